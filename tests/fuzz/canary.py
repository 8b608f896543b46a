"""Honest clients beside an attack, in a process of their own.

Owns a publisher with its subscriber, a requester with its worker, and a link that only sends PING:
what each sent and got, and how long confirms, replies and PONGs took, by phase; also how much later
than it asked the canary was woken, which the machine causes and not the broker. `python -m
tests.fuzz.canary PATIENCE_S ENDPOINT [PASSWORD [NAME]]`: a line on standard input begins the phase
of its name, the end of the input ends it all. It prints `ready` when all are connected, and one
line of JSON at the end. The clients are NAME-0 to NAME-4 (canary-0 unless a name is given), with a
password where there is one; with an empty NAME they have no identity.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import defaultdict
from typing import Any

import msgspec
import zmq
import zmq.asyncio

import malamute_py as malamute
from malamute_protocol.commands import AnyCommand, Hello, Ping, Pong
from malamute_protocol.framing import encode_message

_PAUSE_S = 0.005
PATIENCE_S = 60.0


class Canary:
    """The honest clients and their figures."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        """patience_s: how long an answer may take before it counts as lost."""
        self._patience_s = patience_s
        self.phase = "quiet"
        self.confirms: dict[str, list[float]] = defaultdict(list)
        self.replies: dict[str, list[float]] = defaultdict(list)
        self.pongs: dict[str, list[float]] = defaultdict(list)
        self.lateness: dict[str, list[float]] = defaultdict(list)
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
            await self.pause()

    async def pause(self) -> None:
        began = time.monotonic()
        await asyncio.sleep(_PAUSE_S)
        self.lateness[self.phase].append(time.monotonic() - began - _PAUSE_S)

    async def read(self, client: Any) -> None:
        async for record in client.subscribe("canary", start="earliest", create=True):
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
            await self.pause()

    async def work(self, client: Any) -> None:
        async with client.worker("canary") as worker:
            async for request in worker:
                await request.reply(bytes(request.body) + b" done")

    async def ping(self, endpoint: str, identity: str, password: str) -> None:
        context = zmq.asyncio.Context()
        with context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            if password:
                socket.plain_username, socket.plain_password = identity.encode(), password.encode()
            socket.connect(endpoint)
            hello = Hello((1, 1), os.urandom(16), identity)
            await socket.send_multipart(encode_message([hello]))
            token = 0
            while not self.stopped.is_set():
                token += 1
                began = time.monotonic()
                await socket.send_multipart(encode_message([Ping(token)]))
                if not await self.pong(socket, token):
                    self.wrong.append(f"PING {token} was not answered")
                    break
                self.pongs[self.phase].append(time.monotonic() - began)
                await self.pause()
        context.term()

    async def pong(self, socket: Any, token: int) -> bool:
        """Whether PONG of a token came; the broker's own PINGs are answered meanwhile."""
        while await socket.poll(self._patience_s * 1000):
            head, *_ = await socket.recv_multipart()
            for command in msgspec.msgpack.decode(head, type=list[AnyCommand]):
                if isinstance(command, Ping):
                    await socket.send_multipart(encode_message([Pong(command.token)]))
                elif isinstance(command, Pong) and command.token == token:
                    return True
        return False

    async def run(self, endpoint: str, password: str = "", name: str = "canary") -> dict[str, Any]:
        """Run until the standard input ends; returns the figures."""
        names = [f"{name}-{number}" if name else "" for number in range(5)]
        clients = [
            await malamute.connect(
                endpoint, timeout_ms=None, identity=one,
                credential=malamute.Plain(one, password) if password else None,
            )
            for one in names[:4]
        ]  # fmt: skip
        begun = [self.read(clients[1]), self.work(clients[3])]
        reading = [asyncio.create_task(each) for each in begun]
        await asyncio.sleep(0.2)
        doing = (
            self.publish(clients[0]), self.ask(clients[2]),
            self.ping(endpoint, names[4], password),
        )  # fmt: skip
        writing = [asyncio.create_task(each) for each in doing]
        print("ready", flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            self.phase = line.strip()
        self.stopped.set()
        try:
            async with asyncio.timeout(self._patience_s):
                await asyncio.gather(*writing)
                # An Event would not do: the reader moves the count that is waited for.
                while len(self.received) < self.published:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            late = f"within {self._patience_s:g} s"
            self.wrong.append(f"a confirm, a reply or a record did not come {late}")
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
            "pongs_ms": {name: spread(times) for name, times in self.pongs.items()},
            "lateness_ms": {name: spread(times) for name, times in self.lateness.items()},
        }  # fmt: skip


def spread(times: list[float]) -> dict[str, float]:
    """Return count, median, 99th percentile and greatest value, in milliseconds."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return {
        "count": len(ordered),
        "p50": round(ordered[last // 2] * 1000, 2),
        "p99": round(ordered[last * 99 // 100] * 1000, 2),
        "max": round(ordered[last] * 1000, 2),
    }


if __name__ == "__main__":
    # The patience in seconds; the endpoint; then, where they are asked for, password and name.
    print(json.dumps(asyncio.run(Canary(float(sys.argv[1])).run(*sys.argv[2:]))))
