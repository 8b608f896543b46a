"""Messages that wait for their turn: their order, and the memory that they take."""

from __future__ import annotations

import random
import tracemalloc
from collections import deque

from malamute_py.server.waiting import CHUNK_BYTES, Arrived, Waiting


def message(number: int, size: int, frames: int = 1) -> Arrived:
    data = b"%08d" % number + bytes(size)
    return Arrived([data, *[bytes(9)] * (frames - 1)], size + number % 7, frames)


def test_messages_of_all_sizes_are_taken_in_the_order_in_which_they_came() -> None:
    draw = random.Random(5)
    waiting, expected = Waiting(), deque[Arrived]()
    for number in range(20_000):
        size = draw.choice((0, 10, 300, 300, 4_088, 4_089, 70_000 if number % 50 == 0 else 0))
        one = message(number, size, draw.choice((1, 1, 1, 1, 3)))
        waiting.add(one)
        expected.append(one)
        while expected and draw.random() < 0.48:
            assert waiting.take() == expected.popleft()
        assert len(waiting) == len(expected)
    while expected:
        assert waiting.take() == expected.popleft()
    assert not waiting


def test_all_that_waits_can_be_dropped_from_its_end() -> None:
    waiting = Waiting()
    for number in range(3_000):
        waiting.add(message(number, 100, 3 if number % 1_000 == 0 else 1))
    waiting.take()
    waiting.take()
    freed = []
    while waiting:
        before = len(waiting)
        freed.append(len(waiting.drop()))
        assert len(waiting) < before
    assert sum(freed) == 2 * 3, "of the three of several frames, one was taken"
    assert len(freed) <= 2 + 3 + 3_000 * 108 // CHUNK_BYTES


def test_a_hundred_thousand_small_messages_take_little_more_than_their_bytes() -> None:
    """600,000 of 360 bytes took 360 MiB, and 390 MiB stayed when all were gone."""
    waiting = Waiting()
    tracemalloc.start()
    try:
        for number in range(100_000):
            waiting.add(message(number, 92))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 1.3 * 100_000 * 100
