"""The cost of a record against the number of subscriptions.

Three lines come from the core alone, up to a million: a record whose subject was seen before, a
header never seen before, and a new subscription. The lines over the wire hold the most
subscriptions that the default limits allow: 1,000 for a client, 100,000 in all; none of them
selects records of the pair, so that nothing but their number can cost.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import NamedTuple

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode, encode_fixed
from malamute_protocol.pattern import Pattern
from perf.curves.apart import apart, own_bytes
from perf.curves.bare import BareBroker, Clock
from perf.curves.brokers import BULK, MIB, broker, crowd, idle_share, pair_costs
from perf.curves.curve import Curve, Gathering, Plan, Say

A_LINK = 1_000
WIRE_MAX = 100_000
FIELDS_MAX = 100_000
RECORDS = 100
KNOWN_BATCHES = 2_000
NEW_HEADERS = 2_000
CREDIT = 1 << 50
PUBLISHER = 1 << 40


class InCore(NamedTuple):
    """Costs of one broker without sockets and disk at one count, one for each run."""

    known_us: list[float]
    new_us: list[float]
    subscribe_us: float
    memory_mib: float


def in_core(count: int, runs: int, kind: str) -> InCore:
    """Measure in this process with so many subscriptions of one kind of pattern."""
    before = own_bytes()
    bare = BareBroker()
    bare.hello(PUBLISHER)
    with Clock() as subscribing:
        for first in range(0, count, A_LINK):
            link = first // A_LINK + 1
            bare.hello(link)
            bare.say(
                link,
                *(
                    wire.Subscribe(n - first, "s", pattern(kind, n), [1], CREDIT, CREDIT)
                    for n in range(first, min(first + A_LINK, count))
                ),
            )
    memory = own_bytes() - before
    # As in the daemon: the collector does not look at lasting objects again and again.
    gc.collect()
    known = [encode_fixed(bytes(140 * RECORDS), 140, subject="seen.before")]
    known_us, new_us = [], []
    bare.publish(PUBLISHER, "s", known)
    for run in range(runs):
        with Clock() as clock:
            for n in range(KNOWN_BATCHES):
                bare.publish(PUBLISHER, "s", known, n + 1)
        known_us.append(clock.seconds / KNOWN_BATCHES / RECORDS * 1e6)
        fresh = [header(kind, run * NEW_HEADERS + n, count) for n in range(NEW_HEADERS)]
        with Clock() as clock:
            for n, content in enumerate(fresh):
                bare.publish(PUBLISHER, "s", [content], n + 1)
        new_us.append(clock.seconds / NEW_HEADERS * 1e6)
    assert bare.core.gauges["subscriptions"] == count
    assert bare.core.counters["deliveries"] >= runs * NEW_HEADERS, "each is selected by one"
    return InCore(known_us, new_us, subscribing.seconds / count * 1e6, memory / MIB)


def pattern(kind: str, number: int) -> Pattern:
    """Return the pattern of one subscription: no two are the same."""
    if kind == "topic":
        return ["topic", f"plant.{number}.*.state"]
    criteria = [["plant", str(number)], ["line", str(number % 10)], ["kind", "state"]]
    return ["fields", "all", criteria]


def header(kind: str, place: int, count: int) -> bytes:
    """Make a batch of one record with a new header, which one subscription selects."""
    number = place % count
    if kind == "topic":
        return encode([bytes(140)], subject=f"plant.{number}.{place}.state")
    return encode(
        [bytes(140)], subject="s",
        fields={"plant": str(number), "line": str(number % 10), "kind": "state", "n": str(place)},
    )  # fmt: skip


def measure(points: Sequence[int], runs: int, say: Say) -> Curve:
    """Measure the curve; counts above the default limits are measured with the core alone."""
    gathered = Gathering()
    for count in points:
        say(f"{count:,} subscriptions, the core alone")
        found = apart(in_core, count, runs, "topic")
        gathered.add("known subject, in-core, CPU a record", "us", count, found.known_us)
        gathered.add("new header, topics, in-core, CPU", "us", count, found.new_us)
        gathered.add("subscribing, in-core, CPU", "us", count, [found.subscribe_us])
        gathered.add("memory, in-core", "MiB", count, [found.memory_mib])
        if count <= FIELDS_MAX:
            fields = apart(in_core, count, runs, "fields")
            gathered.add("new header, three fields, in-core, CPU", "us", count, fields.new_us)
        if count <= WIRE_MAX:
            say(f"{count:,} subscriptions over the wire")
            on_the_wire(gathered, count, runs)
    return Curve(
        PLAN.name, PLAN.title, PLAN.axis, gathered.lines(), "flat, memory in proportion",
        f"in-core: the broker's core without sockets and disk, which alone reaches {points[-1]:,};"
        " by default a client holds 1,000 subscriptions and a broker 100,000",
    )  # fmt: skip


def on_the_wire(gathered: Gathering, count: int, runs: int) -> None:
    """Measure a pair beside clients that hold so many subscriptions."""
    clients = -(-count // A_LINK)
    each = -(-count // clients)
    # The pair's own subscriptions come on top of the most that the default allows.
    with (
        broker([f"streams.subscriptions_max={WIRE_MAX + 10}", "quotas.subscriptions=0"]) as daemon,
        crowd(daemon.endpoint, clients, each),
    ):
        share = idle_share(daemon)
        costs = pair_costs(daemon, runs, BULK)
        gathered.add("in bulk, CPU a record", "us", count, [c.bulk_cpu_us for c in costs])
        gathered.add("in bulk, wall a record", "us", count, [c.bulk_wall_us for c in costs])
        gathered.add("alone, CPU a record", "us", count, [c.lone_cpu_us for c in costs])
        gathered.add("at rest, CPU", "%", count, [share * 100])
        gathered.add("broker's memory", "MiB", count, [daemon.own_bytes() / MIB])


PLAN = Plan(
    "subscriptions", "Cost of a record against subscriptions", "subscriptions",
    (10, 1_000, 100_000, 1_000_000), (10, 1_000), measure,
)  # fmt: skip
