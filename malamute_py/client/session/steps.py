"""Atomic steps: what callers put together, and how it leaves and is confirmed.

Owns the parts of each step and the steps that were merged into one. The rules: steps that wait at
the same time leave as one ATOMIC, the contents of the same place gathered row by row, as long as
they may be taken or refused together; a merged one that was refused was not taken at all and goes
again in halves, so that each step has its own answer in the end; one that was not answered goes
again with the same bytes under the same key, and is taken once. Source: SPEC.md, section 4.8;
docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import msgspec

from malamute_protocol.address import NAME_BYTES_MAX
from malamute_protocol.batch import Record
from malamute_protocol.commands import (
    Atomic,
    Command,
    Confirm,
    Level,
    MoveCursor,
    Publish,
    PurgeSubjects,
    Reply,
    Request,
    Send,
    Stage,
    Trim,
    Welcome,
    WorkState,
)
from malamute_protocol.errors import BrokerRefused, LocalProtocolError, MalamuteError
from malamute_protocol.limits import DEFAULT_LIMITS, RANGES_MAX
from malamute_protocol.pattern import Pattern
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.client.arguments import (
    NAMES,
    duration,
    integer,
    key_of,
    later_of,
    name_of,
    priority_of,
    reason_of,
    text,
    wrong,
)
from malamute_py.client.position import Confirmation, Position, start_on_wire
from malamute_py.client.session.acknowledgements import AckForm, merged
from malamute_py.client.session.calls import (
    Bodies,
    Body,
    Fields,
    Properties,
    Time,
    content_count,
    make_pattern,
    make_row,
    request_terms,
    rows_of_columns,
)
from malamute_py.client.session.events import Event, Settled
from malamute_py.client.session.lanes import (
    OVER,
    QUEUED,
    SENT,
    Lane,
    Lanes,
    LastingLane,
    OutgoingBatch,
)
from malamute_py.client.session.outgoing import RETRY_MS, RETRYABLE, CommandSink, Trackers, Window
from malamute_py.client.session.publisher import confirmation, level_number, stamped_as
from malamute_py.client.session.requests import PLAIN
from malamute_py.client.session.rows import ROW_BYTES, OutgoingRow, content_of
from malamute_py.client.settings import ClientSettings
from malamute_py.client.words import ConfirmAt

KEY_BYTES: Final = 16
PARTS_MAX: Final = 256
"""Parts of a merged step; a single one may have as many as a message takes."""
ROWS_MAX: Final = 4096
"""Records and acknowledged numbers of a merged step: what any broker takes as one REQUEST."""

_PUBLISH, _SEND, _REQUEST, _REPLY, _ACK, _MOVE, _CONTENT, _TRIM, _PURGE, COMMAND = range(10)
_STAGE, _STAGE_CONTENT = range(10, 12)
_OWNING: Final = (_PUBLISH, _SEND, _REQUEST, _REPLY, _CONTENT)

_packing: Final = attrgetter("packing")
Place: TypeAlias = tuple[Any, ...]
"""Facts that parts must share to be one: the kind, and all of the command but its rows."""


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
        "choosy", "confirmation", "count", "first", "key", "lent", "level", "parts", "size",
        "state", "token",
    )  # fmt: skip

    def __init__(self, confirm: ConfirmAt = "default", key: bytes = b"") -> None:
        """confirm: "synced" (the default), or "stored". key: the caller's own name for it.

        Raises LocalProtocolError: neither of these levels, or a key that is too long.
        """
        self.level = level_number(confirm)
        if self.level == Level.NONE:
            raise LocalProtocolError("bad_setting", "a step is confirmed: 'synced' or 'stored'")
        self.key = key_of(key) if type(key) is not bytes or key else key
        self.parts: dict[Place, list[Any]] = {}
        self.size = 0
        self.count = 0
        """Records and numbers."""
        self.choosy = False
        """Whether the step moves a cursor, or has a request with a name of the caller's or an
        encoded content: not every step may be taken together with it."""
        self.lent: list[tuple[Holder, list[int]]] = []
        self.state = OPEN
        self.token: Any = None
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
        """A record for a stream. Raises LocalProtocolError: an argument is wrong."""
        if type(stream) is not str or stream not in NAMES:
            name_of("stream", stream)
        row = make_row(
            body, subject, fields, client_time_ms, expires_at_ms, properties, None, codec
        )
        self._add((_PUBLISH, stream), row)

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
        """Records for a stream; what is given as a sequence has one value a record.

        Raises LocalProtocolError: the columns differ in length, or a body is none.
        """
        name_of("stream", stream)
        rows = rows_of_columns(
            bodies, subject, subjects, fields, client_time_ms, expires_at_ms, properties, codec
        )
        for row in rows:
            self._add((_PUBLISH, stream), row)

    def add_rows(self, stream: str, rows: Sequence[OutgoingRow], size: int) -> None:
        """Add rows that were made before, for a stream. size: their bytes, with ROW_BYTES each."""
        self._check_open()
        for packing, some in groupby(rows, _packing):
            place = (_PUBLISH, stream) if packing is None else (_PUBLISH, stream, packing)
            self.parts.setdefault(place, []).extend(some)
        self.size += size
        self.count += len(rows)

    def publish_batch(self, stream: str, content: bytes) -> None:
        """Records for a stream, as one batch content that malamute_protocol.batch encoded.

        The step is merged with no other. Raises LocalProtocolError: the content is no batch, or
        has a producer.
        """
        name_of("stream", stream)
        count = content_count(content)
        if stamped_as(content)[0]:
            raise LocalProtocolError("bad_batch", "a content in a step has no producer")
        self._check_open()
        self.parts[_CONTENT, stream, len(self.parts)] = [content]
        self.size += len(content) + STAMP_BYTES
        self.count += count
        self.choosy = True

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
        """A message for a mailbox. Raises LocalProtocolError: an argument is wrong."""
        # Whatever most callers leave out costs them a comparison.
        if type(mailbox) is not str or mailbox not in NAMES:
            name_of("mailbox", mailbox)
        if type(deliver_at_ms) is not int or deliver_at_ms:
            deliver_at_ms = later_of("deliver_at_ms", deliver_at_ms)
        if type(priority) is not int or priority:
            priority = priority_of(priority)
        row = make_row(body, subject, fields, None, expires_at_ms, properties, None, codec)
        self._add((_SEND, mailbox, deliver_at_ms, priority), row)

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
        """A request for a service, whose replies come as mail to `reply_to`.

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
            self.choosy = True
        asked = StepRequest(key)
        row = make_row(body, subject, fields, None, expires_at_ms, properties, asked, codec)
        terms = PLAIN
        if need_workers or delay_ms or priority:
            terms = request_terms(need_workers, delay_ms, priority)
        self._add((_REQUEST, service, reply_to, timeout_ms, key, terms), row)
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
        """An answer to a request in hand. last: it completes the request.

        Raises BrokerRefused `not_held`, or LocalProtocolError as send().
        """
        last = bool(last)
        _of_a_worker(request)
        row = make_row(
            body, subject, fields, None, expires_at_ms, properties, request.number, codec
        )
        if last:
            self._lend(request.opened, [request.number])
        self._add((_REPLY, request.opened, last, request.reply_to), row)

    # --- acknowledgements -----------------------------------------------------------------------

    def complete(self, request: HandedOutRequest) -> None:
        """A request in hand is done, without a (further) reply. Raises BrokerRefused."""
        _of_a_worker(request)
        self._acknowledge(request, AckForm(WorkState.COMPLETED, 0))

    def fail(self, request: HandedOutRequest, reason: str = "") -> None:
        """A request in hand becomes a dead letter. Raises BrokerRefused `not_held`."""
        _of_a_worker(request)
        self._acknowledge(request, AckForm(WorkState.FAILED, 0, reason_of(reason)))

    def ack(self, held: InHand) -> None:
        """Mail, a record of a group, or a batch of these is done.

        Raises BrokerRefused `not_held`, LocalProtocolError: it came from no inbox or group.
        """
        self._acknowledge(held, AckForm())

    def nack(self, held: InHand, delay_ms: int = 0) -> None:
        """Mail, a record of a group, a batch of these, or a request is wanted again.

        delay_ms: milliseconds until it is delivered again. Raises as ack().
        """
        state = WorkState.RETURNED if _is_request(held) else 0
        self._acknowledge(held, AckForm(state, duration("delay_ms", delay_ms)))

    def _acknowledge(self, held: Any, form: AckForm) -> None:
        """Add the numbers of a message, request, record or batch to what the step acknowledges."""
        batch = getattr(held, "batch", held)
        opened = getattr(held, "opened", None) or getattr(batch, "opened", None)
        if opened is None:
            raise LocalProtocolError(
                "unexpected",
                f"{held!r} came from no inbox, worker or group: nothing to acknowledge",
            )
        numbers = getattr(held, "numbers", None)
        if numbers is None:
            # Mail and requests have a number, records of a group an offset.
            numbers = [held.number] if hasattr(held, "number") else batch.known([held.offset])
        self._lend(opened, numbers)
        self.parts.setdefault((_ACK, opened, form), []).extend(numbers)
        self.count += len(numbers)

    def _lend(self, holder: Holder, numbers: list[int]) -> None:
        """Give numbers that a reader holds to the step, which acknowledges them."""
        self._check_open()
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
        """A cursor is to stand at `next`: an offset, or a subscription's position.

        since: where it stands until now: the step is refused `conflict` when another client moved
        it meanwhile. Without it any place before `next` will do. force: any place at all.
        Raises LocalProtocolError: the step moves this cursor already.
        """
        self._check_open()
        name_of("stream", stream)
        name_of("cursor", cursor)
        moved = (_MOVE, stream, cursor)
        if moved in self.parts:
            raise LocalProtocolError("conflict", f"the step moves cursor {cursor!r} already")
        before = -1 if since is None else integer("since", since, -1, code="bad_start")
        force = bool(force)
        if isinstance(next, Position):
            _, following, epoch, uuid = start_on_wire(next)
            move = Move(following, before, uuid, epoch, force)
        else:
            move = Move(integer("next", next, 0, code="bad_start"), before, force=force)
        self.parts[moved] = [move]
        self.choosy = True

    # --- removal ------------------------------------------------------------------------------

    def trim(self, stream: str, before: int | Position) -> None:
        """Remove a stream's records before an offset, or before a subscription's position.

        The identity needs the permission `trim`. The step is refused `bad_start` when the stream
        ends before it.
        """
        offset, *place = self._removing(stream, before)
        self.parts.setdefault((_TRIM, stream, *place), []).append(offset)

    def purge(self, stream: str, pattern: str | Pattern, before: int | Position) -> None:
        """Remove the records of some subjects before an offset, or a subscription's position.

        pattern: on subjects; a str is a topic. The identity needs the permission `trim`. The step
        is refused `limit` when too many purges of the stream still hide records.
        """
        offset, *place = self._removing(stream, before)
        wanted = tuple_of(make_pattern(pattern))
        self.parts.setdefault((_PURGE, stream, *place, wanted), []).append(offset)

    def _removing(self, stream: str, before: int | Position) -> tuple[int, int, bytes]:
        """Return offset, epoch and uuid of a removal."""
        self._check_open()
        name_of("stream", stream)
        if isinstance(before, Position):
            _, offset, epoch, uuid = start_on_wire(before)
            return offset, epoch, uuid
        return integer("before", before, 0, code="bad_start"), 0, b""

    def _add(self, place: Place, row: OutgoingRow) -> None:
        """Add a row to the part for its place; each part leaves as one command."""
        if self.state != OPEN:
            self._check_open()
        if row.packing is not None:
            place = *place, row.packing
        rows = self.parts.get(place)
        if rows is None:
            self.parts[place] = [row]
        else:
            rows.append(row)
        self.size += row.size + ROW_BYTES
        self.count += 1

    def _check_open(self) -> None:
        if self.state != OPEN:
            raise LocalProtocolError("unexpected", "the step was committed or given up already")

    def give_up(self) -> None:
        """Give the step up: nothing of it happens."""
        if self.state == OPEN:
            self.state = OVER
            self.regain()

    def regain(self, error: MalamuteError | None = None) -> None:
        """Return what the step acknowledged to the caller, unless the broker says `not_held`."""
        not_held = isinstance(error, BrokerRefused) and error.code == "not_held"
        for holder, numbers in self.lent:
            holder.regained(numbers)
            if not_held:
                holder.lost_to_others(numbers)
        self.lent = []

    def settle(self) -> None:
        """Have the holders forget what the step has acknowledged."""
        for holder, numbers in self.lent:
            holder.settled(numbers)
        self.lent = []


