"""The socket under a client, at its edges."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from malamute_py.client.engine.transport import Failure, Transport
from malamute_py.client.settings import ClientSettings
from tests.waiting import WAIT_MS, WAIT_S

_MESSAGES = 20
_FRAMES = [b"%d" % number for number in range(150)]
"""Frames of a message: more than libzmq hands over before it looks at other events."""


@contextmanager
def linked() -> Iterator[tuple[zmq.Socket[bytes], Transport]]:
    """A broker's socket, and a transport that connects to it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as broker:
        port = broker.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{port}"
        transport = Transport(context, ClientSettings(endpoints=(endpoint,)), endpoint)
        try:
            yield broker, transport
        finally:
            transport.close(0)


def test_what_came_before_the_connection_broke_is_read_whole() -> None:
    with linked() as (broker, transport):
        assert transport.send([b"hello"])
        assert broker.poll(WAIT_MS)
        client, _ = broker.recv_multipart()
        for _ in range(_MESSAGES):
            broker.send_multipart([client, *_FRAMES])
        broker.close(linger=WAIT_MS)

        failure = _failure(transport)
        read: list[list[bytes]] = []
        while transport.pending(to_send=False):
            read.extend([bytes(frame) for frame in one] for one in transport.drain(1))

    assert failure.code == "closed"
    assert read == [_FRAMES] * _MESSAGES


def test_what_came_before_a_send_is_noticed_though_its_signal_was_taken_up_by_it() -> None:
    with linked() as (broker, transport):
        assert transport.send([b"hello"])
        client, _ = broker.recv_multipart()
        assert not list(transport.drain(1))
        for number in range(100):
            while transport.pending(to_send=False):
                list(transport.drain(1))
            broker.send_multipart([client, b"%d" % number])
            # Sends take up signals now and then: whether they did is for pending() to know.
            while not transport.pending(to_send=False):
                assert transport.send([b"more"])
                ready = select.select(transport.descriptors, [], [], 0)[0]
                for descriptor in ready:
                    transport.signalled(descriptor)
                broker.recv_multipart()
            (message,) = list(transport.drain(1))
            assert message == [b"%d" % number]


@pytest.mark.moderate
def test_a_peer_that_is_silent_is_not_taken_for_one_of_another_credential() -> None:
    with zmq.Context() as context, socket.create_server(("127.0.0.1", 0)) as frozen:
        endpoint = f"tcp://127.0.0.1:{frozen.getsockname()[1]}"
        settings = ClientSettings(endpoints=(endpoint,), attempt_ms=200)
        transport = Transport(context, settings, endpoint)
        try:
            failure = _failure(transport)
        finally:
            transport.close(0)
    assert failure.reason == f"{endpoint} took the connection and is silent"


def test_a_host_name_without_an_address_is_told_at_once() -> None:
    endpoint = "tcp://no-such-host.invalid:9797"
    with zmq.Context() as context:
        transport = Transport(context, ClientSettings(endpoints=(endpoint,)), endpoint)
        try:
            failure = _failure(transport)
        finally:
            transport.close(0)
    assert failure.code == "unknown_host"
    assert failure.reason == f"the host name in {endpoint} has no address here; is it spelt right?"
    assert not failure.final


@pytest.fixture
def silent_input() -> Iterator[None]:
    """A standard input from which nothing comes and which does not end."""
    kept = os.dup(0)
    reader, writer = os.pipe()
    os.dup2(reader, 0)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        for descriptor in (kept, reader, writer):
            os.close(descriptor)


@pytest.mark.usefixtures("silent_input")
def test_a_socket_that_somebody_else_closed_is_not_taken_for_an_empty_one() -> None:
    with linked() as (_, transport):
        assert not list(transport.drain(1))
        transport.socket.close(0)
        with pytest.raises(zmq.ZMQError, match="non-socket"):
            list(transport.drain(1))
        with pytest.raises(zmq.ZMQError, match="non-socket"):
            transport.pending(to_send=True)


def test_a_large_frame_is_not_copied_and_a_small_one_is() -> None:
    with linked() as (broker, transport):
        assert transport.send([b"hello"])
        client, _ = broker.recv_multipart()
        broker.send_multipart([client, b"small", b"x" * 100_000])
        frames: list[list[object]] = []
        until = time.monotonic() + WAIT_S
        while not frames and time.monotonic() < until:
            frames = list(transport.drain(1))
    ((small, large),) = frames
    assert small == b"small"
    assert type(large) is memoryview
    assert len(large) == 100_000


def _failure(transport: Transport) -> Failure:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        failure = transport.failure()
        if failure is not None:
            return failure
        transport.pending(to_send=False)
        for descriptor in select.select(transport.descriptors, [], [], 0.001)[0]:
            transport.signalled(descriptor)
    raise AssertionError("the end of the connection was not told")
