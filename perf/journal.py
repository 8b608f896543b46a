"""Measure the journal: append, sync, read, recover, index; pwritev against a mapping.

    python perf/journal.py [--json] [--directory DIR] [--megabytes 192]

Every figure is the best of three runs unless it is a percentile. The directory should lie
on the disk that a broker would use; its files are removed afterwards.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyroaring import BitMap

from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_protocol.stamp import CHANGE
from malamute_py.journal import (
    NO_KEYS,
    UNINDEXED_FROM,
    Append,
    FileStorage,
    Follower,
    HeaderIndex,
    MemoryStorage,
    Ring,
    RingSettings,
    Storage,
    Wanted,
)

Figures = list[tuple[str, float, str]]
SETTINGS = RingSettings(segment_bytes=64 << 20, ring_bytes=512 << 20)
SIZES = ((1, 12), (100, 12), (1000, 12), (1000, 100), (1000, 1024))
"""(records a batch, bytes a record), up to batches of 1 MiB."""
MAIL = UNINDEXED_FROM + 254


@contextmanager
def directory_in(parent: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="malamute-perf-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def seconds(work: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def best(work: Callable[[], object], times: int = 3) -> float:
    return min(seconds(work) for _ in range(times))


def percentile(times: list[int], part: int) -> float:
    """Return a percentile of nanoseconds, in microseconds."""
    times.sort()
    return times[min(len(times) * part // 100, len(times) - 1)] / 1000


def contents(records: int, size: int) -> tuple[bytes, int, Any]:
    content = encode([bytes(size)] * records, subject="a.b.c", fields={"kind": "x"})
    parsed = Content(content)
    return content, parsed.head.content_crc, parsed.table


def open_ring(storage: Storage, segments_ahead: int) -> Ring:
    """Open a ring whose first segments are prepared, as housekeeping would have them."""
    ring, _ = Ring.open(storage, settings=SETTINGS, epoch=1)
    ring._space.need(segments_ahead)
    return ring


def append_figures(make: Callable[[], Storage], what: str, total: int) -> Figures:
    figures: Figures = []
    for records, size in SIZES:
        content, crc, keys = contents(records, size)
        count = max(min(total // (len(content) + 96), 30_000), 20)
        bytes_ = count * (len(content) + 96)
        ring = open_ring(make(), bytes_ // SETTINGS.segment_bytes + 1)
        offset = 0

        def run(
            ring: Ring = ring,
            content: bytes = content,
            crc: int = crc,
            keys: Any = keys,
            count: int = count,
            records: int = records,
        ) -> None:
            offset = ring.next_offset(1)
            for _ in range(count):
                ring.append([Append(1, offset, records, 1000, content, crc, keys)])
                offset += records

        took = seconds(run)
        del offset
        name = f"{what}: append {records} x {size} B"
        figures += [
            (name, took / count * 1e6, "us a batch"),
            (name, count * records / took, "records/s"),
            (name, bytes_ / took / 1e6, "MB/s"),
        ]
    return figures


def bundle_figures(make: Callable[[], Storage], what: str) -> Figures:
    """Measure bundles of many small batches, as mail comes: with header index and without."""
    figures: Figures = []
    content, crc, keys = contents(1, 200)
    for name, stream in (("indexed", 1), ("without header index", MAIL)):
        for size in (1, 64):
            rounds = 20_000 // size
            bundles = [
                [
                    Append(stream, number * size + n, 1, 1000, content, crc, keys)
                    for n in range(size)
                ]
                for number in range(rounds)
            ]
            runs = []
            for _ in range(3):
                ring = open_ring(make(), 1)

                def run(ring: Ring = ring, bundles: list[list[Append]] = bundles) -> None:
                    for bundle in bundles:
                        ring.append(bundle)

                runs.append(seconds(run))
            label = f"{what}: append 200 B in bundles of {size}, {name}"
            figures.append((label, min(runs) / rounds / size * 1e6, "us a batch"))
    return figures


def follow_figures(parent: Path) -> Figures:
    """Measure the reading of a million batches of mail, one change in 64, after the writer."""
    with directory_in(parent) as path:
        ring = open_ring(FileStorage(path), 8)
        content, crc, _ = contents(1, 200)
        offset = 0
        for number in range(1_000_000 // 64):
            mail = [Append(MAIL, offset + n, 1, 1000, content, crc, NO_KEYS) for n in range(63)]
            ring.append([*mail, Append(0, number, 1, 1000, content, crc, None, CHANGE)])
            offset += 63
        ring.sync()
        batches = 1_000_000
        follower = Follower(FileStorage(path, read_only=True))

        def follow(wanted: Wanted | None) -> Callable[[], int]:
            return lambda: sum(1 for _ in follower.read(0, ring.end_lsn, wanted))

        changes = best(follow(lambda stamp: stamp.control_kind == CHANGE))
        everything = best(follow(None))
        chance = random.Random(1)
        scattered = sorted(chance.sample(range(offset), 1000))
        near = list(range(offset // 2, offset // 2 + 1000))
        return [
            ("follow: a batch passed over by its stamp", changes / batches * 1e6, "us"),
            ("follow: a batch given, content checked", everything / batches * 1e6, "us"),
            (
                "read_batches: 1,000 neighbours",
                best(lambda: ring.read_batches(MAIL, near)) * 1e3,
                "us each",
            ),
            (
                f"read_batches: 1,000 scattered over {ring.end_lsn >> 20} MiB",
                best(lambda: ring.read_batches(MAIL, scattered)) * 1e3,
                "us each",
            ),
        ]


def sync_figures(parent: Path) -> Figures:
    """Measure one batch and one sync; and with a writer that goes on beside the syncing thread."""
    figures: Figures = []
    for records, size in ((1, 12), (1000, 64)):
        with directory_in(parent) as path:
            ring = open_ring(FileStorage(path), 2)
            content, crc, keys = contents(records, size)
            times = []
            offset = 0
            for _ in range(300):
                ring.append([Append(1, offset, records, 1000, content, crc, keys)])
                offset += records
                start = time.perf_counter_ns()
                ring.sync()
                times.append(time.perf_counter_ns() - start)
            name = f"file: sync after {len(content) + 96} B"
            figures.append((f"{name}, median", percentile(times, 50), "us"))
            figures.append((f"{name}, p99", percentile(times, 99), "us"))
    with directory_in(parent) as path:
        ring = open_ring(FileStorage(path), 5)
        content, crc, keys = contents(1000, 64)
        stop = threading.Event()
        syncs = 0

        def sync() -> None:
            nonlocal syncs
            while not stop.is_set():
                before = ring.synced_lsn
                if ring.sync() == before:
                    time.sleep(0.0001)
                else:
                    syncs += 1

        thread = threading.Thread(target=sync)
        thread.start()
        offset, count = 0, 2500
        begun = time.perf_counter()
        for _ in range(count):
            ring.append([Append(1, offset, 1000, 1000, content, crc, keys)])
            offset += 1000
        took = time.perf_counter() - begun
        stop.set()
        thread.join()
        name = "file: append 1000 x 64 B beside a syncing thread"
        figures.append((name, count * (len(content) + 96) / took / 1e6, "MB/s"))
        figures.append((name, syncs / took, "syncs/s"))
    return figures


def mapped_figures(parent: Path) -> Figures:
    """Measure equal stores by mapping and by pwritev, with a sync now and then as in a broker."""
    figures: Figures = []
    size = SETTINGS.segment_bytes
    for part in (4096, 65_536, 1 << 20):
        data = os.urandom(part)
        for way in ("pwritev", "mapped store"):
            with directory_in(parent) as path:
                storage = FileStorage(path)
                name = "segment"
                file = storage.create(name, size)
                for at in range(0, size, 1 << 20):
                    storage.write(file, at, [bytes(1 << 20)])
                storage.sync(file)
                fd = os.open(path / name, os.O_RDWR)
                view = mmap.mmap(fd, size)

                def run(
                    way: str = way,
                    view: mmap.mmap = view,
                    fd: int = fd,
                    part: int = part,
                    data: bytes = data,
                ) -> float:
                    stores = 0.0
                    for number, at in enumerate(range(0, size, part)):
                        start = time.perf_counter()
                        if way == "pwritev":
                            os.pwritev(fd, [data], at)
                        else:
                            view[at : at + part] = data
                        stores += time.perf_counter() - start
                        if number % max((4 << 20) // part, 1) == 0:
                            os.fdatasync(fd)
                    return stores

                took = min(run() for _ in range(3))
                figures.append((f"{way} of {part} B, synced each 4 MiB", size / took / 1e6, "MB/s"))
                view.close()
                os.close(fd)
    return figures


def stall_figures(parent: Path) -> Figures:
    """Measure the wait of a busy thread while another reads 64 MiB that are not cached."""
    figures: Figures = []
    size = SETTINGS.segment_bytes
    with directory_in(parent) as path:
        name = path / "segment"
        with name.open("wb") as out:
            for _ in range(0, size, 1 << 20):
                out.write(os.urandom(1 << 20))
            out.flush()
            os.fsync(out.fileno())
        for way, read in COLD.items():
            runs = [cold_run(name, size, read) for _ in range(3)]
            took, worst = min(run[0] for run in runs), min(run[1] for run in runs)
            figures.append((f"{way}, cold: longest stall of another thread", worst / 1e6, "ms"))
            figures.append((f"{way}, cold: all 64 MiB", took / 1e6, "ms"))
    return figures


PIECE = 4 << 20
POPULATE_READ = 22
"""MADV_POPULATE_READ, Linux 5.14."""


def by_pread(fd: int, view: mmap.mmap) -> None:
    for at in range(0, len(view), PIECE):
        os.pread(fd, PIECE, at)


def by_mapping(fd: int, view: mmap.mmap) -> None:
    for at in range(0, len(view), PIECE):
        bytes(view[at : at + PIECE])


def by_random_mapping(fd: int, view: mmap.mmap) -> None:
    view.madvise(mmap.MADV_RANDOM)
    by_mapping(fd, view)


def by_asked_mapping(fd: int, view: mmap.mmap) -> None:
    for at in range(0, len(view), 256 << 10):
        view.madvise(POPULATE_READ, at, 256 << 10)
        bytes(view[at : at + (256 << 10)])


COLD: dict[str, Callable[[int, mmap.mmap], None]] = {
    "pread of 4 MiB": by_pread,
    "mapped read of 4 MiB, default advice": by_mapping,
    "mapped read of 256 KiB, pages asked for before": by_asked_mapping,
    "mapped read of 4 MiB, MADV_RANDOM": by_random_mapping,
}


def cold_run(name: Path, size: int, read: Callable[[int, mmap.mmap], None]) -> tuple[float, float]:
    """(nanoseconds of all, of the longest stall of another thread)."""
    fd = os.open(name, os.O_RDONLY)
    os.posix_fadvise(fd, 0, size, os.POSIX_FADV_DONTNEED)
    view = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    done = threading.Event()

    def run() -> None:
        read(fd, view)
        done.set()

    thread = threading.Thread(target=run)
    worst, last, began = 0, time.perf_counter_ns(), time.perf_counter_ns()
    thread.start()
    while not done.is_set():
        now = time.perf_counter_ns()
        worst, last = max(worst, now - last), now
    took = time.perf_counter_ns() - began
    thread.join()
    view.close()
    os.close(fd)
    return took, worst


def read_figures(make: Callable[[], Storage], what: str, total: int) -> Figures:
    figures: Figures = []
    for records, size in ((10, 12), (1000, 64), (1000, 1024)):
        content, crc, keys = contents(records, size)
        count = max(min(total // 2 // (len(content) + 96), 30_000), 20)
        ring = open_ring(make(), count * (len(content) + 96) // SETTINGS.segment_bytes + 1)
        offset = 0
        for _ in range(count):
            ring.append([Append(1, offset, records, 1000, content, crc, keys)])
            offset += records

        def run(ring: Ring = ring, end: int = offset) -> None:
            position = 0
            while position < end:
                position = ring.read(1, position, end, 1 << 20).next

        took = best(run)
        name = f"{what}: read {records} x {size} B in 1 MiB pieces, both checksums checked"
        figures.append((name, count * (len(content) + 96) / took / 1e6, "MB/s"))
        figures.append((name, count / took, "batches/s"))
    return figures


def index_figures(parent: Path) -> Figures:
    """Measure the index's share of an append, and the replay of a rare subject."""
    figures: Figures = []
    count = 20_000
    tables = []
    for number in range(1000):
        content = encode([bytes(12)] * 10, subject=f"a.b{number % 30}.c{number}")
        parsed = Content(content)
        tables.append((content, parsed.head.content_crc, parsed.table))
    for name, distinct in (("one header", 1), ("1,000 headers in turn", 1000)):
        ring = open_ring(MemoryStorage(), 2)
        live = ring._space.new_index()
        add, facts = live.add, ((0, 0), 0, 0)
        start = time.perf_counter()
        for number in range(count):
            keys = tables[number % distinct][2]
            add(1, number * 400, 400, number, number + 1, 1, facts, keys)
        took = time.perf_counter() - start
        figures.append((f"index: one batch, {name}", took / count * 1e6, "us"))
    with directory_in(parent) as path:
        ring = open_ring(FileStorage(path), 2)
        offset = 0
        for number in range(count):
            content, crc, keys = tables[number % 1000]
            ring.append([Append(1, offset, 10, 1000, content, crc, keys)])
            offset += 10

        def rare(index: HeaderIndex) -> BitMap:
            found = BitMap()
            for keys, bitmap in index.subjects():
                if keys == ("a.b7.c7",):
                    found |= bitmap
            return found

        took = best(lambda: ring.read(1, 0, offset, 1 << 30, rare))
        figures.append(("replay of one subject in 1,000 out of 20,000 batches", took * 1e3, "ms"))
        took = best(lambda: ring.read(1, 0, offset, 1 << 30))
        figures.append(("replay of all 20,000 batches", took * 1e3, "ms"))
        took = best(lambda: ring.last_per_subject(1))
        figures.append(("last of each of 1,000 subjects", took * 1e3, "ms"))
        took = best(lambda: ring.plan(1, 0, offset, split_bytes=1 << 20))
        figures.append(("plan over 20,000 batches", took * 1e3, "ms"))
    return figures


