"""The engine inside an asyncio event loop.

Owns the watching of the socket, the timer, and the callers that wait. The rule: the socket's
descriptor is edge-triggered, so after every step its events are asked for again; nothing
that a caller's code raises reaches the link.

Words: the session is the protocol without a socket; it turns calls into messages, and what comes
into events. The engine has the session and the socket. A step is one piece of the engine's work:
send, receive, hand out events. The window bounds the bytes that are queued or unconfirmed: it has
room, or callers wait for it. To gather is to let several callers' messages leave together. To rest
is to wait for the event loop to call again: for the socket, the timer or a caller. A call is
stamped with the time at which its wait ends; fresh calls are those that are not stamped yet: they
are stamped together, every _STAMP_MS, as a look at the clock for each would cost more.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

import zmq

from malamute_protocol.commands import Confirm
from malamute_protocol.errors import LocalProtocolError, MalamuteError, Timeout
from malamute_py.client.engine.engine import Engine, clock_ms
from malamute_py.client.engine.log import LINK_LOG, LOG, guarded
from malamute_py.client.engine.waits import ASKED, ROOM, timed_out
from malamute_py.client.session.attempts import LinkState
from malamute_py.client.session.events import (
    Answered,
    Arrived,
    Closed,
    Confirmed,
    Event,
    Linked,
    LinkEvent,
    Published,
    Settled,
    Unlinked,
    Warned,
    Watched,
)
from malamute_py.client.session.memberships import Membership
from malamute_py.client.session.publisher import confirmations
from malamute_py.client.session.session import Session
from malamute_py.client.session.step import Step
from malamute_py.client.settings import DEFAULT_WAIT, ClientSettings, Wait

if TYPE_CHECKING:
    from malamute_py.client.spans import Spans

_STAMP_MS: Final = 100
"""Bounded waits are counted from the next multiple of this on: no clock is read for each call."""
_EXACT_BELOW_MS: Final = 2_000
"""Waits that are shorter are counted from the call."""
_FRESH_MIN: Final = 1024
"""Entries of calls with a bounded wait from which on answered ones are looked for and dropped."""

Value = TypeVar("Value")


class Waker(Protocol):
    """A caller's object that is to look at what has arrived."""

    def set(self) -> None:
        """There is something, or there will be nothing any more."""

    async def wait(self) -> object:
        """Return when there may be something."""


