"""Answers and requests that were under way when a link or the broker was lost, and come again."""

from __future__ import annotations

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import WorkState
from malamute_protocol.encode import encode
from tests.broker.service_world import ALL, LATER_MS, MANY, World, letters
from tests.broker.shell import Peer

REQUESTER, WORKER, OTHER = 1, 2, 3
SESSION = bytes(range(16))
CONTENT = encode([b"done"], subject="reply")


def at_work(count: int = 1) -> World:
    """A worker that has requests in hand."""
    world = World()
    world.client(REQUESTER, "desk")
    world.worker(WORKER, "ann")
    world.offer(WORKER)
    world.request(REQUESTER, *[b"work"] * count, key=b"r")
    return world


def back(world: World, link: int) -> None:
    """The worker has a new link, and offers its service again."""
    world.worker(link, "ann")
    world.offer(link)


def say(world: World, link: int, *commands: wire.Command, frames: int = 0) -> wire.Command:
    """Commands of one message; the answer to tracker 700."""
    world.shell.send(link, *commands, frames=[CONTENT] * frames)
    (answer,) = world.answers(link, 700)
    return answer


def reply(tracker: int = 700, key: bytes = b"answer") -> wire.Reply:
    return wire.Reply(1, [0], tracker, True, key=key)


def ends() -> list[tuple[wire.Command, int]]:
    return [
        (reply(), 1),
        (wire.AckWork(1, [(0, 1)], WorkState.COMPLETED, 700, key=b"answer"), 0),
        (wire.AckWork(1, [(0, 1)], WorkState.FAILED, 700, reason="no", key=b"answer"), 0),
    ]


# --- an end that was taken ------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "frames"), ends(), ids=["reply", "complete", "fail"])
@pytest.mark.parametrize("restart", [False, True])
def test_an_end_that_was_taken_is_confirmed_again_by_its_key(
    command: wire.Command, frames: int, restart: bool
) -> None:
    world = at_work()
    first = say(world, WORKER, command, frames=frames)
    assert isinstance(first, wire.Confirm)
    if restart:
        world.shell.restart()
    else:
        world.drop(WORKER)
    back(world, OTHER)
    again = say(world, OTHER, command, frames=frames)
    assert isinstance(again, wire.Confirm), again
    assert (first.duplicate, again.duplicate, again.level) == (False, True, 3)
    if not restart:
        assert len(world.mail(REQUESTER)) == 1, "one reply or notice"


def test_an_end_without_a_key_is_not_remembered() -> None:
    world = at_work()
    say(world, WORKER, reply(key=b""), frames=1)
    world.drop(WORKER)
    back(world, OTHER)
    again = say(world, OTHER, reply(key=b""), frames=1)
    assert isinstance(again, wire.Refused)
    assert again.code == "not_held"


def test_an_end_that_was_refused_is_not_remembered() -> None:
    world = at_work()
    world.worker(OTHER, "bob")
    world.offer(OTHER)
    refused = say(world, OTHER, reply(), frames=1)
    assert isinstance(refused, wire.Refused)
    world.shell.peers[OTHER].commands.clear()
    assert isinstance(say(world, OTHER, reply(), frames=1), wire.Refused)


def test_ends_in_memory_are_remembered_as_long_as_the_broker_lives() -> None:
    world = World()
    world.client(REQUESTER, "desk")
    world.ask(REQUESTER, wire.EditService(7, "s", {"memory": True}))
    world.worker(WORKER, "ann")
    world.offer(WORKER)
    world.request(REQUESTER, b"work", key=b"r")
    number = world.numbers(WORKER)[0]
    command = wire.AckWork(1, [(number, number + 1)], WorkState.COMPLETED, 700, key=b"answer")
    assert isinstance(say(world, WORKER, command), wire.Confirm)
    world.drop(WORKER)
    back(world, OTHER)
    again = say(world, OTHER, command)
    assert isinstance(again, wire.Confirm)
    assert again.duplicate


def test_a_part_of_a_step_has_no_key_of_its_own() -> None:
    world = at_work()
    answer = say(world, WORKER, wire.Atomic(700, 1), reply(0), frames=1)
    assert isinstance(answer, wire.Refused)
    assert answer.code == "malformed"


