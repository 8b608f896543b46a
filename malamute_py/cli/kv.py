"""`malamute kv ...`: get, put, update, delete, keys, watch, history.

Owns the words for the keys of a stream that keeps the last record of each subject. The rules: in a
pipe the bytes of a value are never changed; a condition that does not hold is a failure that names
the revision that the key has. Source: SPEC.md, section 8.
"""

from __future__ import annotations

import base64
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malamute_protocol.errors import BrokerRefused
from malamute_py.cli import output
from malamute_py.cli.absent import absent
from malamute_py.cli.commands import group
from malamute_py.cli.failures import CommandFailed
from malamute_py.cli.inputs import whole
from malamute_py.cli.linking import check_unconfirmed, linked
from malamute_py.cli.output import Cell, Column
from malamute_py.cli.parameters import Confirm, Stream
from malamute_py.cli.values import count_text, iso_text, time_text

if TYPE_CHECKING:
    from malamute_py.client.keys import KeyEntry
    from malamute_py.client.sync.client import SyncClient
    from malamute_py.client.sync.keys import SyncKeyView

app = group("kv")

Key = Annotated[str, typer.Argument(metavar="KEY", help="The key.")]
Value = Annotated[
    str | None,
    typer.Argument(metavar="VALUE", help="The value; without it, or by -, standard input."),
]
Pattern = Annotated[
    str, typer.Argument(metavar="PATTERN", help="Which keys: colour.*, prefix:co, regex:^a.")
]
Revision = Annotated[
    int, typer.Option("--revision", metavar="N", help="The key's revision now; 0: it is new.")
]
IfRevision = Annotated[
    int | None,
    typer.Option("--revision", metavar="N", help="Only if this is the key's revision."),
]
_SHOWN_MAX = 200
"""Bytes of a value that a line shows."""


def _view(client: SyncClient, stream: str) -> SyncKeyView:
    """Return the keys of a stream, for a command to read or set.

    Raises CommandFailed: there is no such stream, or it keeps no keys.
    """
    make = "`malamute stream create NAME --keys --ring-bytes 64MiB`"
    found = absent(
        lambda: client.stream_versions(stream),
        "stream",
        stream,
        lambda: [each.name for each in client.list_streams()],
        f"a stream with keys is made by {make}",
    )
    if not found.keep:
        raise CommandFailed(
            f"stream '{stream}' keeps no keys, and cannot begin to; another is made by {make}"
        )
    return client.kv(stream)


@app.command(
    "get",
    epilog="""\b
Examples:
  malamute kv get settings colour
  malamute kv get settings colour --json

A key that is not there is exit code 1. In a pipe the value comes without a line end.""",
)
def get(ctx: typer.Context, stream: Stream, key: Key, as_json: output.Json = False) -> None:
    """Print the value of a key."""
    with linked(ctx) as client:
        found = _view(client, stream).get(key)
    if found is None:
        raise CommandFailed(f"there is no key '{key}' in stream '{stream}'")
    if as_json:
        output.print_json(_named(found))
        return
    parts = found.value if isinstance(found.value, list) else [found.value]
    for part in parts:  # A body may be a list of parts.
        sys.stdout.buffer.write(part)
    if output.on_terminal() or len(parts) > 1:  # In a pipe one value is not changed.
        sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()


@app.command(
    "put",
    epilog="""\b
Examples:
  malamute kv put settings colour blue
  malamute kv put settings logo < logo.png""",
)
def put(
    ctx: typer.Context, stream: Stream, key: Key, value: Value = None,
    confirm: Confirm = "default", as_json: output.Json = False,
) -> None:  # fmt: skip
    """Set a key, whatever it was."""
    body = _given(value)
    with linked(ctx) as client:
        revision = _view(client, stream).put(key, body, confirm=confirm)
        if confirm == "none":
            check_unconfirmed(client, stream, client.stream_info)
    _tell(f"{key} is set", key, revision, as_json)


@app.command(
    "update",
    epilog="""\b
Examples:
  malamute kv update settings colour red --revision 4711
  malamute kv update settings lock mine --revision 0     only if it is new""",
)
def update(
    ctx: typer.Context, stream: Stream, key: Key, revision: Revision, value: Value = None,
    confirm: Confirm = "default", as_json: output.Json = False,
) -> None:  # fmt: skip
    """Set a key if its revision is still the one that you know."""
    body = _given(value)
    with linked(ctx) as client:
        done = _view(client, stream).update(key, body, revision=revision, confirm=confirm)
        if confirm == "none":
            check_unconfirmed(client, stream, client.stream_info)
    _tell(f"{key} is set", key, done, as_json)


