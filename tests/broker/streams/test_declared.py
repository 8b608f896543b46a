"""Typed streams at the broker: what fits, what is refused, how a schema grows, who is told."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode, encode_arrow, encode_lists
from malamute_protocol.schema import schema_id
from malamute_protocol.version import Feature
from tests.broker.shell import Peer, Shell
from tests.broker.streams.test_administration import asked

columns: Any = pa.schema  # its stubs know one form of columns at a time
OLD = columns([("n", pa.int32())]).serialize().to_pybytes()
SAME = columns([("n", pa.int32())], metadata={"a": "b"}).serialize().to_pybytes()
NEW = columns([("n", pa.int64()), ("s", pa.string())]).serialize().to_pybytes()
OTHER = columns([("n", pa.string())]).serialize().to_pybytes()
TYPED = int(Feature.TYPED)


def typed(**options: Any) -> Shell:
    shell = Shell(**options)
    shell.hello(1, features=TYPED)
    assert asked(shell, wire.CreateStream(1, "s", {"schema": OLD}))["name"] == "s"
    return shell


def rows(schema: bytes = OLD, count: int = 2, **options: Any) -> bytes:
    options.setdefault("subject", "s")
    return encode_arrow(b"no broker looks into it.", count, schema_id=schema_id(schema), **options)


def put(shell: Shell, content: bytes, tracker: int, link: int = 1) -> str:
    """Publish a content; "" when it was confirmed, else the code of the refusal."""
    peer = shell.send(link, wire.Publish("s", tracker), frames=[content])
    for command in reversed(peer.commands):
        if isinstance(command, wire.Refused) and command.reference == tracker:
            return command.code
        if isinstance(command, wire.Confirm) and command.tracker == tracker:
            return ""
    raise AssertionError("no answer")


def told(peer: Peer) -> list[tuple[int, int]]:
    return [(command.subscription, command.id) for command in peer.of(wire.Schema)]


def test_a_stream_with_a_schema_takes_rows_of_it_and_nothing_else() -> None:
    shell = typed()
    assert put(shell, rows(), 1) == ""
    refused = [encode([b"x"]), encode_lists([[b"x"]]), rows(OTHER), rows(NEW)]
    for tracker, content in enumerate(refused, 2):
        assert put(shell, content, tracker) == "bad_schema"
    reasons = [refusal.reason for refusal in shell.peers[1].of(wire.Refused)]
    assert "not blob" in reasons[0]
    assert str(schema_id(OTHER)) in reasons[2]
    assert shell.stream("s").next == 2


def test_a_step_with_a_batch_of_another_schema_is_refused_whole() -> None:
    shell = typed()
    peer = shell.send(
        1, wire.Atomic(9, 2), wire.Publish("other", 0), wire.Publish("s", 0),
        frames=[encode([b"x"]), rows(OTHER)],
    )  # fmt: skip
    assert peer.last(wire.Refused).code == "bad_schema"
    shell.send(1, wire.Atomic(10, 1), wire.Publish("s", 0), frames=[rows()])
    assert shell.stream("s").next == 2


@pytest.mark.parametrize("schema", [b"x", OLD[:-8], OLD + bytes(8)])
def test_what_is_no_schema_is_refused_and_makes_no_stream(schema: bytes) -> None:
    shell = Shell()
    shell.hello(1)
    assert asked(shell, wire.CreateStream(1, "s", {"schema": schema})) == "bad_schema"
    assert shell.broker.gauges["streams"] == 0


def test_a_stream_is_created_again_with_any_version_of_its_schema() -> None:
    shell = typed()
    asked(shell, wire.EditStream(2, "s", {"schema": NEW}))
    for number, schema in enumerate((OLD, SAME, NEW), 3):
        again = asked(shell, wire.CreateStream(number, "s", {"schema": schema}))
        assert again["settings"]["schema"] == NEW
    assert asked(shell, wire.CreateStream(8, "s", {"schema": OTHER})) == "stream_exists"
    assert asked(shell, wire.CreateStream(9, "s", {})) == "stream_exists"


@pytest.mark.moderate
def test_a_schema_that_follows_is_a_version_and_batches_of_both_are_taken() -> None:
    shell = typed()
    facts = asked(shell, wire.EditStream(2, "s", {"schema": NEW}))
    assert facts["settings"]["former_schemas"] == [OLD]
    assert [put(shell, rows(schema), n) for n, schema in enumerate((OLD, NEW, OTHER), 1)] == [
        "", "", "bad_schema",
    ]  # fmt: skip
    shell.restart()
    shell.hello(1)
    assert [put(shell, rows(schema), n) for n, schema in enumerate((OLD, NEW, OTHER), 1)] == [
        "", "", "bad_schema",
    ]  # fmt: skip


def test_a_schema_that_cannot_follow_is_refused_by_the_column_that_differs() -> None:
    shell = typed()
    assert asked(shell, wire.EditStream(2, "s", {"schema": OTHER})) == "bad_schema"
    assert "'n: string'" in shell.peers[1].last(wire.Refused).reason
    assert asked(shell, wire.EditStream(3, "s", {"schema": b""})) == "bad_setting"
    assert asked(shell, wire.EditStream(4, "s", {"former_schemas": (NEW,)})) == "bad_setting"
    assert list(shell.stream("s").schemas) == [schema_id(OLD)]


@pytest.mark.moderate
def test_an_edit_with_an_older_version_is_refused_and_changes_nothing() -> None:
    shell = typed()
    asked(shell, wire.EditStream(2, "s", {"schema": NEW}))
    for number, older in enumerate((OLD, SAME), 3):
        edit = wire.EditStream(number, "s", {"schema": older, "description": "d"})
        assert asked(shell, edit) == "bad_schema"
        assert "version 1 of the stream's schema" in shell.peers[1].last(wire.Refused).reason
    again = asked(shell, wire.EditStream(5, "s", {"schema": NEW}))
    assert (again["settings"]["schema"], again["settings"]["description"]) == (NEW, "")


def test_the_same_columns_in_other_bytes_are_no_new_version() -> None:
    shell = typed()
    asked(shell, wire.EditStream(2, "s", {"schema": SAME, "description": "d"}))
    settings = shell.stream("s").settings
    assert (settings.schema, settings.former_schemas, settings.description) == (OLD, (), "d")


def test_versions_that_take_too_much_are_refused_before_anything_changes() -> None:
    shell = typed(settings_bytes_max=len(OLD) + 60)
    assert asked(shell, wire.EditStream(2, "s", {"schema": NEW})) == "bad_setting"
    assert list(shell.stream("s").schemas) == [schema_id(OLD)]


def test_a_stream_without_bodies_may_get_a_schema_and_one_with_blobs_may_not() -> None:
    shell = Shell()
    shell.hello(1)
    asked(shell, wire.CreateStream(1, "s", {}))
    assert asked(shell, wire.EditStream(2, "s", {"schema": OLD}))["name"] == "s"
    assert put(shell, encode([b"x"]), 1) == "bad_schema"
    shell.publish(1, "blobs", [b"x"], tracker=2)
    assert asked(shell, wire.EditStream(3, "blobs", {"schema": OLD})) == "bad_setting"


def test_a_first_batch_cannot_slip_in_before_a_schema_that_is_on_its_way() -> None:
    shell = Shell()
    shell.hello(1)
    asked(shell, wire.CreateStream(1, "s", {}))
    peer = shell.send(
        1, wire.EditStream(2, "s", {"schema": OLD}), wire.EditStream(3, "s", {"description": "d"}),
        wire.Publish("s", 7), frames=[encode([b"x"])],
    )  # fmt: skip
    assert [(r.reference, r.code) for r in peer.of(wire.Refused)] == [(3, "wait"), (7, "bad_batch")]
    assert list(shell.stream("s").schemas) == [schema_id(OLD)]
    assert asked(shell, wire.EditStream(4, "s", {"description": "d"}))["name"] == "s"


def test_subscribers_and_members_know_the_versions_and_are_told_of_a_newer_one() -> None:
    shell = typed()
    shell.subscribe(1, 1, "s")
    reader = shell.send(1, wire.JoinGroup(2, "s", "g", ["all"]))
    assert [each.schemas for each in reader.of(wire.Subscribed)] == [[(schema_id(OLD), OLD)]] * 2
    older = shell.hello(2)
    shell.subscribe(2, 1, "s")
    asked(shell, wire.EditStream(3, "s", {"schema": NEW}))
    assert sorted(told(reader)) == [(1, schema_id(NEW)), (2, schema_id(NEW))]
    assert told(older) == []
    shell.subscribe(2, 5, "s")
    assert older.last(wire.Subscribed).schemas == [(schema_id(OLD), OLD), (schema_id(NEW), NEW)]
    asked(shell, wire.EditStream(6, "s", {"description": "d"}))
    assert len(told(reader)) == 2


def test_a_pattern_selects_rows_of_a_typed_batch_by_a_bitmap() -> None:
    shell = typed()
    reader = shell.subscribe(1, 1, "s", ["topic", "b"])
    put(shell, rows(count=4, subject=["a", "b", "a", "b"]), 1)
    assert reader.last(wire.Deliver).rows == b"\x0a"
    shell.evict()
    shell.hello(2)
    again = shell.subscribe(2, 1, "s", ["topic", "b"], gathered=True)
    assert again.last(wire.Deliver).rows == b"\x0a"


def test_the_most_that_a_batch_of_a_small_ring_has_is_told_with_its_schemas() -> None:
    shell = typed()
    asked(shell, wire.CreateStream(2, "small", {"schema": OLD, "ring_bytes": 3 << 20}))
    value = asked(shell, wire.StreamSchemas(3, "small"))
    assert value["batch_bytes_max"] == {"small": (1 << 20) - (100 << 10)}


def test_the_schemas_are_told_to_who_may_read_or_write() -> None:
    shell = typed()
    asked(shell, wire.EditStream(2, "s", {"schema": NEW}))
    value = asked(shell, wire.StreamSchemas(3, "s"))
    schemas = [[schema_id(OLD), OLD], [schema_id(NEW), NEW]]
    uuid = shell.stream("s").uuid
    settings = {"keep": "", "body_kind": "arrow"}
    assert value == {"stream": uuid, **settings, "schemas": schemas, "batch_bytes_max": {}}
    shell.publish(1, "blobs", [b"x"])
    told = asked(shell, wire.StreamSchemas(4, "blobs"))
    uuid, settings = shell.stream("blobs").uuid, {"keep": "", "body_kind": "blob"}
    assert told == {"stream": uuid, **settings, "schemas": [], "batch_bytes_max": {}}
    assert asked(shell, wire.StreamSchemas(5, "nowhere")) == "unknown_stream"
    only: set[str] = {"write"}
    limited = typed(permit=lambda owner, action, name: action in only or action == "create")
    assert len(asked(limited, wire.StreamSchemas(3, "s"))["schemas"]) == 1
    only.clear()
    assert asked(limited, wire.StreamSchemas(4, "s")) == "forbidden"


def test_the_feature_is_announced() -> None:
    assert Shell().hello(1).last(wire.Welcome).features & Feature.TYPED
