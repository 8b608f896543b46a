"""Inboxes: which reader gets a message, under what credit, and when it comes back."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.broker.mail import inboxes
from tests.broker.post import Post


def code(answer: Any) -> str:
    return answer.code if isinstance(answer, wire.Refused) else type(answer).__name__


def batch_bytes(bodies: list[bytes], **options: Any) -> int:
    return len(encode(bodies, subject="s", **options)) + STAMP_BYTES


# --- readers ------------------------------------------------------------------------------------


def test_several_readers_share_a_mailbox_each_message_to_one() -> None:
    post = Post()
    post.inbox(2, mailbox="desk")
    post.inbox(3, mailbox="desk")
    for number in range(10):
        post.mail(1, "desk", [b"%d" % number])
    assert len(post.got(2)) == len(post.got(3)) == 5
    assert sorted(post.numbers(2) + post.numbers(3)) == list(range(10))


def test_a_reader_without_credit_does_not_hold_the_others_up() -> None:
    post = Post()
    post.inbox(2, mailbox="desk", records=1, size=1 << 20)
    post.inbox(3, mailbox="desk")
    for number in range(6):
        post.mail(1, "desk", [b"%d" % number])
    assert len(post.got(2)) == 1
    assert len(post.got(3)) == 5


def test_one_client_reads_several_mailboxes_and_one_mailbox_several_times() -> None:
    post = Post()
    post.inbox(2, 1, "one")
    post.inbox(2, 2, "two")
    post.inbox(2, 3, "two")
    post.mail(1, "one", [b"a"])
    post.mail(1, "two", [b"b"])
    post.mail(1, "two", [b"c"])
    assert post.got(2, 1) == [b"a"]
    assert sorted(post.got(2, 2) + post.got(2, 3)) == [b"b", b"c"]
    assert post.info("two")["readers"] == 2


def test_the_count_of_inboxes_has_a_bound() -> None:
    post = Post(link_subscriptions_max=2, subscriptions_max=3)
    for link, number, expected in ((2, 1, 0), (2, 2, 0), (2, 3, 1), (3, 1, 1), (3, 2, 2)):
        post.inbox(link, number, "box")
        refused = [
            command
            for peer in post.peers.values()
            for command in peer.of(wire.Refused)
            if command.code == "limit"
        ]
        assert len(refused) == expected


def test_an_inbox_of_a_mailbox_that_is_not_there_creates_it_with_its_settings() -> None:
    post = Post()
    post.inbox(2, mailbox="box", max_messages=1)
    assert post.info("box")["settings"]["max_messages"] == 1
    post.mail(1, "box", [b"x"])
    assert post.got(2) == [b"x"]
    post.inbox(3, mailbox="new", nonsense=1)
    assert post.peers[3].last(wire.Refused).code == "bad_setting"
    post.refuse["main"] = ("disk_full", "no space")
    post.inbox(3, mailbox="new")
    assert post.peers[3].last(wire.Refused).code == "disk_full"
    del post.refuse["main"]
    assert code(post.info("new")) == "unknown_mailbox"
    post.inbox(3, mailbox="new")
    assert post.peers[3].last(wire.Subscribed).subscription == 7


def test_mail_that_comes_while_the_mailbox_is_being_created_is_delivered() -> None:
    post = Post()
    frame = encode([b"x"], subject="s")
    post.send(
        2, wire.OpenInbox(7, "box"), wire.Credit(7, 10, 1 << 20), wire.Send("box", 1),
        frames=[frame],
    )  # fmt: skip
    assert post.got(2) == [b"x"]


# --- credit --------------------------------------------------------------------------------------


def test_credit_in_records_is_exact() -> None:
    post = Post()
    post.inbox(2, records=5, size=1 << 20)
    post.mail(1, "bert", [b"%d" % number for number in range(8)])
    assert post.got(2) == [b"0", b"1", b"2", b"3", b"4"]
    mail = post.peers[2].last(wire.Mail)
    assert mail.rows == b"\x1f"
    post.credit(2, 7, 6, 1 << 20)
    assert post.got(2)[5:] == [b"5"]
    post.credit(2, 7, 3, 1 << 20)
    assert len(post.got(2)) == 6, "credit never falls"
    post.credit(2, 7, 100, 1 << 20)
    assert post.got(2) == [b"%d" % number for number in range(8)]


def test_credit_in_bytes_is_exact_and_one_message_is_always_allowed() -> None:
    post = Post()
    size = batch_bytes([bytes(100)])
    post.inbox(2, records=100, size=2 * size + 1)
    for _ in range(4):
        post.mail(1, "bert", [bytes(100)])
    assert len(post.got(2)) == 2
    post.ack(2, (0, 1))
    assert len(post.got(2)) == 2, "one is outstanding, and the next does not fit"
    post.ack(2, (1, 2))
    assert len(post.got(2)) == 3, "one is allowed: credit in records is left"
    post.ack(2, (2, 3))
    assert len(post.got(2)) == 4


def test_without_any_credit_nothing_is_delivered() -> None:
    post = Post()
    post.inbox(2, records=0, size=0)
    post.mail(1, "bert", [b"x"])
    assert post.got(2) == []
    post.credit(2, 7, 0, 1)
    assert post.got(2) == [b"x"]


def test_the_rows_of_a_batch_that_fit_the_credit_are_delivered() -> None:
    post = Post()
    bodies = [bytes([number]) * 1_000 for number in range(10)]
    few = batch_bytes(bodies[:3], offset_deltas=[0, 1, 2])
    post.inbox(2, records=100, size=few)
    post.mail(1, "bert", bodies)
    assert post.got(2) == bodies[:3]
    post.ack(2, (0, 3))
    assert post.got(2) == bodies[:4]
    post.credit(2, 7, 100, 1 << 20)
    assert post.got(2) == bodies


def test_few_rows_of_a_large_batch_are_extracted() -> None:
    post = Post()
    post.inbox(2, records=1, size=1 << 20)
    bodies = [bytes([number]) * 1_000 for number in range(20)]
    post.mail(1, "bert", bodies)
    assert post.got(2) == bodies[:1]
    assert post.peers[2].last(wire.Mail).rows is None
    post.credit(2, 7, 20, 1 << 20)
    assert post.got(2) == bodies
    assert post.peers[2].last(wire.Mail).rows == (0xFFFFE).to_bytes(3, "little")
    assert post.numbers(2) == list(range(20))


def test_a_peer_that_does_not_read_is_given_no_more() -> None:
    post = Post(share_min_bytes=4_000, share_max_bytes=4_000, outstanding_bytes=4_000)
    post.inbox(2)
    for _ in range(20):
        post.mail(1, "bert", [bytes(1_000)])
    some = len(post.got(2))
    assert 1 <= some < 20
    while post.peers[2].of(wire.Ping):
        token = post.peers[2].last(wire.Ping).token
        post.peers[2].commands.clear()
        post.send(2, wire.Pong(token))
    assert len(post.got(2)) == 20


def test_a_blocked_link_is_given_nothing_until_it_takes_again() -> None:
    post = Post()
    post.inbox(2)
    post.broker.blocked(2)
    post.mail(1, "bert", [b"x"])
    assert post.got(2) == []
    post.broker.writable(2)
    post.run()
    assert post.got(2) == [b"x"]


# --- acknowledging --------------------------------------------------------------------------------


def test_ranges_reach_over_batches_and_into_them() -> None:
    post = Post()
    post.inbox(2)
    for _ in range(3):
        post.mail(1, "bert", [b"a", b"b", b"c", b"d"])
    assert code(post.ack(2, (2, 6), (7, 9), (11, 12))) == "Confirm"
    info = post.info("bert")
    assert (info["messages"], info["held"]) == (5, 5)
    post.restart()
    post.inbox(2)
    assert post.numbers(2) == [0, 1, 6, 9, 10]


@pytest.mark.parametrize(
    "ranges",
    [
        [(3, 5)],
        [(5, 6)],
        [(0, 1), (8, 9)],
        [(0, 1 << 20)],
    ],
)
def test_an_acknowledgement_of_a_message_that_is_not_held_is_refused_whole(
    ranges: list[Any],
) -> None:
    post = Post()
    post.inbox(2)
    post.mail(1, "bert", [b"a", b"b", b"c", b"d"])
    post.mail(1, "carla", [b"e", b"f"])
    post.mail(1, "bert", [b"g", b"h"])
    assert code(post.ack(2, *ranges)) == "not_held"
    assert post.info("bert")["messages"] == 6
    assert code(post.ack(2, (0, 4), (6, 8))) == "Confirm"
    assert post.info("bert")["messages"] == 0


def test_a_message_is_acknowledged_once_and_by_its_holder() -> None:
    post = Post()
    post.inbox(2, mailbox="desk")
    post.mail(1, "desk", [b"a", b"b"])
    post.inbox(3, mailbox="desk")
    assert code(post.ack(3, (0, 1))) == "not_held"
    assert code(post.ack(2, (0, 1))) == "Confirm"
    assert code(post.ack(2, (0, 1))) == "not_held"
    assert code(post.ack(2, (0, 2))) == "not_held"
    assert code(post.ack(2, (1, 2), number=8)) == "unknown_subscription"
    assert code(post.ack(2, (1, 2))) == "Confirm"


def test_an_acknowledgement_is_confirmed_at_its_level() -> None:
    post = Post()
    post.inbox(2)
    post.mail(1, "bert", [b"a", b"b"])
    post.auto_sync = False
    assert post.ack(2, (0, 1)) is None
    assert post.ack(2, (1, 2), level=int(wire.Level.STORED)).level == wire.Level.STORED
    post.restart(power_loss=True)
    post.inbox(2)
    assert post.got(2) == [b"a", b"b"], "neither was synced"


def test_a_refused_append_gives_the_message_back_into_its_holders_hands() -> None:
    post = Post()
    post.inbox(2)
    post.mail(1, "bert", [b"a", b"b"])
    post.refuse["main"] = ("disk_full", "no space")
    assert code(post.ack(2, (0, 1))) == "disk_full"
    assert code(post.ack(2, (0, 1), again_ms=0)) == "disk_full"
    del post.refuse["main"]
    assert post.got(2) == [b"a", b"b"]
    assert post.info("bert")["held"] == 2
    assert code(post.ack(2, (0, 1))) == "Confirm"
    assert post.info("bert")["messages"] == post.info("bert")["held"] == 1


def test_an_acknowledgement_on_its_way_when_its_link_ends_counts() -> None:
    post = Post()
    post.inbox(2)
    post.mail(1, "bert", [b"a", b"b"])
    post.broker.receive(2, "", [wire.AckMail(7, [(0, 1)])], [], post.now_ms)
    post.lose(2)
    post.hello(4, identity="bert")
    post.inbox(4)
    assert post.got(4) == [b"b"]


def test_an_acknowledgement_that_is_refused_after_its_link_ended_frees_the_message() -> None:
    post = Post()
    post.inbox(2)
    post.mail(1, "bert", [b"a", b"b"])
    post.refuse["main"] = ("disk_full", "no space")
    post.broker.receive(2, "", [wire.AckMail(7, [(0, 1)])], [], post.now_ms)
    post.lose(2)
    del post.refuse["main"]
    post.hello(4, identity="bert")
    post.inbox(4)
    assert post.got(4) == [b"a", b"b"]
    assert post.info("bert")["held"] == 2


# --- again ----------------------------------------------------------------------------------------


def test_a_message_may_be_wanted_again_at_once_or_later() -> None:
    post = Post()
    post.inbox(2)
    post.mail(1, "bert", [b"a", b"b", b"c"])
    post.ack(2, (1, 2), again_ms=0)
    assert post.got(2) == [b"a", b"b", b"c", b"b"]
    assert post.letters(2)[-1].mail.attempts == 2
    post.ack(2, (1, 2), again_ms=1_000)
    assert post.info("bert")["delayed"] == 1
    post.wait(999)
    assert len(post.got(2)) == 4
    post.wait(1)
    assert post.got(2)[4:] == [b"b"]
    assert post.letters(2)[-1].mail.attempts == 3
    assert post.count("mail_again") == 2


def test_a_message_given_back_for_later_delays_no_other_also_after_a_restart() -> None:
    post = Post()
    post.inbox(2)
    post.mail(1, "bert", [b"a", b"b", b"c"])
    post.ack(2, (1, 2), again_ms=60_000)
    post.restart()
    post.inbox(2)
    assert post.got(2) == [b"a", b"c"]
    assert [letter.mail.attempts for letter in post.letters(2)] == [1, 1]
    for _ in range(12):
        post.wait(5_000)
        for link in (1, 2):
            post.send(link, wire.Ping())
    assert post.got(2) == [b"a", b"c", b"b"]
    assert post.letters(2)[-1].mail.attempts == 2
    assert post.info("bert")["delayed"] == 0


def test_a_pause_is_no_longer_for_a_clock_that_was_a_day_ahead_and_a_date_is_a_date() -> None:
    post, day_ms = Post(), 86_400_000
    post.now_ms += day_ms
    post.restart()
    post.inbox(2)
    post.mail(1, "bert", [b"given back"])
    post.mail(1, "bert", [b"dated"], deliver_at_ms=post.now_ms + 5_000)
    post.ack(2, (0, 1), again_ms=5_000)
    post.now_ms -= day_ms
    post.restart()
    post.inbox(2)
    assert post.got(2) == []
    post.wait(6_000)
    assert post.got(2) == [b"given back"]
    assert post.info("bert")["delayed"] == 1
    post.wait(day_ms)
    post.connect()
    assert post.info("bert")["delayed"] == 0


def test_a_message_given_back_with_a_delay_can_be_purged() -> None:
    post = Post()
    post.inbox(2)
    post.mail(1, "bert", [b"a", b"b"])
    post.ack(2, (0, 1), again_ms=60_000)
    assert post.ask(1, wire.PurgeMail, "bert", "bert") == {"count": 1, "held": 1}
    assert post.info("bert")["delayed"] == 0
    assert code(post.ack(2, (1, 2))) == "Confirm"
    assert post.broker.gauges["mail_bytes"] == 0


# --- the end of a link --------------------------------------------------------------------------


def test_messages_that_were_not_acknowledged_are_delivered_again_before_newer_ones() -> None:
    post = Post()
    post.inbox(2, records=3, size=1 << 20)
    for number in range(5):
        post.mail(1, "bert", [b"%d" % number])
    post.ack(2, (1, 2))
    post.lose(2)
    assert post.told("mail_redelivered") == [
        {"mailbox": "bert", "link": 2, "identity": "bert", "count": 2}
    ]
    assert post.count("mail_redelivered") == 2
    post.hello(4, identity="bert")
    post.inbox(4)
    assert post.got(4) == [b"0", b"2", b"3", b"4"]
    assert [letter.mail.attempts for letter in post.letters(4)] == [2, 2, 1, 1]


def test_rows_of_one_batch_with_other_attempts_come_apart_and_in_order() -> None:
    post = Post()
    post.inbox(2, records=2, size=1 << 20)
    post.mail(1, "bert", [b"0", b"1", b"2", b"3"])
    post.lose(2)
    post.hello(4, identity="bert")
    post.inbox(4, records=1, size=1 << 20)
    post.lose(4)
    post.hello(5, identity="bert")
    post.inbox(5)
    assert post.got(5) == [b"0", b"1", b"2", b"3"]
    assert [letter.mail.attempts for letter in post.letters(5)] == [3, 2, 1, 1]


def test_another_reader_gets_what_a_lost_one_held() -> None:
    post = Post()
    post.inbox(2, mailbox="desk")
    post.mail(1, "desk", [b"a"])
    post.inbox(3, mailbox="desk")
    assert post.got(3) == []
    post.lose(2)
    assert post.got(3) == [b"a"]
    assert post.letters(3)[0].mail.attempts == 2


def test_readers_that_come_and_go_without_mail_leave_nothing() -> None:
    post = Post()
    post.inbox(3, mailbox="desk")
    for _ in range(100):
        post.inbox(2, mailbox="desk")
        post.send(2, wire.Unsubscribe(7))
    mailbox = post.broker._mail.mailboxes.get("desk")
    assert mailbox is not None
    assert len(mailbox.able) == 1
    assert post.broker.gauges["inboxes"] == 1
    post.mail(1, "desk", [b"x"])
    assert post.got(3) == [b"x"]


def test_unsubscribing_gives_back_the_messages_that_are_held() -> None:
    post = Post()
    post.inbox(2, mailbox="desk")
    post.inbox(3, 8, mailbox="desk")
    post.mail(1, "desk", [b"a"])
    post.send(2, wire.Unsubscribe(7))
    assert post.peers[2].last(wire.Ended).code == "cancelled"
    assert post.got(3, 8) == [b"a"]
    assert code(post.ack(2, (0, 1))) == "unknown_subscription"
    post.send(2, wire.Unsubscribe(7))
    assert post.peers[2].last(wire.Refused).code == "unknown_subscription"


@pytest.mark.slow
def test_many_held_messages_come_back_in_steps_and_in_order() -> None:
    post = Post(inbox_puts_max=9_000)
    post.inbox(2)
    frames = [encode([b"x"], subject="s")] * 3_000
    for _ in range(3):
        post.send(1, *(wire.Send("bert", 0, 1) for _ in frames), frames=frames)
    assert len(post.got(2)) == 9_000
    post.inbox(3, mailbox="bert")
    post.lose(2)
    assert post.numbers(3) == list(range(9_000))


@pytest.mark.moderate
def test_other_mailboxes_do_not_wait_while_many_messages_come_back() -> None:
    post = Post()
    frames = [encode([b"x"], subject="s")] * 2_000
    post.inbox(2)
    post.send(1, *(wire.Send("bert", 0, 1) for _ in frames), frames=frames)
    post.inbox(1)
    post.inbox(3, mailbox="bert")
    before = len(post.readies)
    post.broker.link_lost(2, post.now_ms)
    post.send(3, wire.Send("anna", 0, 1), frames=frames[:1])
    links = [send.link for ready in post.readies[before:] for send in ready.sends]
    assert links.index(1) < links.index(3)
    assert post.numbers(3) == list(range(2_000))


def test_a_restart_delivers_messages_that_were_not_acknowledged() -> None:
    post = Post()
    post.inbox(2)
    post.mail(1, "bert", [b"a", b"b"])
    post.ack(2, (0, 1))
    post.restart()
    post.inbox(2)
    assert post.got(2) == [b"b"]
    assert post.mail(1, "bert", [b"c"]).offset == 2


# --- many ranges of one batch -----------------------------------------------------------


def one_by_one(ranges: list[tuple[int, int]], at: int, base: int, count: int) -> int:
    """Return the rows of a batch that ranges name, one by one."""
    rows = 0
    for first, end in ranges:
        for number in range(max(first, at), min(end, base + count)):
            rows |= 1 << (number - base)
    return rows


def test_many_ranges_of_a_batch_name_the_same_rows_as_one_by_one() -> None:
    draw = random.Random(5)
    for _ in range(300):
        base, count = draw.randrange(1_000), draw.randrange(1, 200)
        cuts = sorted(draw.sample(range(base - 20, base + count + 60), 2 * draw.randrange(1, 9)))
        if draw.random() < 0.5:
            # Two ranges that touch.
            cuts = [cut for first, last in pairwise(cuts) for cut in (first, last)]
        ranges = list(zip(cuts[::2], cuts[1::2], strict=True))
        ranges = [each for each in ranges if each[0] < base + count and each[1] > base]
        if not ranges:
            continue
        at = max(base, ranges[0][0])
        found = inboxes._rows_between(ranges, 0, len(ranges), at, base, count)
        assert found == one_by_one(ranges, at, base, count)


def test_an_acknowledgement_of_many_ranges_looks_for_a_batch_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a bound an ACK_MAIL of 65,536 ranges took a turn of a quarter of a second."""
    post = Post()
    post.inbox(2, records=1 << 20, size=1 << 30)
    for _ in range(4):
        post.mail(1, "bert", [b""] * 4_096)
    first = post.peers[2].mail[7][0].number
    looked = [0]
    between = inboxes._rows_between

    def counted(*given: Any) -> int:
        looked[0] += 1
        return between(*given)

    monkeypatch.setattr(inboxes, "_rows_between", counted)
    odd = [(first + at, first + at + 1) for at in range(1, 4 * 4_096, 2)]
    assert isinstance(post.ack(2, *odd), wire.Confirm)
    assert looked[0] == 4
    assert post.ack(2, odd[7]).code == "not_held"
    spanning = [(first + at, first + at + 1) for at in range(0, 4 * 4_096, 2)]
    assert isinstance(post.ack(2, *spanning), wire.Confirm)
    assert post.broker.gauges["mail_messages"] == 0
