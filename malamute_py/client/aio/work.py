"""Workers in asyncio: an iterator of requests, or handlers that are run for them.

Owns the way from requests in hand to tasks and back. The rule: what a handler raises ends
its request and nothing else; leases are renewed by the link while handlers run, so a handler
may take as long as it wants as long as it lets the event loop turn.

Words: an offer is a worker's statement that it takes requests; `offering` is the session's half of
it, with the requests in hand: handed out to this worker, until the broker has confirmed their ends.
link.wake_up() has the session's messages leave; the window bounds what is sent and not confirmed,
and link.room() waits for it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Final, NamedTuple, TypeVar

from malamute_protocol.errors import (
    BrokerRefused,
    ConnectionLost,
    LocalProtocolError,
    MalamuteError,
    Timeout,
)
from malamute_protocol.pattern import Pattern
from malamute_py.client.aio.handlers import (  # asyncio only
    HandlerRun,
    RequestWaker,
    drain_on_signals,
    together,
)
from malamute_py.client.aio.link import AsyncVerbs, LoopLink
from malamute_py.client.engine.waits import ACKED, NOTHING, OPENED, timed_out
from malamute_py.client.position import Confirmation
from malamute_py.client.session.calls import Body, Fields, Properties, make_row
from malamute_py.client.session.offer_options import (
    COMPLETED,
    CREDIT_BYTES,
    FAILED,
    RECEIVED,
    RELEASED,
    RENEWED,
    RETURNED,
    OfferOptions,
    make_on_error,
    offer_options,
)
from malamute_py.client.session.offering import ReplyToken, RequestBase
from malamute_py.client.settings import Wait
from malamute_py.client.words import ConfirmAt, OnError

# sync: from contextlib import ExitStack
# sync: from malamute_py.client.sync.handlers import (
# sync:     HandlerRun, drain_on_signals, next_job, until_one_is_over,
# sync: )

_CLOSE_MS: Final = 5_000
"""How long close() waits for the broker's word."""

Handler = TypeVar("Handler", bound=Callable[..., Any])


class Served(NamedTuple):
    """A handler and the offer that it was registered for."""

    offered: OfferOptions
    handler: Callable[[Request], Any]
    on_error: OnError
    delay_ms: int


