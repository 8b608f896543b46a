"""Recent reads of history, for the next reader that wants the same.

Owns the last MiBs that the reader thread read for several readers, by stream. The rules: a read is
used again only for offsets that it covers and only when nothing in it lies beyond what is asked
for; one that named gaps is never used again; one that no reader shares any more is dropped. A
hundred subscribers that fell behind together so cost one read and one check of each batch, not a
hundred. The reader thread alone uses it.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from malamute_py.broker.ready import HistoryRun, ReadRange
from malamute_py.journal import Ring

RECENT_BYTES: Final = 2 << 20
"""Bytes of runs that are kept, beside those that a client's socket still holds."""
READS_MAX: Final = 64
"""Reads that are kept: each question goes through all of them."""


class _Read(NamedTuple):
    """A kept read: what was stored of a stream in the offsets [first, next)."""

    ring: bytes
    """Identity of the ring: the ring itself would keep its memory after it was removed."""
    stream: int
    first: int
    next: int
    bytes: int
    runs: tuple[HistoryRun, ...]


class RecentReads:
    """The last plain reads, newest first."""

    def __init__(self) -> None:
        self._reads: deque[_Read] = deque()
        self._bytes = 0

    def find(self, ring: Ring, job: ReadRange) -> tuple[tuple[HistoryRun, ...], int] | None:
        """Return what was read for another reader, if it serves this one; None: nothing does.

        That is the stored runs, from the wanted offset or before it, and the offset after them.
        """
        for read in self._reads:
            if (
                # By uuid: a ring that was made anew may have the same name.
                read.ring == ring.uuid
                and read.stream == job.stream
                and read.first <= job.from_offset < read.next <= job.end_offset
            ):
                return read.runs, read.next
        return None

    def keep(self, ring: Ring, job: ReadRange, runs: tuple[HistoryRun, ...], next: int) -> None:
        """Keep a read for readers that come to the same offsets; the oldest reads make room."""
        size = sum(len(run.data) for run in runs)
        if not size or size > RECENT_BYTES:
            return
        self._reads.appendleft(_Read(ring.uuid, job.stream, job.from_offset, next, size, runs))
        self._bytes += size
        while self._bytes > RECENT_BYTES or len(self._reads) > READS_MAX:
            self._bytes -= self._reads.pop().bytes

    def forget(self, ring: Ring, stream: int) -> None:
        """Drop the reads of a stream whose history only one reader reads now."""
        which = ring.uuid, stream
        if not any((read.ring, read.stream) == which for read in self._reads):
            return
        kept = [read for read in self._reads if (read.ring, read.stream) != which]
        self._reads = deque(kept)
        self._bytes = sum(read.bytes for read in kept)
