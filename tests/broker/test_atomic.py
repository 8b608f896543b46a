"""Atomic steps: one bundle, one answer, all of it or nothing."""

from __future__ import annotations

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_protocol.limits import Limits
from tests.broker.shell import Peer, Shell, bodies


def step(
    shell: Shell, link: int, *parts: tuple[wire.Command, bytes | None], tracker: int = 1,
    level: int = 0, key: bytes = b"",
) -> Peer:  # fmt: skip
    commands = [wire.Atomic(tracker, len(parts), level, key), *(part for part, _ in parts)]
    frames = [encode([body], subject="s") for _, body in parts if body is not None]
    return shell.send(link, *commands, frames=frames)


def publish(stream: str, body: bytes) -> tuple[wire.Command, bytes]:
    return wire.Publish(stream, 0), body


def everything_in(shell: Shell, stream: str, link: int = 90) -> list[bytes]:
    shell.hello(link)
    return bodies(shell.subscribe(link, link, stream), link)


def test_a_step_over_two_streams_is_one_bundle_and_one_confirm() -> None:
    shell = Shell()
    shell.hello(1)
    shell.publish(1, "a", [b"0"])
    shell.publish(1, "b", [b"0"])
    before = len(shell.readies)
    peer = step(shell, 1, publish("a", b"1"), publish("b", b"2"), tracker=7)
    bundles = [bundle for ready in shell.readies[before:] for bundle in ready.appends]
    assert [len(bundle.batches) for bundle in bundles] == [2]
    confirms = [each for each in peer.of(wire.Confirm) if each.tracker == 7]
    assert [(each.level, each.offset, each.duplicate) for each in confirms] == [(3, 1, False)]
    assert everything_in(shell, "a") == [b"0", b"1"]
    assert everything_in(shell, "b", 91) == [b"0", b"2"]


def test_first_use_creates_the_streams_before_the_step_is_taken() -> None:
    shell = Shell()
    shell.hello(1)
    peer = step(shell, 1, publish("new", b"1"), publish("newer", b"2"))
    assert peer.last(wire.Confirm).tracker == 1
    assert everything_in(shell, "new") == [b"1"]
    assert everything_in(shell, "newer", 91) == [b"2"]


def test_a_step_that_is_refused_leaves_nothing() -> None:
    shell = Shell(permit=lambda identity, action, name: name != "closed")
    shell.hello(1)
    peer = step(shell, 1, publish("a", b"1"), publish("closed", b"2"))
    assert peer.last(wire.Refused).code == "forbidden"
    assert not peer.of(wire.Confirm)
    assert everything_in(shell, "a") == []


def test_a_step_that_the_journal_refuses_leaves_nothing_and_can_be_sent_again() -> None:
    shell = Shell()
    shell.hello(1)
    shell.publish(1, "a", [b"0"])
    shell.refuse["main"] = ("disk_full", "no space")
    peer = step(shell, 1, publish("a", b"1"), key=b"k")
    assert peer.last(wire.Refused).code == "disk_full"
    shell.refuse.clear()
    peer = step(shell, 1, publish("a", b"1"), key=b"k", tracker=2)
    assert not peer.last(wire.Confirm).duplicate
    assert everything_in(shell, "a") == [b"0", b"1"]


@pytest.mark.parametrize("restart", [False, True])
def test_a_step_of_a_key_that_was_taken_is_confirmed_and_does_not_happen_again(
    restart: bool,
) -> None:
    shell = Shell()
    shell.hello(1)
    step(shell, 1, publish("a", b"1"), key=b"k")
    link = 1
    if restart:
        shell.restart()
        link = 2
        shell.hello(link, session=(1).to_bytes(16, "big"))
    peer = step(shell, link, publish("a", b"1"), key=b"k", tracker=2)
    assert peer.last(wire.Confirm).duplicate
    assert everything_in(shell, "a") == [b"1"]


