"""Threads in virtual time: those of one simulated program, of which one runs at a time.

Owns the baton. Each simulated thread is a thread of the operating system, so that the client's
blocking code runs as it is; it runs only between being handed the baton by the schedule and its
next wait. The rules: only a lock, a condition, a poll, a join or a sleep gives the baton back, and
the taking of a lock does so now and then though it is free, as a thread may be preempted there;
every wake-up of a thread goes through the schedule, so that a seed repeats a run; a thread of a
dead process is unwound by an exception at its next wait, unseen by the world.
"""

from __future__ import annotations

import _thread
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar, Final
from unittest.mock import patch

from malamute_py.client.engine import bell
from malamute_py.client.sync import handlers as sync_handlers
from malamute_py.client.sync import link as thread_module
from tests.simulation.event_loop import Descriptor

PREEMPTED: Final = 0.1
"""How often a thread is stopped before it takes a lock that is free."""
_STACK_BYTES: Final = 256 << 10


class Killed(BaseException):
    """The process of this thread has died."""


class SimulatedThread:
    """Stands in for threading.Thread, and has the baton of it."""

    def __init__(
        self, target: Callable[..., Any], name: str = "", daemon: bool = True, args: Any = ()
    ) -> None:
        threads = Threads.running()
        self.threads = threads
        self.name = name
        self.over = False
        self.parked = False
        """True: it waits, and nothing has woken it."""
        self.token = 0
        """Number of its waits: the end of an earlier wait does nothing."""
        self.interrupted = False
        """True: a signal's exception is raised in its next or present wait for a condition."""
        self._target = target
        self._args = args
        self._go = _thread.allocate_lock()
        self._go.acquire()
        self._joining: list[SimulatedThread] = []

    def start(self) -> None:
        """Begin the thread, at some later time."""
        self.threads.begin(self)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it is over."""
        me = self.threads.current
        assert me is not None
        if not self.over and not self.threads.dead:
            self._joining.append(me)
            self.threads.park(timeout)

    def is_alive(self) -> bool:
        """Whether the thread is not over."""
        return not self.over

    def run(self) -> None:
        """Run the whole of it, in the thread of the operating system."""
        threads = self.threads
        self._go.acquire()
        try:
            if not threads.dead:
                self._target(*self._args)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - it ends a thread of a program
            threads.failed(self, error)
        self.over = True
        threads.alive.pop(self, None)
        for waiting in self._joining:
            threads.ready(waiting)
        threads.back.release()

    def take_baton(self) -> None:
        """Hand the baton to this thread, and wait until it is back; in the thread that has it."""
        self._go.release()
        self.threads.back.acquire()

    def give_baton(self) -> None:
        """Give the baton back, and wait until it comes again; in this thread."""
        self.threads.back.release()
        self._go.acquire()


class Threads:
    """The threads of one process."""

    _running: Threads | None = None
    """The process whose thread has the baton."""

    def __init__(
        self,
        now_us: Callable[[], int],
        after: Callable[[int, Callable[[], None]], None],
        draw_us: Callable[[], int],
        chance: Callable[[float], bool],
        failed: Callable[[SimulatedThread, BaseException], None],
    ) -> None:
        """after: the schedule. draw_us: how long it takes until a thread runs that may run."""
        self.now_us = now_us
        self.after = after
        self.draw_us = draw_us
        self.chance = chance
        self.failed = failed
        self.back = _thread.allocate_lock()
        self.back.acquire()
        self.current: SimulatedThread | None = None
        self.alive: dict[SimulatedThread, None] = {}
        self.descriptors: dict[int, Descriptor] = {}
        """Number -> descriptor that a socket of this process has opened."""
        self.polling: dict[SimulatedThread, None] = {}
        self.frozen_until_us = 0
        self.dead = False

    @classmethod
    def running(cls) -> Threads:
        """The process whose thread runs now."""
        assert cls._running is not None, "outside of every simulated thread"
        return cls._running

    def spawn(self, target: Callable[..., Any], name: str, *args: Any) -> SimulatedThread:
        """Begin a thread from outside."""
        outer, Threads._running = Threads._running, self
        thread = SimulatedThread(target, name, args=args)
        Threads._running = outer
        thread.start()
        return thread

    def begin(self, thread: SimulatedThread) -> None:
        """Have a thread run for the first time, some time."""
        if self.dead:
            raise Killed
        self.alive[thread] = None
        _thread.start_new_thread(thread.run, ())
        thread.parked = True
        self.ready(thread)

    def ready(self, thread: SimulatedThread) -> None:
        """Note that the awaited event of a thread has happened: let it look, at some later time."""
        if thread.parked and not self.dead:
            thread.parked = False
            self._schedule(thread)

    def _schedule(self, thread: SimulatedThread) -> None:
        frozen_us = self.frozen_until_us - self.now_us()
        self.after(max(self.draw_us(), frozen_us), lambda: self._run(thread))

    def _run(self, thread: SimulatedThread) -> None:
        if self.dead or thread.over:
            return
        if self.now_us() < self.frozen_until_us:
            self._schedule(thread)
        else:
            self._hand(thread)

    def _hand(self, thread: SimulatedThread) -> None:
        outer, before = Threads._running, self.current
        Threads._running, self.current = self, thread
        thread.take_baton()
        Threads._running, self.current = outer, before

    def park(self, timeout_s: float | None = None) -> None:
        """Wait until woken, or so long; in a thread. Raises Killed."""
        me = self.current
        assert me is not None
        if self.dead:
            raise Killed
        me.token += 1
        me.parked = True
        if timeout_s is not None:
            token = me.token

            def due() -> None:
                if me.token == token:
                    self.ready(me)

            self.after(max(0, math.ceil(timeout_s * 1_000_000)), due)
        me.give_baton()
        if self.dead:
            raise Killed

    def preempt(self) -> None:
        """Let others run first; in a thread."""
        if not self.dead and self.chance(PREEMPTED):
            self.park(0.0)

    def interrupt(self, thread: SimulatedThread) -> None:
        """Do as Ctrl-C: a wait for a condition ends by KeyboardInterrupt."""
        thread.interrupted = True
        self.ready(thread)

    def wake(self) -> None:
        """Note that a descriptor can be read."""
        for thread in self.polling:
            self.ready(thread)

    def bury(self) -> None:
        """End the threads of a process that has died, in no time and unseen by the world."""
        self.dead = True
        while self.alive:
            self._hand(next(iter(self.alive)))


# --- what the client's modules have of threading, select, os and time -----------------------------


class Lock:
    """Stands in for threading.Lock."""

    def __init__(self) -> None:
        self._threads = Threads.running()
        self._taken = False
        self._waiting: deque[SimulatedThread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; a waiting thread may find it taken again by another."""
        threads = self._threads
        if threads.dead:
            return True
        if blocking and threads.current is not None:
            threads.preempt()
            while self._taken:
                me = threads.current
                assert me is not None
                self._waiting.append(me)
                threads.park()
                if me in self._waiting:
                    self._waiting.remove(me)  # It was woken by the event of another wait.
        elif self._taken:
            return False
        self._taken = True
        return True

    def release(self) -> None:
        """Let it go."""
        self._taken = False
        if self._waiting:
            self._threads.ready(self._waiting.popleft())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """Stands in for threading.Condition over a Lock."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._threads = Threads.running()
        self._waiting: dict[SimulatedThread, None] = {}

    def wait(self, timeout: float | None = None) -> bool:
        """Give up the lock until it is notified, or so long."""
        threads = self._threads
        me = threads.current
        assert me is not None
        self._waiting[me] = None
        self._lock.release()
        try:
            if not me.interrupted:
                threads.park(timeout)
        finally:
            notified = self._waiting.pop(me, self) is self
            self._take(threads)
        if me.interrupted:
            me.interrupted = False
            raise KeyboardInterrupt
        return notified

    def _take(self, threads: Threads) -> None:
        if not threads.dead:
            self._lock.acquire()

    def notify_all(self) -> None:
        """Let all waiting threads look again."""
        waiting, self._waiting = self._waiting, {}
        for thread in waiting:
            self._threads.ready(thread)


class Pipe:
    """Both ends of a pipe; the bytes in it are counted."""

    every: ClassVar[dict[int, Pipe]] = {}
    """Number -> pipe, of all processes: an object that a thread collects may be another
    process's."""
    numbers: Final = count(1 << 20)

    def __init__(self, threads: Threads) -> None:
        self.fd, self.writer = next(self.numbers), next(self.numbers)
        self.threads = threads
        self.bytes = 0
        self.every[self.fd] = self.every[self.writer] = self

    @property
    def signalled(self) -> bool:
        """Whether its reader is to be called."""
        return self.bytes > 0


