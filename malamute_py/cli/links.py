"""`malamute client ...` and `malamute info`: the connected clients, and the broker's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from malamute_py.cli import complete, output
from malamute_py.cli.columns import age, counted, creator, read, sized
from malamute_py.cli.commands import group
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.linking import linked
from malamute_py.cli.output import Cell, Column
from malamute_py.cli.values import duration_text, size_text, within

app = group("client")

_DIGITS_MAX = 18
"""Digits of a link's number; the wire has 64 bits for it."""


@app.command(
    "ls",
    epilog="""\b
Examples:
  malamute client ls
  malamute client ls --json

In a pipe a line has, with tabs between: link, identity, software, state, time of the
opening in milliseconds, subscriptions, bytes not confirmed, bytes not read, how many of the
subscriptions have no credit left, and how many records the one farthest behind has yet to
be given. --json names them.""",
)
def ls(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="At most so many.")] = 1000,
    as_json: output.Json = False,
) -> None:
    """List the links that clients have to the broker."""
    with linked(ctx) as client:
        found = client.list_links(limit)
    output.entries(
        [
            Column("link", "Link", right=True),
            read("identity", "Identity", creator, style="cyan"),
            Column("software", "Software"),
            Column("state", "State", spare=True),
            _more("opened_ms", "For", age),
            Column("subscriptions", "Subscriptions", right=True, spare=True),
            _more("unconfirmed_bytes", "Unconfirmed", sized),
            _more("unread_bytes", "Unread", sized),
            _more("without_credit", "No credit", counted, spare=True),
            _more("lag", "Behind", counted),
        ],
        found,
        as_json=as_json,
        empty="no links",
    )  # fmt: skip


def _more(key: str, title: str, shown: Callable[[int], Cell], *, spare: bool = False) -> Column:
    """Return the column of a figure that LinkFacts has in its table `more`; 0 where it is not."""
    return Column(
        key, title, right=True, spare=spare, cell=lambda each: shown(int(each.more.get(key, 0)))
    )


@app.command(
    "kick",
    epilog="""\b
Examples:
  malamute client kick 12 --reason 'restart it, please'""",
)
def kick(
    ctx: typer.Context,
    link: Annotated[
        str,
        typer.Argument(
            metavar="LINK",
            help="Number of the link, as `client ls` shows it.",
            autocompletion=complete.links,
        ),
    ],
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Reason that the client is told.")
    ] = "",
    as_json: output.Json = False,
) -> None:
    """End a client's link; the client does not come back by itself."""
    if not (link.isascii() and link.isdigit() and len(link) <= _DIGITS_MAX):
        raise CommandFailed(
            f"'{link}' is not the number of a link; `malamute client ls` shows them", USAGE
        )
    number = int(link)
    with linked(ctx) as client:
        client.kick(number, reason)
    output.done(f"ended link {number}", {"kicked": number}, as_json=as_json)


EPILOG = """\b
Examples:
  malamute info
  malamute info --json | jq .counters"""


def info(ctx: typer.Context, as_json: output.Json = False) -> None:
    """Show facts and counters of the broker."""
    with linked(ctx) as client:
        found = client.broker_info()
    more = dict(found.more)  # Facts that BrokerFacts has no field for.
    if "uptime_ms" in more:
        more["uptime_ms"] = Cell(more["uptime_ms"], duration_text(more["uptime_ms"]))
    if "latency" in more:
        more["latency"] = {name: _latency(facts) for name, facts in more["latency"].items()}
    more.pop("now_ms", None)  # For programs that compute ages.
    # Two tables about the same rings are shown as one, and the shell's counters with the core's.
    rings, disk, shell = (more.pop(name, {}) for name in ("rings", "disk", "shell"))
    told = {
        "software": Cell(found.software, found.software, "bold"),
        "uuid": found.uuid.hex(),
        "epoch": found.epoch,
        **more,
        "rings": {name: {**facts, **disk.get(name, {})} for name, facts in rings.items()},
        "counters": {**found.counters, **shell},
    }
    output.facts(_sizes(told), as_json=as_json)


def _latency(facts: dict[str, Any]) -> dict[str, Any]:
    """Return a histogram as a person reads it: count, p50 and p99 in milliseconds.

    facts: upper bounds of the buckets, and how many lie in each. The last bucket has no bound: a
    percentile in it is left out.
    """
    counts = facts["counts"]
    found: dict[str, Any] = {"count": sum(counts)}
    for percent in (50, 99):
        if (bound_s := within(facts, counts, percent)) is not None:
            found[f"p{percent}_within_ms"] = 1_000 * bound_s
    return found


def _sizes(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts with each count of bytes as a person reads it, also those in inner tables.

    A count of bytes has `bytes` as a word of its name, as `ring_bytes`.
    """
    return {
        name: _sizes(value) if isinstance(value, Mapping)
        else Cell(value, size_text(value)) if "bytes" in name.split("_") and type(value) is int
        else value
        for name, value in facts.items()
    }  # fmt: skip
