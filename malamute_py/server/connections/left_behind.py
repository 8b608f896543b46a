"""Bytes that ended connections have left in libzmq's queues, and the addresses to blame for them.

Owns the ended connections whose bytes still fill memory, by share (a user, or an address). libzmq
keeps what it has read of a connection until it is taken up, also when the connection has gone: no
look sees it, and a peer that connects again and again would have no bound. The rules: what is left
counts for its share until the loop has taken it up, or has taken up nothing of it for a second, and
memory was given back since (its free buffers lie between others, and new ones fill other pages); an
address is to blame when memory has grown by more than a share and its connections ended most often;
when ended connections of all addresses left too much for the whole broker, no peer may connect.
Source: ARCHITECTURE.md, "What a peer may cost".
"""

from __future__ import annotations

import heapq
from collections import Counter

from malamute_py.server.connections.connection import SMALL_BYTES, Connection
from malamute_py.server.connections.memory import Memory

_LEFT_MS = 1_000
"""Time without a message taken up after which an ended connection counts as having left nothing:
each connection's messages have their turn within that time, and libzmq drops the beginning of a
message by itself."""
_LEFT_MAX = 512
"""Ended connections whose memory is counted, the largest: each check looks at all of them."""
_ENDED_LEAST = 2
"""Connections of an address that must have ended before it is blamed for what memory holds: honest
clients lose one too. Measured: with 8, tiny messages of one address took 398 MiB; with 3, partial
messages took 381."""


class LeftBehind:
    """Ended connections since the sockets were empty; used by the loop thread only."""

    def __init__(self, memory: Memory, share_bytes_max: int, bytes_max: int) -> None:
        """share_bytes_max: bound of the unread bytes of one user or address; bytes_max: of all."""
        self._memory = memory
        self._share_bytes_max = share_bytes_max
        self._bytes_max = bytes_max
        self._ended_by_address: Counter[str] = Counter()
        """Address -> connections that ended since the sockets were empty, and whose messages may
        still wait."""
        self._connections: list[Connection] = []
        """Ended connections among them that had much unread at the last look, while it fills
        memory."""
        self._now_ms = 0
        self._drained = False
        """Whether the sockets were read empty: nothing of ended connections waits in them."""

    @property
    def is_empty(self) -> bool:
        """Whether no ended connection is known to have left much."""
        return not self._connections

    def begin(self, now_ms: int, drained: bool) -> None:
        """Begin a check. drained: the sockets have been read until they were empty."""
        self._now_ms, self._drained = now_ms, drained

    def add(self, ended: Connection) -> None:
        """Note that a connection ended, and what it has left in libzmq's queues if that is much."""
        self._ended_by_address[ended.address] += 1
        if ended.memory > SMALL_BYTES and not self._drained:  # else the loop has taken it up
            ended.taken_ms = self._now_ms
            self._connections.append(ended)
            self._memory.has_filled = True

    def clear(self) -> None:
        """Forget all ended connections: the sockets are empty."""
        self._ended_by_address.clear()
        self._connections.clear()

    def to_blame(self) -> set[str]:
        """Return the addresses whose connections ended most often, if memory grew by a share."""
        ended = self._ended_by_address
        if not ended or self._memory.grown() <= self._share_bytes_max:
            return set()
        most = max(ended.values())
        if most < _ENDED_LEAST:
            return set()
        return {address for address, count in ended.items() if count == most}

    def fills_all(self) -> bool:
        """Whether ended connections left so much that no peer may connect.

        Peers with many addresses come again from another one each time, so that no address is to
        blame.
        """
        if not self._ended_by_address:
            return False
        grown = self._memory.grown()
        left = min(sum(gone.memory for gone in self._connections), grown)
        # Three quarters: no more of a bound counts for ended ones, see unread.py, _counted().
        return left > self._bytes_max // 4 * 3 or grown > self._bytes_max

    def by_share(self) -> tuple[Counter[str], Counter[str]]:
        """Return the memory that ended connections fill in libzmq's queues, and how many they are.

        Both by share (the user or address that bytes count for). Called in each check of the guard
        while there are some, it also forgets connections of which nothing is left.
        """
        kept: list[Connection] = []
        shares: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for gone in self._connections:
            taken = gone.delivered - gone.seen  # by the loop, since the last look
            if taken:
                rest = max(0, gone.unread - taken)
                gone.unread, gone.seen, gone.taken_ms = rest, gone.delivered, self._now_ms
            elif self._now_ms - gone.taken_ms >= _LEFT_MS:
                gone.unread = 0
            # Taken up or not, it fills memory until the C library gave that back to the system.
            if gone.unread or not self._memory.given_back_since(gone.taken_ms):
                kept.append(gone)
                shares[gone.share] += gone.memory
                counts[gone.share] += 1
        if len(kept) > _LEFT_MAX:  # each check looks at all of them
            kept = heapq.nlargest(_LEFT_MAX, kept, key=lambda gone: gone.memory)
        self._connections = kept
        return shares, counts
