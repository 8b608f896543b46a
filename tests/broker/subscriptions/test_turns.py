"""Turns: readers that wait for a read, by link."""

from __future__ import annotations

from malamute_py.broker.links.link import Link
from malamute_py.broker.subscriptions.turns import Turns
from tests.broker.shell import Shell


def turns(reads_max: int = 1) -> Turns[str, str]:
    return Turns(Shell(reads_max=reads_max).broker._shard)


def test_links_have_their_reads_in_turn_however_many_readers_each_has() -> None:
    waiting, busy, idle = turns(), Link(1, "", 0), Link(2, "", 0)
    for reader in ("busy 1", "busy 2", "busy 3"):
        waiting.starve(reader, busy)
    waiting.starve("idle", idle)
    waiting.starve("cohort", None)
    waiting.forget("busy 2", busy)
    waiting.forget("never waited", idle)
    assert [waiting.next_starved() for _ in range(4)] == ["busy 1", "idle", "cohort", "busy 3"]
    assert not waiting.runnable


def test_a_starved_reader_is_runnable_while_a_read_is_free() -> None:
    waiting = turns(reads_max=2)
    tokens = [waiting.begin(reader) for reader in ("one", "two")]
    waiting.starve("three", None)
    assert (waiting.may_read, waiting.runnable) == (False, False)
    assert waiting.answered(tokens[0]) == "one"
    assert waiting.answered(tokens[0]) is None
    assert (waiting.may_read, waiting.runnable) == (True, True)
    assert waiting.reads_under_way == 1
