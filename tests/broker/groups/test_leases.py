"""Leases of a group's records: members that are silent lose what they hold."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from tests.broker.group_world import ack, events, got, info, join, publish, world
from tests.broker.shell import Shell

LEASE_MS = 800
OVER_MS = LEASE_MS * 9 // 8 + 1


def leased(shell: Shell, link: int, kind: str = "shared", **settings: Any) -> Any:
    return join(shell, link, kind, settings={"lease_ms": LEASE_MS, **settings})


def renew(shell: Shell, link: int, *ranges: tuple[int, int]) -> Any:
    return ack(shell, link, *ranges, state=2)


def wait(shell: Shell, time_ms: int) -> None:
    for _ in range(10):
        shell.wait(time_ms // 10)


@pytest.mark.parametrize("kind", ["shared", "exclusive", "keyed"])
def test_what_a_silent_member_holds_goes_to_another(kind: str) -> None:
    shell = world()
    assert leased(shell, 2, kind).last(wire.Subscribed).lease_ms == LEASE_MS
    publish(shell, 4, subject=["a", "b", "c", "d"])
    leased(shell, 3, kind)
    assert got(shell, 2) == [0, 1, 2, 3]
    ack(shell, 2, (0, 1))
    wait(shell, LEASE_MS - 10)
    assert not got(shell, 3)
    wait(shell, OVER_MS - LEASE_MS + 20)
    assert got(shell, 3) == [1, 2, 3]
    (event,) = events(shell, "group_lease_ended")
    assert (event["link"], event["records"], event["offset"]) == (2, 3, 1)
    publish(shell, 2, subject="a")
    assert got(shell, 2) == [0, 1, 2, 3]
    assert [one["aside"] for one in info(shell)["members"]] == [True, False]
    assert ack(shell, 2, (1, 2)) == "not_held"
    assert not any(one["aside"] for one in info(shell)["members"])
    ack(shell, 3, (1, 6))
    publish(shell, 40, subject=[f"k{n}" for n in range(40)])
    if kind != "exclusive":
        assert set(got(shell, 2)) & set(range(6, 46))
    assert set(range(6, 46)) <= set(got(shell, 2)) | set(got(shell, 3))


def test_renewed_records_stay() -> None:
    shell = world()
    leased(shell, 2)
    publish(shell, 2)
    leased(shell, 3)
    for _ in range(5):
        wait(shell, LEASE_MS // 2)
        assert isinstance(renew(shell, 2, (0, 1)), wire.Confirm)
        if got(shell, 3):
            renew(shell, 3, (1, 2))
    assert got(shell, 3) == [1]
    assert renew(shell, 2, (0, 2)) == "not_held"


def test_the_end_of_a_lease_is_an_attempt_and_the_last_makes_a_dead_letter() -> None:
    shell = world()
    leased(shell, 2, attempts_max=2)
    publish(shell, 1)
    wait(shell, OVER_MS)
    assert info(shell)["attempts"] == [[1, 1]]
    assert got(shell, 2) == [0]
    ack(shell, 2, (0, 1))
    assert got(shell, 2) == [0, 0]
    wait(shell, OVER_MS)
    assert info(shell)["next"] == 1
    value = shell.send(1, wire.PeekMail(3, "s.g.dead")).last(wire.Result).value
    assert value["messages"][0]["why"] == "lease"


def test_a_member_that_joined_before_the_lease_has_none() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 1)
    shell.send(1, wire.EditGroup(3, "s", "g", {"lease_ms": LEASE_MS}))
    wait(shell, 3 * LEASE_MS)
    join(shell, 3)
    assert (got(shell, 2), got(shell, 3)) == ([0], [])
    assert [one["lease_ms"] for one in info(shell)["members"]] == [0, LEASE_MS]


def test_a_lease_that_is_shorter_than_those_before_it_ends_in_time() -> None:
    shell = world()
    leased(shell, 2, lease_ms=100 * LEASE_MS)
    publish(shell, 1)
    ack(shell, 2, (0, 1))
    shell.send(1, wire.EditGroup(3, "s", "g", {"lease_ms": LEASE_MS}))
    join(shell, 3)
    shell.send(2, wire.Bye())
    publish(shell, 1)
    join(shell, 4)
    assert (got(shell, 3), got(shell, 4)) == ([1], [])
    wait(shell, OVER_MS)
    assert got(shell, 4) == [1]


def test_a_member_without_a_lease_that_renews_gets_none() -> None:
    shell = world()
    join(shell, 2, credit=1)
    publish(shell, 1)
    shell.send(1, wire.EditGroup(3, "s", "g", {"lease_ms": LEASE_MS}))
    assert isinstance(renew(shell, 2, (0, 1)), wire.Confirm)
    join(shell, 3, credit=1)
    publish(shell, 1)
    assert (got(shell, 2), got(shell, 3)) == ([0], [1])
    join(shell, 4)
    wait(shell, OVER_MS)
    assert got(shell, 4) == [1]
    assert [event["link"] for event in events(shell, "group_lease_ended")] == [3]


def test_a_lone_holder_that_was_silent_gives_way_to_a_member_that_joins() -> None:
    shell = world()
    leased(shell, 2, "exclusive")
    publish(shell, 3)
    wait(shell, OVER_MS)
    assert info(shell)["waiting"] == 3
    leased(shell, 3, "exclusive")
    assert got(shell, 3) == [0, 1, 2]
    assert shell.peers[2].last(wire.Mode).live is False


def test_the_shortest_lease_is_the_broker_s() -> None:
    shell = world(lease_min_ms=500)
    peer = join(shell, 2, settings={"lease_ms": 1})
    assert peer.last(wire.Subscribed).lease_ms == 500


def test_a_group_without_a_lease_sets_no_timer() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 3)
    wait(shell, 4_000)
    assert got(shell, 2) == [0, 1, 2]
    assert info(shell)["held"] == 3


def test_what_comes_too_late_acknowledges_nothing_of_the_next_hand_out() -> None:
    """The lone member whose lease ended gets its records again only after its late word."""
    shell = world()
    leased(shell, 2)
    publish(shell, 2)
    wait(shell, OVER_MS + 20)
    assert got(shell, 2) == [0, 1]
    assert ack(shell, 2, (0, 2)) == "not_held"
    assert got(shell, 2) == [0, 1, 0, 1]
    assert info(shell)["next"] == 0
    assert isinstance(ack(shell, 2, (0, 2)), wire.Confirm)
    assert info(shell)["next"] == 2


@pytest.mark.parametrize("kind", ["shared", "keyed", "exclusive"])
def test_a_member_is_told_that_it_is_passed_over_and_that_it_gets_records_again(kind: str) -> None:
    shell = world()
    leased(shell, 2, kind)
    publish(shell, 2)
    modes = shell.peers[2].of(wire.Mode)
    wait(shell, 3 * OVER_MS)
    told = shell.peers[2].of(wire.Mode)[len(modes) :]
    assert [one.live for one in told] == [False]
    ack(shell, 2, (0, 1))
    told = shell.peers[2].of(wire.Mode)[len(modes) :]
    assert [one.live for one in told] == [False, True]
    # The holder of an exclusive group may acknowledge what is to come again to it.
    assert got(shell, 2)[2:] == ([1] if kind == "exclusive" else [0, 1])
