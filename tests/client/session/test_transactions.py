"""Open transactions in the session: in which steps their records leave."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.errors import LocalProtocolError
from malamute_protocol.limits import DEFAULT_LIMITS, Limits
from malamute_py.client.session.calls import make_row
from malamute_py.client.session.step import Step
from malamute_py.client.session.transactions import CHUNK_ROWS, OpenTransaction
from tests.client.session.test_steps import Stepping

ID, KEY = b"i" * 16, b"\xff" * 16


def opened(limits: Limits = DEFAULT_LIMITS) -> OpenTransaction:
    transaction = OpenTransaction(ID, KEY, "default")
    transaction.begin(500, limits)
    return transaction


def sent(step: Step) -> list[Any]:
    """Return the commands in which a step leaves: ATOMIC and its parts."""
    stepping = Stepping()
    stepping.add(step)
    stepping.step()
    (message,) = stepping.sent()
    return [command for command, _ in message]


def test_a_beginning_is_a_step_of_its_own() -> None:
    atomic, begin = sent(OpenTransaction(ID, KEY, "default").begin(500, DEFAULT_LIMITS))
    assert begin == c.BeginTransaction(ID, 0, 500)
    assert (atomic.level, atomic.key) == (c.Level.STORED, KEY)


def test_a_small_transaction_leaves_as_plain_records_with_its_commit() -> None:
    transaction = opened()
    transaction.chunk.publish("a", b"1")
    transaction.chunk.publish("b", b"2")
    atomic, *parts = sent(transaction.commit())
    assert atomic.level == c.Level.DEFAULT
    assert parts == [c.Publish("a", 0), c.Publish("b", 0), c.CommitTransaction(ID, 0, 0)]
    assert not transaction.was_staged


def test_chunks_are_staged_and_have_their_places() -> None:
    transaction = opened()
    transaction.chunk.publish("a", b"1")
    transaction.chunk.publish("b", b"2")
    first, *parts = sent(transaction.take())
    assert parts == [c.Stage(ID, "a", 0, 0), c.Stage(ID, "b", 1, 0)]
    transaction.chunk.publish("a", b"3")
    second, *parts = sent(transaction.commit())
    assert parts == [c.Stage(ID, "a", 2, 0), c.CommitTransaction(ID, 3, 0)]
    assert first.key != second.key, "each step is taken once"


def test_a_chunk_is_full_by_its_rows_and_by_its_bytes() -> None:
    transaction = opened()
    assert not transaction.is_full()
    transaction.chunk.publish_many("a", [b""] * (CHUNK_ROWS - 1))
    assert not transaction.is_full()
    transaction.chunk.publish("a", b"")
    assert transaction.is_full()
    transaction.take()
    transaction.chunk.publish("a", b"x" * (1 << 20))
    assert transaction.is_full()


def test_a_chunk_is_no_larger_than_the_broker_takes() -> None:
    transaction = opened(Limits(batch_records_max=2, batch_bytes_max=1_000))
    transaction.chunk.publish("a", b"1")
    transaction.chunk.publish("a", b"2")
    assert transaction.is_full()
    transaction.take()
    transaction.chunk.publish("a", b"x" * 501)
    assert transaction.is_full()


def test_rows_are_added_until_the_chunk_is_full() -> None:
    transaction = opened(Limits(batch_records_max=3, batch_bytes_max=1_000))
    rows = [make_row(b"x" * size, "", None, None, None, None, None, None) for size in (1, 2, 3, 4)]
    assert transaction.add("a", rows) == 3
    assert transaction.add("a", rows, 3) == 3
    transaction.take()
    assert transaction.add("a", rows, 3) == 4
    (wide,) = (make_row(b"x" * 600, "", None, None, None, None, None, None),)
    assert transaction.add("a", [wide]) == 0
    transaction.take()
    assert transaction.add("a", [wide, wide]) == 1


def test_steps_of_a_transaction_are_merged_with_no_other() -> None:
    stepping = Stepping()
    step = Step()
    step.publish("a", b"other")
    stepping.add(step)
    for _ in range(2):
        transaction = opened()
        transaction.chunk.publish("a", b"own")
        stepping.add(transaction.commit())
    stepping.step()
    assert [len(message) for message in stepping.sent()] == [2, 3, 3]


def test_what_is_over_takes_no_more_records() -> None:
    transaction = opened()
    transaction.roll_back()
    with pytest.raises(LocalProtocolError):
        transaction.chunk.publish("a", b"1")
    with pytest.raises(LocalProtocolError):
        transaction.commit()


def test_what_is_too_large_leaves_again_in_halves_and_in_order() -> None:
    transaction = opened()
    for number in range(4):
        transaction.chunk.publish("own", b"%d" % number * 1_000)
    transaction.take()
    transaction.chunk.publish("own", b"later")
    assert transaction.split()
    halves: list[Any] = []
    while (step := transaction.take_half()) is not None:
        halves += sent(step)[1:]
    assert halves == [c.Stage(ID, "own", 0, 0), c.Stage(ID, "own", 1, 0)]
    assert not transaction.split(), "nothing is left that could be smaller"
    assert transaction.is_full() is False
    _, *parts = sent(transaction.commit())
    assert parts == [c.Stage(ID, "own", 2, 0), c.CommitTransaction(ID, 3, 0)]


def test_a_commit_that_is_too_large_comes_again_alone_once_its_records_are_staged() -> None:
    transaction = opened()
    transaction.chunk.publish("own", b"1")
    transaction.chunk.publish("own", b"2")
    transaction.commit()
    transaction.commit_again()
    assert transaction.split()
    while transaction.take_half() is not None:
        pass
    assert sent(transaction.commit_again())[1:] == [c.CommitTransaction(ID, 2, 0)]


def test_one_record_that_is_too_large_cannot_be_split() -> None:
    transaction = opened()
    transaction.chunk.publish("own", b"1")
    transaction.take()
    assert not transaction.split()
