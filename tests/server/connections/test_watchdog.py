"""Floods while the loop stands still: the kernel holds them back, and nothing is cut or lost."""

from __future__ import annotations

import array
import fcntl
import socket
import termios
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

import pytest

from malamute_protocol.commands import Publish
from malamute_protocol.framing import encode_message
from malamute_py.config import Config
from malamute_py.server.connections.socket_filters import hold_back, let_go, shut, turn_away
from tests.server.fakes import RunningLoop
from tests.server.zmtp import Zmtp, frame
from tests.waiting import WAIT_S

LOCAL = Config(listen=["tcp://127.0.0.1:0"])
MIB = 1 << 20


def message(content: bytes) -> bytes:
    """Return a PUBLISH as it is on the wire."""
    head, body = encode_message([Publish("s", 1)], [content])
    return frame(bytes(head), 1) + frame(bytes(body))


@pytest.fixture(scope="module", autouse=True)
def _filters() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            shut(server)
        except OSError as error:
            pytest.skip(f"this kernel has no filters of sockets: {error}")


class Standing(RunningLoop):
    """A loop whose core stands still in its first message, until it may go on."""

    def __init__(self) -> None:
        super().__init__(LOCAL)
        self.watchdog._grown_bytes = 8 * MIB
        self.stands, self.may_go_on = threading.Event(), threading.Event()
        self.taken: list[int] = []
        """Sizes of the contents that the core was given."""
        self.core.receive = self._receive  # type: ignore[method-assign]

    def _receive(self, link: int, identity: str, commands: Any, frames: Any, now_ms: int) -> None:
        self.stands.set()
        assert self.may_go_on.wait(WAIT_S)
        self.taken += map(len, frames)

    def go_on(self) -> None:
        """Let the loop go on. What memory has grown by stays: a loaded machine's turns are long."""
        self.watchdog._grown_bytes = 1 << 40
        self.may_go_on.set()

    def __exit__(self, *args: Any) -> None:
        self.may_go_on.set()
        super().__exit__(*args)


class Flood:
    """A peer that sends messages of 1 MiB, as fast as they are taken, until it is told to end."""

    def __init__(self, endpoint: str) -> None:
        self._peer = Zmtp(endpoint)
        self.sent = 0
        """Bytes that its kernel has taken."""
        self.messages = 0
        """Messages of which its kernel has taken all."""
        self.error: OSError | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        data = memoryview(message(bytes(MIB)))
        try:
            while not self._stopping:
                rest = data
                while rest:
                    count = self._peer.socket.send(rest)
                    rest = rest[count:]
                    self.sent += count
                self.messages += 1
        except OSError as error:
            self.error = error

    def is_held(self) -> bool:
        """Return whether no more bytes of this peer are taken for a while."""
        before = self.sent
        time.sleep(0.25)
        return self.sent == before

    def finish(self) -> int:
        """Send the message under way to its end; returns how many were sent."""
        self._stopping = True
        self._thread.join()
        return self.messages

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        self._peer.close()


@pytest.fixture
def standing() -> Iterator[Standing]:
    with Standing() as running:
        yield running


@pytest.mark.moderate
def test_a_flood_is_held_back_while_a_turn_stands_still_and_nothing_of_it_is_lost(
    standing: Standing,
) -> None:
    with Flood(standing.endpoint) as flood:
        assert standing.stands.wait(WAIT_S)
        standing.until(lambda: standing.watchdog.holds and flood.is_held())
        held_at = flood.sent
        standing.go_on()
        standing.until(lambda: flood.sent > held_at + 8 * MIB)
        sent = flood.finish()
        standing.until(lambda: len(standing.taken) == sent)
    assert flood.error is None
    assert standing.taken == [MIB] * sent
    assert standing.counters["connections_held_total"] >= 1
    assert standing.log.of("connections_held")[0]["connections"] >= 1
    assert standing.counters["cut_total"] == 0


