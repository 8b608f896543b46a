"""Figures that were measured: how many, how fast, and how long each took.

Owns the percentiles, how measurements are printed, and names and removal of what is made for one.
The rules: a figure that was not measured is left out, never shown as 0; a percentile is a span that
occurred (nearest rank); what this user may not remove is made with --leave only.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from array import array
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from malamute_protocol.errors import BrokerRefused, MalamuteError
from malamute_py.cli import output
from malamute_py.cli.commands import say
from malamute_py.cli.failures import INTERRUPTED, OK
from malamute_py.cli.output import Cell, Column
from malamute_py.cli.values import count_text, size_text

if TYPE_CHECKING:
    from malamute_py.client.aio.client import Client

_SHARES: Final = (("p50_ms", 0.5), ("p90_ms", 0.9), ("p99_ms", 0.99), ("max_ms", 1.0))


Leave: TypeAlias = Annotated[
    bool, typer.Option("--leave", help="Measure also where what is made for it has to be left.")
]


class Measure:
    """One thing that was measured."""

    def __init__(self, what: str, *, count: int = 0, size: int = 0) -> None:
        """what: its name in words. count: how many are to be done within timed(); 0: no rate.

        size: bytes of all of them together.
        """
        self.what = what
        self.done = 0
        """How many of them are done so far, which the caller counts."""
        self.seconds = 0.0
        self.count = count
        self.size = size
        self.spans_ns = array("q")
        """Time that each single one took; empty: it was not measured."""
        self.ended_ns = array("q")
        """When each of these ended, by a clock that only goes forward."""

    def add(self, span_ns: int) -> None:
        """Note how long one took."""
        self.spans_ns.append(span_ns)
        self.ended_ns.append(time.perf_counter_ns())

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure how long all of them take together.

        An exception within it, as Ctrl-C, reduces count and size to those that were done.
        """
        began = time.perf_counter_ns()
        try:
            yield
        except BaseException:
            self.size = self.size * self.done // max(self.count, 1)
            self.count = self.done
            raise
        finally:
            self.seconds = (time.perf_counter_ns() - began) / 1e9

    def facts(self) -> dict[str, Any]:
        """Return what was measured, by name; a figure that was not measured is left out."""
        found: dict[str, Any] = {"what": self.what, "count": self.count or len(self.spans_ns)}
        if self.seconds > 0:
            found["seconds"] = round(self.seconds, 6)
            found["per_second"] = round(self.count / self.seconds, 1)
            if self.size:
                found["bytes_per_second"] = round(self.size / self.seconds)
        if self.spans_ns:
            found["timed"] = len(self.spans_ns)
            ordered = sorted(self.spans_ns)
            for name, share in _SHARES:
                found[name] = round(percentile(ordered, share) / 1e6, 4)
        return found


def percentile(ordered: Sequence[int], share: float) -> int:
    """Return the least value that at least this share of all do not exceed.

    ordered: at least one, the least first.
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def measured(work: Coroutine[Any, Any, object]) -> bool:
    """Run what measures to its end; False: Ctrl-C ended it before, in order."""
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        say("interrupted: the figures are of what was done until then")
        return False
    return True


def show(
    conditions: Mapping[str, Any], measures: Sequence[Measure], title: str, *, as_json: bool,
    whole: bool = True,
) -> int:  # fmt: skip
    """Print measurements, and return the exit code.

    title: one line for a person that says under which conditions. whole: False: it was interrupted.
    """
    code = OK if whole else INTERRUPTED
    found = [each.facts() for each in measures if each.spans_ns or each.count]
    if as_json:
        output.print_json({**conditions, "interrupted": not whole, "measured": found})
        return code
    if not whole:
        title += ", interrupted"
    if output.on_terminal():
        print(title)
    rates = any("per_second" in each for each in found)  # `rtt` measures none.
    columns = [Column("what", "Measured", whole=True), Column("count", "Count", right=True)]
    if rates:
        columns += [
            Column("per_second", "A second", right=True),
            Column("bytes_per_second", "Bytes/s", right=True, spare=True),
        ]
    columns += [
        Column(name, name.removesuffix("_ms") + " ms", right=True, spare=name == "p90_ms")
        for name, _ in _SHARES
    ]
    rows = [[_cell(each, column.key) for column in columns] for each in found]
    output.listing(columns, rows, as_json=False, empty="nothing was measured")
    return code


def _cell(facts: Mapping[str, Any], key: str) -> Any:
    """Return a figure as a table shows it; one that was not measured is a dash."""
    value = facts.get(key)
    if value is None:
        return Cell("", "-", "dim")
    if key == "bytes_per_second":
        return Cell(value, size_text(value))
    if key == "count":
        return Cell(value, count_text(value))
    if key == "per_second":
        return Cell(value, f"{value:,.0f}")
    return Cell(value, f"{value:,.3f}") if key.endswith("_ms") else value


async def name_for(client: Client, measurement: str) -> str:
    """Return an unused name for what a measurement makes, with the prefix of the user's namespace.

    A user of a namespace may make nothing outside of it. measurement: `bench` or `rtt`.
    """
    prefix = ""
    if own := (await client.broker_info()).more.get("namespace"):
        # Only its prefix is missing, which the listing has.
        prefix = next(
            (each.prefix for each in await client.list_namespaces() if each.namespace == own), ""
        )
    return f"{prefix}malamute-{measurement}-{secrets.token_hex(4)}"


async def left_behind(client: Client, verb: str, name: str) -> str:
    """Return why a measurement would leave behind what it makes; empty: it can remove it.

    verb: permission that the removal needs.
    """
    try:
        if await client.may(verb, name):
            return ""
    except BrokerRefused:
        return ""  # The broker is an older one and does not tell: the removal finds out.
    return (
        f"it would leave {name} behind, which you may not remove (permission {verb});"
        " --leave measures all the same"
    )


async def removed(client: Client, name: str, removal: Coroutine[Any, Any, Any]) -> None:
    """Remove what a measurement made, or say that it is left and why.

    removal: the call that removes it, not awaited yet.
    """
    if not client.linked:
        removal.close()  # Otherwise Python warns of a call that was never awaited.
        say(f"{name} is left, because the link is lost; remove it when the broker is back")
        return
    # A publish that Ctrl-C left under way would make the stream anew after its removal.
    with suppress(MalamuteError):
        await client.flush()
    try:
        await removal
    except BrokerRefused as error:
        say(f"{name} is left, because it may not be removed: {error}")
