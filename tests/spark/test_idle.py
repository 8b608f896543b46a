"""Waits for records: only of a source that Spark asks alone."""

from __future__ import annotations

from pyspark_malamute.idle import IdleWait
from tests.spark.scripted import Clock


def waits(clock: Clock, idle: IdleWait, start: str = "s") -> float:
    """Seconds that one call waits that finds nothing; the next begins 15 ms after it."""
    before_s = clock.now_s
    idle.begin(start)
    while idle.pause():
        pass
    idle.end(start)
    waited_s = clock.now_s - before_s
    clock.now_s += 0.015
    return waited_s


def test_the_only_source_of_an_idle_query_waits_longer_from_call_to_call_up_to_its_option() -> None:
    clock = Clock()
    idle = IdleWait(200, clock.read, clock.sleep)
    waited = [waits(clock, idle) for _ in range(9)]
    assert waited[0] == 0
    assert 0 < waited[1] < waited[4] < waited[8]
    assert 0.15 < waited[8] <= 0.2001
    unwilling = IdleWait(0, clock.read, clock.sleep)
    assert {waits(clock, unwilling) for _ in range(9)} == {0}


def test_eight_idle_sources_of_one_query_soon_wait_for_nothing() -> None:
    clock = Clock()
    sources = [IdleWait(200, clock.read, clock.sleep) for _ in range(8)]
    rounds = [sum(waits(clock, idle) for idle in sources) for _ in range(50)]
    assert sum(rounds) < 0.7
    assert rounds[8:] == [0] * 42


def test_a_source_waits_no_more_once_another_source_had_a_batch() -> None:
    clock = Clock()
    idle = IdleWait(200, clock.read, clock.sleep)
    assert waits(clock, idle) + waits(clock, idle) > 0
    idle.batch_began()
    assert [waits(clock, idle) for _ in range(5)] == [0] * 5


def test_a_source_that_had_the_batch_itself_begins_with_short_waits_again() -> None:
    clock = Clock()
    idle = IdleWait(200, clock.read, clock.sleep)
    for _ in range(9):
        waits(clock, idle)
    idle.begin("s")
    idle.end(None)
    idle.batch_began()
    clock.now_s += 3.0
    assert waits(clock, idle, "t") == 0
    assert 0 < waits(clock, idle, "t") < 0.02
