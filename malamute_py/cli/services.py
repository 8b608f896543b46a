"""`malamute service ...`: list, show, peek, requeue, edit, remove.

Owns the words for queues of requests and for the workers that hold them. Source: SPEC.md, section
4.7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from malamute_protocol.errors import BrokerRefused
from malamute_py.cli import complete, output
from malamute_py.cli.absent import absent, made_or_edited
from malamute_py.cli.agreed import Yes, agreed
from malamute_py.cli.columns import (
    age,
    counted,
    dead,
    figure,
    left,
    moment,
    read,
    red,
    sender,
    sized,
)
from malamute_py.cli.commands import group
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.linking import linked
from malamute_py.cli.mailboxes import beside, made, since
from malamute_py.cli.output import Cell, Column
from malamute_py.cli.parameters import MemoryOnCreate, Prefix
from malamute_py.cli.progress import watched
from malamute_py.cli.settings import Description, LevelOption, Replace, Settings, shown, wanted
from malamute_py.cli.values import count_text

if TYPE_CHECKING:
    from malamute_py.client.facts import PeekedRequest, ServiceFacts
    from malamute_py.client.sync.client import SyncClient

app = group("service")

Name = Annotated[
    str, typer.Argument(metavar="SERVICE", help="The service.", autocompletion=complete.services)
]
Names = Annotated[
    list[str],
    typer.Argument(metavar="SERVICE", help="Which ones.", autocompletion=complete.services),
]


def known(client: SyncClient, service: str, following: str = "") -> ServiceFacts:
    """Return facts about a service. Raises CommandFailed, with the nearest name: there is none.

    following: the advice how it is made; empty: by a request or a worker.
    """
    return absent(
        lambda: client.service_info(service),
        "service",
        service,
        lambda: [each.name for each in client.list_services()],
        following or f"a request or a worker makes it: malamute work {service} -- COMMAND",
    )


@app.command(
    "ls",
    epilog="""\b
Examples:
  malamute service ls
  malamute service ls render --json

In a pipe a line has, with tabs between: name, waiting, in hand, delayed, dead,
workers, requests that they would take now, bytes, time of the oldest that waits
in milliseconds (0: none). --json names them.""",
)
def ls(
    ctx: typer.Context,
    prefix: Prefix = "",
    as_json: output.Json = False,
) -> None:
    """List the services."""
    with linked(ctx) as client:
        found = client.list_services(prefix)
    output.entries(
        [
            Column("name", "Service", style="cyan"),
            Column(
                "waiting", "Waiting", right=True,
                # Marked where no worker is there to take them.
                cell=lambda each: counted(each.waiting, "" if each.offers else "yellow"),
            ),
            figure("held", "In hand"),
            figure("delayed", "Delayed"),
            figure("dead", "Dead", red),
            figure("offers", "Workers"),
            figure("credit", "Ready for"),
            figure("bytes", "Bytes", sized, spare=True),
            figure("oldest_ms", "Oldest", age),
        ],
        found,
        as_json=as_json,
        empty=(
            f"no service begins with {prefix}" if prefix else
            "no services yet; a worker makes one: malamute work NAME -- COMMAND"
        ),
    )  # fmt: skip


@app.command(
    "info",
    epilog="""\b
Examples:
  malamute service info render
  malamute service info render --json | jq .workers""",
)
def info(ctx: typer.Context, service: Name, as_json: output.Json = False) -> None:
    """Show one service: the requests that wait, and those that workers hold."""
    with linked(ctx) as client:
        _show(known(client, service), as_json)


def _show(found: ServiceFacts, as_json: bool) -> None:
    """Print the facts of one service, then its workers: for `info`, and `edit` with --json."""
    facts: dict[str, Any] = {
        "name": Cell(found.name, found.name, "bold cyan"),
        "waiting": found.waiting,
        "held": found.held,
        "delayed": found.delayed,
        "bytes": sized(found.bytes),
        "oldest_ms": since(found.oldest_ms),
        "offers": found.offers,
        "credit": found.credit,
        "dead": dead(found),
        "dead_letters": found.dead_letters,
        # The cell `dead` has these mailboxes for a person.
        **({} if output.on_terminal() and not as_json else {"dead_in": found.dead_in}),
        **made(found.created_ms, found.by),
        **beside(found.more, as_json),
        "attempts": _attempts(found),
        "settings": shown(found.settings, _ZERO),
    }  # fmt: skip
    if as_json:
        output.facts({**facts, "workers": output.objects(_WORKERS, found.workers)}, as_json=True)
        return
    output.facts(facts, as_json=False)
    output.entries(
        _WORKERS,
        found.workers,
        as_json=False,
        empty="nothing is in a worker's hand",
        mark="worker",
    )


def _link(number: int) -> Cell:
    """Return the cell of a worker's link; 0: it is away, and its requests wait for it."""
    return Cell(number, str(number)) if number else Cell(0, "away", "yellow")


