"""`malamute send`: put messages into a mailbox.

Owns the words for one message and for many. The rules: a message counts as sent when the broker has
confirmed it; the command waits for a full mailbox, and says so; input is read as `pub` reads it.
Source: inputs.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from malamute_protocol.errors import MalamuteError, Timeout
from malamute_py.cli import complete, inputs, output
from malamute_py.cli.commands import say
from malamute_py.cli.failures import INTERRUPTED, USAGE, CommandFailed
from malamute_py.cli.linking import check_unconfirmed, linked
from malamute_py.cli.parameters import (
    Confirm,
    Expires,
    Fields,
    JsonLines,
    Properties,
    Subject,
    SubjectFromName,
    Tracing,
)
from malamute_py.cli.progress import Progress
from malamute_py.cli.values import (
    count_text,
    duration_ms,
    duration_text,
    later_ms,
    now_ms,
    size_text,
    time_text,
)

if TYPE_CHECKING:
    from malamute_py.client.position import Confirmation
    from malamute_py.client.sync.client import SyncClient

EPILOG: Final = """\b
Examples:
  malamute send ann 'lunch at one?' --subject lunch
  malamute send ann 'back at work' --in 8h --expires 1d
  malamute send ann --whole --key order-4711 < order.json
  malamute send crew --json-lines < messages.jsonl
  malamute send archive --file *.pdf --subject-from-name

