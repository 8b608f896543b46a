"""Records that a group loses or waits for: removed, damaged, rewound, not on the disk yet."""

from __future__ import annotations

import pytest

from malamute_protocol import commands as wire
from malamute_py.broker.subscriptions.audience import audience_of
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
