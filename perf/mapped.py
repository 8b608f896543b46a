"""Measure the mapped reader beside a replay over TCP, and cold history by mapping and by pread.

    python -m perf.mapped [--json] [--megabytes 256]

A broker of its own is filled once for each size of record; then both ways read all of it, three
times each, and the quickest counts. Checksums are checked both ways. Processor time is that of the
reader and of the broker together. Cold: the files' pages are dropped before each read.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import malamute_py as malamute
from malamute_protocol.stamp import DATA, Stamp
from malamute_py.demo.daemon import Daemon
from malamute_py.journal import FileStorage, Follower, FollowLost, open_reader
from malamute_py.journal.directory import RINGS, directory_name
from malamute_py.mapped import LogReader
from perf.curves.brokers import OUT
from perf.figures import Figure, show

SIZES = (12, 140, 1120, 11_760)
BATCH_BYTES = 256 << 10
BATCH_RECORDS = 1000
ROUNDS = 3


def fill(client: malamute.SyncClient, stream: str, size: int, total: int) -> int:
    """Publish so many bytes in batches; returns how many records that was."""
    client.create_stream(stream, ring_bytes=max(2 * total, 256 << 20))
    count = max(1, min(BATCH_RECORDS, BATCH_BYTES // size))
    bodies = [os.urandom(size) for _ in range(count)]
    batches = max(1, total // (count * size))
    for _ in range(batches):
        client.publish_many(stream, bodies, subject="a.b.c", confirm="stored")
    return batches * count


class Taken(NamedTuple):
    """Wall-clock and processor time of the quickest round."""

    wall_s: float
    processor_s: float


def best(daemon: Daemon, work: Callable[[], int], expected: int) -> Taken:
    """Return the times of the quickest round. Each round counts its records."""
    rounds = []
    for _ in range(ROUNDS):
        begun, spent = time.perf_counter(), time.process_time() + daemon.cpu_s()
        found = work()
        took = time.perf_counter() - begun
        rounds.append(Taken(took, time.process_time() + daemon.cpu_s() - spent))
        assert found == expected, f"{found} records of {expected}"
    return min(rounds)


def over_tcp(client: malamute.SyncClient, stream: str, arrow: bool) -> int:
    count = 0
    with client.subscribe(stream, start="earliest", until="tail", timeout_ms=60_000) as records:
        for batch in records.batches():
            count += batch.to_arrow().num_rows if arrow else len(batch)
    return count


def by_mapping(log: LogReader, stream: str, arrow: bool, copy: bool = False) -> int:
    count = 0
    with log.read(stream, until="tail", copy=copy) as reading:
        for batch in reading:
            count += batch.to_arrow().num_rows if arrow else len(batch)
    return count


def beside_tcp(total: int) -> list[Figure]:
    figures = []
    OUT.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=OUT) as folder,
        Daemon(Path(folder)) as daemon,
        malamute.connect_sync(daemon.endpoint) as client,
    ):
        for size in SIZES:
            stream = f"records-{size}"
            count = fill(client, stream, size, total if size > 12 else total // 8)
            with open_reader(Path(folder) / "data") as log:
                figures += compare(daemon, client, log, stream, f"{size} B", count)
    return figures


def compare(
    daemon: Daemon, client: malamute.SyncClient, log: LogReader, stream: str, name: str, count: int
) -> list[Figure]:
    figures = []
    for arrow in (False, True):
        what = f"{name}, {'each batch as Arrow' if arrow else 'batches'}"
        ways = {
            "over TCP": partial(over_tcp, client, stream, arrow),
            "mapped": partial(by_mapping, log, stream, arrow),
            "mapped, copies": partial(by_mapping, log, stream, arrow, copy=True),
        }
        taken = {way: best(daemon, work, count) for way, work in ways.items()}
        for way, each in taken.items():
            figures.append(Figure(f"{what}: {way}", count / each.wall_s, "records/s"))
            spent = each.processor_s / count * 1e9
            figures.append(Figure(f"{what}: {way}, processor", spent, "ns a record"))
        tcp, mapped = taken["over TCP"], taken["mapped"]
        figures.append(Figure(f"{what}: rate to TCP's", tcp.wall_s / mapped.wall_s, "times"))
        less = tcp.processor_s / mapped.processor_s
        figures.append(Figure(f"{what}: processor time less than TCP's", less, "times"))
    return figures


def cold(total: int) -> list[Figure]:
    """History that is in no cache: the mapped reader, and the same batches by pread."""
    figures = []
    OUT.mkdir(exist_ok=True)
    for size in (140, 11_760):
        with tempfile.TemporaryDirectory(dir=OUT) as folder:
            data = Path(folder) / "data"
            with Daemon(Path(folder)) as daemon, malamute.connect_sync(daemon.endpoint) as client:
                count = fill(client, "records", size, total)
            with open_reader(data) as log:
                place = data / RINGS / directory_name(log.streams()[0].ring)
            ways = {
                "mapped": partial(all_mapped, data, count),
                "by pread": partial(all_by_pread, place, count),
            }
            for way, work in ways.items():
                runs = [dropped(place, work) for _ in range(ROUNDS)]
                took, stall = min(run[0] for run in runs), min(run[1] for run in runs)
                what = f"cold, {size} B, {way}"
                figures.append(Figure(f"{what}: all of it", count * size / took / 1e6, "MB/s"))
                figures.append(Figure(f"{what}: longest stall of another thread", stall, "ms"))
    return figures


def all_mapped(data: Path, expected: int) -> None:
    with open_reader(data) as log:
        assert by_mapping(log, "records", arrow=False) == expected


def all_by_pread(place: Path, expected: int) -> None:
    """Read a ring as a checkpoint does: the same checks, of pieces that are read into memory."""
    count = 0
    follower = Follower(FileStorage(place, read_only=True))
    with contextlib.suppress(FollowLost):  # the follower does not know the end of the log
        for stamp, _ in follower.read(0, 1 << 62, is_data):
            count += stamp.count
    assert count == expected


def is_data(stamp: Stamp) -> bool:
    return stamp.control_kind == DATA


def dropped(place: Path, work: Callable[[], None]) -> tuple[float, float]:
    """(seconds of the work, ms of the longest stall of another thread), from an empty cache."""
    for path in place.glob("*.seg"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    done = threading.Event()

    def run() -> None:
        work()
        done.set()

    thread = threading.Thread(target=run)
    worst, last = 0.0, time.perf_counter()
    begun = last
    thread.start()
    while not done.is_set():
        now = time.perf_counter()
        worst, last = max(worst, now - last), now
    took = time.perf_counter() - begun
    thread.join()
    return took, worst * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--megabytes", type=int, default=256, help="of bodies, for each size")
    options = parser.parse_args()
    total = options.megabytes << 20
    figures = beside_tcp(total) + cold(total)
    show(figures, as_json=options.json)


if __name__ == "__main__":
    main()
