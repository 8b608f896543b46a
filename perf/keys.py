"""Keys: get and put of a key-value view, 64 at a time, and one key among very many.

Owns a small measurement beside the suite: one broker in a process of its own with the journal on
disk, one asyncio client, in uvloop where it is installed; beside it the persisted key-value forms
of NATS (JetStream's) and Redis (its append-only file), where their servers and Python clients are
installed. The rules: all servers hold the same keys and are measured in turn, a short while each,
so that a slow minute of the machine hits all alike, and the median of the rounds counts; every
value that is read is compared with the one that was put. `python -m perf.keys [keys]`, `--help`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from malamute_py.client.aio.client import connect
from malamute_py.demo.daemon import Daemon
from perf.curves.brokers import OUT
from perf.peers.driver import run
from perf.peers.nats.server import Nats
from perf.peers.peer import Peer
from perf.peers.redis.server import Redis

IN_FLIGHT = 64
SLICE_S = 0.5
"""Seconds of one kind of call with one broker, before the next broker has its turn."""
ROUNDS = 11
VALUE = b"v" * 140
LONE = 500
"""Reads one after the other, of keys that are in no memory of the broker but its index."""
BULK = 500
"""Records of a batch while keys are put in bulk: a get reads the whole batch that has its record,
which for one of 5,000 is 0.8 MB and its checksum."""
ANSWER_S = 600
"""Seconds that clients of peers wait for an answer: a machine that stands still is no failure."""
MIB = 1 << 20


class Store(NamedTuple):
    """Measured calls of one broker's key-value store."""

    put: Callable[[str], Awaitable[Any]]
    get: Callable[[str], Awaitable[bytes]]
    fill: Callable[[Sequence[str]], Awaitable[None]]
    """Put many keys as quickly as the client can."""
    put_stored: Callable[[str], Awaitable[Any]] | None = None
    """Put a key with a confirm that does not wait for the disk, where a call can say so."""


Opened = AbstractAsyncContextManager[Store]


class Contender(NamedTuple):
    """A running server and how to open its store."""

    name: str
    open: Callable[[], Opened]


class Call(NamedTuple):
    """One kind of call of one broker, and the rates that it reached."""

    what: str
    name: str
    call: Callable[[str], Awaitable[Any]]
    rates: list[float]


@asynccontextmanager
async def of_malamute(endpoint: str, count: int) -> AsyncIterator[Store]:
    """Give a stream of keys that is made if there is none."""
    async with connect(endpoint, call_timeout_ms=ANSWER_S * 1_000) as client:
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

        yield Store(
            lambda key: kv.put(key, VALUE, confirm="synced"),
            get,
            fill,
            lambda key: kv.put(key, VALUE, confirm="stored"),
        )


@asynccontextmanager
async def of_nats(endpoint: str, count: int) -> AsyncIterator[Store]:
    """Give a bucket of JetStream, in files, whose values are read without a question to Raft."""
    import nats
    from nats.js.api import StorageType

    client = await nats.connect(endpoint)
    try:
        jetstream = client.jetstream(timeout=ANSWER_S)
        bucket = await jetstream.create_key_value(
            bucket="keys", history=1, storage=StorageType.FILE, direct=True
        )

        async def get(key: str) -> bytes:
            value = (await bucket.get(key)).value
            assert value is not None
            return value

        async def fill(keys: Sequence[str]) -> None:
            for key in keys[:-1]:
                await client.publish(f"$KV.keys.{key}", VALUE)
            await bucket.put(keys[-1], VALUE)

        yield Store(lambda key: bucket.put(key, VALUE), get, fill)
    finally:
        await client.close()


@asynccontextmanager
async def of_redis(endpoint: str, count: int) -> AsyncIterator[Store]:
    """Give a Redis, with a connection for each call in flight, as its client has it."""
    from redis.asyncio import Redis

    async with Redis.from_url(
        endpoint, max_connections=IN_FLIGHT, socket_timeout=ANSWER_S
    ) as client:

        async def get(key: str) -> bytes:
            value = await client.get(key)
            assert isinstance(value, bytes)
            return value

        async def fill(keys: Sequence[str]) -> None:
            await client.mset(dict.fromkeys(keys, VALUE))

        yield Store(lambda key: client.set(key, VALUE), get, fill)


def peer(name: str, server: Peer, mode: str, folder: Path, count: int, of: Any) -> Iterator[Any]:
    """Yield the context of a running server and its name, or say why it is not measured."""
    column = next(
        (each for each in server.columns() if each.mode == mode and each.client == "python"), None
    )
    if server.missing() or column is None:
        why = server.missing() or "; ".join(server.absent().values())
        print(f"{name}: not measured: {why or f'it has no {mode}'}")
        return

    @contextlib.contextmanager
    def running() -> Iterator[Contender]:
        with server.server(column, folder) as started:
            yield Contender(f"{name} {started.version}", partial(of, started.url, count))

    yield running()


