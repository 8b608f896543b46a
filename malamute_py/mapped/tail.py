"""How far a ring that another process writes can be read.

Owns the end of what is whole, and the end of what is known to be synced. The rules: a bundle counts
once its last batch is there and the contents of all of its batches are good, unless it is known to
be synced; what fails its check is damage where something proves that it was synced, and else the
end; a ring that went on past the place begins anew at its newest segment. What tells is the stamps,
the segments' headers, their index files and the file `closed`.

Words: an LSN is a position in the ring, counted in bytes ever written to it. A bundle is the
batches of one write, of which a recovery keeps all or nothing: each stamp names the LSN of its
bundle, the last one is flagged. Each stamp, header and index also tells how far the ring was synced
when it was written. An epoch rises each time a broker opens the log. Source: FORMAT.md, sections
5, 7 and 8.
"""

from __future__ import annotations

from typing import Final

from malamute_protocol.stamp import DATA, LAST_OF_BUNDLE, PADDING, STAMP_BYTES, Stamp
from malamute_py.journal.check import FoundBatch, candidates, check, content_fault, is_begun
from malamute_py.journal.directory import EPOCH_FILE, Epoch
from malamute_py.journal.marks import read_mark
from malamute_py.journal.storage import FileStorage
from malamute_py.journal.types import SEGMENT_HEADER_BYTES
from malamute_py.mapped.segments import SegmentMap, Segments

_ANY_BUNDLE: Final = -1
"""In place of a bundle's LSN: a bundle may go on whose beginning the walk has not seen."""
_NO_BUNDLE: Final = -2
"""In place of a bundle's LSN: the next batch begins a bundle."""
_SEARCH_EVERY: Final = 1 << 11
"""Looks without news after which the rest of a segment is searched for later batches."""


