"""One offer over all its links, and the requests that a worker has in hand by it.

Owns what was handed out to this offer and is not settled. The rule: a request is in hand from its
arrival until the broker has confirmed its end; after a reconnect the broker is asked what is still
the worker's before anything else is begun, and what it hands out again is begun only once. A
request names its offer and an offer its requests: they share a file.
Source: SPEC.md, sections 4.5 and 8.

Words: a request is begun once it was handed to the worker's program, finished once its end is on
its way, and over when the broker has confirmed the end. It is lost when it is another worker's, or
none's; handed out here anew later, its number stands for another object, hence `is request`. A row
is a reply. The owner (Offerings) sends what is said of requests.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from malamute_protocol.batch import Batch, RowParts
from malamute_protocol.commands import AckWork, Level, Offer, Subscribed, Work
from malamute_protocol.errors import BrokerRefused, MalamuteError, RemoteProtocolError
from malamute_protocol.limits import REASON_BYTES_MAX, Limits
from malamute_py.client.session.acknowledgements import Ack, AckForm, Acks, Range
from malamute_py.client.session.letters import HandedOut, HandoutBatch, rows_of
from malamute_py.client.session.offer_options import (
    FAILED,
    RECEIVED,
    RELEASED,
    RENEWED,
    RETURNED,
    OfferOptions,
)
from malamute_py.client.session.receiver import Opened
from malamute_py.client.session.rows import OutgoingRow
from malamute_py.client.session.unreadable import Unreadable, one_taken_in
from malamute_py.client.session.warnings import Warnings

_STORED: Final = int(Level.STORED)
"""Enough for what ends a request: lost in a power failure, it is handed out once more."""
_LEASE_MS: Final = 30_000
"""Lease that is assumed until a delivery has told it."""
_RENEWALS: Final = 3
"""Renewals of a lease within its time."""
RETRY_MAX_MS: Final = 600_000
"""The longest delay that doubling reaches when handlers give a request back again and again."""
_ANSWERS_MAX: Final = 1024
"""Answers that came too late and are kept, should the request be handed to us once more."""


class RequestBase(HandedOut, RowParts):
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
        """Take a second hand-out of a request in hand: it is this worker's for certain now."""
        self._batch, self._row, self._of = batch, row, of
        self.doubtful = self.lost = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} number={self.number} subject={self.subject!r}>"

    @property
    def service(self) -> str:
        """Which service it was sent to."""
        return self.offering.asked.service

    @property
    def sender(self) -> str:
        """Identity that sent it, or another name of its sender; replies count on its quota."""
        sender: str = self._of.command.sender
        return sender

    @property
    def reply_to(self) -> str:
        """Mailbox that replies go to."""
        reply_to: str = self._of.command.reply_to
        return reply_to

    def retry_ms(self, delay_ms: int) -> int:
        """Milliseconds before the request may be handed out again when its handler gives it back.

        The delay doubles with each attempt, up to RETRY_MAX_MS, or the delay itself if longer.
        0: the service's own back-off.
        """
        doubled = delay_ms << min(max(0, self.attempts - 1), 30)  # 30 keeps the number small
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
        """Whether an answer is of no use, for a handler that asks while it works.

        Another worker has the request, its time is over, or the offer ends. That another has it is
        noticed when its lease is renewed, within a third of the lease.
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


class OfferingOwner(Protocol):
    """The part of a session that an offer and its requests call."""

    acks: Acks
    warnings: Warnings
    finished: Callable[[Opened], None]
    """Credit may be due for what was opened."""
    arrived: Callable[[Any], None]
    """Have the worker look at what was opened."""
    broker_ms: Callable[[], int]
    """The broker's clock, about."""

    def reply(self, request: RequestBase, row: OutgoingRow, last: bool) -> bool:
        """Answer a request; False: it has had its end already."""

    def end(
        self,
        request: RequestBase,
        state: int,
        *,
        again_ms: int = 0,
        reason: str = "",
        token: Any = None,
    ) -> bool:
        """Complete, fail or return a request; False: it has had its end already."""

    def end_at_last(self, request: RequestBase) -> None:
        """Send how a request ends, whose replies are all answered."""

    def report(self, request: RequestBase, state: int, token: Any = None) -> bool:
        """Report a request as received or renewed; False: it has had its end already."""

    def drop_replies(self, request: RequestBase) -> None:
        """Withdraw the replies that wait after one that came too late."""

    def give_up(self, request: RequestBase, error: MalamuteError) -> None:
        """Warn that a reply was refused for good, and turn the request's end into FAILED."""

    def hold(self, offering: Offering) -> None:
        """Begin to renew the leases of an offer."""

    def drain(self, offering: Offering) -> None:
        """Take no more requests by an offer."""

    def close(self, offering: Offering) -> None:
        """End an offer once every answer is confirmed."""

    def over(self, offering: Offering) -> None:
        """Forget an offer that has ended."""


