"""Administration: facts and pages of mailboxes, settings, purge and removal."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_py.broker.mail import administration
from tests.broker.post import Post, code


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


@pytest.mark.moderate
def test_a_purge_goes_on_behind_messages_that_readers_hold() -> None:
    """It was answered as finished after as many puts as it looks at in a piece."""
    post = Post()
    held = administration.PIECE_PUTS
    for _ in range(held):
        post.mail(1, "bert", [b"held"])
    post.inbox(2, mailbox="bert", records=held)
    post.mail(1, "bert", [b"free"])
    assert post.ask(1, wire.PurgeMail, "bert", "bert") == {"count": 1, "held": held}
    assert post.info("bert")["messages"] == held


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


def test_the_oldest_message_is_the_first_of_those_that_wait_for_no_time() -> None:
    post = Post()
    begun = post.now_ms
    post.mail(1, "box", [b"delayed"], deliver_at_ms=begun + 5_000)
    assert post.info("box")["oldest_ms"] == 0
    post.now_ms += 100
    post.mail(1, "box", [b"waits"])
    post.now_ms += 100
    post.mail(1, "box", [b"urgent"], priority=5)
    assert post.info("box")["oldest_ms"] == begun + 100
    post.restart()
    assert post.info("box")["oldest_ms"] == begun + 100
    post.wait(5_000)
    assert post.info("box")["oldest_ms"] == begun
    post.inbox(2, mailbox="box", records=1)
    assert post.info("box")["held"] == 1
    assert post.info("box")["oldest_ms"] == begun


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


def test_a_change_that_never_becomes_durable_is_refused() -> None:
    post = Post(sync=False)
    post.mail(1, "box", [b"x"])
    assert post.ask(1, wire.EditMailbox, "box", {"description": "d"}) is None
    post.broker.ring_failed("main", "journal_failed", "the disk is gone")
    post.run()
    assert post.peers[1].last(wire.Refused).code == "journal_failed"


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


def test_a_mailbox_whose_name_is_the_prefix_itself_is_listed_first() -> None:
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
