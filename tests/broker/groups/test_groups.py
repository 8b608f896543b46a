"""Groups: shared, exclusive and keyed; which member gets and keeps which record."""

from __future__ import annotations

import itertools
from typing import Any

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
from tests.broker.shell import Shell, offsets

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
    shell = world(permit=lambda identity, action, name: action != "read")
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


# --- exclusive -----------------------------------------------------------------------------------


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


# --- keyed ---------------------------------------------------------------------------------------


def keys(shell: Shell, link: int) -> set[str]:
    return {NAMES[offset % len(NAMES)] for offset in got(shell, link)}


NAMES = [f"key.{n}" for n in range(60)]


def test_records_of_a_key_go_to_one_member_in_order() -> None:
    shell = world()
    for link in (2, 3, 4):
        join(shell, link, "keyed")
    for _ in range(5):
        publish(shell, len(NAMES), subject=NAMES)
    parts = [keys(shell, link) for link in (2, 3, 4)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(NAMES)
    assert all(len(part) > 5 for part in parts)
    for link in (2, 3, 4):
        assert got(shell, link) == sorted(got(shell, link))


def test_the_first_key_of_a_record_decides() -> None:
    shell = world()
    for link in (2, 3, 4):
        join(shell, link, "keyed")
    for n in range(40):
        publish(shell, 1, subject=[["one", f"more.{n}"]])
    assert sorted(len(got(shell, link)) for link in (2, 3, 4)) == [0, 0, 40]


def test_a_key_moves_only_when_its_old_member_holds_none_of_it() -> None:
    shell = world()
    join(shell, 2, "keyed")
    publish(shell, len(NAMES), subject=NAMES)
    join(shell, 3, "keyed")
    publish(shell, len(NAMES), subject=NAMES)
    # Records of slots that are to move wait; the others go on.
    assert got(shell, 3) == []
    stay = {NAMES[offset % 60] for offset in got(shell, 2)[60:]}
    assert 10 < len(stay) < 50
    moving = [n for n, name in enumerate(NAMES) if name not in stay]
    assert info(shell)["waiting"] == len(moving)
    ack(shell, 2, (moving[0], moving[0] + 1))
    assert got(shell, 3) == [60 + moving[0]]
    ack(shell, 2, *[(n, n + 1) for n in moving[1:]])
    assert got(shell, 3) == [60 + n for n in moving]


def test_the_keys_of_a_member_that_died_go_to_others_from_where_it_was() -> None:
    shell = world()
    for link in (2, 3):
        join(shell, link, "keyed")
    publish(shell, len(NAMES), subject=NAMES)
    publish(shell, len(NAMES), subject=NAMES)
    mine = got(shell, 2)
    ack(shell, 2, *[(offset, offset + 1) for offset in mine[::2]])
    lose(shell, 2)
    assert got(shell, 3)[-len(mine[1::2]) :] == mine[1::2]


def test_a_keyed_member_without_credit_holds_up_its_keys_only() -> None:
    shell = world()
    join(shell, 2, "keyed", credit=0)
    join(shell, 3, "keyed")
    for _ in range(3):
        publish(shell, len(NAMES), subject=NAMES)
    theirs = set(got(shell, 3))
    assert 0 < len(theirs) < 180
    shell.evict()
    shell.send(2, wire.Credit(M, 5, MUCH))
    missing = sorted(set(range(180)) - theirs)
    assert got(shell, 2) == missing[:5]
    publish(shell, len(NAMES), subject=NAMES)
    shell.send(2, wire.Credit(M, 1_000, MUCH))
    assert got(shell, 2)[: len(missing)] == missing
    assert got(shell, 2) == sorted(got(shell, 2))


def test_a_key_waits_for_its_record_that_is_wanted_again() -> None:
    shell = world()
    join(shell, 2, "keyed")
    publish(shell, 1, subject="a")
    ack(shell, 2, (0, 1), again_ms=300)
    publish(shell, 2, subject="a")
    publish(shell, 1, subject="b")
    assert got(shell, 2) == [0, 3]
    shell.wait(300)
    assert got(shell, 2) == [0, 3, 0, 1, 2]


def test_a_keyed_group_selects_and_reads_history() -> None:
    shell = world(quantum_bytes=500)
    for _ in range(20):
        publish(shell, len(NAMES), subject=NAMES)
    shell.evict()
    pattern = ["or", *[["topic", name] for name in NAMES[:20]]]
    for link in (2, 3):
        join(shell, link, "keyed", pattern=pattern)
    expected = [n for n in range(1_200) if n % 60 < 20]
    assert sorted(got(shell, 2) + got(shell, 3)) == expected
    assert not keys(shell, 2) & keys(shell, 3)


# --- gaps, trims, memory, rewinds ---------------------------------------------------------------


def trim(shell: Shell, first: int) -> None:
    stream = shell.stream("s")
    shell.firsts[stream.number] = first
    shell.broker.trimmed(stream.ring.name, {stream.number: first})
    shell.run()


def test_records_that_were_removed_count_as_done_and_every_member_is_told() -> None:
    shell = world()
    join(shell, 2, credit=5)
    join(shell, 3, credit=0)
    for _ in range(3):
        publish(shell, 10)
    ack(shell, 2, (0, 2))
    trim(shell, 20)
    for link in (2, 3):
        gap = shell.peers[link].last(wire.Gap)
        assert (gap.subscription, gap.from_, gap.to, gap.code) == (M, 5, 20, "retention")
    assert [one["records"] for one in events(shell, "group_gap")] == [15]
    # Records in hand are still in hand.
    assert info(shell)["next"] == 2
    shell.send(2, wire.Credit(M, 100, MUCH))
    assert got(shell, 2) == [0, 1, 2, 3, 4, *range(20, 30)]
    assert ack(shell, 2, (2, 5)).level == 3
    assert info(shell)["next"] == 20
    assert info(shell)["lost"] == 15


def test_what_a_dead_member_held_of_removed_records_is_gone() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 10)
    publish(shell, 10)
    join(shell, 3)
    trim(shell, 10)
    lose(shell, 2)
    assert got(shell, 3) == list(range(10, 20))
    assert info(shell)["next"] == 10


