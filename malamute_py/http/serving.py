"""Serving: the client of the broker, the listening socket, and the end of both.

Owns what runs in the one event loop of the process. The rule: the address is bound before anything
else, so that what is wrong with it is told at once; that the broker cannot be reached is no reason
to end, for that is what the pages are to tell.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final

import uvicorn

from malamute_py.client.settings import Credential
from malamute_py.http.application import application
from malamute_py.http.broker_link import keep_linked
from malamute_py.http.connections import INCOMPLETE_BYTES_MAX, Bounds
from malamute_py.http.console.events import STREAMS_MAX, EventStreams
from malamute_py.http.console.logins import Logins
from malamute_py.http.console.sessions import Sessions
from malamute_py.http.console.site import Console
from malamute_py.http.source import Source
from malamute_py.sections import (
    ConfigError,
    HttpSection,
    check_http,
    parse_bind,
    read_token,
    serves_console,
)

BACKLOG: Final = 64
_STOP_S: Final = 1


class _Server(uvicorn.Server):
    """uvicorn's server, which first ends what would hold up its own end."""

    def __init__(
        self, config: uvicorn.Config, end_console: Callable[[], None], begun: Callable[[], None]
    ) -> None:
        """begun: called once it listens to signals and serves."""
        super().__init__(config)
        self._end_console = end_console
        self._begun = begun

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End in order at a signal, and at once at a second one.

        uvicorn would have the signal end the process after that, which tells a supervisor of a
        failure.
        """
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, and tell so."""
        await super().startup(sockets)
        self._begun()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the sessions of people, and with them their event streams; then the connections."""
        self._end_console()
        await super().shutdown(sockets)


class Serving:
    """The HTTP side of one broker, within an event loop."""

    def __init__(
        self, http: HttpSection, endpoints: Sequence[str], credential: Credential = None
    ) -> None:
        """Bind the address; run() serves. Raises ConfigError.

        endpoints, credential: of the broker, for the HTTP side's own link.
        """
        check_http(http)
        self._token = read_token(http.token_file)
        self._http = http
        self._endpoints = tuple(endpoints)
        self._credential = credential
        self.bounds = Bounds(http.connections_max, http.request_ms / 1_000)
        self.console = self._open_console()
        self._socket = _bound(http.bind)
        self._server: uvicorn.Server | None = None
        self._stopping = False

    def _open_console(self) -> Console | None:
        """Make the console, with its sessions and logins; None: the configuration has none.

        By `http.console`, a login without a name may be tried: from everywhere ("open"), or, over
        tcp, from this machine ("local").
        """
        if not serves_console(self._http):
            return None
        sessions = Sessions(
            idle_s=self._http.session_idle_ms / 1_000, lasting_s=self._http.session_ms / 1_000
        )
        # A socket file has permissions of its own, which a page at a port would get around.
        by_port = all(endpoint.startswith("tcp://") for endpoint in self._endpoints)
        name_optional = self._http.console == "open" or (self._http.console == "local" and by_port)
        logins = Logins(sessions, self._endpoints, self._credential, name_optional=name_optional)
        streams = EventStreams(
            lambda scope, seconds: self.bounds.lengthen(tuple(scope["client"]), seconds),
            # Streams stay open: half of the connections are left to pages.
            most=min(STREAMS_MAX, max(1, self._http.connections_max // 2)),
        )
        return Console(
            sessions, logins, streams, hosts_of_this_machine=self._http.console == "local"
        )

    @property
    def url(self) -> str:
        """Return the URL of the HTTP side, with the port that was found for port 0."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run(self, announce: Callable[[str], None] = lambda url: None) -> None:
        """Serve until stop(), SIGTERM or SIGINT.

        announce: called with the URL once requests are taken.
        """
        # Each malformed request, and each lost link to the broker, would be a line.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        logging.getLogger("malamute.client.link").setLevel(logging.ERROR)
        source = Source(self._http.labels_max)
        config = uvicorn.Config(
            application(source, self._token, self.console),
            # Connections that keep to the bounds: their number, and the time that each has.
            http=self.bounds.protocol(),  # type: ignore[arg-type]  # called as a class is
            ws="none", lifespan="off", interface="asgi3", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, backlog=BACKLOG,
            h11_max_incomplete_event_size=INCOMPLETE_BYTES_MAX,
            timeout_graceful_shutdown=_STOP_S,
        )  # fmt: skip
        end_console = self.console.sessions.close if self.console is not None else lambda: None
        self._server = _Server(config, end_console, lambda: announce(self.url))
        self._server.should_exit = self._stopping  # stop() may have come first
        linking = asyncio.create_task(keep_linked(source, self._endpoints, self._credential))
        # keep_linked() ends by an error of our own only, and no page can tell anything without it.
        linking.add_done_callback(lambda task: self.stop())
        tasks = [linking]
        if self.console is not None:
            tasks.append(asyncio.create_task(self.console.keep()))  # ends sessions in time
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """End soon; from the event loop's thread."""
        self._stopping = True
        if self._server is not None:
            self._server.should_exit = True


def _bound(bind: str) -> socket.socket:
    """Return a listening socket at the address `http.bind` of the configuration.

    Raises ConfigError: the address is none, is in use, or may not be bound.
    """
    host, port, _ = parse_bind(bind)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError("http.bind", f"{bind}: {error.strerror}") from None
    try:
        # The process that is started again may bind while connections of the last one fade out.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError("http.bind", f"{bind}: {error.strerror}") from None
    return listening


def serve(
    http: HttpSection,
    endpoints: Sequence[str],
    credential: Credential = None,
    announce: Callable[[str], None] = lambda url: None,
    until: Callable[[asyncio.AbstractEventLoop, Callable[[], None]], Any] = lambda loop, stop: None,
) -> None:
    """Serve in this thread until a signal comes. Raises ConfigError for a wrong address.

    announce: called with the URL once requests are taken. until: called at the start with the event
    loop and a function that stops the serving, for a caller that has another reason to stop it.
    """

    async def run() -> None:
        """Serve until a signal comes or the caller's own reason, which `until` waits for."""
        serving = Serving(http, endpoints, credential)
        until(asyncio.get_running_loop(), serving.stop)
        await serving.run(announce)

    asyncio.run(run())
