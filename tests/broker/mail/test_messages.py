"""Messages: expiry, delay and priority, and the loss of bodies."""

from __future__ import annotations

import pytest

from malamute_protocol import commands as wire
from tests.broker.post import Post, code


def test_delivery_does_not_wait_for_the_disk() -> None:
    post = Post(sync=False)
    post.inbox(2)
    post.mail(1, "bert", [b"x"])
    post.sync()
    post.run()
    assert post.mail(1, "bert", [b"y"]) is None
    assert post.got(2) == [b"x", b"y"]


def test_an_expired_message_is_not_delivered_and_leaves_by_itself() -> None:
    post = Post()
    soon, late = post.now_ms + 1_000, post.now_ms + 5_000
    post.mail(1, "bert", [b"a", b"b", b"c"], expires_at_ms=[soon, 0, late])
    post.mail(1, "bert", [b"d"], expires_at_ms=soon)
    post.wait(1_000)
    assert post.info("bert")["messages"] == 2
    assert post.count("mail_expired") == 2
    assert post.told("mail_expired") == [{"mailbox": "bert", "count": 2}]
    post.restart()
    assert post.info("bert")["messages"] == 2
    post.wait(4_000)
    post.inbox(2)
    assert post.got(2) == [b"b"]


def test_events_about_expiry_do_not_flood_the_log() -> None:
    post = Post()
    for number in range(30):
        post.mail(1, "bert", [b"x"], expires_at_ms=post.now_ms + 100 + number)
    for _ in range(40):
        post.wait(10)
    assert post.count("mail_expired") == 30
    assert len(post.told("mail_expired")) == 1
    post.mail(1, "bert", [b"x"], expires_at_ms=post.now_ms + 12_000)
    for _ in range(3):
        post.wait(4_000)
        post.send(1, wire.Ping())
    told = post.told("mail_expired")
    assert (len(told), sum(facts["count"] for facts in told)) == (2, 31)


def test_an_expired_message_is_not_delivered_even_before_the_timer() -> None:
    post = Post()
    post.mail(1, "bert", [b"a", b"b"], expires_at_ms=[post.now_ms + 10, 0])
    post.now_ms += 10
    post.inbox(2)
    assert post.got(2) == [b"b"]
    post.wait(0)
    assert post.info("bert")["messages"] == 1


def test_messages_without_an_expiry_have_their_mailboxs() -> None:
    post = Post()
    post.ask(1, wire.EditMailbox, "bert", {"ttl_ms": 1_000})
    post.mail(1, "bert", [b"a"])
    post.mail(1, "bert", [b"b", b"c"], expires_at_ms=[post.now_ms + 3_000, 0])
    post.wait(1_000)
    post.inbox(2)
    assert post.got(2) == [b"b"]


def test_mail_that_was_put_while_the_clock_was_a_day_ahead_lives_no_day_longer() -> None:
    """A time of expiry that a message names holds as it is."""
    post, day_ms = Post(), 86_400_000
    post.ask(1, wire.EditMailbox, "bert", {"ttl_ms": 5_000})
    named = post.now_ms + 60_000
    post.now_ms += day_ms
    post.mail(1, "bert", [b"a"])
    post.mail(1, "bert", [b"b", b"c"], expires_at_ms=[named + day_ms, 0])
    post.now_ms -= day_ms
    post.restart()
    post.wait(4_900)
    assert post.info("bert")["messages"] == 3
    post.wait(200)
    assert post.info("bert")["messages"] == 1
    assert post.count("mail_expired") == 2
    post.wait(day_ms + 60_000)
    assert post.count("mail_expired") == 3


def test_a_message_that_a_reader_holds_stays_with_it_when_it_expires() -> None:
    post = Post()
    post.inbox(2)
    post.mail(1, "bert", [b"a", b"b"], expires_at_ms=post.now_ms + 100)
    post.wait(1_000)
    assert code(post.ack(2, (0, 1))) == "Confirm"
    post.lose(2)
    post.wait(0)
    assert post.info("bert")["messages"] == 0
    assert post.count("mail_expired") == 1


def test_many_rows_of_one_batch_expire_each_at_its_time() -> None:
    post = Post()
    count = 200
    expiries = [0 if row % 3 == 0 else post.now_ms + 10 * row for row in range(count)]
    post.mail(1, "bert", [b"%d" % row for row in range(count)], expires_at_ms=expiries)
    post.wait(1_000)
    kept = [row for row in range(count) if not expiries[row] or row > 100]
    assert post.info("bert")["messages"] == len(kept)
    post.inbox(2)
    assert post.numbers(2) == kept
    post.lose(2)
    post.wait(1_000)
    assert post.info("bert")["messages"] == (count + 2) // 3
    post.restart()
    post.inbox(2)
    assert post.numbers(2) == list(range(0, count, 3))


def test_an_expiry_that_the_journal_refuses_comes_again() -> None:
    post = Post()
    post.mail(1, "bert", [b"a"], expires_at_ms=post.now_ms + 100)
    post.refuse["main"] = ("disk_full", "no space")
    post.wait(100)
    assert post.info("bert")["messages"] == 1
    del post.refuse["main"]
    post.inbox(2)
    assert post.got(2) == []
    post.wait(2_000)
    assert post.info("bert")["messages"] == 0


