"""Typed streams: the columns of a stream's declared schema are the DataFrame's.

Owns the way from a typed batch to Spark's columns. The rules: the newest version holds when the
query begins; later columns are left out, and a value that has become too wide for its column ends
the query by name; a batch is validated in full before the JVM sees a byte of it. Source: SPEC.md,
section 5.9, and PySpark's from_arrow_schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkTypeError
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema, to_arrow_type
from pyspark.sql.types import StructField, StructType

from malamute_protocol.arrow import HEADER_COLUMNS, arrow_schema, parse_schema, schema_of
from malamute_protocol.batch import Batch
from pyspark_malamute.columns import (
    RECORD_BATCH_BYTES_MAX,
    TARGET_BYTES,
    header_bytes_max,
    in_pieces,
)
from pyspark_malamute.errors import MalamuteSourceError
from pyspark_malamute.links import Broker
from pyspark_malamute.options import SourceOptions

_arrow: Final[Any] = pa
_compute: Final[Any] = pc
_RECORD_COLUMNS: Final = (
    "stream", "offset", "append_time", "client_time", "subject", "keys", "fields",
)  # fmt: skip
"""Columns beside the schema's that option `columns` may name."""
_SHARED_COLUMNS: Final = frozenset({"subject", "keys", "fields"})
"""Record columns of which many rows may share a value."""
_TYPE_IN_SPARK: Final = {
    _arrow.uint8(): _arrow.int16(),
    _arrow.uint16(): _arrow.int32(),
    _arrow.uint32(): _arrow.int64(),
    _arrow.uint64(): _arrow.decimal128(20, 0),
    _arrow.float16(): _arrow.float32(),
    _arrow.date64(): _arrow.date32(),
    _arrow.string_view(): _arrow.string(),
    _arrow.binary_view(): _arrow.binary(),
}
"""Types that Spark does not have -> those in which it gets their values."""
_BATCHES_MAX: Final = 10_000
"""Batches gathered at most, so that a record batch of very few bytes ends, too."""


def typed_schema(options: SourceOptions) -> StructType:
    """The columns of the stream's newest schema, or those of them that `columns` names.

    Asked of the broker when Spark loads the source. Raises SourceUnavailable: the stream is not
    typed. Raises MalamuteSourceError: a column is not known, or has a type that Spark has not.
    """
    with Broker(options) as broker:
        declared = broker.ask("read the schema", lambda c: c.stream_schema(options.stream))
    known = {field.name: field for field in declared}
    beside = arrow_schema(decode=True)  # What a record has beside its body, in plain columns.
    fields = []
    for name in options.columns or declared.names:
        field = known.get(name)  # A column of the schema goes before what a record has beside it.
        if field is None and name == "stream":  # It is in no batch: all are of one stream.
            field = _arrow.field(name, _arrow.string(), nullable=False)
        elif field is None and name in _RECORD_COLUMNS:
            field = beside.field(name)
        if field is None:
            raise MalamuteSourceError(
                f"malamute source: there is no column '{name}' (option 'columns'); stream "
                f"'{options.stream}' has {', '.join(known)}, and beside them "
                f"{', '.join(_RECORD_COLUMNS)}"
            )
        try:
            kind = from_arrow_type(
                _TYPE_IN_SPARK.get(field.type, field.type), prefer_timestamp_ntz=True
            )
            # Asked for its error alone: a decimal of too many digits becomes a type of Spark's,
            # which has no way back to Arrow.
            to_arrow_type(kind, timezone="UTC")
        except (PySparkTypeError, ValueError) as error:
            raise MalamuteSourceError(
                f"malamute source: Spark has no type for column '{name}', {field.type}: name the "
                "other columns in option 'columns'"
            ) from error
        fields.append(StructField(name, kind, field.nullable))
    return StructType(fields)


