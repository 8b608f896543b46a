"""Memberships of groups in the session: what is in hand, acknowledged, and whose it is."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.batch import encode
from malamute_protocol.commands import Command
from malamute_protocol.errors import BrokerRefused, LocalProtocolError
from malamute_py.client.readers.group import numbers_of
from malamute_py.client.session.acknowledgements import AckForm
from malamute_py.client.session.attempts import LinkState
from malamute_py.client.session.events import Settled
from malamute_py.client.session.group_options import DONE, RENEWED, GroupOptions
from malamute_py.client.session.held_batches import HeldBatch
from malamute_py.client.session.memberships import Membership
from malamute_py.client.session.step import Step
from malamute_py.client.session.subscription import (
    GapNotice,
    PassedOverNotice,
    RewoundNotice,
)
from tests.client.script import STREAM_UUID, Script, stamped
from tests.rows import bitmap_of_rows

TIME_MS = 1_700_000_000_000


class Grouped(Script):
    """A session that is a member of one group, and what became of its acknowledgements."""

    def __init__(self, **asked: Any) -> None:
        super().__init__()
        self.open()
        self.member = self.join(**asked)

    def join(self, **asked: Any) -> Membership:
        joining = GroupOptions(**{"stream": "s", "group": "g", "pattern": ["all"], **asked}).check()
        member = self.session.memberships.join(joining)
        self.step()
        self.accept_member(member)
        return member

    def accept_member(self, member: Membership) -> list[Command]:
        return self.say(c.Subscribed(member.number, STREAM_UUID, 1, 0, 0, 100))

    def hand(
        self, count: int, base: int, rows: list[int] | None = None, epoch: int = 1
    ) -> list[Command]:
        frames = stamped(encode([b"%d" % n for n in range(count)], subject="a"), base, epoch=epoch)
        bitmap = None if rows is None else bitmap_of_rows(rows, count)
        deliver = c.Deliver(self.member.number, base, base + count, 2, bitmap)
        return self.say(deliver, frames=frames)

    def take(self) -> HeldBatch:
        item = self.member.take()
        assert isinstance(item, HeldBatch)
        return item

    def ack(self, offsets: list[int], token: str | None = None, again_ms: int = -1) -> list[Any]:
        self.member.ack(offsets, DONE if again_ms < 0 else AckForm(0, again_ms), token)
        return [command for command in self.step() if isinstance(command, c.AckRecords)]

    def confirmed(self, ack: c.AckRecords) -> list[Command]:
        return self.say(c.Confirm(ack.tracker, 3, 1, 0, TIME_MS))

    def settled(self) -> dict[str, Any]:
        found = [
            pair for event in self.happened if isinstance(event, Settled) for pair in event.pairs
        ]
        self.happened = [event for event in self.happened if not isinstance(event, Settled)]
        return dict(found)


def test_joining_says_what_was_asked_for_on_every_link() -> None:
    script = Grouped(kind="keyed", start=[0], credit_records=100, hold_ms=5)
    first = script.last(c.JoinGroup)
    assert first == c.JoinGroup(
        script.member.number, "s", "g", ["all"], "keyed", [0], 100, 8 << 20, 5, create=False
    )
    script.reconnect()
    assert script.last(c.JoinGroup) == first


def test_records_come_in_any_order_and_covers_need_not_touch() -> None:
    script = Grouped()
    script.hand(10, 20, [0, 5])
    script.hand(2, 4)
    assert script.take().numbers == [20, 25]
    assert script.take().numbers == [4, 5]
    assert script.member.take() is None


def test_acknowledgements_of_one_turn_leave_as_one_command() -> None:
    script = Grouped()
    script.hand(10, 0)
    batch = script.take()
    for record in list(batch)[:4]:
        script.member.ack(numbers_of(record, script.member), token=f"{record.offset}")
    [ack] = script.ack([7], "7")
    assert ack.ranges == [(0, 4), (7, 8)]
    assert (ack.subscription, ack.again_ms) == (script.member.number, -1)
    assert script.settled() == {}
    script.confirmed(ack)
    assert script.settled() == dict.fromkeys(["0", "1", "2", "3", "7"], True)


def test_what_is_not_in_hand_is_not_acknowledged() -> None:
    script = Grouped()
    script.hand(2, 0)
    assert script.ack([5], "five") == []
    assert script.settled() == {"five": False}
    [ack] = script.ack([1, 2], "both")
    assert ack.ranges == [(1, 2)]
    assert script.ack([1], "again") == []
    assert script.settled() == {"both": False, "again": False}


def test_a_refusal_of_some_costs_the_others_nothing() -> None:
    script = Grouped()
    script.hand(4, 0)
    [ack] = script.ack([0, 1, 2, 3], "all")
    waiting = script.say(c.Refused(64, ack.tracker, "not_held"))
    refused = 0
    while waiting:
        for one in list(waiting):
            waiting.remove(one)
            if not isinstance(one, c.AckRecords):
                continue
            if (2, 3) in [(n, n + 1) for first, end in one.ranges for n in range(first, end)]:
                refused += 1
                waiting += script.say(c.Refused(64, one.tracker, "not_held"))
            else:
                waiting += script.confirmed(one)
    assert refused == 2
    assert script.settled() == {"all": False}
    assert script.session.idle


def test_records_wanted_again_leave_apart_from_those_that_are_done() -> None:
    script = Grouped()
    script.hand(4, 0)
    script.member.ack([0])
    acks = script.ack([1, 2], again_ms=500)
    assert sorted((ack.again_ms, ack.ranges) for ack in acks) == [(-1, [(0, 1)]), (500, [(1, 3)])]


def test_credit_comes_back_as_records_are_acknowledged() -> None:
    script = Grouped(credit_records=10)
    script.hand(10, 0)
    script.take()
    script.session.consumed(script.member)
    assert script.step() == []
    script.member.ack(list(range(4)))
    assert [type(command) for command in script.step()] == [c.AckRecords]
    script.member.ack([4])
    given = [command for command in script.step() if isinstance(command, c.Credit)]
    assert [credit.credit_records for credit in given] == [15]


def test_what_nobody_took_is_dropped_with_the_link_and_comes_to_whom_the_broker_will() -> None:
    script = Grouped()
    script.hand(4, 0)
    script.lose()
    assert script.member.take() is None
    script.wait(60_000)
    script.open()
    script.accept_member(script.member)
    script.hand(2, 0)
    assert script.take().numbers == [0, 1]


def test_what_was_handed_over_is_not_handed_over_again_after_a_reconnect() -> None:
    script = Grouped()
    script.hand(4, 0)
    batch = script.take()
    [ack] = script.ack([0, 1], "lost")
    assert ack.ranges == [(0, 2)]
    script.reconnect()
    assert script.settled() == {"lost": False}
    script.accept_member(script.member)
    again = [command for command in script.hand(6, 0) if isinstance(command, c.AckRecords)]
    assert [command.ranges for command in again] == [[(0, 2)]]
    assert script.take().numbers == [4, 5]
    assert numbers_of(batch, script.member) == [0, 1, 2, 3]
    [late] = script.ack([2, 3], "late")
    script.confirmed(late)
    assert script.settled() == {"late": True}


def test_an_acknowledgement_between_two_links_is_made_good_when_the_record_comes_again() -> None:
    script = Grouped()
    script.hand(2, 0)
    script.take()
    script.lose()
    assert script.ack([0], "between") == []
    assert script.settled() == {"between": False}
    script.wait(60_000)
    script.open()
    script.accept_member(script.member)
    [ack] = [command for command in script.hand(1, 0) if isinstance(command, c.AckRecords)]
    assert ack.ranges == [(0, 1)]
    assert script.member.take() is None


def rewound_after(script: Grouped, until: int, uuid: bytes = STREAM_UUID) -> HeldBatch:
    """A member that has records 0 to 3 of epoch 1, and learns that the log ends at `until`."""
    script.hand(4, 0)
    batch = script.take()
    script.reconnect()
    number = script.member.number
    assert script.last(c.JoinGroup).seen == (4, 1, STREAM_UUID)
    script.say(c.Subscribed(number, uuid, 2, 0, 0, until), c.Rewound(number, 4, until, 2))
    assert script.member.take() == RewoundNotice(4, until, 2)
    return batch


def test_a_rewind_is_a_notice_and_other_records_at_the_same_offsets_are_handed_over() -> None:
    """Such records were taken for those of before: acknowledged, and seen by no reader."""
    script = Grouped()
    old = rewound_after(script, 2)
    acks = [ack for ack in script.hand(4, 0, epoch=2) if isinstance(ack, c.AckRecords)]
    assert acks == []
    new = script.take()
    assert new.numbers == [2, 3]
    assert numbers_of(list(old)[1], script.member) == [1]
    assert numbers_of(list(old)[3], script.member) == [-4], "a number that no record has"
    [ack] = script.ack(old.numbers, "old")
    assert ack.ranges == [(0, 2)]
    assert script.settled() == {"old": False}
    [ack] = script.ack(new.numbers, "new")
    assert ack.ranges == [(2, 4)]
    script.confirmed(ack)
    assert script.settled() == {"new": True}


def test_what_was_acknowledged_before_a_rewind_is_not_acknowledged_after_it() -> None:
    script = Grouped()
    script.hand(4, 0)
    script.take()
    script.ack([1, 2, 3])
    script.reconnect()
    number = script.member.number
    script.say(c.Subscribed(number, STREAM_UUID, 2, 0, 0, 2), c.Rewound(number, 4, 2, 2))
    acks = [ack for ack in script.hand(4, 0, epoch=2) if isinstance(ack, c.AckRecords)]
    assert [ack.ranges for ack in acks] == [[(1, 2)]]
    assert isinstance(script.member.take(), RewoundNotice)
    assert script.take().numbers == [2, 3]


def test_a_rewound_record_is_no_part_of_a_step() -> None:
    script = Grouped()
    old = rewound_after(script, 2)
    script.hand(4, 0, epoch=2)
    step = Step()
    for void in (list(old)[2], old):
        with pytest.raises(BrokerRefused, match="not in hand"):
            step.ack(void)
    step.ack(list(old)[1])


def test_records_of_a_stream_that_was_made_anew_are_none_of_the_old_one() -> None:
    script = Grouped()
    old = rewound_after(script, 0, bytes(16))
    script.hand(4, 0)
    new = script.take()
    assert new.numbers == [0, 1, 2, 3]
    assert old.numbers == [-1, -2, -3, -4]
    script.reconnect()
    assert script.last(c.JoinGroup).seen == (4, 1, bytes(16))
    script.say(c.Subscribed(script.member.number, bytes(16), 2, 0, 0, 4))
    script.hand(4, 0)
    assert script.member.take() is None, "they are with the reader"


def test_a_second_rewind_goes_by_what_was_seen_since_the_first() -> None:
    script = Grouped()
    first = rewound_after(script, 2)
    script.hand(6, 2, epoch=3)
    second = script.take()
    script.reconnect()
    number = script.member.number
    assert script.last(c.JoinGroup).seen == (8, 3, STREAM_UUID)
    script.say(c.Subscribed(number, STREAM_UUID, 5, 0, 0, 6), c.Rewound(number, 8, 6, 5))
    assert script.member.take() == RewoundNotice(8, 6, 5)
    script.hand(4, 4, epoch=4)
    assert first.numbers == [0, 1, -3, -4]
    assert second.numbers == [2, 3, 4, 5, -7, -8]
    assert script.take().numbers == [6, 7]


def test_a_gap_is_a_notice_and_covers_and_modes_are_nothing() -> None:
    script = Grouped()
    script.say(
        c.Cover(script.member.number, 0, 50),
        c.Mode(script.member.number, True, 50),
        c.Gap(script.member.number, 50, 60, "retention"),
    )
    assert script.member.take() == GapNotice(50, 60, "retention")
    assert script.member.take() is None


def test_records_outside_of_what_a_delivery_names_cost_the_broker_the_link() -> None:
    script = Grouped()
    frames = stamped(encode([b"x", b"y"]), 5)
    script.say(c.Deliver(script.member.number, 5, 6, 2), frames=frames)
    assert script.state() is LinkState.WAITING
    assert script.member.ended


def test_who_leaves_says_so_behind_the_confirms_of_what_it_acknowledged() -> None:
    script = Grouped()
    script.hand(4, 0)
    script.take()
    script.member.ack([0, 1], token="done")
    script.session.memberships.leave(script.member)
    [ack] = script.step()
    assert isinstance(ack, c.AckRecords)
    script.hand(2, 10)
    assert script.member.take() is None
    assert script.confirmed(ack) == [c.Unsubscribe(script.member.number)]
    script.say(c.Ended(script.member.number, 0, "cancelled"))
    assert script.settled() == {"done": True}
    assert script.member.ended
    assert script.member.error is None


def test_who_leaves_without_a_link_has_left() -> None:
    script = Grouped()
    script.lose()
    script.session.memberships.leave(script.member)
    assert script.member.ended
    script.wait(60_000)
    assert c.JoinGroup not in [type(command) for command in script.open()]


def test_who_is_leaving_when_the_link_goes_has_left() -> None:
    script = Grouped()
    script.hand(1, 0)
    script.ack([0], "lost")
    script.session.memberships.leave(script.member)
    assert c.JoinGroup not in [type(command) for command in script.reconnect()]
    assert script.member.ended
    assert script.settled() == {"lost": False}


def test_what_is_acknowledged_after_the_end_leaves_nothing_unconfirmed() -> None:
    script = Grouped()
    script.hand(3, 0)
    assert script.take().numbers == [0, 1, 2]
    script.say(c.Ended(script.member.number, 3, "removed"))
    assert script.ack([0, 1], "mine") == []
    assert script.settled() == {"mine": False}
    assert script.session.idle


def test_a_step_acknowledges_records_and_batches_of_a_group() -> None:
    script = Grouped()
    script.hand(4, 0)
    script.hand(2, 10)
    first, second = script.take(), script.take()
    step = Step()
    step.ack(next(iter(first)))
    step.ack(second)
    with pytest.raises(BrokerRefused, match="not_held"):
        Step().ack(second)
    assert script.ack([10]) == []
    script.session.steps.add(step, "step")
    atomic, ack = script.step()
    assert isinstance(atomic, c.Atomic)
    assert ack == c.AckRecords(script.member.number, [(0, 1), (10, 12)])
    script.say(c.Refused(66, atomic.tracker, "conflict"))
    assert isinstance(script.settled()["step"], BrokerRefused)
    assert script.member.in_hand == {0, 1, 2, 3, 10, 11}


def test_credit_comes_back_of_records_that_came_again_before_their_step_was_answered() -> None:
    script = Grouped(credit_records=2)
    script.hand(2, 0)
    taken = script.take()
    step = Step()
    step.ack(taken)
    script.session.steps.add(step, "step")
    script.step()
    script.reconnect()
    script.accept_member(script.member)
    script.hand(2, 0)
    assert script.member.take() is None, "the program has them, and the step is under way"
    atomic = script.last(c.Atomic)
    script.confirmed(atomic)
    assert "step" in script.settled()
    assert not script.member.in_hand
    assert script.last(c.Credit).credit_records == 4


def test_a_record_that_a_step_could_not_acknowledge_is_shown_again() -> None:
    script = Grouped()
    script.hand(2, 4)
    taken = script.take()
    script.reconnect()
    script.accept_member(script.member)
    with pytest.raises(BrokerRefused, match="not_held"):
        Step().ack(taken)
    script.hand(2, 4)
    assert script.take().numbers == [4, 5]


@pytest.mark.parametrize("wrong", [{"kind": "several"}, {"credit_records": 0}, {"hold_ms": -1}])
def test_what_the_broker_would_refuse_is_refused_before(wrong: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError, match="bad_setting"):
        GroupOptions("s", "g", ["all"], **wrong).check()


# --- leases -------------------------------------------------------------------------------------


class Leased(Grouped):
    """A member of a group whose records have a lease of 900 ms."""

    def accept_member(self, member: Membership) -> list[Command]:
        return self.say(c.Subscribed(member.number, STREAM_UUID, 1, 0, 0, 100, -1, 900))

    def renewals(self, ms: int) -> list[Any]:
        """Return the ranges that are renewed within a time."""
        said = [*self.wait(ms), *self.step()]
        return [one.ranges for one in said if isinstance(one, c.AckRecords) and one.state == 2]


def test_leases_are_renewed_while_the_program_asks_for_records() -> None:
    script = Leased()
    script.hand(3, 0)
    script.hand(2, 3)
    script.take()
    assert script.renewals(299) == []
    script.take()
    [ranges] = script.renewals(2)
    assert ranges == [(0, 5)]
    assert script.renewals(500) == []
    script.ack([1])
    assert script.renewals(1) == []
    script.hand(1, 5)
    script.take()
    [ranges] = script.renewals(400)
    assert ranges == [(0, 1), (2, 6)]


def test_a_session_without_a_link_does_not_wake_for_leases() -> None:
    script = Leased()
    script.hand(2, 0)
    script.take()
    script.wait(1)
    script.member.take()
    script.lose()
    at_ms = script.session.attempts.retry_at_ms
    assert script.session.next_wake() == at_ms
    script.wait(at_ms - script.now_ms)
    while script.state() is LinkState.CONNECTING:
        wake_ms = script.session.next_wake()
        assert wake_ms is not None
        assert wake_ms > script.now_ms
        script.wait(wake_ms - script.now_ms)


def test_a_program_that_asks_once_has_its_link_woken_for_the_renewal() -> None:
    script = Leased()
    script.hand(1, 0)
    began_ms = script.now_ms
    at_ms = script.session.next_wake()
    assert at_ms is not None
    assert at_ms > began_ms + 300
    script.take()
    told = [script.member.wakes, script.step(), script.member.wakes]
    assert told == [True, [], False]
    assert script.session.next_wake() == began_ms + 300
    assert script.renewals(300) == [[(0, 1)]]
    script.wait(1)
    script.member.take()
    assert script.member.wakes


def test_a_program_that_stands_still_when_its_lease_ends_says_nothing() -> None:
    script = Leased()
    script.hand(1, 0)
    held = script.take()
    script.now_ms += 900
    said = script.say(c.Mode(script.member.number, False, 0))
    assert isinstance(script.member.take(), PassedOverNotice)
    script.member.take()
    for _ in range(4):
        said += script.wait(300)
    assert [one for one in said if isinstance(one, c.AckRecords)] == []
    [ack] = script.ack(held.numbers)
    assert (ack.state, ack.ranges) == (0, [(0, 1)])


def test_a_program_that_renews_the_record_in_its_hands_keeps_those_that_wait_for_it() -> None:
    script = Leased()
    script.hand(1, 0)
    script.hand(2, 1)
    script.take()
    assert script.renewals(400) == [[(0, 3)]]
    assert script.renewals(500) == []  # The program takes nothing more: it may stand still.
    script.member.renew([0], "mine")
    assert script.renewals(1) == [[(0, 1)], [(0, 3)]]


def test_a_record_is_renewed_by_name_and_one_that_others_have_is_ours_no_more() -> None:
    script = Leased()
    script.hand(2, 0)
    script.take()
    script.member.renew([0, 1], "mine")
    [ack] = [one for one in script.step() if isinstance(one, c.AckRecords)]
    assert (ack.state, ack.ranges) == (2, [(0, 2)])
    said = script.say(c.Refused(64, ack.tracker, "not_held"))
    for one in [one for one in [*said, *script.step()] if isinstance(one, c.AckRecords)]:
        if one.ranges == [(0, 1)]:
            script.confirmed(one)
        else:
            script.say(c.Refused(64, one.tracker, "not_held"))
    assert script.member.in_hand == {0}


def test_a_group_without_a_lease_renews_nothing() -> None:
    script = Grouped()
    script.hand(2, 0)
    script.take()
    said = [*script.wait(5_000), *script.step()]
    assert not [one for one in said if isinstance(one, c.AckRecords)]


def test_records_that_came_again_before_they_were_done_are_not_handed_over_again() -> None:
    """Their lease had ended; the broker took the late word for the next hand-out."""
    script = Leased()
    script.hand(2, 0)
    held = script.take()
    [late] = script.ack(held.numbers, "all")
    script.hand(3, 0)
    script.confirmed(late)
    assert script.settled() == {"all": True}
    assert script.take().numbers == [2]
    assert script.member.in_hand == {2}
    assert script.member.take() is None


def held_by(script: Leased, said: list[Command], ours: set[int]) -> list[tuple[int, list[Any]]]:
    """Answer as a broker at which only some records are held; returns what it was told."""
    told = []
    while said:
        ack = said.pop(0)
        if isinstance(ack, c.AckRecords):
            told.append((ack.state, ack.ranges))
            if {n for first, end in ack.ranges for n in range(first, end)} <= ours:
                said += script.confirmed(ack)
            else:
                said += script.say(c.Refused(64, ack.tracker, "not_held"))
    return told


@pytest.mark.parametrize("again_ms", [-1, 0])
@pytest.mark.parametrize("early", [True, False])
def test_what_is_said_too_late_of_several_records_is_not_said_of_their_next_delivery(
    again_ms: int, early: bool
) -> None:
    script = Leased()
    script.hand(3, 0)
    held = script.take()
    [late] = script.ack(held.numbers, "all", again_ms)
    if early:
        script.hand(3, 0)
    said = script.say(c.Refused(64, late.tracker, "not_held"))
    if not early:
        said += script.hand(3, 0)
    told = held_by(script, said, {0, 1, 2})
    assert all(state == 2 for state, _ in told)
    assert script.settled() == {"all": False}
    assert script.take().numbers == [0, 1, 2]
    assert script.member.in_hand == {0, 1, 2}
    assert not script.member.settling


def test_of_a_word_that_is_too_late_for_some_records_the_others_are_said_once() -> None:
    script = Leased()
    script.hand(4, 0)
    held = script.take()
    script.member.ack(held.numbers[:2], AckForm(0, 7), "low")
    [late] = script.ack(held.numbers[2:], "high", 7)
    assert late.ranges == [(0, 4)]
    said = script.say(c.Refused(64, late.tracker, "not_held"))
    said += script.hand(4, 0, rows=[3])
    told = held_by(script, said, {0, 1, 3})
    assert [n for state, ranges in told if not state for n in ranges] == [(0, 2)]
    assert script.settled() == {"low": True, "high": False}
    assert script.take().numbers == [3]
    assert script.member.in_hand == {3}


def test_a_renewal_that_is_too_late_for_several_records_is_false() -> None:
    script = Leased()
    script.hand(3, 0)
    held = script.take()
    script.member.renew(held.numbers, "all")
    [late] = [one for one in script.step() if isinstance(one, c.AckRecords)]
    said = script.say(c.Refused(64, late.tracker, "not_held"))
    said += script.hand(3, 0)
    held_by(script, said, {0, 1, 2})
    assert script.settled() == {"all": False}
    assert script.member.in_hand == {0, 1, 2}


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
def test_a_member_that_is_passed_over_is_told(kind: Any) -> None:
    script = Leased(kind=kind)
    number = script.member.number

    def told(*, live: bool) -> tuple[bool, Any]:
        script.say(c.Mode(number, live, 7))
        return script.member.passed_over, script.member.take()

    if kind == "exclusive":
        # A member that waits for its place is not passed over.
        assert told(live=False) == (False, None)
        assert told(live=True) == (False, None)
    assert told(live=False) == (True, PassedOverNotice(7))
    assert told(live=True) == (False, None)
    assert told(live=False) == (True, PassedOverNotice(7))
    script.reconnect()
    script.accept_member(script.member)
    assert not script.member.passed_over


def passed_over(script: Grouped, offset: int = 0, *, back: bool = True) -> None:
    """Say that a lease has ended, and that the member is given records again."""
    script.say(c.Mode(script.member.number, False, offset))
    if back:
        script.say(c.Mode(script.member.number, True, offset))


def renewed(script: Grouped, said: list[Command], ours: set[int]) -> None:
    """Answer renewals as a broker does at which only some records are the member's."""
    while said:
        ack = said.pop(0)
        if isinstance(ack, c.AckRecords):
            offsets = {offset for first, end in ack.ranges for offset in range(first, end)}
            if offsets <= ours:
                said += script.confirmed(ack)
            else:
                said += script.say(c.Refused(64, ack.tracker, "not_held"))


