"""One reading of a stream: batches in order, gaps named, following what is written.

Owns the position. The rules: a batch is handed out with its checksums good, and when the next one
is asked for, the last one is checked against having been overwritten; what is not there any more is
told as a subscription tells it, by GapNotice, or GapError where the reading is strict; nothing is
lost to a timeout or an error. Source: FORMAT.md, section 8; SPEC.md, sections 6 and 8.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from malamute_protocol.batch import Batch, Record
from malamute_protocol.commands import Start, StartKind
from malamute_protocol.content import Content
from malamute_protocol.content_layout import ARROW
from malamute_protocol.errors import BatchError, LocalProtocolError, Timeout
from malamute_protocol.gather import Gathering, Row
from malamute_protocol.schema import Schemas
from malamute_protocol.stamp import Stamp, parse_message_id
from malamute_py.changelog.settings import versions
from malamute_py.client.position import Position
from malamute_py.client.session.subscription import (
    BegunNotice,
    GapError,
    GapNotice,
    RewoundNotice,
)
from malamute_py.journal.errors import JournalCorrupt
from malamute_py.journal.gathering import ROWS_MAX
from malamute_py.journal.layout import TRIMS_FILE, Trims
from malamute_py.journal.marks import read_mark
from malamute_py.mapped.batch import MappedBatch, gathers, takes_out
from malamute_py.mapped.errors import Overwritten, StreamRemoved
from malamute_py.mapped.missing import NOTHING, Missing
from malamute_py.mapped.moved import MovedRecords
from malamute_py.mapped.request import ReadingNotice, Request
from malamute_py.mapped.segments import Segments
from malamute_py.mapped.selection import Selection
from malamute_py.mapped.streams import Catalogue, StreamEntry
from malamute_py.mapped.tables import ArrowTables
from malamute_py.mapped.tail import RingTail
from malamute_py.mapped.times import at_append_time, at_client_time
from malamute_py.mapped.walk import (
    END,
    Found,
    Lost,
    Passed,
    Spotted,
    Step,
    Walk,
    begin_of,
    epoch_end,
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
"""Steps to the end of the log before reading begins: one for each damage, and a writer goes on."""
_BOUNDS: Final = "removed to keep the log within its bounds"
_REMOVED: Final = "removed because a client of the broker asked for it"
_AGED: Final = "past the age that the stream keeps"
_THOROUGH: Final = 16
"""Looks at the end of the log of which one finds out why nothing follows."""
_GATHERED_BYTES: Final = 1 << 20
"""Bytes of a batch of rows that were gathered, about."""
_GATHERED_WITHIN: Final = 64 << 20
"""Bytes of the log over which rows are gathered: the caller waits for the first of them."""
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
        """See LogReader.read(). segments, tail: of the stream's ring.

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
        self._looked = time.monotonic()
        self._epoch = 0
        self._idle = 0
        """Looks at the end of the log that found nothing since the caller asked."""
        self._why: Lost | None = None
        """Newest loss of the walk, until a batch is found after it."""
        self._last: MappedBatch | None = None
        self._schemas: Schemas | None = None
        """Versions of a typed stream's schema, once a batch needed one."""
        self._waiting: deque[Batch | MovedRecords | ReadingNotice | JournalCorrupt] = deque()
        """Batches, notices and errors to be handed over to the caller, in order."""
        self._gathering = Gathering(entry.number)
        """Few rows of many batches that become one batch; they come after all that waits."""
        self._gathered_lsn = 0
        """Position in the ring of the first of these rows' batches."""
        self._tables = ArrowTables()
        quiet = 0
        for _ in range(_ADVANCES_MAX):
            quiet = 0 if tail.advance() else quiet + 1
            if quiet == 2:
                break  # at the second look in vain later batches were asked, too
        self._turns = tail.turns
        self._floor = self._read_floor()
        """Offset below which no record is handed out: retention or a trim has removed it."""
        self._missing = missing(tail.stopped_lsn)
        stop = 0  # found out only where it matters
        bounded = request.until or entry.settings.max_records
        kind, *_ = request.start
        if bounded or kind != StartKind.EARLIEST or self._missing.newest:
            stop = self._next_offset(self._bound)
        self._missing_to = 0
        """Offset up to which records are known to have been in missing segments at the end."""
        if self._missing.newest and self._missing.next(entry.number) > stop:
            self._missing_to = stop = self._missing.next(entry.number)
        self._raise_floor(stop)
        self._until_lsn = self._bound if request.until else END
        self._end = min(END if request.end is None else request.end, stop if request.until else END)
        self._next = self._handed = self._begin(request.start, stop)
        """Offsets of the walk, and of the caller while something waits to be handed over."""
        self._go_to(self._next)

    # --- where it is ----------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Return where a later reader, mapped or linked, goes on after the last batch."""
        following = self._handed if self._waiting or len(self._gathering) else self._next
        return Position(self._entry.uuid, self._epoch, following)

    @property
    def _bound(self) -> int:
        """Return the position in the ring up to which this reading sees records."""
        tail = self._tail
        if self._request.visibility != "live":
            return min(tail.end_lsn, tail.synced_lsn)
        return tail.end_lsn

    def _next_offset(self, bound_lsn: int) -> int:
        """Return the offset after the stream's last record before a position in the ring."""
        number, tail = self._entry.number, self._tail
        if bound_lsn == tail.end_lsn and number in tail.nexts:
            return tail.nexts[number]
        return next_offset(self._segments, number, bound_lsn)

    def _begin(self, start: Start, stop: int) -> int:
        """Return the offset to begin with; stop: that after the last record there is.

        Raises LocalProtocolError `bad_start`: the start is of a kind that files do not tell.
        """
        kind, *arguments = start
        if kind == StartKind.EARLIEST:
            first = self._earliest()
            # With keep nothing is lost: what is missing from offset 1 on was replaced.
            if first > 0 and not self._entry.settings.keep:
                self._note(BegunNotice(first))
            return first
        if kind == StartKind.LATEST:
            return stop
        if kind == StartKind.OFFSET:
            return self._from_position(stop, *arguments)
        if kind == StartKind.AFTER_ID:
            message_id, *inclusive = arguments
            time_ms, offset = parse_message_id(message_id)
            following = offset if any(inclusive) else offset + 1
            if 0 < time_ms < self._entry.created_ms:
                return self._from_earlier_stream(following)
            return self._no_later_than(following, stop)
        if kind == StartKind.TIME:
            time_ms, inclusive = arguments
            return self._begin_of_moved(self._at_time(at_append_time, time_ms, inclusive, stop))
        if kind == StartKind.CLIENT_TIME:
            time_ms, inclusive = arguments
            found = self._at_time(at_client_time, time_ms, inclusive, stop)
            # Records that moved keep their client times: any of them may be of that time.
            return self._begin_of_moved(found, moved_may_fit=True)
        raise LocalProtocolError(
            "bad_start",
            "a reader of the files knows no cursors, and no last record of each subject: ask the"
            " broker for them with a client",
        )

    def _earliest(self) -> int:
        """Return the offset of the first record that is kept and not past the stream's age."""
        if self._entry.settings.keep:
            return 1
        lsn, first = begin_of(self._segments, self._entry.number, self._floor)
        if self._missing.oldest:
            first = min(first, self._missing.first(self._entry.number))
        return self._skip_aged(lsn, max(first, self._floor))

    def _begin_of_moved(self, found: int, *, moved_may_fit: bool = False) -> int:
        """Return 1 for an offset found by time, if records that have moved may be of that time.

        moved_may_fit: they may, whatever was found; otherwise only where that is the oldest offset.
        """
        first = max(begin_of(self._segments, self._entry.number, self._floor)[1], self._floor)
        moved = self._entry.settings.keep and first > 1
        return 1 if moved and (moved_may_fit or found <= first) else found

    def _from_position(self, stop: int, offset: int, epoch: int = 0, uuid: bytes = b"") -> int:
        """Return the offset to begin with, for a reader that stood at `offset`.

        uuid: of the stream that it read; empty: not told. Another stream of the name is read from
        its beginning. epoch: that of its last record, or 0; if a later epoch began before the
        offset, a power loss took records away there. stop: end of the stream. Where the reader
        begins before its offset, it gets a RewoundNotice.
        """
        if uuid and uuid != self._entry.uuid:
            return self._from_earlier_stream(offset)
        last = epoch_end(self._segments, self._entry.number, epoch) if epoch else END
        return self._no_later_than(offset, min(last, stop))

    def _from_earlier_stream(self, offset: int) -> int:
        """Return the beginning, with a RewoundNotice: `offset` is of another stream of the name."""
        first = self._earliest()
        self._note(RewoundNotice(offset, first, self._tail.epoch))
        return first

    def _no_later_than(self, offset: int, stop: int) -> int:
        """Return the offset, or `stop` if that comes before, with a RewoundNotice to the reader."""
        if offset > stop:
            self._note(RewoundNotice(offset, stop, self._tail.epoch))
        return min(offset, stop)

    def _at_time(
        self, find: Callable[..., int | None], time_ms: int, inclusive: bool, stop: int
    ) -> int:
        """Return the offset that a look-up by time finds; `stop`: none."""
        least = time_ms if inclusive else time_ms + 1
        # Records before the newest max_records are looked at: they are a gap, as to a subscription.
        floor = self._read_floor()
        found = find(self._segments, self._entry.number, floor, least, self._bound)
        return stop if found is None else found

    def _go_to(self, offset: int) -> None:
        """Go on at an offset, or at the first one after it that the log still has."""
        lsn, first = begin_of(self._segments, self._entry.number, offset)
        choose = None if self._plain else self._selection.choose
        self._steps: Iterator[Step] = iter(())
        # Rows come without their batch as copies alone.
        spots, known = self._selection.alone if choose and self._request.copy else (None, None)
        self._at = Walk(
            self._segments, self._entry.number, lsn, offset, choose=choose, spots=spots, known=known
        )  # fmt: skip
        if self._missing.oldest:
            kept = max(self._missing.first(self._entry.number), self._floor)
            self._lose(kept, "retention", _BOUNDS)
            self._lose(first, "damaged", self._missing.oldest)
        if max(first, self._floor) > self._next:
            self._lose(max(first, self._floor), "retention", _BOUNDS)

    @property
    def _plain(self) -> bool:
        return self._selection.everything and self._request.client_time is None

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
        waited = True
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
                waited = True
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
        following = min(batch.span()[1] if stamp.derived else stamp.next_offset, self._end)
        if isinstance(batch, MappedBatch):
            if waited and not batch.intact():
                begin = max(stamp.base_offset, self._handed)
                lost = list(self._losses(begin, following, "retention", _BOUNDS))
                self._waiting.extendleft(reversed(lost))
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
            self._waiting.appendleft(moved)
            self._epoch = batch.stamp.epoch
        return batch

    def _advance(self) -> bool:
        """Bring something to hand over, or the end, or more steps; False: nothing came."""
        for step in self._steps:
            if isinstance(step, Found):
                if not self._take(step):
                    self._steps = self._at.overtaken(step.segment.number, self._bound)
                    return True
            elif isinstance(step, Spotted):
                self._take_rows(step)
            elif isinstance(step, Passed):
                self._next = max(self._next, min(step.next, self._end))
                self._why = None
            else:
                # The stream may go on after `next` only: the reason lasts until a batch is found.
                self._why = step
                if step.next > self._next:
                    self._lose(step.next, step.code, step.reason)
            if self._next >= self._end:
                break
            if self._waiting:
                return True
        self._flush()
        if self._next < self._end and self._at.lsn < self._until_lsn:
            return bool(self._waiting) or self._renew()
        self._lose_newest()
        if self._next < self._end:
            if self._waiting:
                return True
            self._look()
        self._miss(self._end)
        self._closed = True
        return True

    def _take(self, found: Found) -> bool:
        """Take up the wanted rows of a batch; False: it was overwritten meanwhile.

        The position stays before such a batch: the walk is to go on where the ring is, and the loss
        that is named then begins with this batch.
        """
        stamp = found.stamp
        base, after = stamp.base_offset, min(stamp.next_offset, self._end)
        if base > self._next:
            self._miss(base)
        self._why = None
        if self._entry.settings.max_age_ms and stamp.append_time_ms < self._oldest_ms():
            self._lose_aged(stamp.lsn)
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
            self._lose(after, "damaged", str(error))
            return True
        if not found.segment.intact():
            return False
        if batch is not None:
            try:
                self._hand_in(batch)
            except Overwritten:
                return False
            except (BatchError, IndexError, ValueError) as error:
                self._lose(after, "damaged", str(error))
                return True
        self._next = max(self._next, after)
        return True

    def _hand_in(self, batch: MappedBatch) -> None:
        """Have a batch wait for the caller, as the request wants it. Raises as its methods."""
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
            self._lose_aged(spotted.lsn)
        first, end = max(self._next, self._floor), self._end
        rows = [row for row in spotted.rows if first <= row.offset < end]
        if rows:
            self._gather(rows, spotted.epoch, spotted.lsn)
        self._next = max(self._next, min(spotted.rows[-1].offset + 1, end))

    def _gather(self, rows: list[Row], epoch: int, lsn: int) -> None:
        """Put rows of one batch into the next gathered one."""
        gathering = self._gathering
        if not gathering.takes(rows[-1].offset, epoch):
            self._flush()
        if not len(gathering):
            self._gathered_lsn = lsn
        gathering.add(rows, epoch, lsn)
        if (
            len(gathering) >= ROWS_MAX
            or gathering.bytes >= _GATHERED_BYTES
            or lsn - self._gathered_lsn >= _GATHERED_WITHIN
        ):
            self._flush()

    def _flush(self) -> None:
        """Make a batch of the gathered rows: something else comes after them, or they are many."""
        found = self._gathering.take()
        if found is not None:
            self._waiting.append(Batch(Stamp.unpack(found.stamp), Content(found.content)))

    def _queue(self, item: Batch | MovedRecords | ReadingNotice | JournalCorrupt) -> None:
        if len(self._gathering):
            self._flush()
        self._waiting.append(item)

    def _schemas_with(self, number: int) -> Schemas | None:
        """Return the versions of the stream's schema; the newest ones when one is not known."""
        known = self._schemas
        if known is None or number not in known.versions:
            known = self._schemas = self._declared() or known
        return known

    def _declared(self) -> Schemas | None:
        """Return the versions of the stream's schema as of now; None: it is not typed."""
        self._catalogue.refresh()
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
        """Leave out records that the stream's max_records does not keep of those before `next`."""
        most = self._entry.settings.max_records
        self._floor = max(self._floor, next - most if most else 0)

    def _lose_aged(self, lsn: int) -> None:
        """Report the next records as one gap as far as they are past the stream's age."""
        young = self._skip_aged(lsn, self._next)
        if young > self._next:
            self._lose(young, "retention", _AGED)
            self._at.next = max(self._at.next, young)

    def _renew(self) -> bool:
        """Go on with batches written since the last look; False: there are none."""
        self._tail.advance(thorough=self._idle % _THOROUGH == 0)
        if self._tail.turns != self._turns:
            self._turns = self._tail.turns
            self._look()  # The ring of a stream that was removed is gone, too.
            stop = self._next_offset(self._tail.end_lsn)
            if self._next > stop:
                self._note(RewoundNotice(self._next, stop, self._tail.epoch))
                self._next = stop
            self._missing = NOTHING  # it was of the files before
            self._go_to(self._next)
        if self._at.lsn >= self._bound:
            self._idle += 1
            return self._lose_newest()
        self._idle = 0
        self._look_again(time.monotonic())
        self._floor = self._read_floor()
        if self._entry.settings.max_records:
            stream, lsn = self._entry.number, self._at.lsn
            self._raise_floor(next_from(self._segments, stream, lsn, self._next, self._bound))
        if self._floor > self._next:
            self._lose(self._floor, "retention", _BOUNDS)
        self._lose_aged(self._at.lsn)
        self._steps = self._at.run(self._bound)
        return True

    def _look_again(self, now: float) -> None:
        """Look once in a while at what became of the stream."""
        if now - self._looked >= _CATALOGUE_S:
            self._looked = now
            self._look()

    def _look(self) -> None:
        """Look at what became of the stream. Raises StreamRemoved, and ends the reading."""
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
        self._look_again(now)
        if deadline is not None and now >= deadline:
            raise Timeout(f"no record of '{self._entry.name}' came in time")
        time.sleep(POLL_S if deadline is None else min(POLL_S, deadline - now))

    def _read_floor(self) -> int:
        """Return the offset before which limits and removals left no record."""
        trims = read_mark(self._segments.storage, TRIMS_FILE, Trims)
        if trims is None or trims.ring != self._segments.uuid:
            return self._entry.trimmed
        return max(self._entry.trimmed, trims.first.get(self._entry.number, 0))

    def _miss(self, to_offset: int) -> None:
        """Report the offsets up to `to_offset` as lost: the walk found no batch of them."""
        why = self._why or Lost("damaged", "the batches are not in the ring")
        self._lose(to_offset, why.code, why.reason)

    def _lose(self, to_offset: int, code: str, reason: str) -> None:
        """Report the offsets up to `to_offset` as a gap, for this reason."""
        to_offset = min(to_offset, self._end)
        for item in self._losses(self._next, to_offset, code, reason):
            self._queue(item)
        self._next = max(self._next, to_offset)

    def _losses(
        self, begin: int, to_offset: int, code: str, reason: str
    ) -> Iterator[GapNotice | MovedRecords]:
        """Yield what the caller gets in place of the offsets [begin, to_offset)."""
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

    def _lose_newest(self) -> bool:
        """Report missing segments in which the log went on; False: there are none."""
        newest, self._missing = self._missing.newest, NOTHING
        if not newest:
            return False
        if self._missing_to:
            self._lose(self._missing_to, "damaged", newest)
        elif self._next < self._end or self._end != self._request.end:
            reason = f"{newest}; the log went on there, and nothing tells with which records"
            self._queue(JournalCorrupt(f"ring {self._entry.ring}", reason))
        return True

    def _note(self, notice: ReadingNotice) -> None:
        self._queue(notice)

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
        """Yield the records of copied batches, to the end. Raises as next_batch()."""
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
        self._flush()
        if self._waiting:
            self._next = self._handed
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
    return time.time_ns() // 1_000_000
