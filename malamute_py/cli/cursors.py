"""`malamute cursor ...`: list, show, move, reset, edit, remove.

Owns the words for positions that the broker keeps for readers. The rule: a move goes forward only,
as a reader's does; going back is a command of its own. Source: SPEC.md, section 4.8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from malamute_protocol.errors import BrokerRefused
from malamute_py.cli import complete, output
from malamute_py.cli.absent import absent, made_or_edited
from malamute_py.cli.agreed import Yes, agreed
from malamute_py.cli.columns import age, creator, figure, read, sized
from malamute_py.cli.commands import group
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.linking import linked
from malamute_py.cli.mailboxes import beside, since
from malamute_py.cli.output import Cell, Column
from malamute_py.cli.parameters import OfStream, PrefixOption, Stream
from malamute_py.cli.settings import Description, Replace, Settings, shown, wanted
from malamute_py.cli.subscribe import known as known_stream
from malamute_py.cli.subscribe import one_place

if TYPE_CHECKING:
    from malamute_py.client.facts import CursorFacts
    from malamute_py.client.sync.client import SyncClient

app = group("cursor")

Name = Annotated[
    str, typer.Argument(metavar="CURSOR", help="The cursor.", autocompletion=complete.cursors)
]


def known(client: SyncClient, stream: str, cursor: str, following: str = "") -> CursorFacts:
    """Return facts about a cursor. Raises CommandFailed, with the nearest name: there is none.

    following: the advice how it is made; empty: by reading with it.
    """
    known_stream(client, stream)
    return absent(
        lambda: client.cursor_info(stream, cursor),
        "cursor",
        cursor,
        lambda: [each.cursor for each in client.list_cursors(stream)],
        following or f"reading with it makes it: malamute sub {stream} --cursor {cursor}",
        where=f" of {stream}",
    )


@app.command(
    "ls",
    epilog="""\b
Examples:
  malamute cursor ls
  malamute cursor ls trades --prefix etl --json

In a pipe a line has, with tabs between: stream, cursor, next offset, how many
records it is behind, time of its last move in milliseconds, by whom, whether it keeps the
records that it has not read (yes, no), and how many bytes these are. --json names them.""",
)
def ls(
    ctx: typer.Context,
    stream: OfStream = "",
    prefix: PrefixOption = "",
    as_json: output.Json = False,
) -> None:  # fmt: skip
    """List the cursors."""
    with linked(ctx) as client:
        if stream:
            known_stream(client, stream)
        found = client.list_cursors(stream, prefix)
    output.entries(
        [
            Column("stream", "Stream", style="cyan"),
            Column("cursor", "Cursor", style="cyan"),
            figure("next", "Next"),
            figure("lag", "Behind"),
            figure("moved_ms", "Moved ago", age),
            read("by", "By", creator, spare=True),
            Column("pinned", "Pinned"),
            Column(
                "pinned_bytes", "Keeps", right=True,
                cell=lambda each: sized(each.pinned_bytes) if each.pinned else
                Cell(each.pinned_bytes, "-"),
            ),
        ],
        found,
        as_json=as_json,
        empty=(
            f"{stream} has no cursors" if stream else
            "no cursors yet; reading with one makes it: malamute sub STREAM --cursor NAME"
        ),
    )  # fmt: skip


@app.command(
    "info",
    epilog="""\b
Examples:
  malamute cursor info trades etl""",
)
def info(ctx: typer.Context, stream: Stream, cursor: Name, as_json: output.Json = False) -> None:
    """Show one cursor: where it stands, and its settings."""
    with linked(ctx) as client:
        _show(known(client, stream, cursor), as_json)


def _show(found: CursorFacts, as_json: bool) -> None:
    """Print the facts of one cursor: for `info`, and for `edit` with --json."""
    facts: dict[str, Any] = {
        "stream": Cell(found.stream, found.stream, "cyan"),
        "cursor": Cell(found.cursor, found.cursor, "bold cyan"),
        "next": found.next,
        "lag": found.lag,
        "first": found.first,
        "tail": found.tail,
        "moved_ms": since(found.moved_ms),
        "by": creator(found.by),
        "pinned": found.pinned,
        "pinned_bytes": sized(found.pinned_bytes),
        **beside(found.more, as_json),
        "settings": shown(found.settings, {"pin_bytes_max": "the broker's"}),
    }
    output.facts(facts, as_json=as_json)


@app.command(
    "move",
    epilog="""\b
