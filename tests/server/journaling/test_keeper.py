"""The threads beside the loop: in order, few calls, failures told."""

from __future__ import annotations

import threading
import time
from typing import Any

from malamute_py.journal import JournalError, JournalFailed
from malamute_py.server.journaling.keeper import (
    Died,
    Housekeeper,
    Inbox,
    Synced,
    SyncFailed,
    SyncThread,
    Worker,
)
from tests.waiting import WAIT_S


def gathered(inbox: Inbox, count: int) -> list[Any]:
    results: list[Any] = []
    deadline = time.monotonic() + WAIT_S
    while len(results) < count and time.monotonic() < deadline:
        results += inbox.take()
        time.sleep(0.001)
    return results


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
    inbox, ring = Inbox(), SlowRing()
    syncer = SyncThread(inbox, (JournalError,), explain)
    syncer.start()
    ring.end = 1
    syncer.ask("main", ring)
    assert ring.begun.wait(WAIT_S)
    for end in range(2, 100):
        ring.end = end
        syncer.ask("main", ring)
    ring.may_end.set()
    assert gathered(inbox, 2) == [Synced("main", 1), Synced("main", 99)]
    syncer.stop()
    assert ring.syncs == 2
    inbox.close()


def test_a_failed_sync_comes_back_by_its_code() -> None:
    class Failing:
        def sync(self) -> int:
            raise JournalFailed("the disk is gone")

    inbox = Inbox()
    syncer = SyncThread(inbox, (JournalError,), explain)
    syncer.start()
    syncer.ask("main", Failing())
    assert gathered(inbox, 1) == [SyncFailed("main", "journal_failed", "the disk is gone")]
    syncer.stop()
    inbox.close()


def test_jobs_are_done_in_order_and_those_given_before_the_end_are_done() -> None:
    inbox = Inbox()
    worker: Worker[int] = Worker("test", lambda job: job * 2, inbox)
    worker.start()
    for job in range(100):
        worker.put(job)
    worker.stop()
    assert inbox.take() == [job * 2 for job in range(100)]
    inbox.close()


def test_a_bug_in_a_thread_is_told_with_its_trace() -> None:
    def buggy(job: int) -> None:
        raise ZeroDivisionError("oops")

    inbox = Inbox()
    worker: Worker[int] = Worker("test", buggy, inbox)
    worker.start()
    worker.put(1)
    (died,) = gathered(inbox, 1)
    assert isinstance(died, Died)
    assert isinstance(died.error, ZeroDivisionError)
    assert "buggy" in died.trace
    worker.stop()
    inbox.close()


def test_housekeeping_goes_on_while_there_is_more_and_rests_until_it_is_nudged() -> None:
    left = [5]
    done = threading.Event()

    def step() -> bool:
        left[0] -= 1
        if left[0] == 0:
            done.set()
        return left[0] > 0

    inbox = Inbox()
    keeper = Housekeeper(step, inbox, idle_s=60, pause_s=0.001)
    keeper.start()
    assert done.wait(WAIT_S)
    done.clear()
    left[0] = 1
    keeper.nudge()
    assert done.wait(WAIT_S)
    keeper.stop()
    inbox.close()


def test_a_wake_after_the_end_does_nothing() -> None:
    inbox = Inbox()
    inbox.close()
    inbox.put(1)
    inbox.wake()