def test_what_waits_when_a_lease_ends_is_handed_over_once_the_broker_says_it_is_ours() -> None:
    script = Leased()
    script.hand(3, 0)
    held = script.take()
    script.hand(4, 3)
    passed_over(script)
    assert isinstance(script.member.take(), PassedOverNotice)
    assert script.member.take() is None, "others may have these records by now"
    renewed(script, script.step(), ours={4, 6})
    assert [*script.take().numbers, *script.take().numbers] == [4, 6]
    assert script.member.take() is None
    assert script.member.in_hand == {0, 1, 2, 4, 6}
    [ack] = script.ack(held.numbers)
    assert ack.ranges == [(0, 3)]


def test_a_record_in_doubt_that_is_delivered_again_is_handed_over_once() -> None:
    script = Leased()
    script.hand(4, 0)
    passed_over(script)
    assert isinstance(script.member.take(), PassedOverNotice)
    said = script.hand(4, 0, rows=[1, 2])
    renewed(script, said, ours={0, 1, 2})
    assert [script.take().numbers, script.take().numbers] == [[1, 2], [0]]
    assert script.member.take() is None
    assert script.member.in_hand == {0, 1, 2}


def test_a_passed_over_holder_is_handed_nothing_of_what_the_next_one_gets() -> None:
    script = Leased(kind="exclusive")
    script.say(c.Mode(script.member.number, True, 0))
    script.hand(3, 0)
    script.hand(3, 3)
    script.take()
    passed_over(script, back=False)
    assert isinstance(script.member.take(), PassedOverNotice)
    assert script.member.take() is None
    assert script.member.in_hand == {0, 1, 2}
    script.say(c.Mode(script.member.number, True, 0))
    script.hand(6, 0)
    assert script.take().numbers == list(range(6))


