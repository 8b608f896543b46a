"""A wheel of timers brings what is due in its order, and keeps nothing of what was taken out."""

from __future__ import annotations

from malamute_py.broker.structures.timer_wheel import TimerWheel


def test_slots_of_a_wheel_that_became_empty_are_dropped() -> None:
    wheel: TimerWheel[int] = TimerWheel()
    kept = wheel.add(1 << 50, -1)
    for number in range(100_000):
        wheel.discard(wheel.add((1 << 40) + number * 1_000, number), number)
        assert len(wheel._slots) <= 1_025
        assert len(wheel._order) <= 1_025
    assert len(wheel) == 1
    assert wheel.take(1 << 51, 10) == [-1]
    wheel.discard(kept, -1)
    assert wheel.due_ms is None


def test_many_slots_in_use_are_all_taken_in_their_order() -> None:
    wheel: TimerWheel[int] = TimerWheel()
    for number in range(5_000):
        wheel.add(number * 10, number)
    for number in range(0, 5_000, 2):
        wheel.discard(-(-number * 10 // 8), number)
    wheel.add(60_000, 5_000)
    found = []
    while wheel.due_ms is not None:
        found += wheel.take(wheel.due_ms * 8, 7)
    assert found == [*range(1, 5_000, 2), 5_000]
