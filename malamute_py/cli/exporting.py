"""`malamute stream export`: a range of a stream as a file of JSON lines or Parquet.

Owns the Parquet form. The rules: the range is half open and its end is settled before the first
record; a file keeps of each record what a copy keeps, so that `stream import` gives it back; of a
typed stream it has the columns of the newest schema, and beside them what the others have but for
the body. Source: replay.py has the range.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from malamute_py.cli import output
from malamute_py.cli.failures import INTERRUPTED, USAGE, CommandFailed
from malamute_py.cli.linking import LAST_WAIT_MS, linked
from malamute_py.cli.parameters import OneStream, Pattern, RangeFrom, RangeTo, TimesBy
from malamute_py.cli.replay import Replay, Sink, StreamRange, Writer
from malamute_py.cli.subscribe import check_kind, known

if TYPE_CHECKING:
    from malamute_protocol.batch import Batch

EPILOG: Final = """\b
Examples:
  malamute stream export trades trades.jsonl
  malamute stream export trades today.parquet --from 2026-01-31 --to now
  malamute stream export trades forex.jsonl 'forex.*' --from 4711

The end of the file's name says the form: .jsonl for JSON lines, .parquet for Parquet, which
needs the package pyarrow. `malamute stream import` reads both."""

JSON_LINES: Final = (".jsonl", ".ndjson")
PARQUET: Final = ".parquet"
_GROUP_ROWS: Final = 16_384
"""Rows of one row group: batches of few records are written together."""
_GROUP_BYTES: Final = 64 << 20
"""Bytes of the batches that wait to be written together."""


def form_of(file: Path) -> str:
    """Return the form of a file by its ending: `.jsonl` or `.parquet`.

    Raises CommandFailed: it is another one.
    """
    if file.suffix in JSON_LINES:
        return JSON_LINES[0]
    if file.suffix != PARQUET:
        raise CommandFailed(
            f"{file}: name the file .jsonl (JSON lines) or .parquet (Parquet)", USAGE
        )
    return PARQUET


def export(
    ctx: typer.Context,
    stream: OneStream,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Its end says the form.")],
    pattern: Pattern = "#",
    begin: RangeFrom = None,
    end: RangeTo = None,
    by: TimesBy = "append",
    as_json: output.Json = False,
) -> int:
    """Write a range of a stream to a file: JSON lines or Parquet."""
    form = form_of(file)
    check_kind(pattern)
    # Times of the range are the broker's of appending, or those that the producers gave.
    asked = StreamRange(begin, end, by == "client")
    with ExitStack() as parts:
        client = parts.enter_context(linked(ctx, stays=True))
        settings = known(client, stream).settings
        # Tables that were published to a stream without a declared schema.
        if settings.get("body_kind") == "arrow" and not settings.get("schema"):
            raise CommandFailed(
                f"{stream} has tables whose schema the broker does not know: no file has a form for"
                f" them; `malamute replay {stream} --to-stream NAME` copies them"
            )
        records = parts.enter_context(asked.subscribe(client, stream, pattern))
        records.accepted()  # What the broker refuses is told before the file is touched.
        sink: Sink
        if form == PARQUET:
            sink = Parquet(file, settings.get("schema") or b"")
        else:
            sink = Writer(as_json=True, out=parts.enter_context(file.open("wb")))
        run = Replay(records, asked.end, sink)
        interrupted = False
        try:
            run.go(f"exporting {stream}", shown=True)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sink.finish(LAST_WAIT_MS)  # What was read so far makes a file that can be read, too.
        run.tell(stream, str(file), as_json=as_json, interrupted=interrupted)
    return INTERRUPTED if interrupted else 0


class Parquet:
    """Writes Parquet, many records in a row group."""

    def __init__(self, file: Path, schema: bytes) -> None:
        """schema: of a typed stream, as its settings have it; else empty.

        Raises ModuleNotFoundError: pyarrow is not there.
        """
        from malamute_protocol import arrow

        self.count = 0
        self.bytes = 0
        self._file = file
        self._schema = arrow.parse_schema(schema) if schema else None
        names = () if self._schema is None else self._schema.names
        # Columns of the record's header (subject, offset, ...); where the schema has a column of
        # the same name, that one is written.
        self._header = [name for name in arrow.HEADER_COLUMNS if name not in names]
        self._waiting: list[Any] = []
        self._rows = self._held = 0
        self._writer: Any = None

    def write(self, batch: Batch) -> None:
        """Take the selected records of a batch, and write a row group when there are enough."""
        from malamute_protocol.arrow import to_arrow

        # Without a schema to_arrow() gives each record all of its columns.
        header = () if self._schema is None else self._header
        rows = to_arrow(batch, decode=True, header=header, schema=self._schema)
        self._waiting.append(rows)
        self._rows += rows.num_rows
        # A single selected row keeps the memory of its whole batch.
        self._held += max(batch.stamp.size, rows.nbytes)
        self.count += rows.num_rows
        self.bytes += rows.nbytes
        if self._rows >= _GROUP_ROWS or self._held >= _GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        """Write the waiting batches as a row group; the first one gives the file its schema.

        Without any, a file that is new gets the columns of records without a schema.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        from malamute_protocol.arrow import arrow_schema

        if self._writer is None:
            schema = self._waiting[0].schema if self._waiting else arrow_schema(decode=True)
            self._writer = pq.ParquetWriter(self._file, schema, compression="zstd")
        if self._waiting:
            table = pa.Table.from_batches(self._waiting)
            self._writer.write_table(table.combine_chunks(), row_group_size=len(table))
            self._waiting.clear()
            self._rows = self._held = 0

    def flush(self) -> None:
        """Do nothing: a row group is written when it has enough rows."""

    @property
    def safe(self) -> int:
        """Return how many records were written, or will be with the file's end."""
        return self.count

    def finish(self, timeout_ms: int | None) -> None:
        """Write what waits, and the end of the file, without which it cannot be read.

        timeout_ms: of Sink; a file has no confirms to wait for.
        """
        self._write()
        self._writer.close()
