"""One DEALER socket of a client, and what its monitor tells.

Owns the socket's options and the reading of connection failures. The rule: one thread a
socket, never blocking, never reconnecting by itself: the session decides when a new one is
made, so nothing that was queued for a lost link is ever sent on another.

Words: a monitor is a second socket, on which libzmq tells of the first one's connection. The
descriptors of both are edge-triggered: one signals once, and again only after the events of its
socket were looked at. Source: SPEC.md, section 2.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from malamute_py.client.settings import ClientSettings, Curve, Plain

_MESSAGES_QUEUED_MAX: Final = 64
"""Sent and not yet on the wire; a message carries a batch or a few, of 2 MiB at most by default."""
_EVENTS: Final = (
    zmq.Event.CLOSED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)
_NEVER_MS: Final = 86_400_000
"""Pause before libzmq would reconnect by itself: the session closes the socket long before. Not -1:
there libzmq 4.3 takes the connection's queue away from the reader as soon as it breaks, which
drops what came before, a BYE too, and between two frames of a message ends the whole process
(`Assertion failed: !_more`, fq.cpp)."""
_MECHANISM_MISMATCH: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_COPY_BELOW: Final = 8 << 10
"""Size of a received frame below which it is copied; see drain()."""
_SEND_COPY_BELOW: Final = 64 << 10
"""Size of a sent frame below which it is copied; see send()."""
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
"""Numbers: an `|` of flags of zmq costs as much as sending a small frame."""
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)
_MOST_OF: Final = 0.9
"""Part of an attempt's time after which a handshake that fails was given up by libzmq."""
_TRY_AGAIN: Final = 300
"""ZAP status: a temporary failure."""
_KEPT_BYTES: Final = 4 << 20
"""Size of the block of keep_freed()."""


@functools.cache
def keep_freed() -> None:
    """Have the allocator keep what large messages leave, up to twice _KEPT_BYTES of it.

    glibc maps a block from 128 KiB on anew and gives it back when it is freed, so that each page
    of each message was faulted in and cleared: 90,000 times for 1.7 GB. The largest mapped block
    ever freed is where it begins to do so from then on. Never touched, this one costs two calls.
    """
    bytes(_KEPT_BYTES)


_CREDENTIALS: Final = {
    type(None): "none; give credential=Plain(user, password) or credential=Curve(...)",
    Plain: "a password",
    Curve: "a key",
}
"""Credential that a client has given, in words."""


class Failure(NamedTuple):
    """Reason why there is no connection."""

    code: str
    reason: str
    final: bool
    """Whether another attempt would fail as well, so that the session ends."""