def recovery_figures(parent: Path) -> Figures:
    """Measure a second opening: a segment full of batches, after a crash and an orderly close."""
    figures: Figures = []
    for records, size in ((10, 12), (1000, 64)):
        for clean in (False, True):
            with directory_in(parent) as path:
                ring = open_ring(FileStorage(path), 2)
                content, crc, keys = contents(records, size)
                offset = 0
                while ring.end_lsn < 60 << 20:
                    ring.append([Append(1, offset, records, 1000, content, crc, keys)])
                    offset += records
                ring.sync()
                if clean:
                    ring.close()
                batches = offset // records
                took = seconds(
                    lambda path=path: Ring.open(  # type: ignore[misc]
                        FileStorage(path), settings=SETTINGS, epoch=2
                    )
                )
                how = "an orderly close" if clean else "a crash"
                name = f"open after {how}: 60 MiB, {batches} batches"
                figures.append((name, took * 1e3, "ms"))
    return figures


def streams_figures(parent: Path) -> Figures:
    """Measure 1,000 streams in one ring."""
    with directory_in(parent) as path:
        ring = open_ring(FileStorage(path), 2)
        content, crc, keys = contents(1, 12)
        nexts = [0] * 1000
        times = []
        for number in range(20_000):
            stream = number * 7 % 1000
            began = time.perf_counter_ns()
            ring.append([Append(stream, nexts[stream], 1, 1000, content, crc, keys)])
            times.append(time.perf_counter_ns() - began)
            nexts[stream] += 1
        files = len([name for name in path.iterdir() if name.suffix == ".seg"])
        start = time.perf_counter_ns()
        ring._appender._snapshot_batch(0, ring._snapshot)
        snapshot = time.perf_counter_ns() - start
        return [
            ("1,000 streams in one ring: append, median", percentile(times, 50), "us"),
            ("1,000 streams in one ring: files", files, ""),
            ("1,000 streams in one ring: snapshot at a segment's start", snapshot / 1000, "us"),
        ]


