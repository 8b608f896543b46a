"""Groups of many members: a quick member gets several records at a time, a slow one hoards none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from zlib import crc32

import pytest

from malamute_protocol import commands as wire
from malamute_py.broker.groups import group, selection
from malamute_py.broker.groups.free_members import STALE_MAX
from malamute_py.broker.groups.member import SPREAD_MIN
from malamute_py.broker.groups.slots import Slots
from tests.broker.shell import Shell, offsets

M = 5
"""The number of each member's membership on its link."""


class Crowd:
    """The members of one group, which acknowledge all they have when told to; credit comes back."""

    def __init__(self, members: int, credit: int = 1_000) -> None:
        self.shell = Shell()
        self.shell.hello(1)
        self.credit = credit
        self.links = range(2, 2 + members)
        self._done = dict.fromkeys(self.links, 0)
        self._seen = dict.fromkeys(self.links, 0)
        for link in self.links:
            self.shell.hello(link)
            self.shell.send(
                link, wire.JoinGroup(M, "s", "g", ["all"], "shared", [0], credit, 1 << 50)
            )

    def got(self, link: int) -> list[int]:
        return offsets(self.shell.peers[link], M)

    def held(self, link: int) -> list[int]:
        received = self.shell.peers[link].received.get(M, [])
        return [offset for offset, _ in received[self._done[link] :]]

    def publish(self, count: int) -> int:
        """Publish one batch; returns the number of deliveries in which it went out."""
        self.shell.publish(1, "s", [b"%d" % n for n in range(count)])
        deliveries = 0
        for link in self.links:
            commands = self.shell.peers[link].commands
            deliveries += sum(type(c) is wire.Deliver for c in commands[self._seen[link] :])
            self._seen[link] = len(commands)
        return deliveries

    def answer(self, *, but: Collection[int] = ()) -> None:
        for link in self.links:
            mine = [] if link in but else self.held(link)
            if not mine:
                continue
            self._done[link] += len(mine)
            ranges = [(offset, offset + 1) for offset in sorted(mine)]
            self.shell.send(link, wire.AckRecords(M, ranges, 9))
            self.shell.send(link, wire.Credit(M, self._done[link] + self.credit, 1 << 50))

    def rounds(self, count: int, records: int, took_ms: int = 0) -> list[int]:
        """Publish batches that are all acknowledged; returns the deliveries of each."""
        deliveries = []
        for _ in range(count):
            deliveries.append(self.publish(records))
            if took_ms:
                self.shell.wait(took_ms)
            self.answer()
        return deliveries


@pytest.mark.moderate
def test_many_quick_members_are_given_some_records_at_a_time() -> None:
    crowd = Crowd(150)
    deliveries = crowd.rounds(30, 150)
    assert deliveries[0] == 150, "nothing is known of them yet"
    assert SPREAD_MIN <= deliveries[-1] <= 150 / 3, "a batch is spread over many all the same"
    every = [offset for link in crowd.links for offset in crowd.got(link)]
    assert sorted(every) == list(range(30 * 150))


@pytest.mark.slow
def test_what_many_quick_members_get_evens_out() -> None:
    crowd = Crowd(150)
    crowd.rounds(100, 150)
    shares = [len(crowd.got(link)) for link in crowd.links]
    assert sum(shares) == 100 * 150
    assert min(shares) > 90
    assert max(shares) < 110


@pytest.mark.moderate
def test_many_slow_members_are_given_one_record_each() -> None:
    crowd = Crowd(150)
    assert set(crowd.rounds(10, 150, took_ms=50)) == {150}


@pytest.mark.moderate
def test_a_lone_batch_goes_to_each_of_a_few_members_however_quick_they_are() -> None:
    crowd = Crowd(10)
    crowd.rounds(20, 1_000)
    assert set(crowd.rounds(10, 10)) == {10}
    assert crowd.publish(20) == 10


@pytest.mark.moderate
def test_a_backlog_goes_out_by_shares_however_quick_the_members_are() -> None:
    crowd = Crowd(150)
    crowd.rounds(30, 150)
    counts = Counter({link: -len(crowd.got(link)) for link in crowd.links})
    assert crowd.publish(3_000) >= 150
    counts.update({link: len(crowd.got(link)) for link in crowd.links})
    assert set(counts.values()) == {20}


