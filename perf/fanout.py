"""How many deliveries a second one producer's records become at many subscribers.

    python -m perf.fanout                          # to 1, 10, 100 and 1,000, medians of three runs
    python -m perf.fanout --subscribers 100 --records 200000

Producer, broker and consumer are processes of their own; the consumer process holds a client, and
so a connection, for each subscriber. Records of 140 B in the bulk form, synced confirms, batches
consumed; each record begins with its number, and every subscriber compares all of them. A run
begins with the producer's first record and ends when the last subscriber has everything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import time
from typing import Any

import numpy as np

import malamute_py as malamute
from malamute_py.demo.daemon import Daemon
from perf._daemon import broker
from perf._roles import Role, play, say, word
from perf.replay import numbers_of

RECORDS = {1: 4_000_000, 10: 1_500_000, 100: 200_000, 1_000: 20_000}
CHUNK = 65_536


async def produce(options: dict[str, Any]) -> None:
    records, size, stream = options["records"], options["size"], options["stream"]
    chunks = []
    for first in range(0, records, CHUNK):
        count = min(CHUNK, records - first)
        column = np.full((count, size), ord("x"), np.uint8)
        numbers = np.arange(first, first + count, dtype="<u8")
        column[:, :8] = numbers.view(np.uint8).reshape(-1, 8)
        chunks.append(column.reshape(-1).view(f"V{size}").tolist())
    async with malamute.connect(options["endpoint"]) as client:
        await client.broker_info()
        say(ready=True)
        await word()
        begun, cpu = time.monotonic(), time.process_time()
        async with client.window(stream, confirm="synced") as window:
            for bodies in chunks:
                await window.publish_many(bodies, subject="perf")
        say(begun=begun, ended=time.monotonic(), cpu_s=time.process_time() - cpu)
        await word()


async def consume(options: dict[str, Any]) -> None:
    records, size, stream = options["records"], options["size"], options["stream"]
    wanted = np.arange(records)
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(options["subscribers"]):
            client = await stack.enter_async_context(malamute.connect(options["endpoint"]))
            subscription = client.subscribe(stream, strict=True)
            await subscription.accepted()
            readers.append((client, subscription))
        say(ready=True)
        cpu = time.process_time()

        async def read(client: Any, subscription: Any) -> int:
            received = batches = 0
            async for batch in subscription.batches():
                numbers = numbers_of(batch, size)
                after = received + len(numbers)
                if not np.array_equal(numbers, wanted[received:after]):
                    raise SystemExit(f"another record than the {received}th was due")
                received = after
                batches += 1
                if received >= records:
                    break
            if client.reconnects:
                raise SystemExit("a link was lost amid the run: the figures mean nothing")
            return batches

        counts = await asyncio.gather(*(read(*reader) for reader in readers))
        say(ended=time.monotonic(), cpu_s=time.process_time() - cpu, batches=sum(counts))
        await word()


ROLES = {"produce": produce, "consume": consume}


def measure(daemon: Daemon, subscribers: int, records: int, size: int, run: int) -> dict[str, Any]:
    options = {
        "endpoint": daemon.endpoint, "subscribers": subscribers, "records": records, "size": size,
        "stream": f"fanout-{subscribers}-{os.getpid()}-{run}",
    }  # fmt: skip
    consumer = Role("perf.fanout", "consume", **options)
    consumer.hear()
    producer = Role("perf.fanout", "produce", **options)
    producer.hear()
    before = daemon.cpu_s()
    producer.go()
    produced, consumed = producer.hear(), consumer.hear()
    facts = {
        "took": consumed["ended"] - produced["begun"],
        "batches": consumed["batches"],
        "broker_cpu_s": daemon.cpu_s() - before,
        "consumer_cpu_s": consumed["cpu_s"],
        "producer_cpu_s": produced["cpu_s"],
    }
    producer.end()
    consumer.end()
    facts["deliveries_s"] = subscribers * records / facts["took"]
    return facts


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--subscribers", type=int, nargs="+", default=list(RECORDS))
    parser.add_argument("--records", type=int, default=0, help="0: as suits the subscribers")
    parser.add_argument("--size", type=int, default=140)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = {}
    with broker() as daemon:
        for subscribers in options.subscribers:
            records = options.records or RECORDS.get(subscribers, 2_000_000 // subscribers)
            facts = median([measure(daemon, subscribers, records, options.size, run)
                            for run in range(options.runs)])  # fmt: skip
            report[subscribers] = facts
            if not options.json:
                print(
                    f"to {subscribers:5} {facts['deliveries_s']:12,.0f} deliveries/s "
                    f"in {facts['took']:6.3f} s; {facts['batches']:.0f} batches; CPU s: "
                    f"producer {facts['producer_cpu_s']:.2f}, broker {facts['broker_cpu_s']:.2f}, "
                    f"consumer {facts['consumer_cpu_s']:.2f}",
                    flush=True,
                )
    if options.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    if not play(ROLES):
        main()
