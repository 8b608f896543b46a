"""A batch as an Arrow record batch: the columns as they came, with no Python object for a row.

Owns the Arrow schema. The rule: buffers are wrapped, not copied, unless rows are missing or the
frame lies misaligned; foreign Arrow bytes are validated in full before any code computes with them.
Source: SPEC.md, section 5.8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, Final, Protocol

import numpy as np

try:
    import pyarrow as pa
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "Arrow needs pyarrow, which is not installed: pip install 'malamute-py[arrow]'",
        name="pyarrow",
    ) from error

from malamute_protocol.arrow_check import BROKEN, check_required, checked_rows
from malamute_protocol.batch import Batch
from malamute_protocol.columns import NO_TIME, Array
from malamute_protocol.content import Content
from malamute_protocol.content_layout import ARROW
from malamute_protocol.errors import BatchError, LocalProtocolError
from malamute_protocol.header import HeaderTable
from malamute_protocol.merging import merged
from malamute_protocol.schema import WIDER, Schemas
from malamute_protocol.stamp import Stamp

# The stubs of pyarrow know too few of its overloads: objects built here are Any, and test_arrow.py
# compares them with the schema.
_arrow: Final[Any] = pa
_KEYS: Final = _arrow.list_(_arrow.string())
_FIELDS: Final = _arrow.map_(_arrow.string(), _arrow.string())
_TIME: Final = _arrow.timestamp("ms", tz="UTC")
_BLOBS: Final = _arrow.list_(_arrow.binary())
_NO_PROPERTIES: Final = _arrow.array([], _arrow.binary())
_KEPT_COLUMNS: Final = 8
"""Columns that are kept because many batches have the same: 256 KiB for 65,536 records."""
_SAME_VALUES: Final = (
    (_arrow.string(), _arrow.large_string(), _arrow.string_view()),
    (_arrow.binary(), _arrow.large_binary(), _arrow.binary_view()),
)
"""Types that differ in their layout alone."""
HEADER_COLUMNS: Final = (
    "offset", "append_time", "client_time", "expires", "subject", "keys", "fields", "properties",
)  # fmt: skip
"""Columns beside the body, in their order."""
COLUMN_BYTES_MAX: Final = 256 << 20
"""Bytes that a column of one batch may take where each record has its own copy of what many share:
the largest field map for each of 65,536 records would be 5 GiB."""


class Delivered(Protocol):
    """The part of a batch that columns are made of: of Batch, and of a mapped reader's batch."""

    @property
    def stamp(self) -> Stamp: ...  # noqa: D102
    @property
    def content(self) -> Content: ...  # noqa: D102
    @property
    def indices(self) -> Array | None: ...  # noqa: D102
    @property
    def schemas(self) -> Schemas | None: ...  # noqa: D102


@cache
def arrow_schema(*, lists: bool = False, decode: bool = False) -> pa.Schema:
    """Return the columns of to_arrow(); lists: for bodies that are lists of blobs.

    decode: plain columns in place of dictionary-encoded ones, see to_arrow(). subject is the first
    key, `keys` has all of them; properties are MessagePack maps.
    """

    def column(kind: Any) -> Any:
        """Return the type of a column whose values rows share."""
        return kind if decode else _arrow.dictionary(_arrow.int32(), kind)

    schema: pa.Schema = _arrow.schema(
        [
            _arrow.field("offset", _arrow.int64(), nullable=False),
            _arrow.field("append_time", _TIME, nullable=False),
            _arrow.field("client_time", _TIME),
            _arrow.field("expires", _TIME),
            _arrow.field("subject", column(_arrow.string()), nullable=False),
            _arrow.field("keys", column(_KEYS), nullable=False),
            _arrow.field("fields", column(_FIELDS)),
            _arrow.field("properties", column(_arrow.binary())),
            _arrow.field("body", _BLOBS if lists else _arrow.binary(), nullable=False),
        ]
    )
    return schema


