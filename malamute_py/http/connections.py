"""Connections of the HTTP side: how many there may be, and how long each may last.

Owns both bounds. The rules: a connection serves one request and is ended after request_s, whatever
it is doing, so that neither a client that sends nothing nor one that does not read keeps its place;
an event stream of a person who logged in has a time of its own;
beyond connections_max the oldest connection of the address that has most is ended, so that no
address keeps the others out. uvicorn bounds neither: its only timer begins after the first answer,
and its limit of connections answers 503 to all while idle ones fill it.
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
    """The open connections, in the order in which they came."""

    def __init__(self, connections_max: int, request_s: float) -> None:
        self.request_s = request_s
        self.cut = 0
        """Connections that were ended for being one too many, or too slow."""
        self._connections_max = connections_max
        self._addresses: dict[BoundedProtocol, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: BoundedProtocol, address: str) -> None:
        """Add a connection; if there are too many, the oldest of the busiest address is ended."""
        self._addresses[connection] = address
        if len(self._addresses) > self._connections_max:
            ((busiest, _),) = Counter(self._addresses.values()).most_common(1)
            oldest = next(each for each, whose in self._addresses.items() if whose == busiest)
            self.discard(oldest)
            oldest.end()

    def lengthen(self, peer: tuple[str, int], seconds: float) -> None:
        """Have a peer's connection last so many seconds from now on: it sends an event stream."""
        for connection in self._addresses:
            if connection.peer == peer:
                connection.end_after(seconds)

    def discard(self, connection: BoundedProtocol) -> None:
        """Forget a connection that ended."""
        self._addresses.pop(connection, None)

    def protocol(self) -> Callable[..., asyncio.Protocol]:
        """Return the factory by which uvicorn makes a connection that keeps to these bounds."""

        def make(**given: Any) -> BoundedProtocol:
            return BoundedProtocol(self, **given)

        return make


class BoundedProtocol(H11Protocol):
    """One connection, for one request and for request_s, unless it is lengthened."""

    peer: tuple[str, int] = ("", 0)
    """Address and port of the other end, as the scope of a request names it."""
    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, bounds: Bounds, **given: Any) -> None:
        """given: as of H11Protocol."""
        super().__init__(**given)
        self.bounds = bounds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the connection, and its time with it."""
        super().connection_made(transport)
        self.end_after(self.bounds.request_s)
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):  # None: the peer has gone again.
            self.peer = str(peer[0]), int(peer[1])
        self.bounds.add(self, self.peer[0])

    def end_after(self, seconds: float) -> None:
        """End the connection so many seconds from now, and not before."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self.end)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, and stop its time."""
        if self._deadline is not None:
            self._deadline.cancel()
        self.bounds.discard(self)
        super().connection_lost(exc)

    def end(self) -> None:
        """End the connection now; what it was to be sent is dropped."""
        self.bounds.cut += 1
        self.transport.abort()
