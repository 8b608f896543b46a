"""Full validation of Arrow bodies: rows that any code may compute with afterwards.

Owns what is checked of a record-batch message that a peer sent. The rules: nothing is allocated by
a size that the bytes claim before the size is bounded; the work is bounded by the bytes that came,
or by what they may decompress to; whatever the bytes are, checking them raises BatchError or
returns rows of the schema. Source: SPEC.md, sections 5.8 and 5.9; Message.fbs of Arrow's format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from malamute_protocol.errors import BatchError
from malamute_protocol.limits import DEFAULT_LIMITS
from malamute_protocol.schema import table_field

# The stubs of pyarrow know too few of its overloads.
_arrow: Final[Any] = pa
BROKEN: Final = (
    pa.ArrowException, OSError, EOFError, ValueError, OverflowError, MemoryError, struct.error,
)  # fmt: skip
"""Errors that reading a foreign message may raise."""
_MESSAGE_HEADER: Final = 2
_BATCH_NODES: Final = 1
_BATCH_BUFFERS: Final = 2
_BATCH_COMPRESSION: Final = 3
"""Numbers of the field Message.header and of fields of RecordBatch."""
_CLAIM_BYTES: Final = 8
"""Bytes of the size that a compressed buffer begins with."""
_OFFSET_AND_LENGTH: Final = struct.Struct("<qq")
"""Offset and length of a buffer in the body of a message."""
_VIEW_BYTES: Final = 16
_VIEW_NUMBERS: Final = 4
"""A view of a string is four numbers of 32 bits, the first of which is its length."""


class _Claims(NamedTuple):
    """Sizes that a record-batch message states."""

    nodes: int
    """Columns, those within lists and structs included."""
    buffer_bytes: int
    """All buffers as they lie in the message."""
    raw_bytes: int
    """All buffers after decompression; 0: the message is not compressed."""


def checked_rows(blob: Any, count: int, schema: Any) -> Any:
    """Return the rows of an Arrow body as views of it, validated in full.

    For a broker that takes a typed batch, and for each reader of one. blob: one encapsulated
    record-batch message. count: records that the content has. Raises BatchError: `bad_batch`: the
    message is not one of this schema, or a value is none of its column, which the reason names with
    the row; `too_large`: it would decompress to more than a batch may be.
    """
    try:
        message = _arrow.ipc.read_message(_arrow.py_buffer(blob))
        _check_claims(message, schema)  # Before Arrow allocates by what the message claims.
        rows = _arrow.ipc.read_record_batch(message, schema)
    except BROKEN as error:
        raise BatchError("bad_batch", f"the Arrow body: {error}") from error
    if rows.num_rows != count:
        raise BatchError("bad_batch", f"{rows.num_rows} Arrow rows for {count} records")
    for field, column in zip(rows.schema, rows.columns, strict=True):
        try:
            column.validate()
            _check_views(column)  # The full validation looks at all bytes that the views name.
            column.validate(full=True)
            if len(column) != count:
                raise ValueError(f"{len(column)} values")
        except BROKEN as error:
            raise BatchError(
                "bad_batch", f"the Arrow body: column {field.name!r}: {error}"
            ) from error
    check_required(rows)
    return rows


def check_required(rows: Any) -> None:
    """Raise BatchError when a column that is not nullable has a null: Arrow does not check it.

    Columns within lists and structs count, too.
    """
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if not field.nullable and column.null_count:
            row = int(np.argmax(_nulls(column)))
            raise BatchError(
                "bad_batch", f"column {field.name!r} is not nullable, and is null at row {row}"
            )
        inner = _null_within(column, None) if _has_required(field.type) else ""
        if inner:
            raise BatchError(
                "bad_batch", f"column {field.name!r}: {inner} is not nullable, and has nulls"
            )


def _nulls(column: Any) -> Any:
    """Return a mask of the rows of a column that are null."""
    return column.is_null().to_numpy(zero_copy_only=False)


def _has_required(kind: Any) -> bool:
    """Whether some column within a type is not nullable; else none of its values is looked at."""
    fields = [kind.field(place) for place in range(kind.num_fields)]
    return any(not field.nullable or _has_required(field.type) for field in fields)


def _null_within(column: Any, there: Any) -> str:
    """Return the name of a column in lists and structs that has a null and must not; "": none.

    For check_required(), and for each level below by itself. there: mask of the rows that count;
    None: all of them. What lies in a null means nothing.
    """
    for field, values, inside in _within(column, there):
        if not field.nullable and values.null_count:
            missing = _nulls(values)
            if bool(missing.any() if inside is None else (missing & inside).any()):
                return repr(field.name)
        inner = _null_within(values, inside) if _has_required(field.type) else ""
        if inner:
            return f"{field.name!r} {inner}"
    return ""


def _within(column: Any, there: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (field, values, mask of those that count) of what lies in a column's rows.

    Of a struct, a map and lists whose values lie in order; of other types nothing. No row is
    copied: rows of a view may name the same values again and again. there: mask of the column's
    rows that count, since no level above is null there; None: all.
    """
    kind = column.type
    if not len(column):
        return
    # What lies in a row that is null here does not count further down.
    if column.null_count:
        valid = ~_nulls(column)
        there = valid if there is None else there & valid
    if pa.types.is_struct(kind):
        for place in range(kind.num_fields):
            yield kind.field(place), column.field(place), there
    elif pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        values = column.values.slice(column.offset * size, len(column) * size)
        yield kind.field(0), values, None if there is None else np.repeat(there, size)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        bounds = column.offsets.to_numpy()
        begin, size = int(bounds[0]), int(bounds[-1] - bounds[0])
        inside = None if there is None else np.repeat(there, np.diff(bounds))
        if pa.types.is_map(kind):
            entries = kind.field(0).type
            yield entries.field(0), column.keys.slice(begin, size), inside
            yield entries.field(1), column.items.slice(begin, size), inside
        else:
            yield kind.field(0), column.values.slice(begin, size), inside