def peers(folder: Path, count: int) -> Iterator[Any]:
    """Yield a context for each peer that is installed, in each form that keeps what was put."""
    nats, redis = Nats(), Redis()
    for mode, what in (("jetstream-sync", "every put synced"), ("jetstream", "synced by and by")):
        yield from peer(f"JetStream, {what}", nats, mode, folder / mode, count, of_nats)
    for mode, what in (("stream-sync", "always"), ("stream", "everysec")):
        yield from peer(f"Redis, appendfsync {what}", redis, mode, folder / mode, count, of_redis)


def key_of(number: int, count: int) -> str:
    """Return one of `count` keys: numbers that follow each other give keys far apart."""
    return f"key.{number * 7919 % count}"


async def filled(name: str, store: Store, count: int) -> None:
    """Put all keys."""
    began = time.perf_counter()
    for first in range(0, count, BULK):
        await store.fill([f"key.{number}" for number in range(first, min(count, first + BULK))])
    print(f"{name}: {count:,} keys put in bulk in {time.perf_counter() - began:.1f} s", flush=True)


async def rate_of(call: Call, count: int, first: int) -> float:
    """Return the calls a second that 64 tasks make; first: number of the first key."""
    done = 0
    began = time.perf_counter()
    until = began + SLICE_S

    async def work(lane: int) -> None:
        nonlocal done
        at = first + lane
        while time.perf_counter() < until:
            key = key_of(at, count)
            at += IN_FLIGHT
            value = await call.call(key)
            assert call.what != "get" or value == VALUE
            done += 1

    await asyncio.gather(*map(work, range(IN_FLIGHT)))
    return done / (time.perf_counter() - began)


async def measure(contenders: Sequence[Contender], count: int, rounds: int) -> None:
    """Print the figures of all stores, which are filled first and then called in turn."""
    async with AsyncExitStack() as stack:
        stores = [(each.name, await stack.enter_async_context(each.open())) for each in contenders]
        for name, store in stores:
            await filled(name, store, count)
        calls = []
        for name, store in stores:
            calls += [Call("put", name, store.put, []), Call("get", name, store.get, [])]
            if store.put_stored is not None:
                calls.append(Call("put", f"{name}, confirm = stored", store.put_stored, []))
        for number in range(rounds):
            for call in calls:
                call.rates.append(await rate_of(call, count, number * 1_000_003))
        for what in ("put", "get"):
            for call in calls:
                if call.what == what:
                    rates = sorted(call.rates)
                    print(
                        f"{what}, {IN_FLIGHT} in flight: {statistics.median(rates):>9,.0f} a second"
                        f" ({rates[0]:,.0f} to {rates[-1]:,.0f}): {call.name}",
                        flush=True,
                    )
        for name, store in stores:
            await lone(name, store, count)


async def lone(name: str, store: Store, count: int) -> None:
    """Print how long one get takes with nothing else under way."""
    took = []
    for number in range(LONE):
        began = time.perf_counter()
        assert await store.get(key_of(number, count)) == VALUE
        took.append((time.perf_counter() - began) * 1_000)
    took.sort()
    print(
        f"one get among {count:,} keys: {statistics.median(took):.2f} ms (p50), "
        f"{took[int(0.99 * LONE)]:.2f} ms (p99): {name}",
        flush=True,
    )


async def started_again(daemon: Daemon, count: int, began: float) -> None:
    """Print how long a killed broker needs until it serves its keys, then read some."""
    async with of_malamute(daemon.endpoint, count) as store:
        assert await store.get("key.0") == VALUE
        took = time.perf_counter() - began
        print(f"malamute: started again with {count:,} keys in {took:.1f} s", flush=True)
        await lone("malamute, started again", store, count)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("keys", type=int, nargs="?", default=100_000, help="how many there are")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each broker")
    parser.add_argument("--alone", action="store_true", help="without peers")
    options = parser.parse_args()
    count = options.keys
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="keys-", dir=OUT) as directory, ExitStack() as stack:
        folder = Path(directory)
        daemon = stack.enter_context(Daemon(folder / "malamute"))
        before = daemon.own_bytes()
        contenders = [Contender("malamute", partial(of_malamute, daemon.endpoint, count))]
        if not options.alone:
            contenders += [stack.enter_context(each) for each in peers(folder, count)]
        run(measure(contenders, count, options.rounds))
        grown = daemon.own_bytes() - before
        print(f"malamute: {grown / MIB:.0f} MiB of memory, {grown / count:.0f} bytes a key")
        daemon.kill()
        began = time.perf_counter()
        daemon.start()
        run(started_again(daemon, count, began))


if __name__ == "__main__":
    main()
