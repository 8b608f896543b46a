"""Peers by routing id, listener and link, and the messages that wait for each.

Owns link numbers, the way back to each peer, and messages that its socket would not take. The rule:
a number is given once and never again; a routing id is where to send, never whom a peer is, for the
peer may choose it. Source: docs/design.md, The core and its shell.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Container, Iterable, Sequence
from typing import Any, TypeAlias

import zmq

from malamute_protocol.commands import Command, Ping
from malamute_protocol.framing import encode_message
from malamute_protocol.header import Remains
from malamute_py.server.connections.connection import Connection
from malamute_py.server.connections.counts import Connections
from malamute_py.server.connections.numbering import HARMLESS
from malamute_py.server.sockets import Listener
from malamute_py.server.waiting import CHUNK_BYTES, Arrived, Waiting

Frames: TypeAlias = Sequence[Any]


_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE | zmq.NOBLOCK)
"""Flags as plain numbers: an `|` of zmq's flags costs as much as sending a small frame."""
FREED_A_TURN = 1_024
"""Messages and frames of lost links that are freed in a turn: 0.1 ms, and 0.7 ms where libzmq holds
their frames. The newest go first: of 180 MB in the other order the C library gave all back at the
last one, which took 21 ms."""
_CHUNK_COUNTS = CHUNK_BYTES >> 10
"""Messages as which a chunk of small ones counts then."""
_RETRY_MIN_MS = 1
_RETRY_MAX_MS = 100


class Unreachable(Exception):
    """The socket has no such peer any more."""


class Peer:
    """One link as the shell sees it."""

    __slots__ = (
        "commands",
        "connection",
        "fd",
        "frames",
        "identity",
        "is_new",
        "listener",
        "number",
        "numbered",
        "pending",
        "pending_bytes",
        "queued",
        "queued_bytes",
        "queued_parts",
        "retry_at_ms",
        "retry_ms",
        "routing_id",
        "send",
        "strict",
    )  # fmt: skip

    def __init__(
        self, number: int, listener: Listener, routing_id: bytes, fd: int, identity: str,
        connection: Connection | None,
    ) -> None:  # fmt: skip
        """number: of the link. identity: of the peer's credential; empty: it has none.

        fd: descriptor of the connection by which, as libzmq says, the messages come; -1 on inproc.
        connection: what the guard knows of it; None: that is found later, by Peers.attach().
        """
        self.number = number
        self.listener = listener
        self.routing_id = routing_id
        self.fd = fd
        self.identity = identity
        self.connection = connection
        # The send() of pyzmq's base class: the one over it is for other kinds of sockets, and costs
        # as much again.
        self.send = super(zmq.Socket, listener.socket).send
        # Ids of five bytes that begin with 0 are libzmq's own numbering and not given again. Others
        # are the peer's choice, and on a new connection the next one may choose them.
        self.numbered = len(routing_id) == 5 and routing_id[0] == 0
        """Whether the routing id is one of those that libzmq gives, each of them once. Another peer
        may claim it, but has to guess it among 2^32, and libzmq lets no peer have it while messages
        of the first one are still to be read."""
        self.strict = listener.authenticated or not self.numbered
        """Whether each message must be shown to have come by this peer's own connection: another
        peer may have the same routing id later, or credentials count."""
        self.is_new = False
        """True: the core has had nothing of it yet, and its connection cannot be told."""
        self.queued: Waiting | None = None
        """Messages that came while commands of an earlier one wait for their turn, if some do."""
        self.queued_bytes = 0
        self.queued_parts = 0
        self.commands: list[Command] = []
        self.frames: list[Any] = []
        """The commands of one message that wait for their turn, and the contents they own."""
        self.pending: deque[Frames] = deque()
        """Messages that the socket would not take, held until it does."""
        self.pending_bytes = 0
        self.retry_at_ms = 0
        self.retry_ms = _RETRY_MIN_MS

    def put(self, frames: Frames) -> bool:
        """Send one message; False: the socket takes no more for this peer now.

        Raises Unreachable: the peer is gone.
        """
        send = self.send
        try:
            send(self.routing_id, _MORE)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise Unreachable from None
            raise
        # Once the routing id was taken, so is the rest of the message.
        last = len(frames) - 1
        for index, frame in enumerate(frames):
            send(
                frame,
                _NOBLOCK if index == last else _MORE,
                len(frame) < _COPY_BELOW,  # copy: a large frame is lent to libzmq instead
            )
        return True

    def is_there(self) -> bool:
        """Whether the socket still knows the peer. The peer is sent a message for that."""
        try:
            self.put(HARMLESS)
        except Unreachable:
            return False
        return True

    def queue(self, arrived: Arrived) -> None:
        """Keep a message until the commands of those before it had their turn: catch_up()."""
        assert self.queued is not None
        self.queued.add(arrived)
        self.queued_bytes += arrived.bytes
        self.queued_parts += arrived.parts
        if self.connection is not None:
            self.connection.waiting += arrived.bytes
            self.connection.waiting_frames += arrived.parts

    def next_queued(self) -> Arrived:
        """Take the first message that waits; the guard no longer counts it as unread."""
        assert self.queued
        arrived = self.queued.take()
        self.queued_bytes -= arrived.bytes
        self.queued_parts -= arrived.parts
        self.waits_no_more(arrived.bytes, arrived.parts)
        return arrived

    def waits_no_more(self, size: int, parts: int) -> None:
        """Count messages that waited as read from the peer's connection."""
        if self.connection is not None:
            self.connection.waiting -= size
            self.connection.waiting_frames -= parts
        self.delivered(size, parts)

    def delivered(self, size: int, parts: int) -> None:
        """Count a whole message as read from the peer's connection; the guard judges the rest."""
        if self.connection is not None:
            self.connection.delivered += size
            self.connection.frames += parts

    def hold(self, frames: Frames, now_ms: int) -> None:
        """Keep a message that could not be sent, after the others; flush() tries again."""
        if not self.pending:
            self.retry_ms = _RETRY_MIN_MS
            self.retry_at_ms = now_ms + self.retry_ms
        self.pending.append(frames)
        self.pending_bytes += sum(map(len, frames))

    def flush(self, now_ms: int) -> bool:
        """Try to send what is held; True when nothing is left. Raises Unreachable."""
        pending = self.pending
        while pending:
            if not self.put(pending[0]):
                self.retry_ms = min(self.retry_ms * 2, _RETRY_MAX_MS)
                self.retry_at_ms = now_ms + self.retry_ms
                return False
            self.pending_bytes -= sum(map(len, pending.popleft()))
            self.retry_ms = _RETRY_MIN_MS
        return True