# --- an end that was not taken --------------------------------------------------------------------


def step() -> tuple[wire.Command, ...]:
    return wire.Atomic(700, 2, key=b"step"), wire.Publish("t", 0), wire.Reply(1, [0], 0, True)


@pytest.mark.parametrize("same_message", [True, False])
def test_a_step_that_was_lost_with_its_link_is_taken_when_it_is_sent_again(
    same_message: bool,
) -> None:
    world = at_work()
    world.drop(WORKER)
    offer = wire.Offer(1, "s", ALL, 10, MANY)
    if same_message:
        # Nothing was handed out yet when the step arrives: the request waits.
        world.worker(OTHER, "ann")
        answer = say(world, OTHER, offer, *step(), frames=2)
    else:
        back(world, OTHER)
        assert [task.work.attempts for task in world.work(OTHER)] == [2]
        answer = say(world, OTHER, *step(), frames=2)
    assert isinstance(answer, wire.Confirm), answer
    assert world.replies(REQUESTER) == [b"done"]
    assert world.queued() == 0
    assert world.counter("requests_ended_late") == int(same_message)


def test_a_step_may_come_with_the_hello_that_ends_the_older_link() -> None:
    """The return of what the older link held is on its way into the log at that moment."""
    world = World()
    world.client(REQUESTER, "desk")
    world.worker(WORKER, session=SESSION)
    world.offer(WORKER)
    world.request(REQUESTER, b"work")
    hello = wire.Hello((1, 1), SESSION)
    offer = wire.Offer(1, "s", ALL, 10, MANY)
    broker, now_ms = world.shell.broker, world.shell.now_ms
    peer = world.shell.peers[9] = Peer()
    peer.link.sent(hello)
    broker.receive(9, "", [hello, offer], [], now_ms)
    broker.receive(9, "", list(step()), [CONTENT, CONTENT], now_ms)
    world.shell.run()
    (answer,) = world.answers(9, 700)
    assert isinstance(answer, wire.Confirm), answer
    assert peer.work.get(1, []) == []
    assert world.replies(REQUESTER) == [b"done"]
    assert world.queued() == 0
    assert world.info(REQUESTER)["delayed"] == world.info(REQUESTER)["held"] == 0


def test_what_another_worker_has_is_not_ended_by_who_had_it_before() -> None:
    world = at_work()
    world.worker(OTHER, "bob")
    world.offer(OTHER)
    world.drop(WORKER)
    assert world.numbers(OTHER) == [0]
    back(world, 4)
    for command, frames in ends():
        answer = say(world, 4, command, frames=frames)
        assert isinstance(answer, wire.Refused)
        assert answer.code == "not_held"
        world.shell.peers[4].commands.clear()
    world.reply(OTHER, [0])
    assert world.replies(REQUESTER) == [b"re: 0"]


def test_who_never_had_a_request_does_not_end_what_waits() -> None:
    world = at_work()
    world.drop(WORKER)
    world.worker(OTHER, "bob")
    offer = wire.Offer(1, "s", ALL, 0, MANY)
    answer = say(world, OTHER, offer, reply(), frames=1)
    assert isinstance(answer, wire.Refused)
    assert answer.code == "not_held"
    assert world.queued() == 1


def test_who_withdrew_its_offer_in_order_left_nothing_behind() -> None:
    world = at_work()
    world.shell.send(WORKER, wire.Unsubscribe(1))
    offer = wire.Offer(1, "s", ALL, 0, MANY)
    answer = say(world, WORKER, offer, reply(), frames=1)
    assert isinstance(answer, wire.Refused)
    assert answer.code == "not_held"


def test_what_waits_is_neither_renewed_nor_returned_by_who_had_it() -> None:
    world = at_work()
    world.drop(WORKER)
    world.worker(OTHER, "ann")
    world.shell.send(OTHER, wire.Offer(1, "s", ALL, 0, MANY))
    for state in (WorkState.RECEIVED, WorkState.RENEWED, WorkState.RETURNED):
        assert world.refused(OTHER, world.ack(OTHER, [(0, 1)], state)).code == "not_held"
    world.confirmed(OTHER, world.ack(OTHER, [(0, 1)], WorkState.FAILED))
    assert [letter.body for letter in letters(world, REQUESTER)] == [b"work"]


