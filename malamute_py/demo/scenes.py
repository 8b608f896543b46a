"""The scenes of the demonstration: each does one thing with the broker and checks it.

Owns what is shown and in which order. Every scene takes the stage (daemon, table,
figures, report) and adds checks to the report; a scene that cannot go on raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from malamute_protocol import pattern
from malamute_protocol.batch import Batch
from malamute_protocol.commands import Pattern
from malamute_protocol.errors import Timeout
from malamute_py.client.aio.client import Client, connect
from malamute_py.client.aio.subscription import Subscription
from malamute_py.demo.daemon import Daemon
from malamute_py.demo.flights import Figures, Flights
from malamute_py.demo.report import Report

STREAM = "flights"
MIB = 1 << 20
SILENCE_S = 30.0
"""Time without progress after which a scene gives a subscription up."""
HEARTBEAT_MS = 250
"""Interval at which the broker tells the position of a subscription that gets no records."""
IN_FLIGHT_MAX = 32
"""Publications in flight when the broker is killed."""
RESIDENT_MAX_BYTES = 32 * MIB
"""Bound on the change of the broker's memory while one subscriber lags by some 120 MiB."""


@dataclass(slots=True)
class Stage:
    """The parts that every scene works with."""

    daemon: Daemon
    flights: Flights
    figures: Figures
    report: Report


def row_of(body: bytes) -> int:
    """Return the row number that a record's body carries."""
    return int(json.loads(body)["row"])


async def batches_until(subscription: Subscription, end: int) -> AsyncIterator[Batch]:
    """Yield the batches of a live subscription until it has covered offset `end`.

    A selection is known to be complete only when the records after its last one are covered, too.
    Gives up, so that the checks fail, when nothing moves for SILENCE_S.
    """
    reached = -1
    moved = time.monotonic()
    while reached < end and time.monotonic() - moved < SILENCE_S:
        with contextlib.suppress(Timeout):
            batch = await subscription.next_batch(timeout_ms=200)
            if batch is None:
                break
            yield batch
        # The position moves also over records that are not selected, as the broker tells of them.
        place = subscription.position
        if place is not None and place.next > reached:
            reached, moved = place.next, time.monotonic()


async def rows_until(subscription: Subscription, end: int) -> list[int]:
    """Return row numbers of a live subscription until it has covered offset `end`."""
    batches = batches_until(subscription, end)
    return [row_of(body) async for batch in batches for body in batch.bodies()]


async def rows_to_end(subscription: Subscription) -> list[int]:
    """Return row numbers of a subscription that has an end."""
    return [row_of(body) async for batch in subscription.batches() for body in batch.bodies()]


PATTERNS: tuple[tuple[str, Pattern, str], ...] = (
    ("everything", pattern.everything(), "true"),
    ("topic flights.JFK.#", pattern.topic("flights.JFK.#"), "origin = 'JFK'"),
    ("topic flights.*.UA.*", pattern.topic("flights.*.UA.*"), "carrier = 'UA'"),
    ("prefix flights.LGA.A", pattern.prefix("flights.LGA.A"),
     "origin = 'LGA' and carrier like 'A%'"),
    ("regex (LAX|SFO)$", pattern.regex(r"\.(LAX|SFO)$"), "dest in ('LAX', 'SFO')"),
    ("all fields: origin=EWR, delayed", pattern.fields("origin=EWR", "delayed"),
     "origin = 'EWR' and delayed"),
    ("any field: carrier=HA, cancelled",
     pattern.fields("carrier=HA", "cancelled", mode="any"),
     "carrier = 'HA' or cancelled"),
    ("all of: to BOS, delayed, not from EWR",
     pattern.all_of(pattern.topic("flights.*.*.BOS"), pattern.fields("delayed"),
                    pattern.not_(pattern.prefix("flights.EWR."))),
     "dest = 'BOS' and delayed and origin <> 'EWR'"),
)  # fmt: skip
"""Name, pattern, and the selection of the pattern in SQL."""


async def publish(client: Client, stream: str, flights: Flights) -> None:
    """Publish a table as records, and wait until the last of them is confirmed as on disk."""
    await client.publish_many(
        stream,
        flights.bodies,
        subjects=flights.subjects,
        fields=flights.fields,
        client_time_ms=flights.times_ms,
    )


