"""A TCP connection under a guard, whose memory and looks the test sets."""

from __future__ import annotations

import socket
from collections import Counter
from typing import Self

from malamute_py.config import Config
from malamute_py.server.connections.guard import Guard

LOCAL = Config(listen=["tcp://127.0.0.1:0"])


class Watched:
    """One TCP connection that a guard looks at; the test says what the loop has taken from it."""

    def __init__(self, beside: Watched | None = None) -> None:
        self.cuts: list[str] = []
        self.counts = Counter[str]()
        self._beside = beside
        self.guard: Guard = (
            beside.guard
            if beside is not None
            else Guard(LOCAL, count=self._counted, report=self._reported)
        )
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.peer = socket.create_connection(server.getsockname())
            self.accepted, _ = server.accept()
        self.guard._accepted(self.accepted.fileno(), 0)
        connection = self.guard.connections.get(self.accepted.fileno())
        assert connection is not None
        self.connection = connection
        self.now_ms = 0
        self._began = self.guard.memory.rss
        self.grows(0)

    def _counted(self, name: str) -> None:
        self.counts[name] += 1

    def _reported(self, name: str, facts: dict[str, object]) -> None:
        if name == "connection_cut":
            self.cuts.append(str(facts["reason"]))

    def grows(self, size: int) -> None:
        """Make resident memory so much more than in the beginning."""
        self.guard.memory.resident = lambda: self._began + size  # type: ignore[method-assign]

    def another(self) -> Watched:
        """Return another connection that the same guard looks at."""
        return Watched(self)

    def arrives(self, size: int) -> None:
        while size:
            some = min(size, 64 << 10)
            self.peer.sendall(bytes(some))
            size -= some
            while some:
                some -= len(self.accepted.recv(some))

    def delivers(self, frames: int, frame_bytes: int) -> None:
        self.arrives(frames * frame_bytes)
        self.connection.delivered += frames * frame_bytes
        self.connection.frames += frames

    def trimmed(self) -> None:
        """Wait until memory is given back."""
        trimming = self.guard.memory._trimming
        assert trimming is not None
        trimming.join()

    def look(self, *, drained: bool = True) -> None:
        self.now_ms += 1_000
        self.guard.check(self.now_ms, drained=drained)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.peer.close()
        self.accepted.close()
        if self._beside is None:
            self.guard.close()