def test_a_group_before_the_first_record_is_clamped_at_the_start() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 10)
    publish(shell, 10)
    ack(shell, 2, (0, 1), (12, 13))
    lose(shell, 2)
    shell.firsts[1] = 10
    shell.restart()
    shell.hello(1)
    assert (info(shell)["next"], info(shell)["logged"]) == (10, 10)
    assert [(one["from"], one["to"]) for one in events(shell, "group_clamped")] == [(1, 10)]
    join(shell, 2)
    assert got(shell, 2) == [10, 11, *range(13, 20)]


def test_a_damaged_part_is_passed_over_by_name() -> None:
    shell = world(read=False)
    publish(shell, 10)
    publish(shell, 10)
    shell.evict()
    join(shell, 2)
    (read,) = shell.reads
    shell.reads.clear()
    answer = shell._read(read)
    run = answer.runs[0]
    runs = (type(run)(run.data, run.spans[1:]),)
    shell.broker.history(type(answer)(read.token, runs, 20, ((0, 10, "damaged", "a bad page"),)))
    shell.run()
    assert got(shell, 2) == list(range(10, 20))
    assert shell.peers[2].last(wire.Gap).code == "damaged"
    assert info(shell)["next"] == 10


def test_a_journal_that_cannot_be_read_ends_the_members_by_name() -> None:
    from malamute_py.broker import ReadFailed

    shell = world(read=False)
    publish(shell, 10)
    shell.evict()
    join(shell, 2)
    shell.broker.history(ReadFailed(shell.reads.pop().token, "journal_failed", "an error"))
    shell.run()
    assert shell.peers[2].last(wire.Ended).code == "journal_failed"
    assert info(shell)["members"] == []
    join(shell, 2, hello=False)
    shell.answer_reads()
    shell.run()
    assert got(shell, 2) == list(range(10))


def test_a_read_that_brings_nothing_does_not_go_on_for_ever() -> None:
    shell = world(read=False)
    publish(shell, 10)
    shell.evict()
    join(shell, 2)
    for _ in range(3):
        (read,) = shell.reads
        shell.reads.clear()
        from malamute_py.broker import HistoryRead

        shell.broker.history(HistoryRead(read.token, (), read.from_offset))
        shell.run()
    assert shell.peers[2].last(wire.Ended).code == "internal"
    assert [one["group"] for one in events(shell, "read_stuck")] == ["g"]


