"""Mailboxes: puts and refusals, expiry, delay and priority, first use, and administration."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import Level
from malamute_protocol.encode import encode, encode_arrow, encode_lists
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.broker.mail import administration
from malamute_py.broker.mail.peeking import Peeking
from malamute_py.broker.ready import BodiesFound
from tests.broker.post import Post


def code(answer: Any) -> str:
    return answer.code if isinstance(answer, wire.Refused) else type(answer).__name__


# --- first use, confirms ----------------------------------------------------------------------


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


def test_a_confirm_waits_for_the_level_that_was_asked_for() -> None:
    post = Post(sync=False)
    assert post.mail(1, "box", [b"x"], level=int(Level.STORED)).level == Level.STORED
    assert post.mail(1, "box", [b"x"], tracker=5) is None
    assert post.mail(1, "box", [b"x"], level=int(Level.NONE)) is None
    assert code(post.mail(1, "box", [b"x"], level=int(Level.REPLICATED))) == "unsupported"
    post.sync()
    post.run()
    assert post.answer(1, 5).level == Level.SYNCED
    assert post.info("box")["messages"] == 3


def test_level_0_is_what_the_mailbox_was_set_to() -> None:
    post = Post()
    assert post.ask(1, wire.EditMailbox, "box", {"level": "stored"})["settings"]["level"] == (
        "stored"
    )
    post.auto_sync = False
    assert post.mail(1, "box", [b"x"]).level == Level.STORED


def test_delivery_does_not_wait_for_the_disk() -> None:
    post = Post(sync=False)
    post.inbox(2)
    post.mail(1, "bert", [b"x"])
    post.sync()
    post.run()
    assert post.mail(1, "bert", [b"y"]) is None
    assert post.got(2) == [b"x", b"y"]


# --- bounds -----------------------------------------------------------------------------------


def test_a_full_mailbox_answers_wait_and_drops_nothing() -> None:
    post = Post(retry_ms=250)
    post.ask(1, wire.EditMailbox, "bert", {"max_messages": 3})
    assert code(post.mail(1, "bert", [b"1", b"2", b"3"])) == "Confirm"
    for _ in range(3):
        refused = post.mail(1, "bert", [b"4"])
        assert (refused.code, refused.retry_ms) == ("wait", 250)
    assert len(post.told("mailbox_full")) == 1
    assert post.count("mailbox_full") == 3
    post.inbox(2)
    assert post.got(2) == [b"1", b"2", b"3"]
    post.ack(2, (0, 2))
    assert code(post.mail(1, "bert", [b"4"])) == "Confirm"
    assert post.got(2) == [b"1", b"2", b"3", b"4"]
    post.ack(2, (2, 4))
    assert code(post.mail(1, "bert", [b"1", b"2", b"3"])) == "Confirm"
    assert code(post.mail(1, "bert", [b"4"])) == "wait"
    assert len(post.told("mailbox_full")) == 2, "it was eased in between"


def test_a_mailbox_is_full_by_bytes_until_the_last_message_of_a_batch_is_gone() -> None:
    post = Post()
    frame = encode([bytes(500), bytes(500)], subject="s")
    size = len(frame) + STAMP_BYTES
    post.ask(1, wire.EditMailbox, "bert", {"max_bytes": 2 * size})
    for _ in range(2):
        assert code(post.mail(1, "bert", [bytes(500), bytes(500)])) == "Confirm"
    assert code(post.mail(1, "bert", [b""])) == "wait"
    post.inbox(2)
    post.ack(2, (0, 1))
    assert code(post.mail(1, "bert", [b""])) == "wait"
    post.ack(2, (1, 2))
    assert code(post.mail(1, "bert", [b""])) == "Confirm"


def test_a_put_that_can_never_fit_is_refused_as_a_limit() -> None:
    post = Post()
    post.ask(1, wire.EditMailbox, "box", {"max_messages": 2})
    assert code(post.mail(1, "box", [b""] * 3)) == "limit"
    post.ask(1, wire.EditMailbox, "box", {"max_messages": 0, "max_bytes": 100})
    assert code(post.mail(1, "box", [b""])) == "limit"


def test_mail_on_its_way_counts_towards_the_bounds_of_its_mailbox() -> None:
    post = Post()
    post.ask(1, wire.EditMailbox, "box", {"max_messages": 1})
    frame = encode([b"x"], subject="s")
    post.send(1, wire.Send("box", 1), wire.Send("box", 2), frames=[frame, frame])
    assert code(post.answer(1, 1)) == "Confirm"
    assert code(post.answer(1, 2)) == "wait"


def test_a_batch_of_too_many_messages_is_refused_by_name() -> None:
    post = Post(mail_rows_max=2)
    assert code(post.mail(1, "box", [b""] * 2)) == "Confirm"
    assert code(post.mail(1, "box", [b""] * 3)) == "too_large"


def test_mail_has_no_producer() -> None:
    post = Post()
    assert code(post.mail(1, "box", [b"x"], producer_id=1, producer_epoch=1)) == "unsupported"


def test_bodies_of_mail_are_not_arrow() -> None:
    post = Post()
    frame = encode_arrow(bytes(8), 1, subject="s", schema_id=1)
    post.send(1, wire.Send("box", 1), frames=[frame])
    assert code(post.answer(1, 1)) == "bad_batch"


def test_all_mailboxes_together_have_a_bound() -> None:
    post = Post(mail_bytes_max=1_000, mail_memory_bytes_max=1_000)
    assert code(post.mail(1, "one", [bytes(500)])) == "Confirm"
    assert code(post.mail(1, "two", [bytes(500)])) == "wait"
    post.ask(1, wire.EditMailbox, "quick", {"memory": True})
    assert code(post.mail(1, "quick", [bytes(500)])) == "Confirm"
    assert code(post.mail(1, "quick", [bytes(500)])) == "wait"
    assert code(post.mail(1, "quick", [bytes(1_500)])) == "limit"
    assert post.count("mail_full") == 1
    assert post.count("mail_memory_full") == 1


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


# --- names and permissions ----------------------------------------------------------------------


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


def test_a_client_without_permission_is_refused_but_never_at_its_own_mailbox() -> None:
    def permit(identity: str, action: str, name: str) -> bool:
        return action == "identity" or (identity, action, name) == ("anna", "send", "bert")

    post = Post(permit=permit)
    assert code(post.mail(1, "bert", [b"x"])) == "Confirm"
    assert code(post.mail(1, "carla", [b"x"])) == "forbidden"
    post.inbox(1, mailbox="bert")
    assert post.peers[1].last(wire.Refused).code == "forbidden"
    post.inbox(2, mailbox="bert")
    assert post.got(2) == [b"x"]
    assert code(post.ask(1, wire.PeekMail, "bert")) == "forbidden"
    assert "messages" in post.ask(2, wire.PeekMail, "bert")
    for kind in (wire.PurgeMail, wire.RemoveMailbox):
        assert code(post.ask(2, kind, "bert", "bert")) == "forbidden"
    assert code(post.ask(2, wire.EditMailbox, "bert", {})) == "forbidden"


def test_a_damaged_batch_is_refused() -> None:
    post = Post()
    frame = bytearray(encode([b"x"], subject="s"))
    frame[-1] ^= 1
    post.send(1, wire.Send("box", 1), frames=[bytes(frame)])
    assert code(post.answer(1, 1)) == "corrupt"


# --- accepted once ------------------------------------------------------------------------------


def test_a_batch_sent_again_with_its_key_is_accepted_once() -> None:
    post = Post()
    post.mail(1, "other", [b"before"])
    first = post.mail(1, "bert", [b"x", b"y"], key=b"k")
    again = post.mail(1, "bert", [b"x", b"y"], key=b"k")
    assert (again.offset, again.duplicate) == (first.offset, True)
    post.restart()
    again = post.mail(1, "bert", [b"x", b"y"], key=b"k")
    assert (again.offset, again.duplicate) == (first.offset, True)
    assert post.info("bert")["messages"] == 2
    assert post.mail(3, "bert", [b"x"], key=b"k").duplicate is False, "another sender's key"


def test_a_duplicate_is_confirmed_when_the_original_is() -> None:
    post = Post(sync=False)
    assert post.mail(1, "bert", [b"x"], key=b"k", tracker=1) is None
    assert post.mail(1, "bert", [b"x"], key=b"k", tracker=2) is None
    frame = encode([b"y"], subject="s")
    post.send(1, wire.Send("bert", 3, 0, b"l"), wire.Send("bert", 4, 0, b"l"), frames=[frame] * 2)
    assert post.answer(1, 3) is None
    post.sync()
    post.run()
    assert [post.answer(1, tracker).duplicate for tracker in (1, 2, 3, 4)] == [
        False, True, False, True,
    ]  # fmt: skip
    assert {post.answer(1, tracker).offset for tracker in (3, 4)} == {1}
    assert post.info("bert")["messages"] == 2


def test_keys_of_clients_without_identity_are_their_sessions_own() -> None:
    post = Post()
    post.hello(8)
    post.hello(9)
    assert post.mail(8, "bert", [b"x"], key=b"k").duplicate is False
    assert post.mail(9, "bert", [b"x"], key=b"k").duplicate is False
    post.lose(8)
    post.hello(10, session=(8).to_bytes(16, "big"))
    assert post.mail(10, "bert", [b"x"], key=b"k").duplicate is True


# --- expiry, delay, priority ----------------------------------------------------------------------


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


# --- in memory only -----------------------------------------------------------------------------


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


def test_mail_in_memory_expires_and_is_accepted_once() -> None:
    post = Post()
    post.ask(1, wire.EditMailbox, "quick", {"memory": True})
    first = post.mail(1, "quick", [b"a"], expires_at_ms=post.now_ms + 100, key=b"k")
    again = post.mail(1, "quick", [b"a"], expires_at_ms=post.now_ms + 100, key=b"k")
    assert (again.offset, again.duplicate) == (first.offset, True)
    post.wait(100)
    assert post.info("quick")["messages"] == 0
    assert post.broker.gauges["mail_memory_bytes"] == 0


def test_the_first_mail_waits_for_a_mailbox_in_memory_to_be_created() -> None:
    post = Post(default_mailbox={"memory": True})
    assert code(post.mail(1, "quick", [b"a"])) == "wait"
    assert post.mail(1, "quick", [b"a"]).level == Level.NONE


# --- temporary mailboxes --------------------------------------------------------------------------


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


# --- looking, emptying, removing ------------------------------------------------------------------


def test_peeking_shows_messages_and_consumes_nothing() -> None:
    post = Post()
    post.mail(1, "bert", [b"body one", b"two"], subject=["a", "b"], fields={"f": "v"})
    post.mail(3, "bert", [b"urgent"], priority=5, expires_at_ms=post.now_ms + 99_000)
    page = post.ask(2, wire.PeekMail, "bert", body_bytes=4)
    assert page["more"] is False
    assert [message["number"] for message in page["messages"]] == [0, 1, 2]
    first, _, last = page["messages"]
    assert (first["subject"], first["fields"], first["body"], first["bytes"]) == (
        "a", {"f": "v"}, b"body", 8,
    )  # fmt: skip
    assert (first["sender"], first["held"], first["attempts"]) == ("anna", False, 0)
    assert (last["sender"], last["priority"]) == ("carla", 5)
    assert last["expires_at_ms"] == post.now_ms + 99_000
    assert "body" not in post.ask(2, wire.PeekMail, "bert")["messages"][0]
    post.inbox(2)
    assert sorted(post.got(2)) == [b"body one", b"two", b"urgent"]
    assert all(message["held"] for message in post.ask(2, wire.PeekMail, "bert")["messages"])
    assert post.ask(2, wire.PeekMail, "bert")["messages"][0]["attempts"] == 1


def test_peeking_goes_page_by_page() -> None:
    post = Post(mail_hot_bytes=1)
    for number in range(5):
        post.mail(1, "bert", [b"%d.%d" % (number, row) for row in range(3)])
    seen: list[bytes] = []
    after, more = -1, True
    while more:
        page = post.ask(2, wire.PeekMail, "bert", after, 4, 100)
        seen += [message["body"] for message in page["messages"]]
        after, more = page["messages"][-1]["number"], page["more"]
    assert seen == [b"%d.%d" % (number, row) for number in range(5) for row in range(3)]


@pytest.mark.parametrize("after", [-(2**63), -1, 2, 3, 2**63, 2**64 - 1])
def test_peeking_after_any_number(after: int) -> None:
    post = Post()
    post.mail(1, "bert", [b"a", b"b"])
    post.mail(1, "bert", [b"c", b"d"])
    page = post.ask(2, wire.PeekMail, "bert", after)
    numbers = [number for number in range(4) if number > after]
    assert [message["number"] for message in page["messages"]] == numbers
    assert not page["more"]


def test_peeking_at_lists_and_at_bodies_that_are_gone() -> None:
    post = Post()
    frame = encode_lists([[b"a", b"bc"]], subject="s")
    post.send(1, wire.Send("box", 1), frames=[frame])
    (message,) = post.ask(1, wire.PeekMail, "box", body_bytes=99)["messages"]
    assert message["bytes"] == 3
    assert code(post.ask(1, wire.PeekMail, "none")) == "unknown_mailbox"


@pytest.mark.slow
def test_a_purge_removes_the_messages_that_no_reader_holds() -> None:
    post = Post()
    post.inbox(2, records=2)
    for number in range(5_000):
        post.mail(1, "bert", [b"%d" % number], tracker=0)
    assert code(post.ask(1, wire.PurgeMail, "bert", "wrong")) == "bad_name"
    assert post.ask(1, wire.PurgeMail, "bert", "bert") == {"count": 4_998, "held": 2}
    assert post.info("bert")["messages"] == 2
    assert post.told("mailbox_purged")[0]["count"] == 4_998
    post.restart()
    post.inbox(2)
    assert post.got(2) == [b"0", b"1"]


def test_a_purge_removes_delayed_messages_and_leaves_newer_ones() -> None:
    post = Post(sync=False)
    post.mail(1, "bert", [b"later"], deliver_at_ms=post.now_ms + 1_000)
    post.sync()
    post.run()
    assert post.ask(1, wire.PurgeMail, "bert", "bert") is None, "it is not durable yet"
    post.auto_sync = True
    post.sync()
    post.run()
    assert post.peers[1].last(wire.Result).value == {"count": 1, "held": 0}
    post.wait(1_000)
    post.mail(1, "bert", [b"new"])
    post.inbox(2)
    assert post.got(2) == [b"new"]


def test_a_purge_in_pieces_leaves_messages_that_came_after_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(administration, "PIECE_PUTS", 1)
    post = Post()
    for body in (b"a", b"b", b"c"):
        post.mail(1, "bert", [body])
    frame = encode([b"d"], subject="s")
    post.send(1, wire.PurgeMail(5, "bert", "bert"), wire.Send("bert", 6), frames=[frame])
    assert post.peers[1].last(wire.Result).value == {"count": 3, "held": 0}
    post.inbox(2)
    assert post.got(2) == [b"d"]


def test_a_purge_that_the_journal_refuses_leaves_everything() -> None:
    post = Post()
    post.mail(1, "bert", [b"x"])
    post.refuse["main"] = ("disk_full", "no space")
    assert code(post.ask(1, wire.PurgeMail, "bert", "bert")) == "disk_full"
    del post.refuse["main"]
    post.inbox(2)
    assert post.got(2) == [b"x"]


def test_a_mailbox_with_readers_is_not_removed() -> None:
    post = Post()
    post.mail(1, "box", [b"x", b"y"])
    post.inbox(2, mailbox="box")
    assert code(post.ask(1, wire.RemoveMailbox, "box", "box")) == "in_use"
    post.send(2, wire.Unsubscribe(7))
    assert code(post.ask(1, wire.RemoveMailbox, "box", "bux")) == "bad_name"
    assert post.ask(1, wire.RemoveMailbox, "box", "box") == {"count": 2}
    assert code(post.info("box")) == "unknown_mailbox"
    assert post.told("mailbox_removed")[0]["mailbox"] == "box"
    post.mail(1, "box", [b"new"])
    post.restart()
    post.inbox(2, mailbox="box")
    assert post.got(2) == [b"new"]


def test_mail_on_its_way_into_a_mailbox_that_is_removed() -> None:
    post = Post()
    post.mail(1, "box", [b"x"])
    frame = encode([b"y"], subject="s")
    post.send(
        1, wire.Send("box", 1), wire.RemoveMailbox(2, "box", "box"), wire.Send("box", 3),
        frames=[frame, frame],
    )  # fmt: skip
    assert code(post.answer(1, 1)) == "Confirm"
    assert post.peers[1].last(wire.Result).value == {"count": 2}
    assert code(post.answer(1, 3)) == "wait"
    assert code(post.mail(1, "box", [b"z"])) == "Confirm"
    assert post.info("box")["messages"] == 1
    post.restart()
    assert post.info("box")["messages"] == 1


def test_facts_of_one_mailbox_and_pages_of_many() -> None:
    post = Post()
    for name in ("b", "a", "ab", "c", "aa"):
        post.mail(1, name, [b"x"])
    info = post.info("a")
    assert (info["name"], info["messages"], info["by"]) == ("a", 1, "anna")
    assert (info["readers"], info["held"], info["delayed"]) == (0, 0, 0)
    assert info["oldest_ms"] == info["created_ms"] == post.now_ms
    assert info["bytes"] == post.broker.gauges["mail_bytes"] // 5

    def page(prefix: str, **named: Any) -> tuple[list[str], bool]:
        value = post.ask(1, wire.MailboxInfo, prefix, **named)
        return [entry["name"] for entry in value["entries"]], value["more"]

    assert page("*") == (["a", "aa", "ab", "b", "c"], False)
    assert page("a*") == (["a", "aa", "ab"], False)
    assert page("*", limit=2) == (["a", "aa"], True)
    assert page("*", after="aa", limit=3) == (["ab", "b", "c"], False)
    assert page("a*", after="a") == (["aa", "ab"], False)
    assert page("x*") == ([], False)


def test_settings_are_checked_changed_and_kept() -> None:
    post = Post()
    for wrong in ({"nonsense": 1}, {"max_bytes": -1}, {"level": "none"}, {"max_messages": "x"}):
        assert code(post.ask(1, wire.EditMailbox, "box", wrong)) == "bad_setting"
    assert post.ask(1, wire.EditMailbox, "box", {"max_messages": 5})["messages"] == 0
    assert post.ask(1, wire.EditMailbox, "box", {"description": "d"})["settings"] == {
        "memory": False, "max_messages": 5, "max_bytes": 0, "ttl_ms": 0, "level": "synced",
        "description": "d",
    }  # fmt: skip
    assert code(post.ask(1, wire.EditMailbox, "box", {"memory": True})) == "bad_setting"
    post.refuse["main"] = ("disk_full", "no space")
    assert code(post.ask(1, wire.EditMailbox, "box", {"max_messages": 7})) == "disk_full"
    del post.refuse["main"]
    assert post.info("box")["settings"]["max_messages"] == 5
    post.restart()
    assert post.info("box")["settings"]["max_messages"] == 5


def test_settings_of_an_edit_and_a_first_send_that_come_together_hold() -> None:
    post = Post()
    frame = encode([b"x"], subject="s")
    post.send(
        1, wire.Send("one", 1), wire.EditMailbox(2, "one", {"max_messages": 9}),
        wire.EditMailbox(3, "two", {"max_messages": 9}), wire.Send("two", 4),
        frames=[frame, frame],
    )  # fmt: skip
    post.restart()
    for name in ("one", "two"):
        assert post.info(name)["settings"]["max_messages"] == 9
        assert post.info(name)["messages"] == 1


def test_a_removal_is_one_at_a_time_and_settings_wait_for_it() -> None:
    post = Post()
    post.mail(1, "box", [b"x"])
    post.send(
        1, wire.RemoveMailbox(1, "box", "box"), wire.RemoveMailbox(2, "box", "box"),
        wire.EditMailbox(3, "box", {}), wire.OpenInbox(7, "box", 9, 9),
    )  # fmt: skip
    refused = {(one.reference, one.code) for one in post.peers[1].of(wire.Refused)}
    assert refused == {(2, "wait"), (3, "wait"), (7, "wait")}
    assert code(post.info("box")) == "unknown_mailbox"


def test_a_removal_that_the_journal_refuses_leaves_the_mailbox() -> None:
    post = Post()
    post.mail(1, "box", [b"x"])
    post.refuse["main"] = ("disk_full", "no space")
    assert code(post.ask(1, wire.RemoveMailbox, "box", "box")) == "disk_full"
    post.refuse.clear()
    post.ask(1, wire.PurgeMail, "box", "box")
    post.refuse["main"] = ("disk_full", "no space")
    assert code(post.ask(1, wire.RemoveMailbox, "box", "box")) == "disk_full"
    post.refuse.clear()
    assert code(post.mail(1, "box", [b"y"])) == "Confirm"
    assert post.info("box")["messages"] == 1


def test_a_temporary_mailbox_is_not_removed_by_hand() -> None:
    post = Post()
    post.hello(9)
    post.inbox(9)
    (name,) = [entry["name"] for entry in post.ask(9, wire.MailboxInfo, "~*")["entries"]]
    post.send(9, wire.Unsubscribe(7))
    assert code(post.ask(1, wire.RemoveMailbox, name, name)) == "bad_name"
    assert code(post.ask(9, wire.PeekMail, name)) == "dict"


def test_peeking_shows_delays_and_when_each_row_expires() -> None:
    post = Post()
    at_ms, over_ms = post.now_ms + 5_000, post.now_ms + 9_000
    post.mail(1, "bert", [b"a"], deliver_at_ms=at_ms)
    post.mail(1, "bert", [b"b", b"c"], expires_at_ms=[over_ms, 0])
    messages = post.ask(2, wire.PeekMail, "bert")["messages"]
    assert [message["not_before_ms"] for message in messages] == [at_ms, 0, 0]
    assert [message["expires_at_ms"] for message in messages] == [0, over_ms, 0]
    assert post.ask(2, wire.PeekMail, "bert", 1 << 50)["messages"] == []


def test_a_page_of_a_peek_is_bounded_in_the_bytes_it_reads_and_sends() -> None:
    post = Post(peek_bytes_max=3_000)
    for number in range(4):
        post.mail(1, "bert", [b"%d" % number * 1_000])
    page = post.ask(2, wire.PeekMail, "bert")
    assert (len(page["messages"]), page["more"]) == (2, True)
    big = Post()
    big.mail(1, "bert", [bytes(520_000), bytes(600_000)])
    page = big.ask(2, wire.PeekMail, "bert", body_bytes=1 << 30)
    assert (len(page["messages"]), page["more"]) == (1, True)
    rest = big.ask(2, wire.PeekMail, "bert", page["messages"][0]["number"], body_bytes=1 << 30)
    assert (len(rest["messages"][0]["body"]), rest["more"]) == (512 << 10, False)
    lists = Post()
    frame = encode_lists([[bytes(3_000_000)]], subject="s")
    lists.send(1, wire.Send("bert", 4), frames=[frame])
    page = lists.ask(2, wire.PeekMail, "bert", body_bytes=1 << 30)
    assert len(page["messages"][0]["body"]) == 512 << 10


def test_a_link_has_a_bound_of_unanswered_peeks() -> None:
    post = Post(link_queries_max=1, read=False, mail_hot_bytes=1)
    post.mail(1, "bert", [b"a"])
    post.mail(1, "bert", [b"b"])
    post.send(2, wire.PeekMail(900, "bert"), wire.PeekMail(901, "bert"))
    refused = post.peers[2].last(wire.Refused)
    assert (refused.command, refused.reference, refused.code) == (44, 901, "wait")
    post.answer_bodies()
    post.run()
    assert post.peers[2].last(wire.Result).request == 900


def test_peeks_go_one_at_a_time_and_by_turns_of_links() -> None:
    post = Post(read=False, mail_hot_bytes=1)
    for body in (b"a", b"b", b"c"):
        post.mail(1, "bert", [body])
    peeks = [wire.PeekMail(900 + at, "bert", -1, 10, 10) for at in range(20)]
    post.send(2, *peeks)
    post.send(1, wire.PeekMail(950, "bert", -1, 10, 10))
    post.send(3, wire.PeekMail(960, "bert", -1, 10, 10))
    order = []
    while post.bodies:
        assert [wanted.numbers for wanted in post.bodies] == [(0, 1)], "the newest is in memory"
        before = {link: len(post.peers[link].of(wire.Result)) for link in (1, 2, 3)}
        post.answer_bodies()
        post.run()
        order += [
            link for link in (1, 2, 3) if len(post.peers[link].of(wire.Result)) > before[link]
        ]
    assert order[:4] == [2, 2, 1, 3]
    assert order[4:] == [2] * 18
    assert all(len(one.value["messages"]) == 3 for one in post.peers[2].of(wire.Result))


def test_a_link_that_ends_while_its_peeks_wait_keeps_no_other_waiting() -> None:
    post = Post(read=False, mail_hot_bytes=1)
    post.mail(1, "bert", [b"a"])
    post.send(2, *[wire.PeekMail(900 + at, "bert") for at in range(3)])
    post.send(1, wire.PeekMail(950, "bert"))
    post.lose(2)
    while post.bodies:
        post.answer_bodies()
        post.run()
    assert post.peers[1].last(wire.Result).request == 950
    assert not post.broker._mail.admin._peeks


def test_an_error_in_a_peek_costs_its_link_and_the_next_has_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    post = Post()
    post.planted = True
    post.mail(1, "bert", [b"a"])

    def planted(*_: Any) -> Any:
        raise IndexError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Peeking, "_entry", planted)
        post.send(2, wire.PeekMail(900, "bert"))
    assert post.peers[2].closed
    post.send(1, wire.PeekMail(950, "bert"))
    assert post.peers[1].last(wire.Result).request == 950


def test_a_peek_at_a_body_that_cannot_be_read_describes_the_message() -> None:
    post = Post(read=False, mail_hot_bytes=1)
    post.mail(1, "bert", [b"a"])
    post.mail(1, "other", [b"b"])
    post.send(2, wire.PeekMail(900, "bert", -1, 10, 10))
    (read,) = post.bodies
    post.bodies.clear()
    post.broker.bodies(BodiesFound(read.token, {}, "no disk"))
    post.run()
    (message,) = post.peers[2].last(wire.Result).value["messages"]
    assert (message["number"], message["sender"], message["subject"]) == (0, "anna", "")


def test_a_change_that_never_becomes_durable_is_refused() -> None:
    post = Post(sync=False)
    post.mail(1, "box", [b"x"])
    assert post.ask(1, wire.EditMailbox, "box", {"description": "d"}) is None
    post.broker.ring_failed("main", "journal_failed", "the disk is gone")
    post.run()
    assert post.peers[1].last(wire.Refused).code == "journal_failed"


# --- refusals, and what others do meanwhile -----------------------------------------------------


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


def test_a_refused_purge_leaves_delayed_mail_delayed() -> None:
    post = Post()
    post.inbox(2, records=3)
    due_ms = post.now_ms + 10_000
    post.mail(1, "bert", [b"a", b"b"], deliver_at_ms=due_ms)
    post.mail(1, "bert", [b"c", b"d"])
    assert code(post.ack(2, (3, 4), again_ms=20_000)) == "Confirm"
    post.refuse["main"] = ("disk_full", "no space")
    assert post.ask(1, wire.PurgeMail, "bert", "bert").code == "disk_full"
    post.refuse.clear()
    post.wait(10)
    assert post.got(2) == [b"c", b"d"]
    assert (post.info("bert")["delayed"], post.info("bert")["held"]) == (3, 1)
    post.wait(10_000)
    post.credit(2, 7, 9, 1 << 50)
    assert post.got(2) == [b"c", b"d", b"a", b"b"]
    post.wait(10_000)
    assert post.got(2) == [b"c", b"d", b"a", b"b", b"d"]


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


def test_nothing_stays_of_edits_that_are_refused() -> None:
    post = Post()
    post.ask(1, wire.EditMailbox, "x", {"max_messages": 5})
    post.refuse["main"] = ("disk_full", "no space")
    post.send(
        1, wire.EditMailbox(6, "x", {"max_messages": 6}), wire.EditMailbox(7, "x", {"max_bytes": 7})
    )
    post.refuse.clear()
    settings = post.info("x")["settings"]
    assert (settings["max_messages"], settings["max_bytes"]) == (5, 0)


def test_a_client_may_not_peek_into_the_temporary_mailbox_of_another() -> None:
    post = Post()
    post.hello(8)
    post.inbox(8)
    post.mail(1, post.ask(8, wire.MailboxInfo, "~*")["entries"][0]["name"], [b"secret"])
    name = post.ask(1, wire.MailboxInfo, "~*")["entries"][0]["name"]
    assert post.ask(1, wire.PeekMail, name, body_bytes=9).code == "forbidden"
    assert post.ask(8, wire.PeekMail, name, body_bytes=9)["messages"][0]["body"] == b"secret"


def test_a_page_of_mailboxes_is_found_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(administration, "PIECE_NAMES", 3)
    post = Post(permit=lambda identity, action, name: action != "receive" or name.endswith("7"))
    for number in range(30):
        post.mail(1, f"box{number:02}", [b"a"])
    before = len(post.readies)
    page = post.ask(1, wire.MailboxInfo, "box*", limit=2)
    assert [entry["name"] for entry in page["entries"]] == ["box07", "box17"]
    assert page["more"]
    assert len(post.readies) - before > 6
    rest = post.ask(1, wire.MailboxInfo, "box*", "box17", limit=2)
    assert [entry["name"] for entry in rest["entries"]] == ["box27"]
    assert not rest["more"]
    post.mail(1, "box", [b"a"])
    own = Post()
    own.mail(1, "box", [b"a"])
    own.mail(1, "box1", [b"a"])
    page = own.ask(1, wire.MailboxInfo, "box*")
    assert [entry["name"] for entry in page["entries"]] == ["box", "box1"]


def test_a_link_has_a_bound_of_purges_that_wait() -> None:
    post = Post(sync=False, link_queries_max=2)
    post.mail(1, "box", [b"a"])
    purges = [wire.PurgeMail(request, "box", "box") for request in (1, 2, 3)]
    post.send(1, *purges)
    assert post.peers[1].last(wire.Refused).code == "wait"
    post.sync()
    post.run()
    assert {result.request for result in post.peers[1].of(wire.Result)} == {1, 2}
    assert post.ask(1, wire.PurgeMail, "box", "box") is not None


def test_mail_of_the_message_that_made_room_for_it_finds_the_room() -> None:
    post = Post()
    post.ask(1, wire.EditMailbox, "m", {"memory": True, "max_messages": 2})
    post.mail(1, "m", [b"a", b"b"])
    post.inbox(2, 7, "m", records=1)
    [number] = post.numbers(2)
    again = encode([b"a"], subject="s")
    post.broker.receive(
        2,
        "bert",
        [wire.AckMail(7, [(number, number + 1)], 0, 0, -1), wire.Send("m", 55, 0, b"", 0, 0)],
        [again],
        post.now_ms,
    )
    post.run()
    assert not post.peers[2].of(wire.Refused)
    assert [confirm.tracker for confirm in post.peers[2].of(wire.Confirm)] == [55]
