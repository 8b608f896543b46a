"""Groups: who may join, and which member gets which record."""

from __future__ import annotations

import itertools

import pytest

from malamute_protocol import commands as wire
from malamute_py.broker.subscriptions.audience import audience_of
from tests.broker.group_world import (
    MUCH,
    M,
    ack,
    dones,
    events,
    got,
    info,
    join,
    lose,
    publish,
    world,
)
from tests.broker.shell import offsets

# --- shared ----------------------------------------------------------------------------------


def test_a_record_goes_once_to_a_shared_group() -> None:
    shell = world()
    for link in (2, 3, 4):
        join(shell, link)
    for _ in range(20):
        publish(shell, 30)
    every = [got(shell, link) for link in (2, 3, 4)]
    assert sorted(itertools.chain(*every)) == list(range(600))
    assert all(every)


def test_a_lone_batch_is_spread_over_the_members() -> None:
    shell = world()
    for link in (2, 3, 4):
        join(shell, link)
    publish(shell, 10)
    assert sorted(len(got(shell, link)) for link in (2, 3, 4)) == [2, 4, 4]


def test_a_backlog_goes_out_in_whole_batches() -> None:
    shell = world()
    for _ in range(30):
        publish(shell, 10)
    for link in (2, 3):
        join(shell, link, credit=0)
    for link in (2, 3):
        shell.send(link, wire.Credit(M, 100, MUCH))
    delivered = shell.peers[2].of(wire.Deliver) + shell.peers[3].of(wire.Deliver)
    assert len(delivered) == 20
    assert all(one.rows is None for one in delivered)


def test_who_has_more_credit_is_given_more() -> None:
    shell = world()
    join(shell, 2, credit=5)
    join(shell, 3, credit=50)
    for _ in range(45):
        publish(shell, 1)
    assert (len(got(shell, 2)), len(got(shell, 3))) == (0, 45)
    publish(shell, 15)
    assert (len(got(shell, 2)), len(got(shell, 3))) == (5, 50)


def test_credit_in_records_is_exact() -> None:
    shell = world()
    join(shell, 2, credit=3)
    publish(shell, 10)
    assert got(shell, 2) == [0, 1, 2]
    shell.send(2, wire.Credit(M, 7, MUCH))
    assert got(shell, 2) == [0, 1, 2, 3, 4, 5, 6]
    assert info(shell)["waiting"] == 3


def test_a_new_group_begins_at_the_tail_unless_told_otherwise() -> None:
    shell = world()
    publish(shell, 5)
    join(shell, 2, start=())
    join(shell, 3, group="h", start=(2, 3))
    shell.send(1, wire.MoveCursor("s", "c", 4, 1))
    join(shell, 4, group="i", start=(7, "c"))
    join(shell, 6, group="j", start=(6,))
    publish(shell, 1)
    assert got(shell, 2) == [5]
    assert got(shell, 3) == [3, 4, 5]
    assert got(shell, 4) == [4, 5]
    assert shell.peers[6].last(wire.Refused).code == "bad_start"


def test_the_start_of_a_later_member_does_not_count() -> None:
    shell = world()
    publish(shell, 5)
    join(shell, 2, start=(1,))
    peer = join(shell, 3, start=(0,))
    assert peer.last(wire.Subscribed).next == 5
    assert got(shell, 3) == []


def test_a_group_reads_history_and_goes_on_live() -> None:
    shell = world(quantum_bytes=2_000)
    for _ in range(50):
        publish(shell, 10)
    shell.evict()
    for link in (2, 3):
        join(shell, link)
    publish(shell, 10)
    assert sorted(got(shell, 2) + got(shell, 3)) == list(range(510))
    assert shell.broker.counters["reads"] > 3


def test_only_what_the_pattern_selects_is_given_and_the_rest_is_passed_over() -> None:
    shell = world()
    join(shell, 2, pattern=["topic", "a.*"])
    publish(shell, 6, subject=["a.1", "b", "b", "a.2", "b", "b"])
    assert got(shell, 2) == [0, 3]
    assert info(shell)["next"] == 0
    ack(shell, 2, (0, 1))
    assert info(shell)["next"] == info(shell)["logged"] == 3
    ack(shell, 2, (3, 4))
    assert info(shell)["next"] == info(shell)["logged"] == 6


def test_a_group_that_selects_nothing_moves_all_the_same() -> None:
    shell = world()
    join(shell, 2, pattern=["topic", "never"])
    for _ in range(40):
        publish(shell, 5)
    assert info(shell)["next"] == 200
    shell.wait(1_000)
    assert info(shell)["logged"] == 200
    assert len(dones(shell)) == 1
    shell.restart()
    shell.hello(1)
    assert info(shell)["next"] == 200


