"""Offers: who gets which request, what a worker may say of it, and what happens when it goes."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import WorkState
from malamute_protocol.encode import encode
from malamute_py.broker import Broker
from malamute_py.broker.links import links
from malamute_py.broker.services.queue import (
    PREFETCH_MAX,
    PREFETCH_MS,
    SCANNED_AT_ONCE,
    SLOW_LOOK,
    SubjectQueue,
)
from malamute_py.broker.services.requests import SLOW_SUBJECTS_MAX
from malamute_py.matcher import Index
from tests.broker.service_world import INBOX, MANY, World

STORED = int(wire.Level.STORED)
LATER_MS = 200
"""Past the first back-off."""


def pair(**settings: object) -> World:
    """A requester (link 1) and a worker (link 2) that has offered nothing yet."""
    world = World(**settings)
    world.client(1)
    world.worker(2, "ann")
    return world


# --- hand-out -------------------------------------------------------------------------------------


def test_a_request_is_handed_out_in_the_bundle_that_logs_it() -> None:
    world = pair()
    world.offer(2)
    bundles = len([one for ready in world.shell.readies for one in ready.appends])
    world.request(1, b"a", b"b", key=b"k")
    appends = [one for ready in world.shell.readies for one in ready.appends][bundles:]
    assert len(appends) == 1, "content, put and hand-out share one bundle"
    assert [task.body for task in world.work(2)] == [b"a", b"b"]
    work = world.work(2)[0].work
    assert (work.key, work.attempts, work.rows) == (b"k", 1, None)


def test_requests_wait_for_a_worker_and_come_in_their_order() -> None:
    world = pair()
    for body in (b"a", b"b", b"c"):
        world.request(1, body)
    assert world.info(1)["waiting"] == 3
    world.offer(2)
    assert [task.body for task in world.work(2)] == [b"a", b"b", b"c"]
    assert world.info(1)["held"] == 3


def test_a_worker_gets_no_more_than_its_credit() -> None:
    world = pair()
    world.offer(2, credit=2)
    world.request(1, *[b"%d" % n for n in range(5)])
    assert world.numbers(2) == [0, 1]
    world.credit(2, 3)
    assert world.numbers(2) == [0, 1, 2]
    world.credit(2, 3)
    assert world.numbers(2) == [0, 1, 2], "credit is absolute"
    world.credit(2, 10)
    assert world.numbers(2) == [0, 1, 2, 3, 4]


def test_a_worker_without_credit_is_not_ready_even_with_nothing_in_hand() -> None:
    world = pair()
    world.offer(2, credit=0)
    world.request(1, b"a")
    assert world.work(2) == []


def test_one_request_beyond_the_credit_of_bytes_is_allowed_to_an_empty_hand() -> None:
    world = pair()
    world.offer(2, credit=10, size=1)
    world.request(1, b"a" * 1000)
    world.request(1, b"b" * 1000)
    assert world.numbers(2) == [0]
    world.reply(2, [0])
    assert world.numbers(2) == [0, 1]


def test_bytes_of_credit_are_exact_whatever_part_of_a_batch_is_sent() -> None:
    world = pair()
    world.offer(2, credit=10, size=7_500)
    world.request(1, *[b"x" * 100] * 64)
    size = world.service().batches[0].row.put.size
    assert len(world.work(2)) == 10
    assert world.counter("work_bytes_out") <= size
    world.credit(2, 1_000, size=7_500)
    (offer,) = world.service().offers
    assert offer.left_bytes == 7_500 - world.counter("work_bytes_out")
    assert len(world.work(2)) == 10, "the batch does not fit what is left"
    world.reply(2, list(range(10)))
    assert len(world.work(2)) == 11, "one is allowed to an empty hand"
    world.credit(2, 1_000, size=1_000_000)
    assert len(world.work(2)) == 64
    assert offer.left_bytes == 1_000_000 - world.counter("work_bytes_out")


def test_a_batch_is_shared_among_the_ready() -> None:
    world = pair()
    world.worker(3, "bob")
    world.offer(2)
    world.offer(3)
    world.request(1, *[b"%d" % n for n in range(5)])
    assert sorted(world.numbers(2) + world.numbers(3)) == [0, 1, 2, 3, 4]
    assert {len(world.numbers(2)), len(world.numbers(3))} == {2, 3}


def test_the_one_with_the_fewest_in_hand_is_next() -> None:
    world = pair()
    world.worker(3, "bob")
    world.offer(2)
    world.request(1, b"a")
    world.request(1, b"b")
    world.offer(3)
    for body in (b"c", b"d"):
        world.request(1, body)
    assert world.numbers(2) == [0, 1]
    assert world.numbers(3) == [2, 3]


def test_equals_take_turns() -> None:
    world = pair()
    world.worker(3, "bob")
    world.offer(2)
    world.offer(3)
    for body in (b"a", b"b", b"c", b"d"):
        world.request(1, body)
    assert len(world.numbers(2)) == len(world.numbers(3)) == 2


def answer_all(world: World, wait_ms: int) -> None:
    """Two workers answer what they have in hand, so long after they got it."""
    world.shell.wait(wait_ms)
    for worker in (2, 3):
        if held := world.numbers(worker)[world.done.get(worker, 0) :]:
            world.reply(worker, held)
            world.done[worker] = len(world.numbers(worker))


def test_who_does_much_in_an_instant_gets_more_than_its_share() -> None:
    world = pair()
    world.worker(3, "bob")
    world.offer(2)
    world.offer(3)
    for _ in range(6):
        world.request(1, *[b"q"] * 16)
        answer_all(world, 0)
    before = len(world.numbers(2)), len(world.numbers(3))
    world.request(1, *[b"x"] * 8)
    after = len(world.numbers(2)), len(world.numbers(3))
    assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 8]


def test_a_lone_request_does_not_show_how_many_a_worker_does() -> None:
    world = pair()
    world.offer(2)
    for _ in range(10):
        world.request(1, b"q")
        world.reply(2, world.numbers(2)[-1:])
    assert world.service().prefetch <= PREFETCH_MS


def test_slow_work_is_shared_out_evenly_again_whatever_was_quick_before() -> None:
    world = pair()
    world.worker(3, "bob")
    world.offer(2)
    world.offer(3)
    for wait_ms in (*[0] * 8, *[100] * 20):
        world.request(1, *[b"q"] * 8)
        answer_all(world, wait_ms)
    before = len(world.numbers(2)), len(world.numbers(3))
    world.request(1, *[b"x"] * 8)
    after = len(world.numbers(2)), len(world.numbers(3))
    assert [b - a for a, b in zip(before, after, strict=True)] == [4, 4]


def test_the_prefetch_is_what_a_worker_does_in_its_time() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a")
    service = world.service()
    for count, took_ms, prefetch in (
        (64, 0, 2), (64, 0, 4), (2, PREFETCH_MS, 3), (64, 0, 6), (64, 0, 12), (64, 0, 24),
        (64, 0, 48), (64, PREFETCH_MS, PREFETCH_MAX), (1, 10 * PREFETCH_MS, 48),
    ):  # fmt: skip
        service.measure(count, took_ms)
        assert service.prefetch == prefetch


def test_a_pattern_takes_its_subjects_and_leaves_the_others_waiting() -> None:
    world = pair()
    world.offer(2, pattern=["topic", "air.*"])
    world.request(1, b"a", b"b", b"c", subjects=["air.port", "sea.port", "air.line"])
    assert world.numbers(2) == [0, 2]
    assert world.info(1)["waiting"] == 1
    world.worker(3, "bob")
    world.offer(3, pattern=["topic", "sea.*"])
    assert world.numbers(3) == [1]


def test_rows_of_one_batch_that_waited_by_subject_leave_as_one_work() -> None:
    world = pair()
    world.request(1, *[b"x"] * 9, subjects=["a", "b", "c"] * 3)
    world.offer(2)
    assert len(world.shell.peers[2].of(wire.Work)) == 1
    assert world.numbers(2) == list(range(9))


def test_what_nobody_takes_holds_up_nobody() -> None:
    world = pair()
    for n in range(50):
        world.request(1, b"x", subject=f"lonely.{n}")
    world.offer(2, pattern=["topic", "wanted"])
    world.request(1, b"y", subject="wanted")
    assert [task.body for task in world.work(2)] == [b"y"]


def test_a_new_pattern_finds_what_waits_however_many_subjects_there_are() -> None:
    world = pair()
    for n in range(30):
        world.request(1, *[b"x"] * 100, subjects=[f"{n}.{m}" for m in range(100)])
    world.offer(2, pattern=["topic", "29.7"])
    assert [task.number for task in world.work(2)] == [2907]


def test_what_waits_longest_goes_first_over_all_subjects() -> None:
    world = pair()
    for subject in ("b", "a", "b", "c", "a"):
        world.request(1, subject.encode(), subject=subject)
    world.offer(2)
    assert world.numbers(2) == [0, 1, 2, 3, 4]


def test_a_thousand_offers_of_one_service_share_what_comes() -> None:
    world = pair()
    for number in range(1, 1001):
        world.offer(2, number=number, credit=1)
    world.request(1, *[b"x"] * 1000)
    assert all(len(world.work(2, number)) == 1 for number in range(1, 1001))


def test_a_thousand_different_patterns_each_get_their_own() -> None:
    world = pair()
    for number in range(1, 1001):
        world.offer(2, pattern=["topic", f"t.{number}"], number=number)
    for number in (1, 500, 1000):
        world.request(1, b"x", subject=f"t.{number}")
    assert [number for number in range(1, 1001) if world.work(2, number)] == [1, 500, 1000]


def test_a_step_hands_out_a_bounded_number_and_the_next_goes_on() -> None:
    world = pair(hand_outs_max=3)
    for n in range(20):
        world.request(1, b"%d" % n)
    world.offer(2)
    assert world.numbers(2) == list(range(20))


def test_few_rows_of_a_large_batch_are_extracted_and_many_go_as_they_came() -> None:
    world = pair()
    world.request(1, *[b"%03d" % n * 100 for n in range(100)])
    world.offer(2, credit=2)
    first = world.work(2)[0].work
    assert first.rows is None
    assert world.numbers(2) == [0, 1]
    world.credit(2, 100)
    assert world.work(2)[2].work.rows is not None
    assert world.numbers(2) == list(range(100))


def test_a_body_that_is_in_memory_no_more_is_read_back() -> None:
    world = pair(mail_hot_bytes=1)
    for n in range(5):
        world.request(1, b"%d" % n * 100)
    world.offer(2)
    assert [task.body for task in world.work(2)] == [b"%d" % n * 100 for n in range(5)]


@pytest.mark.parametrize("state", [WorkState.RELEASED, WorkState.RECEIVED])
def test_what_a_worker_says_of_a_request_whose_body_is_read_sends_it_once(state: int) -> None:
    world = pair(mail_hot_bytes=1, read=False)
    world.request(1, b"a", b"b")
    world.request(1, b"c")
    world.offer(2, credit=4)
    (base,) = (batch.base for batch in world.service().batches.values() if batch.row.put.count == 2)
    # It speaks of what it had by an offer before; released, the request comes to it again at once.
    world.ack(2, [(base, base + 1)], state)
    for _ in range(6):
        world.shell.answer_bodies()
        world.shell.run()
    assert [(task.body, task.work.attempts) for task in world.work(2)] in (
        [(b"a", 1), (b"b", 1), (b"c", 1)],
        [(b"b", 1), (b"c", 1), (b"a", 1)],
    )
    # A hand-out of which nothing was sent has used no credit.
    world.request(1, b"d")
    world.request(1, b"e")
    for _ in range(6):
        world.shell.answer_bodies()
        world.shell.run()
    assert [task.body for task in world.work(2)][3:] == [b"d"]


def test_a_request_whose_body_cannot_be_read_ends_and_its_requester_is_told() -> None:
    world = pair(mail_hot_bytes=1, read=False)
    world.request(1, b"a" * 100, key=b"k")
    world.request(1, b"b" * 100)
    world.offer(2)
    world.shell.rings["main"] = [
        held for held in world.shell.rings["main"] if held.base != 0 or held.control_kind
    ]
    world.shell.answer_bodies()
    world.shell.run()
    world.shell.answer_bodies()
    world.shell.run()
    assert world.counter("requests_lost") == 1
    assert [task.body for task in world.work(2)] == [b"b" * 100]
    assert world.mail(1)[0].mail.why == "lost"


def test_an_offer_that_slept_while_others_did_all_the_work_gets_what_comes_next() -> None:
    world = pair()
    world.worker(3, "bob")
    world.offer(3, pattern=["prefix", "t"], credit=0)
    for n in range(30):
        world.request(1, *[b"x"] * 100, subjects=[f"t.{n}.{m}" for m in range(100)])
    world.offer(2, credit=3_000)
    assert len(world.work(2)) == 3_000
    world.credit(3, 1)
    world.request(1, b"next", subject="t.next")
    assert [task.body for task in world.work(3)] == [b"next"]


# --- replies --------------------------------------------------------------------------------------


def test_a_last_reply_answers_and_completes_in_one_bundle() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", b"b", key=b"k")
    world.reply(2, [0, 1])
    assert world.replies(1) == [b"re: 0", b"re: 1"]
    mail = world.mail(1)[0].mail
    assert (mail.sender, mail.last, mail.about) == ("ann", True, [(b"k", 0, 2)])
    assert world.queued() == 0
    assert world.info(1)["held"] == 0


def test_the_confirm_of_a_patient_reply_leaves_with_the_next_work() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a")
    tracker = world.reply(2, [0], level=STORED, patient=True)
    assert world.replies(1) == [b"re: 0"]
    assert not world.answers(2, tracker)
    world.request(1, b"b")
    assert [task.body for task in world.work(2)] == [b"a", b"b"]
    assert world.confirmed(2, tracker).level == STORED


def test_the_confirm_of_a_patient_reply_does_not_wait_for_work_that_never_comes() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", b"b")
    trackers = [world.reply(2, [number], level=STORED, patient=True) for number in (0, 1)]
    assert not any(world.answers(2, tracker) for tracker in trackers)
    world.shell.wait(links.LATER_MS)
    assert all(world.confirmed(2, tracker).level == STORED for tracker in trackers)


def test_who_waits_for_a_confirm_gets_those_that_were_to_come_later_too() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", b"b")
    patient = world.reply(2, [0], level=STORED, patient=True)
    waited_for = world.reply(2, [1], level=STORED)
    assert world.confirmed(2, waited_for).level == STORED
    assert world.confirmed(2, patient).level == STORED


def test_what_was_to_be_said_later_is_said_before_the_end() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a")
    tracker = world.reply(2, [0], level=STORED, patient=True)
    world.shell.broker.drain(world.shell.now_ms)
    world.shell.run()
    assert world.confirmed(2, tracker).level == STORED
    assert isinstance(world.shell.peers[2].commands[-1], wire.Bye)


def test_several_replies_come_before_the_last() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", key=b"k")
    world.reply(2, [0, 0], last=False, bodies=[b"1", b"2"])
    assert world.info(1)["held"] == 1
    world.reply(2, [0], bodies=[b"3"])
    assert world.replies(1) == [b"1", b"2", b"3"]
    assert [letter.mail.last for letter in world.mail(1)] == [False, False, True]
    assert world.mail(1)[0].mail.about == [(b"k", 0, 1), (b"k", 0, 1)]
    assert world.queued() == 0


def test_replies_to_rows_out_of_order_name_what_each_answers() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", b"b", b"c", key=b"k")
    world.request(1, b"d", key=b"l")
    world.reply(2, [2, 3, 0, 1])
    assert world.replies(1) == [b"re: 2", b"re: 3", b"re: 0", b"re: 1"]
    assert world.mail(1)[0].mail.about == [(b"k", 2, 1), (b"l", 0, 1), (b"k", 0, 2)]
    assert world.queued() == 0


def test_a_last_reply_to_some_rows_leaves_the_others_in_hand() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", b"b", b"c", key=b"k")
    world.reply(2, [1])
    assert world.info(1)["held"] == 2
    assert world.mail(1)[0].mail.about == [(b"k", 1, 1)]
    world.reply(2, [0, 2])
    assert world.queued() == 0


def test_rows_of_one_batch_are_answered_by_several_workers() -> None:
    world = pair()
    world.worker(3, "bob")
    world.offer(2)
    world.offer(3)
    world.request(1, *[b"x"] * 6, key=b"k")
    world.reply(2, world.numbers(2))
    world.reply(3, world.numbers(3))
    assert sorted(world.replies(1)) == [b"re: %d" % n for n in range(6)]
    assert world.queued() == 0


@pytest.mark.parametrize("requests", [[7], [0, 7], [1]])
def test_a_reply_to_what_is_not_in_hand_is_refused_and_does_nothing(requests: list[int]) -> None:
    world = pair()
    world.offer(2, credit=1)
    world.request(1, b"a", b"b")
    tracker = world.reply(2, requests)
    assert world.refused(2, tracker).code == "not_held"
    assert world.replies(1) == []
    assert world.info(1)["held"] == 1


def test_a_second_last_reply_is_refused() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a")
    world.reply(2, [0])
    assert world.refused(2, world.reply(2, [0])).code == "not_held"
    assert world.replies(1) == [b"re: 0"]


def test_of_two_last_replies_in_one_turn_the_first_counts() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a")
    contents = [encode([body], subject="r") for body in (b"first", b"second")]
    world.shell.send(
        2, wire.Reply(1, [0], 901, True), wire.Reply(1, [0], 902, True), frames=contents
    )
    assert world.confirmed(2, 901).level == 3
    assert world.refused(2, 902).code == "not_held"
    assert world.replies(1) == [b"first"]


def test_two_last_replies_to_one_request_in_one_batch_are_refused() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", b"b")
    assert world.refused(2, world.reply(2, [0, 0])).code == "bad_batch"
    assert world.info(1)["held"] == 2


def test_one_reply_cannot_go_to_two_mailboxes() -> None:
    world = pair()
    world.client(3)
    world.offer(2)
    world.request(1, b"a")
    world.request(3, b"b")
    assert world.refused(2, world.reply(2, [0, 1])).code == "bad_batch"
    world.reply(2, [0])
    world.reply(2, [1])
    assert (world.replies(1), world.replies(3)) == ([b"re: 0"], [b"re: 1"])


def test_a_reply_of_another_count_is_refused() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", b"b")
    assert world.refused(2, world.reply(2, [0, 1], bodies=[b"one"])).code == "bad_batch"


def test_a_worker_speaks_only_of_its_own() -> None:
    world = pair()
    world.worker(3, "bob")
    world.offer(2)
    world.request(1, b"a")
    world.offer(3)
    assert world.refused(3, world.reply(3, [0])).code == "not_held"
    assert world.refused(3, world.ack(3, [(0, 1)], WorkState.COMPLETED)).code == "not_held"
    assert world.refused(3, world.reply(3, [0], number=9)).code == "unknown_subscription"
    assert world.info(1)["held"] == 1


def test_a_reply_into_a_full_mailbox_waits_and_the_request_stays_in_hand() -> None:
    world = World()
    world.shell.hello(1, identity="req")
    world.shell.send(1, wire.EditMailbox(5, "req", {"max_messages": 1}))
    world.worker(2, "ann")
    world.offer(2)
    world.request(1, b"a")
    world.request(1, b"b")
    world.reply(2, [0])
    refused = world.refused(2, world.reply(2, [1]))
    assert (refused.code, refused.retry_ms) == ("wait", 100)
    assert world.info(1)["held"] == 1
    world.shell.send(1, wire.OpenInbox(INBOX, "req", MANY, MANY))
    world.shell.send(
        1,
        wire.AckMail(
            INBOX,
            [(world.mail(1)[0].number, 1 << 40)][:0]
            or [(world.mail(1)[0].number, world.mail(1)[0].number + 1)],
        ),
    )
    world.confirmed(2, world.reply(2, [1]))
    assert world.queued() == 0


def test_a_reply_to_a_session_that_has_ended_is_dropped_and_completes() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", b"b", key=b"k")
    world.shell.send(1, wire.Bye())
    world.reply(2, [0], last=False)
    world.confirmed(2, world.reply(2, [0, 1]))
    assert world.queued() == 0
    assert world.counter("replies_undeliverable") == 3
    assert world.events("reply_undeliverable")[0]["count"] == 1


def test_replies_to_an_absent_identity_are_there_when_it_comes_back() -> None:
    world = World()
    world.shell.hello(1, identity="req")
    world.worker(2, "ann")
    world.offer(2)
    world.request(1, b"a", key=b"k")
    world.drop(1)
    world.reply(2, [0])
    world.client(3, "req")
    assert world.replies(3) == [b"re: 0"]


def test_a_reply_that_the_log_refuses_leaves_the_request_in_hand() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", key=b"k")
    world.shell.refuse["main"] = ("disk_full", "no space")
    assert world.refused(2, world.reply(2, [0])).code == "disk_full"
    del world.shell.refuse["main"]
    assert world.replies(1) == []
    assert world.info(1)["held"] == 1
    world.confirmed(2, world.reply(2, [0]))
    assert world.replies(1) == [b"re: 0"]


# --- what a worker says of its work ---------------------------------------------------------------


def test_receipt_is_in_the_log_and_completion_apart() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", b"b")
    world.confirmed(2, world.ack(2, [(0, 2)], WorkState.RECEIVED))
    assert world.info(1)["workers"][0]["received"] == 2
    world.confirmed(2, world.ack(2, [(0, 2)], WorkState.COMPLETED))
    assert world.queued() == 0
    assert world.mail(1) == [], "the requester gave them no name"


def test_completion_without_a_last_reply_tells_the_requester_that_nothing_more_comes() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", b"b", key=b"k")
    world.reply(2, [0], last=False)
    world.ack(2, [(0, 2)], WorkState.COMPLETED)
    last = world.mail(1)[-1].mail
    assert (last.why, last.last, last.about) == ("completed", True, [(b"k", 0, 2)])


def test_a_failed_request_is_a_dead_letter_that_says_why_and_the_requester_knows() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"poison", key=b"k")
    world.ack(2, [(0, 1)], WorkState.FAILED, reason="no such flight")
    assert world.mail(1)[0].mail.why == "failed: no such flight"
    world.shell.send(1, wire.OpenInbox(50, "s.dead", MANY, MANY))
    (letter,) = world.shell.peers[1].mail[50]
    assert (letter.body, letter.mail.why) == (b"poison", "failed: no such flight")
    assert world.events("request_dead")[0]["why"] == "failed: no such flight"
    assert world.info(1)["dead"] == 1


def test_a_returned_request_goes_to_whoever_is_ready_not_before_its_time() -> None:
    world = pair()
    world.offer(2, credit=1)
    world.worker(3, "bob")
    world.request(1, b"a")
    world.offer(3)
    world.ack(2, [(0, 1)], WorkState.RETURNED, again_ms=500)
    assert world.info(1)["delayed"] == 1
    world.shell.wait(490)
    assert world.work(3) == []
    world.shell.wait(20)
    assert world.work(3)[0].work.attempts == 2
    assert world.info(1)["delayed"] == 0


def test_a_returned_request_goes_before_new_ones() -> None:
    world = pair()
    world.offer(2, credit=1)
    for body in (b"a", b"b", b"c"):
        world.request(1, body)
    world.ack(2, [(0, 1)], WorkState.RETURNED)
    world.credit(2, 4)
    assert world.numbers(2) == [0, 0, 1, 2]


def test_rows_of_one_batch_with_different_attempts_come_apart() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", b"b", b"c")
    world.ack(2, [(1, 2)], WorkState.RETURNED)
    world.drop(2)
    world.worker(3, "bob")
    world.offer(3)
    world.shell.wait(500)
    attempts = {task.number: task.work.attempts for task in world.work(3)}
    assert attempts == {0: 2, 1: 3, 2: 2}


@pytest.mark.parametrize("ranges", [[(0, 3)], [(5, 6)], [(0, 1 << 20)], [(0, 1), (2, 3)]])
def test_an_ack_of_what_is_not_in_hand_is_refused_whole(ranges: list[tuple[int, int]]) -> None:
    world = pair()
    world.offer(2, credit=2)
    world.request(1, *[b"x"] * 3)
    for state in WorkState:
        assert world.refused(2, world.ack(2, ranges, state)).code == "not_held"
    assert world.info(1)["held"] == 2


def test_an_ack_of_an_unknown_state_is_refused() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a")
    assert world.refused(2, world.ack(2, [(0, 1)], 9)).code == "unsupported"


# --- leases ---------------------------------------------------------------------------------------


def test_a_silent_worker_loses_what_it_has_when_the_lease_is_over() -> None:
    world = pair()
    world.offer(2, lease_ms=1_000, credit=2)
    world.request(1, b"a", b"b")
    world.worker(3, "bob")
    world.offer(3)
    assert world.work(2)[0].work.lease_ms == 1_000
    world.shell.wait(990)
    assert world.work(3) == []
    world.shell.wait(20)
    assert world.events("lease_expired")[0]["count"] == 2
    assert world.work(3) == [], "not before its pause"
    world.shell.wait(LATER_MS)
    assert world.numbers(3) == [0, 1]
    assert world.refused(2, world.reply(2, [0])).code == "not_held"
    world.reply(3, [0, 1])
    assert world.queued() == 0
    assert world.counter("leases_expired") == 2


def test_renewal_keeps_what_it_names_and_nothing_else() -> None:
    world = pair()
    world.offer(2, lease_ms=1_000, credit=3)
    world.request(1, b"a", b"b", b"c")
    world.shell.wait(800)
    world.confirmed(2, world.ack(2, [(1, 2)], WorkState.RENEWED))
    world.shell.wait(300)
    assert world.info(1)["held"] == 1
    world.shell.wait(600)
    assert world.info(1)["held"] == 1
    world.shell.wait(300)
    assert world.info(1)["held"] == 0


@pytest.mark.parametrize("how", ["received", "reply"])
def test_whatever_is_heard_of_a_request_renews_its_lease(how: str) -> None:
    world = pair()
    world.offer(2, lease_ms=1_000)
    world.request(1, b"a")
    world.shell.wait(800)
    if how == "received":
        world.ack(2, [(0, 1)], WorkState.RECEIVED)
    else:
        world.reply(2, [0], last=False)
    world.shell.wait(800)
    assert world.info(1)["held"] == 1


def test_heartbeats_renew_no_lease() -> None:
    world = pair()
    world.offer(2, lease_ms=1_000)
    world.request(1, b"a")
    for _ in range(11):
        world.shell.send(2, wire.Ping(0))
        world.shell.wait(100)
    assert world.counter("leases_expired") == 1


def test_a_lease_that_ends_while_the_reply_is_queued_loses_to_the_reply() -> None:
    world = pair()
    world.offer(2, lease_ms=1_000)
    world.request(1, b"a")
    broker, shell = world.shell.broker, world.shell
    shell.now_ms += 1_100
    content = encode([b"just in time"], subject="r")
    broker.receive(2, "", [wire.Reply(1, [0], 77, True)], [content], shell.now_ms)
    broker.tick(shell.now_ms)
    shell.run()
    assert world.replies(1) == [b"just in time"]
    assert world.queued() == 0
    assert world.counter("leases_expired") == 0


def test_a_reply_after_the_lease_ended_in_the_same_turn_is_refused() -> None:
    world = pair()
    world.offer(2, lease_ms=1_000)
    world.request(1, b"a")
    broker, shell = world.shell.broker, world.shell
    shell.now_ms += 1_100
    content = encode([b"too late"], subject="r")
    broker.tick(shell.now_ms)
    broker.receive(2, "", [wire.Reply(1, [0], 77, True)], [content], shell.now_ms)
    shell.run()
    assert world.refused(2, 77).code == "not_held"
    assert world.replies(1) == []
    assert world.queued() == 1


def test_a_lease_is_kept_within_bounds() -> None:
    world = pair(lease_min_ms=100, lease_max_ms=5_000)
    world.offer(2, lease_ms=1)
    world.offer(2, lease_ms=1 << 40, number=2)
    leases = {offer.lease_ms for offer in world.service().offers}
    assert leases == {100, 5_000}


# --- ends of links and offers ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["lost", "bye", "silent", "kicked"])
def test_what_a_worker_had_in_hand_goes_to_another_when_its_link_ends(how: str) -> None:
    world = pair()
    world.offer(2)
    world.request(1, *[b"x"] * 4, key=b"k")
    world.worker(3, "bob")
    world.offer(3)
    world.reply(2, [1])
    if how == "lost":
        world.drop(2)
    elif how == "bye":
        world.shell.send(2, wire.Bye())
    elif how == "kicked":
        world.shell.send(1, wire.Kick(8, 2))
    else:
        for _ in range(16):
            for link in (1, 3):
                world.shell.send(link, wire.Ping(0))
            world.shell.wait(1_000)
    world.shell.wait(LATER_MS)
    assert world.numbers(3) == [0, 2, 3]
    assert world.work(3)[0].work.attempts == 2
    assert world.events("worker_died")[0]["count"] == 3
    world.reply(3, [0, 2, 3])
    assert world.queued() == 0
    assert sorted(world.replies(1)) == [b"re: %d" % n for n in range(4)]


def test_a_worker_that_dies_with_very_much_in_hand_is_cleared_in_portions() -> None:
    world = pair(timers_max=10)
    world.offer(2)
    for n in range(95):
        world.request(1, b"%d" % n)
    world.drop(2)
    assert world.info(1)["waiting"] == 95
    assert world.events("worker_died")[0]["count"] == 95
    returns = [
        batch for ready in world.shell.readies[-20:] for one in ready.appends
        for batch in one.batches
    ]  # fmt: skip
    assert len(returns) >= 9, "a portion a step"
    world.worker(3, "bob")
    world.offer(3)
    assert world.numbers(3) == list(range(95))


def test_what_is_still_to_be_returned_can_be_cancelled_and_expires() -> None:
    world = pair(timers_max=1)
    world.offer(2)
    for n in range(5):
        world.request(1, b"x", key=b"%d" % n, timeout_ms=1_000)
    shell, broker = world.shell, world.shell.broker
    broker.link_lost(2, shell.now_ms)
    broker.receive(1, "", [wire.CancelRequest(7, "s", b"4")], [], shell.now_ms)
    shell.run()
    assert world.shell.peers[1].last(wire.Result).value == {"count": 1}
    assert world.info(1)["waiting"] == 4
    shell.wait(1_010)
    assert world.queued() == 0
    assert len(world.mail(1)) == 4


def test_a_withdrawn_offer_gives_back_what_it_had_at_once() -> None:
    world = pair()
    world.offer(2, credit=2)
    world.request(1, b"a", b"b", b"c")
    world.offer(2, number=2)
    world.shell.send(2, wire.Unsubscribe(1))
    assert world.shell.peers[2].last(wire.Ended).code == "cancelled"
    assert world.numbers(2, 2) == [2, 0, 1]
    assert world.refused(2, world.reply(2, [0], number=1)).code == "unknown_subscription"
    world.reply(2, [0, 1, 2], number=2)
    assert world.queued() == 0


def test_what_a_withdrawn_offer_had_not_begun_costs_no_attempt() -> None:
    world = pair(attempts_max=3)
    world.request(1, b"a", b"b", key=b"k")
    for _ in range(10):
        world.offer(2)
        assert [task.work.attempts for task in world.work(2)] == [1, 1]
        world.shell.send(2, wire.Unsubscribe(1))
        world.shell.peers[2].work.clear()
    assert world.info(1)["attempts"] == [[0, 2]]
    assert world.counter("requests_dead") == 0


def test_what_a_withdrawn_offer_had_begun_was_an_attempt() -> None:
    world = pair(attempts_max=3)
    world.request(1, b"a", b"b", key=b"k")
    for attempt in (1, 2, 3):
        world.offer(2)
        assert [task.work.attempts for task in world.work(2)] == [attempt, 1]
        world.ack(2, [(0, 1)], WorkState.RECEIVED)
        world.shell.send(2, wire.Unsubscribe(1))
        world.shell.peers[2].work.clear()
    (notice,) = world.mail(1)
    assert notice.mail.why == "returned: handed out 3 times"
    assert [tuple(run) for run in notice.mail.about] == [(b"k", 0, 1)]
    world.shell.restart()
    world.client(1)
    assert world.info(1)["attempts"] == [[0, 1]], "as the log has it"


def test_a_worker_that_stops_costs_its_requests_no_attempt() -> None:
    world = pair(attempts_max=3)
    world.request(1, b"a", b"b", key=b"k")
    for _ in range(10):
        world.offer(2)
        assert [task.work.attempts for task in world.work(2)] == [1, 1]
        world.ack(2, [(0, 1)], WorkState.RECEIVED)
        world.ack(2, [(0, 2)], WorkState.RELEASED)
        world.shell.send(2, wire.Unsubscribe(1))
        world.shell.peers[2].work.clear()
    assert world.info(1)["attempts"] == [[0, 2]]
    assert world.counter("requests_dead") == 0
    world.shell.restart()
    world.client(1)
    assert world.info(1)["attempts"] == [[0, 2]], "as the log has it"


def test_a_released_request_waits_for_no_pause_and_another_worker_has_it() -> None:
    world = pair(attempts_max=3)
    world.worker(3, "ben")
    world.request(1, b"a")
    world.offer(2, credit=1)
    world.offer(3, credit=1)
    world.ack(2, [(0, 1)], WorkState.RELEASED)
    assert [task.work.attempts for task in world.work(3)] == [1]


def test_a_dead_letter_repeats_what_the_worker_said_when_it_gave_the_request_back() -> None:
    world = pair(attempts_max=2)
    world.request(1, b"a", key=b"k")
    world.offer(2, credit=10)
    world.ack(2, [(0, 1)], WorkState.RETURNED, reason="no database")
    world.ack(2, [(0, 1)], WorkState.RETURNED, reason="still none")
    (notice,) = world.mail(1)
    assert notice.mail.why == "returned: handed out 2 times, at last: still none"


def test_what_was_begun_may_be_said_in_the_message_that_ends_the_offer() -> None:
    world = pair(attempts_max=1)
    world.request(1, b"a", b"b", key=b"k")
    world.offer(2)
    began = wire.AckWork(1, [(0, 1)], WorkState.RECEIVED)
    world.shell.send(2, began, wire.Unsubscribe(1))
    assert [letter.mail.why for letter in world.mail(1)] == ["returned: handed out 1 times"]
    assert world.info(1)["attempts"] == [[0, 1]]


def test_what_a_lone_worker_gives_back_again_and_again_waits_longer_each_time() -> None:
    world = pair(backoff_ms=100)
    world.request(1, b"a")
    world.offer(2)
    world.ack(2, [(0, 1)], WorkState.RETURNED)
    assert world.numbers(2) == [0, 0], "once at once"
    world.ack(2, [(0, 1)], WorkState.RETURNED)
    assert world.info(1)["delayed"] == 1
    world.shell.wait(120)
    assert world.numbers(2) == [0, 0, 0]
    world.ack(2, [(0, 1)], WorkState.RETURNED)
    world.shell.wait(120)
    assert world.numbers(2) == [0, 0, 0]
    world.shell.wait(100)
    assert world.numbers(2) == [0, 0, 0, 0]
    world.ack(2, [(0, 1)], WorkState.RETURNED, again_ms=10)
    world.shell.wait(20)
    assert len(world.numbers(2)) == 5, "a worker that says when is believed"


def test_requests_of_many_attempts_become_dead_letters_once_when_the_bound_is_lowered() -> None:
    world = pair(attempts_max=9)
    world.request(1, b"a", b"b", key=b"k")
    for rounds in range(4):
        world.offer(2)
        world.ack(2, [(0, 2 if rounds < 3 else 1)], WorkState.RECEIVED)
        world.shell.send(2, wire.Unsubscribe(1))
    world.offer(2)
    assert world.info(1)["attempts"] == [[4, 1], [5, 1]]
    world.ask(1, wire.EditService(7, "s", {"attempts_max": 2}))
    world.drop(2)
    assert world.counter("requests_dead") == 2
    assert world.queued() == 0
    assert [event["count"] for event in world.events("request_dead")] == [2]


def test_rows_handed_out_before_an_end_that_the_log_refuses_are_in_somebodys_hands_again() -> None:
    world = pair()
    world.request(1, b"a", key=b"k")
    shell, broker = world.shell, world.shell.broker
    command = wire.Offer(1, "s", ["all"], 10, MANY)
    broker.receive(2, "", [command], [], shell.now_ms)
    ready = broker.take_ready()
    service = world.service()
    (batch,) = service.batches.values()
    assert batch.moving == 1, "its hand-out is on its way"
    # A bundle may end between the two: then the hand-out is appended, and the end is not.
    ends = broker._services._ends.end(service, [(batch, 1)], "cancelled")
    ends.reserve()
    shell._do(ready)
    assert world.numbers(2) == []
    ends.undo("full", "no room", 0)
    shell.wait(1_100)
    shell.wait(LATER_MS)
    assert world.numbers(2) == [0]
    world.reply(2, [0])
    assert world.queued() == 0


def test_a_worker_that_dies_before_its_work_is_logged_leaves_it_to_others() -> None:
    world = pair()
    world.offer(2)
    shell, broker = world.shell, world.shell.broker
    content = encode([b"a"], subject="x")
    broker.receive(1, "", [wire.Request("s", 5)], [content], shell.now_ms)
    ready = broker.take_ready()
    broker.link_lost(2, shell.now_ms)
    shell._do(ready)
    shell.run()
    world.worker(3, "bob")
    world.offer(3)
    shell.wait(LATER_MS)
    assert world.numbers(3) == [0]
    assert world.service().held == 1


def test_a_hand_out_that_the_log_refuses_has_not_happened() -> None:
    world = pair()
    world.request(1, b"a", b"b")
    world.offer(2, credit=0)
    world.shell.refuse["main"] = ("full", "no room")
    world.credit(2, 5)
    assert world.work(2) == []
    row = next(iter(world.shell.broker._shard.queues.requests.values()))
    assert (row.waiting, row.holds) == (3, [])
    del world.shell.refuse["main"]
    world.shell.wait(2_000)
    assert world.numbers(2) == [0, 1]
    assert world.work(2)[0].work.attempts == 1
    world.request(1, *[b"x"] * 9)
    assert len(world.numbers(2)) == 5, "its credit is what it was"


def test_a_request_that_the_log_refuses_costs_nobody_credit() -> None:
    world = pair()
    world.offer(2, credit=2)
    world.shell.refuse["main"] = ("full", "no room")
    assert world.refused(1, world.request(1, b"a", b"b", key=b"k")).code == "full"
    del world.shell.refuse["main"]
    world.confirmed(1, world.request(1, b"a", b"b", key=b"k"))
    assert [task.body for task in world.work(2)] == [b"a", b"b"]
    assert world.service().reserved_rows == 0


def test_a_return_that_the_log_refuses_is_tried_again() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", b"b")
    world.shell.refuse["main"] = ("full", "no room")
    world.drop(2)
    assert world.queued() == 2
    del world.shell.refuse["main"]
    world.worker(3, "bob")
    world.offer(3)
    world.shell.wait(2_000)
    world.shell.wait(LATER_MS)
    assert world.numbers(3) == [0, 1]


def test_very_much_that_the_log_refused_is_tried_again_without_a_pause_between() -> None:
    world = pair(timers_max=2)
    world.offer(2)
    for _ in range(30):
        world.request(1, b"x")
    world.shell.refuse["main"] = ("full", "no room")
    world.drop(2)
    world.shell.wait(1_500)
    del world.shell.refuse["main"]
    world.worker(3, "bob")
    world.offer(3)
    world.shell.wait(1_100)
    world.shell.wait(1_100)
    assert sorted(world.numbers(3)) == list(range(30))


def test_one_refusal_after_the_other_puts_nothing_off_for_ever() -> None:
    world = pair()
    world.worker(3, "bob")
    for link in (2, 3):
        world.offer(link, credit=1)
        world.request(1, b"x")
    world.shell.refuse["main"] = ("full", "no room")
    world.drop(2)
    world.shell.wait(600)
    world.drop(3)
    del world.shell.refuse["main"]
    world.worker(4, "cat")
    world.offer(4)
    world.shell.wait(450)
    world.shell.wait(LATER_MS)
    assert sorted(world.numbers(4)) == [0, 1]


def test_a_lease_whose_end_the_log_refuses_is_tried_again() -> None:
    world = pair()
    world.offer(2, lease_ms=1_000, credit=1)
    world.request(1, b"a")
    world.shell.refuse["main"] = ("full", "no room")
    world.shell.wait(1_010)
    del world.shell.refuse["main"]
    world.worker(3, "bob")
    world.offer(3)
    world.shell.wait(1_100)
    world.shell.wait(LATER_MS)
    assert world.numbers(3) == [0]


def test_requests_wait_for_the_room_of_a_link() -> None:
    world = pair()
    world.offer(2)
    broker = world.shell.broker
    world.shell.blocked.add(2)
    broker.blocked(2)
    world.request(1, b"a")
    assert world.info(1)["waiting"] == 1
    world.shell.blocked.discard(2)
    broker.writable(2)
    world.shell.run()
    assert world.numbers(2) == [0]


# --- offers, named --------------------------------------------------------------------------------


def test_an_offer_creates_its_service_with_its_settings() -> None:
    world = pair()
    world.offer(2, service="made", settings={"attempts_max": 7})
    assert world.info(2, "made")["settings"]["attempts_max"] == 7
    assert world.events("service_created") == [{"service": "made", "by": "ann"}]
    world.shell.restart()
    world.worker(2)
    assert world.info(2, "made")["settings"]["attempts_max"] == 7


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"service": "b@d name"}, "bad_name"),
        ({"pattern": ["topic"]}, "bad_pattern"),
        ({"pattern": ["no such kind", 1]}, "unknown_pattern_kind"),
        ({"service": "t", "settings": {"nonsense": 1}}, "bad_setting"),
        ({"number": 3}, "subscription_exists"),
        ({"number": INBOX}, "subscription_exists"),
    ],
)
def test_an_offer_that_cannot_be_is_refused_by_name(fields: dict[str, Any], code: str) -> None:
    world = World()
    world.client(2)
    world.offer(2, number=3, service="other")
    peer = world.offer(2, **{"number": 4, **fields})
    refused = peer.last(wire.Refused)
    assert (refused.command, refused.code) == (51, code)
    gauges = world.shell.broker._services.gauges
    assert (gauges["offers"], gauges["services"]) == (1, 1)


def test_an_offer_needs_its_permission() -> None:
    world = World(permit=lambda identity, action, name: action != "work")
    world.worker(2)
    assert world.offer(2).last(wire.Refused).code == "forbidden"


def test_an_offer_of_a_service_that_the_log_refuses_is_refused() -> None:
    world = pair()
    world.shell.refuse["main"] = ("full", "no room")
    assert world.offer(2).last(wire.Refused).code == "full"
    del world.shell.refuse["main"]
    assert world.shell.broker._services.gauges["services"] == 0
    world.offer(2)
    assert world.shell.peers[2].last(wire.Subscribed).subscription == 1


# --- over restarts --------------------------------------------------------------------------------


def test_a_holder_that_comes_back_after_a_restart_goes_on() -> None:
    world = World()
    world.shell.hello(1, identity="req")
    world.worker(2, "ann")
    world.offer(2)
    world.request(1, *[b"x"] * 4, key=b"k")
    world.reply(2, [1])
    world.shell.restart()
    world.client(1, "req")
    world.worker(2, "ann")
    world.offer(2, number=9)
    assert world.work(2, 9) == [], "it has them already"
    world.confirmed(2, world.ack(2, [(0, 1)], WorkState.RENEWED, number=9))
    world.confirmed(2, world.reply(2, [0, 2, 3], number=9))
    assert sorted(world.replies(1)) == [b"re: %d" % n for n in range(4)]
    assert world.queued() == 0


def test_a_holder_that_does_not_come_back_loses_it_when_a_new_lease_is_over() -> None:
    world = pair()
    world.offer(2, lease_ms=1_000)
    world.request(1, b"a")
    world.shell.wait(900)
    world.shell.restart()
    world.worker(3, "bob")
    world.offer(3)
    world.shell.wait(900)
    assert world.work(3) == []
    world.shell.wait(200)
    world.shell.wait(LATER_MS)
    assert world.work(3)[0].work.attempts == 2
    assert world.info(3)["workers"][0]["attempts"] == 2


def test_a_holder_that_came_back_and_dies_returns_what_it_had_before() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a")
    world.shell.restart()
    world.worker(2, "ann")
    world.offer(2)
    world.drop(2)
    world.worker(3, "bob")
    world.offer(3)
    world.shell.wait(LATER_MS)
    assert world.numbers(3) == [0]


def test_an_orderly_stop_takes_nothing_out_of_anybodys_hands() -> None:
    world = World()
    world.client(1, "req")
    world.worker(2, "ann")
    world.offer(2)
    world.request(1, b"a", key=b"k")
    world.shell.broker.drain(world.shell.now_ms)
    world.shell.run()
    world.shell.restart()
    world.worker(3, "bob")
    world.offer(3)
    world.client(1, "req")
    world.worker(2, "ann")
    world.offer(2)
    world.confirmed(2, world.reply(2, [0]))
    assert world.replies(1) == [b"re: 0"]
    assert world.work(3) == []


def test_a_stranger_cannot_go_on_with_what_another_held_before_the_restart() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a")
    world.shell.restart()
    world.worker(3, "bob")
    world.offer(3)
    assert world.refused(3, world.reply(3, [0])).code == "not_held"


def test_a_restart_knows_what_waits_what_is_delayed_and_how_often_it_was_tried() -> None:
    world = pair()
    world.offer(2, credit=2)
    world.request(1, b"a", b"b", b"c", b"d")
    world.ack(2, [(0, 1)], WorkState.RETURNED)
    world.ack(2, [(1, 2)], WorkState.RETURNED, again_ms=5_000)
    world.shell.restart()
    world.worker(3, "bob")
    info = world.info(3)
    assert (info["waiting"], info["delayed"], info["held"]) == (3, 1, 0)
    world.offer(3)
    assert world.numbers(3) == [0, 2, 3], "what came back goes first"
    assert [task.work.attempts for task in world.work(3)] == [2, 1, 1]
    world.shell.wait(6_000)
    assert world.numbers(3) == [0, 2, 3, 1]


# --- the structures -------------------------------------------------------------------------------


def test_queues_of_subjects_do_not_gather_once_they_are_empty() -> None:
    world = pair()
    world.offer(2, credit=1 << 30)
    for n in range(40):
        world.request(1, *[b"x"] * 100, subjects=[f"{n}.{m}" for m in range(100)])
        world.ack(2, [(n * 100, n * 100 + 100)], WorkState.COMPLETED)
    assert len(world.service().by_subject) <= 1_024 + 100
    assert all(isinstance(queue, SubjectQueue) for queue in world.service().by_subject.values())


def test_what_was_to_wait_for_years_leaves_nothing_when_it_ends() -> None:
    world = World()
    world.client(1, "desk")
    world.worker(2, "ann")
    world.offer(2, lease_ms=1_000)
    timers = world.shell.broker._services._registry.timers
    for turn in range(100):
        world.request(1, b"work", key=b"%d" % turn, timeout_ms=(1 << 52) + turn * 1_000)
        number = world.numbers(2)[-1]
        again_ms = (1 << 51) + turn * 1_000
        world.ack(2, [(number, number + 1)], WorkState.RETURNED, again_ms=again_ms)
        assert world.info(1)["delayed"] == 1
        world.ask(1, wire.CancelRequest(5, "s", b"%d" % turn, -1))
        assert world.queued() == 0
    assert world.info(1)["delayed"] == 0
    assert len(timers) == 0


@pytest.mark.parametrize("late", [False, True])
def test_subjects_are_compared_with_expressions_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """A REQUEST of 1,024 subjects for 64 workers by expressions took one turn of 0.7 s."""
    world = World()
    world.client(1)
    world.worker(2)
    subjects = [f"{at}.{'ab'[at % 2]}" for at in range(1_024)]
    looks, most, take, match = [0], [0], Broker.take_ready, Index.match

    def taken(self: Broker) -> Any:
        most[0], looks[0] = max(most[0], looks[0]), 0
        return take(self)

    def matched(self: Index, keys: Any, fields: Any) -> Any:
        looks[0] += 1
        return match(self, keys, fields)

    def offers() -> None:
        world.offer(2, pattern=["regex", r"[0-9]+\.a"], number=1)
        world.offer(2, pattern=["regex", r"[0-9]+\.b"], number=2)

    if not late:
        offers()
    monkeypatch.setattr(Broker, "take_ready", taken)
    monkeypatch.setattr(Index, "match", matched)
    world.request(1, *[b"x"] * 1_024, subjects=subjects)
    if late:
        offers()
    assert 0 < most[0] <= 2 * SCANNED_AT_ONCE // SLOW_LOOK
    for number, kind in ((1, 0), (2, 1)):
        first = min(world.numbers(2, 1))
        held = sorted(at - first for at in world.numbers(2, number))
        assert held == [at for at in range(1_024) if at % 2 == kind][: len(held)]
        assert len(held) >= 500
    asked = wire.Request("s", 77, need_workers=True)
    many = [f"{5_000 + at}.a" for at in range(SLOW_SUBJECTS_MAX + 1)]
    world.shell.send(1, asked, frames=[encode([b"x"] * len(many), subject=many)])
    assert world.shell.peers[1].last(wire.Refused).code == "too_large"
    world.shell.send(1, asked, frames=[encode([b"x"] * 2, subject=["6000.a", "6000.c"])])
    assert world.shell.peers[1].last(wire.Refused).code == "no_workers"


def test_the_credit_of_a_service_is_what_its_offers_have_left_and_never_below_nothing() -> None:
    world = pair()
    world.offer(2, credit=-(1 << 63))
    world.offer(2, credit=-(1 << 63), number=2)
    world.offer(2, credit=7, number=3)
    assert world.info(1)["credit"] == 7
