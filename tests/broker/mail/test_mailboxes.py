"""Mailboxes: first use, names, mailboxes in memory, temporary mailboxes."""

from __future__ import annotations

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import Level
from malamute_protocol.encode import encode
from tests.broker.post import Post, code


def test_mail_sent_to_an_absent_client_is_delivered_when_it_connects() -> None:
    post = Post()
    post.send(2, wire.Bye())
    answer = post.mail(1, "bert", [b"one", b"two"])
    assert (answer.level, answer.offset, answer.duplicate) == (Level.SYNCED, 0, False)
    post.hello(9, identity="bert")
    post.inbox(9)
    assert post.got(9) == [b"one", b"two"]
    mail = post.peers[9].last(wire.Mail)
    assert (mail.sender, mail.attempts, mail.rows) == ("anna", 1, None)


def test_the_first_mail_creates_its_mailbox_in_the_same_bundle() -> None:
    post = Post()
    post.mail(1, "new", [b"x"])
    bundles = [bundle for ready in post.readies for bundle in ready.appends]
    assert len(bundles) == 1
    assert post.told("mailbox_created") == [{"mailbox": "new", "number": 1, "by": "anna"}]
    assert post.info("new")["messages"] == 1


def test_two_sends_of_one_message_create_a_mailbox_once() -> None:
    post = Post()
    frame = encode([b"x"], subject="s")
    post.send(1, wire.Send("new", 1), wire.Send("new", 2), frames=[frame, frame])
    assert [post.answer(1, 1).offset, post.answer(1, 2).offset] == [0, 1]
    assert len(post.told("mailbox_created")) == 1
    post.restart()
    assert post.info("new")["messages"] == 2


def test_a_refused_append_leaves_nothing_and_the_next_send_creates() -> None:
    post = Post()
    post.refuse["main"] = ("disk_full", "no space")
    assert code(post.mail(1, "new", [b"x"], key=b"k")) == "disk_full"
    assert code(post.info("new")) == "unknown_mailbox"
    assert post.broker.gauges["mail_bytes"] == 0
    del post.refuse["main"]
    answer = post.mail(1, "new", [b"x"], key=b"k")
    assert (answer.offset, answer.duplicate) == (0, False)
    assert post.info("new")["messages"] == 1


def test_the_count_of_mailboxes_has_a_bound() -> None:
    post = Post(mailboxes_max=2)
    assert code(post.mail(1, "one", [b""])) == "Confirm"
    assert code(post.mail(1, "two", [b""])) == "Confirm"
    assert code(post.mail(1, "three", [b""])) == "limit"


def test_a_mailbox_that_a_refused_step_would_have_created_is_forgotten() -> None:
    post = Post(mailboxes_max=2)
    for number in range(5):
        frame = encode([b"x"], subject="s")
        step = wire.Atomic(number + 1, 2)
        post.send(1, step, wire.Send(f"box-{number}", 0), wire.AckMail(7, [(0, 1)]), frames=[frame])
        assert code(post.answer(1, number + 1)) == "unknown_subscription"
        refused = post.mail(1, f"other-{number}", [b"x"], level=int(Level.REPLICATED))
        assert code(refused) == "unsupported"
    assert code(post.mail(1, "one", [b""])) == "Confirm"
    assert code(post.mail(1, "two", [b""])) == "Confirm"


@pytest.mark.parametrize(
    ("name", "why"), [("", "bad_name"), ("a b", "bad_name"), ("~x", "unknown_mailbox")]
)
def test_a_name_that_no_mailbox_may_have_is_refused(name: str, why: str) -> None:
    post = Post()
    assert code(post.mail(1, name, [b"x"])) == why


def test_without_creation_by_first_use_a_mailbox_must_be_there() -> None:
    post = Post(auto_create=False)
    assert code(post.mail(1, "box", [b"x"])) == "unknown_mailbox"
    post.inbox(1, mailbox="box")
    assert post.peers[1].last(wire.Refused).code == "unknown_mailbox"


