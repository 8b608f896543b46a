"""Steps on their way: keys, the window, the bounds of a bundle, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import Level
from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_protocol.limits import Limits
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.broker import AppendRefused, Ready
from malamute_py.broker.log import steps as steps_module
from malamute_py.changelog import tables
from tests.broker.log.test_mail_steps import Stepping, code, send
from tests.broker.post import Post

FRAME = encode([b"a"], subject="s")


def unconfirmed(post: Post, link: int) -> int:
    found = post.broker._links.get(link)
    assert found is not None
    return found.unconfirmed_bytes


# --- keys ------------------------------------------------------------------------------------


def test_a_key_of_a_part_is_taken_once_within_its_step() -> None:
    post = Stepping()
    twice = post.step(1, send("box", b"a", key=b"k"), send("box", b"a", key=b"k"))
    assert code(twice) == "conflict"
    assert "part 2 (Send)" in twice.reason
    assert code(post.step(1, send("box", b"a", key=b"k"), key=b"k")) == "conflict"
    assert code(post.info("box")) == "unknown_mailbox"


def test_a_batch_that_comes_again_while_its_step_is_on_its_way_is_accepted_once() -> None:
    post = Stepping(sync=False)
    post.mail(1, "box", [b"before"])
    commands = [
        wire.Atomic(5, 2), wire.Send("other", 0), wire.Send("box", 0, 0, b"k"),
        wire.Send("box", 6, 0, b"k"), wire.Atomic(7, 1), wire.Send("box", 0, 0, b"k"),
    ]  # fmt: skip
    post.send(1, *commands, frames=[FRAME] * 4)
    assert post.answer(1, 7).code == "conflict"
    assert post.answer(1, 6) is None, "confirmed only when its step is"
    post.sync()
    post.run()
    answer = post.answer(1, 6)
    assert (answer.duplicate, answer.offset, answer.level) == (True, 2, Level.SYNCED)
    assert (post.answer(1, 5).duplicate, post.answer(1, 5).offset) == (False, 1)
    assert post.info("box")["messages"] == 2
    post.mail(1, "box", [b"a"], key=b"k", tracker=8)
    assert (post.answer(1, 8).duplicate, post.answer(1, 8).offset) == (True, 2)
    assert unconfirmed(post, 1) == 0


def test_a_batch_that_was_sent_without_a_tracker_is_confirmed_when_it_comes_again() -> None:
    post = Post()
    commands = [wire.Send("box", 0, 0, b"k"), wire.Send("box", 6, 0, b"k")]
    post.send(1, *commands, frames=[FRAME, FRAME])
    answer = post.answer(1, 6)
    assert (answer.duplicate, answer.offset, answer.append_time_ms) == (True, 0, post.now_ms)
    assert unconfirmed(post, 1) == 0


def test_a_key_of_a_refused_step_is_free_again_and_its_followers_are_refused() -> None:
    post = Stepping()
    post.refuse["main"] = ("wait", "the ring is held")
    commands = [wire.Atomic(5, 1, 0, b"k"), wire.Send("box", 0), wire.Atomic(6, 1, 0, b"k")]
    post.send(1, *commands, wire.Send("box", 0), frames=[FRAME, FRAME])
    assert [post.answer(1, tracker).code for tracker in (5, 6)] == ["wait", "wait"]
    assert unconfirmed(post, 1) == 0
    post.refuse.clear()
    answer = post.step(1, send("box", b"a"), key=b"k")
    assert (code(answer), answer.duplicate) == ("Confirm", False)


def test_the_oldest_keys_are_forgotten_alike_at_run_time_and_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "KEYS_MAX", 5)
    post = Stepping()
    for key in (b"0", b"1", b"2", b"3"):
        post.mail(1, "box", [b"a"], key=key)
    post.mail(1, "box", [b"a"], key=b"0")
    post.step(1, send("box", b"a", key=b"4"), send("box", b"a"), key=b"5")
    post.mail(1, "box", [b"a"], key=b"6")
    before = dict(post.broker._shard.queues.keys)
    assert [key for _, key in before] == [b"2", b"3", b"4", b"5", b"6"]
    post.restart()
    assert list(post.broker._shard.queues.keys.items()) == list(before.items())
    assert not post.mail(1, "box", [b"a"], key=b"1").duplicate
    assert post.mail(1, "box", [b"a"], key=b"6").duplicate


@pytest.mark.parametrize("flooding", [[2], [4, 5, 6, 7, 8]])
@pytest.mark.parametrize("memory", [False, True])
def test_keys_of_a_sender_push_out_no_keys_of_another(
    monkeypatch: pytest.MonkeyPatch, flooding: list[int], memory: bool
) -> None:
    """101,000 keyed messages of one client pushed out the keys of all: a retry was taken twice."""
    monkeypatch.setattr(tables, "KEYS_MAX", 20)
    monkeypatch.setattr(steps_module, "MEMORY_KEYS_MAX", 20)
    post = Stepping()
    post.ask(1, wire.EditMailbox, "box", {"memory": memory})
    for link in flooding[1:]:
        post.hello(link)  # Senders without an identity count as one, however many they are.
    own = [b"own %d" % n for n in range(10)]
    for key in own:
        assert not post.mail(1, "box", [b"a"], key=key).duplicate
    for n in range(200):
        post.mail(flooding[n % len(flooding)], "box", [b"a"], key=b"flood %d" % n)
    if not memory:
        post.restart()
    for key in own:
        assert post.mail(1, "box", [b"a"], key=key).duplicate, key


@pytest.mark.parametrize("size", [1, 128])
def test_keys_of_any_length_name_a_batch(size: int) -> None:
    post = Post()
    assert not post.mail(1, "box", [b"a"], key=bytes(size)).duplicate
    assert post.mail(1, "box", [b"a"], key=bytes(size)).duplicate
    assert not post.mail(1, "box", [b"a"], key=b"").duplicate
    assert not post.mail(1, "box", [b"a"], key=b"").duplicate
    assert post.info("box")["messages"] == 3


# --- the window -------------------------------------------------------------------------------


def test_the_window_counts_contents_as_the_protocol_says_and_is_free_in_the_end() -> None:
    post = Stepping(sync=False)
    each = len(FRAME) + STAMP_BYTES
    post.mail(1, "box", [b"a"], key=b"k", tracker=5)
    assert unconfirmed(post, 1) == each
    post.mail(1, "box", [b"a"], key=b"k", tracker=6)
    assert unconfirmed(post, 1) == 2 * each, "a duplicate that waits for its confirm counts too"
    post.step(1, send("box", b"a"), send("new", b"b"), tracker=7)
    assert unconfirmed(post, 1) == 4 * each
    post.mail(1, "box", [b"a"], level=int(Level.NONE), tracker=8)
    post.mail(1, "box", [b"a"], level=int(Level.STORED), tracker=9)
    assert unconfirmed(post, 1) == 4 * each
    post.sync()
    post.run()
    assert unconfirmed(post, 1) == 0
    assert post.answer(1, 8) is None


def test_a_step_that_waits_for_its_streams_counts_in_the_window() -> None:
    post = Stepping(sync=False, window_bytes=3 * (len(FRAME) + STAMP_BYTES))
    first = [wire.Atomic(5, 2), wire.Publish("one", 0), wire.Publish("two", 0)]
    second = [wire.Atomic(6, 2), wire.Publish("three", 0), wire.Publish("four", 0)]
    post.broker.receive(1, "", [*first, *second], [FRAME] * 4, post.now_ms)
    assert unconfirmed(post, 1) == 2 * (len(FRAME) + STAMP_BYTES)
    post.run()
    assert post.answer(1, 6).code == "window"
    post.sync()
    post.run()
    assert code(post.answer(1, 5)) == "Confirm"
    assert unconfirmed(post, 1) == 0


@pytest.mark.parametrize("refused", [("disk_full", "no space"), ("wait", "the ring is held")])
def test_refusals_leave_nothing_in_the_window(refused: tuple[str, str]) -> None:
    post = Stepping()
    post.inbox(1, mailbox="box")
    post.mail(2, "box", [b"in"])
    post.refuse["main"] = refused
    post.mail(1, "box", [b"a"], key=b"k")
    post.send(1, wire.Send("box", 5, 0, b"q"), wire.Send("box", 6, 0, b"q"), frames=[FRAME] * 2)
    assert code(post.step(1, send("box", b"a"), wire.AckMail(7, [(0, 1)]))) == refused[0]
    assert code(post.step(1, (wire.Publish("new", 0), [b"a"]))) == refused[0]
    assert code(post.step(1, send("box", b"a"), send("~x", b"b"))) == "unknown_mailbox"
    assert code(post.step(1, (wire.Publish("none\n", 0), [b"a"]))) == "bad_name"
    assert unconfirmed(post, 1) == 0
    assert post.broker.gauges["unsettled_bytes"] == 0


def test_a_lost_link_leaves_nothing_but_the_mail_that_it_sent() -> None:
    post = Stepping(sync=False)
    post.mail(1, "box", [b"a"])
    link = post.broker._links.get(1)
    assert link is not None
    commands = [wire.Atomic(5, 1), wire.Publish("new", 0), wire.Send("box", 6)]
    post.broker.receive(1, "", commands, [FRAME] * 2, post.now_ms)
    post.broker.link_lost(1, post.now_ms)
    post.run()
    post.sync()
    post.run()
    assert link.unconfirmed_bytes == 0
    assert post.broker.gauges["unsettled_bytes"] == 0
    assert post.ask(2, wire.MailboxInfo, "box")["messages"] == 2


def test_a_step_without_a_content_is_not_held_back_by_the_window() -> None:
    post = Stepping(sync=False, window_bytes=1_000)
    post.inbox(2)
    post.mail(1, "bert", [b"a", b"b"])
    assert post.mail(2, "anna", [bytes(5_000)]) is None, "one is always allowed"
    assert post.mail(2, "anna", [b"x"]).code == "window"
    assert post.mail(2, "anna", [b"x"], level=int(Level.NONE)) is None
    assert post.info("anna")["messages"] == 2, "what is never confirmed is in no window"
    assert code(post.ack(2, (0, 1), level=int(Level.STORED))) == "Confirm"
    post.step(2, wire.AckMail(7, [(1, 2)]), tracker=9)
    post.sync()
    post.run()
    assert code(post.answer(2, 9)) == "Confirm"
    assert post.info("bert")["messages"] == 0


def test_steps_with_a_content_that_wait_for_the_disk_are_bounded() -> None:
    post = Post(sync=False, unsynced_bytes_max=20_000)
    answers = [post.mail(1, "box", [bytes(5_000)], tracker=0) for _ in range(5)]
    assert answers[-1].code == "wait"
    post.sync()
    post.run()
    assert post.mail(1, "box", [b"x"], level=int(Level.STORED)).level >= Level.STORED


def test_a_log_that_waits_for_its_checkpoint_takes_what_frees_it_alone_or_together() -> None:
    post = Stepping()
    post.inbox(2)
    post.mail(1, "bert", [b"a", b"b"])
    post.broker.pressed(True)
    assert code(post.mail(2, "anna", [b"x"])) == "wait"
    assert code(post.step(2, wire.AckMail(7, [(0, 1)]), send("anna", b"x"))) == "wait"
    assert code(post.step(2, wire.AckMail(7, [(0, 1)]))) == "Confirm"
    assert code(post.ack(2, (1, 2))) == "Confirm"
    post.broker.pressed(False)
    assert code(post.mail(2, "anna", [b"x"])) == "Confirm"


# --- bundles ----------------------------------------------------------------------------------


def contents(ready: Ready) -> list[int]:
    return [sum(len(batch.content) for batch in bundle.batches) for bundle in ready.appends]


@pytest.mark.moderate
def test_large_changes_do_not_make_a_bundle_that_the_journal_refuses() -> None:
    post = Stepping()
    settings = {"description": "d" * 60_000}
    edits = [wire.EditMailbox(place, f"box{place}", settings) for place in range(1, 401)]
    post.send(1, *edits)
    sizes = [size for ready in post.readies for size in contents(ready)]
    assert sum(sizes) > 400 * 60_000
    assert max(sizes) < 2 << 20
    assert len(post.told("mailbox_created")) == 400


def test_a_step_that_is_too_large_is_refused_alone_and_leaves_its_numbers_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    post = Stepping()
    post.publish(1, "s", [b"0"])
    monkeypatch.setattr(steps_module, "STEP_CHANGE_BYTES", 300)
    commands: list[wire.Command] = [
        wire.Send("one", 5), wire.Atomic(6, 11), wire.Publish("s", 0),
        *(wire.Send(f"new{place}", 0) for place in range(10)),
        wire.Send("two", 7), wire.Atomic(8, 2), wire.Publish("s", 0), wire.Send("new1", 0),
    ]  # fmt: skip
    post.send(1, *commands, frames=[FRAME] * 15)
    assert post.answer(1, 6).code == "too_large"
    assert (post.answer(1, 5).offset, post.answer(1, 7).offset) == (0, 1)
    assert post.answer(1, 8).offset == 1
    assert unconfirmed(post, 1) == 0
    names = [entry["name"] for entry in post.ask(1, wire.MailboxInfo, "*")["entries"]]
    assert names == ["new1", "one", "two"]
    post.restart()
    assert [entry["name"] for entry in post.ask(1, wire.MailboxInfo, "*")["entries"]] == names


@pytest.mark.moderate
def test_a_step_of_four_thousand_parts_is_one_bundle() -> None:
    post = Stepping(limits=Limits(step_parts_max=4_000))
    parts: list[wire.Command] = [wire.Send(f"box{place % 50}", 0) for place in range(4_000)]
    post.send(1, wire.Atomic(9, len(parts)), *parts, frames=[FRAME] * len(parts))
    assert code(post.answer(1, 9)) == "Confirm"
    assert [len(bundle.batches) for ready in post.readies for bundle in ready.appends] == [4_001]
    post.inbox(2, mailbox="box0")
    post.send(2, wire.Atomic(9, 80), *(wire.AckMail(7, [(n, n + 1)]) for n in post.numbers(2)))
    assert code(post.answer(2, 9)) == "Confirm"
    assert post.info("box0")["messages"] == 0


@pytest.mark.moderate
def test_a_step_of_too_many_parts_is_refused_before_any_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of 4,000 parts took the loop 0.1 to 0.2 s, whatever share_commands was."""
    looked = 0
    check = Content.check

    def counted(content: Content, *arguments: Any, **options: Any) -> None:
        nonlocal looked
        looked += 1
        check(content, *arguments, **options)

    monkeypatch.setattr(Content, "check", counted)
    post = Stepping()
    for tracker, count in ((8, 513), (9, 512)):
        looked = 0
        parts = [wire.Send("box", 0)] * count
        post.send(1, wire.Atomic(tracker, count), *parts, frames=[FRAME] * count)
        answer = post.answer(1, tracker)
        if count > 512:
            assert (answer.code, looked) == ("too_large", 0)
        else:
            assert (code(answer), looked) == ("Confirm", 512)
    assert unconfirmed(post, 1) == 0


