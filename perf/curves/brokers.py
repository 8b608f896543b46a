"""A broker as a process of its own, its cost, and a pair of clients that uses it.

Owns the daemon on the checkout's disk and the accounts of its processor time and memory. The rules:
the broker's own time is that of all its threads and its children, user and system; the clients are
processes apart; the reader of a pair counts the records that the pair has moved.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from malamute_py.client.aio.client import Client, connect
from malamute_py.demo.daemon import Daemon

OUT = Path(__file__).parent.parent / "out"
"""Folder of data directories: on the disk of the checkout, not in a memory file system."""
MIB = 1 << 20
BODY = b"x" * 140
BULK = 1_000_000
LONE = 1_000
QUIET_S = 60.0
CLIENTS_A_PROCESS = 4_000
"""Clients in one process of a crowd: two descriptors each, within a limit of 20,000."""
STREAM = "busy"
SUBJECT = "busy.subject"


@contextmanager
def broker(settings: Sequence[str] = ()) -> Iterator[Daemon]:
    """Start a broker on a fresh directory; end it and remove the directory at the end."""
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as folder, Daemon(Path(folder), settings) as daemon:
        yield daemon


def cpu_s(daemon: Daemon) -> float:
    """Return the processor time of the broker's threads and of its checkpoint's process, so far.

    From the scheduler, in nanoseconds: the times of ps count hundredths of a second.
    """
    process = daemon.process
    return sum(map(_threads_s, [process.pid, *(c.pid for c in process.children(recursive=True))]))


def _threads_s(pid: int) -> float:
    """Return the time of all threads of a process that live."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            spent += int((task / "schedstat").read_text().split()[0])
    return spent / 1e9


class Cost:
    """Processor time of the broker and wall time that passed within a `with`."""

    cpu_s = 0.0
    wall_s = 0.0

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def __enter__(self) -> Cost:
        self._cpu_s, self._began = cpu_s(self._daemon), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s = time.perf_counter() - self._began
        self.cpu_s = cpu_s(self._daemon) - self._cpu_s

    def us(self, count: int) -> float:
        """Return the broker's processor time for each of so many."""
        return self.cpu_s / count * 1e6


class PairCost(NamedTuple):
    """Costs of a record of an active pair; in microseconds."""

    bulk_cpu_us: float
    bulk_wall_us: float
    lone_cpu_us: float
    """Cost of a record that is published alone and confirmed before the next: a turn of the
    loop."""
    lone_wall_us: float


@contextmanager
def reader(endpoint: str, stream: str, records: int) -> Iterator[subprocess.Popen[str]]:
    """Start a subscriber in a process of its own, and wait until it is ready; see reader.py."""
    command = [sys.executable, "-m", "perf.curves.reader", endpoint, stream, str(records)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            expect(process, "ready")
            yield process
        finally:
            process.kill()


def expect(process: subprocess.Popen[str], word: str) -> None:
    """Read a line of a process; anything but the word ends the measurement."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if line != word:
        raise SystemExit(f"a client of the measurement said {line!r} instead of {word!r}")


@contextmanager
def crowd(
    endpoint: str, clients: int, subscriptions: int = 0, stream: str = "busy", first: int = 0
) -> Iterator[Sequence[subprocess.Popen[str]]]:
    """Start so many idle clients in as few processes as hold them, all of them ready."""
    with ExitStack() as stack:
        processes = []
        for begin in range(first, first + clients, CLIENTS_A_PROCESS):
            count = min(CLIENTS_A_PROCESS, first + clients - begin)
            command = [sys.executable, "-m", "perf.curves.crowd", endpoint, str(count),
                       str(subscriptions), stream, str(begin)]  # fmt: skip
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            expect(process, "ready")
        yield processes


async def publish_bulk(client: Client, stream: str, records: int, subject: str = SUBJECT) -> None:
    """Publish in the bulk form, all of it confirmed at the end."""
    portion = min(records, 100_000)
    bodies = [BODY] * portion
    async with client.publisher(stream, keep=False) as window:
        for first in range(0, records, portion):
            await window.publish_many(bodies[: records - first], subject=subject)


async def pair_cost(daemon: Daemon, stream: str = STREAM, records: int = BULK) -> PairCost:
    """Make one run of an active pair: many records in bulk, then some alone."""
    lone = min(LONE, records)
    async with connect(daemon.endpoint) as client:
        await client.publish(stream, BODY, subject=SUBJECT)
        with reader(daemon.endpoint, stream, records + lone) as process:
            with Cost(daemon) as bulk:
                await publish_bulk(client, stream, records)
            with Cost(daemon) as single:
                for _ in range(lone):
                    await client.publish(stream, BODY, subject=SUBJECT, confirm="stored")
            await asyncio.to_thread(expect, process, "done")
    return PairCost(
        bulk.us(records), bulk.wall_s / records * 1e6, single.us(lone), single.wall_s / lone * 1e6
    )


def pair_costs(daemon: Daemon, runs: int, records: int = BULK) -> list[PairCost]:
    """Make so many runs, after one that warms up."""
    asyncio.run(pair_cost(daemon, records=records // 4))
    return [asyncio.run(pair_cost(daemon, records=records)) for _ in range(runs)]


def idle_share(daemon: Daemon, seconds: float = 2.0) -> float:
    """Return the share of one core that the broker takes while no client asks anything."""
    with Cost(daemon) as cost:
        until_quiet(cost)
    with Cost(daemon) as cost:
        time.sleep(seconds)
    return cost.cpu_s / cost.wall_s


def until_quiet(cost: Cost) -> None:
    """Wait until work under way is done: the broker takes less than a twentieth of a core."""
    until = time.monotonic() + QUIET_S
    spent = -1.0
    while time.monotonic() < until:
        time.sleep(0.5)
        cost.__exit__()
        if cost.cpu_s - spent < 0.025:
            return
        spent = cost.cpu_s
    raise SystemExit("the broker did not come to rest")
