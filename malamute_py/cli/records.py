"""Records as text: columns for a person, bodies or JSON lines for programs.

Owns the three forms and the names in the JSON one, which `pub --json-lines` reads back. The rules:
in a pipe a body's bytes are never changed, and parts of a list have tabs between them; on a
terminal nothing in a body can steer the terminal; output is flushed a batch at a time.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Iterable
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, Final

from malamute_py.cli import output
from malamute_py.cli.typed import as_json, as_text, plain
from malamute_py.cli.values import iso_text
from malamute_py.client.readers.copies import blobs
from malamute_py.client.readers.typed import row_of

if TYPE_CHECKING:
    from malamute_protocol.batch import Batch, Record

SHOWN_BYTES_MAX: Final = 4096
"""Bytes of one body that a terminal is shown."""
_SUBJECT_WIDTH_MAX: Final = 40
ESCAPES: Final = {
    **{code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))},
    9: "\\t",
    10: "\\n",
    13: "\\r",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
    **{code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))},
}
"""Control characters, and those that turn the direction of writing."""


class RecordWriter:
    """Writes records in the form that a command's options ask for: columns, bodies or JSON."""

    def __init__(
        self,
        *,
        as_json: bool = False,
        bodies_only: bool = False,
        with_fields: bool = False,
        client_time: bool = False,
        out: IO[bytes] | None = None,
    ) -> None:
        """Choose the form. Without an option, a terminal gets columns and a pipe bodies.

        client_time: show a person the producer's time, not the broker's. out: a file instead of
        standard output.
        """
        self.count = 0
        self.bytes = 0
        self._out = sys.stdout.buffer if out is None else out
        self._fields = with_fields
        self._client_time = client_time
        self._colour = output.in_colour() and out is None
        self._columns = output.on_terminal() and out is None and not as_json and not bodies_only
        self._json = as_json
        self._plain = not as_json and not self._columns and (bodies_only or not with_fields)
        """Whether a line is a body and nothing else."""
        self._escaped = output.on_terminal() and out is None
        """Whether bodies are shown without what could steer a terminal."""
        self._width = 8
        """Width of the column of subjects, by those that were shown."""
        self._widths: dict[str, int] = {}
        """Width of each column of the typed rows that were shown last."""
        self._day = datetime.now().astimezone().date()

    def write(self, batch: Batch) -> None:
        """Write all delivered records of a batch."""
        # Bodies that are bytes need no record of their own; body_kind 0 says so.
        if self._plain and not self._escaped and not batch.content.head.body_kind:
            bodies = batch.bodies()
            self._emit(b"\n".join(bodies) + b"\n", len(bodies))
        else:
            self.write_records(batch.records())

    def write_records(self, records: Iterable[Record]) -> None:
        """Write some records."""
        lines = [self.line(record) for record in records]
        if lines:
            self._emit(b"\n".join(lines) + b"\n", len(lines))

    def _emit(self, data: bytes, count: int) -> None:
        """Write the lines of so many records, and count them."""
        self.count += count
        self.bytes += len(data)
        self._out.write(data)
        self._written()

    def _written(self) -> None:
        """Flush what was written; a subclass may do it later."""
        self._out.flush()

    def line(self, record: Record) -> bytes:
        """Return one record, without the end of line."""
        if self._json:
            return as_json(self._object(record))
        if self._columns:
            return self._row(record).encode("utf-8", "backslashreplace")
        body = body_of(record)
        if self._plain:
            return printable(body).encode() if self._escaped else body
        named = ",".join(f"{name}={value}" for name, value in record.fields.items())
        return b"\t".join((record.subject.encode(), named.encode(), body))

    def _row(self, record: Record) -> str:
        """Return one record as a line with columns, for a person.

        Columns get wider with what they show, since lines are printed as records come.
        """
        subject = record.subject.translate(ESCAPES)
        self._width = self._wider(self._width, subject)
        at_ms = record.client_time_ms if self._client_time else record.append_time_ms
        cells = [
            self._paint("2", f"{record.offset:>8}"),
            self._paint("2", self._time(at_ms)),
            self._paint("36", f"{subject:<{self._width}}"),
        ]
        if self._fields:
            cells.append(self._named(record))
        row = row_of(record)
        cells.append(printable(body_of(record)) if row is None else self._typed(row))
        return "  ".join(cells)

    def _typed(self, row: dict[str, Any]) -> str:
        """Return the columns of a typed row; when their names change, write a line with these."""
        if list(row) != list(self._widths):
            self._widths = {name: len(name) for name in row}
            names = "  ".join(row).translate(ESCAPES)
            self._out.write(self._paint("1", f"-- {names}").encode() + b"\n")
        cells = []
        for name, value in row.items():
            text = printable(as_text(value).encode("utf-8", "backslashreplace"))
            width = self._widths[name] = self._wider(self._widths[name], text)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            cells.append(f"{text:>{width}}" if number else f"{text:<{width}}")
        return "  ".join(cells)

    def _object(self, record: Record) -> dict[str, Any]:
        return {**as_object(record), "id": record.id.hex()}

    @staticmethod
    def _wider(width: int, subject: str) -> int:
        """Return the width of a column that has to show one more text; beyond a bound it stays."""
        return max(width, min(len(subject), _SUBJECT_WIDTH_MAX))

    def _named(self, record: Record) -> str:
        """Return a record's fields as a cell of its line: name=value, or the name alone."""
        named = " ".join(f"{name}={value}" if value else name
                         for name, value in record.fields.items())  # fmt: skip
        return self._paint("33", named.translate(ESCAPES) or "-")

    def _time(self, at_ms: int | None) -> str:
        """Return the time of day; when the day has changed, write a line with the date before."""
        if at_ms is None:
            return f"{'-':<12}"
        try:
            at = datetime.fromtimestamp(at_ms / 1000).astimezone()
        except (ValueError, OverflowError, OSError):
            return str(at_ms)  # A producer may give any number.
        if at.date() != self._day:
            self._day = at.date()
            self._out.write(self._paint("1", f"-- {at:%A, %d %B %Y}").encode() + b"\n")
        return at.strftime("%H:%M:%S.") + f"{at_ms % 1000:03}"

    def _paint(self, code: str, text: str) -> str:
        """Return a text in colour, where there is any; code: of the terminal, as 1 bold, 2 dim."""
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text


