"""Input of commands that send: lines, files and JSON lines, a chunk at a time.

Owns the reading. The rules: input is handed on as it arrives and never held whole; a line that
cannot be read stops the command by its number. Source: records.py has the names of the JSON form.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from malamute_py.cli.absent import nearest
from malamute_py.cli.commands import say
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.values import later_ms, pairs, size_text, time_ms

if TYPE_CHECKING:
    from malamute_py.client.sync.client import SyncClient

_CHUNK_BYTES: Final = 1 << 20
_LINE_BYTES_MAX: Final = 64 << 20
"""Longest line or body that is read; a longer one is taken for a mistake."""
_IGNORED: Final = frozenset(
    {
        "offset", "time", "epoch", "id", "stream",
        "number", "sender", "attempts", "about", "last", "why", "priority", "held", "not_before",
    }
)  # fmt: skip
"""Keys that `sub --json` and `inbox --json` print and that no sender can set."""
_TAKEN: Final = (
    "body", "body_base64", "subject", "keys", "fields", "client_time", "expires", "properties",
)  # fmt: skip
"""Keys of a JSON line that become parts of a record."""


class Defaults:
    """Values that the options give to every record; times are read anew for each chunk."""

    def __init__(
        self,
        subjects: Sequence[str] | None = None,
        fields: list[str] | None = None,
        properties: list[str] | None = None,
        client_time: str | None = None,
        expires: str | None = None,
        codec: str = "none",
    ) -> None:
        """Take the values as they were typed. Raises CommandFailed: one cannot be read."""
        keys = tuple(subjects or ("",))
        self.subject: str | tuple[str, ...] = keys if len(keys) > 1 else keys[0]
        self.fields = pairs(fields, "--field")
        self.properties = pairs(properties, "--property")
        self.codec = codec
        self._client_time = client_time
        self._expires = expires
        self.times()  # A value that cannot be read is refused before anything is published.

    def times(self) -> tuple[int | None, int | None]:
        """Return client time and expiry as of now."""
        return (
            time_ms(self._client_time) if self._client_time is not None else None,
            later_ms(self._expires) if self._expires is not None else None,
        )

    def options(self) -> dict[str, Any]:
        """Return options for publish_many, when all records differ in their bodies only."""
        client_time, expires = self.times()
        found: dict[str, Any] = {
            "client_time_ms": client_time, "expires_at_ms": expires, "codec": self.codec,
            "fields": self.fields or None, "properties": self.properties or None,
        }  # fmt: skip
        return {name: value for name, value in found.items() if value is not None}


Piece = tuple[list[bytes], dict[str, Any]]
"""Bodies, and the options of publish_many for them."""


def check_sources(
    given: Sequence[str], *, files: bool, json_lines: bool, from_name: bool, whole: bool = False
) -> None:
    """Raise CommandFailed when a command line names its input twice, or not at all.

    given: the arguments: bodies, or with `files` paths. json_lines, whole: how standard input is
    read. from_name: a file's name becomes its subject.
    """
    if files and not given:
        raise CommandFailed("--file: name the files after it", USAGE)
    if sum((files, json_lines, whole)) > 1:
        listed = [name for name, on in (
            ("--file", files), ("--json-lines", json_lines), ("--whole", whole)
        ) if on]  # fmt: skip
        raise CommandFailed(f"{' and '.join(listed)} exclude each other; give one", USAGE)
    if from_name and not files:
        raise CommandFailed("--subject-from-name goes with --file", USAGE)
    if not files and len(given) > 1:
        raise CommandFailed(
            f"{len(given)} bodies; put one in quotes, or give a line each on standard input", USAGE
        )
    if given and json_lines:
        raise CommandFailed("--json-lines reads standard input; leave out the body", USAGE)
    if given and whole:
        raise CommandFailed("--whole reads standard input; leave out the body", USAGE)


def source_of(
    given: Sequence[str], defaults: Defaults, *, files: bool, json_lines: bool, from_name: bool,
    what: str,
) -> Iterator[Piece]:  # fmt: skip
    """Return the files or lines that a command line names, as bodies with their options.

    given: paths. what: "record" or "message", for the person who types lines.
    """
    if files:
        return _files(given, defaults, from_name)
    if sys.stdin.isatty():
        say(f"one {what} a line; end with Ctrl-D")
    return (_objects if json_lines else _lines)(sys.stdin.buffer, defaults)


def tell_key(client: SyncClient) -> None:
    """Warn of --key without an identity: a key is one sender's, and each process is another."""
    if not client.identity:
        say(
            "--key: this client has no identity, so the next command is another sender to the"
            " broker, and the same key another key; use a context with a credential"
        )


