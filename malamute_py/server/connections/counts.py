"""Connections by descriptor, and how many each address and each user has.

Owns the counts and their bounds. The rule: beyond a bound one connection is surplus: the newest.
Among connections that have sent no message yet it is the longest waiting one of the address that
has most of them, once it had its time to speak; waiting connections of one address so keep no other
address out. Source: ARCHITECTURE.md, "What a peer may cost".
"""

from __future__ import annotations

from collections import Counter

from malamute_py.config import LinksSection
from malamute_py.server.connections.connection import Connection


class Connections:
    """All connections that were accepted and have not ended; changed by the loop thread only."""

    def __init__(self, bounds: LinksSection, connections_max: int) -> None:
        """bounds: the section `links`, with the numbers of connections that are allowed.

        connections_max: of all; fewer than in the configuration where descriptors are few.
        """
        self._bounds = bounds
        self.most = connections_max
        """How many there may be at one time."""
        self._by_fd: dict[int, Connection] = {}
        self._local: dict[int, Connection] = {}
        """Connections over ipc, of which the kernel counts no bytes, by descriptor."""
        self._by_address: Counter[str] = Counter()
        self._by_user: Counter[str] = Counter()
        self._silent: dict[int, Connection] = {}
        """Connections that have sent no message yet, by descriptor, the oldest first."""
        self._silent_by_address: Counter[str] = Counter()
        self.accepted = 0
        """Connections that have come so far."""

    def __len__(self) -> int:
        return len(self._by_fd)

    def get(self, fd: int) -> Connection | None:
        """Return the connection that libzmq has under this descriptor."""
        return self._by_fd.get(fd)

    def descriptors(self) -> list[int]:
        """Return the descriptors of all connections."""
        return list(self._by_fd)

    def all(self) -> list[Connection]:
        """Return the connections that are known. From any thread."""
        return list(self._by_fd.values())

    def local(self) -> list[Connection]:
        """Return the connections over ipc."""
        return list(self._local.values())

    def silent(self) -> list[Connection]:
        """Return the connections that have sent no message yet, the oldest first."""
        return list(self._silent.values())

    @property
    def silent_count(self) -> int:
        """Return how many have sent no message yet. From any thread."""
        return len(self._silent)

    def clear(self) -> None:
        """Forget all connections; the counts are not asked any more."""
        self._by_fd.clear()

    def add(self, connection: Connection) -> None:
        """Count a connection that was accepted."""
        address = connection.address
        self._by_fd[connection.fd] = self._silent[connection.fd] = connection
        self._by_address[address] += 1
        self._silent_by_address[address] += 1
        if not connection.is_tcp:
            self._local[connection.fd] = connection

    def remove(self, connection: Connection) -> None:
        """Remove a connection from the counts."""
        del self._by_fd[connection.fd]
        self._local.pop(connection.fd, None)
        _less(self._by_address, connection.address)
        if self._silent.pop(connection.fd, None) is not None:
            _less(self._silent_by_address, connection.address)
        if connection.user:
            _less(self._by_user, connection.user)

    def note_first_message(self, connection: Connection, user: str) -> bool:
        """Note the first message of a link; False: its connection is one too many of its user.

        user: the identity of the connection's credential; empty: it has none.
        """
        connection.spoke = True
        # The connection's first link; further ones change nothing.
        if self._silent.pop(connection.fd, None) is not None:
            _less(self._silent_by_address, connection.address)
            connection.user = user
            if user:
                self._by_user[user] += 1
                most = self._bounds.user_connections_max
                connection.surplus = self._by_user[user] > most
        return not connection.surplus

    def surplus(self, newest: Connection) -> tuple[Connection | None, str]:
        """Return the connection to end now that one more came, and why; "": none has to end.

        That is the newest where there are too many, and the one that is silent longest where too
        many have not spoken yet. None with a reason: these came a moment ago, and none has to end.
        """
        bounds, address, now_ms = self._bounds, newest.address, newest.accepted_ms
        if len(self._by_fd) > self.most:
            return newest, f"there are {self.most} connections already"
        if self._by_address[address] > bounds.address_connections_max:
            most = bounds.address_connections_max
            return newest, f"its address has {most} connections already"
        if self._silent_by_address[address] > bounds.address_greetings_max:
            return self._oldest_silent(
                address, now_ms
            ), "too many connections of its address are silent"
        if len(self._silent) > bounds.greetings_max:
            # The address that has most silent connections loses one, whoever came last.
            (most_of, _), *_ = self._silent_by_address.most_common(1)
            return self._oldest_silent(most_of, now_ms), "too many connections are silent"
        return None, ""

    def _oldest_silent(self, address: str, now_ms: int) -> Connection | None:
        """Return the connection of an address that has been silent longest; None: it just came."""
        oldest = next(each for each in self._silent.values() if each.address == address)
        return oldest if now_ms - oldest.accepted_ms >= self._bounds.greeting_ms else None


def _less(counts: Counter[str], name: str) -> None:
    """Count one less, and drop a name that counts none."""
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
