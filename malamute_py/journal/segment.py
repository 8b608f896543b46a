"""A segment in memory: which file, which positions, which index.

Owns the facts about one segment file of a ring. The rule: a segment object stands for
one life of a file; recycling the file makes a new object and marks the old one retired,
after which a reader that still holds it finds out and reports a gap. Source: FORMAT.md,
section 2.
"""

from __future__ import annotations

from malamute_py.journal.index import LiveIndex, Span
from malamute_py.journal.layout import segment_name
from malamute_py.journal.storage import File


class Segment:
    """One segment of a ring. Attributes are swapped whole; see each for who may."""

    __slots__ = (
        "base_lsn",
        "damaged",
        "expires_at_ms",
        "file",
        "header_lsn",
        "last_epoch",
        "last_time_ms",
        "live",
        "name",
        "number",
        "retired",
        "spans",
    )

    def __init__(self, number: int, segment_bytes: int, file: File | None) -> None:
        """file: open for writing; None: opened when it is read."""
        self.number = number
        self.name = segment_name(number)
        self.base_lsn = number * segment_bytes
        self.file = file
        self.live: LiveIndex | None = None
        """The index in memory until its file is written (housekeeping thread)."""
        self.spans: dict[int, Span] = {}
        """Totals by stream; the live index's own while there is one."""
        self.expires_at_ms = 0
        self.last_epoch = 0
        self.last_time_ms = 0
        self.header_lsn = 0
        """synced_lsn of the segment's header: everything before it was durable."""
        self.damaged = False
        """True: its index is kept in memory only, so that the damage is met at each open."""
        self.retired = False
        """Set before the file is overwritten or removed (the thread that retires it)."""
