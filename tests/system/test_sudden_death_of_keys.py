"""SIGKILL at random moments: keys have their last values, and each update happened once.

The ring is small, so that newest records move all the time.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from malamute_protocol.errors import RevisionConflict
from malamute_py.client.aio.client import Client
from malamute_py.demo.daemon import Daemon
from tests.system.patient import patient

KILLS = 20
KEYS = 200
SEED = int(os.environ.get("MALAMUTE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)


async def put_on(client: Client, last: dict[str, bytes], stopped: asyncio.Event) -> None:
    """Set keys again and again, some at a time; note what each was set to."""
    kv = client.kv("s")
    chance = random.Random(SEED)
    turn = 0
    while not stopped.is_set():
        turn += 1
        changed = {f"k{chance.randrange(KEYS)}": b"%d " % turn * 300 for _ in range(20)}
        await asyncio.gather(*(kv.put(key, value) for key, value in changed.items()))
        last.update(changed)


async def count_on(client: Client, stopped: asyncio.Event) -> int:
    """Raise a counter that others raise, too; returns how often this client did."""
    kv = client.kv("s")
    done = 0
    while not stopped.is_set():
        entry = await kv.get("counter")
        assert entry is not None
        assert isinstance(entry.value, bytes)
        try:
            await kv.update("counter", b"%d" % (int(entry.value) + 1), revision=entry.revision)
            done += 1
        except RevisionConflict:
            await asyncio.sleep(0.001)
    return done


async def comes_round_a_little(client: Client) -> None:
    """Wait until a good part of the ring was written."""
    before = (await client.stream_info("s")).tail
    while (await client.stream_info("s")).tail < before + 100:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.01)


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_keys_survive_kills_while_the_ring_comes_round(tmp_path: Path) -> None:
    print(f"seed: MALAMUTE_TEST_SEED={SEED}")
    moments = random.Random(SEED)
    last: dict[str, bytes] = {}
    with Daemon(tmp_path, []) as daemon:
        async with (
            patient(daemon.endpoint) as first,
            patient(daemon.endpoint) as second,
            patient(daemon.endpoint) as third,
        ):
            await first.create_stream("s", keep="last-per-subject", ring_bytes=1 << 20)
            await first.kv("s").put("once", b"kept")
            await first.kv("s").put("counter", b"0")
            stopped = asyncio.Event()
            putting = asyncio.create_task(put_on(first, last, stopped))
            counting = [
                asyncio.create_task(count_on(client, stopped)) for client in (second, third)
            ]
            for _ in range(KILLS):
                await comes_round_a_little(third)
                await asyncio.sleep(moments.uniform(0.0, 0.2))
                daemon.kill()
                await asyncio.to_thread(daemon.start)
            await asyncio.sleep(0.5)
            stopped.set()
            await putting
            counted = sum(await asyncio.gather(*counting))
            kv = third.kv("s")
            info = await third.stream_info("s")
            assert info.first > KEYS, "the ring came round"
            values = {}
            async with kv.watch() as watch:
                async for entry in watch:
                    if entry is None:
                        break
                    values[entry.key] = entry.value
            found = await asyncio.gather(*map(kv.get, last))
    assert {key: entry and entry.value for key, entry in zip(last, found, strict=True)} == last
    assert values == {**last, "once": b"kept", "counter": b"%d" % counted}
    assert counted > KILLS
