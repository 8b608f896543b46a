"""The broker's core under a shell that answers every bundle at once, with stamps made before.

The curves have another such shell (perf/curves/bare.py), which packs the stamps that it answers:
the figures of both are compared with recorded ones, and stay what they were.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode, encode_fixed
from malamute_protocol.stamp import Stamp
from malamute_py.broker import Appended, Broker, BrokerSettings, RecoveredState

NOW_MS = 1_700_000_000_000
MANY = 1 << 50
STAMPS = {
    count: Stamp(1, 0, 0, 0, 1, 0, NOW_MS, 1, 0, 96, count, 0, 0).pack() for count in (1, 64, 512)
}
"""Stamps of any kind, as no reader decodes them; their counts are those of mail."""


class Core:
    """A core whose journal is nothing but an end that moves."""

    def __init__(self) -> None:
        numbers = iter(range(1, 1 << 30))
        self.broker = Broker(
            # Its peers answer no PING: their links must not expire.
            BrokerSettings(share_min_bytes=1 << 60, share_max_bytes=1 << 60, heartbeat_ms=60_000),
            uuid=bytes(16), epoch=1, state=RecoveredState(),
            random=lambda count: next(numbers).to_bytes(count, "big"),
        )  # fmt: skip
        self.end = 0
        self.heard: list[wire.Command] = []
        self.listens = False

    def hello(self, link: int, name: str = "") -> None:
        self.say(link, wire.Hello((1, 1), struct.pack("<QQ", 1, link), name))

    def say(self, link: int, *commands: wire.Command, frames: Any = ()) -> None:
        self.broker.receive(link, "", commands, frames, NOW_MS)
        self.step()

    def step(self) -> None:
        broker = self.broker
        while ready := broker.take_ready():
            for bundle in ready.appends:
                self.end += sum(96 + len(batch.content) for batch in bundle.batches)
                stamps = tuple(STAMPS.get(batch.count, STAMPS[1]) for batch in bundle.batches)
                broker.appended(Appended(bundle.token, stamps, self.end))
            if self.listens:
                for send in ready.sends:
                    self.heard += send.commands
            if ready.appends:
                broker.synced("main", self.end, NOW_MS)

    def take(self, kind: type[wire.Command]) -> list[Any]:
        """Return the messages of this kind that were heard, and forget all that were heard."""
        found = [command for command in self.heard if type(command) is kind]
        self.heard.clear()
        return found


def content_of(records: int, width: int, subjects: int = 1) -> bytes:
    if subjects == 1:
        return encode_fixed(bytes(records * width), width, subject="orders.eu.new")
    table = [f"orders.{n}.new" for n in range(subjects)]
    codes = [n % subjects for n in range(records)]
    return encode([bytes(width)] * records, subject_table=table, subject_codes=codes)


def publishing(
    *, subscribers: int, records: int, width: int, idle: int = 0, bundled: int = 1,
    subjects: int = 1, pattern: tuple[str, str] = ("topic", "orders.#"),
) -> Callable[[], None]:  # fmt: skip
    """Make a publish of `bundled` batches that goes to so many subscribers, beside idle ones."""
    core = Core()
    core.hello(1)
    for n in range(idle):
        link = 1_000_000 + n // 50
        if n % 50 == 0:
            core.hello(link)
        idly = wire.Subscribe(n % 50, "s", ["topic", f"idle.{n}"], [1], 1 << 40, MANY)
        core.broker.receive(link, "", [idly], [], NOW_MS)
    core.step()
    for link in range(2, 2 + subscribers):
        core.hello(link)
        core.say(link, wire.Subscribe(1, "s", list(pattern), [1], 1 << 60, 1 << 60))
    contents = [content_of(records, width, subjects)] * bundled
    trackers = iter(range(1, 1 << 60))

    def publish() -> None:
        commands = [wire.Publish("s", next(trackers)) for _ in contents]
        core.say(1, *commands, frames=contents)

    publish()
    assert core.broker.counters["batches_in"] == bundled
    assert core.broker.counters["deliveries"] >= subscribers * bundled
    return publish


def round_trips(count: int, *, memory: bool) -> Callable[[], None]:
    """Make a round of requests, their replies, and the ACK of these, between two links.

    memory: service and mailbox are in memory, else both in the log.
    """
    core, requester, worker = Core(), 1, 2
    core.listens = True
    core.hello(requester, "" if memory else "requester")
    core.hello(worker, "worker")
    core.say(worker, wire.EditService(1, "s", {"memory": memory}))
    core.say(requester, wire.OpenInbox(1, "", MANY, MANY))
    core.say(worker, wire.Offer(1, "s", ["all"], MANY, MANY))
    request = encode([b"x" * 100] * count, subject="look.up")
    reply = encode([b"y" * 100] * count, subject="reply")
    keys = iter(range(1, 1 << 60))
    following = (1 << 40) if memory else 0

    def trip() -> None:
        nonlocal following
        key, number = next(keys).to_bytes(8, "big"), following + count
        core.say(requester, wire.Request("s", 1, key=key), frames=(request,))
        assert core.take(wire.Work)
        core.say(
            worker, wire.Reply(1, list(range(following, number)), 1, True), frames=(reply,)
        )  # fmt: skip
        assert core.take(wire.Mail)
        core.say(requester, wire.AckMail(1, [(number, number + count)]))
        following = number + count

    trip()
    return trip


def mailing(count: int) -> Callable[[], None]:
    """Make a round of mail from its SEND to the reader's ACK."""
    core, sender, reader = Core(), 1, 2
    core.listens = True
    core.hello(sender, "sender")
    core.hello(reader, "reader")
    core.say(reader, wire.OpenInbox(1, "", MANY, MANY))
    content = encode([b"x" * 140] * count, subject="news")
    keys = iter(range(1, 1 << 60))
    following = 0

    def mail() -> None:
        nonlocal following
        key = next(keys)
        send = wire.Send("reader", key, key=key.to_bytes(8, "big"))
        core.say(sender, send, frames=(content,))
        assert core.take(wire.Mail)
        core.say(reader, wire.AckMail(1, [(following, following + count)]))
        following += count

    mail()
    return mail


def stepping(parts: int) -> Callable[[], None]:
    """Make an atomic step: publishes of one record each, and a mail that is acknowledged."""
    core, sender, reader = Core(), 1, 2
    core.listens = True
    core.hello(sender, "sender")
    core.hello(reader, "reader")
    core.say(reader, wire.OpenInbox(1, "", MANY, MANY))
    record, letter = content_of(1, 12), encode([b"x" * 140], subject="news")
    publishes = [wire.Publish("s", 0) for _ in range(parts - 1)]
    frames = (*[record] * (parts - 1), letter)
    keys = iter(range(1, 1 << 60))
    following = 0

    def step() -> None:
        nonlocal following
        key = next(keys)
        atomic = wire.Atomic(key, parts, key=key.to_bytes(8, "big"))
        core.say(sender, atomic, *publishes, wire.Send("reader", 0), frames=frames)
        assert core.take(wire.Mail)
        core.say(reader, wire.AckMail(1, [(following, following + 1)]))
        following += 1

    step()
    return step
