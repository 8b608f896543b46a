"""Tables as batches of a typed stream.

Owns the way from a table to contents of a stream's declared schema. The rule: a table is validated
in full, and cast to the newest version, before any of it is sent. Source: SPEC.md, section 5.9.

Words: a content is the encoded form of a batch; the rows of a table are its records. A dictionary
column of Arrow is codes, one a row, and a table of values. A column of views has its values as
references into bytes that it may share with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypedDict

import numpy as np

from malamute_protocol.columns import NO_TIME
from malamute_protocol.encode import encode_arrow
from malamute_protocol.errors import BatchTooLarge, LocalProtocolError
from malamute_protocol.limits import DEFAULT_LIMITS, Limits
from malamute_protocol.schema import SchemaError, Schemas, read_schema
from malamute_py.client.arguments import codec_of, no_near_column, properties_of, text, wrong

_ROWS_MAX: Final = DEFAULT_LIMITS.batch_records_max
_TYPES: Final = "a table of pyarrow, polars, pandas or DuckDB, or a pyarrow record batch"


def schema_message(schema: Any) -> bytes:
    """The setting `schema` of a stream as its Arrow schema message; bytes are one already.

    The type of a dictionary column is that of its values; what pandas notes of itself is left out.
    Raises LocalProtocolError `bad_schema`: a stream cannot declare it.
    """
    message = schema
    if not isinstance(schema, bytes):
        import pyarrow as pa

        if not isinstance(schema, pa.Schema):
            raise wrong("schema", schema, "a pyarrow schema, or its message as bytes")
        fields = [
            field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
            for field in schema
        ]
        metadata: dict[bytes | str, bytes | str] = {
            name: value for name, value in (schema.metadata or {}).items() if name != b"pandas"
        }
        message = pa.schema(fields, metadata=metadata or None).serialize().to_pybytes()
    if message:  # empty: the stream declares none
        try:
            read_schema(message)
        except SchemaError as error:
            raise LocalProtocolError(error.code, error.reason) from error
    return bytes(message)


def stream_settings(named: dict[str, Any]) -> dict[str, Any]:
    """A caller's settings of a stream as the broker takes them, with the schema as its message.

    Raises LocalProtocolError `bad_schema`.
    """
    if named.get("schema") is not None:
        return {**named, "schema": schema_message(named["schema"])}
    return named


def as_table(table: Any) -> Any:
    """A caller's table as one of pyarrow. Raises LocalProtocolError: it is none of _TYPES."""
    import pyarrow as pa

    if isinstance(table, pa.Table):
        return table
    if isinstance(table, pa.RecordBatch):
        return pa.Table.from_batches([table])
    package, _, _ = type(table).__module__.partition(".")
    if package == "pandas":  # which is not imported to find out
        return pa.Table.from_pandas(table, preserve_index=False)
    if not hasattr(table, "__arrow_c_stream__"):
        raise wrong("table", table, f"{_TYPES}, not a {type(table).__name__}", "bad_batch")
    return pa.table(table)


def subject_options(column: Any, name: str) -> dict[str, Any]:
    """Return the subjects of some rows as options of the encoder.

    column: an array with the subject of each row. name: of the column in the table. Raises
    LocalProtocolError `bad_batch`: the column has nulls, or values that cannot be subjects.
    """
    import pyarrow as pa

    from malamute_protocol.arrow import without_views

    if column.null_count:
        raise LocalProtocolError("bad_batch", f"column {name!r} has nulls")
    try:
        column = without_views(column)
        if isinstance(column, pa.DictionaryArray) and len(column.dictionary) > len(column):
            column = column.dictionary_decode()  # most of its values are other rows' subjects
        if not isinstance(column, pa.DictionaryArray):
            column = column.cast(pa.string()).dictionary_encode()
        # The encoder takes subjects in the same form: distinct values, and the code of each row.
        values, codes = column.dictionary.cast(pa.string()), column.indices.cast(pa.int32())
    except pa.ArrowException as error:
        raise LocalProtocolError("bad_batch", f"column {name!r}: {error}") from error
    codes = codes.to_numpy()
    # A slice of a dictionary column has all values of the column: those in use are few.
    used = np.flatnonzero(np.bincount(codes, minlength=len(values)))
    if len(used) < len(values):
        # Code -> its code among the values in use.
        new_codes = np.zeros(len(values), np.int32)
        new_codes[used] = np.arange(len(used), dtype=np.int32)
        values, codes = values.take(pa.array(used)), new_codes[codes]
    if values.null_count:
        raise LocalProtocolError("bad_batch", f"column {name!r} has nulls")
    return {
        "subject_table": values.to_pylist(),
        "subject_codes": codes if len(values) > 1 else None,
    }


def _own_bytes(column: Any) -> Any:
    """Return a column or array of views as one that has the bytes of its own rows alone.

    A slice of views refers to the bytes of the whole, which would all be counted, and sent with it.
    """
    import pyarrow as pa

    if pa.types.is_string_view(column.type):
        return column.cast(pa.large_string())
    if pa.types.is_binary_view(column.type):
        return column.cast(pa.large_binary())
    return column


class TableOptions(TypedDict):
    """Arguments of TableRows beside the table and its schemas."""

    subject: str
    client_time: str
    codec: str | None


