"""`malamute pub`: publish an argument, lines, JSON lines or files.

Owns the reading of input and the one window through which it goes. The rules: what has
arrived is published at once and in as few batches as it needs; input is never held whole;
an interruption waits for what was taken; a line that cannot be read stops the command by
its number. Source: records.py has the names of the JSON form.
"""

from __future__ import annotations

import base64
import difflib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from malamute_protocol.errors import MalamuteError, RequestRejected
from malamute_py.cli import complete, output
from malamute_py.cli.commands import say
from malamute_py.cli.failures import INTERRUPTED, USAGE, CommandFailed
from malamute_py.cli.linking import LAST_WAIT_MS, linked
from malamute_py.cli.progress import Progress
from malamute_py.cli.values import count_text, duration_text, later_ms, pairs, size_text, time_ms

if TYPE_CHECKING:
    from malamute_py.client.sync import SyncClient, SyncWindow

EPILOG: Final = """\b
Examples:
  malamute pub orders 'one record' --subject orders.new --field region=eu
  tail -f app.log | malamute pub logs --subject logs.app
  malamute pub events --json-lines < events.jsonl
  malamute pub documents --file *.pdf --subject-from-name

JSON lines are objects with body (or body_base64), subject, keys, fields, client_time, expires
and properties, as `malamute sub --json` prints them."""

_CHUNK_BYTES: Final = 1 << 20
_LINE_BYTES_MAX: Final = 64 << 20
_IGNORED: Final = frozenset({"offset", "time", "epoch", "id", "stream"})
_KNOWN: Final = (
    "body", "body_base64", "subject", "keys", "fields", "client_time", "expires", "properties",
)  # fmt: skip


class Defaults:
    """What the options say of every record; times are read anew for each chunk."""

    def __init__(
        self,
        subjects: Sequence[str],
        fields: dict[str, str],
        properties: dict[str, str],
        client_time: str | None,
        expires: str | None,
        codec: str,
    ) -> None:
        self.subject: str | tuple[str, ...] = (
            tuple(subjects) if len(subjects) > 1 else subjects[0] if subjects else ""
        )
        self.fields = fields
        self.properties = properties
        self.codec = codec
        self._client_time = client_time
        self._expires = expires
        self.times()  # what cannot be read is refused before anything is published

    def times(self) -> tuple[int | None, int | None]:
        """Client time and expiry, as of now."""
        return (
            time_ms(self._client_time) if self._client_time is not None else None,
            later_ms(self._expires) if self._expires is not None else None,
        )

    def options(self) -> dict[str, Any]:
        """For publish_many, when all records are alike but for their bodies."""
        client_time, expires = self.times()
        found: dict[str, Any] = {
            "client_time_ms": client_time, "expires_ms": expires, "codec": self.codec,
            "fields": self.fields or None, "properties": self.properties or None,
        }  # fmt: skip
        return {name: value for name, value in found.items() if value is not None}


def pub(
    ctx: typer.Context,
    stream: Annotated[
        str,
        typer.Argument(metavar="STREAM", help="Where to; made when new.",
                       autocompletion=complete.streams),
    ],
    bodies: Annotated[
        list[str] | None,
        typer.Argument(metavar="BODY", help="One record; without it, the lines of the input.",
                       show_default=False),
    ] = None,
    subject: Annotated[
        list[str] | None,
        typer.Option(
            "--subject", "-s", metavar="SUBJECT", help="Their subject; again for further keys."
        ),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option("--field", "-f", metavar="NAME=VALUE", help="A field (repeatable)."),
    ] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", "-p", metavar="NAME=VALUE", help="A property (repeatable)."),
    ] = None,
    client_time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The producer's time: now, now-1h, ISO 8601, ms."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="When they expire: 10m from now, or a time.")
    ] = None,
    confirm: Annotated[
        Literal["default", "none", "stored", "synced"],
        typer.Option(metavar="LEVEL", help="Wait until the broker has: none, stored, synced."),
    ] = "default",
    codec: Annotated[
        Literal["none", "gzip", "snappy", "lz4", "zstd"],
        typer.Option(metavar="CODEC", help="Compress bodies: gzip, snappy, lz4, zstd."),
    ] = "none",
    json_lines: Annotated[
        bool, typer.Option("--json-lines", help="Each line of the input is a JSON object.")
    ] = False,
    files: Annotated[
        bool, typer.Option("--file", "-F", help="The arguments are files, each one record.")
    ] = False,
    subject_from_name: Annotated[
        bool, typer.Option("--subject-from-name", help="With --file: SUBJECT.NAME of each file.")
    ] = False,
    as_json: output.Json = False,
) -> int:  # fmt: skip
    """Publish records: an argument, lines, JSON lines or files."""
    given = bodies or []
    if files and not given:
        raise CommandFailed("--file: name the files after it", USAGE)
    if files and json_lines:
        raise CommandFailed("--file and --json-lines exclude each other; give one", USAGE)
    if subject_from_name and not files:
        raise CommandFailed("--subject-from-name goes with --file", USAGE)
    if not files and len(given) > 1:
        raise CommandFailed(
            f"{len(given)} bodies; put one in quotes, or give a line each on standard input", USAGE
        )
    if given and json_lines:
        raise CommandFailed("--json-lines reads standard input; leave out the body", USAGE)
    defaults = Defaults(
        subject or [], pairs(field, "--field"), pairs(properties, "--property"),
        client_time, expires, codec,
    )  # fmt: skip
    with linked(ctx, stays=not given) as client:
        if given and not files:
            _one(client, stream, given[0].encode("utf-8", "surrogateescape"), defaults, confirm,
                 as_json)  # fmt: skip
            return 0
        run = _Run(client, stream, confirm, as_json)
        if files:
            return run.finish(_files(given, defaults, subject_from_name), len(given))
        if sys.stdin.isatty():
            say("one record a line; end with Ctrl-D")
        source = _objects(sys.stdin.buffer, defaults) if json_lines else _lines(
            sys.stdin.buffer, defaults
        )  # fmt: skip
        return run.finish(source, None)


