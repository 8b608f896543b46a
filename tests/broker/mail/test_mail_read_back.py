"""Mail whose bodies are not in memory: read back, in order, once, within the credit."""

from __future__ import annotations

import pytest

from malamute_protocol import commands as wire
from malamute_py.broker.ready import BodiesFound
from tests.broker.mail.test_inboxes import code
from tests.broker.post import Post


def test_bodies_that_are_not_in_memory_are_read_back_and_keep_their_order() -> None:
    post = Post(mail_hot_bytes=3_000)
    bodies = [b"%d" % number * 100 for number in range(50)]
    for body in bodies:
        post.mail(1, "bert", [body])
    post.inbox(2)
    assert post.got(2) == bodies
    assert any(mail.frames == 1 for mail in post.peers[2].of(wire.Mail))
    assert post.peers[2].last(wire.Mail).frames == 2, "the newest were in memory"


def test_a_reader_with_little_credit_reads_a_batch_once() -> None:
    post = Post(mail_hot_bytes=100_000)
    bodies = [b"%d" % number * 100 for number in range(30)]
    post.mail(1, "bert", bodies)
    post.restart()
    post.inbox(2, records=2, size=1 << 20)
    for number in range(0, 30, 2):
        post.ack(2, (number, number + 2))
        post.credit(2, 7, number + 4, 1 << 20)
    assert post.got(2) == bodies
    assert post.count("mail_reads") == 1


def test_reads_at_one_time_are_bounded() -> None:
    post = Post(
        mail_hot_bytes=1, inbox_reads=4, read=False, mail_reads_max=2, mail_read_bytes=1_000
    )
    for number in range(20):
        post.mail(1, "bert", [b"%d" % number * 10])
    post.inbox(2)
    asked = [number for read in post.bodies for number in read.numbers]
    assert len(post.bodies) <= 2
    assert 1 <= len(asked) <= 4
    assert post.got(2) == []
    while post.bodies:
        post.answer_bodies()
        post.run()
    assert len(post.got(2)) == 20


def test_two_readers_of_one_batch_and_a_peek_share_a_read() -> None:
    post = Post(mail_hot_bytes=1, read=False)
    post.mail(1, "desk", [b"a", b"b", b"c"])
    post.mail(1, "other", [b"z"])
    post.inbox(2, mailbox="desk", records=1, size=1 << 20)
    post.inbox(3, mailbox="desk")
    post.send(1, wire.PeekMail(900, "desk", -1, 10, 10))
    assert [read.numbers for read in post.bodies] == [(0,)]
    post.answer_bodies()
    post.run()
    assert post.got(2) == [b"a"]
    assert post.got(3) == [b"b", b"c"]
    (result,) = post.peers[1].of(wire.Result)
    assert [message["body"] for message in result.value["messages"]] == [b"a", b"b", b"c"]


def test_a_reader_that_ended_before_its_mail_was_read_leaves_it_to_the_next() -> None:
    post = Post(mail_hot_bytes=1, read=False)
    post.mail(1, "bert", [b"a"])
    post.mail(1, "other", [b"z"])
    post.inbox(2)
    assert len(post.bodies) == 1
    post.lose(2)
    post.hello(4, identity="bert")
    post.inbox(4)
    post.answer_bodies()
    post.run()
    assert post.got(4) == [b"a"]


def test_a_message_that_was_not_sent_yet_cannot_be_acknowledged() -> None:
    post = Post(mail_hot_bytes=1, read=False)
    post.mail(1, "bert", [b"a"])
    post.mail(1, "other", [b"z"])
    post.inbox(2)
    assert code(post.ack(2, (0, 1))) == "not_held"
    post.answer_bodies()
    post.run()
    assert code(post.ack(2, (0, 1))) == "Confirm"


def test_a_message_that_is_still_read_back_is_in_nobodys_hand() -> None:
    """A reader that asked meanwhile took it for another's, and that there was none for it."""
    post = Post(mail_hot_bytes=1, read=False)
    post.mail(1, "bert", [b"a", b"b"])
    post.mail(1, "other", [b"z"])
    post.inbox(2)
    assert (post.info("bert")["messages"], post.info("bert")["held"]) == (2, 0)
    post.answer_bodies()
    post.run()
    assert post.info("bert")["held"] == 2


def test_a_message_that_expires_while_its_body_is_read_is_not_delivered() -> None:
    post = Post(mail_hot_bytes=1, read=False)
    post.mail(1, "bert", [b"a", b"b"], expires_at_ms=[post.now_ms + 10, 0])
    post.mail(1, "other", [b"z"])
    post.inbox(2)
    post.now_ms += 10
    post.broker.tick(post.now_ms)
    post.answer_bodies()
    post.run()
    assert post.got(2) == [b"b"]
    post.wait(0)
    assert post.info("bert")["messages"] == 1


