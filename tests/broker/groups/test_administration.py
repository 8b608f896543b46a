"""Administration of groups: facts, pages, removal."""

from __future__ import annotations

from malamute_protocol import commands as wire
from tests.broker.group_world import MUCH, M, ack, got, info, join, lose, publish, world


def test_group_info_tells_lag_members_and_what_each_holds_since_when() -> None:
    shell = world()
    shell.send(2, wire.Hello((1, 1), b"a" * 16), identity="ann")
    join(shell, 2, hello=False)
    begun = shell.now_ms
    publish(shell, 4)
    shell.wait(500)
    publish(shell, 4)
    ack(shell, 2, (0, 3))
    facts = info(shell)
    assert (facts["next"], facts["tail"], facts["lag"], facts["kind"]) == (3, 8, 5, "shared")
    (member,) = facts["members"]
    assert (member["identity"], member["link"], member["held"]) == ("ann", 2, 5)
    assert (member["since_ms"], member["oldest_ms"]) == (begun, begun)
    assert facts["moved_ms"] == shell.now_ms


def test_groups_are_listed_by_pages() -> None:
    shell = world()
    for link, group in ((2, "b"), (3, "a"), (4, "b.2")):
        join(shell, link, group=group)
    value = info(shell, "")
    assert [one["group"] for one in value["entries"]] == ["a", "b", "b.2"]
    value = info(shell, "b*")
    assert [one["group"] for one in value["entries"]] == ["b", "b.2"]
    peer = shell.send(1, wire.GroupInfo(3, "", "", "s/a", 1))
    value = peer.last(wire.Result).value
    assert ([one["group"] for one in value["entries"]], value["more"]) == (["b"], True)


def test_a_group_without_members_can_be_removed() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 3)
    peer = shell.send(1, wire.RemoveGroup(1, "s", "g"))
    assert peer.last(wire.Refused).code == "in_use"
    lose(shell, 2)
    shell.send(1, wire.RemoveGroup(2, "s", "g"))
    assert peer.last(wire.Result).value == {}
    shell.send(1, wire.RemoveGroup(3, "s", "g"))
    assert peer.last(wire.Refused).code == "unknown_group"
    shell.restart()
    shell.hello(1)
    shell.send(1, wire.GroupInfo(4, "s", "g"))
    assert shell.peers[1].last(wire.Refused).code == "unknown_group"
    join(shell, 2, "keyed")
    assert got(shell, 2) == [0, 1, 2]


def test_a_member_that_joins_amid_the_removal_of_its_group_is_told_that_it_is_unknown() -> None:
    shell = world()
    join(shell, 2)
    lose(shell, 2)
    shell.hello(3)
    # Both commands come in one turn: the log has the removal after the member was let in.
    shell.broker.receive(1, "", [wire.RemoveGroup(2, "s", "g")], [], 0)
    membership = wire.JoinGroup(M, "s", "g", ["all"], "shared", [0], MUCH, 1 << 50)
    shell.broker.receive(3, "", [membership], [], 0)
    shell.run()
    assert shell.peers[1].last(wire.Result).value == {}
    assert shell.peers[3].of(wire.Subscribed)
    ended = shell.peers[3].last(wire.Ended)
    assert (ended.subscription, ended.code) == (M, "unknown_group")
