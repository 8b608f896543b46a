"""Going through one stream's batches in the files of its ring.

Owns the order: segments by their index where there is one, batch by batch where there is none. The
rules: what is handed out had both checksums good a moment ago, and a rare row that is read without
its batch a checksum of its own; what is not there is a loss with a name, and where the ring went on
past the place the walk goes on at its oldest segment.

Words: an LSN is a position in the ring, counted in bytes ever written to it. An entry of a
segment's index is about adjacent batches of one stream. A rare row is one whose header few rows of
its batch have; its spot in the index names its bytes, so that they are read without the batch. A
known batch was searched before: checksums of its blocks are in memory. A bundle is batches of one
write. Source: FORMAT.md, sections 6 and 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import google_crc32c
import numpy as np

from malamute_protocol.content import Content
from malamute_protocol.gather import Row
from malamute_protocol.stamp import DATA, SNAPSHOT, STAMP_BYTES, Stamp
from malamute_py.journal.check import content_fault
from malamute_py.journal.choosing import WantedSpots
from malamute_py.journal.index import Entries, StoredIndex
from malamute_py.journal.known import KNOWN, KnownBatch, Read
from malamute_py.journal.layout import StreamRow
from malamute_py.journal.marks import Snapshot, parse_snapshot
from malamute_py.journal.types import SEGMENT_HEADER_BYTES
from malamute_py.mapped.segments import SegmentMap, Segments
from malamute_py.mapped.tail import locate, resume

END: Final = 1 << 63
"""Beyond every offset and position."""


class LocatedBatch(NamedTuple):
    """A batch of the stream, where it lies."""

    segment: SegmentMap
    at: int
    stamp: Stamp

    def content(self) -> Content:
        """A view of its content."""
        begin = self.at + self.stamp.stamp_bytes
        return Content(self.segment.view[begin : self.at + self.stamp.size])


class Spotted(NamedTuple):
    """Wanted rows of one batch, read alone. No other wanted record lies before the last of them."""

    rows: list[Row]
    epoch: int
    lsn: int
    """Position of the batch in the ring."""


class Passed(NamedTuple):
    """Step of a walk: nothing wanted lies from one offset up to another, of what can be read."""

    base: int
    """Offset of the first record that was passed: what lies unread before it is lost."""
    next: int


class Lost(NamedTuple):
    """Step of a walk: a part cannot be read; the next batch tells which offsets are lost."""

    code: Literal["retention", "damaged"]
    reason: str
    next: int = 0
    """Offset at which, or after which, the stream goes on; 0: not known."""


Step: TypeAlias = LocatedBatch | Spotted | Passed | Lost
Choose: TypeAlias = Callable[[StoredIndex, Entries], Sequence[bool]]
"""Choice of the index entries that may hold a wanted record."""
Spots: TypeAlias = Callable[[StoredIndex, Entries, int], WantedSpots | None]
"""Choice of the rare rows to read alone, from an offset on, and of the entries to read besides."""
OfKnown: TypeAlias = Callable[[KnownBatch, Read, int], list[Row] | None]
"""The rows to read of a known batch at a position of its segment; None: it is to be read whole."""


class Walk:
    """One stream from a position on. A second run goes on where the first one ended."""

    def __init__(
        self,
        segments: Segments,
        stream: int,
        lsn: int,
        next: int,
        *,
        choose: Choose | None = None,
        spots: Spots | None = None,
        known: OfKnown | None = None,
        contents: bool = True,
    ) -> None:
        """lsn: position in the ring from which to look. next: offset of the first wanted record.

        choose: which index entries of sealed segments to read; None: all of them.
        spots: which rare rows to read without their batch; None: none.
        known: the rows to read of a batch that is known; None: such a batch is read as any other.
        contents: False where only stamps are looked at, so that only they are checked.
        """
        self.lsn = lsn
        self.next = next
        self._segments = segments
        self._stream = stream
        self._choose = choose
        self._spots = spots
        self._known = known
        self._contents = contents

    def run(self, bound_lsn: int) -> Iterator[Step]:
        """Yield the batches before a position at which a bundle ends, and what is lost.

        Raises OSError.
        """
        size = self._segments.segment_bytes
        while self.lsn < bound_lsn:
            # No batch crosses the end of a segment: the next one may begin in the one after.
            number, at = locate(self.lsn, size)
            self.lsn = number * size + at
            segment = self._segments.map(number)
            if segment is None:
                yield from self._skip_to_oldest(number, bound_lsn)
                continue
            index = self._segments.index(number)
            if index is None:
                yield from self._by_stamps(segment, at, bound_lsn)
            else:
                yield from self._by_index(segment, index)

    def overtaken(self, number: int, bound_lsn: int) -> Iterator[Step]:
        """Yield what run() does, after a segment that was overwritten while it was looked at.

        Raises OSError.
        """
        yield from self._skip_to_oldest(number, bound_lsn)
        yield from self.run(bound_lsn)

    def _by_index(self, segment: SegmentMap, index: StoredIndex) -> Iterator[Step]:
        """Yield the stream's batches of a finished segment, as its index file names them.

        Entries that are not chosen are passed over unread; a batch that is not where the index says
        is lost. Where the broker overwrites the segment meanwhile, the rest of it is skipped.
        """
        entries = index.entries(self._stream, self.next, END)
        rows = entries.rows
        chosen = [True] * len(rows)
        ends = [0] * len(rows)
        rare = None if self._spots is None else self._spots(index, entries, self.next)
        if rare is not None:
            chosen = rare.whole
            # For each entry how many of the spots lie before its end.
            ends = np.searchsorted(rare.spots["offset"], rows["next"]).tolist()
        elif self._choose is not None and chosen:
            chosen = list(self._choose(index, entries))
        spots_done = 0
        for at, size, base, after, take, spots_end in zip(
            rows["position"].tolist(), rows["bytes"].tolist(), rows["base"].tolist(),
            rows["next"].tolist(), chosen, ends, strict=True,
        ):  # fmt: skip
            if rare is not None and spots_end > spots_done:
                yield from self._spotted(segment, rare, spots_done, spots_end)
                spots_done = spots_end
                if not segment.intact():
                    yield from self._skip_to_oldest(segment.number, END)
                    return
            spotted = self._of_known(segment, at, size) if take else None
            if not take or spotted is not None:
                if spotted is not None and spotted.rows:
                    yield Passed(base, base)  # what is lost before the rows is told before them
                    yield spotted
                self.next = max(self.next, after)
                yield Passed(base, self.next)
                continue
            reason = f"{_place_text(segment, at)}: the batches that the index names are not there"
            for step in self._within(segment, at, at + size):
                if isinstance(step, Lost):
                    reason = step.reason
                yield step
            if after > self.next:
                # The entry promised records up to `after`, and they were not found.
                if not segment.intact():
                    yield from self._skip_to_oldest(segment.number, END)
                    return
                self.next = after
                yield Lost("damaged", reason, after)
        self.lsn = segment.base_lsn + self._segments.segment_bytes

    def _spotted(
        self, segment: SegmentMap, rare: WantedSpots, begin: int, end: int
    ) -> Iterator[Step]:
        """Yield the rare rows of one entry, which is one batch, read without the batch.

        begin, end: which of the spots are of this entry. Each body has its checksum good; a damaged
        one is Lost alone. It ends early where the segment is overwritten: the caller looks at that.
        """
        rows: list[Row] = []
        epoch = lsn = 0  # of the batch: alike in all spots of the entry
        for (offset, append_ms, client_ms, epoch, batch_at, at, size, crc), code in zip(
            rare.spots[begin:end].tolist(), rare.codes[begin:end].tolist(), strict=True
        ):
            lsn = segment.base_lsn + batch_at
            if offset < self.next:
                continue
            fault = segment.unreadable_alone(at, at + size)
            body = b"" if fault else bytes(segment.view[at : at + size])
            if not fault and google_crc32c.value(body) == crc:
                rows.append(Row(rare.headers[code], offset, append_ms, client_ms, body))
                continue
            if not segment.intact():
                return
            # Damage: the good rows before it go first, since steps are in the order of offsets.
            if rows:
                yield Spotted(rows, epoch, lsn)
            yield Passed(self.next, offset)
            rows, self.next = [], offset + 1
            fault = fault or "a record's checksum does not fit"
            yield Lost("damaged", f"{_place_text(segment, at)}: {fault}", offset + 1)
        if rows and segment.intact():
            yield Spotted(rows, epoch, lsn)
            self.next = max(self.next, rows[-1].offset + 1)

    def _of_known(self, segment: SegmentMap, at: int, size: int) -> Spotted | None:
        """Return the wanted rows of an entry that is one known batch; None: it is to be read whole.

        segment, at, size: where the entry's bytes lie. The rows may be none.
        """
        if self._known is None:
            return None
        batch = KNOWN.get(segment.ring, segment.base_lsn + at, size)
        rows = None if batch is None else self._known(batch, segment.copy, at)
        if batch is None or rows is None or not segment.intact():
            return None
        rows = [row for row in rows if row.offset >= self.next]
        return Spotted(rows, batch.stamp.epoch, batch.stamp.lsn)

    def _by_stamps(self, segment: SegmentMap, at: int, bound_lsn: int) -> Iterator[Step]:
        """Yield the stream's batches of a segment without an index file, from stamp to stamp."""
        stop = min(bound_lsn - segment.base_lsn, self._segments.segment_bytes)
        yield from self._within(segment, at, stop)
        if not segment.intact():
            yield from self._skip_to_oldest(segment.number, bound_lsn)
        else:
            self.lsn = segment.base_lsn + stop

    def _within(self, segment: SegmentMap, at: int, stop: int) -> Iterator[Step]:
        """Yield the stream's batches between two positions of a segment, and what is damaged there.

        It ends early where the broker overwrites the segment while it is read. Each batch
        was right a moment before it is yielded: SegmentMap.intact() says afterwards whether it was
        so while it was used.
        """
        epoch = 0
        while stop - at >= STAMP_BYTES:
            stamp = segment.stamp(at)
            # Epochs only rise: a lower one is of a batch that was left over from before a crash.
            if isinstance(stamp, Stamp) and stamp.epoch >= epoch and at + stamp.size <= stop:
                epoch, end = stamp.epoch, at + stamp.size
                wanted = stamp.stream == self._stream and stamp.control_kind == DATA
                if not wanted or (after := stamp.next_offset) <= self.next:
                    at = end
                    continue
                fault = self._fault(segment, at, stamp) if self._contents else ""
                if not fault:
                    yield LocatedBatch(segment, at, stamp)
                    self.next = max(self.next, after)
                elif segment.intact():
                    yield Lost("damaged", f"{_place_text(segment, at)}: {fault}", after)
                else:
                    return
                at = end
                continue
            if not segment.intact():
                return
            reason = stamp if isinstance(stamp, str) else "a batch that does not follow"
            yield Lost("damaged", f"{_place_text(segment, at)}: {reason}")
            at = min(resume(segment, at, stop, epoch) - segment.base_lsn, stop)

    def _fault(self, segment: SegmentMap, at: int, stamp: Stamp) -> str:
        """Say what is wrong with a batch's bytes: the disk, or its checksum; "": nothing."""
        end = at + stamp.size
        fault = segment.unreadable(at, end)
        return fault or content_fault(segment.view, at + stamp.stamp_bytes, end, stamp)

    def _skip_to_oldest(self, number: int, bound_lsn: int) -> Iterator[Step]:
        """Go on at the oldest segment that is there, after the segment `number` that is gone.

        What lay between is Lost: by retention if the ring has taken all before it, else by damage.
        Where no later segment is there, none is told as lost: the broker may make one yet.
        """
        numbers = self._segments.numbers()
        later = [n for n in numbers if n > number]
        if not later:
            self.lsn = min(bound_lsn, (number + 1) * self._segments.segment_bytes)
            return
        oldest_left = later[0]
        self.lsn = min(bound_lsn, oldest_left * self._segments.segment_bytes)
        # Its snapshot says how far the stream had come there, which bounds what is lost.
        begun = first_snapshot(self._segments, oldest_left)
        row = None if begun is None else begun.facts.streams.get(self._stream)
        # The ring takes its oldest segment first: one that is missing between others is lost.
        code: Literal["retention", "damaged"] = "retention" if numbers == later else "damaged"
        reason = f"segment {number} is not there any more"
        yield Lost(code, reason, 0 if row is None else row.next)


