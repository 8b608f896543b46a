"""Virtual time: one true clock that only goes forward, and the broker's, which lies.

Owns the schedule of a run. The rule: every action is an entry of this schedule, in the order of
(time, number of entry), so that a seed replays a run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

START_MS = 1_700_000_000_000


class Clock:
    """The schedule and both clocks; times are microseconds since the run began."""

    def __init__(self) -> None:
        self.now_us = 0
        self.skew_ms = 0
        """Milliseconds by which the broker's wall clock is off; changed by jumps."""
        self._entries: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def true_ms(self) -> int:
        """Return milliseconds since the epoch, as an honest clock shows them."""
        return START_MS + self.now_us // 1000

    def broker_ms(self) -> int:
        """Return the time that the broker's clock shows."""
        return START_MS + self.now_us // 1000 + self.skew_ms

    def after(self, delay_us: int, action: Callable[[], None]) -> None:
        """Do something later; entries of one moment happen in the order of their making."""
        self._count += 1
        heapq.heappush(self._entries, (self.now_us + delay_us, self._count, action))

    def step(self) -> bool:
        """Do the next thing; False when nothing is left."""
        if not self._entries:
            return False
        self.now_us, _, action = heapq.heappop(self._entries)
        action()
        return True
