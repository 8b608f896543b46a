"""The golden vectors: our reader, an independent one, and the generator agree on each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol.address import name_fault
from malamute_protocol.batch import Content, Record, Stamp, iter_batches, rows_from_bitmap
from malamute_protocol.errors import BrokerRefused, ProtocolError
from malamute_protocol.framing import NUMBERS, decode_message
from malamute_protocol.stamp import message_id, parse_message_id
from malamute_py.matcher.scan import matches
from tests.protocol import independent_reader as independent
from vectors.generate import files

HERE = Path(__file__).parent
VECTORS = HERE.parents[1] / "protocol" / "vectors"


INDEX = json.loads((VECTORS / "index.json").read_text())


def vectors(kind: str) -> list[Any]:
    found = json.loads((VECTORS / INDEX["files"][kind]).read_text())["vectors"]
    assert len(found) == INDEX["counts"][kind]
    return [pytest.param(vector, id=vector["name"]) for vector in found]


def told(value: Any) -> Any:
    """Return a value in the form of the vectors' JSON."""
    if isinstance(value, dict):
        if set(value) == {"hex"}:
            return bytes.fromhex(value["hex"])
        if set(value) == {"int"}:
            return int(value["int"])
        return {key: told(item) for key, item in value.items()}
    return [told(item) for item in value] if isinstance(value, list) else value


def listed(value: Any) -> Any:
    """Return tuples as the lists that MessagePack has."""
    if isinstance(value, list | tuple):
        return [listed(item) for item in value]
    return value


def seen(record: Record) -> dict[str, Any]:
    return {
        "keys": list(record.keys),
        "fields": dict(record.fields),
        "client_time_ms": record.client_time_ms,
        "expires_at_ms": record.expires_at_ms,
        "properties": dict(record.properties),
        "parts": [part.hex() for part in record.parts],
    }


def placed(record: Record) -> dict[str, Any]:
    return seen(record) | {
        "offset": record.offset,
        "append_time_ms": record.append_time_ms,
        "id": record.id.hex(),
    }


@pytest.mark.parametrize("vector", vectors("messages"))
def test_messages(vector: dict[str, Any]) -> None:
    frames = [bytes.fromhex(frame) for frame in vector["frames"]]
    if "error" in vector:
        with pytest.raises(ProtocolError) as ours:
            decode_message(frames)
        with pytest.raises(independent.Refused) as theirs:
            independent.read_message(frames)
        assert ours.value.code == theirs.value.code == vector["error"]
        return
    expected = [told(command) for command in vector["commands"]]
    assert independent.read_message(frames) == expected
    for (command, contents), said in zip(decode_message(frames), expected, strict=True):
        assert NUMBERS[type(command)] == said["number"]
        assert {
            name.rstrip("_"): listed(getattr(command, name)) for name in command.__struct_fields__
        } == said["fields"]
        assert list(contents) == [frames[place] for place in said["frames"]]


@pytest.mark.parametrize("vector", vectors("stamps"))
def test_stamps(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    if "error" in vector:
        with pytest.raises(ProtocolError) as ours:
            Stamp.unpack(data)
        with pytest.raises(independent.Refused) as theirs:
            independent.read_stamp(data)
        assert ours.value.code == theirs.value.code == vector["error"]
        return
    assert Stamp.unpack(data)._asdict() == independent.read_stamp(data) == told(vector["stamp"])


@pytest.mark.parametrize("vector", vectors("contents"))
def test_contents(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    if "error" in vector:
        with pytest.raises(ProtocolError) as ours:
            Content(data).check()
        with pytest.raises(independent.Refused) as theirs:
            independent.read_content(data)
        assert ours.value.code == theirs.value.code == vector["error"]
        return
    head, records = independent.read_content(data)
    records = records or []
    content = Content(data)
    content.verify()
    if "taking" in vector:
        with pytest.raises(ProtocolError) as refused:
            content.check(taking=True)
        assert refused.value.code == vector["taking"]
    else:
        content.check(taking=True)
    for name, value in told(vector["head"]).items():
        assert getattr(content.head, name) == head[name] == value
    if "records" not in vector:
        return
    expected = told(vector["records"])
    assert [
        {k: v for k, v in r.items() if k not in ("delta", "appended")} for r in records
    ] == expected
    crc, size = content.head.content_crc, 96 + len(data)
    stamp = Stamp(1, 0, 0, 0, 1, 0, 0, 1, 0, size, len(content), 0, crc)
    (batch,) = iter_batches([stamp.pack(), data])
    assert [seen(record) for record in batch] == expected


@pytest.mark.parametrize("vector", vectors("deliveries"))
def test_deliveries(vector: dict[str, Any]) -> None:
    frames = [bytes.fromhex(frame) for frame in vector["frames"]]
    rows = None if vector["rows"] is None else bytes.fromhex(vector["rows"])
    if "error" in vector:
        with pytest.raises(ProtocolError) as ours:
            list(iter_batches(frames, rows))
        with pytest.raises(independent.Refused) as theirs:
            independent.read_delivery(frames, rows)
        assert ours.value.code == theirs.value.code == vector["error"]
        return
    expected = told(vector["records"])
    assert independent.read_delivery(frames, rows) == expected
    assert [placed(record) for batch in iter_batches(frames, rows) for record in batch] == expected


@pytest.mark.parametrize("vector", vectors("bitmaps"))
def test_bitmaps(vector: dict[str, Any]) -> None:
    data, count = bytes.fromhex(vector["hex"]), vector["count"]
    if "error" in vector:
        with pytest.raises(ProtocolError) as ours:
            rows_from_bitmap(data, count)
        with pytest.raises(independent.Refused):
            independent.read_bitmap(data, count)
        assert ours.value.code == vector["error"]
        return
    assert rows_from_bitmap(data, count).nonzero()[0].tolist() == vector["rows"]
    assert independent.read_bitmap(data, count) == vector["rows"]


@pytest.mark.parametrize("vector", vectors("patterns"))
def test_patterns(vector: dict[str, Any]) -> None:
    pattern = vector["pattern"]
    if "error" in vector:
        from malamute_py.matcher import Index

        with pytest.raises(BrokerRefused) as ours:
            Index().add(pattern)
        assert ours.value.code == vector["error"]
        return
    for header in vector["headers"]:
        keys, fields = tuple(header["keys"]), tuple(sorted(header["fields"].items()))
        assert matches(pattern, keys, fields) == header["matches"], header


@pytest.mark.parametrize("vector", vectors("names"))
def test_names(vector: dict[str, Any]) -> None:
    assert bool(name_fault(vector["text"])) == ("error" in vector)


def test_message_ids_are_as_told_and_sort_as_bytes() -> None:
    found = [param.values[0] for param in vectors("message_ids")]
    for vector in found:
        pair = told(vector["append_time_ms"]), told(vector["offset"])
        assert message_id(*pair).hex() == vector["hex"]
        assert parse_message_id(bytes.fromhex(vector["hex"])) == pair
    assert [v["hex"] for v in found] == sorted(v["hex"] for v in found)


def test_the_files_are_what_the_generator_writes() -> None:
    """Compressed bytes are left out: they may change with the codec's library."""

    def without_codecs(value: Any) -> Any:
        vectors = value.get("vectors", [])
        return value | {"vectors": [v for v in vectors if "codec" not in v]}

    for name, made in files().items():
        stored = json.loads((VECTORS / name).read_text())
        assert without_codecs(json.loads(json.dumps(made))) == without_codecs(stored), (
            f"{name} is stale: run python -m vectors.generate"
        )
