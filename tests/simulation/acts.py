"""Acts: what the clients of a run want to happen, in the words of the model.

Owns the form of a wish and of an act. The rule: an act is one command, or one atomic step; its
wishes happen together or not at all. Source: SPEC.md, section 4.8.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVEL_STORED, LEVEL_SYNCED = 2, 3


@dataclass(slots=True)
class Wish:
    """One part of an act, in the words of the model."""

    kind: str
    """send, publish, request, reply, ack, end, records, back, move; again, return, memory (no
    trace)."""
    place: str = ""
    """Mailbox, stream, service, or stream and group or cursor."""
    serials: tuple[int, ...] = ()
    """Serials of the records that it brings."""
    numbers: tuple[int, ...] = ()
    """Messages, requests or offsets that it takes away; of a move: where the cursor goes."""
    last: bool = False
    since: int = -1
    """Where the cursor of a move must stand before it; -1: anywhere."""


@dataclass(slots=True, eq=False)
class Act:
    """One command, or one atomic step, of a client."""

    number: int
    holder: str
    """Name by which the broker knows the sender."""
    wishes: list[Wish]
    key: bytes
    level: int
    atomic: bool
    memory: bool = False
    since_lsn: int = 0
    """End of the log when it was first sent: nothing before that is its doing."""
    tries: int = 0
    """How often it was sent."""
    confirmed: bool = False
