"""Offers of a worker: the requests in hand, their leases, and the answers to them.

Owns what was handed out to this session and is not settled. The rule: a request is in hand
from its arrival until the broker has confirmed its end; while it is, its lease is renewed,
whatever a handler does; after a reconnect the broker is asked what is still ours before
anything else is begun, and what it hands out again is begun only once.
Source: SPEC.md, sections 4.5 and 8.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from malamute_protocol.address import name_fault
from malamute_protocol.batch import Batch
from malamute_protocol.commands import (
    AckWork,
    Atomic,
    Confirm,
    Credit,
    Level,
    Offer,
    Pattern,
    Subscribed,
    Unsubscribe,
    Welcome,
    Work,
    WorkState,
)
from malamute_protocol.commands import Reply as ReplyCommand
from malamute_protocol.errors import (
    BrokerRefused,
    ConnectionLost,
    LocalProtocolError,
    MalamuteError,
    ProtocolError,
    RemoteProtocolError,
)
from malamute_protocol.limits import REASON_BYTES_MAX, Limits
from malamute_py.client.arguments import (
    duration,
    integer,
    name_of,
    one_of,
    reason_of,
    settings_of,
)
from malamute_py.client.session.acknowledgements import Ack, AckForm, Acks, Range
from malamute_py.client.session.calls import make_pattern
from malamute_py.client.session.events import Event, Settled
from malamute_py.client.session.lanes import Lane
from malamute_py.client.session.letters import HandoutBatch, rows_of
from malamute_py.client.session.outbox import KeyedBatch, Outbox
from malamute_py.client.session.outgoing import CommandSink, Trackers
from malamute_py.client.session.publisher import confirmation, level_number
from malamute_py.client.session.receiver import Opened
from malamute_py.client.session.rows import OutgoingRow
from malamute_py.client.session.unreadable import Unreadable, one_taken_in
from malamute_py.client.session.warnings import Warnings
from malamute_py.client.words import ConfirmAt, OnError

RECEIVED: Final = int(WorkState.RECEIVED)
RENEWED: Final = int(WorkState.RENEWED)
COMPLETED: Final = int(WorkState.COMPLETED)
FAILED: Final = int(WorkState.FAILED)
RETURNED: Final = int(WorkState.RETURNED)
RELEASED: Final = int(WorkState.RELEASED)
CREDIT_BYTES: Final = 64 << 20
ON_ERROR: Final = ("fail", "nack")
"""Ways to end a request whose handler raised."""
_STORED: Final = int(Level.STORED)
"""Enough for what ends a request: lost in a power failure, it is handed out once more."""
_RENEWALS: Final = 3
"""Renewals of a lease within its time."""
RETRY_MAX_MS: Final = 600_000
"""The longest delay that doubling reaches when handlers give a request back again and again."""
_ANSWERS_MAX: Final = 1024
"""Answers that came too late and are kept, should the request be handed to us once more."""


class OfferOptions(msgspec.Struct, frozen=True):
    """Options of a worker's offer."""

    service: str
    pattern: Pattern
    concurrency: int = 16
    """Requests that may be in hand and not finished."""
    credit_bytes: int = CREDIT_BYTES
    """Bytes of requests that may be on their way here."""
    lease_ms: int = 0
    """0: the broker's default."""
    level: int = 0
    """At which replies are confirmed."""
    settings: dict[str, Any] = {}


def offer_options(
    service: str,
    pattern: str | Pattern,
    concurrency: int,
    lease_ms: int | None,
    confirm: ConfirmAt,
    credit_bytes: int,
    settings: Mapping[str, Any] | None,
) -> OfferOptions:
    """An offer as asked for. Raises PatternError or LocalProtocolError `bad_setting`."""
    name_of("service", service)
    if fault := name_fault(service):
        # serve() registers only: the broker would tell it in run(), and for all services at once.
        raise LocalProtocolError("bad_name", f"service {service!r}: {fault}")
    return OfferOptions(
        service,
        make_pattern(pattern),
        integer("concurrency", concurrency, 1),
        integer("credit_bytes", credit_bytes, 1),
        0 if lease_ms is None else duration("lease_ms", lease_ms, 1),
        level_number(confirm),
        settings_of(settings),
    )


def make_on_error(on_error: OnError) -> None:
    """Raises LocalProtocolError `bad_setting` for what is not in ON_ERROR."""
    one_of("on_error", on_error, ON_ERROR)


