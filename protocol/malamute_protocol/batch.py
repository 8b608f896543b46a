"""The record batch as a consumer gets it, and the way from a delivery's frames to batches.

Owns the pair of stamp and content with the rows that were delivered, and a record, which is a row
number in it. The rule: columns are resolved once for each batch, lazily; iterating builds no more
than the rows' own objects; a frame boundary falls only after a stamp or after a batch. Source:
SPEC.md, section 5.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from malamute_protocol.bodies import FEW, Bodies
from malamute_protocol.columns import NO_TIME, Array
from malamute_protocol.content import Content
from malamute_protocol.content_layout import APPEND_TIMES, ARROW, BLOB, OFFSET_DELTAS
from malamute_protocol.encode import (
    encode,
    encode_arrow,
    encode_bulk,
    encode_columns,
    encode_fixed,
    encode_lists,
)
from malamute_protocol.encode_headers import Options
from malamute_protocol.errors import BatchError
from malamute_protocol.extract import extract, extractable
from malamute_protocol.header import Header
from malamute_protocol.limits import DEFAULT_LIMITS, Limits
from malamute_protocol.properties import parse_properties
from malamute_protocol.schema import Schemas
from malamute_protocol.stamp import (
    STAMP_BYTES,
    Stamp,
    message_id,
    parse_message_id,
    row_bitmap,
    rows_from_bitmap,
)

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

__all__ = [
    "STAMP_BYTES",
    "Batch",
    "Content",
    "Header",
    "Options",
    "Record",
    "Stamp",
    "encode",
    "encode_arrow",
    "encode_bulk",
    "encode_columns",
    "encode_fixed",
    "encode_lists",
    "extract",
    "extractable",
    "iter_batches",
    "message_id",
    "parse_message_id",
    "row_bitmap",
    "rows_from_bitmap",
]

# Shared by all records without, and never changed.
_NO_FIELDS: Mapping[str, str] = {}
_NO_PROPERTIES: Mapping[str, Any] = {}

_SHOWN_MAX: Final = 60
"""Bytes of a body that repr() shows."""
_PARSED_BYTES: Final = 1 << 20
"""MessagePack of the property maps that a batch keeps parsed: as objects they may take 30 times as
much, and a batch of 16 MiB may hold nothing else."""


class Batch:
    """Records of one stream that were appended together, without the rows not delivered."""

    schemas: Schemas | None = None
    """Versions of the stream's declared schema; None: it has none, or the batch came without."""

    def __init__(self, stamp: Stamp, content: Content, rows: Array | None = None) -> None:
        """rows: boolean mask of the delivered rows; None: all."""
        self.stamp = stamp
        self.content = content
        self.rows = rows
        self._indices: Array | None = None
        # Values that every row asks for are plain attributes: a cached_property costs a lookup of
        # 50 ns each time, these 5.
        self._base = stamp.base_offset
        self._deltas: list[int] | None = None
        if content.head.flags & OFFSET_DELTAS:
            self._deltas = _listed(content.offset_deltas)
        self._append_times: list[int] | None = None
        if content.head.flags & APPEND_TIMES:
            self._append_times = _listed(content.append_times)
        # Columns of all rows as lists, made when a row first asks for one of them.
        self._body_bytes: bytes | None = None
        self._body_bounds: list[int] = []
        self._keys: list[tuple[str, ...]] | None = None
        self._subject_codes: list[int] | None = None
        self._maps: Sequence[Mapping[str, str]] | None = None
        self._field_codes: list[int] | None = None
        self._parsed: dict[int, Mapping[str, Any]] = {}
        """Code -> properties that some row asked for."""
        self._parsed_bytes = 0
        """MessagePack bytes that `_parsed` was made of."""

    def with_rows(self, rows: Array) -> Batch:
        """Return the batch with these rows, a boolean mask, as those that were delivered.

        A client gives a caller part of a batch so.
        """
        batch = Batch(self.stamp, self.content, rows)
        if self.schemas is not None:
            batch.schemas = self.schemas
        return batch

    def __len__(self) -> int:
        indices = self.indices
        return self.content.head.count if indices is None else len(indices)

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    def __repr__(self) -> str:
        return f"<Batch offset={self.base_offset} records={len(self)}>"

    @property
    def base_offset(self) -> int:
        """Return the offset of the batch's first record, delivered or not."""
        return self._base

    def span(self) -> tuple[int, int]:
        """Return the offset of the first delivered record, and that after the last one.

        A reader's position goes by these. At least one record is delivered.
        """
        indices = self.indices
        first, last = 0, self.content.head.count - 1
        if indices is not None:
            first, last = int(indices[0]), int(indices[-1])
        return self.offset_of(first), self.offset_of(last) + 1

    @property
    def indices(self) -> Array | None:
        """Return the row numbers delivered; None: all."""
        # No cached_property: until 3.12 that takes a lock for the first look, and mostly there is
        # no second.
        if self._indices is None and self.rows is not None:
            self._indices = np.flatnonzero(self.rows)
        return self._indices

    @cached_property
    def offsets(self) -> Array:
        """Return the offset of each delivered record, as int64."""
        deltas = self.content.offset_deltas
        if deltas is None:
            deltas = np.arange(self.content.head.count, dtype=np.int64)
        chosen = deltas if self.indices is None else deltas[self.indices]
        result: Array = chosen.astype(np.int64) + self.stamp.base_offset
        return result

    def records(self) -> Iterator[Record]:
        """Yield the delivered records, lazily, in order."""
        rows: Iterable[int] = (
            range(self.content.head.count) if self.indices is None else self.indices.tolist()
        )
        # map and repeat make the rows in C: half the cost of a generator's loop.
        return map(Record, repeat(self), rows)

    def bodies(self) -> list[bytes]:
        """Return the bodies of the delivered records; quick for a caller that wants no more.

        Raises TypeError when the body kind is not blob.
        """
        bodies = self._blobs()
        bounds = bodies.offsets
        count = len(bounds) - 1
        if count > FEW:
            width = int(bounds[1])
            if (
                width > 0
                and width * count == int(bounds[-1])
                and bool((np.diff(bounds) == width).all())
            ):
                # Equal widths: numpy cuts the blob into items of opaque bytes (V) five times faster
                # than slicing does.
                column = np.frombuffer(bodies.blob, f"V{width}", count)
                chosen = column if self.indices is None else column[self.indices]
                cut: list[bytes] = chosen.tolist()
                return cut
        blob, ends = self.body_columns()
        if self.indices is None:
            return [blob[i:j] for i, j in pairwise(ends)]
        return [blob[ends[i] : ends[i + 1]] for i in self.indices.tolist()]

    def to_arrow(
        self, *, decode: bool = False, header: Sequence[str] = (), schema: int = 0
    ) -> pa.RecordBatch:
        """Return the delivered records as one Arrow record batch; see arrow.py for its columns.

        Of a typed stream these are the columns of its schema, as views of the batch. decode: plain
        columns for subject, fields and properties instead of dictionaries. For typed streams only:
        header: columns to put before those of the schema ("offset", "subject", ...); schema: id of
        the version to cast to, 0: the newest. Raises as typed_to_arrow().
        """
        from malamute_protocol.arrow import to_arrow

        return to_arrow(self, decode=decode, header=header, schema=schema or None)

    def to_polars(self, *, header: Sequence[str] = (), schema: int = 0) -> pl.DataFrame:
        """Return the delivered records as a polars frame. Raises as to_arrow()."""
        import polars as pl

        rows = self.to_arrow(decode=True, header=header, schema=schema)
        frame = pl.from_arrow(rows, rechunk=False)
        assert isinstance(frame, pl.DataFrame)
        return frame

    def to_pandas(self, *, header: Sequence[str] = (), schema: int = 0) -> pd.DataFrame:
        """Return the delivered records as a pandas frame of Arrow columns. Raises as to_arrow().

        Columns of numpy would be copies of most columns.
        """
        import pandas as pd

        rows = self.to_arrow(decode=True, header=header, schema=schema)
        return rows.to_pandas(types_mapper=pd.ArrowDtype)

    def verify(self, limits: Limits = DEFAULT_LIMITS) -> None:
        """Validate the whole content, bodies included. Raises BatchError."""
        self.content.verify(limits, derived=self.stamp.derived)

    # --- one row: what Record asks for ----------------------------------------------

    @cached_property
    def _bodies(self) -> Bodies:
        """The bodies of all rows, decompressed once."""
        return self.content.bodies()

    def _blobs(self) -> Bodies:
        """Return the bodies of a batch whose bodies are single blobs. Raises TypeError."""
        kind = self.content.head.body_kind
        if kind != BLOB:
            how = "to_arrow()" if kind == ARROW else "parts"
            raise TypeError(f"the batch's bodies are not single blobs: use {how}")
        return self._bodies

    def body_columns(self) -> tuple[bytes, list[int]]:
        """Return (all bodies back to back, their n+1 bounds), of all rows.

        One copy of a batch costs a third of a view for each row.
        """
        if self._body_bytes is None:
            few = self.content.few_bodies()
            if few is None:
                bodies = self._blobs()
                few = bytes(bodies.blob), bodies.offsets.tolist()
            self._body_bytes, self._body_bounds = few
        return self._body_bytes, self._body_bounds

    @cached_property
    def _properties(self) -> tuple[list[bytes], list[int] | None]:
        """Property maps, not parsed, and the code of each row; None: all rows have the first."""
        maps, codes = self.content.properties()
        return maps, None if codes is None else codes.tolist()

    def offset_of(self, row: int) -> int:
        """Return the offset of the record in row `row` of the batch as it came."""
        deltas = self._deltas
        return self._base + (row if deltas is None else deltas[row])

    def append_time_of(self, row: int) -> int:
        """Return the time in milliseconds when a row was appended."""
        times = self._append_times
        return self.stamp.append_time_ms if times is None else times[row]

    def keys_of(self, row: int) -> tuple[str, ...]:
        """Return the keys of a row, its subject first."""
        keys = self._keys
        if keys is None:
            keys = self._keys = self.content.table.keys
            self._subject_codes = _listed(self.content.subject_codes)
        codes = self._subject_codes
        return keys[0 if codes is None else codes[row]]

    def body_of(self, row: int) -> bytes:
        """Return the body of a row."""
        blob = self._body_bytes
        if blob is None:
            blob, _ = self.body_columns()
        bounds = self._body_bounds
        return blob[bounds[row] : bounds[row + 1]]

    def fields_of(self, row: int) -> Mapping[str, str]:
        """Return the fields of a row."""
        maps = self._maps
        if maps is None:
            maps = self._maps = self.content.table.fieldmaps
            self._field_codes = _listed(self.content.field_codes)
        if not maps:
            return _NO_FIELDS
        codes = self._field_codes
        code = 0 if codes is None else codes[row]
        return maps[code] if code >= 0 else _NO_FIELDS

    def parts_of(self, row: int) -> list[bytes]:
        """Return the blobs of a row: the body, or of a list its parts."""
        bodies = self._bodies
        if bodies.parts is None:
            return [self.body_of(row)]
        first, end = int(bodies.offsets[row]), int(bodies.offsets[row + 1])
        bounds = bodies.parts[first : end + 1].tolist()
        return [bytes(bodies.blob[i:j]) for i, j in pairwise(bounds)]

    def client_time_of(self, row: int) -> int | None:
        """Return the client time of a row in milliseconds; None: the producer gave none."""
        times = self.content.client_times
        time = NO_TIME if times is None else int(times[row])
        return None if time == NO_TIME else time

    def expiry_of(self, row: int) -> int | None:
        """Return the time in milliseconds when a row expires; None: never."""
        expiries = self.content.expiries
        return None if expiries is None else int(expiries[row]) or None

    def properties_of(self, row: int) -> Mapping[str, Any]:
        """Return the properties of a row, parsed once for all rows that share the map."""
        maps, codes = self._properties
        if not maps:
            return _NO_PROPERTIES
        code = 0 if codes is None else codes[row]
        if code < 0 or not maps[code]:
            return _NO_PROPERTIES
        found = self._parsed.get(code)
        if found is None:
            if self._parsed_bytes > _PARSED_BYTES:  # Begin anew, to bound the memory.
                self._parsed.clear()
                self._parsed_bytes = 0
            found = self._parsed[code] = parse_properties(maps[code])
            self._parsed_bytes += len(maps[code])
        return found