def table_of(pieces: list[pa.RecordBatch], *, decode: bool = False) -> pa.Table:
    """Make one table of several results of to_arrow(); one of no rows when there are none."""
    schema = pieces[0].schema if pieces else arrow_schema(decode=decode)
    return pa.Table.from_batches(pieces, schema)


def batches_to_table(
    batches: Sequence[Batch],
    *,
    decode: bool = False,
    header: Sequence[str] = (),
    schemas: Schemas | None = None,
) -> pa.Table:
    """Return the delivered records of several batches as one table.

    It has a chunk for each batch, but for small ones, which share one.

    Batches of a typed stream are cast to the newest version that one of them came with. schemas:
    those of the stream, for a table of no batches. Raises as to_arrow().
    """
    known = [batch.schemas for batch in batches if batch.schemas is not None]
    # Versions are only ever added: those of the batch that knows most include all others'.
    newest = max(known, key=lambda each: len(each.versions), default=schemas)
    target = None if newest is None else schema_of(newest, newest.newest)
    pieces = [
        to_arrow(batch, decode=decode, header=header, schema=target) for batch in merged(batches)
    ]
    if pieces or target is None:
        return table_of(pieces, decode=decode)
    return pa.Table.from_batches([], _with_header(target, header, decode=decode))


def to_arrow(
    batch: Delivered,
    *,
    decode: bool = False,
    header: Sequence[str] = (),
    schema: int | pa.Schema | None = None,
    unchanged: Callable[[], None] | None = None,
) -> pa.RecordBatch:
    """Return the delivered records of a batch as an Arrow record batch.

    decode: repeated values, as subjects, stand in each row; otherwise codes of a dictionary do.
    header, schema: for batches of typed streams, see typed_to_arrow().
    unchanged: for bytes that another process may write over. Offsets and codes are copied then,
    so that no later reader computes with what has changed, and this is called once they are: it
    raises when the bytes are not what they were. Bodies and times stay views.
    Raises TypeError: an Arrow body that came without its stream's schemas, and no schema is given.
    Raises BatchError: the content is not what it says, or (decode) a column would get too large.
    """
    content = aligned(batch.content)
    head = content.head
    if head.body_kind == ARROW:
        return typed_to_arrow(batch, content, decode=decode, header=header, schema=schema)
    # Columns that are computed with are copied while another process may write over the bytes.
    keep = _as_it_is if unchanged is None else _copied
    bodies = content.bodies()
    bounds = bodies.offsets if unchanged is None else bodies.offsets.copy()
    parts = keep(bodies.parts)
    columns = _header(batch, content, decode=decode, unchanged=unchanged)
    body = _binary(bounds if parts is None else parts, _arrow.py_buffer(bodies.blob))
    if parts is not None:  # Lists: `bounds` counts parts, each of which is an entry of `body`.
        body = _arrow.Array.from_buffers(
            _BLOBS, head.count, [None, _arrow.py_buffer(bounds)], children=[body]
        )
    whole = arrow_schema(lists=parts is not None, decode=decode)
    return _delivered(batch, _arrow.RecordBatch.from_arrays([*columns, body], schema=whole))


