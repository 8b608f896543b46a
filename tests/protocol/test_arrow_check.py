"""Full validation of Arrow bodies: rows of every type pass, and what fits no column is named."""

from __future__ import annotations

import datetime as dt
import decimal
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from malamute_protocol.arrow_check import checked_rows
from malamute_protocol.errors import BatchError
from malamute_protocol.limits import DEFAULT_LIMITS
from tests.protocol.test_hostile_contents import arrow_message

arrow: Any = pa
compute: Any = pc
REQUIRED = arrow.struct([arrow.field("must", arrow.int32(), nullable=False)])
DAY = dt.date(2026, 1, 31)

GOOD: dict[str, Any] = {
    "null": arrow.nulls(3),
    "bool": arrow.array([True, None, False]),
    "int8": arrow.array([1, None, -3], arrow.int8()),
    "uint64": arrow.array([1, None, 2**64 - 1], arrow.uint64()),
    "half": arrow.array([np.float16(1.5), None, np.float16(2)], arrow.float16()),
    "double": arrow.array([1.5, None, float("nan")]),
    "decimal": arrow.array([decimal.Decimal("1.50"), None, decimal.Decimal("-9.99")]),
    "date": arrow.array([DAY, None, DAY], arrow.date32()),
    "date64": arrow.array([DAY, None, DAY], arrow.date64()),
    "time": arrow.array([1, None, 3], arrow.time64("us")),
    "timestamp": arrow.array([1, None, 3], arrow.timestamp("ns", "Europe/Paris")),
    "duration": arrow.array([1, None, 3], arrow.duration("s")),
    "interval": arrow.array([(1, 2, 3), None, (0, 0, 0)], arrow.month_day_nano_interval()),
    "binary": arrow.array([b"\xff", None, b""]),
    "large binary": arrow.array([b"\xff", None, b""], arrow.large_binary()),
    "fixed binary": arrow.array([b"ab", None, b"cd"], arrow.binary(2)),
    "binary view": arrow.array([b"a" * 40, None, b""], arrow.binary_view()),
    "string": arrow.array(["é", None, ""]),
    "large string": arrow.array(["é", None, ""], arrow.large_string()),
    "string view": arrow.array(["é" * 40, None, "short"], arrow.string_view()),
    "list": arrow.array([[1, None], None, []]),
    "large list": arrow.array([["a"], None, []], arrow.large_list(arrow.string())),
    "fixed list": arrow.array([[1, 2], None, [3, None]], arrow.list_(arrow.int8(), 2)),
    "list view": arrow.array([["a"], None, []], arrow.list_view(arrow.string())),
    "map": arrow.array([[("a", 1)], None, [("b", None)]], arrow.map_(arrow.string(), arrow.int8())),
    "struct": arrow.array([{"a": 1, "b": ["x"]}, None, {"a": None, "b": None}]),
    "runs": compute.run_end_encode(arrow.array([1, 1, 2])),
    "union": arrow.UnionArray.from_sparse(
        arrow.array([0, 1, 0], arrow.int8()),
        [arrow.array([1, 2, 3]), arrow.array(["a", "b", "c"])],
    ),
    "required in a struct": arrow.array([{"must": 1}, None, {"must": 3}], REQUIRED),
    "required in a list": arrow.array(
        [[1], None, [2, 3]], arrow.list_(arrow.field("item", arrow.int8(), nullable=False))
    ),
    "required in a fixed list": arrow.array(
        [[1, 2], None, [2, 3]], arrow.list_(arrow.field("item", arrow.int8(), nullable=False), 2)
    ),
}


def batch_of(column: Any, *, nullable: bool = True) -> Any:
    schema = arrow.schema([arrow.field("c", column.type, nullable=nullable)])
    return arrow.RecordBatch.from_arrays([column], schema=schema)


