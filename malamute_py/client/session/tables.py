"""Tables as batches of a typed stream.

Owns the way from a table to contents of a stream's declared schema. The rule: a table is validated
in full, and cast to the newest version, before any of it is sent. Source: SPEC.md, section 5.9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

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
    """A schema setting as its Arrow schema message; bytes are one already.

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
    if message:
        try:
            read_schema(message)
        except SchemaError as error:
            raise LocalProtocolError(error.code, error.reason) from error
    return bytes(message)


def stream_settings(named: dict[str, Any]) -> dict[str, Any]:
    """Settings of a stream as the broker takes them. Raises LocalProtocolError `bad_schema`."""
    if named.get("schema") is not None:
        return {**named, "schema": schema_message(named["schema"])}
    return named


def as_table(table: Any) -> Any:
    """The argument as a pyarrow table. Raises LocalProtocolError: it is none of what can be."""
    import pyarrow as pa

    if isinstance(table, pa.Table):
        return table
    if isinstance(table, pa.RecordBatch):
        return pa.Table.from_batches([table])
    if type(table).__module__.partition(".")[0] == "pandas":
        return pa.Table.from_pandas(table, preserve_index=False)
    if not hasattr(table, "__arrow_c_stream__"):
        raise wrong("table", table, f"{_TYPES}, not a {type(table).__name__}", "bad_batch")
    return pa.table(table)


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
        if client_time and client_time not in whole.column_names:
            raise LocalProtocolError("bad_batch", f"the table has no column {client_time!r}")
        beside = {subject, client_time}
        for name in whole.column_names:
            if name not in schema.names and name not in beside:
                raise LocalProtocolError(
                    "bad_schema", f"the stream's schema has no column {name!r} as the table has"
                )
        self._subject = subject
        self._properties: Mapping[str, Any] | None = None
        self._columns: dict[str, Any] = {}
        no_near_column(subject, whole.column_names)
        if subject in whole.column_names:
            self._columns["subject"] = whole.column(subject)
        if client_time:
            self._columns["client_time"] = whole.column(client_time)
        self._rows = conform(whole, schema)

    def contents(
        self, batch_bytes: int, limits: Limits, properties: Mapping[str, Any] | None = None
    ) -> Iterator[tuple[bytes, int]]:
        """(content, count) of each batch, of about so many bytes. Raises LocalProtocolError.

        properties: of each row.
        """
        self._properties = None if properties is None else properties_of(properties)
        count = self._rows.num_rows
        if not count:
            return
        rows = min(_ROWS_MAX, max(1, batch_bytes * count // max(1, self._rows.nbytes)))
        for first in range(0, count, rows):
            yield from self._encoded(first, min(rows, count - first), limits)

    def _encoded(self, first: int, count: int, limits: Limits) -> Iterator[tuple[bytes, int]]:
        """The content of so many rows, or those of its halves where it gets too large."""
        rows = self._rows.slice(first, count).combine_chunks().to_batches()[0]
        body = np.frombuffer(memoryview(rows.serialize()), np.uint8)
        try:
            content = encode_arrow(
                body, count, schema_id=self._id, codec=self._codec, limits=limits,
                **self._headers(first, count),
            )  # fmt: skip
        except BatchTooLarge:
            if count == 1:
                raise
            half = count // 2
            yield from self._encoded(first, half, limits)
            yield from self._encoded(first + half, count - half, limits)
        else:
            yield content, count

    def _headers(self, first: int, count: int) -> dict[str, Any]:
        """Return what some rows have beside their columns, as options of the encoder."""
        if self._given is not None:
            return self._given(first, count)
        import pyarrow as pa

        options: dict[str, Any] = {"subject": self._subject}
        named = self._columns.get("subject")
        if named is not None:
            column = named.slice(first, count).combine_chunks()
            if column.null_count:
                raise LocalProtocolError("bad_batch", f"column {self._subject!r} has nulls")
            if not isinstance(column, pa.DictionaryArray):
                column = column.cast(pa.string()).dictionary_encode()
            # A slice of a dictionary column has all values of the column: those in use are few.
            used, codes = np.unique(
                column.indices.to_numpy(zero_copy_only=False), return_inverse=True
            )
            options = {
                "subject_table": column.dictionary.cast(pa.string()).take(used).to_pylist(),
                "subject_codes": codes.astype(np.int32) if len(used) > 1 else None,
            }
        options["properties"] = self._properties
        timed = self._columns.get("client_time")
        if timed is not None:
            try:
                times = timed.slice(first, count).cast(pa.timestamp("ms"), safe=False)
            except pa.ArrowException as error:
                raise LocalProtocolError("bad_batch", f"the client times: {error}") from error
            options["client_time_ms"] = times.cast(pa.int64()).fill_null(NO_TIME).to_numpy()
        return options