def _is_request(held: Any) -> bool:
    """Whether what is in hand is a worker's request."""
    return hasattr(held, "reply_to")


def _of_a_worker(request: Any) -> None:
    """Raise LocalProtocolError unless this is a request in hand."""
    if not _is_request(request):
        raise wrong("request", request, "a request that a worker of this client was given")


OPEN: Final = -1
"""State of a step that is being put together; the others are those of a batch."""


def staged(place: Place, transaction: bytes, number: int) -> Place:
    """Return the place of records that are staged, for that of records which are published.

    number: place of their batch in the transaction.
    """
    kind, stream, *packing = place
    if kind == _CONTENT:
        return _STAGE_CONTENT, stream, transaction, number
    return _STAGE, stream, transaction, number, *packing


class OutgoingSteps(OutgoingBatch):
    """Steps that leave as one ATOMIC, from the first of them until it is answered."""

    __slots__ = ("contents", "key", "moves", "numbers", "places", "plain")

    rows: list[Step]

    def __init__(self, lane: Lane[OutgoingSteps], level: int) -> None:
        super().__init__(lane, level)
        self.content: list[Command] = []
        """ATOMIC and its parts, once it is encoded."""
        self.contents: list[bytes] = []
        self.key = b""
        self.places: set[Place] = set()
        self.moves: dict[Place, Move] = {}
        self.numbers = 0
        """Records and acknowledged numbers."""
        self.plain = False
        """Whether its one part leaves as a command of its own."""

    @property
    def may_be_plain(self) -> bool:
        """Whether this is one move or one acknowledgement, which needs no ATOMIC around it."""
        return (
            not self.plain
            and len(self.rows) == len(self.places) == 1
            and all(place[0] in (_MOVE, _ACK) for place in self.places)
        )

    def joins(self, step: Step, parts_max: int, bytes_max: int) -> bool:
        """Whether a step of the same level may be taken or refused together with these."""
        if (
            self.sealed
            or step.key
            or self.rows[0].key
            or self.bytes + step.size > bytes_max
            or self.numbers + step.count > ROWS_MAX
        ):
            return False
        if not self.places.issuperset(step.parts):
            fresh = step.parts.keys() - self.places
            if len(self.places) + len(fresh) > parts_max:
                return False
        for place in step.parts if step.choosy else ():
            if place[0] == _MOVE:
                before = self.moves.get(place)
                if before is not None and not _follows(step.parts[place][0], before):
                    return False
            elif place[0] == _CONTENT or (place[0] == _REQUEST and place[4]):
                # A request with a name of its own is alone in its content.
                return False
        return True

    def take_in(self, step: Step) -> None:
        """Merge a further step into this batch."""
        self.rows.append(step)
        self.places.update(step.parts)
        if step.choosy:
            for place, rows in step.parts.items():
                if place[0] == _MOVE:
                    self.moves[place] = rows[0]
                elif place[0] == _CONTENT:
                    self.sealed = True
        self.bytes += step.size
        self.numbers += step.count

    def remove(self, step: Step) -> None:
        """Take a step out of a batch that has not left."""
        self.rows.remove(step)
        self.bytes -= step.size
        self.numbers -= step.count

    def alike(self) -> OutgoingSteps:
        """Make an empty batch that no step joins, so that none suffers for a refused one."""
        alike = OutgoingSteps(self.lane, self.level)
        alike.sealed = True
        return alike

    def part(self, rows: list[Step]) -> OutgoingSteps:
        """Make a batch of some of the steps, which takes this one's turn."""
        part = self.alike()
        part.serial = self.serial
        for step in rows:
            step.state = QUEUED
            part.take_in(step)
        return part

    def replaced(self, parts: list[Any]) -> None:
        """Go on with the steps in other batches; those that no caller waits for are dropped."""
        for step in self.rows:
            if step.token is None:
                step.state = OVER
                step.regain()

    def put_off(self) -> None:
        """Drop the encoded form, so that a caller which withdraws now is left out of the next."""
        self.content, self.contents = [], []
        self.bytes = sum(step.size for step in self.rows)
        for step in self.rows:
            step.state = QUEUED

    def encode(self) -> None:
        """Make the parts. Raises what a row that cannot be encoded raises."""
        steps = self.lane.owner
        gathered: dict[Place, list[Any]] = {}
        first: Place | None = None
        for step in self.rows:
            step.first = -1
            for place, rows in step.parts.items():
                known = gathered.get(place)
                if first is None and place[0] in _OWNING:
                    first = place
                if place == first:
                    step.first = 0 if known is None else len(known)
                if known is None:
                    gathered[place] = rows.copy()
                else:
                    known += rows
        commands: list[Command] = []
        contents: list[bytes] = []
        for place, rows in gathered.items():
            kind = place[0]
            if kind == _MOVE:
                commands.append(_move(place, rows))
            elif kind == _TRIM:
                _, stream, epoch, uuid = place
                commands.append(Trim(stream, max(rows), 0, 0, uuid, epoch))
            elif kind == _PURGE:
                _, stream, epoch, uuid, wanted = place
                pattern = list_of(wanted)
                commands.append(PurgeSubjects(stream, pattern, max(rows), 0, 0, uuid, epoch))
            elif kind == _ACK:
                _, holder, form = place
                ranges = merged([(number, number + 1) for number in rows])
                commands += [
                    holder.ack_command(form, ranges[at : at + RANGES_MAX], 0)
                    for at in range(0, len(ranges), RANGES_MAX)
                ]
            elif kind == _CONTENT:
                contents += rows
                commands.append(Publish(place[1], 0))
            elif kind == COMMAND:
                commands += rows
            elif kind == _STAGE_CONTENT:
                contents += rows
                commands.append(_stage(place))
            elif kind == _STAGE:
                contents.append(content_of(rows, steps.limits))
                commands.append(_stage(place))
            else:
                contents.append(content_of(rows, steps.limits))
                commands.append(_owning(place, rows, steps.random))
        self.key = self.rows[0].key or steps.random(KEY_BYTES)
        self.content = [Atomic(0, len(commands), self.level, self.key), *commands]
        self.contents = contents
        self.bytes = sum(map(len, contents)) + STAMP_BYTES * len(contents)

    def send(self, out: CommandSink, tracker: int) -> None:
        """Hand over ATOMIC with its parts, or the one part that needs no step."""
        for step in self.rows:
            step.state = SENT
        commands = self.content
        if self.plain:
            out.put(_alone(commands[1], tracker, self.level), None)
            return
        commands[0] = Atomic(tracker, len(commands) - 1, self.level, self.key)
        out.put_together(commands.copy(), self.contents)

    def settle(self, outcome: Confirm | MalamuteError) -> None:
        """Give the callers their outcome, and the holders what became of the numbers they gave."""
        told: list[tuple[Any, Any]] = []
        if isinstance(outcome, Confirm):
            for step in self.rows:
                step.state = OVER
                step.settle()
                known = step.first >= 0 and outcome.offset >= 0
                step.confirmation = (
                    confirmation(outcome, step.first, 1) if known else _nowhere(outcome)
                )
                if step.token is not None:
                    told.append((step.token, step.confirmation))
        else:
            for step in self.rows:
                step.state = OVER
                step.regain(outcome)
                if step.token is not None:
                    told.append((step.token, outcome))
        self.lane.owner.emit(Settled(told))


