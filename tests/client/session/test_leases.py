"""Leases of records of groups in the session: renewed, ended, and what is said too late."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.commands import Command
from malamute_py.client.session.acknowledgements import AckForm
from malamute_py.client.session.attempts import LinkState
from malamute_py.client.session.group_options import RENEWED
from malamute_py.client.session.memberships import Membership
from malamute_py.client.session.subscription import (
    PassedOverNotice,
)
from tests.client.script import STREAM_UUID
from tests.client.session.grouped import Grouped


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
    told = [script.member.wakes_link, script.step(), script.member.wakes_link]
    assert told == [True, [], False]
    assert script.session.next_wake() == began_ms + 300
    assert script.renewals(300) == [[(0, 1)]]
    script.wait(1)
    script.member.take()
    assert script.member.wakes_link


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


def test_credit_comes_back_for_records_that_went_to_others_when_a_lease_ended() -> None:
    """The member had credit for one record and no more, and was given nothing for ever."""
    script = Leased(credit_records=1)
    script.hand(1, 0)
    script.say(c.Mode(script.member.number, False, 0))
    assert isinstance(script.member.take(), PassedOverNotice)
    assert script.member.take() is None
    [ack] = [one for one in script.step() if isinstance(one, c.AckRecords)]
    assert (ack.state, ack.ranges) == (2, [(0, 1)])
    said = script.say(c.Refused(64, ack.tracker, "not_held"))
    [credit] = [one for one in [*said, *script.step()] if isinstance(one, c.Credit)]
    assert credit.credit_records == 2


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
    assert not script.member.wakes_link
    script.hand(2, 0)
    assert script.take().numbers == [0, 1]
