"""The whole broker in this process: core, journal, threads and sockets together."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zmq

from malamute_protocol.commands import (
    BrokerInfo,
    Bye,
    Confirm,
    CreateStream,
    Deliver,
    FindOffset,
    Hello,
    Kick,
    Level,
    PlanRead,
    Publish,
    Refused,
    RemoveStream,
    Result,
    StreamInfo,
    Subscribe,
    Subscribed,
)
from malamute_protocol.encode import encode
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.client.position import AtTime, LastPerSubject
from malamute_py.client.sync.client import connect_sync
from malamute_py.config import Config, load
from malamute_py.server import Server
from malamute_py.server.authentication.credentials import hash_password
from malamute_py.server.errors import ServerFailed
from tests.server.fakes import Lines
from tests.server.peer import RawPeer
from tests.server.storages import TroubledStorage, Troubles
from tests.server.zmtp import Zmtp, greeting
from tests.waiting import WAIT_S

SMALL: dict[str, Any] = {
    "limits.batch_bytes_max": 1 << 20,
    "limits.record_bytes_max": 1 << 19,
    "journal.segment_bytes": 4 << 20,
    "journal.ring_bytes": 32 << 20,
    # A RawPeer says nothing while the test is elsewhere, however long that takes.
    "links.heartbeat_ms": 60_000,
}


def config(data: object = "", **settings: Any) -> Config:
    wanted: dict[str, Any] = {
        "data_directory": str(data), "listen": ["tcp://127.0.0.1:0"], **SMALL,
    }  # fmt: skip
    wanted |= {key.replace("__", "."): value for key, value in settings.items()}
    return load(overrides=wanted)


@contextlib.contextmanager
def serving(wanted: Config, **options: Any) -> Iterator[tuple[Server, str, Lines]]:
    log = Lines()
    with Server(wanted, log=log, **options) as server:
        yield server, server.endpoints[0], log


def until(condition: Callable[[], object], wait_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def publish(peer: RawPeer, tracker: int, content: bytes, stream: str = "s") -> Any:
    """Return the answer to one publish; as a client would, it tries again when told to wait."""
    peer.send(Publish(stream, tracker, Level.SYNCED), frames=(content,))
    while True:
        command, _ = peer.next()
        if isinstance(command, Refused) and command.code == "wait":
            time.sleep(command.retry_ms / 1000)
            return publish(peer, tracker, content, stream)
        if isinstance(command, Confirm | Refused | Bye):
            return command


@pytest.mark.moderate
@pytest.mark.parametrize("transport", ["tcp", "ipc", "inproc"])
def test_a_batch_goes_in_is_confirmed_and_comes_out_as_it_was(
    transport: str, tmp_path: Path
) -> None:
    endpoint = {
        "tcp": "tcp://127.0.0.1:0", "ipc": f"ipc://{tmp_path}/socket", "inproc": "inproc://here",
    }[transport]  # fmt: skip
    with (
        zmq.Context() as context,
        serving(config(tmp_path / "data", listen=[endpoint]), context=context) as (_, at, _log),
        RawPeer(at, context=context) as reader,
        RawPeer(at, context=context) as writer,
    ):
        reader.send(Subscribe(1, "s", ["all"], [0], 1000, 1 << 20))
        subscribed, _ = reader.get(Subscribed)
        assert subscribed.tail == 0
        for number, size in enumerate((10, 100_000), 1):
            content = encode([os.urandom(size)], subject="a.b")
            answer = publish(writer, number, content)
            assert isinstance(answer, Confirm)
            assert (answer.level, answer.offset) == (Level.SYNCED, number - 1)
            delivered, frames = reader.get(Deliver)
            assert (delivered.from_, delivered.next) == (number - 1, number)
            assert b"".join(frames)[STAMP_BYTES:] == content
            assert len(frames) == 2


@pytest.mark.moderate
def test_everything_confirmed_is_there_after_a_stop_and_a_start(tmp_path: Path) -> None:
    for round_ in range(3):
        with serving(config(tmp_path)) as (_, at, log), connect_sync(at) as client:
            for number in range(20):
                client.publish("s", b"%d/%d" % (round_, number), subject=f"x.{number}")
            bodies = [
                record.body for record in client.subscribe("s", start="earliest", until="tail")
            ]
            expected = [b"%d/%d" % (r, n) for r in range(round_ + 1) for n in range(20)]
            assert bodies == expected
        if round_:
            assert log.of("recovered")[0]["clean"] is True


def test_clients_are_told_when_the_broker_stops_and_what_was_sent_is_confirmed() -> None:
    with serving(config()) as (server, at, _), RawPeer(at) as peer:
        publish(peer, 1, encode([b"x"]))
        server.request_stop()
        bye, _ = peer.get(Bye)
        assert bye.code == "draining"


@pytest.mark.moderate
def test_history_beyond_the_hot_window_is_read_from_the_journal(tmp_path: Path) -> None:
    body = os.urandom(10_000)
    with serving(config(tmp_path, memory__hot_bytes=100_000)) as (server, at, _):
        with connect_sync(at) as client:
            for number in range(100):
                client.publish("s", body + b"%d" % number)
            got = [r.body for r in client.subscribe("s", start="earliest", until="tail")]
            assert got == [body + b"%d" % number for number in range(100)]
        assert server.metrics()["core"]["reads"] > 0


@pytest.mark.moderate
def test_the_index_answers_times_last_per_subject_and_plans(tmp_path: Path) -> None:
    with serving(config(tmp_path)) as (_, at, _log), connect_sync(at) as client:
        times = []
        for number in range(30):
            fields = {"kind": "even" if number % 2 == 0 else "odd"}
            confirmed = client.publish(
                "s", b"%d" % number, subject=f"k.{number % 3}", fields=fields
            )
            times.append(confirmed.append_time_ms)
            time.sleep(0.002)
        client.publish("s", b"other", subject="z")

        middle = times[15]
        first_at = next(offset for offset, at_ms in enumerate(times) if at_ms >= middle)
        first_after = next(offset for offset, at_ms in enumerate(times) if at_ms > middle)
        assert client.find_offset("s", AtTime(middle)) == first_at
        assert client.find_offset("s", AtTime(middle, inclusive=False)) == first_after

        def last(pattern: Any) -> list[bytes]:
            found = client.subscribe("s", pattern, start=LastPerSubject(), until="tail")
            return [record.body for record in found]

        assert last("k.*") == [b"27", b"28", b"29"]
        assert last("#") == [b"27", b"28", b"29", b"other"]
        assert last(["fields", "all", [["kind", "even"]]]) == [b"24", b"26", b"28"]


@pytest.mark.moderate
def test_a_plan_says_where_it_ends_and_where_it_can_be_cut(tmp_path: Path) -> None:
    with serving(config(tmp_path)) as (_, at, _log), RawPeer(at) as peer:
        for number in range(40):
            publish(peer, number + 1, encode([os.urandom(30_000)]))
        peer.send(PlanRead(7, "s", ["all"], [0], split_bytes=200_000))
        result, _ = peer.get(Result)
        value = result.value
        splits = value["splits"]
        assert (value["from"], value["to"]) == (0, 40)
        assert splits[0][0] == 0
        assert splits[-1][1] == 40
        assert all(one[1] == two[0] for one, two in pairwise(splits))
        assert len(splits) >= 5
        peer.send(FindOffset(8, "s", [1]))
        found, _ = peer.get(Result)
        assert 40 in found.value.values()


@pytest.mark.moderate
def test_a_stream_with_a_ring_of_its_own_lives_and_goes_with_it(tmp_path: Path) -> None:
    wanted = config(tmp_path)
    with serving(wanted) as (server, at, _), RawPeer(at) as peer:
        peer.send(CreateStream(1, "own", {"ring_bytes": 8 << 20, "full": "refuse"}))
        peer.get(Result)
        assert isinstance(publish(peer, 1, encode([b"kept"]), "own"), Confirm)
        assert len(server.metrics()["disk"]) == 2
    with serving(wanted) as (server, at, _), RawPeer(at) as peer:
        peer.send(StreamInfo(1, "own"))
        info, _ = peer.get(Result)
        assert info.value["tail"] == 1
        body = os.urandom(400_000)
        tracker = 0
        while True:
            tracker += 1
            answer = publish(peer, tracker, encode([body]), "own")
            if isinstance(answer, Refused):
                break
        assert answer.code == "full"
        assert tracker < 30
        assert isinstance(publish(peer, tracker + 1, encode([body])), Confirm), "others go on"
        peer.send(RemoveStream(2, "own"))
        peer.get(Result)
        until(lambda: len(server.metrics()["disk"]) == 1)
        rings = tmp_path / "rings"
        until(lambda: [each.name for each in rings.iterdir()] == ["main"])


@pytest.mark.moderate
def test_a_memory_stream_is_gone_after_a_restart_and_the_others_are_not(tmp_path: Path) -> None:
    wanted = config(tmp_path)
    with serving(wanted) as (_, at, _log), RawPeer(at) as peer:
        peer.send(CreateStream(1, "volatile", {"memory": True}))
        peer.get(Result)
        refused = publish(peer, 1, encode([b"x"]), "volatile")
        assert isinstance(refused, Refused), "memory promises nothing"
        assert refused.code == "unsupported"
        peer.send(Publish("volatile", 1, Level.NONE), frames=(encode([b"x"]),))
        assert isinstance(publish(peer, 2, encode([b"x"]), "lasting"), Confirm)
    with serving(wanted) as (_, at, _log), RawPeer(at) as peer:
        for request, name in enumerate(("volatile", "lasting"), 1):
            peer.send(StreamInfo(request, name))
        first, _ = peer.get(Result)
        second, _ = peer.get(Result)
        assert first.value["first"] == first.value["tail"]
        assert second.value["tail"] - second.value["first"] == 1


@pytest.mark.slow
def test_old_segments_are_overwritten_and_a_late_reader_gets_a_gap(tmp_path: Path) -> None:
    wanted = config(tmp_path, memory__hot_bytes=1 << 20, journal__ring_bytes=12 << 20)
    with serving(wanted) as (_, at, log), RawPeer(at) as peer:
        body = os.urandom(400_000)
        for number in range(60):
            assert isinstance(publish(peer, number + 1, encode([body])), Confirm)
        until(lambda: log.of("segment_retired"))
        peer.send(StreamInfo(1, "s"))
        info, _ = peer.get(Result)
        assert 0 < info.value["first"] < 60
        assert info.value["tail"] == 60


# --- bad input ------------------------------------------------------------------------------


def test_commands_before_hello_and_a_second_hello_cost_the_link_and_nobody_else() -> None:
    with serving(config()) as (server, at, _), RawPeer(at) as other:
        with RawPeer(at, hello=False) as rude:
            rude.send(Publish("s", 1, Level.SYNCED), frames=(encode([b"x"]),))
            bye, _ = rude.get(Bye)
            assert bye.code in ("unexpected", "malformed")
        with RawPeer(at) as rude:
            rude.send(Hello((1, 1), os.urandom(16)))
            bye, _ = rude.get(Bye)
            assert bye.code in ("unexpected", "malformed")
        assert isinstance(publish(other, 1, encode([b"x"])), Confirm)
        assert server.metrics()["core"]["streams"] == 1


@pytest.mark.moderate
def test_a_corrupt_or_truncated_batch_is_refused_and_nothing_of_it_is_stored() -> None:
    good = encode([b"good"])
    flipped = bytearray(good)
    flipped[-9] ^= 1
    with serving(config()) as (_, at, _log):
        for content in (bytes(flipped), good[:-8], b"", b"x" * 200, good + bytes(8)):
            with RawPeer(at) as peer:
                answer = publish(peer, 1, content)
                assert isinstance(answer, Refused | Bye)
                assert answer.code in ("corrupt", "bad_batch", "malformed", "too_large")
        with RawPeer(at) as peer:
            answer = publish(peer, 1, good)
            assert isinstance(answer, Confirm)
            assert answer.offset == 0


def test_an_oversized_batch_costs_the_connection_and_others_notice_nothing() -> None:
    with serving(config()) as (_, at, _log), RawPeer(at) as other:
        with Zmtp(at) as rude:
            rude.socket.sendall(b"\x03" + (2 << 20).to_bytes(8, "big"))
            with contextlib.suppress(ConnectionResetError):
                while rude.socket.recv(65536):
                    pass
        assert isinstance(publish(other, 1, encode([b"x"])), Confirm)


@pytest.mark.moderate
def test_random_bytes_of_every_kind_do_not_stop_the_broker() -> None:
    with serving(config()) as (server, at, _), RawPeer(at) as other:
        for number in range(200):
            with Zmtp(at) as rude, contextlib.suppress(OSError):
                rude.send(os.urandom(number))
                rude.send(*(os.urandom(8) for _ in range(number % 5 + 1)))
                rude.socket.sendall(os.urandom(number))
        assert isinstance(publish(other, 1, encode([b"x"])), Confirm)
        assert server.failure is None
        assert server.metrics()["shell"]["malformed_total"] > 100


@pytest.mark.moderate
def test_a_kicked_client_is_told_and_loses_its_connection() -> None:
    with serving(config()) as (server, at, _), RawPeer(at) as admin, RawPeer(at) as other:
        admin.send(Kick(1, 2, "misbehaving"))
        bye, _ = other.get(Bye)
        assert bye.code == "kicked"
        until(lambda: server.metrics()["shell"].get("cut_total", 0) == 1)
        admin.send(BrokerInfo(2))
        admin.get(Result)


@pytest.mark.moderate
def test_identities_come_from_the_credential_and_permissions_hold() -> None:
    users = {"alice": hash_password("a"), "bob": hash_password("b")}
    wanted = config(
        authentication__mechanism="plain",
        authentication__users=users,
        permissions={"alice": {"read": ["*"], "write": ["*"], "admin": True},
                     "bob": {"read": ["public"]}},
    )  # fmt: skip
    with (
        serving(wanted) as (_, at, log),
        RawPeer(at, plain_username=b"alice", plain_password=b"a") as alice,
        RawPeer(at, plain_username=b"bob", plain_password=b"b") as bob,
    ):
        assert alice.welcome is not None
        assert alice.welcome.identity == "alice"
        assert isinstance(publish(alice, 1, encode([b"x"]), "public"), Confirm)
        answer = publish(bob, 1, encode([b"x"]), "public")
        assert isinstance(answer, Refused)
        assert answer.code == "forbidden"
        bob.send(Subscribe(1, "public", ["all"], [0], 10, 1000))
        bob.get(Subscribed)
        bob.send(Kick(5, 1, ""))
        refused, _ = bob.get(Refused)
        assert refused.code == "forbidden"
        with RawPeer(at, hello=False, plain_username=b"bob", plain_password=b"b") as thief:
            thief.send(Hello((1, 1), os.urandom(16), identity="alice"))
            refused, _ = thief.get(Refused)
            assert refused.code == "forbidden"
        with RawPeer(at, hello=False, plain_username=b"bob", plain_password=b"x") as guess:
            guess.send(Hello((1, 1), os.urandom(16)))
            until(lambda: log.of("denied"))


BY_PASSWORD: dict[str, Any] = {
    "authentication__mechanism": "plain", "authentication__users": {"ann": hash_password("a")}
}  # fmt: skip


def tcp_connection(at: str) -> socket.socket:
    host, _, port = at.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("settings", "mechanism"), [(BY_PASSWORD, b"NULL"), (BY_PASSWORD, b"CURVE"), ({}, b"PLAIN")]
)
def test_a_peer_without_a_credential_or_of_another_kind_is_counted_and_logged_with_its_address(
    settings: dict[str, Any], mechanism: bytes
) -> None:
    with serving(config(**settings)) as (server, at, log), tcp_connection(at) as stranger:
        # A connection that ends before the guard asked for its address has none.
        until(lambda: server.metrics()["connections"])
        stranger.sendall(greeting(mechanism))
        until(lambda: log.of("denied"))
        assert log.of("denied") == [{"address": "127.0.0.1", "why": "mechanism"}]
        facts = server.metrics()["shell"]
        assert (facts["denied_total"], facts["denied_mechanism_total"]) == (1, 1)
        assert "handshake_abandoned_total" not in facts


@pytest.mark.moderate
@pytest.mark.parametrize("settings", [{}, BY_PASSWORD])
def test_a_connection_that_ends_amid_the_handshake_was_not_denied(settings: dict[str, Any]) -> None:
    """Health checks by TCP and port scans were told as clients without a credential."""
    probes = 25  # more than the log has lines of one name
    with serving(config(**settings, links__handshake_ms=200)) as (server, at, log):
        for said in [b"", b"GET / HTTP/1.0\r\n\r\n", *[b""] * (probes - 3)]:
            with tcp_connection(at) as probe:
                probe.sendall(said)
        with tcp_connection(at) as stays:
            stays.settimeout(WAIT_S)
            while stays.recv(64):  # until the broker has waited long enough
                pass
        until(lambda: server.metrics()["shell"].get("disconnected_total", 0) >= probes)
        with tcp_connection(at) as stranger:
            stranger.sendall(greeting(b"CURVE"))
            until(lambda: log.of("denied"))
        facts = server.metrics()["shell"]
        # The line for the one that was denied is written, however many probes came before it.
        assert [told["why"] for told in log.of("denied")] == ["mechanism"]
        assert facts["denied_total"] == 1
        # A listener with authentication ends the one that speaks HTTP, before any handshake.
        assert facts.get("handshake_abandoned_total", 0) == (probes - 1 if settings else 0)
        assert {told["address"] for told in log.of("handshake_abandoned")} <= {
            "127.0.0.1", "unknown"
        }  # fmt: skip
        assert bool(log.of("handshake_abandoned")) is bool(settings)


# --- disks ------------------------------------------------------------------------------------


@pytest.mark.moderate
def test_a_full_disk_refuses_publishes_by_name_and_loses_nothing(tmp_path: Path) -> None:
    troubles = Troubles()
    storage = TroubledStorage(tmp_path, troubles)
    with serving(config(tmp_path), storage=storage) as (_, at, log):
        with RawPeer(at) as peer:
            assert isinstance(publish(peer, 1, encode([b"before"])), Confirm)
            troubles.full = True
            answer = publish(peer, 2, encode([b"during"]))
            assert isinstance(answer, Refused)
            assert answer.code == "disk_full"
            assert answer.retry_ms > 0
            assert "free space" in log.of("append_refused")[0]["reason"]
            troubles.full = False
            assert isinstance(publish(peer, 3, encode([b"after"])), Confirm)
        with connect_sync(at) as client:
            bodies = [r.body for r in client.subscribe("s", start="earliest", until="tail")]
            assert bodies == [b"before", b"after"]


@pytest.mark.moderate
def test_a_failed_sync_is_never_confirmed_and_seals_the_ring_aloud(tmp_path: Path) -> None:
    troubles = Troubles()
    storage = TroubledStorage(tmp_path, troubles)
    with serving(config(tmp_path), storage=storage) as (server, at, log), RawPeer(at) as peer:
        assert isinstance(publish(peer, 1, encode([b"before"])), Confirm)
        troubles.failing_sync = True
        first = publish(peer, 2, encode([b"lost"]))
        assert isinstance(first, Refused)
        assert first.code == "journal_failed"
        troubles.failing_sync = False
        second = publish(peer, 3, encode([b"after"]))
        assert isinstance(second, Refused), "a sync is not tried again"
        assert second.code == "journal_failed"
        assert ("critical", "ring_failed") in [line[:2] for line in log.lines]
        assert server._rings.syncs_due == 0, "no turn waits for it"
    with serving(config(tmp_path)) as (_, at, log), RawPeer(at) as peer:
        answer = publish(peer, 1, encode([b"again"]))
        assert isinstance(answer, Confirm), "a restart goes on"
        assert answer.offset >= 1


@pytest.mark.moderate
def test_damage_in_the_journal_is_reported_by_name_and_the_rest_is_served(tmp_path: Path) -> None:
    wanted = config(tmp_path, memory__hot_bytes=1 << 16)
    body = os.urandom(100_000)
    with serving(wanted) as (_, at, _log), RawPeer(at) as peer:
        for number in range(100):
            assert isinstance(publish(peer, number + 1, encode([body])), Confirm)
    ring = tmp_path / "rings" / "main"
    segments = sorted(path for path in ring.iterdir() if path.stat().st_size == 4 << 20)
    with segments[0].open("r+b") as file:
        file.seek(1 << 20)
        file.write(os.urandom(1000))
    with serving(wanted) as (_, at, _log), connect_sync(at) as client:
        gaps: list[Any] = []
        bodies = [
            r.body
            for r in client.subscribe("s", start="earliest", until="tail", on_notice=gaps.append)
        ]
        assert 95 <= len(bodies) < 100
        assert all(one == body for one in bodies)
        assert any(getattr(gap, "code", "") == "damaged" for gap in gaps)
        client.publish("s", b"and on")


# --- facts ------------------------------------------------------------------------------------


@pytest.mark.moderate
def test_the_broker_tells_about_itself(tmp_path: Path) -> None:
    with serving(config(tmp_path)) as (server, at, _), RawPeer(at) as peer:
        publish(peer, 1, encode([b"x"]))
        peer.send(BrokerInfo(1))
        result, _ = peer.get(Result)
        assert result.value["endpoints"] == [at]
        assert result.value["data"] == str(tmp_path)
        assert result.value["disk"]["main"]["disk_bytes"] >= 4 << 20
        facts = server.metrics()
        assert facts["core"]["links"] == facts["core"]["links_opened"] == 1
        assert facts["shell"]["messages_in_total"] >= 2
        main = facts["disk"]["main"]
        assert 0 < main["synced_lsn"] <= main["end_lsn"] <= main["ring_bytes"]
        assert (main["full"], main["unprepared"]) == ("overwrite", "")
        assert facts["bounds"]["links"] == server.config.links.links_max
        assert facts["refusing"] == {}
        assert facts["blocked_links"] == 0


@pytest.mark.moderate
def test_a_confirm_on_disk_is_in_the_histograms_of_syncs_and_confirms(tmp_path: Path) -> None:
    with serving(config(tmp_path)) as (server, at, _), RawPeer(at) as peer:
        before = server.metrics()["latency"]
        assert isinstance(publish(peer, 1, encode([b"x"])), Confirm)
        after = server.metrics()["latency"]
    for name in ("sync", "confirm"):
        assert sum(after[name]["counts"]) > sum(before[name]["counts"])
        assert after[name]["sum_s"] > before[name]["sum_s"]


def test_syncs_of_rings_in_memory_are_not_measured() -> None:
    with serving(config()) as (server, at, _), RawPeer(at) as peer:
        peer.send(CreateStream(1, "quick", {"memory": True}))
        peer.get(Result)
        before = sum(server.metrics()["latency"]["confirm"]["counts"])
        peer.send(Publish("quick", 1, Level.DEFAULT), frames=(encode([b"x"]),))
        assert peer.get(Confirm)[0].level == Level.NONE
        assert sum(server.metrics()["latency"]["confirm"]["counts"]) == before


def test_an_idle_broker_stops_at_once_and_can_be_started_again() -> None:
    for _ in range(3):
        # A broker that waited would wait longer than a test may take.
        with serving(config(loop__drain_ms=3_600_000)):
            pass


def test_an_error_in_an_answer_of_the_journal_is_told_who_asked_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Lines()
    with (
        Server(config(), log=log) as server,
        RawPeer(server.endpoints[0]) as bystander,
        RawPeer(server.endpoints[0]) as peer,
    ):
        assert isinstance(publish(peer, 1, encode([b"x"])), Confirm)
        with monkeypatch.context() as planted:
            planted.setattr("malamute_py.server.journaling.rings.answer_query", lambda *_: 1 // 0)
            peer.send(FindOffset(1, "s", [3, 0, True]))
            refused, _ = peer.get(Refused)
        assert (refused.reference, refused.code) == (1, "internal")
        peer.send(FindOffset(2, "s", [3, 0, True]))
        found, _ = peer.get(Result)
        assert found.request == 2
        assert isinstance(publish(bystander, 1, encode([b"y"])), Confirm)
    (facts,) = log.of("read_erred")
    assert "ZeroDivisionError" in facts["error"]
    assert "answer_query" in facts["trace"]


def test_a_bug_in_a_thread_ends_every_link_by_name_and_the_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Lines()
    # Outside of the one job that it does, the reader contains nothing.
    monkeypatch.setattr("malamute_py.server.journaling.rings.Rings._take_turn", lambda *_: 1 // 0)
    server = Server(config(), log=log).start()
    with RawPeer(server.endpoints[0]) as bystander, RawPeer(server.endpoints[0]) as peer:
        assert isinstance(publish(peer, 1, encode([b"x"])), Confirm)
        peer.send(FindOffset(1, "s", [3, 0, True]))
        for link in (bystander, peer):
            bye, _ = link.get(Bye)
            assert bye.code == "draining"
        with pytest.raises(ServerFailed):
            server.stop()
    assert [facts["thread"] for facts in log.of("thread_died")] == ["reader"]


@pytest.mark.moderate
def test_a_user_with_too_many_connections_is_told_so_and_others_are_not_concerned() -> None:
    wanted = config(
        authentication__mechanism="plain",
        authentication__users={"alice": hash_password("a"), "bob": hash_password("b")},
        links__user_connections_max=2,
    )
    alice: dict[str, Any] = {"plain_username": b"alice", "plain_password": b"a"}
    with serving(wanted) as (server, at, _):
        with RawPeer(at, **alice), RawPeer(at, **alice):
            with RawPeer(at, hello=False, **alice) as third:
                third.send(Hello((1, 1), os.urandom(16)))
                refused, _ = third.get(Refused)
                assert refused.code == "limit"
                assert "links.user_connections_max" in refused.reason
            with RawPeer(at, plain_username=b"bob", plain_password=b"b") as bob:
                assert bob.welcome is not None
            assert server.metrics()["shell"]["connections_refused_total"] == 1
        until(lambda: server.metrics()["connections"] == 0)
        with RawPeer(at, **alice) as again:
            assert again.welcome is not None


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("asked", "facts"),
    [(True, {"way": "mapped"}), (False, {"way": "pread", "reason": "not asked for"})],
)
def test_the_log_says_once_in_which_way_history_is_read(
    tmp_path: Path, asked: bool, facts: dict[str, str]
) -> None:
    with serving(config(tmp_path, journal__mapped_reads=asked)) as (_, _, log):
        (said,) = log.of("history_reads")
        assert said.items() >= facts.items()