def test_what_lost_workers_left_behind_goes_with_the_requests() -> None:
    world = World()
    world.client(REQUESTER, "desk")
    world.worker(OTHER, "bob")
    for cycle in range(5):
        lost = 10 + cycle
        for _ in range(20):
            world.request(REQUESTER, b"work")
        # Without an identity each session is another holder.
        world.worker(lost, session=bytes([cycle + 1]) * 16)
        world.offer(lost)
        world.drop(lost)
        absent = world.service().absent
        assert [len(holders) for holders in absent.by_base.values()] == [1] * 20
        world.offer(OTHER)
        for number in world.numbers(OTHER)[cycle * 20 :]:
            world.ack(OTHER, [(number, number + 1)], WorkState.COMPLETED)
        world.shell.send(OTHER, wire.Unsubscribe(1))
        assert world.queued() == 0
        assert not absent.by_holder
        assert not absent.by_base


def test_of_a_request_that_is_lost_again_and_again_the_last_holders_are_remembered() -> None:
    world = World()
    world.client(REQUESTER, "desk")
    world.request(REQUESTER, b"work")
    names = ["ann", "bob", "eve", "joe"]
    for link, name in enumerate(names, 10):
        world.worker(link, name)
        world.offer(link)
        world.drop(link)
        world.shell.wait(LATER_MS)
    assert list(world.service().absent.by_holder) == names[-2:]
    offer = wire.Offer(1, "s", ALL, 0, MANY)
    for link, name in enumerate(names, 20):
        world.worker(link, name)
        answer = say(world, link, offer, reply(key=b"of %d" % link), frames=1)
        assert isinstance(answer, wire.Confirm) == (name == "eve"), "then it has ended"


def test_of_a_batch_each_row_may_have_a_lost_holder() -> None:
    world = World()
    world.client(REQUESTER, "desk")
    world.request(REQUESTER, *[b"work"] * 40)
    names = [f"worker{number}" for number in range(40)]
    for link, name in enumerate(names, 10):
        world.worker(link, name)
        world.offer(link, credit=1)
    for link in range(10, 50):
        world.drop(link)
    offer = wire.Offer(1, "s", ALL, 0, MANY)
    for link, name in enumerate(names, 60):
        world.worker(link, name)
        row = world.service().absent.by_holder[name].rows[0].bit_length() - 1
        command = wire.Reply(1, [row], 700, True, key=b"of %d" % link)
        assert isinstance(say(world, link, offer, command, frames=1), wire.Confirm)
    assert world.service().absent.by_holder == {}


def test_a_refusal_by_the_log_leaves_what_waits_as_it_was() -> None:
    world = at_work()
    world.drop(WORKER)
    world.worker(OTHER, "ann")
    world.shell.send(OTHER, wire.Offer(1, "s", ALL, 0, MANY))
    world.shell.refuse["main"] = ("wait", "not now")
    answer = say(world, OTHER, reply(), frames=1)
    assert isinstance(answer, wire.Refused)
    world.shell.refuse.clear()
    world.credit(OTHER, 1)
    assert [task.work.attempts for task in world.work(OTHER)] == [2]


# --- an answer that ended with its mailbox --------------------------------------------------------


def asked(count: int = 1) -> World:
    """A requester without an identity, and a worker that has its requests in hand."""
    world = World()
    world.client(REQUESTER, session=SESSION)
    world.worker(WORKER, "ann")
    world.offer(WORKER)
    world.request(REQUESTER, *[b"work"] * count, key=b"r")
    return world


def ask_again(world: World, count: int = 1, link: int = REQUESTER) -> wire.Confirm:
    return world.confirmed(link, world.request(link, *[b"work"] * count, key=b"r"))


