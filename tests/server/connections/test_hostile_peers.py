"""Attacks by a peer that only needs to connect: the daemon lives, and others are served.

Each attack runs against a daemon in a process of its own, beside a canary: a client whose records
are confirmed before, amid and after. Source: ARCHITECTURE.md, "What a peer may cost".
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from malamute_protocol.commands import BrokerInfo, Confirm, Hello, Ping, Publish, Result
from malamute_protocol.encode import encode
from malamute_protocol.framing import encode_message
from malamute_py.server.authentication.credentials import hash_password
from tests.server.daemon import Daemon
from tests.server.peer import RawPeer
from tests.server.zmtp import COMMAND, LONG, MORE, Zmtp, frame
from tests.waiting import WAIT_S

pytestmark = pytest.mark.system

RESET = struct.pack("ii", 1, 0)


def hello() -> bytes:
    return frame(encode_message([Hello((1, 1), os.urandom(16))])[0])


def reset(peer: Zmtp) -> None:
    """Close so that the other end is told of a reset: RST, not FIN."""
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    peer.close()


class Canary(RawPeer):
    """An honest client beside the attackers; it fails soon when the daemon is gone."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon.endpoint)
        self._daemon = daemon
        self._tracker = 0

    def publish(self) -> None:
        """Publish a record, which is confirmed as synced."""
        self._tracker += 1
        self.send(Publish("canary", self._tracker), frames=(encode([b"x"]),))
        assert self.get(Confirm)[0].tracker == self._tracker

    def facts(self) -> dict[str, Any]:
        self.send(BrokerInfo(1))
        return self.get(Result)[0].value

    def count(self, name: str) -> int:
        return int(self.facts()["shell"].get(name, 0))

    def until(self, name: str, least: int) -> None:
        """Wait for a counter."""
        deadline = time.monotonic() + WAIT_S
        while self.count(name) < least:
            assert time.monotonic() < deadline, self.facts()["shell"]
            time.sleep(0.01)


@contextlib.contextmanager
def canary(daemon: Daemon) -> Iterator[Canary]:
    """Check that a client's record is confirmed before and after the block."""
    with Canary(daemon) as peer:
        peer.publish()
        yield peer
        assert daemon.process.poll() is None, daemon.text
        peer.publish()


# --- libzmq's own assertions -----------------------------------------------------------