def test_expired_records_count_as_done() -> None:
    shell = world()
    publish(shell, 4, expires_at_ms=[0, shell.now_ms + 50, 0, 0])
    shell.wait(100)
    join(shell, 2)
    assert got(shell, 2) == [0, 2, 3]
    ack(shell, 2, (0, 1), (2, 4))
    assert info(shell)["next"] == 4


def test_a_record_that_expires_while_it_waits_is_not_given() -> None:
    shell = world()
    join(shell, 2, credit=1)
    publish(shell, 3, expires_at_ms=[0, shell.now_ms + 50, 0])
    assert got(shell, 2) == [0]
    shell.wait(100)
    shell.send(2, wire.Credit(M, 9, MUCH))
    assert got(shell, 2) == [0, 2]
    ack(shell, 2, (0, 1), (2, 3))
    assert info(shell)["next"] == 3


def test_large_rows_are_extracted_and_small_ones_marked() -> None:
    shell = world()
    for link in (2, 3):
        join(shell, link)
    shell.publish(1, "s", [bytes(2_000)] * 10)
    assert [one.rows for one in shell.peers[2].of(wire.Deliver)] == [None]
    publish(shell, 10)
    assert [one.rows for one in shell.peers[2].of(wire.Deliver)][1:] != [None]
    assert sorted(got(shell, 2) + got(shell, 3)) == list(range(20))


# --- members come and go ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["unsubscribe", "bye", "lost", "kick", "fenced"])
def test_what_a_member_held_goes_to_others(how: str) -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 10)
    join(shell, 3)
    ack(shell, 2, (3, 5))
    match how:
        case "unsubscribe":
            peer = shell.send(2, wire.Unsubscribe(M))
            assert (peer.last(wire.Ended).code, peer.last(wire.Ended).subscription) == (
                "cancelled",
                M,
            )
        case "bye":
            shell.send(2, wire.Bye())
        case "lost":
            lose(shell, 2)
        case "kick":
            shell.send(1, wire.Kick(1, 2))
        case "fenced":
            shell.hello(12, session=(2).to_bytes(16, "big"))
    assert got(shell, 3) == [0, 1, 2, 5, 6, 7, 8, 9]
    (left,) = events(shell, "group_left")
    assert left["held"] == 8
    assert shell.broker.counters["group_records_returned"] == 8


def test_what_the_last_member_held_is_for_the_next() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 10)
    ack(shell, 2, (0, 4))
    lose(shell, 2)
    publish(shell, 2)
    join(shell, 3)
    assert got(shell, 3) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_a_member_that_joins_takes_its_share() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 10)
    join(shell, 3)
    publish(shell, 10)
    assert len(got(shell, 2)) == len(got(shell, 3)) + 10 == 15


def test_a_member_without_credit_stops_no_other() -> None:
    shell = world()
    join(shell, 2, credit=0)
    join(shell, 3)
    publish(shell, 10)
    assert got(shell, 3) == list(range(10))


def test_a_blocked_link_is_given_nothing_until_it_reads_again() -> None:
    shell = world()
    join(shell, 2)
    shell.broker.blocked(2)
    publish(shell, 10)
    assert got(shell, 2) == []
    shell.broker.writable(2)
    shell.run()
    assert got(shell, 2) == list(range(10))


def test_a_member_is_told_where_its_stream_began() -> None:
    shell = world()
    shell.send(1, wire.CreateStream(1, "kept", {"ring_bytes": 1 << 20, "keep": "last-per-subject"}))
    shell.send(1, wire.JoinGroup(M, "kept", "g", ["all"], "shared", [0], 9, 1 << 40))
    assert shell.peers[1].last(wire.Subscribed).begin == 1
    assert join(shell, 2).last(wire.Subscribed).begin == 0


def test_one_link_may_be_a_member_of_several_groups() -> None:
    shell = world()
    join(shell, 2)
    shell.send(2, wire.JoinGroup(6, "s", "h", ["all"], "shared", [0], 9, 1 << 40))
    publish(shell, 3)
    assert got(shell, 2) == offsets(shell.peers[2], 6) == [0, 1, 2]


def test_numbers_are_one_space_with_subscriptions() -> None:
    shell = world()
    join(shell, 2)
    shell.send(2, wire.JoinGroup(M, "s", "h", ["all"], "shared", [0], 9, 1 << 40))
    assert shell.peers[2].last(wire.Refused).code == "subscription_exists"
    shell.subscribe(2, 8, "s")
    shell.send(2, wire.JoinGroup(8, "s", "h", ["all"], "shared", [0], 9, 1 << 40))
    assert shell.peers[2].last(wire.Refused).code == "subscription_exists"


