"""Each peer's server and Python drivers do a little of every work that they list.

Left out, with a word, where a server or a client is not installed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from perf.peers.mosquitto import server as mosquitto
from perf.peers.nats import server as nats
from perf.peers.peer import Column, Peer, Server
from perf.peers.rabbitmq import server as rabbitmq
from perf.peers.redis import server as redis
from perf.suite.roles import Role

pytestmark = [pytest.mark.slow, pytest.mark.system]

WAIT_S = 60.0
COUNT = 300
PEERS: dict[str, Peer] = {
    peer.name: peer for peer in (nats.PEER, redis.PEER, rabbitmq.PEER, mosquitto.PEER)
}
MODES = [
    ("nats", "core"),
    ("nats", "jetstream"),
    ("redis", "pubsub"),
    ("redis", "pubsub-waves"),
    ("redis", "stream"),
    ("redis", "stream-sync"),
    ("rabbitmq", "classic"),
    ("rabbitmq", "quorum"),
    ("rabbitmq", "stream"),
    ("mosquitto", "qos0"),
    ("mosquitto", "qos1"),
]


class Bench:
    """A column with its server; starts drivers against it."""

    def __init__(self, column: Column, server: Server) -> None:
        self.column = column
        self.server = server
        self.roles: list[Role] = []

    def start(self, role: str, **keys: object) -> Role:
        if "count" not in keys:
            keys["count"] = COUNT
        started = Role(
            self.column.command, role, url=self.server.url, mode=self.column.mode, **keys
        )
        self.roles.append(started)
        assert started.ready(WAIT_S)
        return started

    def close(self) -> None:
        for role in self.roles:
            role.kill()

    def run(self, *roles: Role) -> list[dict[str, Any]]:
        for role in roles:
            role.go()
        results = [role.result(WAIT_S) for role in roles]
        for role in reversed(roles):
            role.end()
        return results


def column_of(name: str, mode: str) -> tuple[Peer, Column]:
    peer = PEERS[name]
    if why := peer.missing():
        pytest.skip(why)
    found = [c for c in peer.columns() if (c.mode, c.client) == (mode, "python")]
    if not found:
        pytest.skip(f"the Python client of {name} {mode} is not installed")
    return peer, found[0]


@pytest.fixture(scope="module", params=MODES, ids="-".join)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    peer, column = column_of(*request.param)
    folder: Path = tmp_path_factory.mktemp(column.name)
    with peer.server(column, folder / "server") as server:
        made = Bench(column, server)
        yield made
        made.close()
        pids = server.pids
    assert not alive_after(pids, WAIT_S)


def alive_after(pids: tuple[int, ...], within_s: float) -> list[psutil.Process]:
    """Return processes that have not ended by then; a dead one without a waiting parent has."""
    left = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(pid))
    deadline = time.monotonic() + within_s
    while left and time.monotonic() < deadline:
        left = [each for each in left if runs(each)]
        time.sleep(0.01)
    return left


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def wants(bench: Bench, *roles: str) -> None:
    if not set(roles) <= bench.column.roles:
        pytest.skip(f"{bench.column.label} does not play {' and '.join(roles)}")


def all_came(result: dict[str, Any], count: int) -> None:
    assert (result["received"], result["missing"]) == (count, 0)
    assert (result["duplicates"], result["misordered"]) == (0, 0)
    assert result["begun_ns"] <= result["ended_ns"]


@pytest.mark.parametrize("form", ["bulk", "single"])
def test_what_is_published_is_received_whole(bench: Bench, form: str) -> None:
    wants(bench, "publish", "subscribe")
    keys = {"subject": f"one-{form}", "form": form, "size": 140}
    consumer = bench.start("subscribe", **keys)
    producer = bench.start("publish", **keys)
    received, published = bench.run(consumer, producer)
    all_came(received, COUNT)
    assert published["confirmed"] == COUNT


def test_many_subscribers_of_one_process_each_receive_all_of_many_producers(bench: Bench) -> None:
    wants(bench, "fan-out", "producers")
    keys = {"subject": "many", "producers": 2, "size": 12}
    consumer = bench.start("subscribe", subscribers=3, **keys)
    producers = [bench.start("publish", producer=number, **keys) for number in range(2)]
    received, *_ = bench.run(consumer, *producers)
    all_came(received, 2 * 3 * COUNT)


def test_each_of_many_subjects_reaches_its_wildcard_subscription(bench: Bench) -> None:
    wants(bench, "wildcards")
    keys = {"subject": "wild", "subjects": 20, "size": 12}
    consumer = bench.start("subscribe", **keys)
    producer = bench.start("publish", **keys)
    received, _ = bench.run(consumer, producer)
    all_came(received, COUNT)


def test_a_queues_messages_are_acknowledged_one_by_one(bench: Bench) -> None:
    wants(bench, "queue")
    keys = {"subject": "queue", "queue": 1, "form": "single"}
    consumer = bench.start("subscribe", **keys)
    producer = bench.start("publish", **keys)
    received, _ = bench.run(consumer, producer)
    all_came(received, COUNT)


def test_what_was_filled_is_replayed_whole_and_from_its_middle(bench: Bench) -> None:
    wants(bench, "fill", "replay", "replay-time")
    # More than a burst before the middle and after it.
    keys = {"subject": "log", "size": 140, "count": 12_000}
    (filled,) = bench.run(bench.start("fill", **keys))
    assert filled["confirmed"] == 12_000
    assert 0 < filled["middle"] < 12_000
    (whole,) = bench.run(bench.start("replay", start="first", **keys))
    all_came(whole, 12_000)
    since = {"select": "time", "from_ns": filled["middle_ns"], "first": filled["middle"]}
    (late,) = bench.run(bench.start("replay", start="first", **since, **keys))
    all_came(late, 12_000 - filled["middle"])


def test_the_rare_subject_is_found_in_what_was_filled(bench: Bench) -> None:
    wants(bench, "fill", "replay-rare")
    keys = {"subject": "haystack", "size": 140, "rare": 100, "seed": 5, "count": 1000}
    bench.run(bench.start("fill", **keys))
    (found,) = bench.run(bench.start("replay", start="first", select="rare", **keys))
    all_came(found, 10)
    (whole,) = bench.run(bench.start("replay", start="first", **keys))
    all_came(whole, 1000)


def test_requests_are_answered_by_several_workers(bench: Bench) -> None:
    wants(bench, "request", "respond")
    keys = {"subject": "echo", "flight": 8, "form": "single"}
    worker = bench.start("respond", workers=2, **keys)
    caller = bench.start("request", **keys)
    (answered,) = bench.run(caller)
    assert 0 < answered["p50_us"] <= answered["p99_us"] <= answered["p999_us"]
    (ended,) = bench.run(worker)
    assert ended["cpu_s"] >= 0


def test_paced_requests_are_made_no_faster_than_they_are_due(bench: Bench) -> None:
    wants(bench, "request", "respond")
    keys = {"subject": "paced", "flight": 1, "paced": 1, "rate": 400, "count": 80, "form": "single"}
    worker = bench.start("respond", **keys)
    (answered,) = bench.run(bench.start("request", **keys))
    bench.run(worker)
    # A timer may be early by a millisecond.
    assert answered["ended_ns"] - answered["begun_ns"] >= 78 / 400 * 1e9


def test_a_publisher_with_one_record_out_tells_how_long_confirms_took(bench: Bench) -> None:
    wants(bench, "alone")
    keys = {"subject": "alone", "form": "single", "window": 1, "count": 20}
    consumer = bench.start("subscribe", **keys)
    received, published = bench.run(consumer, bench.start("publish", **keys))
    all_came(received, 20)
    assert published["confirmed"] == 20
    assert 0 < published["p50_us"] <= published["p99_us"] <= published["p999_us"]


def test_the_time_of_each_record_on_its_way_is_told(bench: Bench) -> None:
    wants(bench, "pace", "listen")
    keys = {"subject": "paced", "rate": 2000, "size": 140}
    listener = bench.start("listen", **keys)
    pacer = bench.start("pace", **keys)
    heard, paced = bench.run(listener, pacer)
    assert heard["received"] == COUNT
    assert 0 < heard["p50_us"] <= heard["p99_us"]
    assert paced["begun_ns"] < paced["ended_ns"]


@pytest.mark.parametrize(
    ("name", "mode"), [("nats", "jetstream"), ("redis", "stream"), ("rabbitmq", "stream")]
)
def test_a_server_started_again_in_its_folder_has_what_was_stored(
    name: str, mode: str, tmp_path: Path
) -> None:
    peer, column = column_of(name, mode)
    keys = {"subject": "kept", "count": COUNT}
    with (
        peer.server(column, tmp_path / "server") as server,
        contextlib.closing(Bench(column, server)) as first,
    ):
        first.run(first.start("fill", **keys))
    with (
        peer.server(column, tmp_path / "server") as server,
        contextlib.closing(Bench(column, server)) as again,
    ):
        (replayed,) = again.run(again.start("replay", start="first", **keys))
        assert server.disk_bytes() > 0
    all_came(replayed, COUNT)
