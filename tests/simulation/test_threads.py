"""Threads in virtual time: one runs at a time, waits take virtual time, a seed repeats a run."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tests.simulation.clock import Clock
from tests.simulation.threads import Condition, Lock, SimulatedThread, Threads, sleep


class Host:
    """A process with threads."""

    def __init__(self, seed: int = 0) -> None:
        self.clock = Clock()
        rng = Random(seed)
        self.failures: list[BaseException] = []
        self.threads = Threads(
            lambda: self.clock.now_us, self.clock.after, lambda: rng.randint(1, 40),
            lambda share: rng.random() < share, lambda _, error: self.failures.append(error),
        )  # fmt: skip

    def run(self, *targets: Callable[[], None]) -> None:
        """Begin these and go on until nothing is left to do."""
        for target in targets:
            self.threads.spawn(target, target.__name__)
        while self.clock.step():
            pass


def test_a_wait_that_is_not_notified_takes_its_time_and_no_other() -> None:
    host = Host()
    told: list[tuple[bool, int]] = []

    def waits() -> None:
        lock = Lock()
        condition = Condition(lock)
        with lock:
            told.append((condition.wait(2.5), host.clock.now_us))

    host.run(waits)
    ((notified, at_us),) = told
    assert not notified
    assert 2_500_000 <= at_us < 2_501_000
    assert not host.threads.alive


def test_who_waits_is_woken_by_who_notifies_and_has_the_lock_then() -> None:
    host = Host()
    told: list[str] = []
    shared: list[Condition] = []
    locks: list[Lock] = []

    def waits() -> None:
        locks.append(Lock())
        shared.append(Condition(locks[0]))
        with locks[0]:
            told.append("waits")
            assert shared[0].wait(10.0)
            told.append("woken")

    def notifies() -> None:
        sleep(1.0)
        with locks[0]:
            shared[0].notify_all()
            sleep(1.0)
            told.append("lets go")

    host.run(waits, notifies)
    assert told == ["waits", "lets go", "woken"]
    assert host.failures == []


def increments(host: Host, seen: list[int], lock: Lock) -> Callable[[], None]:
    def increment() -> None:
        for _ in range(20):
            with lock:
                value = len(seen)
                sleep(0.000_01)
                assert len(seen) == value, "two threads had one lock"
                seen.append(host.clock.now_us)

    return increment


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_repeats_the_order_of_threads_that_want_one_lock(seed: int) -> None:
    runs = []
    for _ in range(2):
        host = Host(seed)
        seen: list[int] = []

        def main(host: Host = host, seen: list[int] = seen) -> None:
            lock = Lock()
            threads = [SimulatedThread(increments(host, seen, lock)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(seen) == 60

        host.run(main)
        assert host.failures == []
        runs.append(seen)
    assert runs[0] == runs[1]


def test_an_interrupt_ends_a_wait_for_a_condition() -> None:
    host = Host()
    told: list[int] = []

    def waits() -> None:
        me = host.threads.current
        assert me is not None
        host.clock.after(300_000, lambda: host.threads.interrupt(me))
        lock = Lock()
        condition = Condition(lock)
        with lock, pytest.raises(KeyboardInterrupt):
            condition.wait()
        told.append(host.clock.now_us)

    host.run(waits)
    assert 300_000 <= told[0] < 301_000


def test_the_threads_of_a_process_that_dies_end_at_once_and_nothing_is_said_of_it() -> None:
    host = Host()
    ended: list[str] = []

    def sleeps() -> None:
        try:
            sleep(100.0)
        finally:
            ended.append("unwound")

    def kills() -> None:
        host.clock.after(1_000, host.threads.bury)

    host.run(sleeps, kills)
    assert ended == ["unwound"]
    assert not host.threads.alive
    assert host.failures == []