async def year(stage: Stage) -> None:
    """Publish the year while live, late and slow subscribers read; check what each of them gets.

    Live ones subscribe before the first record, one for each of PATTERNS.
    """
    report, flights, figures = stage.report, stage.flights, stage.figures
    report.begin("A year of departures, live")
    endpoint = stage.daemon.endpoint
    async with (
        connect(endpoint) as producer,
        connect(endpoint, heartbeat_ms=HEARTBEAT_MS) as reader,
    ):
        expected = {name: figures.rows(where) for name, _, where in PATTERNS}
        subscriptions = {
            name: reader.subscribe(STREAM, selection, start="earliest", create=True)
            for name, selection, _ in PATTERNS
        }
        readers = {
            name: asyncio.create_task(rows_until(each, len(flights)))
            for name, each in subscriptions.items()
        }
        half_way = asyncio.Event()
        others = [
            asyncio.create_task(_late(stage, half_way)),
            asyncio.create_task(_slow(stage, half_way)),
        ]
        half = len(flights) // 2
        began = time.perf_counter()
        await publish(producer, STREAM, flights.slice(0, half))
        half_way.set()
        await publish(producer, STREAM, flights.slice(half, len(flights)))
        seconds = time.perf_counter() - began
        report.say(
            f"{len(flights):,} records published and confirmed on disk in {seconds:.1f} s "
            f"while {len(PATTERNS) + 2} subscribers read them"
        )
        info = await producer.stream_info(STREAM)
        report.equal("records in the stream", figures.count(), info.tail - info.first)
        for name, task in readers.items():
            report.same_rows(f"live: {name}", expected[name], await task)
        for other in others:  # They add their checks to the report themselves.
            await other


async def _late(stage: Stage, half_way: asyncio.Event) -> None:
    """Subscribe from the start when half of the year is published; check that it catches up.

    It reads the journal first, until the broker feeds it the newest records as they come.
    """
    await half_way.wait()
    where = "carrier = 'B6'"
    expected = stage.figures.rows(where)
    async with connect(stage.daemon.endpoint, heartbeat_ms=HEARTBEAT_MS) as client:
        subscription = client.subscribe(STREAM, pattern.topic("flights.*.B6.#"), start="earliest")
        rows = await rows_until(subscription, len(stage.flights))
        stage.report.same_rows("late: from the journal, then live", expected, rows)
        for _ in range(int(SILENCE_S / 0.02)):
            if subscription.live:
                break
            await asyncio.sleep(0.02)
        stage.report.holds(
            "late: the broker says that it caught up", "live",
            "live" if subscription.live else "on demand", subscription.live,
        )  # fmt: skip


