"""Taking: what one read brings of a stream, and how each of its batches is read.

Owns which batches leave whole, which are read whole and leave some rows, and which are known, so
that only these rows are read. Source: FORMAT.md, section 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from malamute_protocol.content import Content
from malamute_protocol.gather import Row
from malamute_protocol.stamp import Stamp
from malamute_py.journal.chunks import Batch, Part, group_entries
from malamute_py.journal.gathering import RareRows, WantedRows, least_cost
from malamute_py.journal.known import KNOWN, KnownBatch
from malamute_py.journal.segment import Segment
from malamute_py.journal.types import Gap, Run


class Wanted(NamedTuple):
    """An index entry to be read."""

    position: int
    size: int
    base: int
    next: int
    known: KnownBatch | None
    """The one batch that the entry is, if it is known."""


class Out(NamedTuple):
    """Output of one read of a stream: runs and gaps in order, and rows that are being gathered."""

    ring: bytes
    runs: list[Run]
    gaps: list[Gap]
    gathering: RareRows
    wanted: WantedRows | None
    """Takes few wanted rows out of their batch; None: batches leave whole."""

    def entry(self, segment: Segment, position: int, size: int, base: int, after: int) -> Wanted:
        """Return an index entry to be read, with its batch if an earlier search read that whole.

        position, size: in the segment. base, after: the entry's offsets, [base, after).
        """
        known = None
        if self.wanted is not None:  # else batches leave whole, and are read whole
            known = KNOWN.get(self.ring, segment.base_lsn + position, size)
        return Wanted(position, size, base, after, known)

    def least_cost_of(self, entry: Wanted) -> int:
        """Return how many bytes of a read's bound an entry uses up at least.

        All of its bytes where batches leave whole; fewer where it may be only looked through.
        """
        if self.wanted is None:
            return entry.size
        return least_cost(entry.size, known=entry.known is not None)

    def rows_of(self, view: memoryview, batch: Batch, stamp: Stamp) -> list[Row] | None:
        """Return the rows that are wanted of a batch read whole and good; None: it leaves whole.

        view: bytes read, with the batch at `batch.at`. A batch of which few rows are wanted becomes
        known, so that later searches need not read it whole.
        """
        if self.wanted is None:
            return None
        begin = batch.at + stamp.stamp_bytes
        rows = self.wanted.of(stamp, Content(view[begin : batch.at + batch.size]))
        if rows is not None:
            KNOWN.note(self.ring, stamp, view, batch.at)
        return rows

    def gather(self, rows: list[Row], stamp: Stamp, left: int, *, known: bool = False) -> int:
        """Take all rows that are wanted of a batch; returns what is left of a read's bound.

        left: bytes of the bound before. Returns 0, which ends the read, if the gathered batch is
        full. known: the batch was searched before, which makes it cost less of the bound.
        """
        gathering = self.gathering
        left -= least_cost(stamp.size, known=known)
        if rows:
            left -= gathering.add(rows, stamp.epoch, stamp.lsn)
        return 0 if gathering.full else left


def parts(entries: list[Wanted]) -> Iterator[tuple[KnownBatch | None, Part]]:
    """Group entries into few reads, in order: (None, part to be read whole).

    A known batch, of which a few blocks may do, is a part by itself: (the batch, its part).
    """
    rest: list[tuple[int, int, int, int]] = []
    for position, size, base, after, known in entries:
        if known is None:
            rest.append((position, size, base, after))
            continue
        for part in group_entries(rest):
            yield None, part
        rest = []
        yield known, Part(position, size, [(position, size, base, after)])
    for part in group_entries(rest):
        yield None, part
