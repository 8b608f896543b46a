"""What waiting mail costs: 100,000 mailboxes with one message each, and one with 1,000,000.

    python -m perf.backlog
    python -m perf.backlog --mailboxes 10000 --messages 100000 --size 1024

Prints the broker's own memory before and after, the time of a start after an orderly stop and
after SIGKILL, and the time from connecting to the first delivery; counts are checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import malamute_py as malamute
from malamute_py.demo.daemon import Daemon
from perf._daemon import broker

MIB = 1 << 20
TASKS = 500
SENDERS = 100


async def many_mailboxes(endpoint: str, mailboxes: int, size: int) -> None:
    numbers = iter(range(mailboxes))
    async with malamute.connect(endpoint) as client:

        async def work() -> None:
            for number in numbers:
                await client.send(f"box-{number:06}", b"%0*d" % (size, number))

        await asyncio.gather(*(work() for _ in range(TASKS)))


async def one_mailbox(endpoint: str, messages: int, size: int) -> None:
    # A client's sends that wait together become one batch, which costs about as much as one
    # message: a sender each, so that there is a put for each message, the dearest form.
    numbers = iter(range(messages))

    async def sender() -> None:
        async with malamute.connect(endpoint) as client:
            for number in numbers:
                await client.send("backlog", b"%0*d" % (size, number), confirm="stored")

    await asyncio.gather(*(sender() for _ in range(SENDERS)))


async def first_delivery(endpoint: str, mailbox: str) -> float:
    began = time.perf_counter()
    async with malamute.connect(endpoint) as client, client.inbox(mailbox, ack="manual") as inbox:
        async for _ in inbox:
            return time.perf_counter() - began
    raise SystemExit(f"mailbox {mailbox} is empty")


async def messages_in(endpoint: str, mailbox: str) -> int:
    async with malamute.connect(endpoint) as client:
        return int((await client.mailbox_info(mailbox)).messages)


def restarts(daemon: Daemon, mailbox: str) -> dict[str, float]:
    daemon.stop()
    began = time.perf_counter()
    daemon.start(wait_s=300)
    orderly_s = time.perf_counter() - began
    daemon.kill()
    began = time.perf_counter()
    daemon.start(wait_s=300)
    killed_s = time.perf_counter() - began
    first_s = asyncio.run(first_delivery(daemon.endpoint, mailbox))
    return {
        "start_after_stop_s": orderly_s, "start_after_kill_s": killed_s,
        "first_delivery_ms": first_s * 1e3, "memory_after_start_mib": daemon.own_bytes() / MIB,
    }  # fmt: skip


def measure(form: str, count: int, size: int) -> dict[str, Any]:
    with broker() as daemon:
        before = daemon.own_bytes()
        began = time.perf_counter()
        fill = many_mailboxes if form == "mailboxes" else one_mailbox
        asyncio.run(fill(daemon.endpoint, count, size))
        filled_s = time.perf_counter() - began
        after = daemon.own_bytes()
        mailbox = f"box-{count - 1:06}" if form == "mailboxes" else "backlog"
        facts = restarts(daemon, mailbox)
        wanted = 1 if form == "mailboxes" else count
        found = asyncio.run(messages_in(daemon.endpoint, mailbox))
        if found != wanted:
            raise SystemExit(f"{wanted} messages in {mailbox}, the broker says {found}")
        return {
            "form": form, "count": count, "size": size, "filled_per_s": count / filled_s,
            "memory_mib": (after - before) / MIB, "bytes_a_message": (after - before) / count,
            "bodies_mib": count * size / MIB, **facts,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--mailboxes", type=int, default=100_000)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=1_024)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = []
    for form, count in (("mailboxes", options.mailboxes), ("messages", options.messages)):
        if not count:
            continue
        facts = measure(form, count, options.size)
        report.append(facts)
        if not options.json:
            print(
                f"backlog of {count:9,} {form:9} x {options.size} B ({facts['bodies_mib']:,.0f} MiB"
                f" of bodies): filled at {facts['filled_per_s']:,.0f}/s, memory"
                f" +{facts['memory_mib']:,.0f} MiB ({facts['bytes_a_message']:,.0f} B a message);"
                f" start {facts['start_after_stop_s']:.2f} s, after SIGKILL"
                f" {facts['start_after_kill_s']:.2f} s; first delivery"
                f" {facts['first_delivery_ms']:.1f} ms",
                flush=True,
            )
    if options.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
