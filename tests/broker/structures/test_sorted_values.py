"""Ordered collections against the obvious: a sorted list, a dictionary of times."""

from __future__ import annotations

import random

import pytest

from malamute_py.broker.structures import sorted_values
from malamute_py.broker.structures.sorted_values import Ordered, Schedule
from tests.seeds import seeds


@pytest.mark.parametrize("seed", seeds(6, 20))
def test_numbers_stay_in_order_whatever_comes_and_goes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorted_values, "CHUNK", 4)
    draw = random.Random(seed)
    numbers: Ordered[int] = Ordered()
    twin: set[int] = set()
    for _ in range(400):
        value = draw.randrange(120)
        many = [draw.randrange(120) for _ in range(draw.randrange(9))]
        if draw.random() < 0.1:
            numbers.add_many(many)
            twin.update(many)
        elif draw.random() < 0.5:
            numbers.add(value)
            twin.add(value)
        else:
            numbers.discard(value)
            twin.discard(value)
        expected = sorted(twin)
        assert list(numbers) == expected
        assert len(numbers) == len(expected)
        assert bool(numbers) == bool(expected)
        if expected:
            assert (numbers.first, numbers.last) == (expected[0], expected[-1])
        probe = draw.randrange(-1, 121)
        assert list(numbers.after(probe)) == [one for one in expected if one > probe]
        assert numbers.floor(probe) == max((one for one in expected if one <= probe), default=None)


def test_what_rises_and_is_taken_from_the_front_leaves_nothing() -> None:
    numbers: Ordered[int] = Ordered()
    for value in range(5_000):
        numbers.add(value)
    for value in range(5_000):
        assert numbers.first == value
        numbers.discard(value)
    assert not numbers
    numbers.discard(1)


def test_a_place_is_due_once_at_its_last_time() -> None:
    schedule = Schedule()
    schedule.set((1, 10), 500)
    schedule.set((1, 11), 300)
    schedule.set((2, 10), 400)
    schedule.set((1, 10), 200)
    schedule.set((1, 10), 200)
    schedule.drop((2, 10))
    schedule.drop((9, 9))
    assert (1, 10) in schedule
    assert (2, 10) not in schedule
    assert len(schedule) == 2
    assert schedule.due_ms == 200
    assert schedule.pop_due(199) is None
    assert [schedule.pop_due(300), schedule.pop_due(300), schedule.pop_due(300)] == [
        (1, 10),
        (1, 11),
        None,
    ]
    assert schedule.due_ms is None
