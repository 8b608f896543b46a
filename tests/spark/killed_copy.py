"""A query out of a stream that is killed amid its batches, or whose broker is.

By hand: python -m tests.spark.killed_copy [--archive] [--times 10] [--broker] [--seed 1]. It starts
a broker and the query, into another stream or into an archive of Parquet, kills the query's process
group or the broker at random moments of its start and of its batches, starts it again, and ends
with 1 unless the copy has every record once.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from malamute_py.client.sync.client import SyncClient, connect_sync
from malamute_py.demo.daemon import Daemon
from pyspark_malamute.pipelines import archive
from pyspark_malamute.pipelines.archive_log import State, load_state
from pyspark_malamute.pipelines.folder import FoundFile
from tests.spark.conftest import start_spark

PER_TRIGGER = 20_000
WAIT_S = 240
CHUNKS_S = 0.4
"""About the duration of a batch whose chunks are in the stream one after the other."""


def copy(endpoint: str, stream: str, directory: Path) -> Any:
    """Start the query in this process."""
    spark = start_spark(directory / "warehouse")
    return (
        spark.readStream.format("malamute")
        .options(endpoint=endpoint, stream=stream, startingOffsets="earliest")
        .options(maxRecordsPerTrigger=str(PER_TRIGGER), splitBytes="1m", minPartitions="2")
        .load()
        .select("subject", "body")
        .writeStream.format("malamute")
        .options(endpoint=endpoint, stream=f"{stream}-copy", chunkBytes="128k")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .start()
    )


def copy_into_archive(endpoint: str, stream: str, directory: Path) -> Any:
    """Start the query into Parquet in this process."""
    return archive(
        start_spark(directory / "warehouse"), str(directory / "archive"), endpoint=endpoint,
        stream=stream, follow=True, every_ms=0, maxRecordsPerTrigger=PER_TRIGGER, splitBytes="1m",
        minPartitions=2,
    )  # fmt: skip


@contextlib.contextmanager
def running(
    endpoint: str, stream: str, directory: Path, *more: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The query in a process group of its own, which is killed in the end."""
    program = [sys.executable, "-m", "tests.spark.killed_copy", *more, "--run", endpoint, stream]
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "query.log").open("ab") as log:
        query = subprocess.Popen(
            [*program, str(directory)], stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield query
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(query.pid, signal.SIGKILL)
        query.wait()


def publish(client: SyncClient, stream: str, rows: int) -> None:
    """Fill the source: bodies are the rows' numbers, 60 bytes each."""
    for first in range(0, rows, 10_000):
        bodies = [b"%060d" % row for row in range(first, min(rows, first + 10_000))]
        client.publish_many(stream, bodies, subject=f"a.{first % 7}")


def copied(client: SyncClient, stream: str) -> int:
    """Records of the copy."""
    found = {facts.name: facts.tail for facts in client.list_streams(f"{stream}-copy")}
    return found.get(f"{stream}-copy", 0)


def until(client: SyncClient, stream: str, count: int, query: subprocess.Popen[bytes]) -> None:
    """Wait until the copy has so many records."""
    wait_until(count, query, lambda: copied(client, stream))


class Timing:
    """Durations of a run's parts as they were seen last, within which a kill is to fall."""

    start_s = 20.0
    """From the start of the query to its first batch."""
    batch_s = 1.0


def wait_until(
    count: int,
    query: subprocess.Popen[bytes],
    done: Callable[[], int],
    timing: Timing | None = None,
) -> None:
    """Wait until so many records are done."""
    timing = timing or Timing()
    begun_s = time.monotonic()
    found, found_s = done(), 0.0
    while found < count:
        time.sleep(0.005)
        assert query.poll() is None, f"the query ended by itself: {_log(query)}"
        now, now_s = done(), time.monotonic()
        assert now_s < begun_s + WAIT_S, f"{now} of {count} records"
        if now > found:
            if found_s:
                timing.batch_s = now_s - found_s
            else:
                timing.start_s = now_s - begun_s
            found, found_s = now, now_s


class Local:
    """An archive's directory on this machine, looked at without Spark."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, name: str) -> bytes:
        return (self.directory / name).read_bytes()

    def files(self, below: str = "") -> list[FoundFile]:
        home = self.directory / below
        return [FoundFile(f"{below}/{path.name}", 0, 0) for path in home.glob("*.json")]


def state_of(directory: Path) -> State | None:
    """An archive as its log tells."""
    return load_state(Local(directory))


def archived(directory: Path, stream: str) -> int:
    """Records of an archive."""
    state = state_of(directory)
    return 0 if state is None else state.reached.get(stream, 0)


def _log(query: subprocess.Popen[bytes]) -> str:
    directory = list(query.args)[-1] if isinstance(query.args, list) else ""
    return (Path(str(directory)) / "query.log").read_text()[-3000:]


def faults(client: SyncClient, stream: str, rows: int) -> str:
    """Say what of the copy is missing or there twice; "" when nothing is."""
    with client.subscribe(f"{stream}-copy", start="earliest", until="tail") as reading:
        found = collections.Counter(
            int(body) for batch in reading.batches() for body in batch.bodies()
        )
    return judged(found, rows)


def faults_of_archive(directory: Path, rows: int) -> str:
    """Say what of an archive is missing or there twice; "" when nothing is."""
    state = state_of(directory)
    assert state is not None
    found: collections.Counter[int] = collections.Counter()
    for path in state.files:
        table: Any = pq.ParquetFile(directory / path).read(["body"])
        found.update(int(body) for body in table.column("body").to_pylist())
    return judged(found, rows)


def judged(found: collections.Counter[int], rows: int) -> str:
    """Say which of so many numbers are missing or there twice; "" when none is."""
    twice = sum(count > 1 for count in found.values())
    missing = rows - len(found)
    return f"{missing} missing, {twice} more than once" if missing or twice else ""


def main() -> int:
    """Kill as often as is asked for, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--archive", action="store_true", help="into Parquet, not into a stream")
    parser.add_argument("--broker", action="store_true", help="kill the broker, not the query")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run", nargs=3, metavar=("ENDPOINT", "STREAM", "DIRECTORY"))
    given = parser.parse_args()
    if given.run:
        endpoint, stream, directory = given.run
        start = copy_into_archive if given.archive else copy
        start(endpoint, stream, Path(directory)).awaitTermination()
        return 0
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as directory:
        fault = _killed(given, chance, Path(directory))
    print(fault or f"{given.rows:,} of {given.rows:,} records, each once")
    return 1 if fault else 0


def _killed(given: argparse.Namespace, chance: random.Random, directory: Path) -> str:
    stream, rows = "source", given.rows
    more = ("--archive",) if given.archive else ()
    with Daemon(directory / "broker") as broker, connect_sync(broker.endpoint) as client:
        publish(client, stream, rows)
        work = directory / "query"

        def done() -> int:
            if given.archive:
                return archived(work / "archive", stream)
            return copied(client, stream)

        timing = Timing()
        with contextlib.ExitStack() as stack:
            query: subprocess.Popen[bytes] | None = None
            for number in range(given.times):
                begun = done()
                started = query is None
                if query is None:
                    query = stack.enter_context(running(broker.endpoint, stream, work, *more))
                if started and number % 3 == 1:
                    # While the query starts, or in its first batch.
                    end_s = time.monotonic() + chance.random() * timing.start_s
                    while time.monotonic() < end_s and done() == begun:
                        time.sleep(0.005)
                else:
                    # Somewhere in the records that are left, the last kill amid the last of them,
                    # and at any moment of a batch. A stream shows a batch's chunks one by one.
                    count = begun + (rows - begun) // (given.times - number + 1)
                    wait_until(count, query, done, timing)
                    time.sleep(chance.random() * max(timing.batch_s, CHUNKS_S))
                if given.broker:
                    broker.kill()
                    broker.start()
                    client.opened(timeout_ms=60_000)
                else:
                    stack.close()
                    query = None
                print(
                    f"kill {number + 1}: {done():,} records copied; a start takes"
                    f" {timing.start_s:.0f} s, a batch {timing.batch_s:.1f}",
                    flush=True,
                )
        with running(broker.endpoint, stream, work, *more) as query:
            wait_until(rows, query, done)
            time.sleep(2)
        if given.archive:
            return faults_of_archive(work / "archive", rows)
        return faults(client, stream, rows)


if __name__ == "__main__":
    sys.exit(main())