def refusal(message: Any, schema: Any, count: int = 3) -> str:
    with pytest.raises(BatchError) as raised:
        checked_rows(message, count, schema)
    return f"{raised.value.code}: {raised.value.reason}"


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("name", GOOD)
def test_rows_of_each_type_pass_as_they_are(name: str, compression: str | None) -> None:
    rows = batch_of(GOOD[name])
    found = checked_rows(arrow_message(rows, compression), 3, rows.schema)
    assert str(found.to_pylist()) == str(rows.to_pylist())


def damaged(column: Any, buffer: int, change: Callable[[bytearray], None]) -> tuple[bytes, Any]:
    """The message of a column one of whose buffers was changed, and its schema."""
    rows = batch_of(column)
    message = bytearray(rows.serialize().to_pybytes())
    before = rows.column(0).buffers()[buffer].to_pybytes()
    at = message.rindex(before)
    after = bytearray(before)
    change(after)
    message[at : at + len(before)] = after
    return bytes(message), rows.schema


def put(at: int, value: int, width: int = 4) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at : at + width] = value.to_bytes(width, "little", signed=True)

    return change


TEXTS = arrow.array(["abcd", "efgh", "ijkl"])
BAD: dict[str, tuple[Any, int, Callable[[bytearray], None], str]] = {
    "text that is no UTF-8": (TEXTS, 2, put(5, -1, 1), "UTF8 sequence at string index 1"),
    "an offset beyond its text": (TEXTS, 1, put(12, 1_000), "column 'c'"),
    "offsets that fall": (TEXTS, 1, put(4, 9), "column 'c'"),
    "a negative offset": (TEXTS, 1, put(4, -1), "column 'c'"),
    "a list beyond its values": (arrow.array([[1], [2], [3]]), 1, put(8, 700), "column 'c'"),
    "a view beyond its text": (
        arrow.array(["a" * 20] * 3, arrow.string_view()), 1, put(12, 4_000), "column 'c'",
    ),
    "a time after midnight": (
        arrow.array([1, 2, 3], arrow.time32("s")), 1, put(4, 90_000), "column 'c'",
    ),
    "a decimal of too many digits": (
        arrow.array([decimal.Decimal("1.1")] * 3), 1, put(0, 10**9, 16), "column 'c'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_value_that_is_none_of_its_column_is_named(name: str) -> None:
    column, buffer, change, words = BAD[name]
    found = refusal(*damaged(column, buffer, change))
    assert found.startswith("bad_batch: the Arrow body: column 'c': ")
    assert words in found


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (arrow.array([1, None, 3]), "column 'c' is not nullable, and is null at row 1"),
        (arrow.array([["x"], None, []]), "column 'c' is not nullable, and is null at row 1"),
    ],
    ids=["plain", "list"],
)
def test_a_null_where_none_may_be_is_named_with_its_row(column: Any, words: str) -> None:
    schema = arrow.schema([arrow.field("c", column.type, nullable=False)])
    assert words in refusal(batch_of(column).serialize(), schema)


def strict(kind: Any) -> Any:
    """The type with everything in it not nullable."""
    if arrow.types.is_struct(kind):
        return arrow.struct([field.with_nullable(False) for field in kind])
    if arrow.types.is_map(kind):
        return arrow.map_(kind.key_type, kind.item_field.with_nullable(False))
    inner = kind.field(0).with_nullable(False)
    if arrow.types.is_large_list(kind):
        return arrow.large_list(inner)
    size = kind.list_size if arrow.types.is_fixed_size_list(kind) else -1
    return arrow.list_(inner, size)


@pytest.mark.parametrize("name", ["list", "fixed list", "map", "struct"])
def test_a_null_within_a_list_or_a_struct_that_may_have_none_is_named(name: str) -> None:
    rows = batch_of(GOOD[name])
    schema = arrow.schema([arrow.field("c", strict(rows.schema.field(0).type))])
    found = refusal(rows.serialize(), schema)
    assert found.startswith("bad_batch: column 'c': '")
    assert "is not nullable, and has nulls" in found