class WorkVerbs(AsyncVerbs):
    """Verbs for workers of a service."""

    _served: list[Served]
    _worker_type: type[Worker]

    def worker(
        self,
        service: str,
        pattern: str | Pattern = "#",
        *,
        concurrency: int = 16,
        lease_ms: int | None = None,
        confirm: ConfirmAt = "stored",
        credit_bytes: int = CREDIT_BYTES,
        settings: Mapping[str, Any] | None = None,
        # sync: timeout_ms: int | None = None,
    ) -> Worker:
        """Offer a service for requests whose subject matches the pattern; iterate the result.

        concurrency: requests that may be in hand and not finished; the broker hands out no
        more. lease_ms: silence after which the broker gives a request to another worker; it is
        renewed by this client while the request is in hand (None: the service's own). confirm:
        level of the replies. credit_bytes: bytes of requests that may be on their way here.
        settings: for a service that does not exist yet. close(), or the end of `async with`,
        gives back what is not finished; a worker that is not closed ends once it is collected.
        Raises PatternError or LocalProtocolError; a refusal is raised by the iteration.
        """
        offered = offer_options(
            service, pattern, concurrency, lease_ms, confirm, credit_bytes, settings
        )
        return self._worker_type(
            self._link,
            offered,
            # sync: timeout_ms,
        )

    def serve(
        self,
        service: str,
        pattern: str | Pattern = "#",
        *,
        concurrency: int = 16,
        lease_ms: int | None = None,
        on_error: OnError = "fail",
        delay_ms: int = 0,
        confirm: ConfirmAt = "stored",
        credit_bytes: int = CREDIT_BYTES,
        settings: Mapping[str, Any] | None = None,
    ) -> Callable[[Handler], Handler]:
        """Register a handler of requests, as a decorator; run() runs it.

        The handler gets a Request. What it returns is the reply (whatever reply() takes as a body),
        None completes the request without one unless the handler has finished it itself; an async
        generator's values are replies, and its end completes the request. A handler that is no
        coroutine function runs in one of `concurrency` threads. What it raises: on_error="fail"
        moves the request to the service's dead letters with the exception as the reason, "nack"
        returns it to the queue for after delay_ms, which doubles with each attempt (0: the
        service's back-off); after the last attempt the exception is in the dead letter, too. The
        rest as worker(). Raises as worker().
        """
        offered = offer_options(
            service, pattern, concurrency, lease_ms, confirm, credit_bytes, settings
        )
        make_on_error(on_error)

        def register(handler: Handler) -> Handler:
            self._served.append(Served(offered, handler, on_error, delay_ms))
            return handler

        return register

    async def run(self, *, signals: bool = False) -> None:
        """Run the registered handlers until the client is closed or this call is cancelled.

        Then requests that were not begun, and those of cancelled handlers, go back to the queue,
        and that counts as no attempt; a handler in a thread cannot be cancelled, and what it
        returns then is dropped. close(drain=True) lets handlers end first.
        signals: SIGTERM and SIGINT (Ctrl-C) drain: handlers that run come to their end, no other
        request is begun, and run() returns. A second signal cancels the handlers.
        Raises LocalProtocolError when there are none, the broker's refusal of an offer, or
        what ended the session.
        """
        if not self._served:
            raise LocalProtocolError("bad_setting", "no handler is registered: use @client.serve")
        draining = drain_on_signals(self._link) if signals else nullcontext()
        with draining:  # sync: with draining, ExitStack() as stack:
            await together(self._run_one(served) for served in self._served)  # asyncio only
            # sync: runs = []
            # sync: for served in self._served:
            # sync:     worker = stack.enter_context(self._worker_type(self._link, served.offered))
            # sync:     run = worker.start(served.handler, served.on_error, served.delay_ms)
            # sync:     runs.append(run)
            # sync: until_one_is_over(self._link, runs)
        # sync: for run in runs:
        # sync:     run.join()
        # sync: for run in runs:
        # sync:     run.raise_error()

    async def _run_one(self, served: Served) -> None:  # asyncio only
        """Run one registered handler, with a worker of its own."""
        async with self._worker_type(self._link, served.offered) as worker:
            await worker.run(served.handler, on_error=served.on_error, delay_ms=served.delay_ms)


