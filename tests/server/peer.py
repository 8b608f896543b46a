"""A client that is nothing but a DEALER socket and the command table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import msgspec
import zmq

from malamute_protocol.commands import AnyCommand, Command, Hello, Ping, Pong, Welcome
from malamute_protocol.framing import encode_message
from tests.waiting import WAIT_MS

Wanted = TypeVar("Wanted", bound=Command)


@contextmanager
def dealer(
    endpoint: str, context: zmq.Context[zmq.Socket[bytes]] | None = None
) -> Iterator[zmq.Socket[bytes]]:
    own = context or zmq.Context()
    peer = own.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    peer.connect(endpoint)
    try:
        yield peer
    finally:
        peer.close(0)
        if context is None:
            own.term()


def received(peer: zmq.Socket[bytes]) -> tuple[list[AnyCommand], list[bytes]]:
    head, *frames = peer.recv_multipart()
    return msgspec.msgpack.decode(head, type=list[AnyCommand]), frames


def ping(peer: zmq.Socket[bytes], token: int = 1) -> None:
    peer.send_multipart(encode_message([Ping(token)]))
    assert received(peer) == ([Pong(token)], [])


class RawPeer:
    """One link, or a connection that is to become one."""

    def __init__(
        self, endpoint: str, *, hello: bool = True, context: zmq.Context[Any] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self._own = None if context else zmq.Context()
        self.socket: zmq.Socket[bytes] = (context or self._own or zmq.Context()).socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(endpoint)
        self.waiting: list[tuple[Command, list[bytes]]] = []
        self.welcome: Welcome | None = None
        if hello:
            self.send(Hello((1, 1), os.urandom(16)))
            self.welcome, _ = self.get(Welcome)

    def send(self, *commands: Command, frames: tuple[bytes, ...] = ()) -> None:
        self.socket.send_multipart(encode_message(commands, frames))

    def next(self) -> tuple[Command, list[bytes]]:
        """Return the next command that is no heartbeat, with its frames."""
        while not self.waiting:
            head, *frames = self.socket.recv_multipart()
            for command in msgspec.msgpack.decode(head, type=list[AnyCommand]):
                if isinstance(command, Ping):
                    self.send(Pong(command.token))
                    continue
                owned = command.content_frames
                self.waiting.append((command, frames[:owned]))
                del frames[:owned]
        return self.waiting.pop(0)

    def get(self, wanted: type[Wanted]) -> tuple[Wanted, list[bytes]]:
        """Return the next command of this type; others before it are dropped."""
        while True:
            command, frames = self.next()
            if isinstance(command, wanted):
                return command, frames

    def close(self) -> None:
        self.socket.close(0)
        if self._own is not None:
            self._own.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
