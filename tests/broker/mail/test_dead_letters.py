"""Mail of services: replies, notices and dead letters, as the readers of mailboxes see them."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import WorkState
from malamute_protocol.encode import encode
from malamute_py.broker.log.steps import Steps
from malamute_py.broker.mail import administration
from malamute_py.changelog.records import MailDone
from tests.broker.post import Post

ANNA, WORKER, CLERK = 1, 2, 3


class Office(Post):
    """A post with a service `svc` and one worker of it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.offer()

    def offer(self) -> None:
        self.send(WORKER, wire.Offer(9, "svc", ["all"], 1_000, 1 << 20))

    def request(self, bodies: list[bytes], key: bytes = b"k", link: int = ANNA) -> None:
        self._trackers += 1
        command = wire.Request("svc", self._trackers, key=key)
        self.send(link, command, frames=[encode(bodies, subject="s")])

    def end(self, first: int, end: int, state: WorkState, reason: str = "") -> None:
        self.send(WORKER, wire.AckWork(9, [(first, end)], int(state), reason=reason))

    def reply(self, requests: list[int], bodies: list[bytes], *, last: bool = True) -> None:
        frame = encode(bodies, subject="r")
        self.send(WORKER, wire.Reply(9, requests, 0, last), frames=[frame])


def test_a_failed_request_lies_in_the_dead_letters_under_its_number_and_says_why() -> None:
    office = Office()
    office.request([b"a", b"b", b"c"])
    office.end(1, 2, WorkState.FAILED, "no such airport")
    office.inbox(CLERK, mailbox="svc.dead")
    (letter,) = office.letters(CLERK)
    assert (letter.number, letter.body, letter.mail.sender) == (1, b"b", "anna")
    assert letter.mail.why.startswith("failed")
    assert "no such airport" in letter.mail.why
    assert letter.mail.about == []
    office.ack(CLERK, (1, 2))
    office.restart()
    assert office.info("svc.dead")["messages"] == 0


def test_dead_letters_of_one_batch_come_one_by_one_and_each_says_its_own_why() -> None:
    office = Office()
    office.request([b"a", b"b", b"c", b"d"])
    office.end(0, 1, WorkState.FAILED, "one")
    office.end(3, 4, WorkState.FAILED, "one")
    office.end(1, 3, WorkState.FAILED, "two")
    assert office.info("svc.dead")["messages"] == 4
    office.restart()
    office.inbox(CLERK, mailbox="svc.dead")
    assert office.got(CLERK) == [b"a", b"b", b"c", b"d"]
    whys = [letter.mail.why.rsplit(" ", 1)[-1] for letter in office.letters(CLERK)]
    assert whys == ["one", "two", "two", "one"]


def test_a_peek_tells_the_attempts_of_each_dead_letter_also_after_a_restart() -> None:
    office = Office()
    office.request([b"a", b"b"])
    office.end(0, 1, WorkState.FAILED, "x")
    office.inbox(CLERK, mailbox="svc.dead", records=1, size=1 << 20)
    office.ack(CLERK, (0, 1), again_ms=0)
    office.end(1, 2, WorkState.FAILED, "x")
    office.restart()
    peeked = office.ask(ANNA, wire.PeekMail, "svc.dead", -1, 10, 0)
    assert [message["attempts"] for message in peeked["messages"]] == [1, 0]


def test_a_batch_may_lie_in_its_queue_and_in_the_dead_letters_at_one_time() -> None:
    office = Office(mail_hot_bytes=1)
    office.request([b"a", b"b"])
    office.end(0, 1, WorkState.FAILED, "x")
    office.inbox(CLERK, mailbox="svc.dead")
    office.ack(CLERK, (0, 1))
    office.reply([1], [b"done"])
    office.inbox(ANNA)
    assert b"done" in office.got(ANNA)
    gauges = office.broker.gauges
    assert gauges["mail_messages"] == len(office.got(ANNA))
    assert office.info("svc.dead")["bytes"] == 0


def test_revived_dead_letters_leave_their_mailbox_but_not_a_readers_hands() -> None:
    office = Office()
    office.request([b"a", b"b", b"c"])
    office.end(0, 3, WorkState.FAILED, "x")
    office.inbox(CLERK, mailbox="svc.dead", records=1, size=1 << 20)
    assert office.got(CLERK) == [b"a"]
    answer = office.ask(ANNA, wire.Requeue, "svc", [])
    assert answer["count"] == 2
    assert office.info("svc.dead")["messages"] == 1
    tasks = [task.body for task in office.peers[WORKER].work[9]]
    assert tasks == [b"a", b"b", b"c", b"b", b"c"]
    assert office.ack(CLERK, (0, 1)).tracker
    office.end(1, 3, WorkState.COMPLETED)
    office.restart()
    assert office.info("svc.dead")["messages"] == 0