_WORKERS: Final = (
    read("holder", "Worker", sender, style="cyan"),
    figure("link", "Link", _link),
    figure("held", "In hand"),
    figure("received", "Received", spare=True),
    figure("since_ms", "For", age),
    figure("lease_until_ms", "Lease left", left),
    figure("attempts", "Most attempts"),
)

# Words for a setting that is 0.
_ZERO = {
    "max_requests": "the broker's", "max_bytes": "the broker's", "attempts_max": "the broker's",
    "lease_ms": "the broker's", "backoff_ms": "the broker's", "backoff_max_ms": "the broker's",
    "timeout_ms": "none",
}  # fmt: skip


def _attempts(found: ServiceFacts) -> Cell:
    """Return how many of the requests in the queue were handed out how often, in words."""
    counts = [
        f"{count:,} {'not yet' if not times else 'once' if times == 1 else f'{times} times'}"
        for times, count in found.attempts
    ]
    text = f"handed out: {', '.join(counts)}" if counts else "-"
    attempts = {str(times): count for times, count in found.attempts}
    return Cell(attempts, text, "" if counts else "dim")


@app.command(
    "peek",
    epilog="""In a pipe a line has, with tabs between: number, subject, requester, time at which it
was put, attempts, state (waiting, delayed, held), worker that has it, since when, end of its lease,
deadline, time before which no worker gets it, priority; times in milliseconds, 0: none. --json
names them.

\b
Examples:
  malamute service peek lookup                the 20 oldest requests
  malamute service peek lookup --after 4711   those after that number""",
)
def peek(
    ctx: typer.Context,
    service: Name,
    count: Annotated[
        int, typer.Option("--count", "-n", metavar="N", min=1, help="At most so many.")
    ] = 20,
    after: Annotated[
        int, typer.Option(metavar="NUMBER", help="Only those after this number.")
    ] = -1,
    as_json: output.Json = False,
) -> None:  # fmt: skip
    """Look at requests without taking them: who asked, and who has them in hand."""
    found: list[PeekedRequest] = []
    with linked(ctx) as client:
        known(client, service)
        while len(found) < count:  # The broker tells of a page at a time.
            last = found[-1].number if found else after
            page = client.peek_requests(service, after=last, limit=count - len(found))
            if not page:
                break
            found += page
    output.entries(
        [
            Column("number", "Number", right=True),
            Column("subject", "Subject", style="cyan"),
            read("sender", "Requester", sender, style="green"),
            figure("at_ms", "Age", age),
            figure("attempts", "Attempts"),
            Column("state", "State"),
            read("holder", "In hand of", sender),
            figure("since_ms", "For", age),
            read("lease_until_ms", "Lease until", moment, spare=True),
            read("deadline_ms", "Deadline", moment, spare=True),
            read("not_before_ms", "Not before", moment, spare=True),
            Column("priority", "Priority", right=True, spare=True),
        ],
        found,
        as_json=as_json,
        empty=f"{service} has no requests" + (" after that number" if after >= 0 else ""),
    )  # fmt: skip


