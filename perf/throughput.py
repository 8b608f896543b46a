"""How fast one producer feeds one consumer through one broker, each a process of its own.

    python -m perf.throughput                      # all forms, medians of three runs
    python -m perf.throughput --form bulk --size 12 --json
    python -m perf.throughput --endpoint tcp://127.0.0.1:9797   # a broker that runs already

Everything goes through the public client. The producer's time ends when all is confirmed
at the level asked for, the consumer's when all was received; count and CRC of what was
received are compared with what was sent, and the level of each confirm with the one asked
for: a difference fails the run, and so does a data directory in a memory file system. The
bodies are made before the clock starts; encoding them into batches counts.

Forms: `bulk` is window.publish_many() and batches(); `single` is publish(), by 64 tasks at
a time, and `async for`; `alone` is one publish() after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import psutil

import malamute_py as malamute
from malamute_py.demo.daemon import Daemon

RECORDS = {
    "bulk": {12: 6_000_000, 140: 2_500_000, 1024: 600_000},
    "single": {12: 60_000},
    "alone": {12: 2_000},
}
CHUNK = 65_536
POOL_BYTES = 32 << 20
TASKS = 64
STREAM = "throughput"


# --- what is sent -----------------------------------------------------------------------


def chunks(size: int, records: int) -> list[list[bytes]]:
    """Lists of distinct bodies, at most POOL_BYTES of them; send them round and round."""
    per_chunk = min(CHUNK, records, max(1, POOL_BYTES // size))
    wanted = -(-records // per_chunk)
    pool = []
    number = 0
    for _ in range(max(1, min(wanted, POOL_BYTES // (per_chunk * size)))):
        pool.append([b"%0*d" % (size, number + n) for n in range(per_chunk)])
        number += per_chunk
    return pool


def rounds(size: int, records: int) -> Iterator[list[bytes]]:
    """The pool's chunks until so many records were given."""
    pool = chunks(size, records)
    left, place = records, 0
    while left:
        chunk = pool[place % len(pool)][:left]
        yield chunk
        left -= len(chunk)
        place += 1


def crc_of(size: int, records: int) -> int:
    crc = 0
    for chunk in rounds(size, records):
        crc = google_crc32c.extend(crc, b"".join(chunk))
    return crc


# --- the two clients, each in its process -------------------------------------------------


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def produce(options: argparse.Namespace) -> None:
    size, records, confirm = options.size, options.records, options.confirm
    given = list(rounds(size, records))
    crc = crc_of(size, records)
    async with malamute.connect(options.endpoint, batch_bytes=options.batch_bytes) as client:
        # The producer id is opened by the first confirmed publish, once in its life.
        await client.publish(options.stream, b"\0" * size, confirm=confirm)
        say(ready=True)
        await asyncio.to_thread(sys.stdin.readline)
        levels: dict[str, int] = {}

        async def publish(body: bytes) -> None:
            confirmed = await client.publish(options.stream, body, subject="perf", confirm=confirm)
            levels[confirmed.level] = levels.get(confirmed.level, 0) + 1

        begun, cpu = time.monotonic(), time.process_time()
        if options.form == "bulk":
            async with client.window(options.stream, confirm=confirm) as window:
                for chunk in given:
                    await window.publish_many(chunk, subject="perf")
            for confirmed in window.confirmations:
                levels[confirmed.level] = levels.get(confirmed.level, 0) + confirmed.count
        elif options.form == "single":
            bodies = iter([body for chunk in given for body in chunk])

            async def work() -> None:
                for body in bodies:
                    await publish(body)

            await asyncio.gather(*(work() for _ in range(TASKS)))
        else:
            for chunk in given:
                for body in chunk:
                    await publish(body)
        say(
            begun=begun,
            ended=time.monotonic(),
            cpu_s=time.process_time() - cpu,
            crc=crc,
            levels=levels,
            reconnects=client.reconnects,
        )
        await asyncio.to_thread(sys.stdin.readline)


async def consume(options: argparse.Namespace) -> None:
    size, wanted = options.size, options.records + 1
    async with malamute.connect(options.endpoint) as client:
        subscription = client.subscribe(options.stream, start="earliest", strict=True)
        await subscription.accepted()
        say(ready=True)
        crc = received = 0
        cpu = 0.0
        if options.form == "bulk":
            async for batch in subscription.batches():
                if received == 0:
                    cpu = time.process_time()
                blob = np.frombuffer(batch.content.bodies().blob, np.uint8)
                crc = google_crc32c.extend(crc, blob if received else blob[size:])
                received += len(batch)
                if received >= wanted:
                    break
        else:
            bodies = []
            async for record in subscription:
                if received == 0:
                    cpu = time.process_time()
                else:
                    bodies.append(record.body)
                received += 1
                if received >= wanted:
                    break
            crc = google_crc32c.value(b"".join(bodies))
        say(
            ended=time.monotonic(),
            cpu_s=time.process_time() - cpu,
            crc=crc,
            received=received - 1,
            reconnects=client.reconnects,
        )


