"""Waking of a thread that sleeps on descriptors, on Linux, macOS and Windows.

Owns the descriptor that other threads make readable, and the sleep on several descriptors. The
rule: nothing here is missing on one of the three systems. Linux has the cheaper calls: a pipe takes
half of a socket pair's time, and poll() sets up nothing for each sleep.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

READABLE: Final = 1
"""The event that Poller.register() takes; POLLIN where there is poll()."""
_MARK: Final = b"\0"
"""The byte that a ring writes: that it can be read is all that counts."""
_MANY: Final = 4096
"""Rings that one call of silence() takes back, at most."""


class Bell:
    """A descriptor that becomes readable when any thread rings."""

    __slots__ = ("_closing", "descriptor", "ring", "silence")

    ring: Callable[[], object]
    """Make the descriptor readable. Raises BlockingIOError: it is so often enough."""
    silence: Callable[[], object]
    """Make it unreadable until the next ring. Raises BlockingIOError: it was."""

    def __init__(self) -> None:
        """Open a pipe or, where that cannot be done in one call, a pair of sockets."""
        self._closing: list[Callable[[], object]]
        if hasattr(os, "pipe2"):
            self.descriptor, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self.ring = partial(os.write, writer, _MARK)
            self.silence = partial(os.read, self.descriptor, _MANY)
            self._closing = [partial(os.close, self.descriptor), partial(os.close, writer)]
        else:
            # Windows polls sockets alone, and macOS has no pipe2().
            reading, writing = socket.socketpair()
            reading.setblocking(False)
            writing.setblocking(False)
            self.descriptor = reading.fileno()
            self.ring = partial(writing.send, _MARK)
            self.silence = partial(reading.recv, _MANY)
            self._closing = [reading.close, writing.close]

    def close(self) -> None:
        """Give up the descriptors; ring() is not called any more."""
        for close in self._closing:
            close()


class Poller(Protocol):
    """The part of select.poll that a client's thread uses."""

    def register(self, descriptor: int, event: int, /) -> object:
        """Watch a descriptor for reading."""

    def unregister(self, descriptor: int, /) -> object:
        """Watch it no more. Raises KeyError: it was not watched."""

    def poll(self, timeout_ms: Any = None, /) -> list[tuple[int, int]]:
        """Wait until some can be read; None: without end."""


class Selecting:
    """poll() for a system that has select() only (Windows)."""

    def __init__(self) -> None:
        self._watched: set[int] = set()

    def register(self, descriptor: int, event: int, /) -> None:
        """Watch a descriptor for reading."""
        self._watched.add(descriptor)

    def unregister(self, descriptor: int, /) -> None:
        """Watch it no more. Raises KeyError: it was not watched."""
        self._watched.remove(descriptor)

    def poll(self, timeout_ms: Any = None, /) -> list[tuple[int, int]]:
        """Wait until some can be read; None: without end."""
        timeout_s = None if timeout_ms is None else timeout_ms / 1_000
        readable, _, _ = select.select(self._watched, (), (), timeout_s)
        return [(found, READABLE) for found in readable]


def poller() -> Poller:
    """Return a poller of this system."""
    return select.poll() if hasattr(select, "poll") else Selecting()
