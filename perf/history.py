"""Measure replays of history that the broker reads through mappings, and by pread, side by side.

    python -m perf.history [--json] [--megabytes 512] [--rounds 3]

One broker's directory is filled once for each size of record; then a broker over it replays all of
it over TCP, by both ways in turn. Cold: the files' pages are dropped before the broker starts. A
stall is the longest time between two batches that come to the client. A publisher of another
process has one record after the other confirmed as stored meanwhile; its figures are of the cold
replays only, for a warm one is over too soon.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, NamedTuple, cast

import malamute_py as malamute
from malamute_py.demo.daemon import Daemon
from malamute_py.journal.directory import RINGS
from perf.curves.brokers import OUT
from perf.figures import Figure, show
from perf.mapped import BATCH_BYTES, BATCH_RECORDS

SIZES = (140, 1120, 11_760)
WAYS = {"by pread": "false", "mapped": "true"}
PAUSE_S = 0.001
"""Time between the confirm of a record and the next one."""


class Replayed(NamedTuple):
    """Figures of one replay."""

    wall_s: float
    stall_ms: float
    processor_s: float
    own_mb: float
    """Memory that maps no file, at the end."""
    publisher_ms: list[float]


def fill(folder: Path, size: int, total: int) -> int:
    """Publish so many bytes of records, in batches; returns how many records that was."""
    with Daemon(folder) as daemon, malamute.connect_sync(daemon.endpoint) as client:
        client.create_stream("records", ring_bytes=max(2 * total, 256 << 20))
        client.create_stream("live", ring_bytes=64 << 20)
        count = max(1, min(BATCH_RECORDS, BATCH_BYTES // size))
        bodies = [os.urandom(size) for _ in range(count)]
        batches = max(1, total // (count * size))
        for _ in range(batches):
            client.publish_many("records", bodies, subject="a.b.c", confirm="stored")
    return batches * count


def drop(folder: Path) -> None:
    """Drop the pages of all segments from the cache. No process may map them now."""
    for path in (folder / "data" / RINGS).glob("*/*.seg"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def publish(endpoint: str) -> None:
    """Publish record after record until standard input ends; print what each confirm took."""
    took: list[float] = []
    os.set_blocking(sys.stdin.fileno(), False)
    with malamute.connect_sync(endpoint) as client:
        client.publish("live", b"x" * 100, subject="a", confirm="stored")
        print("ready", flush=True)
        while sys.stdin.buffer.read(1) is None:
            begun = time.perf_counter()
            client.publish("live", b"x" * 100, subject="a", confirm="stored")
            took.append((time.perf_counter() - begun) * 1e3)
            time.sleep(PAUSE_S)
    json.dump(took, sys.stdout)


def replay(folder: Path, way: str, cold: bool, beside: bool, expected: int) -> Replayed:
    """Replay everything once."""
    settings = [f"journal.mapped_reads={WAYS[way]}"]
    with Daemon(folder, settings) as daemon, malamute.connect_sync(daemon.endpoint) as client:
        if cold:
            drop(folder)
        else:
            run(client, expected)
        publisher = None
        if beside:
            publisher = subprocess.Popen(
                [sys.executable, "-m", "perf.history", "--publish", daemon.endpoint],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert cast("IO[str]", publisher.stdout).readline() == "ready\n"
        spent = daemon.cpu_s()
        wall_s, stall_s = run(client, expected)
        spent = daemon.cpu_s() - spent
        own_mb = daemon.own_bytes() / 1e6
        took = []
        if publisher is not None:
            took = json.loads(publisher.communicate()[0])
    return Replayed(wall_s, stall_s * 1e3, spent, own_mb, took)


def run(client: malamute.SyncClient, expected: int) -> tuple[float, float]:
    """(seconds of a replay, of its longest stall)."""
    count, worst = 0, 0.0
    begun = last = time.perf_counter()
    with client.subscribe("records", start="earliest", until="tail", timeout_ms=60_000) as records:
        for batch in records.batches():
            count += len(batch)
            now = time.perf_counter()
            worst, last = max(worst, now - last), now
    assert count == expected, f"{count} records of {expected}"
    return time.perf_counter() - begun, worst


def figures_of(what: str, found: list[Replayed], total: int) -> list[Figure]:
    """Return the medians of some replays of so many bytes; the publisher's are of all together."""
    walls = [each.wall_s for each in found]
    spent = statistics.median(each.processor_s for each in found)
    stall = statistics.median(each.stall_ms for each in found)
    figures = [
        Figure(f"{what}: replay", total / statistics.median(walls) / 1e6, "MB/s"),
        Figure(f"{what}: quickest replay", total / min(walls) / 1e6, "MB/s"),
        Figure(f"{what}: longest stall", stall, "ms"),
        Figure(f"{what}: processor of the broker", spent / total * (1 << 30), "s/GiB"),
        Figure(f"{what}: broker's own memory", max(each.own_mb for each in found), "MB"),
    ]
    took = sorted(each for run in found for each in run.publisher_ms)
    if took:
        figures += [
            Figure(f"{what}: publisher's median", statistics.median(took), "ms"),
            Figure(f"{what}: publisher's p99", took[len(took) * 99 // 100], "ms"),
            Figure(f"{what}: publisher's worst", took[-1], "ms"),
        ]
    return figures


def compare(size: int, total: int, rounds: int) -> list[Figure]:
    """Return the figures of both ways for one size of record."""
    figures = []
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as place:
        folder = Path(place)
        count = fill(folder, size, total)
        for state in ("cold", "warm", "cold, beside a publisher"):
            runs: dict[str, list[Replayed]] = {way: [] for way in WAYS}
            for at in range(rounds):
                # In turn, and each first as often: what else the machine does meets both.
                for way in list(WAYS)[:: 1 if at % 2 else -1]:
                    found = replay(folder, way, "cold" in state, "beside" in state, count)
                    runs[way].append(found)
            for way, rounds_of_it in runs.items():
                what = f"{size} B, {state}, {way}"
                figures += figures_of(what, rounds_of_it, count * size)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--megabytes", type=int, default=512, help="of bodies, for each size")
    parser.add_argument("--rounds", type=int, default=3, help="replays each way")
    parser.add_argument("--publish", metavar="ENDPOINT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.publish:
        publish(options.publish)
        return
    figures = [
        figure
        for size in SIZES
        for figure in compare(size, options.megabytes << 20, options.rounds)
    ]
    show(figures, as_json=options.json)


if __name__ == "__main__":
    main()