def typed_to_arrow(
    batch: Delivered,
    content: Content,
    *,
    decode: bool,
    header: Sequence[str],
    schema: int | pa.Schema | None,
) -> pa.RecordBatch:
    """Return the delivered rows of a typed stream's batch: the columns of its schema, as views.

    content: the batch's, which aligned() returned. header: which of HEADER_COLUMNS stand before
    them. schema: id of the version, or the version, that the rows are cast to; None: the newest
    that the batch came with. A batch that came without schemas is read by the schema that is given.
    Raises TypeError: there is none. Raises LocalProtocolError: a header column that is not known,
    or that the stream has a column of; `bad_schema`: a value has no place in the older version that
    was asked for. Raises BatchError: the body is none of its schema, or (`too_large`) would
    decompress to more than a batch may be.
    """
    schemas = batch.schemas
    if schemas is not None:
        if schema is None or isinstance(schema, int):
            schema = schema_of(schemas, schema or schemas.newest)
        # Read by the version that the content names, then cast to the one that is wanted.
        whole = _cast(_body(content, schema_of(schemas, content.head.schema_id)), schema)
    elif schema is None or isinstance(schema, int):
        raise TypeError("an Arrow body without its stream's schema: arrow.to_arrow() takes one")
    else:
        whole = _body(content, schema)
    if header:
        columns = dict(zip(HEADER_COLUMNS, _header(batch, content, decode=decode), strict=True))
        layout = _with_header(whole.schema, header, decode=decode)
        whole = _arrow.RecordBatch.from_arrays(
            [*(columns[name] for name in header), *whole.columns], schema=layout
        )
    return _delivered(batch, whole)


def _with_header(schema: Any, header: Sequence[str], *, decode: bool) -> Any:
    """Return a schema with header columns before its own. Raises LocalProtocolError."""
    known = arrow_schema(decode=decode)
    for name in header:
        if name not in HEADER_COLUMNS:
            allowed = ", ".join(HEADER_COLUMNS)
            raise LocalProtocolError("bad_setting", f"no header column {name!r}: {allowed}")
        if name in schema.names:
            raise LocalProtocolError(
                "bad_setting", f"the stream has a column {name!r} of its own: take it from there"
            )
    return _arrow.schema([*map(known.field, header), *schema], metadata=schema.metadata)


def schema_of(schemas: Schemas, number: int) -> Any:
    """Return the version of a stream's schema with an id, parsed once. Raises BatchError: none."""
    found = schemas.arrow.get(number)
    if found is None:
        message = schemas.versions.get(number)
        if message is None:
            raise BatchError("bad_schema", f"schema {number} is not one of the stream's")
        found = schemas.arrow[number] = parse_schema(message)
    return found


def parse_schema(message: bytes) -> pa.Schema:
    """Return the schema of an encapsulated Arrow message. Raises BatchError: it is none."""
    try:
        return pa.ipc.read_schema(_arrow.py_buffer(message))
    except BROKEN as error:
        raise BatchError("bad_schema", f"the stream's schema: {error}") from error


def _cast(rows: Any, target: Any) -> Any:
    """Return rows of one version of a schema as rows of another, which a reader wants.

    Raises LocalProtocolError: a value has no place in the older version that is wanted.
    """
    if rows.schema.equals(target):
        return rows
    columns = []
    for place, field in enumerate(target):
        # Versions have the same columns in the same places; a newer one has more after them.
        if place >= rows.num_columns:
            columns.append(_nulls(rows.num_rows, field.type))
            continue
        column = rows.column(place)
        if column.type != field.type:
            try:
                if pa.types.is_floating(field.type) and not _is_wider(column.type, field.type):
                    # To a narrower float Arrow would round; integers it checks itself.
                    raise pa.ArrowInvalid(f"it is {column.type} in a newer version")
                column = column.cast(field.type)
            except pa.ArrowException as error:
                raise LocalProtocolError("bad_schema", f"column {field.name!r}: {error}") from error
        columns.append(column)
    return _arrow.RecordBatch.from_arrays(columns, schema=target)


def _is_wider(given: Any, wanted: Any) -> bool:
    """Whether each value of one type is a value of another, by the rule of versions."""
    return (str(given), str(wanted)) in WIDER


def _delivered(batch: Delivered, whole: Any) -> pa.RecordBatch:
    """Return those of all rows of a batch that were delivered: a view where they lie together."""
    indices = batch.indices
    if indices is None:
        return whole  # type: ignore[no-any-return]
    count = len(indices)
    if count and int(indices[-1]) - int(indices[0]) == count - 1:
        return whole.slice(int(indices[0]), count)  # type: ignore[no-any-return]
    return whole.take(_arrow.array(indices))  # type: ignore[no-any-return]