def _check_claims(message: Any, schema: Any) -> None:
    """Raise BatchError, ValueError or struct.error: sizes that the message states cannot be."""
    if message.type != "record batch":
        raise ValueError(f"a message of the kind {message.type}")
    claims = _claims(message)
    if claims.raw_bytes > DEFAULT_LIMITS.batch_bytes_max:
        raise BatchError(
            "too_large",
            f"an Arrow body that decompresses to {claims.raw_bytes} bytes, at most "
            f"{DEFAULT_LIMITS.batch_bytes_max}",
        )
    # Bytes that came bound the work: each buffer has its own, and each column is in the schema.
    body_bytes = 0 if message.body is None else message.body.size
    if claims.buffer_bytes > body_bytes:
        # Columns that share bytes would be checked once each: 4,096 times the bytes that came.
        raise ValueError(f"buffers of {claims.buffer_bytes} bytes in {body_bytes}")
    columns = sum(map(_count, schema.types))
    if claims.nodes != columns:
        raise ValueError(f"{claims.nodes} columns, the schema has {columns}, all levels counted")


def _count(kind: Any) -> int:
    """Return how many columns a type has, those within it included, as a message counts them."""
    if isinstance(kind, pa.BaseExtensionType):
        return _count(kind.storage_type)
    return 1 + sum(_count(kind.field(place).type) for place in range(kind.num_fields))


def _claims(message: Any) -> _Claims:
    """Return the sizes that a record-batch message states.

    Arrow allocates what the buffers claim, before it looks at a byte of them. Layout: Message.fbs
    of Arrow's format, tables of FlatBuffers; pyarrow has verified the bytes. Raises struct.error.
    """
    data = bytes(message.metadata)
    (root,) = struct.unpack_from("<I", data)  # FlatBuffers begin with the place of their root.
    header = table_field(data, root, _MESSAGE_HEADER)
    if not header:
        return _Claims(0, 0, 0)
    # A field that is a table or a vector holds how far after itself that one lies.
    batch = header + struct.unpack_from("<I", data, header)[0]
    nodes, _ = _vector(data, batch, _BATCH_NODES)
    count, first = _vector(data, batch, _BATCH_BUFFERS)
    packed = bool(table_field(data, batch, _BATCH_COMPRESSION))
    body = memoryview(b"" if message.body is None else message.body)
    total = raw = 0
    for offset, length in _OFFSET_AND_LENGTH.iter_unpack(
        data[first : first + _OFFSET_AND_LENGTH.size * count]
    ):
        total += max(0, length)
        # A compressed buffer begins with its size before compression; -1: it is stored as it is.
        if packed and length >= _CLAIM_BYTES:
            raw += max(length, *struct.unpack_from("<q", body, offset))
    return _Claims(nodes, total, raw)


def _vector(data: bytes, table: int, field: int) -> tuple[int, int]:
    """Return (count of entries, position of the first) of a FlatBuffers vector in a table.

    field: number of the vector's field. (0, 0): the table has none.
    """
    at = table_field(data, table, field)
    if not at:
        return 0, 0
    start = at + struct.unpack_from("<I", data, at)[0]
    return int(struct.unpack_from("<I", data, start)[0]), start + 4


def _check_views(column: Any) -> None:
    """Raise BatchError `too_large`: the views of strings in a column name the same bytes too often.

    Each view is checked by itself: a million views of one long text would take hours.
    """
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        _check_views(column.storage)
    elif pa.types.is_string_view(kind):
        _, views, *_ = column.buffers()  # The first buffer tells which rows are null.
        if views is None:
            return
        numbers = np.frombuffer(views, np.int32, len(views) // _VIEW_BYTES * _VIEW_NUMBERS)
        lengths = numbers[::_VIEW_NUMBERS]
        size = int(np.maximum(lengths, 0).sum(dtype=np.int64))
        if size > DEFAULT_LIMITS.batch_bytes_max:
            raise BatchError(
                "too_large",
                f"views of {size} bytes in a column, at most {DEFAULT_LIMITS.batch_bytes_max}",
            )
    elif pa.types.is_struct(kind) or pa.types.is_union(kind):
        for place in range(kind.num_fields):
            _check_views(column.field(place))
    elif pa.types.is_run_end_encoded(kind) or kind.num_fields:  # Lists of all sorts, and maps.
        _check_views(column.values)
