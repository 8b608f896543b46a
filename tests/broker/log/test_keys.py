"""Keys: a retry is a duplicate, and a key of another command or content is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.content import Content
from malamute_protocol.encode import encode, encode_lists
from malamute_py.broker.log.keys import digest_of, digest_of_parts
from malamute_py.changelog.records import StepTaken
from malamute_py.changelog.tables import KeyRow
from tests.broker.log.test_mail_steps import Stepping, code, send
from tests.broker.post import Post
from tests.broker.service_world import World

KEY = b"order 17"
FRAME = encode([b"a"], subject="s")
TRACKER = 900

Use: TypeAlias = Callable[[Stepping], Any]
"""A command of link 1 under KEY; returns its answer."""


def say(post: Stepping, *commands: wire.Command, frame: bytes = FRAME) -> Any:
    post.peers[1].commands.clear()
    post.send(1, *commands, frames=[frame])
    return post.answer(1, TRACKER)


def send_to(mailbox: str) -> Use:
    return lambda post: say(post, wire.Send(mailbox, TRACKER, 0, KEY))


def request_of(service: str) -> Use:
    return lambda post: say(post, wire.Request(service, TRACKER, key=KEY))


def atomic(post: Stepping) -> Any:
    return say(post, wire.Atomic(TRACKER, 1, 0, KEY), wire.Publish("stream", 0))


def part_to(mailbox: str) -> Use:
    """A message whose key is that of a part of a step without a key."""
    return lambda post: say(post, wire.Atomic(TRACKER, 1), wire.Send(mailbox, 0, 0, KEY))


USES: dict[str, Use] = {
    "send A": send_to("A"),
    "send B": send_to("B"),
    "request A": request_of("A"),
    "request B": request_of("B"),
    "atomic": atomic,
}
OTHERS = [(one, other) for one in USES for other in USES if one != other]


@pytest.mark.parametrize(("first", "second"), OTHERS)
@pytest.mark.parametrize("restart", [False, True])
def test_a_key_that_another_command_took_is_refused_and_nothing_is_done(
    first: str, second: str, restart: bool
) -> None:
    post = Stepping()
    for name in ("A", "B"):
        post.mail(2, name, [b"before"])
        post.send(2, wire.Request(name, 1), frames=[FRAME])
    assert code(USES[first](post)) == "Confirm"
    if restart:
        post.restart()
    before = [post.info(name)["messages"] for name in ("A", "B")]
    refused = USES[second](post)
    assert code(refused) == "conflict", refused
    assert "another command" in refused.reason
    assert [post.info(name)["messages"] for name in ("A", "B")] == before
    again = USES[first](post)
    assert (code(again), again.duplicate) == ("Confirm", True)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("restart", [False, True])
def test_a_retry_is_a_duplicate_also_after_a_restart(use: str, restart: bool) -> None:
    post = Stepping()
    assert not USES[use](post).duplicate
    if restart:
        post.restart()
    assert USES[use](post).duplicate


def test_the_same_message_with_another_time_is_a_duplicate() -> None:
    post = Post()
    assert not post.mail(1, "A", [b"a"], key=KEY, client_time_ms=1).duplicate
    assert post.mail(1, "A", [b"a"], key=KEY, client_time_ms=2).duplicate


@pytest.mark.parametrize(("first", "second"), OTHERS)
def test_a_key_of_a_command_that_is_on_its_way_is_refused_to_another(
    first: str, second: str
) -> None:
    commands: dict[str, Callable[[int], list[wire.Command]]] = {
        "send A": lambda tracker: [wire.Send("A", tracker, 0, KEY)],
        "send B": lambda tracker: [wire.Send("B", tracker, 0, KEY)],
        "request A": lambda tracker: [wire.Request("A", tracker, key=KEY)],
        "request B": lambda tracker: [wire.Request("B", tracker, key=KEY)],
        "atomic": lambda tracker: [wire.Atomic(tracker, 1, 0, KEY), wire.Send("C", 0)],
    }
    post = Stepping()
    together = [*commands[first](1), *commands[second](2), *commands[first](3)]
    post.broker.receive(1, "", together, [FRAME] * 3, post.now_ms)
    post.run()
    assert [code(post.answer(1, tracker)) for tracker in (1, 2, 3)] == [
        "Confirm", "conflict", "Confirm",
    ]  # fmt: skip
    assert post.answer(1, 3).duplicate


def test_a_step_that_waited_for_its_stream_is_refused_when_its_key_was_taken_meanwhile() -> None:
    post = Stepping()
    commands = [wire.Atomic(1, 1, 0, KEY), wire.Publish("new", 0), wire.Send("A", 2, 0, KEY)]
    post.broker.receive(1, "", commands, [FRAME] * 2, post.now_ms)
    post.run()
    assert [code(post.answer(1, tracker)) for tracker in (1, 2)] == ["conflict", "Confirm"]
    assert post.broker.counters["steps_duplicate"] == 0


def test_a_key_of_a_part_is_compared_with_that_of_a_lone_message() -> None:
    post = Stepping()
    assert code(part_to("A")(post)) == "Confirm"
    assert send_to("A")(post).duplicate
    assert code(send_to("B")(post)) == "conflict"
    assert code(atomic(post)) == "conflict"


def test_a_retry_to_a_mailbox_that_was_removed_meanwhile_is_a_duplicate() -> None:
    post = Stepping()
    send_to("A")(post)
    post.ask(1, wire.RemoveMailbox, "A", "A")
    assert code(post.info("A")) == "unknown_mailbox"
    assert send_to("A")(post).duplicate
    post.mail(2, "A", [b"made anew"])
    assert send_to("A")(post).duplicate


def test_keys_of_mail_in_memory_are_compared_too() -> None:
    post = Stepping()
    for name in ("A", "B"):
        post.ask(1, wire.EditMailbox, name, {"memory": True})
    assert code(send_to("A")(post)) == "Confirm"
    assert code(send_to("B")(post)) == "conflict"
    assert code(atomic(post)) == "conflict"
    assert send_to("A")(post).duplicate


@pytest.mark.parametrize("memory", [False, True])
def test_an_answer_and_an_acknowledgement_of_work_have_no_key_in_common(memory: bool) -> None:
    world = World()
    world.client(1, "desk")
    world.ask(1, wire.EditService(7, "s", {"memory": memory}))
    world.worker(2, "ann")
    world.offer(2)
    world.request(1, b"one", b"two", key=b"r")
    one, two = world.numbers(2)
    world.shell.send(2, wire.Reply(1, [one], 700, True, key=KEY), frames=[FRAME])
    ack = wire.AckWork(1, [(two, two + 1)], wire.WorkState.COMPLETED, 701, key=KEY)
    world.shell.send(2, ack)
    assert world.refused(2, 701).code == "conflict"
    world.shell.send(2, wire.Reply(1, [one], 702, True, key=KEY), frames=[FRAME])
    assert world.confirmed(2, 702).duplicate
    assert world.info(1)["waiting"] + world.info(1)["held"] == 1


OTHER_FRAMES: dict[str, bytes] = {
    "another body": encode([b"b"], subject="s"),
    "another subject": encode([b"a"], subject="t"),
    "fields": encode([b"a"], subject="s", fields={"to": "all"}),
    "two messages": encode([b"a", b"a"], subject="s"),
    "a list": encode_lists([[b"a"]], subject="s"),
    "a long body": encode([b"a" * 10_000], subject="s"),
}
SAME_FRAMES: dict[str, bytes] = {
    "time": encode([b"a"], subject="s", client_time_ms=1_000),
    "expiry": encode([b"a"], subject="s", expires_at_ms=9_000_000_000_000),
    "properties": encode([b"a"], subject="s", properties={"traceparent": "00-1"}),
}
CONTENT_USES: dict[str, list[wire.Command]] = {
    "send": [wire.Send("A", TRACKER, 0, KEY)],
    "request": [wire.Request("A", TRACKER, key=KEY)],
    "step": [wire.Atomic(TRACKER, 1, 0, KEY), wire.Send("A", 0)],
    "publish": [wire.Atomic(TRACKER, 1, 0, KEY), wire.Publish("stream", 0)],
}


def kept(post: Stepping) -> list[tuple[tuple[str, bytes], KeyRow]]:
    return list(post.broker._shard.queues.keys.items())


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("use", CONTENT_USES)
def test_a_key_that_comes_again_with_another_content_is_refused_and_nothing_is_done(
    use: str, restart: bool
) -> None:
    post, commands = Stepping(), CONTENT_USES[use]
    post.mail(2, "A", [b"before"])
    assert not say(post, *commands).duplicate
    if restart:
        post.restart()
    before = kept(post), post.info("A")["messages"]
    for frame in OTHER_FRAMES.values():
        refused = say(post, *commands, frame=frame)
        assert code(refused) == "conflict", refused
        assert re.fullmatch(r"key b'.+' was taken before, with another content", refused.reason)
    for frame in (FRAME, *SAME_FRAMES.values()):
        assert say(post, *commands, frame=frame).duplicate
    assert (kept(post), post.info("A")["messages"]) == before
    assert post.broker.counters["steps_conflicting"] == len(OTHER_FRAMES)


def test_a_key_used_twice_is_told_to_the_operator_once_a_link() -> None:
    post = Stepping()
    for frame in (FRAME, *OTHER_FRAMES.values()):
        say(post, *CONTENT_USES["send"], frame=frame)
    told = post.told("key_conflicting")
    assert [(facts["holder"], facts["command"]) for facts in told] == [("anna", "Send")]


@pytest.mark.parametrize("use", CONTENT_USES)
def test_another_content_is_refused_while_the_first_one_is_on_its_way(use: str) -> None:
    post, commands = Stepping(), CONTENT_USES[use]
    frames = [FRAME, OTHER_FRAMES["another body"], FRAME]
    post.broker.receive(1, "", commands * 3, frames, post.now_ms)
    post.run()
    answers = [
        answer for answer in post.peers[1].commands
        if isinstance(answer, wire.Confirm | wire.Refused)
    ]  # fmt: skip
    assert sorted(map(code, answers)) == ["Confirm", "Confirm", "conflict"]


def test_another_content_for_mail_in_memory_is_refused_too() -> None:
    post = Stepping()
    post.ask(1, wire.EditMailbox, "A", {"memory": True})
    assert code(say(post, *CONTENT_USES["send"])) == "Confirm"
    refused = say(post, *CONTENT_USES["send"], frame=OTHER_FRAMES["another body"])
    assert code(refused) == "conflict"
    assert say(post, *CONTENT_USES["send"]).duplicate


def test_a_part_of_a_step_is_compared_with_a_lone_message_by_its_content() -> None:
    post = Stepping()
    assert code(part_to("A")(post)) == "Confirm"
    refused = say(post, *CONTENT_USES["send"], frame=OTHER_FRAMES["another body"])
    assert code(refused) == "conflict"
    assert say(post, *CONTENT_USES["send"]).duplicate


def test_the_contents_of_a_step_are_compared_in_their_order_and_with_their_places() -> None:
    one, other = Content(FRAME), Content(OTHER_FRAMES["another body"])
    to_a, to_b = wire.Send("A", 0), wire.Send("B", 0)
    cursor = wire.MoveCursor("stream", "c", 7, 0)
    steps: list[list[tuple[wire.Command, Content | None]]] = [
        [(to_a, one), (to_b, other)], [(to_a, other), (to_b, one)], [(to_b, one), (to_a, other)],
        [(to_a, one)], [(wire.Publish("A", 0), one)],
    ]  # fmt: skip
    assert len(set(map(digest_of_parts, steps))) == len(steps)
    assert digest_of_parts([(cursor, None), (to_a, one)]) == digest_of_parts([(to_a, one)])
    assert digest_of_parts([(cursor, None)]) == 0


def test_a_step_without_contents_is_compared_by_its_kind_alone() -> None:
    post = Stepping()
    post.mail(2, "A", [b"before"])
    post.send(1, *CONTENT_USES["publish"], frames=[FRAME])
    steps = [
        [wire.Atomic(TRACKER, 1, 0, b"c"), wire.MoveCursor("stream", name, 0, 0)] for name in "xy"
    ]
    assert [say_alone(post, *step).duplicate for step in steps] == [False, True]


def say_alone(post: Stepping, *commands: wire.Command) -> Any:
    post.peers[1].commands.clear()
    post.send(1, *commands)
    return post.answer(1, TRACKER)


def test_a_body_counts_as_it_was_sent_and_is_never_decompressed() -> None:
    plain = Content(encode([b"a" * 1_000], subject="s"))
    packed = Content(encode([b"a" * 1_000], subject="s", codec="gzip"))
    assert digest_of(plain) != digest_of(packed)
    again = Content(encode([b"a" * 1_000], subject="s", codec="gzip", client_time_ms=5))
    assert digest_of(packed) == digest_of(again)
    assert packed._bodies is None


def test_an_answer_that_comes_again_with_another_content_is_refused() -> None:
    world = World()
    world.client(1, "desk")
    world.worker(2, "ann")
    world.offer(2)
    world.request(1, b"one", key=b"r")
    (number,) = world.numbers(2)
    for tracker, frame in ((700, FRAME), (701, OTHER_FRAMES["another body"]), (702, FRAME)):
        reply = wire.Reply(1, [number], tracker, True, key=KEY)
        world.shell.send(2, reply, frames=[frame])
    assert not world.confirmed(2, 700).duplicate
    assert world.refused(2, 701).code == "conflict"
    assert world.confirmed(2, 702).duplicate


def test_a_retry_whose_content_is_none_is_refused_by_name() -> None:
    post = Stepping()
    say(post, *CONTENT_USES["send"])
    broken = bytearray(FRAME)
    broken[104:108] = (1_000).to_bytes(4, "little")  # More bytes of bodies than there are.
    broken[100:104] = (1_000).to_bytes(4, "little")
    assert code(say(post, *CONTENT_USES["send"], frame=bytes(broken))) == "bad_batch"
    assert code(say(post, *CONTENT_USES["send"], frame=b"x" * 200)) == "bad_batch"
    assert say(post, *CONTENT_USES["send"]).duplicate


def test_a_key_of_an_earlier_version_is_compared_with_nothing() -> None:
    post = Stepping()
    post.mail(1, "A", [b"a"])
    keys = post.broker._shard.queues.keys
    keys["anna", KEY] = KeyRow(0, 1, 1)
    for use in USES.values():
        assert use(post).duplicate
    assert StepTaken("anna", KEY, 1).command == StepTaken("anna", KEY, 1).digest == 0


@pytest.mark.parametrize("use", ["send", "step"])
def test_a_key_that_an_earlier_version_took_without_a_digest_stays_a_duplicate(use: str) -> None:
    post, commands = Stepping(), CONTENT_USES[use]
    say(post, *commands)
    post.broker._shard.queues.keys["anna", KEY].digest = 0
    assert say(post, *commands, frame=OTHER_FRAMES["another body"]).duplicate


def test_another_sender_has_keys_of_its_own() -> None:
    post = Stepping()
    assert not post.mail(1, "A", [b"a"], key=KEY).duplicate
    assert not post.mail(2, "B", [b"b"], key=KEY).duplicate
    assert code(post.step(3, send("C", b"c"), key=KEY)) == "Confirm"
