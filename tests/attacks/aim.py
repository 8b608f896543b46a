"""Means of an attack: the broker's address, its bounds, and hostile peers.

Owns the count of messages sent. The rules: an attack ends after so many rounds or seconds,
whichever comes first, so that a short run is equal each time; a peer whose connection the broker
has cut connects again at its next message. Source: ZMTP 3.0, https://rfc.zeromq.org/spec/23/.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from malamute_protocol.commands import AnyCommand, Command, Hello, Ping, Pong
from malamute_protocol.framing import encode_message
from tests.fuzz.zmtp import GREETING, Wire, message, ready

ANSWER_S: Final = 30.0
"""Time that a peer waits for an answer without which its attack cannot go on."""


class Aim:
    """One attack's means and bounds."""

    def __init__(
        self, endpoint: str, *, rounds: int, seconds: float, seed: int = 0, broker: int = 0
    ) -> None:
        """rounds, seconds: bounds until which `more` says yes. broker: its process."""
        self.endpoint = endpoint
        self.port = int(endpoint.rpartition(":")[2])
        self.broker = broker
        self.chance = random.Random(seed)
        self.sent = 0
        """Messages and connections sent so far."""
        self.lost = 0
        """Connections that the broker has cut."""
        self.round = 0
        self._rounds = rounds
        self._until = time.monotonic() + seconds

    def more(self) -> bool:
        """Whether another round is to follow."""
        if self.round >= self._rounds or time.monotonic() >= self._until:
            return False
        self.round += 1
        return True

    def peer(self, identity: str = "", *, routing_id: bytes | None = None) -> Peer:
        """Return a peer with a link."""
        return Peer(self, identity, routing_id)


class Peer:
    """A peer whose link is made again when it was lost."""

    def __init__(self, aim: Aim, identity: str = "", routing_id: bytes | None = None) -> None:
        """identity: that is asked for; empty: none."""
        self._aim = aim
        self._identity = identity
        self._routing_id = routing_id
        self._wire: Wire | None = None
        self._found: list[tuple[Command, list[bytes]]] = []
        self._before: Callable[[], None] | None = None
        self.connect()

    def first(self, do: Callable[[], None]) -> None:
        """Do this now, and each time the link was made again: subscribe, for example."""
        self._before = do
        do()

    def connect(self) -> None:
        """Connect, and begin a link."""
        self._aim.sent += 1
        self._found = []
        hello = Hello((1, 1), self._aim.chance.randbytes(16), self._identity)
        # The broker refuses while its backlog is full: an attacker tries again.
        for _ in range(100):
            try:
                wire = Wire(self._aim.port, GREETING + ready(identity=self._routing_id))
                if wire.greet():
                    break
                wire.close()
            except OSError:
                pass
            time.sleep(0.05)
        else:
            raise ConnectionError(f"the broker at {self._aim.endpoint} takes no connections")
        self._wire = wire
        wire.send(message(encode_message([hello])))

    def say(self, *commands: Command, frames: Sequence[Any] = ()) -> None:
        """Send one message."""
        self.write(message([bytes(part) for part in encode_message(commands, frames)]))

    def write(self, data: bytes, messages: int = 1) -> None:
        """Send bytes that are so many messages."""
        wire = self._wire
        if wire is None or wire.closed:
            self._aim.lost += 1
            self.connect()
            if self._before is not None:
                self._before()
            wire = self._wire
            assert wire is not None
        self._aim.sent += messages
        wire.send(data)

    def discard(self) -> None:
        """Read what has come and forget it, so that the broker never waits for this peer."""
        wire = self._wire
        if wire is not None and not wire.discard():
            self._aim.lost += 1
            self._wire = None

    def take(self, wanted: type[Command], wait_s: float = ANSWER_S) -> Any:
        """Return the next command of a type; None: the link ended, or none came in time."""
        until = time.monotonic() + wait_s
        while True:
            while self._found:
                command, _ = self._found.pop(0)
                if isinstance(command, wanted):
                    return command
            left = until - time.monotonic()
            if self._wire is None or self._wire.closed or left <= 0:
                return None
            for head, *frames in self._wire.receive(left):
                for command in msgspec.msgpack.decode(head, type=list[AnyCommand]):
                    if isinstance(command, Ping):
                        self._wire.send(message(encode_message([Pong(command.token)])))
                    self._found.append((command, frames))

    def reset(self) -> None:
        """End the connection with a reset."""
        if self._wire is not None:
            self._wire.close(abort=True)
            self._wire = None

    def close(self) -> None:
        """End the connection."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None


class Raw:
    """A connection that sends bytes and makes no link of them."""

    def __init__(
        self, aim: Aim, hello: bytes = b"", then: bytes = b"", source: str = "127.0.0.1"
    ) -> None:
        """hello: its first bytes. then: sent once the broker has answered. source: its address."""
        aim.sent += 1
        self.socket = socket.create_connection(
            ("127.0.0.1", aim.port), timeout=10.0, source_address=(source, 0)
        )
        self.open = True
        self.send(hello)
        if then:
            # Greeting and READY, or the end.
            left = 64 + 2
            while left > 0 and (data := self.socket.recv(left)):
                left -= len(data)
            self.send(then)

    def send(self, data: bytes | memoryview) -> bool:
        """Write bytes; False: the broker has cut the connection."""
        if self.open:
            try:
                self.socket.sendall(data)
            except OSError:
                self.close()
        return self.open

    def close(self) -> None:
        """End the connection."""
        self.open = False
        with contextlib.suppress(OSError):
            self.socket.close()


def burst(commands: Iterable[Command], each: int = 1) -> bytes:
    """Return messages of so many commands each, without frames, as bytes."""
    every = list(commands)
    return b"".join(
        message(encode_message(every[at : at + each])) for at in range(0, len(every), each)
    )
