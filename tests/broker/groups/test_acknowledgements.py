"""Acknowledgements of groups: done or wanted again, one by one, late or in a step."""

from __future__ import annotations

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from tests.broker.group_world import M, ack, dones, events, got, info, join, publish, world


def test_acknowledgements_in_any_order_move_the_position_over_what_has_no_hole() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 10)
    for ranges, next, done in (([(4, 6)], 0, 2), ([(0, 2), (8, 9)], 2, 3), ([(2, 4)], 6, 1)):
        assert ack(shell, 2, *ranges).level == 3
        facts = info(shell)
        assert (facts["next"], facts["done"], facts["lag"]) == (next, done, 10 - next)
        assert facts["held"] == 10 - next - done


def test_what_was_confirmed_does_not_come_again_and_the_rest_does() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 10)
    ack(shell, 2, (1, 3), (7, 8))
    shell.restart()
    join(shell, 2)
    assert got(shell, 2) == [0, 3, 4, 5, 6, 8, 9]


def test_a_confirm_waits_for_the_level_and_a_power_loss_takes_the_unsynced() -> None:
    shell = world(sync=False)
    join(shell, 2)
    for _ in range(2):
        shell.sync()
        shell.run()
    publish(shell, 4)
    shell.sync()
    shell.run()
    assert ack(shell, 2, (0, 1), tracker=1, level=2).level == 2
    assert ack(shell, 2, (1, 2), tracker=2) is None
    shell.sync()
    shell.run()
    assert shell.peers[2].last(wire.Confirm).tracker == 2
    ack(shell, 2, (2, 3), tracker=3)
    shell.restart(power_loss=True)
    shell.hello(1)
    join(shell, 2)
    assert got(shell, 2) == [2, 3]


def test_of_what_is_not_held_nothing_is_acknowledged() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 5)
    join(shell, 3)
    publish(shell, 4)
    assert got(shell, 2) == [0, 1, 2, 3, 4, 7, 8]
    assert ack(shell, 2, (0, 9)) == "not_held"
    assert ack(shell, 2, (0, 5), (1_000_000, 1_000_001)) == "not_held"
    assert ack(shell, 3, (0, 1)) == "not_held"
    assert info(shell)["next"] == 0
    assert ack(shell, 2, (0, 5)).level == 3
    assert ack(shell, 2, (0, 1)) == "not_held"
    shell.send(3, wire.AckRecords(77, [(0, 1)], 4))
    assert shell.peers[3].last(wire.Refused).code == "unknown_subscription"


def test_an_acknowledgement_that_the_journal_refuses_changes_nothing() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 5)
    shell.refuse["main"] = ("disk_full", "no space")
    assert ack(shell, 2, (0, 3)) == "disk_full"
    shell.refuse.clear()
    assert (info(shell)["next"], info(shell)["held"]) == (0, 5)
    assert ack(shell, 2, (0, 3)).level == 3
    assert info(shell)["next"] == 3


def test_what_a_dead_member_acknowledged_in_vain_goes_to_others() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 5)
    join(shell, 3)
    # The step is taken and not handed over yet when the link is lost.
    shell.broker.receive(2, "", [wire.AckRecords(M, [(0, 3)], 4)], [], shell.now_ms)
    shell.broker.link_lost(2, shell.now_ms)
    shell.refuse["main"] = ("disk_full", "no space")
    shell.run()
    shell.refuse.clear()
    assert sorted(got(shell, 3)) == [0, 1, 2, 3, 4]


def test_acknowledgements_that_no_caller_waits_for_are_logged_together() -> None:
    shell = world()
    join(shell, 2)
    for n in range(50):
        publish(shell, 4)
        assert ack(shell, 2, (4 * n + 1, 4 * n + 4), tracker=0) is None
    assert dones(shell) == []
    assert info(shell)["done"] == 150
    shell.wait(1_000)
    (done,) = dones(shell)
    assert len(done.ranges) == 50
    shell.restart()
    join(shell, 2)
    assert got(shell, 2) == list(range(0, 200, 4))


def test_what_no_caller_waits_for_is_logged_of_a_page_that_has_nothing_else() -> None:
    shell = world()
    join(shell, 2, pattern=["topic", "a"])
    for subject, count in (("a", 1), ("b", 5_000), ("a", 1), ("b", 5_000)):
        publish(shell, count, subject=subject)
    assert got(shell, 2) == [0, 5_001]
    ack(shell, 2, (5_001, 5_002), tracker=0)
    shell.refuse["main"] = ("disk_full", "no space")
    shell.wait(1_500)
    shell.refuse.clear()
    shell.wait(1_500)
    shell.restart()
    join(shell, 2, pattern=["topic", "a"])
    assert got(shell, 2) == [0]