# --- the measurement ------------------------------------------------------------------------


class Role:
    """One of the clients as a child process that talks JSON lines."""

    def __init__(self, role: str, options: argparse.Namespace, **changes: Any) -> None:
        facts = {**vars(options), **changes}
        names = ("endpoint", "stream", "size", "records", "form", "confirm", "batch_bytes")
        arguments = [f"--{name.replace('_', '-')}={facts[name]}" for name in names]
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--role", role, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a client ended with status {self.process.wait()}")
        facts: dict[str, Any] = json.loads(line)
        return facts

    def end(self) -> None:
        self.go()
        self.process.communicate(timeout=60)


def measure(
    options: argparse.Namespace, broker: psutil.Process | None, run: int, size: int
) -> dict[str, Any]:
    records = options.records or RECORDS[options.form].get(size, 60_000)
    stream = f"{STREAM}-{options.form}-{size}-{os.getpid()}-{run}"
    shape = {"size": size, "records": records, "stream": stream}
    consumer = Role("consumer", options, **shape)
    consumer.hear()
    producer = Role("producer", options, **shape)
    producer.hear()
    before = broker.cpu_times() if broker else None
    producer.go()
    produced, consumed = producer.hear(), consumer.hear()
    after = broker.cpu_times() if broker else None
    producer.end()
    consumer.process.wait()
    if (consumed["received"], consumed["crc"]) != (records, produced["crc"]):
        raise SystemExit(f"sent {records} records of CRC {produced['crc']}, got {consumed}")
    if produced["levels"] != {options.confirm: records}:
        raise SystemExit(f"{records} records at {options.confirm}, confirmed {produced['levels']}")
    if produced["reconnects"] or consumed["reconnects"]:
        raise SystemExit("a link was lost amid the run: the figures mean nothing")
    begun = produced["begun"]
    facts = {
        "produced_s": produced["ended"] - begun,
        "consumed_s": consumed["ended"] - begun,
        "producer_cpu_s": produced["cpu_s"],
        "consumer_cpu_s": consumed["cpu_s"],
    }
    if before and after:
        facts["broker_cpu_s"] = after.user + after.system - before.user - before.system
    facts["producer_records_s"] = records / facts["produced_s"]
    facts["consumer_records_s"] = records / facts["consumed_s"]
    return facts


def refuse_memory(folder: Path) -> None:
    """Raise SystemExit when a folder is in a memory file system: syncing there costs nothing."""
    mounts = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    for place in (folder.resolve(), *folder.resolve().parents):
        if str(place) in mounts:
            if mounts[str(place)] in ("tmpfs", "ramfs"):
                raise SystemExit(f"{folder} is in a {mounts[str(place)]}: measure on a disk")
            return


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def show(form: str, size: int, confirm: str, facts: dict[str, Any]) -> None:
    producer, consumer = facts["producer_records_s"], facts["consumer_records_s"]
    broker = facts.get("broker_cpu_s")
    print(
        f"{form:6} {size:5} B {confirm:8} "
        f"producer {producer:11,.0f} rec/s {producer * size / 1e6:7.1f} MB/s "
        f"{facts['producer_cpu_s']:6.2f} s CPU | "
        f"consumer {consumer:11,.0f} rec/s {consumer * size / 1e6:7.1f} MB/s "
        f"{facts['consumer_cpu_s']:6.2f} s CPU"
        + ("" if broker is None else f" | broker {broker:6.2f} s CPU"),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--form", choices=[*RECORDS, "all"], default="all")
    parser.add_argument("--size", type=int, default=0, help="bytes a record; 0: 12, 140 and 1024")
    parser.add_argument("--records", type=int, default=0, help="0: as suits form and size")
    parser.add_argument("--confirm", default="synced", choices=["synced", "stored", "none"])
    parser.add_argument("--batch-bytes", type=int, default=256 << 10)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--endpoint", default="", help="a running broker; otherwise one is started")
    parser.add_argument("--pid", type=int, default=0, help="its process, to count its CPU time")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", choices=["producer", "consumer"], help=argparse.SUPPRESS)
    parser.add_argument("--stream", default=STREAM, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        asyncio.run(produce(options) if options.role == "producer" else consume(options))
        return
    report = []
    with contextlib.ExitStack() as stack:
        if not options.endpoint:
            out = Path(__file__).parent / "out"
            out.mkdir(exist_ok=True)
            refuse_memory(out)
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=out))
            daemon = stack.enter_context(Daemon(Path(folder)))
            options.endpoint, options.pid = daemon.endpoint, daemon.process.pid
        process = psutil.Process(options.pid) if options.pid else None
        forms = list(RECORDS) if options.form == "all" else [options.form]
        for form in forms:
            options.form = form
            for size in [options.size] if options.size else RECORDS[form]:
                runs = [measure(options, process, run, size) for run in range(options.runs)]
                facts = median(runs)
                report.append({"form": form, "size": size, "confirm": options.confirm, **facts})
                if not options.json:
                    show(form, size, options.confirm, facts)
    if options.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
