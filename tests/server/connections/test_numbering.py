"""Routing ids of libzmq's own: they begin anywhere, and a peer that claims the next is found."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
import zmq

from malamute_protocol.commands import Ping
from malamute_protocol.framing import encode_message
from malamute_py.config import Config
from malamute_py.server.connections.numbering import Numbering
from tests.server.fakes import RunningLoop
from tests.server.zmtp import Zmtp
from tests.waiting import WAIT_MS

LOCAL = Config(listen=["tcp://127.0.0.1:0"])


@pytest.fixture
def router() -> Iterator[tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    socket.setsockopt(zmq.LINGER, 0)
    yield context, socket
    context.destroy(linger=0)


def next_number(numbering: Numbering, socket: zmq.Socket[bytes], now_ms: int) -> bytes:
    """Return what the socket tells about the next number."""
    numbering.ask(now_ms)
    routing_id, *frames = socket.recv_multipart()
    assert numbering.answers(frames)
    return routing_id


def test_two_sockets_begin_their_numbers_at_different_places() -> None:
    firsts = set()
    for _ in range(3):
        with RunningLoop(LOCAL) as running:
            numbering = running.listeners[0].numbering
            assert numbering is not None
            firsts.add(numbering._first)
    assert len(firsts) == 3


def test_a_number_that_is_taken_ahead_is_found_before_libzmq_gives_it(
    router: tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]],
) -> None:
    context, socket = router
    numbering = Numbering(context, socket)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    answer = next_number(numbering, socket, 100)
    assert not numbering.is_claimed(answer)
    number = int.from_bytes(answer[1:], "big")
    claimed = b"\0" + ((number + 200) & 0xFFFFFFFF).to_bytes(4, "big")
    with Zmtp(f"tcp://127.0.0.1:{port}", identity=claimed) as claimer:
        # A later message is proof that its id is known to the socket.
        claimer.send(b"there")
        assert socket.recv_multipart() == [claimed, b"there"]
        assert not numbering.is_claimed(next_number(numbering, socket, 200)), "one look is no proof"
        assert numbering.is_claimed(socket.recv_multipart()[0])
        assert not numbering.is_given(claimed, accepted=1)
    numbering.close()


def test_numbers_that_libzmq_gives_are_no_claims(
    router: tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]],
) -> None:
    context, socket = router
    numbering = Numbering(context, socket)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    peers = []
    for accepted in range(1, 101):
        peers.append(Zmtp(f"tcp://127.0.0.1:{port}"))
        peers[-1].send(b"there")
        assert numbering.is_given(socket.recv_multipart()[0], accepted)
    assert not numbering.is_claimed(next_number(numbering, socket, 100))
    assert not numbering.is_claimed(next_number(numbering, socket, 200))
    assert numbering.is_given(b"alice", 0)
    assert not numbering.is_given(b"\0alice", 100)
    for peer in peers:
        peer.close()
    numbering.close()


def test_a_message_by_a_number_that_was_not_given_costs_its_connection() -> None:
    with RunningLoop(LOCAL) as running:
        numbering = running.listeners[0].numbering
        assert numbering is not None
        claimed = b"\0" + ((numbering._first - 5) & 0xFFFFFFFF).to_bytes(4, "big")
        with Zmtp(running.endpoint, identity=claimed) as claimer:
            claimer.send(*encode_message([Ping(1)]))
            running.until(lambda: running.log.of("connection_cut"))
            assert running.counters["claimed_ids_total"]
            (event,) = running.log.of("connection_cut")
            assert "claims" in event["reason"]
            running.until(lambda: len(running.guard.connections) == 0)
            assert claimer.socket.recv(1) == b""
        assert set(running.core.calls) <= {("tick",)}


def test_who_claims_the_next_number_and_says_nothing_is_cut() -> None:
    with RunningLoop(LOCAL) as running:
        numbering = running.listeners[0].numbering
        assert numbering is not None
        claimed = b"\0" + ((numbering._first + 200) & 0xFFFFFFFF).to_bytes(4, "big")
        with Zmtp(running.endpoint, identity=claimed) as claimer:
            for _ in range(200):
                # An honest peer comes, which has the next number asked for; it may have said
                # nothing yet when all of those are cut.
                with contextlib.suppress(ConnectionError), Zmtp(running.endpoint) as peer:
                    peer.send(*encode_message([Ping(1)]))
                    peer.receive_frame()
                if running.counters["claimed_ids_total"]:
                    break
                time.sleep(0.011)
            assert running.counters["claimed_ids_total"] >= 1
            assert claimer.socket.recv(1) in {b"", b"\0"}, "cut, or first told a PONG"
    assert running.failure is None
