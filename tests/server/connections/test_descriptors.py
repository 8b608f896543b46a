"""Descriptors: what a broker does that has few left."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from malamute_protocol.commands import BrokerInfo, Confirm, Publish, Result
from malamute_protocol.encode import encode
from malamute_py.config import Config
from malamute_py.server.connections import guard as guard_module
from malamute_py.server.connections.descriptors import Room, lowest_free, room
from malamute_py.server.connections.guard import Guard
from malamute_py.server.connections.numbering import Numbering
from tests.server import daemon as daemon_module
from tests.server.daemon import Daemon
from tests.server.peer import RawPeer
from tests.server.zmtp import Zmtp
from tests.waiting import WAIT_MS, WAIT_S

FILES = 700


def test_the_lowest_free_descriptor_tells_how_many_are_used() -> None:
    free = lowest_free()
    with open(os.devnull, "rb") as file:
        assert file.fileno() == free
        assert lowest_free() > free
    assert lowest_free() == free


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("files", [192, 256, FILES, 1_024, 20_000, 1 << 20])
def test_what_is_told_of_connections_fits_below_where_nobody_may_connect(
    files: int, local: bool
) -> None:
    own = 40
    bounds = room(files, own, local=local)
    assert bounds.connections >= 16
    assert own + bounds.connections <= bounds.shut_from
    if not local:
        assert own + bounds.surplus_from + 16 <= bounds.shut_from
    assert bounds.shut_from >= own + 16
    if files >= FILES:
        assert bounds.shut_from <= (files // 2 if local else files - files // 16)


def test_a_closed_descriptor_0_is_a_free_one() -> None:
    """The closed descriptor counted as none being free, and no peer could connect."""
    kept = os.dup(0)
    os.close(0)
    try:
        assert lowest_free() == 0
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_nobody_may_connect_while_few_descriptors_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    guard = Guard(
        Config(), Room(100, 100, FILES - 200), count=lambda name: None,
        report=lambda name, facts: told.append(name),
    )  # fmt: skip
    left = 200
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.PAIR) as monitor:
        for free, is_full in ((FILES - left - 1, False), (FILES - left, True)):
            monkeypatch.setattr(guard_module, "lowest_free", lambda free=free: free)
            guard.drain(monitor, 0, 1, authenticated=False)
            assert guard.listening.is_full is is_full
    assert told == ["descriptors_short"]
    for free, is_full in ((FILES - left, True), (FILES - left - 1, False)):
        monkeypatch.setattr(guard_module, "lowest_free", lambda free=free: free)
        guard.check(0, drained=True)
        assert guard.listening.is_full is is_full
    guard.close()


def test_the_next_routing_id_is_asked_for_later_where_no_descriptor_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error ended the broker, by a peer that connected often enough."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    numbering = Numbering(context, router)

    def none_left(kind: int) -> Any:
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as patched:
        patched.setattr(context, "socket", none_left)
        numbering.ask(100)
    numbering.ask(105)
    assert numbering._asked is None, "too early"
    numbering.ask(200)
    _, *frames = router.recv_multipart()
    assert numbering.answers(frames)
    numbering.close()
    router.close(0)
    context.term()


@pytest.mark.system
@pytest.mark.parametrize("files", [192, 256])
def test_a_broker_of_few_descriptors_cuts_surplus_connections_and_shuts_nobody_out(
    tmp_path: Path, files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker of so few kept all clients out from the start."""
    with _daemon(tmp_path, files, monkeypatch, local=False) as daemon:
        bounded = daemon.wait_for("connections_bounded")
        assert (bounded["connections"], bounded["backlog"]) == (16, 32)
        assert "ulimit -n" in bounded["do"]
        with contextlib.ExitStack() as stack:
            peers = [stack.enter_context(RawPeer(daemon.endpoint)) for _ in range(16)]
            with pytest.raises(ConnectionError), Zmtp(daemon.endpoint) as surplus:
                surplus.receive_exactly(1)
            peers[0].send(Publish("s", 1), frames=(encode([b"x"]),))
            assert peers[0].get(Confirm)[0].tracker == 1
            peers[0].send(BrokerInfo(2))
            told = peers[0].get(Result)[0].value
            assert told["shell"]["connections_refused_total"] >= 1
        port = int(daemon.endpoint.rpartition(":")[2])
        made = [socket.create_connection(("127.0.0.1", port), WAIT_S) for _ in range(20)]
        assert "16 connections already" in daemon.wait_for("connection_cut")["reason"]
        for peer in made:
            peer.close()
        with RawPeer(daemon.endpoint) as newcomer:
            assert newcomer.welcome is not None
        assert daemon.terminate() == 0
        assert "descriptors_short" not in daemon.text


def _daemon(tmp_path: Path, files: int, monkeypatch: pytest.MonkeyPatch, *, local: bool) -> Daemon:
    """Start a broker of so many descriptors; local: it listens over ipc, too."""
    limit = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))\n"
    monkeypatch.setattr(daemon_module, "PROGRAM", limit + daemon_module.PROGRAM)
    listen = '"tcp://127.0.0.1:0"' + f', "ipc://{tmp_path / "socket"}"' * local
    mask = os.umask(0o077)
    try:
        return Daemon(tmp_path / "data", listen=f"[{listen}]")
    finally:
        os.umask(mask)


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_peers_that_connect_without_end_leave_the_broker_its_descriptors(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over tcp a socket of the broker's own could not be made, over ipc libzmq aborted."""
    path = tmp_path / "socket"
    with (
        _daemon(tmp_path, FILES, monkeypatch, local=True) as daemon,
        RawPeer(daemon.endpoint) as canary,
    ):
        port = int(daemon.endpoint.rpartition(":")[2])
        ends = time.monotonic() + 4
        made: list[socket.socket] = []

        def connect() -> None:
            while time.monotonic() < ends:
                peer = socket.socket(socket.AF_UNIX if transport == "ipc" else socket.AF_INET)
                peer.settimeout(0.5)
                try:
                    peer.connect(str(path) if transport == "ipc" else ("127.0.0.1", port))
                except OSError:
                    peer.close()
                    time.sleep(0.001)
                else:
                    made.append(peer)
                    if len(made) > FILES + 200:
                        with contextlib.suppress(IndexError):
                            made.pop(0).close()

        threads = [threading.Thread(target=connect) for _ in range(2)]
        for thread in threads:
            thread.start()
        most = tracker = 0
        while any(thread.is_alive() for thread in threads):
            most = max(most, len(os.listdir(f"/proc/{daemon.process.pid}/fd")))
            tracker += 1
            canary.send(Publish("canary", tracker), frames=(encode([b"x"]),))
            assert canary.get(Confirm)[0].tracker == tracker
        for peer in made:
            peer.close()
        assert daemon.process.poll() is None, daemon.text
        assert most < FILES
        with RawPeer(daemon.endpoint) as newcomer:
            assert newcomer.welcome is not None
        assert daemon.terminate() == 0


def test_a_connection_is_cut_where_no_descriptor_is_left_for_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was forgotten, and stayed open: no later look found it."""

    def none_left(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    left, right = socket.socketpair()
    guard = Guard(Config(), count=lambda name: None, report=lambda name, facts: None)
    with left, right:
        guard._accepted(right.fileno(), 0)
        connection = guard.connections.get(right.fileno())
        assert connection is not None
        monkeypatch.setattr(os, "dup", none_left)
        guard.cut(connection, "its link ended")
        assert left.recv(1) == b""
        assert os.fstat(right.fileno()).st_ino == connection.inode, "libzmq closes its own"
    guard.close()