def test_a_second_delivery_is_dropped_once_the_program_is_done_with_the_first() -> None:
    script = Leased()
    script.hand(3, 0)
    held = script.take()
    passed_over(script)
    script.hand(5, 0)
    assert isinstance(script.member.take(), PassedOverNotice)
    [ack] = script.ack(held.numbers, "done")
    script.confirmed(ack)
    assert script.settled() == {"done": True}
    assert script.take().numbers == [3, 4]
    assert script.member.take() is None
    assert script.member.in_hand == {3, 4}


def test_a_program_that_forgot_a_record_is_handed_it_again_when_its_lease_has_ended() -> None:
    script = Leased()
    script.hand(1, 0)
    script.take()
    passed_over(script)
    script.hand(1, 0)
    assert isinstance(script.member.take(), PassedOverNotice)
    assert script.take().numbers == [0]


def test_a_step_with_records_that_were_delivered_twice_leaves_nothing_to_hand_over() -> None:
    script = Leased()
    script.hand(2, 0)
    held = script.take()
    passed_over(script)
    script.hand(2, 0)
    script.member.lend(held.numbers)
    assert isinstance(script.member.take(), PassedOverNotice)
    assert script.member.take() is None
    script.member.settled(held.numbers)
    assert not script.member.in_hand


def test_the_credit_of_a_batch_that_its_reader_gives_back_in_doubt_is_given_once() -> None:
    script = Leased(credit_bytes=4096)
    script.hand(4, 0)
    held = script.take()
    passed_over(script)
    script.member.doubt([held.cut(1, 4)])
    assert isinstance(script.member.take(), PassedOverNotice)
    renewed(script, script.step(), ours={0, 1, 2, 3})
    assert script.take().numbers == [1, 2, 3]
    assert script.member.credit().credit_bytes == held.stamp.size + 4096