class Offering(Opened):
    """One offer over all its links."""

    consumes = True

    def __init__(
        self, number: int, asked: OfferOptions, kind: type[RequestBase], offerings: OfferingOwner,
        link: Any,
    ) -> None:  # fmt: skip
        """kind: the shell's class for requests. link: the shell's, by which callers answer them."""
        super().__init__(number, asked.concurrency, asked.credit_bytes)
        self.asked = asked
        self.offerings = offerings
        self.link = link
        self.queue: deque[RequestBase] = deque()
        """Not begun, in the order of arrival; take from it with take()."""
        self.in_hand: dict[int, RequestBase] = {}
        """By number, until the broker has confirmed the end of each."""
        self.unfinished = 0
        """Requests in hand and not finished: as many as take the worker's concurrency."""
        self.not_held = 0
        """Answers that came too late: the request was another worker's, or over, by then."""
        self.plain = False
        """Replies cannot be steps: the service is in memory."""
        self.in_memory = False
        """The service is in memory: nothing of it can be confirmed as stored."""
        self.draining = False
        """The worker takes no more requests; those that it has begun go on."""
        self.closing = False
        self.to_release: list[int] = []
        """Requests begun and not finished when the offer was closed: released with UNSUBSCRIBE."""
        self.renew_at_ms = 0
        """0: nothing to renew."""
        self._kind = kind
        self._lease_ms = 0
        self._late: dict[int, OutgoingRow] = {}
        """Last replies to requests that another worker has by now, by the request's number."""
        self._still_running: dict[int, RequestBase] = {}
        """Requests that were taken from us, while their handlers are at it."""
        self._came_again: dict[int, RequestBase] = {}
        """Handed to us once more meanwhile: they are begun when those handlers have ended."""

    # --- the worker's side -------------------------------------------------------------------

    def take(self) -> RequestBase | None:
        """The next request for the worker to begin with; None: none yet."""
        queue = self.queue
        while queue:
            request = queue[0]
            if request.lost:
                queue.popleft()
                continue
            if request.doubtful:  # the broker is being asked whether it is ours: see acked()
                return None
            queue.popleft()
            request.begun = True
            return request
        return None

    def take_waiting(self) -> list[RequestBase]:
        """Take out all requests that were not begun, as the worker drains."""
        waiting = [*self.queue, *self._came_again.values()]
        self.queue.clear()
        self._came_again.clear()
        return [request for request in waiting if not request.lost]

    def finish(self, request: RequestBase) -> bool:
        """Mark a request as finished, which makes room for another one; False: it was before.

        Its end is about to be sent, or it is not this worker's any more.
        """
        if request.finished:
            return False
        request.finished = True
        if self.in_hand.get(request.number) is request:
            self.unfinished -= 1
        return True

    def done(self, request: RequestBase) -> None:
        """Forget a request whose end the broker has confirmed."""
        if self.in_hand.get(request.number) is request:
            del self.in_hand[request.number]

    def too_late(
        self, request: RequestBase, error: MalamuteError, row: OutgoingRow | None, last: bool = True
    ) -> None:
        """Note an answer that came when the request was not this worker's any more.

        error: the broker's refusal. row: its last reply, sent again should the broker hand the
        request to this worker once more; None: it had none, and the request is then begun anew.
        last: whether the answer is the end of the request, rather than a reply that others follow.
        """
        self.not_held += 1
        self._taken_away(request)
        if row is not None and not request.broken:  # else earlier replies would be missing
            self._late[request.number] = row
            if len(self._late) > _ANSWERS_MAX:
                del self._late[next(iter(self._late))]  # the oldest
        if not last and not request.broken:
            # The replies that were to follow would leave a hole: none is sent.
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
        """Note that a request is this worker's no more; its handler may run on.

        If the broker hands it out here again, that is begun when the handler has ended.
        """
        request.lost = True
        if request.running:
            self._still_running[request.number] = request

    def ran(self, request: RequestBase) -> None:
        """Note that a handler has ended; begin its request anew if it came again meanwhile.

        request: the former run, whose handler has ended.
        """
        if self._still_running.get(request.number) is not request:
            return  # it was this worker's to the end
        del self._still_running[request.number]
        again = self._came_again.pop(request.number, None)
        if again is not None and self.in_hand.get(again.number) is again:
            self.queue.append(again)
            self.offerings.arrived(self)

    def drop(self, request: RequestBase) -> None:
        """Forget a request that is this worker's no more: nothing is sent of it any more."""
        self.finish(request)
        self.done(request)
        self.offerings.finished(self)

    def dropped(self) -> list[int]:
        """Numbers of the requests that the program was given and cannot finish any more.

        It has let go of each without an answer: only this client refers to them. They are in hand
        no more, and are given back to the broker.
        """
        found = []
        for number in [
            number
            for number, request in self.in_hand.items()
            if request.begun and not (request.finished or request.replying)
        ]:
            # Whether the program refers to it shows when we let go of it, too: if not, Python
            # frees it at once, and the weak reference is dead.
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
        """Give requests in hand to an atomic step, which ends them.

        Raises BrokerRefused, and none was lent: `not_held`, or `conflict` when replies to one are
        not confirmed yet, which the step would overtake.
        """
        requests = [self.in_hand.get(number) for number in numbers]
        for request in requests:
            if request is None or request.finished or request.lost or request.broken:
                if request is not None and request.lost:
                    # The caller hears now that it has lost the request: should the broker hand it
                    # to us again, that is another run.
                    self._taken_away(request)
                    self.drop(request)
                raise BrokerRefused("not_held", "not in hand, or it had its end already")
            if request.replying:
                raise BrokerRefused(
                    "conflict", "replies to it are not confirmed yet: reply with wait=True before"
                )
        for request in requests:
            assert request is not None  # else the loop above has raised
            self.finish(request)

    def settled(self, numbers: list[int]) -> None:
        """Forget requests that an atomic step has ended."""
        for number in numbers:
            request = self.in_hand.get(number)
            if request is not None:
                self.done(request)
        self.offerings.finished(self)

    def regained(self, numbers: list[int]) -> None:
        """Take requests back into hand, since the step that was to end them was refused."""
        for number in numbers:
            request = self.in_hand.get(number)
            if request is not None:
                self.reopened(request)
        if self.closing and not self.ended:
            self.offerings.close(self)  # once more, as these would keep the offer from ending

    def lost_to_others(self, numbers: list[int]) -> None:
        """Drop requests, as a step with them was refused `not_held`.

        Of those that this worker held all the same, the lease ends, and another worker gets them.
        """
        for number in numbers:
            request = self.in_hand.get(number)
            if request is not None:
                self._taken_away(request)
                self.drop(request)

    def give_back(self, numbers: list[int]) -> None:
        """Have the broker hand out requests again that came back from a step whose caller has gone.

        No program knows that they are in hand again: see Step.give_back_untold. That counts as an
        attempt, so that a request whose steps all fail has an end. It counts as none while the
        worker drains: a stop may cancel each of its handlers.
        """
        state = RELEASED if self.draining else RETURNED
        for number in numbers:
            request = self.in_hand.get(number)
            if request is None or request.lost or self.ended:
                continue
            if self.offerings.end(request, state):
                # Handed out here again, it is to be begun only when its present handler has ended.
                self._taken_away(request)

    def discard(self) -> None:
        """Drop what was not begun: the caller works no more."""
        self.queue.clear()

    # --- acknowledgements --------------------------------------------------------------------

    question = None
    """No question precedes the halves of a refused acknowledgement."""

    def ack_command(self, form: AckForm, ranges: list[Range], tracker: int) -> AckWork:
        """Return ACK_WORK for these requests, which asks for `stored` if it ends them."""
        again_ms = max(0, form.again_ms)
        ends = form.state not in (RECEIVED, RENEWED)
        level = _STORED if ends and not self.in_memory else 0
        return AckWork(self.number, ranges, form.state, tracker, level, again_ms, form.reason)

    def takes_default(self) -> bool:
        """Ask for no level from now on: the broker refused `stored`, the service is in memory."""
        self.in_memory = True
        return True

    def acked(self, form: AckForm, ranges: list[Range]) -> None:
        """Take note that the broker took an acknowledgement: requests are renewed, or over.

        Renewed ones are this worker's for certain, also those that the last link left in doubt.
        """
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
        """Take note that a request is not this worker's any more: refused, or delivered again."""
        request = self.in_hand.get(number)
        if request is None:
            return
        if form.state not in (RENEWED, RECEIVED):  # it was to end the request
            self.too_late(request, error, None)
            return
        # A renewal, or the question after a reconnect: another worker has the request, or none.
        request.doubtful = False
        if not request.finished:  # else the refusal of its end, which is on its way, tells the same
            request.lost = True
            if not request.begun:  # no program knows of it
                self.unfinished -= 1
                del self.in_hand[number]
                self.offerings.finished(self)
        self.offerings.arrived(self)

    def ack_lost(self, ack: Ack) -> bool:
        """Return whether an acknowledgement is sent again on the next link.

        A renewal is not, unless a caller waits for it: the next link renews all that is in hand.
        """
        return ack.form.state != RENEWED or bool(ack.tokens)

    # --- commands to the broker --------------------------------------------------------------

    def open(self) -> Offer:
        """Return OFFER for a new link, with credit that counts from its beginning."""
        self._begin_credit()
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
        """Whether CREDIT is to be sent: as soon as there is room for one more request."""
        records, size = self._credit_limits()
        # Half of the bytes, as for all that is opened; half of few requests would be too long.
        return records > self._granted_records or (size - self._granted_bytes >= self._half_bytes)

    def _credit_limits(self) -> tuple[int, int]:
        """Return the totals of requests and bytes that the broker may have sent.

        A worker that drains or closes gives no more than it has received.
        """
        if self.draining or self.closing:
            return self._received_records, self._received_bytes
        return (
            self._received_records + max(0, self.asked.concurrency - self.unfinished),
            self._received_bytes + self.asked.credit_bytes,
        )

    # --- commands from the broker ------------------------------------------------------------

    def receive(self, command: Any, frames: Sequence[Any], limits: Limits) -> None:
        """Take SUBSCRIBED or WORK. Raises RemoteProtocolError for anything else."""
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
        """Take in one delivery of requests, without those that are in hand or answered already."""
        batch = one_taken_in(command, frames, limits)
        self._received_bytes += batch.stamp.size
        if isinstance(batch, Unreadable):
            self._received_records += batch.records
            self._cannot_read(batch)
            return
        self._received_records += len(batch)
        delivered = HandoutBatch(batch, command)
        in_hand, queue, kind = self.in_hand, self.queue, self._kind
        some_may_be_known = bool(in_hand or self._late or self._still_running)
        for row in rows_of(batch):
            request = kind(batch, row, delivered, self)
            if some_may_be_known and self._is_known(request, batch, row, delivered):
                continue
            in_hand[request.number] = request
            self.unfinished += 1
            if request.number in self._still_running:
                self._came_again[request.number] = request
            else:
                queue.append(request)
        self._lease_ms = command.lease_ms
        if not self.renew_at_ms:
            self.offerings.hold(self)
        # What came after the worker stopped taking requests goes back at once.
        if self.closing:
            self.offerings.close(self)
        elif self.draining:
            self.offerings.drain(self)

    def _cannot_read(self, found: Unreadable) -> None:
        """Fail requests that no worker can read: they become dead letters with the reason."""
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
        """Whether a delivered request needs no new run: it is in hand, or was answered too late.

        One in hand takes note of the hand-out; a late answer is sent once more.
        """
        in_hand = self.in_hand.get(request.number)
        if in_hand is not None:
            in_hand.handed_again(batch, row, delivered)
            return True
        late = self._late.pop(request.number, None)
        if late is None:
            return False
        self.in_hand[request.number] = request
        self.unfinished += 1
        request.begun = True
        again = msgspec.structs.replace(late, token=ReplyToken(request))
        self.offerings.reply(request, again, last=True)
        return True

    def next_renewal_ms(self) -> int:
        """Milliseconds between two renewals."""
        lease_ms = self._lease_ms or self.asked.lease_ms or _LEASE_MS  # as WORK said it, else asked
        return max(1, lease_ms // _RENEWALS)

    def link_down(self) -> None:
        """Mark requests that were not begun as doubtful, until the next link has asked the broker.

        Those that were begun go on meanwhile.
        """
        super().link_down()
        self.renew_at_ms = 0
        for request in self.in_hand.values():
            if not request.begun:
                request.doubtful = True

    def over(self) -> None:
        """Forget everything of the offer, which has ended."""
        self._still_running.clear()
        self._came_again.clear()
        self._late.clear()
        self.offerings.over(self)