@app.command(
    "requeue",
    epilog="""\b
Examples:
  malamute service requeue lookup         all dead letters of the service
  malamute service requeue lookup 17 23   these dead letters, or requests
  malamute mailbox peek lookup.dead       shows their numbers, and why""",
)
def requeue(
    ctx: typer.Context,
    service: Name,
    numbers: Annotated[
        list[int] | None,
        typer.Argument(metavar="NUMBER", help="Their numbers; default: all dead letters.",
                       show_default=False),
    ] = None,
    as_json: output.Json = False,
) -> None:  # fmt: skip
    """Put dead letters, or requests that workers hold, back into the queue."""
    with linked(ctx) as client:
        found = known(client, service)
        try:
            count = watched(
                f"requeuing {service}", max(1, len(numbers or ()) or found.dead),
                lambda: client.requeue(service, numbers or ()),
                lambda: client.service_info(service).dead,
            )  # fmt: skip
        except BrokerRefused as error:
            # All of none were asked for, or the mailbox has dead letters of others alone.
            if numbers or error.code != "unknown_request":
                raise
            count = 0
    left = len(set(numbers or ())) - count if numbers else 0
    text = f"{count_text(count, 'request')} back in the queue of {service}"
    if left > 0:
        text += (
            f"; {left} of these numbers stay: neither dead letters of {service} nor requests in"
            " hand, or a reader holds them"
        )
    elif not count:
        text = f"{service} has no dead letters"
    told = {"service": service, "requeued": count, **({"left": left} if numbers else {})}
    output.done(text, told, as_json=as_json)


@app.command(
    "edit",
    epilog="""\b
Examples:
  malamute service edit lookup --lease 30s --attempts 5 --backoff 1s
  malamute service edit lookup --dead-letters ops --timeout 1h""",
)
def edit(
    ctx: typer.Context,
    service: Name,
    attempts: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Hand-outs after which a request is a dead letter."),
    ] = None,
    lease: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="A worker's silence after which another gets a request."
        ),
    ] = None,
    backoff: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Pause before another try; doubles each time."),
    ] = None,
    backoff_max: Annotated[
        str | None, typer.Option(metavar="DURATION", help="The longest such pause.")
    ] = None,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Timeout of requests that name none.")
    ] = None,
    max_requests: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Refuse (wait) beyond so many.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Refuse (wait) beyond so much.")
    ] = None,
    dead_letters: Annotated[
        str | None,
        typer.Option(metavar="MAILBOX", help="Mailbox of dead letters; default: SERVICE.dead."),
    ] = None,
    memory: MemoryOnCreate = False,
    level: LevelOption = None,
    description: Description = None,
    settings: Settings = None,
    replace: Replace = False,
    create: Annotated[
        bool, typer.Option("--create", help="Make the service when there is none.")
    ] = False,
    as_json: output.Json = False,
) -> None:
    """Change settings of a service, or make one; settings that are not named stay."""
    asked = wanted(
        settings, attempts_max=attempts, lease_ms=lease, backoff_ms=backoff,
        backoff_max_ms=backoff_max, timeout_ms=timeout, max_requests=max_requests,
        max_bytes=max_bytes, dead_letters=dead_letters, memory=memory or None, level=level,
        description=description,
    )  # fmt: skip
    if not (asked or create or replace):
        raise CommandFailed("nothing to change; name a setting, such as --lease 30s", USAGE)
    with linked(ctx) as client:
        if not create:
            known(client, service, "--create makes it")
        found, done = made_or_edited(
            lambda: client.service_info(service), "service", service, asked,
            lambda: client.edit_service(service, asked, replace=replace),
            replace=replace,
        )  # fmt: skip
    if as_json:
        _show(found, as_json)
    else:
        output.done(done, {}, as_json=False)


@app.command(
    "rm",
    epilog="""\b
Examples:
  malamute service rm render --yes""",
)
def rm(ctx: typer.Context, services: Names, yes: Yes = False, as_json: output.Json = False) -> None:
    """Remove services and their requests; the requesters are told."""
    with linked(ctx) as client:
        # All names are looked up first: with a misspelt one, none is removed.
        for name, found in {name: known(client, name) for name in services}.items():
            count = _requests(found)
            agreed(f"remove {name} and its {count_text(count, 'request')}", name, yes=yes)
            removed = watched(
                f"removing {name}", count,
                lambda name=name: client.remove_service(name),  # type: ignore[misc]
                lambda name=name: _requests(client.service_info(name)),  # type: ignore[misc]
            )  # fmt: skip
            output.done(
                f"removed {name} and {count_text(removed, 'request')}",
                {"removed": name, "requests": removed},
                as_json=as_json,
            )


def _requests(found: ServiceFacts) -> int:
    """Return how many requests a service has, in whatever state."""
    return found.waiting + found.held + found.delayed
