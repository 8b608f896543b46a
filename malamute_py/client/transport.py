"""One DEALER socket of a client, and what its monitor tells.

Owns the socket's options and the reading of connection failures. The rule: one thread a
socket, never blocking, never reconnecting by itself: the session decides when a new one is
made, so nothing that was queued for a lost link is ever sent on another.
Source: SPEC.md, section 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from malamute_py.client.settings import ClientSettings, Curve, Plain

_MESSAGES_QUEUED_MAX: Final = 64
"""Sent and not yet on the wire; a message carries about a MiB at most under load."""
_EVENTS: Final = (
    zmq.Event.CLOSED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)
_NEVER_MS: Final = 86_400_000
"""When libzmq would reconnect by itself: long after the session has closed the socket. Not -1:
there libzmq 4.3 takes the connection's queue away from the reader as soon as it breaks, which
drops what came before, a BYE too, and between two frames of a message ends the whole process
(`Assertion failed: !_more`, fq.cpp)."""
_MECHANISM_MISMATCH: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_TRY_AGAIN: Final = 300
"""ZAP status: a temporary failure."""


class Failure(NamedTuple):
    """Why a connection is not there."""

    code: str
    reason: str
    final: bool


class Transport:
    """A socket that is connecting or connected to one endpoint."""

    def __init__(self, context: zmq.Context[Any], settings: ClientSettings, endpoint: str) -> None:
        """Raises zmq.ZMQError: the endpoint or a key cannot be used at all."""
        self.endpoint = endpoint
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.monitor: zmq.Socket[bytes] | None = None
        try:
            self._set_options(settings)
            self.monitor = self.socket.get_monitor_socket(int(_EVENTS))
            self.descriptors = [int(self.socket.fd), int(self.monitor.fd)]
            """What to watch for reading; both are edge-triggered."""
            self.socket.connect(endpoint)
        except BaseException:
            self.close(0)
            raise

    def _set_options(self, settings: ClientSettings) -> None:
        socket = self.socket
        socket.linger = 0
        socket.reconnect_ivl = _NEVER_MS
        socket.connect_timeout = settings.attempt_ms
        socket.handshake_ivl = settings.attempt_ms
        socket.sndhwm = _MESSAGES_QUEUED_MAX
        socket.maxmsgsize = settings.frame_bytes_max
        credential = settings.credential
        if isinstance(credential, Plain):
            socket.plain_username = credential.user.encode()
            socket.plain_password = credential.password.encode()
        elif isinstance(credential, Curve):
            socket.curve_serverkey = credential.server_key.encode()
            socket.curve_publickey = credential.public_key.encode()
            socket.curve_secretkey = credential.secret_key.encode()

    def drain(self, most: int) -> Iterator[list[Any]]:
        """The messages that have come, at most so many, each a list of buffers without a copy."""
        receive = self.socket.recv_multipart
        for _ in range(most):
            try:
                frames = receive(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield [frame.buffer for frame in frames]

    def send(self, message: list[Any]) -> bool:
        """Send one message; False: the socket takes nothing now, and nothing was sent."""
        try:
            # Without a copy from 64 KiB on: copying into fresh pages was half of a producer's
            # time. The bytes are kept unchanged until they are confirmed anyway.
            self.socket.send_multipart(message, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def pending(self, *, to_send: bool) -> bool:
        """There is something to be done at once.

        To be asked before sleeping on the descriptors: both sockets must be looked at for
        theirs to signal again, the monitor's for the first time too (without that look, a
        refused connection went unnoticed until the attempt's time was over).
        """
        assert self.monitor is not None
        wanted = zmq.POLLIN | zmq.POLLOUT if to_send else zmq.POLLIN
        return bool(_events(self.socket) & wanted or _events(self.monitor) & zmq.POLLIN)

    def failure(self) -> Failure | None:
        """The first failure that the monitor has told since the last call; None: none."""
        found: Failure | None = None
        assert self.monitor is not None
        while found is None and _events(self.monitor) & zmq.POLLIN:
            event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            found = self._failure_of(zmq.Event(event["event"]), int(event["value"]))
        return found

    def _failure_of(self, event: zmq.Event, value: int) -> Failure | None:
        match event:
            case zmq.Event.CLOSED:
                return Failure("closed", f"nothing answers at {self.endpoint}", False)
            case zmq.Event.DISCONNECTED:
                return Failure("closed", f"{self.endpoint} closed the connection", False)
            case zmq.Event.HANDSHAKE_FAILED_AUTH:
                reason = f"{self.endpoint} refused the credential (status {value})"
                return Failure("unauthenticated", reason, value != _TRY_AGAIN)
            case zmq.Event.HANDSHAKE_FAILED_PROTOCOL if value == _MECHANISM_MISMATCH:
                reason = f"{self.endpoint} asks for another kind of credential"
                return Failure("unauthenticated", reason, True)
            case zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                # A wrong server key shows as this, a broker that dies just then, and mostly another
                # kind of credential: libzmq closes before it has sent which one it wants.
                reason = (
                    f"the handshake with {self.endpoint} failed; does it ask for another kind of "
                    "credential, or is its key another?"
                )
                return Failure("closed", reason, False)
            case _:
                return None

    def close(self, linger_ms: int) -> None:
        """Close the socket; what was sent may still leave within the linger time."""
        monitor = self.monitor
        # Both may be gone already, with a context that somebody else destroyed.
        with contextlib.suppress(zmq.ZMQError):
            self.socket.disable_monitor()
        if monitor is not None:
            monitor.close(0)
        self.socket.close(linger_ms)


def _events(socket: zmq.Socket[bytes]) -> int:
    """What a socket is ready for, in half of the time that the attribute `events` takes."""
    return socket.getsockopt(zmq.EVENTS)  # type: ignore[return-value]