def whole() -> bytes:
    """Return all of standard input as one body. Raises CommandFailed: it is too long."""
    if sys.stdin.isatty():
        say("type the body; end with Ctrl-D")
    body = sys.stdin.buffer.read(_LINE_BYTES_MAX + 1)
    if len(body) > _LINE_BYTES_MAX:
        raise CommandFailed(f"a body of more than {size_text(_LINE_BYTES_MAX)}")
    return body


def _chunks(source: IO[bytes]) -> Iterator[list[bytes]]:
    """Yield whole lines, as many as have arrived; wait only when there is none.

    The last line need not end. Raises CommandFailed: a line is too long.
    """
    # read1() returns what has arrived; read() would wait until the chunk is full.
    read = getattr(source, "read1", source.read)
    rest: list[bytes] = []  # Pieces of a line that has not ended, and their bytes.
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
    """Yield lines as bodies, as many in a piece as have arrived."""
    for bodies in _chunks(source):
        yield bodies, _alike(defaults, len(bodies))


def _alike(defaults: Defaults, count: int) -> dict[str, Any]:
    """Return the options of publish_many for `count` records that have the same headers.

    A subject with further keys has no form for all: it is given for each record.
    """
    if isinstance(defaults.subject, str):
        return {"subject": defaults.subject, **defaults.options()}
    return {"subjects": [defaults.subject] * count, **defaults.options()}


def _files(paths: Sequence[str], defaults: Defaults, from_name: bool) -> Iterator[Piece]:
    """Yield each file as one body. from_name: its name without ending ends the subject."""
    given = defaults.subject
    prefix, *further = (given,) if isinstance(given, str) else given  # The subject, other keys.
    for path in map(Path, paths):
        body = path.read_bytes()
        options = _alike(defaults, 1)
        if from_name:
            subject = f"{prefix}.{path.stem}" if prefix else path.stem
            options.pop("subject", None)
            options["subjects"] = [(subject, *further) if further else subject]
        yield [body], options


# --- JSON lines --------------------------------------------------------------------------


def _objects(source: IO[bytes], defaults: Defaults) -> Iterator[Piece]:
    """Yield JSON lines as records, as many in a piece as have arrived.

    Raises CommandFailed at a bad line, after all lines before it.
    """
    for rows in read_rows(source, defaults):
        yield _columns(rows, defaults.codec)


def read_rows(
    source: IO[bytes],
    defaults: Defaults,
    *,
    parts: bool = False,
    typed: Callable[[Any], Any] | None = None,
    following: str = "; the lines before it were taken",
) -> Iterator[list[Row]]:
    """Yield JSON lines as rows, as many as have arrived, with `defaults` for what they leave out.

    parts: whether a body may be a list of parts. typed: makes the body of what a line has as `row`,
    which each line must have then. following: ends the error of a line that cannot be read.
    Raises CommandFailed at such a line, after all lines before it.
    """
    number = 0
    for lines in _chunks(source):
        client_time, expires = defaults.times()
        rows: list[Row] = []
        failure: CommandFailed | None = None
        for line in lines:
            number += 1
            if not line.strip():
                continue
            try:
                rows.append(_row(line, defaults, client_time, expires, parts, typed))
            except (CommandFailed, ValueError, TypeError, KeyError) as error:
                # The rows before it go out first.
                failure = CommandFailed(f"line {number}: {error}{following}")
                break
        if rows:
            yield rows
        if failure is not None:
            raise failure


Row = tuple[
    Any, Any, dict[str, str], int | None, int | None, dict[str, Any]
]  # fmt: skip
"""Body (bytes, a list of parts, or a typed row), subject (or all keys), fields, client time, expiry
and properties of one record."""


