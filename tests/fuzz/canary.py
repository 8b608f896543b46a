"""Honest clients beside an attack, in a process of their own.

Owns a publisher with its subscriber and a requester with its worker: what each sent and got, and
how long confirms and replies took, by phase. `python -m tests.fuzz.canary ENDPOINT`: a line on
standard input begins the phase of its name, the end of the input ends it all; then one line of
JSON is printed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import defaultdict
from typing import Any

import malamute_py as malamute

_PAUSE_S = 0.005
_END_S = 60.0


class Canary:
    """The four of them."""

    def __init__(self) -> None:
        """Nothing was sent yet."""
        self.phase = "quiet"
        self.confirms: dict[str, list[float]] = defaultdict(list)
        self.replies: dict[str, list[float]] = defaultdict(list)
        self.published = 0
        self.received: list[int] = []
        self.asked = 0
        self.answered = 0
        self.wrong: list[str] = []
        self.stopped = asyncio.Event()

    async def publish(self, client: Any) -> None:
        while not self.stopped.is_set():
            began = time.monotonic()
            await client.publish("canary", b"%d" % self.published)
            self.confirms[self.phase].append(time.monotonic() - began)
            self.published += 1
            await asyncio.sleep(_PAUSE_S)

    async def read(self, client: Any) -> None:
        async for record in client.subscribe("canary", start="earliest"):
            self.received.append(int(record.body))

    async def ask(self, client: Any) -> None:
        while not self.stopped.is_set():
            began = time.monotonic()
            reply = await client.request("canary", b"%d" % self.asked)
            self.replies[self.phase].append(time.monotonic() - began)
            if bytes(reply.body) != b"%d done" % self.asked:
                self.wrong.append(f"request {self.asked} was answered {bytes(reply.body)!r}")
            self.asked += 1
            self.answered += 1
            await asyncio.sleep(_PAUSE_S)

    async def work(self, client: Any) -> None:
        async with client.worker("canary") as worker:
            async for request in worker:
                await request.reply(bytes(request.body) + b" done")

    async def run(self, endpoint: str) -> dict[str, Any]:
        """Until the standard input ends; what was seen."""
        clients = [await malamute.connect(endpoint, timeout_ms=None) for _ in range(4)]
        begun = [self.read(clients[1]), self.work(clients[3])]
        reading = [asyncio.create_task(each) for each in begun]
        await asyncio.sleep(0.2)
        writing = [
            asyncio.create_task(each) for each in (self.publish(clients[0]), self.ask(clients[2]))
        ]
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            self.phase = line.strip()
        self.stopped.set()
        try:
            async with asyncio.timeout(_END_S):
                await asyncio.gather(*writing)
                # Not an Event: a count is waited for, which the reader moves.
                while len(self.received) < self.published:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            self.wrong.append("a confirm, a reply or a record did not come within a minute")
        for task in (*reading, *writing):
            task.cancel()
        await asyncio.gather(*reading, *writing, return_exceptions=True)
        if self.received != list(range(self.published)):
            self.wrong.append(
                f"of {self.published} records {len(self.received)} came, or in another order"
            )
        return {
            "published": self.published, "received": len(self.received), "asked": self.asked,
            "answered": self.answered, "wrong": self.wrong,
            "confirms_ms": {name: spread(times) for name, times in self.confirms.items()},
            "replies_ms": {name: spread(times) for name, times in self.replies.items()},
        }  # fmt: skip


def spread(times: list[float]) -> dict[str, float]:
    """Count, median, 99th percentile and greatest, in milliseconds."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return {
        "count": len(ordered),
        "p50": round(ordered[last // 2] * 1000, 2),
        "p99": round(ordered[last * 99 // 100] * 1000, 2),
        "max": round(ordered[last] * 1000, 2),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(Canary().run(sys.argv[1]))))
