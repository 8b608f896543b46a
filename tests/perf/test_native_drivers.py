"""The native drivers: built where their libraries are, and a little of every work with each.

What is not installed is left out with a word: by make, and here.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perf.peers.mosquitto import server as mosquitto
from perf.peers.nats import server as nats
from perf.peers.peer import Column, Peer, Server
from perf.peers.rabbitmq import server as rabbitmq
from perf.peers.redis import server as redis
from perf.suite.roles import Role, RoleFailed

FOLDER = Path(__file__).parents[2] / "perf" / "peers"
DRIVERS = {"nats_driver", "redis_driver", "rabbitmq_driver", "mosquitto_driver"}
PEERS: list[Peer] = [nats.PEER, redis.PEER, rabbitmq.PEER, mosquitto.PEER]
MODES = [
    "core",
    "jetstream",
    "pubsub",
    "stream-sync",
    "classic",
    "quorum",
    "stream",
    "qos0",
    "qos1",
]
WAIT_S = 60.0
COUNT = 1000


def make(*words: str) -> str:
    if shutil.which("make") is None:
        pytest.skip("make is not installed (Debian: apt-get install make)")
    made = subprocess.run(
        ["make", "-C", str(FOLDER), *words], capture_output=True, text=True, check=True
    )
    return made.stdout


def test_the_makefile_has_a_driver_for_each_of_the_sources() -> None:
    in_c = {path.parent.name for path in FOLDER.glob("*/native_driver.c")}
    in_go = {path.parents[1].name for path in FOLDER.glob("*/native/main.go")}
    assert {f"{peer}_driver" for peer in in_c | in_go} == DRIVERS
    named = (FOLDER / "Makefile").read_text()
    assert all(f"{driver}:" in named or f"driver_in_c,{driver}," in named for driver in DRIVERS)


def test_a_driver_without_its_compiler_is_left_out_with_the_packages_to_install() -> None:
    said = make("--dry-run", "CC=no-such-compiler", "HAS_GO=")
    for driver in DRIVERS:
        assert f"{driver} is left out: apt-get install " in said


class Bench:
    """Starts native drivers of a column against its server."""

    def __init__(self, column: Column, server: Server) -> None:
        self.column = column
        self.server = server
        self.started: list[Role] = []

    def start(self, role: str, **keys: object) -> Role:
        given = {"url": self.server.url, "mode": self.column.mode, "count": COUNT}
        started = Role(self.column.command, role, **given, **keys)
        self.started.append(started)
        started.ready(WAIT_S)
        return started

    def run(self, *roles: Role) -> list[dict[str, Any]]:
        for role in roles:
            role.go()
        results = [role.result(WAIT_S) for role in roles]
        for role in reversed(roles):
            role.end()
        return results

    def close(self) -> None:
        for role in self.started:
            role.kill()


def native_column(mode: str) -> tuple[Peer, Column]:
    left_out = make()
    for peer in PEERS:
        for column in peer.columns():
            if (column.mode, column.client) == (mode, "native"):
                if why := peer.missing():
                    pytest.skip(why)
                return peer, column
    pytest.skip(left_out)


@pytest.fixture(scope="module", params=MODES)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    peer, column = native_column(request.param)
    with peer.server(column, tmp_path_factory.mktemp(column.name) / "server") as server:
        made = Bench(column, server)
        yield made
        made.close()


def wants(bench: Bench, *roles: str) -> None:
    if not set(roles) <= bench.column.roles:
        pytest.skip(f"{bench.column.label} does not play {' and '.join(roles)}")


def all_came(result: dict[str, Any], count: int) -> None:
    assert (result["received"], result["missing"]) == (count, 0)
    assert (result["duplicates"], result["misordered"]) == (0, 0)
    assert result["begun_ns"] <= result["ended_ns"]


@pytest.mark.slow
@pytest.mark.system
def test_each_of_three_subscribers_receives_what_is_published(bench: Bench) -> None:
    subscribers = 3 if "fan-out" in bench.column.roles else 1
    keys = {"subject": "one", "size": 140}
    consumer = bench.start("subscribe", subscribers=subscribers, **keys)
    producer = bench.start("publish", **keys)
    received, published = bench.run(consumer, producer)
    all_came(received, subscribers * COUNT)
    assert published["confirmed"] == COUNT


@pytest.mark.slow
@pytest.mark.system
def test_a_fill_is_replayed_whole_and_from_its_middle(bench: Bench) -> None:
    wants(bench, "fill", "replay", "replay-time")
    keys = {"subject": "log", "size": 140, "start": "first"}
    (filled,) = bench.run(bench.start("fill", **keys))
    (whole,) = bench.run(bench.start("replay", **keys))
    all_came(whole, COUNT)
    since = {"select": "time", "from_ns": filled["middle_ns"], "first": filled["middle"]}
    (late,) = bench.run(bench.start("replay", **since, **keys))
    all_came(late, COUNT - filled["middle"])


@pytest.mark.slow
@pytest.mark.system
def test_requests_are_answered_by_two_workers(bench: Bench) -> None:
    wants(bench, "request", "respond")
    keys = {"subject": "echo", "flight": 8}
    workers = bench.start("respond", workers=2, **keys)
    (answered,) = bench.run(bench.start("request", **keys))
    bench.run(workers)
    assert 0 < answered["p50_us"] <= answered["p99_us"] <= answered["p999_us"]


@pytest.mark.slow
@pytest.mark.system
def test_paced_requests_are_made_no_faster_than_they_are_due(bench: Bench) -> None:
    wants(bench, "request", "respond")
    keys = {"subject": "paced", "flight": 1, "paced": 1, "rate": 4 * COUNT}
    workers = bench.start("respond", **keys)
    (answered,) = bench.run(bench.start("request", **keys))
    bench.run(workers)
    assert answered["ended_ns"] - answered["begun_ns"] >= 0.24e9


@pytest.mark.slow
@pytest.mark.system
def test_a_queues_message_alone_tells_how_long_its_confirm_took(bench: Bench) -> None:
    wants(bench, "alone", "queue")
    keys = {"subject": "alone", "form": "single", "window": 1, "queue": 1}
    consumer = bench.start("subscribe", **keys)
    received, published = bench.run(consumer, bench.start("publish", **keys))
    all_came(received, COUNT)
    assert 0 < published["p50_us"] <= published["p99_us"]


@pytest.mark.slow
@pytest.mark.system
def test_a_record_of_another_size_ends_the_consumer_without_a_figure(bench: Bench) -> None:
    consumer = bench.start("subscribe", subject="other", size=140)
    producer = bench.start("publish", subject="other", size=141)
    consumer.go()
    producer.go()
    with pytest.raises(RoleFailed, match="141 bytes"):
        consumer.result(WAIT_S)
    producer.result(WAIT_S)
    producer.end()