@pytest.mark.parametrize("restart", [False, True])
def test_a_retry_of_what_was_taken_is_never_told_to_wait(restart: bool) -> None:
    # Told so, a client may take it for not taken, and send it anew under another key.
    shell = Shell()
    shell.hello(1)
    step(shell, 1, publish("a", b"1"), key=b"k")
    mail = encode([b"m"], subject="s")
    shell.send(1, wire.Send("box", 2, 0, b"m"), frames=[mail])
    link = 1
    if restart:
        shell.restart()
        link = 2
        shell.hello(link, session=(1).to_bytes(16, "big"))
    shell.broker.pressed(True)
    peer = step(shell, link, publish("a", b"1"), key=b"k", tracker=3)
    assert peer.last(wire.Confirm).duplicate
    peer = shell.send(link, wire.Send("box", 4, 0, b"m"), frames=[mail])
    assert [(one.tracker, one.duplicate) for one in peer.of(wire.Confirm)][-1] == (4, True)
    peer = step(shell, link, publish("a", b"2"), key=b"other", tracker=5)
    assert peer.last(wire.Refused).code == "wait"


def test_a_duplicate_is_not_confirmed_before_the_original_is() -> None:
    shell = Shell(sync=False)
    shell.hello(1)
    shell.publish(1, "a", [b"0"])
    shell.sync()
    shell.run()
    step(shell, 1, publish("a", b"1"), key=b"k", tracker=5)
    peer = step(shell, 1, publish("a", b"1"), key=b"k", tracker=6)
    assert {each.tracker for each in peer.of(wire.Confirm)} == {1}
    shell.sync()
    shell.run()
    assert {each.tracker for each in peer.of(wire.Confirm)} == {1, 5, 6}


def test_a_stream_with_a_ring_of_its_own_cannot_be_part_of_a_step() -> None:
    shell = Shell()
    shell.hello(1)
    shell.send(1, wire.CreateStream(9, "own", {"ring_bytes": 1 << 24}))
    peer = step(shell, 1, publish("a", b"1"), publish("own", b"2"))
    assert peer.last(wire.Refused).code == "cross_ring"
    assert everything_in(shell, "a") == []


def test_a_stored_step_survives_a_kill_and_is_gone_whole_after_a_power_loss() -> None:
    for power_loss in (False, True):
        shell = Shell(sync=False)
        shell.hello(1)
        shell.publish(1, "a", [b"0"])
        shell.publish(1, "b", [b"0"])
        shell.sync()
        shell.run()
        step(shell, 1, publish("a", b"1"), publish("b", b"2"))
        shell.restart(power_loss=power_loss)
        shell.auto_sync = True
        wanted = [] if power_loss else [b"1"]
        assert everything_in(shell, "a") == [b"0", *wanted]
        assert everything_in(shell, "b", 91) == [b"0", *([b"2"] if wanted else [])]


def test_parts_that_cannot_be_are_refused_and_the_link_goes_on() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.send(1, wire.Atomic(3, 1), wire.Ping(4))
    assert peer.last(wire.Refused).code == "unsupported"
    assert not peer.of(wire.Pong), "what a step announces belongs to it"
    peer = shell.send(1, wire.Ping(5))
    assert peer.last(wire.Pong).token == 5


def test_changes_of_one_turn_share_a_batch() -> None:
    shell = Shell()
    shell.hello(1)
    shell.hello(2)
    before = len(shell.readies)
    for link in (1, 2):
        commands = [wire.OpenProducer(link), wire.CreateStream(link + 10, f"s{link}")]
        shell.broker.receive(link, "", commands, [], shell.now_ms)
    shell.run()
    bundles = [bundle for ready in shell.readies[before:] for bundle in ready.appends]
    assert [[batch.count for batch in bundle.batches] for bundle in bundles] == [[4]]


@pytest.mark.moderate
def test_streams_that_others_create_while_a_step_waits_are_no_tower_of_calls() -> None:
    shell = Shell(limits=Limits(step_parts_max=1_500))
    shell.hello(1)
    names = [f"n{number:04}" for number in range(1_500)]
    frame = encode([b"a"], subject="s")
    step = [wire.Atomic(9, len(names)), *(wire.Publish(name, 0) for name in names)]
    # The second stream comes last: all others are there when the step goes on.
    others = [wire.Publish(name, 0, 1) for name in reversed(names)]
    shell.broker.receive(1, "", step, [frame] * len(names), shell.now_ms)
    peer = shell.send(1, *others, frames=[frame] * len(others))
    assert peer.last(wire.Confirm).tracker == 9