class RequestBase:
    """A request in hand; the shells add what can be done with it."""

    __slots__ = (
        "__weakref__",
        "_batch",
        "_of",
        "_row",
        "begun",
        "broken",
        "doubtful",
        "end",
        "finished",
        "lost",
        "number",
        "offering",
        "replying",
        "running",
    )

    def __init__(self, batch: Batch, row: int, of: HandoutBatch, offering: Offering) -> None:
        self._batch = batch
        self._row = row
        self._of = of
        self.offering = offering
        self.number = batch.offset_of(row)
        """Number by which the broker knows the request."""
        self.begun = False
        """Whether the request was handed over to the caller."""
        self.finished = False
        """The last reply, or another end of it, is on its way."""
        self.doubtful = False
        """The link was lost since it came: whether it is still ours is being asked."""
        self.lost = False
        """The broker has given it to another worker, or it was cancelled or expired."""
        self.broken = False
        """One of its replies came too late: those that follow would leave a hole."""
        self.running = False
        """A handler that the client runs is at it."""
        self.replying = 0
        """Replies that were not answered."""
        self.end: tuple[AckForm, Any] | None = None
        """End of the request, with its caller: it must not overtake these replies."""

    @property
    def opened(self) -> Offering:
        """Offer by which an atomic step answers the request."""
        return self.offering

    def handed_again(self, batch: Batch, row: int, of: HandoutBatch) -> None:
        """The broker hands it out once more while we have it."""
        self._batch, self._row, self._of = batch, row, of
        self.doubtful = self.lost = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} number={self.number} subject={self.subject!r}>"

    @property
    def body(self) -> bytes:
        """The body. Raises TypeError when it is a list of blobs: use `parts`."""
        return self._batch.body_of(self._row)

    @property
    def parts(self) -> list[bytes]:
        """The blobs of the body: one unless it is a list of blobs."""
        return self._batch.parts_of(self._row)

    @property
    def subject(self) -> str:
        """Subject that the worker's pattern was matched with."""
        return self._batch.keys_of(self._row)[0]

    @property
    def keys(self) -> tuple[str, ...]:
        """The subject and further keys."""
        return self._batch.keys_of(self._row)

    @property
    def fields(self) -> Mapping[str, str]:
        """Field values by name."""
        return self._batch.fields_of(self._row)

    @property
    def properties(self) -> Mapping[str, Any]:
        """Properties, which travel with the request and are not matched."""
        return self._batch.properties_of(self._row)

    @property
    def sender(self) -> str:
        """Identity of the requester; `~` and hexadecimal digits: a client without one."""
        sender: str = self._of.command.sender
        return sender

    @property
    def service(self) -> str:
        """Which service it was sent to."""
        return self.offering.asked.service

    @property
    def reply_to(self) -> str:
        """Mailbox that replies go to."""
        reply_to: str = self._of.command.reply_to
        return reply_to

    @property
    def attempts(self) -> int:
        """Count of its hand-outs, this one included; the broker keeps it over restarts."""
        return self._of.attempts

    def retry_ms(self, delay_ms: int) -> int:
        """Milliseconds before the request may be handed out again when its handler gives it back.

        The delay doubles with each attempt, up to RETRY_MAX_MS, or the delay itself if longer.
        0: the service's own back-off.
        """
        doubled = delay_ms << min(max(0, self.attempts - 1), 30)
        return max(delay_ms, min(doubled, RETRY_MAX_MS))

    @property
    def deadline_ms(self) -> int:
        """Time of giving up, by the broker's clock in milliseconds since 1970; 0: never."""
        deadline_ms: int = self._of.command.deadline_ms
        return deadline_ms

    @property
    def key(self) -> tuple[bytes, int]:
        """(key of the requester's batch, row in it): the same however often it is handed out."""
        return self._of.command.key, self._row

    def cancelled(self) -> bool:
        """Working on is of no use: it was taken from us, its time is over, or we are closed.

        That another has it is noticed when its lease is renewed, within a third of the lease.
        """
        if self.lost or self.offering.ended or self.offering.closing:
            return True
        deadline_ms = self.deadline_ms
        return bool(deadline_ms) and self.offering.offerings.broker_ms() >= deadline_ms


class ReplyToken(msgspec.Struct):
    """The token of a reply's row."""

    request: RequestBase
    caller: Any = None
    """Object at which the caller waits for the confirm; None: no caller does."""


