"""How long a record takes from publish() to the consumer's hand, at an even pace.

    python -m perf.latency                       # 1,000 records/s through each kind of client
    python -m perf.latency --rate 20000 --shell aio --uvloop
    python -m perf.latency --rate 1000000 --form bulk --count 3000000

Three processes over tcp, the journal on, confirms at the default level. The time of the call
(CLOCK_MONOTONIC) stands in the body; the consumer takes the time before it looks at anything.
Nothing waits for a confirm before the next record is due, all confirms are awaited at the end.
The first tenth is not counted. `bulk`: what is due each millisecond is one publish_many(), and
all of its records carry the time of that call; else each record is a publish().
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import struct
import time
from collections import deque
from typing import Any

import numpy as np

import malamute_py as malamute
from perf._daemon import broker
from perf._roles import Role, play, say, word

STREAM = "latency"
_STAMP = struct.Struct("<qq")
"""Number of the record, and when it was handed over."""
SHELLS = ("aio", "sync")


def body_of(number: int, size: int) -> bytes:
    return _STAMP.pack(number, time.monotonic_ns()) + b"x" * (size - _STAMP.size)


def bodies_of(first: int, count: int, size: int) -> list[bytes]:
    now = time.monotonic_ns()
    rest = b"x" * (size - _STAMP.size)
    return [_STAMP.pack(number, now) + rest for number in range(first, first + count)]


def summary(times: list[int], bodies: list[bytes]) -> dict[str, Any]:
    """Percentiles of what was received; raises SystemExit when anything is missing."""
    stamps = np.frombuffer(b"".join(body[: _STAMP.size] for body in bodies), np.int64)
    stamps = stamps.reshape(-1, 2)
    if not np.array_equal(stamps[:, 0], np.arange(len(times))):
        raise SystemExit("records are missing, or not in order")
    spans = np.array(times, np.int64) - stamps[:, 1]
    sorted_us = np.sort(spans[len(spans) // 10 :]) / 1000
    marks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
    facts: dict[str, Any] = {
        f"{name}_us": float(sorted_us[int(len(sorted_us) * share)]) for name, share in marks.items()
    }
    facts["longest_us"] = float(sorted_us[-1])
    return facts


# --- asyncio ----------------------------------------------------------------------------------


async def publish_aio(options: dict[str, Any]) -> None:
    rate, count, size = options["rate"], options["count"], options["size"]
    async with malamute.connect(options["endpoint"]) as client:
        await client.publish(STREAM, b"\0" * size)
        say(ready=True)
        await word()
        begun, cpu = time.monotonic(), time.process_time()
        pending: deque[asyncio.Future[Any]] = deque()
        done = 0
        while done < count:
            due = min(count, int((time.monotonic() - begun) * rate) + 1)
            if due > done and options["form"] == "bulk":
                bodies = bodies_of(done, due - done, size)
                pending.append(
                    asyncio.ensure_future(client.publish_many(STREAM, bodies, subject="s"))
                )
                done = due
            while done < due:
                pending.append(client.publish_nowait(STREAM, body_of(done, size), subject="s"))
                done += 1
            while pending and pending[0].done():
                pending.popleft().result()
            await asyncio.sleep(max(0.0, begun + done / rate - time.monotonic()))
        ended = time.monotonic()
        await asyncio.gather(*pending)
        say(cpu_s=time.process_time() - cpu, rate=count / (ended - begun))
        await word()


async def listen_aio(options: dict[str, Any]) -> None:
    count = options["count"]
    # Not a list of pairs: the garbage collector would look at them again and again.
    times: list[int] = []
    bodies: list[bytes] = []
    clock = time.monotonic_ns
    async with malamute.connect(options["endpoint"]) as client:
        subscription = client.subscribe(STREAM, start="latest", strict=True)
        await subscription.accepted()
        say(ready=True)
        if options["form"] == "bulk":
            async for batch in subscription.batches():
                now = clock()
                bodies += batch.bodies()
                times += [now] * len(batch)
                if len(times) > count:
                    break
        else:
            async for record in subscription:
                times.append(clock())
                bodies.append(record.body)
                if len(times) > count:
                    break
        say(**summary(times[1:], bodies[1:]))
        await word()


# --- threads ----------------------------------------------------------------------------------


async def publish_sync(options: dict[str, Any]) -> None:
    rate, count, size = options["rate"], options["count"], options["size"]
    with malamute.connect_sync(options["endpoint"]) as client:
        client.publish(STREAM, b"\0" * size)
        say(ready=True)
        await word()
        begun, cpu = time.monotonic(), time.process_time()
        pending: deque[Any] = deque()
        done = 0
        with client.window(STREAM, keep=False) as window:
            while done < count:
                due = min(count, int((time.monotonic() - begun) * rate) + 1)
                if due > done and options["form"] == "bulk":
                    window.publish_many(bodies_of(done, due - done, size), subject="s")
                    done = due
                while done < due:
                    pending.append(
                        client.publish_nowait(
                            STREAM, body_of(done, size), subject="s", timeout_ms=None
                        )
                    )
                    done += 1
                while pending and pending[0].done:
                    pending.popleft().result()
                time.sleep(max(0.0, begun + done / rate - time.monotonic()))  # noqa: ASYNC251 - alone in its loop
            ended = time.monotonic()
        for confirm in pending:
            confirm.result()
        say(cpu_s=time.process_time() - cpu, rate=count / (ended - begun))
        await word()


async def listen_sync(options: dict[str, Any]) -> None:
    count = options["count"]
    # Not a list of pairs: the garbage collector would look at them again and again.
    times: list[int] = []
    bodies: list[bytes] = []
    clock = time.monotonic_ns
    with malamute.connect_sync(options["endpoint"]) as client:
        subscription = client.subscribe(STREAM, start="latest", strict=True)
        subscription.accepted()
        say(ready=True)
        if options["form"] == "bulk":
            for batch in subscription.batches():
                now = clock()
                bodies += batch.bodies()
                times += [now] * len(batch)
                if len(times) > count:
                    break
        else:
            for record in subscription:
                times.append(clock())
                bodies.append(record.body)
                if len(times) > count:
                    break
        say(**summary(times[1:], bodies[1:]))
        await word()


# --- the measurement ----------------------------------------------------------------------------


def measure(shell: str, options: argparse.Namespace) -> dict[str, Any]:
    with broker() as daemon:
        facts = {
            "endpoint": daemon.endpoint,
            "rate": options.rate,
            "count": options.count,
            "size": options.size,
            "form": options.form,
        }
        listener = Role("perf.latency", f"listen_{shell}", **facts)
        listener.hear()
        publisher = Role("perf.latency", f"publish_{shell}", **facts)
        publisher.hear()
        before = daemon.cpu_s()
        publisher.go()
        published = publisher.hear()
        found = listener.hear()
        found["broker_cpu_us"] = (daemon.cpu_s() - before) / options.count * 1e6
        found["publisher_cpu_us"] = published["cpu_s"] / options.count * 1e6
        found["rate"] = published["rate"]
        publisher.end()
        listener.end()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=int, default=1000, help="records a second")
    parser.add_argument("--count", type=int, default=0, help="0: five seconds of them")
    parser.add_argument("--size", type=int, default=140)
    parser.add_argument("--form", choices=["single", "bulk"], default="single")
    parser.add_argument("--shell", choices=[*SHELLS, "all"], default="all")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--uvloop", action="store_true", help="asyncio with uvloop's event loop")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.count = options.count or 5 * options.rate
    if options.uvloop:
        os.environ["PERF_UVLOOP"] = "1"
    report = []
    for shell in SHELLS if options.shell == "all" else (options.shell,):
        runs = [measure(shell, options) for _ in range(options.runs)]
        # Of each figure the median of the runs.
        found = {name: float(np.median([run[name] for run in runs])) for name in runs[0]}
        report.append({"shell": shell, "uvloop": options.uvloop, **found})
        if not options.json:
            print(
                f"{shell:4} {options.form} {found['rate']:9,.0f}/s "
                + " ".join(
                    f"{name} {found[f'{name}_us']:7,.0f}"
                    for name in ("p50", "p90", "p99", "p999", "longest")
                )
                + f" us | CPU a record: publisher {found['publisher_cpu_us']:.1f}, "
                f"broker {found['broker_cpu_us']:.1f} us",
                flush=True,
            )
    if options.json:
        print(json.dumps(report))


PARTS = {
    "publish_aio": publish_aio,
    "listen_aio": listen_aio,
    "publish_sync": publish_sync,
    "listen_sync": listen_sync,
}

if __name__ == "__main__":
    if os.environ.get("PERF_UVLOOP"):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    if not play(PARTS):
        main()
