"""Open transactions: beside the same records in one step, and what a large commit costs others.

Owns a small measurement beside the suite: one broker in a process of its own with the journal on
disk, one asyncio client; steps and transactions take turns, so that both meet the same disk. The
rule: the streams are counted afterwards. `python -m perf.transactions [rounds]`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from malamute_py.client.aio.client import Client, connect
from malamute_py.demo.daemon import Daemon
from perf.curves.brokers import OUT

RECORDS = 1_000
BODY = b"b" * 140
ROUNDS = 300
LARGE_RECORDS = 100_000
LARGE_BODY = b"b" * 1_000
LARGE_CHUNK = 2_000
MILLI = 1_000


async def small(client: Client, rounds: int) -> None:
    """Print how long a step and a transaction of the same records take."""
    steps: list[float] = []
    transactions: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        async with client.atomic() as step:
            step.publish_many("steps", [BODY] * RECORDS, subject="a.b")
        steps.append(time.perf_counter() - began)
        began = time.perf_counter()
        async with client.transaction() as transaction:
            await transaction.publish_many("transactions", [BODY] * RECORDS, subject="a.b")
        transactions.append(time.perf_counter() - began)
    for stream in ("steps", "transactions"):
        assert (await client.stream_info(stream)).tail == rounds * RECORDS
    middle = [MILLI * statistics.median(times) for times in (steps, transactions)]
    print(f"one step of {RECORDS:,} records: {middle[0]:.2f} ms, the median of {rounds}")
    print(f"one transaction of them: {middle[1]:.2f} ms, {middle[1] / middle[0]:.2f} times")


async def large(client: Client, other: Client) -> None:
    """Print what a large transaction takes, and how long another client's records take then."""
    ended = False
    waits: dict[str, list[float]] = {"at rest": [], "staging": [], "the commit": []}
    during = "at rest"

    async def publish_on() -> None:
        while not ended:
            began = time.perf_counter()
            await other.publish("other", BODY)
            waits[during].append(time.perf_counter() - began)
            await asyncio.sleep(0.002)

    publishing = asyncio.create_task(publish_on())
    await asyncio.sleep(2)
    began = time.perf_counter()
    during = "staging"
    transaction = client.transaction(timeout_ms=600_000)
    await transaction.begin()
    for _ in range(LARGE_RECORDS // LARGE_CHUNK):
        await transaction.publish_many("large", [LARGE_BODY] * LARGE_CHUNK)
        await asyncio.sleep(0)
    staged_s = time.perf_counter() - began
    during = "the commit"
    began = time.perf_counter()
    await transaction.commit()
    committed_s = time.perf_counter() - began
    ended = True
    await publishing
    assert (await client.stream_info("large")).tail == LARGE_RECORDS
    size = LARGE_RECORDS * len(LARGE_BODY) / (1 << 20)
    print(f"{LARGE_RECORDS:,} records of {size:.0f} MiB: staged in {staged_s:.1f} s, ", end="")
    print(f"committed and appended in {committed_s:.1f} s")
    turn_us = (await client.broker_info()).more["longest_turn_us"]
    print(f"longest turn of the broker's loop until then: {turn_us / MILLI:.1f} ms of processor")
    for name, times in waits.items():
        times.sort()
        p99 = MILLI * times[int(0.99 * len(times))]
        print(f"another client's record during {name}: p99 {p99:.1f} ms of {len(times)}")


async def measured(rounds: int) -> None:
    """Measure both over one broker."""
    OUT.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=OUT) as directory,
        Daemon(Path(directory), []) as daemon,
    ):
        async with (
            connect(daemon.endpoint, call_timeout_ms=600_000) as client,
            connect(daemon.endpoint, call_timeout_ms=600_000) as other,
        ):
            await small(client, 10)
        async with (
            connect(daemon.endpoint, call_timeout_ms=600_000) as client,
            connect(daemon.endpoint, call_timeout_ms=600_000) as other,
        ):
            for stream in ("steps", "transactions"):
                await client.remove_stream(stream)
            await small(client, rounds)
            await large(client, other)


def main() -> None:
    """Measure as many rounds as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("rounds", type=int, nargs="?", default=ROUNDS, help="of each kind")
    asyncio.run(measured(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