class RingTail:
    """The end of a ring: of what is whole, and of what is known to be synced."""

    def __init__(self, segments: Segments, directory: FileStorage) -> None:
        """directory: the data directory, whose epoch tells of a broker that was started anew."""
        self.end_lsn = 0
        """Position before which all bundles are whole."""
        self.synced_lsn = 0
        """Position before which everything is known to be durable; more may be."""
        self.times_lost = 0
        """Times that the walk lost its place: the ring came round, or a broker opened it anew."""
        self._segments = segments
        self._directory = directory
        self._bundle = _ANY_BUNDLE
        """LSN of the bundle that the walk is amid, or one of the two words above."""
        self._epoch = 0
        self._begin_lsn = 0
        """Position of the bundle that comes next, or is not whole yet."""
        self.stopped_lsn = 0
        """Position at which the last walk stopped."""
        self.nexts: dict[int, int] = {}
        """Stream -> offset after its last record before `end_lsn`, of streams that the walk met."""
        self._quiet_looks = 0
        """Thorough looks in a row that found nothing new."""
        self._mark = self._read_mark()
        self._begin()

    @property
    def epoch(self) -> int:
        """Epoch of the broker that opened the directory last, as its notices tell it."""
        return self._mark.epoch

    def advance(self, *, thorough: bool = True) -> bool:
        """Take in what was written since; True when there was anything.

        thorough: where nothing follows, find out why, which takes a dozen system calls.
        """
        before = self._where()
        self._walk()
        if thorough:
            while self._where() == before and self._look_around():
                self._walk()
        changed = self._where() != before
        self._quiet_looks = 0 if changed else self._quiet_looks + thorough
        return changed

    def _where(self) -> tuple[int, int, int]:
        """Return what differs after a look that found anything new."""
        return self.end_lsn, self.synced_lsn, self.times_lost

    def _begin(self) -> None:
        """Stand at the beginning of a segment from which on the log is to be walked.

        That is the newest one that begins before a position known to be synced: what lies after
        that position may be left over from before a crash, and only a walk tells.
        """
        self._bundle, self._epoch = _ANY_BUNDLE, 0
        self.nexts.clear()
        size, numbers = self._segments.segment_bytes, self._segments.numbers()
        self.synced_lsn = self._segments.proven()
        known = [number for number in numbers if number * size <= self.synced_lsn]
        for number in reversed(known or numbers):
            segment = self._segments.map(number)
            stamp = None if segment is None else segment.stamp(SEGMENT_HEADER_BYTES)
            if isinstance(stamp, Stamp):
                self._begin_lsn, self.end_lsn = stamp.lsn, stamp.bundle_lsn
                return
        self._begin_lsn = self.end_lsn = numbers[0] * size if numbers else 0

    def _walk(self) -> None:
        """Go on from batch to batch, as far as each follows on the one before.

        The end moves only to the end of a whole bundle: a bundle that is being written is walked
        again the next time.
        """
        size = self._segments.segment_bytes
        lsn, bundle, epoch = self._begin_lsn, self._bundle, self._epoch
        nexts: dict[int, int] = {}  # of the bundle that is not whole yet
        while True:
            number, at = locate(lsn, size)
            lsn = number * size + at
            segment = self._segments.map(number)
            if segment is None:
                break
            while size - at >= STAMP_BYTES:
                stamp = segment.stamp(at)
                if isinstance(stamp, str) or self._fault(segment, stamp, at, bundle, epoch):
                    break
                self.synced_lsn = max(self.synced_lsn, stamp.synced_lsn)
                epoch = stamp.epoch
                at += stamp.size
                lsn = segment.base_lsn + at
                bundle = stamp.bundle_lsn
                if stamp.control_kind == DATA:
                    # A copy of a record that has moved keeps its offset: not all are higher.
                    before = nexts.get(stamp.stream, self.nexts.get(stamp.stream, 0))
                    nexts[stamp.stream] = max(before, stamp.next_offset)
                if stamp.flags & LAST_OF_BUNDLE:
                    bundle = _NO_BUNDLE
                    self._begin_lsn = self.end_lsn = lsn
                    self._bundle, self._epoch = bundle, epoch
                    self.nexts.update(nexts)
                    nexts.clear()
            else:  # the segment is full, and its batches are good: the next one follows
                lsn = segment.base_lsn + size
                continue
            break
        self.stopped_lsn = lsn

    def _fault(self, segment: SegmentMap, stamp: Stamp, at: int, bundle: int, epoch: int) -> bool:
        """Return whether a batch does not follow on those before it, or is not whole yet.

        bundle, epoch: of the batch before it; bundle may be _ANY_BUNDLE or _NO_BUNDLE.
        """
        end = at + stamp.size
        if stamp.epoch < epoch or end > self._segments.segment_bytes:
            return True  # left over from before a crash
        if stamp.lsn < self.synced_lsn:
            return False  # what was synced belongs to the log, damaged or not
        if bundle == _NO_BUNDLE and stamp.bundle_lsn != stamp.lsn:
            return True  # the beginning of its bundle is not here
        if bundle >= 0 and (stamp.bundle_lsn, stamp.epoch) != (bundle, epoch):
            return True  # the bundle before it has no end
        if stamp.control_kind == PADDING:
            return False  # it fills the segment up, and has no content
        if segment.unreadable(at, end):
            return True
        return bool(content_fault(segment.view, at + stamp.stamp_bytes, end, stamp))

    # --- where nothing follows ------------------------------------------------------------

    def _look_around(self) -> bool:
        """Find out why nothing follows; True when there is somewhere else to go on."""
        size = self._segments.segment_bytes
        number, at = locate(self.stopped_lsn, size)
        mark = self._read_mark()
        if mark.openings != self._mark.openings or self._segments.replaced(number):
            # A recovery may have dropped an end, and have put copies in the place of files.
            self._mark = mark
            self._segments.forget()
            self._begin_anew()
            return True
        segment = self._segments.map(number)
        if segment is None:
            # Either the next segment is not begun yet, or the ring came round and overwrote it.
            later = [n for n in self._segments.numbers() if n > number]
            if any(self._has_batch(n) for n in later):
                self._begin_anew()
                return True
            return False
        proven = self._segments.proven()
        if proven > self.synced_lsn:
            # Then a bundle may do without its end: the next walk tells what is damage.
            self.synced_lsn = proven
            return False
        if self.stopped_lsn >= self.synced_lsn and not self._proven_later(segment, at):
            return False  # the end of what was written
        # The walk stopped before a synced place: this is damage, and the log goes on after it.
        self._begin_lsn = resume(segment, at, size, self._epoch)
        self._bundle = _ANY_BUNDLE
        # A bundle that lost its end is not among them, and may have had a stream's last record.
        self.nexts.clear()
        self.end_lsn = max(self.end_lsn, self._begin_lsn)
        return True

    def _begin_anew(self) -> None:
        """Begin anew at the newest segment: the ring came round, or another broker opened it."""
        self.times_lost += 1
        self._begin()

    def _has_batch(self, number: int) -> bool:
        """Whether a segment has its first batch: the ring went on in it."""
        segment = self._segments.map(number)
        return segment is not None and isinstance(segment.stamp(SEGMENT_HEADER_BYTES), Stamp)

    def _proven_later(self, segment: SegmentMap, at: int) -> bool:
        """Whether a later batch in the segment says that the place at `at` was synced.

        Reads the rest of the segment, so only at the first quiet look, if a batch was begun here,
        and then once in _SEARCH_EVERY looks. What cannot be read before a synced place is damage,
        not the end.
        """
        if self._quiet_looks % _SEARCH_EVERY != 1 or (
            self._quiet_looks == 1 and not is_begun(segment.view, segment.base_lsn, at)
        ):
            return False
        data = segment.readable()
        for later in candidates(data, segment.base_lsn, at):
            found = check(data, segment.base_lsn, later)
            if isinstance(found, FoundBatch) and found.content_good:
                self.synced_lsn = max(self.synced_lsn, found.stamp.synced_lsn)
                if self.synced_lsn > self.stopped_lsn:
                    return True
        return False

    def _read_mark(self) -> Epoch:
        """Return the file `epoch`: the epoch, and how often brokers have opened the directory."""
        return read_mark(self._directory, EPOCH_FILE, Epoch) or Epoch(b"", 0, 0)


def locate(lsn: int, segment_bytes: int) -> tuple[int, int]:
    """(number of the segment, position in it) of the batch that begins at or after a position."""
    number, at = divmod(lsn, segment_bytes)
    if segment_bytes - at < STAMP_BYTES:  # no batch has room before the segment's end
        number, at = number + 1, 0
    return number, max(at, SEGMENT_HEADER_BYTES)


def resume(segment: SegmentMap, at: int, stop: int, epoch: int) -> int:
    """Return the LSN of the next good batch after damage in a segment; else that of `stop`.

    For the walk, which goes on there, and for a reading that passes over damage. at, stop:
    positions of the damage and of the end of the search. epoch: least one of that batch:
    a ghost, which a crash left at the right place, has an earlier one (FORMAT.md, P5).
    """
    stamp = segment.stamp(at)
    if isinstance(stamp, Stamp) and stamp.epoch >= epoch and at + stamp.size <= stop:
        return stamp.lsn + stamp.size  # the stamp is good, and tells where its content ends
    data = segment.readable()[:stop]
    for later in candidates(data, segment.base_lsn, at):
        found = check(data, segment.base_lsn, later)
        if isinstance(found, FoundBatch) and found.stamp.epoch >= epoch:
            return segment.base_lsn + later
    return segment.base_lsn + stop
