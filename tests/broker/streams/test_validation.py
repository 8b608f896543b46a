"""Typed streams with validate = full: what no schema describes is refused by name, and not stored.

Which rows pass, and which do not, is tested with the check itself: tests/protocol.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode, encode_arrow
from malamute_protocol.schema import schema_id
from malamute_protocol.version import Feature
from malamute_py.broker.ready import BatchChecked
from tests.broker.shell import Shell
from tests.broker.streams.test_administration import asked
from tests.broker.streams.test_declared import put

arrow: Any = pa
OLD = arrow.schema([arrow.field("n", arrow.int32(), nullable=False), ("s", arrow.string())])
NEW = arrow.schema([*OLD, ("x", arrow.float64())])
OLD_BYTES, NEW_BYTES = (schema.serialize().to_pybytes() for schema in (OLD, NEW))
ROWS = {"n": [1, 2], "s": ["a", "bcd"]}


def rows(values: Any = None, schema: Any = OLD, *, damage: bool = False, **options: Any) -> bytes:
    message = arrow.RecordBatch.from_pydict(values or ROWS, schema=schema).serialize().to_pybytes()
    if damage:
        message = message.replace(b"abcd", b"ab\xff\xff")
    number = schema_id(schema.serialize().to_pybytes())
    return encode_arrow(message, 2, schema_id=number, subject="s", **options)


def made(**options: Any) -> Shell:
    shell = Shell(validates=True, **options)
    shell.hello(1, features=int(Feature.TYPED))
    settings = {"schema": OLD_BYTES, "validate": "full"}
    assert asked(shell, wire.CreateStream(1, "s", settings))["settings"]["validate"] == "full"
    return shell


def reason(shell: Shell) -> str:
    refused: wire.Refused = shell.peers[1].last(wire.Refused)
    return refused.reason


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_a_batch_is_stored_if_each_value_is_one_of_its_column(codec: str) -> None:
    shell = made()
    assert put(shell, rows(codec=codec), 1) == ""
    assert put(shell, rows(damage=True, codec=codec), 2) == "bad_batch"
    assert "column 's': Invalid UTF8 sequence at string index 1" in reason(shell)
    assert put(shell, rows({"n": [1, 2], "s": [None, "x"]}, codec=codec), 3) == ""
    assert shell.stream("s").next == 4


def test_what_is_no_arrow_message_is_refused_and_other_bodies_as_ever() -> None:
    shell = made()
    number = schema_id(OLD_BYTES)
    assert put(shell, encode_arrow(b"garbage." * 9, 2, schema_id=number, subject="s"), 1) == (
        "bad_batch"
    )
    assert put(shell, encode([b"x"]), 2) == "bad_schema"
    assert put(shell, rows({**ROWS, "x": [1.0, 2.0]}, NEW), 3) == "bad_schema"
    assert put(shell, rows()[:-8] + bytes(8), 4) == "corrupt"
    assert shell.stream("s").next == 0


def test_a_refused_batch_takes_no_sequence() -> None:
    shell = made()
    opened = asked(shell, wire.OpenProducer(5))
    producer = {"producer_id": opened["id"], "producer_epoch": opened["epoch"]}
    assert put(shell, rows(damage=True, first_sequence=0, **producer), 1) == "bad_batch"
    assert put(shell, rows(first_sequence=0, **producer), 2) == ""


def test_a_step_with_a_batch_that_is_none_of_the_schema_is_refused_whole() -> None:
    shell = made()
    shell.send(
        1, wire.Atomic(9, 2), wire.Publish("other", 0), wire.Publish("s", 0),
        frames=[encode([b"x"]), rows(damage=True)],
    )  # fmt: skip
    assert shell.peers[1].last(wire.Refused).code == "bad_batch"
    shell.send(
        1, wire.Atomic(10, 2), wire.Publish("s", 0), wire.Publish("s", 0), frames=[rows(), rows()]
    )
    assert shell.stream("s").next == 4


def test_a_batch_of_a_transaction_is_refused_when_it_is_staged() -> None:
    shell = made()
    key = b"k" * 16
    shell.send(1, wire.BeginTransaction(key, 8))
    staged = wire.Stage(key, "s", 0, 9)
    assert shell.send(1, staged, frames=[rows(damage=True)]).last(wire.Refused).code == "bad_batch"
    assert shell.send(1, staged, frames=[rows()]).last(wire.Confirm).tracker == 9


def test_later_versions_of_the_schema_are_validated_by_their_own_columns() -> None:
    shell = made()
    asked(shell, wire.EditStream(2, "s", {"schema": NEW_BYTES}))
    newer = {**ROWS, "x": [1.0, None]}
    assert [put(shell, content, 3) for content in (rows(newer, NEW), rows())] == ["", ""]
    assert put(shell, rows(newer, NEW, damage=True), 4) == "bad_batch"
    shell.restart()
    shell.hello(1)
    assert put(shell, rows(damage=True), 5) == "bad_batch"
    assert put(shell, rows(newer, NEW), 6) == ""


def test_the_setting_is_taken_and_taken_back_and_concerns_new_batches_alone() -> None:
    shell = Shell(validates=True)
    shell.hello(1)
    asked(shell, wire.CreateStream(1, "s", {"schema": OLD_BYTES}))
    assert put(shell, rows(damage=True), 2) == ""
    asked(shell, wire.EditStream(3, "s", {"validate": "full"}))
    assert put(shell, rows(damage=True), 4) == "bad_batch"
    edited = wire.EditStream(5, "s", {"description": "d"}, replace=True)
    assert asked(shell, edited)["settings"].get("validate", "schema") == "schema"
    assert put(shell, rows(damage=True), 6) == ""
    assert shell.stream("s").next == 4


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"validate": "full"}, "bad_setting"),
        ({"validate": "twice", "schema": OLD_BYTES}, "bad_setting"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(settings: dict[str, Any], code: str) -> None:
    shell = Shell(validates=True)
    shell.hello(1)
    assert asked(shell, wire.CreateStream(1, "s", settings)) == code
    assert "validate" in reason(shell)


def test_a_broker_without_pyarrow_refuses_the_setting_and_the_batches_by_name() -> None:
    shell = Shell()
    shell.hello(1)
    settings = {"schema": OLD_BYTES, "validate": "full"}
    assert asked(shell, wire.CreateStream(1, "s", settings)) == "unsupported"
    assert "malamute-py[arrow]" in reason(shell)
    other = made()
    other.settings = Shell().settings
    other.restart()
    other.hello(1)
    assert put(other, rows(), 2) == "unsupported"


def test_a_batch_that_was_not_validated_waits() -> None:
    shell = made()
    shell.broker.receive(1, "", [wire.Publish("s", 7)], [rows()], shell.now_ms)
    shell.run()
    assert shell.peers[1].last(wire.Refused).code == "wait"


def test_a_message_waits_until_its_batches_are_validated() -> None:
    shell = made()
    frame = rows()
    commands = [wire.Publish("s", 7)]
    assert not shell.broker.read_ahead(1, commands, [frame], shell.now_ms)
    assert shell.broker.validating(1)
    (check,) = shell.broker.take_ready().checks
    assert (check.content, check.schema) == (frame, OLD_BYTES)
    assert not shell.broker.read_ahead(1, commands, [frame], shell.now_ms)
    assert not shell.broker.take_ready().checks
    assert shell.broker.checked(BatchChecked(check.token)) == 1
    assert shell.broker.read_ahead(1, commands, [frame], shell.now_ms)
    assert not shell.broker.validating(1)


def test_an_outcome_for_a_link_that_has_gone_is_dropped_and_an_error_costs_the_link() -> None:
    shell = made()
    shell.planted = True
    for link in (2, 3):
        shell.hello(link)
    for link in (2, 3):
        shell.broker.read_ahead(link, [wire.Publish("s", 7)], [rows()], shell.now_ms)
    gone, failed = shell.broker.take_ready().checks
    shell.broker.link_lost(2, shell.now_ms)
    shell.run()
    assert shell.broker.checked(BatchChecked(gone.token, "internal", "e", ValueError("e"))) == 2
    shell.broker.checked(BatchChecked(failed.token, "internal", "e", ValueError("e")))
    shell.run()
    assert shell.peers[3].last(wire.Bye).code == "internal"


def test_who_may_not_write_has_nothing_validated() -> None:
    shell = made(permit=lambda owner, action, name: action != "write")
    assert shell.broker.read_ahead(1, [wire.Publish("s", 7)], [rows()], shell.now_ms)
    assert put(shell, rows(), 8) == "forbidden"


def test_streams_without_it_are_asked_for_nothing() -> None:
    shell = Shell(validates=True)
    shell.hello(1)
    asked(shell, wire.CreateStream(1, "t", {"schema": OLD_BYTES}))
    before = shell.broker.ahead_bytes
    assert before > 0
    assert not shell.broker.reads_first(rows())
    asked(shell, wire.CreateStream(2, "s", {"schema": OLD_BYTES, "validate": "full"}))
    assert shell.broker.reads_first(rows())
    assert shell.broker.ahead_bytes == 0
    asked(shell, wire.RemoveStream(3, "s"))
    assert shell.broker.ahead_bytes == before
    assert not shell.broker.reads_first(rows())
