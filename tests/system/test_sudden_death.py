"""SIGKILL at fifty random moments: confirmed records are there, in order, once.

Proves survival of the process's death only; power loss is the simulator's subject.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from malamute_py.client.aio.client import Client
from malamute_py.demo.daemon import Daemon
from tests.system.patient import patient
from tests.waiting import WAIT_S

STREAM = "ledger"
KILLS = 50
AMID_PUBLISHING = 0.8
"""Share of the kills that wait until a record was confirmed since the restart."""
SEED = int(os.environ.get("MALAMUTE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)


@dataclass
class Ledger:
    """The records that a producer sent and those that were promised."""

    name: str
    sent: int = 0
    confirmed: set[int] = field(default_factory=set)


async def publish_single(client: Client, ledger: Ledger, stopped: asyncio.Event) -> None:
    """Make single publish calls, many in flight; each awaited for its own confirm."""
    inflight: set[asyncio.Task[None]] = set()

    async def one(number: int) -> None:
        await client.publish(STREAM, f"{ledger.name} {number}".encode(), subject=ledger.name)
        ledger.confirmed.add(number)

    while not stopped.is_set():
        task = asyncio.create_task(one(ledger.sent))
        ledger.sent += 1
        inflight.add(task)
        task.add_done_callback(inflight.discard)
        await asyncio.sleep(0 if ledger.sent % 20 else 0.002)
        if len(inflight) > 500:
            await asyncio.wait(inflight, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*inflight)


async def publish_bulk(client: Client, ledger: Ledger, stopped: asyncio.Event) -> None:
    """Make bulk calls, one after the other."""
    while not stopped.is_set():
        numbers = range(ledger.sent, ledger.sent + 700)
        ledger.sent = numbers.stop
        bodies = [f"{ledger.name} {number}".encode().ljust(200) for number in numbers]
        await client.publish_many(STREAM, bodies, subject=ledger.name)
        ledger.confirmed.update(numbers)
        await asyncio.sleep(0.001)


async def follow(client: Client, seen: list[bytes], offsets: list[int]) -> None:
    """Run a live reader that goes through all the deaths."""
    subscription = client.subscribe(STREAM, start="earliest", visibility="durable", create=True)
    async for batch in subscription.batches():
        seen.extend(batch.bodies())
        offsets.extend(batch.offsets.tolist())


async def confirmed_more(ledgers: list[Ledger]) -> None:
    """Wait until each producer was promised something more."""
    before = [len(ledger.confirmed) for ledger in ledgers]
    # An Event would not do: tasks move the two counts that are waited for thousands of times a
    # second.
    while any(len(a.confirmed) == b for a, b in zip(ledgers, before, strict=True)):  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def numbers_of(bodies: list[bytes]) -> dict[str, list[int]]:
    """Return the numbers of each producer, in the order of the log."""
    found: dict[str, list[int]] = defaultdict(list)
    for body in bodies:
        name, number = body.split()
        found[name.decode()].append(int(number))
    return found


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_every_confirmed_record_survives_fifty_kills_in_order_and_once(
    tmp_path: Path,
) -> None:
    print(f"seed: MALAMUTE_TEST_SEED={SEED}")
    moments = random.Random(SEED)
    # Small segments, so that the kills also fall on the preparing and sealing of segments.
    settings = [
        "limits.batch_bytes_max=1048576", "limits.record_bytes_max=524288",
        "journal.segment_bytes=2097152", "journal.ring_bytes=1073741824",
    ]  # fmt: skip
    ledgers = [Ledger("single"), Ledger("bulk")]
    seen: list[bytes] = []
    offsets: list[int] = []
    with Daemon(tmp_path, settings) as daemon:
        async with (
            patient(daemon.endpoint) as first,
            patient(daemon.endpoint) as second,
            patient(daemon.endpoint) as third,
        ):
            stopped = asyncio.Event()
            producers = [
                asyncio.create_task(publish_single(first, ledgers[0], stopped)),
                asyncio.create_task(publish_bulk(second, ledgers[1], stopped)),
            ]
            reader = asyncio.create_task(follow(third, seen, offsets))
            for _ in range(KILLS):
                # Mostly amid publishing; else at any moment, recovery and reconnects included.
                if moments.random() < AMID_PUBLISHING:
                    await confirmed_more(ledgers)
                await asyncio.sleep(moments.uniform(0.0, 0.2))
                daemon.kill()
                await asyncio.to_thread(daemon.start)
            stopped.set()
            await asyncio.gather(*producers)
            everything: list[bytes] = []
            subscription = first.subscribe(STREAM, start="earliest", until="tail")
            async for batch in subscription.batches():
                everything.extend(batch.bodies())
            for _ in range(int(WAIT_S / 0.025)):
                if len(seen) >= len(everything):
                    break
                await asyncio.sleep(0.025)
            reader.cancel()
    found = numbers_of(everything)
    for ledger in ledgers:
        assert ledger.confirmed == set(range(ledger.sent))
        assert found[ledger.name] == list(range(ledger.sent)), "in order, each once"
        assert ledger.sent > KILLS / 2, "there was something to lose"
    assert seen == everything, "the reader that lived through it saw the same log"
    assert offsets == list(range(len(everything)))
