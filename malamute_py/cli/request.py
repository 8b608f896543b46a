"""`malamute request`: ask a service.

Owns the words for the fate of a request. The rule: the exit code tells it: 0 answered, 1 failed
(standard error says why), 4 not answered in time; a request for which no caller waits any more is
cancelled at the broker.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from malamute_protocol.errors import BrokerRefused, Timeout
from malamute_py.cli import complete, inputs, output
from malamute_py.cli.commands import say
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.letters import MailWriter
from malamute_py.cli.linking import linked
from malamute_py.cli.parameters import BodiesOnly, Fields, Properties, Tracing
from malamute_py.cli.progress import Progress
from malamute_py.cli.records import body_of, printable
from malamute_py.cli.values import count_text, duration_ms, pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from malamute_py.client.session.letters import Letter
    from malamute_py.client.sync.client import SyncClient

EPILOG: Final = """\b
Examples:
  malamute request lookup LH123 --subject airline
  malamute request resize --timeout 5m < photo.jpg > small.jpg
  malamute request report 2026-01 --stream       every reply until the last
  malamute request report 2026-01 --reply-to desk
  malamute request remind LH123 --no-wait --delay 2h
  malamute inbox desk                            later: the replies to that

Exit codes: 0 answered, 1 the service gave it up (why is on standard error), 4 no answer within
--timeout. Without a body the whole input is the body. Put one in quotes that begins with -."""

_TIMEOUT: Final = "30s"
_NEVER: Final = ("0", "none", "never")
"""Words of --timeout for a request without one."""
_CONFIRM_MS: Final = 30_000
"""How long a request that is only queued may wait for its confirm."""


def request(
    ctx: typer.Context,
    service: Annotated[
        str,
        typer.Argument(metavar="SERVICE", help="The service; made when new.",
                       autocompletion=complete.services),
    ],
    given: Annotated[
        str | None,
        typer.Argument(metavar="BODY", help="The request; without it, the whole input.",
                       show_default=False),
    ] = None,
    subject: Annotated[
        list[str] | None,
        typer.Option(
            "--subject", "-s", metavar="SUBJECT",
            help="Subject for workers' patterns; again for further keys.",
        ),
    ] = None,
    field: Fields = None,
    properties: Properties = None,
    timeout: Annotated[
        str,
        typer.Option(metavar="DURATION", help="Timeout of the request; 0: none. Default 30s,"
                     " or 0 when only queued."),
    ] = "",
    stream: Annotated[
        bool, typer.Option("--stream", help="Print every reply until the last.")
    ] = False,
    no_wait: Annotated[
        bool,
        typer.Option("--no-wait", help="Only queue it; replies go to your own mailbox."),
    ] = False,
    reply_to: Annotated[
        str,
        typer.Option(metavar="MAILBOX", help="Only queue it; replies go to this mailbox.",
                     autocompletion=complete.mailboxes),
    ] = "",
    key: Annotated[
        str, typer.Option(metavar="TEXT", help="Names the request: it is taken once, however"
                          " often it is sent.")
    ] = "",
    need_workers: Annotated[
        bool,
        typer.Option("--need-workers", help="Fail at once when no worker offers the service."),
    ] = False,
    delay: Annotated[
        str,
        typer.Option(metavar="DURATION", help="No worker gets it before; --timeout begins then."),
    ] = "",
    priority: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=9, help="Before requests of a lower one; 0 to 9."),
    ] = 0,
    bodies_only: BodiesOnly = False,
    tracing: Tracing = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, a line each reply.")] = False,
) -> int:  # fmt: skip
    """Ask a service and print the reply."""
    queued = no_wait or bool(reply_to)  # It is sent only, and another program reads the replies.
    if queued and stream:
        raise CommandFailed("--stream waits for replies, --no-wait and --reply-to do not", USAGE)
    typed = timeout or ("0" if queued else _TIMEOUT)
    timeout_ms = None if typed in _NEVER else duration_ms(typed)
    options: dict[str, Any] = {
        "subject": tuple(subject) if subject and len(subject) > 1 else (subject or [""])[0],
        "fields": pairs(field, "--field") or None,
        "properties": pairs(properties, "--property") or None,
        "key": key.encode() or None,
        "need_workers": need_workers,
        "delay_ms": duration_ms(delay) if delay else 0,
        "priority": priority,
    }
    body = inputs.whole() if given is None else given.encode("utf-8", "surrogateescape")
    # A request may take long: it outlives a restart of the broker.
    with linked(ctx, stays=not queued, traces=True) as client:
        if key:
            inputs.tell_key(client)
        if queued:
            if not reply_to:
                _check_own_mailbox(client)
            _submit(client, service, body, options, timeout_ms, reply_to, as_json)
            return 0
        writer = MailWriter(as_json=as_json, bodies_only=bodies_only)
        # A single reply is printed without a line end of ours; of several each gets a line.
        show = writer.write_all if stream or as_json else _show_bodies
        _ask(client, service, body, {**options, "timeout_ms": timeout_ms}, stream, show, typed)
    return 0


def _check_own_mailbox(client: SyncClient) -> None:
    """Raise CommandFailed for a client without an identity: replies have nowhere to go."""
    if not client.identity:
        raise CommandFailed(
            "where are the replies to go? this client has no identity, and so no mailbox of its"
            " own; name one with --reply-to",
            USAGE,
        )


def _submit(
    client: SyncClient,
    service: str,
    body: bytes,
    options: dict[str, Any],
    timeout_ms: int | None,
    reply_to: str,
    as_json: bool,
) -> None:
    """Send a request whose replies another program reads; print its number once it is confirmed.

    reply_to: the mailbox that they go to; empty: the client's own.
    """
    told = client.submit(
        service, body, request_timeout_ms=timeout_ms, reply_to=reply_to,
        timeout_ms=_CONFIRM_MS, **options,
    )  # fmt: skip
    if not as_json and not output.on_terminal():
        print(f"{service}\t{told.offset}\t{told.level}")
        return
    again = "; it was sent before, and is there once" if told.duplicate else ""
    output.done(
        f"{service} request {told.offset}, {told.level}{again}",
        {
            "service": service, "number": told.offset, "level": told.level,
            "time": told.append_time_ms, "duplicate": told.duplicate, "reply_to": reply_to,
        },
        as_json=as_json,
    )  # fmt: skip


def _show_bodies(replies: list[Letter]) -> None:
    """Print a reply: a body of bytes unchanged in a pipe; on a terminal in lines, escaped and cut.

    body_of() joins the parts of a list with tabs and writes a typed row as JSON.
    """
    for reply in replies:
        body = body_of(reply)
        if output.on_terminal():
            body = b"".join(printable(line).encode() + b"\n" for line in body.splitlines())
        sys.stdout.buffer.write(body)
        sys.stdout.buffer.flush()


def _ask(
    client: SyncClient,
    service: str,
    body: bytes,
    options: dict[str, Any],
    stream: bool,
    show: Callable[[list[Any]], None],
    typed: str,
) -> None:
    """Send a request and show each reply as it comes.

    stream: take all replies until the last; False: one. typed: --timeout as it was typed, for the
    error. Raises CommandFailed: the service gave it up; Timeout: not all replies came in time.
    """
    from malamute_py.client.session.letters import RequestFailed

    began = time.monotonic()
    count = 0
    try:
        with Progress(f"waiting for {service}") as progress:
            replies: Iterator[Letter] = (
                client.requests(service, body, **options) if stream
                else iter([client.request(service, body, **options)])
            )  # fmt: skip
            for reply in replies:
                if reply.why:  # The request was completed without a further reply.
                    break
                progress.stop()  # Its line would stand in the reply.
                show([reply])
                count += 1
    except RequestFailed as error:
        kind, _, words = error.why.partition(":")  # As `failed: the worker's own words`.
        raise CommandFailed(f"{service} {_failed(kind)}{words and ':'}{words}") from None
    except Timeout:
        raise Timeout(_why_late(client, service, typed, count)) from None
    if not count:
        say(f"{service} has done it and replied nothing")
    elif stream and output.on_terminal():
        text = f"{count:,} {'reply' if count == 1 else 'replies'}"
        say(f"{text} in {time.monotonic() - began:.3g} s")


def _failed(kind: str) -> str:
    """Return what became of a request without an answer. kind: the broker's word for it."""
    return {
        "failed": "gave it up",
        "attempts": "gave it up after too many tries",
        "cancelled": "will not answer: it was cancelled",
        "removed": "was removed",
    }.get(kind, f"will not answer ({kind})")


def _why_late(client: SyncClient, service: str, typed: str, replies: int) -> str:
    """Return the line for a request that timed out, with what the service's state says about it.

    replies: how many came before.
    """
    text = f"{service}: no answer within {typed}"
    if replies:
        return f"{service}: the last reply did not come within {typed}; {replies} came"
    try:
        facts = client.service_info(service)
    except BrokerRefused:
        return text
    if not facts.offers:
        return f"{text}: no worker offers it; `malamute work {service} -- COMMAND` does"
    if facts.waiting:
        workers = count_text(facts.offers, "worker")
        return f"{text}: {count_text(facts.waiting, 'request')} waiting for {workers}"
    return f"{text}; `malamute service info {service}` shows who works on what"
