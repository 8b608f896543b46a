"""Rows of a partition as chunks, each of which is published in one atomic step.

Owns the way from Spark's Arrow batches to batch contents. The rules: the same rows in the same
order make the same chunks, however Spark cuts them into Arrow batches; where chunks are published
already, the cuts are theirs; no Python object a row; a row that cannot be a record is refused by
its number and column before a chunk with it is published.
Source: SPEC.md, section 5.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import google_crc32c
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from malamute_protocol.address import name_fault
from malamute_protocol.batch import Options, encode_columns
from malamute_protocol.columns import NO_TIME
from malamute_protocol.content_layout import PROPERTIES_DICTIONARY
from malamute_protocol.errors import LocalProtocolError
from malamute_protocol.limits import DEFAULT_LIMITS, Limits
from pyspark_malamute.errors import UnwritableRows
from pyspark_malamute.sink_options import SinkOptions

ROWS_MAX: Final = 32_768
"""Rows of a chunk, at most: half of what a batch may have."""
STREAMS_MAX: Final = DEFAULT_LIMITS.step_parts_max // 2
"""Streams of a chunk, at most: each is a part of its step."""
_STREAM_BYTES: Final = 256
"""Bytes that a stream adds to the step of a chunk, at most: a stamp, a head, padding."""
_ENTRIES_MAX: Final = 200_000
"""Subjects and fields of a chunk, at most, counted as if each row had its own."""
_ROW_BYTES: Final = 24
"""Bytes that a row is assumed to cost beside its values."""
_CONTENT_CRC: Final = struct.Struct("<8xI")
"""Checksum of a content, which its head has after 8 other bytes."""
_SHORT_MAP: Final = 15
"""Entries of a map whose number MessagePack has in its first byte."""
_SHORT_TEXT: Final = 31
"""Bytes of a text whose length MessagePack has in its first byte."""
_BYTE_MAX: Final = 255

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# The stubs of pyarrow know too few of its overloads.
_arrow: Final[Any] = pa
_compute: Final[Any] = pc


class Chunk(NamedTuple):
    """Consecutive rows of a partition that are published together."""

    number: int
    """Number within the partition, from 0."""
    first: int
    """Number of the first row within the partition."""
    rows: Any
    """pyarrow.RecordBatch of them."""
    size: int
    """Bytes of the rows' values, about; the same for the same rows."""
    last: bool
    """Whether the partition has no further row."""


