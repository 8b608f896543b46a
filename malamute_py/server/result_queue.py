"""Results of the threads beside the loop, and the queue that brings them to it.

Owns the one way from any thread to the loop. The rule: a result is a plain message, and the loop
alone takes it; an exception that no code foresaw becomes `Died` and stops the daemon. Source:
docs/design.md (The core and its shell); eventfd(2).
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from typing import Any, NamedTuple


class Died(NamedTuple):
    """A thread beside the loop met a bug, and the daemon has to stop."""

    thread: str
    error: BaseException
    trace: str


class ResultQueue:
    """A queue in which threads leave results for the loop, with a descriptor that wakes it."""

    def __init__(self) -> None:
        """Make the descriptor, which is readable while results wait, or after `wake`."""
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._results: deque[Any] = deque()
        self._lock = threading.RLock()  # A signal handler may interrupt a wake.
        self._closed = False
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def wait(self, ms: float) -> bool:
        """Wait for results, so many milliseconds at most; False: none came. The loop only."""
        return bool(self._poll.poll(ms))

    def put(self, result: Any) -> None:
        """Leave a result for the loop, and wake it; from any thread."""
        self._results.append(result)
        self.wake()

    @property
    def waiting(self) -> bool:
        """Whether results wait."""
        return bool(self._results)

    def wake(self) -> None:
        """Wake the loop; from any thread, and from a signal handler."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def take(self) -> list[Any]:
        """Take the results that have gathered out of the queue; the loop only."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        results = self._results
        # One by one: other threads add results meanwhile, which a copy and a clear() would lose.
        return [results.popleft() for _ in range(len(results))]

    def close(self) -> None:
        """Give the descriptor back; later results are left unread."""
        with self._lock:
            self._closed = True
            os.close(self.fd)
