"""Keys: a retry is a duplicate, and a key of another command is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
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


def say(post: Stepping, *commands: wire.Command, frames: int = 1) -> Any:
    post.peers[1].commands.clear()
    post.send(1, *commands, frames=[FRAME] * frames)
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


def test_a_key_of_an_earlier_version_is_compared_with_nothing() -> None:
    post = Stepping()
    post.mail(1, "A", [b"a"])
    keys = post.broker._shard.queues.keys
    keys["anna", KEY] = KeyRow(0, 1, 1)
    for use in USES.values():
        assert use(post).duplicate
    assert StepTaken("anna", KEY, 1).command == 0


def test_another_sender_has_keys_of_its_own() -> None:
    post = Stepping()
    assert not post.mail(1, "A", [b"a"], key=KEY).duplicate
    assert not post.mail(2, "B", [b"b"], key=KEY).duplicate
    assert code(post.step(3, send("C", b"c"), key=KEY)) == "Confirm"
