"""Trims and purges while publishers run: what they take from the publishers' rate and confirms.

    python -m perf.removal [--seconds 4]

Owns a small measurement beside the suite: one broker in a process of its own with the journal on
disk, eight publishers in one asyncio client, each with one record under way, and one that publishes
in bulk. Quiet rounds, rounds with a trim every 50 ms and rounds with a purge every 50 ms take
turns, so that what else the machine does strikes all alike; medians over the rounds are told.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from malamute_py.client.aio.client import Client, connect
from malamute_py.demo.daemon import Daemon
from perf.curves.brokers import OUT

ROUNDS = 6
PUBLISHERS = 8
EVERY_S = 0.05
BODY = b"x" * 140
BULK = 1_000
SUBJECTS = [f"s.{number}" for number in range(40)]


class Round(NamedTuple):
    """Figures of the publishers in one round."""

    records: float
    """Records a second, in bulk."""
    singles: float
    """Single calls a second, of all publishers."""
    p99_ms: float
    """Time until a single record is confirmed."""
    removals: int


class Load:
    """One stream, its publishers, and what removes its records meanwhile."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._removed = 0

    async def trim(self) -> None:
        """Remove all but the newest 20,000 records."""
        facts = await self._client.stream_info("s")
        await self._client.trim("s", max(facts.first, facts.tail - 20_000))

    async def purge(self) -> None:
        """Remove the records of one subject after another."""
        await self._client.purge("s", SUBJECTS[self._removed % 8])

    async def round(self, seconds: float, remove: Callable[[], Awaitable[Any]] | None) -> Round:
        """Publish for some seconds, and remove every 50 ms."""
        until = time.perf_counter() + seconds
        took: list[float] = []
        bulk = removals = 0

        async def single() -> None:
            while (began := time.perf_counter()) < until:
                await self._client.publish("s", BODY, subject="s.single")
                took.append(time.perf_counter() - began)

        async def many() -> None:
            nonlocal bulk
            subjects = [SUBJECTS[row % len(SUBJECTS)] for row in range(BULK)]
            while time.perf_counter() < until:
                await self._client.publish_many("s", [BODY] * BULK, subjects=subjects)
                bulk += BULK

        async def removing() -> None:
            nonlocal removals
            while remove is not None and time.perf_counter() < until:
                await remove()
                removals += 1
                self._removed += 1
                await asyncio.sleep(EVERY_S)

        await asyncio.gather(*(single() for _ in range(PUBLISHERS)), many(), removing())
        took.sort()
        p99_ms = took[int(0.99 * len(took))] * 1_000
        return Round(bulk / seconds, len(took) / seconds, p99_ms, removals)


async def measure(endpoint: str, seconds: float) -> None:
    """Print the figures of each kind of round."""
    async with connect(endpoint) as client:
        await client.create_stream("s")
        load = Load(client)
        await load.round(seconds / 2, None)
        kinds = {"nothing removed": None, "trims": load.trim, "purges": load.purge}
        found: dict[str, list[Round]] = {kind: [] for kind in kinds}
        order = list(kinds.items())
        for turn in range(ROUNDS):
            first = turn % len(order)  # What follows another kind meets what that one left.
            for kind, remove in order[first:] + order[:first]:
                found[kind].append(await load.round(seconds, remove))
        for kind, rounds in found.items():
            records, singles, p99_ms, removals = (
                statistics.median(column) for column in zip(*rounds, strict=True)
            )
            print(
                f"{kind:<16} {records:>10,.0f} records/s in bulk, {singles:>7,.0f} single calls/s, "
                f"p99 {p99_ms:.1f} ms, {removals / seconds:.0f} removals/s"
            )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each round")
    options = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as folder, Daemon(Path(folder)) as daemon:
        asyncio.run(measure(daemon.endpoint, options.seconds))


if __name__ == "__main__":
    main()