def test_groups_that_lost_their_members_while_they_waited_for_a_read_hold_up_no_other() -> None:
    shell = world(read=False, reads_max=1)
    publish(shell, 10)
    shell.evict()
    for link, group in enumerate(("first", "left", "gone", "last"), 2):
        join(shell, link, group=group)
    assert len(shell.reads) == 1
    lose(shell, 3)
    lose(shell, 4)
    while shell.reads:
        shell.answer_reads()
        shell.run()
    assert got(shell, 2) == got(shell, 5) == list(range(10))


def test_a_group_that_waits_for_a_read_and_is_woken_meanwhile_reads_once_at_a_time() -> None:
    shell = world(read=False, reads_max=1)
    publish(shell, 10)
    shell.evict()
    for link, group in enumerate(("first", "second", "last"), 2):
        join(shell, link, group=group)
    # The group is woken while it waits for a read: it stands in both orders.
    for link in (3, 4):
        shell.send(link, wire.Credit(M, MUCH + 1, 1 << 50))
    while shell.reads:
        assert len(shell.reads) == 1
        shell.answer_reads()
        shell.run()
    assert [got(shell, link) for link in (2, 3, 4)] == [list(range(10))] * 3


def test_groups_of_a_stream_in_memory_live_in_memory() -> None:
    shell = world()
    shell.send(1, wire.CreateStream(1, "s", {"memory": True}))
    join(shell, 2)
    publish(shell, 5)
    assert ack(shell, 2, (0, 2)).level == wire.Level.NONE
    assert ack(shell, 2, (2, 3), level=3) == "unsupported"
    assert (info(shell)["next"], info(shell)["logged"]) == (2, 2)
    shell.send(2, wire.Atomic(8, 1), wire.AckRecords(M, [(2, 3)]))
    assert shell.peers[2].last(wire.Refused).code == "cross_ring"
    assert info(shell)["held"] == 3
    shell.restart()
    shell.hello(1)
    shell.send(1, wire.GroupInfo(1, "s", "g"))
    assert shell.peers[1].last(wire.Refused).code == "unknown_group"


def test_what_a_power_loss_took_back_is_not_taken_for_done() -> None:
    """A stream with a ring of its own may lose more than the log of the group."""
    shell = world()
    shell.send(1, wire.CreateStream(1, "s", {"ring_bytes": 1 << 20}))
    join(shell, 2, visibility=0)
    publish(shell, 4)
    shell.auto_sync = False
    publish(shell, 4, level=2)
    ack(shell, 2, (0, 2), (3, 7), level=2)
    shell.synced_to["main"] = shell.ends["main"]
    shell.restart(power_loss=True)
    shell.auto_sync = True
    shell.run()
    shell.hello(1)
    (clamped,) = events(shell, "group_clamped")
    assert (clamped["group"], clamped["code"]) == ("g", "rewound")
    join(shell, 2)
    publish(shell, 4)
    assert got(shell, 2) == [2, 4, 5, 6, 7]
    shell.restart()
    join(shell, 2)
    assert got(shell, 2) == [2, 4, 5, 6, 7]


def test_what_took_the_offsets_of_lost_records_is_not_done_however_late_that_is_found() -> None:
    """The second start used to find a tail before the group's position, and clamped nothing."""
    shell = world()
    shell.send(1, wire.CreateStream(1, "s", {"ring_bytes": 1 << 20}))
    shell.send(1, wire.CreateStream(2, "t", {"ring_bytes": 1 << 20}))
    join(shell, 2, visibility=0)
    publish(shell, 2)
    shell.auto_sync = False
    publish(shell, 4, level=2)
    ack(shell, 2, (0, 6), level=2)
    shell.send(1, wire.MoveCursor("s", "c", 6, 5, 2))
    shell.synced_to["main"] = shell.ends["main"]
    # The changes that clamp group and cursor are lost with the next power loss; the records that
    # take the offsets of the lost ones are not.
    shell.restart(power_loss=True)
    shell.hello(1)
    publish(shell, 4, level=2)
    own = next(ring for ring in shell.rings if shell.stream("s").ring.name == ring)
    shell.synced_to[own] = shell.ends[own]
    shell.restart(power_loss=True)
    shell.auto_sync = True
    shell.run()
    shell.hello(1)
    assert {fact["code"] for fact in events(shell, "group_clamped")} == {"rewound"}
    assert shell.stream("s").next == 6
    assert info(shell)["next"] == 2
    value = shell.send(1, wire.CursorInfo(4, "s", "c")).last(wire.Result).value
    assert value["next"] == 2
    join(shell, 2)
    assert got(shell, 2) == [2, 3, 4, 5]


