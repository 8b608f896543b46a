"""Handlers of requests in threads.

Owns the threads that run a handler, and the signals that drain. The rule: what a handler raises
ends its request and nothing else.

Words: `offering` is the session's half of a worker's offer, with the requests in hand: handed out
to this worker, until the broker has confirmed their ends. One is lost when the broker may have
given it to another worker. To drain is to begin no other request while those in hand come to their
end.
"""

from __future__ import annotations

import contextlib
import inspect
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from malamute_protocol.errors import MalamuteError
from malamute_py.client.engine.log import LOG
from malamute_py.client.engine.waits import NOTHING
from malamute_py.client.session.attempts import LinkState
from malamute_py.client.session.calls import make_row
from malamute_py.client.session.offer_options import COMPLETED, FAILED, RETURNED
from malamute_py.client.session.offering import ReplyToken, RequestBase
from malamute_py.client.sync.link import ThreadLink
from malamute_py.client.words import OnError

_BODIES: Final = (bytes, bytearray, memoryview, str, list, tuple)


class HandlerRun:
    """The threads that run one handler for one worker."""

    def __init__(
        self,
        link: ThreadLink,
        offering: Any,
        following: Callable[[], Any],
        handler: Callable[[Any], Any],
        on_error: OnError,
        delay_ms: int,
    ) -> None:
        """following: waits for the worker's next request."""
        self.error: MalamuteError | None = None
        """Reason why there are no more requests."""
        self._link = link
        self._next = following
        self._handler = handler
        self._on_error = on_error
        self._delay_ms = delay_ms
        self._running = offering.asked.concurrency
        self._threads = [
            threading.Thread(target=self._handle_all, name=f"malamute-worker-{n}", daemon=True)
            for n in range(self._running)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def over(self) -> bool:
        """All threads have ended."""
        return not self._running

    def join(self) -> None:
        """Wait for the threads."""
        for thread in self._threads:
            thread.join()

    def _handle_all(self) -> None:
        """Handle one request after the other, in a thread, until there are no more."""
        link = self._link
        try:
            while (request := self._next()) is not None:
                self._handle(request)
        except MalamuteError as error:
            self.error = error
        finally:
            with link.lock:
                self._running -= 1
                link.notify()

    def _handle(self, request: Any) -> None:
        """Handle one request, marked as running meanwhile."""
        request.running = True
        try:
            self._run(request)
        finally:
            request.running = False
            if request.lost:
                with self._link.lock:
                    request.offering.ran(request)  # if it came again meanwhile, it begins now
                    self._link.notify()

    def _run(self, request: Any) -> None:
        """Call the handler, and answer the request; what it raises ends the request."""
        try:
            result: Any = self._handler(request)
            if inspect.isgenerator(result):
                replies: Any = result
                with contextlib.closing(replies):
                    for body in replies:
                        request.reply(body, last=False)
                result = None
            if not request.finished:
                self._answer(request, result)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it ends its request only
            if request.offering.ended or request.lost:
                # Another worker has it, or will: it is not ours to fail.
                LOG.warning("%r was not finished: %s", request, error)
                with self._link.lock:
                    request.offering.drop(request)
                return
            LOG.warning("the handler of %r failed", request, exc_info=True)
            if self._on_error == "fail":
                self._finish(request, FAILED, reason=f"{type(error).__name__}: {error}")
            else:
                self._finish(
                    request, RETURNED, again_ms=request.retry_ms(self._delay_ms),
                    reason=f"{type(error).__name__}: {error}",
                )  # fmt: skip

    def _answer(self, request: Any, result: Any) -> None:
        """Send what a handler returned as the reply and end of its request; None completes it."""
        if result is None:
            self._finish(request, COMPLETED)
        elif isinstance(result, _BODIES):
            row = make_row(result, "", None, None, None, None, ReplyToken(request))
            link = self._link
            with link.lock:
                if not link.has_room():
                    link.room(None, "a reply")
                request.offering.offerings.reply(request, row, last=True)
                link.wake_up()
        else:
            kind = type(result).__name__
            raise TypeError(f"a handler returns bytes, str, a list of these or None, not {kind}")

    def _finish(self, request: Any, state: int, **more: Any) -> None:
        """Give a request an end without a reply: completed, failed or returned.

        Nothing is to be said once the offer has ended: the broker has its requests then.
        """
        link = self._link
        with link.lock:
            if not request.offering.ended:
                request.offering.offerings.end(request, state, **more)
                link.wake_up()

    def raise_error(self) -> None:
        """Wait for the threads, and raise why there are no more requests."""
        self.join()
        if self.error is not None:
            raise self.error


def within_span(scope: Callable[[Any], Any], handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make a handler of the same kind that runs in `with scope(request)`, for traced workers.

    The kinds: a generator function, any other callable.
    """
    if any(map(inspect.isgeneratorfunction, (handler, type(handler).__call__))):

        def replies(request: Any) -> Iterator[Any]:
            with scope(request):
                yield from handler(request)

        return replies

    def function(request: Any) -> Any:
        with scope(request):
            return handler(request)

    return function


@contextlib.contextmanager
def drain_on_signals(link: ThreadLink) -> Iterator[None]:
    """Drain the client's offers at the first SIGTERM or SIGINT, interrupt at the second."""

    def drain(number: int) -> None:
        """Have all offers begin nothing more, and the threads that wait for requests look."""
        with link.lock:
            link.session.offerings.drain_all()
            link.wake_up()
            link.notify()
        LOG.info("%s: the worker begins nothing more", signal.Signals(number).name)

    told: list[int] = []

    def heard(number: int, frame: object) -> None:
        """Drain at the first signal; interrupt the main thread at the second."""
        told.append(number)
        if len(told) > 1:
            raise KeyboardInterrupt
        # In a thread: the signal may have come while this one changes what the lock protects.
        threading.Thread(target=drain, args=(number,), name="malamute-drain", daemon=True).start()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, heard) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def next_job(link: ThreadLink, offering: Any, timeout_ms: int | None) -> Any:
    """Wait for the next request of a worker; None when it was closed. See SyncWorker.next()."""
    found: list[RequestBase] = []

    def ready() -> bool:
        """Take a request if there is one; True: with one, or as there will be none any more."""
        request = offering.take()
        if request is not None:
            found.append(request)
        return bool(found) or offering.ended or offering.closing or offering.draining

    with link.lock:
        link.wait_for(ready, timeout_ms, NOTHING, "request")
    if found:
        return found[0]
    if offering.error is not None:
        raise offering.error
    return None


def until_one_is_over(link: ThreadLink, runs: Sequence[HandlerRun]) -> None:
    """Wait until the threads of a handler have ended, or the client is closed."""
    with link.lock:
        link.wait_for(
            lambda: any(run.over for run in runs) or link.session.state is LinkState.CLOSED,
            None,
            NOTHING,
        )
