"""The session's mail, requests and work: what leaves, and what becomes of the answers."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.batch import Content, encode
from malamute_protocol.errors import BrokerRefused, MalamuteError, Timeout
from malamute_py.client.session.calls import make_row
from malamute_py.client.session.events import Confirmed, Settled, Warned
from malamute_py.client.session.mailboxes import InboxOptions
from malamute_py.client.session.offers import OfferOptions, ReplyToken, RequestBase
from malamute_py.client.session.outbox import Tally
from malamute_py.client.session.publisher import level_number
from malamute_py.client.session.requests import Replies
from malamute_py.client.session.warnings import GATHER_MS
from malamute_py.client.words import ConfirmAt
from tests.client.script import Script, bodies_of, stamped


def opened(**options: Any) -> Script:
    script = Script(**options)
    script.open()
    return script


def row(body: bytes, token: Any = None) -> Any:
    return make_row(body, "a", None, None, None, None, token or body)


def send(script: Script, body: bytes, mailbox: str = "box", level: int = 0, **more: Any) -> None:
    script.session.outbox.send(mailbox, row(body), level, **more)


def ask(script: Script, body: bytes, **more: Any) -> None:
    script.session.requests.request("svc", row(body, more.pop("token", None)), 0, **more)


def of(commands: list[c.Command], kind: type[Any]) -> list[Any]:
    return [command for command in commands if type(command) is kind]


def outcomes(script: Script) -> dict[Any, Any]:
    """Outcome by token, of all that was settled since the last call."""
    found: dict[Any, Any] = {}
    for event in script.happened:
        if isinstance(event, Confirmed):
            found |= dict.fromkeys(event.tokens, event.outcome)
        elif isinstance(event, Settled):
            found |= dict(event.pairs)
    script.happened.clear()
    return found


def sent_bodies(script: Script, kind: type[Any]) -> list[list[bytes]]:
    return [
        bodies_of(Content(frames[0])) for command, frames in script.heard if type(command) is kind
    ]


def warnings(script: Script) -> list[str]:
    """Lines for the log since the last call, once the time of gathering is over."""
    script.wait(0)
    script.wait(GATHER_MS)
    found = [event.message for event in script.happened if isinstance(event, Warned)]
    script.happened = [event for event in script.happened if not isinstance(event, Warned)]
    return found


def deliver(script: Script, bodies: list[bytes], base: int, about: Any = (), **more: Any) -> Any:
    """MAIL to the inbox that was opened last."""
    frames = stamped(encode(bodies, subject="a"), base)
    number = more.pop("number", None) or script.last(c.OpenInbox).subscription
    mail = c.Mail(number, "bob", 1, 2, None, list(about), **more)
    return script.say(mail, frames=frames)


def accept(script: Script, kind: type[Any] = c.OpenInbox) -> list[c.Command]:
    return script.say(c.Subscribed(script.last(kind).subscription, b"", 1, 0, 0, 0))


def confirm(script: Script, command: Any, offset: int = 0) -> list[c.Command]:
    return script.say(c.Confirm(command.tracker, 3, 1, offset, 1))


# --- sending ---


def test_messages_of_one_turn_to_one_mailbox_leave_as_one_send() -> None:
    script = opened()
    for number in range(5):
        send(script, b"%d" % number)
    send(script, b"elsewhere", "other")
    send(script, b"urgent", priority=3)
    first, urgent_waits = of(script.step(), c.Send), sent_bodies(script, c.Send)
    assert [command.mailbox for command in first] == ["box", "other"]
    assert urgent_waits == [[b"0", b"1", b"2", b"3", b"4"], [b"elsewhere"]]
    assert len({command.key for command in first}) == 2
    assert all(len(command.key) == 16 for command in first)
    [urgent] = of(confirm(script, first[0], 40), c.Send)
    assert urgent.priority == 3
    assert outcomes(script)[b"3"].offset == 40


def test_what_gathers_while_a_mailbox_answers_is_the_next_send() -> None:
    script = opened()
    send(script, b"a")
    [first] = of(script.step(), c.Send)
    send(script, b"b")
    assert script.step() == []
    send(script, b"c")
    [second] = of(confirm(script, first), c.Send)
    assert sent_bodies(script, c.Send)[-1] == [b"b", b"c"]
    assert second.key != first.key


def test_an_unanswered_send_is_repeated_with_its_bytes_and_key() -> None:
    script = opened()
    send(script, b"a")
    [before] = of(script.step(), c.Send)
    [again] = of(script.reconnect(), c.Send)
    assert (again.key, again.mailbox) == (before.key, before.mailbox)
    first, second = (bytes(f[0]) for command, f in script.heard if type(command) is c.Send)
    assert first == second


def test_a_full_mailbox_is_tried_again_until_its_callers_time_is_over() -> None:
    script = opened()
    send(script, b"patient")
    [first] = of(script.step(), c.Send)
    send(script, b"hasty", until_ms=script.now_ms + 200)
    script.say(c.Refused(40, first.tracker, "wait", "full", 150))
    assert script.session.next_wake() == script.now_ms + 150
    [again] = of(script.wait(150), c.Send)
    assert again.key == first.key
    script.say(c.Refused(40, again.tracker, "wait", "full", 500))
    script.wait(100)
    late = outcomes(script)[b"hasty"]
    assert isinstance(late, Timeout)
    assert "the broker puts off what it is asked for: full" in str(late)
    [last] = of(script.wait(500), c.Send)
    confirm(script, last)
    assert script.step() == []
    assert sent_bodies(script, c.Send) == [[b"patient"]] * 3
    assert script.session.idle
    script.wait(2_600)
    script.say(c.Pong())
    assert "puts off" not in script.session.standing(script.now_ms)


def test_a_content_that_is_too_much_at_once_is_divided_in_order() -> None:
    script = opened()
    tally = Tally("all")
    tally.left = 4
    content = encode([b"0", b"1", b"2", b"3"], subject="a")
    script.session.outbox.send_content("box", content, 0, tally, 4)
    for offset in range(8):
        sends = of(script.step(), c.Send)
        if not sends:
            break
        count = len(sent_bodies(script, c.Send)[-1])
        while True:
            if count > 1:
                more = script.say(c.Refused(40, sends[0].tracker, "limit", "one at a time"))
            else:
                more = confirm(script, sends[0], offset)
            sends = of(more, c.Send)
            if not sends:
                break
            count = len(sent_bodies(script, c.Send)[-1])
    assert [one for one in sent_bodies(script, c.Send) if len(one) == 1] == [
        [b"0"], [b"1"], [b"2"], [b"3"],
    ]  # fmt: skip
    assert len(outcomes(script)["all"]) == 4


def test_a_message_without_confirm_waits_for_nothing() -> None:
    script = opened()
    send(script, b"a", level=1)
    [command] = of(script.step(), c.Send)
    assert (command.tracker, command.key) == (0, b"")
    assert outcomes(script)[b"a"].offset == -1
    assert script.session.idle


# --- reading ---


def test_a_mailbox_is_opened_once_and_acknowledged_in_ranges() -> None:
    script = opened()
    view = script.session.mailboxes.read(InboxOptions("box"))
    other = script.session.mailboxes.read(InboxOptions("box"))
    assert len(of(script.step(), c.OpenInbox)) == 1
    accept(script)
    deliver(script, [b"a", b"b", b"c"], 10)
    assert view.take() is not None
    assert other.take() is None
    for number in (10, 11, 12):
        view.done(number)
    [ack] = of(script.step(), c.AckMail)
    assert (ack.ranges, ack.again_ms) == ([(10, 13)], -1)


def test_what_is_not_held_costs_the_others_nothing() -> None:
    script = opened()
    view = script.session.mailboxes.read(InboxOptions("box"))
    script.step()
    accept(script)
    deliver(script, [b"a", b"b", b"c", b"d"], 0)
    view.take()
    view.mailbox.ack([(0, 4)], token="mine")
    asked = of(script.step(), c.AckMail)
    confirmed = []
    while asked:
        following = []
        for ack in asked:
            if any(first <= 2 < end for first, end in ack.ranges):
                following += of(script.say(c.Refused(43, ack.tracker, "not_held")), c.AckMail)
            else:
                confirmed += [n for first, end in ack.ranges for n in range(first, end)]
                following += of(confirm(script, ack), c.AckMail)
        asked = following
    assert sorted(confirmed) == [0, 1, 3]
    assert len(warnings(script)) == 1
    outcome = outcomes(script)["mine"]
    assert isinstance(outcome, BrokerRefused)
    assert script.session.idle


def test_what_is_acknowledged_after_the_end_of_the_inbox_leaves_nothing_unconfirmed() -> None:
    script = opened()
    view = script.session.mailboxes.read(InboxOptions("box"))
    script.step()
    accept(script)
    deliver(script, [b"a", b"b"], 0)
    view.take()
    view.done(0)
    script.say(c.Ended(view.mailbox.number, 0, "removed"))
    view.done(1)
    view.mailbox.ack([(0, 2)])
    assert not of(script.step(), c.AckMail)
    assert script.session.idle
    with pytest.raises(BrokerRefused, match="removed"):
        view.mailbox.ack([(0, 2)], token="mine")


def test_mail_that_was_handed_over_is_not_handed_over_again_after_a_reconnect() -> None:
    script = opened()
    view = script.session.mailboxes.read(InboxOptions("box"))
    script.step()
    accept(script)
    deliver(script, [b"a", b"b"], 0)
    view.take()
    deliver(script, [b"c"], 2)
    view.done(0)
    script.step()  # its confirm is lost
    script.reconnect()
    accept(script)
    [ack] = of(deliver(script, [b"a", b"b"], 0), c.AckMail)
    assert ack.ranges == [(0, 1)]
    assert view.take() is None
    deliver(script, [b"c"], 2)
    item = view.take()
    assert item is not None
    assert item[1].bodies() == [b"c"]
    view.done(1)
    [ack] = of(script.step(), c.AckMail)
    assert ack.ranges == [(1, 2)]


# --- asking ---


def test_requests_of_one_turn_leave_as_one_and_replies_find_their_callers() -> None:
    script = opened()
    for body in (b"x", b"y", b"z"):
        ask(script, body)
    script.step()
    [request] = of([command for command, _ in script.heard], c.Request)
    assert (request.service, request.reply_to, len(request.key)) == ("svc", "", 16)
    assert script.last(c.OpenInbox).mailbox == ""
    accept(script)
    [ack] = of(deliver(script, [b"3", b"1"], 5, [(request.key, 2, 1), (request.key, 0, 1)],
                       last=True), c.AckMail)  # fmt: skip
    assert ack.ranges == [(5, 7)]
    found = outcomes(script)
    assert {token: reply.body for token, reply in found.items()} == {b"z": b"3", b"x": b"1"}
    deliver(script, [b"2"], 7, [(request.key, 1, 1)], last=True)
    assert outcomes(script)[b"y"].body == b"2"
    assert not script.session.requests.asked


def test_a_reply_with_an_unknown_key_is_mail() -> None:
    script = opened(identity="ann")
    view = script.session.mailboxes.read(InboxOptions("ann"))
    ask(script, b"x")
    script.step()
    assert len(of([command for command, _ in script.heard], c.OpenInbox)) == 1, "one for both"
    accept(script)
    request = script.last(c.Request)
    deliver(script, [b"mine", b"old"], 0, [(request.key, 0, 1), (b"before", 4, 1)], last=True)
    item = view.take()
    assert item is not None
    delivered, batch = item
    assert batch.bodies() == [b"old"]
    assert delivered.about_of(1) == (b"before", 4)
    assert outcomes(script)[b"x"].body == b"mine"


def test_unread_mail_does_not_keep_replies_away() -> None:
    script = opened(identity="ann")
    script.session.mailboxes.read(InboxOptions("", credit_records=4))
    ask(script, b"x")
    script.step()
    accept(script)
    credit = script.last(c.OpenInbox).credit_records
    for number in range(40):
        more = of(deliver(script, [b"mail"], number), c.Credit)
        credit = max([credit, *(one.credit_records for one in more)])
        assert credit > number + 1, "a reply after it may still come"


def test_a_request_in_vain_says_why() -> None:
    script = opened()
    for body in (b"late", b"dead"):
        ask(script, body, key=body)
    script.step()
    accept(script)
    deliver(script, [b""], 0, [(b"late", 0, 1)], last=True, why="expired")
    deliver(script, [b""], 1, [(b"dead", 0, 1)], last=True, why="dead: 5 attempts")
    found = outcomes(script)
    assert isinstance(found[b"late"], Timeout)
    assert found[b"dead"].why == "dead: 5 attempts"


def test_callers_that_give_up_leave_nothing_behind() -> None:
    script = opened()
    ask(script, b"unsent")
    script.session.requests.give_up(b"unsent")
    script.step()
    assert of([command for command, _ in script.heard], c.Request) == []
    ask(script, b"sent")
    ask(script, b"kept")
    script.step()
    request = script.last(c.Request)
    accept(script)
    script.session.requests.give_up(b"sent")
    [cancel] = of(script.step(), c.CancelRequest)
    assert (cancel.key, cancel.row) == (request.key, 0)
    script.say(c.Result(cancel.request, {"count": 1}))
    deliver(script, [b"yes"], 0, [(request.key, 1, 1)], last=True)
    assert outcomes(script)[b"kept"].body == b"yes"
    assert not script.session.requests.asked
    assert not script.session.requests.batches


def test_the_end_of_the_session_fails_who_waits_for_replies() -> None:
    script = opened()
    replies = Replies()
    ask(script, b"one")
    ask(script, b"many", token=replies)
    script.step()
    confirm(script, script.last(c.Request))
    script.session.close()
    script.step()
    assert isinstance(outcomes(script)[b"one"], MalamuteError)
    assert replies.ended
    assert replies.error is not None


# --- working ---


def working(script: Script, count: int = 2, **asked: Any) -> Any:
    """An offer, and so many requests of one sender in hand."""
    offered = OfferOptions("svc", ["all"], **{"concurrency": 4, **asked})
    offering = script.session.offerings.offer(offered, RequestBase)
    script.step()
    accept(script, c.Offer)
    work(script, offering, count)
    return offering


def work(script: Script, offering: Any, count: int, base: int = 0, attempts: int = 1) -> None:
    frames = stamped(encode([b"%d" % n for n in range(count)], subject="a"), base)
    command = c.Work(offering.number, "ann", "ann", 0, attempts, 300, 2, None, b"k" * 16)
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