class Halfway(Post):
    """A journal that takes the first bundle of several and refuses the others."""

    def _do(self, ready: Ready) -> None:
        for place, bundle in enumerate(ready.appends if len(ready.appends) > 1 else ()):
            if place:
                self.broker.append_refused(AppendRefused(bundle.token, "disk_full", "no space"))
            else:
                self.broker.appended(self._append(bundle))
        if len(ready.appends) > 1:
            ready.appends.clear()
        super()._do(ready)


def test_a_mailbox_that_one_bundle_created_stays_when_the_next_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps_module, "BUNDLE_STEPS", 1)
    post = Halfway()
    edit = wire.EditMailbox(5, "box", {"max_messages": 6})
    post.send(1, edit, wire.Send("box", 7), frames=[FRAME])
    assert post.answer(1, 7).code == "disk_full"
    before = post.info("box")
    assert before["settings"]["max_messages"] == 6
    assert code(post.mail(1, "box", [b"x"])) == "Confirm"
    post.restart()
    assert post.info("box")["number"] == before["number"]


def test_a_part_that_the_journal_has_is_confirmed_with_its_own_number() -> None:
    post = Stepping()
    answer: Any = post.step(2, (wire.Publish("s", 0), [b"p"]), send("box", b"a", key=b"k"))
    assert (code(answer), answer.offset) == ("Confirm", 0)
    post.mail(2, "box", [b"b"])
    again = post.mail(2, "box", [b"a"], key=b"k")
    assert (again.duplicate, again.offset) == (True, 0)


def test_a_sender_that_asks_for_no_confirm_gets_a_refusal() -> None:
    post = Post()
    post.publish(1, "s", [b"a"])
    none = int(Level.NONE)
    commands = [wire.Publish("s", 44, none), wire.Send("box", 45, none), wire.Publish("s", 0, none)]
    post.send(1, *commands, frames=[FRAME] * 3)
    assert post.answer(1, 44) is None
    assert post.answer(1, 45) is None
    post.refuse["main"] = ("disk_full", "no space")
    told = len(post.peers[1].commands)
    post.send(1, *commands, frames=[FRAME] * 3)
    answers: list[Any] = post.peers[1].commands[told:]
    assert [answer.reference for answer in answers] == [44, 0, 45]
    assert unconfirmed(post, 1) == 0
