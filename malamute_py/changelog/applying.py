"""Applying: the one function by which a record of the change log changes the tables.

Owns `apply` and the table of effects. The rules: `apply` sees no clock, no randomness and no link,
so every replay and every replica reaches the same tables; each record is applied once, in the order
of the log; a record about something that is not there changes nothing.
Source: docs/design.md (Journal; Queues and the checkpoint).
"""

from __future__ import annotations

from typing import Final

from malamute_py.changelog.effects import groups, mail, requests, streams, transactions
from malamute_py.changelog.records import Change
from malamute_py.changelog.tables import Effects, Queues, Tables


def apply(tables: Tables, queues: Queues, change: Change) -> None:
    """Let one record of the log take effect."""
    _EFFECTS[type(change)](tables, queues, change)


STREAM_CHANGES: Final = tuple(streams.EFFECTS)
"""Changes of streams and producers, which concern Tables only; all others concern Queues only."""
_EFFECTS: Final[Effects] = {
    **streams.EFFECTS,
    **mail.EFFECTS,
    **requests.EFFECTS,
    **groups.EFFECTS,
    **transactions.EFFECTS,
}