class Request(RequestBase):
    """A request in hand."""

    __slots__ = ()

    async def reply(
        self,
        body: Body,
        *,
        last: bool = True,
        subject: str | Sequence[str] = "",
        fields: Fields | None = None,
        properties: Properties | None = None,
        codec: str | None = None,
        wait: bool = False,
        timeout_ms: Wait = "default",
    ) -> Confirmation | None:
        """Answer the request and, with the last reply, complete it in the same step.

        Returns once it is on its way, or, with wait=True, when the broker has confirmed it;
        None then: it came too late, the request is not in our hands any more (counted in
        worker.not_held, and logged).
        Raises LocalProtocolError `conflict` when it was finished already; BrokerRefused or
        ConnectionLost: then it is still in hand; Timeout: it may still be confirmed.
        """
        link: LoopLink = self.offering.link
        future: asyncio.Future[Confirmation | None] | None = (
            link.loop.create_future() if wait else None
        )
        row = make_row(
            body, subject, fields, None, None, properties, ReplyToken(self, future), codec
        )
        if link.is_here():  # sync: with link.lock:
            if not link.has_room():
                timeout_ms = await link.room(row.size, timeout_ms, "a reply")
            if not self.offering.offerings.reply(self, row, last):
                raise _finished_already(self)
            link.wake_up()
        if future is None:
            return None
        return await link.limit(future, timeout_ms, ACKED, "a reply")

    async def complete(self, *, wait: bool = False, timeout_ms: Wait = "default") -> bool:
        """Say that the request is done, without a (further) reply.

        Returns once that is on its way; wait=True: when the broker has confirmed it, False
        then: it is not in our hands any more. Raises as reply().
        """
        return await self._end(COMPLETED, wait, timeout_ms)

    async def fail(self, reason: str, *, wait: bool = False, timeout_ms: Wait = "default") -> bool:
        """Give it up: to the service's dead letters, with the reason (at most 1,024 characters).

        wait, and what is returned: as complete().
        """
        return await self._end(FAILED, wait, timeout_ms, reason=reason)

    async def nack(
        self,
        delay_ms: int = 0,
        *,
        reason: str = "",
        wait: bool = False,
        timeout_ms: Wait = "default",
    ) -> bool:
        """Put it back into the queue, for any worker, after so many milliseconds; see complete().

        reason: the dead letter repeats it, should this have been the last attempt.
        """
        return await self._end(RETURNED, wait, timeout_ms, again_ms=delay_ms, reason=reason)

    async def release(self, *, wait: bool = False, timeout_ms: Wait = "default") -> bool:
        """Put it back into the queue at once, for any worker, as no attempt. See complete().

        For a worker that stops, not for a request that cannot be done: that one would never end.
        """
        return await self._end(RELEASED, wait, timeout_ms)

    async def received(self, timeout_ms: Wait = "default") -> bool:
        """Tell the broker that the request has arrived, which the service's facts show."""
        return await self._report(RECEIVED, timeout_ms)

    async def renew(self, timeout_ms: Wait = "default") -> bool:
        """Begin the lease anew now; it is done by itself every third of a lease.

        False: it is not in our hands any more. While there is no link the answer is waited for:
        it is said on the next one. Raises Timeout.
        """
        return await self._report(RENEWED, timeout_ms)

    async def _end(
        self,
        state: int,
        wait: bool,
        timeout_ms: Wait,
        *,
        again_ms: int = 0,
        reason: str = "",
    ) -> bool:
        """Give a request an end, and wait for the broker's word on it where that is asked for.

        state: COMPLETED, FAILED, RETURNED (into the queue, after again_ms) or RELEASED (at once,
        counting as no attempt). Returns False when it came too late: the request was not held.
        Raises LocalProtocolError `conflict`: it was finished already.
        """
        link: LoopLink = self.offering.link
        future: asyncio.Future[bool] | None = link.loop.create_future() if wait else None
        if link.is_here():  # sync: with link.lock:
            if not self.offering.offerings.end(
                self, state, again_ms=again_ms, reason=reason, token=future
            ):
                raise _finished_already(self)
            link.wake_up()
        if future is None:
            return True
        return await link.limit(future, timeout_ms, ACKED, "the end of a request")

    async def _report(self, state: int, timeout_ms: Wait) -> bool:
        """Report the request as received or renewed; False: it is over, or another worker's."""
        link: LoopLink = self.offering.link
        future: asyncio.Future[bool] = link.loop.create_future()
        if link.is_here():  # sync: with link.lock:
            if not self.offering.offerings.report(self, state, future):
                return False
            link.wake_up()
        return await link.limit(future, timeout_ms, ACKED, "what was said of a request")


