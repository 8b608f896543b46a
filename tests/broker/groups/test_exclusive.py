"""Exclusive groups: one member holds, and the place of a lost holder is kept for a while."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from tests.broker.group_world import (
    MUCH,
    M,
    ack,
    events,
    got,
    info,
    join,
    lose,
    publish,
    world,
)
from tests.broker.shell import Shell


def exclusive(**settings: Any) -> Shell:
    """Links 2 and 3 are members, in this order; 2 holds records 0 to 4 and acknowledged 1."""
    shell = world(**settings)
    join(shell, 2, "exclusive", hold_ms=1_000)
    join(shell, 3, "exclusive", hold_ms=1_000)
    publish(shell, 5)
    ack(shell, 2, (1, 2))
    assert (got(shell, 2), got(shell, 3)) == ([0, 1, 2, 3, 4], [])
    return shell


def test_an_exclusive_group_tells_its_members_which_one_holds() -> None:
    shell = exclusive()
    assert [one.live for one in shell.peers[2].of(wire.Mode)] == [True]
    assert [one.live for one in shell.peers[3].of(wire.Mode)] == [False]
    assert [one["holds"] for one in info(shell)["members"]] == [True, False]


def test_a_lost_holder_returns_by_its_session_and_goes_on_with_what_it_had() -> None:
    shell = exclusive()
    lose(shell, 2)
    publish(shell, 1)
    shell.wait(999)
    assert got(shell, 3) == []
    shell.hello(12, session=(2).to_bytes(16, "big"))
    join(shell, 12, "exclusive", hello=False)
    assert got(shell, 12) == [0, 2, 3, 4, 5]
    shell.wait(5_000)
    assert got(shell, 3) == []
    assert ack(shell, 12, (0, 1), (2, 6)).level == 3
    assert info(shell)["next"] == 6


def test_a_returned_holder_may_acknowledge_what_it_had_before_it_comes_again() -> None:
    shell = exclusive()
    lose(shell, 2)
    shell.hello(12, session=(2).to_bytes(16, "big"))
    shell.send(
        12, wire.JoinGroup(M, "s", "g", ["all"], "exclusive", [], 0, MUCH),
        wire.AckRecords(M, [(0, 1), (2, 4)], 4), wire.Credit(M, 10, MUCH),
    )  # fmt: skip
    assert shell.peers[12].last(wire.Confirm).tracker == 4
    assert got(shell, 12) == [4]


def test_a_returned_holder_may_want_again_what_comes_again_anyway() -> None:
    shell = exclusive()
    lose(shell, 2)
    shell.hello(12, session=(2).to_bytes(16, "big"))
    shell.send(
        12, wire.JoinGroup(M, "s", "g", ["all"], "exclusive", [], 0, MUCH),
        wire.AckRecords(M, [(0, 1), (2, 4)], 4, again_ms=100), wire.Credit(M, 10, MUCH),
    )  # fmt: skip
    assert got(shell, 12) == [0, 2, 3, 4]


def test_a_lost_holder_returns_by_its_identity() -> None:
    shell = world()
    shell.send(2, wire.Hello((1, 1), b"a" * 16), identity="ann")
    join(shell, 2, "exclusive", hello=False, hold_ms=1_000)
    join(shell, 3, "exclusive")
    publish(shell, 3)
    lose(shell, 2)
    shell.send(4, wire.Hello((1, 1), b"b" * 16), identity="ann")
    join(shell, 4, "exclusive", hello=False)
    assert got(shell, 4) == [0, 1, 2]
    assert got(shell, 3) == []


def test_after_the_window_the_next_member_holds() -> None:
    shell = exclusive()
    lose(shell, 2)
    (member, absent) = info(shell)["members"]
    assert (member["link"], member["holds"]) == (3, False)
    assert (absent["held"], absent["returns_ms"]) == (4, shell.now_ms + 1_000)
    shell.wait(1_000)
    assert got(shell, 3) == [0, 2, 3, 4]
    assert shell.peers[3].last(wire.Mode).live
    assert [one["held"] for one in events(shell, "group_place_lost")] == [4]
    shell.hello(12, session=(2).to_bytes(16, "big"))
    join(shell, 12, "exclusive", hello=False)
    assert got(shell, 12) == []
    assert ack(shell, 12, (0, 1)) == "not_held"


@pytest.mark.parametrize("how", ["unsubscribe", "bye", "kick"])
def test_a_holder_that_leaves_has_no_window(how: str) -> None:
    shell = exclusive()
    match how:
        case "unsubscribe":
            shell.send(2, wire.Unsubscribe(M))
        case "bye":
            shell.send(2, wire.Bye())
        case "kick":
            shell.send(1, wire.Kick(1, 2))
    assert got(shell, 3) == [0, 2, 3, 4]


def test_the_window_has_the_brokers_default_and_bound() -> None:
    shell = world(group_hold_ms=500, group_hold_max_ms=2_000)
    join(shell, 2, "exclusive")
    join(shell, 3, "exclusive", hold_ms=1 << 40)
    publish(shell, 1)
    lose(shell, 2)
    shell.wait(500)
    assert got(shell, 3) == [0]
    lose(shell, 3)
    assert info(shell)["members"][0]["returns_ms"] == shell.now_ms + 2_000


def test_a_place_is_kept_when_no_other_member_waits_and_the_next_to_join_takes_it() -> None:
    shell = world()
    join(shell, 2, "exclusive", hold_ms=1_000)
    publish(shell, 2)
    lose(shell, 2)
    shell.send(1, wire.RemoveGroup(1, "s", "g"))
    assert shell.peers[1].last(wire.Refused).code == "in_use"
    join(shell, 3, "exclusive")
    assert got(shell, 3) == []
    shell.wait(1_000)
    assert got(shell, 3) == [0, 1]


def test_a_lost_holder_that_waits_already_goes_on_at_once() -> None:
    """The member's new link is there before the broker notices that the old one is dead."""
    shell = world()
    for link, session in ((2, b"a" * 16), (4, b"b" * 16)):
        shell.send(link, wire.Hello((1, 1), session), identity="ann")
    join(shell, 2, "exclusive", hello=False, hold_ms=60_000)
    join(shell, 3, "exclusive")
    join(shell, 4, "exclusive", hello=False)
    publish(shell, 2)
    lose(shell, 2)
    assert (got(shell, 3), got(shell, 4)) == ([], [0, 1])