def test_nulls_in_what_is_itself_null_are_no_fault() -> None:
    inner = arrow.array([1, None, 3], arrow.int32())
    column = arrow.StructArray.from_arrays(
        [inner], fields=list(REQUIRED), mask=arrow.array([False, True, False])
    )
    lists = arrow.ListArray.from_arrays(arrow.array([0, 1, 2, 3], arrow.int32()), column)
    for each in (column, lists):
        assert checked_rows(batch_of(each).serialize(), 3, batch_of(each).schema).num_rows == 3


def test_a_message_of_other_columns_is_refused() -> None:
    message = batch_of(TEXTS).serialize()
    one, two = arrow.field("c", arrow.string()), arrow.field("d", arrow.string())
    assert "1 columns, the schema has 2" in refusal(message, arrow.schema([one, two]))
    both = arrow.RecordBatch.from_arrays([TEXTS, TEXTS], ["c", "d"]).serialize()
    assert "2 columns, the schema has 1" in refusal(both, arrow.schema([one]))
    assert "column 'c'" in refusal(message, arrow.schema([("c", arrow.large_string())]))
    assert "2 Arrow rows" not in refusal(message, arrow.schema([one]), 2)
    assert "3 Arrow rows for 2 records" in refusal(message, arrow.schema([one]), 2)


def test_another_kind_of_message_is_refused() -> None:
    schema = batch_of(TEXTS).schema
    for data in (b"", b"\0" * 64, b"garbage" * 9, schema.serialize().to_pybytes()):
        assert refusal(data, schema).startswith("bad_batch: the Arrow body: ")


def test_columns_that_share_bytes_are_refused_before_they_are_checked_one_by_one() -> None:
    rows = arrow.RecordBatch.from_arrays([TEXTS, TEXTS], ["c", "d"])
    message = bytearray(rows.serialize().to_pybytes())
    # The last of the six buffers claims all bytes of the body.
    size = len(rows.column(0).buffers()[2]).to_bytes(8, "little")
    places = [at for at in range(0, len(message), 8) if message[at : at + 8] == size]
    message[places[-1] : places[-1] + 8] = (1 << 20).to_bytes(8, "little")
    assert "buffers of" in refusal(bytes(message), rows.schema)


def test_views_that_name_one_text_again_and_again_are_refused_before_they_are_checked() -> None:
    long = "a" * 40_000
    column = arrow.array([long] + ["b" * 13] * 999, arrow.string_view())
    views = bytearray(column.buffers()[1].to_pybytes())
    views[16:] = bytes(views[:16]) * 999
    buffers = [None, arrow.py_buffer(bytes(views)), *column.buffers()[2:]]
    try:
        made = arrow.Array.from_buffers(arrow.string_view(), 1_000, buffers)
    except ValueError:
        pytest.skip("this pyarrow makes no string views of buffers")
    assert 1_000 * len(long) > DEFAULT_LIMITS.batch_bytes_max
    for each in (made, arrow.StructArray.from_arrays([made], ["s"])):
        rows = batch_of(each)
        found = refusal(rows.serialize(), rows.schema, 1_000)
        assert found.startswith("too_large: views of 40000000 bytes")


@pytest.mark.parametrize("name", GOOD)
def test_any_byte_may_be_any_other_and_nothing_but_a_refusal_comes_of_it(name: str) -> None:
    rows = batch_of(GOOD[name])
    message = rows.serialize().to_pybytes()
    draw = random.Random(name)
    for _ in range(60):
        changed = bytearray(message)
        for _ in range(draw.choice((1, 1, 2, 8))):
            changed[draw.randrange(len(changed))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
        try:
            checked_rows(bytes(changed), 3, rows.schema).to_pylist()
        except BatchError:
            continue
        except (ValueError, OverflowError):
            pass  # of to_pylist(): a date that Python cannot say
