"""Keys: get and put of a key-value view, 64 at a time, and one key among very many.

Owns a small measurement beside the suite: one broker in a process of its own with the journal on
disk, one asyncio client; beside it the persisted key-value forms of NATS (JetStream's) and Redis
(appendfsync always), where their servers and Python clients are installed. The rule: every value
that is read is compared with the one that was put. `python -m perf.keys [keys]`, `--help`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from malamute_py.client.aio.client import connect
from malamute_py.demo.daemon import Daemon
from perf.curves.brokers import OUT
from perf.peers.nats.server import Nats
from perf.peers.peer import Peer
from perf.peers.redis.server import Redis

IN_FLIGHT = 64
SECONDS = 5.0
VALUE = b"v" * 140
LONE = 500
"""Reads one after the other, of keys that are in no memory of the broker but its index."""
BULK = 500
"""Records of a batch while keys are put in bulk: a get reads the whole batch that has its record,
which for one of 5,000 is 0.8 MB and its checksum."""
MIB = 1 << 20


class Store(NamedTuple):
    """Measured calls of one broker's key-value store."""

    put: Callable[[str], Awaitable[Any]]
    get: Callable[[str], Awaitable[bytes]]
    fill: Callable[[Sequence[str]], Awaitable[None]]
    """Put many keys as quickly as the client can."""


@asynccontextmanager
async def of_malamute(endpoint: str, count: int) -> AsyncIterator[Store]:
    """Give a stream of keys that is made if there is none."""
    async with connect(endpoint, call_timeout_ms=600_000) as client:
        size = max(64 << 20, count * 1_200)
        await client.create_stream("keys", keep="last-per-subject", ring_bytes=size)
        kv = client.kv("keys")

        async def get(key: str) -> bytes:
            entry = await kv.get(key)
            assert entry is not None
            assert isinstance(entry.value, bytes)
            return entry.value

        async def fill(keys: Sequence[str]) -> None:
            await client.publish_many("keys", [VALUE] * len(keys), subjects=list(keys))

        yield Store(lambda key: kv.put(key, VALUE), get, fill)


@asynccontextmanager
async def of_nats(endpoint: str, count: int) -> AsyncIterator[Store]:
    """Give a bucket of JetStream, in files."""
    import nats
    from nats.js.api import StorageType

    client = await nats.connect(endpoint)
    try:
        bucket = await client.jetstream().create_key_value(
            bucket="keys", history=1, storage=StorageType.FILE
        )

        async def get(key: str) -> bytes:
            value = (await bucket.get(key)).value
            assert value is not None
            return value

        yield Store(lambda key: bucket.put(key, VALUE), get, _one_by_one(bucket.put))
    finally:
        await client.close()


@asynccontextmanager
async def of_redis(endpoint: str, count: int) -> AsyncIterator[Store]:
    """Give a Redis that syncs what it was told before it answers."""
    from redis.asyncio import Redis

    async with Redis.from_url(endpoint, max_connections=IN_FLIGHT) as client:

        async def get(key: str) -> bytes:
            value = await client.get(key)
            assert isinstance(value, bytes)
            return value

        yield Store(lambda key: client.set(key, VALUE), get, _one_by_one(client.set))


def _one_by_one(put: Callable[[str, bytes], Awaitable[Any]]) -> Callable[[Sequence[str]], Any]:
    """Return what puts many keys, some of them at a time."""

    async def fill(keys: Sequence[str]) -> None:
        for first in range(0, len(keys), IN_FLIGHT):
            await asyncio.gather(*(put(key, VALUE) for key in keys[first : first + IN_FLIGHT]))

    return fill


async def measure(name: str, store: Store, count: int) -> None:
    """Print the figures of a store of `count` keys, which are put first."""
    began = time.perf_counter()
    for first in range(0, count, BULK):
        await store.fill([f"key.{number}" for number in range(first, min(count, first + BULK))])
    print(f"{name}: {count:,} keys put in bulk in {time.perf_counter() - began:.1f} s", flush=True)
    for what in ("put", "get"):
        done = 0
        until = time.perf_counter() + SECONDS

        async def work(lane: int, what: str = what, until: float = until) -> None:
            nonlocal done
            at = lane
            while time.perf_counter() < until:
                key = f"key.{at * 7919 % count}"
                at += IN_FLIGHT
                if what == "put":
                    await store.put(key)
                else:
                    assert await store.get(key) == VALUE
                done += 1

        await asyncio.gather(*map(work, range(IN_FLIGHT)))
        print(f"{name}: {what}, {IN_FLIGHT} in flight: {done / SECONDS:,.0f} a second", flush=True)
    await lone(name, store, count)


async def lone(name: str, store: Store, count: int) -> None:
    """Print how long one get takes with nothing else under way."""
    took = []
    for number in range(LONE):
        began = time.perf_counter()
        assert await store.get(f"key.{number * 7919 % count}") == VALUE
        took.append((time.perf_counter() - began) * 1_000)
    took.sort()
    print(
        f"{name}: one get among {count:,} keys: {statistics.median(took):.2f} ms (p50), "
        f"{took[int(0.99 * LONE)]:.2f} ms (p99)",
        flush=True,
    )


async def started_again(daemon: Daemon, count: int, began: float) -> None:
    """Print how long a killed broker needs until it serves its keys, then read some."""
    async with of_malamute(daemon.endpoint, count) as store:
        assert await store.get("key.0") == VALUE
        took = time.perf_counter() - began
        print(f"malamute: started again with {count:,} keys in {took:.1f} s", flush=True)
        await lone("malamute, started again", store, count)


def malamute(folder: Path, count: int) -> None:
    """Measure this broker: its memory and its start as well."""
    with Daemon(folder) as daemon:
        before = daemon.own_bytes()

        async def run() -> None:
            async with of_malamute(daemon.endpoint, count) as store:
                await measure("malamute", store, count)

        asyncio.run(run())
        grown = daemon.own_bytes() - before
        print(f"malamute: {grown / MIB:.0f} MiB of memory, {grown / count:.0f} bytes a key")
        daemon.kill()
        began = time.perf_counter()
        daemon.start()
        asyncio.run(started_again(daemon, count, began))


def peer(name: str, server: Peer, mode: str, folder: Path, count: int, of: Any) -> None:
    """Measure another broker with its Python client, or say why not."""
    why = server.missing() or "; ".join(server.absent().values())
    column = next(
        (each for each in server.columns() if each.mode == mode and each.client == "python"), None
    )
    if server.missing() or column is None:
        print(f"{server.name}: not measured: {why or f'it has no {mode}'}")
        return

    async def run(url: str) -> None:
        async with of(url, count) as store:
            await measure(name, store, count)

    with server.server(column, folder) as running:
        asyncio.run(run(running.url))


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("keys", type=int, nargs="?", default=100_000, help="how many there are")
    count = parser.parse_args().keys
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="keys-", dir=OUT) as directory:
        malamute(Path(directory) / "malamute", count)
        nats, redis = Nats(), Redis()
        mode = "jetstream-sync" if not nats.missing() and nats._syncs() else "jetstream"
        peer(f"NATS {mode}", nats, mode, Path(directory) / "nats", count, of_nats)
        peer(
            "Redis, appendfsync always",
            redis,
            "stream-sync",
            Path(directory) / "redis",
            count,
            of_redis,
        )


if __name__ == "__main__":
    main()
