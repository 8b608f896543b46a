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