def tuple_of(pattern: Any) -> Any:
    """Return a pattern of tuples, which can be a key."""
    return tuple(map(tuple_of, pattern)) if isinstance(pattern, list | tuple) else pattern


def list_of(pattern: Any) -> Any:
    """Return the pattern of lists that `tuple_of` was given."""
    return list(map(list_of, pattern)) if isinstance(pattern, tuple) else pattern


def _follows(move: Move, before: Move) -> bool:
    """Whether a move begins where another one ends, so that one command does for both."""
    return (
        not (move.force or before.force)
        and (move.uuid, move.epoch) == (before.uuid, before.epoch)
        and move.next > before.next
        and move.since in (-1, before.next)
    )


def _move(place: Place, moves: list[Move]) -> MoveCursor:
    """Return one MOVE_CURSOR for all moves of a cursor in a step: the last place counts.

    The condition is that of the first move: where the cursor stood before.
    """
    _, stream, cursor = place
    last = moves[-1]
    return MoveCursor(
        stream, cursor, last.next, 0, 0, last.force, last.uuid, last.epoch, moves[0].since
    )


def _stage(place: Place) -> Stage:
    _, stream, transaction, number = place[:4]
    return Stage(transaction, stream, number, 0)


def _alone(part: Command, tracker: int, level: int) -> Command:
    """Return a part of a step as a command of its own, with its tracker and level."""
    return msgspec.structs.replace(part, tracker=tracker, level=level)


