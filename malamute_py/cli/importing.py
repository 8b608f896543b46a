"""`malamute stream import`: records of a file into a stream, each once however often it is run.

Owns the cutting of a file into steps, the key of each, and the batches of typed streams. The rules:
a key is made of the stream, of all steps before and of the step's records, so that the same file
gives the same keys and the broker takes no step twice; records keep what a copy keeps. Source:
SPEC.md, section 4.6, Keys.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from hashlib import blake2b
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import typer

from malamute_protocol.errors import BrokerRefused
from malamute_protocol.limits import Limits
from malamute_py.cli import inputs, output
from malamute_py.cli.commands import say
from malamute_py.cli.exporting import PARQUET, form_of
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.inputs import Row
from malamute_py.cli.linking import linked
from malamute_py.cli.parameters import NewStream
from malamute_py.cli.progress import Progress
from malamute_py.cli.typed import from_json
from malamute_py.cli.values import count_text, duration_text

if TYPE_CHECKING:
    import pyarrow as pa

    from malamute_py.client.facts import StreamVersions
    from malamute_py.client.position import Confirmation
    from malamute_py.client.sync.client import SyncClient
    from malamute_py.client.sync.link import Pending

EPILOG: Final = """\b
Examples:
  malamute stream import trades trades.jsonl
  malamute stream import trades today.parquet
  malamute stream import trades events.jsonl --no-keys  into a ring of its own

An import that was cut off is run again, and goes on where it was: each 1,000 records are a step
with a key, which the broker takes once. It remembers the newest 100,000 keys, shared between all
senders. Lines that are added to a file later are imported by the next run, but the
last step of the run before, when it had fewer than 1,000 records, counts as another one then.

Records keep subject, keys, fields, properties, the producer's time, expiry and body; offset and
append time are new."""

_ROWS: Final = 1_000
"""Records of one step at most. Another value makes other keys of the same file."""
_BYTES: Final = 1 << 20
"""Bytes of bodies of one step at most. Another value makes other keys of the same file."""
_UNDER_WAY: Final = 16
"""Steps that are sent without a confirm, at most."""
_HEADER: Final = ("body", "subject", "keys", "fields", "client_time", "expires", "properties")
"""Columns of a Parquet file that are taken for the parts of a record."""
_IDENTITY: Final = "malamute-import"
"""Identity of an import without a credential: keys are those of an identity."""


@dataclass(frozen=True)
class _Chunk:
    """Records of one step."""

    count: int
    content: bytes = b""
    """The records encoded alike in each run, of which the step's key is made; empty: no key."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of publish_many."""
    contents: Sequence[tuple[bytes, int]] = ()
    """Instead of options, for a typed stream: encoded batches, each with its number of rows."""


def import_(
    ctx: typer.Context,
    stream: NewStream,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSON lines (.jsonl) or Parquet (.parquet).")
    ],
    keys: Annotated[
        bool, typer.Option("--keys/--no-keys", help="Each record once, or all of them each time.")
    ] = True,
    as_json: output.Json = False,
) -> int:  # fmt: skip
    """Publish the records of a file, each once however often it is run."""
    from malamute_py.client.session.lanes import limits_of

    form = form_of(file)
    identity = _IDENTITY if keys else ""
    with file.open("rb") as source, linked(ctx, stays=True, anonymous=identity) as client:
        found = _versions_of(client, stream)
        typed = bool(found.schemas)
        if typed and keys:
            raise CommandFailed(
                f"{stream} is typed, and a step has no rows of typed streams; --no-keys imports"
                " without keys: each run adds all rows", USAGE,
            )  # fmt: skip
        # Keys begin with the stream's uuid: a stream of the same name that is made anew later gets
        # the records once more.
        run = _Import(client, stream, found.uuid if keys else b"")
        welcome = client.welcome
        assert welcome is not None, "a broker has answered"
        limits = limits_of(welcome)
        cuts = _Cuts(limits)
        total = file.stat().st_size
        rows_of = _TypedRows(found.schemas, limits) if typed else None
        if form != PARQUET:
            defaults = inputs.Defaults()
            make = None if rows_of is None else rows_of.from_json
            # following="": lines before a wrong one are told of by run.go().
            pieces = inputs.read_rows(source, defaults, parts=True, typed=make, following="")
            chunks = cuts.chunks(pieces) if rows_of is None else rows_of.chunks(pieces)
        else:
            chunks = _of_parquet(source, rows_of, cuts)
        return run.go(chunks, source, total, as_json=as_json)


def _versions_of(client: SyncClient, stream: str) -> StreamVersions:
    """Return the uuid and schemas of a stream, which is made when it is not there."""
    try:
        return client.stream_versions(stream)
    except BrokerRefused as error:
        if error.code != "unknown_stream":
            raise
        client.create_stream(stream)
        return client.stream_versions(stream)