@app.command(
    "delete",
    epilog="""\b
Examples:
  malamute kv delete settings colour
  malamute kv delete settings colour --revision 4711

A key that is not there is exit code 1; who may not read the keys is not told.""",
)
def delete(
    ctx: typer.Context, stream: Stream, key: Key, revision: IfRevision = None,
    as_json: output.Json = False,
) -> None:  # fmt: skip
    """Delete a key."""
    with linked(ctx) as client:
        view = _view(client, stream)
        # With a revision the broker judges it. Without one, deleting nothing succeeds there.
        if revision is None and _is_absent(view, key):
            raise CommandFailed(f"there is no key '{key}' in stream '{stream}'")
        done = view.delete(key, revision=revision)
    _tell(f"{key} is deleted", key, done, as_json)


@app.command(
    "keys",
    epilog="""\b
Examples:
  malamute kv keys settings
  malamute kv keys settings 'colour.*'

In a pipe a line has, with a tab between: key, revision. --json names them.""",
)
def keys(
    ctx: typer.Context, stream: Stream, pattern: Pattern = "#", as_json: output.Json = False
) -> None:
    """List the keys by name."""
    with linked(ctx) as client:
        found = _view(client, stream).keys(pattern)
    output.listing(
        [Column("key", "Key", style="cyan"), Column("revision", "Revision", right=True)],
        [(key, Cell(revision, count_text(revision))) for key, revision in found.items()],
        as_json=as_json,
        empty=f"no key of {stream} matches" if pattern != "#" else f"{stream} has no keys yet",
    )


@app.command(
    "watch",
    epilog="""\b
Examples:
  malamute kv watch settings
  malamute kv watch settings prefix:colour. --json
  malamute kv watch settings --present

With --json one object a line; the line {"complete": true} follows the present
values, and what comes after it are changes.""",
)
def watch(
    ctx: typer.Context, stream: Stream, pattern: Pattern = "#",
    present: Annotated[
        bool, typer.Option("--present", help="End where the present values are complete.")
    ] = False,
    as_json: output.Json = False,
) -> None:  # fmt: skip
    """Print the present values, then each change as it comes."""
    with linked(ctx, stays=not present) as client, _view(client, stream).watch(pattern) as entries:
        for entry in entries:
            if entry is not None:
                _print(entry, as_json)
            # None comes once, after the present values.
            elif present:
                return
            elif as_json:
                output.print_json({"complete": True}, compact=True)
            sys.stdout.flush()


@app.command(
    "history",
    epilog="""\b
Examples:
  malamute kv history settings colour""",
)
def history(ctx: typer.Context, stream: Stream, key: Key, as_json: output.Json = False) -> None:
    """Print what is left of a key's values, the oldest first."""
    with linked(ctx) as client:
        found = _view(client, stream).history(key)
    for entry in found:
        _print(entry, as_json)


def _is_absent(view: SyncKeyView, key: str) -> bool:
    """Whether there is no such key; False for a user who may not read it and so cannot know."""
    try:
        return view.get(key) is None
    except BrokerRefused as error:
        if error.code != "forbidden":
            raise
        return False


def _given(value: str | None) -> bytes:
    """Return the value of the command line, or all of standard input."""
    return whole() if value in (None, "-") else str(value).encode()


def _tell(text: str, key: str, revision: int, as_json: bool) -> None:
    output.done(f"{text}: revision {revision}", {"key": key, "revision": revision}, as_json=as_json)


def _named(entry: KeyEntry) -> dict[str, Any]:
    """Return a key's entry as JSON shows it: its value as text, or in base64 if it is no text."""
    named: dict[str, Any] = {
        "key": entry.key, "revision": entry.revision, "time_ms": entry.time_ms,
        "time": iso_text(entry.time_ms),
    }  # fmt: skip
    if entry.deleted:
        return {**named, "deleted": True}
    if entry.fields:
        named["fields"] = entry.fields
    if isinstance(entry.value, list):
        return {**named, "parts": [base64.b64encode(part).decode() for part in entry.value]}
    try:
        return {**named, "value": entry.value.decode()}
    except UnicodeDecodeError:
        return {**named, "value_base64": base64.b64encode(entry.value).decode()}


def _print(entry: KeyEntry, as_json: bool) -> None:
    """Print one entry of a key, as JSON or as a line."""
    if as_json:
        output.print_json(_named(entry), compact=True)
        return
    parts = entry.value if isinstance(entry.value, list) else [entry.value]
    # repr() without b'...': bytes that a terminal cannot show are escaped.
    shown = " | ".join(repr(part[:_SHOWN_MAX])[2:-1] for part in parts)
    value = "(deleted)" if entry.deleted else shown
    print(f"{time_text(entry.time_ms)}\t{entry.revision}\t{entry.key}\t{value}")