def test_the_daemon_survives_a_reset_behind_a_full_queue(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, canary(daemon) as client:
        slow = frame(encode_message([Ping(n) for n in range(4_000)])[0]) * 3
        few = frame(encode_message([Ping(1)])[0]) * 16
        ping = frame(b"\x04PING\x00\x0a", COMMAND)
        for _ in range(20):
            peer = Zmtp(daemon.endpoint)
            peer.socket.settimeout(0.5)
            with contextlib.suppress(OSError):
                # Many messages while the loop is at the first ones, ZMTP's PING among them.
                peer.socket.sendall(hello() + slow + (few + ping) * 400)
            reset(peer)
            client.publish()


UNSEEDED = """
import zmq
context = zmq.Context()
for number in range(8):
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.bind(f"inproc://{number}")
    dealer.connect(f"inproc://{number}")
    dealer.send(b"")
    print(router.recv().hex())
"""


def test_routing_ids_that_libzmq_would_give_next_cannot_be_claimed(tmp_path: Path) -> None:
    """Without a seed, each process of libzmq draws the same numbers in the same order."""
    guesses = subprocess.run(
        [sys.executable, "-c", UNSEEDED], check=True, capture_output=True, text=True
    ).stdout.split()
    with Daemon(tmp_path) as daemon, canary(daemon), contextlib.ExitStack() as stack:
        for guess in guesses:
            first = int.from_bytes(bytes.fromhex(guess)[1:], "big")
            for number in range(first, first + 25):
                claimed = b"\0" + (number & 0xFFFFFFFF).to_bytes(4, "big")
                stack.enter_context(Zmtp(daemon.endpoint, identity=claimed))
        for _ in range(20):
            with Canary(daemon) as anonymous:
                anonymous.publish()


# --- bytes ------------------------------------------------------------------------------

BOUNDS = {
    "links__window_bytes": 1 << 20,
    "limits__batch_bytes_max": 4 << 20,
    "limits__record_bytes_max": 4 << 20,
    "limits__partial_message_bytes_max": 8 << 20,
    "limits__unread_share_bytes_max": 32 << 20,
    "limits__unread_bytes_max": 48 << 20,
}


def test_partial_messages_of_many_connections_have_a_bound_together(tmp_path: Path) -> None:
    with Daemon(tmp_path, **BOUNDS) as daemon, canary(daemon) as client:
        before = daemon.resident_bytes()
        part = bytes((LONG | MORE,)) + struct.pack(">Q", 2 << 20) + bytes(2 << 20)
        peak = before
        with contextlib.ExitStack() as stack:
            peers = [stack.enter_context(Zmtp(daemon.endpoint)) for _ in range(40)]
            for number, peer in enumerate(peers):
                peer.socket.sendall(hello())
                peer.receive_frame()
                with contextlib.suppress(OSError):
                    peer.socket.sendall(part * 2)
                peak = max(peak, daemon.resident_bytes())
                if number % 10 == 0:
                    client.publish()
            client.until("cut_total", 25)
            cut = client.count("cut_total")
            # 40 of 4 MiB each; connections for which there was room are still there.
            assert cut <= 35
            # Bytes that came since the guard's last look may be above the bound until the next.
            deadline = time.monotonic() + WAIT_S
            while client.facts()["unread_bytes"] > BOUNDS["limits__unread_share_bytes_max"]:
                assert time.monotonic() < deadline, "the share is above its bound for good"
        print(f"{cut} of 40 cut, RSS +{(peak - before) >> 20} MiB")
        assert peak - before < 160 << 20
        assert "its share" in daemon.wait_for("connection_cut")["reason"]


def test_a_flood_of_tiny_messages_is_cut_and_memory_comes_back(tmp_path: Path) -> None:
    with Daemon(tmp_path, **BOUNDS) as daemon, canary(daemon) as client:
        before = peak = daemon.resident_bytes()
        burst = frame(encode_message([Ping(1)])[0]) * 50_000
        with Zmtp(daemon.endpoint) as flooder:
            flooder.socket.sendall(hello())
            flooder.receive_frame()
            deadline = time.monotonic() + WAIT_S
            with contextlib.suppress(OSError):
                while time.monotonic() < deadline:
                    flooder.socket.sendall(burst)
                    peak = max(peak, daemon.resident_bytes())
            assert time.monotonic() < deadline, "it was not cut"
            client.publish()
        peak = max(peak, daemon.resident_bytes())
        print(f"RSS {before >> 20} MiB, at most {peak >> 20} MiB")
        assert peak - before < 320 << 20


def test_a_peer_that_vanishes_amid_a_message_is_cut_and_its_memory_is_free(tmp_path: Path) -> None:
    """Neither a FIN nor a RST comes from a machine that lost its power."""
    with Daemon(tmp_path) as daemon, canary(daemon) as client:
        greeting = Hello((1, 1), os.urandom(16), heartbeat_ms=50)
        part = bytes((LONG | MORE,)) + struct.pack(">Q", 8 << 20) + bytes(4 << 20)
        with Zmtp(daemon.endpoint) as vanished:
            vanished.send(*encode_message([greeting]))
            vanished.receive_frame()
            vanished.socket.sendall(part)
            client.until("cut_total", 1)
            facts = client.facts()
            assert facts["connections"] == 1
            assert facts["unread_bytes"] == 0
        assert "its link ended" in daemon.wait_for("connection_cut")["reason"]


def test_too_many_connections_of_one_kind_are_cut_and_counted(tmp_path: Path) -> None:
    bounds = {
        "links__connections_max": 40,
        "links__greetings_max": 10,
        "links__address_greetings_max": 8,
        "links__greeting_ms": 0,
    }
    with Daemon(tmp_path, **bounds) as daemon, canary(daemon) as client:
        with contextlib.ExitStack() as stack:
            for _ in range(30):
                stack.enter_context(Zmtp(daemon.endpoint))
            client.until("connections_refused_total", 22)
            assert client.facts()["silent_connections"] <= 8
            with Canary(daemon) as newcomer:
                newcomer.publish()
        with contextlib.ExitStack() as stack:
            for _ in range(39):
                stack.enter_context(Canary(daemon)).publish()
            refused = client.count("connections_refused_total")
            with pytest.raises(ConnectionError), Zmtp(daemon.endpoint) as surplus:
                surplus.receive_exactly(1)
            client.until("connections_refused_total", refused + 1)
            assert client.facts()["connections"] == 40
            client.publish()


# --- commands and passwords -------------------------------------------------------------


def test_peers_with_thousands_of_commands_a_message_starve_nobody(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, canary(daemon) as client, contextlib.ExitStack() as stack:
        before = daemon.resident_bytes()
        message = frame(encode_message([Ping(number) for number in range(4_000)])[0])
        peers = [stack.enter_context(Zmtp(daemon.endpoint)) for _ in range(10)]
        for peer in peers:
            peer.socket.sendall(hello())
            peer.receive_frame()
        # 1,000,000 commands whose answers no peer reads.
        for _ in range(25):
            for peer in peers:
                peer.socket.sendall(message)
            client.publish()
        said = sum(len(message) for _ in range(25) for _ in peers)
        for _ in range(20):
            client.publish()
        # All of them came, and not all were done before the messages after them.
        assert client.facts()["shell"]["bytes_in_total"] > 0
        print(f"{said >> 20} MiB of commands, RSS +{(daemon.resident_bytes() - before) >> 20} MiB")
        assert daemon.resident_bytes() - before < 256 << 20


def _shell_until(peer: RawPeer, counter: str) -> dict[str, Any]:
    """Return the counters of the broker's shell once `counter` is among them.

    A pause is logged when it begins; an attempt is refused for it only when the next one comes.
    """
    until = time.monotonic() + WAIT_S
    number = 0
    while True:
        number += 1
        peer.send(BrokerInfo(number))
        shell: dict[str, Any] = peer.get(Result)[0].value["shell"]
        if counter in shell:
            return shell
        assert time.monotonic() < until, f"{counter} is not among {sorted(shell)}"
        time.sleep(0.05)


def test_a_flood_of_guesses_keeps_no_user_out(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.touch(0o640)
    users.write_text(f"alice {hash_password('a')}\nbob {hash_password('b')}\n")
    settings = {"authentication__mechanism": "plain", "authentication__users_file": users}
    guesser = zmq.Context()
    with Daemon(tmp_path / "data", **settings) as daemon:
        before = daemon.resident_bytes()
        sockets = []
        for number in range(200):
            socket_ = guesser.socket(zmq.DEALER)
            socket_.setsockopt(zmq.LINGER, 0)
            socket_.setsockopt(zmq.RECONNECT_IVL, 20)
            socket_.plain_username = b"alice" if number % 2 else b"nobody"
            socket_.plain_password = b"guess %d" % number
            socket_.connect(daemon.endpoint)
            sockets.append(socket_)
        daemon.wait_for("password_pause")
        with RawPeer(
            daemon.endpoint, plain_username=b"bob", plain_password=b"b", reconnect_ivl=20
        ) as bob:
            assert bob.welcome is not None
            assert bob.welcome.identity == "bob"
            shell = _shell_until(bob, "denied_paused_total")
            # Each of the two names has its few, not each of the 200 sockets.
            assert shell["denied_credential_total"] < 100
        assert daemon.resident_bytes() - before < 128 << 20
        for socket_ in sockets:
            socket_.close(0)
    guesser.term()