async def _slow(stage: Stage, half_way: asyncio.Event) -> None:
    """Read everything with little credit and long pauses while the second half is published.

    The checks: it falls behind, loses nothing, and the broker's memory does not grow for it.
    """
    await half_way.wait()
    before = stage.daemon.own_bytes()
    async with connect(stage.daemon.endpoint, heartbeat_ms=HEARTBEAT_MS) as client:
        subscription = client.subscribe(
            STREAM, pattern.everything(), start="earliest",
            credit_records=4096, credit_bytes=256 << 10,
        )  # fmt: skip
        expected = stage.figures.rows("true")
        rows: list[int] = []
        highest = before
        furthest = 0
        async for batch in batches_until(subscription, len(stage.flights)):
            rows.extend(row_of(body) for body in batch.bodies())
            # Slow for the first records only: the rest of the year is to be read in time.
            if len(rows) < 40_000:
                await asyncio.sleep(0.1)
            highest = max(highest, stage.daemon.own_bytes())
            if len(rows) < 60_000:
                info = await client.stream_info(STREAM)
                furthest = max(furthest, info.tail - len(rows))
        moved = highest - before
        stage.report.holds("slow: it fell behind", "by a third",
                           f"by {furthest:,} records", furthest > len(expected) // 3)  # fmt: skip
        stage.report.same_rows("slow: nothing lost", expected, rows)
        stage.report.holds(
            "slow: the broker's memory moved by", f"less than {RESIDENT_MAX_BYTES // MIB} MiB",
            f"{moved / MIB:.1f} MiB", moved < RESIDENT_MAX_BYTES,
        )  # fmt: skip


async def replay(stage: Stage) -> None:
    """Read one day by scheduled time, and three destinations by subject; check both row by row."""
    report, figures = stage.report, stage.figures
    report.begin("Replay")
    day = 1372896000000  # 2013-07-04T00:00Z
    following = day + 86_400_000
    rare = figures.rarest_destinations()
    async with connect(stage.daemon.endpoint) as client:
        began = time.perf_counter()
        subscription = client.subscribe(
            STREAM, start="earliest", until="tail", client_time=(day, following)
        )
        report.same_rows(
            "the fourth of July, by scheduled time",
            figures.rows("at_ms >= ? and at_ms < ?", [day, following]),
            await rows_to_end(subscription),
        )
        report.say(f"in {time.perf_counter() - began:.3f} s")
        began = time.perf_counter()
        subscription = client.subscribe(
            STREAM,
            pattern.any_of(*(pattern.topic(f"flights.*.*.{each}") for each in rare)),
            start="earliest",
            until="tail",
        )
        report.same_rows(
            f"the three rarest destinations: {', '.join(rare)}",
            figures.rows("dest in (?, ?, ?)", rare),
            await rows_to_end(subscription),
        )
        report.say(f"in {time.perf_counter() - began:.3f} s, out of {figures.count():,} records")


async def sudden_death(stage: Stage) -> None:
    """Kill the broker amid publishing, and start it again.

    The checks: what was confirmed before is still there, and in the end, since the client sends
    again what was not, each record once.
    """
    report, flights = stage.report, stage.flights
    report.begin("Sudden death")
    stream = "flights.again"
    chunk = min(2_000, -(-len(flights) // 100))  # rows published together: at least 100 times
    # Parts of the year, each known by its first row.
    confirmed_before_death: set[int] = set()
    flying = 0
    async with connect(stage.daemon.endpoint) as client:
        waiting = {}
        killed = False
        for start in range(0, len(flights), chunk):
            part = flights.slice(start, start + chunk)
            waiting[start] = asyncio.create_task(publish(client, stream, part))
            await asyncio.sleep(0)  # It begins, so that parts are published in their order.
            if not killed and start >= len(flights) // 2:
                killed = True
                confirmed_before_death = {
                    begun for begun, task in waiting.items() if task.done() and not task.exception()
                }
                stage.daemon.kill()
                flying = len(waiting) - len(confirmed_before_death)
                stage.daemon.start()
            flight = [task for task in waiting.values() if not task.done()]
            if len(flight) > IN_FLIGHT_MAX:
                await asyncio.wait(flight, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*waiting.values())
        subscription = client.subscribe(stream, start="earliest", until="tail")
        rows = await rows_to_end(subscription)
    counts = np.bincount(np.asarray(rows, dtype=np.int64), minlength=len(flights))
    missing = sum(
        int((counts[begun : begun + chunk] == 0).sum()) for begun in confirmed_before_death
    )
    done = len(confirmed_before_death)
    report.holds("killed amid publishing: confirmed, in flight", "some of each",
                 f"{done * chunk:,}, {flying * chunk:,}", done > 0 and flying > 0)  # fmt: skip
    report.equal("confirmed before the kill and missing after it", 0, missing)
    report.equal("records that are there twice", 0, int((counts > 1).sum()))
    report.same_rows("the client finished by itself",
                     stage.figures.rows("true"), rows)  # fmt: skip


async def days(stage: Stage) -> tuple[list[str], list[int], list[int]]:
    """Count departures a day, and late ones, from the stream's records by their columns.

    The checks: each record, and each day's counts. Returns the series of the chart: days, their
    departures, and how many of these were late.
    """
    report = stage.report
    report.begin("The year, as read back")
    # (row, subject, time, delayed, delay), as Figures.records() has them.
    found: list[tuple[int, str, int, bool, float | None]] = []
    async with connect(stage.daemon.endpoint) as client:
        subscription = client.subscribe(STREAM, start="earliest", until="tail")
        async for batch in subscription.batches():
            table: Any = batch.to_arrow()
            times = table.column("client_time").cast("timestamp[ms]").cast("int64").to_pylist()
            subjects = table.column("subject").to_pylist()
            fields = table.column("fields").to_pylist()
            bodies = map(json.loads, table.column("body").to_pylist())
            found.extend(
                (body["row"], subject, time_ms, "delayed" in dict(its), body["dep_delay"])
                for body, subject, time_ms, its in zip(bodies, subjects, times, fields, strict=True)
            )
    expected = stage.figures.records()
    differing = sum(a != b for a, b in zip(expected, found, strict=False))
    report.equal("records of which subject, time, field or delay differ", 0,
                 differing + abs(len(expected) - len(found)))  # fmt: skip
    times_ms = np.array([time_ms for _, _, time_ms, _, _ in found])
    delayed = np.array([late for _, _, _, late, _ in found])
    # The day begins at 5:00 UTC, as New York's does in winter.
    local_day = (times_ms // 1000 - 5 * 3600) // 86_400
    first = int(local_day.min())
    total = np.bincount(local_day - first)
    of_these = np.bincount(local_day[delayed] - first, minlength=len(total))
    names = [str(np.datetime64(first + day, "D")) for day in range(len(total))]
    shown = [
        (name, int(count), int(slow))
        for name, count, slow in zip(names, total, of_these, strict=True)
        if count
    ]
    by_table = stage.figures.departures_a_day()
    report.holds(
        "departures and late ones of each day",
        f"{len(by_table)} days",
        f"{sum(a == b for a, b in zip(by_table, shown, strict=False))} days agree",
        by_table == shown,
    )
    return names, [int(each) for each in total], [int(each) for each in of_these]
