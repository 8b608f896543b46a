"""How many atomic steps of four parts a second, in flight together.

    python -m perf.atomic
    python -m perf.atomic --tasks 256 --count 50000 --json

Two processes, tcp, the data on disk, confirms `synced`. A step publishes to two streams, sends a
mail and queues a request; so many tasks each await one step after the other. At the end each of
the four places must hold every step's part, once, and in the same order.
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


async def step(options: dict[str, Any]) -> None:
    count, run = options["count"], options["run"]
    a, b, box, service = (f"{name}-{run}" for name in ("a", "b", "box", "service"))
    async with malamute.connect(options["endpoint"]) as client:
        await client.create_stream(a)
        await client.create_stream(b)
        say(ready=True)
        await word()
        numbers = iter(range(count))
        levels: dict[str, int] = {}

        async def work() -> None:
            for number in numbers:
                body = b"%012d" % number
                async with client.atomic() as step:
                    step.publish(a, body)
                    step.publish(b, body)
                    step.send(box, body)
                    step.request(service, body)
                confirmed = step.confirmation
                assert confirmed is not None
                levels[confirmed.level] = levels.get(confirmed.level, 0) + 1

        begun, cpu = time.monotonic(), time.process_time()
        await asyncio.gather(*(work() for _ in range(options["tasks"])))
        seconds, cpu_s = time.monotonic() - begun, time.process_time() - cpu
        orders: list[list[bytes]] = []
        for stream in (a, b):
            records = client.subscribe(stream, start="earliest", until="tail")
            orders.append([bytes(record.body) async for record in records])
        mails: list[bytes] = []
        async with client.inbox(box) as inbox:
            async for mail in inbox:
                mails.append(bytes(mail.body))
                if len(mails) == count:
                    await mail.ack()
                    break
        asked: list[bytes] = []
        async with client.worker(service, concurrency=1024) as worker:
            async for request in worker:
                asked.append(bytes(request.body))
                await request.complete()
                if len(asked) == count:
                    break
        same = all(order == orders[0] for order in (*orders, mails, asked))
        say(seconds=seconds, cpu_s=cpu_s, levels=levels, same=same, distinct=len(set(orders[0])))


def measure(endpoint: str, tasks: int, count: int, run: int, process: Any) -> dict[str, float]:
    role = Role("perf.atomic", "stepper", endpoint=endpoint, tasks=tasks, count=count, run=run)
    role.hear()
    role.go()
    facts = role.hear()
    role.process.wait()
    if not facts["same"] or facts["distinct"] != count:
        raise SystemExit(f"{count} steps, but the four places do not hold the same: {facts}")
    if facts["levels"] != {"synced": count}:
        raise SystemExit(f"{count} steps to be synced, confirmed {facts['levels']}")
    return {"steps_per_s": count / facts["seconds"], "client_us": facts["cpu_s"] / count * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--tasks", type=int, default=512, help="steps in flight together")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with broker() as daemon:
        runs = [
            measure(daemon.endpoint, options.tasks, options.count, run, daemon.process)
            for run in range(options.runs)
        ]
    facts = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    if options.json:
        print(json.dumps({"tasks": options.tasks, "count": options.count, **facts}, indent=2))
    else:
        print(
            f"atomic, {options.tasks} in flight: {facts['steps_per_s']:9,.0f} steps/s of four parts"
            f" | CPU a step: client {facts['client_us']:.1f} us"
        )


if __name__ == "__main__" and not play({"stepper": step}):
    main()
