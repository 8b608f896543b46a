"""A world with one stream that keeps the newest record of each subject."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_protocol.keys import DELETION_FIELD
from tests.broker.shell import Peer, Shell

KEEP = {"keep": "last-per-subject", "ring_bytes": 1 << 20}


class World(Shell):
    """A shell with one stream of keys, and one client with a producer."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.tracker = 0
        self.sequence = 0
        self.hello(1)
        self.send(1, wire.CreateStream(1, "s", KEEP))
        self.open_producer()

    def open_producer(self) -> None:
        peer = self.send(1, wire.OpenProducer(2))
        value = peer.last(wire.Result).value
        self.producer = value["id"], value["epoch"]
        self.sequence = value["next"].get("s", 0)

    def content(self, key: str, body: bytes, *, sequence: int, deletion: bool = False) -> bytes:
        return bytes(
            encode(
                [body], subject=key, fields={DELETION_FIELD: ""} if deletion else None,
                producer_id=self.producer[0], producer_epoch=self.producer[1],
                first_sequence=sequence,
            )
        )  # fmt: skip

    def say(self, command: wire.Command, content: bytes) -> Any:
        """Send a batch; returns its CONFIRM or REFUSED."""
        peer = self.send(1, command, frames=[content])
        answers = [
            one for one in peer.commands
            if getattr(one, "tracker", getattr(one, "reference", 0)) == self.tracker
        ]  # fmt: skip
        answer = answers[-1]
        if isinstance(answer, wire.Confirm) and not answer.duplicate:
            self.sequence += 1
        return answer

    def put(self, key: str, body: bytes = b"v", *, deletion: bool = False) -> Any:
        self.tracker += 1
        content = self.content(key, body, sequence=self.sequence, deletion=deletion)
        return self.say(wire.Publish("s", self.tracker), content)

    def update(self, key: str, body: bytes, revision: int, sequence: int | None = None) -> Any:
        self.tracker += 1
        sequence = self.sequence if sequence is None else sequence
        content = self.content(key, body, sequence=sequence)
        return self.say(wire.UpdateKey("s", self.tracker, 0, revision), content)

    def get(self, key: str, link: int = 1) -> Any:
        peer = self.send(link, wire.GetKey(77, "s", key))
        return result(peer)

    def keys(self, pattern: Any = None) -> dict[str, int]:
        listing = wire.ListKeys(78, "s", pattern or ["all"])
        return dict(result(self.send(1, listing))["keys"])


def table(*subjects: str) -> Any:
    """Options of an encoder for records with these subjects."""
    names = sorted(set(subjects))
    codes = np.array([names.index(subject) for subject in subjects], np.int32)
    return {"subject_table": [(name,) for name in names], "subject_codes": codes}


def result(peer: Peer) -> Any:
    last = [one for one in peer.commands if isinstance(one, wire.Result | wire.Refused)][-1]
    return last.value if isinstance(last, wire.Result) else last


def in_memory(world: World) -> None:
    """All records are in the hot window."""


def on_disk(world: World) -> None:
    """No record is in the hot window."""
    world.evict()


def restarted(world: World) -> None:
    """The broker was started again."""
    world.restart()
    world.hello(1)
    world.open_producer()


PLACES = pytest.mark.parametrize("place", [in_memory, on_disk, restarted])


def turned(world: World, laps: int = 2) -> None:
    """Let the ring come round some times, by changes of one key."""
    ring = world.stream("s").ring
    end = ring.end_lsn + laps * world.segment_bytes * world.segments
    waited = 0
    while ring.end_lsn < end:
        answer = world.put("busy", b"x" * 900)
        if isinstance(answer, wire.Refused):
            assert answer.code == "wait"
            waited += 1
            assert waited < 100


def moved(world: World) -> Peer:
    """Newest records that have moved, among others: "k0" to "k9", "gone" is deleted."""
    for number in range(10):
        world.put(f"k{number}", b"%d" % number, deletion=False)
    world.put("gone", deletion=True)
    turned(world)
    assert world.stream("s").first > 11
    return world.peers[1]