def test_a_mailbox_in_memory_confirms_none_and_is_empty_after_a_restart() -> None:
    post = Post(mail_hot_bytes=1)
    post.ask(1, wire.EditMailbox, "quick", {"memory": True})
    answer = post.mail(1, "quick", [b"a", b"b"])
    assert answer.level == Level.NONE
    assert answer.offset >= 1 << 40
    assert code(post.mail(1, "quick", [b"c"], level=int(Level.SYNCED))) == "unsupported"
    bundles = sum(len(ready.appends) for ready in post.readies)
    assert bundles == 1, "its creation, and nothing else"
    post.inbox(2, mailbox="quick")
    assert post.got(2) == [b"a", b"b"]
    first = post.numbers(2)[0]
    assert code(post.ack(2, (first, first + 1))) == "Confirm"
    assert post.info("quick")["messages"] == 1
    post.ack(2, (first + 1, first + 2), again_ms=500)
    assert post.info("quick")["delayed"] == 1
    post.wait(500)
    assert post.got(2) == [b"a", b"b", b"b"]
    post.restart()
    info = post.info("quick")
    assert (info["messages"], info["memory"]) == (0, True)
    assert post.mail(1, "quick", [b"z"]).offset > first + (1 << 39)


def test_the_first_mail_waits_for_a_mailbox_in_memory_to_be_created() -> None:
    post = Post(default_mailbox={"memory": True})
    assert code(post.mail(1, "quick", [b"a"])) == "wait"
    assert post.mail(1, "quick", [b"a"]).level == Level.NONE


def test_a_client_without_identity_has_a_temporary_mailbox() -> None:
    post = Post()
    post.hello(9)
    post.inbox(9)
    assert post.peers[9].last(wire.Subscribed).subscription == 7
    (name,) = [entry["name"] for entry in post.ask(9, wire.MailboxInfo, "~*")["entries"]]
    assert post.mail(1, name, [b"x"]).level == Level.NONE
    assert post.got(9) == [b"x"]
    assert post.ask(1, wire.MailboxInfo, "*")["entries"] == []
    assert code(post.ask(1, wire.EditMailbox, name, {})) == "bad_name"
    post.inbox(1, mailbox=name)
    assert post.peers[1].last(wire.Refused).code == "forbidden"


def test_a_temporary_mailbox_ends_with_bye() -> None:
    post = Post()
    post.hello(9)
    post.inbox(9)
    (name,) = [entry["name"] for entry in post.ask(9, wire.MailboxInfo, "~*")["entries"]]
    post.mail(1, name, [b"x"])
    post.send(9, wire.Bye())
    assert code(post.mail(1, name, [b"y"])) == "unknown_mailbox"
    assert post.broker.gauges["temporary_mailboxes"] == 0
    assert post.broker.gauges["mail_memory_bytes"] == 0
    assert post.broker.gauges["mail_messages"] == 0
    assert post.count("mail_unread") == 1


def test_a_temporary_mailbox_waits_for_the_session_to_come_back() -> None:
    post = Post()
    session = bytes(15) + b"9"
    post.hello(9, session=session)
    post.inbox(9)
    (name,) = [entry["name"] for entry in post.ask(9, wire.MailboxInfo, "~*")["entries"]]
    post.lose(9)
    post.mail(1, name, [b"x"])
    post.wait(5_000)
    post.hello(10, session=session)
    post.inbox(10)
    assert post.got(10) == [b"x"]
    for _ in range(4):
        post.wait(4_000)
        post.send(1, wire.Ping())
        post.send(10, wire.Ping())
    assert code(post.mail(1, name, [b"y"])) == "Confirm", "its session is there"


def test_a_temporary_mailbox_ends_when_its_session_stays_away() -> None:
    post = Post()
    post.hello(9)
    post.inbox(9)
    (name,) = [entry["name"] for entry in post.ask(9, wire.MailboxInfo, "~*")["entries"]]
    post.mail(1, name, [b"x"])
    post.lose(9)
    for _ in range(4):
        post.wait(4_000)
        post.send(1, wire.Ping())
    assert code(post.mail(1, name, [b"y"])) == "unknown_mailbox"
    assert post.broker.gauges["temporary_mailboxes"] == 0


def test_a_mailbox_that_a_refused_put_would_have_created_does_not_bind_its_creator() -> None:
    post = Post()
    frame = encode([b"a"], subject="s")
    edit = wire.EditMailbox(6, "x", {"memory": True})
    post.send(1, wire.Send("x", 5, 4), edit, frames=[frame])
    assert post.answer(1, 5).code == "unsupported"
    assert post.mail(1, "x", [b"a"]).level == Level.NONE
    post.inbox(2, mailbox="x")
    assert post.got(2) == [b"a"]
    post.send(
        1, wire.Send("y", 5, 4), wire.OpenInbox(3, "y", 1, 1, {"max_messages": 2}), frames=[frame]
    )
    assert post.info("y")["settings"]["max_messages"] == 2
