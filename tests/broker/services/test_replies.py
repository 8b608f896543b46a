"""REPLY and ACK_WORK: what a worker may say of a request, and what comes of it."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import WorkState
from malamute_protocol.encode import encode
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.broker.limits import Namespace, Quota
from malamute_py.broker.links import links
from tests.broker.service_world import INBOX, MANY, World, letters, pair

STORED = int(wire.Level.STORED)


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


def of_two(**settings: Any) -> World:
    """A worker (link 2) that holds requests of `req` (0, 2) and `bob` (1), for one mailbox."""
    world = World(**settings)
    world.client(1, "req")
    world.worker(2, "ann")
    world.client(3, "bob")
    world.offer(2)
    for link, key in ((1, b"k"), (3, b"l"), (1, b"m")):
        world.request(link, b"a", reply_to="shared", key=key)
    return world


def mail_bytes(world: World) -> tuple[int, int]:
    """Bytes in mailboxes, on disk or in memory, that count on `req` and on `bob`."""
    held = [world.shell.broker._shard.quotas.of(name).held for name in ("req", "bob")]
    req, bob = (each["mail_bytes"] + each["mail_memory_bytes"] for each in held)
    return req, bob


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("memory", [False, True])
def test_each_requester_has_its_own_replies_on_its_quota(memory: bool, last: bool) -> None:
    world = of_two()
    world.shell.send(1, wire.EditMailbox(5, "shared", {"memory": memory}))
    world.confirmed(2, world.reply(2, [0, 1, 2], last=last, bodies=[b"x", b"y" * 5_000, b"z"]))
    few, many = mail_bytes(world)
    assert 0 < few < 1_000 < 5_000 < many < 6_000
    got = letters(world, 1, "shared")
    assert [letter.body for letter in got] == [b"x", b"z", b"y" * 5_000]
    assert [letter.mail.about for letter in got] == [
        [(b"k", 0, 1), (b"m", 0, 1)], [(b"k", 0, 1), (b"m", 0, 1)], [(b"l", 0, 1)],
    ]  # fmt: skip
    assert {letter.mail.last for letter in got} == {last}
    assert world.info(1)["held"] == (0 if last else 3)
    numbers = [letter.number for letter in got]
    world.shell.send(1, wire.AckMail(50, [(min(numbers), max(numbers) + 1)], 99))
    assert mail_bytes(world) == (0, 0)


def test_each_requester_is_told_which_of_its_requests_are_answered() -> None:
    world = World()
    world.client(1, "req")
    world.worker(2, "ann")
    world.client(3, "bob")
    world.offer(2)
    world.request(1, b"a", b"b", b"c", reply_to="shared", key=b"k")
    world.request(3, b"d", b"e", reply_to="shared", key=b"l")
    first = world.numbers(2)[0]
    order = [first + row for row in (2, 3, 0, 4, 1)]  # of bob: 3 and 4
    world.confirmed(2, world.reply(2, order, bodies=[b"c", b"d", b"a", b"e", b"b"]))
    mails = {id(letter.mail): letter for letter in letters(world, 1, "shared")}.values()
    assert [letter.mail.about for letter in mails] == [[(b"k", 2, 1), (b"k", 0, 2)], [(b"l", 0, 2)]]
    assert [letter.body for letter in letters(world, 1, "shared")] == [b"c", b"a", b"b", b"d", b"e"]


def test_a_reply_beyond_the_quota_of_one_of_its_requesters_does_nothing() -> None:
    world = of_two(quota=lambda name: Quota(mail_bytes=2_000) if name == "bob" else Quota())
    large = [b"x", b"y" * 5_000, b"z"]
    assert world.refused(2, world.reply(2, [0, 1, 2], bodies=large)).code == "limit"
    assert mail_bytes(world) == (0, 0)
    assert world.info(1)["held"] == 3
    world.confirmed(2, world.reply(2, [1, 0, 2], bodies=large))
    assert mail_bytes(world) > (5_000, 0)


def test_replies_to_several_requesters_are_within_the_bounds_of_their_mailbox() -> None:
    world = of_two()
    world.shell.send(1, wire.EditMailbox(5, "shared", {"max_messages": 2}))
    assert world.refused(2, world.reply(2, [0, 1, 2])).code == "limit"
    world.confirmed(2, world.reply(2, [0, 1]))
    assert world.refused(2, world.reply(2, [2])).code == "wait"


def test_replies_to_several_requesters_keep_their_expiries() -> None:
    world = of_two()
    soon = world.shell.now_ms + 1_000
    frame = encode([b"x", b"y", b"z"], subject="reply", expires_at_ms=[soon, 0, 0])
    world.shell.send(2, wire.Reply(1, [0, 1, 2], 77), frames=[frame])
    world.shell.wait(2_000)
    assert [letter.body for letter in letters(world, 1, "shared")] == [b"z", b"y"]


def test_replies_of_several_requesters_take_what_their_copies_take_in_the_mailbox() -> None:
    world = of_two()
    world.shell.send(1, wire.EditMailbox(5, "shared", {"max_bytes": 650}))
    whole = STAMP_BYTES + len(encode([b"re: 0", b"re: 1"], subject="reply"))
    assert 2 * whole < 650, "one batch would fit beside the first reply, as each part does"
    world.confirmed(2, world.reply(2, [0]))
    assert world.refused(2, world.reply(2, [1, 2])).code == "wait"
    world.confirmed(2, world.reply(2, [1]))


def test_requesters_of_a_namespace_have_no_more_by_one_reply_than_it_may() -> None:
    namespace = Namespace(name="acme", prefix="", quota=Quota(mail_bytes=12_000))
    world = of_two(
        namespaces=(namespace,),
        namespace_of=lambda owner: namespace if owner in ("req", "bob") else None,
    )
    large = [b"x" * 7_000, b"y" * 7_000]
    assert world.refused(2, world.reply(2, [0, 1], bodies=large)).code == "limit"
    assert mail_bytes(world) == (0, 0)
    assert world.info(1)["held"] == 3
    world.confirmed(2, world.reply(2, [0], bodies=large[:1]))
    refused = world.refused(2, world.reply(2, [1, 2], bodies=[b"x" * 3_000] * 2))
    assert refused.code == "wait"
    assert "acme" in refused.reason
    assert world.info(1)["held"] == 2


def test_replies_that_cannot_be_divided_go_to_one_requester() -> None:
    """A client divides what is `too_large`, also one that knows nothing of senders."""
    world = of_two()
    frame = encode([b"x" * 500, b"y" * 500], subject="reply", codec="zstd")
    refused = world.shell.send(2, wire.Reply(1, [0, 1], 77), frames=[frame]).last(wire.Refused)
    assert (refused.reference, refused.code) == (77, "too_large")
    world.shell.send(2, wire.Reply(1, [0, 2], 78), frames=[frame])
    assert world.confirmed(2, 78).tracker == 78


def test_one_reply_goes_to_a_bounded_number_of_requesters() -> None:
    world = World()
    world.worker(2, "ann")
    world.offer(2)
    for link in range(10, 75):
        world.client(link, f"req{link}")
        world.request(link, b"a", reply_to="shared")
    assert world.refused(2, world.reply(2, range(65))).code == "too_large"
    world.confirmed(2, world.reply(2, range(64)))
    world.confirmed(2, world.reply(2, [64]))


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
