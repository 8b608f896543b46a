"""A ZMTP 3 peer over a plain socket, which can do what libzmq would never do.

Owns nothing but bytes. Source: ZeroMQ RFC 23 (ZMTP 3.0).
"""

from __future__ import annotations

import socket
import struct
from typing import Self

from tests.waiting import WAIT_S

MORE, LONG, COMMAND = 1, 2, 4


def frame(body: bytes, flags: int = 0) -> bytes:
    """Make one frame, short or long as its size asks."""
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | LONG,)) + struct.pack(">Q", len(body)) + body


def greeting(mechanism: bytes = b"NULL") -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def ready(identity: bytes = b"") -> bytes:
    def item(name: bytes, value: bytes) -> bytes:
        return bytes((len(name),)) + name + struct.pack(">I", len(value)) + value

    return frame(
        b"\x05READY" + item(b"Socket-Type", b"DEALER") + item(b"Identity", identity), COMMAND
    )


class Zmtp:
    """A connection that has shaken hands as an anonymous DEALER."""

    def __init__(self, endpoint: str, identity: bytes = b"") -> None:
        if endpoint.startswith("ipc://"):
            self.socket = socket.socket(socket.AF_UNIX)
            try:
                self.socket.connect(endpoint.removeprefix("ipc://"))
            except OSError:
                self.socket.close()
                raise
        else:
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            self.socket = socket.create_connection((host, int(port)))
        self.socket.settimeout(WAIT_S)
        try:
            self.socket.sendall(greeting() + ready(identity))
            self.receive_exactly(64)
            self.receive_frame()
        except BaseException:
            self.socket.close()
            raise

    def receive_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                raise ConnectionResetError
            data += part
        return data

    def receive_frame(self) -> tuple[int, bytes]:
        flags = self.receive_exactly(1)[0]
        if flags & LONG:
            size = struct.unpack(">Q", self.receive_exactly(8))[0]
        else:
            size = self.receive_exactly(1)[0]
        return flags, self.receive_exactly(size)

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frame(part, MORE) for part in frames[:-1]) + frame(frames[-1]))

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
