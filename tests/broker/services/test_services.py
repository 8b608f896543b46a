"""Services in memory only, and services in atomic steps."""

from __future__ import annotations

from typing import Any

from malamute_protocol import commands as wire
from malamute_protocol.commands import WorkState
from malamute_protocol.encode import encode
from tests.broker.service_world import World, letters, pair


def in_memory(**settings: Any) -> World:
    world = pair(**settings)
    world.ask(1, wire.EditService(7, "s", {"memory": True, "attempts_max": 2, "backoff_ms": 10}))
    return world


def test_requests_in_memory_are_confirmed_as_none_and_never_logged() -> None:
    world = in_memory()
    batches = len(world.shell.rings["main"])
    world.offer(2)
    tracker = world.request(1, b"a", b"b", key=b"k")
    answer = world.confirmed(1, tracker)
    assert (answer.level, answer.offset) == (1, world.shell.epoch << 40)
    first = answer.offset
    world.reply(2, [first, first + 1])
    assert len(world.replies(1)) == 2
    assert len(world.shell.rings["main"]) == batches
    assert world.queued() == 0
    assert world.shell.broker.gauges["mail_memory_bytes"] > 0, "the replies wait for their ACK"


def test_requests_in_memory_are_gone_after_a_restart_and_their_service_is_not() -> None:
    world = in_memory()
    world.request(1, b"a")
    world.shell.restart()
    world.client(1)
    info = world.info(1)
    assert (info["waiting"], info["settings"]["memory"]) == (0, True)
    tracker = world.request(1, b"b")
    assert world.confirmed(1, tracker).offset == world.shell.epoch << 40


def test_a_level_that_memory_cannot_keep_is_refused() -> None:
    world = in_memory()
    assert world.refused(1, world.request(1, b"a", level=3)).code == "unsupported"
    assert world.queued() == 0


def test_the_life_of_a_request_in_memory_is_the_same() -> None:
    world = in_memory()
    world.offer(2, lease_ms=500)
    world.request(1, b"a", key=b"k", timeout_ms=60_000)
    world.shell.wait(510)
    world.shell.wait(50)
    assert [task.work.attempts for task in world.work(2)] == [1, 2]
    world.shell.wait(510)
    world.shell.wait(50)
    assert world.mail(1)[0].mail.why == "lease: handed out 2 times"
    assert [letter.body for letter in letters(world, 1)] == [b"a"]
    world.request(1, b"b", key=b"l", timeout_ms=100)
    world.shell.wait(110)
    assert world.mail(1)[-1].mail.why == "expired"
    world.request(1, b"c", key=b"m")
    assert world.ask(1, wire.CancelRequest(7, "s", b"m")) == {"count": 1}
    assert world.queued() == 0


def test_replies_of_a_service_in_memory_to_a_mailbox_in_the_log_are_logged() -> None:
    world = World()
    world.client(1, "req")
    world.worker(2, "ann")
    world.ask(1, wire.EditService(7, "s", {"memory": True}))
    world.offer(2)
    number = world.confirmed(1, world.request(1, b"a", key=b"k")).offset
    answer = world.confirmed(2, world.reply(2, [number], level=3))
    assert answer.level == 3
    assert world.replies(1) == [b"re: %d" % number]
    assert world.queued() == 0


def test_a_step_replies_audits_and_completes_together() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", key=b"k")
    world.shell.send(
        2,
        wire.Atomic(900, 3),
        wire.Publish("audit", 0),
        wire.Reply(1, [0], 0, False),
        wire.AckWork(1, [(0, 1)], WorkState.COMPLETED),
        frames=[encode([b"seen"], subject="x"), encode([b"yes"], subject="r")],
    )
    world.confirmed(2, 900)
    assert world.replies(1) == [b"yes", b""]
    assert world.queued() == 0


def test_a_step_that_is_refused_leaves_the_request_in_hand() -> None:
    world = pair()
    world.offer(2)
    world.request(1, b"a", key=b"k")
    world.shell.send(
        2,
        wire.Atomic(900, 2),
        wire.Reply(1, [0], 0, True),
        wire.AckWork(1, [(0, 1)], WorkState.COMPLETED),
        frames=[encode([b"yes"], subject="r")],
    )
    assert world.refused(2, 900).code == "not_held"
    assert world.replies(1) == []
    assert world.info(1)["held"] == 1
    world.confirmed(2, world.reply(2, [0]))
    assert world.replies(1) == [b"re: 0"]


def test_a_request_in_a_step_is_handed_out_when_the_step_is_in_the_log() -> None:
    world = pair()
    world.offer(2)
    world.shell.send(
        1,
        wire.Atomic(900, 2),
        wire.Request("s", 0, key=b"k"),
        wire.Request("s", 0, key=b"l"),
        frames=[encode([b"a"], subject="x"), encode([b"b"], subject="x")],
    )
    world.confirmed(1, 900)
    assert [task.body for task in world.work(2)] == [b"a", b"b"]