def measure(parent: Path, total: int) -> Figures:
    figures: Figures = []
    with directory_in(parent) as path:
        numbers = iter(range(100))
        make = lambda: FileStorage(path / str(next(numbers)))  # noqa: E731
        figures += append_figures(make, "file", total)
        figures += bundle_figures(make, "file")
    figures += append_figures(MemoryStorage, "memory", total)
    figures += bundle_figures(MemoryStorage, "memory")
    figures += follow_figures(parent)
    figures += sync_figures(parent)
    figures += mapped_figures(parent)
    figures += stall_figures(parent)
    with directory_in(parent) as path:
        numbers = iter(range(100))
        make = lambda: FileStorage(path / str(next(numbers)))  # noqa: E731
        figures += read_figures(make, "file", total)
    figures += read_figures(MemoryStorage, "memory", total)
    figures += index_figures(parent)
    figures += recovery_figures(parent)
    figures += streams_figures(parent)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--directory", type=Path, default=None, help="where to write")
    parser.add_argument("--megabytes", type=int, default=192, help="written by each append figure")
    options = parser.parse_args()
    parent = options.directory or Path(tempfile.gettempdir())
    figures = measure(parent, options.megabytes << 20)
    if options.json:
        rows = [{"what": what, "value": value, "unit": unit} for what, value, unit in figures]
        json.dump({"python": sys.version.split()[0], "figures": rows}, sys.stdout, indent=1)
        print()
        return
    width = max(len(what) for what, _, _ in figures)
    for what, value, unit in figures:
        print(f"{what:<{width}}  {value:>14,.1f} {unit}")


if __name__ == "__main__":
    main()