def test_records_in_doubt_that_are_ours_in_parts_leave_the_bound_of_bytes_as_it_is() -> None:
    script = Leased(credit_bytes=4096)
    script.hand(8, 0)
    passed_over(script)
    assert isinstance(script.member.take(), PassedOverNotice)
    size = script.member._queued_bytes
    for ours in ((0, 4), (4, 6), (6, 7)):
        script.member.acked(RENEWED, [ours])
        assert script.take().numbers == list(range(*ours))
        assert script.member._queued_bytes == size
    script.member._doubts.drop([7])
    script.member._count_bytes()
    assert script.member._queued_bytes == 0


def test_records_in_doubt_are_dropped_with_the_link() -> None:
    script = Leased()
    script.hand(2, 0)
    passed_over(script)
    script.reconnect()
    script.accept_member(script.member)
    assert script.member.take() is None
    assert not script.member.wakes
    script.hand(2, 0)
    assert script.take().numbers == [0, 1]


def test_a_caller_whose_refused_batch_was_said_in_halves_is_told_when_the_link_is_lost() -> None:
    script = Grouped()
    script.hand(2, 0)
    held = script.take()
    [ack] = script.ack(held.numbers, "both")
    script.say(c.Refused(64, ack.tracker, "not_held"))
    script.reconnect()
    assert script.settled() == {"both": False}
