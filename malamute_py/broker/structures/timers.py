"""Timers: calls that fall due, in the order of their times.

Groups, transactions and streams with keys set them. The shell gives the core a turn at `due_ms`,
and run() makes the calls in it.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Timers:
    """Calls that fall due; none can be taken back."""

    __slots__ = ("_count", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        """(time, number in the order of setting, call)."""
        self._count = 0

    @property
    def due_ms(self) -> int | None:
        """Time of the next call; None: there is none."""
        return self._heap[0][0] if self._heap else None

    def set(self, due_ms: int, call: Callable[[], None]) -> None:
        """Have a call made once this time has come, after those that were set for it before."""
        self._count += 1
        heappush(self._heap, (due_ms, self._count, call))

    def run(self, now_ms: int) -> None:
        """Make the calls that are due; what they set is left to the next run, due or not.

        A call that sets itself again for at once so gets one turn in each run. A call that raises
        leaves the others for the next run.
        """
        heap, newest = self._heap, self._count
        later: list[tuple[int, int, Callable[[], None]]] = []
        try:
            while heap and heap[0][0] <= now_ms:
                timer = heappop(heap)
                _, number, call = timer
                if number > newest:  # It was set during this run.
                    later.append(timer)
                else:
                    call()
        finally:
            for timer in later:
                heappush(heap, timer)