@pytest.mark.slow
def test_a_quick_member_that_becomes_slow_holds_a_lot_and_no_more() -> None:
    crowd = Crowd(150, credit=40)
    crowd.rounds(60, 150)
    slow = crowd.links[7]
    for _ in range(40):
        crowd.publish(150)
        crowd.answer(but=[slow])
    # The member's free credit is the least from then on: all others go before it.
    assert 1 <= len(crowd.held(slow)) <= 150 // SPREAD_MIN
    crowd.answer()
    crowd.rounds(20, 150)
    assert crowd.held(slow) == []


@pytest.mark.moderate
def test_slow_members_among_quick_ones_are_given_one_record_at_a_time() -> None:
    crowd = Crowd(150)
    slow = crowd.links[:20]
    for _ in range(20):
        crowd.publish(150)
        crowd.answer(but=slow)
        crowd.shell.wait(100)
        assert all(len(crowd.held(link)) <= 2 for link in slow)
        crowd.answer()


@pytest.mark.moderate
def test_members_that_have_left_are_not_kept_in_the_order_of_the_others() -> None:
    crowd = Crowd(150)
    crowd.rounds(5, 150)
    (group,) = crowd.shell.broker._groups._groups
    for link in crowd.links[1:]:
        crowd.shell.send(link, wire.Bye())
    assert len(group.free._heap) <= STALE_MAX + 2
    crowd.shell.send(crowd.links[0], wire.Unsubscribe(M))
    assert not group.free._heap


# --- keyed groups whose members come and go together ---------------------------------------------


def keyed(members: int, subjects: int = 3_000) -> Shell:
    """A keyed group of link 2 over four batches of distinct subjects, before any hand-out."""
    shell = Shell()
    shell.hello(1)
    shell.hello(2)
    for batch in range(4):
        names = [f"k{batch}.{at}" for at in range(subjects)]
        shell.publish(1, "st", [b""] * subjects, subject=names)
    joins = [
        wire.JoinGroup(number, "st", "g", ["all"], "keyed", [0], 1_000_000, 1 << 30)
        for number in range(1, members + 1)
    ]
    shell.broker.receive(2, "", joins, [], shell.now_ms)
    return shell


@pytest.mark.moderate
def test_a_first_key_is_hashed_once_however_many_members_it_is_divided_among(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For each delivery all keys of its batch were hashed: 1,000 members took a minute."""
    hashed = 0

    def counted(data: bytes) -> int:
        nonlocal hashed
        hashed += 1
        return crc32(data)

    monkeypatch.setattr(selection, "crc32", counted)
    shell = keyed(200)
    shell.run()
    assert shell.broker.gauges["group_records_held"] == 12_000
    assert hashed <= 12_000


@pytest.mark.moderate
def test_a_turn_of_a_keyed_group_makes_a_bounded_number_of_deliveries() -> None:
    shell = keyed(400)
    shell.readies.clear()
    shell.run()
    deliveries = [
        sum(type(command) is wire.Deliver for send in ready.sends for command in send.commands)
        for ready in shell.readies
    ]
    assert sum(deliveries) > 1_200
    weight = 1 + 3_000 // group.DEAL_ROWS
    assert max(deliveries) * weight <= 3 * group.DEALS_AT_ONCE
    assert shell.broker.gauges["group_records_held"] == 12_000


@pytest.mark.moderate
def test_members_that_leave_together_are_divided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each member that left all slots were settled, for each page of what it held."""
    shell = keyed(200)
    shell.hello(3)
    shell.send(3, wire.JoinGroup(1, "st", "g", ["all"], "keyed", [0], 1_000_000, 1 << 30))
    shell.run()
    settled = 0
    settle = Slots.settle

    def counted(slots: Slots) -> None:
        nonlocal settled
        settled += 1
        settle(slots)

    monkeypatch.setattr(Slots, "settle", counted)
    shell.broker.link_lost(2, shell.now_ms)
    assert settled == 1
    shell.run()
    (left,) = shell.events_of("group_left")
    assert (left.facts["members"], left.facts["link"]) == (200, 2)
    mine = [offset for offset, _ in shell.peers[3].received[1]]
    assert sorted(mine) == list(range(12_000))
    assert [*dict.fromkeys(mine)] == mine