class OutgoingReplies(KeyedBatch):
    """Replies to requests of one offer with one reply_to."""

    __slots__ = ("awaited", "last", "offering")

    def __init__(self, lane: Lane[Any], level: int, offering: Offering, last: bool) -> None:
        super().__init__(lane, level)
        self.offering = offering
        self.last = last
        # A reply that others follow must not be overtaken by them.
        self.one_by_one = not last
        self.awaited = False
        """Whether a caller waits for the confirm."""

    def alike(self) -> OutgoingReplies:
        """Make an empty batch of the same kind for the same place."""
        alike = OutgoingReplies(self.lane, self.level, self.offering, self.last)
        alike.awaited = self.awaited
        return alike

    def say(self, out: CommandSink, tracker: int) -> None:
        """REPLY; with a name, as a step of its own, when it may come twice otherwise."""
        offering = self.offering
        numbers = [row.token.request.number for row in self.rows]
        if self.last or offering.plain or not tracker:
            patient = not self.awaited and self.lane.owner.is_roomy
            # A caller that waits gets the outcome also when the reply has to be sent again; for all
            # others the broker need not remember it.
            key = self.key if self.awaited and self.last else b""
            reply = ReplyCommand(
                offering.number, numbers, tracker, self.last, self.level, patient, key
            )
            out.put(reply, self.content)
        else:
            step = Atomic(tracker, 1, self.level, self.key)
            part = ReplyCommand(offering.number, numbers, 0, False, 0)
            out.put_together([step, part], [self.content])

    def refused(self, error: BrokerRefused, now_ms: int) -> None:
        """Settle, repeat or give up an end that the broker refused."""
        if (
            not self.last
            and not self.offering.plain
            and error.code in ("cross_ring", "unsupported")
        ):
            # A service in memory: its requests cannot be part of a step.
            self.offering.plain = True
            error = BrokerRefused("wait", error.reason, 1)
        elif error.code == "unsupported" and self.level:
            self.level = 0  # a service or a mailbox in memory
            error = BrokerRefused("wait", error.reason, 1)
        elif error.code == "conflict":
            error = BrokerRefused("not_held", error.reason)
        super().refused(error, now_ms)

    def live_rows(self) -> list[OutgoingRow]:
        """The replies that leave no hole."""
        return [row for row in self.rows if not row.token.request.broken]

    def settle(self, outcome: Confirm | MalamuteError) -> None:
        """Settle the callers; a request that is another worker's by now is no error of theirs."""
        if self.last and not self.awaited and isinstance(outcome, Confirm):
            # Most replies are such: no caller waits, and nothing follows.
            in_hand = self.offering.in_hand
            for row in self.rows:
                answered: RequestBase = row.token.request
                answered.replying -= 1
                if in_hand.get(answered.number) is answered:
                    del in_hand[answered.number]
            return
        pairs: list[tuple[Any, Any]] = []
        for index, row in enumerate(self.rows):
            request, token = row.token.request, row.token.caller
            told: Any = None
            if isinstance(outcome, Confirm):
                if self.last:
                    self.offering.done(request)
                if token is None:
                    continue
                told = confirmation(outcome, index, 1)
            elif isinstance(outcome, BrokerRefused) and outcome.code == "not_held":
                self.offering.too_late(request, outcome, row if self.last else None, self.last)
            else:
                told = outcome
                if self.last:
                    self.offering.reopened(request)
                given_up = token is None or request.finished
                if given_up and isinstance(outcome, ProtocolError | BrokerRefused):
                    # No caller is left that could end it otherwise, and replies with a hole would
                    # look whole to the requester.
                    self.offering.offerings.give_up(request, outcome)
            if token is not None:
                pairs.append((token, told))
        if pairs:
            self.lane.owner.tell(Settled(pairs))
        for row in self.rows:
            request = row.token.request
            request.replying -= 1
            if request.end is not None and not request.replying:
                self.offering.offerings.end_at_last(request)


