"""Newest records that have moved: the copies of them in the files of their ring.

Owns the reading of copies for a stream that keeps the last record of each subject: before the
broker overwrites such records, it appends them again, as rows of a hidden stream of their ring,
where each row's body is a batch of some of them. The rules: each offset is given once, in order,
from the newest copy of it that is there; a copy that is overwritten while it is read has moved once
more, and is looked for anew. A record that was replaced may be given as long as a copy of it is
there: its successor comes later. Source: FORMAT.md, section 15.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from malamute_protocol.batch import Batch
from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError
from malamute_protocol.stamp import STAMP_BYTES, Stamp
from malamute_py.changelog.copies import MOVED_STREAM, unpack_copy
from malamute_py.mapped.segments import Segments
from malamute_py.mapped.selection import Selection
from malamute_py.mapped.walk import END, LocatedBatch, Walk, begin_of


class _Copy(NamedTuple):
    """A copy: one row of a batch of the hidden stream."""

    found: LocatedBatch
    row: int

    def read(self) -> tuple[Stamp, Content, list[int]] | None:
        """Return the batch in it, with bytes of its own, and which offsets count; None: it is gone.

        Offsets do not count whose records were replaced before the copy was made.
        """
        try:
            bodies = self.found.content().bodies()
            begin, end = int(bodies.offsets[self.row]), int(bodies.offsets[self.row + 1])
            batch, rows = unpack_copy(bytes(bodies.blob[begin:end]))
            if not self.found.segment.intact():
                return None
        except (BatchError, IndexError, ValueError, struct.error):
            return None  # bytes that are overwritten may look like anything
        stamp, content = Stamp.unpack(batch, verify=False), Content(memoryview(batch)[STAMP_BYTES:])
        offsets = offsets_of(stamp, content)
        return stamp, content, [offsets[row] for row in rows] if rows else offsets


class MovedRecords:
    """The records of some offsets of a stream that have moved, batch by batch."""

    def __init__(self, segments: Segments, begin: int, end: int, bound: Callable[[], int]) -> None:
        """Read the records of [begin, end). bound: returns how far the ring is to be read."""
        self.next = begin
        self._segments = segments
        self._end = end
        self._bound = bound
        self._copies: deque[tuple[list[int], _Copy]] | None = None
        """(offsets, the newest copy of them), in order; None: to be looked for (anew)."""

    def batch(self, selection: Selection, now_ms: Callable[[], int]) -> Batch | None:
        """Return the next batch, with bytes of its own; None at the end. Raises OSError."""
        while True:
            if self._copies is None:
                self._copies = self._find()
            if not self._copies:
                self.next = self._end
                return None
            wanted, copy = self._copies.popleft()
            read = copy.read()
            if read is None:
                self._copies = None  # it was overwritten: there is a newer copy further on
                continue
            self.next = wanted[-1] + 1  # after the last of its offsets
            stamp, content, _ = read
            # Of the copy only those rows whose newest copy it is, and which the reader selects.
            some, mask = selection.rows(content, stamp.base_offset, (0, END), now_ms)
            rows = np.isin(offsets_of(stamp, content), wanted)
            if mask is not None:
                rows &= mask
            if some and rows.any():
                return Batch(stamp, content, None if rows.all() else rows)

    def _find(self) -> deque[tuple[list[int], _Copy]]:
        """Find the newest copy of each record: offsets that lie together, and their copy."""
        newest: dict[int, _Copy] = {}
        lsn, first = begin_of(self._segments, MOVED_STREAM, 0)
        for step in Walk(self._segments, MOVED_STREAM, lsn, first).run(self._bound()):
            if not isinstance(step, LocatedBatch):
                continue
            for row in range(step.stamp.count):
                copy = _Copy(step, row)
                read = copy.read()
                if read is not None:
                    _, _, offsets = read
                    newest.update(
                        (offset, copy) for offset in offsets if self.next <= offset < self._end
                    )
        # In the order of offsets, so that neighbours of one copy are given as one batch.
        by_copy = groupby(sorted(newest.items(), key=itemgetter(0)), key=itemgetter(1))
        return deque(([offset for offset, _ in records], copy) for copy, records in by_copy)


def offsets_of(stamp: Stamp, content: Content) -> list[int]:
    """Return the offset of each row of a batch, which may be derived."""
    deltas = content.offset_deltas  # of a derived batch: its offsets have gaps
    distances = np.arange(content.head.count) if deltas is None else deltas.astype(np.int64)
    found: list[int] = (stamp.base_offset + distances).tolist()
    return found