class _Os:
    """Stands in for the module os, as far as the client's thread uses it."""

    O_NONBLOCK = O_CLOEXEC = 0

    @staticmethod
    def pipe2(_flags: int) -> tuple[int, int]:
        pipe = Pipe(Threads.running())
        return pipe.fd, pipe.writer

    @staticmethod
    def write(fd: int, data: bytes) -> int:
        pipe = Pipe.every[fd]
        pipe.bytes += len(data)
        pipe.threads.wake()
        return len(data)

    @staticmethod
    def read(fd: int, most: int) -> bytes:
        pipe = Pipe.every[fd]
        if not pipe.bytes:
            raise BlockingIOError
        taken = min(most, pipe.bytes)
        pipe.bytes -= taken
        return bytes(taken)

    @staticmethod
    def close(fd: int) -> None:
        del Pipe.every[fd]


class _Poll:
    """Stands in for select.poll."""

    def __init__(self) -> None:
        self._threads = Threads.running()
        self._watched: dict[int, Descriptor] = {}

    def register(self, fd: int, _events: int) -> None:
        self._watched[fd] = Pipe.every.get(fd) or self._threads.descriptors[fd]

    def unregister(self, fd: int) -> None:
        del self._watched[fd]

    def poll(self, timeout_ms: int | None = None) -> list[tuple[int, int]]:
        threads = self._threads
        me = threads.current
        assert me is not None
        found = self._found()
        if not found and timeout_ms != 0:
            threads.polling[me] = None
            try:
                threads.park(None if timeout_ms is None else timeout_ms / 1000)
            finally:
                del threads.polling[me]
            found = self._found()
        return found

    def _found(self) -> list[tuple[int, int]]:
        return [(fd, 1) for fd, watched in self._watched.items() if watched.signalled]


def sleep(seconds: float) -> None:
    """Stands in for time.sleep."""
    Threads.running().park(seconds)


def _current() -> SimulatedThread | None:
    running = Threads._running
    return None if running is None else running.current


@contextmanager
def simulated_threads() -> Iterator[None]:
    """Have the synchronous client run on simulated threads for a while."""
    fakes = SimpleNamespace(
        Lock=Lock, Condition=Condition, Thread=SimulatedThread, current_thread=_current
    )
    clock = SimpleNamespace(monotonic=lambda: Threads.running().now_us() / 1_000_000)
    with ExitStack() as stack:
        for module, name, fake in (
            (thread_module, "threading", fakes),
            (sync_handlers, "threading", fakes),
            (bell, "os", _Os),
            (bell, "select", SimpleNamespace(poll=_Poll)),
            (thread_module, "time", clock),
        ):
            stack.enter_context(patch.object(module, name, fake))
        stack.callback(_thread.stack_size, _thread.stack_size(_STACK_BYTES))
        yield
