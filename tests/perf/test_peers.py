"""The peers' columns, and what their drivers are made of; no server is needed."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from perf.peers import driver
from perf.peers.checks import Check, selected
from perf.peers.mosquitto import server as mosquitto
from perf.peers.nats import server as nats
from perf.peers.peer import ROLES, Peer
from perf.peers.rabbitmq import server as rabbitmq
from perf.peers.redis import server as redis

PEERS: list[Peer] = [nats.PEER, redis.PEER, rabbitmq.PEER, mosquitto.PEER]
PERSISTENT = {"jetstream", "stream", "stream-sync", "quorum"}
SYNCED = {"stream-sync", "quorum"}


@pytest.fixture
def everything_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every Python client can be imported and every native driver is built."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(nats.Nats, "version", lambda _: "2.9.10")
    for name in ("nats", "redis", "rabbitmq", "mosquitto"):
        (tmp_path / f"{name}_driver").touch()
    monkeypatch.setattr(nats, "NATIVE", tmp_path / "nats_driver")
    monkeypatch.setattr(redis, "NATIVE", tmp_path / "redis_driver")
    monkeypatch.setattr(rabbitmq, "AMQP_NATIVE", tmp_path / "rabbitmq_driver")
    monkeypatch.setattr(mosquitto, "NATIVE", tmp_path / "mosquitto_driver")


@pytest.mark.usefixtures("everything_installed")
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_mode_has_a_python_and_a_native_column_that_say_what_they_are(peer: Peer) -> None:
    columns = peer.columns()
    names = [column.name for column in columns]
    assert len(set(names)) == len(names)
    # A form of a client that only asks and answers stands beside its column.
    columns = [column for column in columns if column.roles != {"request", "respond"}]
    modes = {column.mode for column in columns}
    assert {(column.mode, column.client) for column in columns} == {
        (mode, client) for mode in modes for client in ("python", "native")
    }
    for column in columns:
        assert column.peer == peer.name
        assert column.label
        assert column.note
        assert column.roles <= ROLES
        assert {"publish", "subscribe", "pace", "listen"} <= column.roles
        assert {12, 140, 1120} <= set(column.rates)
        assert column.persistent == (column.mode in PERSISTENT)
        assert column.synced == (column.mode in SYNCED)


@pytest.mark.usefixtures("everything_installed")
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_python_columns_command_names_a_module_that_is_there(peer: Peer) -> None:
    for column in peer.columns():
        if column.client == "python":
            module = column.command[-1].replace(".", "/") + ".py"
            assert (Path(__file__).parents[2] / module).exists()


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_client_that_is_not_there_has_no_column(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(nats.Nats, "version", lambda _: "2.9.10")
    monkeypatch.setattr(rabbitmq, "AMQP_NATIVE", tmp_path / "rabbitmq_driver")
    for module in (nats, redis, mosquitto):
        monkeypatch.setattr(module, "NATIVE", tmp_path / "absent")
    assert list(peer.columns()) == []
    told = peer.absent()
    for client in ("python", "native"):
        assert any(
            name.endswith(client) and ("install" in why or "build" in why)
            for name, why in told.items()
        )


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_server_that_is_not_installed_is_told_with_what_to_install(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (nats, redis, rabbitmq, mosquitto):
        monkeypatch.setattr(module.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(rabbitmq, "SCRIPT", tmp_path / "absent")
    assert "apt-get install" in peer.missing()


@pytest.mark.parametrize(("version", "there"), [("2.9.10", False), ("2.10.0", True)])
def test_jetstream_with_a_sync_of_every_write_is_there_when_the_server_can(
    version: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(nats.Nats, "version", lambda _: version)
    assert ("jetstream-sync" in {column.mode for column in nats.PEER.columns()}) == there


# --- what drivers are made of -----------------------------------------------------------------


def options(**keys: object) -> driver.Options:
    given = {"role": "subscribe", "url": "x://", "size": 12, "count": 100, **keys}
    return driver.options_of([f"{key}={value}" for key, value in given.items()])


def sent(asked: driver.Options, producer: int = 0) -> list[bytes]:
    return [driver.body(producer, number, asked.size) for number in range(asked.count)]


def test_arguments_that_a_driver_does_not_know_are_ignored() -> None:
    asked = driver.options_of(["role=publish", "url=x://h", "size=20", "colour=blue", "rate=0.5"])
    assert (asked.role, asked.size, asked.rate, asked.window) == ("publish", 20, 0.5, 4096)


def test_bodies_hold_producer_and_number_and_are_of_the_size_asked_for() -> None:
    asked = options(count=driver.BURST + 5, producer=3)
    made = [body for burst in driver.bodies(asked) for body in burst]
    assert len(made) == asked.count
    for number in (0, 1, driver.BURST, driver.BURST + 4):
        assert made[number] == driver.body(3, number, 12)
        assert made[number] == (3 << 48 | number).to_bytes(8, "little") + b"xxxx"


def test_bodies_that_are_too_many_for_memory_are_made_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "POOL_BYTES", 1000)
    asked = options(count=100)
    assert [body for burst in driver.bodies(asked) for body in burst] == sent(asked)


def test_a_check_is_content_with_all_records_in_order() -> None:
    asked = options()
    check = Check(asked)
    assert [check.add(body) for body in sent(asked)] == [False] * 99 + [True]
    assert (check.received, check.missing, check.duplicates, check.misordered) == (100, 0, 0, 0)
    assert 0 < check.begun_ns <= check.ended_ns


def test_a_check_tells_a_gap_a_duplicate_and_a_record_out_of_order() -> None:
    asked = options()
    bodies = sent(asked)
    check = Check(asked)
    check.burst(bodies[:10])
    check.close()
    check.burst([bodies[12], bodies[11], bodies[11], bodies[5], *bodies[13:40]])
    check.close()
    check.burst([*bodies[40:60], bodies[50]])
    check.close()
    assert (check.received, check.missing, check.duplicates, check.misordered) == (59, 41, 3, 1)


def test_a_check_refuses_another_size_and_records_of_nobody() -> None:
    check = Check(options())
    with pytest.raises(driver.DriverFailed, match="13"):
        check.burst([driver.body(0, n, 13) for n in range(100)])
    check = Check(options())
    with pytest.raises(driver.DriverFailed, match="nobody"):
        check.burst([driver.body(0, n + 1, 12) for n in range(100)])


def test_a_check_lets_producers_and_subjects_mix_but_not_the_order_within_them() -> None:
    asked = options(producers=2, subjects=4)
    first, second = sent(asked), sent(asked, producer=1)
    # Subjects 0 and 1 of a producer come before its subjects 2 and 3.
    mixed = [body for lane in (0, 2, 1, 3) for body in first[lane::4]]
    check = Check(asked)
    check.burst([*second, *mixed])
    assert (check.received, check.missing, check.duplicates, check.misordered) == (200, 0, 0, 0)
    check = Check(asked)
    check.burst([*second, *first[4:8], *first[:4], *first[8:]])
    assert (check.missing, check.duplicates, check.misordered) == (0, 0, 4)


def test_rare_places_are_the_same_in_every_language() -> None:
    places = driver.rare_places(50_000, 10_000, 7)
    # splitmix64(7 + block) % 10000, as the native drivers compute it.
    mask = (1 << 64) - 1

    def splitmix64(x: int) -> int:
        z = x + 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    assert places.tolist() == [b * 10_000 + splitmix64(7 + b) % 10_000 for b in range(5)]


def test_a_replay_of_the_rare_subject_wants_exactly_its_records() -> None:
    asked = options(count=50, rare=10, seed=3, select="rare")
    wanted = selected(asked)
    assert wanted is not None
    bodies = [driver.body(0, number, 12) for number in wanted.tolist()]
    check = Check(asked, wanted)
    assert check.burst(bodies)
    assert (check.received, check.missing) == (5, 0)
    with pytest.raises(driver.DriverFailed):
        Check(asked, wanted).burst([driver.body(0, n, 12) for n in range(5)])


def test_a_replay_from_a_time_on_wants_all_that_came_after() -> None:
    wanted = selected(options(select="time", first=60))
    assert wanted is not None
    assert np.array_equal(wanted, np.arange(60, 100))


def test_records_go_to_their_subjects_in_turn_and_the_rare_ones_to_their_own() -> None:
    subjects = driver.Subjects(options(subject="a.b", subjects=3), "/", "+")
    assert subjects.of_burst(2, 3) == ["a/b/2/x", "a/b/0/x", "a/b/1/x"]
    assert subjects.patterns == ["a/b/0/+", "a/b/1/+", "a/b/2/+"]
    rare = driver.Subjects(options(subject="s", count=30, rare=10, seed=3))
    names = rare.of_burst(0, 30)
    places = driver.rare_places(30, 10, 3).tolist()
    assert [i for i, name in enumerate(names) if name == "s.rare"] == places
    assert set(names) == {"s.rare", "s.0.x"}


def test_latencies_are_told_in_microseconds_and_their_order_is_checked() -> None:
    asked = options(size=16, count=2)
    heard = driver.Listen(asked)
    assert not heard.add(driver.stamped(0, 0, 16))
    with pytest.raises(driver.DriverFailed):
        heard.add(driver.stamped(0, 0, 16))
    assert heard.add(driver.stamped(0, 1, 16))
    assert driver.percentiles([1000, 2000, 3000])["p50_us"] == 2.0


def test_a_reply_that_is_not_its_requests_is_no_round_trip() -> None:
    requests = driver.Requests(options(count=2))
    requests.answered(0, b"re:" + requests.bodies[0], 0)
    with pytest.raises(driver.DriverFailed):
        requests.answered(1, b"re:" + requests.bodies[0], 0)
    with pytest.raises(driver.DriverFailed, match="2 requests"):
        driver.Requests(options(count=2)).tell(driver.Clock())


async def test_a_full_window_waits_until_half_of_it_is_free() -> None:
    window = driver.Window(4)
    window.sent = 4
    waiting = asyncio.create_task(window.room())
    await asyncio.sleep(0)
    window.confirm(1)
    await asyncio.sleep(0)
    assert not waiting.done()
    window.confirm(1)
    await waiting
    window.confirm(2)
    await window.all()
