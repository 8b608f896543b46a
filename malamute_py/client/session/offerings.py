"""Offers of a worker: the answers to its requests, and the leases of those in hand.

Owns what is said of requests, and when. The rule: while a request is in hand its lease is renewed,
whatever a handler does; the end of a request leaves when all replies to it are answered.
Source: SPEC.md, sections 4.5 and 8.

Words: an offering is one offer. A request is begun once the worker's program was given it. One in
hand is finished once its end is on its way; it is lost when it is another worker's, or none's; it
is broken when a reply to it came too late, so that what follows would leave a hole. The row of a
reply has a ReplyToken: the request, and the caller that waits for the CONFIRM, or None. A lane has
the replies of one offer to one mailbox.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from malamute_protocol.commands import AckWork, Unsubscribe
from malamute_protocol.errors import BrokerRefused, ConnectionLost, MalamuteError
from malamute_py.client.arguments import duration, reason_of
from malamute_py.client.session.acknowledgements import (
    AckForm,
    Acknowledging,
    Acks,
    ranges_of_numbers,
)
from malamute_py.client.session.events import Event, Settled
from malamute_py.client.session.lanes import Lane
from malamute_py.client.session.offer_options import (
    COMPLETED,
    FAILED,
    RELEASED,
    RENEWED,
    RETURNED,
    OfferOptions,
)
from malamute_py.client.session.offering import Offering, RequestBase
from malamute_py.client.session.outbox import KeyedBatch, Outbox
from malamute_py.client.session.outgoing import CommandSink, Trackers
from malamute_py.client.session.receiver import Opened
from malamute_py.client.session.replies import OutgoingReplies
from malamute_py.client.session.rows import OutgoingRow


def _rows_of(request: RequestBase, batch: KeyedBatch) -> list[OutgoingRow]:
    """Return the replies to one request among those of a batch."""
    return [row for row in batch.rows if row.token.request is request]


_NOT_HELD: Final = BrokerRefused("not_held", "it was taken from us before it was answered")


class Offerings(Acknowledging):
    """All offers of a session, what is said of their requests, and when."""

    def __init__(
        self,
        outbox: Outbox,
        trackers: Trackers,
        emit: Callable[[Event], None],
        begin: Callable[[Callable[[int], Offering]], Offering],
        finished: Callable[[Opened], None],
        arrived: Callable[[Any], None],
        broker_ms: Callable[[], int],
    ) -> None:
        """begin: opens an offer under a number of the session. finished: has CREDIT sent, if due.

        emit, arrived: have an event told, and have a worker look at what has come for it.
        broker_ms: the broker's clock, about.
        """
        super().__init__(Acks(trackers, self.told, outbox.new_key), emit)
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
        """Offers that end once every answer is confirmed."""
        self.queues: Final = (self._holding, self._draining, self._closing, *self.acks.queues)
        """While all of them are empty, take() has nothing to do."""
        self._lanes: dict[Any, Lane[KeyedBatch]] = {}
        """Replies on their way, by offer and mailbox."""
        outbox.homes.append(self._lanes)

    # --- what callers do -----------------------------------------------------------------------

    def offer(self, asked: OfferOptions, kind: type[RequestBase], link: Any = None) -> Offering:
        """Begin to offer, under a number that the session gives (`begin` of the constructor).

        kind: the shell's type of request. link: the shell's, for the requests. Raises what ended
        the session.
        """
        offering = self._begin(lambda number: Offering(number, asked, kind, self, link))
        self._offerings[offering] = None
        return offering

    def reply(self, request: RequestBase, row: OutgoingRow, last: bool) -> bool:
        """Put a worker's reply to a request on its way; it joins others of its lane.

        row: its token is a ReplyToken. last: the reply ends the request. A caller that waits gets a
        Confirmation, or None when it was too late. Returns False when the request has had its end
        already: nothing was done.
        Raises LocalProtocolError `too_large`, or what ended the session.
        """
        outbox, offering = self._outbox, request.offering
        outbox.check(row)
        if offering.ended:
            raise offering.error or ConnectionLost("the worker is closed")
        if request.broken:  # an earlier reply came too late: so is this one
            self._told_late(row)
            return True
        if request.finished or (last and not offering.finish(request)):
            return False
        if last:
            self.finished(offering)  # there is room for a further request
        if request.lost:  # the broker would refuse it
            offering.too_late(request, _NOT_HELD, row if last else None, last)
            self._told_late(row)
            return True
        place = offering.number, request.reply_to, request.sender
        lane = self._lanes.get(place)
        if lane is None or outbox.fatal is not None:
            lane = outbox.lane(self._lanes, place)
        lane.gate = offering  # nothing leaves on a link before the offer is open there
        queue = lane.queue
        batch = queue[-1] if queue else None
        if (
            type(batch) is not OutgoingReplies
            or batch.last is not last
            or not outbox.join(batch, row, until_ms=0)
        ):
            batch = OutgoingReplies(lane, offering.asked.level, offering, last)
            outbox.start(batch, row, key=b"", until_ms=0)
        if row.token.caller is not None:
            batch.awaited = True
        request.replying += 1
        return True

    def _told_late(self, row: OutgoingRow) -> None:
        """Tell the caller of a reply, if one waits, that the reply came too late (None)."""
        if row.token.caller is not None:
            self.emit(Settled([(row.token.caller, None)]))

    def end(
        self,
        request: RequestBase,
        state: int,
        *,
        again_ms: int = 0,
        reason: str = "",
        token: Any = None,
    ) -> bool:
        """Complete, fail, return or release a request, as the worker says.

        state: which of these. token: gets True, or False: too late. It leaves when all replies to
        the request are answered. Returns False when the request has had its end already: nothing
        was done. Raises what ended the offer, or LocalProtocolError: an argument is wrong.
        """
        offering = request.offering
        again_ms, reason = duration("delay_ms", again_ms), reason_of(reason)
        if offering.ended:
            raise offering.error or ConnectionLost("the worker is closed")
        if request.broken:
            if token is not None:
                self.emit(Settled([(token, False)]))
            return True
        if not offering.finish(request):
            return False
        self.finished(offering)
        request.end = AckForm(state, again_ms, reason), token
        if not request.replying:
            self.end_at_last(request)
        return True

    def end_at_last(self, request: RequestBase) -> None:
        """Send the end of a request whose replies are all answered, if it may be sent still.

        Else its caller is told why not.
        """
        offering, end = request.offering, request.end
        assert end is not None
        form, token = end
        request.end = None
        if not request.broken and not offering.ended:
            self.acks.add(offering, form, [(request.number, request.number + 1)], token)
        elif token is not None:
            closed = offering.error or ConnectionLost("the worker is closed")
            self.emit(Settled([(token, closed if offering.ended else False)]))

    def drop_replies(self, request: RequestBase) -> None:
        """Withdraw the replies to a request that wait after one that came too late.

        Their callers get None. The request is broken, so its rows count as given up.
        """
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
                    # A last reply after a hole must not end the request: its content is made anew.
                    batch.content = b""
        self.emit(Settled([(caller, none) for caller, none in pairs if caller is not None]))

    def give_up(self, request: RequestBase, error: MalamuteError) -> None:
        """Warn that a reply was refused for good, and turn the request's end into FAILED.

        The requester is thus not told that it was completed. No caller waits for that reply, or the
        request has its end already. A last reply that follows the refused one is taken back: it has
        not left, for what follows a reply leaves when that is answered.
        """
        reason = str(error)
        self.warnings.add(
            "an answer was refused", f"request {request.number} of {request.service}: {reason}"
        )
        if request.offering.ended:
            return
        if request.finished and request.end is None:
            self._take_back_last(request, error)  # a last reply was to end it
        form, token = request.end or (None, None)  # an end that waits for this reply's answer
        if form is not None and form.state == COMPLETED:
            request.end = AckForm(FAILED, 0, reason_of(reason)), None
            if token is not None:
                self.emit(Settled([(token, error)]))
        else:
            self.end(request, FAILED, reason=reason)

    def _take_back_last(self, request: RequestBase, error: MalamuteError) -> None:
        """Take back the last reply to a request, which has not left: its caller gets the error.

        The request is in hand again, so that it can be failed.
        """
        offering = request.offering
        lane = self._lanes.get((offering.number, request.reply_to, request.sender))
        if lane is None or offering.in_hand.get(request.number) is not request:
            return
        for batch in lane.queue:
            mine = _rows_of(request, batch)
            if not mine or not isinstance(batch, OutgoingReplies) or not batch.last:
                continue
            batch.rows = [row for row in batch.rows if row.token.request is not request]
            batch.thin = True  # should no row be left, nothing leaves
            batch.content = b""  # encoded anew
            request.replying -= len(mine)
            offering.reopened(request)
            self.emit(
                Settled([(row.token.caller, error) for row in mine if row.token.caller is not None])
            )

    def report(self, request: RequestBase, state: int, token: Any = None) -> bool:
        """Report a request as received, or renew its lease; False: it has had its end already.

        state: RECEIVED or RENEWED. token: gets True; False: the request is another worker's by now.
        """
        offering = request.offering
        if offering.ended or request.finished:
            return False
        number = request.number
        self.acks.add(offering, AckForm(state, 0), [(number, number + 1)], token)
        return True

    def drain(self, offering: Offering) -> None:
        """Take no more requests, and release those that were not begun: their worker stops."""
        if offering.ended or offering.closing:
            return
        offering.draining = True
        for request in offering.take_waiting():
            self.end(request, RELEASED)
        if offering.in_hand:
            self._draining[offering] = None
        self.arrived(offering)  # a worker that waits for a request stops

    def drain_all(self) -> None:
        """Drain every offer: a signal stops the program, or it closes the client with drain."""
        for offering in list(self._offerings):
            self.drain(offering)

    def close_all(self) -> None:
        """Close every offer, before the client closes the link."""
        for offering in list(self._offerings):
            self.close(offering)

    def close(self, offering: Offering) -> None:
        """End the offer once every answer is confirmed; the broker takes back what has none.

        Called as a worker stops; the end leaves by take(). Requests that were begun are released,
        so that the stop counts as no attempt; for the others UNSUBSCRIBE is enough. Called once
        more for what comes meanwhile.
        """
        if offering.ended:
            return
        offering.closing = True
        self._draining.pop(offering, None)
        offering.queue.clear()
        for request in list(offering.in_hand.values()):
            if not request.finished:
                # It is released with UNSUBSCRIBE, not now: with credit left, the broker might
                # hand it to this offer once more.
                if request.begun and not request.lost:
                    offering.to_release.append(request.number)
                offering.finish(request)
                offering.done(request)
        self._closing[offering] = None

    def hold(self, offering: Offering) -> None:
        """Begin to renew the leases of an offering that has something in hand."""
        self._holding[offering] = None

    def over(self, offering: Offering) -> None:
        """Forget an offer that has ended; callers that wait for something of it get its error."""
        self._offerings.pop(offering, None)
        self._holding.pop(offering, None)
        self._draining.pop(offering, None)
        self._closing.pop(offering, None)
        error = offering.error or ConnectionLost("the worker is closed")
        self.acks.forget(offering, error)
        for lane in [lane for lane in self._lanes.values() if lane.gate is offering]:
            self._outbox.fail_lane(lane, error)
        offering.in_hand.clear()

    # --- outgoing --------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether all that was sent is confirmed, and no offer drains or is being closed."""
        return super().idle and not self._draining and not self._closing

    def take(self, now_ms: int, out: CommandSink) -> bool:
        """Renew leases that are due, send acknowledgements, and end offers that were closed."""
        for offering in list(self._holding):
            if not offering.in_hand:
                del self._holding[offering]
                offering.renew_at_ms = 0
            elif not offering.renew_at_ms:  # a request has come, or a new link is sought
                offering.renew_at_ms = now_ms + offering.next_renewal_ms()
            elif offering.active and offering.renew_at_ms <= now_ms:
                self._give_back_dropped(offering)
                if not offering.in_hand:
                    continue
                self.acks.add(offering, AckForm(RENEWED, 0), ranges_of_numbers(offering.in_hand))
                offering.renew_at_ms = now_ms + offering.next_renewal_ms()
        self.acks.take(now_ms, out)
        for offering in list(self._draining):
            if not offering.in_hand:
                del self._draining[offering]
                self.arrived(offering)  # the worker waits for that, and stops
        for offering in list(self._closing):
            if not offering.in_hand and not offering.ending:
                offering.ending = True
                for number in offering.to_release:
                    # Each by itself: of several at once all would be refused with one.
                    out.put(AckWork(offering.number, [(number, number + 1)], RELEASED), None)
                out.put(Unsubscribe(offering.number), None)
        return True

    def _give_back_dropped(self, offering: Offering) -> None:
        """Give back the requests that the program let go of and cannot finish any more."""
        numbers = sorted(offering.dropped())
        if numbers:
            self.acks.add(offering, AckForm(RETURNED, 0), ranges_of_numbers(numbers))
            self.finished(offering)
            for number in numbers:
                self.warnings.add(
                    "dropped without an answer, and given back",
                    f"request {number} of {offering.asked.service}",
                )

    def next_wake(self) -> int | None:
        """Latest time of the next wake() and take(); None: no need."""
        at = super().next_wake()
        for offering in self._holding:
            if (
                offering.active
                and offering.renew_at_ms
                and (at is None or offering.renew_at_ms < at)
            ):
                at = offering.renew_at_ms
        return at