def _place_text(segment: SegmentMap, at: int) -> str:
    """Return a place in words, for the reason of a loss."""
    return f"segment {segment.number} at byte {at}"


def first_snapshot(segments: Segments, number: int) -> Snapshot | None:
    """Return the ring's snapshot at the start of a segment; None: it is absent or unreadable.

    The broker begins each segment with one: it says how far each stream had come there.
    """
    segment = segments.map(number)
    stamp = None if segment is None else segment.stamp(SEGMENT_HEADER_BYTES)
    if segment is None or not isinstance(stamp, Stamp) or stamp.control_kind != SNAPSHOT:
        return None
    begin, end = SEGMENT_HEADER_BYTES + stamp.stamp_bytes, SEGMENT_HEADER_BYTES + stamp.size
    if segment.unreadable(begin, end):
        return None
    data = bytes(segment.view[SEGMENT_HEADER_BYTES:end])
    if content_fault(data, stamp.stamp_bytes, stamp.size, stamp):
        return None
    return parse_snapshot(stamp.lsn, memoryview(data)[stamp.stamp_bytes :])


def begin_of(segments: Segments, stream: int, offset: int) -> tuple[int, int]:
    """Return (position from which on the records from an offset on lie, offset to begin with).

    The second is the offset that was asked for, or the first one in the segments that are left.
    """
    # A binary search: the snapshot at a segment's beginning says how far the stream had come.
    numbers = segments.numbers()
    begin_lsn: int | None = None
    """Beginning of the newest segment before which all records of the stream have lower offsets."""
    oldest_left = 0, offset
    """The answer without such a segment: where the oldest one begins, and the stream goes on."""
    while numbers:
        middle = len(numbers) // 2
        snapshot = first_snapshot(segments, numbers[middle])
        if snapshot is None:
            del numbers[middle]  # a spare, or damaged: its neighbours tell as well
            continue
        row = snapshot.facts.streams.get(stream, StreamRow(0, 0, []))
        # as_of_lsn: the bundle that a segment begins with may have begun in the one before.
        if row.next <= offset:
            begin_lsn, numbers = snapshot.facts.as_of_lsn, numbers[middle + 1 :]
        else:
            oldest_left, numbers = (snapshot.facts.as_of_lsn, row.next), numbers[:middle]
    return oldest_left if begin_lsn is None else (begin_lsn, offset)


