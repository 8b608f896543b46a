"""Workers in asyncio: an iterator of requests, or handlers that are run for them.

Owns the way from requests in hand to tasks and back. The rule: what a handler raises ends
its request and nothing else; leases are renewed by the link while handlers run, so a handler
may take as long as it wants as long as it lets the event loop turn.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import signal
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar

from malamute_protocol.errors import (
    ConnectionLost,
    LocalProtocolError,
    MalamuteError,
    RequestRejected,
)
from malamute_protocol.pattern import Pattern
from malamute_py.client.aio.link import AsyncVerbs, LoopLink
from malamute_py.client.engine.log import LOG
from malamute_py.client.engine.waits import ACKED, NOTHING, OPENED, timed_out
from malamute_py.client.position import Confirmation
from malamute_py.client.session.calls import Body, Fields, Properties, body_size, make_row
from malamute_py.client.session.offers import (
    COMPLETED,
    CREDIT_BYTES,
    FAILED,
    RECEIVED,
    RELEASED,
    RENEWED,
    RETURNED,
    Job,
    Offered,
    make_offered,
    make_on_error,
)
from malamute_py.client.settings import Wait
from malamute_py.client.words import ConfirmAt, OnError

_CLOSE_MS: Final = 5_000
_BODIES: Final = (bytes, bytearray, memoryview, str)

Handler = TypeVar("Handler", bound=Callable[..., Any])


class Served(NamedTuple):
    """A handler and the offer that it was registered for."""

    offered: Offered
    handler: Callable[[Request], Any]
    on_error: OnError
    delay_ms: int


class WorkVerbs(AsyncVerbs):
    """Verbs for who works for a service."""

    _served: list[Served]

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
        offered = make_offered(
            service, pattern, concurrency, lease_ms, confirm, credit_bytes, settings
        )
        return Worker(self._link, offered)

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

        The handler gets a Request. What it returns is the reply (bytes or str), None completes
        the request without one unless the handler has finished it itself; an async generator's
        values are replies, and its end completes the request. A handler that is no coroutine
        function runs in one of `concurrency` threads. What it raises: on_error="fail" moves the
        request to the service's dead letters with the exception as the reason, "nack"
        returns it to the queue for after delay_ms, which doubles with each attempt (0: the
        service's back-off); after the last attempt the exception is in the dead letter, too. The
        rest as worker(). Raises as worker().
        """
        offered = make_offered(
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
        with _drain_on_signals(self._link) if signals else nullcontext():
            await _together(self._run_one(served) for served in self._served)

    async def _run_one(self, served: Served) -> None:
        async with Worker(self._link, served.offered) as worker:
            await worker.run(served.handler, on_error=served.on_error, delay_ms=served.delay_ms)


class Request(Job):
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
        wait: bool = False,
        timeout_ms: Wait = "default",
    ) -> Confirmation | None:
        """Answer it, and, with the last reply, complete it in the same step.

        Returns once it is on its way, or, with wait=True, when the broker has confirmed it;
        None then: it came too late, the request is not in our hands any more (counted in
        worker.not_held, and logged).
        Raises LocalProtocolError `conflict` when it was finished already; RequestRejected or
        ConnectionLost: then it is still in hand; Timeout: it may still be confirmed.
        """
        link = self.offering.workings.link
        if not link.has_room():
            timeout_ms = await link.room(body_size(body), timeout_ms, "a reply")
        future = link.loop.create_future() if wait else None
        row = make_row(body, subject, fields, None, None, properties, (self, future))
        if not self.offering.workings.reply(self, row, last):
            raise _over(self)
        link.wake_up()
        if future is None:
            return None
        link.limit(future, timeout_ms, ACKED, "a reply")
        confirmation: Confirmation | None = await future
        return confirmation

    async def complete(self, *, wait: bool = False, timeout_ms: Wait = "default") -> bool:
        """Say that the request is done, without a (further) reply.

        Returns once that is on its way; wait=True: when the broker has confirmed it, False
        then: it is not in our hands any more.
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
        """Back into the queue, for any worker, after so many milliseconds; see complete().

        reason: the dead letter repeats it, should this have been the last attempt.
        """
        return await self._end(RETURNED, wait, timeout_ms, again_ms=delay_ms, reason=reason)

    async def release(self, *, wait: bool = False, timeout_ms: Wait = "default") -> bool:
        """Back into the queue at once, for any worker; it counts as no attempt. See complete().

        For a worker that stops, not for a request that cannot be done: that one would never end.
        """
        return await self._end(RELEASED, wait, timeout_ms)

    async def received(self, timeout_ms: Wait = "default") -> bool:
        """Tell the broker that it has arrived; who asks for the service's facts sees it."""
        return await self._say(RECEIVED, timeout_ms)

    async def renew(self, timeout_ms: Wait = "default") -> bool:
        """Begin the lease anew now; it is done by itself every third of a lease.

        False: it is not in our hands any more. While there is no link the answer is waited for:
        it is said on the next one. Raises Timeout.
        """
        return await self._say(RENEWED, timeout_ms)

    async def _end(
        self,
        state: int,
        wait: bool,
        timeout_ms: Wait,
        *,
        again_ms: int = 0,
        reason: str = "",
    ) -> bool:
        link = self.offering.workings.link
        future: asyncio.Future[bool] | None = link.loop.create_future() if wait else None
        if not self.offering.workings.end(
            self, state, again_ms=again_ms, reason=reason, token=future
        ):
            raise _over(self)
        link.wake_up()
        if future is None:
            return True
        link.limit(future, timeout_ms, ACKED, "the end of a request")
        return await future

    async def _say(self, state: int, timeout_ms: Wait) -> bool:
        link = self.offering.workings.link
        future: asyncio.Future[bool] = link.loop.create_future()
        if not self.offering.workings.say(self, state, future):
            return False
        link.limit(future, timeout_ms, ACKED, "what was said of a request")
        link.wake_up()
        return await future


