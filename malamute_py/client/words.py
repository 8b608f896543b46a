"""Words that arguments of the client's calls may be.

Owns the types by which a checker knows them before a program runs. The rule: each call checks at
run time what it is given, too, and names the words that are allowed (arguments.one_of).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

ConfirmAt: TypeAlias = Literal["default", "none", "stored", "synced"]
"""Promise of a confirm; "default": as the stream, mailbox or service has it."""
ReadVisibility: TypeAlias = Literal["live", "durable", "committed"]
"""Which records a reader sees: all, those that no power loss takes back, or of these those that are
in no open transaction."""
GroupVisibility: TypeAlias = Literal["live", "durable"]
"""As ReadVisibility, of a group."""
GroupKind: TypeAlias = Literal["shared", "keyed", "exclusive"]
"""Ways in which the members of a group share its records."""
AckWhen: TypeAlias = Literal["next", "manual"]
"""Moment at which a hand-out is done: with the next that is asked for, or by ack() only."""
Until: TypeAlias = Literal["", "tail"]
"""End of a subscription: none, or the tail as it was when the subscription began."""
OnError: TypeAlias = Literal["fail", "nack"]
"""End of a request whose handler raises: a dead letter, or another attempt."""
