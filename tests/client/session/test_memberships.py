"""Memberships of groups in the session: what is in hand, acknowledged, and whose it is."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.batch import encode
from malamute_protocol.errors import BrokerRefused, LocalProtocolError
from malamute_py.client.readers.group import numbers_of
from malamute_py.client.session.attempts import LinkState
from malamute_py.client.session.group_options import GroupOptions
from malamute_py.client.session.step import Step
from malamute_py.client.session.subscription import (
    GapNotice,
    RewoundNotice,
)
from tests.client.script import STREAM_UUID, stamped
from tests.client.session.grouped import Grouped, rewound_after


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


@pytest.mark.parametrize("word", ["take", "ack", "renew", "lend"])
def test_a_member_that_stands_still_while_it_is_passed_over_joins_again_at_a_word(
    word: str,
) -> None:
    script = Grouped()
    script.hand(2, 0)
    script.take()
    script.say(c.Mode(script.member.number, False, 0))
    for _ in range(2):
        assert not [one for one in script.reconnect() if isinstance(one, c.JoinGroup)]
    if word == "take":
        assert script.member.take() is None
        assert script.member.wakes_link
    elif word == "ack":
        script.member.ack([0, 1])
    elif word == "renew":
        script.member.renew([0], None)
    else:
        with pytest.raises(BrokerRefused):
            script.member.lend([0])
        # A step without parts wakes no link; the program's next call for records does.
        assert script.member.take() is None
        assert script.member.wakes_link
    assert [type(one) for one in script.wait(0)] == [c.JoinGroup]
    script.accept_member(script.member)
    # What the program has is its own again, and the next link begins with the member.
    script.hand(2, 0)
    assert (script.member.take() is None) == (word != "lend")
    assert [type(one) for one in script.reconnect()].count(c.JoinGroup) == 1


def test_a_member_whose_program_waits_for_records_joins_each_link() -> None:
    script = Grouped()
    script.hand(1, 0)
    script.take()
    assert script.member.take() is None
    script.say(c.Mode(script.member.number, False, 0))
    assert [type(one) for one in script.reconnect()].count(c.JoinGroup) == 1


def test_a_member_that_the_link_began_without_leaves_at_once() -> None:
    script = Grouped()
    script.hand(1, 0)
    script.take()
    script.say(c.Mode(script.member.number, False, 0))
    script.reconnect()
    script.session.memberships.leave(script.member)
    assert script.member.ended
    assert script.step() == []


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


def test_records_of_a_withdrawn_step_that_is_refused_go_back_to_the_broker() -> None:
    script = Grouped(credit_records=2)
    script.hand(2, 0)
    step = Step()
    step.ack(script.take())
    script.session.steps.add(step, "step")
    [atomic, _] = script.step()
    script.session.steps.withdraw(step)
    assert isinstance(atomic, c.Atomic)
    said = [*script.say(c.Refused(66, atomic.tracker, "conflict")), *script.step()]
    [ack] = [one for one in said if isinstance(one, c.AckRecords)]
    assert (ack.ranges, ack.again_ms, ack.state) == ([(0, 2)], 0, 0)
    assert not script.member.in_hand
    assert script.last(c.Credit).credit_records == 4


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


def test_a_caller_whose_refused_batch_was_said_in_halves_is_told_when_the_link_is_lost() -> None:
    script = Grouped()
    script.hand(2, 0)
    held = script.take()
    [ack] = script.ack(held.numbers, "both")
    script.say(c.Refused(64, ack.tracker, "not_held"))
    script.reconnect()
    assert script.settled() == {"both": False}


def test_what_is_renewed_after_the_end_leaves_nothing_unconfirmed() -> None:
    script = Grouped()
    script.hand(3, 0)
    script.take()
    script.say(c.Ended(script.member.number, 3, "group_reset"))
    script.member.renew([0, 1], "mine")
    assert script.step() == []
    assert script.settled() == {"mine": False}
    assert script.session.idle


def test_to_say_something_of_no_records_is_done_at_once() -> None:
    script = Grouped()
    script.member.ack([], token="acknowledged")
    script.member.renew([], "renewed")
    assert script.step() == []
    assert script.settled() == {"acknowledged": True, "renewed": True}


def test_a_member_that_its_program_dropped_leaves_behind_what_it_acknowledged() -> None:
    script = Grouped()
    script.hand(2, 0)
    script.take()
    script.member.ack([0], token="done")
    script.session.drop(script.member)
    [ack] = script.step()
    assert isinstance(ack, c.AckRecords)
    assert script.confirmed(ack) == [c.Unsubscribe(script.member.number)]
    assert script.settled() == {"done": True}
