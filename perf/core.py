"""What the broker core costs by itself: no sockets, no disk, one process.

A fake shell answers every bundle at once. Prints publishes and deliveries a second and the
processor time that a publish costs from receive() to the last take_ready() of its step.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

from malamute_protocol import commands as wire
from malamute_protocol.commands import Level
from malamute_protocol.encode import encode, encode_fixed
from malamute_protocol.stamp import Stamp
from malamute_py.broker import Appended, Broker, BrokerSettings, RecoveredState

NOW_MS = 1_700_000_000_000
STAMP = Stamp(1, 0, 0, 0, 1, 0, NOW_MS, 1, 0, 96, 1, 0, 0).pack()
"""Any stamp will do: nobody decodes what is delivered here."""


class Bench:
    """A core whose journal is nothing but an end that moves."""

    def __init__(self) -> None:
        numbers = iter(range(1, 1 << 30))
        self.broker = Broker(
            # The share would stop peers that answer no PING, as these do not.
            BrokerSettings(share_min_bytes=1 << 60, share_max_bytes=1 << 60, heartbeat_ms=60_000),
            uuid=bytes(16),
            epoch=1,
            state=RecoveredState(),
            random=lambda count: next(numbers).to_bytes(count, "big"),
        )
        self.end = 0
        self.deliveries = 0
        self.sends = 0

    def hello(self, link: int) -> None:
        hello = wire.Hello((1, 1), struct.pack("<QQ", 1, link))
        self.broker.receive(link, "", [hello], [], NOW_MS)
        self.step()

    def step(self) -> None:
        broker = self.broker
        while ready := broker.take_ready():
            for bundle in ready.appends:
                self.end += 96 + len(bundle.batches[0].content)
                broker.appended(Appended(bundle.token, (STAMP,), self.end))
            self.sends += len(ready.sends)
            if ready.appends:
                broker.synced("main", self.end, NOW_MS)

    def publish(self, contents: list[bytes], tracker: int) -> None:
        commands = [wire.Publish("s", tracker + n) for n in range(len(contents))]
        self.broker.receive(1, "", commands, contents, NOW_MS)
        self.step()


def content_of(records: int, width: int, subjects: int) -> bytes:
    if subjects == 1:
        return encode_fixed(bytes(records * width), width, subject="orders.eu.new")
    table = [f"orders.{n}.new" for n in range(subjects)]
    codes = [n % subjects for n in range(records)]
    return encode([bytes(width)] * records, subject_table=table, subject_codes=codes)


def measured(seconds: float, once: Callable[[int], None]) -> tuple[int, float]:
    """(how often, in what time) at the median speed of runs of 20, after a warm-up.

    The median of processor time, since others use the machine too.
    """
    for n in range(50):
        once(n)
    count, begun, times = 50, process_time(), []
    while process_time() - begun < seconds:
        before = process_time()
        for _ in range(20):
            once(count)
            count += 1
        times.append(process_time() - before)
    return count - 50, (count - 50) / 20 * median(times)


def scenario(
    seconds: float, *, subscribers: int, records: int, width: int, idle: int = 0,
    bundled: int = 1, subjects: int = 1, pattern: list[Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    bench = Bench()
    bench.hello(1)
    for n in range(idle):
        link = 1_000_000 + n // 50
        if n % 50 == 0:
            bench.hello(link)
        subscribe = wire.Subscribe(n % 50, "s", ["topic", f"idle.{n}"], [1], 1 << 40, 1 << 50)
        bench.broker.receive(link, "", [subscribe], [], NOW_MS)
    bench.step()
    for n in range(subscribers):
        bench.hello(2 + n)
        subscribe = wire.Subscribe(1, "s", pattern or ["topic", "orders.#"], [1], 1 << 60, 1 << 60)
        bench.broker.receive(2 + n, "", [subscribe], [], NOW_MS)
    bench.step()
    contents = [content_of(records, width, subjects)] * bundled
    taken, elapsed = measured(seconds, lambda n: bench.publish(contents, 1 + n * bundled))
    publishes = taken * bundled
    deliveries = publishes * subscribers
    assert bench.broker.counters["batches_in"] >= publishes
    assert bench.broker.counters["deliveries"] >= deliveries
    return {
        "subscribers": subscribers,
        "idle": idle,
        "records": records,
        "batch_bytes": 96 + len(contents[0]),
        "subjects": subjects,
        "a_message": bundled,
        "publishes_per_s": round(publishes / elapsed),
        "deliveries_per_s": round(deliveries / elapsed),
        "records_out_per_s": round(deliveries * records / elapsed),
        "us_per_publish": round(elapsed / publishes * 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="a scenario")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [
        scenario(options.seconds, subscribers=subscribers, records=records, width=width)
        for records, width in ((1, 12), (4096, 12), (64, 1024))
        for subscribers in (0, 1, 100, 1000)
    ]
    rows.append(scenario(options.seconds, subscribers=1, records=1, width=12, bundled=100))
    rows.append(scenario(options.seconds, subscribers=1, records=1, width=12, idle=25_000))
    rows.append(scenario(options.seconds, subscribers=1, records=4096, width=12, idle=25_000))
    rows.append(scenario(options.seconds, subscribers=1, records=4096, width=12, subjects=64))
    rows.append(
        scenario(
            options.seconds, subscribers=100, records=4096, width=12, subjects=64,
            pattern=["topic", "orders.7.*"],
        )
    )  # fmt: skip
    if options.json:
        print(json.dumps({"level": Level.SYNCED.name, "rows": rows}))
        return
    names = list(rows[0])
    print("  ".join(f"{name:>17}" for name in names))
    for row in rows:
        print("  ".join(f"{row[name]:>17,}" for name in names))


if __name__ == "__main__":
    main()