Without a body each line of the input is a message. JSON lines have the names that
`malamute inbox --json` prints: body (or body_base64), subject, keys, fields, expires,
properties. In a pipe the answer is: mailbox, number, level; for many: mailbox, how many,
level, first and last number."""

_TIMEOUT: Final = "30s"


def send(
    ctx: typer.Context,
    mailbox: Annotated[
        str,
        typer.Argument(metavar="MAILBOX", help="The mailbox; made when new.",
                       autocompletion=complete.mailboxes),
    ],
    bodies: Annotated[
        list[str] | None,
        typer.Argument(metavar="BODY", help="One message; without it, the lines of the input.",
                       show_default=False),
    ] = None,
    subject: Subject = None,
    field: Fields = None,
    properties: Properties = None,
    expires: Expires = None,
    deliver_at: Annotated[
        str | None, typer.Option("--at", metavar="TIME", help="Deliver them then, not before.")
    ] = None,
    deliver_in: Annotated[
        str | None, typer.Option("--in", metavar="DURATION", help="Deliver them after so long.")
    ] = None,
    priority: Annotated[
        int, typer.Option(min=-128, max=127, help="Higher goes first.", metavar="NUMBER")
    ] = 0,
    key: Annotated[
        str, typer.Option(metavar="TEXT", help="Names one message: it is taken once, however often"
                          " it is sent.")
    ] = "",
    confirm: Confirm = "default",
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long to try when the mailbox is full.")
    ] = _TIMEOUT,
    whole: Annotated[
        bool, typer.Option("--whole", help="The whole input is one message.")
    ] = False,
    json_lines: JsonLines = False,
    files: Annotated[
        bool, typer.Option("--file", "-F", help="The arguments are files, each one message.")
    ] = False,
    subject_from_name: SubjectFromName = False,
    tracing: Tracing = None,
    as_json: output.Json = False,
) -> int:  # fmt: skip
    """Send messages to a mailbox: an argument, lines, JSON lines or files."""
    given = bodies or []
    inputs.check_sources(given, files=files, json_lines=json_lines, from_name=subject_from_name,
                         whole=whole)  # fmt: skip
    one = whole or (bool(given) and not files)
    if key and not one:
        raise CommandFailed(
            "--key names one message; give it as an argument or with --whole", USAGE
        )
    if deliver_at is not None and deliver_in is not None:
        raise CommandFailed("--at and --in exclude each other; give one", USAGE)
    defaults = inputs.Defaults(subject, field, properties, expires=expires)
    run = _Sending(mailbox, confirm, priority, _delivery(deliver_at, deliver_in), timeout, as_json)
    with linked(ctx, stays=not given, traces=True) as client:
        if key:
            inputs.tell_key(client)
        if one:
            body = given[0].encode("utf-8", "surrogateescape") if given else inputs.whole()
            run.one(client, body, defaults, key.encode())
            return 0
        source = inputs.source_of(given, defaults, files=files, json_lines=json_lines,
                                  from_name=subject_from_name, what="message")  # fmt: skip
        return run.many(client, source, len(given) if files else None)


def _delivery(at: str | None, after: str | None) -> int:
    """Return the time in ms before which a message is not delivered; 0: at once.

    at, after: --at and --in, of which one may be given.
    """
    if after is not None:
        return now_ms() + duration_ms(after)
    return 0 if at is None else later_ms(at)


class _Sending:
    """One command's messages on their way: the options that all of them have, and the counts."""

    def __init__(
        self, mailbox: str, confirm: str, priority: int, deliver_at_ms: int, timeout: str,
        as_json: bool,
    ) -> None:  # fmt: skip
        self._mailbox = mailbox
        self._confirm = confirm
        self._options: dict[str, Any] = {
            "confirm": confirm, "priority": priority,
            "deliver_at_ms": deliver_at_ms or None, "timeout_ms": duration_ms(timeout),
        }  # fmt: skip
        self._at_ms = deliver_at_ms
        self._timeout = timeout
        self._json = as_json
        self._count = 0
        self._bytes = 0
        self._first = self._last = -1
        """Numbers of the first and last message; -1: none was told."""
        self._level = confirm
        self._began = time.monotonic()

    def one(self, client: SyncClient, body: bytes, defaults: inputs.Defaults, key: bytes) -> None:
        """Send one message and print its number."""
        options = defaults.options()
        try:
            told = client.send(
                self._mailbox, body, subject=defaults.subject, key=key or None,
                **options, **self._options,
            )  # fmt: skip
        except Timeout:
            raise self._not_taken() from None
        if told.level == "none":
            check_unconfirmed(client, self._mailbox, client.mailbox_info)
        if not self._json and not output.on_terminal():
            print(f"{self._mailbox}\t{told.offset}\t{told.level}")
            return
        text = f"{self._mailbox} message {told.offset}, {_promised(told.level)}"
        if told.duplicate:
            text += "; it was sent before, and is there once"
        output.done(
            text + self._when(),
            {
                "mailbox": self._mailbox, "number": told.offset, "level": told.level,
                "time": told.append_time_ms, "duplicate": told.duplicate,
            },
            as_json=self._json,
        )  # fmt: skip

    def many(self, client: SyncClient, source: Iterator[inputs.Piece], total: int | None) -> int:
        """Send all of the source, a piece after the other is confirmed, and report; the exit code.

        total: messages, if known, for the progress bar. Ctrl-C, or input that cannot be read, ends
        it; what was sent before is told.
        """
        interrupted = False
        unreadable: CommandFailed | OSError | None = None
        warned = False
        tried = 0  # Messages of the piece under way: after a failure, some of them may be there.
        with Progress("sending", total=total, shown=not sys.stdin.isatty()) as progress:
            try:
                for bodies, options in source:
                    if options.pop("client_time_ms", None) is not None and not warned:
                        warned = True
                        say("client_time is left out: messages have none")
                    tried = len(bodies)
                    self._note(
                        client.send_many(self._mailbox, bodies, **options, **self._options), bodies
                    )
                    progress.update(self._count, self._pace())
            except KeyboardInterrupt:
                interrupted = True
            except Timeout:
                self._tell_partly(tried)
                raise self._not_taken() from None
            except MalamuteError:
                self._tell_partly(tried)
                raise
            except (CommandFailed, OSError) as error:
                unreadable = error  # Messages before it are told of first.
        if unreadable is None or self._count:
            self._tell()
        if self._confirm == "none" and not interrupted:
            check_unconfirmed(client, self._mailbox, client.mailbox_info, beside=unreadable)
        if unreadable is not None:
            raise unreadable
        return INTERRUPTED if interrupted else 0

    def _note(self, told: list[Confirmation], bodies: list[bytes]) -> None:
        """Count messages that were taken. told: their confirmations."""
        self._count += len(bodies)
        self._bytes += sum(map(len, bodies))
        for each in told:
            self._level = each.level
            if self._first < 0:
                self._first = each.offset
            self._last = each.offset + each.count - 1

    def _not_taken(self) -> Timeout:
        """Return the error for messages that the mailbox did not take in time."""
        return Timeout(
            f"{self._mailbox}: not taken within {self._timeout}: it is full, or the broker does"
            f" not answer; `malamute mailbox info {self._mailbox}` tells, --timeout waits longer"
        )

    def _tell_partly(self, tried: int) -> None:
        """Report a partial failure. tried: messages under way at the failure; some may be there."""
        if self._count:
            say(f"{count_text(self._count, 'message')} confirmed, to number {self._last}")
        if tried > 1:
            say(
                f"of the {'next' if self._count else 'first'} {count_text(tried, 'message')} some"
                f" may be in the mailbox; `malamute mailbox peek {self._mailbox}` shows"
            )

    def _pace(self) -> str:
        """Return how much was sent and how fast, for the progress line."""
        spent = time.monotonic() - self._began
        rate = self._count / spent if spent > 0 else 0.0
        return f"{self._count:,} messages, {size_text(self._bytes)}, {rate:,.0f}/s"

    def _when(self) -> str:
        return f", to be delivered {time_text(self._at_ms)}" if self._at_ms else ""

    def _tell(self) -> None:
        """Print how many messages were sent, their numbers, and how long that took."""
        spent_ms = round((time.monotonic() - self._began) * 1000)
        if not self._json and not output.on_terminal():
            cells = [self._mailbox, self._count, self._level]
            if self._first >= 0:
                cells += [self._first, self._last]
            print("\t".join(map(str, cells)))
            return
        numbers = "" if self._first < 0 else f" (numbers {self._first} to {self._last})"
        output.done(
            f"{count_text(self._count, 'message')} to {self._mailbox}{numbers},"
            f" {size_text(self._bytes)} in {duration_text(spent_ms)}{self._when()}",
            {
                "mailbox": self._mailbox, "messages": self._count, "bytes": self._bytes,
                "level": self._level, "first": self._first, "last": self._last,
                "duration_ms": spent_ms,
            },
            as_json=self._json,
        )  # fmt: skip


def _promised(level: str) -> str:
    return "nothing was promised" if level == "none" else level
