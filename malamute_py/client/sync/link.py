"""The engine inside a thread of its own, for callers in any thread.

Owns the thread, the lock over the session, and the callers that wait. The rule: only this
thread touches the socket; callers change the session under the lock and wake the thread;
a caller that waits can be interrupted, by a timeout or by the client's end. A forked child has
neither thread nor socket: there every call says so instead of waiting for ever.

Words: the session is the protocol without a socket; it turns calls into messages, and what comes
into events. The engine has the session and the socket. A step is one piece of the engine's work:
send, receive, hand out events. The window bounds the bytes that are queued or unconfirmed: it has
room, or callers wait for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import zmq

from malamute_protocol.commands import Confirm
from malamute_protocol.errors import BrokerRefused, MalamuteError, Timeout
from malamute_py.client.engine.bell import READABLE, Bell, Poller, poller
from malamute_py.client.engine.engine import Engine, clock_ms
from malamute_py.client.engine.log import LINK_LOG, LOG, guarded
from malamute_py.client.engine.waits import ANSWER, ASKED, ROOM, timed_out
from malamute_py.client.session.attempts import LinkState
from malamute_py.client.session.events import (
    Answered,
    Arrived,
    Confirmed,
    Event,
    LinkEvent,
    Published,
    Settled,
    Warned,
    Watched,
)
from malamute_py.client.session.memberships import Membership
from malamute_py.client.session.publisher import confirmations
from malamute_py.client.session.session import Session
from malamute_py.client.session.step import Step
from malamute_py.client.settings import ClientSettings, Wait

if TYPE_CHECKING:
    from malamute_py.client.spans import Spans

Value = TypeVar("Value")

_JOIN_S: Final = 5.0
"""How long stop() waits for the thread to end."""


class Pending(Generic[Value]):
    """A value that is still to come; of one ThreadLink, any thread may wait for it."""

    __slots__ = ("_done", "_error", "_link", "_value")

    def __init__(self, link: ThreadLink) -> None:
        self._link = link
        self._done = False
        self._value: Value | None = None
        self._error: MalamuteError | None = None

    @property
    def done(self) -> bool:
        """The value, or what went wrong, is there."""
        return self._done

    def result(self, timeout_ms: Wait = "default", what: str = ANSWER, name: str = "") -> Value:
        """Wait for the value; what, name: of the words of a Timeout, see waits.py.

        Raises Timeout (it may still come), or what went wrong: see the call that gave this.
        """
        if not self._done:
            with self._link.lock:
                self._link.wait_for(lambda: self._done, timeout_ms, what, name)
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def settle(self, outcome: Any) -> None:
        """Called by the link, under its lock."""
        if isinstance(outcome, MalamuteError):
            self._error = outcome
        else:
            self._value = outcome
        self._done = True


class ThreadLink:
    """One client's engine in its own thread."""

    def __init__(
        self,
        settings: ClientSettings,
        context: zmq.Context[Any] | None,
        on_link: Callable[[LinkEvent], None] | None,
    ) -> None:
        """Begin to connect, in a thread of the link's own.

        on_link: called in that thread; what it raises is logged.
        """
        self.lock = threading.Lock()
        """Over the session and everything that callers share with the thread."""
        self.spans: Spans | None = None
        """Maker of spans, of a traced client."""
        self.pending_type: type[Pending[Any]] = Pending
        """Type of what a call that does not wait returns; a traced client has its own."""
        self.last: LinkEvent | None = None
        """The newest change of the link."""
        self.engine = Engine(settings, context)
        self.session = self.engine.session
        self.publisher = self.session.publisher
        self.has_room = self.session.window.has_room
        self._happened = threading.Condition(self.lock)
        """Notified when waiting callers are to look again."""
        self._waiting = 0
        """Callers that wait."""
        self._on_link = on_link
        self._dropped: deque[Watched | Step] = deque()
        """Readers and open steps that programs dropped, perhaps amid a turn: the next ends them."""
        self._awake = True
        """Whether the thread does a step before it sleeps again: it need not be woken."""
        self._stopping = False
        self._bell = Bell()
        self._thread = threading.Thread(target=self._run, name="malamute-client", daemon=True)
        _LINKS.add(self)
        self._thread.start()

    # --- callers, under the lock -----------------------------------------------------------

    def wake_up(self) -> None:
        """Have a step done: what was asked for until it begins leaves together."""
        if not self._awake:
            self._awake = True
            with contextlib.suppress(BlockingIOError):  # it has rung so often that it is heard
                self._bell.ring()

    def wait_for(self, ready: Callable[[], bool], wait: Wait, what: str, name: str = "") -> None:
        """Give up the lock until `ready()`. Raises Timeout; what, name: its words, see waits.py."""
        timeout_ms = self.engine.settings.wait_ms(wait)
        if threading.current_thread() is self._thread and not ready():
            raise RuntimeError("on_link runs in the client's own thread: nothing can be awaited")
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        self._waiting += 1
        try:
            while not ready():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    standing = self.session.standing(clock_ms())
                    raise timed_out(what, name, timeout_ms, standing)
                self._happened.wait(left)
        finally:
            self._waiting -= 1

    def dropped(self, opened: Watched | Step) -> None:
        """Have the next step close what a program never closed, as its object was collected.

        A finalizer of the object calls this, amid anything, the lock held by this very thread
        included: no lock here. The thread notices with its next step, a heartbeat later at most.
        """
        self._dropped.append(opened)

    def let_go(self, opened: Watched) -> None:
        """End what no caller wants any more; may be called amid anything, as dropped()."""
        if self.lock.acquire(blocking=False):
            try:
                self.session.drop(opened)
                self.wake_up()
            finally:
                self.lock.release()
        else:
            self.dropped(opened)

    def until(self, ready: Callable[[], bool], wait: Wait, what: str, name: str = "") -> int | None:
        """Wait under the lock until `ready()`, which is called again when anything has happened.

        what, name: of the words of the Timeout, see waits.py. Returns how many milliseconds of
        `wait` are left. Raises Timeout.
        """
        wait_ms = self.engine.settings.wait_ms(wait)
        until_ms = None if wait_ms is None else clock_ms() + wait_ms
        self.wait_for(ready, wait_ms, what, name)
        return None if until_ms is None else max(0, until_ms - clock_ms())

    def until_members(
        self, stream: str, group: str, ready: Callable[[Membership], bool], what: str, name: str
    ) -> None:
        """Wait until each membership of this client in a group is ready. what, name: as until()."""
        with self.lock:
            for member in self.session.memberships_of(stream, group):
                self.until(partial(ready, member), "default", what, name)

    def room(self, wait: Wait, name: str) -> Wait:
        """Wait under the lock until the window has room, or the session is over.

        name: of what room is wanted for. Returns what is left of `wait` for what the caller waits
        for next. Raises Timeout, or BrokerRefused `window` where `wait` is 0.
        """
        session = self.session
        try:
            left_ms = self.until(
                lambda: self.has_room() or session.state is LinkState.CLOSED, wait, ROOM, name
            )
        except Timeout:
            if wait:
                raise
            raise BrokerRefused("window", "too much is unconfirmed: wait for some of it") from None
        return None if left_ms is None else max(1, left_ms)

    def notify(self) -> None:
        """Have all waiting callers look again."""
        self._happened.notify_all()

    def ask(self, make: Callable[[int], Any], wait: Wait = "default") -> dict[str, Any]:
        """Send a command that a RESULT answers, and wait for the fields of that; takes the lock.

        make: returns the command, given the number by which its answer is known. Raises
        BrokerRefused, ConnectionLost, or Timeout after `wait`.
        """
        pending: Pending[dict[str, Any]] = Pending(self)
        with self.lock:
            name = type(self.session.request(make, pending)).__name__
            self.wake_up()
        try:
            return pending.result(wait, ASKED, name)
        finally:
            if not pending.done:
                with self.lock:
                    self.session.give_up(pending)

    def standing(self) -> str:
        """Describe the link in words; takes the lock itself."""
        with self.lock:
            return self.session.standing(clock_ms())

    def stop(self) -> None:
        """Close the session, send its last word, end the thread; may be repeated."""
        with self.lock:
            self.session.close()
            self._stopping = True
            self.wake_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def forked(self) -> None:
        """In the child of a fork: everything fails with ConnectionLost; the parent goes on."""
        # The lock may have been held, and no thread is left to release it.
        self.lock = threading.Lock()
        self._happened = threading.Condition(self.lock)
        self._waiting = 0
        self._awake = True  # for good: the bell is the parent's, too
        reason = "the process was forked after it had connected: connect in the child"
        self.session.lost("closed", reason, clock_ms(), final=True)
        for event in self.session.take_events():
            self._handle(event)

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        """Drive the engine until the link is stopped; the thread's whole life."""
        try:
            self._turn_to_the_end()
        except BaseException as error:  # noqa: BLE001 - see there
            # A defect of ours: without this thread, all callers would wait for ever.
            LOG.exception("the client's thread failed; please report this")
            with self.lock:
                self.session.abandon(RuntimeError(repr(error)))
                for event in self.session.take_events():
                    self._handle(event)
                self.notify()
        finally:
            with self.lock:
                self._awake = True  # for good: nothing is written to what is closed
                self.engine.drop(linger_ms=0)
                self._bell.close()

    def _turn_to_the_end(self) -> None:
        """Do a step, tell those that wait for it, and sleep; again and again until stop()."""
        waiting = poller()
        waiting.register(self._bell.descriptor, READABLE)
        watched: list[int] = []
        generation = 0
        while True:
            with self.lock:
                self._awake = True
                while self._dropped:
                    self.session.drop(self._dropped.popleft())
                events = self._step()
                told = [event for event in events if self._handle(event)]
                # Who waits for everything to be confirmed is told by no event of its own.
                if self._waiting and (events or self.session.idle):
                    self._happened.notify_all()
                if self.engine.generation != generation:  # another socket
                    generation = self.engine.generation
                    watched = self._watch(waiting, watched)
                busy = self.engine.busy
                stopping = self._stopping
                wake_ms = self.engine.next_wake()
                self._awake = busy
            # Without the lock: on_link may call the client.
            if self._on_link is not None:
                for event in told:
                    guarded("on_link", self._on_link, event)
            if stopping:
                break
            if not busy:
                self._sleep(waiting, wake_ms)

    def _step(self) -> list[Event]:
        """Let the engine work once, and return what happened; a defect of ours ends the session."""
        try:
            return self.engine.step()
        except Exception as error:  # noqa: BLE001 - no caller may be left waiting for ever
            LOG.exception("the client failed; please report this")
            self.session.abandon(error)
            self.engine.drop(linger_ms=0)
            return self.session.take_events()

    def _watch(self, waiting: Poller, watched: list[int]) -> list[int]:
        """Have the poller watch the engine's new socket; returns its descriptors.

        watched: those of the socket before.
        """
        for descriptor in watched:
            with contextlib.suppress(KeyError):
                waiting.unregister(descriptor)
        transport = self.engine.transport
        if transport is None:
            return []
        watched = transport.descriptors
        for descriptor in watched:
            waiting.register(descriptor, READABLE)
        return watched

    def _sleep(self, waiting: Poller, wake_ms: int | None) -> None:
        """Sleep until a caller rings, the socket signals, or a time has come (None: no time)."""
        # A millisecond later: a sleep that ends early finds nothing due.
        timeout_ms = None if wake_ms is None else max(0, wake_ms - clock_ms()) + 1
        for descriptor, _ in waiting.poll(timeout_ms):
            if descriptor == self._bell.descriptor:
                with contextlib.suppress(BlockingIOError):
                    self._bell.silence()
            elif self.engine.transport is not None:
                self.engine.transport.signalled(descriptor)

    def _handle(self, event: Event) -> bool:
        """Settle the callers that an event is about; True for an event that on_link gets.

        What a caller gave the session as its token comes back with the outcome: a Pending, or an
        object with settled(), as of a run of batches.
        """
        if isinstance(event, Published):
            if event.single:  # records that were published one by one
                _confirm(event.tokens, event.outcome)
            elif event.tokens is not None:
                event.tokens.settled(event.count, event.outcome)
        elif isinstance(event, Answered):
            event.token.settle(event.outcome)
        elif isinstance(event, Confirmed):
            _confirm(event.tokens, event.outcome)
        elif isinstance(event, Settled):
            for token, outcome in event.pairs:
                token.settle(outcome)
        elif isinstance(event, Warned):
            (LINK_LOG if event.link else LOG).warning("%s", event.message)
        elif isinstance(event, Arrived):
            pass  # the waiting caller looks at the reading itself
        else:
            self.last = event
            return True
        return False


def _confirm(tokens: Sequence[Pending[Any] | None], outcome: Any) -> None:
    """Settle the tokens of the rows of a content, one a row, that was confirmed or has failed.

    tokens: None for a row that no caller waits for. outcome: a Confirm, or the error.
    """
    if isinstance(outcome, Confirm):
        for pending, told in zip(tokens, confirmations(outcome, len(tokens)), strict=True):
            if pending is not None:
                pending.settle(told)
    else:
        for pending in tokens:
            if pending is not None:
                pending.settle(outcome)


_LINKS: Final[weakref.WeakSet[ThreadLink]] = weakref.WeakSet()


def _after_fork() -> None:
    """Have each link of the process fail its calls, in the child of a fork."""
    for link in list(_LINKS):
        link.forked()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)


class SyncVerbs:
    """The link and the session, as a group of the client's verbs finds them.

    Each group is a class of its own over this one, and the client is nothing but their sum.
    """

    _link: ThreadLink
    _session: Session
