"""ZMTP 3.0 over a plain socket, for the peers of the live fuzzer.

Owns one connection: the greeting, frames out, frames in. The rule: it sends bytes, so that any of
them may be wrong; libzmq is not used, because it sends nothing wrong. Source: ZMTP 3.0,
https://rfc.zeromq.org/spec/23/.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4
GREETING: Final = (
    b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
)
_ABORT: Final = struct.pack("ii", 1, 0)


def frame(data: bytes, flags: int = 0) -> bytes:
    """Return one frame of ZMTP."""
    if len(data) < 256:
        return bytes((flags, len(data))) + data
    return bytes((flags | LONG,)) + len(data).to_bytes(8, "big") + data


def message(frames: Sequence[bytes]) -> bytes:
    """Return one message of ZMTP."""
    last = len(frames) - 1
    return b"".join(frame(data, MORE if n < last else 0) for n, data in enumerate(frames))


def ready(kind: bytes = b"DEALER", identity: bytes | None = None) -> bytes:
    """Return the READY command of a socket."""
    body = b"\x05READY" + _property(b"Socket-Type", kind)
    if identity is not None:
        body += _property(b"Identity", identity)
    return frame(body, COMMAND)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


class Wire:
    """One connection to a broker."""

    def __init__(self, port: int, hello: bytes = GREETING + ready()) -> None:
        """hello: the first bytes; the answer to them is read with everything else."""
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._in = bytearray()
        self._frames: list[bytes] = []
        self._greeted = False
        self._ready = False
        self.closed = False
        self.send(hello)

    def send(self, data: bytes) -> None:
        """Write bytes; a peer that the broker has cut, or does not read from, is closed."""
        try:
            self._socket.sendall(data)
        except OSError:
            self.close()

    def greet(self, wait_s: float = 10.0) -> bool:
        """Wait for the other side's READY; False: it did not come.

        Before libzmq has sent it, a message that it receives is an error that ends the connection.
        """
        until = time.monotonic() + wait_s
        while not self._ready and not self.closed and time.monotonic() < until:
            self.receive(until - time.monotonic())
        return self._ready

    def receive(self, wait_s: float = 0.0) -> list[list[bytes]]:
        """Return the messages that have come since; wait_s: how long to wait for bytes."""
        found: list[list[bytes]] = []
        while not self.closed and select.select([self._socket], [], [], wait_s)[0]:
            wait_s = 0.0
            try:
                data = self._socket.recv(1 << 18)
            except OSError:
                data = b""
            if not data:
                self.close()
                break
            self._in += data
            if len(data) < 1 << 18:
                break
        self._parse(found)
        return found

    def discard(self) -> bool:
        """Read what has come and look at none of it, from now on; False: the connection is over."""
        while not self.closed and select.select([self._socket], [], [], 0)[0]:
            try:
                data = self._socket.recv(1 << 18)
            except OSError:
                data = b""
            if not data:
                self.close()
        return not self.closed

    def _parse(self, found: list[list[bytes]]) -> None:
        at, data = 0, self._in
        if not self._greeted:
            if len(data) < 64:
                return
            at, self._greeted = 64, True
        while len(data) - at >= 2:
            flags = data[at]
            head, size = 2, data[at + 1]
            if flags & LONG:
                if len(data) - at < 9:
                    break
                head, size = 9, int.from_bytes(data[at + 1 : at + 9], "big")
            if len(data) - at < head + size:
                break
            body = bytes(data[at + head : at + head + size])
            at += head + size
            if flags & COMMAND:
                self._ready = True
                if body[:5] == b"\x04PING":
                    self.send(frame(b"\x04PONG" + body[7:], COMMAND))
                continue
            self._frames.append(body)
            if not flags & MORE:
                found.append(self._frames)
                self._frames = []
        del data[:at]

    def close(self, *, abort: bool = False) -> None:
        """End the connection; abort: with a reset."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(OSError):
                if abort:
                    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
            self._socket.close()
