"""SIGKILL of client and broker at random moments: a transaction is there whole, or not at all."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from malamute_py.client.sync.client import SyncClient, connect_sync
from malamute_py.demo.daemon import Daemon
from tests.waiting import WAIT_MS

KILLS = 6
STREAMS = ("a", "b", "own")
"""The last one has a ring of its own."""
SEED = int(os.environ.get("MALAMUTE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)

LOADER = """
import random, sys
import malamute_py as malamute

endpoint, seed = sys.argv[1], int(sys.argv[2])
draw = random.Random(seed)
client = malamute.connect_sync(endpoint, identity="loader", timeout_ms=60_000)
for number in range(1_000_000):
    name = b"%d.%d" % (seed, number)
    transaction = client.transaction(timeout_ms=2_000)
    transaction.begin()
    for _ in range(draw.choice((1, 3, 12))):
        for stream in ("a", "b"):
            transaction.publish_many(stream, [name + b" " + b"x" * 200_000] * 3)
        transaction.publish_many("own", [name + b" " + b"x" * 1_000] * 3)
    if draw.random() < 0.3:
        transaction.roll_back()
        print("rolled-back", name.decode(), flush=True)
    else:
        print("asked", name.decode(), flush=True)
        transaction.commit()
        print("committed", name.decode(), flush=True)
"""


def counts(client: SyncClient, stream: str) -> Counter[bytes]:
    """Count the records of each transaction in a stream, from its beginning to its tail."""
    found: Counter[bytes] = Counter()
    reading = client.subscribe(stream, start="earliest", until="tail", visibility="committed")
    with reading as subscription:
        for record in subscription:
            assert isinstance(record.body, bytes)
            found[record.body.partition(b" ")[0]] += 1
    return found


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_transaction_survives_kills_whole_or_not_at_all(tmp_path: Path) -> None:
    print(f"seed: MALAMUTE_TEST_SEED={SEED}")
    moments = random.Random(SEED)
    said: dict[bytes, str] = {}
    with Daemon(tmp_path, []) as daemon:
        with connect_sync(daemon.endpoint, timeout_ms=WAIT_MS) as client:
            client.create_stream("own", ring_bytes=64 << 20)
        for kill in range(KILLS):
            log = tmp_path / f"loader-{kill}"
            with log.open("wb") as output:
                loader = subprocess.Popen(
                    [sys.executable, "-c", LOADER, daemon.endpoint, str(kill)], stdout=output
                )
            transactions = moments.randint(2, 8)
            while log.read_bytes().count(b"\n") < transactions and loader.poll() is None:
                time.sleep(0.005)
            time.sleep(moments.uniform(0.0, 0.1))
            if kill % 3:
                daemon.kill()
            if kill % 2:
                loader.kill()
            if kill % 3:
                daemon.start()
            time.sleep(moments.uniform(0.0, 0.4))
            loader.kill()
            loader.wait()
            for line in log.read_bytes().splitlines():
                word, name = line.split()
                said[name] = word.decode()
        with connect_sync(daemon.endpoint, timeout_ms=WAIT_MS) as client:
            while client.transactions():
                time.sleep(0.05)
            first, second, own = (counts(client, stream) for stream in STREAMS)
    assert first == second == own, "all streams have the same of each transaction"
    assert {name for name, word in said.items() if word == "committed"} <= set(first)
    assert set(first) <= {name for name, word in said.items() if word != "rolled-back"}
    assert set(first.values()) <= {3, 9, 36}, "each is there whole"
    assert sum(word == "committed" for word in said.values()) > KILLS