# --- what is not on the disk ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shared", "exclusive", "keyed"])
def test_members_of_a_new_group_are_given_what_is_on_the_disk_only(kind: str) -> None:
    shell = world()
    shell.send(1, wire.CreateStream(1, "s"))
    join(shell, 2, kind)
    shell.auto_sync = False
    publish(shell, 4, level=2)
    assert got(shell, 2) == []
    assert info(shell)["visibility"] == 1
    shell.sync()
    shell.run()
    assert got(shell, 2) == [0, 1, 2, 3]
    publish(shell, 2, level=2)
    shell.send(2, wire.Unsubscribe(M))
    assert info(shell)["tail"] == 6
    join(shell, 3, kind)
    # The disk has to have the new holder of an exclusive group, too.
    assert got(shell, 3) == ([] if kind == "exclusive" else [0, 1, 2, 3])
    shell.sync()
    shell.run()
    assert got(shell, 3) == [0, 1, 2, 3, 4, 5]
    assert isinstance(ack(shell, 3, (0, 6), level=2), wire.Confirm)


def test_a_ring_is_awaited_while_a_durable_group_has_members() -> None:
    shell = world(sync=False)
    shell.send(1, wire.CreateStream(1, "s"))
    shell.sync()
    shell.run()
    stream = shell.stream("s")
    join(shell, 2)
    shell.sync()
    shell.run()
    publish(shell, 1, level=2)
    assert stream.ring.awaited == stream.ring.end_lsn
    lose(shell, 2)
    audience = audience_of(stream)
    assert (audience.durable, audience.wakers) == (0, ([], []))


def test_a_durable_group_reads_history_no_further_than_the_disk_has_it() -> None:
    shell = world(read=False)
    publish(shell, 4)
    shell.auto_sync = False
    publish(shell, 4, level=2)
    shell.evict()
    join(shell, 2)
    shell.sync()
    shell.run()
    publish(shell, 4, level=2)
    shell.evict()
    shell.answer_reads()
    shell.run()
    assert all(read.end_offset <= shell.stream("s").visible_next for read in shell.reads)
    shell.auto_read = True
    shell.answer_reads()
    shell.run()
    assert got(shell, 2) == [0, 1, 2, 3, 4, 5, 6, 7]
    shell.sync()
    shell.run()
    assert got(shell, 2) == list(range(12))


def test_the_visibility_of_a_group_is_that_of_its_first_member() -> None:
    shell = world()
    join(shell, 2, visibility=0)
    join(shell, 3)
    refused = join(shell, 4, visibility=1).last(wire.Refused)
    assert (refused.code, info(shell)["visibility"]) == ("bad_setting", 0)
    shell.restart()
    shell.hello(1)
    assert info(shell)["visibility"] == 0


def test_a_member_that_comes_back_is_told_what_was_rewound_of_what_it_saw() -> None:
    shell = world()
    shell.send(1, wire.CreateStream(1, "s", {}))
    join(shell, 2, visibility=0)
    publish(shell, 2)
    shell.auto_sync = False
    publish(shell, 2, level=2)
    assert got(shell, 2) == [0, 1, 2, 3]
    uuid = shell.peers[2].last(wire.Subscribed).stream
    shell.restart(power_loss=True)
    shell.auto_sync = True
    shell.hello(1)
    publish(shell, 1)
    again = join(shell, 2, seen=(4, 1, uuid))
    (rewound,) = again.of(wire.Rewound)
    assert rewound == wire.Rewound(M, 4, 2, 2)
    assert again.commands.index(rewound) == again.commands.index(again.last(wire.Subscribed)) + 1
    assert got(shell, 2) == [0, 1, 2]
    for link, seen in enumerate([(2, 1, uuid), (3, 2, uuid), (0, 0, b"")], 3):
        assert join(shell, link, seen=seen).of(wire.Rewound) == [], seen
    assert join(shell, 7, seen=(1, 2, bytes(16))).last(wire.Rewound) == wire.Rewound(M, 1, 0, 2)


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
