"""Batches as Arrow record batches of the source's schema.

Owns the way from a batch's columns to Spark's. The rules: no Python object a row; what
repeats (subjects, field maps) is turned into Arrow once a header table; what leaves here
equals Spark's Arrow schema exactly and has one to two MiB, which Spark does not cut and
takes fastest. Source: SPEC.md, section 5, and PySpark's to_arrow_schema.
"""

from __future__ import annotations

import base64
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from malamute_protocol.arrow import aligned
from malamute_protocol.batch import Batch
from malamute_protocol.columns import NO_TIME
from malamute_protocol.content_layout import ARROW, BODY_KINDS, LIST
from malamute_protocol.header import HeaderTable
from malamute_protocol.properties import parse_properties
from malamute_py.client.session.subscription import cut
from pyspark_malamute.errors import MalamuteSourceError
from pyspark_malamute.options import RECORDS, SourceOptions
from pyspark_malamute.schema import spark_schema

if TYPE_CHECKING:
    from malamute_protocol.content import Content

TARGET_BYTES: Final = 1 << 20
"""Bytes that are gathered for one record batch: each smaller one would cost a call, too."""
RECORD_BATCH_BYTES_MAX: Final = 2 << 20
"""Bytes at which a record batch is cut: one of 50 MiB costs 40% more a row."""
PIECE_BYTES_MAX: Final = 64 << 20
"""Bytes of the rows taken in at once, counted as if each row had its own copy of what rows share:
the largest field map for each of 65,536 records would be 5 GiB."""
_PARSED_EXPANSION: Final = 30
"""Bytes of a map of properties as Python objects for each byte of its MessagePack, at most."""
_LEAN_ROW_BYTES: Final = 32
"""Bytes of a row in columns without bodies, about."""
_EMPTY_ROWS_MAX: Final = 1 << 17
"""Rows of a record batch without columns."""
_TABLES_KEPT: Final = 256
"""Header tables of which the Arrow arrays are kept."""
_TIME_MAX_MS: Final = ((1 << 63) - 1) // 1000
"""Greatest time that Spark's microseconds can say."""
_BATCHES_MAX: Final = 10_000
"""Batches gathered at most, so that a record batch of empty bodies ends, too."""

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# The stubs of pyarrow know too few of its overloads: what is built here is Any, and
# test_columns.py holds it to Spark's schema.
_arrow: Final[Any] = pa


class Columns(Protocol):
    """Rows of batches that a task collects, and gives out as record batches.

    What is wanted of the records decides which class does it: see fetch.py.
    """

    @property
    def full(self) -> bool: ...  # noqa: D102
    def pieces(self, batch: Batch) -> Iterator[Batch]: ...  # noqa: D102
    def add(self, batch: Batch) -> None: ...  # noqa: D102
    def take(self) -> Iterator[Any]: ...  # noqa: D102


def take_in(columns: Columns, batch: Batch) -> Iterator[Any]:
    """Take a batch into the columns, and yield the record batches that are full by then.

    A task does so with each batch that it reads, over the wire or from files.
    """
    for piece in columns.pieces(batch):
        columns.add(piece)
        if columns.full:
            yield from columns.take()


