"""Pins: the history that cursors hold back, up to a bound."""

from __future__ import annotations

import pytest

from malamute_protocol import commands as wire
from tests.broker.cursors.cursor_world import ME, edit, events, info, move, trim, world
from tests.broker.shell import Shell


def fill(shell: Shell, count: int, stream: str = "s") -> None:
    for _ in range(count):
        shell.publish(1, stream, [bytes(1_000)])


def test_a_pin_is_told_to_the_journal_and_moves_with_its_cursor() -> None:
    shell = world()
    edit(shell, [2, 3], pin=True)
    assert shell.pins == {("main", "cursor-1-c"): (1, 3)}
    assert info(shell)["pinned"] is True
    move(shell, 8)
    assert shell.pins == {("main", "cursor-1-c"): (1, 8)}
    shell.restart()
    assert shell.pins == {("main", "cursor-1-c"): (1, 8)}
    shell.hello(ME)
    edit(shell, pin=False)
    assert shell.pins == {}


def test_a_cursor_that_is_removed_gives_its_pin_up() -> None:
    shell = world()
    edit(shell, pin=True)
    shell.send(ME, wire.RemoveCursor(5, "s", "c"))
    assert shell.pins == {}
    assert shell.broker.gauges["pins"] == 0


def test_a_pin_is_warned_of_before_it_breaks() -> None:
    shell = world()
    edit(shell, [1], pin=True, pin_bytes_max=20_000)
    fill(shell, 10)
    shell.wait(1_000)
    assert not events(shell, "pin_near_limit")
    fill(shell, 5)
    shell.wait(1_000)
    (warning,) = events(shell, "pin_near_limit")
    assert 16_000 <= warning["bytes"] <= 20_000
    assert shell.pins
    fill(shell, 5)
    shell.wait(1_000)
    assert len(events(shell, "pin_near_limit")) == 1
    assert [one["cursor"] for one in events(shell, "pin_broken")] == ["c"]
    assert shell.broker.counters["pins_broken"] == 1
    assert shell.pins == {}
    assert info(shell)["pinned"] is False
    shell.wait(5_000)
    assert shell.pins == {}
    move(shell, info(shell)["tail"])
    assert shell.pins == {("main", "cursor-1-c"): (1, info(shell)["tail"])}


def test_a_pin_breaks_in_time_however_much_is_published_within_a_second() -> None:
    shell = world()
    edit(shell, [1], pin=True, pin_bytes_max=20_000)
    fill(shell, 13)
    assert not events(shell, "pin_near_limit")
    fill(shell, 4)
    (warning,) = events(shell, "pin_near_limit")
    assert 16_000 <= warning["bytes"] <= 20_000
    assert info(shell)["pinned"] is True
    fill(shell, 4)
    (broken,) = events(shell, "pin_broken")
    assert 20_000 < broken["bytes"] <= 24_000
    assert shell.pins == {}
    fill(shell, 20)
    assert len(events(shell, "pin_broken")) == 1


def test_a_cursor_that_follows_what_is_published_within_a_second_keeps_its_pin() -> None:
    shell = world()
    edit(shell, [1], pin=True, pin_bytes_max=20_000)
    for _ in range(10):
        fill(shell, 8)
        move(shell, info(shell)["tail"] - 2)
        assert info(shell)["pinned"] is True
    assert not events(shell, "pin_broken")
    assert info(shell)["pinned_bytes"] < 6_000


def test_a_stream_without_pins_is_not_looked_at() -> None:
    shell = world()
    edit(shell, [1], pin=True)
    audience = shell.stream("s").audience
    assert [len(calls) for calls in audience.wakers] == [1, 0]  # type: ignore[attr-defined]
    edit(shell, pin=False)
    assert [len(calls) for calls in audience.wakers] == [0, 0]  # type: ignore[attr-defined]


def test_other_streams_of_the_ring_count_towards_a_pin() -> None:
    shell = world()
    edit(shell, [1], pin=True, pin_bytes_max=10_000)
    fill(shell, 12, "another")
    shell.wait(1_000)
    assert events(shell, "pin_broken")


def test_retention_leaves_pinned_records() -> None:
    shell = Shell(retention_ms=100)
    shell.hello(1)
    shell.hello(ME)
    shell.send(1, wire.CreateStream(1, "s", {"max_bytes": 10_000}))
    fill(shell, 3)
    edit(shell, [2, 2], pin=True)
    fill(shell, 50)
    shell.wait(1_000)
    assert 0 < shell.stream("s").first <= 2
    move(shell, 53)
    fill(shell, 5)
    shell.wait(1_000)
    assert shell.stream("s").first > 2


def test_a_pin_that_the_journal_broke_is_named() -> None:
    shell = world()
    shell.publish(1, "s", [b"x"] * 10)
    edit(shell, pin=True)
    trim(shell, 10)
    assert [one["offset"] for one in events(shell, "pin_broken")] == [0]
    assert [one["to"] for one in events(shell, "cursor_clamped")] == [10]
    assert shell.pins == {}


@pytest.mark.moderate
@pytest.mark.parametrize("steps", [300, 1_000])
def test_marks_stay_few_and_tell_about_how_many_bytes_are_held(steps: int) -> None:
    shell = world(expiry_beats=10_000)
    edit(shell, [1], pin=True, pin_bytes_max=1 << 40)
    begin = shell.ends["main"]
    places = []
    for _ in range(steps):
        shell.publish(1, "s", [bytes(100)])
        places.append((shell.stream("s").next, shell.ends["main"]))
        shell.wait(1_000)
    (marks,) = shell.broker._cursors.pins._marks.values()
    assert len(marks._offsets) <= 256
    next, lsn = places[steps // 2]
    move(shell, next)
    shell.wait(1_000)
    exact = shell.ends["main"] - lsn
    assert 0 <= info(shell)["pinned_bytes"] - exact <= (shell.ends["main"] - begin) * 0.02 + 1_000
