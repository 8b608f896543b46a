"""A fair queue against what it is for: each owner has a turn, and its items keep their order."""

from __future__ import annotations

from malamute_py.broker.structures.fair_queue import FairQueue


def test_owners_have_their_turns_however_many_items_each_has() -> None:
    queue: FairQueue[str, int] = FairQueue()
    assert not queue
    for number in range(5):
        queue.add("a", number)
    queue.add("b", 10)
    queue.add("c", 20)
    queue.discard("a", 2)
    queue.discard("c", 21)
    queue.discard("d", 30)
    assert [queue.take() for _ in range(3)] == [0, 10, 20]
    queue.add("b", 11)
    assert [queue.take() for _ in range(4)] == [1, 11, 3, 4]
    queue.add("b", 12)
    queue.discard("b", 12)
    assert not queue


def test_an_item_whose_turn_it_was_is_first_until_it_waits_no_longer() -> None:
    queue: FairQueue[str, int] = FairQueue()
    queue.add("a", 0)
    queue.add("a", 1)
    queue.add("b", 10)
    assert [queue.turn() for _ in range(4)] == [0, 10, 0, 10]
    queue.discard("a", 0)
    assert [queue.turn() for _ in range(3)] == [1, 10, 1]
