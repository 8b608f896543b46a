"""What idle clients cost: 500 of them with 50 subscriptions each, beside one publisher.

    python -m perf.idle [--clients 500] [--subscriptions 50] [--json]

Publishes the same records three times: beside nobody, beside the idle clients whose
subscriptions match nothing of it, and counts the broker's processor time a record and its
memory before and after. The idle clients are real ones, in processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from typing import Any

from malamute_py.client.aio import Client, connect
from malamute_py.demo.daemon import Daemon
from perf._daemon import broker

RECORDS = 2_000_000
BODY = b"x" * 140
STREAM = "busy"
PROCESSES = 2


async def hold(endpoint: str, clients: int, subscriptions: int, first: int) -> None:
    """Be so many idle clients until standard input ends."""
    open_clients: list[Client] = []
    for client_number in range(first, first + clients):
        client = await connect(endpoint, timeout_ms=60_000)
        open_clients.append(client)
        for number in range(subscriptions):
            subscription = client.subscribe(STREAM, f"idle.{client_number}.{number}")
            await subscription.accepted()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for client in open_clients:
        client.abort()


async def publish(watched: Daemon) -> dict[str, float]:
    """Publish RECORDS and say what that cost the broker."""
    async with connect(watched.endpoint) as client:
        await client.publish_many(STREAM, [BODY] * 100_000, subject="busy.subject")
        cpu, began = watched.cpu_s(), time.perf_counter()
        async with client.window(STREAM, keep=False) as window:
            for _ in range(RECORDS // 100_000):
                await window.publish_many([BODY] * 100_000, subject="busy.subject")
        seconds = time.perf_counter() - began
        return {
            "records_per_s": RECORDS / seconds,
            "broker_cpu_us_per_record": (watched.cpu_s() - cpu) / RECORDS * 1e6,
        }


async def idle_cpu(watched: Daemon, seconds: float = 10.0) -> float:
    """Processor share that the broker takes while nobody publishes."""
    cpu, began = watched.cpu_s(), time.perf_counter()
    await asyncio.sleep(seconds)
    return (watched.cpu_s() - cpu) / (time.perf_counter() - began)


def _holder(endpoint: str, clients: int, subscriptions: int, first: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "perf.idle", "--hold", endpoint, "--clients", str(clients),
         "--subscriptions", str(subscriptions), "--first", str(first)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


async def measure(clients: int, subscriptions: int) -> dict[str, Any]:
    with broker() as watched:
        await publish(watched)  # fills the hot window, so that the memory is steady
        alone = await publish(watched)
        before = watched.own_bytes()
        per_process = clients // PROCESSES
        holders = [
            _holder(watched.endpoint, per_process, subscriptions, number * per_process)
            for number in range(PROCESSES)
        ]
        try:
            began = time.perf_counter()
            for holder in holders:
                assert holder.stdout is not None
                if await asyncio.to_thread(holder.stdout.readline) != "ready\n":
                    raise SystemExit("the idle clients did not get through")
            connect_s = time.perf_counter() - began
            held = watched.own_bytes()
            share = await idle_cpu(watched)
            beside = await publish(watched)
            after = watched.own_bytes()
        finally:
            for holder in holders:
                holder.communicate("\n", timeout=60)
        return {
            "clients": per_process * PROCESSES,
            "subscriptions": per_process * PROCESSES * subscriptions,
            "connect_s": connect_s,
            "memory_bytes_per_client": (held - before) / (per_process * PROCESSES),
            "memory_before_bytes": before,
            "memory_with_clients_bytes": held,
            "memory_after_publishing_bytes": after,
            "idle_cpu_share": share,
            "alone": alone,
            "beside": beside,
            "cpu_ratio": beside["broker_cpu_us_per_record"] / alone["broker_cpu_us_per_record"],
            "rate_ratio": beside["records_per_s"] / alone["records_per_s"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--subscriptions", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--hold", metavar="ENDPOINT")
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    if options.hold:
        asyncio.run(hold(options.hold, options.clients, options.subscriptions, options.first))
        return
    facts = asyncio.run(measure(options.clients, options.subscriptions))
    if options.json:
        print(json.dumps(facts))
        return
    mib = 1 << 20
    print(f"{facts['clients']:,} idle clients, {facts['subscriptions']:,} subscriptions,"
          f" connected in {facts['connect_s']:.1f} s")  # fmt: skip
    print(f"memory: {facts['memory_before_bytes'] / mib:.1f} MiB before,"
          f" {facts['memory_with_clients_bytes'] / mib:.1f} MiB with them"
          f" ({facts['memory_bytes_per_client'] / 1024:.0f} KiB a client),"
          f" {facts['memory_after_publishing_bytes'] / mib:.1f} MiB after publishing")  # fmt: skip
    print(f"broker at rest with them: {facts['idle_cpu_share'] * 100:.2f}% of one core")
    for name in ("alone", "beside"):
        part = facts[name]
        print(f"publishing {name:7}: {part['records_per_s']:12,.0f} records/s,"
              f" broker {part['broker_cpu_us_per_record']:.3f} us of CPU a record")  # fmt: skip
    print(f"ratios beside/alone: CPU a record {facts['cpu_ratio']:.2f},"
          f" rate {facts['rate_ratio']:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
