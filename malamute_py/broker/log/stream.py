"""Streams at run time: positions, the hot window, and facts about the audience.

Owns the facts that the core keeps in memory of every stream beside the durable tables. The rules:
`next` moves only when the journal has appended, `first` only when it has trimmed or a TRIM is
durable; offsets are never given twice, not even by a stream in memory over a restart. Source:
docs/design.md (The core and its shell; Journal).

The hot window of a stream is its newest batches, in memory. An epoch is one run of the broker over
its log: offsets that a power loss took away are given again in a later one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sized
from itertools import islice
from typing import Any, Protocol

import msgspec

from malamute_protocol.commands import Level
from malamute_protocol.content import Content
from malamute_protocol.content_layout import BODY_KINDS
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.stamp import append_time_of
from malamute_py.broker.log.ledger import Ledger
from malamute_py.broker.log.newest import Keys
from malamute_py.broker.log.purges import NO_PURGES, Purges
from malamute_py.broker.log.ring import RingState
from malamute_py.broker.ready import StreamFacts
from malamute_py.changelog.records import StreamEdited
from malamute_py.changelog.settings import StreamSettings, versions
from malamute_py.changelog.tables import StreamRow

NEVER = 1 << 63
"""End of a reader that has none."""
TYPED = len(BODY_KINDS)
"""Body kind of a stream with a declared schema. No batch has it, so that the comparison which each
batch meets sends those of typed streams, and no others, to the comparison of schemas."""
BATCH_OVERHEAD = 2_000
"""Bytes that a batch in the hot window takes beside its content, about."""
HEADER_OVERHEAD = 300
"""Bytes that each distinct subject and field map of a batch takes besides."""
FIELDS_OVERHEAD = 10
"""Bytes that the field maps of a batch take besides for each byte of theirs: a field of 15 bytes,
its texts and its places in a map and a tuple, takes some 150."""


def headers_memory(content: Content) -> int:
    """Return about how many bytes a batch's header tables take in memory, once they were read."""
    head = content.head
    headers = head.subjects_count + head.fieldmaps_count
    return HEADER_OVERHEAD * headers + FIELDS_OVERHEAD * head.fieldmaps_bytes


class StampedBatch(msgspec.Struct, eq=False):
    """One appended batch in memory: the stamp, and the frame as the producer sent it."""

    stream: Stream
    stamp: bytes
    frame: Any
    content: Content
    base: int
    next: int
    size: int

    @property
    def memory(self) -> int:
        """Bytes that the batch takes in the hot window, about, with its header table."""
        return self.size + BATCH_OVERHEAD + headers_memory(self.content)


class AudienceFacts(Protocol):
    """Facts about the subscriptions and groups that read a stream."""

    @property
    def count(self) -> int:
        """Number of the subscriptions."""

    @property
    def live(self) -> int:
        """Number of the subscriptions that take batches as they come."""

    @property
    def durable(self) -> int:
        """Number of the subscriptions and groups that see only what is durable."""

    @property
    def patterns(self) -> int:
        """How many different patterns the subscriptions have."""

    @property
    def late(self) -> Sized:
        """Batches that live subscriptions get once their headers are matched; usually none."""

    def late_from(self, durable: bool, tail: int) -> int:
        """Return the offset before which live subscriptions were given everything.

        That is the tail, but while headers of a batch are still being matched, the batch's base.
        durable: of the subscriptions that get only what is durable.
        """

    def add_reader(self, wake: Callable[[], None], durable: bool) -> None:
        """Call this whenever there is more to read."""

    def remove_reader(self, wake: Callable[[], None], durable: bool) -> None:
        """Call this no longer."""


