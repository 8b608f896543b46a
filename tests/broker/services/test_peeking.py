"""Requests are looked at where they wait, or in the hands of their workers."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import WorkState
from malamute_py.broker.log import pages
from malamute_py.broker.services import peeking
from tests.broker.service_world import World, pair


def peek(world: World, **fields: Any) -> tuple[list[dict[str, Any]], bool]:
    value = world.ask(1, wire.PeekRequests(7, "s", **fields))
    return value["requests"], value["more"]


def test_what_waits_and_what_is_in_hand_is_told_apart_and_nothing_is_taken() -> None:
    world = pair()
    world.offer(2, credit=1, lease_ms=5_000)
    put_ms = world.shell.now_ms
    world.request(1, b"a", b"b", key=b"k", subjects=["x", "y"], timeout_ms=60_000)
    (first, second), more = peek(world)
    assert not more
    assert (first["number"], first["subject"], first["state"]) == (0, "x", "held")
    assert (second["number"], second["subject"], second["state"]) == (1, "y", "waiting")
    assert (first["attempts"], second["attempts"]) == (1, 0)
    assert (first["link"], first["since_ms"]) == (2, put_ms)
    assert first["lease_until_ms"] == put_ms + 5_000
    assert first["holder"]
    assert (second["link"], second["holder"], second["since_ms"]) == (0, "", 0)
    for one in (first, second):
        assert (one["at_ms"], one["deadline_ms"]) == (put_ms, put_ms + 60_000)
        assert one["sender"].startswith("~")
    assert len(world.work(2)) == 1


def test_who_may_not_manage_a_service_may_not_look_at_its_requests() -> None:
    world = pair(permit=lambda identity, action, name: action != "manage_queues")
    refused = world.shell.send(1, wire.PeekRequests(7, "s")).last(wire.Refused)
    assert (refused.code, refused.reason) == ("forbidden", "you may not manage service 's'")


def test_a_request_that_came_back_is_delayed_until_its_pause_is_over() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a")
    world.shell.send(2, wire.AckWork(1, [(0, 1)], WorkState.RETURNED, 9, again_ms=500))
    ((one,), _) = peek(world)
    assert (one["state"], one["attempts"]) == ("delayed", 1)
    assert one["not_before_ms"] == world.shell.now_ms + 500


def test_priorities_are_shown() -> None:
    world = pair()
    world.request(1, b"a")
    world.request(1, b"b", priority=7)
    found = world.ask(1, wire.PeekRequests(5, "s", -1, 10))["requests"]
    assert [one["priority"] for one in found] == [0, 7]


def test_pages_follow_on_after_a_number_and_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    world = pair()
    for _ in range(4):
        world.request(1, b"a", b"b", b"c")
    seen: list[int] = []
    while True:
        page, more = peek(world, after=seen[-1] if seen else -1, limit=5)
        seen += [one["number"] for one in page]
        assert len(page) <= 5
        if not more:
            break
    assert seen == list(range(12))
    monkeypatch.setattr(pages, "PAGE_BYTES", 500)
    page, more = peek(world, limit=100)
    assert len(page) == 2
    assert more
    assert peek(world, after=11) == ([], False)


def test_a_long_queue_is_put_in_order_once_for_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peeking, "FEW", 2)
    world = pair()
    for _ in range(3):
        world.request(1, b"a")
    assert [one["number"] for one in peek(world)[0]] == [0, 1, 2]
    world.request(1, b"b")
    assert [one["number"] for one in peek(world, after=1)[0]] == [2]
    world.shell.wait(peeking.ORDER_MS)
    assert [one["number"] for one in peek(world, after=1)[0]] == [2, 3]


def test_requests_that_have_ended_are_not_shown() -> None:
    world = pair()
    world.request(1, b"a", b"b", key=b"k")
    world.ask(1, wire.CancelRequest(8, "s", b"k", 0))
    assert [one["number"] for one in peek(world)[0]] == [1]


def test_a_service_that_is_not_there_is_refused() -> None:
    world = pair()
    peer = world.shell.send(1, wire.PeekRequests(7, "nothing"))
    assert peer.last(wire.Refused).code == "unknown_service"


def test_a_service_that_is_removed_while_its_requests_are_looked_at_has_none() -> None:
    world = pair()
    world.request(1, b"a")
    broker, now_ms = world.shell.broker, world.shell.now_ms
    broker.receive(1, "", [wire.PeekRequests(7, "s"), wire.PeekRequests(8, "s")], [], now_ms)
    broker.take_ready()
    del broker._services._registry.by_name["s"]
    world.shell.run()
    values = [result.value for result in world.shell.peers[1].of(wire.Result)[-2:]]
    assert values[-1] == {"requests": [], "more": False}
