"""Keys: get and put of a key-value view, 64 at a time, and one key among very many.

Owns a small measurement beside the suite: one broker in a process of its own with the journal on
disk, one asyncio client. NATS' and Redis' servers are not part of it. The rule: every value that is
read is compared with the one that was put. `python -m perf.keys [keys]`.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from malamute_py.client.aio.client import connect
from malamute_py.demo.daemon import Daemon

IN_FLIGHT = 64
SECONDS = 5.0
VALUE = b"v" * 140
LONE = 500
"""Reads one after the other, of keys that are in no memory of the broker but its index."""


async def measure(endpoint: str, count: int) -> None:
    """Print the figures for a stream of `count` keys."""
    async with connect(endpoint, call_timeout_ms=600_000) as client:
        size = max(64 << 20, count * 1_200)
        await client.create_stream("keys", keep="last-per-subject", ring_bytes=size)
        kv = client.kv("keys")
        began = time.perf_counter()
        step = 5_000
        for first in range(0, count, step):
            numbers = range(first, min(count, first + step))
            await client.publish_many(
                "keys", [VALUE] * len(numbers), subjects=[f"key.{number}" for number in numbers]
            )
        print(f"{count:,} keys put in bulk in {time.perf_counter() - began:.1f} s")
        for name in ("put", "get", "update"):
            done = 0
            until = time.perf_counter() + SECONDS

            async def work(lane: int, name: str = name, until: float = until) -> None:
                nonlocal done
                at = lane
                while time.perf_counter() < until:
                    key = f"key.{at % count}"
                    at += IN_FLIGHT
                    if name == "put":
                        await kv.put(key, VALUE)
                    else:
                        entry = await kv.get(key)
                        assert entry is not None
                        assert entry.value == VALUE
                        if name == "update":
                            await kv.update(key, VALUE, revision=entry.revision)
                    done += 1

            await asyncio.gather(*map(work, range(IN_FLIGHT)))
            print(f"{name}, {IN_FLIGHT} in flight: {done / SECONDS:,.0f} a second")
        took = []
        for number in range(LONE):
            key = f"key.{number * 7919 % count}"
            began = time.perf_counter()
            entry = await kv.get(key)
            took.append((time.perf_counter() - began) * 1_000)
            assert entry is not None
        took.sort()
        print(
            f"one get among {count:,} keys: {statistics.median(took):.2f} ms (p50), "
            f"{took[int(0.99 * LONE)]:.2f} ms (p99)"
        )


def main() -> None:
    """Measure."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with (
        tempfile.TemporaryDirectory(prefix="malamute-keys-") as directory,
        Daemon(Path(directory), []) as daemon,
    ):
        asyncio.run(measure(daemon.endpoint, count))


if __name__ == "__main__":
    main()