@pytest.mark.parametrize("how", ["unsubscribe", "bye", "lost"])
def test_a_holder_that_leaves_another_member_of_its_identity_leaves_it_its_records(
    how: str,
) -> None:
    shell = world()
    for link in (2, 3):
        shell.send(link, wire.Hello((1, 1), b"%d" % link * 16), identity="ann")
        join(shell, link, "exclusive", hello=False, settings={"attempts_max": 3})
    publish(shell, 3)
    assert (got(shell, 2), got(shell, 3)) == ([0, 1, 2], [])
    if how == "lost":
        lose(shell, 2)
    else:
        shell.send(2, wire.Bye() if how == "bye" else wire.Unsubscribe(M))
    assert got(shell, 3) == [0, 1, 2]
    assert info(shell)["attempts"] == ([[1, 3]] if how == "lost" else [])


@pytest.mark.parametrize("power_loss", [False, True])
def test_a_restart_keeps_the_place_of_a_holder_for_its_window(power_loss: bool) -> None:
    shell = exclusive()
    shell.restart(power_loss=power_loss)
    shell.hello(1)
    join(shell, 3, "exclusive", hold_ms=1_000)
    (member, absent) = info(shell)["members"]
    assert (member["link"], member["holds"]) == (3, False)
    assert (absent["link"], absent["held"]) == (0, 0)
    assert absent["returns_ms"] == shell.now_ms + 1_000
    shell.wait(999)
    assert got(shell, 3) == []
    shell.send(1, wire.RemoveGroup(1, "s", "g"))
    assert shell.peers[1].last(wire.Refused).code == "in_use"
    join(shell, 2, "exclusive", hold_ms=1_000)
    assert got(shell, 2) == [0, 2, 3, 4]
    shell.wait(5_000)
    assert got(shell, 3) == []
    assert [one["holds"] for one in info(shell)["members"]] == [False, True]


