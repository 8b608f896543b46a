"""The session's offers: requests in hand, their answers, and their leases."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.batch import encode
from malamute_protocol.errors import BrokerRefused
from malamute_py.client.session.calls import make_row
from malamute_py.client.session.events import Warned
from malamute_py.client.session.offer_options import OfferOptions
from malamute_py.client.session.offering import ReplyToken, RequestBase
from malamute_py.client.session.publisher import level_number
from malamute_py.client.session.step import Step
from malamute_py.client.words import ConfirmAt
from tests.client.script import Script, stamped
from tests.client.session.conversation import (
    accept,
    confirm,
    of,
    opened,
    outcomes,
    sent_bodies,
    warnings,
)


def working(script: Script, count: int = 2, **asked: Any) -> Any:
    """An offer, and so many requests of one sender in hand."""
    offered = OfferOptions("svc", ["all"], **{"concurrency": 4, **asked})
    offering = script.session.offerings.offer(offered, RequestBase)
    script.step()
    accept(script, c.Offer)
    work(script, offering, count)
    return offering


def work(
    script: Script, offering: Any, count: int, base: int = 0, attempts: int = 1, sender: str = "ann"
) -> None:
    frames = stamped(encode([b"%d" % n for n in range(count)], subject="a"), base)
    command = c.Work(offering.number, sender, "ann", 0, attempts, 300, 2, None, b"k" * 16)
    script.say(command, frames=frames)


def reply(
    script: Script, job: RequestBase, body: bytes = b"r", last: bool = True, who: Any = None
) -> bool:
    answer = make_row(body, "", None, None, None, None, ReplyToken(job, who))
    return script.session.offerings.reply(job, answer, last)


def take_all(offering: Any) -> list[RequestBase]:
    found = []
    while (job := offering.take()) is not None:
        found.append(job)
    return found


def test_answers_of_one_turn_leave_as_one_reply_with_their_credit() -> None:
    script = opened()
    offering = working(script)
    for job in take_all(offering):
        assert reply(script, job, b"re:" + job.body)
        assert not reply(script, job), "it has had its end"
    sent = script.step()
    [answer] = of(sent, c.Reply)
    assert (answer.requests, answer.last) == ([0, 1], True)
    assert of(sent, c.Credit)[0].credit_records == 6
    confirm(script, answer)
    assert not offering.in_hand


def test_answers_to_two_senders_with_one_mailbox_leave_apart() -> None:
    script = opened()
    offering = working(script, 2)
    work(script, offering, 1, base=2, sender="bob")
    work(script, offering, 1, base=3)
    for job in take_all(offering):
        assert reply(script, job, b"re:" + job.body)
    assert [answer.requests for answer in of(script.step(), c.Reply)] == [[0, 1, 3], [2]]


def test_leases_are_renewed_by_the_session() -> None:
    script = opened()
    offering = working(script)
    script.step()
    assert script.session.next_wake() == script.now_ms + 100
    [renewal] = of(script.wait(100), c.AckWork)
    assert (renewal.state, renewal.ranges) == (2, [(0, 2)])
    halves = of(script.say(c.Refused(53, renewal.tracker, "not_held")), c.AckWork)
    for half in halves:
        if half.ranges == [(0, 1)]:
            script.say(c.Refused(53, half.tracker, "not_held"))
        else:
            confirm(script, half)
    assert [job.number for job in take_all(offering)] == [1]


def test_after_a_reconnect_nothing_is_begun_before_the_broker_says_whose_it_is() -> None:
    script = opened()
    offering = working(script, 3)
    begun = offering.take()
    script.reconnect()
    assert offering.take() is None
    asked = of(accept(script, c.Offer), c.AckWork)
    assert (asked[0].state, asked[0].ranges) == (2, [(0, 3)])
    confirm(script, asked[0])
    assert [job.number for job in take_all(offering)] == [1, 2]
    work(script, offering, 3, attempts=2)
    assert offering.take() is None, "it is in hand"
    assert begun.attempts == 2


def test_a_reply_that_comes_too_late_is_counted_and_sent_when_the_request_comes_again() -> None:
    script = opened()
    offering = working(script, 1)
    reply(script, offering.take(), b"answer", who="caller")
    [answer] = of(script.step(), c.Reply)
    script.say(c.Refused(54, answer.tracker, "not_held"))
    assert warnings(script)
    assert outcomes(script) == {"caller": None}
    assert (offering.not_held, len(offering.in_hand)) == (1, 0)
    work(script, offering, 1, attempts=2)
    script.step()
    assert offering.take() is None
    assert sent_bodies(script, c.Reply) == [[b"answer"], [b"answer"]]


def test_a_reply_that_others_follow_has_a_name_and_is_not_overtaken() -> None:
    script = opened()
    offering = working(script, 1)
    job = offering.take()
    reply(script, job, b"one", last=False)
    reply(script, job, b"two")
    sent = script.step()
    [step] = of(sent, c.Atomic)
    [part] = of(sent, c.Reply)
    assert (step.count, len(step.key), part.tracker, part.last) == (1, 16, 0, False)
    [last] = of(confirm(script, step), c.Reply)
    assert last.last


@pytest.mark.parametrize("state", [3, 4, 5])
def test_an_end_does_not_overtake_the_replies_before_it(state: int) -> None:
    script = opened()
    offering = working(script, 1)
    job = offering.take()
    assert job is not None
    for body in (b"one", b"two"):
        reply(script, job, body, last=False)
        sent = script.step()
    reply(script, job, b"three", last=False)
    script.session.offerings.end(job, state, token="ended")
    assert not of([*sent, *script.step()], c.AckWork)
    second = confirm(script, script.last(c.Atomic))
    assert not of(second, c.AckWork), "two replies are on their way"
    [end] = of(confirm(script, of(second, c.Atomic)[0]), c.AckWork)
    assert (end.state, end.ranges) == (state, [(job.number, job.number + 1)])
    assert outcomes(script) == {}
    confirm(script, end)
    assert outcomes(script) == {"ended": True}
    assert script.session.idle


def test_an_end_behind_a_reply_that_came_too_late_is_not_said() -> None:
    script = opened()
    offering = working(script, 1)
    job = offering.take()
    assert job is not None
    reply(script, job, b"one", last=False)
    [step] = of(script.step(), c.Atomic)
    reply(script, job, b"two", last=False)
    script.session.offerings.end(job, 3, token="ended")
    script.say(c.Refused(66, step.tracker, "not_held"))
    assert not of(script.step(), c.AckWork)
    assert outcomes(script) == {"ended": False}
    assert not offering.in_hand


def test_a_worker_whose_first_reply_came_too_late_is_given_the_next_request() -> None:
    script = opened()
    job = working(script, 1, concurrency=1).take()
    assert job is not None
    reply(script, job, b"one", last=False)
    [step] = of(script.step(), c.Atomic)
    [credit] = of(script.say(c.Refused(66, step.tracker, "not_held")), c.Credit)
    assert credit.credit_records == 2


def test_a_reply_that_others_follow_and_that_is_refused_for_good_fails_its_request() -> None:
    script = opened()
    job = working(script, 1).take()
    assert job is not None
    reply(script, job, b"one", last=False)
    [step] = of(script.step(), c.Atomic)
    sent = script.say(c.Refused(66, step.tracker, "forbidden", "no such mailbox"))
    [end] = of([*sent, *script.step()], c.AckWork)
    assert (end.state, end.ranges) == (4, [(job.number, job.number + 1)])
    assert "no such mailbox" in end.reason
    [warned] = warnings(script)
    assert "an answer was refused: request 0 of svc" in warned
    assert not reply(script, job), "it has had its end"


def test_a_request_does_not_complete_with_a_hole_among_its_replies() -> None:
    script = opened()
    job = working(script, 1).take()
    assert job is not None
    reply(script, job, b"one", last=False)
    [step] = of(script.step(), c.Atomic)
    script.session.offerings.end(job, 3, token="ended")
    sent = script.say(c.Refused(66, step.tracker, "forbidden", "no such mailbox"))
    [end] = of([*sent, *script.step()], c.AckWork)
    assert (end.state, end.ranges) == (4, [(job.number, job.number + 1)])
    [told] = outcomes(script).values()
    assert isinstance(told, BrokerRefused)
    assert told.code == "forbidden"
    assert warnings(script)


def test_a_refused_reply_that_somebody_waits_for_is_theirs_to_deal_with() -> None:
    script = opened()
    job = working(script, 1).take()
    assert job is not None
    reply(script, job, b"one", last=False, who="caller")
    [step] = of(script.step(), c.Atomic)
    sent = script.say(c.Refused(66, step.tracker, "forbidden"))
    assert not of([*sent, *script.step()], c.AckWork)
    assert isinstance(outcomes(script)["caller"], BrokerRefused)
    assert not warnings(script)
    assert reply(script, job), "it goes on"


@pytest.mark.parametrize("who", [None, "caller"])
def test_a_last_reply_does_not_leave_behind_one_that_was_refused_for_good(who: Any) -> None:
    script = opened()
    offering = working(script)
    job, other = take_all(offering)
    reply(script, job, b"one", last=False)
    confirm(script, of(script.step(), c.Atomic)[0])
    reply(script, job, b"two", last=False, who=who)
    [second] = of(script.step(), c.Atomic)
    reply(script, job, b"three", last=False, who="third")
    reply(script, job, b"four", who="fourth")
    reply(script, other, b"of the other")
    sent = script.say(c.Refused(66, second.tracker, "forbidden", "no such mailbox"))
    [third] = of(sent, c.Atomic)
    assert not of(sent, c.AckWork), "a reply is on its way"
    told = outcomes(script)
    assert {error.code for error in told.values()} == {"forbidden"}
    assert set(told) == {"fourth", who} - {None}
    sent = confirm(script, third)
    [end], [answer] = of(sent, c.AckWork), of(sent, c.Reply)
    assert (end.state, end.ranges) == (4, [(job.number, job.number + 1)])
    assert "no such mailbox" in end.reason
    assert (answer.requests, answer.last) == ([other.number], True)
    assert sent_bodies(script, c.Reply)[-2:] == [[b"three"], [b"of the other"]]
    assert not reply(script, job), "it has had its end"
    confirm(script, end)
    confirm(script, answer)
    assert set(outcomes(script)) == {"third"}
    assert (offering.in_hand, offering.unfinished) == ({}, 0)
    assert script.session.idle
    assert len(warnings(script)) == 1


@pytest.mark.parametrize("confirmed", ["default", "none"])
def test_replies_of_which_one_cannot_be_encoded_do_not_look_whole(confirmed: ConfirmAt) -> None:
    script = opened()
    offering = working(script, 1, level=level_number(confirmed))
    job = offering.take()
    assert job is not None
    reply(script, job, b"one", last=False)
    bad = make_row(b"two", "", None, None, None, {"a": "x" * 70_000}, ReplyToken(job))
    assert script.session.offerings.reply(job, bad, False)
    reply(script, job, b"three", last=False)
    reply(script, job, b"four")
    sent = script.step()
    while steps := of(sent, c.Atomic):
        sent = confirm(script, steps[0])
    assert sent_bodies(script, c.Reply) == [[b"one"], [b"three"]]
    end = script.last(c.AckWork)
    assert (end.state, end.ranges) == (4, [(job.number, job.number + 1)])
    confirm(script, end)
    assert script.session.idle
    assert len(warnings(script)) == 1


def test_a_step_does_not_end_a_request_whose_replies_are_not_confirmed() -> None:
    script = opened()
    offering = working(script, 2)
    first, second = take_all(offering)
    reply(script, second, b"one", last=False)
    [step] = of(script.step(), c.Atomic)
    with pytest.raises(BrokerRefused) as caught:
        offering.lend([first.number, second.number])
    assert caught.value.code == "conflict"
    assert not any(job.finished for job in (first, second)), "none of them was lent"
    confirm(script, step)
    offering.lend([first.number, second.number])
    assert all(job.finished for job in (first, second))


@pytest.mark.parametrize(
    ("draining", "state"), [(False, c.WorkState.RETURNED), (True, c.WorkState.RELEASED)]
)
def test_requests_of_a_withdrawn_step_that_is_refused_go_back_to_the_broker(
    draining: bool, state: c.WorkState
) -> None:
    """That is no attempt of theirs where the worker drains."""
    script = opened()
    offering = working(script, 1)
    job = offering.take()
    assert job is not None
    step = Step()
    step.complete(job)
    script.session.steps.add(step, "step")
    [atomic] = of(script.step(), c.Atomic)
    script.session.steps.withdraw(step)
    if draining:
        script.session.offerings.drain(offering)
    said = [*script.say(c.Refused(66, atomic.tracker, "conflict")), *script.step()]
    [ack] = of(said, c.AckWork)
    assert (ack.ranges, ack.state) == ([(job.number, job.number + 1)], state)
    assert job.finished


def test_a_request_that_a_step_gave_back_is_begun_anew_when_its_handler_has_ended() -> None:
    script = opened()
    offering = working(script, 1)
    job = offering.take()
    assert job is not None
    job.running = True
    step = Step()
    step.complete(job)
    script.session.steps.add(step, "step")
    [atomic] = of(script.step(), c.Atomic)
    script.session.steps.withdraw(step)
    said = [*script.say(c.Refused(66, atomic.tracker, "conflict")), *script.step()]
    confirm(script, of(said, c.AckWork)[0])
    work(script, offering, 1, attempts=2)
    assert offering.take() is None
    assert job.cancelled()
    job.running = False
    offering.ran(job)
    again = offering.take()
    assert again is not None
    assert (again.number, again.attempts) == (job.number, 2)


@pytest.mark.parametrize("gone", [False, True])
def test_a_worker_that_was_closed_while_a_step_is_refused_releases_the_request(gone: bool) -> None:
    """It waited for an end of the request for ever, and renewed its lease."""
    script = opened()
    offering = working(script, 1)
    job = offering.take()
    step = Step()
    step.complete(job)
    script.session.steps.add(step, "step")
    [atomic] = of(script.step(), c.Atomic)
    if gone:
        script.session.steps.withdraw(step)
    script.session.offerings.close(offering)
    assert not of(script.step(), c.Unsubscribe)
    said = [*script.say(c.Refused(66, atomic.tracker, "conflict")), *script.step()]
    assert [ack.state for ack in of(said, c.AckWork)] == [c.WorkState.RELEASED]
    assert of(said, c.Unsubscribe)


def test_who_waits_for_an_end_behind_replies_is_told_when_the_client_is_closed() -> None:
    script = opened()
    offering = working(script, 1)
    job = offering.take()
    assert job is not None
    reply(script, job, b"one", last=False)
    script.session.offerings.end(job, 3, token="ended")
    script.session.abandon(RuntimeError("a defect"))
    script.step()
    [told] = outcomes(script).values()
    assert isinstance(told, BrokerRefused)


def test_a_service_in_memory_gets_plain_replies() -> None:
    script = opened()
    offering = working(script, 1)
    reply(script, offering.take(), b"one", last=False)
    [step] = of(script.step(), c.Atomic)
    script.say(c.Refused(66, step.tracker, "cross_ring"))
    [plain] = of(script.wait(1), c.Reply)
    assert plain.tracker


def test_closing_releases_what_was_begun_as_no_attempt() -> None:
    script = opened()
    offering = working(script)
    begun = offering.take()
    assert begun is not None
    script.session.offerings.close(offering)
    released, end = (one for one in script.step() if isinstance(one, c.AckWork | c.Unsubscribe))
    assert isinstance(released, c.AckWork)
    assert released.state == c.WorkState.RELEASED
    assert released.ranges == [(begun.number, begun.number + 1)]
    assert isinstance(end, c.Unsubscribe)


@pytest.mark.parametrize("begun", [False, True])
def test_closing_gives_back_what_is_not_finished_and_then_ends_the_offer(begun: bool) -> None:
    script = opened()
    offering = working(script)
    if begun:
        reply(script, offering.take())
        script.step()
    script.session.offerings.close(offering)
    if begun:
        assert script.step() == [], "its answer is awaited"
        [end] = of(confirm(script, script.last(c.Reply)), c.Unsubscribe)
    else:
        [end] = of(script.step(), c.Unsubscribe)
    script.say(c.Ended(end.subscription, 0, "cancelled"))
    assert offering.ended
    assert script.session.idle


def test_answers_that_come_too_late_at_once_are_one_line_in_the_log() -> None:
    script = opened()
    offering = working(script, 16)
    answers = []
    for job in take_all(offering):
        reply(script, job)
        answers += of(script.step(), c.Reply)
    for answer in answers:
        script.say(c.Refused(54, answer.tracker, "not_held"))
    assert (len(answers), offering.not_held) == (16, 16)
    assert not [event for event in script.happened if isinstance(event, Warned)]
    [warned] = warnings(script)
    assert "request 0 of svc" in warned
    assert "(and 15 more)" in warned
    assert not warnings(script)


def test_ends_of_a_service_in_memory_that_are_under_way_together_are_all_said() -> None:
    script = opened()
    offering = working(script)
    one, two = take_all(offering)
    script.session.offerings.end(one, c.WorkState.COMPLETED, token="one")
    script.session.offerings.end(two, c.WorkState.FAILED, token="two")
    asked = of(script.step(), c.AckWork)
    assert [ack.level for ack in asked] == [2, 2]
    said = []
    for ack in asked:
        said += of(script.say(c.Refused(53, ack.tracker, "unsupported")), c.AckWork)
    said += of(script.wait(1), c.AckWork)
    assert [(ack.state, ack.level) for ack in said] == [(3, 0), (4, 0)]
    for ack in said:
        confirm(script, ack)
    assert outcomes(script) == {"one": True, "two": True}
    assert not offering.not_held


def test_replies_of_a_service_in_memory_that_are_under_way_together_all_get_through() -> None:
    script = opened()
    offering = working(script, 1)
    frames = stamped(encode([b"2"], subject="a"), 1)
    script.say(c.Work(offering.number, "bob", "bob", 0, 1, 300, 2, None, b"l" * 16), frames=frames)
    for job in take_all(offering):
        reply(script, job, b"one", last=False)
    steps = of(script.step(), c.Atomic)
    assert len(steps) == 2
    for step in steps:
        script.say(c.Refused(66, step.tracker, "cross_ring"))
    script.wait(1)
    plain = [command for command, _ in script.heard if isinstance(command, c.Reply)][2:]
    assert [bool(command.tracker) for command in plain] == [True, True]
    assert not of(script.step(), c.AckWork)


def test_draining_releases_a_request_that_waits_for_the_handler_of_its_former_run() -> None:
    script = opened()
    offering = working(script, 1)
    former = offering.take()
    former.running = True
    offering.lost_to_others([former.number])
    work(script, offering, 1, attempts=2)
    assert offering.take() is None, "its former run is still at it"
    script.session.offerings.drain(offering)
    [ack] = of(script.step(), c.AckWork)
    assert (ack.state, ack.ranges) == (c.WorkState.RELEASED, [(0, 1)])
    former.running = False
    offering.ran(former)
    assert offering.take() is None, "the worker begins nothing more"
    confirm(script, ack)
    assert not offering.in_hand