def test_replies_name_their_requests_also_when_they_are_read_one_by_one() -> None:
    office = Office()
    office.request([b"a", b"b", b"c", b"d"], b"key1")
    office.request([b"e"], b"key2")
    office.reply([0, 1, 3, 4], [b"A", b"B", b"D", b"E"])
    office.inbox(ANNA, records=1, size=1 << 20)
    for _ in range(4):
        letter = office.letters(ANNA)[-1]
        office.ack(ANNA, (letter.number, letter.number + 1))
    assert office.got(ANNA) == [b"A", b"B", b"D", b"E"]
    runs = [run for letter in office.letters(ANNA) for run in letter.mail.about]
    assert [tuple(run) for run in runs] == [
        (b"key1", 0, 1), (b"key1", 1, 1), (b"key1", 3, 1), (b"key2", 0, 1),
    ]  # fmt: skip
    assert all(letter.mail.last for letter in office.letters(ANNA))


def test_a_reply_to_a_temporary_mailbox_happens_with_the_completion() -> None:
    office = Office()
    office.hello(8)
    office.inbox(8)
    office.request([b"a"], link=8)
    office.reply([0], [b"A"])
    (letter,) = office.letters(8)
    assert (letter.body, letter.number >= 1 << 40) == (b"A", True)
    office.ack(8, (letter.number, letter.number + 1))
    office.request([b"b"], b"other", link=8)
    office.refuse["main"] = ("disk_full", "no space")
    office.reply([1], [b"B"])
    assert len(office.letters(8)) == 1, "the completion was refused, and the reply with it"
    assert office.broker.gauges["mail_memory_bytes"] == 0
    office.refuse.clear()
    office.reply([1], [b"B"])
    assert office.got(8) == [b"A", b"B"]


def test_a_reply_to_a_full_mailbox_waits_and_notices_do_not() -> None:
    office = Office()
    office.ask(ANNA, wire.EditMailbox, "anna", {"max_messages": 1})
    office.request([b"a", b"b"])
    office.reply([0], [b"A"])
    office.send(WORKER, wire.Reply(9, [1], 77, True), frames=[encode([b"B"], subject="r")])
    assert office.answer(WORKER, 77).code == "wait"
    office.end(1, 2, WorkState.FAILED, "x")
    office.inbox(ANNA)
    assert office.got(ANNA) == [b"A", b""]
    assert office.letters(ANNA)[-1].mail.why.startswith("failed")
    assert [tuple(run) for run in office.letters(ANNA)[-1].mail.about] == [(b"k", 1, 1)]


def test_dead_letters_are_revived_by_their_numbers() -> None:
    office = Office()
    office.request([b"a", b"b", b"c"])
    office.end(0, 3, WorkState.FAILED, "x")
    answer = office.ask(ANNA, wire.Requeue, "svc", [1, 2, 77, 1 << 50])
    assert answer["count"] == 2
    assert office.info("svc.dead")["messages"] == 1
    office.end(1, 3, WorkState.COMPLETED)
    assert office.info("svc.dead")["messages"] == 1


def test_dead_letters_that_the_journal_refuses_leave_no_mailbox() -> None:
    office = Office()
    office.request([b"a"])
    office.refuse["main"] = ("disk_full", "no space")
    office.end(0, 1, WorkState.FAILED, "x")
    assert isinstance(office.info("svc.dead"), wire.Refused)
    office.refuse.clear()
    office.end(0, 1, WorkState.FAILED, "x")
    assert office.info("svc.dead")["messages"] == 1


def test_dead_letters_do_not_go_where_they_would_be_lost() -> None:
    office = Office()
    office.ask(ANNA, wire.EditMailbox, "quick", {"memory": True})
    office.ask(ANNA, wire.EditService, "svc", {"dead_letters": "quick"})
    office.request([b"a"])
    office.end(0, 1, WorkState.FAILED, "x")
    assert office.info("quick")["messages"] == 0
    assert office.info("svc.dead")["messages"] == 1


def test_a_notice_for_a_temporary_mailbox_that_has_ended_is_dropped() -> None:
    office = Office()
    office.hello(8)
    office.inbox(8)
    office.request([b"a"], link=8)
    office.send(8, wire.Bye())
    office.end(0, 1, WorkState.FAILED, "x")
    assert office.info("svc.dead")["messages"] == 1
    assert office.broker.gauges["mail_messages"] == 1


def test_a_dead_letter_has_nothing_to_do_with_what_was_given_back_before_it() -> None:
    office = Office()
    office.request([b"a", b"b", b"c"])
    office.end(0, 1, WorkState.FAILED, "one")
    office.inbox(CLERK, mailbox="svc.dead", records=9)
    office.ack(CLERK, (0, 1), again_ms=10_000)
    office.end(1, 2, WorkState.FAILED, "two")
    assert office.numbers(CLERK) == [0, 1]
    assert (office.info("svc.dead")["delayed"], office.info("svc.dead")["held"]) == (1, 1)
    office.restart()
    office.inbox(CLERK, mailbox="svc.dead", records=9)
    assert office.numbers(CLERK) == [1]
    assert office.letters(CLERK)[-1].mail.attempts == 1
    office.wait(10_000)
    assert office.numbers(CLERK) == [1, 0]
    assert office.letters(CLERK)[-1].mail.attempts == 2


