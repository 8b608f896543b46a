"""Simulated DEALER sockets, on which the client's own transport runs.

Owns the manners of libzmq that the client's transport has to know. The rules: a descriptor tells of
a change and not of a state: it signals when something comes to a socket that was found empty, or
when there is room again after a refusal; looking at the socket, and sometimes sending on it, takes
the signal away; a monitor at which no one has looked does not signal. Messages sent before close()
may still leave within the linger time; messages that have arrived can be read after the connection
is lost. Each connection may have an appointed end: at its k-th message in one direction, before the
message arrives or after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

import zmq

from malamute_protocol import commands as c
from malamute_py.client.aio import link as loop_link
from malamute_py.client.aio import mail as aio_mail
from malamute_py.client.engine import engine
from malamute_py.client.engine import transport as transport_module
from malamute_py.client.sync import link as thread_link
from malamute_py.client.sync import mail as sync_mail
from tests.simulation.network import Connection, Message


class Owner(Protocol):
    """The process that a socket belongs to."""

    name: str

    @property
    def late_hellos(self) -> bool: ...
    def descriptor(self) -> int: ...
    def opened(self, end: Signalling) -> None: ...
    def woken(self) -> None: ...
    def connect(self, socket: DealerSocket) -> Connection | None: ...
    def after(self, delay_us: int, action: Callable[[], None]) -> None: ...
    def draw_us(self, low: int, high: int) -> int: ...
    def chance(self, share: float) -> bool: ...
    def said(self, connection: Connection, message: Message) -> None: ...
    def overheard(
        self, connection: Connection, commands: list[c.Command], frames: list[bytes]
    ) -> None: ...
    def parted(self, connection: Connection) -> None: ...


class Signalling:
    """A descriptor, and the messages to read from it."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.fd = owner.descriptor()
        self.signalled = False
        self.closed = False
        self._asleep = False
        """True: it was found empty, and the next message is signalled."""
        owner.opened(self)

    def signal(self) -> None:
        """Note that something has changed."""
        if self._asleep and not self.closed:
            self._asleep = False
            self.signalled = True
            self.owner.woken()

    def looked_at(self, *, empty: bool) -> None:
        """Take the signal up."""
        self.signalled = False
        self._asleep = empty


class Frame:
    """One received frame."""

    __slots__ = ("buffer", "bytes", "more")

    def __init__(self, data: bytes, more: bool) -> None:
        self.bytes = data
        self.buffer = memoryview(data)
        self.more = more

    def __len__(self) -> int:
        return len(self.bytes)


class MonitorSocket(Signalling):
    """Reports events of the connection."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._told: deque[dict[str, int]] = deque()

    def tell(self, event: zmq.Event) -> None:
        """Note an event of the connection."""
        self._told.append({"event": int(event), "value": 0})
        self.signal()

    def events(self, asked: int) -> int:
        """Return events as zmq_poll does."""
        self.looked_at(empty=not self._told)
        return int(zmq.POLLIN) & asked if self._told else 0

    def recv_multipart(self, _flags: int) -> dict[str, int]:
        """Return the next event; the transport's parser of it is replaced."""
        return self._told.popleft()

    def close(self, _linger: int = 0) -> None:
        """Report nothing more."""
        self.closed = True


