"""The cost of a record against the number of streams, and the cost of the streams themselves.

Records go to all streams in turn, in flight at once, and one after the other; all streams are in
ring main. Then the broker at rest, its memory, and its start with so many of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from malamute_protocol.encode import encode
from malamute_py.client.aio.client import Client, connect
from malamute_py.demo.daemon import Daemon
from perf.curves.brokers import (
    BODY,
    BULK,
    LONE,
    MIB,
    Cost,
    broker,
    cpu_s,
    idle_share,
    pair_costs,
)
from perf.curves.curve import Curve, Gathering, Plan, Say

SPREAD = 20_000
"""Records that go round all streams, a batch each."""
IN_FLIGHT = 1_000
LISTINGS = 3
CONTENT = encode([BODY], subject="s")


def measure(points: Sequence[int], runs: int, say: Say) -> Curve:
    """Measure the curve."""
    gathered = Gathering()
    for count in points:
        say(f"{count:,} streams")
        with broker(
            [f"streams.streams_max={max(10_000, count + 1)}", "quotas.streams=0"]
        ) as daemon:
            asyncio.run(with_streams(gathered, daemon, count, runs))
            costs = pair_costs(daemon, runs, BULK)
            gathered.add("one in bulk, CPU a record", "us", count, [c.bulk_cpu_us for c in costs])
            gathered.add("one alone, CPU a record", "us", count, [c.lone_cpu_us for c in costs])
            gathered.add("at rest, CPU", "%", count, [idle_share(daemon) * 100])
            gathered.add("broker's memory", "MiB", count, [daemon.own_bytes() / MIB])
            gathered.add("files", "files", count, [daemon.files()])
            for name, end in (("in order", daemon.stop), ("SIGKILL", daemon.kill)):
                end()
                began = time.perf_counter()
                daemon.start(wait_s=300)
                gathered.add(f"start after {name}", "s", count, [time.perf_counter() - began])
    return Curve(PLAN.name, PLAN.title, PLAN.axis, gathered.lines(), "flat; memory in proportion")


async def with_streams(gathered: Gathering, daemon: Daemon, count: int, runs: int) -> None:
    """Make so many streams by first use, and publish to all of them."""
    names = [f"stream.{number:05}" for number in range(count)]
    async with connect(daemon.endpoint) as client:
        with Cost(daemon) as creating:
            for first in range(0, count, IN_FLIGHT):
                some = names[first : first + IN_FLIGHT]
                await asyncio.gather(*(client.publish(name, BODY, subject="s") for name in some))
        gathered.add("first use of a stream, CPU", "us", count, [creating.us(count)])
        await spread(client, names)
        many: list[Any] = []
        lone: list[Any] = []
        for _ in range(runs):
            with Cost(daemon) as cost:
                await spread(client, names)
            many.append(cost)
            with Cost(daemon) as cost:
                for number in range(LONE):
                    await client.publish(
                        names[number * 7919 % count], BODY, subject="s", confirm="stored"
                    )
            lone.append(cost)
        gathered.add("all in turn, CPU a record", "us", count, [c.us(SPREAD) for c in many])
        gathered.add(
            "all in turn, wall a record", "us", count, [c.wall_s / SPREAD * 1e6 for c in many]
        )
        gathered.add("each alone, CPU a record", "us", count, [c.us(LONE) for c in lone])
        spent = cpu_s(daemon)
        for _ in range(LISTINGS):
            found = await client.list_streams()
        if len(found) != count:
            raise SystemExit(f"{count} streams were made, the broker lists {len(found)}")
        listed = (cpu_s(daemon) - spent) / LISTINGS / count
        gathered.add("listing, CPU a stream", "us", count, [listed * 1e6])


async def spread(client: Client, names: Sequence[str]) -> None:
    """Publish to all streams in turn, a batch each whatever their number, synced."""
    async with AsyncExitStack() as stack:
        windows = [
            await stack.enter_async_context(client.publisher(name, keep=False)) for name in names
        ]
        for number in range(SPREAD):
            await windows[number % len(windows)].publish_batch(CONTENT)
            if number % IN_FLIGHT == 0:
                await asyncio.sleep(0)


PLAN = Plan(
    "streams", "Cost of a record against streams", "streams",
    (1, 100, 1_000, 10_000), (1, 100), measure,
)  # fmt: skip
