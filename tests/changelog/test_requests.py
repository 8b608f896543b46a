"""Rows of requests and of their dead letters: each in one place, whatever the log says of them."""

from __future__ import annotations

import random

import pytest

from malamute_py.changelog.applying import apply
from malamute_py.changelog.records import (
    Change,
    MailAgain,
    MailDone,
    RequestDead,
    RequestDone,
    RequestPut,
    RequestRevived,
    WorkReceived,
    WorkReturned,
    WorkTaken,
    rows_of,
)
from malamute_py.changelog.tables import Queues, RequestRow, Tables

COUNT = 4


def change_of(chance: random.Random) -> Change:
    rows = [(0, rows_of(chance.randrange(1 << COUNT)))]
    changes: list[Change] = [
        WorkTaken(1, rows, chance.choice(["ann", "bob"]), 10, 5),
        WorkReceived(1, rows),
        WorkReturned(1, rows, chance.choice(["died", "withdrawn"]), chance.choice([0, 50]), 9),
        RequestDone(1, rows),
        RequestDead(1, rows, 2, "died", 20),
        RequestRevived(2, 1, rows, 30),
        MailAgain(2, rows, chance.choice([0, 70])),
        MailDone(2, rows),
    ]
    return chance.choice(changes)


def disjoint(masks: list[int]) -> int:
    """Return all rows of the masks, of which no two share one."""
    every = 0
    for mask in masks:
        assert not mask & every
        every |= mask
    return every


def check(row: RequestRow) -> None:
    assert row.left
    held = disjoint([hold.rows for hold in row.holds])
    assert disjoint([row.waiting, held]) == row.left
    assert all(hold.rows | hold.received == hold.rows != 0 for hold in row.holds)
    assert disjoint(list(row.delayed.values())) | row.waiting == row.waiting
    assert disjoint(list(row.attempts.values())) < 1 << COUNT


@pytest.mark.parametrize("seed", range(200))
def test_a_row_waits_or_is_held_or_is_a_dead_letter_or_is_gone(seed: int) -> None:
    chance, tables, queues = random.Random(seed), Tables(), Queues()
    apply(tables, queues, RequestPut(1, 0, COUNT, 10, "ann", "ann", 5, delay_ms=seed % 2 * 7))
    for _ in range(20):
        apply(tables, queues, change_of(chance))
        for request in queues.requests.values():
            check(request)
        for place, message in queues.messages.items():
            known = queues.requests.get(place[1])
            assert message.left
            assert known is None or not known.left & message.left


def test_dead_letters_that_are_gone_are_not_revived() -> None:
    tables, queues = Tables(), Queues()
    apply(tables, queues, RequestPut(1, 0, COUNT, 10, "ann", "ann", 5))
    apply(tables, queues, RequestDead(1, [(0, b"")], 2, "died", 20))
    apply(tables, queues, MailDone(2, [(0, b"\x03")]))
    apply(tables, queues, RequestRevived(2, 1, [(0, b"\x03")], 30))
    assert not queues.requests
    assert queues.messages[2, 0].left == 0b1100
