"""A group that is made to stand elsewhere: refused while members are at work, unless told."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from tests.broker.group_world import M, ack, events, got, info, join, lose, publish, world
from tests.broker.shell import Shell


def reset(shell: Shell, *start: Any, force: bool = False) -> Any:
    """RESULT's value, or the code of REFUSED."""
    answer = shell.send(1, wire.ResetGroup(4, "s", "g", list(start), force)).commands[-1]
    if isinstance(answer, wire.Refused):
        assert (answer.command, answer.reference) == (83, 4)
        return answer.code
    assert isinstance(answer, wire.Result), answer
    return answer.value


def left(kind: str = "shared", **fields: Any) -> Shell:
    """A group that has done ten records, and whose member has left."""
    shell = world()
    publish(shell, 10)
    join(shell, 2, kind, **fields)
    ack(shell, 2, (0, 10))
    shell.send(2, wire.Unsubscribe(M))
    return shell


@pytest.mark.parametrize("kind", ["shared", "exclusive", "keyed"])
def test_records_from_the_new_position_on_come_again_and_those_before_it_never(kind: str) -> None:
    shell = left(kind)
    told = reset(shell, 2, 4)
    assert (told["next"], told["before"], told["members"]) == (4, 10, [])
    join(shell, 3, kind)
    publish(shell, 2)
    assert got(shell, 3) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_a_reset_forward_passes_over_records_that_nobody_did() -> None:
    shell = world()
    publish(shell, 10)
    join(shell, 2)
    ack(shell, 2, (0, 2), (5, 6))
    shell.send(2, wire.Unsubscribe(M))
    assert reset(shell, 1)["next"] == 10
    join(shell, 3)
    assert got(shell, 3) == []
    assert info(shell)["lag"] == 0


def test_what_was_done_ahead_of_the_new_position_comes_again() -> None:
    shell = world()
    publish(shell, 10)
    join(shell, 2)
    ack(shell, 2, (5, 6))
    shell.send(2, wire.Unsubscribe(M))
    reset(shell, 2, 3)
    join(shell, 3)
    assert got(shell, 3) == [3, 4, 5, 6, 7, 8, 9]


def test_the_new_position_survives_a_restart() -> None:
    shell = left()
    reset(shell, 0)
    shell.restart()
    shell.hello(1)
    assert info(shell)["next"] == 0
    join(shell, 3)
    assert got(shell, 3) == list(range(10))


def test_attempts_begin_anew_and_settings_and_the_creator_stay() -> None:
    shell = world()
    publish(shell, 3)
    join(shell, 2, settings={"attempts_max": 3, "description": "loads"})
    ack(shell, 2, (1, 2), again_ms=0)
    shell.send(2, wire.Unsubscribe(M))
    before = info(shell)
    assert before["attempts"] == [[1, 1]]
    told = reset(shell, 0)
    assert told["attempts"] == []
    assert (told["settings"], told["by"]) == (before["settings"], before["by"])


def test_an_edit_just_before_a_reset_is_kept_and_so_are_two_edits_at_once() -> None:
    shell = left()
    edits = [
        wire.EditGroup(5, "s", "g", {"attempts_max": 3}),
        wire.EditGroup(6, "s", "g", {"description": "loads"}),
    ]
    shell.send(1, *edits, wire.ResetGroup(7, "s", "g", [0]))
    facts = info(shell)
    assert (facts["next"], facts["settings"]["attempts_max"]) == (0, 3)
    assert facts["settings"]["description"] == "loads"


def test_a_group_with_members_is_not_reset_and_they_go_on() -> None:
    shell = world()
    publish(shell, 4)
    join(shell, 2)
    assert reset(shell, 0) == "in_use"
    assert isinstance(ack(shell, 2, (0, 4)), wire.Confirm)
    assert info(shell)["next"] == 4


def test_a_group_that_keeps_a_place_is_not_reset() -> None:
    shell = world()
    publish(shell, 4)
    join(shell, 2, "exclusive", hold_ms=60_000)
    lose(shell, 2)
    assert reset(shell, 0) == "in_use"
    assert reset(shell, 0, force=True)["members"] == []
    shell.restart()
    join(shell, 3, "exclusive")
    assert got(shell, 3) == [0, 1, 2, 3], "the place is free, now and after a restart"


