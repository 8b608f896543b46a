"""Random hostile contents and a log that holds them: only their sender notices.

A canary publishes and reads beside the attacker, on the same stream, mailbox and service.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.batch import Batch, iter_batches
from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_protocol.errors import BatchError
from malamute_protocol.limits import DEFAULT_LIMITS
from malamute_protocol.stamp import Stamp
from malamute_py.broker.ready import MAIN
from malamute_py.client.session.subscription import (
    Arrival,
    GapNotice,
    SubscribeOptions,
    SubscriptionState,
)
from tests.broker.hostile_random import consume, make
from tests.broker.post import Post
from tests.broker.shell import Held, Peer
from tests.seeds import seeds

CORPUS = json.loads((Path(__file__).parent / "hostile_contents.json").read_text())
SEEDS = int(os.environ.get("MALAMUTE_HOSTILE_SEEDS", "12"))
"""Set for a longer run: each seed is 30 contents."""
CONTENTS = 30
CANARY, READER, ATTACKER = 1, 2, 3


class Careful(Peer):
    """A client as the real one is: its subscriptions are Readings, and it looks at everything."""

    def __init__(self) -> None:
        super().__init__()
        self.tolerant = True
        self.readings: dict[int, SubscriptionState] = {}
        self.gaps: dict[int, list[GapNotice]] = {}
        self.seen: dict[int, list[int]] = {}
        self.tweets: Counter[int] = Counter()

    def _one(self, command: wire.Command, frames: list[Any]) -> None:
        number = getattr(command, "subscription", -1)
        reading = self.readings.get(number)
        if reading is None:
            if isinstance(command, wire.Mail | wire.Work | wire.Deliver):
                self._look(number, iter_batches(frames, command.rows))
            else:
                super()._one(command, frames)
            return
        if isinstance(command, wire.Ended):
            reading.end_with(command)
            return
        reading.receive(command, frames, DEFAULT_LIMITS)
        while (item := reading.take()) is not None:
            if isinstance(item, GapNotice):
                self.gaps.setdefault(number, []).append(item)
            elif isinstance(item, Arrival) and item.batch is not None:
                self._look(number, [item.batch])

    def _look(self, number: int, batches: Iterable[Batch]) -> None:
        for batch in batches:
            consume(batch)
            self.seen.setdefault(number, []).extend(batch.offsets.tolist())
            if batch.stamp.count == 1 and not batch.content.head.codec:
                self.tweets[number] += bytes(batch.content.bodies().blob) == b"tweet"


class World(Post):
    def __init__(self) -> None:
        self.good: list[int] = []
        super().__init__(
            extract_bytes_min=0, extract_share=1.0, shared_window_min=2, shared_read_min=2
        )

    def connect(self) -> None:
        """The canary, the attacker, and the canary's reader with something of each kind."""
        self.asked = 0
        self.hello(CANARY, identity="anna")
        self.hello(ATTACKER)
        peer = self.peers[READER] = Careful()
        self.send(READER, wire.Hello((1, 1), b"r" * 16))
        patterns: list[list[Any]] = [
            ["all"], ["topic", "canary"], ["topic", "a.#"], ["fields", "any", [["k"]]],
            ["prefix", ""],
        ]  # fmt: skip
        for number, pattern in enumerate(patterns):
            request = SubscribeOptions(
                "s", pattern, [0], credit_records=1 << 40, credit_bytes=1 << 50
            )
            peer.readings[number] = SubscriptionState(number, request)
            self.send(READER, peer.readings[number].open())
        for number, kind in enumerate(("shared", "keyed", "exclusive"), 10):
            join = wire.JoinGroup(
                number, "s", kind, ["topic", "canary"], kind, [0], 1 << 40, 1 << 50
            )
            self.send(READER, join)
        self.send(READER, wire.OpenInbox(20, "box", 1 << 40, 1 << 50))
        self.send(READER, wire.Offer(21, "service", ["all"], 1 << 40, 1 << 50))

    def canary(self) -> None:
        self.publish(CANARY, "s", [b"tweet"] * 2, subject=["canary", "canary"])
        confirm = self.peers[CANARY].last(wire.Confirm)
        self.good += [confirm.offset, confirm.offset + 1]
        self.mail(CANARY, "box", [b"tweet"])
        self.asked += 1
        self.send(CANARY, wire.Request("service", 5), frames=[encode([b"tweet"], subject="q")])

    def attack(self, content: bytes, link: int) -> None:
        for command in (
            wire.Publish("s", 1), wire.Publish("hostile", 2), wire.Send("box", 3),
            wire.Send("~r", 4), wire.Request("service", 5),
        ):  # fmt: skip
            self.send(link, command, frames=[content])
        self.send(
            link, wire.Atomic(6, 2), wire.Publish("s", 0), wire.Send("box", 0),
            frames=[content, content],
        )  # fmt: skip

    def assert_well(self) -> None:
        """The canary is confirmed, and its reader has all of it, once each, by every way."""
        self.canary()
        for link in (CANARY, READER):
            assert not self.peers[link].closed
        peer = self.peers[READER]
        assert isinstance(peer, Careful)
        good = set(self.good)
        for number in (0, 1, 4):
            assert [o for o in peer.seen[number] if o in good] == self.good
        for number in (10, 11, 12):
            assert sorted(o for o in peer.seen[number] if o in good) == self.good
        assert peer.tweets[20] == len(self.good) // 2
        # Those of before a restart are in the worker's hands still.
        assert peer.tweets[21] == self.asked


