"""Growth of a broker's start and its memory with the number of its mailboxes.

Each mailbox is made by first use and holds one message of 140 bytes. Start-up is timed from the
command to the port that listens, after an orderly stop, and after SIGKILL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import malamute_py as malamute
from malamute_py.demo.daemon import Daemon
from perf.curves.brokers import MIB, Cost, broker, idle_share
from perf.curves.curve import Curve, Gathering, Plan, Say

BODY = b"x" * 140
IN_FLIGHT = 2_000
LISTED = 1_000


def measure(points: Sequence[int], runs: int, say: Say) -> Curve:
    """Measure the curve: one broker, which gets more mailboxes from point to point."""
    gathered = Gathering()
    have = 0
    with broker() as daemon:
        for count in points:
            say(f"{count:,} mailboxes")
            with Cost(daemon) as cost:
                asyncio.run(make(daemon, have, count))
            gathered.add("first use, CPU a mailbox", "us", count, [cost.us(count - have)])
            have = count
            gathered.add("at rest, CPU", "%", count, [idle_share(daemon) * 100])
            gathered.add("memory", "MiB", count, [daemon.own_bytes() / MIB])
            for name, end in (("in order", daemon.stop), ("SIGKILL", daemon.kill)):
                times = []
                for _ in range(runs):
                    end()
                    began = time.perf_counter()
                    daemon.start(wait_s=300)
                    times.append(time.perf_counter() - began)
                gathered.add(f"start after {name}", "s", count, times)
            gathered.add("memory after the start", "MiB", count, [daemon.own_bytes() / MIB])
            page, first_ms = asyncio.run(ask(daemon, count))
            gathered.add("a page of the listing, wall", "ms", count, [page])
            gathered.add("first message after a start", "ms", count, [first_ms])
    return Curve(
        PLAN.name, PLAN.title, PLAN.axis, gathered.lines(),
        "in proportion: they are read at a start and kept in memory; the rest flat",
    )  # fmt: skip


def name_of(number: int) -> str:
    """Return the name of one mailbox."""
    return f"box.{number:07}"


async def make(daemon: Daemon, first: int, end: int) -> None:
    """Send to mailboxes that do not exist yet."""
    numbers = iter(range(first, end))
    async with malamute.connect(daemon.endpoint) as client:

        async def work() -> None:
            for number in numbers:
                await client.send(name_of(number), BODY)

        await asyncio.gather(*(work() for _ in range(min(IN_FLIGHT, end - first))))


async def ask(daemon: Daemon, count: int) -> tuple[float, float]:
    """Return milliseconds for the facts of mailboxes by prefix, and to the first message of one."""
    loop = asyncio.get_running_loop()
    async with malamute.connect(daemon.endpoint) as client:
        began = loop.time()
        page = await client.list_mailboxes(name_of(count - 1)[:-3])
        listed_ms = (loop.time() - began) * 1e3
        if not 0 < len(page) <= LISTED:
            raise SystemExit(f"{len(page)} mailboxes listed")
        began = loop.time()
        async with client.inbox(name_of(count - 1), ack="manual") as inbox:
            if await inbox.next() is None:
                raise SystemExit("the mailbox is empty")
        return listed_ms, (loop.time() - began) * 1e3


PLAN = Plan(
    "mailboxes", "Start-up and memory against mailboxes", "mailboxes",
    (100, 1_000, 10_000, 100_000), (100, 1_000), measure,
)  # fmt: skip