def test_reasons_of_a_request_that_dies_again_and_again_do_not_pile_up() -> None:
    office = Office()
    office.request([b"a", b"b"])
    office.end(1, 2, WorkState.FAILED, "first")
    for number in range(6):
        office.end(0, 1, WorkState.FAILED, f"time {number}")
        office.ask(ANNA, wire.Requeue, "svc", [0])
    office.end(0, 1, WorkState.FAILED, "the last time")
    rows = office.broker._shard.queues.messages.values()
    (rare,) = [row.rare for row in rows if row.rare is not None and row.rare.request is not None]
    assert len(rare.why) <= 2
    office.inbox(CLERK, mailbox="svc.dead")
    assert [letter.mail.why for letter in office.letters(CLERK)] == [
        "failed: the last time", "failed: first",
    ]  # fmt: skip


def both_at_once(acked: tuple[int, int], ended: tuple[int, int], *, ack_first: bool) -> Office:
    """Acknowledge some dead letters and let further requests of their batch die, in one step."""
    office = Office()
    office.inbox(WORKER, mailbox="svc.dead")
    office.request([b"a", b"b", b"c", b"d"])
    office.end(*acked, WorkState.FAILED, "one")
    parts = [
        wire.AckMail(7, [acked], 0, 0, -1),
        wire.AckWork(9, [ended], int(WorkState.FAILED), reason="two"),
    ]
    office.send(WORKER, wire.Atomic(1, 2, 0, b""), *(parts if ack_first else parts[::-1]))
    assert isinstance(office.answer(WORKER, 1), wire.Confirm)
    return office


@pytest.mark.parametrize("ack_first", [False, True])
@pytest.mark.parametrize("ended", [(0, 1), (3, 4), (0, 2)])
def test_a_dead_letter_that_comes_while_its_neighbour_is_acknowledged_stays(
    ended: tuple[int, int], ack_first: bool
) -> None:
    office = both_at_once((2, 3), ended, ack_first=ack_first)
    died = list(range(*ended))
    assert office.numbers(WORKER) == [2, *died]
    info = office.info("svc.dead")
    assert (info["messages"], info["held"]) == (len(died), len(died))
    office.restart()
    office.inbox(CLERK, mailbox="svc.dead")
    assert office.numbers(CLERK) == died


@pytest.mark.parametrize("ack_first", [False, True])
def test_a_mailbox_counts_right_though_a_batch_comes_and_goes_in_one_step(
    ack_first: bool,
) -> None:
    office = both_at_once((2, 3), (0, 2), ack_first=ack_first)
    size = office.info("svc.dead")["bytes"]
    assert size > 0
    office.ack(WORKER, (0, 2))
    assert office.info("svc.dead")["bytes"] == 0
    office.end(3, 4, WorkState.FAILED, "three")
    assert office.info("svc.dead")["bytes"] == size
    office.restart()
    assert office.info("svc.dead")["bytes"] == size


def test_two_rows_of_a_batch_that_die_in_one_step_are_one_put_of_their_mailbox() -> None:
    office = Office()
    office.request([b"a", b"b", b"c"])
    ends = [
        wire.AckWork(9, [(place, place + 1)], int(WorkState.FAILED), reason=f"why {place}")
        for place in (0, 2)
    ]
    office.send(WORKER, wire.Atomic(1, 2, 0, b""), *ends)
    info = office.info("svc.dead")
    assert info["messages"] == 2
    assert info["bytes"] > 0
    office.inbox(CLERK, mailbox="svc.dead")
    office.ack(CLERK, (0, 1))
    office.ack(CLERK, (2, 3))
    info = office.info("svc.dead")
    assert (info["messages"], info["bytes"]) == (0, 0)
    assert office.broker.gauges["mail_bytes"] == office.info("anna")["bytes"]


def test_dead_letters_of_very_many_rows_are_purged_in_pieces_that_a_step_can_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(administration, "PIECE_ROWS", 4)
    office = Office()
    for number in range(5):
        office.request([b"a", b"b", b"c"], key=b"%d" % number)
    office.end(0, 15, WorkState.FAILED, "all")
    changes: list[int] = []
    take = Steps.take

    def seen(steps: Steps, parts: Any, *others: Any, **named: Any) -> Any:
        changes.extend(
            len(change.rows) for part in parts for change in part.changes
            if isinstance(change, MailDone)
        )  # fmt: skip
        return take(steps, parts, *others, **named)

    monkeypatch.setattr(Steps, "take", seen)
    assert office.ask(ANNA, wire.PurgeMail, "svc.dead", "svc.dead") == {"count": 15, "held": 0}
    assert changes == [2, 2, 1]
    assert office.info("svc.dead")["messages"] == 0