def test_a_holder_without_a_session_of_before_returns_by_its_identity_after_a_restart() -> None:
    shell = world()
    shell.send(2, wire.Hello((1, 1), b"a" * 16), identity="ann")
    join(shell, 2, "exclusive", hello=False, hold_ms=1_000)
    publish(shell, 3)
    shell.restart()
    shell.hello(1)
    join(shell, 3, "exclusive")
    shell.send(4, wire.Hello((1, 1), b"b" * 16), identity="ann")
    join(shell, 4, "exclusive", hello=False)
    assert (got(shell, 3), got(shell, 4)) == ([], [0, 1, 2])
    shell.restart()
    shell.send(2, wire.Hello((1, 1), b"b" * 16), identity="other")
    join(shell, 2, "exclusive", hello=False)
    assert got(shell, 2) == [0, 1, 2]


def test_after_a_restart_and_the_window_another_member_holds() -> None:
    shell = exclusive()
    lose(shell, 2)
    shell.wait(900)
    shell.restart()
    shell.hello(1)
    join(shell, 3, "exclusive", hold_ms=1_000)
    shell.wait(999)
    assert got(shell, 3) == []
    shell.wait(1)
    assert got(shell, 3) == [0, 2, 3, 4]
    assert [one["held"] for one in events(shell, "group_place_lost")] == [0]
    shell.restart()
    join(shell, 3, "exclusive")
    assert got(shell, 3) == [0, 2, 3, 4]


@pytest.mark.parametrize("how", ["unsubscribe", "bye", "window"])
def test_a_place_that_was_given_up_is_kept_for_no_one_after_a_restart(how: str) -> None:
    shell = world()
    join(shell, 2, "exclusive", hold_ms=1_000)
    publish(shell, 2)
    if how == "window":
        lose(shell, 2)
        shell.wait(1_000)
    else:
        shell.send(2, wire.Unsubscribe(M) if how == "unsubscribe" else wire.Bye())
    shell.restart()
    join(shell, 3, "exclusive")
    assert got(shell, 3) == [0, 1]


def test_a_new_holder_is_given_records_once_the_disk_has_it() -> None:
    shell = exclusive()
    shell.auto_sync = False
    shell.send(2, wire.Unsubscribe(M))
    assert (got(shell, 3), shell.peers[3].last(wire.Mode).live) == ([], False)
    shell.sync()
    shell.run()
    assert (got(shell, 3), shell.peers[3].last(wire.Mode).live) == ([0, 2, 3, 4], True)


def test_a_new_holder_that_the_log_refuses_begins_when_the_log_takes_it() -> None:
    shell = exclusive()
    shell.refuse["main"] = ("disk_full", "no space")
    shell.send(2, wire.Unsubscribe(M))
    assert got(shell, 3) == []
    shell.refuse.clear()
    shell.wait(2_000)
    assert got(shell, 3) == [0, 2, 3, 4]


def test_a_clamped_group_keeps_its_holder() -> None:
    shell = world()
    join(shell, 2, "exclusive", visibility=0)
    shell.auto_sync = False
    publish(shell, 2, level=2)
    ack(shell, 2, (0, 2), level=2)
    for power_loss in (True, False):
        shell.restart(power_loss=power_loss)
        shell.hello(1)
        join(shell, 3, "exclusive", visibility=0)
        assert [one["identity"] for one in info(shell)["members"]] == ["", ""]