class Worker:
    """Requests of one service, as an async iterator; several tasks may iterate it."""

    def __init__(
        self, link: LoopLink, offered: OfferOptions, timeout_ms: int | None = None
    ) -> None:
        """See WorkVerbs.worker(). Raises what ended the session."""
        self._link = link
        self._timeout_ms = timeout_ms
        if link.is_here():  # sync: with link.lock:
            self._offering = link.session.offerings.offer(offered, Request, link)
            link.wake_up()
        self._waker = RequestWaker(self._offering)  # asyncio only
        link.watch(self._offering, self._waker)  # asyncio only
        self._finalizer = weakref.finalize(self, link.dropped, self._offering)
        self._finalizer.atexit = False

    @property
    def in_hand(self) -> int:
        """Requests whose end the broker has not confirmed."""
        return len(self._offering.in_hand)

    @property
    def not_held(self) -> int:
        """Answers that came when the request was not in our hands any more."""
        return self._offering.not_held

    async def accepted(self, timeout_ms: Wait = "default") -> None:
        """Wait until the broker has taken the offer. Raises the refusal, or Timeout."""
        offering = self._offering
        if self._link.is_here():  # sync: with self._link.lock:
            await self._link.until(
                lambda: offering.accepted or offering.ended,
                offering,
                timeout_ms,
                OPENED,
                "the offer",
            )
        if offering.queue:  # asyncio only
            self._waker.wake_another()  # it was meant for a task that waits for requests
        if not offering.accepted:
            raise offering.error or BrokerRefused("cancelled")

    async def next(self, timeout_ms: int | None = None) -> Request | None:
        """The next request; None when the worker was closed.

        Raises Timeout (nothing is lost) or the broker's refusal.
        """
        # sync: request: Request | None = next_job(self._link, self._offering, timeout_ms)
        # sync: return request
        wait_ms = self._link.engine.settings.wait_ms(timeout_ms)  # asyncio only
        if wait_ms is None:  # asyncio only
            return await self._next()
        try:  # asyncio only
            async with asyncio.timeout(wait_ms / 1000):
                return await self._next()
        except TimeoutError:
            raise timed_out(NOTHING, "request", wait_ms, self._link.standing()) from None

    async def _next(self) -> Request | None:  # asyncio only
        """Return the next request to begin, once there is one; None: the offer takes no more."""
        self._link.check_loop()
        offering = self._offering
        while True:
            request = self._begin()
            if request is not None:
                return request
            if offering.error is not None:
                raise offering.error
            if offering.ended or offering.closing or offering.draining:
                return None
            await self._waker.wait()

    def _begin(self) -> Request | None:  # asyncio only
        """Return the next request to begin if there is one now."""
        offering = self._offering
        request = offering.take()
        if request is not None and offering.queue:
            self._waker.wake_another()  # there is one more, for another task that waits
        return request  # type: ignore[return-value]

    def __aiter__(self) -> Worker:
        return self

    async def __anext__(self) -> Request:
        request = self._begin() or await self._next()  # sync: request = self.next(self._timeout_ms)
        if request is None:
            raise StopAsyncIteration
        return request

    async def run(
        self, handler: Callable[[Request], Any], *, on_error: OnError = "fail", delay_ms: int = 0
    ) -> None:
        """Run a handler for every request, as many at a time as the offer's concurrency.

        Returns when the worker is closed. Arguments and errors: see Client.serve().
        """
        make_on_error(on_error)
        # sync: self.start(handler, on_error, delay_ms).raise_error()
        await HandlerRun(  # asyncio only
            self._link, self._offering, self._begin, self._next, on_error, delay_ms
        ).to_the_end(handler)

    # sync: def start(
    # sync:     self, handler: Callable[[Request], Any], on_error: OnError, delay_ms: int
    # sync: ) -> HandlerRun:
    # sync:     """Start the threads that run a handler; they end with the worker."""
    # sync:     return HandlerRun(
    # sync:         self._link, self._offering, self.next, handler, on_error, delay_ms
    # sync:     )

    async def close(
        self, *, drain: bool = False, drain_ms: int | None = None, wait_ms: int = _CLOSE_MS
    ) -> None:
        """Release what is not finished, and end the offer once the broker has confirmed that.

        What is released goes to other workers, and that counts as no attempt. drain: begin
        nothing more, and wait first until what was begun is finished, drain_ms at most (None: as
        long as it takes). wait_ms: how long the broker's confirmation may take; then the broker
        does it by itself, when the link ends.
        """
        self._finalizer.detach()
        offering, link = self._offering, self._link
        if link.is_here():  # sync: with link.lock:
            if drain and not offering.ended:
                link.session.offerings.drain(offering)
                link.wake_up()
                link.notify(offering)  # those that wait for a request end their iteration
                with suppress(Timeout):
                    await link.until(
                        lambda: not offering.in_hand or offering.ended,
                        offering,
                        drain_ms,
                        ACKED,
                        "the end",
                    )
            if not offering.ended:
                link.session.offerings.close(offering)
                link.wake_up()
                link.notify(offering)
                try:
                    await link.until(lambda: offering.ended, offering, wait_ms, ACKED, "the end")
                except Timeout:
                    # The broker's word is not waited for: the offer is over here.
                    link.session.unsubscribe(offering)
                    link.wake_up()
        link.notify(offering)  # asyncio only
        link.forget(offering)  # asyncio only

    async def __aenter__(self) -> Worker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _finished_already(request: RequestBase) -> MalamuteError:
    """Return the error of a call on a request that is not in hand any more."""
    if request.offering.ended:
        return request.offering.error or ConnectionLost("the worker is closed")
    return LocalProtocolError("conflict", f"{request!r} was finished already")