class RowParts:
    """Parts of what lies in a row of a batch, be it a record, a message or a request."""

    __slots__ = ()
    _batch: Batch
    _row: int
    """Row in the batch as it came, not among the delivered rows."""

    @property
    def subject(self) -> str:
        """The first key."""
        return self._batch.keys_of(self._row)[0]

    @property
    def keys(self) -> tuple[str, ...]:
        """The subject and further keys."""
        return self._batch.keys_of(self._row)

    @property
    def fields(self) -> Mapping[str, str]:
        """Field values by name, empty without fields; shared by records, so not to be changed."""
        return self._batch.fields_of(self._row)

    @property
    def body(self) -> bytes:
        """The body. Raises TypeError when the body kind is not blob: use `parts`, `to_arrow`."""
        return self._batch.body_of(self._row)

    @property
    def parts(self) -> list[bytes]:
        """The blobs of the body: one unless the body kind is list."""
        return self._batch.parts_of(self._row)

    @property
    def properties(self) -> Mapping[str, Any]:
        """Values that travel with the record and that no pattern is matched with."""
        return self._batch.properties_of(self._row)


class Record(RowParts, msgspec.Struct, frozen=True, eq=False, gc=False):
    """A row of a batch; keeps the batch alive, so copy `body` out to keep only that."""

    _batch: Batch
    _row: int

    @property
    def batch(self) -> Batch:
        """The batch that the record lies in."""
        return self._batch

    @property
    def offset(self) -> int:
        """Position in the stream."""
        return self._batch.offset_of(self._row)

    @property
    def epoch(self) -> int:
        """Epoch of the log when the record was appended."""
        return self._batch.stamp.epoch

    @property
    def append_time_ms(self) -> int:
        """The broker's clock at the append."""
        return self._batch.append_time_of(self._row)

    @property
    def id(self) -> bytes:
        """16 bytes that sort in the order of the stream."""
        return message_id(self.append_time_ms, self.offset)

    @property
    def client_time_ms(self) -> int | None:
        """The producer's time, if it gave one."""
        return self._batch.client_time_of(self._row)

    @property
    def expires_at_ms(self) -> int | None:
        """When the record expires; None: never."""
        return self._batch.expiry_of(self._row)

    def __repr__(self) -> str:
        body = ""
        if self._batch.content.head.body_kind == BLOB:
            # An error in the body is raised where the body is read, not where the record is
            # printed.
            with contextlib.suppress(BatchError):
                found = self.body
                cut = "..." if len(found) > _SHOWN_MAX else ""
                body = f" body={found[:_SHOWN_MAX]!r}{cut}"
        return f"<Record offset={self.offset} subject={self.subject!r}{body}>"


