"""`malamute rtt`: how long the broker takes to answer, one question at a time.

Owns the round trips that are measured: a question that is answered from memory, and a record that
is confirmed at each level. The rules: one is under way at a time; the stream of the records has a
name of its own and is removed afterwards; a trip that the broker refuses, or whose stream would be
left behind, is named as not measured.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Final

import typer

from malamute_protocol.errors import BrokerRefused
from malamute_py.cli import output
from malamute_py.cli.commands import say
from malamute_py.cli.linking import linked_in_loop
from malamute_py.cli.measuring import (
    Leave,
    Measure,
    left_behind,
    measured,
    name_for,
    removed,
    show,
)
from malamute_py.cli.progress import Progress
from malamute_py.client.words import ConfirmAt

EPILOG: Final = """\b
Examples:
  malamute rtt                      1,000 of each, to the broker in use
  malamute rtt --count 100 --json
  malamute --context live rtt --size 4KiB

\b
question          a name that is looked up in memory: network, broker, client
confirm stored    a record that survives the end of the broker's process
confirm synced    a record that survives a power loss: the disk comes on top

In a pipe a line has, with tabs between: what, count, p50, p90, p99 and max in milliseconds."""

_WARM_UP: Final = 20
"""Trips before the first that counts: the stream's producer is opened, code is loaded."""


def rtt(
    ctx: typer.Context,
    count: Annotated[
        int, typer.Option("--count", "-n", metavar="N", min=1, help="Trips of each kind.")
    ] = 1000,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Size of a record's body.")] = "128",
    leave: Leave = False,
    as_json: output.Json = False,
) -> int:
    """Measure round trips: of a question, and of a record until it is confirmed."""
    from malamute_py.cli.values import size_bytes

    body = bytes(size_bytes(size))
    found: list[Measure] = []
    refused: dict[str, str] = {}
    whole = measured(_measure(ctx, count, body, leave, found, refused))
    for what, why in refused.items():
        say(f"{what} was not measured: {why}")
    return show(
        {"size": len(body), "not_measured": refused},
        found,
        f"one at a time, records of {len(body):,} B",
        as_json=as_json,
        whole=whole,
    )


async def _measure(
    ctx: typer.Context,
    count: int,
    body: bytes,
    leave: bool,
    found: list[Measure],
    refused: dict[str, str],
) -> None:
    """Measure each kind of round trip that this user may make.

    found: gets the figures; filled as they come, so that Ctrl-C leaves those so far. refused: gets
    the kinds that could not be measured, and why.
    """
    async with linked_in_loop(ctx) as client:
        name = await name_for(client, "rtt")
        levels: tuple[ConfirmAt, ...] = ("stored", "synced")
        trips: dict[str, Callable[[], Awaitable[object]]] = {
            "question": lambda: client.list_streams(name, limit=1)
        }
        made = False
        # Why no records are published; empty: they are. The question alone needs no stream.
        why = "" if leave else await left_behind(client, "manage_streams", name)
        try:
            try:
                if not why:
                    await client.create_stream(name, description="made by malamute rtt")
                    made = True
                    await client.publish(name, body)
            except BrokerRefused as error:
                why = str(error)
            refused |= {f"confirm {level}": why for level in levels if why}
            if not why:
                for level in levels:
                    trips[f"confirm {level}"] = lambda level=level: client.publish(  # type: ignore[misc]
                        name, body, confirm=level
                    )
            with Progress("measuring", total=count * len(trips)) as progress:
                for at, (what, trip) in enumerate(trips.items()):
                    found.append(Measure(what))
                    await _timed(found[-1], trip, count, progress, at * count)
        finally:
            if made:
                await removed(client, name, client.remove_stream(name))


async def _timed(
    measure: Measure,
    trip: Callable[[], Awaitable[object]],
    count: int,
    progress: Progress,
    before: int,
) -> None:
    """Measure one kind of round trip, after a few that do not count.

    before: round trips of other kinds, for the progress bar.
    """
    for _ in range(_WARM_UP):
        await trip()
    for at in range(count):
        began = time.perf_counter_ns()
        await trip()
        measure.add(time.perf_counter_ns() - began)
        progress.update(before + at + 1, measure.what)