Examples:
  malamute cursor move orders billing 4711        what is before it is done
  malamute cursor move orders billing 4711 --since 4000""",
)
def move(
    ctx: typer.Context,
    stream: Stream,
    cursor: Name,
    following: Annotated[
        int, typer.Argument(metavar="OFFSET", min=0, help="The offset that is to be read next.")
    ],
    since_offset: Annotated[
        int | None,
        typer.Option(
            "--since", metavar="OFFSET", min=0, help="Only if the cursor stands there now."
        ),
    ] = None,
    as_json: output.Json = False,
) -> None:
    """Move a cursor forward, as a reader does; made when new."""
    with linked(ctx) as client:
        known_stream(client, stream)
        try:
            client.cursor(stream, cursor).move(following, since=since_offset)
        except BrokerRefused as error:
            # A refusal that the person's OFFSET or --since caused is told with the next command.
            if error.code == "conflict":
                raise CommandFailed(
                    f"{stream}/{cursor} was not moved: {error.reason}; `malamute cursor info"
                    f" {stream} {cursor}` says where it stands, `cursor reset` goes back, too"
                ) from None
            if error.code == "bad_start":
                raise CommandFailed(f"{stream}/{cursor} was not moved: {error.reason}") from None
            raise
    _moved(stream, cursor, following, as_json)


@app.command(
    "reset",
    epilog="""\b
Examples:
  malamute cursor reset orders billing earliest
  malamute cursor reset orders billing latest     skip what was not read
  malamute cursor reset orders billing 4711       an offset
  malamute cursor reset orders billing now-1h     a time, as 2026-01-31T10:00""",
)
def reset(
    ctx: typer.Context,
    stream: Stream,
    cursor: Name,
    point: Annotated[
        str,
        typer.Argument(metavar="POINT", help="earliest, latest, an OFFSET, message ID or TIME."),
    ],
    as_json: output.Json = False,
) -> None:
    """Move a cursor elsewhere, forward or back."""
    start = one_place(point, "a cursor stands at")
    with linked(ctx) as client:
        before = known(client, stream, cursor).next
        offset = client.cursor(stream, cursor).reset(start)
    _moved(stream, cursor, offset, as_json, before)


def _moved(stream: str, cursor: str, offset: int, as_json: bool, before: int | None = None) -> None:
    """Print where a cursor stands now. before: where it stood, if that is known."""
    told: dict[str, Any] = {"stream": stream, "cursor": cursor, "next": offset}
    until = ""
    if before is not None:
        told["before"] = before
        until = f" (it stood at {before:,})"
    output.done(f"{stream}/{cursor} stands at {offset:,}{until}", told, as_json=as_json)


@app.command(
    "edit",
    epilog="""\b
Examples:
  malamute cursor edit orders billing --pin --pin-bytes 10GiB
  malamute cursor edit orders billing --create --start latest

A pinned cursor has the broker keep what it has not read, up to its bound; it warns before.""",
)
def edit(
    ctx: typer.Context,
    stream: Stream,
    cursor: Name,
    pin: Annotated[
        bool | None, typer.Option("--pin/--no-pin", help="Keep the records that it has not read.")
    ] = None,
    pin_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Keep at most so much for it.")
    ] = None,
    description: Description = None,
    settings: Settings = None,
    replace: Replace = False,
    create: Annotated[
        bool, typer.Option("--create", help="Make the cursor when there is none.")
    ] = False,
    start: Annotated[
        str, typer.Option(metavar="POINT", help="Position of a new cursor.")
    ] = "earliest",
    as_json: output.Json = False,
) -> None:
    """Change settings of a cursor, or make one; settings that are not named stay."""
    asked = wanted(settings, pin=pin, pin_bytes_max=pin_bytes, description=description)
    if not (asked or create or replace):
        raise CommandFailed("nothing to change; name a setting, such as --pin", USAGE)
    begin = one_place(start, "a cursor stands at")
    with linked(ctx) as client:
        # Without --create a misspelt name must not make a new cursor.
        if create:
            known_stream(client, stream)
        else:
            known(client, stream, cursor, "--create makes it")
        found, done = made_or_edited(
            lambda: client.cursor_info(stream, cursor), "cursor", f"{stream}/{cursor}", asked,
            lambda: client.cursor(stream, cursor).edit(asked, start=begin, replace=replace),
            replace=replace,
        )  # fmt: skip
    if as_json:
        _show(found, as_json)
    else:
        output.done(f"{done}; it stands at {found.next:,}", {}, as_json=False)


@app.command(
    "rm",
    epilog="""\b
Examples:
  malamute cursor rm trades etl""",
)
def rm(
    ctx: typer.Context, stream: Stream, cursor: Name, yes: Yes = False, as_json: output.Json = False
) -> None:
    """Have the broker forget a cursor; the records stay."""
    with linked(ctx) as client:
        found = known(client, stream, cursor)
        agreed(f"remove cursor {cursor} of {stream}, which stands at {found.next:,}", cursor,
               yes=yes)  # fmt: skip
        client.cursor(stream, cursor).remove()
    output.done(
        f"removed cursor {cursor} of {stream}; it stood at {found.next:,}",
        {"stream": stream, "removed": cursor, "next": found.next},
        as_json=as_json,
    )
