"""The threads beside the loop: jobs in order, few calls, failures reported."""

from __future__ import annotations

import threading
import time
from typing import Any

from malamute_py.journal import JournalError, JournalFailed
from malamute_py.server.journaling.journal_threads import (
    Housekeeper,
    Synced,
    SyncFailed,
    SyncThread,
    Worker,
)
from malamute_py.server.result_queue import Died, ResultQueue
from tests.waiting import WAIT_S


def gathered(results: ResultQueue, count: int) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < count and time.monotonic() < deadline:
        found += results.take()
        time.sleep(0.001)
    return found


class SlowRing:
    """A ring whose sync takes as long as the test wants."""

    def __init__(self) -> None:
        self.end = 0
        self.syncs = 0
        self.may_end = threading.Event()
        self.begun = threading.Event()

    def sync(self) -> int:
        end = self.end
        self.syncs += 1
        self.begun.set()
        self.may_end.wait(WAIT_S)
        return end


def explain(error: Exception) -> tuple[str, str]:
    return getattr(error, "code", ""), str(error)


def test_what_gathers_during_a_sync_is_covered_by_one_more() -> None:
    results, ring = ResultQueue(), SlowRing()
    syncer = SyncThread(results, (JournalError,), explain)
    syncer.start()
    ring.end = 1
    syncer.ask("main", ring)
    assert ring.begun.wait(WAIT_S)
    for end in range(2, 100):
        ring.end = end
        syncer.ask("main", ring)
    ring.may_end.set()
    assert gathered(results, 2) == [Synced("main", 1), Synced("main", 99)]
    syncer.stop()
    assert ring.syncs == 2
    results.close()


def test_a_failed_sync_comes_back_by_its_code() -> None:
    class Failing:
        def sync(self) -> int:
            raise JournalFailed("the disk is gone")

    results = ResultQueue()
    syncer = SyncThread(results, (JournalError,), explain)
    syncer.start()
    syncer.ask("main", Failing())
    assert gathered(results, 1) == [SyncFailed("main", "journal_failed", "the disk is gone")]
    syncer.stop()
    results.close()


def test_jobs_are_done_in_order_and_those_given_before_the_end_are_done() -> None:
    results = ResultQueue()
    worker: Worker[int] = Worker("test", lambda job: job * 2, results)
    worker.start()
    for job in range(100):
        worker.put(job)
    worker.stop()
    assert results.take() == [job * 2 for job in range(100)]
    results.close()


def test_a_bug_in_a_thread_is_told_with_its_trace() -> None:
    def buggy(job: int) -> None:
        raise ZeroDivisionError("oops")

    results = ResultQueue()
    worker: Worker[int] = Worker("test", buggy, results)
    worker.start()
    worker.put(1)
    (died,) = gathered(results, 1)
    assert isinstance(died, Died)
    assert isinstance(died.error, ZeroDivisionError)
    assert "buggy" in died.trace
    worker.stop()
    results.close()


def test_housekeeping_goes_on_while_there_is_more_and_rests_until_it_is_nudged() -> None:
    left = [5]
    done = threading.Event()

    def step() -> bool:
        left[0] -= 1
        if left[0] == 0:
            done.set()
        return left[0] > 0

    results = ResultQueue()
    housekeeper = Housekeeper(step, results, idle_s=60, pause_s=0.001)
    housekeeper.start()
    assert done.wait(WAIT_S)
    done.clear()
    left[0] = 1
    housekeeper.nudge()
    assert done.wait(WAIT_S)
    housekeeper.stop()
    results.close()


def test_a_wake_after_the_end_does_nothing() -> None:
    results = ResultQueue()
    results.close()
    results.put(1)
    results.wake()