class LoopLink:
    """One client's engine, driven by the running event loop."""

    def __init__(
        self,
        settings: ClientSettings,
        context: zmq.Context[Any] | None,
        on_link: Callable[[LinkEvent], None] | None,
    ) -> None:
        """Begin to connect. Made by Client, in the event loop that will drive it.

        on_link: called with each change of the link; what it raises is logged.
        """
        self.loop = watching_loop()
        self._thread = get_ident()
        """Thread of the event loop; asyncio's own question for that costs a system call."""
        self.engine = Engine(settings, context)
        self.session = self.engine.session
        self._window = self.session.window
        # Acknowledgements of replies may be held back to leave with the next requests: the end of
        # each turn (see _step()) lets them go.
        self.session.mailboxes.may_hold = True
        self.publisher = self.session.publisher
        self.spans: Spans | None = None
        """Maker of spans, of a traced client."""
        self.last: LinkEvent | None = None
        """The newest change of the link."""
        self.changed = asyncio.Event()
        """Set with each change of the link."""
        self.quiet = asyncio.Event()
        """Set when nothing is unconfirmed; a caller that waits for that clears it first."""
        self._on_link = on_link
        self._generation = 0
        """Number of the transport whose descriptors, `_watched`, are watched."""
        self._watched: list[int] = []
        self._scheduled = False
        """A step is about to be done, in the event loop's next turn."""
        self._resting = False
        """_rest() is about to be called, after the callers that were just told something."""
        self._told = 0
        """Callers that got an answer or a confirm in this turn and have not asked anew."""
        self._gathered = False
        """Whether those callers have said something, which leaves with what the others say."""
        self._finished = False
        """The link was stopped, and does no further step."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0
        """Time at which the timer fires."""
        self.fresh: list[tuple[asyncio.Future[Any], int, str, str]] = []
        """Calls of the last moment whose wait is bounded, with how long (-1: the default); most are
        answered before they are looked at, and need no entry below. The answered ones in front go
        with each step: memory that is used again soon is still in the processor's cache."""
        self._fresh_max = _FRESH_MIN
        """Length of `fresh` at which answered calls are dropped from all of it."""
        self._stamped_ms = 0
        """Time of the last look at `fresh`."""
        self._limits: list[tuple[int, int, asyncio.Future[Any], int, str, str]] = []
        """A heap of (time, number of the entry, future, how long, for what, its name)."""
        self._entries = 0
        """Entries of the heap until now: their numbers keep futures from being compared."""
        self._sweep_at = _FRESH_MIN
        """Length of `_limits` at which answered calls are dropped from it."""
        self._room: OrderedDict[asyncio.Future[None], int] = OrderedDict()
        """Callers that wait for room in the window, in order, and for how many bytes."""
        self._arrivals: dict[object, Waker] = {self.engine: self.changed, self.session: self.quiet}
        """Object of which callers wait for news -> its waker; see until()."""
        self._dropped: deque[Watched | Step] = deque()
        """Readers and open steps that programs dropped, perhaps amid a turn: the next ends them."""
        self.wake_up()

    # --- turning ---------------------------------------------------------------------------

    def wake_up(self) -> None:
        """Have a step done soon: what was asked for until then leaves together.

        Called by every verb that has given the session something to do. Raises LocalProtocolError:
        the event loop of this client is closed.
        """
        if not self._scheduled and not self._finished:
            try:
                self.loop.call_soon(self._scheduled_step)
            except RuntimeError:
                raise _elsewhere() from None
            self._scheduled = True

    def is_here(self) -> Literal[True]:
        """Return True; raise LocalProtocolError in another thread than the event loop's.

        Asked before a verb gives the session something to do: two threads in one session at a time
        would end the client, and with it all that others do with it.
        """
        if get_ident() != self._thread:
            self.check_loop()
            self._thread = get_ident()  # the event loop goes on in another thread, or rests
        return True

    def check_loop(self) -> None:
        """Raise LocalProtocolError unless the running event loop is the one that drives this link.

        Called where a caller would otherwise wait for ever.
        """
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        # Without any loop that runs, one that rests may be ended, as by the end of a program.
        if here is not self.loop and (here is not None or self.loop.is_running()):
            raise _elsewhere()

    def leave(self) -> None:
        """Have a record leave that publish() has just given to the session.

        It leaves at once where no other is under way. While others are unconfirmed, records gather
        until the event loop turns, or until all callers that were confirmed together have published
        anew: a caller that publishes much gets large batches, and a lone record does not wait for
        the turn.
        """
        if self._told:
            self.leave_with_others()
            return
        lone = not (self._scheduled or self._finished or self.session.window.unconfirmed_bytes)
        self.wake_up()  # also for a lone one: a step sets the timer that its confirm may need
        if lone:
            self.engine.send()

    def leave_with_others(self) -> None:
        """Have leave what a caller has just asked for, as request() does.

        Where the last step answered several callers (`_told`), it waits until each of them has
        asked for something, so that all leave together. The last of them has it sent at once: a
        turn of the event loop costs some 10 us. The others are waited for until that turn ends.
        """
        if self._told > 1:
            self._told -= 1
            self._gathered = True
        elif self._told:
            self._told = 0
            self.gather(last=True)
        else:
            self.wake_up()

    def gather(self, *, last: bool) -> None:
        """Have a step done soon: after a handler's reply, and for the last of several callers.

        last: no other reply or call will follow, and what has gathered leaves at once.
        """
        if last and not self._finished:
            self._gathered = False
            # Acknowledgements of what was just answered need not wait for other requests.
            self.session.mailboxes.holding = False
            self.engine.send()
            # A step tells of what could not be sent, and nothing else would have one done soon.
            if not self._resting or self.session.has_events:
                self.wake_up()
        elif self._resting:
            self._gathered = True
        else:
            self.wake_up()

    def _scheduled_step(self) -> None:
        """Do the step that wake_up() has asked for."""
        if self._scheduled:  # else the socket, or a gathering caller, has had it done meanwhile
            self._step()

    def _signalled(self, descriptor: int) -> None:
        """Take a step at once, as a descriptor can be read: a turn of the loop costs some 10 us."""
        transport = self.engine.transport
        if transport is not None:
            transport.signalled(descriptor)
            self._step()

    def _step(self) -> None:
        """Let the engine work once, and tell callers and receivers what came of it."""
        self._scheduled = False
        while self._dropped:
            self.session.drop(self._dropped.popleft())
        try:
            events = self.engine.step()
        except Exception as error:  # noqa: BLE001 - no caller may be left waiting for ever
            LOG.exception("the client failed; please report this")
            self.session.abandon(error)
            self.engine.drop(linger_ms=0)
            events = self.session.take_events()
        if self.engine.generation != self._generation:  # another socket
            self._generation = self.engine.generation
            self._watch()
        told = 0
        for event in events:
            if type(event) is Settled:
                # Answers to many callers at once; a token is the future that its caller awaits.
                told += len(event.pairs)
                for token, outcome in event.pairs:
                    _settle(token, outcome)
            else:
                if type(event) is Published and event.single:
                    told += event.count
                self._handle(event)
        if self._room:
            self._give_room()
        if self.fresh or self._limits:
            self._look_at_limits(self.engine.now_ms)
        if not self.quiet.is_set() and self.session.idle:
            self.quiet.set()
        # The callers who have just been told something run now, in this turn of the event loop.
        # _rest_at_last() comes after them: what they ask for leaves together.
        if self.session.mailboxes.holding:
            self._gathered = True  # held acknowledgements leave then, at the latest
        elif not events:
            self._rest()
            return
        self._told = told
        if not self._resting:
            self._resting = True
            self.loop.call_soon(self._rest_at_last)

    def _rest_at_last(self) -> None:
        """Make the step that gathering calls were waiting for, or rest if there is none.

        The event loop calls it after the callers that the last step has told something.
        """
        self._resting = False
        self._told = 0
        if self._gathered:
            self._gathered = False
            self._step()
        else:
            self._rest()

    def _rest(self) -> None:
        """Before the event loop sleeps: see that it is woken for what comes next."""
        if self._scheduled or self._finished:
            return
        if self.engine.busy:
            self.wake_up()
        else:
            self._set_timer()

    def _watch(self) -> None:
        """Have the event loop watch the descriptors of the engine's transport, its new socket."""
        for descriptor in self._watched:
            self.loop.remove_reader(descriptor)
        self._watched = []
        transport = self.engine.transport
        if transport is not None:
            self._watched = transport.descriptors
            for descriptor in self._watched:
                self.loop.add_reader(descriptor, self._signalled, descriptor)

    def _set_timer(self) -> None:
        """Have a step made when the engine, or the earliest wait of a caller, is due."""
        at_ms = self.engine.next_wake()
        if self._limits and (at_ms is None or self._limits[0][0] < at_ms):
            at_ms = self._limits[0][0]  # the earliest end of a wait
        if self.fresh and (at_ms is None or self._stamped_ms + _STAMP_MS < at_ms):
            at_ms = self._stamped_ms + _STAMP_MS
        if self._timer is not None:
            # A timer that fires too early costs one step; moving it each time would cost more.
            if at_ms is not None and self._timer_ms <= at_ms:
                return
            self._timer.cancel()
            self._timer = None
        if at_ms is not None:
            self._timer_ms = at_ms
            # A millisecond later: a timer of the loop that fires early finds nothing due.
            delay_s = max(0, at_ms - clock_ms()) / 1000 + 0.001
            self._timer = self.loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        """Take note that the timer has fired, and have a step done."""
        self._timer = None
        self.wake_up()

    def stop(self) -> None:
        """Close the session, send its last word, tell all callers, let go; may be repeated.

        Called by abort(), which close() ends with. Raises LocalProtocolError: another thread, or
        another event loop, drives this client.
        """
        if not self.loop.is_closed():
            self.check_loop()
        self.session.close()
        if self._finished:
            return
        self._finished = True
        if self.loop.is_closed():
            self.engine.step()  # The last word leaves; a closed loop has no callers to be told.
            return
        self._step()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- what happened -----------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        """Pass one event of the session on to the callers or receivers that wait for it.

        What the caller gave the session as its token comes back with the outcome: a future, or an
        object with settled(), as of a run of batches.
        """
        if type(event) is Published:
            if event.single:  # records that were published one by one, with a future each
                _confirm(event.tokens, event.outcome)
            elif event.tokens is not None:
                event.tokens.settled(event.count, event.outcome)
        elif type(event) is Arrived:
            opened = event.opened
            waker = self._arrivals.get(opened)
            if waker is not None:
                waker.set()
                if opened.ended:
                    del self._arrivals[opened]
        elif type(event) is Confirmed:
            _confirm(event.tokens, event.outcome)
        elif type(event) is Answered:
            _settle(event.token, event.outcome)
        elif type(event) is Warned:
            (LINK_LOG if event.link else LOG).warning("%s", event.message)
        elif isinstance(event, Linked | Unlinked | Closed):
            self.last = event
            self.changed.set()
            if isinstance(event, Closed):
                self._close_waiters(event)
            if self._on_link is not None:
                guarded("on_link", self._on_link, event)

    def _close_waiters(self, event: Closed) -> None:
        """Wake all callers that wait for room, arrivals or quiet: the session has ended."""
        while self._room:
            future, _ = self._room.popitem(last=False)
            if not future.done():
                future.set_result(None)  # the publish that follows raises what ended it
        for waker in self._arrivals.values():
            waker.set()
        self.quiet.set()

    # --- bounds of waiting -----------------------------------------------------------------

    def limit(
        self, future: asyncio.Future[Value], wait: Wait, what: str, name: str = ""
    ) -> asyncio.Future[Value]:
        """Have a future fail with Timeout once `wait` is over, and return it to be awaited.

        what, name: of the words of the Timeout, see waits.py. Raises LocalProtocolError: `wait` is
        no time.
        """
        if wait is DEFAULT_WAIT:
            # -1 for what most calls ask for: how long that is need be known of few of them.
            self.fresh.append((future, -1, what, name))
            return future
        wait_ms = self.engine.settings.wait_ms(wait)
        if wait_ms is None:
            return future
        self.fresh.append((future, wait_ms, what, name))
        if wait_ms < _EXACT_BELOW_MS:
            self._stamp(clock_ms())
            self.wake_up()
        return future

    def _look_at_limits(self, now_ms: int) -> None:
        """Fail the callers whose waits are over. Called in each step.

        Calls since the last look get their times first, all at once: one clock read for each costs
        more.
        """
        if self.fresh:
            if now_ms - self._stamped_ms >= _STAMP_MS:
                self._stamp(now_ms)
            else:
                self._drop_answered(self.fresh)
        limits = self._limits
        while limits:
            end_ms, _, future, wait_ms, what, name = limits[0]
            if end_ms > now_ms:
                break
            heapq.heappop(limits)
            if not future.done():
                future.set_exception(timed_out(what, name, wait_ms, self.standing()))

    def _drop_answered(self, fresh: list[tuple[asyncio.Future[Any], int, str, str]]) -> None:
        """Drop leading calls that were answered, or all such calls if many have gathered."""
        count = 0
        for future, _, _, _ in fresh:
            if not future.done():
                break
            count += 1
        del fresh[:count]
        if len(fresh) >= self._fresh_max:
            fresh[:] = [entry for entry in fresh if not entry[0].done()]  # entry[0]: the future
            self._fresh_max = max(_FRESH_MIN, 2 * len(fresh))

    def _stamp(self, now_ms: int) -> None:
        """Give the calls since the last look the times at which their waits end."""
        self._stamped_ms = now_ms
        by_default_ms = self.engine.settings.call_timeout_ms
        for future, asked_ms, what, name in self.fresh:
            wait_ms = by_default_ms if asked_ms < 0 else asked_ms  # -1: the default; see limit()
            if wait_ms is not None and not future.done():
                self._entries += 1
                entry = (now_ms + wait_ms, self._entries, future, wait_ms, what, name)
                heapq.heappush(self._limits, entry)
        self.fresh.clear()
        if len(self._limits) >= self._sweep_at:
            self._limits = [entry for entry in self._limits if not entry[2].done()]  # the future
            heapq.heapify(self._limits)
            self._sweep_at = max(_FRESH_MIN, 2 * len(self._limits))

    def standing(self) -> str:
        """Describe the link in words, for the message of a Timeout."""
        return self.session.standing(clock_ms())

    # --- waiting -------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether the window has room and no caller waits for it already.

        Asked before anything is put on its way; room() waits where it says no.
        """
        # As Window.has_room() does it, without its call for each record.
        window = self._window
        return (
            not self._room
            and window.queued_bytes + window.unconfirmed_bytes + window.passing_bytes
            < window.bytes_max
        )

    async def room(self, size: int, wait: Wait, name: str) -> Wait:
        """Wait until the window has room for more; callers are served in order.

        A caller that finds the room taken again, by a call that came in between, waits again, and
        no longer than `wait` in all. size: bytes that the caller will put on their way. name: of
        what room is wanted for. Returns what is left of `wait` for what the caller waits for next.
        Raises Timeout: there was no room in time.
        """
        wait_ms = self.engine.settings.wait_ms(wait)
        until_ms = None if wait_ms is None else clock_ms() + wait_ms
        # Once the session has ended, what the caller puts on its way raises why.
        while self.session.state is not LinkState.CLOSED:
            future = self.loop.create_future()
            self.limit(future, wait, ROOM, name)
            self._room[future] = size  # _give_room() settles the future
            self.wake_up()
            try:
                await future
            except Timeout:
                raise timed_out(ROOM, name, wait_ms, self.standing()) from None
            except asyncio.CancelledError:
                self.wake_up()  # what it was given goes to the next in line
                raise
            finally:
                # Nothing is left of a call that gave up while the broker is away.
                self._room.pop(future, None)
            wait = None if until_ms is None else max(1, until_ms - clock_ms())
            if self._window.has_room():
                break
        return wait

    def _give_room(self) -> None:
        """Wake callers that wait in room(), in order, as far as the window's room reaches."""
        left = self.session.window.left
        while self._room and left > 0:
            future, size = self._room.popitem(last=False)
            if not future.done():
                future.set_result(None)
                left -= size

    async def until_members(
        self, stream: str, group: str, ready: Callable[[Membership], bool], what: str, name: str
    ) -> None:
        """Wait until each membership of this client in a group is ready. what, name: as until().

        For verbs over a group, which is to be asked for after its members have joined or left.
        """
        for member in self.session.memberships_of(stream, group):
            await self.until(partial(ready, member), member, "default", what, name)

    def watch(self, opened: Watched, waker: Waker) -> None:
        """Have `waker.set()` called whenever what was opened has something new, until forget().

        For a worker, several tasks of which may wait; other callers wait by until().
        """
        self._arrivals[opened] = waker

    async def until(
        self, ready: Callable[[], bool], opened: object, wait: Wait, what: str, name: str = ""
    ) -> int | None:
        """Wait until `ready()`, which is called again whenever `opened` has something new.

        opened: what events are of, or what notify() is called with; the engine stands for the
        changes of the link, the session for the moment when nothing is unconfirmed. what, name: as
        of limit(). Returns how many milliseconds of `wait` are left. Raises Timeout, or
        LocalProtocolError in another event loop.
        """
        self.check_loop()
        left_ms = wait_ms = self.engine.settings.wait_ms(wait)
        until_ms = clock_ms() + (wait_ms or 0)
        while not ready():
            waker = self._arrival(opened)
            if left_ms is None:
                await waker.wait()
                continue
            # A timer of its own for each wait: asyncio.timeout() costs twice as much.
            timer = self.loop.call_later(max(0, left_ms) / 1000, waker.set)
            try:
                await waker.wait()
            finally:
                timer.cancel()
            left_ms = until_ms - clock_ms()
            if left_ms <= 0 and not ready():
                raise timed_out(what, name, wait_ms, self.standing())
        return left_ms and max(0, left_ms)

    def _arrival(self, opened: object) -> Waker:
        """Return the waker that is set when `opened` has something new from now on."""
        waker = self._arrivals.get(opened)
        if waker is None:
            waker = self._arrivals[opened] = asyncio.Event()
        elif isinstance(waker, asyncio.Event):
            waker.clear()
        return waker

    def notify(self, opened: object) -> None:
        """Have the callers that wait for `opened` look at it again.

        Called after a change that the session tells no event of, as when a caller closes it.
        """
        waker = self._arrivals.get(opened)
        if waker is not None:
            if isinstance(waker, asyncio.Event):
                del self._arrivals[opened]  # the next caller that waits brings its own
            waker.set()

    def let_go(self, opened: Watched) -> None:
        """End what no caller wants any more, as the replies of a request."""
        self.session.drop(opened)
        self.forget(opened)
        self.wake_up()

    def forget(self, opened: Watched) -> None:
        """Drop the waker of an object that no caller waits for any more."""
        self._arrivals.pop(opened, None)

    def dropped(self, opened: Watched | Step) -> None:
        """Have the next step close what a program never closed, as its object was collected.

        A finalizer of the object calls this, in any thread and amid any other call.
        """
        self._dropped.append(opened)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the link with it
            self.loop.call_soon_threadsafe(self.wake_up)

    async def ask(self, make: Callable[[int], Any], wait: Wait = "default") -> dict[str, Any]:
        """Send a command that a RESULT answers, and wait for the fields of that.

        make: returns the command, given the number by which its answer is known. Raises
        BrokerRefused, ConnectionLost, or Timeout after `wait`.
        """
        self.check_loop()
        future: asyncio.Future[dict[str, Any]] = self.loop.create_future()
        name = type(self.session.request(make, future)).__name__
        self.limit(future, wait, ASKED, name)
        self.wake_up()
        try:
            return await future
        except (Timeout, asyncio.CancelledError):
            self.session.give_up(future)
            raise