@pytest.mark.moderate
def test_who_has_little_unread_is_not_held_back(standing: Standing) -> None:
    with Zmtp(standing.endpoint) as neighbour, Flood(standing.endpoint) as flood:
        standing.until(lambda: len(standing.guard.connections) == 2 or standing.stands.is_set())
        assert standing.stands.wait(WAIT_S)
        standing.until(lambda: standing.watchdog.holds and flood.is_held())
        # Its kernel has these bytes acknowledged at once: none of them is dropped.
        neighbour.socket.sendall(message(b"small"))
        unsent = 1
        deadline = time.monotonic() + WAIT_S
        while unsent:
            assert time.monotonic() < deadline, "what a neighbour sends is dropped"
            unsent = unacknowledged(neighbour.socket)
        standing.go_on()
        standing.until(lambda: 5 in standing.taken)


def unacknowledged(peer: socket.socket) -> int:
    """Bytes that a peer's kernel has sent, or is to send, and that were not acknowledged."""
    count = array.array("i", [0])
    fcntl.ioctl(peer, termios.TIOCOUTQ, count)
    return count[0]


@pytest.mark.moderate
def test_connections_that_come_meanwhile_wait_until_the_turn_has_ended(
    standing: Standing,
) -> None:
    with Flood(standing.endpoint) as flood:
        assert standing.stands.wait(WAIT_S)
        standing.until(lambda: standing.watchdog.holds and flood.is_held())
        host, _, port = standing.endpoint.removeprefix("tcp://").rpartition(":")
        with socket.socket() as late:
            late.settimeout(0.2)
            with pytest.raises(TimeoutError):
                late.connect((host, int(port)))
        standing.go_on()
        flood.finish()
    with Zmtp(standing.endpoint) as later:
        later.socket.sendall(message(b"later"))
        standing.until(lambda: 5 in standing.taken)


@pytest.mark.moderate
def test_who_floods_by_a_connection_that_the_loop_has_not_seen_yet_is_held_back(
    standing: Standing,
) -> None:
    with Zmtp(standing.endpoint) as first:
        # Memory may have grown for another reason, and the flood is to get in.
        standing.watchdog._grown_bytes = 1 << 40
        first.socket.sendall(message(b"first"))
        assert standing.stands.wait(WAIT_S)
        # Accepted by libzmq while the loop stands still.
        with Flood(standing.endpoint) as flood:
            standing.watchdog._grown_bytes = 8 * MIB
            standing.until(lambda: standing.watchdog.holds and flood.is_held())
            standing.go_on()
            sent = flood.finish()
            standing.until(lambda: len(standing.taken) == sent + 1)
    assert flood.error is None


@pytest.mark.moderate
def test_a_long_turn_that_fills_no_memory_holds_nobody_back(standing: Standing) -> None:
    standing.watchdog._grown_bytes = 512 * MIB
    with Zmtp(standing.endpoint) as peer:
        peer.socket.sendall(message(b"first"))
        assert standing.stands.wait(WAIT_S)
        time.sleep(0.3)
        assert not standing.watchdog.holds
        standing.go_on()
        standing.until(lambda: standing.taken == [5])
    assert standing.counters["connections_held_total"] == 0


def test_a_turn_that_ended_before_it_was_looked_at_holds_nobody_back(standing: Standing) -> None:
    standing.watchdog.stop()  # Its own thread might look at the turn that lasts.
    standing.watchdog._grown_bytes = -1
    standing.watchdog.look(standing.watchdog.turn - 1)
    assert not standing.watchdog.holds


@pytest.mark.moderate
def test_a_held_connection_gets_what_was_sent_meanwhile_once_it_is_let_go() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as peer,
    ):
        taken, _ = server.accept()
        with taken:
            taken.settimeout(0.3)
            hold_back(taken)
            peer.sendall(b"later")
            with pytest.raises(TimeoutError):
                taken.recv(5)
            let_go(taken)
            taken.settimeout(WAIT_S)
            assert taken.recv(5) == b"later"


def test_no_connection_is_born_held_back() -> None:
    """An accepted connection has the filter of its listening socket, which drops requests only."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        shut(server)
        turn_away(server, [])
        with socket.create_connection(server.getsockname(), WAIT_S) as peer:
            shut(server)
            taken, _ = server.accept()
            with taken:
                taken.settimeout(WAIT_S)
                peer.sendall(b"now")
                assert taken.recv(3) == b"now"