class Worker:
    """Requests of one service, as an async iterator; several tasks may iterate it."""

    def __init__(self, link: LoopLink, offered: Offered) -> None:
        """See WorkVerbs.worker(). Raises what ended the session."""
        self._link = link
        link.session.workings.link = link
        self._offering = link.session.workings.offer(offered, Request)
        self._waker = _Waker(self._offering)
        link.watch(self._offering, self._waker)
        self._finalizer = weakref.finalize(self, link.dropped, self._offering)
        self._finalizer.atexit = False
        link.wake_up()

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
        wait_ms = self._link.engine.settings.wait_ms(timeout_ms)
        try:
            async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                while not self._offering.accepted:
                    if self._offering.ended:
                        raise self._offering.error or RequestRejected("cancelled")
                    await self._waker.wait()
                    if self._offering.queue:
                        self._waker.wake_another()  # it was meant for who waits for requests
        except TimeoutError:
            raise timed_out(OPENED, "the offer", wait_ms, self._link.standing()) from None

    async def next(self, timeout_ms: int | None = None) -> Request | None:
        """The next request; None when the worker was closed.

        Raises Timeout (nothing is lost) or the broker's refusal.
        """
        if timeout_ms is None:
            return await self._next()
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self._next()
        except TimeoutError:
            raise timed_out(NOTHING, "request", timeout_ms, self._link.standing()) from None

    async def _next(self) -> Request | None:
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

    def _begin(self) -> Request | None:
        """The next request if there is one now."""
        offering = self._offering
        request = offering.take()
        if request is not None and offering.queue:
            self._waker.wake_another()
        return request  # type: ignore[return-value]

    def __aiter__(self) -> Worker:
        return self

    async def __anext__(self) -> Request:
        request = self._begin() or await self._next()
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
        concurrency = self._offering.asked.concurrency
        # Not the event loop's threads: those are few, and others wait for them.
        threads = ThreadPoolExecutor(concurrency, "malamute-worker")
        try:
            call = _caller(handler, threads)
            await _together(self._handle_all(call, on_error, delay_ms) for _ in range(concurrency))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    async def _handle_all(
        self, call: Callable[[Request], Awaitable[Any]], on_error: OnError, delay_ms: int
    ) -> None:
        # A request that is there already is begun with without a coroutine more.
        while (request := self._begin() or await self._next()) is not None:
            request.running = True
            try:
                result = await call(request)
                if not request.finished:
                    if not self._link.has_room():
                        await self._link.room(0, None, "a reply")
                    self._answer(request, result)
            except (Exception, asyncio.CancelledError) as error:
                # It ends its request and nothing else, unless it is we who are cancelled.
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                    self._finish(request, RELEASED, 0, "")
                    raise
                if self._offering.ended or request.lost:
                    # Another worker has it, or will: it is not ours to fail.
                    LOG.warning("%r was not finished: %s", request, error)
                    self._offering.drop(request)
                    continue
                LOG.warning("the handler of %r failed", request, exc_info=True)
                reason = f"{type(error).__name__}: {error}"
                if on_error == "fail":
                    self._finish(request, FAILED, 0, reason)
                else:
                    self._finish(request, RETURNED, request.retry_ms(delay_ms), reason)
            finally:
                request.running = False
                if request.lost:
                    self._offering.ran(request)

    def _answer(self, request: Request, result: Any) -> None:
        if result is None:
            self._finish(request, COMPLETED, 0, "")
        elif isinstance(result, _BODIES):
            row = make_row(result, "", None, None, None, None, (request, None))
            self._link.session.workings.reply(request, row, True)
            # The last of what was in hand: no other reply comes that it could leave with.
            self._link.gather(last=not self._offering.unfinished)
        else:
            raise TypeError(f"a handler returns bytes, str or None, not {type(result).__name__}")

    def _finish(self, request: Request, state: int, again_ms: int, reason: str) -> None:
        if not self._offering.ended:
            self._link.session.workings.end(request, state, again_ms=again_ms, reason=reason)
            self._link.wake_up()

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
        if drain and not offering.ended:
            link.session.workings.drain(offering)
            link.wake_up()
            self._waker.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if drain_ms is None else drain_ms / 1000):
                    while offering.in_hand and not offering.ended:
                        await self._waker.wait()
        if not offering.ended:
            link.session.workings.close(offering)
            link.wake_up()
            self._waker.set()
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    while not offering.ended:
                        await self._waker.wait()
            except TimeoutError:
                link.session.unsubscribe(offering)
                link.wake_up()
        link.forget(offering)
        self._waker.set()

    async def __aenter__(self) -> Worker:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class _Waker:
    """Wakes the tasks that wait for requests, in the order in which they began to wait."""

    def __init__(self, offering: Any) -> None:
        self._offering = offering
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._woken = 0
        """Waiting tasks that were woken and have not had their turn yet."""

    def set(self) -> None:
        """Something arrived, or nothing will any more."""
        offering = self._offering
        over = offering.ended or offering.closing or offering.draining
        everybody = over or not offering.in_hand
        self._wake(len(self._waiting) if everybody else 1)

    def wake_another(self) -> None:
        """There is more than one can begin with: should it have to wait, others go on.

        One is enough: it wakes another before it begins. And one that need not wait has them all
        done before the other gets its turn; so a request costs a wake-up only if its handler
        waits for something.
        """
        if not self._woken:
            self._wake(1)

    def _wake(self, count: int) -> None:
        waiting = self._waiting
        while waiting and count:
            future = waiting.popleft()
            if not future.done():
                future.set_result(None)
                self._woken += 1
                count -= 1

    async def wait(self) -> None:
        """Return when there may be something."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.set()  # what it was woken for goes to the next
            raise
        finally:
            if future.done() and not future.cancelled():
                self._woken -= 1


@contextmanager
def _drain_on_signals(link: LoopLink) -> Iterator[None]:
    """Drain the client's offers at the first SIGTERM or SIGINT, cancel this task at the second."""
    loop, task = link.loop, asyncio.current_task()
    assert task is not None
    told: list[int] = []

    def heard(number: int) -> None:
        told.append(number)
        if len(told) > 1:
            task.cancel()
            return
        LOG.info("%s: the worker begins nothing more", signal.Signals(number).name)
        link.session.workings.drain_all()
        link.wake_up()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, heard, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def _together(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await all of them; the first error ends the others, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


def _caller(
    handler: Callable[[Request], Any], threads: ThreadPoolExecutor
) -> Callable[[Request], Awaitable[Any]]:
    """The handler as a coroutine function; threads: for one that is none."""
    called = (handler, type(handler).__call__)  # a function, or an object that is called
    if any(map(inspect.isasyncgenfunction, called)):

        async def replies(request: Request) -> None:
            async with aclosing(handler(request)) as bodies:
                async for body in bodies:
                    await request.reply(body, last=False)

        return replies
    if any(map(inspect.iscoroutinefunction, called)):
        return handler

    async def in_a_thread(request: Request) -> Any:
        call = partial(contextvars.copy_context().run, handler, request)
        return await asyncio.get_running_loop().run_in_executor(threads, call)

    return in_a_thread


def _over(request: Job) -> MalamuteError:
    if request.offering.ended:
        return request.offering.error or ConnectionLost("the worker is closed")
    return LocalProtocolError("conflict", f"{request!r} was finished already")
