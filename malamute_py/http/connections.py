"""What a connection of the HTTP side may cost.

Owns how many there are and how long each may last. The rules: a connection serves one request and
is ended after request_s, whatever it is doing, so that neither one that says nothing nor one that
does not read keeps its place; beyond connections_max the oldest one of the address that has most
is ended, so that no address keeps the others out. uvicorn bounds neither: its only timer begins
after the first answer, and its limit of connections answers 503 to all while idle ones fill it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

INCOMPLETE_BYTES_MAX: Final = 16 << 10
"""Bytes of a request's head that are kept while it is not complete."""


class Bounds:
    """The connections that there are, in the order in which they came."""

    def __init__(self, connections_max: int, request_s: float) -> None:
        self.request_s = request_s
        self.cut = 0
        """How many were ended for being one too many, or too slow."""
        self._connections_max = connections_max
        self._addresses: dict[BoundedProtocol, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: BoundedProtocol, address: str) -> None:
        """A connection came; another goes if there are too many."""
        self._addresses[connection] = address
        if len(self._addresses) > self._connections_max:
            most = Counter(self._addresses.values()).most_common(1)[0][0]
            oldest = next(each for each, whose in self._addresses.items() if whose == most)
            self.discard(oldest)
            oldest.end()

    def discard(self, connection: BoundedProtocol) -> None:
        """A connection went."""
        self._addresses.pop(connection, None)

    def protocol(self) -> Callable[..., asyncio.Protocol]:
        """What uvicorn makes its connections with."""

        def make(**given: Any) -> BoundedProtocol:
            connection = BoundedProtocol(**given)
            connection.bounds = self
            return connection

        return make


class BoundedProtocol(H11Protocol):
    """One connection."""

    bounds: Bounds
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The connection begins, and its time with it."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self.bounds.request_s, self.end)
        peer = transport.get_extra_info("peername")
        self.bounds.add(self, str(peer[0]) if isinstance(peer, tuple) else "")

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        if self._deadline is not None:
            self._deadline.cancel()
        self.bounds.discard(self)
        super().connection_lost(exc)

    def end(self) -> None:
        """End the connection now; what it was to be sent is dropped."""
        self.bounds.cut += 1
        self.transport.abort()