def _row(
    line: bytes, defaults: Defaults, client_time: int | None, expires: int | None, parts: bool,
    typed: Callable[[Any], Any] | None,
) -> Row:  # fmt: skip
    """Return the record of a JSON line. Raises CommandFailed, which says what is wrong with it.

    parts: a body may be a list of parts. client_time, expires: the times of records that name none.
    typed: makes the body of the line's row. Raises also ValueError, TypeError, KeyError.
    """
    import msgspec

    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise CommandFailed(f"is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CommandFailed('is not an object; write {"body": ...}')
    if "row" in value and typed is None:
        raise CommandFailed(
            "is a row of a typed stream: `malamute stream import` into a stream with its schema"
            " takes it (`malamute stream create NAME --schema FILE`)"
        )
    if typed is not None and not isinstance(value.get("row"), dict):
        raise CommandFailed("has no row, which is an object of the columns of a typed stream")
    if "parts_base64" in value and not parts:
        raise CommandFailed(
            "is a list of parts, which pub does not publish; copy such a stream with"
            " `malamute replay STREAM --to-stream NAME`"
        )
    # A misspelt key is told; keys that only our own output has are passed over.
    for key in value:
        if key not in _TAKEN and key not in _IGNORED and key not in ("parts_base64", "row"):
            hint = nearest(key, _TAKEN, f"known are {', '.join(_TAKEN)}")
            raise CommandFailed(f"unknown key {key!r}; {hint}")
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
    properties = {name: _property(each) for name, each in properties.items()}
    body = _body(value) if typed is None else typed(value["row"])
    named = {name: _field(each) for name, each in fields.items() if each is not None}
    return (
        body, subject, {**defaults.fields, **named}, client_time, expires,
        {**defaults.properties, **properties},
    )  # fmt: skip


def _field(value: Any) -> str:
    """Return the text of a field: a text and a number as they are, other values as JSON."""
    import msgspec

    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value) if plain else msgspec.json.encode(value).decode()


def _property(value: Any) -> Any:
    """Return the value of a property, as `sub --json` writes it.

    Values that JSON cannot write are objects: bytes {"base64": text}, and {"float": "nan"}.
    """
    if isinstance(value, dict) and value.keys() == {"base64"}:
        return base64.b64decode(value["base64"], validate=True)
    if isinstance(value, dict) and value.keys() == {"float"}:
        return float(value["float"])
    return value


def _time(value: Any) -> int | None:
    """Return a time of a JSON line in milliseconds: a number as it is, a text as an option's."""
    if value is None or type(value) is int:
        return value
    return time_ms(str(value))


def _body(value: dict[str, Any]) -> bytes | list[bytes]:
    """Return the body of a JSON object: a text, base64, parts, or any JSON value as JSON."""
    if "parts_base64" in value:
        return [base64.b64decode(part, validate=True) for part in value["parts_base64"]]
    if "body_base64" in value:
        return base64.b64decode(value["body_base64"], validate=True)
    if "body" not in value:
        raise CommandFailed("has neither body nor body_base64")
    body = value["body"]
    if isinstance(body, str):
        return body.encode()
    import msgspec

    return msgspec.json.encode(body)


def _columns(rows: list[Row], codec: str) -> Piece:
    """Return rows as columns, which publish_many takes."""
    bodies: list[Any] = [body for body, _, _, _, _, _ in rows]
    subjects = [subject for _, subject, _, _, _, _ in rows]
    return bodies, {"subjects": subjects, "codec": codec, **further_columns(rows)}


def further_columns(rows: list[Row]) -> dict[str, Any]:
    """Return the columns of rows beside bodies and subjects, as options of publish_many().

    A column in which no row has a value is left out.
    """
    _, _, fields, times, expiries, properties = map(list, zip(*rows, strict=True))
    options: dict[str, Any] = {}
    if any(fields):
        options["fields"] = [each or None for each in fields]
    if any(each is not None for each in times):
        options["client_time_ms"] = times
    if any(expiries):
        options["expires_at_ms"] = [each or 0 for each in expiries]
    if any(properties):
        options["properties"] = [each or None for each in properties]
    return options
