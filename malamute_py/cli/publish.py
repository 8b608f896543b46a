"""`malamute pub`: publish an argument, lines, JSON lines or files.

Owns the one publisher through which the input goes. The rules: input is published as it arrives and
in as few batches as it needs; an interruption waits for what was taken; a line that cannot be read
stops the command, after everything before it. Source: inputs.py reads.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from malamute_protocol.errors import MalamuteError
from malamute_py.cli import inputs, output
from malamute_py.cli.commands import say
from malamute_py.cli.failures import INTERRUPTED, CommandFailed
from malamute_py.cli.linking import LAST_WAIT_MS, check_unconfirmed, linked
from malamute_py.cli.parameters import (
    Confirm,
    Expires,
    Fields,
    JsonLines,
    NewStream,
    Properties,
    Subject,
    SubjectFromName,
    Tracing,
)
from malamute_py.cli.progress import Progress
from malamute_py.cli.values import count_text, duration_text, size_text

if TYPE_CHECKING:
    from malamute_py.client.sync.client import SyncBulkPublisher, SyncClient
    from malamute_py.client.words import ConfirmAt

EPILOG: Final = """\b
Examples:
  malamute pub orders 'one record' --subject orders.new --field region=eu
  tail -f app.log | malamute pub logs --subject logs.app
  malamute pub events --json-lines < events.jsonl
  malamute pub documents --file *.pdf --subject-from-name

JSON lines are objects with body (or body_base64), subject, keys, fields, client_time, expires
and properties, as `malamute sub --json` prints them."""


def pub(
    ctx: typer.Context,
    stream: NewStream,
    bodies: Annotated[
        list[str] | None,
        typer.Argument(metavar="BODY", help="One record; without it, the lines of the input.",
                       show_default=False),
    ] = None,
    subject: Subject = None,
    field: Fields = None,
    properties: Properties = None,
    client_time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The producer's time: now, now-1h, ISO 8601, ms."),
    ] = None,
    expires: Expires = None,
    confirm: Confirm = "default",
    codec: Annotated[
        Literal["none", "gzip", "snappy", "lz4", "zstd"],
        typer.Option(metavar="CODEC", help="Compress bodies: gzip, snappy, lz4, zstd."),
    ] = "none",
    json_lines: JsonLines = False,
    files: Annotated[
        bool, typer.Option("--file", "-F", help="The arguments are files, each one record.")
    ] = False,
    subject_from_name: SubjectFromName = False,
    tracing: Tracing = None,
    as_json: output.Json = False,
) -> int:  # fmt: skip
    """Publish records: an argument, lines, JSON lines or files."""
    given = bodies or []
    inputs.check_sources(given, files=files, json_lines=json_lines, from_name=subject_from_name)
    defaults = inputs.Defaults(subject, field, properties, client_time, expires, codec)
    # A command that reads its input goes on when a lost link is back.
    with linked(ctx, stays=not given, traces=True) as client:
        if given and not files:
            # As bytes as they were typed, also where they are no UTF-8.
            _one(client, stream, given[0].encode("utf-8", "surrogateescape"), defaults, confirm,
                 as_json)  # fmt: skip
            return 0
        run = _Publishing(client, stream, confirm, as_json)
        source = inputs.source_of(given, defaults, files=files, json_lines=json_lines,
                                  from_name=subject_from_name, what="record")  # fmt: skip
        return run.finish(source, len(given) if files else None)


def _one(
    client: SyncClient,
    stream: str,
    body: bytes,
    defaults: inputs.Defaults,
    confirm: ConfirmAt,
    as_json: bool,
) -> None:  # fmt: skip
    """Publish one record and print where it is, or that nothing was promised."""
    confirmed = client.publish_many(
        stream, [body], subjects=[defaults.subject], confirm=confirm, **defaults.options()
    )[0]
    if confirmed.level == "none":
        check_unconfirmed(client, stream, client.stream_info)
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


class _Publishing:
    """One publisher over all of the input."""

    def __init__(self, client: SyncClient, stream: str, confirm: ConfirmAt, as_json: bool) -> None:
        self._client = client
        self._stream = stream
        self._confirm = confirm
        self._json = as_json
        self._bytes = 0
        self._began = time.monotonic()

    def finish(self, source: Iterator[inputs.Piece], total: int | None) -> int:
        """Publish all of the source, wait for its confirms, and report; return the exit code.

        total: records, if known, for the progress bar. Ctrl-C, or input that cannot be read, ends
        the reading; what was taken before is still confirmed and told.
        """
        interrupted = False
        unreadable: CommandFailed | OSError | None = None
        # keep=False: it counts confirms, and keeps none of them for a caller.
        window = self._client.publisher(self._stream, confirm=self._confirm, keep=False)
        try:
            # A person who types the input sees no progress line between its lines.
            with Progress("publishing", total=total, shown=not sys.stdin.isatty()) as progress:
                try:
                    for bodies, options in source:
                        window.publish_many(bodies, **options)
                        self._bytes += sum(map(len, bodies))
                        progress.update(window.published, self._pace(window))
                except KeyboardInterrupt:
                    interrupted = True
                except MalamuteError:
                    raise  # Timeout and ConnectionLost are OSErrors, too.
                except (CommandFailed, OSError) as error:
                    unreadable = error  # Records before it are still to be confirmed.
                progress.title("confirming")
                window.wait(LAST_WAIT_MS if interrupted else None)
        except (MalamuteError, KeyboardInterrupt):
            say(f"{count_text(window.confirmed, 'record')} of {window.published:,} confirmed")
            raise
        if unreadable is None or window.published:
            self._tell(window)
        if self._confirm == "none" and not interrupted:
            check_unconfirmed(
                self._client, self._stream, self._client.stream_info, beside=unreadable
            )
        if unreadable is not None:
            raise unreadable
        return INTERRUPTED if interrupted else 0

    def _pace(self, window: SyncBulkPublisher) -> str:
        """Return how much was published and how fast, for the progress line."""
        spent = time.monotonic() - self._began
        rate = window.published / spent if spent > 0 else 0.0
        return f"{window.published:,} records, {size_text(self._bytes)}, {rate:,.0f}/s"

    def _tell(self, window: SyncBulkPublisher) -> None:
        """Print how many records were published and confirmed, and how long that took."""
        spent_ms = round((time.monotonic() - self._began) * 1000)
        if not self._json and not output.on_terminal():
            print(f"{self._stream}\t{window.published}\t{window.level or 'none'}")
            return
        output.done(
            f"{count_text(window.published, 'record')} to {self._stream},"
            f" {size_text(self._bytes)} in {duration_text(spent_ms)}",
            {
                "stream": self._stream, "records": window.published,
                "confirmed": window.confirmed, "bytes": self._bytes, "confirm": self._confirm,
                "level": window.level or "none", "duration_ms": spent_ms,
            },
            as_json=self._json,
        )  # fmt: skip
