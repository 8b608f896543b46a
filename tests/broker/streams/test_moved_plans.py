"""Plans of streams with keys whose newest records have moved."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_py.broker.log.newest import Keys
from malamute_py.broker.ready import IndexAnswer
from malamute_py.broker.streams import moved_plans
from malamute_py.broker.streams.moved_plans import plan_moved
from tests.broker.streams.keyed import World, moved, result

KEYS = 3_000


def keys_that_moved() -> Keys:
    """Keys "k0" to "k2999" whose records, at every second offset from 2 on, have moved."""
    keys = Keys(2 * KEYS + 2, ready=True)
    for number in range(KEYS):
        keys.enter(f"k{number}", 2 * number + 2, 160, None)
        keys.moved(f"k{number}", 2 * number + 2, number)
    return keys


def command(pattern: Any = None, **caps: Any) -> wire.PlanRead:
    return wire.PlanRead(1, "s", pattern or ["all"], [0], **caps)


def test_what_has_moved_is_planned_without_a_look_at_each_key() -> None:
    keys = keys_that_moved()
    part = plan_moved(keys, 1, 10_000, command())
    assert part.to == 10_000
    assert part.records == 3_000
    assert part.splits == [[1, 10_000, part.bytes]]
    assert not part.ended
    cut = plan_moved(keys, 1, 10_000, command(split_bytes=16_000))
    assert 25 < len(cut.splits) < 35
    assert [split[0] for split in cut.splits[1:]] == [split[1] for split in cut.splits[:-1]]


@pytest.mark.parametrize("most", [1, 77, 512, 2_999])
def test_a_cap_of_records_counts_those_that_are_there(most: int) -> None:
    part = plan_moved(keys_that_moved(), 1, 10_000, command(records_max=most))
    assert (part.to, part.records, part.ended) == (2 * most + 1, most, True)


def test_a_cap_counts_what_a_pattern_selects_and_one_question_looks_at_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = keys_that_moved()
    part = plan_moved(keys, 1, 10_000, command(["prefix", "k29"], records_max=50))
    assert (part.records, part.to) == (50, 2 * 2_938 + 3)
    monkeypatch.setattr(moved_plans, "LOOKED_AT", 100)
    early = plan_moved(keys, 1, 10_000, command(["topic", "k150"], records_max=5))
    assert (early.records, early.to, early.ended) == (0, 201, True)
    more = plan_moved(keys, early.to, 10_000, command(["topic", "k150"], records_max=5))
    assert (more.records, more.to) == (1, 401)


def test_a_plan_begins_with_what_has_moved_and_goes_on_in_the_journal() -> None:
    world = World()
    moved(world)
    first = world.stream("s").first

    def plan(**caps: Any) -> dict[str, Any]:
        return dict(result(world.send(1, wire.PlanRead(5, "s", ["all"], [0], **caps))))

    whole = plan()
    assert (whole["first"], whole["from"], whole["to"]) == (1, 1, whole["tail"])
    assert whole["splits"][0][:2] == [1, first]
    assert whole["splits"][1][0] == first
    few = plan(records_max=4)
    assert (few["to"], few["records"]) == (5, 4)
    light = plan(bytes_max=1)
    assert light["to"] == 2


def test_a_plan_covers_what_the_ring_gave_up_while_the_journal_looked() -> None:
    world = World(ask=False)
    world.stream("s")
    world.put("a")
    world.put("a")
    peer = world.send(1, wire.PlanRead(5, "s", ["all"], [0]))
    (query,) = [one for one in world.queries if one.kind == "plan"]
    value = {"young": 0, "to": 3, "splits": [[2, 3, 90]], "records": 1, "bytes": 90, "begin": 2}
    world.broker.answered(IndexAnswer(query.token, value))
    world.run()
    plan = peer.last(wire.Result).value
    assert plan["splits"] == [[1, 2, 1], [2, 3, 90]]