class DealerSocket(Signalling):
    """One socket, from its making to its close; a client of the simulated network."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._asleep = True
        self.name = owner.name
        self.monitor: MonitorSocket | None = None
        self.connection: Connection | None = None
        self._inbox: deque[Message] = deque()
        self._reading: deque[bytes] = deque()
        self._writing: list[bytes] = []
        self._refused = False
        self._heard = False

    # --- the transport's side ------------------------------------------------------------------

    def get_monitor_socket(self, _events: int) -> MonitorSocket:
        """Return its monitor."""
        self.monitor = MonitorSocket(self.owner)
        return self.monitor

    def disable_monitor(self) -> None:
        """Tell the monitor nothing more."""

    def connect(self, _endpoint: str) -> None:
        """Connect; a broker that is away refuses a little later."""
        self.connection = self.owner.connect(self)
        if self.connection is None:
            self._tell(zmq.Event.CLOSED, 50, 3_000)
        else:
            self.connection.up.writable = self._room

    def _tell(self, event: zmq.Event, low: int, high: int) -> None:
        def act() -> None:
            if self.monitor is not None and not self.monitor.closed:
                self.monitor.tell(event)

        self.owner.after(self.owner.draw_us(low, high), act)

    def _room(self) -> None:
        if self._refused and not self.closed:
            self._refused = False
            self._asleep = True
            self.signal()

    def events(self, asked: int) -> int:
        """Return events as zmq_poll does."""
        self.looked_at(empty=not (self._inbox or self._reading))
        up = None if self.connection is None else self.connection.up
        found = int(zmq.POLLIN) if self._inbox or self._reading else 0
        if up is not None and len(up.under_way) < up.high_water:
            found |= int(zmq.POLLOUT)
        return found & asked

    def recv(self, _flags: int = 0, _copy: bool = True) -> Frame:
        """Return the next frame of the next message."""
        if not self._reading:
            self._reading.extend(self._inbox.popleft())
        data = self._reading.popleft()
        return Frame(data, bool(self._reading))

    def send(self, frame: Any, flags: int = 0, _copy: bool = True) -> None:
        """Send a frame. Raises zmq.Again: no room, said of the first frame only."""
        connection = self.connection
        if self.owner.chance(0.5):
            self.signalled = False
        if not self._writing and connection is not None:
            up = connection.up
            if len(up.under_way) >= up.high_water:
                self._refused = True
                up.wants()
                raise zmq.Again
        self._writing.append(bytes(frame))
        if flags & int(zmq.SNDMORE):
            return
        message, self._writing = self._writing, []
        if connection is not None:
            self.owner.said(connection, message)
            connection.up.send(message)

    def close(self, linger: int = 0) -> None:
        """Close the socket; messages that were sent may still leave."""
        self.closed = True
        connection = self.connection
        if connection is None:
            return
        connection.down.close()
        # An unanswered message may be a HELLO: it may arrive after that of the next attempt.
        if linger and connection.open and (self._heard or self.owner.late_hellos):
            delay_us = self.owner.draw_us(10, 20_000)
            self.owner.after(delay_us, lambda: self._part(connection))
        else:
            self._part(connection)

    def _part(self, connection: Connection) -> None:
        if connection.open:
            connection.drop()
            self.owner.parted(connection)

    # --- the network's side ----------------------------------------------------------------------

    def arrive(self, connection: Connection, message: Message) -> None:
        """Take a message."""
        if connection is self.connection and not self.closed:
            self._heard = True
            self._inbox.append(message)
            self.signal()

    def lost(self, connection: Connection) -> None:
        """Note that the operating system has noticed a lost connection."""
        if connection is self.connection and not self.closed:
            connection.drop()
            self._tell(zmq.Event.DISCONNECTED, 1, 200)

    def overheard(
        self, connection: Connection, commands: list[c.Command], frames: list[bytes]
    ) -> None:
        """Note a message for this socket that the broker hands to the network."""
        self.owner.overheard(connection, commands, frames)


class Context:
    """Stands in for a zmq.Context."""

    closed = False

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def socket(self, _kind: int) -> DealerSocket:
        """Return a new socket."""
        return DealerSocket(self._owner)


@contextmanager
def simulated_transport(
    now_ms: Callable[[], int], random: Callable[[int], bytes]
) -> Iterator[None]:
    """Have the client library run on simulated sockets, time and randomness for a while."""
    with ExitStack() as stack:
        for name, value in (
            ("_events", lambda socket, asked=int(zmq.POLLIN): socket.events(asked)),
            ("_send_of", lambda socket: socket.send),
            ("parse_monitor_message", lambda told: told),
        ):
            stack.enter_context(patch.object(transport_module, name, value))
        for module in (aio_mail, engine, loop_link, sync_mail, thread_link):
            stack.enter_context(patch.object(module, "clock_ms", now_ms))
        stack.enter_context(patch.object(engine, "os", SimpleNamespace(urandom=random)))
        yield
