"""One atomic step: what a caller puts together.

Owns the parts of a step, and what they have in hand until the step is over. The rules: contents of
the same place are gathered row by row, and records for one stream, messages of one mailbox and
replies to one request keep the order of the calls; what a step acknowledges is its caller's again
when the step is not taken. Source: SPEC.md, section 4.8.

Words: a part leaves as one command; its rows are records, messages, requests, replies, moves or
numbers to acknowledge. A place is what its rows must agree in, a tuple that begins with the kind of
the part: (PUBLISH, stream), for instance. A form is a place with the packing of the bodies (codec,
lists). A holder is the inbox, offer or membership by which something was handed out; it lends the
numbers to the step, so that no other call acknowledges them meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, repeat
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from malamute_protocol.address import NAME_BYTES_MAX
from malamute_protocol.batch import Record
from malamute_protocol.commands import Command, Level, WorkState
from malamute_protocol.errors import BrokerRefused, LocalProtocolError, MalamuteError
from malamute_protocol.pattern import Pattern
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.client.arguments import (
    NAMES,
    column_of,
    duration,
    integer,
    key_of,
    later_of,
    name_of,
    priority_of,
    reason_of,
    several,
    text,
    truth,
    wrong,
)
from malamute_py.client.position import Confirmation, Position, start_on_wire
from malamute_py.client.session.acknowledgements import AckForm
from malamute_py.client.session.calls import (
    ZERO,
    Bodies,
    Body,
    Fields,
    Properties,
    Time,
    content_count,
    make_row,
    purge_pattern,
    request_terms,
)
from malamute_py.client.session.lanes import OVER
from malamute_py.client.session.outgoing_records import stamped_as
from malamute_py.client.session.publisher import level_number
from malamute_py.client.session.requests import PLAIN
from malamute_py.client.session.rows import ROW_BYTES, OutgoingRow
from malamute_py.client.words import ConfirmAt

PUBLISH, SEND, REQUEST, REPLY, ACK, MOVE, CONTENT, TRIM, PURGE, COMMAND = range(10)
"""Kinds of parts. CONTENT: records that came encoded; COMMAND: a command as it is."""
STAGE, STAGE_CONTENT = range(10, 12)
"""Kinds for records of a transaction: staged by the broker rather than published."""
_packing: Final = attrgetter("packing")
Place: TypeAlias = tuple[Any, ...]
"""Facts that parts must share to be one: first the kind, then all of the command but its rows."""


class Holder(Protocol):
    """An inbox, offer or membership, which holds what was delivered under its number."""

    number: int

    def ack_command(self, form: AckForm, ranges: list[tuple[int, int]], tracker: int) -> Command:
        """Return the command that acknowledges these numbers."""

    def lend(self, numbers: list[int]) -> None:
        """Give numbers in hand to a step; no other call acknowledges them meanwhile.

        Raises BrokerRefused `not_held`: nothing was given.
        """

    def settled(self, numbers: list[int]) -> None:
        """Forget numbers that a step has acknowledged."""

    def regained(self, numbers: list[int]) -> None:
        """Take numbers back into hand from a step that was not taken."""

    def lost_to_others(self, numbers: list[int]) -> None:
        """Take note that a step was refused as this client does not hold some of these numbers."""

    def give_back(self, numbers: list[int]) -> None:
        """Have the broker hand out numbers again that a step took and that no program knows of.

        Called after regained() when no caller waits for the outcome of the step
        (Step.give_back_untold).
        """


class HandedOut(Protocol):
    """One message, request or record in hand."""

    @property
    def opened(self) -> Any:
        """Return the Holder that it was handed out by."""

    @property
    def number(self) -> int:
        """Return the number of the message or request, or the offset of the record."""


class HandedOutRequest(HandedOut, Protocol):
    """One request in a worker's hand."""

    @property
    def sender(self) -> str:
        """Return who sent it."""

    @property
    def reply_to(self) -> str:
        """Return the mailbox of its replies."""