def body_of(record: Record) -> bytes:
    """Return the body as a pipe gets it: parts with tabs between them, a typed row as JSON."""
    body = blobs(record)
    if body is None:  # A row of a table.
        row = row_of(record)
        # A row is None where the stream's schema is not known.
        return b"<a row of an Arrow table>" if row is None else as_json(row)
    return body if isinstance(body, bytes) else b"\t".join(body)


def printable(body: bytes) -> str:
    """Return a body for a terminal: control characters escaped, a long one cut."""
    text = body[:SHOWN_BYTES_MAX].decode("utf-8", "backslashreplace").translate(ESCAPES)
    hidden = len(body) - SHOWN_BYTES_MAX
    return text if hidden <= 0 else f"{text} … {hidden:,} more bytes"


def as_object(record: Record) -> dict[str, Any]:
    """Return a record as one JSON object, without keys for what it does not have."""
    found: dict[str, Any] = {
        "offset": record.offset,
        "time": iso_text(record.append_time_ms),
        "subject": record.subject,
    }
    if len(keys := record.keys) > 1:
        found["keys"] = list(keys)
    if fields := record.fields:
        found["fields"] = dict(fields)
    if (client_time := record.client_time_ms) is not None:
        found["client_time"] = iso_text(client_time)
    if expires := record.expires_at_ms:
        found["expires"] = iso_text(expires)
    if properties := record.properties:
        found["properties"] = {name: _plain(value) for name, value in properties.items()}
    body = blobs(record)
    if isinstance(body, list):
        found["parts_base64"] = [base64.b64encode(part).decode() for part in body]
    elif body is None:
        if (row := row_of(record)) is not None:
            found["row"] = plain(row)
    else:
        try:
            found["body"] = body.decode()
        except UnicodeDecodeError:
            found["body_base64"] = base64.b64encode(body).decode()
    return found


def _plain(value: Any) -> Any:
    """Return a property with objects for what JSON cannot write: bytes, and numbers as infinity.

    inputs._property() reads them back.
    """
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value
