"""Handlers of requests in tasks of the event loop.

Owns the tasks that run a handler, the waking of those that wait for requests, and the signals that
drain. The rule: what a handler raises ends its request and nothing else; of the tasks that wait for
requests, no more are woken than have something to begin with.

Words: `offering` is the session's half of a worker's offer, with the requests in hand: handed out
to this worker, until the broker has confirmed their ends. One is lost when the broker may have
given it to another worker. To drain is to begin no other request while those in hand come to their
end.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import signal
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any, Final

from malamute_py.client.aio.link import LoopLink
from malamute_py.client.engine.log import LOG
from malamute_py.client.session.calls import make_row
from malamute_py.client.session.offer_options import COMPLETED, FAILED, RELEASED, RETURNED
from malamute_py.client.session.offering import ReplyToken
from malamute_py.client.words import OnError

_BODIES: Final = (bytes, bytearray, memoryview, str, list, tuple)


class HandlerRun:
    """The tasks that run one handler for one worker."""

    def __init__(
        self,
        link: LoopLink,
        offering: Any,
        begin: Callable[[], Any],
        following: Callable[[], Awaitable[Any]],
        on_error: OnError,
        delay_ms: int,
    ) -> None:
        """begin: returns the worker's next request if there is one; following: waits for the next.

        on_error, delay_ms: of what a handler raises; see Client.serve().
        """
        self._link = link
        self._offering = offering
        self._begin = begin
        self._next = following
        self._on_error = on_error
        self._delay_ms = delay_ms
        self._ending = False
        """One of the tasks has ended by an error, so that the others are cancelled."""
        self._parent: asyncio.Task[Any] | None = None
        """The task that waits for all of them."""

    async def to_the_end(self, handler: Callable[[Any], Any]) -> None:
        """Run the handler, as many times at once as the offer's concurrency; see Worker.run()."""
        concurrency = self._offering.asked.concurrency
        # Not the event loop's threads: those are few, and others wait for them.
        threads = ThreadPoolExecutor(concurrency, "malamute-worker")
        self._parent = asyncio.current_task()
        try:
            call = _caller(handler, threads)
            await together(self._handle_all(call) for _ in range(concurrency))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    async def _handle_all(self, call: Callable[[Any], Awaitable[Any]]) -> None:
        """Handle requests until the offer ends or this run does, whatever a handler does to it."""
        while True:
            try:
                await self._handle_each(call)
            except asyncio.CancelledError:
                # A handler may have cancelled its task and returned before it waited for anything.
                if not self._is_handlers_own():
                    raise
            except BaseException:
                self._ending = True
                raise
            else:
                return

    def _is_handlers_own(self) -> bool:
        """Whether a handler has cancelled the task that runs it, which then goes on."""
        task, parent = asyncio.current_task(), self._parent
        assert task is not None
        assert parent is not None
        if self._ending or parent.cancelling() or not task.cancelling():
            return False
        while task.cancelling():
            task.uncancel()
        return True

    async def _handle_each(self, call: Callable[[Any], Awaitable[Any]]) -> None:
        """Call the handler for one request after the other, and answer or return each."""
        # A request that is there already is begun with without a coroutine more.
        while (request := self._begin() or await self._next()) is not None:
            request.running = True
            try:
                result = await call(request)
                if not request.finished:
                    if not self._link.has_room():
                        # Its size is known once it is encoded; only what has room is encoded.
                        await self._link.room(size=0, wait=None, name="a reply")
                    self._answer(request, result)
            except (Exception, asyncio.CancelledError) as error:
                # The error ends its request and nothing else, unless this run itself is cancelled.
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                    if not self._is_handlers_own():
                        self._finish(request, RELEASED)
                        raise
                if self._offering.ended or request.lost:
                    # Another worker has it, or will: it is not ours to fail.
                    LOG.warning("%r was not finished: %s", request, error)
                    self._offering.drop(request)
                    continue
                LOG.warning("the handler of %r failed", request, exc_info=True)
                reason = f"{type(error).__name__}: {error}"
                if self._on_error == "fail":
                    self._finish(request, FAILED, reason=reason)
                else:
                    again_ms = request.retry_ms(self._delay_ms)
                    self._finish(request, RETURNED, again_ms=again_ms, reason=reason)
            finally:
                request.running = False
                if request.lost:
                    self._offering.ran(request)  # if it came again meanwhile, it begins now

    def _answer(self, request: Any, result: Any) -> None:
        """Send what a handler returned as the reply and end of its request; None completes it."""
        if result is None:
            self._finish(request, COMPLETED)
        elif isinstance(result, _BODIES):
            row = make_row(result, "", None, None, None, None, ReplyToken(request))
            self._link.session.offerings.reply(request, row, last=True)
            # The last of what was in hand: no other reply comes that it could leave with.
            self._link.gather(last=not self._offering.unfinished)
        else:
            kind = type(result).__name__
            raise TypeError(f"a handler returns bytes, str, a list of these or None, not {kind}")

    def _finish(self, request: Any, state: int, *, again_ms: int = 0, reason: str = "") -> None:
        """Give a request an end without a reply: completed, failed, returned or released.

        Nothing is to be said once the offer has ended: the broker has its requests then.
        """
        if not self._offering.ended:
            self._link.session.offerings.end(request, state, again_ms=again_ms, reason=reason)
            self._link.wake_up()


