"""How fast a stream is read back: whole, one rare subject of it, and from a time on.

    python -m perf.replay                          # 10 M records of 140 B, medians of three runs
    python -m perf.replay --records 1000000 --works whole rare
    python -m perf.replay --data perf/out/kept     # fill once, read again with every later call

The broker, and each reader, is a process of its own; readers use the public Python API over
tcp and take batches. A record begins with its number, so that the reader sees, vectorised, that
each came once, in order, and of the right size. One record in 10,000, at a pseudo-random place,
has the rare subject. `raw` is what ZeroMQ alone moves between two processes in messages of
64 KiB, received with a copy: the share that replaying reaches of it is given in bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import zmq

import malamute_py as malamute
from malamute_py.demo.daemon import Daemon
from perf._daemon import OUT
from perf._roles import Role, play, say, word

STREAM = "replay"
RARE, COMMON = "perf.rare", "perf.common"
CHUNK = 65_536
RARE_EVERY = 10_000
SEED = 7
WORKS = ("raw", "whole", "rare", "time")
RAW_BYTES = 64 << 10


def rare_places(records: int) -> np.ndarray[Any, Any]:
    """One place in each stretch of RARE_EVERY records."""
    chosen = random.Random(SEED)
    firsts = range(0, records, RARE_EVERY)
    places = [first + chosen.randrange(min(RARE_EVERY, records - first)) for first in firsts]
    return np.array(places, np.int64)


# --- the clients, each in its process ------------------------------------------------------


async def fill(options: dict[str, Any]) -> None:
    records, size = options["records"], options["size"]
    rare = set(rare_places(records).tolist())
    async with malamute.connect(options["endpoint"], batch_bytes=options["batch_bytes"]) as client:
        say(ready=True)
        await word()
        begun = time.monotonic()
        async with client.window(STREAM, confirm="synced") as window:
            for first in range(0, records, CHUNK):
                count = min(CHUNK, records - first)
                column = np.full((count, size), ord("x"), np.uint8)
                column[:, :8] = (
                    np.arange(first, first + count, dtype="<u8").view(np.uint8).reshape(-1, 8)
                )
                bodies = column.reshape(-1).view(f"V{size}").tolist()
                subjects = [RARE if n in rare else COMMON for n in range(first, first + count)]
                await window.publish_many(bodies, subjects=subjects)
        say(took=time.monotonic() - begun)
        await word()


async def replay(options: dict[str, Any]) -> None:
    """Read what one work wants; say when it was asked for, and when all had come."""
    records, size, work = options["records"], options["size"], options["work"]
    wanted = np.arange(records) if work != "rare" else rare_places(records)
    start: Any = "earliest"
    if work == "time":
        # The batch in the middle: everything appended in its millisecond or later.
        async with malamute.connect(options["endpoint"]) as client:
            middle = client.subscribe(STREAM, start=records // 2, credit_bytes=1)
            batch = await middle.next_batch()
            assert batch is not None
            start = datetime.fromtimestamp(batch.stamp.append_time_ms / 1000, UTC)
    async with malamute.connect(options["endpoint"]) as client:
        await client.broker_info()
        say(ready=True)
        await word()
        received = batches = 0
        first_s = 0.0
        begun, cpu = time.monotonic(), time.process_time()
        subscription = client.subscribe(
            STREAM, RARE if work == "rare" else "#", start=start, until="tail", strict=True
        )
        async for batch in subscription.batches():
            if received == 0:
                first_s = time.monotonic() - begun
            numbers = numbers_of(batch, size)
            if batches == 0 and work == "time":
                wanted = wanted[int(numbers[0]) :]
            after = received + len(numbers)
            if not np.array_equal(numbers, wanted[received:after]):
                raise SystemExit(f"{work}: another record than the {received}th was due")
            received = after
            batches += 1
        ended = time.monotonic()
        if received != len(wanted) or client.reconnects:
            raise SystemExit(f"{work}: {received} of {len(wanted)} records came")
        say(
            records=received, batches=batches, took=ended - begun, first_s=first_s,
            cpu_s=time.process_time() - cpu,
        )  # fmt: skip
        await word()


def numbers_of(batch: Any, size: int) -> np.ndarray[Any, Any]:
    """The numbers in the delivered records; raises SystemExit when one has another size."""
    bodies = batch.content.bodies()
    count = len(bodies.offsets) - 1
    if int(bodies.offsets[-1]) != count * size or not (np.diff(bodies.offsets) == size).all():
        raise SystemExit("a record of another size")
    column = np.frombuffer(bodies.blob, np.uint8, count * size).reshape(count, size)
    numbers = np.ascontiguousarray(column[:, :8]).view("<u8").reshape(-1)
    return numbers if batch.indices is None else numbers[batch.indices]


async def push(options: dict[str, Any]) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.bind("tcp://127.0.0.1:*")
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    say(ready=True, endpoint=endpoint.rstrip(b"\0").decode())
    await word()
    message = bytes(RAW_BYTES)
    begun = time.monotonic()
    for _ in range(options["messages"]):
        socket.send(message)
    socket.recv()
    say(took=time.monotonic() - begun)
    await word()


async def pull(options: dict[str, Any]) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(options["endpoint"])
    say(ready=True)
    for _ in range(options["messages"]):
        if len(socket.recv()) != RAW_BYTES:
            raise SystemExit("a message of another size")
    socket.send(b"")
    await word()
    context.destroy(1000)


ROLES = {"fill": fill, "replay": replay, "push": push, "pull": pull}


# --- the measurement ------------------------------------------------------------------------


def role(name: str, **options: Any) -> Role:
    return Role("perf.replay", name, **options)


def raw() -> dict[str, Any]:
    """ZeroMQ alone: so many messages from one process to another, and an answer."""
    messages = 30_000
    pusher = role("push", messages=messages)
    puller = role("pull", messages=messages, endpoint=pusher.hear()["endpoint"])
    puller.hear()
    pusher.go()
    took = pusher.hear()["took"]
    puller.end()
    pusher.end()
    return {"took": took, "MB_s": messages * RAW_BYTES / took / 1e6}


def read(options: argparse.Namespace, daemon: Daemon, work: str) -> dict[str, Any]:
    reader = role(
        "replay", endpoint=daemon.endpoint, records=options.records, size=options.size, work=work
    )
    reader.hear()
    before = daemon.cpu_s()
    reader.go()
    facts = reader.hear()
    facts["broker_cpu_s"] = daemon.cpu_s() - before
    reader.end()
    facts["records_s"] = facts["records"] / facts["took"]
    facts["MB_s"] = facts["records_s"] * options.size / 1e6
    return facts


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def show(work: str, facts: dict[str, Any]) -> None:
    if work == "raw":
        print(f"raw    {facts['MB_s']:7.0f} MB/s", flush=True)
        return
    print(
        f"{work:6} {facts['records_s']:12,.0f} rec/s {facts['MB_s']:7.0f} MB/s "
        f"in {facts['took'] * 1e3:8.1f} ms, first after {facts['first_s'] * 1e3:5.1f}; "
        f"{facts['batches']:.0f} batches; CPU s: reader {facts['cpu_s']:.2f}, "
        f"broker {facts['broker_cpu_s']:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--size", type=int, default=140)
    parser.add_argument("--batch-bytes", type=int, default=256 << 10)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--data", type=Path, help="keep the filled data directory there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report: dict[str, dict[str, Any]] = {}
    OUT.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = options.data
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=OUT)))
        filled = (folder / "data").exists()
        daemon = stack.enter_context(Daemon(folder))
        if not filled:
            filler = role(
                "fill", endpoint=daemon.endpoint, records=options.records, size=options.size,
                batch_bytes=options.batch_bytes,
            )  # fmt: skip
            filler.hear()
            filler.go()
            took = filler.hear()["took"]
            filler.end()
            if not options.json:
                print(f"filled {options.records:,} records in {took:.1f} s", flush=True)
        for work in options.works:
            runs = [raw() if work == "raw" else read(options, daemon, work)
                    for _ in range(options.runs)]  # fmt: skip
            report[work] = median(runs)
            if not options.json:
                show(work, report[work])
    if options.json:
        print(json.dumps(report, indent=2))
        return
    if "raw" in report and "whole" in report:
        print(f"whole is {report['whole']['MB_s'] / report['raw']['MB_s']:.0%} of raw ZeroMQ")
    if "rare" in report and "whole" in report:
        print(f"rare is {report['whole']['took'] / report['rare']['took']:.0f} times faster")


if __name__ == "__main__":
    if not play(ROLES):
        main()
