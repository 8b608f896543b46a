"""One client takes all that it can of a running broker: what it gets, and what others keep."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_protocol.errors import BrokerRefused
from malamute_py import SyncClient, connect, connect_sync
from tests.server.daemon import Daemon
from tests.server.peer import RawPeer
from tests.waiting import WAIT_S

pytestmark = pytest.mark.system


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    with contextlib.ExitStack() as running:

        def begin(**settings: object) -> Daemon:
            return running.enter_context(Daemon(tmp_path / "data", **settings))

        yield begin


def named(daemon: Daemon, identity: str) -> SyncClient:
    return connect_sync(daemon.endpoint, identity=identity)


def descriptors(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def refusals(client: SyncClient, count: int, **settings: object) -> list[str]:
    """Return the codes of the refusals of so many CREATE_STREAM."""
    found = []
    for at in range(count):
        try:
            client.create_stream(f"greedy-{at}", settings)
        except BrokerRefused as error:
            found.append(error.code)
    return found


def test_one_identity_gets_its_streams_and_another_the_rest(start: Any) -> None:
    daemon = start(streams__streams_max=50, quotas__streams=20)
    with named(daemon, "greedy") as greedy, named(daemon, "other") as other:
        assert refusals(greedy, 60) == ["limit"] * 40
        for at in range(20):
            assert other.publish(f"other-{at}", b"x").offset == 0
        with pytest.raises(BrokerRefused, match=r"quotas\.streams is 20"):
            greedy.publish("one-more", b"x")
        counters = other.broker_info().counters
        assert counters["quota_streams"] == 41
    assert daemon.terminate() == 0  # Its log is read to the end.
    assert sum(line.get("event") == "quota_reached" for line in daemon.lines) == 1


def test_rings_take_descriptors_and_disk_for_no_more_than_the_quota(
    start: Any, tmp_path: Path
) -> None:
    daemon = start(quotas__rings=3, quotas__rings_bytes=1 << 30, quotas__rings_memory_bytes=8 << 20)
    with named(daemon, "greedy") as greedy, named(daemon, "other") as other:
        before = descriptors(daemon)
        assert refusals(greedy, 40, ring_bytes=100 << 20) == ["limit"] * 37
        assert descriptors(daemon) <= before + 3 * 6
        assert len(list((tmp_path / "data" / "rings").iterdir())) <= 1 + 3
        resident = daemon.resident_bytes()
        with pytest.raises(BrokerRefused, match="quotas"):
            greedy.create_stream("in-memory", memory=True, ring_bytes=1 << 40)
        assert daemon.resident_bytes() < resident + (16 << 20)
        other.create_stream("other", ring_bytes=100 << 20)
        assert other.publish("other", b"x").offset == 0


def test_names_that_are_none_leave_nothing_in_the_memory_of_permissions(start: Any) -> None:
    daemon = start(**{"permissions.*.write": '["*"]'})
    frame = encode([b"x"], subject="s")
    with RawPeer(daemon.endpoint) as peer:
        for at in range(10):
            peer.send(wire.Publish(f"{at}" * 900_000, at + 1), frames=(frame,))
            peer.get(wire.Refused)
        before = daemon.resident_bytes()
        for at in range(100):
            peer.send(wire.Publish(f"{at:02}" * 450_000, at + 1), frames=(frame,))
            assert peer.get(wire.Refused)[0].code == "forbidden"
        assert daemon.resident_bytes() < before + (20 << 20)


def test_pings_are_answered_while_hostile_subjects_are_matched(start: Any) -> None:
    daemon = start()
    draw = random.Random(1)
    names = ["".join(draw.choices("ab", k=250)) + f"{at}" for at in range(400)]
    with (
        RawPeer(daemon.endpoint) as reader,
        RawPeer(daemon.endpoint) as writer,
        RawPeer(daemon.endpoint) as canary,
    ):
        writer.send(wire.Publish("s", 1), frames=(encode([b"x"], subject="first"),))
        writer.get(wire.Confirm)
        for at in range(17):
            pattern = ["regex", f"([ab]{{0,12}}a){{0,5}}c{at}|^[ab]+{at}$"]
            reader.send(wire.Subscribe(at, "s", pattern, [1], 1 << 40, 1 << 50))
            reader.get(wire.Subscribed)
        writer.send(wire.Publish("s", 2), frames=(encode([b"x"] * 400, subject=names),))
        writer.get(wire.Confirm)
        answered = 0
        reader.socket.rcvtimeo = 0
        while answered < 10:
            canary.send(wire.Ping(7))
            canary.get(wire.Pong)
            assert not _delivered(reader), f"only {answered} PINGs were answered before"
            answered += 1
        reader.socket.rcvtimeo = int(WAIT_S * 1000)
        reader.get(wire.Deliver)


def _delivered(peer: RawPeer) -> bool:
    """Whether a DELIVER has come; messages that came are kept."""
    try:
        while True:
            command, _ = peer.next()
            if isinstance(command, wire.Deliver):
                return True
    except zmq.Again:
        return False


def test_a_client_that_is_too_fast_for_its_rate_is_slowed_down_and_loses_nothing(
    start: Any,
) -> None:
    daemon = start(quotas__messages_s=2_000)
    with named(daemon, "fast") as fast, named(daemon, "other") as other:
        fast.publish_many("s", [b"x"] * 2_000)
        for _ in range(4):
            fast.publish_many("s", [b"x"] * 250)
        assert other.publish("s", b"y").offset == 3_000
        counters = other.broker_info().counters
        assert counters["quota_rate"] >= 1
        assert counters["refused_wait"] >= 1
        records = sum(len(batch) for batch in other.subscribe(
            "s", start="earliest", until="tail").batches())  # fmt: skip
        assert records == 3_001


def test_clients_that_come_all_at_once_are_let_in_one_after_the_other(start: Any) -> None:
    daemon = start(quotas__links_s=20)

    async def come() -> dict[str, int]:
        clients = await asyncio.gather(
            *(connect(daemon.endpoint, identity=f"c{n}", timeout_ms=None) for n in range(60))
        )
        counters = (await clients[0].broker_info()).counters
        await asyncio.gather(*(client.close() for client in clients))
        return counters

    counters = asyncio.run(asyncio.wait_for(come(), WAIT_S))
    assert counters["quota_links_s"] >= 1
