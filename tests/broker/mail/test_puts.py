"""Puts: the bounds of mailboxes, permissions, confirms, and batches that come again."""

from __future__ import annotations

from malamute_protocol import commands as wire
from malamute_protocol.commands import Level
from malamute_protocol.encode import encode, encode_arrow
from malamute_protocol.stamp import STAMP_BYTES
from tests.broker.post import Post, code


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


def test_a_client_without_permission_is_refused_but_never_at_its_own_mailbox() -> None:
    def permit(identity: str, action: str, name: str) -> bool:
        allowed = (("anna", "send", "bert"), ("anna", "create_mailbox", "bert"))
        return action == "identity" or (identity, action, name) in allowed

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