def _header(
    batch: Delivered,
    content: Content,
    *,
    decode: bool,
    unchanged: Callable[[], None] | None = None,
) -> list[Any]:
    """Return the columns of HEADER_COLUMNS for all rows of a content. Raises as to_arrow().

    decode, unchanged: as of to_arrow().
    """
    content.check_codes()
    keep = _as_it_is if unchanged is None else _copied
    n = content.head.count
    deltas = content.offset_deltas
    first = batch.stamp.base_offset
    if deltas is None:
        offsets = np.arange(first, first + n, dtype=np.int64)
    else:
        offsets = deltas.astype(np.int64)
        offsets += first
    subject_codes, field_codes = keep(content.subject_codes), keep(content.field_codes)
    subjects, keys, fields = _header_columns(content.table)
    appended = content.append_times
    if appended is None:
        appended = np.full(n, batch.stamp.append_time_ms, np.int64)
    maps, property_codes = content.properties()
    property_codes = keep(property_codes)
    # All is copied that is computed with: had it changed before, this raises.
    if unchanged is not None:
        unchanged()
    properties = _arrow.array(maps, _arrow.binary()) if maps else _NO_PROPERTIES
    if decode:
        # Plain columns repeat a map in each record that has it.
        _check_repeated(property_codes, n, list(map(len, maps)), "properties")
        if content.table.fieldmaps:
            _check_repeated(field_codes, n, content.table.map_bytes(), "fields")
    if subject_codes is None and field_codes is None and not decode and _is_small(content.table):
        # All rows have one header, as in most batches: its columns are kept for the next ones.
        shared = _one_header_columns(content.table, n)
    else:
        by_subject = _indices(subject_codes, n, subjects)
        shared = (
            _column(by_subject, subjects, decode=decode),
            _column(by_subject, keys, decode=decode),
            _column(_indices(field_codes, n, fields), fields, decode=decode),
        )
    return [
        _arrow.Array.from_buffers(_arrow.int64(), n, [None, _arrow.py_buffer(offsets)]),
        _arrow.Array.from_buffers(_TIME, n, [None, _arrow.py_buffer(appended)]),
        _times(content.client_times, n, NO_TIME),
        _times(content.expiries, n, 0),
        *shared,
        _column(_indices(property_codes, n, properties), properties, decode=decode)
        if maps or decode
        else _no_properties(n),
    ]


def _as_it_is(column: Array | None) -> Array | None:
    """Return the column itself, of bytes that stay as they are."""
    return column


def _copied(column: Array | None) -> Array | None:
    """Return a copy of a column whose bytes another process may write over."""
    return None if column is None else column.copy()


def _body(content: Content, schema: Any) -> Any:
    """Return all rows of an Arrow body, as views of it. Raises as checked_rows()."""
    return checked_rows(content.bodies().blob, content.head.count, schema)


