"""One subscription as the client sees it: covers, credit and what waits to be consumed.

Owns the position, the order of everything that arrived, and the credit given. The rule:
each delivery begins where the last one ended, or the broker is at fault; credit is
given back as records are consumed, never as they arrive. Source: SPEC.md, section 8.

Words: a cover is the range of offsets [from, next) that a command accounts for, whether or not
records of it were selected. An item is what waits to be consumed: an Arrival, which is a batch or
the end of a cover without records, or a notice. A rewind is the loss of the log's end in a power
failure of the broker: the reader goes back to where the log ends, and its epoch is a later one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from malamute_protocol.batch import Batch
from malamute_protocol.commands import (
    Cover,
    Deliver,
    Gap,
    Mode,
    Pattern,
    Rewound,
    Schema,
    Start,
    StartKind,
    Subscribe,
    Subscribed,
    Visibility,
)
from malamute_protocol.errors import MalamuteError, RemoteProtocolError
from malamute_protocol.limits import DEFAULT_LIMITS, Limits
from malamute_protocol.schema import Schemas
from malamute_py.client.position import Position, start_on_wire
from malamute_py.client.session.receiver import Opened
from malamute_py.client.session.unreadable import Unreadable, taken_in
from malamute_py.client.words import Until

CREDIT_RECORDS: Final = 1 << 17
CREDIT_BYTES: Final = 8 << 20
"""Records and bytes that a subscription takes in before it grants more."""

VISIBILITIES: Final[dict[str, int]] = {level.name.lower(): int(level) for level in Visibility}
"""Name of what a reader may see -> its number on the wire."""
_EARLIEST: Final = [int(StartKind.EARLIEST)]


class GapNotice(msgspec.Struct, frozen=True, gc=False):
    """Offsets [from_offset, to_offset) cannot be had any more; the code says why."""

    from_offset: int
    to_offset: int
    code: str
    reason: str = ""


class RewoundNotice(msgspec.Struct, frozen=True, gc=False):
    """The log ends before our position (a power loss took its tail): reading goes on at `to`."""

    from_offset: int
    to_offset: int
    epoch: int


class BegunNotice(msgspec.Struct, frozen=True, gc=False):
    """A reader from the earliest record begins at `offset`: all records before it were removed."""

    offset: int


class ModeNotice(msgspec.Struct, frozen=True, gc=False):
    """From `offset` on records come from the tail (live) or from the journal (on demand)."""

    live: bool
    offset: int


class PassedOverNotice(msgspec.Struct, frozen=True, gc=False):
    """The lease of records that a member of a group holds has ended: others get them.

    The member is given nothing more until it acknowledges something. offset: position of the group.
    """

    offset: int


Notice: TypeAlias = GapNotice | RewoundNotice | BegunNotice | ModeNotice | PassedOverNotice


class GapError(MalamuteError):
    """A strict subscription met a gap or a rewind; `notice` says which records are gone."""

    def __init__(self, notice: GapNotice | RewoundNotice) -> None:
        """notice: the loss."""
        super().__init__(
            f"offsets {notice.from_offset} to {notice.to_offset - 1} cannot be read: "
            f"{notice.code}" + (f" ({notice.reason})" if notice.reason else "")
            if isinstance(notice, GapNotice)
            else f"the log was rewound from {notice.from_offset} to {notice.to_offset}"
        )
        self.notice = notice


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """One batch that waits to be consumed, or, without one, the end of an empty cover."""

    batch: Batch | None
    next: int
    """The reader's position once the batch is consumed."""
    bytes: int


Item: TypeAlias = Arrival | Notice


class SubscribeOptions(msgspec.Struct, frozen=True):
    """Options of a subscription."""

    stream: str
    pattern: Pattern
    start: Start
    visibility: int = 0
    end: int = -1
    until: Until = ""
    client_time: tuple[int, int] | None = None
    create: bool = True
    whole: bool = False
    credit_records: int = CREDIT_RECORDS
    """Records that may wait in this client, unconsumed."""
    credit_bytes: int = CREDIT_BYTES
    """Bytes that may wait in this client, unconsumed."""


