"""The cost of clients that are connected and do nothing, at rest and beside an active pair.

The clients are DEALER sockets of libzmq that answer heartbeats, a few thousand in a process (see
crowd.py); each has two subscriptions on the stream of the pair that select none of its records.
They take descriptors: two each in their processes and one in the broker, so `ulimit -n` bounds
them.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence

from perf.curves.brokers import (
    BULK,
    CLIENTS_A_PROCESS,
    MIB,
    Cost,
    broker,
    crowd,
    idle_share,
    pair_costs,
    until_quiet,
)
from perf.curves.curve import Curve, Gathering, Plan, Say

SPARE = 200
SUBSCRIPTIONS = 2
SETTLING_S = 6.0
"""Time within which the checkpoint's process has begun."""
REST_S = 10.0
"""Time of two heartbeats of each client."""


def measure(points: Sequence[int], runs: int, say: Say) -> Curve:
    """Measure the curve, as far as the limits of open files and of clients allow."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    gathered = Gathering()
    left_out = [count for count in points if count + SPARE > files]
    for count in points:
        if count not in left_out:
            say(f"{count:,} clients")
            beside(gathered, count, runs)
    note = f"ulimit -n is {files:,}; at most {CLIENTS_A_PROCESS:,} clients in a process"
    if left_out:
        note += f"; left out for want of descriptors: {', '.join(f'{n:,}' for n in left_out)}"
    return Curve(
        PLAN.name, PLAN.title, PLAN.axis, gathered.lines(),
        "flat; memory and the time at rest, which is their heartbeats, in proportion", note,
    )  # fmt: skip


def beside(gathered: Gathering, count: int, runs: int) -> None:
    """Measure a pair beside so many clients, their coming and going, and the broker at rest."""
    # Room for the pair, which comes on top of the most clients that the default allows.
    with broker([f"links.links_max={max(10_000, count + SPARE)}", "quotas.links=0"]) as daemon:
        before = daemon.own_bytes()
        with Cost(daemon) as coming, crowd(daemon.endpoint, count, SUBSCRIPTIONS) as processes:
            coming.__exit__()
            came_us = coming.us(count)
            held = daemon.own_bytes()
            time.sleep(SETTLING_S)
            share = idle_share(daemon, REST_S)
            costs = pair_costs(daemon, runs, BULK)
            with Cost(daemon) as going:
                for process in processes:
                    process.kill()
                    process.wait()
                until_quiet(going)
        gathered.add("in bulk, CPU a record", "us", count, [c.bulk_cpu_us for c in costs])
        gathered.add("in bulk, wall a record", "us", count, [c.bulk_wall_us for c in costs])
        gathered.add("alone, CPU a record", "us", count, [c.lone_cpu_us for c in costs])
        gathered.add("alone, wall a record", "us", count, [c.lone_wall_us for c in costs])
        gathered.add("a client that comes, CPU", "us", count, [came_us])
        gathered.add("a client that goes, CPU", "us", count, [going.us(count)])
        gathered.add("at rest, CPU", "%", count, [share * 100])
        gathered.add("memory with them", "MiB", count, [held / MIB])
        gathered.add("memory a client", "KiB", count, [(held - before) / 1024 / count])


PLAN = Plan(
    "clients", "Cost of a record, and of rest, against clients", "clients connected",
    (1, 100, 1_000, 10_000), (1, 100), measure,
)  # fmt: skip
