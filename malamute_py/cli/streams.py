"""`malamute stream ...`: list, show, create, edit, trim, purge, remove, peek, export, import.

Owns the words for the settings of a stream. The rule: a command that cannot be undone asks first;
looking never consumes. Source: SPEC.md, section 4.7.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malamute_py.cli import complete, exporting, importing, output
from malamute_py.cli.agreed import Yes, confirmed
from malamute_py.cli.columns import figure, sized
from malamute_py.cli.commands import group
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.linking import linked
from malamute_py.cli.output import Cell, Column, kept
from malamute_py.cli.parameters import OneStream, Pattern, Prefix
from malamute_py.cli.records import RecordWriter
from malamute_py.cli.settings import (
    Description,
    LevelOption,
    Replace,
    Settings,
    schema_of,
    shown,
    wanted,
)
from malamute_py.cli.subscribe import check_kind, known, one_place, tell_notice
from malamute_py.cli.values import (
    count_text,
    pattern_text,
    time_ms,
    time_text,
)

if TYPE_CHECKING:
    from malamute_protocol.batch import Record
    from malamute_py.client.facts import StreamFacts
    from malamute_py.client.session.subscription import Notice
    from malamute_py.client.sync.client import SyncClient

app = group("stream")

app.command("export", epilog=exporting.EPILOG)(exporting.export)
app.command("import", epilog=importing.EPILOG)(importing.import_)

MaxAge = Annotated[
    str | None, typer.Option(metavar="DURATION", help="Drop records older than this: 7d.")
]
MaxBytes = Annotated[str | None, typer.Option(metavar="SIZE", help="Keep at most so much: 1GiB.")]
MaxRecords = Annotated[
    int | None, typer.Option(metavar="COUNT", min=0, help="Keep the newest so many at most.")
]
BodyKind = Annotated[
    str | None,
    typer.Option(metavar="KIND", help="blob, list or arrow; else the first batch decides."),
]

SchemaFile = Annotated[
    Path | None,
    typer.Option(
        "--schema", metavar="FILE", help="Typed: the schema of this Arrow or Parquet file."
    ),
]

Validate = Annotated[
    str | None,
    typer.Option(metavar="WORD", help="Typed: check the schema alone, or each value: full."),
]


@app.command(
    "ls",
    epilog="""\b
Examples:
  malamute stream ls
  malamute stream ls orders. --json

In a pipe a line has, with tabs between: name, records, first offset, next offset,
bytes, and whether it is kept in memory (yes, no). --json names them.""",
)
def ls(
    ctx: typer.Context,
    prefix: Prefix = "",
    as_json: output.Json = False,
) -> None:
    """List the streams."""
    with linked(ctx) as client:
        found = client.list_streams(prefix)
    output.entries(
        [
            Column("name", "Stream", style="cyan"),
            figure("records", "Records"),
            figure("first", "First", spare=True),
            figure("tail", "Next"),
            figure("bytes", "Bytes", sized),
            Column(
                "memory", "Kept", spare=True,
                cell=lambda each: kept(bool(each.more.get("memory"))),
            ),
        ],
        found,
        as_json=as_json,
        empty=(
            f"no stream begins with {prefix}" if prefix else
            "no streams yet; publishing makes one: malamute pub NAME 'a record'"
        ),
    )  # fmt: skip


@app.command(
    "info",
    epilog="""\b
Examples:
  malamute stream info orders
  malamute stream info orders --json | jq .tail""",
)
def info(ctx: typer.Context, stream: OneStream, as_json: output.Json = False) -> None:
    """Show one stream: what it holds, and its settings."""
    with linked(ctx) as client:
        found = known(client, stream)
    _show(found, as_json)


def _show(found: StreamFacts, as_json: bool) -> None:
    """Print the facts of one stream: for `info`, and for `create` and `edit` with --json."""
    output.facts(
        {
            "name": Cell(found.name, found.name, "bold cyan"),
            "records": found.records,
            "first": found.first,
            "tail": found.tail,
            "bytes": sized(found.bytes),
            "aged_bytes": sized(found.aged_bytes),
            "trimmed": found.trimmed,
            "purges": Cell(
                [list(each) for each in found.purges],
                "; ".join(
                    f"{pattern_text(pattern)} before {before:,}" for pattern, before in found.purges
                )
                or "none",
            ),
            "subscriptions": found.subscriptions,
            "epoch": found.epoch,
            "uuid": found.uuid.hex(),
            "generation": found.generation,
            **_readable(found.more),
            "settings": shown(found.settings, {"ring_bytes": "shared"}),
        },
        as_json=as_json,
    )


def _readable(more: dict[str, Any]) -> dict[str, Any]:
    """Return facts that StreamFacts has no field for, with times and epochs for a person."""
    told = dict(more)
    for key in ("last_time_ms", "created_ms"):
        if key in told:
            told[key] = Cell(told[key], time_text(told[key]))
    if epochs := told.get("epochs"):
        told["epochs"] = Cell(epochs, ", ".join(f"{epoch} from {at:,}" for epoch, at in epochs))
    return told


@app.command(
    "create",
    epilog="""\b
