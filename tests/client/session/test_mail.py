"""The session's mail and requests: what leaves, and what becomes of the answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.batch import encode
from malamute_protocol.errors import BrokerRefused, MalamuteError, Timeout
from malamute_protocol.framing import encode_message
from malamute_py.client.session.inbox_options import InboxOptions
from malamute_py.client.session.outbox import Tally
from malamute_py.client.session.requests import Replies
from malamute_py.client.session.step import Step
from tests.client.script import Script, stamped, welcome
from tests.client.session.conversation import (
    accept,
    confirm,
    of,
    opened,
    outcomes,
    row,
    sent_bodies,
    warnings,
)


def send(script: Script, body: bytes, mailbox: str = "box", level: int = 0, **more: Any) -> None:
    script.session.outbox.send(mailbox, row(body), level, **more)


def ask(script: Script, body: bytes, **more: Any) -> None:
    script.session.requests.request("svc", row(body, more.pop("token", None)), 0, **more)


def deliver(script: Script, bodies: list[bytes], base: int, about: Any = (), **more: Any) -> Any:
    """MAIL to the inbox that was opened last."""
    frames = stamped(encode(bodies, subject="a"), base)
    number = more.pop("number", None) or script.last(c.OpenInbox).subscription
    mail = c.Mail(number, "bob", 1, 2, None, list(about), **more)
    return script.say(mail, frames=frames)


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
    assert "the broker lately put off what it was asked for: full" in str(late)
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


def test_a_content_whose_call_timed_out_is_not_sent_again() -> None:
    script = opened()
    for mailbox in ("full", "away"):
        tally = Tally(mailbox)
        tally.left = 2
        content = encode([b"0", b"1"], subject="a")
        until_ms = script.now_ms + 100
        script.session.outbox.send_content(mailbox, content, 0, tally, 2, until_ms=until_ms)
    full, _ = of(script.step(), c.Send)
    script.wait(100)
    assert all(isinstance(error, Timeout) for error in outcomes(script).values())
    script.say(c.Refused(40, full.tracker, "wait", "full", 50))
    assert of(script.wait(50), c.Send) == []
    assert of(script.reconnect(), c.Send) == []
    assert script.session.idle
    assert script.session.window.left == script.session.window.bytes_max


def test_mail_is_sent_again_although_what_timed_out_before_it_was_refused_late() -> None:
    script = opened()
    tally = Tally("late")
    tally.left = 1
    content = encode([b"late"], subject="a")
    until_ms = script.now_ms + 100
    script.session.outbox.send_content("box", content, 0, tally, 1, until_ms=until_ms)
    [late] = of(script.step(), c.Send)
    script.wait(100)
    assert isinstance(outcomes(script)["late"], Timeout)
    script.say(c.Refused(40, late.tracker, "wait", "full", 50))
    assert all(batch.forgotten for _, _, batch in script.session.outbox._deadlines)
    send(script, b"next")
    [before] = of(script.step(), c.Send)
    script.wait(100)
    [again] = of(script.reconnect(), c.Send)
    assert again.key == before.key
    confirm(script, again)
    assert script.session.idle
    assert script.session.window.left == script.session.window.bytes_max


def test_a_lane_that_was_dropped_leaves_the_one_that_has_its_place_since() -> None:
    outbox = opened().session.outbox
    former = outbox.lane(outbox.mailboxes, "box")
    outbox._note_empty(former)
    later = outbox.lane(outbox.mailboxes, "box")
    outbox._note_empty(former)
    assert outbox.mailboxes == {"box": later}
    outbox._note_empty(later)
    assert not outbox.mailboxes


def test_what_timed_out_under_way_leaves_nothing_behind_when_the_link_goes() -> None:
    script = opened()
    for number in range(3):
        send(script, b"late", f"box-{number}", until_ms=script.now_ms + 100)
    assert len(of(script.step(), c.Send)) == 3
    script.wait(100)
    script.lose()
    assert not script.session.outbox.mailboxes
    assert of(script.reconnect(), c.Send) == []
    send(script, b"next", "box-0")
    assert sent_bodies(script, c.Send)[3:] == []
    [command] = of(script.step(), c.Send)
    confirm(script, command)
    assert script.session.idle


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


@pytest.mark.parametrize("ranges", [[(0, 4)], [(2, 4), (0, 2)], [(3, 4), (1, 3), (0, 1)]], ids=str)
def test_what_is_not_held_costs_the_others_nothing(ranges: list[tuple[int, int]]) -> None:
    script = opened()
    view = script.session.mailboxes.read(InboxOptions("box"))
    script.step()
    accept(script)
    deliver(script, [b"a", b"b", b"c", b"d"], 0)
    view.take()
    view.mailbox.ack(ranges, token="mine")
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


def test_a_caller_whose_refused_messages_were_said_in_halves_is_told_when_the_link_is_lost() -> (
    None
):
    script = opened()
    view = script.session.mailboxes.read(InboxOptions("box"))
    script.step()
    accept(script)
    deliver(script, [b"a", b"b"], 0)
    view.take()
    view.mailbox.ack([(0, 2)], token="both")
    [ack] = of(script.step(), c.AckMail)
    script.say(c.Refused(43, ack.tracker, "not_held"))
    script.reconnect()
    assert outcomes(script) == {"both": False}


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


def test_messages_of_lost_links_are_remembered_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("malamute_py.client.session.mailboxes.AWAY_MAX", 2)
    script = opened()
    view = script.session.mailboxes.read(InboxOptions("box"))
    script.step()
    accept(script)
    deliver(script, [b"0", b"1", b"2"], 0)
    view.take()
    script.reconnect()
    accept(script)
    assert view.mailbox.in_hand == {1, 2}
    view.mailbox.ack([(0, 1)], token="forgotten")
    deliver(script, [b"0", b"1", b"2"], 0)
    item = view.take()
    assert item is not None
    _, again = item
    assert again.offsets.tolist() == [0]
    script.step()
    assert outcomes(script) == {"forgotten": False}


def test_a_reader_that_was_closed_takes_nothing_of_what_waits_for_another() -> None:
    script = opened()
    one = script.session.mailboxes.read(InboxOptions("box"))
    two = script.session.mailboxes.read(InboxOptions("box"))
    script.step()
    accept(script)
    deliver(script, [b"a"], 0)
    script.session.mailboxes.close(one)
    assert one.take() is None
    assert two.take() is not None


def test_to_acknowledge_no_messages_is_done_at_once() -> None:
    script = opened()
    view = script.session.mailboxes.read(InboxOptions("box"))
    script.step()
    accept(script)
    view.mailbox.ack([], token="none")
    view.mailbox.ack([(3, 3)], token="an empty range")
    script.step()
    assert outcomes(script) == {"none": True, "an empty range": True}


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


def test_a_batch_of_which_a_part_was_not_handed_out_again_is_not_called_acknowledged() -> None:
    script = opened()
    view = script.session.mailboxes.read(InboxOptions("box"))
    script.step()
    accept(script)
    deliver(script, [b"a", b"b"], 0)
    view.take()
    script.reconnect()
    accept(script)
    deliver(script, [b"b"], 1)
    assert view.take() is None
    view.mailbox.ack([(0, 2)], token="both")
    [ack] = of(script.step(), c.AckMail)
    assert ack.ranges == [(1, 2)]
    confirm(script, ack)
    assert outcomes(script) == {"both": False}


def test_a_message_that_came_again_while_a_step_waited_is_the_readers_when_it_is_refused() -> None:
    script = opened()
    view = script.session.mailboxes.read(InboxOptions("box"))
    script.step()
    accept(script)
    deliver(script, [b"a"], 0)
    view.take()
    step = Step()
    step.ack(SimpleNamespace(opened=view.mailbox, number=0))
    step.move_cursor("s", "cursor", 5, since=4)
    script.session.steps.add(step, "step")
    script.step()
    [atomic] = of(script.reconnect(), c.Atomic)
    accept(script)
    script.say(c.Refused(66, atomic.tracker, "wait", "", 100))
    deliver(script, [b"a"], 0)
    assert view.take() is None, "its reader has it"
    [atomic] = of(script.wait(100), c.Atomic)
    script.say(c.Refused(66, atomic.tracker, "conflict"))
    assert isinstance(outcomes(script)["step"], BrokerRefused)
    view.mailbox.ack([(0, 1)], token="mine")
    [ack] = of(script.step(), c.AckMail)
    confirm(script, ack)
    assert outcomes(script) == {"mine": True}


def test_messages_of_a_withdrawn_step_that_is_refused_go_back_to_the_broker() -> None:
    script = opened()
    view = script.session.mailboxes.read(InboxOptions("box"))
    script.step()
    accept(script)
    deliver(script, [b"a", b"b"], 0)
    view.take()
    step = Step()
    step.ack(SimpleNamespace(opened=view.mailbox, number=0))
    script.session.steps.add(step, "step")
    [atomic] = of(script.step(), c.Atomic)
    script.session.steps.withdraw(step)
    said = [*script.say(c.Refused(66, atomic.tracker, "conflict")), *script.step()]
    [ack] = of(said, c.AckMail)
    assert (ack.ranges, ack.again_ms) == ([(0, 1)], 0)


def test_a_reader_that_closes_gives_back_nothing_of_a_step_that_leaves_again() -> None:
    """The message had come again on the new link, and went to others before the step did."""
    script = opened()
    view = script.session.mailboxes.read(InboxOptions("box"))
    script.session.mailboxes.read(InboxOptions("box"))
    script.step()
    accept(script)
    deliver(script, [b"a", b"b"], 0)
    view.take()
    step = Step()
    step.ack(SimpleNamespace(opened=view.mailbox, number=0))
    script.session.steps.add(step, "step")
    script.step()
    [atomic] = of(script.reconnect(), c.Atomic)
    accept(script)
    script.say(c.Refused(66, atomic.tracker, "wait", "", 100))
    deliver(script, [b"a", b"b"], 0)
    assert view.take() is None
    script.session.mailboxes.close(view)
    [ack] = of(script.step(), c.AckMail)
    assert (ack.ranges, ack.again_ms) == ([(1, 2)], 0)
    [atomic] = of(script.wait(100), c.Atomic)
    script.say(c.Confirm(atomic.tracker, 2, 1, -1, 0))
    assert not isinstance(outcomes(script)["step"], BrokerRefused)


def test_a_reader_that_closes_does_not_give_back_what_another_reader_was_given_since() -> None:
    script = opened()
    one = script.session.mailboxes.read(InboxOptions("box"))
    script.step()
    accept(script)
    deliver(script, [b"a", b"b", b"c"], 0)
    one.take()
    two = script.session.mailboxes.read(InboxOptions("box"))
    one.mailbox.ack([(1, 2)], 0)
    [ack] = of(script.step(), c.AckMail)
    confirm(script, ack)
    deliver(script, [b"b"], 1)
    assert two.take() is not None
    script.session.mailboxes.close(one)
    [ack] = of(script.step(), c.AckMail)
    assert ack.ranges == [(0, 1), (2, 3)]
    confirm(script, ack)
    two.mailbox.ack([(1, 2)], token="two")
    [ack] = of(script.step(), c.AckMail)
    confirm(script, ack)
    assert outcomes(script) == {"two": True}


def test_a_reader_that_closes_does_not_give_back_what_came_again_and_waits_unread() -> None:
    script = opened()
    one = script.session.mailboxes.read(InboxOptions("box"))
    two = script.session.mailboxes.read(InboxOptions("box"))
    script.step()
    accept(script)
    deliver(script, [b"a", b"b"], 0)
    assert one.take() is not None
    one.mailbox.ack([(1, 2)], 0)
    [ack] = of(script.step(), c.AckMail)
    confirm(script, ack)
    deliver(script, [b"b"], 1)
    script.session.mailboxes.close(one)
    [ack] = of(script.step(), c.AckMail)
    assert ack.ranges == [(0, 1)]
    confirm(script, ack)
    assert two.take() is not None
    two.mailbox.ack([(1, 2)], token="two")
    [ack] = of(script.step(), c.AckMail)
    confirm(script, ack)
    assert outcomes(script) == {"two": True}


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
    assert not script.session.awaited.asked


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
    assert not script.session.awaited.asked
    assert not script.session.awaited.batches


def test_a_cancelled_request_that_was_over_ends_no_other_caller_of_its_batch() -> None:
    script = opened()
    ask(script, b"given up")
    ask(script, b"patient")
    script.step()
    request = script.last(c.Request)
    accept(script)
    script.session.requests.give_up(b"given up")
    [cancel] = of(script.step(), c.CancelRequest)
    script.say(c.Result(cancel.request, {"count": 0}))
    for _ in range(70):
        script.wait(1_000)
        script.say(c.Pong())
    assert outcomes(script) == {}
    deliver(script, [b"late"], 0, [(request.key, 0, 1)], last=True)
    deliver(script, [b"yes"], 1, [(request.key, 1, 1)], last=True)
    assert outcomes(script)[b"patient"].body == b"yes"
    assert not script.session.awaited.asked
    assert not script.session.awaited.batches
    [inbox] = script.session.mailboxes._mailboxes.values()
    assert (inbox.waiting, len(inbox.queue)) == (0, 0)


@pytest.mark.parametrize("others", [[], [b"kept"]])
def test_a_request_that_is_given_up_while_its_service_is_full_is_not_sent(
    others: list[bytes],
) -> None:
    script = opened()
    for body in [b"given up", *others]:
        ask(script, body)
    script.step()
    request = script.last(c.Request)
    accept(script)
    script.say(c.Refused(50, request.tracker, "wait", "full", 300))
    script.session.requests.give_up(b"given up")
    assert of(script.step(), c.CancelRequest) == []
    again = of(script.wait(300), c.Request)
    assert sent_bodies(script, c.Request)[1:] == ([others] if others else [])
    for command in again:
        confirm(script, command)
        deliver(script, others, 0, [(command.key, 0, 1)], last=True)
    assert set(outcomes(script)) == set(others)
    assert not script.session.awaited.asked
    assert not script.session.awaited.batches
    assert script.session.idle
    assert script.session.window.left == script.session.window.bytes_max
    [inbox] = script.session.mailboxes._mailboxes.values()
    assert inbox.waiting == 0


@pytest.mark.parametrize("level", [0, 2])
def test_a_request_is_sent_again_although_one_before_it_was_given_up_in_a_full_service(
    level: int,
) -> None:
    script = opened()
    until_ms = script.now_ms + 1_000
    script.session.requests.request("svc", row(b"given up"), level, until_ms=until_ms)
    script.step()
    first = script.last(c.Request)
    accept(script)
    script.say(c.Refused(50, first.tracker, "wait", "full", 100))
    script.session.requests.give_up(b"given up")
    assert all(batch.forgotten for _, _, batch in script.session.outbox._deadlines)
    script.wait(900)
    script.session.requests.request("svc", row(b"second"), level)
    [before] = of(script.step(), c.Request)
    script.wait(100)
    script.reconnect()
    accept(script)
    again = script.last(c.Request)
    assert sent_bodies(script, c.Request) == [[b"given up"], [b"second"], [b"second"]]
    assert again.key == before.key
    if level:
        confirm(script, again)
    deliver(script, [b"yes"], 0, [(again.key, 0, 1)], last=True)
    assert outcomes(script)[b"second"].body == b"yes"
    assert script.session.idle
    assert script.session.window.left == script.session.window.bytes_max


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_request_that_the_broker_may_have_is_cancelled_behind_its_repetition(
    confirmed: bool,
) -> None:
    script = opened()
    for body in (b"given up", b"kept"):
        ask(script, body)
    script.step()
    request = script.last(c.Request)
    accept(script)
    if confirmed:
        confirm(script, request)  # As stored, so that a power loss may take it back.
    script.lose()
    script.wait(60_000)
    script.session.receive(encode_message([welcome(epoch=2)]), script.now_ms)
    script.session.requests.give_up(b"given up")
    [again, cancel] = script.step()[-2:]
    assert isinstance(again, c.Request)
    assert again.key == request.key
    assert isinstance(cancel, c.CancelRequest)
    assert (cancel.key, cancel.row) == (request.key, 0)


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