def in_pieces(batch: Batch, row_bytes: int) -> Iterator[Batch]:
    """Yield a batch in parts whose columns stay within PIECE_BYTES_MAX; as a rule it is one.

    row_bytes: the most that a row takes in the columns beside its body, at least 1.
    """
    rows = max(1, PIECE_BYTES_MAX // row_bytes)
    count = len(batch)
    if count <= rows:
        yield batch
        return
    for first in range(0, count, rows):
        yield cut(batch, first, min(first + rows, count))


def header_bytes_max(table: HeaderTable, names: Collection[str]) -> int:
    """Return the most bytes that a row takes in columns of a header, of those with these names.

    Values that rows share in the batch are copied for each row. Never 0.
    """
    widest = 1 + table.subject_bytes
    if "keys" in names:
        widest += table.keys_most * table.subject_bytes
    if "fields" in names:
        widest += table.fields_most * (table.field_name_bytes + table.field_value_bytes)
    return widest


class RowCount:
    """Rows without columns, as count() needs them: what the records hold is not looked at."""

    _most = _EMPTY_ROWS_MAX
    """Records that are counted for one record batch, about."""

    def __init__(self) -> None:
        self._rows = 0

    @property
    def full(self) -> bool:
        """True when enough rows have been counted for a record batch."""
        return self._rows >= self._most

    def pieces(self, batch: Batch) -> Iterator[Batch]:
        """Yield the batch whole, whatever its size: nothing of its rows is copied."""
        yield batch

    def add(self, batch: Batch) -> None:
        """Count the delivered rows of a batch."""
        self._rows += len(batch)

    def batches_of(self, records: int) -> Iterator[Any]:
        """Yield record batches for records of which only the number is known."""
        for first in range(0, records, self._most):
            self._rows = min(self._most, records - first)
            yield from self.take()

    def take(self) -> Iterator[Any]:
        """Yield a record batch without columns of as many rows as were counted; then begin anew."""
        if self._rows:
            # Without a column, a record batch has its number of rows from an array of structs.
            nothing = _arrow.struct([])
            rows = _arrow.StructArray.from_buffers(nothing, self._rows, [None])
            yield _arrow.RecordBatch.from_struct_array(rows)
        self._rows = 0


class RecordCount(RowCount):
    """One row for all that was counted of a range, in the column `records`; for count_records()."""

    _most = 1 << 62
    """A range has one row, however many records it has."""

    def __init__(self, options: SourceOptions) -> None:
        """options: those for the stream of the range."""
        super().__init__()
        self._stream = options.stream
        self._schema: Any = to_arrow_schema(spark_schema(options))

    def take(self) -> Iterator[Any]:
        """Yield a record batch of one row, if anything was counted; then begin anew."""
        if self._rows:
            row = {"stream": self._stream, RECORDS: self._rows}
            yield _arrow.RecordBatch.from_pylist([row], self._schema)
        self._rows = 0


class _Column:
    """A column of numbers (times, codes) gathered from several batches.

    A batch gives a number for each of its rows, or one for all of them. A numpy array for each
    batch of one record costs more than the record.
    """

    def __init__(self) -> None:
        self._parts: list[Array | int] = []
        """Numbers of each batch, or the one number of all its rows."""
        self._counts: list[int] = []
        """Rows of each batch."""
        self._one_each = True
        """Each batch so far had one number for all of its rows."""

    def add(self, values: Array | int, count: int) -> None:
        """Take in the numbers of a batch of `count` rows: one for each row, or an int for all."""
        self._parts.append(values)
        self._counts.append(count)
        self._one_each = self._one_each and isinstance(values, int)

    def finish(self, dtype: Any) -> Array:
        """Return the number of each row of all batches, for a record batch."""
        if self._one_each:
            return np.repeat(np.array(self._parts, dtype), self._counts)
        if len(self._parts) == 1:
            only: Any = self._parts[0]
            return np.asarray(only, dtype)
        return np.concatenate(
            [
                np.full(count, part, dtype) if isinstance(part, int) else part
                for part, count in zip(self._parts, self._counts, strict=True)
            ],
            dtype=dtype,
        )


class _Coded:
    """A column of values that rows name by codes into header tables, which batches share.

    The values of all tables are put one after the other, and codes count over all of them.
    """

    def __init__(self, kind: Any, entries: Callable[[HeaderTable], Iterable[Any]]) -> None:
        """kind: Arrow type of a value. entries: returns the values of a table, by their codes."""
        self._kind = kind
        self._entries = entries
        self._arrays: OrderedDict[int, tuple[HeaderTable, Any]] = OrderedDict()
        """id of a table -> the table and the Arrow array of its values."""
        self.clear()

    def clear(self) -> None:
        """Begin a new record batch."""
        self._bases: dict[int, int] = {}
        """id of a table -> place of its first value among those of all tables here."""
        self._tables: list[Any] = []
        """Values of each table of the record batch, as Arrow arrays."""
        self._size = 0
        """Values of all these tables."""
        self._codes = _Column()

    def add(self, table: HeaderTable, codes: Array | int, count: int) -> None:
        """Take in the codes of a batch of `count` rows: one for each row, or one for all."""
        key = id(table)
        base = self._bases.get(key)
        if base is None:
            values = self._array(table)
            base = self._bases[key] = self._size
            self._tables.append(values)
            self._size += len(values)
        # The batch's codes count from its table's first value, these from the first of all tables.
        self._codes.add(codes + base if base else codes, count)

    def finish(self) -> Any:
        """Return the value of each row as an Arrow array, for the record batch."""
        tables = self._tables
        values = tables[0] if len(tables) == 1 else _arrow.concat_arrays(tables)
        return values.take(_arrow.array(self._codes.finish(np.int32)))

    def _array(self, table: HeaderTable) -> Any:
        """Return the entries of a header table as an Arrow array, made once for each table."""
        # The table is held beside its array: an id is unique among the living only.
        found = self._arrays.get(id(table))
        if found is None:
            values = _arrow.array(list(self._entries(table)), self._kind)
            found = self._arrays[id(table)] = (table, values)
            if len(self._arrays) > _TABLES_KEPT:
                # Another table may get its address, and is to get no rows of this one.
                dropped, _ = self._arrays.popitem(last=False)
                self._bases.pop(dropped, None)
        return found[1]


class Gather:
    """Collects batches and gives them out as record batches of the source's schema."""

    def __init__(self, options: SourceOptions) -> None:
        """options: those that the schema follows from."""
        self._options = options
        self.schema: Any = to_arrow_schema(spark_schema(options), timezone="UTC")
        kinds = {field.name: field.type for field in self.schema}
        self._body_kind = kinds.get("body")
        self._subjects: _Coded | None = None
        self._keys: _Coded | None = None
        self._fields: dict[str, _Coded] = {}
        """Columns coded by a record's map of fields: the map, and single fields of it."""
        if "subject" in kinds:
            self._subjects = _Coded(
                kinds["subject"], lambda table: (keys[0] for keys in table.keys)
            )
        if "keys" in kinds:
            self._keys = _Coded(kinds["keys"], lambda table: map(list, table.keys))
        if "fields" in kinds:
            self._fields["fields"] = _Coded(kinds["fields"], _field_entries)
        for name in options.field_columns:
            self._fields[name] = _Coded(kinds[name], partial(_values_of, name))
        # Columns that are made once for each header table, which many batches share.
        self._by_header = {"subject": self._subjects, "keys": self._keys, **self._fields}
        self._has_client_time = "client_time" in kinds
        self._has_append_time = "append_time" in kinds
        self._properties_kind = kinds.get("properties")
        self._maps_of: tuple[Any, list[bytes], Array | None] | None = None
        """Buffer of the newest content, and what _maps() returned for it."""
        self._clear()

    def _clear(self) -> None:
        """Begin a new Arrow batch, without any rows."""
        self._bytes = 0
        """Bytes of the rows as they lay in their batches, about."""
        self._bytes_apart = 0
        """Bytes of the rows if each had its own copy of what rows share, at most."""
        self._offsets: list[Array] = []
        self._append_times = _Column()
        self._client_times = _Column()
        self._bodies: list[Any] = []
        self._properties: list[Any] = []
        for coded in self._by_header.values():
            if coded is not None:
                coded.clear()

    @property
    def full(self) -> bool:
        """True when enough rows have been gathered for a record batch."""
        return (
            self._bytes >= TARGET_BYTES
            or self._bytes_apart >= PIECE_BYTES_MAX  # What rows share, Spark gets for each.
            or len(self._offsets) >= _BATCHES_MAX
        )

    def pieces(self, batch: Batch) -> Iterator[Batch]:
        """Yield a batch in parts whose columns stay within PIECE_BYTES_MAX; as a rule it is one."""
        content = aligned(batch.content)
        if content is not batch.content:
            batch = Batch(batch.stamp, content, batch.rows)
        yield from in_pieces(batch, self._row_bytes_max(content))

    def _row_bytes_max(self, content: Content) -> int:
        """Return the most bytes that a row takes in the columns beside its body."""
        table = content.table
        widest = header_bytes_max(table, self.schema.names)
        widest += len(self._options.field_columns) * table.field_value_bytes
        if self._properties_kind is not None:
            maps, _ = self._maps(content)
            largest = max(map(len, maps), default=0)
            # Distinct maps become Python objects on the way, all at once; a lone one is not many.
            widest += largest * (_PARSED_EXPANSION if len(maps) > 1 else 1)
        return widest

    def _maps(self, content: Content) -> tuple[list[bytes], Array | None]:
        """Return content.properties(), asked once for a batch: all its pieces have one buffer."""
        if self._maps_of is None or self._maps_of[0] is not content.buffer:
            self._maps_of = (content.buffer, *content.properties())
        return self._maps_of[1:]

    def add(self, batch: Batch) -> None:
        """Take in the delivered rows of a batch.

        Raises BatchError: the bytes are not a batch. Raises MalamuteSourceError: its bodies
        have no place in the schema.
        """
        rows = batch.indices  # None: all rows of the content were delivered
        count = len(batch)
        if not count:
            return
        content = aligned(batch.content)
        if self._body_kind is not None:
            body = self._body(content)
            self._bodies.append(body if rows is None else body.take(_arrow.array(rows)))
        self._offsets.append(batch.offsets)
        if self._has_append_time:
            times = content.append_times
            if times is None:
                self._append_times.add(batch.stamp.append_time_ms, count)
            else:
                self._append_times.add(times if rows is None else times[rows], count)
        if self._has_client_time:
            self._client_times.add(_of_rows(content.client_times, NO_TIME, rows), count)
        # Raises for a code beyond its table: from here on, values are looked up by codes.
        content.check_codes()
        table = content.table
        codes = _of_rows(content.subject_codes, 0, rows)
        if self._subjects is not None:
            self._subjects.add(table, codes, count)
        if self._keys is not None:
            self._keys.add(table, codes, count)
        if self._fields:
            # Entry 0 is the empty map: a record without fields has code -1 in the batch.
            default = 0 if table.fieldmaps else -1
            codes = _of_rows(content.field_codes, default, rows) + 1
            for coded in self._fields.values():
                coded.add(table, codes, count)
        if self._properties_kind is not None:
            self._properties.append(self._property_column(content, rows, count))
        if self._body_kind is not None:
            # The share that the delivered rows have of the batch.
            self._bytes += batch.stamp.size * count // content.head.count
        else:
            self._bytes += _LEAN_ROW_BYTES * count
        self._bytes_apart += self._row_bytes_max(content) * count

    def take(self) -> Iterator[Any]:
        """Yield the gathered rows as record batches of 1 to 2 MiB; then begin anew."""
        if not self._offsets:
            return
        columns: dict[str, Any] = {
            name: coded.finish() for name, coded in self._by_header.items() if coded is not None
        }
        columns["offset"] = _arrow.array(np.concatenate(self._offsets))
        if "stream" in self.schema.names:
            count = len(columns["offset"])
            columns["stream"] = _arrow.repeat(_arrow.scalar(self._options.stream), count)
        if self._has_append_time:
            columns["append_time"] = _times(self._append_times.finish(np.int64))
        if self._has_client_time:
            columns["client_time"] = _times(self._client_times.finish(np.int64))
        if self._body_kind is not None:
            columns["body"] = _concatenated(self._bodies)
        if self._properties_kind is not None:
            columns["properties"] = _concatenated(self._properties)
        whole = _arrow.RecordBatch.from_arrays(
            [columns[name] for name in self.schema.names], schema=self.schema
        )
        self._clear()
        # Rounded up, both: so many pieces of equal rows that none is too large.
        pieces = -(-whole.nbytes // RECORD_BATCH_BYTES_MAX)
        rows = -(-whole.num_rows // pieces)
        for first in range(0, whole.num_rows, rows):
            yield whole.slice(first, rows)

    def _body(self, content: Content) -> Any:
        """Return the bodies as an Arrow array of the column's type. Raises MalamuteSourceError."""
        kind = content.head.body_kind
        wanted = self._options.body_type
        if kind == ARROW or (kind == LIST and wanted != "list"):
            remedy = (
                'add .option("bodyType", "list")'
                if kind == LIST
                else 'add .option("bodyType", "typed")'
            )
            raise MalamuteSourceError(
                f"malamute source: bodies of stream '{self._options.stream}' are of kind "
                f"'{BODY_KINDS[kind]}', which bodyType '{wanted}' cannot hold: {remedy}"
            )
        # `offsets` bounds the bodies in the blob; where bodies are lists, `parts` bounds their
        # entries in the blob, and `offsets` the lists in `parts`.
        bodies = content.bodies()
        blob = _arrow.py_buffer(bodies.blob)
        bounds = bodies.offsets if bodies.parts is None else bodies.parts
        values = _arrow.Array.from_buffers(
            _arrow.binary(), len(bounds) - 1, [None, _arrow.py_buffer(bounds), blob]
        )
        if wanted != "list":
            return values
        parts = bodies.offsets
        if bodies.parts is None:
            # Each body is shown as a list of one.
            parts = np.arange(len(content) + 1, dtype=np.int32)
        return _arrow.ListArray.from_arrays(_arrow.array(parts), values, type=self._body_kind)

    def _property_column(self, content: Content, rows: Array | None, count: int) -> Any:
        """Return the properties of some rows as an Arrow map column.

        rows: their numbers; None: all. count: how many they are.
        """
        maps, codes = self._maps(content)
        # Place of each row's map among `values` below: 0 is the empty one, of code -1.
        chosen = _of_rows(codes, 0 if maps else -1, rows) + 1
        if isinstance(chosen, int):
            chosen = np.full(count, chosen, np.int32)
        elif count < len(maps):
            # Few rows of many: only their maps are parsed, and numbered anew. A place 0 is added,
            # so that the empty map stays the first, and is taken away again.
            used, chosen = np.unique(np.append(chosen, 0), return_inverse=True)
            chosen = chosen[:-1]
            maps = [maps[code - 1] for code in used[1:].tolist()]
        values = _arrow.array([[], *map(_texts, maps)], self._properties_kind)
        return values.take(_arrow.array(chosen))


def _field_entries(table: HeaderTable) -> Iterator[Sequence[tuple[str, str]]]:
    """Yield the pairs of each field map of a table, after those of a record without fields."""
    yield ()  # for code -1: the caller adds 1 to all codes
    for fields in table.fieldmaps:
        yield tuple(fields.items())


def _values_of(name: str, table: HeaderTable) -> Iterator[str | None]:
    """Yield the value of one field in each field map, after that of a record without fields."""
    yield None  # for code -1: the caller adds 1 to all codes
    for fields in table.fieldmaps:
        yield fields.get(name)


def _of_rows(values: Array | None, default: int, rows: Array | None) -> Array | int:
    """Return a column's values for some rows.

    default: value of each row where the batch has no such column. rows: None: all.
    """
    if values is None:
        return default
    return values if rows is None else values[rows]


def _concatenated(arrays: list[Any]) -> Any:
    """Return Arrow arrays as one; a lone one is not copied."""
    return arrays[0] if len(arrays) == 1 else _arrow.concat_arrays(arrays)


def _times(times_ms: Array) -> Any:
    """Return times in microseconds, as Spark counts; null where a row has no time.

    A time beyond what 64 bits can count, as a producer may give, becomes the last or first one.
    """
    missing = times_ms == NO_TIME
    times_ms = times_ms.clip(-_TIME_MAX_MS, _TIME_MAX_MS)
    if missing.any():
        times = _arrow.array(np.where(missing, 0, times_ms) * 1000, mask=missing)
    else:
        times = _arrow.array(times_ms * 1000)
    return times.view(_arrow.timestamp("us", "UTC"))


@lru_cache(maxsize=4096)
def _texts(properties: bytes) -> list[tuple[str, str]]:
    """Return a map of properties with its values as text; kept, since few maps differ."""
    found: Mapping[str, Any] = parse_properties(properties) if properties else {}
    return [(name, _text(value)) for name, value in found.items()]


def _text(value: Any) -> str:
    """Return a property's value as text: bytes in base64, other values as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return json.dumps(value, ensure_ascii=False)
