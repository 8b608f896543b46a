"""The cost of a record against the number of different subjects among the records.

The count of records of 140 bytes is fixed. They have 1 to as many different subjects, in a shuffled
order that is the same each time. One reader takes all of them, and another those of one subject, so
that the matcher, the journal's index and the extraction all have work.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from malamute_py.client.aio.client import connect
from malamute_py.demo.daemon import Daemon
from perf.curves.brokers import BODY, MIB, Cost, broker, expect, reader
from perf.curves.curve import Curve, Gathering, Plan, Say

RECORDS = 500_000
PORTION = 50_000
STREAM = "varied"


def measure(points: Sequence[int], runs: int, say: Say) -> Curve:
    """Measure the curve."""
    gathered = Gathering()
    for count in points:
        say(f"{count:,} different subjects among {RECORDS:,} records")
        with broker() as daemon:
            costs = [asyncio.run(publish(daemon, count, run)) for run in range(runs)]
            gathered.add("CPU a record", "us", count, [c.us(RECORDS) for c in costs])
            gathered.add("wall a record", "us", count, [c.wall_s / RECORDS * 1e6 for c in costs])
            gathered.add("broker's memory", "MiB", count, [daemon.own_bytes() / MIB])
            written = log_bytes(daemon) / (RECORDS * runs)
            gathered.add("log a record", "bytes", count, [written])
            rare = asyncio.run(replay_one(daemon, count))
            gathered.add("replay of one subject, wall", "ms", count, [rare * 1e3])
    return Curve(
        PLAN.name, PLAN.title, PLAN.axis, gathered.lines(),
        "flat while subjects repeat; at the end each record brings a header of its own, which is"
        " written, indexed and matched once",
    )  # fmt: skip


def log_bytes(daemon: Daemon) -> int:
    """Return the bytes that were appended to ring main."""

    async def ask() -> int:
        async with connect(daemon.endpoint) as client:
            facts = await client.broker_info()
            return int(facts.more["rings"]["main"]["end_lsn"])

    return asyncio.run(ask())


def subjects_of(count: int, run: int) -> list[str]:
    """Return a subject for each record: all of so many come about equally often."""
    numbers = [n % count for n in range(RECORDS)]
    random.Random(7).shuffle(numbers)
    # All distinct means in the whole log: no run repeats an earlier one's.
    last = f".{run}" if count == RECORDS else ""
    return [f"plant.{n % 100}.line.{n}{last}" for n in numbers]


async def publish(daemon: Daemon, count: int, run: int) -> Cost:
    """Publish all records, with a reader that takes every record."""
    subjects = subjects_of(count, run)
    bodies = [BODY] * PORTION
    async with connect(daemon.endpoint) as client:
        await client.publish("other", BODY)
        with reader(daemon.endpoint, STREAM, RECORDS) as process:
            one = client.subscribe(STREAM, subjects[0], create=True)
            await one.accepted()
            with Cost(daemon) as cost:
                async with client.publisher(STREAM, keep=False) as window:
                    for first in range(0, RECORDS, PORTION):
                        await window.publish_many(
                            bodies, subjects=subjects[first : first + PORTION]
                        )
                await asyncio.to_thread(expect, process, "done")
            await one.close()
    return cost


async def replay_one(daemon: Daemon, count: int) -> float:
    """Return the seconds until all records of one subject were read from the start."""
    subject = subjects_of(count, 0)[0]
    async with connect(daemon.endpoint) as client:
        seen = 0
        loop = asyncio.get_running_loop()
        began = loop.time()
        async for batch in client.subscribe(
            STREAM, subject, start="earliest", until="tail"
        ).batches():
            seen += len(batch)
        seconds = loop.time() - began
    if not seen:
        raise SystemExit(f"no record of {subject} came back")
    return seconds


PLAN = Plan(
    "headers", "Cost of a record against different subjects",
    f"different subjects among {RECORDS:,} records",
    (1, 100, 1_000, 10_000, RECORDS), (1, 1_000), measure,
)  # fmt: skip