def check_typed(content: Content, schema: pa.Schema) -> None:
    """Check all rows of a typed batch in full, for a broker. Raises as checked_rows()."""
    _body(aligned(content), schema)


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table's columns of a schema, in its order and types, to be published.

    A column may have a narrower type by the rule of versions, be dictionary-encoded, be of another
    layout of strings, bytes or lists, or count time in another unit that loses nothing; a nullable
    one may be missing. Raises LocalProtocolError `bad_schema`: it names the column that differs, or
    in which a value is missing, also within lists and structs.
    """
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            if not field.nullable:
                raise LocalProtocolError("bad_schema", f"the table has no column {field.name!r}")
            columns.append(_arrow.chunked_array([_arrow.nulls(table.num_rows, field.type)]))
            continue
        column: Any = table.column(field.name)
        if column.type != field.type:
            if not _becomes(column.type, field.type):
                raise LocalProtocolError(
                    "bad_schema",
                    f"column {field.name!r} is of type {column.type}, the stream's is {field.type}",
                )
            try:
                column = without_views(column).cast(field.type)
            except pa.ArrowException as error:
                raise LocalProtocolError("bad_schema", f"column {field.name!r}: {error}") from error
        if column.null_count and not field.nullable:
            raise LocalProtocolError("bad_schema", f"column {field.name!r} has nulls")
        columns.append(column)
    made = pa.Table.from_arrays(columns, schema=schema)
    try:
        for rows in made.to_batches():
            check_required(rows)
    except BatchError as error:
        # A position in bytes means nothing to the caller, who handed in a table.
        reason = error.reason.removesuffix(f" (byte {error.position})")
        raise LocalProtocolError("bad_schema", reason) from error
    return made


def without_views(column: Any) -> Any:
    """Return a column without views of strings or bytes as the values of its dictionary.

    Arrow cannot cast a dictionary of views to a plain column, and polars makes such columns of its
    categories. Any other column is returned as it is.
    """
    kind, kinds = column.type, pa.types
    if not kinds.is_dictionary(kind):
        return column
    if kinds.is_string_view(kind.value_type):
        plain: Any = pa.string()
    elif kinds.is_binary_view(kind.value_type):
        plain = pa.binary()
    else:
        return column
    if isinstance(column, pa.ChunkedArray):
        chunks = [without_views(chunk) for chunk in column.chunks]
        return _arrow.chunked_array(chunks, pa.dictionary(kind.index_type, plain))
    return pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(plain))


def _becomes(given: Any, wanted: Any) -> bool:
    """Whether a column of one type can be published as one of another, by the rule of conform().

    Units of time may differ here: a cast that would lose digits fails by itself.
    """
    kinds = pa.types
    if given == wanted or _is_wider(given, wanted) or kinds.is_null(given):
        return True
    if kinds.is_dictionary(given):
        return _becomes(given.value_type, wanted)
    if kinds.is_timestamp(given) and kinds.is_timestamp(wanted):
        # A time of a zone and one without a zone are different things, whatever the zone.
        return bool((given.tz is None) == (wanted.tz is None))
    if kinds.is_duration(given) and kinds.is_duration(wanted):
        return True
    if _is_list(given) and _is_list(wanted):
        return _becomes(given.value_type, wanted.value_type)
    return any(given in layouts and wanted in layouts for layouts in _SAME_VALUES)


def _is_list(kind: Any) -> bool:
    """Whether a type is a list of any length, with offsets of 32 or 64 bits."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def aligned(content: Content) -> Content:
    """Return the content itself, or a copy where its bytes do not start at a multiple of 8.

    Arrow wraps no column that lies elsewhere.
    """
    address = _arrow.py_buffer(content.view).address
    return content if address % 8 == 0 else Content(content.view.tobytes())


def _header_columns(table: HeaderTable) -> tuple[Any, Any, Any]:
    """Return (subjects, key lists, field maps) of a header table; made once for each table."""
    if table.arrow is None:
        table.arrow = (
            _arrow.array([keys[0] for keys in table.keys], _arrow.string()),
            _arrow.array(list(map(list, table.keys)), _KEYS),
            _arrow.array([list(entry.items()) for entry in table.fieldmaps], _FIELDS),
        )
    columns: tuple[Any, Any, Any] = table.arrow
    return columns


def _is_small(table: HeaderTable) -> bool:
    """Whether a header table is small enough to be kept by _one_header_columns().

    A batch without codes may have entries that no record uses, and as many as a table may have.
    """
    return len(table.keys) <= 1 and len(table.fieldmaps) <= 1


@lru_cache(maxsize=_KEPT_COLUMNS)
def _one_header_columns(table: HeaderTable, count: int) -> tuple[Any, Any, Any]:
    """Return the coded columns of `count` rows that all have the first entries of a header table.

    Batches that follow each other often have the same table, and as many rows.
    """
    subjects, keys, fields = _header_columns(table)
    firsts = _indices(None, count, subjects)
    return (
        _column(firsts, subjects, decode=False),
        _column(firsts, keys, decode=False),
        _column(_indices(None, count, fields), fields, decode=False),
    )


