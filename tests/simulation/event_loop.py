"""An asyncio event loop in virtual time, with simulated descriptors.

Owns the turns of one simulated program's event loop. The rules: a turn runs the callbacks that were
ready when it began, as asyncio's own loop does; a descriptor is level-triggered, as epoll shows it;
between two turns the rest of the world may do something; tasks hash by their number, so that sets
of them have one order in every run of a seed. A loop whose process was stopped turns again when the
process goes on; the loop of a dead process never does.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol


class Descriptor(Protocol):
    """An object that can be watched for reading."""

    fd: int

    @property
    def signalled(self) -> bool:
        """Whether its reader is to be called."""


class SimulatedTask(asyncio.Task[Any]):
    """A task whose place in a set does not depend on where it lies in memory."""

    def __init__(self, number: int, coro: Any, **named: Any) -> None:
        self._number = number
        super().__init__(coro, **named)

    def __hash__(self) -> int:
        return self._number


_Loop: Any = asyncio.AbstractEventLoop
"""Untyped base: methods that the client never calls, such as servers and signals, are left as they
are."""


class SimulatedLoop(_Loop):  # type: ignore[misc]
    """One program's event loop."""

    def __init__(
        self,
        now_us: Callable[[], int],
        after: Callable[[int, Callable[[], None]], None],
        pause_us: Callable[[], int],
        failed: Callable[[dict[str, Any]], None],
    ) -> None:
        """after: the schedule. pause_us: how long one turn takes. failed: a callback raised."""
        self._now_us = now_us
        self._after = after
        self._pause_us = pause_us
        self._failed = failed
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._readers: dict[int, tuple[Descriptor, asyncio.Handle]] = {}
        self.descriptors: dict[int, Descriptor] = {}
        """Number -> descriptor that a socket of this process has opened."""
        self._numbers = 0
        self._turning = False
        """True: a turn is scheduled."""
        self.frozen_until_us = 0
        self.dead = False
        self.tasks: dict[SimulatedTask, None] = {}

    # --- turns -----------------------------------------------------------------------------

    def wake(self) -> None:
        """Have a turn soon."""
        if not self._turning and not self.dead:
            self._turning = True
            delay_us = self._pause_us()
            self._after(max(delay_us, self.frozen_until_us - self._now_us()), self._begin_turn)

    def _begin_turn(self) -> None:
        self._turning = False
        if self.dead:
            return
        if self._now_us() < self.frozen_until_us:
            self.wake()
            return
        self.turn()
        if self._ready or any(descriptor.signalled for descriptor, _ in self._readers.values()):
            self.wake()

    def turn(self) -> None:
        """Run one turn: timers and descriptors, then all callbacks that were ready at its begin."""
        now_s = self.time() + 1e-9
        while self._timers and self._timers[0][0] <= now_s:
            _, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                self._ready.append(timer)
        for descriptor, handle in list(self._readers.values()):
            if descriptor.signalled:
                self._ready.append(handle)
        outer = events._get_running_loop()
        events._set_running_loop(self)
        try:
            for _ in range(len(self._ready)):
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            events._set_running_loop(outer)

    def bury(self) -> None:
        """End the tasks of a process that has died, in no time and unseen by the world."""
        self.dead = True
        for _ in range(1_000):
            alive = [task for task in self.tasks if not task.done()]
            if not alive:
                break
            for task in alive:
                task.cancel()
            self._timers.clear()
            self.turn()
        for task in self.tasks:
            if task.done() and not task.cancelled():
                task.exception()

    # --- what asyncio asks for ---------------------------------------------------------------

    def time(self) -> float:
        return self._now_us() / 1_000_000

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        self.wake()
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._numbers += 1
        heapq.heappush(self._timers, (when, self._numbers, timer))
        self._after(max(0, math.ceil((when - self.time()) * 1_000_000)), self.wake)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # It is dropped when it would be due.

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **named: Any) -> Any:
        self._numbers += 1
        task = SimulatedTask(self._numbers, coro, loop=self, **named)
        self.tasks[task] = None
        task.add_done_callback(lambda done: self.tasks.pop(done, None))
        return task

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        self._readers[fd] = self.descriptors[fd], asyncio.Handle(callback, args, self, None)
        self.wake()

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Run it as if in a thread, at some later time, with nothing else running meanwhile."""
        future = self.create_future()

        def act() -> None:
            if self.dead or future.done():
                return
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - it is the awaiting task's
                future.set_exception(error)
            else:
                future.set_result(result)

        self._after(self._pause_us(), act)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self._failed(context)

    default_exception_handler = call_exception_handler

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self.dead

    def run_coroutine(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin a task from outside of the loop."""
        task: asyncio.Task[Any] = self.create_task(work)
        return task