@pytest.mark.parametrize("kind", ["shared", "exclusive", "keyed"])
def test_a_forced_reset_ends_the_memberships_and_late_acknowledgements_do_not_count(
    kind: str,
) -> None:
    shell = world()
    publish(shell, 6)
    for link in (2, 3):
        join(shell, link, kind, settings={"attempts_max": 2})
    ack(shell, 2, (0, 1), tracker=0)
    told = reset(shell, 0, force=True)
    assert (told["next"], told["members"], told["attempts"]) == (0, [], [])
    for link in (2, 3):
        assert shell.peers[link].last(wire.Ended).code == "group_reset"
    left = shell.events_of("group_left")
    assert [(event.facts["link"], event.facts["why"]) for event in left] == [
        (3, "group_reset"), (2, "group_reset"),
    ]  # fmt: skip
    assert ack(shell, 2, (1, 2)) == "unknown_subscription"
    shell.wait(5_000)
    assert (info(shell)["next"], info(shell)["logged"]) == (0, 0)
    join(shell, 4, kind)
    assert got(shell, 4) == list(range(6))


def test_a_member_that_joins_amid_a_reset_waits_for_the_new_position() -> None:
    shell = left()
    shell.hello(3)
    shell.peers[3].members.add(M)
    joining = wire.JoinGroup(M, "s", "g", ["all"], "shared", [0], 1 << 40, 1 << 50)
    shell.broker.receive(1, "", [wire.ResetGroup(4, "s", "g", [2, 7])], [], shell.now_ms)
    shell.broker.receive(3, "", [joining], [], shell.now_ms)
    shell.run()
    assert shell.peers[3].last(wire.Subscribed).next == 7
    assert got(shell, 3) == [7, 8, 9]


def test_a_reset_that_the_log_refuses_leaves_the_group_where_it_stood() -> None:
    shell = left()
    shell.refuse["main"] = ("journal_full", "no room")
    assert reset(shell, 0) == "journal_full"
    shell.refuse.clear()
    assert info(shell)["next"] == 10
    publish(shell, 1)
    join(shell, 3)
    assert got(shell, 3) == [10]


def test_a_place_that_is_none_is_refused() -> None:
    shell = left()
    assert reset(shell, 6) == "bad_start"
    assert reset(shell, 2, 11) == "bad_start"
    assert reset(shell, 7, "nothing") == "unknown_cursor"
    assert info(shell)["next"] == 10


def test_a_reset_is_told_as_what_an_administrator_did() -> None:
    shell = left()
    reset(shell, 0)
    (event,) = [each for each in events(shell, "administered") if each["command"] == "ResetGroup"]
    assert (event["stream"], event["group"]) == ("s", "g")


def test_members_that_wait_for_a_group_to_be_durable_outlast_resets_meanwhile() -> None:
    shell = world()
    publish(shell, 10)
    shell.auto_sync = False
    join(shell, 2)
    for tracker, at in ((4, 3), (5, 7)):
        shell.send(1, wire.ResetGroup(tracker, "s", "g", [2, at]))
    join(shell, 3)
    assert not shell.peers[2].of(wire.Subscribed)
    shell.sync()
    shell.run()
    for link in (2, 3):
        assert [one.next for one in shell.peers[link].of(wire.Subscribed)] == [7]
    assert sorted(got(shell, 2) + got(shell, 3)) == [7, 8, 9]


def test_a_member_waits_until_the_newest_of_two_positions_is_durable() -> None:
    shell = left()
    shell.auto_sync = False
    shell.send(1, wire.ResetGroup(4, "s", "g", [2, 3]))
    first_ends = shell.ends["main"]
    join(shell, 3)
    shell.send(1, wire.ResetGroup(5, "s", "g", [2, 7]))
    shell.synced_to["main"] = first_ends
    shell.broker.synced("main", first_ends, shell.now_ms)
    shell.run()
    assert not shell.peers[3].of(wire.Subscribed), "a power loss could take back the position"
    shell.sync()
    shell.run()
    assert shell.peers[3].last(wire.Subscribed).next == 7