class RequestWaker:
    """Wakes the tasks that wait for requests, in the order in which they began to wait."""

    def __init__(self, offering: Any) -> None:
        """offering: whose requests the tasks wait for."""
        self._offering = offering
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._woken = 0
        """Waiting tasks that were woken and have not had their turn yet."""

    def set(self) -> None:
        """Wake tasks, called by the link: something arrived, or nothing will any more.

        One is enough for requests that arrived, since each wakes another where there are more. All
        are woken when they are to end, or when no request is in hand: the news is of the offer.
        """
        offering = self._offering
        over = offering.ended or offering.closing or offering.draining
        wake_all = over or not offering.in_hand
        self._wake(len(self._waiting) if wake_all else 1)

    def wake_another(self) -> None:
        """Wake one more waiting task: there are more requests than the calling task begins now.

        One is enough, since each task wakes another before it begins. A handler that waits for
        nothing has them all done before that task's turn: a request costs a wake-up only if its
        handler waits.
        """
        if not self._woken:
            self._wake(1)

    def _wake(self, count: int) -> None:
        """Wake so many of the tasks that wait for a request, the longest waiting first."""
        waiting = self._waiting
        while waiting and count:
            future = waiting.popleft()
            if not future.done():
                future.set_result(None)
                self._woken += 1
                count -= 1

    async def wait(self) -> None:
        """Return when there may be a request to begin."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # it was woken, and then cancelled
                self.set()  # what it was woken for goes to the next
            raise
        finally:
            if future.done() and not future.cancelled():
                self._woken -= 1


@contextmanager
def drain_on_signals(link: LoopLink) -> Iterator[None]:
    """Drain the client's offers at the first SIGTERM or SIGINT, cancel this task at the second."""
    loop, task = link.loop, asyncio.current_task()
    assert task is not None
    told: list[int] = []

    def heard(number: int) -> None:
        """Drain the client's offers at the first signal; cancel the task at the second."""
        told.append(number)
        if len(told) > 1:
            task.cancel()
            return
        link.session.offerings.drain_all()
        link.wake_up()
        LOG.info("%s: the worker begins nothing more", signal.Signals(number).name)

    def interrupted(number: int, frame: object) -> None:
        """Have the event loop hear a signal, where it has no handlers of its own."""
        loop.call_soon_threadsafe(heard, number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        try:
            loop.add_signal_handler(number, heard, number)
        except NotImplementedError:  # Windows
            signal.signal(number, interrupted)
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(NotImplementedError):
                loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def together(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await all calls; the first error ends the others, and is raised itself, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call)
    except BaseExceptionGroup as failed:
        first, *_ = failed.exceptions
        raise first from None


def within_span(scope: Callable[[Any], Any], handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make a handler of the same kind that runs in `with scope(request)`, for traced workers.

    The kinds: an async generator function, a coroutine function, any other callable.
    """
    called = (handler, type(handler).__call__)  # a function, or an object that is called
    if any(map(inspect.isasyncgenfunction, called)):

        async def replies(request: Any) -> AsyncGenerator[Any, None]:
            """Yield the handler's replies; its code between them runs within the span, too."""
            with scope(request):
                async with aclosing(handler(request)) as bodies:
                    async for body in bodies:
                        yield body

        return replies
    if any(map(inspect.iscoroutinefunction, called)):

        async def coroutine(request: Any) -> Any:
            with scope(request):
                return await handler(request)

        return coroutine

    def function(request: Any) -> Any:
        with scope(request):
            return handler(request)

    return function


def _caller(
    handler: Callable[[Any], Any], threads: ThreadPoolExecutor
) -> Callable[[Any], Awaitable[Any]]:
    """Return the handler as a coroutine function of a request, whose result is the last reply.

    An async generator's values are replies, none of them the last. threads: for a handler that is
    no coroutine function; it sees the context variables of the task that calls it.
    """
    called = (handler, type(handler).__call__)  # a function, or an object that is called
    if any(map(inspect.isasyncgenfunction, called)):

        async def replies(request: Any) -> None:
            """Send each value as a reply; the None that this returns completes the request."""
            async with aclosing(handler(request)) as bodies:
                async for body in bodies:
                    await request.reply(body, last=False)

        return replies
    if any(map(inspect.iscoroutinefunction, called)):
        return handler

    async def in_a_thread(request: Any) -> Any:
        call = partial(contextvars.copy_context().run, handler, request)
        return await asyncio.get_running_loop().run_in_executor(threads, call)

    return in_a_thread