def test_a_group_has_one_kind_and_one_pattern() -> None:
    shell = world()
    join(shell, 2, pattern=["topic", "a.*"])
    assert (
        join(shell, 3, "keyed", pattern=["topic", "a.*"]).last(wire.Refused).code == "bad_setting"
    )
    assert join(shell, 4, pattern=["topic", "b.*"]).last(wire.Refused).code == "bad_setting"
    refused = join(shell, 6, "random").last(wire.Refused)
    assert (refused.command, refused.reference, refused.code) == (63, M, "unsupported")
    assert len(info(shell)["members"]) == 1
    shell.send(4, wire.Unsubscribe(M))
    assert shell.peers[4].last(wire.Refused).code == "unknown_subscription"


def test_who_may_not_read_may_not_join() -> None:
    shell = world(permit=lambda identity, action, name: action in ("identity", "write", "create"))
    publish(shell, 1)
    assert join(shell, 2).last(wire.Refused).code == "forbidden"
    shell.send(1, wire.GroupInfo(1, "s", "g"))
    assert shell.peers[1].last(wire.Refused).code == "forbidden"


def test_limits_of_groups_and_members() -> None:
    shell = world(groups_max=1, group_members_max=2, pattern_bytes_max=30)
    for link in (2, 3):
        join(shell, link)
    assert join(shell, 4).last(wire.Refused).code == "limit"
    assert join(shell, 6, group="h").last(wire.Refused).code == "limit"
    assert join(shell, 7, pattern=["topic", "x" * 40]).last(wire.Refused).code == "too_large"
    assert join(shell, 8, group="no name").last(wire.Refused).code == "bad_name"
    assert join(shell, 9, pattern=["regex", "("]).last(wire.Refused).code == "bad_pattern"


def test_a_reset_on_its_way_takes_no_room_of_a_new_group() -> None:
    shell = world(groups_max=2)
    publish(shell, 1)
    join(shell, 2)
    shell.hello(3)
    reset = wire.ResetGroup(3, "s", "g", [2, 0], True)
    shell.broker.receive(1, "", [reset], [], shell.now_ms)
    assert not join(shell, 3, group="h", hello=False).of(wire.Refused)
    assert join(shell, 4, group="i").last(wire.Refused).code == "limit"


def test_a_question_too_many_for_the_start_of_a_group_is_refused_for_a_while() -> None:
    shell = world(ask=False, link_queries_max=1)
    shell.publish(1, "s", [b"x"])
    for number in (5, 6):
        shell.send(1, wire.JoinGroup(number, "s", f"g{number}", ["all"], "shared", [3, 5, True]))
    refused = shell.peers[1].last(wire.Refused)
    assert (refused.reference, refused.code) == (6, "wait")
    assert refused.retry_ms == shell.settings.retry_ms
    shell.answer_queries()
    shell.run()
    assert shell.broker.gauges["groups"] == 1


def test_members_that_came_before_their_stream_begin_with_it() -> None:
    shell = world(sync=False)
    join(shell, 2, visibility=0)
    join(shell, 3)
    assert not shell.peers[2].of(wire.Subscribed)
    shell.sync()
    shell.run()
    shell.sync()
    shell.run()
    assert len(shell.peers[2].of(wire.Subscribed)) == len(shell.peers[3].of(wire.Subscribed)) == 1
    publish(shell, 4)
    assert sorted(got(shell, 2) + got(shell, 3)) == [0, 1, 2, 3]


def test_a_group_that_the_journal_refuses_is_not_there() -> None:
    shell = world()
    publish(shell, 1)
    shell.refuse["main"] = ("disk_full", "no space")
    assert join(shell, 2).last(wire.Refused).code == "disk_full"
    shell.refuse.clear()
    assert join(shell, 2, hello=False).last(wire.Subscribed).subscription == M
    assert got(shell, 2) == [0]


def test_a_link_that_ends_while_its_group_is_created_leaves_the_group() -> None:
    shell = world(sync=False)
    publish(shell, 1)
    join(shell, 2)
    lose(shell, 2)
    shell.sync()
    shell.run()
    assert info(shell)["members"] == []
    assert shell.broker.gauges["group_members"] == 0


# --- streams that go, and groups at rest ---------------------------------------------------------


def test_groups_go_with_their_stream() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 3)
    shell.send(1, wire.RemoveStream(1, "s"))
    assert shell.peers[2].last(wire.Ended).code == "stream_removed"
    assert not shell.broker._shard.queues.groups
    assert shell.broker.gauges["groups"] == shell.broker.gauges["group_members"] == 0
    publish(shell, 2)
    join(shell, 2, hello=False)
    assert got(shell, 2) == [0, 1]


def test_an_idle_group_costs_no_turns() -> None:
    shell = world()
    join(shell, 2)
    lose(shell, 2)
    publish(shell, 3)
    assert not shell.broker._groups.reader.turns.runnable
    assert audience_of(shell.stream("s")).wakers == ([], [])
