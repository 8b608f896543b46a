"""The cost of a start, of a first replayed record and of appends against the log's size.

One ring that is filled from point to point, with records of 140 bytes in full batches. At each
point: a start after an orderly stop and one after SIGKILL amid publishing, each timed from the
command to the port that listens; the first record from the beginning and from the middle; appends
at the end. The files stay in the page cache as far as memory goes: the figures are the broker's
work; the reading of cold files comes on top.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from typing import Any

from malamute_py.client.aio.client import connect
from malamute_py.demo.daemon import Daemon
from perf.curves.brokers import (
    BODY,
    BULK,
    MIB,
    OUT,
    STREAM,
    SUBJECT,
    broker,
    pair_costs,
    publish_bulk,
)
from perf.curves.curve import Curve, Gathering, Plan, Say

GIB = 1 << 30
RECORD_BYTES = 145
"""Bytes that a record of 140 bytes takes in the log, about."""
SPARE_BYTES = 15 * GIB
"""Bytes of the disk that are left to others."""
UNSYNCED = 100_000
PORTION = 200_000


def measure(points: Sequence[int], runs: int, say: Say) -> Curve:
    """Measure the curve, as far as the disk has room."""
    OUT.mkdir(exist_ok=True)
    free = shutil.disk_usage(OUT).free
    wanted = [mib for mib in points if mib * MIB + SPARE_BYTES <= free]
    gathered = Gathering()
    with broker([f"journal.ring_bytes={max(wanted) * MIB + 2 * GIB}"]) as daemon:
        for mib in wanted:
            say(f"{mib:,} MiB of log")
            began = time.perf_counter()
            appended = asyncio.run(fill(daemon, mib * MIB))
            if appended:
                seconds = time.perf_counter() - began
                gathered.add("filling, wall a record", "us", mib, [seconds / appended * 1e6])
            at_size(gathered, daemon, mib, runs)
    note = f"{free / GIB:.0f} GiB of the disk were free"
    if len(wanted) < len(points):
        note += (
            f"; left out for want of room: {', '.join(f'{n:,} MiB' for n in points[len(wanted) :])}"
        )
    return Curve(
        PLAN.name, PLAN.title, PLAN.axis, gathered.lines(),
        "flat: a start reads the segments' headers and the last segment", note,
    )  # fmt: skip


def at_size(gathered: Gathering, daemon: Daemon, mib: int, runs: int) -> None:
    """Measure starts, first records and appends at one size."""
    costs = pair_costs(daemon, runs, BULK // 4)
    gathered.add("append in bulk, CPU a record", "us", mib, [c.bulk_cpu_us for c in costs])
    gathered.add("append alone, CPU a record", "us", mib, [c.lone_cpu_us for c in costs])
    starts: dict[str, list[float]] = {"in order": [], "SIGKILL": []}
    first: dict[str, list[float]] = {"beginning": [], "middle": []}
    for _ in range(runs):
        daemon.stop()
        starts["in order"].append(started(daemon))
        asyncio.run(unfinished(daemon))
        daemon.kill()
        starts["SIGKILL"].append(started(daemon))
        # The first after a start: nothing of the index is in memory.
        for name, share in (("beginning", 0.0), ("middle", 0.5)):
            first[name].append(asyncio.run(first_record_ms(daemon, share)))
    for name, times in starts.items():
        gathered.add(f"start after {name}", "s", mib, times)
    for name, times in first.items():
        gathered.add(f"first record from the {name}", "ms", mib, times)
    gathered.add("broker's memory", "MiB", mib, [daemon.own_bytes() / MIB])


def started(daemon: Daemon) -> float:
    """Return the seconds of a start."""
    began = time.perf_counter()
    daemon.start(wait_s=300)
    return time.perf_counter() - began


async def end_of_log(client: Any) -> int:
    """Return the bytes ever appended to ring main."""
    return int((await client.broker_info()).more["rings"]["main"]["end_lsn"])


async def fill(daemon: Daemon, size: int) -> int:
    """Append until the log has so many bytes; returns how many records that took."""
    appended = 0
    async with connect(daemon.endpoint) as client:
        while (missing := size - await end_of_log(client)) > PORTION * RECORD_BYTES:
            count = max(PORTION, int(missing / RECORD_BYTES * 0.98) // PORTION * PORTION)
            await publish_bulk(client, STREAM, count)
            appended += count
    return appended


async def unfinished(daemon: Daemon) -> None:
    """Leave records after the last sync for a SIGKILL to meet."""
    async with connect(daemon.endpoint) as client:
        await client.publish_many(STREAM, [BODY] * UNSYNCED, subject=SUBJECT, confirm="stored")


async def first_record_ms(daemon: Daemon, share: float) -> float:
    """Return milliseconds from connecting to the first record, so far into the stream."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with connect(daemon.endpoint) as client:
        start: Any = "earliest"
        if share:
            facts = await client.stream_info(STREAM)
            start = facts.first + int((facts.tail - facts.first) * share)
        async for batch in client.subscribe(STREAM, start=start).batches():
            if not len(batch):
                raise SystemExit("an empty batch")
            return (loop.time() - began) * 1e3
    raise SystemExit("no record came back")


PLAN = Plan(
    "journal", "Start-up, first record and appends against the size of the log", "MiB of log",
    (64, 256, 1_024, 4_096, 20_480), (64, 256), measure,
)  # fmt: skip
