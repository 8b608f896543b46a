"""Turns: readers that wait for a read, by link."""

from __future__ import annotations

from malamute_py.broker.subscriptions.turns import Turns
from tests.broker.shell import Shell


def turns(reads_max: int = 1) -> Turns[str, str]:
    return Turns(Shell(reads_max=reads_max).broker._shard)


def test_a_starved_reader_is_runnable_while_a_read_is_free() -> None:
    waiting = turns(reads_max=2)
    tokens = [waiting.begin(reader) for reader in ("one", "two")]
    waiting.starved.add(None, "three")
    assert (waiting.may_read, waiting.runnable) == (False, False)
    assert waiting.answered(tokens[0]) == "one"
    assert waiting.answered(tokens[0]) is None
    assert (waiting.may_read, waiting.runnable) == (True, True)
    assert waiting.reads_under_way == 1
