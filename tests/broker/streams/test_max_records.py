"""A stream with a bound of records: no reader gets one before the newest so many."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from tests.broker.shell import Shell, bodies
from tests.broker.streams.test_age import PLACES, Place

KEPT = [b"%d" % n for n in range(6, 10)]


def counted(retention_ms: int = 1 << 40, **settings: Any) -> Shell:
    """Ten records in two batches, of a stream that keeps four."""
    shell = Shell(retention_ms=retention_ms, **settings)
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "s", {"max_records": 4}))
    shell.publish(1, "s", [b"%d" % n for n in range(7)], tracker=1)
    shell.publish(1, "s", [b"%d" % n for n in range(7, 10)], tracker=2)
    return shell


@PLACES
def test_a_reader_gets_the_newest_so_many_amid_a_batch_too(place: Place) -> None:
    shell = counted()
    place(shell)
    assert bodies(shell.subscribe(1, 1, "s", start=[0]), 1) == KEPT
    peer = shell.subscribe(1, 2, "s", start=[2, 1])
    assert bodies(peer, 2) == KEPT
    gap = peer.last(wire.Gap)
    assert (gap.from_, gap.to, gap.code) == (1, 6, "retention")


@PLACES
def test_a_member_of_a_group_gets_the_newest_so_many(place: Place) -> None:
    shell = counted()
    place(shell)
    peer = shell.send(
        1, wire.JoinGroup(1, "s", "g", ["all"], "shared", [0], 1 << 40, 1 << 40, visibility=0)
    )
    assert bodies(peer, 1) == KEPT


def test_a_cursor_pins_records_beyond_the_number() -> None:
    shell = Shell(retention_ms=1 << 40)
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "s", {"max_records": 4}))
    shell.publish(1, "s", [b"%d" % n for n in range(7)], tracker=1)
    shell.send(1, wire.EditCursor(1, "s", "c", {"pin": True}, [2, 4]))
    shell.publish(1, "s", [b"%d" % n for n in range(7, 10)], tracker=2)
    assert bodies(shell.subscribe(1, 1, "s", start=[0]), 1) == [b"4", b"5", *KEPT]


def test_retention_drops_what_is_beyond_the_number_but_for_records_that_may_still_be_lost() -> None:
    shell = counted(retention_ms=100, sync=False)
    shell.wait(100)
    assert shell.trims == [], "no record is durable: a power loss takes all ten"
    shell.sync()
    shell.wait(100)
    assert [offset for _, _, offset in shell.trims] == [6]


def test_an_edit_has_a_stream_keep_fewer_records_and_the_facts_say_what_still_takes_space() -> None:
    shell = counted()
    peer = shell.send(1, wire.EditStream(2, "s", {"max_records": 1}))
    facts = peer.last(wire.Result).value
    assert (facts["first"], facts["tail"], facts["settings"]["max_records"]) == (9, 10, 1)


@pytest.mark.parametrize("value", [-1, "4", 1.5])
def test_a_number_that_is_none_is_refused_by_name(value: Any) -> None:
    shell = counted()
    refused = shell.send(1, wire.EditStream(2, "s", {"max_records": value})).last(wire.Refused)
    assert (refused.code, "max_records" in refused.reason) == ("bad_setting", True)


def test_what_a_restart_leaves_of_a_large_batch_still_takes_the_whole_of_it() -> None:
    shell = Shell(retention_ms=100)
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "s", {"max_records": 3}))
    shell.publish(1, "s", [b"%03d" % n for n in range(1_000)], level=2)
    shell.restart()
    shell.hello(1)
    for _ in range(4):
        shell.wait(100)
        facts = shell.send(1, wire.StreamInfo(2, "s")).last(wire.Result).value
        assert (facts["first"], facts["tail"]) == (997, 1_000)
        assert facts["aged_bytes"] == facts["bytes"] * 997 // 1_000 > 5_000


def test_what_was_trimmed_before_a_kill_still_takes_space_after_it() -> None:
    shell = counted()
    shell.send(1, wire.Trim("s", 8, 9, level=2))
    before = shell.send(1, wire.StreamInfo(2, "s")).last(wire.Result).value
    assert before["aged_bytes"] > before["bytes"] // 2
    shell.restart()
    shell.hello(1)
    after = shell.send(1, wire.StreamInfo(2, "s")).last(wire.Result).value
    assert after["first"] == before["first"] == 8
    left = [facts["bytes"] - facts["aged_bytes"] for facts in (before, after)]
    assert abs(left[0] - left[1]) <= 1
    shell.send(1, wire.Trim("s", 10, 9, level=2))
    shell.restart()
    shell.hello(1)
    assert shell.send(1, wire.StreamInfo(2, "s")).last(wire.Result).value["bytes"] == 0
