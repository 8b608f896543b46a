"""Good batches after a fault: the proof that what cannot be read there had been durable.

Owns their search in the segments that a recovery walks. The rule: only the synced LSN that a good
batch names proves anything, and bytes inside a good batch that look like one prove nothing.
Source: FORMAT.md, section 7.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from malamute_py.journal.check import FoundBatch, candidates, check
from malamute_py.journal.segment import Segment
from malamute_py.journal.segment_bytes import SegmentBytes
from malamute_py.journal.types import SEGMENT_HEADER_BYTES


class Later(NamedTuple):
    """A good batch: its position, its epoch, and up to where the ring was synced before it."""

    lsn: int
    synced_lsn: int
    epoch: int


class LaterBatches:
    """Good batches after the first fault that a recovery met, by position."""

    def __init__(self, data: SegmentBytes) -> None:
        """data: bytes of the segments."""
        self.found: list[Later] = []
        """Empty until search()."""
        self._bytes = data
        self._searched = False

    def search(self, lsn: int, segments: Iterable[Segment]) -> None:
        """Find all good batches after a position, at the first call; further calls do nothing.

        A recovery goes on in the order of the log: what it asks about later lies after the first
        position. segments: those that it walks, from the one with the position on.
        """
        if self._searched:
            return
        self._searched = True
        kept = self._bytes.kept
        for segment in segments:
            data = self._bytes.of(segment)
            # candidates() begins 8 bytes after the position that it is given.
            begin = max(lsn - segment.base_lsn, SEGMENT_HEADER_BYTES - 8)
            after = 0
            for position in candidates(data, segment.base_lsn, begin):
                if position < after:
                    continue  # a producer's bytes that look like a batch prove nothing
                found = check(data, segment.base_lsn, position)
                if isinstance(found, FoundBatch) and found.content_good:
                    stamp = found.stamp
                    after = position + stamp.size
                    self.found.append(Later(stamp.lsn, stamp.synced_lsn, stamp.epoch))
        # The caller is amid a segment, whose bytes would be read again.
        self._bytes.kept = kept

    def prove(self, lsn: int, epoch: int) -> bool:
        """Whether a batch after a position says that the ring had been synced beyond it.

        epoch: that of the last batch kept; batches of lower ones were dropped by an earlier start.
        """
        first = bisect_right(self.found, lsn, key=attrgetter("lsn"))
        return any(each.synced_lsn > lsn and each.epoch >= epoch for each in self.found[first:])