def with_schema(options: SourceOptions, schema: StructType) -> SourceOptions:
    """Return the options with the columns that the query reads, as tasks need them.

    schema: the query's, with Spark's types.
    """
    arrow: Any = to_arrow_schema(schema, timezone="UTC")
    return msgspec.structs.replace(options, typed=arrow.serialize().to_pybytes())


class TypedGather:
    """Collects typed batches and gives them out as record batches of the query's columns."""

    def __init__(self, options: SourceOptions) -> None:
        """options: those of with_schema()."""
        self._stream = options.stream
        self.schema: Any = parse_schema(options.typed)
        self._pieces: list[Any] = []
        self._bytes = 0

    @property
    def full(self) -> bool:
        """True when enough rows have been gathered for a record batch."""
        return self._bytes >= TARGET_BYTES or len(self._pieces) >= _BATCHES_MAX

    def pieces(self, batch: Batch) -> Iterator[Batch]:
        """Yield a batch in parts, as Gather.pieces() does: header columns repeat shared values."""
        if _SHARED_COLUMNS.isdisjoint(self.schema.names):  # then the header need not be read
            yield batch
        else:
            yield from in_pieces(batch, header_bytes_max(batch.content.table, self.schema.names))

    def add(self, batch: Batch) -> None:
        """Take in the delivered rows of a batch.

        Raises BatchError: the bytes are not a batch of its schema. Raises MalamuteSourceError: a
        value has no place in the query's columns.
        """
        schemas = batch.schemas
        if schemas is None:
            raise MalamuteSourceError(
                f"malamute source: stream '{self._stream}' has no declared schema: leave out "
                "option 'bodyType'"
            )
        # A column of the schema goes before what a record has by the same name.
        own = schema_of(schemas, schemas.newest).names
        header = [name for name in self.schema.names if name in HEADER_COLUMNS and name not in own]
        rows: Any = batch.to_arrow(header=header)  # coded: what is not asked for repeats nothing
        columns = [self._column(rows, field) for field in self.schema]
        piece = _arrow.RecordBatch.from_arrays(columns, schema=self.schema)
        self._pieces.append(piece)
        self._bytes += piece.nbytes

    def _column(self, rows: Any, field: Any) -> Any:
        """Return one column in the query's type. Raises MalamuteSourceError: it does not fit."""
        place = rows.schema.get_field_index(field.name)
        if place < 0 and field.name == "stream":
            return _arrow.repeat(_arrow.scalar(self._stream), rows.num_rows)
        if place < 0:
            raise MalamuteSourceError(
                f"malamute source: stream '{self._stream}' has no column '{field.name}'"
            )
        column = rows.column(place)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary.take(column.indices)
        if column.type == field.type:
            return column
        kinds = pa.types
        try:
            floats = kinds.is_floating(column.type) and kinds.is_floating(field.type)
            if floats and column.type.bit_width > field.type.bit_width:
                # Arrow would round to the narrower type without a word.
                raise pa.ArrowInvalid(f"it is {column.type} now")
            # Spark counts in microseconds: what is finer is cut off.
            return column.cast(options=_compute.CastOptions(field.type, allow_time_truncate=True))
        except pa.ArrowException as error:
            raise MalamuteSourceError(
                f"malamute source: column '{field.name}' of stream '{self._stream}' has no place "
                f"in the query's {field.type}: {error}. Start the query again: it takes up the "
                "newest schema"
            ) from error

    def take(self) -> Iterator[Any]:
        """Yield the gathered rows as record batches of 1 to 2 MiB; then begin anew."""
        if not self._pieces:
            return
        whole = _arrow.Table.from_batches(self._pieces, self.schema).combine_chunks()
        self._pieces, self._bytes = [], 0
        # Rounded up, both: so many pieces of equal rows that none is too large.
        pieces = max(1, -(-whole.nbytes // RECORD_BATCH_BYTES_MAX))
        yield from whole.to_batches(max_chunksize=max(1, -(-whole.num_rows // pieces)))
