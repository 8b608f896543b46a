"""How fast mail goes from a sender through the broker to a recipient who acknowledges it.

    python -m perf.mail                       # all forms, medians of three runs
    python -m perf.mail --form single --size 140 --json

Three processes, tcp, the data on disk, confirms `synced`. Everything goes through the public
client. A run ends when the sender has every confirm, the recipient has read and acknowledged
every message (the broker confirmed that too), and the mailbox is empty; count and CRC of what
was read are compared with what was sent. Forms: `single` is send() by 1,000 tasks at a time,
`many` is send_many() of 1,000, `alone` one send() after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from typing import Any

import google_crc32c

import malamute_py as malamute
from perf._daemon import broker
from perf._roles import Role, play, say, word

COUNTS = {"single": 200_000, "many": 500_000, "alone": 2_000}
TASKS = 1_000


def body(size: int, number: int) -> bytes:
    return b"%0*d" % (size, number)


async def send(options: dict[str, Any]) -> None:
    size, count, mailbox = options["size"], options["count"], options["mailbox"]
    async with malamute.connect(options["endpoint"]) as client:
        say(ready=True)
        await word()
        begun, cpu = time.monotonic(), time.process_time()
        levels: dict[str, int] = {}
        if options["form"] == "many":
            for first in range(0, count, TASKS):
                some = [body(size, number) for number in range(first, min(first + TASKS, count))]
                for confirmed in await client.send_many(mailbox, some):
                    levels[confirmed.level] = levels.get(confirmed.level, 0) + confirmed.count
        else:
            numbers = iter(range(count))

            async def work() -> None:
                for number in numbers:
                    confirmed = await client.send(mailbox, body(size, number))
                    levels[confirmed.level] = levels.get(confirmed.level, 0) + 1

            tasks = TASKS if options["form"] == "single" else 1
            await asyncio.gather(*(work() for _ in range(tasks)))
        say(begun=begun, ended=time.monotonic(), cpu_s=time.process_time() - cpu, levels=levels)


async def read(options: dict[str, Any]) -> None:
    count = options["count"]
    async with malamute.connect(options["endpoint"]) as client:
        async with client.inbox(options["mailbox"]) as inbox:
            say(ready=True)
            seen: list[int] = []
            cpu = 0.0
            async for mail in inbox:
                if not seen:
                    cpu = time.process_time()
                seen.append(int(mail.body))
                if len(seen) == count:
                    await mail.ack()
                    break
        left = (await client.mailbox_info(options["mailbox"])).messages
        ordered = seen == sorted(seen)
        crc = google_crc32c.value(b"".join(body(options["size"], number) for number in seen))
        say(ended=time.monotonic(), cpu_s=time.process_time() - cpu, crc=crc,
            distinct=len(set(seen)), left=left, ordered=ordered)  # fmt: skip


def measure(endpoint: str, form: str, size: int, count: int, run: int, process: Any) -> Any:
    options = {
        "endpoint": endpoint, "form": form, "size": size, "count": count,
        "mailbox": f"perf-{form}-{size}-{os.getpid()}-{run}",
    }  # fmt: skip
    reader = Role("perf.mail", "reader", **options)
    reader.hear()
    sender = Role("perf.mail", "sender", **options)
    sender.hear()
    before = process.cpu_times()
    sender.go()
    sent, got = sender.hear(), reader.hear()
    after = process.cpu_times()
    sender.process.wait()
    reader.process.wait()
    crc = google_crc32c.value(b"".join(body(size, number) for number in range(count)))
    if got["distinct"] != count or got["left"] or (got["ordered"] and got["crc"] != crc):
        raise SystemExit(f"sent {count}, read {got}")
    if sent["levels"] != {"synced": count}:
        raise SystemExit(f"{count} mails to be synced, confirmed {sent['levels']}")
    begun = sent["begun"]
    broker_cpu_s = after.user + after.system - before.user - before.system
    return {
        "confirmed_per_s": count / (sent["ended"] - begun),
        "acknowledged_per_s": count / (got["ended"] - begun),
        "sender_us": sent["cpu_s"] / count * 1e6,
        "reader_us": got["cpu_s"] / count * 1e6,
        "broker_us": broker_cpu_s / count * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--form", choices=[*COUNTS, "all"], default="all")
    parser.add_argument("--size", type=int, default=140)
    parser.add_argument("--count", type=int, default=0, help="0: as suits the form")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = []
    with broker() as daemon:
        for form in COUNTS if options.form == "all" else [options.form]:
            count = options.count or COUNTS[form]
            runs = [
                measure(daemon.endpoint, form, options.size, count, run, daemon.process)
                for run in range(options.runs)
            ]
            facts = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            report.append({"form": form, "size": options.size, "count": count, **facts})
            if not options.json:
                print(
                    f"mail {form:6} {options.size} B: {facts['confirmed_per_s']:9,.0f}/s confirmed"
                    f" synced, {facts['acknowledged_per_s']:9,.0f}/s read and acknowledged | CPU"
                    f" a mail: sender {facts['sender_us']:.1f} us, broker {facts['broker_us']:.1f},"
                    f" reader {facts['reader_us']:.1f}",
                    flush=True,
                )
    if options.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__" and not play({"sender": send, "reader": read}):
    main()