Examples:
  malamute stream create orders --max-age 7d --description 'all orders'
  malamute stream create ticks --ring-bytes 1GiB --full refuse
  malamute stream create settings --keys --ring-bytes 64MiB
  malamute stream create scratch --memory --set max_bytes=64MiB
  malamute stream create flights --schema flights.parquet --validate full""",
)
def create(
    ctx: typer.Context,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="Its name.")],
    max_age: MaxAge = None,
    max_bytes: MaxBytes = None,
    max_records: MaxRecords = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="In memory only: gone when the broker stops.")
    ] = False,
    ring_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="A ring of its own, of this size.")
    ] = None,
    full: Annotated[
        str | None,
        typer.Option(metavar="WORD", help="A full ring of its own: overwrite or refuse."),
    ] = None,
    keys: Annotated[
        bool,
        typer.Option("--keys", help="Keep the newest record of each subject, for `malamute kv`."),
    ] = False,
    level: LevelOption = None,
    body_kind: BodyKind = None,
    schema: SchemaFile = None,
    validate: Validate = None,
    description: Description = None,
    settings: Settings = None,
    as_json: output.Json = False,
) -> None:
    """Create a stream; creating it again with these settings is fine."""
    asked = wanted(
        settings, max_age_ms=max_age, max_bytes=max_bytes, max_records=max_records,
        memory=memory or None, ring_bytes=ring_bytes, full=full, level=level, body_kind=body_kind,
        keep="last-per-subject" if keys else None, description=description,
        schema=None if schema is None else schema_of(schema), validate=validate,
    )  # fmt: skip
    with linked(ctx) as client:
        client.create_stream(stream, asked)
        if as_json:
            _show(client.stream_info(stream), as_json)
    if not as_json:
        output.done(f"created {stream}", {}, as_json=False)


@app.command(
    "edit",
    epilog="""\b
Examples:
  malamute stream edit orders --max-age 30d
  malamute stream edit orders --max-bytes 2GiB --description 'all orders'""",
)
def edit(
    ctx: typer.Context,
    stream: OneStream,
    max_age: MaxAge = None,
    max_bytes: MaxBytes = None,
    max_records: MaxRecords = None,
    level: LevelOption = None,
    body_kind: BodyKind = None,
    schema: SchemaFile = None,
    validate: Validate = None,
    description: Description = None,
    settings: Settings = None,
    replace: Replace = False,
    ring_bytes: Annotated[str | None, typer.Option(hidden=True)] = None,
    full: Annotated[str | None, typer.Option(hidden=True)] = None,
    as_json: output.Json = False,
) -> None:
    """Change settings of a stream; settings that are not named stay."""
    asked = wanted(
        settings, max_age_ms=max_age, max_bytes=max_bytes, max_records=max_records, level=level,
        body_kind=body_kind, description=description,
        schema=None if schema is None else schema_of(schema), validate=validate,
    )  # fmt: skip
    # Hidden options of `create`, so that a person who tries them here learns what to do.
    if ring_bytes is not None or full is not None:
        raise CommandFailed(
            f"a ring is chosen when a stream is made: make another one, and copy the records with"
            f" `malamute replay {stream} --to-stream NAME`", USAGE,
        )  # fmt: skip
    if not asked and not replace:
        raise CommandFailed("nothing to change; name a setting, such as --max-age 7d", USAGE)
    with linked(ctx) as client:
        known(client, stream)
        client.edit_stream(stream, asked, replace=replace)
        if as_json:
            _show(client.stream_info(stream), as_json)
    if not as_json:
        output.done(f"edited {stream}: {', '.join(asked) or 'all settings'}", {}, as_json=False)


@app.command(
    "rm",
    epilog="""\b
Examples:
  malamute stream rm scratch
  malamute stream rm scratch-1 scratch-2 --yes""",
)
def rm(
    ctx: typer.Context,
    streams: Annotated[
        list[str],
        typer.Argument(metavar="STREAM", help="What to remove.",
                       autocompletion=complete.streams),
    ],
    yes: Yes = False,
    as_json: output.Json = False,
) -> None:  # fmt: skip
    """Remove streams and all their records."""
    with linked(ctx) as client:
        # All names are looked up first: with a misspelt one, none is removed.
        held = {name: known(client, name).records for name in streams}
        for name, records in held.items():
            what = f"{name} and its {count_text(records, 'record')}"
            confirmed(f"remove {what}", f"{name} was not removed", yes=yes)
            client.remove_stream(name)
            output.done(f"removed {what}", {"removed": name, "records": records}, as_json=as_json)


@app.command(
    "trim",
    epilog="""\b
