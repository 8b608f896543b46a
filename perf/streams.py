"""What many streams cost: 1,000 of them in one ring against one, synced confirms.

    python -m perf.streams [--streams 1000] [--json]

Prints files and bytes on disk, the broker's memory, and the cost of a synced confirm for a
record to one stream, to each of the streams in turn, and for rounds over all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

from malamute_py.client.aio import Client, connect
from perf._daemon import broker

BODY = b"x" * 140
ALONE = 1_000
ROUNDS = 10


async def one_after_the_other(client: Client, streams: list[str]) -> dict[str, float]:
    """Latency of synced confirms, one at a time."""
    times = []
    for stream in streams:
        began = time.perf_counter()
        await client.publish(stream, BODY, subject="s", confirm="synced")
        times.append(time.perf_counter() - began)
    times.sort()
    return {
        "p50_ms": statistics.median(times) * 1e3,
        "p99_ms": times[int(len(times) * 0.99)] * 1e3,
    }


async def rounds(client: Client, streams: list[str], times: int) -> float:
    """Records a second when a record to each stream is in flight at once."""
    began = time.perf_counter()
    for _ in range(times):
        waiting = [
            client.publish_nowait(stream, BODY, subject="s", confirm="synced") for stream in streams
        ]
        await asyncio.gather(*waiting)
    return times * len(streams) / (time.perf_counter() - began)


async def measure(count: int) -> dict[str, Any]:
    names = [f"stream.{number:05}" for number in range(count)]
    with broker() as watched:
        async with connect(watched.endpoint) as client:
            await client.publish("one", BODY)
            await one_after_the_other(client, ["one"] * 50)
            memory, files, disk = watched.own_bytes(), watched.files(), watched.disk_bytes()
            alone = await one_after_the_other(client, ["one"] * ALONE)
            one_flight = await rounds(client, ["one"] * count, ROUNDS)
            began = time.perf_counter()
            await asyncio.gather(*(client.publish(name, BODY) for name in names))
            created_s = time.perf_counter() - began
            many = await one_after_the_other(client, [names[n % count] for n in range(ALONE)])
            many_flight = await rounds(client, names, ROUNDS)
            cpu = watched.cpu_s()
            await asyncio.sleep(5)
            return {
                "streams": count,
                "created_s": created_s,
                "files": {"one": files, "many": watched.files()},
                "disk_bytes": {"one": disk, "many": watched.disk_bytes()},
                "memory_bytes": {"one": memory, "many": watched.own_bytes()},
                "alone": {"one": alone, "many": many},
                "in_flight_records_s": {"one": one_flight, "many": many_flight},
                "idle_cpu_share": (watched.cpu_s() - cpu) / 5,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    facts = asyncio.run(measure(options.streams))
    if options.json:
        print(json.dumps(facts))
        return
    mib = 1 << 20
    print(f"{facts['streams']:,} streams on first use in {facts['created_s']:.2f} s")
    print(f"{'':28}{'one stream':>14}{'all of them':>14}")
    rows = [
        ("files", *(f"{facts['files'][k]:,}" for k in ("one", "many"))),
        ("on disk, MiB", *(f"{facts['disk_bytes'][k] / mib:,.0f}" for k in ("one", "many"))),
        ("memory, MiB", *(f"{facts['memory_bytes'][k] / mib:.1f}" for k in ("one", "many"))),
        *((f"synced confirm, {part} ms",
           *(f"{facts['alone'][k][f'{part}_ms']:.3f}" for k in ("one", "many")))
          for part in ("p50", "p99")),
        (f"{facts['streams']:,} in flight, records/s",
         *(f"{facts['in_flight_records_s'][k]:,.0f}" for k in ("one", "many"))),
    ]  # fmt: skip
    for name, one, many in rows:
        print(f"{name:28}{one:>14}{many:>14}")
    print(f"broker at rest with them: {facts['idle_cpu_share'] * 100:.2f}% of one core")


if __name__ == "__main__":
    main()