def next_offset(segments: Segments, stream: int, bound_lsn: int) -> int:
    """The offset after a stream's last record before a position at which a bundle ends.

    The newest snapshot before the position tells most of it, a walk over stamps the rest.
    """
    for number in reversed(segments.numbers()):
        snapshot = first_snapshot(segments, number)
        if snapshot is None or snapshot.facts.as_of_lsn > bound_lsn:
            continue
        row = snapshot.facts.streams.get(stream, StreamRow(0, 0, []))
        return next_from(segments, stream, snapshot.facts.as_of_lsn, row.next, bound_lsn)
    return 0


def next_from(segments: Segments, stream: int, lsn: int, offset: int, bound_lsn: int) -> int:
    """The offset after a stream's last record before `bound_lsn`, found by a walk over stamps.

    lsn, offset: position in the ring, and offset, from which on to look; returns at least `offset`.
    """
    walk = Walk(segments, stream, lsn, offset, contents=False)
    for _ in walk.run(bound_lsn):
        pass
    return walk.next


def young_from(
    segments: Segments, stream: int, lsn: int, offset: int, oldest_ms: int, bound_lsn: int
) -> int:
    """Return the first offset from `offset` on that was appended at `oldest_ms` or later.

    For readers, which pass over records beyond their stream's age. lsn: position in the ring from
    which to look for it. Without such a record before the bound it is the offset after the last.
    """
    walk = Walk(
        segments, stream, lsn, offset, contents=False,
        choose=lambda index, entries: (entries.rows["last_time"] >= oldest_ms).tolist(),
    )  # fmt: skip
    for step in walk.run(bound_lsn):
        if isinstance(step, LocatedBatch):
            if step.stamp.append_time_ms >= oldest_ms:
                break
            offset = max(offset, step.stamp.next_offset)
        elif isinstance(step, Passed):
            offset = max(offset, step.next)
    return offset


def epoch_end(segments: Segments, stream: int, epoch: int) -> int:
    """The offset at which an epoch after this one began in a stream; END: none did, as is known.

    For a reader that comes back: a record of its epoch with this offset or a later one was taken
    away by a power loss. The newest readable snapshot tells it.
    """
    for number in reversed(segments.numbers()):
        snapshot = first_snapshot(segments, number)
        if snapshot is not None:
            row = snapshot.facts.streams.get(stream, StreamRow(0, 0, []))
            return min((first for later, first in row.epochs if later > epoch), default=END)
    return END
