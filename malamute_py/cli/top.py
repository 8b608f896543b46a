"""`malamute top`: the broker as it is now, drawn anew every few seconds.

Owns the choice between the screen of top_screen.py and one look that is printed. The rule: textual
is loaded for the screen only.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from malamute_py.cli import output
from malamute_py.cli.linking import linked
from malamute_py.cli.looking import look, pause_s
from malamute_py.cli.screens import (
    KEYS,
    THINGS_MAX,
    Sample,
    snapshot,
    troubles_of,
)

if TYPE_CHECKING:
    from malamute_py.client.sync.client import SyncClient

EPILOG: Final = f"""\b
Examples:
  malamute top                    each 2 s
  malamute top --every 500ms
  malamute top --once             the state once, and the rates of one period
  malamute top --json | jq '.troubles'

\b
Keys:
{KEYS}

What is slow or stuck stands above the table, the worst first. In a pipe there is one look: what is
slow or stuck, then a line for each thing, with tabs between, which begins with its kind."""


def top(
    ctx: typer.Context,
    every: Annotated[
        str, typer.Option("--every", metavar="DURATION", help="Pause between two looks.")
    ] = "2s",
    once: Annotated[bool, typer.Option("--once", help="Print one look, as in a pipe.")] = False,
    as_json: output.Json = False,
) -> None:
    """Watch the broker: rates, lags, rings, and what is slow or stuck."""
    every_s = pause_s(every)
    # The screen is drawn on standard error.
    terminal = output.on_terminal() and sys.stdin.isatty() and sys.stderr.isatty()
    live = terminal and not (once or as_json)
    # Nothing can be drawn on a terminal without positions: it gets one look, as a pipe does.
    live = live and not output.console().is_dumb_terminal
    with linked(ctx, stays=live) as client:
        if live:
            _watch(client, every_s)
            return
        before = _sample(client)  # Rates need two looks.
        time.sleep(min(every_s, 1.0))
        after = _sample(client)
    if as_json:
        output.print_json(snapshot(after, before))
        return
    for trouble in troubles_of(after):
        print(f"{trouble.kind}\t{trouble.what}\t{'/'.join(trouble.name)}\t{trouble.words}")
    for kind, rows in snapshot(after, before)["things"].items():
        for row in rows:
            print(
                "\t".join([kind, *("" if value is None else f"{value}" for value in row.values())])
            )


def _sample(client: SyncClient) -> Sample:
    """Take one look at the broker, with its time."""
    return Sample(look(client, limit=THINGS_MAX), time.monotonic())


def _watch(client: SyncClient, every_s: float) -> None:
    """Show the screen until the person quits; raise what ended it otherwise."""
    from malamute_py.cli.top_screen import TopScreen

    screen = TopScreen(lambda: _sample(client), lambda: client.linked, _sample(client), every_s)
    screen.run()
    if screen.failure is not None:
        raise screen.failure
    if screen.return_code:
        raise typer.Exit(screen.return_code)
