"""A port of this machine that stays a test's own while no process listens there.

Owns the reservation. The rule: the port is bound and not listening for as long as it is
kept, so that the kernel gives it to no other process, neither to a broker that asks for a free
one nor to a client as its own end, and a connection is refused until libzmq, which shares
addresses of this kind, listens there. Source: socket(7), SO_REUSEADDR.
"""

from __future__ import annotations

import socket
from typing import Self


class Port:
    """A free port of the loopback address; a context manager."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("127.0.0.1", 0))
        except BaseException:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.number}"

    def close(self) -> None:
        """Give it back."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
