"""`malamute sub`: records as they come, or from any point on.

Owns the words for start points and for what a reader has to be told. The rules: gaps and
rewinds are said on standard error, never silently passed over; Ctrl-C ends in order and
says where to go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from malamute_protocol.errors import RequestRejected, Timeout
from malamute_py.cli import complete, output
from malamute_py.cli.commands import say
from malamute_py.cli.failures import INTERRUPTED, USAGE, CommandFailed
from malamute_py.cli.linking import linked
from malamute_py.cli.records import RecordWriter
from malamute_py.cli.values import TIMES, count_text, duration_ms, is_offset, time_ms

if TYPE_CHECKING:
    from malamute_py.client.facts import StreamFacts
    from malamute_py.client.position import StartPoint
    from malamute_py.client.reading import Notice
    from malamute_py.client.sync import SyncClient, SyncSubscription

EPILOG: Final = """\b
Examples:
  malamute sub orders                              what comes from now on
  malamute sub orders 'orders.*.eu' --start earliest
  malamute sub orders fields:region=eu --start now-1h --json
  malamute sub orders --until-tail > bodies.txt    all there is, then end

Patterns: a.*.# (parts), prefix:a., regex:^a.+, fields:k=v,l (all), any:k=v,l (one), #."""

_KINDS: Final = ("prefix", "regex", "fields", "any")
PATTERN_HELP: Final = "Which records: a.*.#, prefix:a., regex:^a, fields:k=v, any:k,l"


def sub(
    ctx: typer.Context,
    stream: Annotated[
        str, typer.Argument(metavar="STREAM", help="The stream.", autocompletion=complete.streams)
    ],
    pattern: Annotated[str, typer.Argument(help=PATTERN_HELP)] = "#",
    start: Annotated[
        str | None,
        typer.Option(
            metavar="POINT",
            help="earliest, latest (default), last (newest of each subject), an OFFSET or TIME.",
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="End after so many records.")
    ] = None,
    until_tail: Annotated[
        bool, typer.Option("--until-tail", help="End at what is the tail now.")
    ] = False,
    wait: Annotated[
        str | None,
        typer.Option("--timeout", metavar="DURATION", help="End when none comes for so long."),
    ] = None,
    durable: Annotated[
        bool, typer.Option("--durable", help="Only what no power loss can take back.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="End at a gap (exit code 1).")] = False,
    create: Annotated[
        bool, typer.Option("--create", help="Make the stream when there is none.")
    ] = False,
    bodies_only: Annotated[
        bool, typer.Option("--bodies-only", help="Only bodies, on a terminal too.")
    ] = False,
    with_fields: Annotated[
        bool, typer.Option("--fields", help="Fields too; in a pipe: subject, fields, body.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> int:
    """Subscribe to a stream and print its records."""
    check_kind(pattern)
    begin = start_point(start or ("earliest" if until_tail else "latest"))
    timeout_ms = None if wait is None else duration_ms(wait)
    writer = RecordWriter(as_json=as_json, bodies_only=bodies_only, with_fields=with_fields)
    with linked(ctx, stays=True) as client:
        if not create:
            known(client, stream)
        records = client.subscribe(
            stream, pattern, start=begin,
            visibility="durable" if durable else "live",
            until="tail" if until_tail else "",
            create=create, strict=strict, on_notice=tell_notice,
            credit_records=min(count or 1 << 17, 1 << 17),
        )  # fmt: skip
        with records:
            try:
                records.accepted()
                if output.on_terminal() and not records.ended and not until_tail:
                    say(f"{stream}: listening; end with Ctrl-C")
                _print(records, writer, count, timeout_ms)
            except KeyboardInterrupt:
                place = records.position
                if output.on_terminal() and place is not None:
                    say(f"{count_text(writer.count, 'record')}; go on with --start {place.next}")
                return INTERRUPTED
            except Timeout:
                raise Timeout(f"{stream}: no record came within {wait}") from None
    return 0


def _print(
    records: SyncSubscription, writer: RecordWriter, count: int | None, timeout_ms: int | None
) -> None:
    from malamute_py.client.reading import cut

    while (batch := records.next_batch(timeout_ms)) is not None:
        left = None if count is None else count - writer.count
        writer.write(batch if left is None or len(batch) <= left else cut(batch, 0, left))
        if count is not None and writer.count >= count:
            return


def known(client: SyncClient, stream: str) -> StreamFacts:
    """Facts about a stream. Raises CommandFailed, with the nearest name, when there is none."""
    try:
        return client.stream_info(stream)
    except RequestRejected as error:
        if error.code != "unknown_stream":
            raise
    import difflib

    near = difflib.get_close_matches(stream, [each.name for each in client.list_streams()], n=1)
    hint = f"did you mean {near[0]}?" if near else (
        "`malamute stream ls` lists them; publishing to it makes it, or"
        f" `malamute stream create {stream}`"
    )  # fmt: skip
    raise CommandFailed(f"there is no stream {stream}; {hint}")


def check_kind(pattern: str) -> None:
    """Say so when a topic pattern may have been meant as another kind: regexp:x, glob:x."""
    import difflib

    kind, colon, rest = pattern.partition(":")
    if not colon or kind in _KINDS or not kind.isalpha():
        return
    near = difflib.get_close_matches(kind.lower(), _KINDS, n=1)
    hint = f"did you mean {near[0]}:{rest}?" if near else f"other kinds are {', '.join(_KINDS)}"
    say(f"{pattern!r} is taken as a topic with a colon in it; {hint}")


def start_point(text: str) -> StartPoint:
    """A start point as typed. Raises CommandFailed."""
    from malamute_py.client.position import AtTime, LastPerSubject, Position

    lowered = text.strip().lower()
    if lowered == "earliest":
        return "earliest"
    if lowered == "latest":
        return "latest"
    if lowered == "last":
        return LastPerSubject()
    if is_offset(text):
        return int(text)
    if text.count("/") == 2:
        return Position.parse(text)
    try:
        return AtTime(time_ms(text))
    except CommandFailed:
        raise CommandFailed(
            f"{text!r} is no place to start; write earliest, latest, last, an offset, or a time:"
            f" {TIMES}",
            USAGE,
        ) from None


def tell_notice(notice: Notice) -> None:
    """Say on standard error what a reader has to know."""
    from malamute_protocol.errors import CODES
    from malamute_py.client.reading import GapNotice, RewoundNotice

    if isinstance(notice, GapNotice):
        why = notice.reason or CODES.get(notice.code, notice.code)
        lost = count_text(notice.to_offset - notice.from_offset, "record")
        say(f"gap: offsets {notice.from_offset} to {notice.to_offset - 1} ({lost}) are gone: {why}")
    elif isinstance(notice, RewoundNotice):
        say(
            f"rewound: the log ends at {notice.to_offset}, before offset {notice.from_offset}: it"
            " never came so far, or a power loss took its tail; going on from there"
        )