def test_what_no_caller_waits_for_is_kept_when_the_journal_refuses_it_at_first() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 4)
    ack(shell, 2, (1, 3), tracker=0)
    shell.refuse["main"] = ("disk_full", "no space")
    shell.wait(1_500)
    shell.refuse.clear()
    shell.wait(1_500)
    shell.restart()
    join(shell, 2)
    assert got(shell, 2) == [0, 3]


def test_a_record_that_is_wanted_again_comes_after_its_time() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 4)
    assert ack(shell, 2, (1, 3), again_ms=500).level == wire.Level.NONE
    assert (info(shell)["late"], info(shell)["held"]) == (2, 2)
    shell.wait(400)
    assert len(got(shell, 2)) == 4
    shell.wait(100)
    assert got(shell, 2) == [0, 1, 2, 3, 1, 2]
    ack(shell, 2, (0, 1), again_ms=0)
    assert got(shell, 2)[6:] == [0]
    ack(shell, 2, (0, 4))
    assert info(shell)["next"] == 4


def test_a_step_acknowledges_what_it_transforms() -> None:
    shell = world()
    join(shell, 2)
    publish(shell, 4)
    content = encode([b"done"], subject="out")
    step = wire.Atomic(9, 2), wire.Publish("out", 0), wire.AckRecords(M, [(0, 2)])
    peer = shell.send(2, *step, frames=[content])
    assert peer.last(wire.Confirm).tracker == 9
    assert info(shell)["next"] == info(shell)["logged"] == 2
    # The same step again: nothing of it happens, and nothing is published.
    shell.send(2, *step, frames=[content])
    assert peer.last(wire.Refused).code == "not_held"
    assert shell.stream("out").next == 1
    shell.send(2, wire.Atomic(10, 1), wire.AckRecords(M, [(2, 3)], again_ms=5))
    assert peer.last(wire.Refused).code == "unsupported"
    shell.send(2, wire.Atomic(11, 2), wire.AckRecords(M, [(2, 3)]), wire.AckRecords(M, [(2, 3)]))
    assert (peer.last(wire.Refused).code, info(shell)["held"]) == ("not_held", 2)
    shell.restart()
    join(shell, 2)
    assert got(shell, 2) == [2, 3]


def test_a_group_reads_no_further_ahead_than_its_window() -> None:
    shell = world(group_window_records=20)
    join(shell, 2)
    for _ in range(10):
        publish(shell, 10)
    assert got(shell, 2) == list(range(20))
    ack(shell, 2, (10, 20))
    assert len(got(shell, 2)) == 20
    ack(shell, 2, (0, 5))
    assert len(got(shell, 2)) == 30
    for first in range(5, 10):
        ack(shell, 2, (first, first + 1))
    assert len(got(shell, 2)) == 40


def test_who_holds_a_group_up_is_named_once_and_can_be_kicked() -> None:
    shell = world(group_window_records=20)
    join(shell, 2, credit=1)
    join(shell, 3)
    publish(shell, 2)
    assert got(shell, 2) == [1]
    for _ in range(3):
        publish(shell, 10)
    ack(shell, 3, (0, 1), (2, 12))
    assert info(shell)["next"] == 1

    def pass_time() -> None:
        for _ in range(20):
            for link in (1, 2, 3):
                shell.send(link, wire.Ping(0))
            shell.wait(2_000)

    since_ms = shell.now_ms
    assert events(shell, "group_held_up") == []
    pass_time()
    pass_time()
    (event,) = events(shell, "group_held_up")
    assert event == {
        "stream": "s", "group": "g", "next": 1, "read": 22, "held": 11, "link": 2,
        "identity": "", "since_ms": since_ms,
    }  # fmt: skip
    assert shell.broker.counters["groups_held_up"] == 1
    shell.send(1, wire.Kick(8, 2))
    assert 1 in got(shell, 3)
    ack(shell, 3, (1, 2), (12, 22))
    assert info(shell)["next"] == 22
    assert len(got(shell, 3)) == 32
    pass_time()
    assert len(events(shell, "group_held_up")) == 1


def test_a_record_is_not_put_off_for_ever() -> None:
    shell = world(lease_max_ms=5_000)
    join(shell, 2)
    publish(shell, 1)
    ack(shell, 2, (0, 1), again_ms=1 << 53)
    shell.wait(4_000)
    assert got(shell, 2) == [0]
    for link in (1, 2):
        shell.send(link, wire.Ping(0))
    shell.wait(1_100)
    assert got(shell, 2) == [0, 0]


def test_a_group_that_is_slow_but_moves_is_not_held_up() -> None:
    shell = world(group_window_records=20)
    join(shell, 2)
    for _ in range(10):
        publish(shell, 10)
    for first in range(0, 80, 10):
        for _ in range(6):
            shell.send(2, wire.Ping(0))
            shell.send(1, wire.Ping(0))
            shell.wait(4_000)
        ack(shell, 2, (first, first + 10))
    assert events(shell, "group_held_up") == []
