"""`malamute verify-promises`: check that a broker keeps its promises while it is disturbed.

Owns the command's options and how its verdict is shown; the run is malamute_py/promises.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from malamute_py.cli import output
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.options import options
from malamute_py.cli.progress import Progress

EPILOG = """\b
Examples:
  malamute verify-promises --embedded
  malamute verify-promises --kill-command 'systemctl restart malamute'"""


def verify_promises(
    ctx: typer.Context,
    embedded: Annotated[
        bool,
        typer.Option(
            "--embedded", help="Start a broker of its own, kill and freeze it, and move its clock."
        ),
    ] = False,
    kill_command: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="A shell command that kills your broker and starts it again, run now and then.",
        ),
    ] = "",
    minutes: Annotated[
        float, typer.Option(min=0.0, help="End after so long; 0: by --disturbances alone.")
    ] = 0.0,
    disturbances: Annotated[
        int, typer.Option(min=0, help="End after so many; without --minutes: 20.")
    ] = 0,
    stored: Annotated[
        bool, typer.Option("--stored", help="Ask for confirms 'stored' instead of 'synced'.")
    ] = False,
    journal: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the journal of calls, confirms and findings."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the disturbances; none: a new one.")
    ] = None,
    as_json: output.Json = False,
) -> None:
    """Check what a broker confirms while it is disturbed.

    Clients publish, send, ask and step; each record, message, request and step has an id. What was
    asked and what was confirmed is written to a file, and compared with what is there afterwards:
    what was confirmed is there once, in order; what was done with does not come again; nothing
    stands still. Connections to a tcp endpoint go through a proxy of the command, which cuts,
    stalls and delays them.

    It creates streams, mailboxes and a service whose names begin with `promises.`, and leaves them.
    """
    from malamute_py.cli.contexts import chosen
    from malamute_py.promises.run import Run

    context = chosen(options(ctx))
    if embedded and kill_command:
        raise CommandFailed("--embedded kills its own broker: leave --kill-command off", USAGE)
    # Links are lost all the time here: a line for each would bury the verdict.
    logging.getLogger("malamute").setLevel(logging.CRITICAL)
    most = disturbances or (0 if minutes else 20)  # 0: the minutes end it.
    seed = int.from_bytes(os.urandom(4), "big") if seed is None else seed
    # The folder of a run without --journal, and of the broker that --embedded starts.
    with tempfile.TemporaryDirectory(prefix="malamute-promises-") as folder:
        kept = journal or Path(folder) / "journal"
        with Progress("disturbing", total=most or None) as progress:
            run = Run(
                journal=kept,
                seed=seed,
                minutes=minutes,
                disturbances=most,
                level="stored" if stored else "synced",
                told=progress.update,
                options={} if embedded else {"credential": context.credential()},
            )
            if embedded:
                found = asyncio.run(run.embedded(Path(folder) / "broker"))
            else:
                found = asyncio.run(run.at(context.endpoints[0], kill_command))
    output.facts(
        {
            "verdict": "broken" if found.faults else "kept",
            "seed": found.seed,
            "seconds": found.seconds,
            **found.counts,
            **{f"disturbed_by_{kind}": count for kind, count in found.disturbances.items()},
            "faults": found.faults,
        },
        as_json=as_json,
    )
    if found.faults:
        raise CommandFailed(f"promises were broken: {found.faults[0]}")