def _binary(offsets: Array, blob: Any) -> Any:
    """Return a binary column without nulls over n+1 offsets and the bytes that they divide."""
    buffers = [None, _arrow.py_buffer(offsets), blob]
    return _arrow.Array.from_buffers(_arrow.binary(), len(offsets) - 1, buffers)


@lru_cache(maxsize=_KEPT_COLUMNS)
def _nulls(count: int, kind: Any) -> Any:
    """Return a column of nulls, which all batches of so many records share."""
    return _arrow.nulls(count, kind)


@lru_cache(maxsize=_KEPT_COLUMNS)
def _no_times(count: int) -> Any:
    """Return a column of no times, kept by its count alone: to hash a type costs ten look-ups."""
    return _nulls(count, _TIME)


@lru_cache(maxsize=_KEPT_COLUMNS)
def _no_codes(count: int) -> Any:
    """Return indices that are all null, kept by their count alone."""
    return _nulls(count, _arrow.int32())


@lru_cache(maxsize=_KEPT_COLUMNS)
def _no_properties(count: int) -> Any:
    """Return a coded column of no properties, which all batches of so many records share."""
    return _column(_no_codes(count), _NO_PROPERTIES, decode=False)


@lru_cache(maxsize=_KEPT_COLUMNS)
def _firsts(count: int) -> Any:
    """Return indices of the first entry, which all batches of so many records share."""
    return _arrow.array(np.zeros(count, np.int32))


def _times(times: Array | None, count: int, none: int) -> Any:
    """Return a column of times for Arrow, null where there is none.

    none: the value that stands for no time.
    """
    if times is None:
        return _no_times(count)
    present = times != none
    validity = None  # Arrow's bitmap of the rows that are not null; None: none is null.
    if not present.all():
        validity = _arrow.py_buffer(np.packbits(present, bitorder="little"))
    return _arrow.Array.from_buffers(_TIME, count, [validity, _arrow.py_buffer(times)])


def _indices(codes: Array | None, count: int, values: Any) -> Any:
    """Return int32 indices of a dictionary column, one for each row.

    codes: None: all rows have the first value. values: the dictionary. An index is null where the
    code is -1, and where there are no values.
    """
    if not len(values):
        return _no_codes(count)
    if codes is None:
        return _firsts(count)
    present = codes >= 0
    validity = None  # As in _times().
    if not present.all():
        validity = _arrow.py_buffer(np.packbits(present, bitorder="little"))
    return _arrow.Array.from_buffers(
        _arrow.int32(), count, [validity, _arrow.py_buffer(np.ascontiguousarray(codes))]
    )


def _column(indices: Any, values: Any, *, decode: bool) -> Any:
    """Return a dictionary column, or (decode) a plain one of the values that it stands for."""
    if decode:
        return values.take(indices)
    # safe=False: _indices() and check_codes() leave no index outside of the values.
    return _arrow.DictionaryArray.from_arrays(indices, values, safe=False)


def _check_repeated(codes: Array | None, count: int, sizes: Sequence[int], what: str) -> None:
    """Raise BatchError `too_large`: with a copy for each record, shared values take too much.

    codes: of each record's value; None: all have the first. sizes: bytes of each value. what: name
    of the column, for the error.
    """
    # At the worst every record has the largest value.
    if max(sizes, default=0) * count <= COLUMN_BYTES_MAX:
        return
    each = np.array([*sizes, 0], np.int64)  # The code -1 is the last entry.
    size = int(each[codes].sum()) if codes is not None else sizes[0] * count
    if size > COLUMN_BYTES_MAX:
        raise BatchError(
            "too_large",
            f"the column {what} of {count} records would take {size} bytes, at most "
            f"{COLUMN_BYTES_MAX}: read it coded (decode=False), or record by record",
        )
