"""A broker inside this process, for tests and small programs.

Owns nothing but the pairing of a Server in a thread with clients over inproc. The rule: it is the
same broker with the same journal and limits, in memory unless it is given a directory. Source:
server.py; ARCHITECTURE.md, One picture.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, Unpack

import zmq

from malamute_py.client.aio.client import Connecting, connect
from malamute_py.client.session.events import LinkEvent
from malamute_py.client.settings import ClientOptions
from malamute_py.client.sync.client import SyncClient, connect_sync
from malamute_py.client.tracing import Tracing
from malamute_py.config import load
from malamute_py.server import Server
from malamute_py.telemetry import Log, open_log

_numbers = itertools.count(1)

_SMALL_SEGMENT_BYTES = 48 << 20
_SMALL_RING_BYTES = 256 << 20
_LET_GO_S = 2.0
"""Time that clients have to close their sockets when the broker stops; a thread takes little."""


class ConnectOptions(ClientOptions, total=False):
    """Options of `connect()` and `connect_sync()`, without the endpoint and the zmq context."""

    wait: bool
    timeout_ms: int | None
    on_link: Callable[[LinkEvent], None] | None
    tracing: bool | Tracing


class EmbeddedBroker:
    """A broker in a thread of this process.

        with EmbeddedBroker() as broker, broker.connect_sync() as client: ...
        async with EmbeddedBroker("data", tcp=True) as broker: ...

    data: a directory; None: in memory, gone at the end. tcp: also listen on a free port of
    this machine, so that other processes can connect. settings: dotted keys of the
    configuration, `**{"journal.ring_bytes": 1 << 30}`, or with `__` for the dot.
    """

    def __init__(
        self,
        data: str | Path | None = None,
        *,
        tcp: bool = False,
        log: Log | None = None,
        **settings: Any,
    ) -> None:
        """Note the settings, by names such as journal__ring_bytes; start() makes the broker.

        data: the data directory; None: everything is kept in memory. tcp: whether it also listens
        at a free port. Raises ConfigError for an unknown setting or a wrong value.
        """
        # A name of its own: several brokers fit in one process.
        inproc = f"inproc://malamute-{os.getpid()}-{next(_numbers)}"
        wanted: dict[str, Any] = {
            "data_directory": "" if data is None else str(data),
            "listen": [inproc, "tcp://127.0.0.1:0"] if tcp else [inproc],
        }
        if data is None:
            # Memory is taken as it is used, and given back at the end only.
            wanted["journal.segment_bytes"] = _SMALL_SEGMENT_BYTES
            wanted["journal.ring_bytes"] = _SMALL_RING_BYTES
        wanted |= {key.replace("__", "."): value for key, value in settings.items()}
        self.config = load(overrides=wanted)
        # A program's own log is not ours to fill: warnings and worse.
        self._log = log or open_log("warning")
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._server: Server | None = None

    def start(self) -> Self:
        """Start the broker in a thread, with a ZeroMQ context that its clients share.

        Raises StartError, ConfigError.
        """
        assert self._server is None, "it is running"
        self._context = zmq.Context()
        server = Server(self.config, context=self._context, log=self._log)
        try:
            server.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._server = server
        return self

    def stop(self) -> None:
        """Stop the broker, then close the clients that are still open; a second call does nothing.

        With a data directory all that was confirmed is kept. Raises ServerFailed when the broker
        had failed.
        """
        server, context = self._server, self._context
        self._server = self._context = None
        if server is not None and context is not None:
            try:
                server.stop()
            finally:
                _end(context)

    @property
    def server(self) -> Server:
        """The running server, for its metrics."""
        assert self._server is not None, "start() it, or use it in a with statement"
        return self._server

    @property
    def context(self) -> zmq.Context[zmq.Socket[bytes]]:
        """The zmq.Context that a client at `endpoint` has to use."""
        assert self._context is not None, "start() it, or use it in a with statement"
        return self._context

    @property
    def endpoint(self) -> str:
        """The endpoint for clients in this process, with `context`."""
        return self.server.endpoints[0]

    @property
    def tcp_endpoint(self) -> str:
        """The endpoint for other processes; with tcp=True."""
        for endpoint in self.server.endpoints:
            if endpoint.startswith("tcp://"):
                return endpoint
        raise ValueError("it listens in this process only: EmbeddedBroker(tcp=True)")

    def connect(self, **options: Unpack[ConnectOptions]) -> Connecting:
        """Return a client of this broker for asyncio; options as for malamute_py.connect()."""
        return connect(self.endpoint, context=self.context, **options)

    def connect_sync(self, **options: Unpack[ConnectOptions]) -> SyncClient:
        """Return a client of this broker for threads; options as for malamute_py.connect_sync()."""
        return connect_sync(self.endpoint, context=self.context, **options)

    def __enter__(self) -> Self:
        """Start the broker."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop the broker."""
        self.stop()

    async def __aenter__(self) -> Self:
        """Start the broker, without holding up the event loop."""
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *_: object) -> None:
        """Stop the broker, without holding up the event loop."""
        await asyncio.to_thread(self.stop)


def _end(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """End the ZeroMQ context of an embedded broker, and the clients that were not closed.

    Called when the broker has ended. context.term() has each client's next call fail, whereupon the
    client closes its socket itself, and returns when all are closed: a socket that another thread
    closes never wakes the thread that sleeps on it. Clients whose event loop no longer turns do not
    close theirs, which is done here, after _LET_GO_S.
    """
    ending = threading.Thread(target=context.term, name="malamute-end", daemon=True)
    ending.start()
    ending.join(_LET_GO_S)
    while ending.is_alive():
        with contextlib.suppress(RuntimeError):  # A client was closed while they were listed.
            for socket in list(context._sockets):
                socket.close(0)
        ending.join(0.1)
