"""`malamute top`: the broker as it is now, drawn anew every few seconds.

Owns the terminal: keys, the pace, and what is drawn where. screens.py owns what is on a screen. The
rules: one look is under way at a time, and the next begins a pause after its answer, so that a busy
broker is asked less; the terminal is given back however the command ends; without a terminal one
look is printed.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from malamute_protocol.errors import MalamuteError
from malamute_py.cli import output
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.linking import linked
from malamute_py.cli.looking import look
from malamute_py.cli.screens import Sample, Screen, snapshot, troubles_of
from malamute_py.cli.values import duration_ms

if TYPE_CHECKING:
    from malamute_py.client.sync.client import SyncClient

EPILOG: Final = """\b
Examples:
  malamute top                    each 2 s
  malamute top --every 500ms
  malamute top --once             the state once, and the rates of one period
  malamute top --json | jq '.troubles'

\b
Keys:
  1 to 5, Tab     streams, readers, mailboxes, services, clients
  s, r            sort by the next column; in the other direction
  up, down        scroll (also j and k)
  Space, q        look at once; quit

What is slow or stuck stands above the table, the worst first. In a pipe there is one look: what is
slow or stuck, then a line for each thing, with tabs between, which begins with its kind."""

_LIMIT: Final = 1000
"""Things of each kind that are looked at."""
_KEY: Final = re.compile(r"\x1b[\[O]([0-9;]*[A-Za-z~])|(.)", re.DOTALL)
_ARROWS: Final = {"A": "k", "B": "j"}


def top(
    ctx: typer.Context,
    every: Annotated[
        str, typer.Option("--every", metavar="DURATION", help="Pause between two looks.")
    ] = "2s",
    once: Annotated[bool, typer.Option("--once", help="Print one look, as in a pipe.")] = False,
    as_json: output.Json = False,
) -> None:
    """Watch the broker: rates, lags, rings, and what is slow or stuck."""
    every_s = duration_ms(every) / 1000
    if every_s < 0.1:
        raise CommandFailed("--every is at least 100ms", USAGE)
    live = output.on_terminal() and sys.stdin.isatty() and not (once or as_json)
    # Nothing can be drawn on a terminal without positions: it gets one look, as a pipe does.
    live = live and not output.console().is_dumb_terminal
    with linked(ctx, stays=live) as client:
        if live:
            _watch(client, every_s)
            return
        before = _sample(client)
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
    return Sample(look(client, limit=_LIMIT), time.monotonic())


def _watch(client: SyncClient, every_s: float) -> None:
    """Draw the screen until a person quits; keys act at once, figures come every `every_s`."""
    from rich.live import Live

    console = output.console()
    screen = Screen()
    sample, before, gone = _sample(client), None, ""
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            due_s = time.monotonic() + every_s
            pressed = ""
            while pressed != " ":  # the space bar asks for a look at once
                drawn = screen.drawn(sample, before, *console.size, gone=gone)
                live.update(drawn, refresh=True)
                pressed = key(max(0.0, due_s - time.monotonic()))
                if pressed == "q":
                    return
                if not pressed:
                    break
                screen.press(pressed)
            if not client.linked:
                gone = "the link is lost; it is sought"
                continue
            try:
                sample, before, gone = _sample(client), sample, ""
            except MalamuteError as error:
                gone = str(error)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Give a function that waits for a key so many seconds, and returns it or an empty text."""
    import termios
    import tty

    entry = sys.stdin.fileno()
    kept = termios.tcgetattr(entry)

    waiting: list[str] = []

    def key(wait_s: float) -> str:
        """Return the next key that was pressed within a time; empty: none was."""
        if not waiting and select.select([entry], [], [], wait_s)[0]:
            text = os.read(entry, 64).decode("utf-8", "replace")
            if not text:  # The terminal is gone.
                return "q"
            for special, plain in _KEY.findall(text):
                waiting.append(plain or _ARROWS.get(special, "?"))
        return waiting.pop(0) if waiting else ""

    try:
        tty.setcbreak(entry)
        yield key
    finally:
        termios.tcsetattr(entry, termios.TCSADRAIN, kept)