def test_a_batch_that_is_lost_is_removed_and_reported() -> None:
    post = Post(mail_hot_bytes=1, read=False)
    post.mail(1, "bert", [b"a", b"b"])
    post.mail(1, "bert", [b"c"])
    post.inbox(2)
    (read,) = post.bodies
    post.bodies.clear()
    post.broker.bodies(BodiesFound(read.token, {}))
    post.run()
    assert post.got(2) == [b"c"]
    assert post.count("mail_lost") == 2
    assert post.told("mail_lost")[0]["mailbox"] == "bert"
    assert post.info("bert")["messages"] == 1


def test_a_read_that_fails_is_tried_again() -> None:
    post = Post(mail_hot_bytes=1, read=False)
    post.mail(1, "bert", [b"a", b"b"])
    post.mail(1, "other", [b"z"])
    post.inbox(2)
    (read,) = post.bodies
    post.bodies.clear()
    post.broker.bodies(BodiesFound(read.token, {}, failed="the disk does not answer"))
    post.run()
    assert post.got(2) == []
    assert post.told("mail_read_failed")[0]["reason"] == "the disk does not answer"
    post.wait(1_000)
    post.answer_bodies()
    post.run()
    assert post.got(2) == [b"a", b"b"]
    assert post.info("bert")["delayed"] == 0


def test_a_read_that_fails_before_an_earlier_batch_came_is_tried_again() -> None:
    """It took the mail for lost, and removed it: no read was failing when its turn came."""
    post = Post(mail_hot_bytes=1, read=False, mail_read_bytes=16_000)
    bodies = [b"a" * 3_000, b"b" * 3_000]
    for body in bodies:
        post.mail(1, "bert", [body])
    post.mail(1, "other", [b"z"])
    post.inbox(2)
    first, second = post.bodies
    post.bodies.clear()
    post.broker.bodies(BodiesFound(second.token, {}, failed="the disk does not answer"))
    post.run()
    post.bodies.append(first)
    post.answer_bodies()
    post.run()
    assert post.count("mail_lost") == 0
    assert post.told("mail_read_failed")[0]["reason"] == "the disk does not answer"
    post.wait(1_000)
    post.answer_bodies()
    post.run()
    assert post.got(2) == bodies


def test_a_damaged_batch_is_reported_and_removed() -> None:
    post = Post(mail_hot_bytes=1, read=False)
    post.mail(1, "bert", [b"a"])
    post.mail(1, "other", [b"z"])
    post.inbox(2)
    (read,) = post.bodies
    post.bodies.clear()
    post.broker.bodies(BodiesFound(read.token, {0: bytes(400)}))
    post.run()
    assert post.count("mail_lost") == 1
    assert post.told("mail_damaged")[0]["number"] == 0


def test_memory_holds_no_bodies_beyond_the_window() -> None:
    post = Post(mail_hot_bytes=20_000)
    for _ in range(200):
        post.mail(1, "bert", [bytes(1_000)])
    assert post.broker.gauges["mail_hot_bytes"] <= 20_000
    assert post.broker.gauges["mail_messages"] == 200
    post.inbox(2)
    assert len(post.got(2)) == 200
    post.ack(2, (0, 200))
    assert post.broker.gauges["mail_hot_bytes"] == 0
    assert post.broker.gauges["mail_bytes"] == 0


@pytest.mark.parametrize("hot", [1, 1 << 20])
def test_credit_in_bytes_is_exact_whether_mail_is_in_memory_or_read_back(hot: int) -> None:
    post = Post(mail_hot_bytes=hot)
    for number in range(6):
        post.mail(1, "bert", [b"%d" % number * 100])
    size = post.info("bert")["bytes"] // 6
    post.inbox(2, size=2 * size)
    assert post.numbers(2) == [0, 1]
    post.credit(2, 7, 1 << 40, 3 * size - 1)
    assert post.numbers(2) == [0, 1]
    post.credit(2, 7, 1 << 40, 4 * size)
    assert post.numbers(2) == [0, 1, 2, 3]
    assert code(post.ack(2, (0, 3))) == "Confirm"
    assert post.numbers(2) == [0, 1, 2, 3], "what was acknowledged gives no credit back"
    post.credit(2, 7, 1 << 40, 5 * size)
    assert post.numbers(2) == [0, 1, 2, 3, 4]
    assert code(post.ack(2, (3, 5))) == "Confirm"
    assert post.numbers(2) == [0, 1, 2, 3, 4, 5], "one is always allowed"


@pytest.mark.parametrize("hot", [1, 1 << 20])
def test_deliveries_never_exceed_the_credit_in_bytes(hot: int) -> None:
    post = Post(mail_hot_bytes=hot, extract_bytes_min=1 << 20)
    post.mail(1, "bert", [bytes(1_000)] * 8)
    whole = post.info("bert")["bytes"]
    post.inbox(2, records=1, size=1)
    assert post.numbers(2) == [0], "one is always allowed"
    allowed = whole - 1
    post.credit(2, 7, 9, allowed)
    sent = sum(
        sum(len(memoryview(frame)) for frame in send.frames)
        for ready in post.readies for send in ready.sends if send.link == 2
    )  # fmt: skip
    assert whole // 2 < sent <= allowed, "few rows of a batch that would not fit are extracted"
    assert 1 < len(post.numbers(2)) < 8
