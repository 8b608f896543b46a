"""The cost of a message against the number that wait in its mailbox already.

One mailbox is filled to each point and never emptied. At each point a few thousand more messages
are put one by one, as many are delivered and acknowledged one by one, and the broker's memory is
measured. The fill is puts of ten messages, as a client's sends that wait together become.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import malamute_py as malamute
from malamute_py.client.aio.mail import Mail
from malamute_py.demo.daemon import Daemon
from perf.curves.brokers import MIB, Cost, broker
from perf.curves.curve import Curve, Gathering, Plan, Say

BODY = b"x" * 140
SOME = 2_000
IN_FLIGHT = 200
BOX = "backlog"
TOGETHER = 10


class Costs(NamedTuple):
    """Costs of one run at one point."""

    put: Cost
    delivered: Cost
    acknowledged: Cost
    first_ms: float


def measure(points: Sequence[int], runs: int, say: Say) -> Curve:
    """Measure the curve: one broker, whose mailbox grows from point to point."""
    gathered = Gathering()
    with broker() as daemon:
        empty = daemon.own_bytes()
        for count in points:
            say(f"{count:,} messages in the mailbox")
            asyncio.run(fill(daemon, count))
            held = daemon.own_bytes()
            costs = [asyncio.run(one_by_one(daemon, count)) for _ in range(runs)]
            for name, part in (
                ("put", [c.put for c in costs]),
                ("deliver", [c.delivered for c in costs]),
                ("acknowledge", [c.acknowledged for c in costs]),
            ):
                gathered.add(f"{name}, CPU a message", "us", count, [c.us(SOME) for c in part])
                gathered.add(
                    f"{name}, wall a message", "us", count, [c.wall_s / SOME * 1e6 for c in part]
                )
            gathered.add("first message, wall", "ms", count, [c.first_ms for c in costs])
            gathered.add("broker's memory", "MiB", count, [held / MIB])
            gathered.add("memory, messages alone", "MiB", count, [max(0, held - empty) / MIB])
    return Curve(
        PLAN.name, PLAN.title, PLAN.axis, gathered.lines(), "flat; memory in proportion",
        f"filled {TOGETHER} messages a put",
    )  # fmt: skip


async def fill(daemon: Daemon, count: int) -> None:
    """Put messages one by one until so many wait."""
    async with malamute.connect(daemon.endpoint) as client:
        await client.edit_mailbox(BOX)
        missing = count - int((await client.mailbox_info(BOX)).messages)
        sizes = [TOGETHER] * (missing // TOGETHER) + [1] * (missing % TOGETHER)
        waiting: list[Any] = []
        for size in sizes:
            waiting.append(client.send_many(BOX, [BODY] * size))
            if len(waiting) == IN_FLIGHT:
                await asyncio.gather(*waiting)
                waiting.clear()
        await asyncio.gather(*waiting)
        if int((await client.mailbox_info(BOX)).messages) != count:
            raise SystemExit(f"the mailbox does not hold {count} messages")


async def put(client: malamute.Client, count: int) -> None:
    """Put so many messages, a put each, many in flight."""
    waiting: list[Any] = []
    for _ in range(count):
        # A key of its own keeps a message from travelling with its neighbours.
        waiting.append(client.send_nowait(BOX, BODY, key=os.urandom(16)))
        if len(waiting) == IN_FLIGHT:
            await asyncio.gather(*waiting)
            waiting.clear()
    await asyncio.gather(*waiting)


async def one_by_one(daemon: Daemon, count: int) -> Costs:
    """Put some, take as many, acknowledge them: the mailbox holds as many as before."""
    loop = asyncio.get_running_loop()
    async with malamute.connect(daemon.endpoint) as client:
        with Cost(daemon) as putting:
            await put(client, SOME)
        began, first_ms = loop.time(), 0.0
        async with client.inbox(BOX, ack="manual", credit_records=SOME) as inbox:
            mail: list[Mail] = []
            with Cost(daemon) as taking:
                async for one in inbox:
                    if not mail:
                        first_ms = (loop.time() - began) * 1e3
                    mail.append(one)
                    if len(mail) == SOME:
                        break
            with Cost(daemon) as acknowledging:
                for first in range(0, SOME, IN_FLIGHT):
                    await asyncio.gather(*(each.ack() for each in mail[first : first + IN_FLIGHT]))
        left = int((await client.mailbox_info(BOX)).messages)
    if left != count:
        raise SystemExit(f"{left} messages are left in the mailbox instead of {count}")
    return Costs(putting, taking, acknowledging, first_ms)


PLAN = Plan(
    "backlog", "Cost of a message against the backlog of its mailbox", "messages waiting",
    (1, 1_000, 10_000, 100_000, 1_000_000), (1, 1_000), measure,
)  # fmt: skip