_QUESTION = encode_message([Ping(0)])
_COPY_BELOW = 64 << 10
"""Size up to which frames are copied: to copy 64 KiB (10 us) costs less than telling Python when
libzmq is done."""


class Peers:
    """All links by number and by the way they came."""

    def __init__(self, connections: Connections) -> None:
        """connections: the guard's connections, which a peer's descriptor leads to."""
        self._connections = connections
        self._next = 1
        """Number of the next link."""
        self._by_number: dict[int, Peer] = {}
        self._by_route: dict[Listener, dict[bytes, Peer]] = {}
        self._dropped: deque[Waiting] = deque()
        """Messages of lost links that waited for their turn, freed in shares: see free()."""
        self._remains = Remains()
        """Frames, commands and messages that were to be sent; freed before more of `_dropped`."""
        self.freeing = False
        """Whether there is something to free."""

    def __len__(self) -> int:
        return len(self._by_number)

    def routes(self, listener: Listener) -> dict[bytes, Peer]:
        """Return the listener's peers by routing id; for looking up, not for changing."""
        return self._by_route.setdefault(listener, {})

    def get(self, number: int) -> Peer | None:
        """Return the peer of a link."""
        return self._by_number.get(number)

    def numbers(self) -> list[int]:
        """Return the numbers of all links."""
        return list(self._by_number)

    def are_numbered(self, links: set[int]) -> bool:
        """Whether these are links, all with ids that libzmq gives no other: see Peer.numbered."""
        peers = [self._by_number.get(number) for number in links]
        return bool(peers) and all(peer is not None and peer.numbered for peer in peers)

    def is_same(self, peer: Peer, head: zmq.Frame) -> bool:
        """Whether a message that came by the peer's routing id came from that very peer.

        Asked for peers that are `strict`: another connection may use the id, too.
        """
        if peer.fd != _descriptor(head) or peer.identity != _identity(peer.listener, head):
            return False
        own = peer.connection
        if own is None or self._connections.get(peer.fd) is own:
            return True
        # It has ended, and these are its last messages: a numbered id is the link's own, whoever
        # has the descriptor by now. The next connection, which has another number, would have to
        # guess this one and to show a credential of the same user.
        return peer.numbered and not own.revoked

    def connection(self, head: zmq.Frame) -> Connection | None:
        """Return the connection by which a message came."""
        return self._connections.get(_descriptor(head))

    def is_known(self, head: zmq.Frame) -> bool:
        """Whether the guard has noted the very connection that a message came by.

        Until then the message is held. By its inode the connection is told from an earlier one that
        had the same descriptor.
        """
        connection = self.connection(head)
        if connection is None:
            return False
        try:
            return os.fstat(connection.fd).st_ino == connection.inode
        except OSError:
            return False

    def add(self, listener: Listener, head: zmq.Frame) -> Peer:
        """Make a link for the peer whose message begins with this frame; attach() comes next."""
        fd = _descriptor(head)
        peer = Peer(self._next, listener, head.bytes, fd, _identity(listener, head), None)
        self._next += 1
        self._by_number[peer.number] = peer
        self.routes(listener)[peer.routing_id] = peer
        return peer

    def attach(self, peer: Peer, unsure: Container[int]) -> bool:
        """Find the connection of a link that has none yet; False: its user has too many of them.

        True also where the connection cannot be told yet: the caller asks again at the link's next
        message. unsure: descriptors whose last connection has ended before any message of it was
        taken up: a message may be from it or from the next connection with the same descriptor.
        """
        if peer.fd >= 0 and peer.fd not in unsure:
            peer.connection = self._connections.get(peer.fd)
            if peer.connection is not None:
                peer.connection.links.add(peer.number)
                return self._connections.note_first_message(peer.connection, peer.identity)
        return True

    def ask(self, numbers: Iterable[int]) -> None:
        """Send each of these links a PING, if its peer takes messages now.

        Called for peers that the guard doubts: it cuts those that stay silent.
        """
        for number in numbers:
            peer = self._by_number.get(number)
            if peer is not None and not peer.pending:
                with contextlib.suppress(Unreachable):
                    peer.put(_QUESTION)

    def remove(self, number: int) -> Peer | None:
        """Forget a link that ended, with the messages that wait in both directions.

        Those are the peer's messages that came and wait for their turn (`queued`), and the broker's
        that the socket would not take (`pending`). Returns its peer; None: there is no such link.
        """
        peer = self._by_number.pop(number, None)
        if peer is None:
            return None
        routes = self._by_route[peer.listener]
        # A new peer may have come by the same routing id.
        if routes.get(peer.routing_id) is peer:
            del routes[peer.routing_id]
        self.drop_queued(peer)
        if peer.connection is not None:
            peer.connection.links.discard(number)
        if peer.pending:
            # Held messages may be many: free() gives them back in shares.
            self._remains.parts.append(peer.pending)
            self.freeing = True
            peer.pending = deque()
        return peer

    def drop_queued(self, peer: Peer) -> None:
        """Drop what waits of a peer for its turn, and have its next message taken up at once.

        Called when nothing waits any more, when a message was malformed, and when the link ends.
        The guard no longer counts the messages as unread. Their memory is freed in shares by
        free(): there may be as many as a connection may leave unread.
        """
        if peer.queued:
            peer.waits_no_more(peer.queued_bytes, peer.queued_parts)
            self._dropped.append(peer.queued)
            self.freeing = True
        if peer.commands:
            self._remains.parts += (peer.commands, peer.frames)
            self.freeing = True
        peer.queued, peer.queued_bytes, peer.queued_parts = None, 0, 0
        peer.commands, peer.frames = [], []

    def free(self) -> None:
        """Free FREED_A_TURN of the dropped messages, frames and commands, in each turn of the loop.

        To free all at once would hold the loop for long.
        """
        most, dropped, remains = FREED_A_TURN, self._dropped, self._remains
        while most > 0 and (dropped or remains.parts):
            if not remains.parts:
                frames = dropped[-1].drop()
                remains.parts.append(frames)
                most -= 1 if frames else _CHUNK_COUNTS
                if not dropped[-1]:
                    dropped.pop()
            most = remains.free(most)
        self.freeing = bool(dropped or remains.parts)


def _descriptor(head: zmq.Frame) -> int:
    """Return the descriptor of the connection that a message came by, as libzmq says; -1: none."""
    try:
        return int(head.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1  # An inproc peer has no connection.


def _identity(listener: Listener, head: zmq.Frame) -> str:
    """Return the user that the authenticator told libzmq for a message's connection; "": none."""
    if not listener.authenticated:
        return ""
    return str(head.get("User-Id"))