def test_mail_is_delivered_when_it_is_due_and_not_before() -> None:
    post = Post()
    post.inbox(2)
    post.mail(1, "bert", [b"later"], deliver_at_ms=post.now_ms + 1_000)
    post.mail(1, "bert", [b"at once"])
    assert post.info("bert")["delayed"] == 1
    assert post.got(2) == [b"at once"]
    post.wait(999)
    assert post.got(2) == [b"at once"]
    post.wait(1)
    assert post.got(2) == [b"at once", b"later"]
    assert post.info("bert")["delayed"] == 0


def test_a_delay_survives_a_restart() -> None:
    post = Post()
    post.mail(1, "bert", [b"later"], deliver_at_ms=post.now_ms + 1_000)
    post.restart()
    post.inbox(2)
    assert post.got(2) == []
    post.wait(1_000)
    assert post.got(2) == [b"later"]


def test_higher_priority_goes_first_and_within_one_the_older() -> None:
    post = Post()
    for priority, body in ((0, b"c"), (-5, b"e"), (9, b"b"), (0, b"d"), (100, b"a")):
        post.mail(1, "bert", [body], priority=priority)
    post.inbox(2)
    assert post.got(2) == [b"a", b"b", b"c", b"d", b"e"]
    post.lose(2)
    post.restart()
    post.inbox(2)
    assert post.got(2) == [b"a", b"b", b"c", b"d", b"e"]


def test_mail_in_memory_expires_and_is_accepted_once() -> None:
    post = Post()
    post.ask(1, wire.EditMailbox, "quick", {"memory": True})
    first = post.mail(1, "quick", [b"a"], expires_at_ms=post.now_ms + 100, key=b"k")
    again = post.mail(1, "quick", [b"a"], expires_at_ms=post.now_ms + 100, key=b"k")
    assert (again.offset, again.duplicate) == (first.offset, True)
    post.wait(100)
    assert post.info("quick")["messages"] == 0
    assert post.broker.gauges["mail_memory_bytes"] == 0


def test_a_message_that_expired_while_it_was_held_leaves_when_it_is_freed() -> None:
    post = Post()
    post.inbox(2, records=1)
    now_ms = post.now_ms
    post.mail(1, "bert", [b"a", b"b"], expires_at_ms=[now_ms + 100, now_ms + 10_000_000])
    assert post.got(2) == [b"a"]
    post.wait(200)
    assert post.info("bert")["messages"] == 2
    post.lose(2)
    post.wait(1)
    assert post.info("bert")["messages"] == 1


@pytest.mark.parametrize("again_ms", [0, 5_000])
def test_a_message_that_expired_while_it_was_held_does_not_wait_to_be_delivered_again(
    again_ms: int,
) -> None:
    post = Post()
    post.inbox(2, records=1)
    post.mail(1, "bert", [b"a"], expires_at_ms=post.now_ms + 100)
    post.wait(200)
    assert code(post.ack(2, (0, 1), again_ms=again_ms)) == "Confirm"
    post.wait(1)
    assert (post.info("bert")["messages"], post.info("bert")["delayed"]) == (0, 0)


@pytest.mark.parametrize("rows", [2, 100])
def test_an_expiry_before_the_beginning_of_time_has_passed(rows: int) -> None:
    post = Post()
    post.inbox(2)
    post.mail(1, "bert", [b"a"] * rows, expires_at_ms=[-5, 0] * (rows // 2))
    assert post.numbers(2) == list(range(1, rows, 2))
    post.wait(1)
    assert post.info("bert")["messages"] == rows // 2


def test_mail_is_due_and_over_at_the_very_time_that_it_names() -> None:
    post = Post()
    post.inbox(2)
    now_ms = post.now_ms
    post.mail(1, "bert", [b"late"], deliver_at_ms=now_ms + 100)
    post.mail(1, "bert", [b"now"], deliver_at_ms=now_ms)
    post.mail(1, "bert", [b"over"], expires_at_ms=now_ms)
    assert post.got(2) == [b"now"]
    post.wait(99)
    assert post.got(2) == [b"now"]
    post.mail(1, "carla", [b"x"], expires_at_ms=now_ms + 100)
    post.wait(1)
    assert post.got(2) == [b"now", b"late"]
    post.inbox(3)
    assert post.got(3) == []


def test_a_lost_batch_is_removed_once_even_when_the_journal_is_full() -> None:
    post = Post(mail_hot_bytes=1)
    post.mail(1, "bert", [b"a"])
    post.mail(1, "bert", [b"b"])
    del post.rings["main"][0]
    post.refuse["main"] = ("disk_full", "no space")
    post.inbox(2)
    assert post.count("mail_lost") == 1
    assert post.got(2) == [b"b"]
    post.refuse.clear()
    post.wait(2_000)
    assert (post.count("mail_lost"), post.info("bert")["messages"]) == (2, 1)
