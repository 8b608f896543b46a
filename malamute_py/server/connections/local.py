"""Local connections: what they fill in memory, where the kernel counts no bytes.

Owns the judgement of connections over ipc by the growth of memory. libzmq reads a local socket
empty at once, so that neither the kernel nor a look at the socket tells what came in. Two things
tell. While messages of local peers wait, memory grows by them: the connection of which most were
taken up meanwhile is cut (measured: without it, two peers with tiny messages took 2.7 GiB in 6 s).
And while nothing waits, only the beginning of a message can fill memory, and no whole message comes
of its connection: a peer that says nothing while memory grows is asked for a PONG, and is cut when
none comes. A stretch is the checks in a row in which local messages wait; a share is what counts
for one local user. The rule: growth that other connections explain counts for none of these; a peer
that is cut by mistake (it stood still for so long, say) connects again and loses nothing. Source:
ARCHITECTURE.md, "What a peer may cost".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from malamute_py.server.connections.connection import Connection
from malamute_py.server.connections.memory import Memory

ANSWER_MS = 1_000
"""Time that a peer has for its PONG."""
_LEAST_BYTES = 8 << 20
"""Growth that is of no concern."""


class LocalConnections:
    """Judges connections over ipc; used by the loop thread only."""

    def __init__(self, memory: Memory, share_bytes_max: int) -> None:
        """share_bytes_max: bound of the unread bytes of one user or address."""
        self._memory = memory
        self._share_bytes_max = share_bytes_max
        self._stretch = 1
        """Number of the stretch: the checks of the guard since local messages were all taken up."""
        self._rss = memory.rss
        """Resident memory at the last check before this stretch, or when the last one was cut."""
        self._cuts = 0
        """Connections that were cut in this stretch."""
        self.doubted: list[Connection] = []
        """Connections whose peers are to be asked for a sign of life; the loop does it."""

    def begin(self, *, waits: bool) -> None:
        """Begin a check of the guard. waits: whether local peers' messages wait to be taken up."""
        if not waits:
            # The next stretch begins here, as far as messages wait at the next check.
            self._stretch += 1
            self._cuts = 0
            self._rss = self._memory.rss
        # Memory that was given back makes room.
        self._rss = min(self._rss, self._memory.rss)

    def judge(
        self, connection: Connection, said: bool, explained: int, now_ms: int, drained: bool
    ) -> str | None:
        """Return why a connection has to end, for a message that it began; None: it may stay.

        For the guard's look at a connection over ipc. said: whether a whole message of it was taken
        up since the last look. explained: memory of the unread bytes of all connections that were
        counted, which so is not this one's. drained: nothing waits to be taken up.
        """
        # The first look since messages of local peers wait: flood() counts its frames from here.
        if connection.stretch != self._stretch:
            connection.stretch, connection.stretch_frames = self._stretch, connection.frames
        # Growth counts from its last whole message on, or from the least memory since.
        rss = self._memory.rss
        if said or rss < connection.heard_rss:
            connection.heard_rss, connection.asked_ms = rss, 0
        grown = rss - connection.heard_rss - explained
        if not drained or grown <= self._share_bytes_max // 2:
            return None
        if not connection.asked_ms:
            connection.asked_ms = now_ms
            self.doubted.append(connection)  # the loop sends a PING
        elif now_ms - connection.asked_ms >= ANSWER_MS:
            return f"memory grew by {grown} bytes, and its peer, which was asked, says nothing"
        return None

    def ended(self, connection: Connection) -> None:
        """Have memory given back that the beginning of a message of an ended connection took.

        Nothing was seen to be unread, so that the growth counted as what honest clients fill.
        """
        memory = self._memory
        if memory.rss - connection.heard_rss > _LEAST_BYTES:
            # Memory gives back what it has grown beyond `before`.
            memory.before = min(memory.before, connection.heard_rss)
            memory.has_filled = True

    def flood(self, local: Iterable[Connection], explained: int) -> tuple[Connection, str] | None:
        """Return the connection to cut for local messages that wait, and why; None: there is none.

        Called while messages of local peers wait (a stretch). The kernel does not tell whose they
        are: the connection is cut of which most were taken up meanwhile. The first is cut when
        memory has grown by the bound of a share, the next at half as much, and so on, so that
        together they come to two shares. explained: memory of unread bytes that were counted.
        """
        grown = self._memory.rss - self._rss - explained
        if grown <= max(self._share_bytes_max >> self._cuts, _LEAST_BYTES):
            return None
        # Frames of each connection that were taken up since messages wait.
        taken = {
            each: each.frames - each.stretch_frames
            for each in local
            if each.stretch == self._stretch
        }
        shares: Counter[str] = Counter()
        for each, frames in taken.items():
            shares[each.share] += frames
        if not shares:
            return None
        share = max(shares, key=shares.__getitem__)  # the local user that sent most
        largest = max((each for each in taken if each.share == share), key=taken.__getitem__)
        if not taken[largest]:
            return None
        self._cuts += 1
        self._rss = self._memory.rss  # growth counts anew from here
        # What it leaves counts until it is taken up and given back: see left_behind.py.
        largest.unread = largest.memory = grown
        return (
            largest,
            f"memory grew by {grown} bytes while local messages waited, most of them its",
        )
