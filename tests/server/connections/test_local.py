"""Local connections: what they may fill in memory, where the kernel counts no bytes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol.commands import Confirm, Hello, Ping, Publish
from malamute_protocol.encode import encode
from malamute_protocol.framing import encode_message
from malamute_py import connect_sync
from malamute_py.server.connections.connection import Connection
from malamute_py.server.connections.listening import ASIDE, ListeningSockets
from malamute_py.server.connections.local import ANSWER_MS, LocalConnections
from malamute_py.server.connections.memory import Memory
from tests.server.daemon import Daemon
from tests.server.peer import RawPeer
from tests.server.zmtp import MORE, Zmtp, frame
from tests.waiting import WAIT_S

MIB = 1 << 20
SHARE = 256 * MIB


class Looks:
    """Local connections that are looked at; the test says how memory grows."""

    def __init__(self) -> None:
        self.memory = Memory(lambda name: None, lambda name, facts: None)
        self.memory.rss = self.memory.before = 0
        self.local = LocalConnections(self.memory, SHARE)
        self.now_ms = 0

    def connection(self, address: str = "local user 1") -> Connection:
        return Connection(0, 0, False, address, self.now_ms, self.memory.rss)

    def grows(self, size: int) -> None:
        self.memory.rss += size

    def look(
        self, connection: Connection, *, said: bool = False, drained: bool = True,
        explained: int = 0,
    ) -> str | None:  # fmt: skip
        self.now_ms += 10
        self.local.begin(waits=not drained)
        return self.local.judge(connection, said, explained, self.now_ms, drained)


@pytest.fixture
def looks() -> Iterator[Looks]:
    made = Looks()
    yield made
    made.memory.close()


def test_a_peer_that_says_nothing_while_memory_grows_is_asked_and_then_cut(looks: Looks) -> None:
    silent, answers = looks.connection(), looks.connection()
    looks.grows(SHARE // 2)
    assert looks.look(silent) is looks.look(answers) is None
    assert looks.local.doubted == []
    looks.grows(1)
    assert looks.look(silent) is looks.look(answers) is None
    assert looks.local.doubted == [silent, answers]
    assert looks.look(answers, said=True) is None
    looks.now_ms += ANSWER_MS
    assert looks.look(answers) is None
    assert looks.look(silent, drained=False) is None, "its answer may wait"
    assert "says nothing" in str(looks.look(silent))
    assert looks.local.doubted == [silent, answers], "each was asked once"


@pytest.mark.parametrize("why", ["explained", "given back", "little"])
def test_growth_that_is_not_of_the_message_costs_no_connection(looks: Looks, why: str) -> None:
    silent = looks.connection()
    looks.grows(SHARE)
    explained = SHARE if why == "explained" else 0
    looks.look(silent, explained=explained)
    if why != "explained":
        looks.grows(-SHARE if why == "given back" else -SHARE // 2)
    looks.now_ms += ANSWER_MS
    assert looks.look(silent, explained=explained) is None


def test_the_connection_is_cut_of_which_most_is_taken_up_while_local_messages_wait(
    looks: Looks,
) -> None:
    floods, honest, other = looks.connection(), looks.connection(), looks.connection("user 2")
    every = [honest, floods, other]
    honest.frames = 1 << 30
    looks.look(honest)
    for connection in every:
        looks.look(connection, drained=False)
    for connection, frames in ((honest, 10), (floods, 1_000), (other, 100)):
        connection.frames += frames
    looks.grows(SHARE)
    assert looks.local.flood(every, 0) is None
    looks.grows(1)
    assert looks.local.flood(every, 1) is None, "others explain it"
    cut = looks.local.flood(every, 0)
    assert cut is not None
    assert cut[0] is floods
    assert floods.memory == SHARE + 1, "which counts as left behind"


def test_connections_that_flood_one_after_the_other_come_to_two_shares(looks: Looks) -> None:
    every = [looks.connection() for _ in range(50)]
    for connection in every:
        looks.look(connection, drained=False)
    while len(every) > 40:
        for connection in every:
            connection.frames += 1
        looks.grows(MIB)
        cut = looks.local.flood(every, 0)
        if cut is not None:
            every.remove(cut[0])
    assert looks.memory.rss <= 2 * SHARE + 8 * 9 * MIB
    looks.look(every[0])
    assert looks.local.flood(every, 0) is None, "nothing waits"


def test_what_an_ended_connection_had_begun_to_send_is_given_back(looks: Looks) -> None:
    gone = looks.connection()
    looks.grows(100 * MIB)
    looks.memory.before = looks.memory.rss  # Nothing was seen to be unread.
    looks.local.ended(gone)
    assert looks.memory.has_filled
    assert looks.memory.grown() == 100 * MIB


# --- the socket's file ---------------------------------------------------------------------


def test_no_local_peer_finds_the_socket_while_local_peers_are_kept_out(tmp_path: Path) -> None:
    told: list[tuple[str, dict[str, object]]] = []
    listening = ListeningSockets(lambda name: None, lambda name, facts: told.append((name, facts)))
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        listening.add(server.fileno())

        def found() -> bool:
            with socket.socket(socket.AF_UNIX) as peer:
                return peer.connect_ex(str(path)) == 0

        listening.keep_out({"127.0.0.1"})
        assert found(), "its address has nothing to do with local peers"
        listening.keep_out({"local user 0"})
        assert not found()
        assert ("address_turned_away", {"peer": "local users"}) in told
        listening.keep_out({"local user 0"}, everybody=True)
        listening.open()  # The watchdog does so at the end of a long turn.
        assert not found()
        listening.keep_out(set())
        assert found()
        listening.keep_out(set(), everybody=True)
        assert not found()
        path.write_text("another's")
        listening.close()
        assert path.read_text() == "another's"
        path.unlink()
        listening.close()
        assert found()


def test_peers_over_tcp_are_still_turned_away_after_local_ones_were_kept_out(
    tmp_path: Path,
) -> None:
    """A socket has no filter to give up then: that was taken for a kernel without filters."""
    told: list[str] = []
    listening = ListeningSockets(lambda name: None, lambda name, facts: told.append(name))
    with (
        socket.socket(socket.AF_UNIX) as local,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        local.bind(str(tmp_path / "socket"))
        local.listen()
        for each in (local, server):
            listening.add(each.fileno())
        listening.keep_out({"local user 0"})
        listening.keep_out(set())
        assert told == ["address_turned_away"]
        assert listening._fds == [server.fileno()]


# --- at a broker ---------------------------------------------------------------------------


def hello() -> bytes:
    return frame(encode_message([Hello((1, 1), os.urandom(16))])[0])


class Flood:
    """Peers of a broker over ipc that send the same again and again, and come again when cut."""

    def __init__(
        self, endpoint: str, data: bytes, peers: int, pace_s: float, until: Callable[[], bool]
    ) -> None:
        self.cuts = 0
        self._endpoint, self._data, self._pace_s = endpoint, data, pace_s
        self._until = until
        self.threads = [threading.Thread(target=self._run) for _ in range(peers)]
        for thread in self.threads:
            thread.start()

    def _run(self) -> None:
        while not self._until():
            with contextlib.suppress(OSError), Zmtp(self._endpoint) as peer:
                peer.socket.sendall(hello())
                with contextlib.suppress(OSError):
                    peer.receive_frame()
                    while not self._until():
                        peer.socket.sendall(self._data)
                        time.sleep(self._pace_s)
                self.cuts += 1
            time.sleep(0.001)


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tiny messages", "the beginning of a message"])
def test_floods_over_ipc_have_a_bound_and_memory_comes_back(tmp_path: Path, kind: str) -> None:
    """Tiny messages of two peers took 2.7 GiB in 6 s, eight beginnings 740 MiB in 6."""
    path = tmp_path / "socket"
    mask = os.umask(0o077)
    try:
        daemon = Daemon(tmp_path / "data", listen=f'["ipc://{path}"]')
    finally:
        os.umask(mask)
    with (
        daemon,
        RawPeer(daemon.endpoint) as canary,
        connect_sync(daemon.endpoint, heartbeat_ms=60_000) as idle,
    ):
        idle.publish("canary", b"x")
        publish(canary, 1)
        before = peak = daemon.resident_bytes()
        ends = time.monotonic() + (6 if kind == "tiny messages" else 10)
        if kind == "tiny messages":
            data, peers, pace_s = frame(encode_message([Ping(1)])[0]) * 4_000, 2, 0.0
        else:
            data, peers, pace_s = frame(bytes(64 << 10), MORE), 8, 0.002
        flood = Flood(daemon.endpoint, data, peers, pace_s, lambda: time.monotonic() > ends)
        tracker = 1
        while any(thread.is_alive() for thread in flood.threads):
            peak = max(peak, daemon.resident_bytes())
            tracker += 1
            publish(canary, tracker)
        assert daemon.process.poll() is None, daemon.text
        assert peak - before <= 640 * MIB
        assert flood.cuts
        # The file may be away while what ended connections left is dropped.
        until = time.monotonic() + 30 + WAIT_S
        while daemon.resident_bytes() > before + 100 * MIB or not path.exists():
            assert time.monotonic() < until, (daemon.resident_bytes() - before, path.exists())
            time.sleep(0.1)
            # A peer that answers nothing for its heartbeat would be taken for dead.
            tracker += 1
            publish(canary, tracker)
        with RawPeer(daemon.endpoint) as newcomer:
            publish(newcomer, 1)
        publish(canary, tracker + 1)
        idle.publish("canary", b"x")
        assert idle.reconnects == 0, "a client that says nothing answers when it is asked"
        assert daemon.terminate() == 0
    assert not (tmp_path / f"socket{ASIDE}").exists()


def publish(peer: Any, tracker: int) -> None:
    """Publish a record and answer what the broker asks until it is confirmed."""
    peer.send(Publish("canary", tracker), frames=(encode([b"x"]),))
    assert peer.get(Confirm)[0].tracker == tracker