def _owning(place: Place, rows: list[OutgoingRow], random: Callable[[int], bytes]) -> Command:
    """Return the command that owns the content of these rows."""
    kind = place[0]
    if kind == _PUBLISH:
        return Publish(place[1], 0)
    if kind == _SEND:
        _, mailbox, deliver_at_ms, priority = place[:4]
        return Send(mailbox, 0, 0, b"", deliver_at_ms, priority)
    if kind == _REQUEST:
        _, service, reply_to, timeout_ms, key, terms = place[:6]
        name = key or random(KEY_BYTES)
        for number, row in enumerate(rows):
            asked = row.token
            asked.key, asked.row = name, number
        return Request(
            service,
            0,
            reply_to,
            timeout_ms,
            0,
            name,
            terms.need_workers,
            terms.delay_ms,
            terms.priority,
        )
    _, holder, last, _ = place[:4]
    return Reply(holder.number, [row.token for row in rows], 0, last)


class Steps(Lanes[OutgoingSteps]):
    """All steps of a session."""

    unit = "step"

    def __init__(
        self,
        settings: ClientSettings,
        random: Callable[[int], bytes],
        trackers: Trackers,
        window: Window,
        emit: Callable[[Event], None],
    ) -> None:
        """random: n -> n random bytes, for keys."""
        super().__init__(settings, trackers, window, emit)
        self.random = random
        main: dict[Any, Lane[OutgoingSteps]] = {}
        self._main: Lane[OutgoingSteps] = LastingLane(self, main, "")
        main[""] = self._main
        self._put_off: dict[Any, Lane[OutgoingSteps]] = {}
        """Lanes of steps that the broker refused for a while: the others go on meanwhile."""
        self.homes += [main, self._put_off]
        self._parts_max = PARTS_MAX
        self._message_parts_max = DEFAULT_LIMITS.step_parts_max

    # --- what callers do --------------------------------------------------------------------

    def add(self, step: Step, token: Any) -> None:
        """Put a step on its way; the token gets its Confirmation, or why it was not taken.

        Raises LocalProtocolError `too_large`, or what ended the session: nothing was taken,
        and what the step acknowledged is the caller's again.
        """
        try:
            self._check(step)
        except MalamuteError:
            step.give_up()
            raise
        step.token = token
        step.state = QUEUED
        queue = self._main.queue
        last = queue[-1] if queue else None
        if (
            last is None
            or last.level != step.level
            or not last.joins(step, self._parts_max, self.batch_bytes)
        ):
            last = OutgoingSteps(self._main, step.level)
            self.queue(last)
        last.take_in(step)
        self.window.queued_bytes += step.size

    def _check(self, step: Step) -> None:
        """Raise LocalProtocolError unless a step is open and fits in one message and bundle."""
        if step.state != OPEN:
            step._check_open()
        if self.fatal is not None:
            raise self.fatal
        limits = self.limits
        if len(step.parts) > self._message_parts_max:
            raise LocalProtocolError(
                "too_large", f"a step of {len(step.parts)} parts, at most {self._message_parts_max}"
            )
        if step.size > limits.batch_bytes_max or step.count > limits.batch_records_max:
            raise LocalProtocolError(
                "too_large", f"a step of {step.size} bytes and {step.count} records or numbers"
            )

    def withdraw(self, step: Step) -> None:
        """Take back a step that no caller waits for, if it has not left."""
        step.token = None
        if step.state != QUEUED:
            return
        for lane in self._lanes():
            for batch in lane.queue:
                # One that has left before may have been taken: the answer to it decides.
                if step in batch.rows and not batch.content:
                    batch.remove(step)
                    self.window.queued_bytes -= step.size
                    step.state = OVER
                    step.regain()
                    if not batch.rows:
                        self._take_out(lane, [batch])
                    return

    # --- the link ---------------------------------------------------------------------------

    def link_up(self, welcome: Welcome) -> None:
        """Send unconfirmed steps again, now that the broker has said what a message may hold.

        Of parts, a message takes as many as fit beside ATOMIC; a step gathers PARTS_MAX at most.
        """
        super().link_up(welcome)
        self._message_parts_max = min(
            welcome.message_commands_max - 1, DEFAULT_LIMITS.step_parts_max
        )
        self._parts_max = min(PARTS_MAX, self._message_parts_max)

    # --- answers ----------------------------------------------------------------------------

    def refused(self, batch: OutgoingSteps, error: BrokerRefused, now_ms: int) -> None:
        """Send refused steps again in halves or later, or fail them, by the code.

        The broker took nothing of them.
        """
        if not self._came_back(batch):
            return
        batch.doubtful = False
        before = batch.lane
        again = error.code in RETRYABLE and (batch.count > 1 or batch.rows[0].token is not None)
        if again:
            self._serial += 1
            batch.lane = self.lane(self._put_off, self._serial)
            self._block(batch.lane, now_ms + (error.retry_ms or RETRY_MS))
        if error.code == "cross_ring" and batch.may_be_plain:
            # A cursor or group of a stream in memory is in no log, and so in no step.
            batch.plain = True
            self._put_back(batch)
        elif batch.count > 1:
            self._divide(batch)
        elif again:
            batch.put_off()
            self._put_back(batch)
        else:
            self._end(batch, error)
        for lane in {before, batch.lane}:
            if not lane.queue:
                self._rest(lane)

    def _divide(self, batch: OutgoingSteps) -> list[Any]:
        """Replace a merged step that was not taken by two, under keys of their own."""
        batch.thin = True
        return super()._divide(batch)


def _nowhere(confirm: Confirm) -> Confirmation:
    """A step without a place of its own that the confirm would name."""
    plain = confirmation(confirm, 0, 0)
    return Confirmation(-1, plain.epoch, plain.level, plain.append_time_ms, 0, plain.duplicate)
