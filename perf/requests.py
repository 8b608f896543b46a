"""How fast requests go through a service queue to one worker and the replies come back.

    python -m perf.requests                   # 64 in flight, then one after the other
    python -m perf.requests --flight 1 --count 5000 --json

Three processes, tcp, the data on disk. A round trip is request(): queued in the log, handed to
the worker, answered with a reply that completes it, put into the requester's mailbox, read
and acknowledged. Each reply is compared with its request, and at the end the queue must be empty.
The times of lone round trips are those that the caller sees.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

import malamute_py as malamute
from perf._daemon import broker
from perf._roles import Role, play, say, word

COUNTS = {64: 200_000, 1: 3_000}


async def work(options: dict[str, Any]) -> None:
    async with malamute.connect(options["endpoint"]) as client:

        async def echo(request: Any) -> bytes:
            return b"re:" + bytes(request.body)

        async with client.worker(options["service"], concurrency=256) as worker:
            await worker.accepted()
            say(ready=True)
            cpu = time.process_time()
            working = asyncio.create_task(worker.run(echo))
            await word()
            cpu_s = time.process_time() - cpu
            working.cancel()
        say(cpu_s=cpu_s)


async def ask(options: dict[str, Any]) -> None:
    count, service = options["count"], options["service"]
    async with malamute.connect(options["endpoint"], identity=options["identity"]) as client:
        say(ready=True)
        await word()
        numbers = iter(range(count))
        times: list[float] = []

        async def run() -> None:
            for number in numbers:
                body = b"%012d" % number
                began = time.perf_counter()
                reply = await client.request(service, body)
                times.append(time.perf_counter() - began)
                if reply.body != b"re:" + body:
                    raise SystemExit(f"request {number} was answered {reply.body!r}")

        begun, cpu = time.monotonic(), time.process_time()
        await asyncio.gather(*(run() for _ in range(options["flight"])))
        ended, cpu_s = time.monotonic(), time.process_time() - cpu
        info = await client.service_info(service)
        times.sort()
        say(
            seconds=ended - begun, cpu_s=cpu_s, left=info.waiting + info.held,
            p50_ms=times[len(times) // 2] * 1e3, p99_ms=times[len(times) * 99 // 100] * 1e3,
        )  # fmt: skip


def measure(endpoint: str, flight: int, count: int, run: int, process: Any) -> dict[str, float]:
    options = {
        "endpoint": endpoint, "flight": flight, "count": count,
        "service": f"echo-{flight}-{run}", "identity": f"asker-{flight}-{run}",
    }  # fmt: skip
    worker = Role("perf.requests", "worker", **options)
    worker.hear()
    asker = Role("perf.requests", "asker", **options)
    asker.hear()
    before = process.cpu_times()
    asker.go()
    asked = asker.hear()
    worker.go()
    worked = worker.hear()
    after = process.cpu_times()
    asker.process.wait()
    worker.process.wait()
    if asked["left"]:
        raise SystemExit(f"{asked['left']} requests are still in the queue")
    broker_cpu_s = after.user + after.system - before.user - before.system
    return {
        "round_trips_per_s": count / asked["seconds"],
        "p50_ms": asked["p50_ms"],
        "p99_ms": asked["p99_ms"],
        "asker_us": asked["cpu_s"] / count * 1e6,
        "worker_us": worked["cpu_s"] / count * 1e6,
        "broker_us": broker_cpu_s / count * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--flight", type=int, default=0, help="in flight; 0: 64, then 1")
    parser.add_argument("--count", type=int, default=0, help="0: as suits")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = []
    with broker() as daemon:
        for flight in [options.flight] if options.flight else COUNTS:
            count = options.count or COUNTS.get(flight, 50_000)
            runs = [
                measure(daemon.endpoint, flight, count, run, daemon.process)
                for run in range(options.runs)
            ]
            facts = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            report.append({"flight": flight, "count": count, **facts})
            if not options.json:
                print(
                    f"requests, {flight:3} in flight: {facts['round_trips_per_s']:9,.0f} round"
                    f" trips/s, p50 {facts['p50_ms']:.3f} ms, p99 {facts['p99_ms']:.3f} ms | CPU a"
                    f" round trip: requester {facts['asker_us']:.1f} us, broker"
                    f" {facts['broker_us']:.1f}, worker {facts['worker_us']:.1f}",
                    flush=True,
                )
    if options.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__" and not play({"worker": work, "asker": ask}):
    main()