class TableRows:
    """A table on its way into a typed stream."""

    def __init__(
        self,
        table: Any,
        schemas: Schemas,
        *,
        subject: str = "",
        client_time: str = "",
        codec: str | None = None,
        headers: Callable[[int, int], dict[str, Any]] | None = None,
    ) -> None:
        """subject: name of a column, or one subject for all rows. client_time: name of a column.

        headers: returns, for a first row and a count, what the encoder is told of these rows beside
        their columns, instead of subject and client_time.

        Raises LocalProtocolError: `bad_schema`: the table does not fit the newest schema.
        """
        import pyarrow as pa

        from malamute_protocol.arrow import conform, schema_of

        for name, given in (("subject", subject), ("client_time", client_time)):
            text(name, given, DEFAULT_LIMITS.command_frame_bytes_max, "bad_batch")
        self._id = schemas.newest
        self._codec = codec_of(codec)
        self._given = headers
        whole = as_table(table)
        try:
            whole.validate(full=True)
        except pa.ArrowException as error:
            raise LocalProtocolError("bad_batch", f"the table: {error}") from error
        schema = schema_of(schemas, self._id)
        for name in whole.column_names:
            if len(whole.schema.get_all_field_indices(name)) > 1:
                raise LocalProtocolError(
                    "bad_schema", f"several columns of the table are named {name!r}"
                )
        if client_time and client_time not in whole.column_names:
            raise LocalProtocolError("bad_batch", f"the table has no column {client_time!r}")
        beside = {subject, client_time}  # columns that do not become columns of the bodies
        for name in whole.column_names:
            if name not in schema.names and name not in beside:
                raise LocalProtocolError(
                    "bad_schema", f"the stream's schema has no column {name!r} as the table has"
                )
        self._subject = subject
        self._properties: Mapping[str, Any] | None = None
        self._content_bytes_max = 0
        self._columns: dict[str, Any] = {}
        no_near_column(subject, whole.column_names)
        if subject in whole.column_names:
            self._columns["subject"] = whole.column(subject)
        if client_time:
            self._columns["client_time"] = whole.column(client_time)
        self._rows = conform(whole, schema)  # cast to the newest version, without other columns

    def contents(
        self,
        batch_bytes: int,
        limits: Limits,
        properties: Mapping[str, Any] | None = None,
        content_bytes_max: int = 0,
    ) -> Iterator[tuple[bytes, int]]:
        """Yield (content, count of its rows) of each batch, of about `batch_bytes`.

        properties: of each row. content_bytes_max: most bytes of a content of several rows, where
        the stream takes less than the limits say; 0: it does not. Raises LocalProtocolError: a row
        is too large, or cannot be encoded.
        """
        self._content_bytes_max = content_bytes_max or limits.batch_bytes_max
        self._properties = None if properties is None else properties_of(properties)
        count = self._rows.num_rows
        if not count:
            return
        size = sum(_own_bytes(column).nbytes for column in self._rows.columns)
        # Rows of a batch, as if all rows were of the mean size.
        rows = min(_ROWS_MAX, max(1, batch_bytes * count // max(1, size)))
        for first in range(0, count, rows):
            yield from self._encoded(first, min(rows, count - first), limits)

    def _encoded(self, first: int, count: int, limits: Limits) -> Iterator[tuple[bytes, int]]:
        """Yield (content, count of rows) of some rows, or of their halves where it is too large."""
        rows = self._rows.slice(first, count).combine_chunks().to_batches()[0]
        # Columns of views are copied, so that the batch has the bytes of its own rows alone.
        columns = [
            column if (own := _own_bytes(column)) is column else own.cast(column.type)
            for column in rows.columns
        ]
        rows = rows.from_arrays(columns, schema=rows.schema)
        body = np.frombuffer(memoryview(rows.serialize()), np.uint8)
        content = b""  # stays empty where the rows are more than the broker takes in a batch
        try:
            content = encode_arrow(
                body, count, schema_id=self._id, codec=self._codec, limits=limits,
                **self._headers(first, count),
            )  # fmt: skip
        except BatchTooLarge:
            if count == 1:
                raise
        if content and (count == 1 or len(content) <= self._content_bytes_max):
            yield content, count
        else:
            half = count // 2
            yield from self._encoded(first, half, limits)
            yield from self._encoded(first + half, count - half, limits)

    def _headers(self, first: int, count: int) -> dict[str, Any]:
        """Return subjects, client times and properties of some rows, as options of the encoder."""
        if self._given is not None:
            return self._given(first, count)
        import pyarrow as pa
        import pyarrow.compute as pc

        from malamute_protocol.arrow import without_views

        options: dict[str, Any] = {"subject": self._subject}
        named = self._columns.get("subject")
        if named is not None:
            column = without_views(named).slice(first, count)
            if column.num_chunks > 1 and pa.types.is_dictionary(column.type):
                # Joined chunks share one table of values, which may be more than the type of the
                # codes can count: so they become plain values.
                column = column.cast(column.type.value_type)
            options = subject_options(column.combine_chunks(), self._subject)
        options["properties"] = self._properties
        timed = self._columns.get("client_time")
        if timed is not None:
            try:
                # Times of a finer unit are cut to milliseconds; NO_TIME stands for null.
                whole_ms = pc.CastOptions(pa.timestamp("ms"), allow_time_truncate=True)
                times = timed.slice(first, count).cast(options=whole_ms)
            except pa.ArrowException as error:
                raise LocalProtocolError("bad_batch", f"the client times: {error}") from error
            options["client_time_ms"] = times.cast(pa.int64()).fill_null(NO_TIME).to_numpy()
        return options
