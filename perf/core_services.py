"""What the broker core costs for a request and its reply: no sockets, no disk, one process.

A fake shell answers every bundle at once. One requester and one worker; prints the processor
time of the core for each round trip, from REQUEST over WORK and REPLY to the ACK of the mail.
"""

from __future__ import annotations

import argparse
import json
import struct
from statistics import median
from time import process_time
from typing import Any

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_protocol.stamp import Stamp
from malamute_py.broker import Appended, Broker, BrokerSettings, RecoveredState

NOW_MS = 1_700_000_000_000
MANY = 1 << 50
REQUESTER, WORKER = 1, 2
STAMPS = {count: Stamp(1, 0, 0, 0, 1, 0, NOW_MS, 1, 0, 96, count, 0, 0).pack() for count in (1, 64)}


class Bench:
    """A core whose journal is nothing but an end that moves."""

    def __init__(self, identity: str, memory: bool) -> None:
        numbers = iter(range(1, 1 << 30))
        self.broker = Broker(
            BrokerSettings(share_min_bytes=1 << 60, share_max_bytes=1 << 60, heartbeat_ms=60_000),
            uuid=bytes(16), epoch=1, state=RecoveredState(),
            random=lambda count: next(numbers).to_bytes(count, "big"),
        )  # fmt: skip
        self.end = 0
        self.keys = iter(range(1, 1 << 60))
        self.inbox: list[Any] = []
        self.work: list[Any] = []
        for link, name in ((REQUESTER, identity), (WORKER, "worker")):
            self.say(link, wire.Hello((1, 1), struct.pack("<QQ", 1, link), name))
        self.say(WORKER, wire.EditService(1, "s", {"memory": memory}))
        self.say(REQUESTER, wire.OpenInbox(1, "", MANY, MANY))
        self.say(WORKER, wire.Offer(1, "s", ["all"], MANY, MANY))
        self.next = (1 << 40) if memory else 0

    def say(self, link: int, *commands: wire.Command, frames: tuple[Any, ...] = ()) -> None:
        self.broker.receive(link, "", commands, frames, NOW_MS)
        broker = self.broker
        while ready := broker.take_ready():
            for bundle in ready.appends:
                self.end += sum(96 + len(batch.content) for batch in bundle.batches)
                stamps = tuple(STAMPS.get(batch.count, STAMPS[1]) for batch in bundle.batches)
                broker.appended(Appended(bundle.token, stamps, self.end))
            for send in ready.sends:
                for command in send.commands:
                    kind = type(command)
                    if kind is wire.Work:
                        self.work.append(command)
                    elif kind is wire.Mail:
                        self.inbox.append(command)
            if ready.appends:
                broker.synced("main", self.end, NOW_MS)

    def round_trips(self, request: bytes, reply: bytes, count: int) -> None:
        """A batch of requests, its replies, and the ACK of these."""
        key = next(self.keys).to_bytes(8, "big")
        first = self.next
        self.say(REQUESTER, wire.Request("s", 1, key=key), frames=(request,))
        assert self.work
        requests = list(range(first, first + count))
        self.say(WORKER, wire.Reply(1, requests, 1, True), frames=(reply,))
        assert self.inbox
        number = first + count
        self.say(REQUESTER, wire.AckMail(1, [(number, number + count)]))
        self.work.clear()
        self.inbox.clear()
        self.next = number + count


def scenario(seconds: float, count: int, identity: str, memory: bool) -> dict[str, Any]:
    bench = Bench(identity, memory)
    request = encode([b"x" * 100] * count, subject="look.up")
    reply = encode([b"y" * 100] * count, subject="reply")
    for _ in range(200):
        bench.round_trips(request, reply, count)
    begun, times = process_time(), []
    while process_time() - begun < seconds:
        before = process_time()
        for _ in range(20):
            bench.round_trips(request, reply, count)
        times.append((process_time() - before) / 20)
    batch = median(times)
    return {
        "batch": count,
        "service": "memory" if memory else "log",
        "mailbox": "log" if identity else "memory",
        "us_per_batch": round(batch * 1e6, 1),
        "us_per_round_trip": round(batch / count * 1e6, 2),
        "round_trips_per_s": round(count / batch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="a scenario")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [
        scenario(options.seconds, count, identity, memory)
        for identity, memory in (("requester", False), ("", True))
        for count in (1, 64)
    ]
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    print("  ".join(f"{name:>17}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:>17}" for value in row.values()))


if __name__ == "__main__":
    main()