def _one(
    client: SyncClient, stream: str, body: bytes, defaults: Defaults, confirm: str, as_json: bool
) -> None:
    confirmed = client.publish_many(
        stream, [body], subjects=[defaults.subject], confirm=confirm, **defaults.options()
    )[0]
    if confirmed.level == "none":
        _check_unconfirmed(client, stream)
        output.done(
            f"sent to {stream}; nothing was promised",
            {"stream": stream, "level": "none"}, as_json=as_json,
        )  # fmt: skip
        return
    if not as_json and not output.on_terminal():
        print(f"{stream}\t{confirmed.offset}\t{confirmed.level}")
        return
    output.done(
        f"{stream} offset {confirmed.offset:,}, {confirmed.level}",
        {
            "stream": stream, "offset": confirmed.offset, "epoch": confirmed.epoch,
            "level": confirmed.level, "time": confirmed.append_time_ms, "id": confirmed.id.hex(),
            "duplicate": confirmed.duplicate,
        },
        as_json=as_json,
    )  # fmt: skip


def _check_unconfirmed(client: SyncClient, stream: str) -> None:
    """Raise CommandFailed when something published without a confirm was refused."""
    client.flush()
    # An answer that was asked for later comes later: whatever was refused is known by then.
    try:
        client.stream_info(stream)
    except RequestRejected as error:
        if error.code != "unknown_stream":
            raise
    if client.refused_unconfirmed:
        raise CommandFailed(
            f"{stream}: the broker refused some of it ({client.refused_unconfirmed} batches);"
            " publish with --confirm stored to learn why"
        )


Piece = tuple[list[bytes], dict[str, Any]]
"""Bodies, and the options of publish_many for them."""


class _Run:
    """One window over all of the input."""

    def __init__(self, client: SyncClient, stream: str, confirm: str, as_json: bool) -> None:
        self._client = client
        self._stream = stream
        self._confirm = confirm
        self._json = as_json
        self._bytes = 0
        self._began = time.monotonic()

    def finish(self, source: Iterator[Piece], total: int | None) -> int:
        """Publish all of it and say how much that was; returns the exit code."""
        interrupted = False
        unreadable: CommandFailed | OSError | None = None
        window = self._client.window(self._stream, confirm=self._confirm, keep=False)
        try:
            with Progress("publishing", total=total, shown=not sys.stdin.isatty()) as progress:
                try:
                    for bodies, options in source:
                        window.publish_many(bodies, **options)
                        self._bytes += sum(map(len, bodies))
                        progress.update(window.published, self._pace(window))
                except KeyboardInterrupt:
                    interrupted = True
                except (CommandFailed, OSError) as error:
                    unreadable = error  # what came before it is still to be confirmed
                progress.title("confirming")
                window.wait(LAST_WAIT_MS if interrupted else None)
            if self._confirm == "none":
                _check_unconfirmed(self._client, self._stream)
        except (MalamuteError, KeyboardInterrupt):
            say(f"{count_text(window.confirmed, 'record')} of {window.published:,} confirmed")
            raise
        self._tell(window)
        if unreadable is not None:
            raise unreadable
        return INTERRUPTED if interrupted else 0

    def _pace(self, window: SyncWindow) -> str:
        spent = time.monotonic() - self._began
        rate = window.published / spent if spent > 0 else 0.0
        return f"{window.published:,} records, {size_text(self._bytes)}, {rate:,.0f}/s"

    def _tell(self, window: SyncWindow) -> None:
        spent_ms = round((time.monotonic() - self._began) * 1000)
        if not self._json and not output.on_terminal():
            print(f"{self._stream}\t{window.published}\t{self._confirm}")
            return
        output.done(
            f"{count_text(window.published, 'record')} to {self._stream},"
            f" {size_text(self._bytes)} in {duration_text(spent_ms)}",
            {
                "stream": self._stream, "records": window.published,
                "confirmed": window.confirmed, "bytes": self._bytes, "confirm": self._confirm,
                "duration_ms": spent_ms,
            },
            as_json=self._json,
        )  # fmt: skip