def test_an_answer_that_ended_with_the_broker_is_named_when_its_request_comes_again() -> None:
    world = asked(3)
    world.shell.send(REQUESTER, wire.Credit(100, 0, 0))
    world.reply(WORKER, [0, 2])
    world.shell.restart()
    world.client(REQUESTER, session=SESSION)
    assert world.mail(REQUESTER) == []
    assert ask_again(world, 3).duplicate
    (first, second) = world.mail(REQUESTER)
    assert {first.mail.why, second.mail.why} == {"lost"}
    assert first.mail.last
    told = [run for letter in (first, second) for run in letter.mail.about]
    assert set(map(tuple, told)) == {(b"r", 0, 1), (b"r", 2, 1)}
    # The one that is still in hand is answered.
    back(world, OTHER)
    world.reply(OTHER, [1])
    assert world.mail(REQUESTER)[2].body == b"re: 1"


def test_a_lost_answer_is_named_once_in_the_life_of_a_mailbox() -> None:
    world = asked()
    world.reply(WORKER, [0])
    for lives in (1, 2):
        world.shell.restart()
        world.client(REQUESTER, session=SESSION)
        for _ in range(5):
            ask_again(world)
        assert [letter.mail.why for letter in world.mail(REQUESTER)] == ["lost"], lives


def test_a_request_that_waits_still_is_not_said_to_be_lost() -> None:
    world = World()
    world.client(REQUESTER, session=SESSION)
    world.request(REQUESTER, b"work", key=b"r")
    world.shell.restart()
    world.client(REQUESTER, session=SESSION)
    ask_again(world)
    assert world.mail(REQUESTER) == []
    world.worker(WORKER, "ann")
    world.offer(WORKER)
    world.reply(WORKER, [0])
    ask_again(world)
    assert world.replies(REQUESTER)[0] == b"re: 0", "a notice may follow, never come before"


def test_an_answer_that_lies_in_the_mailbox_is_not_said_to_be_lost() -> None:
    world = asked()
    world.drop(REQUESTER)
    world.reply(WORKER, [0])
    world.client(7, session=SESSION)
    ask_again(world, link=7)
    assert world.replies(7) == [b"re: 0"]


def test_an_answer_to_a_session_that_was_away_too_long_is_named_too() -> None:
    world = asked()
    world.drop(REQUESTER)
    world.shell.wait(120_000)
    assert world.shell.broker.gauges["temporary_mailboxes"] == 0
    back(world, 5)
    world.shell.wait(LATER_MS)
    world.reply(5, [0])
    assert world.counter("replies_undeliverable") == 1
    world.client(7, session=SESSION)
    ask_again(world, link=7)
    assert [letter.mail.why for letter in world.mail(7)] == ["lost"]
    assert world.counter("answers_lost") == 1


def test_a_request_that_comes_again_before_its_inbox_makes_the_mailbox() -> None:
    world = asked()
    world.reply(WORKER, [0])
    world.shell.restart()
    world.shell.hello(REQUESTER, session=SESSION)
    ask_again(world)
    world.shell.send(REQUESTER, wire.OpenInbox(100, "", MANY, MANY))
    assert [letter.mail.why for letter in world.mail(REQUESTER)] == ["lost"]


def test_a_request_of_a_step_that_comes_again_is_a_question_too() -> None:
    world = World()
    world.client(REQUESTER, session=SESSION)
    world.worker(WORKER, "ann")
    world.offer(WORKER)
    asking = wire.Atomic(700, 2, key=b"step"), wire.Publish("t", 0), wire.Request("s", 0, key=b"r")
    say(world, REQUESTER, *asking, frames=2)
    world.reply(WORKER, world.numbers(WORKER))
    world.shell.restart()
    world.client(REQUESTER, session=SESSION)
    again = say(world, REQUESTER, *asking, frames=2)
    assert isinstance(again, wire.Confirm)
    assert again.duplicate
    assert [letter.mail.why for letter in world.mail(REQUESTER)] == ["lost"]


def test_an_identity_keeps_its_answers_and_is_told_nothing() -> None:
    world = at_work()
    world.reply(WORKER, [0])
    world.shell.restart()
    world.client(REQUESTER, "desk")
    ask_again(world)
    assert world.replies(REQUESTER) == [b"re: 0"]