class Transport:
    """A socket that is connecting or connected to one endpoint."""

    def __init__(self, context: zmq.Context[Any], settings: ClientSettings, endpoint: str) -> None:
        """Begin to connect. Raises zmq.ZMQError: the endpoint or a key cannot be used at all."""
        keep_freed()
        self.endpoint = endpoint
        self._credential = _CREDENTIALS[type(settings.credential)]
        self._silent_at_s = time.monotonic() + settings.attempt_ms / 1000 * _MOST_OF
        """A handshake that fails later than this was not answered: libzmq gave it up."""
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._send = _send_of(self.socket)
        self.monitor: zmq.Socket[bytes] | None = None
        self.readable = True
        """Something may have come: the socket's descriptor has signalled, or was not looked at."""
        self._alarmed = True
        """Whether the monitor may tell of a failure: it has signalled, or was not looked at yet."""
        self._failed = False
        """A failure was returned: what the monitor tells after it is of no use."""
        self._armed = False
        """The socket was found empty, and nothing was sent since: its descriptor will signal."""
        try:
            self._set_options(settings)
            self.monitor = self.socket.get_monitor_socket(int(_EVENTS))
            self.descriptors = [int(self.socket.fd), int(self.monitor.fd)]
            """Descriptors to watch for reading, the socket's first; both are edge-triggered."""
            self.socket.connect(endpoint)
        except BaseException:
            self.close(linger_ms=0)
            raise

    def _set_options(self, settings: ClientSettings) -> None:
        """Set bounds, waits and the credential of the socket before it connects."""
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
        """Yield the messages that have come, at most so many, each a list of buffers, a frame each.

        Large frames are not copied. Small ones are: libzmq cuts them from a buffer of 8 KiB that
        each of them would keep, and bytes are read at less cost than a view of a frame.
        """
        socket = self.socket
        receive = socket.recv  # (flags, copy): False gives frames that are copied only if asked
        for _ in range(most):
            # Asked first: the exception that an empty socket raises costs three times as much.
            if not _events(socket) & _POLLIN:
                self.readable, self._armed = False, True
                return
            frame = receive(_NOBLOCK, False)
            frames = [frame.bytes if len(frame) < _COPY_BELOW else frame.buffer]
            # The whole message has come: libzmq shows the first frame no earlier.
            while frame.more:
                frame = receive(_NOBLOCK, False)
                frames.append(frame.bytes if len(frame) < _COPY_BELOW else frame.buffer)
            yield frames

    def send(self, message: list[Any]) -> bool:
        """Send one message; False: the socket takes nothing now, and nothing was sent."""
        send = self._send
        # libzmq may take notice, amid sending, of what has come, and does not signal it then.
        self._armed = False
        left = len(message)
        try:
            for frame in message:
                left -= 1
                # Without a copy from 64 KiB on: copying into fresh pages was half of a producer's
                # time. The bytes are kept unchanged until they are confirmed anyway.
                copied = len(frame) < _SEND_COPY_BELOW
                send(frame, _MORE if left else _NOBLOCK, copied)
        except zmq.Again:
            # Only the first frame can be refused: once it was taken, so is the rest.
            return False
        return True

    def pending(self, *, to_send: bool) -> bool:
        """Whether the socket or its monitor can be read, or written if `to_send`, at once.

        To be asked before sleeping on the descriptors: both sockets must be looked at for
        theirs to signal again, the monitor's for the first time too: without that look, a
        refused connection goes unnoticed until the attempt's time is over.
        """
        if to_send or not (self._armed or self.readable):
            events = _events(self.socket, _POLLIN | _POLLOUT)
            self.readable = self.readable or bool(events & _POLLIN)
            self._armed = not self.readable
            if to_send and events & _POLLOUT:
                return True
        self.readable = self.readable or self._told()
        return self.readable

    def _told(self) -> bool:
        """Whether the socket's monitor has an event to read."""
        if self._alarmed and not self._failed:
            assert self.monitor is not None
            self._alarmed = bool(_events(self.monitor) & _POLLIN)
        return self._alarmed and not self._failed

    def signalled(self, descriptor: int) -> None:
        """Note that one of the descriptors can be read; called by the shell that watches them."""
        self.readable = True  # what the monitor reports comes after what was received
        socket_descriptor, _ = self.descriptors
        if descriptor != socket_descriptor:
            self._alarmed = True

    def failure(self) -> Failure | None:
        """Return the first failure that the monitor told; None: none yet, or it was returned."""
        found: Failure | None = None
        while found is None and self._told():
            assert self.monitor is not None
            event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            found = self._failure_of(zmq.Event(event["event"]), int(event["value"]))
        self._failed = self._failed or found is not None
        return found

    def _failure_of(self, event: zmq.Event, value: int) -> Failure | None:
        """Return what an event of the socket means to the session; None: no failure."""
        match event:
            case zmq.Event.CLOSED:
                return Failure("closed", f"nothing answers at {self.endpoint}", final=False)
            case zmq.Event.CONNECT_RETRIED:
                # It follows on each other failure, which was returned before; it comes alone where
                # no connection could be begun.
                reason = f"the host name in {self.endpoint} has no address here; is it spelt right?"
                return Failure("unknown_host", reason, final=False)
            case zmq.Event.DISCONNECTED:
                return Failure("closed", f"{self.endpoint} closed the connection", final=False)
            case zmq.Event.HANDSHAKE_FAILED_AUTH:
                reason = f"{self.endpoint} refused the credential"
                return Failure("unauthenticated", reason, final=value != _TRY_AGAIN)
            case zmq.Event.HANDSHAKE_FAILED_PROTOCOL if value == _MECHANISM_MISMATCH:
                reason = (
                    f"{self.endpoint} asks for another kind of credential than {self._credential}"
                )
                return Failure("unauthenticated", reason, final=True)
            case zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                # A wrong server key shows as this, a broker that dies just then, and mostly another
                # kind of credential: libzmq closes before it has sent which one it wants.
                reason = (
                    f"the handshake with {self.endpoint} failed; does it ask for another kind of "
                    "credential, or is its key another?"
                )
                if time.monotonic() >= self._silent_at_s:
                    reason = f"{self.endpoint} took the connection and is silent"
                    return Failure("silent", reason, final=False)
                return Failure("handshake", reason, final=False)
            case _:
                return None

    def close(self, linger_ms: int) -> None:
        """Close the socket; what was sent may still leave within the linger time."""
        monitor = self.monitor
        # Socket and monitor may be closed already, by a program that destroyed their context.
        with contextlib.suppress(zmq.ZMQError):
            self.socket.disable_monitor()
        if monitor is not None:
            monitor.close(0)
        self.socket.close(linger_ms)


def _send_of(socket: zmq.Socket[bytes]) -> Callable[..., Any]:
    """Return a socket's send() of libzmq's binding, past that of pyzmq's class over it.

    The layer in between is for other kinds of sockets, and costs as much as the sending.
    """
    return super(zmq.Socket, socket).send


def _events(socket: zmq.Socket[bytes], asked: int = _POLLIN) -> int:
    """Return which of the asked events a socket is ready for.

    One zmq_poll() of pyzmq takes a third of the time of its getsockopt(EVENTS), and has the same
    effect: libzmq's poll reads the events of the socket, too.
    Raises zmq.ZMQError: it was closed, or its context ended. pyzmq would poll the descriptor 0 for
    one that was closed, and a client whose standard input is silent would wait on.
    """
    if socket.closed:
        raise zmq.ZMQError(zmq.ENOTSOCK)
    # One pair (socket, events) if it is ready for any, else none: the sum is these events, or 0.
    return sum(found for _, found in zmq.zmq_poll([(socket, asked)], 0))