class _Cuts:
    """The cutting of rows into steps at places that do not depend on how the rows arrive."""

    def __init__(self, limits: Limits) -> None:
        """limits: the broker's, which a step has to keep when it becomes a batch."""
        most = limits.batch_bytes_max
        self._rows = min(_ROWS, limits.batch_records_max)
        # Half for the bodies leaves the other half for subjects, fields and properties.
        self._bytes = min(_BYTES, most // 2)
        # A sixteenth is left for what the batch's own encoding needs beside.
        self._content_bytes = most - most // 16

    def chunks(self, pieces: Iterable[list[Row]]) -> Iterator[_Chunk]:
        """Yield the rows as chunks. pieces: rows as they arrived."""
        rows: list[Row] = []
        size = 0
        for piece in pieces:
            for row in piece:
                body = row[0]  # Bytes, or a list of parts.
                more = len(body) if isinstance(body, bytes) else sum(map(len, body))
                if rows and (len(rows) == self._rows or size + more > self._bytes):
                    yield from self._whole_or_halves(rows)
                    rows, size = [], 0
                rows.append(row)
                size += more
        if rows:
            yield from self._whole_or_halves(rows)

    def _whole_or_halves(self, rows: list[Row]) -> Iterator[_Chunk]:
        """Yield a chunk of rows, or those of its halves while it is too large for a batch.

        Rows were counted by their bodies alone, and fields and properties may be larger.
        """
        chunk = _chunk(rows)
        if len(rows) == 1 or len(chunk.content) <= self._content_bytes:
            yield chunk
            return
        half = len(rows) // 2
        yield from self._whole_or_halves(rows[:half])
        yield from self._whole_or_halves(rows[half:])


def _chunk(rows: list[Row]) -> _Chunk:
    """Return a chunk of rows, with the encoded form that its key is made of."""
    import msgspec

    options = {
        "bodies": [body for body, _, _, _, _, _ in rows],
        "subject": [subject for _, subject, _, _, _, _ in rows],
    }
    options |= inputs.further_columns(rows)
    return _Chunk(len(rows), msgspec.msgpack.encode(rows), options)


# --- Parquet -------------------------------------------------------------------------------------


def _of_parquet(source: IO[bytes], typed: _TypedRows | None, cuts: _Cuts) -> Iterator[_Chunk]:
    """Yield the rows of a Parquet file as chunks.

    typed: makes them for a typed stream, whose rows have no keys to be cut for; None: cuts does.
    Raises CommandFailed: it is no Parquet file, or its columns are not those of records.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        opened = pq.ParquetFile(source)
    except pa.ArrowException as error:
        raise CommandFailed(f"it is no Parquet file: {error}") from None
    schema = opened.schema_arrow
    _check_columns(schema, _HEADER if typed is None else typed.header)
    batches = opened.iter_batches(batch_size=_ROWS)
    if typed is not None:
        for batch in batches:
            yield typed.of_parquet(batch)
        return
    if "body" not in schema.names:
        raise CommandFailed(
            "it has no column body; rows of other columns are for a typed stream:"
            " `malamute stream create NAME --schema FILE`"
        )
    names = [name for name in schema.names if name in _HEADER]
    yield from cuts.chunks(_rows(batch.select(names)) for batch in batches)


def _check_columns(schema: pa.Schema, names: Collection[str]) -> None:
    """Raise CommandFailed for a column that would become a part of a record and has another type.

    names: columns that become parts of a record, as subject; others are not looked at.
    """
    import pyarrow as pa

    # "null" is the type of a column without any value, which fits everywhere.
    def is_text(kind: Any) -> bool:
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        return str(kind) in ("string", "large_string", "string_view", "null")

    def is_blob(kind: Any) -> bool:
        return is_text(kind) or is_bytes(kind)

    def is_bytes(kind: Any) -> bool:
        kinds = ("binary", "large_binary", "binary_view", "null")
        return str(kind) in kinds or bool(pa.types.is_fixed_size_binary(kind))

    def is_list(kind: Any, of: Callable[[Any], bool]) -> bool:
        lists = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
        return pa.types.is_null(kind) or (any(one(kind) for one in lists) and of(kind.value_type))

    def is_time(kind: Any) -> bool:
        return bool(pa.types.is_timestamp(kind) or pa.types.is_null(kind))

    fitting: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "body": ("binary, string or lists of binary", lambda k: is_blob(k) or is_list(k, is_bytes)),
        "subject": ("string", is_text),
        "keys": ("lists of string", lambda k: is_list(k, is_text)),
        "fields": ("map<string, string>", lambda k: pa.types.is_null(k) or (bool(pa.types.is_map(k))
                   and is_text(k.key_type) and is_text(k.item_type))),
        "client_time": ("timestamp", is_time),
        "expires": ("timestamp", is_time),
        "properties": ("binary, MessagePack maps", is_bytes),
    }  # fmt: skip
    for column in schema:
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if column.name in names and column.name in fitting:
            wanted, fits = fitting[column.name]
            if not fits(kind):
                name = column.name
                raise CommandFailed(
                    f"its column {name} is {column.type}; a record's {name} is {wanted}"
                )


def _rows(batch: Any) -> list[Row]:
    """Return the rows of a piece of a Parquet file as records.

    batch: has the columns that become parts of a record alone. Raises CommandFailed: a row has no
    body, or its properties cannot be read.
    """
    import pyarrow as pa

    if "body" in batch.schema.names:
        bodies = batch.column("body")
        # The blobs of bodies that are lists, or the bodies themselves.
        parts = bodies.flatten() if hasattr(bodies, "flatten") else bodies
        if bodies.null_count or parts.null_count:
            raise CommandFailed("a row of it has no body (null); an empty body is b''")
    for place, column in enumerate(batch.schema):
        if pa.types.is_timestamp(column.type) and column.type.unit == "ms":
            # As whole milliseconds: Python's datetime ends with the year 9999.
            times = batch.column(place).cast(pa.int64())
            batch = batch.set_column(place, column.name, times)
    return [_row(each) for each in batch.to_pylist()]


def _row(values: dict[str, Any]) -> Row:
    """Return a row as a record. values: by column. Raises CommandFailed: bad properties."""
    import msgspec

    body = values.get("body")
    keys = values.get("keys") or [values.get("subject") or ""]  # The first key is the subject.
    given = values.get("properties")
    try:
        properties = msgspec.msgpack.decode(given, type=dict[str, Any]) if given else {}
    except msgspec.MsgspecError as error:
        raise CommandFailed(f"the properties of a row are no MessagePack map: {error}") from None
    return (
        body.encode() if isinstance(body, str) else body,
        tuple(keys) if len(keys) > 1 else keys[0],
        dict(values.get("fields") or ()),
        _ms(values.get("client_time")),
        _ms(values.get("expires")),
        properties,
    )


def _ms(at: Any) -> int | None:
    """Return a time of a file in milliseconds; one without a zone is in UTC."""
    if at is None or isinstance(at, int):
        return at
    seconds: float = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    return round(seconds * 1_000)


# --- typed streams -------------------------------------------------------------------------------


class _TypedRows:
    """Rows of a file on their way into a typed stream, as batches of its newest schema."""

    def __init__(self, schemas: list[tuple[int, bytes]], limits: Limits) -> None:
        """schemas: number and schema of each version, the newest last. limits: the broker's."""
        self._limits = limits
        import pyarrow as pa

        from malamute_protocol.arrow import HEADER_COLUMNS, parse_schema
        from malamute_protocol.schema import Schemas

        self._schemas = Schemas(schemas)
        self._schema = parse_schema(schemas[-1][1])
        self._row = pa.struct(list(self._schema))
        self.header = [name for name in HEADER_COLUMNS if name not in self._schema.names]

    def from_json(self, row: dict[str, Any]) -> Any:
        """Return the columns of a JSON line's row, in the schema's types.

        Raises ValueError, TypeError: a value does not fit its column.
        """
        return from_json(row, self._row)

    def chunks(self, pieces: Iterable[list[Row]]) -> Iterator[_Chunk]:
        """Yield the rows of JSON lines as chunks. Raises CommandFailed: one does not fit."""
        import pyarrow as pa

        for piece in pieces:
            for first in range(0, len(piece), _ROWS):
                rows = piece[first : first + _ROWS]
                try:
                    table = pa.Table.from_pylist([columns for columns, *_ in rows], self._schema)
                except pa.ArrowException as error:
                    raise CommandFailed(
                        f"a row does not fit the stream's schema: {error}"
                    ) from None
                yield self._chunk(table, rows)

    def of_parquet(self, batch: Any) -> _Chunk:
        """Return the rows of a piece of a Parquet file as a chunk.

        Columns of the header become parts of the records, the others columns of the schema. Raises
        LocalProtocolError: they do not fit the schema.
        """
        import pyarrow as pa

        names = batch.schema.names
        header = [name for name in names if name in self.header]
        rows = _rows(batch.select(header))
        # A schema may have a column `subject` itself: its value is the record's subject, too.
        if "subject" in names and "keys" not in header:
            subjects = batch.column("subject").cast(pa.string()).to_pylist()
            rows = [
                (row[0], subject, *row[2:]) for row, subject in zip(rows, subjects, strict=True)
            ]
        kept = [name for name in names if name not in header]
        return self._chunk(pa.Table.from_batches([batch.select(kept)]), rows)

    def _chunk(self, table: Any, rows: list[Row]) -> _Chunk:
        """Return a chunk of a table's rows, encoded as batches of the typed stream.

        rows: the same rows as records, of which the headers are taken.
        """
        from malamute_py.client.session.tables import TableRows

        def options(first: int, count: int) -> dict[str, Any]:
            """Return the headers of the rows that one batch gets."""
            some = rows[first : first + count]
            subjects = [subject for _, subject, _, _, _, _ in some]
            return {"subject": subjects, **inputs.further_columns(some)}

        typed = TableRows(table, self._schemas, headers=options)
        return _Chunk(len(rows), contents=list(typed.contents(_BYTES, self._limits)))


# --- one import ----------------------------------------------------------------------------------


class _Import:
    """One file on its way into a stream."""

    def __init__(self, client: SyncClient, stream: str, uuid: bytes) -> None:
        """uuid: of the stream; empty: without keys."""
        self._client = client
        self._stream = stream
        self._key = uuid  # Of the newest step; before the first one the stream's uuid.
        self._under_way: deque[tuple[Pending[Confirmation | None], int]] = deque()
        self._added = self._known = 0  # Records that were new, and that an earlier run brought.

    def go(self, chunks: Iterator[_Chunk], source: IO[bytes], total: int, *, as_json: bool) -> int:
        """Import all chunks, and tell how much of it was new; return the exit code.

        source, total: the file and its bytes, for the progress bar. Whatever ends it early, the
        person is told how many records are certain and whether to run it again.
        """
        began = time.monotonic()
        unreadable: CommandFailed | None = None
        try:
            with Progress(f"importing into {self._stream}", total=total) as progress:
                try:
                    for chunk in chunks:
                        self._put(chunk)
                        while len(self._under_way) >= _UNDER_WAY:
                            self._settle()
                        progress.update(
                            0 if source.closed else source.tell(),
                            f"{self._added:,} added, {self._known:,} known",
                        )
                except CommandFailed as error:
                    unreadable = error  # Steps before it are still to be confirmed.
                while self._under_way:
                    self._settle()
                if unreadable is not None:
                    raise unreadable
        except BaseException as error:
            # Keys are kept in ring main, and a step lies in one ring.
            if isinstance(error, BrokerRefused) and error.code == "cross_ring":
                raise CommandFailed(
                    f"{self._stream} is in memory or has a ring of its own, where a step has no"
                    " key; --no-keys imports without: each run adds all records"
                ) from None
            again = "run it again to go on" if self._key else "a further run adds them once more"
            first = "mend the file, then " if error is unreadable and self._key else ""
            say(f"{count_text(self._added, 'record')} added for certain; {first}{again}")
            raise
        spent_ms = round((time.monotonic() - began) * 1_000)
        known = f", {self._known:,} were there already" if self._known else ""
        output.done(
            f"{count_text(self._added, 'record')} added to {self._stream}{known}"
            f" in {duration_text(spent_ms)}",
            {
                "stream": self._stream, "added": self._added, "known": self._known,
                "duration_ms": spent_ms,
            },
            as_json=as_json,
        )  # fmt: skip
        return 0

    def _put(self, chunk: _Chunk) -> None:
        """Send a chunk as a step of its own, or, when steps have no keys, by an ordinary publish.

        A step's key is a hash of the key before and of the chunk, and so of all chunks up to it.
        The same file gives the same keys in each run, and the broker takes a step whose key it
        knows as done.
        """
        if not self._key:
            self._publish(chunk)
            return
        self._key = blake2b(self._key + chunk.content, digest_size=16).digest()
        step = self._client.atomic(key=self._key)
        step.publish_many(self._stream, **chunk.options)
        self._under_way.append((step.commit_nowait(), chunk.count))

    def _publish(self, chunk: _Chunk) -> None:
        """Publish one chunk without a key: rows, or batches of a typed stream."""
        if chunk.contents:
            for content, _ in chunk.contents:
                self._client.publish_batch(self._stream, content, typed=True)
        else:
            options = dict(chunk.options)
            subjects = options.pop("subject")
            self._client.publish_many(self._stream, subjects=subjects, **options)
        self._added += chunk.count

    def _settle(self) -> None:
        """Wait for the oldest step; count its records as added, or as known from an earlier run."""
        pending, count = self._under_way.popleft()
        confirmed = pending.result()
        if confirmed is not None and confirmed.duplicate:
            self._known += count
        else:
            self._added += count