Examples:
  malamute stream trim orders --before 4711
  malamute stream trim orders --before now-30d --yes    by append time
  malamute stream trim orders --before latest           everything until now""",
)
def trim(
    ctx: typer.Context,
    stream: OneStream,
    before: Annotated[
        str, typer.Option(metavar="POINT", help="First that stays: an OFFSET, a TIME or latest.")
    ],
    yes: Yes = False,
    as_json: output.Json = False,
) -> None:
    """Remove the oldest records of a stream, pinned ones too."""
    from malamute_py.client.position import Position

    point = one_place(before, "a trim ends at")
    with linked(ctx) as client:
        found = known(client, stream)
        offset = point if isinstance(point, int) else client.find_offset(stream, point)
        if offset > found.tail:
            raise CommandFailed(f"{stream} was not trimmed: it ends at {found.tail:,}")
        records = max(0, offset - found.first)  # 0: nothing is lost, and nothing is asked.
        what = f"{count_text(records, 'record')} of {stream} before {offset:,}"
        confirmed(f"remove {what}", f"{stream} was not trimmed", yes=yes or not records)
        # With the uuid: a stream that was made anew since the question is not trimmed.
        client.trim(stream, Position(found.uuid, found.epoch, offset))
    output.done(
        f"removed {what}", {"stream": stream, "before": offset, "records": records},
        as_json=as_json,
    )  # fmt: skip


@app.command(
    "purge",
    epilog="""\b
Examples:
  malamute stream purge orders 'customer.4711.#'
  malamute stream purge orders prefix:customer.4711 --before now-1d --yes

A record that is published later is delivered, whatever its subject.""",
)
def purge(
    ctx: typer.Context,
    stream: OneStream,
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="Of subjects: a topic, or prefix:x.")
    ],
    before: Annotated[
        str, typer.Option(metavar="POINT", help="First that stays: latest, OFFSET or TIME.")
    ] = "latest",
    yes: Yes = False,
    as_json: output.Json = False,
) -> None:
    """Remove the records of some subjects from a stream, pinned ones too."""
    check_kind(pattern)
    point = one_place(before, "a purge ends at")
    with linked(ctx) as client:
        found = known(client, stream)
        what = f"the records of {stream} with subjects {pattern}"
        confirmed(f"remove {what}", f"{stream} was not purged", yes=yes)
        offset = client.purge(found.name, pattern, before=point)
    output.done(
        f"removed {what} before {offset:,}",
        {"stream": stream, "pattern": pattern, "before": offset}, as_json=as_json,
    )  # fmt: skip


@app.command(
    "peek",
    epilog="""\b
Examples:
  malamute stream peek orders                    the last 10 records
  malamute stream peek orders --last 3 --json
  malamute stream peek orders 'eu.*' --time now-1h --count 5""",
)
def peek(
    ctx: typer.Context,
    stream: OneStream,
    pattern: Pattern = "#",
    offset: Annotated[
        int | None, typer.Option("--offset", min=0, help="Begin at this offset.")
    ] = None,
    at: Annotated[
        str | None, typer.Option("--time", metavar="TIME", help="Begin at this append time.")
    ] = None,
    last: Annotated[int | None, typer.Option("--last", min=1, help="The newest so many.")] = None,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="At most so many; default 10.")
    ] = None,
    with_fields: Annotated[bool, typer.Option("--fields", help="Show fields too.")] = False,
    bodies_only: Annotated[bool, typer.Option("--bodies-only", help="Only bodies.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> None:
    """Look at some records of a stream; nothing is consumed."""
    from malamute_py.client.position import AtTime

    check_kind(pattern)
    if sum(given is not None for given in (offset, at, last)) > 1:
        raise CommandFailed("--offset, --time and --last exclude each other; give one", USAGE)
    writer = RecordWriter(as_json=as_json, bodies_only=bodies_only, with_fields=with_fields)
    most = count or last or 10
    with linked(ctx) as client:
        facts = known(client, stream)
        if offset is None and at is None:
            writer.write_records(_newest(client, facts, pattern, min(last or most, most)))
            return
        start = AtTime(time_ms(at)) if at is not None else int(offset or 0)
        with client.subscribe(
            stream, pattern, start=start, until="tail", create=False, credit_records=most,
            on_notice=tell_notice,
        ) as records:  # fmt: skip
            for record in records:
                writer.write_records([record])
                if writer.count >= most:
                    break


def _newest(client: SyncClient, facts: StreamFacts, pattern: str, count: int) -> Iterator[Record]:
    """Yield the newest records that match, oldest first.

    The broker reads forward only: a step reads the last `span` records, and when too few of them
    match, the next one reads again from farther back.
    """
    span = count
    while True:
        notices: list[Notice] = []
        begin = max(facts.first, facts.tail - span)
        if begin >= facts.tail:
            return  # The stream is empty.
        with client.subscribe(
            facts.name, pattern, start=begin, end=facts.tail, create=False,
            on_notice=notices.append,
        ) as records:  # fmt: skip
            kept = deque(records, maxlen=count)
        if len(kept) == count or begin == facts.first:
            # A larger step meets the gaps of the smaller ones again.
            for notice in notices:
                tell_notice(notice)
            yield from kept
            return
        span *= 16  # few steps, however rare the records are that match
