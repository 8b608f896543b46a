"""Reading a ring back after any kind of end: what is kept, damaged, dropped.

Owns the decision table of FORMAT.md, section 7, and only reads: repairs are in repair.py. The rule:
every confirmed batch is kept or named as damaged; only what was never known to be durable is
dropped. Proof that a position had been durable is a later valid batch, marker, segment header or
index that says so. Segments with a good index are taken from it, others are walked batch by batch.
A snapshot is the state at the begin of a segment. Source: docs/design.md, Journal.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import msgspec

from malamute_protocol.stamp import (
    DATA,
    EPOCH_START,
    LAST_OF_BUNDLE,
    PADDING,
    STAMP_BYTES,
)
from malamute_py.journal.check import (
    FoundBatch,
    candidates,
    check,
    content_facts,
    header_table,
    is_begun,
)
from malamute_py.journal.doubts import CONTROLS, UNSEEN, Doubts
from malamute_py.journal.found_state import FoundState, SegmentState
from malamute_py.journal.index import LiveIndex, Place, read_index
from malamute_py.journal.later import LaterBatches
from malamute_py.journal.layout import (
    ACTIVE_FILE,
    CLOSED_FILE,
    TRIMS_FILE,
    Active,
    Closed,
    Failed,
    RingMeta,
    Trims,
)
from malamute_py.journal.listing import Listing
from malamute_py.journal.manifest import Expected, skipped
from malamute_py.journal.marks import read_mark
from malamute_py.journal.segment import Segment
from malamute_py.journal.segment_bytes import SegmentBytes
from malamute_py.journal.storage import File, Storage
from malamute_py.journal.streams import StreamTable
from malamute_py.journal.types import (
    SEGMENT_HEADER_BYTES,
    UNINDEXED_FROM,
    Damage,
    Dropped,
    RingSettings,
    Unknown,
)

_ANY_BUNDLE = -1  # the next batch may belong to any bundle: what is before it is not known
_CLOSED_BUNDLE = -2  # the last bundle is whole: the next batch begins one
MISSING = "the segment's file is missing"


class Scan:
    """One reading of a ring's files; the outcome is in its attributes."""

    def __init__(
        self,
        storage: Storage,
        meta: RingMeta,
        settings: RingSettings,
        *,
        failed: Failed | None = None,
        expected: Expected | None = None,
        trust_indexes: bool = True,
    ) -> None:
        """failed: the mark of a failed sync, kept elsewhere than the ring's files.

        expected: what should be there, as the ring's manifest says.
        trust_indexes: False reads every segment even when it has a valid index file.
        """
        self.storage = storage
        self.ring = meta.uuid
        self.segment_bytes = meta.segment_bytes
        self.settings = settings
        self.segments: list[Segment] = []
        """Segments with data, oldest first."""
        self.spares: list[Segment] = []
        """Segments after the end, ready to be written."""
        self.unfinished: list[Segment] = []
        """Spares whose header has to be written: their preparation was interrupted."""
        self.temporaries: list[str] = []
        self.orphans: list[str] = []
        """Index files without their segment, or unreadable."""
        self.short: dict[int, int] = {}
        """Number -> bytes of segments whose file was cut off."""
        self.unknown: list[Unknown] = []
        self.damages: list[Damage] = []
        self.dropped: list[Dropped] = []
        self.first_number = 0
        """Number of the segment with which the ring begins, be it there or missing."""
        self.end_lsn = 0
        self.epoch = 0
        self.last_time_ms = 0
        self.last_lsn = -1
        """LSN at which the last batch begins; -1: there is none, or damage follows it."""
        self.safe_lsn = 0
        """LSN before which all was proven durable; from here to the end it was not."""
        self.streams = StreamTable(settings.epochs_max)
        self.state = FoundState(self.streams)
        self.skipped: dict[int, tuple[int, int]] = {}
        """Stream -> offsets [from, to) that hold no record and are skipped: none is given twice."""
        self.doubtful_bytes = self.doubtful_to = 0
        """Bytes that may have held control batches after the last one found."""
        self.clean = False
        self.batches = 0
        closed = read_mark(storage, CLOSED_FILE, Closed)
        self._closed = closed if closed is not None and closed.ring == self.ring else None
        self._failed = failed if failed is not None and failed.ring == self.ring else None
        mine = expected is not None and expected.ring == self.ring
        self._expected = expected if mine else None
        self._present: set[int] = set()
        """Numbers of all segments that there are."""
        self._doubts = Doubts()
        self._trust_indexes = trust_indexes
        self._active: Active | None = None
        if trust_indexes and self._closed is not None and self._closed.clean:
            # Only beside the mark of an orderly close, which the next opening takes away.
            self._active = read_mark(storage, ACTIVE_FILE, Active)
        self._bundle = _ANY_BUNDLE
        """LSN of the bundle that the next batch must go on with, _ANY_BUNDLE or _CLOSED_BUNDLE."""
        self._pending: list[tuple[Segment, FoundBatch, memoryview]] = []
        """Good batches of a bundle whose last batch was not met yet."""
        self._complete_lsn = 0
        """Position after the last bundle that is whole, or after damage: there the ring may end."""
        self._headless: set[int] = set()
        self._stale: set[int] = set()
        """Numbers of segments with a damaged header, and with an older number in it."""
        self._indexed: set[int] = set()
        """Numbers of segments with a good index file, which are not walked."""
        self._unread: set[int] = set()
        """Numbers of segments that were not read: what they hold of state is still to come."""
        self._listed: list[Segment] = []
        """All segments that there are, by number."""
        self._bytes = SegmentBytes(storage, meta.segment_bytes, self.unknown)
        self._later = LaterBatches(self._bytes)
        self._proven_lsn = 0
        """Position before which files other than the batches say that all was durable."""

    # --- the files ----------------------------------------------------------------

    def run(self) -> Scan:
        """Read the whole ring, for an opening or a tool; returns itself."""
        for _ in self.steps():
            pass
        return self

    def steps(self) -> Iterator[tuple[int, int]]:
        """Read everything, yielding (segments read, segments there are); run() does it at once."""
        listing = Listing(self.storage, self.ring, self.segment_bytes)
        listing.classify()
        if self._trust_indexes:
            listing.load_indexes()
        self._listed, self._indexed = listing.segments, listing.indexed
        self._unread = set(listing.indexed)
        self._headless, self._stale = listing.headless, listing.stale
        self.unknown += listing.unknown
        self.temporaries = listing.temporaries
        self.orphans, self.short = listing.orphans, listing.short
        self._present = {segment.number for segment in self._listed}
        self._proven_lsn = listing.proven_lsn()
        if self._expected is not None and self._expected.clean:
            self._proven_lsn = max(self._proven_lsn, self._expected.end_lsn)
        for mark in (self._closed, self._failed):
            if mark is not None:
                proven = mark.end_lsn if isinstance(mark, Closed) else mark.synced_lsn
                self._proven_lsn = max(self._proven_lsn, proven)
        for done in self._walk_segments():
            yield done, len(self._listed)
        self._finish()

    def bytes_of(self, segment: Segment) -> memoryview:
        """The whole segment; what cannot be read is zeros, and so fails its check."""
        return self._bytes.of(segment)

    # --- the walk -------------------------------------------------------------------

    def _walk_segments(self) -> Iterator[int]:
        """Check segment after segment up to where the log ends; yield how many are done."""
        size = self.segment_bytes
        self.first_number = coming = self._find_first_number()
        self._complete_lsn = coming * size
        for at, segment in enumerate(self._listed):
            if segment.number != coming:
                missing = coming * size
                known = self._is_missing(coming) or self._proven(missing, at)
                if not (known or self._any_later(missing)):
                    break  # Nothing says that the log went on beyond the hole: it ends here.
                self._damage(missing, segment.base_lsn, MISSING, offsets_unknown=True)
            coming = segment.number + 1
            if segment.number in self._indexed:
                self._accept_indexed(segment)
            elif self._accept_active(segment):
                yield at + 1
                break  # it is the last one
            elif not self._walk(segment, at):
                break  # the log ends in it
            yield at + 1
        else:
            self._miss_the_newest(coming)
        if self._complete_lsn < self._proven_lsn:
            self._flush()
            self._damage(
                self._complete_lsn,
                self._proven_lsn,
                "the log was longer when it was closed or synced",
                offsets_unknown=True,
            )

    def _find_first_number(self) -> int:
        """Number of the segment with which the ring begins, be it there or missing."""
        lowest = self._listed[0].number if self._listed else None
        known = self._expected
        if known is None or not known.has(known.first):
            return lowest or 0  # no manifest tells what there should be
        # A lower one was about to be removed or used again: it is as good as ever.
        return known.first if lowest is None else min(lowest, known.first)

    def _is_missing(self, number: int) -> bool:
        """Whether the manifest has a segment of which there is no file."""
        known = self._expected
        if known is None or not known.has(number) or number in self._present:
            return False
        # The oldest was to be used again under this number, and still has its own.
        return not (number == known.last and known.first - 1 in self._present)

    def _miss_the_newest(self, number: int) -> None:
        """Note as damage the manifest's segments from a number on, after the last file there is."""
        begin = number
        while self._is_missing(number):
            number += 1
        if number > begin:
            known = self._expected
            assert known is not None
            # Only a manifest of an orderly close tells where the ring ended in its last segment.
            stop = known.end_lsn if known.clean else number * self.segment_bytes
            self._damage(begin * self.segment_bytes, stop, MISSING, offsets_unknown=True)

    def _accept_indexed(self, segment: Segment) -> None:
        """Take a whole segment by its index file, without reading its batches."""
        self._flush()  # an index file proves that all before it was durable, a bundle's begin, too
        self.epoch = max(self.epoch, segment.last_epoch)
        self.last_time_ms = max(self.last_time_ms, segment.last_time_ms)
        for number, span in segment.spans.items():
            self.streams.note_span(number, span)
            self._doubts.note_offset_known(number)
        self.segments.append(segment)
        self._bundle = _ANY_BUNDLE  # the index does not say whether its last bundle goes on
        self._complete_lsn = segment.base_lsn + self.segment_bytes

    def _walk(self, segment: Segment, at: int) -> bool:
        """Check one segment's batches in order; True when the log goes on in the next one.

        at: its place among all segments. Where a batch does not go on with the log, the log ends,
        or, if it is proven to have gone on, all up to the next good batch is damage.
        """
        size, base = self.segment_bytes, segment.base_lsn
        data = self.bytes_of(segment)
        segment.live = LiveIndex(
            self.settings.index_interval_bytes, self.settings.distinct_headers_max
        )
        segment.spans = segment.live.spans
        position = SEGMENT_HEADER_BYTES
        begun = False  # whether the log reaches into this segment
        while size - position >= STAMP_BYTES:
            found = check(data, base, position)
            fault = self._fault(found)
            if not fault:
                assert isinstance(found, FoundBatch)
                if not begun:
                    begun = True
                    self._add_segment(segment)
                self._take(segment, found, data)
                position += found.stamp.size
                continue
            lsn = base + position
            cut = self._is_cut(segment, found, lsn, at)
            if not cut and not self._proven(lsn, at):
                self._note_tail(found, lsn, fault, at)
                return False
            if not begun:
                begun = True
                self._add_segment(segment)
            resume = self._resume(found, data, base, position)
            if resume is None:
                stop = base + size
                proven = max(self._proven_lsn, lsn)
                if not cut and proven < stop and not self._proven(proven, at):
                    # Only as far as was proven: what follows may be a torn tail.
                    stop = proven
                self._damage(lsn, stop, cut or fault, segment, offsets_unknown=True)
                return stop == base + size
            self._damage(lsn, base + resume, fault, segment, offsets_unknown=isinstance(found, str))
            if isinstance(found, FoundBatch):
                self.streams.note_lost(found.stamp)
                self._doubts.note_offset_known(found.stamp.stream)
            position = resume
        self._close_segment(base + size)
        return True

    def _is_cut(self, segment: Segment, found: FoundBatch | str, lsn: int, at: int) -> str:
        """Say that a segment's file was cut off where the log went on; "": it was not.

        found, lsn: what check() says of the position that the walk has come to. Where there was
        room for a stamp and none was begun, the log had ended. at: the segment's place among all.
        """
        left = self.short.get(segment.number)
        if left is None:
            return ""
        position = lsn - segment.base_lsn
        if left - position >= STAMP_BYTES and not self._is_torn(found, lsn, at):
            return ""  # the log had ended before
        return f"the segment's file was cut off at {left} bytes"

    def _accept_active(self, segment: Segment) -> bool:
        """Take the last segment from the file `active`, which an orderly close wrote.

        False: it has to be walked, as it is not the last one or something does not fit the file.
        """
        active, closed = self._active, self._closed
        if (
            active is None
            or closed is None
            or self._failed is not None  # what reads well may not be on disk
            or segment.number in self._headless | self._stale
            or segment.number in self.short
            or (active.ring, active.number) != (self.ring, segment.number)
            or (active.end_lsn, active.epoch) != (closed.end_lsn, closed.epoch)
            or not self._is_last(segment, active)
        ):
            return False
        stored = read_index(active.index, self.ring, segment.number)
        live = LiveIndex(self.settings.index_interval_bytes, self.settings.distinct_headers_max)
        if stored is None or stored.last_epoch != active.epoch:
            return False
        try:
            if not live.restore(stored):
                return False
        except (ValueError, struct.error, msgspec.MsgspecError):
            # Whatever an index's bytes are, a walk is the worst that may come of them.
            return False
        self._flush()
        segment.live, segment.spans, segment.expires_at_ms = live, live.spans, live.expires_at_ms
        segment.last_epoch, segment.last_time_ms = stored.last_epoch, stored.last_time_ms
        self.segments.append(segment)
        self._unread.add(segment.number)
        self.epoch = max(self.epoch, segment.last_epoch)
        self.last_time_ms = max(self.last_time_ms, segment.last_time_ms)
        for number, span in segment.spans.items():
            self.streams.note_span(number, span)
        for number, row in active.streams.items():
            self.streams.note_row(number, row)
            self._doubts.note_offset_known(number)
        self._bundle = _CLOSED_BUNDLE
        self._complete_lsn = active.end_lsn
        self.safe_lsn = max(self.safe_lsn, active.end_lsn)
        self.last_lsn = active.last_lsn
        return True

    def _is_last(self, segment: Segment, active: Active) -> bool:
        """Whether the last batch is where the file `active` says, good, and ends the ring there."""
        begin, stop = active.last_lsn - segment.base_lsn, active.end_lsn - segment.base_lsn
        if not SEGMENT_HEADER_BYTES <= begin < stop < self.segment_bytes:
            return False
        try:
            file = segment.file or self.storage.open(segment.name)
            data = memoryview(self.storage.read(file, begin, stop - begin))
        except OSError:
            return False
        found = check(data, active.last_lsn, 0)
        if isinstance(found, str) or not found.content_good or self.epoch > active.epoch:
            return False
        stamp = found.stamp
        return (
            stamp.epoch == active.epoch
            and bool(stamp.flags & LAST_OF_BUNDLE)
            and self._boundary(found.end) == active.end_lsn
        )

    def _add_segment(self, segment: Segment) -> None:
        """Take a segment as a part of the ring, even if its header is damaged."""
        self.segments.append(segment)
        if segment.number in self._headless:
            segment.damaged = True
            begin, number = segment.base_lsn, segment.number
            reason = "the segment's header is damaged; its batches were checked and are served"
            self.damages.append(Damage(begin, begin + SEGMENT_HEADER_BYTES, number, reason))

    def _fault(self, found: FoundBatch | str) -> str:
        """Return why a batch does not go on where the log stands; "": it does.

        found: the batch, or what is wrong with it in itself.
        """
        if isinstance(found, str):
            return found
        stamp = found.stamp
        if stamp.epoch < self.epoch:
            return f"epoch {stamp.epoch} after epoch {self.epoch}: left over from before a crash"
        if not found.content_good:
            return found.reason
        if self._bundle == _CLOSED_BUNDLE:
            if stamp.bundle_lsn != stamp.lsn:
                return "the rest of a bundle whose beginning is not here"
        elif self._bundle >= 0 and (  # amid a bundle
            # A bundle dropped by an earlier recovery may have begun at the very same
            # position: of two halves with one bundle LSN, the epoch tells them apart.
            stamp.bundle_lsn != self._bundle or stamp.epoch != self.epoch
        ):
            return "another bundle amid a bundle"
        return ""

    def _take(self, segment: Segment, found: FoundBatch, data: memoryview) -> None:
        """Take a good batch, which belongs to the ring once the last batch of its bundle is there.

        It waits in `_pending` until then.
        """
        stamp = found.stamp
        self.epoch = stamp.epoch
        self.safe_lsn = max(self.safe_lsn, stamp.synced_lsn)
        self.batches += 1
        self._pending.append((segment, found, data))
        if stamp.flags & LAST_OF_BUNDLE:
            self.last_lsn = stamp.lsn
            self._flush()
            self._bundle = _CLOSED_BUNDLE
            self._complete_lsn = self._boundary(found.end)
        else:
            self._bundle = stamp.bundle_lsn

    def _close_segment(self, stop: int) -> None:
        """Note that the log has come to the end of a segment, unless a bundle goes on."""
        if not self._pending:
            self._complete_lsn = max(self._complete_lsn, self._boundary(stop))

    def _boundary(self, lsn: int) -> int:
        """Return a batch's end as append() counts it: with a rest that is too small for a stamp."""
        rest = -lsn % self.segment_bytes
        return lsn + rest if rest < STAMP_BYTES else lsn

    def _flush(self) -> None:
        """Make the pending batches part of the ring: their bundle is whole, or was durable."""
        self._keep(self._pending)
        self._pending.clear()

    def _keep(self, batches: Iterable[tuple[Segment, FoundBatch, memoryview]]) -> None:
        """Make batches part of the ring: in their segment's index, the stream table, and the state.

        Each comes with its segment and the bytes of that. Called when their bundle is whole.
        """
        # Batches of streams without a header index, as mail, gather here and are indexed together.
        sparse: dict[tuple[Segment, int], list[Place]] = {}
        for segment, found, data in batches:
            stamp = found.stamp
            key = stamp.stream if stamp.control_kind == DATA else CONTROLS
            self._doubts.note_offset_known(key)
            segment.last_epoch = stamp.epoch
            segment.last_time_ms = time_ms = stamp.append_time_ms
            self.last_time_ms = max(self.last_time_ms, time_ms)
            kind = stamp.control_kind
            if kind in (PADDING, EPOCH_START):
                continue
            position, size = found.position, stamp.size
            content = data[position + stamp.stamp_bytes : position + size]
            if kind == DATA:
                base, stream = stamp.base_offset, stamp.stream
                after = base + stamp.count
                if stream >= UNINDEXED_FROM:
                    places = sparse.setdefault((segment, stream), [])
                    places.append((position, size, base, after, time_ms))
                else:
                    assert segment.live is not None
                    keys = header_table(content)
                    segment.live.add(
                        stream, position, size, base, after, time_ms, content_facts(content), keys,
                        content, stamp.epoch,
                    )  # fmt: skip
                    segment.expires_at_ms = segment.live.expires_at_ms
                    self.streams.note_batch(stream, base, after, stamp.epoch, size)
            self.state.note(found, content)
        for (segment, stream), places in sparse.items():
            assert segment.live is not None
            total = segment.live.add_sparse(stream, places)
            segment.expires_at_ms = segment.live.expires_at_ms
            (_, _, base, _, _), (_, _, _, after, _) = places[0], places[-1]
            self.streams.note_batch(stream, base, after, segment.last_epoch, total)

    # --- damage or tail -------------------------------------------------------------

    def _proven(self, lsn: int, at: int) -> bool:
        """Whether a position had been durable once: what cannot be read there is damage."""
        if lsn < self._proven_lsn or lsn < self.safe_lsn:
            return True
        if self._closed_here(lsn):
            return False
        # What index files prove is in _proven_lsn.
        walked = (each for each in self._listed[at:] if each.number not in self._indexed)
        self._later.search(lsn, walked)
        return self._later.prove(lsn, self.epoch)

    def _closed_here(self, lsn: int) -> bool:
        """Whether the ring was closed in order here: no need to search what lies after its end."""
        closed = self._closed
        if closed is None or not closed.clean or closed.epoch != self.epoch or self._pending:
            return False
        return closed.end_lsn in (lsn, self._complete_lsn)  # `lsn` may be a segment's end after it

    def _any_later(self, lsn: int) -> bool:
        """Whether a valid batch lies after the place of a missing file, which then is damage."""
        if any(each.lsn >= lsn and each.epoch >= self.epoch for each in self._later.found):
            return True
        return any(s.number in self._indexed and s.base_lsn >= lsn for s in self._listed)

    def _resume(self, found: FoundBatch | str, data: memoryview, base: int, at: int) -> int | None:
        """Return where in the segment reading goes on after damage; None: nowhere."""
        if isinstance(found, FoundBatch):
            stamp = found.stamp
            if stamp.epoch >= self.epoch and not found.content_good:
                return at + stamp.size  # the stamp is good, and tells the batch's size
        for place in candidates(data, base, at):
            later = check(data, base, place)
            if isinstance(later, FoundBatch) and later.stamp.epoch >= self.epoch:
                return place
        return None

    def _damage(
        self,
        from_lsn: int,
        to_lsn: int,
        reason: str,
        segment: Segment | None = None,
        *,
        offsets_unknown: bool,
    ) -> None:
        """Note a damaged range, and go on after it. offsets_unknown: no stamp tells what it had.

        Batches of an unfinished bundle before it are kept: what came after was durable.
        """
        self._flush()
        if offsets_unknown:
            self._doubts.add(from_lsn, to_lsn)
        number = from_lsn // self.segment_bytes
        self.damages.append(Damage(from_lsn, to_lsn, number, reason))
        if segment is not None:
            segment.damaged = True
        self._bundle = _ANY_BUNDLE
        self.last_lsn = -1
        self._complete_lsn = self._boundary(to_lsn)

    def _note_tail(self, found: FoundBatch | str, lsn: int, fault: str, at: int) -> None:
        """Note the range that is dropped at the end of the log, if something was begun there.

        found, fault: the batch at which the log ends, and why it does not belong to the ring.
        """
        # What is dropped goes on to the last batch after it, if there are any.
        later = (each.lsn for each in self._later.found if each.epoch >= self.epoch)
        to_lsn = max((each for each in later if each > lsn), default=0)
        if self._pending:
            _, first, _ = self._pending[0]
            reason = f"a bundle without its end ({fault})"
            self.dropped.append(Dropped(first.stamp.bundle_lsn, max(lsn, to_lsn), reason))
        elif to_lsn or self._is_torn(found, lsn, at):
            self.dropped.append(Dropped(self._complete_lsn, max(lsn, to_lsn), f"torn: {fault}"))

    def _is_torn(self, found: FoundBatch | str, lsn: int, at: int) -> bool:
        """Whether a write was cut off here: a stamp of this place is there, but no good batch.

        A stamp of an earlier use of the file says another position, or an older epoch.
        """
        if isinstance(found, FoundBatch):
            return found.stamp.epoch >= self.epoch
        segment = self._listed[at]
        return is_begun(self.bytes_of(segment), segment.base_lsn, lsn - segment.base_lsn)

    # --- the end ----------------------------------------------------------------------

    def _finish(self) -> None:
        """Settle where the ring ends: half a bundle is dropped, later segments are spares."""
        if self._pending:
            # The files ended amid a bundle, with nothing to fail a check on.
            if not self.dropped:
                (_, begun, _), (_, final, _) = self._pending[0], self._pending[-1]
                half = Dropped(begun.stamp.bundle_lsn, final.end, "a bundle without its end")
                self.dropped.append(half)
            self._pending.clear()
        self.end_lsn = self._complete_lsn
        self.safe_lsn = min(max(self.safe_lsn, self._proven_lsn), self.end_lsn)
        kept = [s for s in self.segments if s.base_lsn < self.end_lsn]
        last = kept[-1].number if kept else -1
        for segment in self._listed:
            # A dropped tail may have begun a segment: that one is a spare again.
            if segment.number > last and segment.base_lsn >= self.end_lsn:
                segment.live, segment.spans, segment.damaged = None, {}, False
                self.spares.append(segment)
                if segment.number in self._headless | self._stale:
                    self.unfinished.append(segment)
        self.segments = kept
        closed = self._closed
        self.clean = (
            closed is not None
            and closed.clean
            and closed.end_lsn == self.end_lsn
            and closed.epoch == self.epoch
            and not self.dropped
            and not self.damages
        )
        self._bytes.kept = None
        self.last_time_ms = max(self.last_time_ms, self.state.last_time_ms)
        self.state.complete(reversed(self.segments), self._unread_state)
        self._go_beyond_doubts()
        trims = read_mark(self.storage, TRIMS_FILE, Trims)
        if trims is not None and trims.ring == self.ring:
            for number, first in trims.first.items():
                # What was trimmed and not yet durable may be lost: its offsets come again.
                self.streams.note_floor(number, min(first, self.streams.state(number).next))

    def _unread_state(self, segment: Segment) -> SegmentState | None:
        """Read the state batches of a segment that was not walked; None: a walk has met them."""
        if segment.number not in self._unread:
            return None
        data = SegmentBytes(self.storage, self.segment_bytes, []).of(segment)
        return SegmentState(segment, data, self.end_lsn, self.settings.epochs_max)

    def _go_beyond_doubts(self) -> None:
        """Have no offset given again that a batch in a damaged part may have had.

        Streams whose last batches may lie in damage go on after as many offsets as the lost bytes
        can have held at most.
        """
        known = self._expected
        # What a repair or an earlier start wrote into the manifest counts whatever the ring says.
        for number, after in (known.beyond if known is not None else {}).items():
            self.streams.note_next(number, after)
        rows = None if known is None else known.streams
        told = rows or {}  # stream -> (next offset, first offset), by the ring's manifest
        for number in self.streams.states.keys() | told.keys():
            if self._doubts.parts_before(number):
                # What is lost of its beginning was not retired, and so is not called that.
                _, first = told.get(number, (0, 0))
                self.streams.note_lost_beginning(number, first)
        # Damage before the newest snapshot does not count: the snapshot has all offsets up to it.
        as_of = 0 if self.state.snapshot is None else self.state.snapshot.facts.as_of_lsn
        for number in self.streams.states.keys() | told.keys():
            lost = self._doubts.bytes_after(number, as_of)
            if lost and known is not None and rows is not None:
                # Only here: a power loss may have taken back records that the manifest counts,
                # which is no damage.
                after, _ = told.get(number, (0, 0))
                self.streams.note_next(number, after)
                lost = self._doubts.bytes_after(number, max(as_of, known.end_lsn))
            if lost:
                state = self.streams.state(number)
                self.skipped[number] = (state.next, state.next + skipped(lost))
                state.next += skipped(lost)
        self.doubtful_bytes = self._doubts.bytes_after(CONTROLS, as_of)
        self.doubtful_to = self._doubts.end() if self.doubtful_bytes else 0
        if known is not None and rows is not None:
            as_of = max(as_of, known.end_lsn)
        self.streams.unseen_next = skipped(self._doubts.bytes_after(UNSEEN, as_of))

    def index_one(self, segment: Segment, file: File) -> LiveIndex:
        """Return a new index of one finished segment, made from its batches.

        For readers, where its index file is damaged. A twin of the segment is filled, so that the
        one in use stays as it is.
        """
        twin = Segment(segment.number, self.segment_bytes, file)
        twin.live = LiveIndex(
            self.settings.index_interval_bytes, self.settings.distinct_headers_max
        )
        data = self.bytes_of(twin)
        self._keep((twin, found, data) for found in self.walk_valid(twin))
        return twin.live

    def walk_valid(self, segment: Segment) -> list[FoundBatch]:
        """Return the good batches of one segment, for a new index of it."""
        data, base = self.bytes_of(segment), segment.base_lsn
        out: list[FoundBatch] = []
        position: int | None = SEGMENT_HEADER_BYTES
        while position is not None and self.segment_bytes - position >= STAMP_BYTES:
            found = check(data, base, position)
            if isinstance(found, FoundBatch):
                if found.content_good:
                    out.append(found)
                position += found.stamp.size
            else:
                position = next(candidates(data, base, position), None)
        return out
