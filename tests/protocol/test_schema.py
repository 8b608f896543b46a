"""Declared schemas: read as pyarrow writes them, and the rule by which they grow."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from malamute_protocol.schema import (
    COLUMNS_MAX,
    SchemaError,
    Schemas,
    misfit,
    read_schema,
    schema_id,
)
from tests.seeds import seeds

columns: Any = pa.schema  # its stubs know one form of columns at a time
PLAIN = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32()),
    *(pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.null()),
    *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()),
    *(pa.binary_view(), pa.binary(16), pa.date32(), pa.date64(), pa.time32("s")),
    *(pa.time32("ms"), pa.time64("us"), pa.time64("ns"), pa.timestamp("s"), pa.timestamp("ns")),
    *(pa.timestamp("us", "UTC"), pa.timestamp("ms", "Europe/Berlin"), pa.duration("ms")),
    *(pa.decimal128(10, 2), pa.decimal256(40, 5)),
]
UUID = pa.field("x", pa.binary(16), metadata={"ARROW:extension:name": "arrow.uuid"})
WHOLE = columns(
    [
        pa.field("id", pa.int32(), nullable=False),
        ("price", pa.float32()),
        ("tags", pa.list_(pa.field("item", pa.string()))),
        ("at", pa.struct([("x", pa.int8()), ("y", pa.date32())])),
        ("by", pa.map_(pa.string(), pa.int64())),
    ],
    metadata={"made by": "a test"},
)


def message(*fields: Any, metadata: dict[str, str] | None = None) -> bytes:
    named = [field if isinstance(field, pa.Field) else pa.field(*field) for field in fields]
    return bytes(columns(named, metadata=metadata).serialize())


def fault(older: bytes, newer: bytes) -> str:
    return misfit(read_schema(older), read_schema(newer))


@pytest.mark.parametrize("kind", PLAIN, ids=str)
def test_a_type_has_the_name_that_arrow_gives_it(kind: pa.DataType) -> None:
    (column,) = read_schema(message(("x", kind)))
    assert (column.name, column.type, column.nullable) == ("x", str(kind), True)


def test_columns_within_columns_and_extension_types_are_read() -> None:
    read = read_schema(WHOLE.serialize().to_pybytes())
    assert [str(column) for column in read] == [
        "id: int32 not null",
        "price: float",
        "tags: list<item: string>",
        "at: struct<x: int8, y: date32[day]>",
        "by: map<entries: struct<key: string not null, value: int64> not null>",
    ]
    (own,) = read_schema(message(UUID))
    assert str(own) == "x: fixed_size_binary[16] (arrow.uuid)"


def test_a_schema_is_named_by_its_bytes() -> None:
    one, other = message(("x", pa.int8())), message(("x", pa.int8()), metadata={"a": "b"})
    assert schema_id(one) == schema_id(bytes(one)) != schema_id(other)
    schemas = Schemas([(schema_id(one), one)])
    assert schemas.newest == schema_id(one)
    assert schemas.with_version(schema_id(other), other).newest == schema_id(other)


@pytest.mark.parametrize(
    ("older", "newer", "named"),
    [
        ((("x", pa.int8()),), (("x", pa.int64()),), ""),
        ((("x", pa.uint16()),), (("x", pa.uint32()),), ""),
        ((("x", pa.float32()),), (("x", pa.float64()),), ""),
        ((("x", pa.int8()),), (("x", pa.int8()), ("y", pa.string())), ""),
        ((("x", pa.int64()),), (("x", pa.int32()),), "'x'"),
        ((("x", pa.int32()),), (("x", pa.uint64()),), "'x'"),
        ((("x", pa.int32()),), (("x", pa.float64()),), "'x'"),
        ((("x", pa.string()),), (("x", pa.large_string()),), "'x'"),
        ((("x", pa.int8()), ("y", pa.int8())), (("x", pa.int8()),), "'y' is missing"),
        ((("x", pa.int8()),), (("z", pa.int8()),), "'z'"),
        ((("x", pa.int8()),), (("y", pa.int8()), ("x", pa.int8())), "'y'"),
        ((("x", pa.int8()),), (("x", pa.int8()), ("y", pa.int8(), False)), "'y' is not null"),
        ((("x", pa.int8(), False),), (("x", pa.int8()),), "'x' is nullable"),
        ((("x", pa.int8()),), (("x", pa.int8(), False),), "'x' is not null"),
        ((("x", pa.list_(pa.int8())),), (("x", pa.list_(pa.int16())),), "'x'"),
        ((("x", pa.binary(16)),), (UUID,), "'x'"),
    ],
)
def test_a_schema_may_follow_only_where_older_values_keep_their_place(
    older: tuple[object, ...], newer: tuple[object, ...], named: str
) -> None:
    found = fault(message(*older), message(*newer))
    assert named in found
    assert bool(found) == bool(named)


def test_metadata_of_a_schema_is_no_difference() -> None:
    assert not fault(message(("x", pa.int8())), message(("x", pa.int8()), metadata={"a": "b"}))


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "message"),
        (b"x" * 100, "message"),
        (message(), "without columns"),
        (message(("x", pa.int8()), ("x", pa.int8())), "differ"),
        (message(("", pa.int8())), "empty"),
        (message(("x", pa.dictionary(pa.int8(), pa.string()))), "dictionary"),
        (message(("x" * 2000, pa.int8())), "name"),
        (message(*((str(n), pa.int8()) for n in range(COLUMNS_MAX + 1))), "more than"),
        (pa.record_batch({"x": [1]}).serialize().to_pybytes(), "message"),
        (message(("x", pa.int8())) + bytes(8), "message"),
    ],
)
def test_what_no_stream_can_declare_is_refused_by_name(data: bytes, named: str) -> None:
    with pytest.raises(SchemaError, match=named):
        read_schema(data)


def test_a_column_nested_too_deep_is_refused() -> None:
    kind: pa.DataType = pa.int8()
    for _ in range(40):
        kind = pa.list_(kind)
    with pytest.raises(SchemaError, match="nested"):
        read_schema(message(("x", kind)))


@pytest.mark.moderate
@pytest.mark.parametrize("seed", seeds(2, 20))
def test_damaged_schemas_are_read_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    whole = WHOLE.serialize().to_pybytes()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            read_schema(bytes(data))
        except SchemaError:
            pass
        else:
            fault(whole, bytes(data))
