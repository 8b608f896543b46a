"""One reading of a stream: batches in order, gaps named, following what is written.

Owns the position. The rules: a batch is handed out with its checksums good, and when the next one
is asked for, the last one is checked against having been overwritten; what is not there any more is
told as a subscription tells it, by GapNotice, or GapError where the reading is strict; nothing is
lost to a timeout or an error.

Words: the tail is the end of the ring, and how far it is synced. It loses its place when the ring
comes round, or a broker is started anew. A walk yields steps: LocatedBatch (a batch),
Spotted (rows read without their batch), Passed (no wanted record), Lost. The floor is the offset
below which retention or a trim left no record. Aged is what the stream's max_age_ms excludes.
Missing are segments that the ring's manifest names and its directory lacks: the oldest, or the
newest. A stream with `keep` keeps the newest record of each subject: before their segment is
overwritten, the broker copies these records further on (they have moved). Source: FORMAT.md,
section 8; SPEC.md, sections 6 and 8.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from malamute_protocol.batch import Batch, Record
from malamute_protocol.commands import StartKind
from malamute_protocol.content_layout import ARROW
from malamute_protocol.errors import BatchError, Timeout
from malamute_protocol.gather import Row
from malamute_protocol.schema import Schemas
from malamute_py.changelog.settings import versions
from malamute_py.client.position import Position
from malamute_py.client.session.subscription import (
    BegunNotice,
    GapError,
    GapNotice,
    RewoundNotice,
)
from malamute_py.journal.errors import JournalCorrupt
from malamute_py.mapped.batch import MappedBatch, gathers, takes_out
from malamute_py.mapped.beginning import Beginning, trim_floor
from malamute_py.mapped.errors import Overwritten, StreamRemoved
from malamute_py.mapped.gathered import GatheredRows
from malamute_py.mapped.missing import NOTHING, Missing
from malamute_py.mapped.moved import MovedRecords
from malamute_py.mapped.request import ReadingNotice, Request
from malamute_py.mapped.segments import Segments
from malamute_py.mapped.selection import Selection
from malamute_py.mapped.streams import Catalogue, StreamEntry
from malamute_py.mapped.tables import ArrowTables
from malamute_py.mapped.tail import RingTail
from malamute_py.mapped.walk import (
    END,
    LocatedBatch,
    Lost,
    Passed,
    Spotted,
    Step,
    Walk,
    begin_of,
    next_from,
    next_offset,
    young_from,
)

if TYPE_CHECKING:
    import pyarrow as pa

LOG = logging.getLogger("malamute.mapped")
POLL_S: Final = 0.002
"""Time between two looks at the end of the log while no batch comes."""
_ADVANCES_MAX: Final = 64
"""Steps to the end of the log before reading begins, at most. One step ends at each damage, and
while the broker writes, each brings something."""
_BOUNDS: Final = "removed to keep the log within its bounds"
_REMOVED: Final = "removed because a client of the broker asked for it"
_AGED: Final = "past the age that the stream keeps"
_THOROUGH: Final = 16
"""Looks at the end of the log of which one finds out why nothing follows."""
_CATALOGUE_S: Final = 0.25
"""Time between two looks whether the stream is still there."""


class Reading:
    """Batches of one stream, as an iterator; for one thread at a time."""

    def __init__(
        self,
        entry: StreamEntry,
        segments: Segments,
        tail: RingTail,
        catalogue: Catalogue,
        missing: Callable[[int], Missing],
        request: Request,
    ) -> None:
        """See LogReader.read(), which makes it. segments, tail: of the stream's ring.

        missing: compares the ring with its manifest, given where a walk to its end stopped.
        """
        self._entry = entry
        self._segments = segments
        self._tail = tail
        self._catalogue = catalogue
        self._request = request
        self._selection = Selection(entry.number, request.pattern, request.client_time)
        self._selection.purge(entry.purges)
        self._closed = False
        self._refreshed = time.monotonic()
        """Time at which the stream was looked up last in the change log."""
        self._epoch = 0
        """Epoch of the batch that was handed over last, for `position`; 0: none was."""
        self._idle = 0
        """Looks at the end of the log that found nothing since the caller asked."""
        self._why: Lost | None = None
        """Newest loss of the walk, until a batch is found after it."""
        self._last: MappedBatch | None = None
        """The batch that was handed over last, if it is of views: checked with the next call."""
        self._schemas: Schemas | None = None
        """Versions of a typed stream's schema, once a batch needed one."""
        self._waiting: deque[Batch | MovedRecords | ReadingNotice | JournalCorrupt] = deque()
        """Batches, notices and errors to be handed over to the caller, in order."""
        self._gathered = GatheredRows(entry.number)
        """Few rows of many batches that become one batch; they come after all that waits."""
        self._tables = ArrowTables()
        self._reach_the_end()
        self._times_lost = tail.times_lost
        self._floor = trim_floor(entry, segments)
        """Offset below which no record is handed out: retention or a trim has removed it."""
        self._missing = missing(tail.stopped_lsn)
        # The offset after the last record there is. It costs a walk: 0 where nothing depends on it.
        stop = self._next_offset(self._bound) if self._depends_on_stop() else 0
        self._missing_to = 0
        """Offset up to which records are known to have been in missing segments at the end."""
        if self._missing.newest and self._missing.next(entry.number) > stop:
            self._missing_to = stop = self._missing.next(entry.number)
        self._raise_floor(stop)  # max_records counts back from the last record
        self._until_lsn = self._bound if request.until else END
        """Position in the ring at which the reading ends; END: it follows what is written."""
        self._end = min(END if request.end is None else request.end, stop if request.until else END)
        """Offset at which the reading ends."""
        beginning = Beginning(
            entry, segments, tail, self._missing,
            floor=self._floor, stop=stop, end=self._end, bound_lsn=self._bound,
            oldest_ms=self._oldest_ms(),
        )  # fmt: skip
        self._next = self._handed = beginning.offset(request.start)
        """Offsets of the walk, and of the caller while something waits to be handed over."""
        self._waiting.extend(beginning.notices)
        self._go_to(self._next)

    def _reach_the_end(self) -> None:
        """Take in what was written until now, before the reading begins."""
        quiet_looks = 0
        for _ in range(_ADVANCES_MAX):
            quiet_looks = 0 if self._tail.advance() else quiet_looks + 1
            if quiet_looks == 2:
                break  # the second one searched the segment for later batches, too (tail.py)

    def _depends_on_stop(self) -> bool:
        """Whether the reading needs the offset after the stream's last record as it begins."""
        kind, *_ = self._request.start
        # max_records counts the records that are kept from the last one back.
        ends_there = bool(self._request.until or self._entry.settings.max_records)
        # Missing newest segments: what the manifest says they held begins after the last record.
        return ends_there or kind != StartKind.EARLIEST or bool(self._missing.newest)

    # --- where it is ----------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Return where a later reader, mapped or linked, goes on after the last batch."""
        # The walk is ahead of the caller by what waits, or is being gathered, for it.
        following = self._handed if self._waiting or len(self._gathered) else self._next
        return Position(self._entry.uuid, self._epoch, following)

    @property
    def _bound(self) -> int:
        """Return the position in the ring up to which this reading sees records."""
        tail = self._tail
        if self._request.visibility != "live":  # only what no power loss takes back
            return min(tail.end_lsn, tail.synced_lsn)
        return tail.end_lsn

    def _next_offset(self, bound_lsn: int) -> int:
        """Return the offset after the stream's last record before a position in the ring."""
        number, tail = self._entry.number, self._tail
        if bound_lsn == tail.end_lsn and number in tail.nexts:  # the tail met it on its way
            return tail.nexts[number]
        return next_offset(self._segments, number, bound_lsn)

    def _go_to(self, offset: int) -> None:
        """Walk from an offset on, or from the first one after it that the log still has.

        What lies between is told as lost. _renew() begins the walk's steps.
        """
        lsn, first = begin_of(self._segments, self._entry.number, offset)
        selection, request = self._selection, self._request
        every_batch = selection.everything and request.client_time is None
        self._steps: Iterator[Step] = iter(())
        # A row without its batch is a copy: a reading of views takes whole batches.
        single_rows = request.copy and not every_batch
        self._walk = Walk(
            self._segments, self._entry.number, lsn, offset,
            choose=None if every_batch else selection.choose,
            spots=selection.spots if single_rows else None,
            known=selection.of_known if single_rows else None,
        )  # fmt: skip
        if self._missing.oldest:
            # The manifest tells how far retention had come: what it kept is lost with its files.
            kept = max(self._missing.first(self._entry.number), self._floor)
            self._report_gap(kept, "retention", _BOUNDS)
            self._report_gap(first, "damaged", self._missing.oldest)
        if max(first, self._floor) > self._next:
            self._report_gap(max(first, self._floor), "retention", _BOUNDS)

    # --- batches ----------------------------------------------------------------------------

    def next_batch(self, timeout_ms: int | None = None) -> Batch | None:
        """The next batch; None at the end.

        A MappedBatch where it is of views; a Batch where its bytes are its own: in a reading of
        copies, of few rows of a batch, and of newest records of keys that have moved.
        timeout_ms: None waits without end.
        Raises Timeout (nothing is lost); Overwritten: the batch before was overwritten while its
        views were looked at (a copy of it was not); GapError when strict; StreamRemoved; OSError;
        JournalCorrupt: the log went on in segments that are missing, and nothing tells with which
        records (once, after everything else).
        """
        last, self._last = self._last, None
        if last is not None and not (last.copied or last.told):
            last.check()
        self._idle = 0
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        waited = True  # what waits from an earlier call was checked a while ago
        while True:
            while self._waiting:
                item = self._waiting.popleft()
                if isinstance(item, Batch):
                    batch = self._hand_over(item, waited)
                    if batch is not None:
                        return batch
                elif isinstance(item, MovedRecords):
                    moved = self._hand_over_moved(item)
                    if moved is not None:
                        return moved
                elif isinstance(item, JournalCorrupt):
                    raise item
                else:
                    if not isinstance(item, BegunNotice):
                        self._handed = item.to_offset
                    self._tell(item)
                waited = True  # the program may have spent any time over a notice
            if self._closed:
                return None
            waited = False
            if not self._advance():
                self._wait(deadline)

    def _hand_over(self, batch: Batch, waited: bool) -> Batch | None:
        """Return the batch, or None if it was overwritten while it waited after a notice.

        waited: whether the batch may have waited; False: it was checked a moment ago.
        """
        stamp = batch.stamp
        # The rows of a derived batch have gaps between their offsets: its count tells no end.
        _, after = batch.span() if stamp.derived else (0, stamp.next_offset)
        following = min(after, self._end)
        if isinstance(batch, MappedBatch):
            if waited and not batch.intact():
                begin = max(stamp.base_offset, self._handed)
                in_its_place = list(self._in_place_of(begin, following, "retention", _BOUNDS))
                self._waiting.extendleft(reversed(in_its_place))
                return None
            self._last = batch
        self._handed = following
        self._epoch = stamp.epoch
        return batch

    def _hand_over_moved(self, moved: MovedRecords) -> Batch | None:
        """Return the next batch of newest records that have moved; None: there is none more."""
        batch = moved.batch(self._selection, _now_ms)
        self._handed = moved.next
        if batch is not None:
            self._waiting.appendleft(moved)  # the next call asks it for its next batch
            self._epoch = batch.stamp.epoch
        return batch

    def _advance(self) -> bool:
        """Go on until something waits for the caller, or the reading is closed, or steps run out.

        Returns False when the log has nothing more for now: the caller sleeps and asks again.
        """
        for step in self._steps:
            if isinstance(step, LocatedBatch):
                if not self._take(step):
                    self._steps = self._walk.overtaken(step.segment.number, self._bound)
                    return True
            elif isinstance(step, Spotted):
                self._take_rows(step)
            elif isinstance(step, Passed):
                if step.base > self._next:
                    self._report_unfound(step.base)
                self._next = max(self._next, min(step.next, self._end))
                self._why = None
            else:
                # The stream may go on after `next` only: the reason lasts until a batch is found.
                self._why = step
                if step.next > self._next:
                    self._report_gap(step.next, step.code, step.reason)
            if self._next >= self._end:
                break
            if self._waiting:
                return True
        # The steps are over: rows that were gathered do not wait for the next ones.
        self._flush()
        if self._next < self._end and self._walk.lsn < self._until_lsn:
            return bool(self._waiting) or self._renew()
        # The end of the reading; offsets before it that no step accounted for are told as lost.
        self._report_missing_newest()
        if self._next < self._end:
            if self._waiting:
                return True
            self._refresh()  # perhaps nothing came because the stream was removed
        self._report_unfound(self._end)
        self._closed = True
        return True

    def _take(self, found: LocatedBatch) -> bool:
        """Take up the wanted rows of a batch; False: it was overwritten meanwhile.

        The position stays before such a batch: the walk is to go on where the ring is, and the loss
        that is named then begins with this batch.
        """
        stamp = found.stamp
        base, after = stamp.base_offset, min(stamp.next_offset, self._end)
        if base > self._next:
            self._report_unfound(base)  # no step has accounted for the offsets before the batch
        self._why = None
        if self._entry.settings.max_age_ms and stamp.append_time_ms < self._oldest_ms():
            self._report_aged(stamp.lsn)  # it and those after it that are too old, as one gap
            if self._next >= after:
                return True
        offsets = max(self._next, self._floor), self._end
        batch: MappedBatch | None = None
        try:
            content = found.content()
            wanted, mask = self._selection.rows(content, base, offsets, _now_ms)
            if wanted:
                batch = MappedBatch(stamp, content, mask, found.segment)
                if content.head.body_kind == ARROW:
                    batch.schemas = self._schemas_with(content.head.schema_id)
        except (BatchError, IndexError) as error:
            # Bytes that were overwritten may look like anything.
            if not found.segment.intact():
                return False
            self._report_gap(after, "damaged", str(error))
            return True
        if not found.segment.intact():
            return False
        if batch is not None:
            try:
                self._hand_in(batch)  # it copies, unless the request wants views
            except Overwritten:
                return False
            except (BatchError, IndexError, ValueError) as error:
                self._report_gap(after, "damaged", str(error))
                return True
        self._next = max(self._next, after)
        return True

    def _hand_in(self, batch: MappedBatch) -> None:
        """Have a batch wait for the caller: as views of the mapped file, or copied out of it.

        Views are cheap, but hold only until the broker overwrites the segment; the request chooses.
        Of a batch with few wanted rows only these are copied, and very few are gathered with those
        of other batches, so that no caller gets a batch for each row. Raises Overwritten: the
        segment was overwritten under the copy, which is then of no use; BatchError, IndexError,
        ValueError: the bytes are damaged.
        """
        if not self._request.copy:
            self._queue(batch)
        elif not takes_out(batch.content, batch.rows):
            self._queue(batch.copy())
        elif gathers(batch.content, batch.rows):
            self._gather(batch.taken_rows(), batch.stamp.epoch, batch.stamp.lsn)
        else:
            self._queue(batch.taken_out())

    def _take_rows(self, spotted: Spotted) -> None:
        """Take up rare rows that were read without their batch."""
        if spotted.rows[0].append_time_ms < self._oldest_ms():
            self._report_aged(spotted.lsn)
        first, end = max(self._next, self._floor), self._end
        rows = [row for row in spotted.rows if first <= row.offset < end]
        if rows:
            self._gather(rows, spotted.epoch, spotted.lsn)
        self._next = max(self._next, min(spotted.rows[-1].offset + 1, end))

    def _gather(self, rows: list[Row], epoch: int, lsn: int) -> None:
        """Put rows of one batch beside those of others; full batches of them wait for the caller.

        epoch, lsn: of the rows' batch.
        """
        if not self._gathered.takes(rows[-1].offset, epoch):
            self._flush()
        self._gathered.add(rows, epoch, lsn)
        if self._gathered.full:
            self._flush()

    def _flush(self) -> None:
        """Make a batch of the gathered rows: something else comes after them, or they are many."""
        batch = self._gathered.batch()
        if batch is not None:
            self._waiting.append(batch)

    def _queue(self, item: Batch | MovedRecords | ReadingNotice | JournalCorrupt) -> None:
        """Have something wait for the caller, after the rows that were gathered before it."""
        if len(self._gathered):
            self._flush()
        self._waiting.append(item)

    def _schemas_with(self, number: int) -> Schemas | None:
        """Return the versions of the stream's schema, read anew where they lack a batch's.

        to_arrow() of the batch needs them. number: of the version that the batch's rows have. None:
        the stream is not typed.
        """
        known = self._schemas
        if known is None or number not in known.versions:
            known = self._schemas = self._declared() or known
        return known

    def _declared(self) -> Schemas | None:
        """Return the versions of the stream's schema as of now; None: it is not typed."""
        self._catalogue.refresh()
        # Of a stream that was removed meanwhile the versions known last: batches of it may be left.
        entry = self._catalogue.entry(self._entry.number) or self._entry
        return Schemas(versions(entry.settings).items()) if entry.settings.schema else None

    def _oldest_ms(self) -> int:
        """Return the append time before which records are past the stream's age; 0: none are."""
        age_ms = self._entry.settings.max_age_ms
        return _now_ms() - age_ms if age_ms else 0

    def _skip_aged(self, lsn: int, offset: int) -> int:
        """Return the offset after the records past their age that begin at `offset`.

        lsn: position in the ring from which to look for them.
        """
        oldest_ms = self._oldest_ms()
        if not oldest_ms:
            return offset
        young = young_from(self._segments, self._entry.number, lsn, offset, oldest_ms, self._bound)
        return min(young, self._end)

    def _raise_floor(self, next: int) -> None:
        """Raise the floor until at most the stream's max_records lie between it and `next`."""
        most = self._entry.settings.max_records
        self._floor = max(self._floor, next - most if most else 0)

    def _report_aged(self, lsn: int) -> None:
        """Report the next records as one gap as far as they are past the stream's age."""
        young = self._skip_aged(lsn, self._next)
        if young > self._next:
            self._report_gap(young, "retention", _AGED)
            self._walk.next = max(self._walk.next, young)

    def _renew(self) -> bool:
        """Begin steps over what was written since the last look; False: nothing was."""
        self._tail.advance(thorough=self._idle % _THOROUGH == 0)
        if self._tail.times_lost != self._times_lost:
            # The ring came round, or was opened anew: the place is sought again by its offset.
            self._times_lost = self._tail.times_lost
            self._refresh()  # The ring of a stream that was removed is gone, too.
            stop = self._next_offset(self._tail.end_lsn)
            if self._next > stop:
                # A power loss took away what was read.
                self._queue(RewoundNotice(self._next, stop, self._tail.epoch))
                self._next = stop
            self._missing = NOTHING  # it was of the files before
            self._go_to(self._next)
        if self._walk.lsn >= self._bound:
            self._idle += 1
            return self._report_missing_newest()
        self._idle = 0
        self._refresh_in_time(time.monotonic())
        self._floor = trim_floor(self._entry, self._segments)
        if self._entry.settings.max_records:
            stream, lsn = self._entry.number, self._walk.lsn
            self._raise_floor(next_from(self._segments, stream, lsn, self._next, self._bound))
        if self._floor > self._next:
            self._report_gap(self._floor, "retention", _BOUNDS)
        self._report_aged(self._walk.lsn)
        self._steps = self._walk.run(self._bound)
        return True

    def _refresh_in_time(self, now: float) -> None:
        """Refresh, if the last time is a while ago. now: by the monotonic clock."""
        if now - self._refreshed >= _CATALOGUE_S:
            self._refreshed = now
            self._refresh()

    def _refresh(self) -> None:
        """Take up the stream's settings, trims and purges as of now.

        Raises StreamRemoved, after which the reading is closed.
        """
        self._catalogue.refresh()
        entry = self._catalogue.entry(self._entry.number)
        if entry is None:
            self._closed = True
            raise StreamRemoved(f"the stream '{self._entry.name}' was removed")
        self._entry = entry
        self._selection.purge(entry.purges)

    def _wait(self, deadline: float | None) -> None:
        """Sleep until files are looked at again. Raises Timeout once the deadline is over."""
        now = time.monotonic()
        self._refresh_in_time(now)
        if deadline is not None and now >= deadline:
            raise Timeout(f"no record of '{self._entry.name}' came in time")
        time.sleep(POLL_S if deadline is None else min(POLL_S, deadline - now))

    def _report_unfound(self, to_offset: int) -> None:
        """Report the offsets up to `to_offset` as lost: the walk found no batch of them."""
        why = self._why or Lost("damaged", "the batches are not in the ring")
        self._report_gap(to_offset, why.code, why.reason)

    def _report_gap(self, to_offset: int, code: str, reason: str) -> None:
        """Report the offsets up to `to_offset` as a gap, for this reason."""
        to_offset = min(to_offset, self._end)
        for item in self._in_place_of(self._next, to_offset, code, reason):
            self._queue(item)
        self._next = max(self._next, to_offset)

    def _in_place_of(
        self, begin: int, to_offset: int, code: str, reason: str
    ) -> Iterator[GapNotice | MovedRecords]:
        """Yield what the caller gets in place of the offsets [begin, to_offset).

        That is a gap; or two, where a trim removed the first ones; or, of a stream with `keep`,
        copies of the records that moved.
        """
        if code == "retention" and self._entry.settings.keep:
            # What is left of these records has moved, and the others were replaced.
            if begin < to_offset:
                yield MovedRecords(self._segments, begin, to_offset, self._moved_bound)
            return
        purged = min(to_offset, self._entry.trimmed)
        if code == "retention" and begin < purged:
            yield GapNotice(begin, purged, "purged", _REMOVED)
            begin = purged
        if begin < to_offset:
            yield GapNotice(begin, to_offset, code, reason)

    def _moved_bound(self) -> int:
        """Return how far copies are looked for: they may be newer than what was read until now."""
        self._tail.advance()
        return self._bound

    def _report_missing_newest(self) -> bool:
        """Report missing segments in which the log went on, once; False: there are none."""
        newest, self._missing = self._missing.newest, NOTHING
        if not newest:
            return False
        if self._missing_to:
            self._report_gap(self._missing_to, "damaged", newest)
        elif self._next < self._end or self._end != self._request.end:
            # The reading is not complete without them: it was not asked to end before them.
            reason = f"{newest}; the log went on there, and nothing tells with which records"
            self._queue(JournalCorrupt(f"ring {self._entry.ring}", reason))
        return True

    def _tell(self, notice: ReadingNotice) -> None:
        """Give the caller a notice. Raises GapError for a loss in a strict reading."""
        request = self._request
        if request.strict and not isinstance(notice, BegunNotice):
            raise GapError(notice)
        if request.on_notice is not None:
            request.on_notice(notice)
        elif isinstance(notice, BegunNotice):
            LOG.info("a reading of %s from the earliest record: %s", self._entry.name, notice)
        else:
            LOG.warning("stream %s: %s", self._entry.name, notice)

    def __iter__(self) -> Reading:
        return self

    def __next__(self) -> Batch:
        batch = self.next_batch()
        if batch is None:
            raise StopIteration
        return batch

    def records(self) -> Iterator[Record]:
        """Yield all records to the end, each out of a copy of its batch. Raises as next_batch()."""
        while (batch := self.next_batch()) is not None:
            yield from batch.records()

    # --- Arrow ------------------------------------------------------------------------------

    def to_arrow(self, *, decode: bool = False) -> pa.Table:
        """Return all batches to the end of the reading as one table of views; see check().

        Small batches are copied, into chunks of many records. decode: plain columns instead of
        dictionaries. Views of an earlier call are forgotten: check() answers for this one. Raises
        as next_batch().
        """
        return self._tables.table(self, decode, self._declared)

    def arrow_reader(self, *, decode: bool = False) -> pa.RecordBatchReader:
        """Return a reader of all record batches to the end, read as it is asked for; see check().

        An error of next_batch() is raised by that reader, and ends it.
        """
        return self._tables.reader(self, decode, self._declared)

    def check(self) -> None:
        """Raise Overwritten unless all views of the last to_arrow() or arrow_reader() were right.

        Ask after they were used: what was computed of them before is right then.
        """
        self._tables.check()

    # --- life ------------------------------------------------------------------------------

    def close(self) -> None:
        """End the reading. Batches and tables that were handed out stay what they are."""
        self._flush()  # rows that were gathered were not handed over either
        if self._waiting:
            self._next = self._handed  # `position` is where the caller stands, not the walk
        self._closed = True
        self._steps = iter(())
        self._waiting.clear()
        self._last = None
        self._tables.forget()

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _now_ms() -> int:
    """Return the time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000