class Stream:
    """One stream at run time."""

    __slots__ = (
        "audience",
        "body_kind",
        "coming",
        "created_lsn",
        "edited",
        "epochs",
        "first",
        "handed",
        "hot",
        "keys",
        "last_time_ms",
        "ledger",
        "level",
        "lost_before",
        "name",
        "next",
        "number",
        "pinned",
        "purges",
        "removed",
        "ring",
        "row",
        "schemas",
        "trim_asked",
        "uuid",
        "visible_next",
    )

    def __init__(
        self, row: StreamRow, ring: RingState, facts: StreamFacts | None, audience: AudienceFacts
    ) -> None:
        """facts: what the journal has of the stream; None: nothing, since the stream is new."""
        self.row = row
        self.number = row.number
        self.name = row.name
        self.uuid = row.uuid
        self.ring = ring
        self.audience = audience
        self.created_lsn = 0
        """LSN of the creation in ring main; a ring of the stream's own takes nothing before it is
        visible."""
        # Where the last record of each subject is kept, revision 0 says that there is no such key.
        begin = 1 if row.settings.keep else 0
        self.next = max(begin, facts.next) if facts else begin
        """Offset of the next record: the end, or tail, of the stream."""
        kept = max(begin, facts.first) if facts else begin
        self.first = max(kept, min(row.trimmed, self.next))
        """Offset of the first record; the journal may still have some before it (`kept`)."""
        self.handed = self.next
        """The next offset after the batches that the journal was handed."""
        self.coming = 0
        """Records of atomic steps that were taken and not yet appended: a cursor may move to
        them."""
        self.visible_next = self.next
        """Offset after the newest record that no power loss can take back."""
        self.epochs: list[tuple[int, int]] = list(facts.epochs) if facts else []
        """(epoch, first offset that was written in it), ascending."""
        self.last_time_ms = max(facts.last_time_ms if facts else 0, row.created_ms)
        """Append time before which no record follows, be the ring new and the clock set back: a
        message id from before the creation counts as one of an earlier stream."""
        self.lost_before = 0
        """Records before this offset were in memory only, and are gone with an earlier run."""
        self.hot: deque[StampedBatch] = deque()
        """The hot window: its newest batches in memory, the oldest first."""
        self.removed = False
        self.trim_asked = kept
        """Offset before which the journal was asked to drop the records."""
        self.purges = Purges(row.purges) if row.purges else NO_PURGES
        """Records that were purged by subject, by marks that are durable."""
        self.pinned = NEVER
        """Offset from which on retention leaves all records, whatever their age and number: the
        least position of a cursor that pins (holds back) them; NEVER: none does."""
        self.ledger = Ledger(kept, self.next, facts.bytes if facts else 0)
        self.ledger.trimmed(self.first)
        self.keys = Keys(self.next, ready=self.first == self.next) if row.settings.keep else None
        """The newest record of each subject; None: the stream does not keep it."""
        self.edited: StreamSettings | None = None
        """Settings that are on their way into the log: the next edit begins from them."""
        self.level = 0
        self.body_kind = -1
        """Number of the bodies' kind; -1: the first batch settles it; TYPED: see there."""
        self.schemas: dict[int, bytes] = {}
        """Id -> message of the versions of the declared schema, oldest first; mostly none."""
        self.settle(row.settings)

    def settle(self, settings: StreamSettings) -> None:
        """Apply settings: those that the stream begins with, or that an edit has changed."""
        self.level = int(Level[settings.level.upper()])
        self.body_kind = BODY_KINDS.index(settings.body_kind or "blob")
        if not settings.body_kind and not settings.keep:
            self.body_kind = -1  # The first batch settles it; with keys it is `blob` unless named.
        self.schemas = versions(settings)
        if self.schemas:
            self.body_kind = TYPED

    def settling(self, kind: int, now_ms: int) -> StreamEdited | None:
        """Return the change that tells the log the body kind, which the first batch has settled.

        kind: the batch's. None: the step with that batch was refused after all, so that another
        batch may settle another kind.
        """
        if self.body_kind != kind:
            return None
        settings = msgspec.structs.replace(self.settings, body_kind=BODY_KINDS[kind])
        return StreamEdited(self.number, settings, now_ms)

    @property
    def settings(self) -> StreamSettings:
        """Settings as the change log has them."""
        return self.row.settings

    def needed_keys(self) -> Keys:
        """Return the stream's keys. Raises BrokerRefused `unsupported`: it keeps none."""
        if self.keys is None:
            raise BrokerRefused(
                "unsupported", f"stream '{self.name}' has no keys: it was made without keep"
            )
        return self.keys

    @property
    def newest_ms(self) -> int:
        """When the newest record was appended, for STREAM_INFO; 0: none ever was."""
        # `last_time_ms` begins as the time of creation; a first record may have that time, too.
        had_any = self.epochs or self.last_time_ms > self.row.created_ms
        return self.last_time_ms if had_any else 0

    @property
    def begin(self) -> int:
        """First offset at which a reader may stand; records before `first` may have moved."""
        return self.first if self.keys is None else 1

    def first_to_read(self, now_ms: int) -> int:
        """First offset that a reader is told of: with keys 1, since any record may have moved."""
        return self.first_at(now_ms) if self.keys is None else 1

    @property
    def bounded(self) -> bool:
        """Whether records go out of bounds by their age or number alone."""
        return bool(self.settings.max_age_ms or self.settings.max_records)

    @property
    def hot_first(self) -> int:
        """Offset of the oldest record in the hot window; `next` when it is empty."""
        return self.hot[0].base if self.hot else self.next

    def oldest_ms(self, now_ms: int) -> int:
        """Append time before which records are too old for the stream; 0: none is."""
        max_age_ms = self.settings.max_age_ms
        return now_ms - max_age_ms if max_age_ms else 0

    def first_at(self, now_ms: int) -> int:
        """First offset that is neither gone nor beyond the stream's bounds of records and age.

        The age is looked for in the hot window: the journal tells it of what is older, where that
        is read.
        """
        past = max(self.first_of_newest(self.next), self.first_of_age(now_ms))
        return max(self.first, min(past, self.pinned))

    def first_of_age(self, now_ms: int) -> int:
        """First of the records in the hot window that the stream keeps by its age; 0: all.

        Batches are in the order of their append times, so that the first young one is searched.
        """
        oldest_ms, hot = self.oldest_ms(now_ms), self.hot
        if not oldest_ms or not hot or _append_time(hot[0]) >= oldest_ms:
            return 0
        place = bisect_left(hot, oldest_ms, key=_append_time)
        return hot[place].base if place < len(hot) else hot[-1].next

    def is_past(self, batch: StampedBatch, now_ms: int) -> bool:
        """Whether a batch begins with records that are gone or beyond the stream's bounds.

        Live delivery asks, of a batch that became durable late or waited for its matching: if so,
        its subscriptions fall back to delivery on demand, which leaves such records out and tells
        of the gap. The batch may have left the hot window, where alone first_at() looks for ages:
        so its own age is compared, too.
        """
        old = _append_time(batch) < self.oldest_ms(now_ms) and batch.base < self.pinned
        return old or batch.base < self.first_at(now_ms)

    def first_of_newest(self, end: int) -> int:
        """First offset that the stream keeps by `max_records` when it ends at `end`; 0: all."""
        most = self.settings.max_records
        return max(0, end - most) if most else 0

    def aged_bytes(self, first: int) -> int:
        """Bytes before the first record within the stream's bounds that still take space, about.

        For what an operator is told of a stream: records that are past its bounds, and that the
        journal has not dropped yet. first: offset of that first record. The number is exact where
        the record is in the hot window, whose batches are weighed one by one.
        """
        if not self.bounded:
            return 0
        if first < self.hot_first or not self.hot:
            return self.ledger.bytes_before(first)
        kept = 0
        for batch in islice(self.hot, self.hot_place(first), None):
            rows = max(0, batch.next - max(batch.base, first))
            kept += batch.size * rows // (batch.next - batch.base)
        return max(0, self.ledger.bytes - kept)

    def hot_place(self, offset: int) -> int:
        """Index in the hot window of the batch that holds an offset, or of the batch after it."""
        return max(0, bisect_right(self.hot, offset, key=_base) - 1)

    def epoch_at(self, offset: int) -> int:
        """Return the epoch in which the record at an offset was written, to confirm a retry."""
        found = self.epochs[0][0] if self.epochs else 0  # Of records before the oldest known one.
        for epoch, first in self.epochs:
            if first > offset:
                break
            found = epoch
        return found

    def epoch_end(self, epoch: int, tail: int) -> int:
        """Offset at which the records of an epoch, and of those before it, end.

        For positions that clients bring with the epoch in which they learnt them. A position of
        that epoch beyond its end is one that a power loss took away: the records there now are
        others.
        """
        for later, first in self.epochs:
            if later > epoch:
                return first
        return tail

    def position_end(self, epoch: int) -> int:
        """Offset at which positions of an epoch end now; 0: nothing is known of it."""
        return self.epoch_end(epoch, self.next) if epoch else self.next

    def begin_epoch(self, epoch: int) -> None:
        """Note that records of this epoch begin at `next`; a second call costs nothing."""
        if not self.epochs or self.epochs[-1][0] != epoch:
            self.epochs.append((epoch, self.next))


def _append_time(batch: StampedBatch) -> int:
    return append_time_of(batch.stamp)


def _base(batch: StampedBatch) -> int:
    return batch.base
