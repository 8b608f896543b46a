"""Chunks, one for each read: grouping entries into reads, finding batches, joining runs.

Owns the way from index entries (runs of adjacent batches of one stream) to a few large reads, and
from the bytes of one read, a chunk, to runs of batches that leave together. The
rule: a batch is returned only with both checksums good, and a copy is made only to close
up the holes that other streams leave. Source: FORMAT.md, section 8.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from malamute_protocol.stamp import DATA, STAMP_BYTES, Stamp, stamp_here
from malamute_py.journal.check import FoundBatch, candidates, check, content_fault
from malamute_py.journal.types import UNINDEXED_FROM, Run

_READ_BYTES = 4 << 20
_HOLE_BYTES = 32 << 10
"""Bytes of other streams that are read over, as that costs less than a second read."""


class Part(NamedTuple):
    """Entries of one segment, in one read."""

    position: int
    size: int
    entries: list[tuple[int, int, int, int]]
    """(position, bytes, base, next) of each entry."""


class Batch(NamedTuple):
    """A batch of the stream inside a chunk that was read, or offsets that are damaged."""

    at: int
    size: int
    base: int
    next: int
    found: FoundBatch | None
    reason: str = ""


class Runs:
    """Joins the batches of one chunk into runs: batches of one stream whose offsets follow on.

    A copy is made only where batches of other streams lie between them.
    """

    def __init__(self, data: memoryview, out: list[Run]) -> None:
        """out: where finished runs go."""
        self._data = data
        self._out = out
        self._spans: list[tuple[int, int, int, int]] = []
        """(place in the run, size, base, count) of each batch of the run in hand."""
        self._pieces: list[tuple[int, int]] = []
        """(begin, end) in the chunk; more than one: holes lie between, which a copy closes."""
        self._next = -1
        self._size = 0

    def add(self, batch: Batch) -> None:
        """Take the next good batch; one whose offsets do not follow on begins a new run."""
        if batch.base != self._next:
            self.close()
        if self._pieces and self._pieces[-1][1] == batch.at:
            # It lies right after the batch before: the piece in hand becomes longer.
            self._pieces[-1] = (self._pieces[-1][0], batch.at + batch.size)
        else:
            self._pieces.append((batch.at, batch.at + batch.size))
        self._spans.append((self._size, batch.size, batch.base, batch.next - batch.base))
        self._size += batch.size
        self._next = batch.next

    def close(self) -> None:
        """Give out the run in hand, if it has a batch; the next batch begins another one."""
        if self._spans:
            pieces = [self._data[begin:stop] for begin, stop in self._pieces]
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            self._out.append(Run(data, tuple(self._spans)))
        self._spans, self._pieces, self._size, self._next = [], [], 0, -1


def group_entries(wanted: list[tuple[int, int, int, int]]) -> Iterator[Part]:
    """Group entries of (position, size, base offset, next offset) into few reads, for a Reader.

    Entries with less than _HOLE_BYTES between them share a read, up to _READ_BYTES.
    """
    group: list[tuple[int, int, int, int]] = []
    begin = stop = 0
    for entry in wanted:
        position, size, _, _ = entry
        if group and (position - stop > _HOLE_BYTES or position + size - begin > _READ_BYTES):
            yield Part(begin, stop - begin, group)
            group = []
        if not group:
            begin = position
        group.append(entry)
        stop = position + size
    if group:
        yield Part(begin, stop - begin, group)


def batches_in(view: memoryview, base_lsn: int, part: Part, stream: int) -> Iterator[Batch]:
    """Yield the stream's batches in a chunk that was read, checked; damaged ones without `found`.

    For reads and searches. view: the chunk's bytes, those of `part`. base_lsn: position in the ring
    at which it begins.
    """
    for position, size, base, after in part.entries:
        at = position - part.position
        stop = at + size
        expected = base  # offset at which the next batch should begin
        while at < stop:
            found = check(view, base_lsn, at)
            if isinstance(found, FoundBatch) and _is_foreign(found.stamp, stream):
                at += found.stamp.size
                continue
            if isinstance(found, FoundBatch) and found.stamp.stream == stream:
                # The stamp is good: it names the offsets, even where the content is damaged.
                stamp = found.stamp
                good = found if found.content_good and stamp.control_kind == DATA else None
                yield Batch(
                    at, stamp.size, stamp.base_offset, stamp.next_offset, good, found.reason
                )
                expected = stamp.next_offset
                at += stamp.size
                continue
            # No stamp of the stream is here. All offsets up to the next good batch are damaged.
            reason = found if isinstance(found, str) else "a batch of another stream"
            resumed, resume_base = _resume(view, base_lsn, at, stop, stream, after)
            yield Batch(at, resumed - at, expected, resume_base, None, reason)
            expected, at = resume_base, resumed


def _resume(
    view: memoryview, base_lsn: int, at: int, stop: int, stream: int, after: int
) -> tuple[int, int]:
    """Return (place, base offset) of the stream's next batch in an entry, after a damaged part.

    at, stop: where to look in the bytes. after: offset after the entry, returned with `stop` where
    there is no such batch.
    """
    for place in candidates(view[:stop], base_lsn, at):
        found = check(view, base_lsn, place)
        if (
            isinstance(found, FoundBatch)
            and found.stamp.stream == stream
            and not _is_foreign(found.stamp, stream)
        ):
            return place, found.stamp.base_offset
    return stop, after


def pick_in(
    data: bytes, base_lsn: int, part: Part, stream: int, offsets: Sequence[int]
) -> Iterator[tuple[int, bytes]]:
    """Yield (place among `offsets`, the whole batch that holds it) of what a chunk has.

    For Reader.read_batches(), as bodies of mail are read back by number. offsets: ascending.
    Only what is handed out has its content checked; what is damaged is stepped over.
    """
    view, which = memoryview(data), 0
    for position, size, base, after in part.entries:
        at = position - part.position
        stop = at + size
        # Of the offsets, those from place `which` to `last` lie in this entry.
        which = bisect_left(offsets, base, which)
        last = bisect_left(offsets, after, which)
        while which < last and at + STAMP_BYTES <= stop:
            stamp = stamp_here(data, at, base_lsn + at)
            if stamp is None:
                # Damage: on with the next place at which a stamp may lie.
                at = next(candidates(view[:stop], base_lsn, at), stop)
                continue
            begin, at = at, at + stamp.size
            if stamp.stream != stream or stamp.control_kind != DATA:
                continue
            # The batch holds the offsets from place `which` to `held`.
            which = bisect_left(offsets, stamp.base_offset, which, last)
            held = bisect_left(offsets, stamp.next_offset, which, last)
            if held > which and not content_fault(data, begin + stamp.stamp_bytes, at, stamp):
                batch = data[begin:at]
                for hit in range(which, held):
                    yield hit, batch
            which = held
        which = last


def _is_foreign(stamp: Stamp, stream: int) -> bool:
    """Whether a batch is no part of the stream but may lie within its entries.

    So it is in streams without header index, whose entries cover a part of the file.
    """
    return stream >= UNINDEXED_FROM and (stamp.stream != stream or stamp.control_kind != DATA)
