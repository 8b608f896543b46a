"""Keys of steps: what each was accepted for, and whether a command is that.

Owns the comparison of a command with the one that a key was accepted for. The rule: the kind and
the mailbox or service are compared. Contents are not: a program that was restarted may encode the
same message with another time. Source: SPEC.md, section 4.8.
"""

from __future__ import annotations

from typing import Final

from malamute_protocol.commands import Command, Request, Send
from malamute_protocol.framing import NUMBERS
from malamute_py.changelog.tables import KeyRow, Queues

KEYED: Final = (Send, Request)
"""Commands whose own key names the batch that they put into a mailbox or service."""


def use_of(command: Command, place: int) -> int:
    """Return what a key's row remembers of its command. place: number of the mailbox or service."""
    return place if isinstance(command, KEYED) else -NUMBERS[type(command)]


def is_use(use: Command | KeyRow, command: Command, queues: Queues) -> bool:
    """Whether a key may have been accepted for a command.

    use: the command that it was accepted for while that is on its way, then its row.
    """
    kind = type(command)
    if not isinstance(use, KeyRow):
        return type(use) is kind and _place(use) == _place(command)
    if not use.use:
        return True
    if kind not in KEYED:
        return use.use == use_of(command, 0)
    if use.use < 0:
        return False
    # Mailboxes and services share their numbers. One that has gone cannot be compared.
    mailbox, service = queues.mailboxes.get(use.use), queues.services.get(use.use)
    same, other = (mailbox, service) if kind is Send else (service, mailbox)
    return other is None and (same is None or same.name == _place(command))


def _place(command: Command) -> str:
    """Return the name of the mailbox or service of a SEND or REQUEST; "" of other commands."""
    if isinstance(command, Send):
        return command.mailbox
    return command.service if isinstance(command, Request) else ""