def lone_batch(frames: Sequence[Any], rows: Any, limits: Limits) -> Batch | None:
    """Return the one batch of two frames, stamp and content, as it comes live; None: other frames.

    A client asks it first about each delivery, and iter_batches() about other frames: that has to
    cut them, which is half of the work for a lone record. Raises BatchError.
    """
    if len(frames) != 2 or len(frames[0]) != STAMP_BYTES:
        return None
    stamp = Stamp.unpack(frames[0])
    if stamp.size != STAMP_BYTES + len(frames[1]):
        return None
    content = Content(frames[1])
    _check_pair(stamp, content, limits, 0)
    return Batch(stamp, content, None if rows is None else rows_from_bitmap(rows, len(content)))


def iter_batches(
    frames: Sequence[Any],
    rows: Any = None,
    *,
    verify: bool = True,
    limits: Limits = DEFAULT_LIMITS,
    unreadable: Callable[[Stamp, BatchError], None] | None = None,
) -> Iterator[Batch]:
    """Yield the batches of a delivery's frames (or of bytes that the journal holds, as one frame).

    rows: the delivery's row bitmap, of its only batch; None: all rows. verify: check both CRCs and
    the structure of each batch, as far as Content.check does. unreadable: called in place of a
    batch whose bytes came as they were sent and are no valid batch; the batches around it are
    yielded all the same. None: it raises. Raises BatchError: the frames are not whole stamps and
    contents in order.
    """
    batches = 0
    stamp: Stamp | None = None
    for frame in frames:
        view = memoryview(frame).cast("B") if type(frame) is not memoryview else frame
        position, end = 0, len(view)
        while position < end:
            if stamp is None:
                stamp = Stamp.unpack(view, position, verify=verify)
                position += stamp.stamp_bytes
                if position == end:
                    break  # Its content is the next frame.
            size = stamp.size - stamp.stamp_bytes
            if position + size > end:
                raise BatchError("bad_batch", "a content crosses the end of its frame", position)
            content = Content(view[position : position + size])
            batches += 1
            if rows is not None and batches > 1:
                raise BatchError("malformed", "a row bitmap for more than one batch", position)
            try:
                if verify:
                    _check_pair(stamp, content, limits, position)
                chosen = None if rows is None else rows_from_bitmap(rows, len(content))
            except BatchError as error:
                # Bytes that do not fit their checksum are no longer those that were sent.
                if unreadable is None or error.code == "corrupt":
                    raise
                unreadable(stamp, error)
            else:
                yield Batch(stamp, content, chosen)
            position += size
            stamp = None
    if stamp is not None:
        raise BatchError("bad_batch", "a stamp without its content")
    if rows is not None and not batches:
        raise BatchError("malformed", "a row bitmap without a batch")


def _listed(column: Array | None) -> list[int] | None:
    """Return a column as a list, which is quicker than an array to take single rows from."""
    return None if column is None else column.tolist()


def _check_pair(stamp: Stamp, content: Content, limits: Limits, position: int) -> None:
    """Raise BatchError unless a stamp and a content belong together and are sound.

    For a reader, before it gets the batch. position: of the batch in what was received, for the
    error.
    """
    head = content.head
    if stamp.content_crc != head.content_crc:
        raise BatchError("corrupt", "the stamp belongs to another content", position)
    if stamp.count != head.count:
        raise BatchError("bad_batch", "stamp and content count differently", position)
    # Control batches alone have no records. Properties are checked when a consumer asks for them.
    content.check(limits, empty=stamp.control_kind != 0, derived=stamp.derived, properties=False)
