"""Batches of typed streams as Arrow: views, versions, header columns, tables that fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from malamute_protocol.arrow import batches_to_table, conform
from malamute_protocol.batch import Batch, Content, Stamp, encode, encode_arrow
from malamute_protocol.errors import BatchError, LocalProtocolError
from malamute_protocol.schema import Schemas, schema_id

columns: Any = pa.schema  # its stubs know one form of columns at a time
OLD = columns([pa.field("n", pa.int32(), nullable=False), ("x", pa.float32())])
NEW = columns([pa.field("n", pa.int64(), nullable=False), ("x", pa.float64()), ("s", pa.string())])


def versions(*schemas: pa.Schema) -> Schemas:
    messages = [schema.serialize().to_pybytes() for schema in schemas]
    return Schemas([(schema_id(message), message) for message in messages])


BOTH = versions(OLD, NEW)
OLDER, _ = BOTH.versions


def batch(
    rows: dict[str, Any], schema: pa.Schema = OLD, *, base: int = 100, delivered: Any = None,
    schemas: Schemas | None = BOTH, **options: Any,
) -> Batch:  # fmt: skip
    made = pa.RecordBatch.from_pydict(rows, schema=schema)
    options.setdefault("subject", "s")
    number = schema_id(schema.serialize().to_pybytes())
    data = encode_arrow(made.serialize().to_pybytes(), made.num_rows, schema_id=number, **options)
    content = Content(np.frombuffer(data, np.uint8).copy())
    stamp = Stamp(
        flags=0, lsn=0, bundle_lsn=0, synced_lsn=0, epoch=1, base_offset=base,
        append_time_ms=1000, stream=1, origin=0, size=96 + len(data), count=made.num_rows,
        control_kind=0, content_crc=content.head.content_crc,
    )  # fmt: skip
    found = Batch(stamp, content, None if delivered is None else np.array(delivered, np.bool_))
    found.schemas = schemas
    return found


ROWS: dict[str, Any] = {"n": [1, 2, 3, 4], "x": [0.5, None, 1.5, 2.5]}


def lies_in(content: Content, column: Any) -> bool:
    """Whether the values of a column are bytes of the content."""
    first = np.frombuffer(content.view, np.uint8).ctypes.data
    return bool(first <= column.buffers()[1].address < first + len(content.view))


def test_typed_columns_are_views_of_the_batch() -> None:
    found = batch(ROWS, schemas=versions(OLD))
    rows = found.to_arrow()
    assert rows.schema == OLD
    assert rows.to_pydict() == ROWS
    assert lies_in(found.content, rows["n"])
    assert lies_in(found.content, rows["x"])


def test_rows_that_lie_together_are_a_view_and_others_are_taken() -> None:
    together = batch(ROWS, schemas=versions(OLD), delivered=[False, True, True, False])
    rows = together.to_arrow()
    assert rows.to_pydict() == {"n": [2, 3], "x": [None, 1.5]}
    assert lies_in(together.content, rows["n"])
    apart = batch(ROWS, schemas=versions(OLD), delivered=[True, False, True, False])
    assert apart.to_arrow().to_pydict() == {"n": [1, 3], "x": [0.5, 1.5]}


def test_several_batches_are_one_table_of_chunks_without_a_copy() -> None:
    batches = [batch(ROWS, schemas=versions(OLD), base=4 * place) for place in range(3)]
    table = batches_to_table(batches, header=["offset"])
    assert table.column("offset").to_pylist() == list(range(12))
    assert table.column("n").num_chunks == 3
    for found, chunk in zip(batches, table.column("n").chunks, strict=True):
        assert lies_in(found.content, chunk)


@pytest.mark.moderate
def test_polars_and_pandas_take_the_columns_as_they_lie() -> None:
    found = batch(ROWS, schemas=versions(OLD))
    pytest.importorskip("polars")
    pytest.importorskip("pandas")
    frame = found.to_polars()
    assert frame["n"].to_list() == [1, 2, 3, 4]
    assert lies_in(found.content, frame["n"].to_arrow())
    table = found.to_pandas()
    assert lies_in(found.content, table["n"].array.__arrow_array__().chunk(0))


def test_older_batches_are_cast_to_the_newest_version() -> None:
    older, newer = batch(ROWS), batch({"n": [9], "x": [1.0], "s": ["new"]}, NEW)
    assert older.to_arrow().schema == NEW
    assert older.to_arrow().to_pydict() == {**ROWS, "s": [None] * 4}
    assert older.to_arrow(schema=OLDER).schema == OLD
    table = batches_to_table([batch(ROWS, schemas=versions(OLD)), newer])
    assert table.schema == NEW
    assert table.num_rows == 5


def test_a_newer_batch_has_its_place_in_an_older_version_only_if_its_values_do() -> None:
    whole = columns([("n", pa.int32())])
    wide = columns([("n", pa.int64()), ("s", pa.string())])
    both = versions(whole, wide)
    first = next(iter(both.versions))
    fits = batch({"n": [7], "s": ["a"]}, wide, schemas=both)
    assert fits.to_arrow(schema=first).to_pydict() == {"n": [7]}
    large = batch({"n": [1 << 40], "s": ["a"]}, wide, schemas=both)
    with pytest.raises(LocalProtocolError, match="column 'n'"):
        large.to_arrow(schema=first)
    with pytest.raises(LocalProtocolError, match="column 'x'"):
        batch({"n": [1], "x": [1.0], "s": ["a"]}, NEW).to_arrow(schema=OLDER)


def test_header_columns_stand_before_those_of_the_schema() -> None:
    found = batch(ROWS, subject=["a", "b", "a", "b"], delivered=[False, True, False, True])
    rows = found.to_arrow(header=["subject", "offset"], decode=True, schema=OLDER)
    assert rows.to_pydict() == {
        "subject": ["b", "b"], "offset": [101, 103], "n": [2, 4], "x": [None, 2.5],
    }  # fmt: skip
    with pytest.raises(LocalProtocolError, match="no header column 'body'"):
        found.to_arrow(header=["body"])
    own = columns([("offset", pa.int64())])
    with pytest.raises(LocalProtocolError, match="of its own"):
        batch({"offset": [1]}, own, schemas=versions(own)).to_arrow(header=["offset"])


def test_a_batch_of_no_version_of_the_stream_is_an_error_by_name() -> None:
    with pytest.raises(BatchError, match="not one of the stream's"):
        batch(ROWS, schemas=versions(NEW)).to_arrow()
    with pytest.raises(TypeError, match="without its stream's schema"):
        batch(ROWS, schemas=None).to_arrow()


def test_a_null_where_none_may_be_is_damage() -> None:
    loose = columns([("n", pa.int32()), ("x", pa.float32())])
    hidden = batch({"n": [None], "x": [1.0]}, loose)
    number = int.from_bytes(hidden.content.view[36:40], "little")
    disguised = Schemas([(number, OLD.serialize().to_pybytes())])
    hidden.schemas = disguised
    with pytest.raises(BatchError, match="'n' is not nullable"):
        hidden.to_arrow()


def test_a_table_of_no_batches_has_the_columns_of_the_schema() -> None:
    assert batches_to_table([], schemas=BOTH).schema == NEW
    with_offset = batches_to_table([], schemas=BOTH, header=["offset"])
    assert with_offset.schema.names == ["offset", "n", "x", "s"]


def test_a_batch_that_is_not_typed_is_what_it_was() -> None:
    data = encode([b"a"], subject="s")
    plain = Batch(batch(ROWS).stamp._replace(count=1), Content(data))
    assert plain.to_arrow().schema.names[-1] == "body"


# --- tables that fit a schema ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (pa.array([1], pa.int8()), pa.int32()),
        (pa.array([1.0], pa.float32()), pa.float64()),
        (pa.array(["a"]).dictionary_encode(), pa.string()),
        (pa.array(["a"], pa.large_string()), pa.string()),
        (pa.array(["a"], pa.string_view()), pa.string()),
        (pa.array([b"a"], pa.large_binary()), pa.binary()),
        (pa.array([1], pa.timestamp("s")), pa.timestamp("us")),
        (pa.array([None]), pa.int8()),
        (pa.array([["a"]], pa.large_list(pa.large_string())), pa.list_(pa.string())),
    ],
    ids=str,
)
def test_a_column_of_another_layout_is_cast(given: Any, wanted: pa.DataType) -> None:
    fits = conform(pa.table({"x": given}), columns([("x", wanted)]))
    assert fits.column("x").type == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (pa.array([1], pa.int64()), pa.int32()),
        (pa.array(["1"]), pa.int32()),
        (pa.array([1], pa.int32()), pa.float64()),
        (pa.array([1], pa.timestamp("us")), pa.timestamp("us", "UTC")),
        (pa.array([1], pa.timestamp("us")), pa.timestamp("s")),
        (pa.array([1]), pa.string()),
    ],
    ids=str,
)
def test_a_column_of_another_type_is_refused_by_name(given: Any, wanted: pa.DataType) -> None:
    with pytest.raises(LocalProtocolError, match="bad_schema: column 'x'"):
        conform(pa.table({"x": given}), columns([("x", wanted)]))


def test_a_missing_column_is_null_or_refused() -> None:
    assert conform(pa.table({"n": [1]}), NEW).to_pydict() == {
        "n": [1], "x": [None], "s": [None],
    }  # fmt: skip
    with pytest.raises(LocalProtocolError, match="no column 'n'"):
        conform(pa.table({"x": [1.0]}), NEW)
    with pytest.raises(LocalProtocolError, match="'n' has nulls"):
        conform(pa.table({"n": pa.array([None], pa.int64())}), NEW)