def chunks(
    options: SinkOptions,
    batches: Iterable[Any],
    published: Callable[[int], int | None],
    limits_of_broker: Callable[[], Limits] = lambda: DEFAULT_LIMITS,
) -> Iterator[Chunk]:
    """The rows of a partition in chunks; none of a partition without rows.

    published: number of a chunk -> how many rows it has, where it is published; asked once there is
    a row for it. limits_of_broker: asked for a chunk that is not published. Raises UnwritableRows.
    """
    held: list[Any] = []
    # Of the chunk that is being gathered: its number, first row, rows and bytes.
    number = first = count = size = 0
    streams = _Streams()

    def held_chunk(*, last: bool) -> Chunk:
        """Return the chunk of what was gathered; last: the partition has no further row."""
        table = _arrow.Table.from_batches(held).combine_chunks()
        return Chunk(number, first, table.to_batches()[0], size, last)

    for batch in batches:
        ends = np.cumsum(_sizes(options, batch, first + count))  # bytes up to the end of each row
        if not options.stream:
            streams.look_at(batch.column("stream"))
        begin = 0
        while begin < batch.num_rows:
            done = int(ends[begin - 1]) if begin else 0  # bytes of the batch's rows before `begin`
            fixed = published(number)  # rows that an earlier attempt gave to this chunk
            # `stop`: row of the batch up to which the chunk takes rows.
            if fixed is None:
                limits = limits_of_broker()
                most = min(options.chunk_bytes, limits.batch_bytes_max * 3 // 4)
                # Row up to which the chunk's bytes stay within `most`.
                fitting = int(np.searchsorted(ends, done + most - size, "right"))
                # The record of the chunk goes into the same step.
                rows = min(ROWS_MAX, max(1, limits.batch_records_max - 1))
                # Each stream is a part; the quarter of the bytes that rows leave is for them.
                quarter = limits.batch_bytes_max // 4 // _STREAM_BYTES
                parts = max(1, min(STREAMS_MAX, limits.step_parts_max - 1, quarter))
                stop = min(fitting, begin + rows - count, streams.end(begin, parts))
            else:
                stop = min(begin + fixed - count, batch.num_rows)
            if stop <= begin and count:  # No further row fits: the chunk is full.
                yield held_chunk(last=False)
                held, number, first, count, size = [], number + 1, first + count, 0, 0
                streams.clear()
                continue
            # A row that is larger than a chunk is a chunk.
            stop = max(stop, begin + 1)
            if fixed is None:
                _check_bodies(options, batch.slice(begin, stop - begin), limits, first + count)
            held.append(batch.slice(begin, stop - begin))
            count += stop - begin
            size += int(ends[stop - 1]) - done
            streams.take(begin, stop)
            begin = stop
    if count:
        yield held_chunk(last=True)


class _Streams:
    """Streams of the chunk that is being gathered, where a column names them."""

    def __init__(self) -> None:
        self._names: list[str] = []
        """Distinct names in the column that was looked at last."""
        self._codes: Array = np.zeros(0, np.int32)
        """Place in `_names` of each row's stream."""
        self._of_chunk: set[str] = set()

    def look_at(self, column: Any) -> None:
        """Take up column `stream` of the Arrow batch whose rows come next."""
        coded = column.dictionary_encode()
        self._names = coded.dictionary.to_pylist()
        self._codes = coded.indices.to_numpy()

    def end(self, begin: int, most: int) -> int:
        """Return the row, from `begin` on, at which the chunk would get more than `most` streams.

        sys.maxsize: it gets no more.
        """
        codes, firsts = np.unique(self._codes[begin:], return_index=True)
        names = [self._names[code] for code in codes]
        # First row of each stream that the chunk has not yet, in the order of the rows.
        new = sorted(
            int(place) for place, name in zip(firsts, names, strict=True)
            if name not in self._of_chunk
        )  # fmt: skip
        room = most - len(self._of_chunk)
        return begin + new[room] if room < len(new) else sys.maxsize

    def take(self, begin: int, stop: int) -> None:
        """Note the streams of the rows [begin, stop), which the chunk gets."""
        self._of_chunk.update(self._names[code] for code in np.unique(self._codes[begin:stop]))

    def clear(self) -> None:
        """Begin a new chunk."""
        self._of_chunk.clear()


def contents(options: SinkOptions, chunk: Chunk) -> list[tuple[str, bytes]]:
    """(stream, batch content) of a chunk: one for each stream, rows in their order.

    Raises UnwritableRows: a name is none of a stream, or the rows of one cannot be a batch.
    """
    rows = chunk.rows
    try:
        if options.stream:
            return [(options.stream, _content(options, rows))]
        streams = rows.column("stream").dictionary_encode()
        names = streams.dictionary.to_pylist()
        codes = streams.indices.to_numpy()
        for code, name in enumerate(names):
            fault = name_fault(name)
            if fault:
                row = chunk.first + int(np.flatnonzero(codes == code)[0])
                raise _unwritable("stream", f"names no stream, for {fault}", row)
        if len(names) == 1:
            return [(names[0], _content(options, rows))]
        return [
            (name, _content(options, rows.take(_arrow.array(np.flatnonzero(codes == code)))))
            for code, name in enumerate(names)
        ]
    except LocalProtocolError as error:
        raise no_batch(chunk, error.reason) from error


def no_batch(chunk: Chunk, reason: str) -> UnwritableRows:
    """Return the error for a chunk whose rows cannot be published together, by their numbers."""
    last = chunk.first + chunk.rows.num_rows - 1
    which = f"rows {chunk.first} to {last}" if last > chunk.first else f"row {last}"
    return UnwritableRows(f"malamute sink: {which} of the partition cannot be a batch: {reason}")


def checksum(found: Sequence[tuple[str, bytes]]) -> int:
    """A number that tells chunks of other rows, or of rows in another order, apart.

    found: what contents() returned for the chunk.
    """
    value = 0
    for stream, content in found:
        value = google_crc32c.extend(value, stream.encode())
        # The content's own checksum stands for its bytes.
        value = google_crc32c.extend(value, _CONTENT_CRC.pack(*_CONTENT_CRC.unpack_from(content)))
    return value


# --- sizes and checks of rows ----------------------------------------------------------------


def _sizes(options: SinkOptions, batch: Any, first: int) -> Array:
    """Bytes of each row's values, about; raises UnwritableRows for the first bad row.

    first: number of the batch's first row within the partition, for the error.
    """
    # Those of the broker are not asked for: they would change where the same rows are cut.
    limits = DEFAULT_LIMITS
    total = np.full(batch.num_rows, _ROW_BYTES, np.int64)
    # Weighed so that a chunk of its full bytes has _ENTRIES_MAX subjects and fields at most.
    entry = options.chunk_bytes // _ENTRIES_MAX + 1
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name in ("body", "subject", "stream"):
            if name == "stream" and options.stream:  # Option `stream` stands for the column.
                continue
            if column.null_count:
                row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
                raise _unwritable(name, "is null", first + row)
            sizes = _lengths(column)
            most = limits.record_bytes_max if name == "body" else limits.subject_bytes_max
            _check_most(name, sizes, most, first)
            total += sizes
            if name == "subject":
                total += entry
        elif name in options.field_columns:
            sizes = _lengths(column)
            _check_most(name, sizes, limits.field_value_bytes_max, first)
            total += sizes + entry
        elif name in ("fields", "properties"):
            total += _map_sizes(name, column, first, entry)
    return total


def _map_sizes(name: str, column: Any, first: int, entry: int) -> Array:
    """Bytes of each row's map, about; raises UnwritableRows.

    first: as of _sizes(). entry: bytes that an entry is assumed to cost beside its text.
    """
    # The entries of all rows lie one behind the other: those of row n are bounds[n]:bounds[n + 1].
    bounds = column.offsets.to_numpy().astype(np.int64)
    begin, count = int(bounds[0]), int(bounds[-1] - bounds[0])
    bounds = bounds - begin
    items = column.items.slice(begin, count)
    if items.null_count:
        # An entry's row is the last one that begins at it or before.
        place = int(np.flatnonzero(items.is_null().to_numpy(zero_copy_only=False))[0])
        row = int(np.searchsorted(bounds, place, "right")) - 1
        key = column.keys[begin + place].as_py()
        raise _unwritable(name, f"has null under '{key}'", first + row)
    keys, values = _lengths(column.keys.slice(begin, count)), _lengths(items)
    if name == "fields":
        limits = DEFAULT_LIMITS
        for lengths, most in (
            (keys, limits.field_name_bytes_max),
            (values, limits.field_value_bytes_max),
        ):
            if count and int(lengths.max()) > most:
                place = int(lengths.argmax())
                row = int(np.searchsorted(bounds, place, "right")) - 1
                raise _unwritable(
                    name,
                    f"has a name or value of {lengths[place]} bytes, at most {most}",
                    first + row,
                )
        _check_most(name, np.diff(bounds), limits.fields_max, first, what="fields")
    # Sums up to each entry: the difference at a row's bounds is the row's.
    ends = np.zeros(count + 1, np.int64)
    np.cumsum(keys + values + entry, out=ends[1:])
    sizes: Array = np.diff(ends[bounds])
    if name == "properties":
        np.cumsum(_packed_sizes(keys) + _packed_sizes(values), out=ends[1:])
        lengths = np.diff(bounds)
        # MessagePack has the number of entries in one byte, or in three.
        packed = np.diff(ends[bounds]) + np.where(lengths > _SHORT_MAP, 3, 1)
        _check_most(name, packed, DEFAULT_LIMITS.property_bytes_max, first)
    return sizes


def _packed_sizes(lengths: Array) -> Array:
    """Bytes of texts of these lengths as MessagePack, up to 64 KiB."""
    # Besides the text one byte, in which a short length is; two for a longer one, else three.
    return lengths + 1 + (lengths > _SHORT_TEXT) + (lengths > _BYTE_MAX)


def _check_most(name: str, sizes: Array, most: int, first: int, what: str = "bytes") -> None:
    """Raise UnwritableRows if the value of some row in a column has a size above `most`.

    name: of the column. first: as of _sizes(). what: the unit of the sizes.
    """
    if len(sizes) and int(sizes.max()) > most:
        row = int(sizes.argmax())
        raise _unwritable(name, f"has {sizes[row]} {what}, at most {most}", first + row)


def _check_bodies(options: SinkOptions, rows: Any, limits: Limits, first: int) -> None:
    """Raise UnwritableRows for the first row whose body is larger than the broker takes.

    limits: the broker's. first: as of _sizes().
    """
    sizes, most = _lengths(rows.column("body")), limits.record_bytes_max
    large = np.flatnonzero(sizes > most)
    if len(large):
        row = int(large[0])
        stream = options.stream or rows.column("stream")[row].as_py()
        fault = f"has {sizes[row]} bytes for stream '{stream}', at most {most} by the broker's "
        raise _unwritable("body", f"{fault}limits.record_bytes_max", first + row)


def _unwritable(column: str, fault: str, row: int) -> UnwritableRows:
    """Return the error for a value that cannot be written; row: its number in the partition."""
    return UnwritableRows(f"malamute sink: column '{column}' of row {row} of the partition {fault}")


def _lengths(column: Any) -> Array:
    """Return the bytes of each value of a column of texts or bytes; 0 for null."""
    found: Array = _compute.binary_length(column).fill_null(0).to_numpy().astype(np.int64)
    return found


# --- columns of a content --------------------------------------------------------------------


def _content(options: SinkOptions, rows: Any) -> bytes:
    """Return rows of a chunk, all for one stream, as an encoded content of their columns.

    Raises LocalProtocolError: they are no batch.
    """
    names = rows.schema.names
    made: Options = {}
    if "subject" in names:
        coded = rows.column("subject").dictionary_encode()
        table = coded.dictionary.to_pylist()
        made["subject_table"] = table
        made["subject_codes"] = coded.indices.to_numpy() if len(table) > 1 else None
    maps: tuple[list[dict[str, str]], Array] | None = None
    if options.field_columns:
        maps = _maps_of_columns({name: rows.column(name) for name in options.field_columns})
    elif "fields" in names:
        maps = _maps(rows.column("fields"))
    if maps is not None and maps[0]:
        made["field_table"], made["field_codes"] = maps
    if "client_time" in names:
        times = _times(rows.column("client_time"))
        if times is not None:
            made["client_time_ms"] = times
    if "properties" in names:
        kept, codes = _maps(rows.column("properties"))
        # Maps are encoded once each, with a code for each row, where they come twice on average.
        if kept and 2 * len(kept) <= len(codes):
            packed = msgspec.msgpack.encode(kept)
            made["property_section"] = (
                PROPERTIES_DICTIONARY,
                [codes.astype(np.int32), packed],
            )
        elif kept:
            made["properties"] = [kept[code] if code >= 0 else None for code in codes.tolist()]
    body = rows.column("body").cast(_arrow.binary())
    _, bounds, blob = body.buffers()  # which values are there (all are), offsets, bytes
    offsets = np.frombuffer(bounds, np.int32)[body.offset : body.offset + len(body) + 1]
    return encode_columns(offsets, b"" if blob is None else blob, **made)


def _times(column: Any) -> Array | None:
    """Milliseconds since 1970, rounded down; None where no row has a time."""
    if column.null_count == len(column):
        return None
    micros = column.cast(_arrow.timestamp("us", tz="UTC")).cast(_arrow.int64())
    times: Array = micros.fill_null(0).to_numpy() // 1000
    if column.null_count:
        times = np.where(column.is_null().to_numpy(zero_copy_only=False), NO_TIME, times)
    return times


def _maps(column: Any) -> tuple[list[dict[str, str]], Array]:
    """(distinct maps, code of each row's map); -1: the row has none, or an empty one.

    Each pair of name and value gets a number, and rows of as many pairs are compared together, as a
    matrix of these numbers.
    """
    bounds = column.offsets.to_numpy().astype(np.int64)
    begin = int(bounds[0])
    bounds -= begin
    count = int(bounds[-1])
    keys = column.keys.slice(begin, count).dictionary_encode()
    items = column.items.slice(begin, count).dictionary_encode()
    names, values = keys.dictionary.to_pylist(), items.dictionary.to_pylist()
    radix = max(1, len(values))  # number of a pair: that of its name times this, and of its value
    pairs = keys.indices.to_numpy().astype(np.int64) * radix + items.indices.to_numpy()
    lengths = np.diff(bounds)
    if column.null_count:
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = 0
    codes = np.full(len(column), -1, np.int32)
    table: list[dict[str, str]] = []
    for length in np.unique(lengths):
        if not length:
            continue
        rows = np.flatnonzero(lengths == length)
        # A line for each of these rows, with the numbers of its pairs. Sorted: the same pairs in
        # another order are the same map.
        matrix = np.sort(pairs[bounds[rows][:, None] + np.arange(length)], axis=1)
        firsts, found = _distinct(list(matrix.T))
        codes[rows] = found + len(table)
        table += [
            {names[pair // radix]: values[pair % radix] for pair in row}
            for row in matrix[firsts].tolist()
        ]
    return table, codes


def _maps_of_columns(columns: dict[str, Any]) -> tuple[list[dict[str, str]], Array]:
    """The maps that string columns make, and each row's code; null: no such field.

    A row without any of the fields has code -1, as _maps() gives it.
    """
    # Of each column, the number of each row's text, and the texts by number; 0 is null.
    coded = {name: column.dictionary_encode() for name, column in columns.items()}
    numbers = [
        each.indices.fill_null(-1).to_numpy().astype(np.int64) + 1 for each in coded.values()
    ]
    texts = [[None, *each.dictionary.to_pylist()] for each in coded.values()]
    firsts, codes = _distinct(numbers)
    table: list[dict[str, str]] = []
    places = np.full(len(firsts), -1, np.int32)  # in `table`, of each distinct row
    for place, row in enumerate(firsts.tolist()):
        found = {
            name: text
            for name, number, known in zip(coded, numbers, texts, strict=True)
            if (text := known[number[row]]) is not None
        }
        if found:
            places[place] = len(table)
            table.append(found)
    return table, places[codes]


def _distinct(columns: Sequence[Array]) -> tuple[Array, Array]:
    """(a row for each distinct combination of the columns' numbers, code of each row).

    columns: numbers from 0 on of each row.
    """
    codes = columns[0]
    for column in columns[1:]:
        # Combinations so far are numbered densely, so that the product stays small, and each gets
        # room for every number of the next column.
        _, codes = np.unique(codes, return_inverse=True)
        codes = codes.astype(np.int64) * (int(column.max()) + 1) + column
    _, firsts, found = np.unique(codes, return_index=True, return_inverse=True)
    return firsts, found
