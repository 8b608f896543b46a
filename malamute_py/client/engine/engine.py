"""The work of a client's link that both shells share: receive, let the session decide, send.

Owns the session and its socket. The rule: all of it happens in the thread of the socket,
in bounded bursts, and what was received is taken in before a broker is called silent.

Words: the session is the protocol without a socket; it says when a socket is wanted (Connect) or is
to go (Disconnect), and what may leave. A shell, of the event loop or of a thread, calls step() and
sleeps in between on the socket's descriptors.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from typing import Any, Final

import zmq

from malamute_py.client.engine.transport import Transport
from malamute_py.client.session.events import Connect, Disconnect, Event
from malamute_py.client.session.session import Session
from malamute_py.client.settings import ClientSettings

_BURST: Final = 32
"""Messages taken in before the rest of the program gets its turn."""
_LOOK_MS: Final = 10
"""After so long a socket is looked at though it has not signalled: its news may come late."""
_GONE: Final = (zmq.ETERM, zmq.ENOTSOCK)
"""The context was terminated, or the socket closed by the end of the context."""
_PARTING_MS: Final = 500
"""Time that a BYE has to leave after the socket is closed."""


def clock_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


class Engine:
    """One session over one socket at a time."""

    def __init__(self, settings: ClientSettings, context: zmq.Context[Any] | None) -> None:
        """context: None is the process's own; inproc endpoints need the broker's."""
        self.settings = settings
        self.session = Session(settings, os.urandom, clock_ms())
        self.transport: Transport | None = None
        self.generation = 0
        """Changes with every socket, so that a shell knows when to watch another."""
        self._context = context if context is not None else zmq.Context.instance()
        self._unsent: deque[list[Any]] = deque()
        """Messages that were taken of the session and that the socket would not take yet."""
        self.now_ms = 0
        """Time of the last step."""
        self._looked_ms = 0
        """Time at which the socket was read last."""

    def step(self) -> list[Event]:
        """Take in what has come, do what is due, send what may leave; returns what happened."""
        try:
            self._turn()
        except zmq.ZMQError as error:
            if error.errno not in _GONE:
                raise
            # The context is the caller's, or an embedded broker's that has stopped.
            reason = "the zmq.Context of this client was terminated"
            self.session.lost("closed", reason, clock_ms(), final=True)
            self.session.take_transport()  # its wish to disconnect: drop() does it
            self.drop(linger_ms=0)
        return self.session.take_events()

    def _turn(self) -> None:
        """Receive, let the session's time go on, send, and change the transport if it says so."""
        session = self.session
        self.now_ms = now_ms = clock_ms()
        transport = self.transport
        # A step that was asked for to send something need not look for what has not come.
        if transport is not None and (transport.readable or now_ms - self._looked_ms >= _LOOK_MS):
            self._looked_ms = now_ms
            self._receive(transport, now_ms)
        session.wake(now_ms)
        self._send(now_ms)
        wanted = session.take_transport()
        if wanted is not None:
            self._connect_or_disconnect(wanted)
            # HELLO leaves at once. An endpoint that cannot be used ended the session just now,
            # which wants no socket then.
            self._send(now_ms)
            again = session.take_transport()
            if again is not None:
                self._connect_or_disconnect(again)

    def send(self) -> None:
        """Send what may leave, and nothing else; what happened is told by the next step.

        For a shell that knows that nothing else will leave with it.
        """
        # If the context is gone, the next step tells all callers.
        with contextlib.suppress(zmq.ZMQError):
            self._send(clock_ms())

    def _receive(self, transport: Transport, now_ms: int) -> None:
        """Hand all that has come to the session, then tell it of a failure of the transport."""
        # The failure is read first and told last: a BYE may still be waiting to be read.
        failure = transport.failure()
        while True:
            messages = list(transport.drain(_BURST))
            for frames in messages:
                self.session.receive(frames, now_ms)
            if failure is None:
                return
            if not messages:
                self.session.lost(failure.code, failure.reason, now_ms, final=failure.final)
                return

    def _send(self, now_ms: int) -> None:
        """Send what the socket would not take before, then what the session has ready."""
        transport = self.transport
        if transport is None:
            return
        # What the socket would not take goes first; what is asked for meanwhile gathers.
        if self._flush(transport):
            self._unsent.extend(self.session.take_outgoing(now_ms))
            self._flush(transport)

    def _flush(self, transport: Transport) -> bool:
        """Send what was taken of the session; True: nothing of it is left."""
        unsent = self._unsent
        while unsent:
            if not transport.send(unsent[0]):  # the socket's queue is full: it stays the first
                return False
            unsent.popleft()
        return True

    def _connect_or_disconnect(self, wanted: Connect | Disconnect) -> None:
        """Close the socket, and for Connect open another one.

        An endpoint that cannot be used at all ends the session.
        """
        self.drop(_PARTING_MS)
        if isinstance(wanted, Connect):
            self.generation += 1
            try:
                self.transport = Transport(self._context, self.settings, wanted.endpoint)
            except (zmq.ZMQError, ValueError) as error:
                if self._context.closed or getattr(error, "errno", 0) in _GONE:
                    raise zmq.ContextTerminated from error  # for step(), which ends the session
                reason = f"{wanted.endpoint} cannot be used: {error}"
                self.session.lost("bad_setting", reason, clock_ms(), final=True)

    def drop(self, linger_ms: int) -> None:
        """Close the socket, if there is one; nothing more is sent on it."""
        self._unsent.clear()
        if self.transport is not None:
            transport, self.transport = self.transport, None
            self.generation += 1  # the shell watches it no more
            transport.close(linger_ms)

    @property
    def busy(self) -> bool:
        """Whether a step has work at once, so that the shell is not to sleep.

        Asked after each step: without that look the socket's descriptor would not signal again.
        """
        transport = self.transport
        try:
            return transport is not None and transport.pending(to_send=bool(self._unsent))
        except zmq.ZMQError as error:
            if error.errno not in _GONE:
                raise
            return True  # the next step tells all callers

    def next_wake(self) -> int | None:
        """Latest time of the next step(), by clock_ms(); None: no need."""
        return self.session.next_wake()
