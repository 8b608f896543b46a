"""A TCP proxy between clients and a broker, which delays, stalls and cuts.

Owns the connections through it. The rule: bytes are never changed or reordered, only late or lost
with their connection, as in a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

_PIECE = 1 << 16
"""Bytes that are passed on at once, at most."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of no time: close() then resets the connection instead of ending it in order."""


class Proxy:
    """Forwards connections to a port of its own."""

    def __init__(self, host: str, port: int) -> None:
        """host, port: of the broker."""
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        """Set unless stall() has all pieces wait."""
        self.delay_s = 0.0
        """Delay of each piece."""
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        """Return how many connections go through the proxy."""
        return len(self._pairs)

    async def start(self) -> str:
        """Listen; returns the endpoint for clients."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def stall(self) -> None:
        """Forward nothing until flow()."""
        self._flowing.clear()

    def flow(self) -> None:
        """Forward again."""
        self._flowing.set()

    def cut(self) -> None:
        """End every connection by a reset."""
        for pair in list(self._pairs):
            self._end(pair)

    def _end(self, pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        """Cut both connections of a pair with a reset: by cut(), or as one of them has ended."""
        self._pairs.discard(pair)
        for writer in pair:
            with contextlib.suppress(OSError):
                plain: socket.socket = writer.get_extra_info("socket")
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.close()

    async def _accept(
        self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        """Connect a client that has come through to the broker, and pump both ways."""
        try:
            from_broker, to_broker = await asyncio.open_connection(*self._target)
        except OSError:
            to_client.close()  # no broker: the client finds out as without a proxy
            return
        pair = (to_client, to_broker)
        self._pairs.add(pair)
        for source, sink in ((from_client, to_broker), (from_broker, to_client)):
            pump = asyncio.ensure_future(self._pump(source, sink, pair))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter,
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:  # fmt: skip
        """Pass on bytes one way until either end is gone.

        pair: the writers of both ends, which are closed then.
        """
        try:
            while data := await source.read(_PIECE):
                await self._flowing.wait()  # stall() has it wait until flow()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                sink.write(data)
                await sink.drain()
        except OSError:
            pass  # The other end is gone; the lines below end this one.
        finally:
            self._end(pair)