class HandedOutTogether(Protocol):
    """Messages in hand that were sent together."""

    @property
    def opened(self) -> Any:
        """Return the Holder that they were handed out by."""

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of the messages."""


InHand: TypeAlias = HandedOut | HandedOutTogether | Record
"""Hand-out that a step acknowledges: mail, a request, a record of a group, or a batch of these."""


class Move(NamedTuple):
    """Move of a cursor."""

    next: int
    since: int = -1
    """Offset at which it must stand until now; -1: anywhere before."""
    uuid: bytes = b""
    epoch: int = 0
    force: bool = False


class StepRequest:
    """A request that a step makes: how its replies name it, known once the step has left."""

    __slots__ = ("key", "row")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.row = 0

    @property
    def about(self) -> tuple[bytes, int]:
        """Return (key of the request's batch, its row), as `about` of a reply has it."""
        return self.key, self.row


class Step:
    """The parts of one step, in the order of the calls."""

    __slots__ = (
        "confirmation",
        "count",
        "first",
        "key",
        "lent",
        "level",
        "merge_limited",
        "mixed",
        "newest",
        "parts",
        "size",
        "state",
        "token",
        "untold",
    )  # fmt: skip

    def __init__(self, confirm: ConfirmAt = "default", key: bytes = b"") -> None:
        """confirm: "synced" (the default), or "stored". key: the caller's own name for the step.

        Under a key the broker takes it once; empty: one is drawn when it leaves.
        Raises LocalProtocolError: neither of these levels, or a key that is too long.
        """
        self.level = level_number(confirm)
        if self.level == Level.NONE:
            raise LocalProtocolError("bad_setting", "a step is confirmed: 'synced' or 'stored'")
        self.key = key_of(key) if type(key) is not bytes or key else key  # b"" needs no check
        self.parts: dict[Place, list[Any]] = {}
        """Rows of each part by its place, in the order in which the parts leave."""
        self.size = 0
        """Bytes of the contents, about."""
        self.count = 0
        """Records, and numbers that are acknowledged."""
        self.merge_limited = False
        """Whether the step moves a cursor, or has a request with a name of the caller's or an
        encoded content: not every step may share a batch with it."""
        self.newest: dict[Place, tuple[Place, Place]] = {}
        """Place of plain rows -> form and place of the newest part beside it; empty: the step has
        plain rows only."""
        self.mixed = False
        """Whether the order of its parts matters: rows of several forms go to one place, or replies
        come before what ends their requests."""
        self.lent: list[tuple[Holder, list[int]]] = []
        """Holders and the numbers that they have lent to the step."""
        self.untold: list[tuple[Holder, list[int]]] = []
        """Holders and numbers that its caller has again, who is about to be told so."""
        self.state = OPEN
        self.token: Any = None
        """Object at which the caller waits for the outcome; None: none does."""
        self.first = -1
        """Row of its first record in the first content of what it was merged into; -1: it
        has none there."""
        self.confirmation: Confirmation | None = None
        """Once the step was taken."""

    # --- contents ----------------------------------------------------------------------------

    def publish(
        self,
        stream: str,
        body: Body,
        *,
        subject: str | Sequence[str] = "",
        fields: Fields | None = None,
        client_time_ms: Time | None = None,
        expires_at_ms: Time | None = None,
        properties: Properties | None = None,
        codec: str | None = None,
    ) -> None:
        """Add a record for a stream. Raises LocalProtocolError: an argument is wrong."""
        # Names in NAMES were found good before: a look-up costs less than the check.
        if type(stream) is not str or stream not in NAMES:
            name_of("stream", stream)
        row = make_row(
            body, subject, fields, client_time_ms, expires_at_ms, properties, None, codec
        )
        self._add((PUBLISH, stream), row)

    def publish_many(
        self,
        stream: str,
        bodies: Bodies,
        *,
        subject: str | Sequence[str | Sequence[str]] = "",
        subjects: Sequence[str | Sequence[str]] | None = None,
        fields: Fields | Sequence[Fields | None] | None = None,
        client_time_ms: int | Sequence[int | None] | None = None,
        expires_at_ms: int | Sequence[int | None] | None = None,
        properties: Properties | Sequence[Properties | None] | None = None,
        codec: str | None = None,
    ) -> None:
        """Add records for a stream; what is given as a sequence has one value a record.

        Raises LocalProtocolError: the columns differ in length, or a body is none.
        """
        name_of("stream", stream)
        rows = rows_of_columns(
            bodies, subject, subjects, fields, client_time_ms, expires_at_ms, properties, codec
        )
        for row in rows:
            self._add((PUBLISH, stream), row)

    def add_rows(self, stream: str, rows: Sequence[OutgoingRow], size: int) -> None:
        """Add rows to a transaction's chunk. size: their bytes, with ROW_BYTES for each."""
        self.check_open()
        for packing, some in groupby(rows, _packing):  # runs of one packing, in order
            place: Place = (PUBLISH, stream)
            if packing is not None or self.newest:  # as _add() does it for one row
                place = self._place_in_order(place, place if packing is None else (*place, packing))
            self.parts.setdefault(place, []).extend(some)
        self.size += size
        self.count += len(rows)

    def publish_batch(self, stream: str, content: bytes, *, typed: bool = False) -> None:
        """Add records for a stream, as one content that malamute_protocol.batch encoded.

        typed: the stream must have a declared schema, and is not created. The step is merged with
        no other. Raises LocalProtocolError: the content is no batch, or has a producer.
        """
        name_of("stream", stream)
        count = content_count(content)
        producer_id, _, _ = stamped_as(content)
        if producer_id:
            raise LocalProtocolError("bad_batch", "a content in a step has no producer")
        self.check_open()
        # By the number no other content has its place: it is a part of its own.
        place = CONTENT, stream, typed, len(self.parts)
        self.parts[place] = [content]
        self.newest[PUBLISH, stream] = place, place  # rows that follow begin a part after it
        self.size += len(content) + STAMP_BYTES
        self.count += count
        self.merge_limited = True

    def send(
        self,
        mailbox: str,
        body: Body,
        *,
        subject: str | Sequence[str] = "",
        fields: Fields | None = None,
        properties: Properties | None = None,
        codec: str | None = None,
        expires_at_ms: Time | None = None,
        deliver_at_ms: Time = 0,
        priority: int = 0,
    ) -> None:
        """Add a message for a mailbox. Raises LocalProtocolError: an argument is wrong."""
        # What most callers leave out costs them only this comparison, and no call.
        if type(mailbox) is not str or mailbox not in NAMES:
            name_of("mailbox", mailbox)
        if type(deliver_at_ms) is not int or deliver_at_ms:
            deliver_at_ms = later_of("deliver_at_ms", deliver_at_ms)
        if type(priority) is not int or priority:
            priority = priority_of(priority)
        row = make_row(body, subject, fields, None, expires_at_ms, properties, None, codec)
        self._add((SEND, mailbox, deliver_at_ms, priority), row)

    def request(
        self,
        service: str,
        body: Body,
        *,
        subject: str | Sequence[str] = "",
        fields: Fields | None = None,
        properties: Properties | None = None,
        codec: str | None = None,
        expires_at_ms: Time | None = None,
        reply_to: str = "",
        timeout_ms: int = 0,
        key: bytes = b"",
        need_workers: bool = False,
        delay_ms: int = 0,
        priority: int = 0,
    ) -> StepRequest:
        """Add a request for a service, whose replies come as mail to `reply_to`.

        Requests that agree in service, reply_to, timeout_ms, key and terms keep the order of the
        calls; one that differs in them may stand before or after these in the queue.
        reply_to: empty: the own mailbox. key: the caller's own name for it; else one is drawn.
        need_workers: the step is refused `no_workers` when no worker offers the service.
        delay_ms: time before which no worker gets the request; timeout_ms begins after it.
        priority: as in client.request().
        Returns what names it in its replies. Raises LocalProtocolError as send().
        """
        if type(service) is not str or service not in NAMES:
            name_of("service", service)
        if type(reply_to) is not str or reply_to:
            text("reply_to", reply_to, NAME_BYTES_MAX)
        if type(timeout_ms) is not int or timeout_ms:
            timeout_ms = duration("timeout_ms", timeout_ms)
        if type(key) is not bytes or key:
            key = key_of(key)
            self.merge_limited = True
        asked = StepRequest(key)  # the row's token, to which the encoder gives the key and row
        row = make_row(body, subject, fields, None, expires_at_ms, properties, asked, codec)
        terms = PLAIN
        # By identity: an array, for one, cannot be asked whether it is 0.
        if need_workers is not False or delay_ms is not ZERO or priority is not ZERO:
            terms = request_terms(need_workers, delay_ms, priority)
        self._add((REQUEST, service, reply_to, timeout_ms, key, terms), row)
        return asked

    def reply(
        self,
        request: HandedOutRequest,
        body: Body,
        *,
        last: bool = True,
        subject: str | Sequence[str] = "",
        fields: Fields | None = None,
        properties: Properties | None = None,
        codec: str | None = None,
        expires_at_ms: Time | None = None,
    ) -> None:
        """Add an answer to a worker's request in hand. last: it completes the request.

        Raises BrokerRefused `not_held`: the request is another worker's, or has its end; or
        LocalProtocolError as send().
        """
        truth("last", last)
        _of_a_worker(request)
        row = make_row(
            body, subject, fields, None, expires_at_ms, properties, request.number, codec
        )
        if last:
            self._lend(request.opened, [request.number])
        parts = len(self.parts)
        self._add((REPLY, request.opened, last, request.reply_to, request.sender), row)
        if not last and len(self.parts) > parts:
            # A new part, at the end. What ends a request, in whatever part, comes after the replies
            # that others follow: all parts but those replies move behind it.
            self.mixed = True
            for place in list(self.parts):
                kind, *facts = place
                if kind == REPLY:
                    _opened, ends_request, *_ = facts
                    if not ends_request:
                        continue
                self.parts[place] = self.parts.pop(place)  # now it is the last one

    # --- acknowledgements -----------------------------------------------------------------------

    def complete(self, request: HandedOutRequest) -> None:
        """Complete a request in hand without a (further) reply. Raises BrokerRefused `not_held`."""
        _of_a_worker(request)
        self._acknowledge(request, AckForm(WorkState.COMPLETED, 0))

    def fail(self, request: HandedOutRequest, reason: str = "") -> None:
        """Make a request in hand a dead letter. Raises BrokerRefused `not_held`."""
        _of_a_worker(request)
        self._acknowledge(request, AckForm(WorkState.FAILED, 0, reason_of(reason)))

    def ack(self, held: InHand) -> None:
        """Have mail, a record of a group, or a batch of these count as done.

        Raises BrokerRefused `not_held`, LocalProtocolError: it came from no inbox or group.
        """
        self._acknowledge(held, AckForm())

    def nack(self, held: InHand, delay_ms: int = 0) -> None:
        """Give mail, a record of a group, a batch of these, or a request back, to come again.

        delay_ms: milliseconds until it is delivered again. Raises as ack().
        """
        state = WorkState.RETURNED if _is_request(held) else 0
        self._acknowledge(held, AckForm(state, duration("delay_ms", delay_ms)))

    def _acknowledge(self, held: Any, form: AckForm) -> None:
        """Add the numbers of a message, request, record or batch to what the step acknowledges.

        form: what becomes of them: done, failed, or given back. Raises BrokerRefused `not_held`, or
        LocalProtocolError: nothing of the kind was handed over.
        """
        batch = getattr(held, "batch", held)  # a record of a group knows its holder by its batch
        opened = getattr(held, "opened", None) or getattr(batch, "opened", None)
        if opened is None:
            raise LocalProtocolError(
                "unexpected",
                f"{held!r} came from no inbox, worker or group: nothing to acknowledge",
            )
        numbers = getattr(held, "numbers", None)
        if numbers is None:
            # Mail and requests have a number, records of a group an offset, for which a membership
            # has another number if it was rewound.
            numbers = [held.number] if hasattr(held, "number") else batch.known([held.offset])
        self._lend(opened, numbers)
        self.parts.setdefault((ACK, opened, form), []).extend(numbers)
        self.count += len(numbers)

    def _lend(self, holder: Holder, numbers: list[int]) -> None:
        """Have a holder lend numbers to the step, which acknowledges them.

        Raises BrokerRefused `not_held`: it does not hold one of them, and none was lent.
        """
        self.check_open()
        holder.lend(numbers)
        self.lent.append((holder, numbers))

    # --- cursors ------------------------------------------------------------------------------

    def move_cursor(
        self,
        stream: str,
        cursor: str,
        next: int | Position,
        *,
        since: int | None = None,
        force: bool = False,
    ) -> None:
        """Move a cursor to `next`: an offset, or a subscription's position.

        since: offset where the cursor must stand until now: the step is refused `conflict` when
        another client has moved it. Without it any offset before `next` will do. force: any at all.
        Raises LocalProtocolError: the step moves this cursor already.
        """
        self.check_open()
        name_of("stream", stream)
        name_of("cursor", cursor)
        moved = (MOVE, stream, cursor)
        if moved in self.parts:
            raise LocalProtocolError("conflict", f"the step moves cursor {cursor!r} already")
        before = -1 if since is None else integer("since", since, -1, code="bad_start")
        truth("force", force)
        if isinstance(next, Position):
            # With the stream's epoch and uuid the broker refuses a position in a lost log.
            _, following, epoch, uuid = start_on_wire(next)
            move = Move(following, before, uuid, epoch, force)
        else:
            move = Move(integer("next", next, 0, code="bad_start"), before, force=force)
        self.parts[moved] = [move]
        # A step that is to be merged with this one might move the same cursor.
        self.merge_limited = True

    # --- removal ------------------------------------------------------------------------------

    def trim(self, stream: str, before: int | Position) -> None:
        """Remove a stream's records before an offset, or before a subscription's position.

        The identity needs the permission `trim`. The step is refused `bad_start` when the stream
        ends before it.
        """
        offset, epoch, uuid = self._removing(stream, before)
        self.parts.setdefault((TRIM, stream, epoch, uuid), []).append(offset)

    def purge(self, stream: str, pattern: str | Pattern, before: int | Position) -> None:
        """Remove the records of some subjects before an offset, or a subscription's position.

        pattern: on subjects; a str is a topic, and "" refused. Needs the permission `trim`. The
        step is refused `limit` when too many purges of the stream still hide records.
        """
        offset, epoch, uuid = self._removing(stream, before)
        wanted = tuple_of(purge_pattern(pattern))  # a list could not be part of a key
        self.parts.setdefault((PURGE, stream, epoch, uuid, wanted), []).append(offset)

    def _removing(self, stream: str, before: int | Position) -> tuple[int, int, bytes]:
        """Return (offset, epoch, uuid) before which trim() or purge() removes records.

        epoch and uuid of the stream: 0 and empty, where the caller named an offset alone.
        """
        self.check_open()
        name_of("stream", stream)
        if isinstance(before, Position):
            _, offset, epoch, uuid = start_on_wire(before)
            return offset, epoch, uuid
        return integer("before", before, 0, code="bad_start"), 0, b""

    def _add(self, place: Place, row: OutgoingRow) -> None:
        """Add a row to the part for its place; each part leaves as one command."""
        if self.state != OPEN:
            self.check_open()
        if row.packing is not None or self.newest:  # rare: a part has rows of one packing
            form = place if row.packing is None else (*place, row.packing)
            place = self._place_in_order(place, form)
        rows = self.parts.get(place)
        if rows is None:
            self.parts[place] = [row]
        else:
            rows.append(row)
        self.size += row.size + ROW_BYTES
        self.count += 1

    def _place_in_order(self, plain: Place, form: Place) -> Place:
        """Return the place for a row of a form: the newest part, if it has that form, or a new one.

        plain: the place without a packing. A row in an older part would leave before rows that were
        added earlier. A step with several parts of one place is `mixed`: it shares no batch with
        others, whose rows would join an older part.
        """
        newest, place = self.newest.get(plain, (plain, plain))
        if newest != form:
            place = form
            if plain in self.newest or plain in self.parts:
                # By the number it is a further part, beside an older one of the same form.
                place = *form, len(self.parts)
                self.mixed = True
        self.newest[plain] = form, place
        return place

    def check_open(self) -> None:
        """Raise LocalProtocolError unless parts may still be added."""
        if self.state != OPEN:
            raise LocalProtocolError("unexpected", "the step was committed or given up already")

    def give_up(self) -> None:
        """Give up a step that was not committed: nothing of it happens; holders get all back."""
        if self.state == OPEN:
            self.state = OVER
            self.regain()

    def regain(self, error: MalamuteError | None = None) -> None:
        """Give the numbers back to the holders that lent them: the step is not taken.

        error: why; after `not_held` some of the numbers are others', as each holder is told.
        """
        not_held = isinstance(error, BrokerRefused) and error.code == "not_held"
        for holder, numbers in self.lent:
            holder.regained(numbers)
            if not_held:
                holder.lost_to_others(numbers)
        self.lent = []

    def end_untaken(self, error: MalamuteError | None = None) -> None:
        """End the step, of which the broker has taken nothing and will take nothing.

        A caller that waits is told so, and has again what the step took from readers. Where none
        waits, no program knows that the readers hold it: it goes back to the broker.
        """
        self.state = OVER
        self.untold = self.lent
        self.regain(error)
        if self.token is None:
            self.give_back_untold()

    def give_back_untold(self) -> None:
        """Give numbers back to the broker that the holders have again: no caller is told so.

        Called when the caller that was to be told has stopped waiting.
        """
        for holder, numbers in self.untold:
            holder.give_back(numbers)
        self.untold = []

    def settle(self) -> None:
        """Have the holders forget what the step has acknowledged."""
        for holder, numbers in self.lent:
            holder.settled(numbers)
        self.lent = []


def _is_request(held: Any) -> bool:
    """Whether something in hand is a worker's request: it alone has a mailbox for replies."""
    return hasattr(held, "reply_to")


def _of_a_worker(request: Any) -> None:
    """Raise LocalProtocolError unless this is a request in hand."""
    if not _is_request(request):
        raise wrong("request", request, "a request that a worker of this client was given")


OPEN: Final = -1
"""State of a step that is being put together; the others are those of a batch."""


def staged(place: Place, transaction: bytes, number: int) -> Place:
    """Return the place of a part that stages records in a transaction, from one that publishes.

    place: (CONTENT, stream, typed, number) or (PUBLISH, stream, maybe a packing and a number).
    number: that of their batch among those of the transaction.
    """
    kind, stream, *rest = place
    if kind == CONTENT:
        [typed, _] = rest
        return STAGE_CONTENT, stream, transaction, number, typed
    return STAGE, stream, transaction, number, *rest


def rows_of_columns(
    bodies: Bodies,
    subject: str | Sequence[str | Sequence[str]],
    subjects: Sequence[str | Sequence[str]] | None,
    fields: Fields | Sequence[Fields | None] | None,
    client_time_ms: int | Sequence[int | None] | None,
    expires_at_ms: int | Sequence[int | None] | None,
    properties: Properties | Sequence[Properties | None] | None,
    codec: str | None,
) -> list[OutgoingRow]:
    """Return a row for each body; what is given as a sequence has one value a record.

    subject: of all records, or a sequence, which `subjects` gives instead.
    Raises LocalProtocolError: the columns differ in length, or a body is none.
    """
    bodies = several("bodies", bodies)
    count = len(bodies)
    if subjects is not None and subject != "":
        raise LocalProtocolError("bad_batch", "give subject or subjects, not both")
    return [
        make_row(body, keys, named, time_ms, expiry_ms, kept, None, codec)
        for body, keys, named, time_ms, expiry_ms, kept in zip(
            bodies,
            _column("subject", subject, count)
            if subjects is None
            else column_of("subjects", subjects, count),
            _column("fields", fields, count),
            _column("client_time_ms", client_time_ms, count),
            _column("expires_at_ms", expires_at_ms, count),
            _column("properties", properties, count),
            strict=False,
        )
    ]


def _column(name: str, value: Any, count: int) -> Iterable[Any]:
    """Return the values of `count` records for an argument: its own one by one, or one for all."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
        return repeat(value, count)  # One value for all; make_row() looks at it.
    return column_of(name, value, count)


def tuple_of(pattern: Any) -> Any:
    """Return a pattern with tuples for its lists, so that a place can have it and be a key."""
    return tuple(map(tuple_of, pattern)) if isinstance(pattern, list | tuple) else pattern


def list_of(pattern: Any) -> Any:
    """Return the pattern of lists that `tuple_of` was given, as commands have it."""
    return list(map(list_of, pattern)) if isinstance(pattern, tuple) else pattern
