"""Edits of streams: several at once, and beside the first batch, which settles the body kind."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode, encode_lists
from tests.broker.shell import Shell


def world() -> Shell:
    """A broker with a stream that has no record."""
    shell = Shell()
    shell.hello(1)
    shell.send(1, wire.CreateStream(2, "s", {}))
    return shell


def settings(shell: Shell) -> dict[str, Any]:
    answer = shell.send(1, wire.StreamInfo(3, "s")).last(wire.Result)
    found: dict[str, Any] = answer.value["settings"]
    return found


def test_edits_of_one_message_add_up() -> None:
    shell = world()
    shell.send(
        1, wire.EditStream(5, "s", {"max_records": 7}), wire.EditStream(6, "s", {"max_bytes": 9})
    )
    found = settings(shell)
    assert (found["max_records"], found["max_bytes"]) == (7, 9)


def test_an_edit_while_another_is_on_its_way_keeps_it() -> None:
    shell = world()
    broker = shell.broker
    broker.receive(1, "", [wire.EditStream(5, "s", {"max_records": 7})], [], shell.now_ms)
    ready = broker.take_ready()
    broker.receive(1, "", [wire.EditStream(6, "s", {"max_bytes": 9})], [], shell.now_ms)
    shell._do(ready)
    shell.run()
    found = settings(shell)
    assert (found["max_records"], found["max_bytes"]) == (7, 9)


def test_an_edit_that_the_log_refuses_is_not_what_the_next_begins_from() -> None:
    shell = world()
    shell.refuse["main"] = ("full", "no room")
    shell.send(1, wire.EditStream(5, "s", {"max_records": 7}))
    del shell.refuse["main"]
    shell.send(1, wire.EditStream(6, "s", {"max_bytes": 9}))
    found = settings(shell)
    assert (found["max_records"], found["max_bytes"]) == (0, 9)


@pytest.mark.parametrize("edit_first", [False, True])
def test_an_edit_beside_the_first_batch_leaves_its_body_kind(edit_first: bool) -> None:
    shell = world()
    commands = [wire.Publish("s", 7), wire.EditStream(5, "s", {"max_records": 7})]
    if edit_first:
        commands.reverse()
    shell.send(1, *commands, frames=[encode([b"a"])])
    for _ in range(2):
        found = settings(shell)
        assert (found["max_records"], found["body_kind"]) == (7, "blob")
        shell.send(1, wire.Publish("s", 8), frames=[encode_lists([[b"a", b"b"]])])
        assert shell.peers[1].last(wire.Refused).code == "bad_batch"
        shell.restart()
        shell.hello(1)


def test_a_first_batch_while_an_edit_is_on_its_way_leaves_the_edit_and_the_body_kind() -> None:
    shell = world()
    broker = shell.broker
    broker.receive(1, "", [wire.EditStream(5, "s", {"max_records": 7})], [], shell.now_ms)
    ready = broker.take_ready()
    broker.receive(1, "", [wire.Publish("s", 7)], [encode([b"a"])], shell.now_ms)
    shell._do(ready)
    broker.receive(1, "", [wire.Publish("s", 8)], [encode_lists([[b"a", b"b"]])], shell.now_ms)
    shell.run()
    assert shell.peers[1].last(wire.Refused).code == "bad_batch"
    found = settings(shell)
    assert (found["max_records"], found["body_kind"]) == (7, "blob")


def test_a_schema_behind_another_edit_is_declared_when_its_own_change_is_in_the_log() -> None:
    shell = world()
    schema = pa.schema([("price", pa.float64())]).serialize().to_pybytes()
    peer = shell.send(
        1, wire.EditStream(5, "s", {"max_records": 7}), wire.EditStream(6, "s", {"schema": schema})
    )
    assert [answer.request for answer in peer.of(wire.Result)][-2:] == [5, 6]
    found = settings(shell)
    assert (found["max_records"], found["body_kind"]) == (7, "arrow")
    assert not [event for event in shell.events if event.name == "internal_error"]


@pytest.mark.parametrize("how", ["unknown producer", "step", "stage"])
def test_a_batch_that_is_refused_settles_no_body_kind(how: str) -> None:
    shell = world()
    lists = encode_lists([[b"a", b"b"]])
    if how == "unknown producer":
        frame = encode_lists([[b"a", b"b"]], producer_id=7, first_sequence=0)
        shell.send(1, wire.Publish("s", 7), frames=[frame])
    elif how == "step":
        parts = [wire.Publish("s", 0), wire.MoveCursor("s", "c", 99, 0)]
        shell.send(1, wire.Atomic(7, len(parts)), *parts, frames=[lists])
    else:
        shell.send(1, wire.BeginTransaction(b"t", 6), wire.Stage(b"t", "s", 0, 5), frames=[lists])
        shell.restart()
        shell.hello(1)
        assert settings(shell)["body_kind"] == "list", "a staged batch is taken"
        return
    assert isinstance(shell.peers[1].commands[-1], wire.Refused)
    assert not settings(shell)["body_kind"]
    shell.send(1, wire.Publish("s", 8), frames=[encode([b"a"])])
    assert shell.peers[1].last(wire.Confirm).tracker == 8
    shell.restart()
    shell.hello(1)
    assert settings(shell)["body_kind"] == "blob"


def test_two_parts_of_a_step_settle_one_body_kind() -> None:
    shell = world()
    parts = [wire.Publish("s", 0), wire.Publish("s", 0)]
    frames = [encode([b"a"]), encode_lists([[b"a", b"b"]])]
    shell.send(1, wire.Atomic(7, 2), *parts, frames=frames)
    assert shell.peers[1].last(wire.Refused).code == "bad_batch"
    shell.send(1, wire.Atomic(8, 2), *parts, frames=[frames[1], frames[1]])
    assert shell.peers[1].last(wire.Confirm).tracker == 8
    assert settings(shell)["body_kind"] == "list"