def found(content: bytes, what: BaseException) -> None:
    """Print a content that did harm, as the corpus keeps it."""
    print(json.dumps({"name": "", "why": repr(what), "contents": [content.hex()]}))


@pytest.mark.moderate
@pytest.mark.parametrize("seed", seeds(3, SEEDS))
def test_random_hostile_contents_end_nobody_but_their_sender(seed: int) -> None:
    """No boundary is needed either, or the fake shell would raise: what is let in is handled."""
    chance = random.Random(f"hostile {seed}")
    world = World()
    world.canary()
    for place in range(CONTENTS):
        content = make(chance)
        try:
            if place % 10 == 0:
                world.send(ATTACKER, wire.Hello((1, 1), bytes([seed % 256, place] * 8)))
            world.attack(content, ATTACKER)
            if place % 5 == 0:
                world.evict()
        except BaseException as error:
            found(content, error)
            raise
    world.assert_well()


@pytest.mark.moderate
@pytest.mark.parametrize("seed", seeds(1, SEEDS))
def test_a_log_full_of_hostile_batches_serves_everything_else(seed: int) -> None:
    """Stored past all checks, as a bug could have let them in."""
    chance = random.Random(f"stored {seed}")
    world = World()
    world.planted = True
    world.canary()
    stream = world.stream("s").number
    for place in range(CONTENTS):
        store(world, stream, make(chance))
        if place % 7 == 0:
            # What comes behind a start is good.
            world.restart()
            world.canary()
    world.restart()
    world.assert_well()
    assert not world.events_of("internal_error") or world.events_of("batch_quarantined")


def store(world: Post, stream: int, content: bytes) -> None:
    """Write a batch into the log without a look at it, behind the stream's last."""
    head = Content(content).head
    held = world.rings[MAIN]
    base = max(one.next for one in held if one.stamp.stream == stream)
    lsn = world.ends[MAIN]
    end = lsn + 96 + len(content)
    stamp = Stamp(
        1, lsn, lsn, 0, world.epoch, base, held[-1].stamp.append_time_ms, stream, 0,
        96 + len(content), head.count, 0, head.content_crc,
    )  # fmt: skip
    held.append(Held(stamp.pack(), content, end, 0))
    world.ends[MAIN] = end


@pytest.mark.parametrize("entry", CORPUS, ids=[entry["name"] for entry in CORPUS])
def test_what_did_harm_once_does_none(entry: dict[str, Any]) -> None:
    world = World()
    world.canary()
    for content in map(bytes.fromhex, entry["contents"]):
        world.attack(content, ATTACKER)
    world.evict()
    world.assert_well()
    world.planted = True
    for content in map(bytes.fromhex, entry["contents"]):
        store(world, world.stream("s").number, content)
    world.restart()
    world.assert_well()


@pytest.mark.parametrize("seed", seeds(3, SEEDS))
def test_a_consumer_reads_or_refuses_by_name(seed: int) -> None:
    """Without a broker between: whatever the bytes are, nothing but named errors."""
    chance = random.Random(f"consumed {seed}")
    for _ in range(CONTENTS):
        content = make(chance)
        head = Content(content).head
        stamp = Stamp(0, 0, 0, 0, 1, 5, 1, 7, 0, 96 + len(content), head.count, 0, head.content_crc)
        rows = chance.choice((None, None, b"\x01" + bytes((head.count - 1) // 8), b"\xff" * 9))
        named: list[BatchError] = []
        note = partial(_note, named)
        try:
            read = list(iter_batches([stamp.pack(), content], rows, unreadable=note))
            for batch in read:
                consume(batch)
        except BaseException as error:
            found(content, error)
            raise
        assert len(read) + len(named) == 1


def _note(named: list[BatchError], _: Stamp, error: BatchError) -> None:
    named.append(error)