class SubscriptionState(Opened):
    """State of one subscription over all its links."""

    def __init__(self, number: int, request: SubscribeOptions) -> None:
        """number: of the subscription, unique in the session."""
        super().__init__(number, request.credit_records, request.credit_bytes)
        self.request = request
        self.inbox: deque[Item] = deque()
        """In the stream's order; take from it with take(), so that credit is given back."""
        self.live = False
        self.schemas: Schemas | None = None
        """Versions of the stream's declared schema; None: it has none, or is not known yet."""
        self.stream_uuid = b""
        self.epoch = 0
        self.first = 0
        self.tail = 0
        self.shortened = 0
        """Times that a link found a lower tail than the one before, without a rewind of ours."""
        self.end = request.end
        self.next = -1
        """Offset at which the next cover must begin; -1: not known yet."""
        self.consumed_next = -1
        """Offset after what was consumed; -1: not known yet."""
        self.held_records = 0
        """Received and not yet consumed."""
        self.held_bytes = 0
        self._rewinds: deque[tuple[bytes, int]] = deque()
        """(stream uuid, epoch) that hold before each RewoundNotice in the inbox."""
        self._before = (b"", 0)
        """(stream uuid, epoch) as they were before the last SUBSCRIBED."""
        self._taken: Arrival | None = None

    # --- the consumer's side -------------------------------------------------------------

    @property
    def position(self) -> Position | None:
        """Position after what was consumed, to go on from later; None: not accepted yet."""
        if self.consumed_next < 0:
            return None
        # An epoch beyond a rewind that was not consumed would make the old offset look like
        # one of the new log: a resume there would pass over what was written in its place.
        stream, epoch = self._rewinds[0] if self._rewinds else (self.stream_uuid, self.epoch)
        return Position(stream, epoch, self.consumed_next)

    @property
    def _received_to(self) -> Position:
        """Position after what was received, from which a new link goes on."""
        return Position(self.stream_uuid, self.epoch, self.next)

    def take(self) -> Item | None:
        """The next item, and the position moved past it; None: none yet.

        The credit of the item taken before is given back: asking for more is what
        shows that it was consumed.
        """
        if self._taken is not None:
            self.held_records -= len(self._taken.batch or ())
            self.held_bytes -= self._taken.bytes
            self._taken = None
        if not self.inbox:
            return None
        item = self.inbox.popleft()
        if isinstance(item, Arrival):
            self._taken = item
            self.consumed_next = item.next
        elif isinstance(item, GapNotice):
            self.consumed_next = item.to_offset
        elif isinstance(item, RewoundNotice):
            self.consumed_next = item.to_offset
            self._rewinds.popleft()
        return item

    def goes_on_from(self, offset: int) -> bool:
        """Whether the batch that comes next begins at an offset or after it, where a read ends."""
        item = self.inbox[0] if self.inbox else None
        if not isinstance(item, Arrival) or item.batch is None:
            return False
        return int(item.batch.offsets[0]) >= offset

    def take_back(self, batches: Sequence[Batch]) -> None:
        """Have the batches taken last come again: the call that gathered them has failed."""
        following = self.consumed_next
        for batch in reversed(batches):
            size = batch.stamp.size
            self.inbox.appendleft(Arrival(batch, following, size))
            self.held_records += len(batch)
            self.held_bytes += size
            following = int(batch.offsets[0])  # the batch before ends where this one begins
        if batches:
            # The least one: after a rewind the offsets of the first batch lie above.
            self.consumed_next = min(int(batch.offsets[0]) for batch in batches)

    def closed_at(self, position: Position | None) -> None:
        """Drop what waits, as the consumer has gone; the position stays where it was.

        position: the consumer's own, where it is amid a batch; None: after what it took.
        """
        if position is not None:
            self.consumed_next = position.next
        self.discard()

    def discard(self) -> None:
        """Drop what was received and not consumed, as the consumer has gone."""
        self.inbox.clear()
        self._taken = None
        self.held_records = self.held_bytes = 0

    # --- commands to the broker ------------------------------------------------------------

    @property
    def accepted(self) -> bool:
        """Whether the broker has accepted the subscription once."""
        return self.next >= 0

    def open(self) -> Subscribe:
        """Return SUBSCRIBE for a new link: as asked for, or from after the last record received."""
        asked = self.request
        self.active = False
        self._begin_credit()
        resumed = self.next >= 0
        return Subscribe(
            self.number,
            asked.stream,
            asked.pattern,
            start_on_wire(self._received_to) if resumed else asked.start,
            self._granted_records,
            self._granted_bytes,
            asked.visibility,
            self.end,
            # "tail" means the tail of the first SUBSCRIBED: later it is a plain end.
            "" if resumed else asked.until,
            asked.client_time,
            asked.create,
            asked.whole,
            gathered=True,  # Derived batches may hold rows of several batches.
        )

    def _credit_limits(self) -> tuple[int, int]:
        """Return how many records and bytes the broker may have sent on this link by now.

        Less than 0 where more waits here from earlier links than the credit.
        """
        asked = self.request
        return (
            self._received_records + asked.credit_records - self.held_records,
            self._received_bytes + asked.credit_bytes - self.held_bytes,
        )

    # --- commands from the broker ------------------------------------------------------------

    def receive(self, command: Any, frames: Sequence[Any], limits: Limits) -> None:
        """Take any command of the subscription but ENDED.

        Raises RemoteProtocolError: the command is not one for a subscription, or does not go on
        where the last one ended.
        """
        kind = type(command)
        if kind is Deliver:
            self.deliver(command, frames, limits)
        elif kind is Cover:
            self.cover(command)
        elif kind is Gap:
            self.gap(command)
        elif kind is Rewound:
            self.rewound(command)
        elif kind is Mode:
            self.mode(command)
        elif kind is Subscribed:
            self.subscribed(command)
        elif kind is Schema:
            self.note_schema(command)
        else:
            raise RemoteProtocolError("unexpected", f"{kind.__name__} for a subscription")

    def subscribed(self, command: Subscribed) -> None:
        """Take SUBSCRIBED; a resume that begins elsewhere than asked for queues a notice."""
        self.active = True
        self.live = False
        resumed = self.next >= 0
        another = resumed and command.stream != self.stream_uuid
        # For _rewind(): what the position of a consumer that has not come to the notice is of.
        self._before = (
            (self.stream_uuid, self.epoch) if resumed else (command.stream, command.epoch)
        )
        self.stream_uuid = command.stream
        self.epoch = command.epoch
        self.first = command.first
        former, self.tail = self.tail, command.tail
        self.schemas = Schemas(command.schemas) if command.schemas else None
        if command.end >= 0:
            self.end = command.end
        expected = self.next
        self.next = command.next
        if expected < 0:  # the first SUBSCRIBED
            self.consumed_next = command.next
            if command.next > command.begin and self.request.start[:1] == _EARLIEST:
                self.inbox.append(BegunNotice(command.next))
        elif command.next < expected or another:
            # The log, or another stream of the name, ends before the position.
            self._rewind(RewoundNotice(expected, command.next, command.epoch))
        else:
            if command.next > expected:  # records were overwritten while there was no link
                self.inbox.append(GapNotice(expected, command.next, "retention"))
            self.shortened += command.tail < former  # True counts as 1

    def deliver(
        self, command: Deliver, frames: Sequence[Any], limits: Limits = DEFAULT_LIMITS
    ) -> None:
        """Queue the batches of a delivery.

        One that came as it is stored and cannot be read, for the broker does not look into all of
        a batch, is a gap: it cannot come otherwise, and those around it are delivered.
        Raises RemoteProtocolError (BatchError among them): not contiguous, or not batches;
        nothing of it was queued.
        """
        self._check(command.from_, command.next, "DELIVER")
        batches, unreadable = taken_in(frames, command.rows, limits)
        ends = []  # position of the reader after each batch
        before = command.from_  # where the batch or the gap before ended
        for batch in batches:
            first, end = batch.span()
            if first < before or end > command.next:
                raise RemoteProtocolError(
                    "unexpected",
                    f"records {first} to {end} in what is left of a cover, "
                    f"[{before}, {command.next})",
                )
            ends.append(end)
            before = end
        if not batches and not unreadable:
            self._skip_to(command.next)
            return
        gaps = bool(unreadable)
        if not gaps:
            # Records between the last batch and the end of the cover were not selected.
            ends[-1] = command.next
        before = command.from_
        for index, (batch, end) in enumerate(zip(batches, ends, strict=True)):
            if gaps:
                first, _ = batch.span()
                self._pass_over_unreadable(unreadable, index, command, before, first)
                before = end
            size = batch.stamp.size
            self.inbox.append(Arrival(batch, end, size))
            self.held_records += len(batch)
            self.held_bytes += size
            self._received_records += len(batch)
            self._received_bytes += size
            self.epoch = max(self.epoch, batch.stamp.epoch)
        if self.schemas is not None:
            for batch in batches:
                batch.schemas = self.schemas
        if gaps:
            # Those after the last batch; then what was not selected up to the end of the cover.
            self._pass_over_unreadable(unreadable, len(batches), command, before, command.next)
            last = self.inbox[-1] if self.inbox else None
            if not isinstance(last, GapNotice) or last.to_offset < command.next:
                self._skip_to(command.next)
        self.next = command.next

    def _pass_over_unreadable(
        self, unreadable: list[Unreadable], index: int, command: Deliver, before: int, until: int
    ) -> None:
        """Queue a gap for each unreadable batch before the readable batch number `index`.

        unreadable: those that are left; the ones passed over are taken out. before, until: where
        the readable ones around them end and begin.
        """
        while unreadable and unreadable[0].readable_before <= index:
            found = unreadable.pop(0)
            # Consumed as it came: its credit is the broker's again.
            self._received_records += found.records
            self._received_bytes += found.size
            end = found.end(until)
            before = max(before, found.stamp.base_offset)
            if before < end:
                self.inbox.append(GapNotice(before, end, "damaged", found.reason))
                before = end

    def cover(self, command: Cover) -> None:
        """Pass over [from, next), of which nothing was selected. Raises RemoteProtocolError."""
        self._check(command.from_, command.next, "COVER")
        self._skip_to(command.next)

    def _skip_to(self, following: int) -> None:
        """Pass over offsets before `following`, of which nothing came, after what is queued."""
        self.next = following
        last = self.inbox[-1] if self.inbox else None
        if last is None:  # all was consumed: so is this
            self.consumed_next = following
        elif isinstance(last, Arrival):  # it moves the position further when it is consumed
            self.inbox[-1] = Arrival(last.batch, following, last.bytes)
        else:
            self.inbox.append(Arrival(None, following, 0))

    def gap(self, command: Gap) -> None:
        """Queue a notice of records that will not come.

        Raises RemoteProtocolError: it does not begin where the last command ended.
        """
        last = self.inbox[-1] if self.inbox else None
        if isinstance(last, GapNotice) and self.next == last.to_offset == command.to:
            self.inbox.pop()  # the same hole, told by SUBSCRIBED before it had a name
        else:
            self._check(command.from_, command.to, "GAP")
        self.next = command.to
        self.inbox.append(GapNotice(command.from_, command.to, command.code, command.reason))

    def rewound(self, command: Rewound) -> None:
        """Queue a notice that the log ends before the position that was asked for.

        SUBSCRIBED may have told the same before, by its `next`: the notice takes the place of that.
        """
        last = self.inbox[-1] if self.inbox else None
        if isinstance(last, RewoundNotice) and last.to_offset == command.to:
            self.inbox.pop()  # the same step back, seen at SUBSCRIBED
            self._rewinds.pop()
        elif isinstance(last, GapNotice) and last.to_offset == command.to:
            self.inbox.pop()  # the same, when retention has taken what both logs had
        self.next = command.to
        # Not lowered to command.epoch: the newer epoch may go on with covers alone, and a
        # resume that names the older one would be taken for a position beyond its end.
        self.epoch = max(self.epoch, command.epoch)
        self._rewind(RewoundNotice(command.from_, command.to, command.epoch))

    def _rewind(self, notice: RewoundNotice) -> None:
        """Queue a notice of a rewind, with the stream and epoch that were valid before it.

        A consumer that has not come to the notice has a `position` of those.
        """
        self.inbox.append(notice)
        self._rewinds.append(self._before)

    def mode(self, command: Mode) -> None:
        """Queue a notice that records come live from here on, or from history."""
        self.live = command.live
        self.inbox.append(ModeNotice(command.live, command.offset))

    def note_schema(self, command: Schema) -> None:
        """Take up a new version of the stream's schema."""
        self.schemas = with_version(self.schemas, command)

    def _check(self, begin: int, end: int, what: str) -> None:
        """Raise RemoteProtocolError unless a command goes on where the last one ended.

        what: the name of the command, for the error.
        """
        if begin != self.next:
            raise RemoteProtocolError(
                "unexpected",
                f"{what} of subscription {self.number} begins at {begin}, "
                f"the last one ended at {self.next}",
            )
        if end < begin:
            raise RemoteProtocolError(
                "unexpected", f"{what} of subscription {self.number} ends before it begins"
            )


def with_version(known: Schemas | None, command: Schema) -> Schemas:
    """Return the versions of a stream's schema with a new one; known: None: there were none."""
    if known is None:
        return Schemas([(command.id, command.schema)])
    return known.with_version(command.id, command.schema)


def cut(batch: Batch, first: int, end: int) -> Batch:
    """The delivered records [first, end) of a batch, counted among the delivered ones.

    For a reader that stops amid a batch, and goes on there later.
    """
    mask = np.zeros(batch.content.head.count, np.bool_)  # one a row of the batch: True: kept
    if batch.indices is None:  # all rows were delivered
        mask[first:end] = True
    else:
        mask[batch.indices[first:end]] = True
    return batch.with_rows(mask)
