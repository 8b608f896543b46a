"""Absent holders are remembered for as long as their requests are in the queue, and in a bound."""

from __future__ import annotations

from malamute_py.broker.services.absent import ABSENT_MIN, AbsentHolders


def test_a_number_is_found_in_the_last_batch_that_begins_before_it() -> None:
    absent = AbsentHolders()
    absent.remember("ann", [(100, 0b1, 1)])
    absent.remember("ann", [(10, 0b110, 3), (100, 0b1, 1)])
    ann = absent.by_holder["ann"]
    assert [ann.rows_at(number) for number in (9, 10, 12, 99, 100)] == [
        (-1, 0), (10, 0b110), (10, 0b110), (10, 0b110), (100, 0b1),
    ]  # fmt: skip


def test_a_batch_that_left_the_queue_leaves_nothing_of_its_holders() -> None:
    absent = AbsentHolders()
    absent.remember("ann", [(10, 0b1, 1), (20, 0b1, 1)])
    absent.remember("bob", [(10, 0b1, 1)])
    absent.forget(10)
    assert list(absent.by_holder) == ["ann"]
    absent.forget(20)
    assert not absent.by_holder
    assert not absent.by_base


def test_of_a_batch_the_oldest_holder_is_forgotten_first() -> None:
    absent = AbsentHolders()
    for number in range(ABSENT_MIN + 2):
        absent.remember(f"worker{number}", [(10, 0b1, 1)])
    assert list(absent.by_holder) == [f"worker{number}" for number in range(2, ABSENT_MIN + 2)]