class Offering(Opened):
    """One offer over all its links."""

    consumes = True

    def __init__(
        self, number: int, asked: OfferOptions, kind: type[RequestBase], offerings: Offerings
    ) -> None:
        """kind: what is made of each request."""
        super().__init__(number)
        self.asked = asked
        self.offerings = offerings
        self.queue: deque[RequestBase] = deque()
        """Not begun, in the order of arrival; take from it with take()."""
        self.in_hand: dict[int, RequestBase] = {}
        """By number, until the broker has confirmed the end of each."""
        self.unfinished = 0
        """In hand and not finished."""
        self.not_held = 0
        """Answers that came too late: the request was another worker's, or over, by then."""
        self.plain = False
        """Replies cannot be steps: the service is in memory."""
        self.in_memory = False
        """The service is in memory: nothing of it can be confirmed as stored."""
        self.draining = False
        """The worker takes no more requests; those that it has begun go on."""
        self.closing = False
        self.begun: list[int] = []
        """Requests that were begun and not finished when the offer was closed."""
        self.renew_at_ms = 0
        """0: nothing to renew."""
        self._kind = kind
        self._accepted = False
        self._lease_ms = 0
        self._late: dict[int, OutgoingRow] = {}
        self._still: dict[int, RequestBase] = {}
        """Taken from us, while their handlers are at it."""
        self._behind: dict[int, RequestBase] = {}
        """Handed to us once more meanwhile: they are begun when those handlers have ended."""
        self._received_records = 0
        self._received_bytes = 0
        self._granted_records = 0
        self._granted_bytes = 0

    @property
    def accepted(self) -> bool:
        """SUBSCRIBED has come once."""
        return self._accepted

    # --- the worker's side -------------------------------------------------------------------

    def take(self) -> RequestBase | None:
        """The next request to begin with; None: none yet."""
        queue = self.queue
        while queue:
            request = queue[0]
            if request.lost:
                queue.popleft()
                continue
            if request.doubtful:
                return None
            queue.popleft()
            request.begun = True
            return request
        return None

    def finish(self, request: RequestBase) -> bool:
        """Note that its end is about to be sent; False: it was sent already."""
        if request.finished:
            return False
        request.finished = True
        if self.in_hand.get(request.number) is request:
            self.unfinished -= 1
        return True

    def done(self, request: RequestBase) -> None:
        """The broker has confirmed its end."""
        if self.in_hand.get(request.number) is request:
            del self.in_hand[request.number]

    def too_late(
        self, request: RequestBase, error: MalamuteError, row: OutgoingRow | None, last: bool = True
    ) -> None:
        """Note an answer that came when the request was not this worker's any more.

        row: its last reply. last: False for one that others follow: should the request be
        handed to us once more, it is begun anew.
        """
        self.not_held += 1
        self._taken_away(request)
        if row is not None and not request.broken:
            self._late[request.number] = row
            if len(self._late) > _ANSWERS_MAX:
                del self._late[next(iter(self._late))]
        if not last and not request.broken:
            request.broken = True
            self.offerings.drop_replies(request)
            if request.end is not None:
                self.offerings.end_at_last(request)
        if request.finished or request.broken:
            self.finish(request)
            self.done(request)
            self.offerings.finished(self)
        self.offerings.warnings.add(
            "answered too late, or taken before the link was lost",
            f"request {request.number} of {self.asked.service}: {error}",
        )

    def _taken_away(self, request: RequestBase) -> None:
        """Forget a request that is not ours any more; if it comes again, that is another run."""
        request.lost = True
        if request.running:
            self._still[request.number] = request

    def ran(self, request: RequestBase) -> None:
        """The handler of a request that was taken from us has ended."""
        if self._still.get(request.number) is not request:
            return
        del self._still[request.number]
        again = self._behind.pop(request.number, None)
        if again is not None and self.in_hand.get(again.number) is again:
            self.queue.append(again)
            self.offerings.arrived(self)

    def drop(self, request: RequestBase) -> None:
        """Nothing more is said of a request that was taken from us."""
        self.finish(request)
        self.done(request)
        self.offerings.finished(self)

    def dropped(self) -> list[int]:
        """Numbers of the requests that the program was given and cannot finish any more.

        It has let go of each without an answer: only this client knew of them.
        """
        found = []
        for number in [
            number
            for number, request in self.in_hand.items()
            if request.begun and not (request.finished or request.replying)
        ]:
            # Whether anyone else has it shows when we let go of it, too.
            known = weakref.ref(self.in_hand.pop(number))
            request = known()
            if request is None:
                self.unfinished -= 1
                found.append(number)
            else:
                self.in_hand[number] = request
        return found

    def reopened(self, request: RequestBase) -> None:
        """Take a request back into hand whose end was refused."""
        if request.finished and self.in_hand.get(request.number) is request:
            request.finished = False
            self.unfinished += 1

    # --- steps -------------------------------------------------------------------------------

    def lend(self, numbers: list[int]) -> None:
        """An atomic step ends these requests.

        Raises BrokerRefused, and none was lent: `not_held`, or `conflict` when replies to one are
        not confirmed yet, which the step would overtake.
        """
        requests = [self.in_hand.get(number) for number in numbers]
        for request in requests:
            if request is None or request.finished or request.lost or request.broken:
                if request is not None and request.lost:
                    # The caller hears it now: handed to us again, it is another run.
                    self._taken_away(request)
                    self.drop(request)
                raise BrokerRefused("not_held", "not in hand, or it had its end already")
            if request.replying:
                raise BrokerRefused(
                    "conflict", "replies to it are not confirmed yet: reply with wait=True before"
                )
        for request in requests:
            assert request is not None
            self.finish(request)

    def settled(self, numbers: list[int]) -> None:
        """The step was taken."""
        for number in numbers:
            request = self.in_hand.get(number)
            if request is not None:
                self.done(request)
        self.offerings.finished(self)

    def regained(self, numbers: list[int]) -> None:
        """The step was not taken: they are in hand as before."""
        for number in numbers:
            request = self.in_hand.get(number)
            if request is not None:
                self.reopened(request)

    def lost_to_others(self, numbers: list[int]) -> None:
        """A step was refused `not_held`: these are another worker's, or over.

        Were some of them ours all the same, their leases end, and the broker hands them out anew.
        """
        for number in numbers:
            request = self.in_hand.get(number)
            if request is not None:
                self._taken_away(request)
                self.drop(request)

    def discard(self) -> None:
        """Give back what waits: the caller works no more."""
        self.queue.clear()

    # --- acknowledgements --------------------------------------------------------------------

    def ack_command(self, form: AckForm, ranges: list[Range], tracker: int) -> AckWork:
        """ACK_WORK."""
        again_ms = max(0, form.again_ms)
        ends = form.state not in (RECEIVED, RENEWED)
        level = _STORED if ends and not self.in_memory else 0
        return AckWork(self.number, ranges, form.state, tracker, level, again_ms, form.reason)

    def takes_default(self) -> bool:
        """The level was refused: what is in memory is never stored."""
        if self.in_memory:
            return False
        self.in_memory = True
        return True

    def acked(self, form: AckForm, ranges: list[Range]) -> None:
        """The broker confirmed it."""
        for first, end in ranges:
            for number in range(first, end):
                request = self.in_hand.get(number)
                if request is None:
                    continue
                if form.state == RENEWED:
                    request.doubtful = False
                elif form.state != RECEIVED:
                    self.done(request)
        if form.state == RENEWED:
            self.offerings.arrived(self)

    def not_acked(self, form: AckForm, number: int, error: MalamuteError) -> None:
        """The broker says that it is not ours any more."""
        request = self.in_hand.get(number)
        if request is None:
            return
        if form.state not in (RENEWED, RECEIVED):
            self.too_late(request, error, None)
            return
        request.doubtful = False
        if not request.finished:
            request.lost = True
            if not request.begun:
                self.unfinished -= 1
                del self.in_hand[number]
                self.offerings.finished(self)
        self.offerings.arrived(self)

    def ack_lost(self, ack: Ack) -> bool:
        """A renewal is said anew with the next link; what a caller waits for is said again."""
        return ack.form.state != RENEWED or bool(ack.tokens)

    # --- commands to the broker --------------------------------------------------------------

    def open(self) -> Offer:
        """OFFER for a new link."""
        self._received_records = self._received_bytes = 0
        self._granted_records = self._granted_bytes = 0
        self._granted_records, self._granted_bytes = self._credit_limits()
        asked = self.asked
        return Offer(
            self.number,
            asked.service,
            asked.pattern,
            self._granted_records,
            self._granted_bytes,
            asked.lease_ms,
            asked.settings,
        )

    @property
    def credit_due(self) -> bool:
        """There is room for another request."""
        records, size = self._credit_limits()
        return records > self._granted_records or (
            size - self._granted_bytes >= self.asked.credit_bytes / 2
        )

    def credit(self) -> Credit:
        """CREDIT for what was finished."""
        records, size = self._credit_limits()
        self._granted_records = max(records, self._granted_records)
        self._granted_bytes = max(size, self._granted_bytes)
        return Credit(self.number, self._granted_records, self._granted_bytes)

    def _credit_limits(self) -> tuple[int, int]:
        if self.draining or self.closing:
            return self._received_records, self._received_bytes
        return (
            self._received_records + max(0, self.asked.concurrency - self.unfinished),
            self._received_bytes + self.asked.credit_bytes,
        )

    # --- commands from the broker ------------------------------------------------------------

    def receive(self, command: Any, frames: Sequence[Any], limits: Limits) -> None:
        """SUBSCRIBED or WORK."""
        kind = type(command)
        if kind is Work:
            self._work(command, frames, limits)
        elif kind is Subscribed:
            self.active = self._accepted = True
            if self.in_hand:
                self.renew_at_ms = 1  # at once: what is still ours has to be known
        else:
            raise RemoteProtocolError("unexpected", f"{kind.__name__} for an offer")

    def _work(self, command: Work, frames: Sequence[Any], limits: Limits) -> None:
        batch = one_taken_in(command, frames, limits)
        self._received_bytes += batch.stamp.size
        if isinstance(batch, Unreadable):
            self._received_records += batch.records
            self._cannot_read(batch)
            return
        self._received_records += len(batch)
        delivered = HandoutBatch(batch, command)
        in_hand, queue, kind = self.in_hand, self.queue, self._kind
        known = bool(in_hand or self._late or self._still)
        for row in rows_of(batch):
            request = kind(batch, row, delivered, self)
            if known and self._is_known(request, batch, row, delivered):
                continue
            in_hand[request.number] = request
            self.unfinished += 1
            if request.number in self._still:
                self._behind[request.number] = request
            else:
                queue.append(request)
        self._lease_ms = command.lease_ms
        if not self.renew_at_ms:
            self.offerings.hold(self)
        if self.closing:
            self.offerings.close(self)
        elif self.draining:
            self.offerings.drain(self)

    def _cannot_read(self, found: Unreadable) -> None:
        """Requests that no worker can read: dead letters, by name, instead of one worker's end."""
        ranges = found.ranges
        reason = f"unreadable: {found.reason}"[:REASON_BYTES_MAX]
        self.offerings.acks.add(self, AckForm(FAILED, 0, reason), ranges)
        self.offerings.warnings.add(
            "requests that cannot be read, and are failed",
            f"number {ranges[0][0]} of {self.asked.service}: {found.reason}",
        )

    def _is_known(
        self, request: RequestBase, batch: Batch, row: int, delivered: HandoutBatch
    ) -> bool:
        """Whether a request was handed to us before: it is in hand, or was answered in vain."""
        ours = self.in_hand.get(request.number)
        if ours is not None:
            ours.handed_again(batch, row, delivered)
            return True
        late = self._late.pop(request.number, None)
        if late is None:
            return False
        self.in_hand[request.number] = request
        self.unfinished += 1
        request.begun = True
        self.offerings.reply(
            request, msgspec.structs.replace(late, token=ReplyToken(request)), True
        )
        return True

    def next_renewal_ms(self) -> int:
        """Milliseconds between two renewals."""
        return max(1, (self._lease_ms or self.asked.lease_ms or 30_000) // _RENEWALS)

    def link_down(self) -> None:
        """Nothing of what is in hand is sure until the broker has said so."""
        super().link_down()
        self.renew_at_ms = 0
        for request in self.in_hand.values():
            if not request.begun:
                request.doubtful = True

    def over(self) -> None:
        """The offer has ended."""
        self._still.clear()
        self._behind.clear()
        self._late.clear()
        self.offerings.over(self)


def _rows_of(request: RequestBase, batch: KeyedBatch) -> list[OutgoingRow]:
    """The replies of a request among those that leave together."""
    return [row for row in batch.rows if row.token.request is request]


_NOT_HELD: Final = BrokerRefused("not_held", "it was taken from us before it was answered")


class Offerings:
    """All offers of a session, what is said of their requests, and when."""

    def __init__(
        self,
        outbox: Outbox,
        trackers: Trackers,
        tell: Callable[[Event], None],
        begin: Callable[[Callable[[int], Offering]], Offering],
        finished: Callable[[Opened], None],
        arrived: Callable[[Any], None],
        broker_ms: Callable[[], int],
    ) -> None:
        """The session's own calls; finished: there may be credit to be given.

        broker_ms: the broker's clock, about.
        """
        self.acks = Acks(trackers, self._told, outbox.new_key)
        self.link: Any = None
        """The shell's, for its requests."""
        self.tell = tell
        self.warnings = Warnings(tell)
        self.arrived = arrived
        self.broker_ms = broker_ms
        self.finished = finished
        self._outbox = outbox
        self._begin = begin
        self._offerings: dict[Offering, None] = {}
        self._holding: Final[dict[Offering, None]] = {}
        """Offerings with requests in hand, whose leases are renewed."""
        self._draining: Final[dict[Offering, None]] = {}
        """Offerings that take no more requests and have some in hand."""
        self._closing: Final[dict[Offering, None]] = {}
        self.queues: Final = (self._holding, self._draining, self._closing, *self.acks.queues)
        """While all of them are empty, take() has nothing to do."""
        self._lanes: dict[Any, Lane[KeyedBatch]] = {}
        outbox.homes.append(self._lanes)

    # --- what callers do -----------------------------------------------------------------------

    def offer(self, asked: OfferOptions, kind: type[RequestBase]) -> Offering:
        """Begin to offer. Raises what ended the session."""
        offering = self._begin(lambda number: Offering(number, asked, kind, self))
        self._offerings[offering] = None
        return offering

    def reply(self, request: RequestBase, row: OutgoingRow, last: bool) -> bool:
        """Answer a request; row: its token is a ReplyToken.

        Who waits gets a Confirmation, or None when it was too late. Returns False when the
        request has had its end already: nothing was done.
        Raises LocalProtocolError `too_large`, or what ended the session.
        """
        outbox, offering = self._outbox, request.offering
        outbox.check(row)
        if offering.ended:
            raise offering.error or ConnectionLost("the worker is closed")
        if request.broken:
            self._told_late(row)
            return True
        if request.finished or (last and not offering.finish(request)):
            return False
        if last:
            self.finished(offering)
        if request.lost:
            offering.too_late(request, _NOT_HELD, row if last else None, last)
            self._told_late(row)
            return True
        lane = outbox.lane(self._lanes, (offering.number, request.reply_to))
        lane.gate = offering
        queue = lane.queue
        batch = queue[-1] if queue else None
        if (
            type(batch) is not OutgoingReplies
            or batch.last is not last
            or not outbox.join(batch, row, 0)
        ):
            batch = OutgoingReplies(lane, offering.asked.level, offering, last)
            outbox.start(batch, row, b"", 0)
        if row.token.caller is not None:
            batch.awaited = True
        request.replying += 1
        return True

    def _told_late(self, row: OutgoingRow) -> None:
        if row.token.caller is not None:
            self.tell(Settled([(row.token.caller, None)]))

    def end(
        self,
        request: RequestBase,
        state: int,
        *,
        again_ms: int = 0,
        reason: str = "",
        token: Any = None,
    ) -> bool:
        """Complete, fail or return a request; its token gets True, or False: too late.

        It leaves when all replies to the request are answered. Returns False when the request
        has had its end already: nothing was done.
        """
        offering = request.offering
        again_ms, reason = duration("delay_ms", again_ms), reason_of(reason)
        if offering.ended:
            raise offering.error or ConnectionLost("the worker is closed")
        if request.broken:
            if token is not None:
                self.tell(Settled([(token, False)]))
            return True
        if not offering.finish(request):
            return False
        self.finished(offering)
        request.end = AckForm(state, again_ms, reason), token
        if not request.replying:
            self.end_at_last(request)
        return True

    def end_at_last(self, request: RequestBase) -> None:
        """Send how it ends, or tell its caller why that is not sent."""
        offering, end = request.offering, request.end
        assert end is not None
        form, token = end
        request.end = None
        if not request.broken and not offering.ended:
            self.acks.add(offering, form, [(request.number, request.number + 1)], token)
        elif token is not None:
            closed = offering.error or ConnectionLost("the worker is closed")
            self.tell(Settled([(token, closed if offering.ended else False)]))

    def drop_replies(self, request: RequestBase) -> None:
        """One of its replies came too late: those that wait after it do not leave."""
        pairs: list[tuple[Any, Any]] = []
        for lane in self._lanes.values():
            if lane.gate is not request.offering:
                continue
            for batch in lane.queue:
                if not any(row.token.request is request for row in batch.rows):
                    continue
                pairs += [
                    (row.token.caller, None) for row in batch.rows if row.token.request is request
                ]
                batch.thin = True
                if isinstance(batch, OutgoingReplies) and batch.last:
                    batch.content = b""
        self.tell(Settled([pair for pair in pairs if pair[0] is not None]))

    def give_up(self, request: RequestBase, error: MalamuteError) -> None:
        """Fail a request of which a reply was refused for good, with the reason.

        No caller waits for that reply, or the request has its end already. A last reply that
        follows it has not left: what follows a reply leaves when that is answered. One that had
        left could not be taken back, and the warning would be all.
        """
        reason = str(error)
        self.warnings.add(
            "an answer was refused", f"request {request.number} of {request.service}: {reason}"
        )
        if request.offering.ended:
            return
        if request.finished and request.end is None:
            self._take_back_last(request, error)
        if request.end is not None and request.end[0].state == COMPLETED:
            token = request.end[1]
            request.end = AckForm(FAILED, 0, reason_of(reason)), None
            if token is not None:
                self.tell(Settled([(token, error)]))
        else:
            self.end(request, FAILED, reason=reason)

    def _take_back_last(self, request: RequestBase, error: MalamuteError) -> None:
        """Take back the last reply, which has not left: its caller gets the error."""
        offering = request.offering
        lane = self._lanes.get((offering.number, request.reply_to))
        if lane is None or offering.in_hand.get(request.number) is not request:
            return
        for batch in lane.queue:
            mine = _rows_of(request, batch)
            if not mine or not isinstance(batch, OutgoingReplies) or not batch.last:
                continue
            batch.rows = [row for row in batch.rows if row.token.request is not request]
            batch.thin = True  # should no row be left, nothing leaves
            batch.content = b""
            request.replying -= len(mine)
            offering.reopened(request)
            self.tell(
                Settled([(row.token.caller, error) for row in mine if row.token.caller is not None])
            )

    def say(self, request: RequestBase, state: int, token: Any = None) -> bool:
        """Received, or renewed; its token gets True, or False: it is not ours any more."""
        offering = request.offering
        if offering.ended or request.finished:
            return False
        number = request.number
        self.acks.add(offering, AckForm(state, 0), [(number, number + 1)], token)
        return True

    def drain(self, offering: Offering) -> None:
        """Take no more requests, and release those that were not begun."""
        if offering.ended or offering.closing:
            return
        offering.draining = True
        waiting = list(offering.queue)
        offering.queue.clear()
        for request in waiting:
            if not request.lost:
                self.end(request, RELEASED)
        if offering.in_hand:
            self._draining[offering] = None
        self.arrived(offering)

    def drain_all(self) -> None:
        """Drain every offer."""
        for offering in list(self._offerings):
            self.drain(offering)

    def close_all(self) -> None:
        """Close every offer."""
        for offering in list(self._offerings):
            self.close(offering)

    def close(self, offering: Offering) -> None:
        """End the offer once every answer is confirmed; the broker takes back what has none.

        What was begun is released: that the worker stops is no attempt.
        """
        if offering.ended:
            return
        offering.closing = True
        self._draining.pop(offering, None)
        offering.queue.clear()
        for request in list(offering.in_hand.values()):
            if not request.finished:
                # With UNSUBSCRIBE, not now: with credit left, it might be handed to this offer
                # once more.
                if request.begun and not request.lost:
                    offering.begun.append(request.number)
                offering.finish(request)
                offering.done(request)
        self._closing[offering] = None

    def hold(self, offering: Offering) -> None:
        """Begin to renew the leases of an offering that has something in hand."""
        self._holding[offering] = None

    def over(self, offering: Offering) -> None:
        """An offer ended."""
        self._offerings.pop(offering, None)
        self._holding.pop(offering, None)
        self._draining.pop(offering, None)
        self._closing.pop(offering, None)
        error = offering.error or ConnectionLost("the worker is closed")
        self.acks.forget(offering, error)
        for lane in [lane for lane in self._lanes.values() if lane.gate is offering]:
            self._outbox.fail_lane(lane, error)
        offering.in_hand.clear()

    def _told(self, token: Any, outcome: Any) -> None:
        if isinstance(outcome, BrokerRefused) and outcome.code == "not_held":
            outcome = False
        elif not isinstance(outcome, MalamuteError):
            outcome = outcome is not None
        self.tell(Settled([(token, outcome)]))

    # --- outgoing --------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Everything that was said is confirmed, and no offer drains or is being closed."""
        return self.acks.idle and not self._draining and not self._closing

    @property
    def unanswered(self) -> int:
        """Commands that wait to leave, or for their answers."""
        return self.acks.unanswered

    @property
    def waits(self) -> bool:
        """Something may be said with the next take()."""
        return self.acks.waits

    def link_up(self, welcome: Welcome) -> None:
        """A link is open."""

    def link_down(self) -> None:
        """The link is gone."""
        self.acks.link_down()

    def fail_all(self, error: MalamuteError) -> None:
        """The session ends."""
        self.acks.fail_all(error)
        self.warnings.tell()

    def wake(self, now_ms: int) -> None:
        """Write the warnings that are due; take() does the rest."""
        self.warnings.wake(now_ms)

    def take(self, now_ms: int, out: CommandSink) -> bool:
        """Renew leases, acknowledge, end what is closed."""
        for offering in list(self._holding):
            if not offering.in_hand:
                del self._holding[offering]
                offering.renew_at_ms = 0
            elif not offering.renew_at_ms:
                offering.renew_at_ms = now_ms + offering.next_renewal_ms()
            elif offering.active and offering.renew_at_ms <= now_ms:
                self._give_back_dropped(offering)
                numbers = sorted(offering.in_hand)
                if not numbers:
                    continue
                self.acks.add(offering, AckForm(RENEWED, 0), [(n, n + 1) for n in numbers])
                offering.renew_at_ms = now_ms + offering.next_renewal_ms()
        self.acks.take(now_ms, out)
        for offering in list(self._draining):
            if not offering.in_hand:
                del self._draining[offering]
                self.arrived(offering)
        for offering in list(self._closing):
            if not offering.in_hand and not offering.ending:
                offering.ending = True
                for number in offering.begun:
                    # Each by itself: of several at once all would be refused with one.
                    out.put(AckWork(offering.number, [(number, number + 1)], RELEASED), None)
                out.put(Unsubscribe(offering.number), None)
        return True

    def _give_back_dropped(self, offering: Offering) -> None:
        """Give back the requests that the program let go of and cannot finish any more."""
        numbers = sorted(offering.dropped())
        if numbers:
            self.acks.add(offering, AckForm(RETURNED, 0), [(n, n + 1) for n in numbers])
            self.finished(offering)
            for number in numbers:
                self.warnings.add(
                    "dropped without an answer, and given back",
                    f"request {number} of {offering.asked.service}",
                )

    def next_wake(self) -> int | None:
        """Latest time of the next wake() and take(); None: no need."""
        at = self.warnings.next_wake(self.acks.next_wake())
        for offering in self._holding:
            if (
                offering.active
                and offering.renew_at_ms
                and (at is None or offering.renew_at_ms < at)
            ):
                at = offering.renew_at_ms
        return at
