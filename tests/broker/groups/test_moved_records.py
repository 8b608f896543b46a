"""Groups of streams with keys: newest records that have moved, and those that were replaced."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from tests.broker.group_world import MUCH, M, ack, events, got, info, join, lose
from tests.broker.streams.keyed import World, moved, on_disk, restarted, table, turned

NEWEST = list(range(1, 11))
"""Offsets of "k0" to "k9" in a world whose records have moved."""


@pytest.mark.parametrize("place", [on_disk, restarted])
@pytest.mark.parametrize("kind", ["shared", "exclusive", "keyed"])
def test_a_group_gets_newest_records_that_have_moved_and_counts_none_as_lost(
    kind: str, place: Any
) -> None:
    world = World()
    moved(world)
    place(world)
    join(world, 2, kind, pattern=["prefix", "k"])
    assert sorted(got(world, 2)) == NEWEST
    bodies = dict(world.peers[2].received[M])
    assert bodies == {n + 1: b"%d" % n for n in range(10)}
    assert not world.peers[2].of(wire.Gap)
    assert ack(world, 2, (1, 11)).level == 3
    facts = info(world)
    assert (facts["lost"], facts["first"], facts["lag"]) == (0, 1, 0)


def test_records_that_are_replaced_before_the_group_comes_to_them_count_as_done() -> None:
    world = World()
    world.put("a", b"old")
    join(world, 2, credit=0)
    moved(world)
    world.put("k3", b"new")
    newest = world.stream("s").next - 1
    world.send(2, wire.Credit(M, MUCH, 1 << 50))
    offsets = got(world, 2)
    assert 5 not in offsets
    assert {1, 2, 3, 4, 6, newest} <= set(offsets)
    assert len(offsets) == len(set(offsets))
    assert info(world)["lost"] == 0
    assert not world.peers[2].of(wire.Gap)


@pytest.mark.moderate
def test_a_group_goes_on_over_a_restart_amid_what_has_moved() -> None:
    world = World()
    moved(world)
    join(world, 2, pattern=["prefix", "k"], credit=4)
    assert got(world, 2) == NEWEST[:4]
    ack(world, 2, (1, 3))
    restarted(world)
    join(world, 2, pattern=["prefix", "k"])
    assert sorted(got(world, 2)) == [*range(3, 11)]
    assert not events(world, "group_clamped")


@pytest.mark.moderate
def test_a_record_that_comes_back_and_was_replaced_meanwhile_is_done() -> None:
    world = World()
    moved(world)
    join(world, 2, pattern=["prefix", "k"])
    world.put("k4", b"new")
    turned(world, 1)
    ack(world, 2, (4, 6), again_ms=0)
    assert got(world, 2).count(4) == 2
    assert got(world, 2).count(5) == 1
    assert info(world)["lost"] == 0


def test_a_batch_that_stays_together_gives_a_group_its_newest_rows_only() -> None:
    world = World()
    content = encode([b"%d" % n * 99 for n in range(6)], **table(*"abcdef"), codec="zstd")
    world.send(1, wire.Publish("s", 900), frames=[content])
    world.put("b", b"new")
    world.put("e", b"new")
    turned(world)
    join(world, 2, pattern=["regex", "^[a-f]$"])
    assert sorted(got(world, 2)) == [1, 3, 4, 6, 7, 8]


def test_rows_of_a_large_batch_that_moved_alone_come_one_by_one() -> None:
    world = World()
    subjects = [f"k{n}" for n in range(20)]
    content = encode([b"%d" % n * 20 for n in range(20)], **table(*subjects))
    world.send(1, wire.Publish("s", 900), frames=[content])
    for subject in subjects[::2]:
        world.put(subject, b"new")
    turned(world)
    join(world, 2, "keyed", pattern=["prefix", "k"])
    join(world, 3, "keyed", pattern=["prefix", "k"])
    offsets = sorted([*got(world, 2), *got(world, 3)])
    assert offsets == [*range(2, 21, 2), *range(21, 31)]


def test_a_group_that_is_reset_may_stand_before_what_has_moved() -> None:
    world = World()
    moved(world)
    join(world, 2, pattern=["prefix", "k"], start=[1])
    assert got(world, 2) == []
    world.send(1, wire.ResetGroup(4, "s", "g", [0], True))
    join(world, 2, pattern=["prefix", "k"], hello=False)
    assert sorted(got(world, 2)) == NEWEST


def test_members_wait_while_a_start_reads_the_keys() -> None:
    world = World()
    moved(world)
    join(world, 2, pattern=["prefix", "k"], credit=2)
    world.auto_ask = False
    restarted(world)
    refused = join(world, 2, pattern=["prefix", "k"]).last(wire.Refused)
    assert (refused.code, refused.retry_ms > 0) == ("wait", True)
    world.auto_ask = True
    world.answer_queries()
    world.run()
    join(world, 2, pattern=["prefix", "k"], hello=False)
    assert set(got(world, 2)) == set(NEWEST)


@pytest.mark.parametrize("place", [on_disk, restarted])
def test_a_dead_letter_whose_record_was_compacted_stays_and_one_that_moved_comes_again(
    place: Any,
) -> None:
    world = World()
    world.put("a", b"old")
    world.put("b", b"new")
    join(world, 2, settings={"attempts_max": 1}, credit=2)
    ack(world, 2, (1, 3), state=4)
    world.put("a", b"newer")
    turned(world)
    place(world)
    assert world.stream("s").first > 3
    lose(world, 2)
    join(world, 7, credit=0)
    answer = world.send(1, wire.RequeueGroup(5, "s", "g", [])).last(wire.Result)
    assert answer.value == {"count": 1, "gone": 1}
    world.send(7, wire.Credit(M, MUCH, 1 << 50))
    assert [offset for offset in got(world, 7) if offset < 4] == [2, 3]
    letter = world.send(1, wire.PeekMail(3, "s.g.dead", body_bytes=9)).last(wire.Result).value
    assert [one["origin"]["offset"] for one in letter["messages"]] == [1]