def _chunks(source: IO[bytes]) -> Iterator[list[bytes]]:
    """Whole lines, as many as have arrived; waits only when there is none."""
    read = getattr(source, "read1", source.read)
    rest: list[bytes] = []
    held = 0
    while chunk := read(_CHUNK_BYTES):
        end = chunk.rfind(b"\n")
        if end < 0:
            rest.append(chunk)
            held += len(chunk)
            if held > _LINE_BYTES_MAX:
                raise CommandFailed(
                    f"a line of more than {size_text(_LINE_BYTES_MAX)}; publish files with --file"
                )
            continue
        rest.append(chunk[:end])
        yield b"".join(rest).split(b"\n")
        rest, held = [chunk[end + 1 :]], len(chunk) - end - 1
    if held:
        yield [b"".join(rest)]


def _lines(source: IO[bytes], defaults: Defaults) -> Iterator[Piece]:
    for lines in _chunks(source):
        yield lines, _alike(defaults, len(lines))


def _alike(defaults: Defaults, count: int) -> dict[str, Any]:
    if isinstance(defaults.subject, str):
        return {"subject": defaults.subject, **defaults.options()}
    return {"subjects": [defaults.subject] * count, **defaults.options()}


def _files(paths: Sequence[str], defaults: Defaults, from_name: bool) -> Iterator[Piece]:
    prefix = defaults.subject if isinstance(defaults.subject, str) else defaults.subject[0]
    for path in map(Path, paths):
        body = path.read_bytes()
        options = _alike(defaults, 1)
        if from_name:
            options["subject"] = f"{prefix}.{path.stem}" if prefix else path.stem
            options.pop("subjects", None)
        yield [body], options


# --- JSON lines --------------------------------------------------------------------------


def _objects(source: IO[bytes], defaults: Defaults) -> Iterator[Piece]:
    number = 0
    for lines in _chunks(source):
        client_time, expires = defaults.times()
        rows: list[_Row] = []
        failure: CommandFailed | None = None
        for line in lines:
            number += 1
            if not line.strip():
                continue
            try:
                rows.append(_row(line, defaults, client_time, expires))
            except (CommandFailed, ValueError, TypeError, KeyError) as error:
                failure = CommandFailed(
                    f"line {number}: {error}; the lines before it are published"
                )
                break
        if rows:
            yield _columns(rows, defaults.codec)
        if failure is not None:
            raise failure


_Row = tuple[bytes, Any, dict[str, str], int | None, int | None, dict[str, Any]]


def _row(line: bytes, defaults: Defaults, client_time: int | None, expires: int | None) -> _Row:
    import msgspec

    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise CommandFailed(f"is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CommandFailed('is not an object; write {"body": ...}')
    if "parts_base64" in value:
        raise CommandFailed(
            "is a list of parts, which pub does not publish; copy such a stream with"
            " `malamute replay STREAM --to-stream NAME`"
        )
    for key in value:
        if key not in _KNOWN and key not in _IGNORED:
            near = difflib.get_close_matches(key, _KNOWN, n=1)
            raise CommandFailed(
                f"unknown key {key!r}; " + (f"did you mean {near[0]}?" if near else
                                            f"known are {', '.join(_KNOWN)}")
            )  # fmt: skip
    keys = value.get("keys")
    if keys is not None and not isinstance(keys, list):
        raise CommandFailed('keys is a list: ["a.b", "c"]')
    subject = tuple(map(str, keys)) if keys else value.get("subject", defaults.subject)
    if not isinstance(subject, str | tuple):
        raise CommandFailed("subject must be text")
    fields = value.get("fields", {})
    properties = value.get("properties", {})
    if not isinstance(fields, dict) or not isinstance(properties, dict):
        raise CommandFailed("fields and properties are objects")
    if "client_time" in value:
        client_time = _time(value["client_time"])
    if "expires" in value:
        expires = _time(value["expires"])
    return (
        _body(value), subject, {**defaults.fields, **{k: str(v) for k, v in fields.items()}},
        client_time, expires, {**defaults.properties, **properties},
    )  # fmt: skip


def _time(value: Any) -> int | None:
    if value is None or type(value) is int:
        return value
    return time_ms(str(value))


def _body(value: dict[str, Any]) -> bytes:
    if "body_base64" in value:
        return base64.b64decode(value["body_base64"], validate=True)
    if "body" not in value:
        raise CommandFailed("has neither body nor body_base64")
    body = value["body"]
    if isinstance(body, str):
        return body.encode()
    import msgspec

    return msgspec.json.encode(body)


def _columns(rows: list[_Row], codec: str) -> Piece:
    bodies, subjects, fields, times, expiries, properties = map(list, zip(*rows, strict=True))
    options: dict[str, Any] = {"subjects": subjects, "codec": codec}
    if any(fields):
        options["fields"] = [each or None for each in fields]
    if any(each is not None for each in times):
        options["client_time_ms"] = times
    if any(expiries):
        options["expires_ms"] = [each or 0 for each in expiries]
    if any(properties):
        options["properties"] = [each or None for each in properties]
    return bodies, options