def _elsewhere() -> LocalProtocolError:
    """Return the error of a call in an event loop that does not drive the client."""
    return LocalProtocolError(
        "unexpected",
        "this client belongs to another event loop: connect in the loop that uses it, or use"
        " connect_sync()",
    )


def watching_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop. Raises RuntimeError for one that watches no descriptors."""
    loop = asyncio.get_running_loop()
    if type(loop).add_reader is asyncio.AbstractEventLoop.add_reader:
        raise RuntimeError(
            f"{type(loop).__name__} cannot watch the socket of a client (on Windows it is the"
            " default): run the program with"
            " asyncio.Runner(loop_factory=asyncio.SelectorEventLoop), or use connect_sync()"
        )
    return loop


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    """Give a future its value or error, unless its caller has cancelled it."""
    if future.done():
        return
    if isinstance(outcome, MalamuteError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _confirm(futures: Sequence[asyncio.Future[Any] | None], outcome: Any) -> None:
    """Settle the futures of the rows of a content, one a row, that was confirmed or has failed.

    futures: None for a row that no caller waits for. outcome: a Confirm, or the error.
    """
    if isinstance(outcome, Confirm):
        for future, told in zip(futures, confirmations(outcome, len(futures)), strict=True):
            if future is not None and not future.done():
                future.set_result(told)
    else:
        for future in futures:
            if future is not None and not future.done():
                future.set_exception(outcome)


class AsyncVerbs:
    """The link and the session, as a group of the client's verbs finds them.

    Each group is a class of its own over this one, and the client is nothing but their sum.
    """

    _link: LoopLink
    _session: Session
