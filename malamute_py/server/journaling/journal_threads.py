"""The journal's threads: sync, reader, housekeeping.

Owns the threads that work beside the loop. The rule: they exchange plain messages with it, share no
state, and are given few, large calls, because a thread that takes the interpreter lock often fights
the loop for it. A journal's own errors come back as messages; any other exception is a bug of ours,
comes back as `Died`, and stops the daemon. Source: docs/design.md (The core and its shell;
Journal).
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from malamute_py.server.result_queue import Died, ResultQueue

Job = TypeVar("Job")
_GO_ON: Final = False
_END: Final = True


class Synced(NamedTuple):
    """A ring is on disk up to here."""

    ring: str
    lsn: int


class SyncFailed(NamedTuple):
    """A sync failed: the ring takes nothing more."""

    ring: str
    code: str
    reason: str


class Trimmed(NamedTuple):
    """A ring let go of records: the first offset of each stream that it concerns."""

    ring: str
    first_offsets: dict[int, int]


class RingEvent(NamedTuple):
    """An event of a ring by itself, for the log."""

    ring: str
    name: str
    facts: dict[str, Any]


class Worker(Generic[Job]):
    """A thread that does jobs of one kind, one after another, in the order in which they came."""

    def __init__(self, name: str, do: Callable[[Job], object | None], results: ResultQueue) -> None:
        """name: of the thread. do: does a job in it, and returns a result for the loop, or None."""
        self._name = name
        self._do = do
        self._results = results
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"malamute-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, job: Job) -> None:
        """Give the thread a job; from the loop."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Finish the jobs that were given, then end."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        """Run the thread: one job after the other; an unforeseen error ends the daemon."""
        try:
            while (job := self._jobs.get()) is not None:
                result = self._do(job)
                if result is not None:
                    self._results.put(result)
        except BaseException as error:  # noqa: BLE001 - told to the loop, which stops the daemon
            self._results.put(Died(self._name, error, traceback.format_exc()))


class Syncable(Protocol):
    """The part of a ring that the sync thread uses."""

    def sync(self) -> int: ...  # noqa: D102


class SyncThread:
    """Syncs rings that have something new, and nothing else: group commit.

    While it syncs, more is appended; the next sync covers all of that.
    """

    def __init__(
        self, results: ResultQueue, failures: tuple[type[Exception], ...],
        explain: Callable[[Exception], tuple[str, str]],
        took: Callable[[str, int], None] = lambda name, took_ns: None,
    ) -> None:  # fmt: skip
        """failures: errors that are told to the loop; any other one is a bug, and ends the broker.

        explain: returns code and reason of a failure. took: called in the thread with the ring and
        the nanoseconds that its sync took.
        """
        self._failures = failures
        self._explain = explain
        self._took = took
        self._asked: set[str] = set()
        self._worker: Worker[tuple[str, Syncable]] = Worker("sync", self._sync, results)
        self.start = self._worker.start
        self.stop = self._worker.stop

    def ask(self, name: str, ring: Syncable) -> bool:
        """Have the ring synced with what was appended so far; from the loop.

        False: a sync is to begin that covers this, too; otherwise one more result will come.
        """
        if name in self._asked:
            return False
        self._asked.add(name)
        self._worker.put((name, ring))
        return True

    def _sync(self, job: tuple[str, Syncable]) -> object:
        """Sync a ring, in the sync thread; returns Synced, or SyncFailed with the reason."""
        name, ring = job
        # _asked: rings whose sync is asked for and has not begun. An append from here on may come
        # too late for this sync, and asks for another one.
        self._asked.discard(name)
        began = time.perf_counter_ns()
        try:
            synced = Synced(name, ring.sync())
            self._took(name, time.perf_counter_ns() - began)
            return synced
        except self._failures as error:
            return SyncFailed(name, *self._explain(error))


class Housekeeper:
    """A thread that prepares and retires segments in small pieces, with pauses."""

    def __init__(
        self, step: Callable[[], bool], results: ResultQueue, *, idle_s: float, pause_s: float
    ) -> None:
        """step: does a piece of work; True: there is more. pause_s, idle_s: between two pieces.

        idle_s: where the last piece left nothing to do.
        """
        self._step = step
        self._results = results
        self._idle_s = idle_s
        self._pause_s = pause_s
        self._nudges: SimpleQueue[bool] = SimpleQueue()
        """_GO_ON ends a pause early, _END the thread."""
        self._thread = threading.Thread(target=self._run, name="malamute-housekeeping", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def nudge(self) -> None:
        """Wake the thread, for which there may be something to do; from the loop."""
        if self._nudges.empty():
            self._nudges.put(_GO_ON)

    def stop(self) -> None:
        """End after the piece of work that is under way."""
        if self._thread.is_alive():
            self._nudges.put(_END)
            self._thread.join()

    def _run(self) -> None:
        """Run the thread: a piece of housekeeping, then a pause, which is long when none was left.

        nudge() ends a pause early, stop() the thread.
        """
        try:
            while True:
                pause_s = self._pause_s if self._step() else self._idle_s
                try:
                    if self._nudges.get(timeout=pause_s) is _END:
                        return
                except Empty:
                    continue
        except BaseException as error:  # noqa: BLE001 - told to the loop, which stops the daemon
            self._results.put(Died("housekeeping", error, traceback.format_exc()))
