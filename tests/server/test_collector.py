"""The daemon has Python's collector look at all objects at the right times."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import zmq

from malamute_protocol.commands import Ping
from malamute_protocol.framing import decode_message, encode_message
from malamute_protocol.limits import DEFAULT_LIMITS
from malamute_py.config import Config
from malamute_py.server.collector import COMMANDS_A_LOOK, Collector
from tests.server.fakes import RunningLoop


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = gc.get_threshold()
    gc.freeze()  # what other tests left would take a second to look at
    yield
    gc.set_threshold(*before)


class Clock:
    """Nanoseconds that go on by so much at each look."""

    def __init__(self) -> None:
        self.now_ns = self.step_ns = 0

    def __call__(self) -> int:
        self.now_ns += self.step_ns
        return self.now_ns


class Knot:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.own = self


def grow_old(looks: int = 110) -> None:
    """Have the collector look so many times at objects that get old."""
    for _ in range(looks):
        gc.collect(1)


def passes(collector: Collector) -> int:
    return collector.facts()["collector_passes_total"]


def test_old_objects_are_looked_at_while_the_loop_rests_and_garbage_among_them_is_counted() -> None:
    collector = Collector(Clock())
    collector.begin()
    knots = [Knot() for _ in range(100)]
    grow_old()
    del knots
    collector.rest(0)
    facts = collector.facts()
    assert facts["collector_passes_total"] == 1
    assert facts["collector_garbage_total"] >= 100


def test_a_loop_that_rests_after_little_has_come_has_nothing_looked_at() -> None:
    collector = Collector(Clock())
    collector.begin()
    grow_old(10)
    collector.rest(0)
    assert passes(collector) == 0


def test_all_objects_are_looked_at_once_a_minute_at_most() -> None:
    collector = Collector(Clock())
    collector.begin()
    for now_ms, seen in ((0, 1), (59_999, 1), (60_000, 2)):
        grow_old()
        collector.rest(now_ms)
        assert passes(collector) == seen


def test_a_look_that_takes_long_is_seldom() -> None:
    clock = Clock()
    clock.step_ns = 500_000_000
    collector = Collector(clock)
    collector.begin()
    for now_ms, seen in ((0, 1), (499_999, 1), (500_000, 2)):
        grow_old()
        collector.rest(now_ms)
        assert passes(collector) == seen


@pytest.mark.moderate
def test_what_was_there_at_the_beginning_is_never_looked_at_again() -> None:
    kept = Knot()
    collector = Collector(Clock())
    collector.begin()
    assert gc.get_freeze_count() > 0
    assert not any(each is kept for each in gc.get_objects())


def test_young_garbage_goes_by_a_look_and_what_outlived_one_look_by_the_third() -> None:
    """Python would not look while as much is freed as is made."""
    collector = Collector(Clock())
    collector.begin()
    gc.disable()
    try:
        young, kept = Knot(), Knot()
        known, known_kept = weakref.ref(young), weakref.ref(kept)
        del young
        collector.look()
        assert known() is None
        del kept
        collector.look()
        assert known_kept() is not None
        collector.look()
        assert known_kept() is None
    finally:
        gc.enable()


class Resting(Collector):
    """Notes when the loop rests, and how often young objects are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.at_ms: list[int] = []
        self.looks = 0

    def look(self) -> None:
        self.looks += 1

    def rest(self, now_ms: int) -> None:
        self.at_ms.append(now_ms)


@pytest.mark.moderate
def test_the_loop_rests_when_nothing_has_come_for_a_second() -> None:
    collector = Resting()
    with RunningLoop(Config(listen=["tcp://127.0.0.1:0"]), collector) as running:
        loop = running.loop
        running.stop_the_clock()
        running.leap(500)
        came_ms = running._now_ms()
        running.until(lambda: loop._active_ms == came_ms)
        collector.at_ms.clear()
        running.let_pass(999)
        running.until(lambda: loop._now_ms == came_ms + 999)
        turn = loop._turns
        running.until(lambda: loop._turns > turn)
        assert collector.at_ms == []
        running.let_pass(1)
        running.until(lambda: collector.at_ms)


def test_young_objects_are_looked_at_after_so_many_commands() -> None:
    collector = Resting()
    peer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    with RunningLoop(Config(listen=["tcp://127.0.0.1:0"]), collector) as running, peer:
        peer.connect(running.endpoint)
        for count in (COMMANDS_A_LOOK - 1, 1, COMMANDS_A_LOOK):
            looks = collector.looks
            peer.send_multipart(encode_message([Ping(n) for n in range(count)]))
            heard = 0
            while heard < count:
                heard += len(decode_message(peer.recv_multipart(), DEFAULT_LIMITS))
            if count == COMMANDS_A_LOOK - 1:
                assert collector.looks == 0
            else:
                running.until(lambda looks=looks: collector.looks == looks + 1)
