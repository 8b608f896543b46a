"""Histograms of how long syncs and confirms take.

Owns the bounds of the buckets and what is counted in them. The rule: a sync or a write costs one
look at a clock and one search among the bounds, and a message costs nothing. Source:
deploy/metrics.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any, Final

BOUNDS_S: Final = (
    0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds of the buckets, in seconds; one more bucket has everything above."""
_BOUNDS_NS: Final = [round(1e9 * bound) for bound in BOUNDS_S]
_WRITES_MAX: Final = 65_536
"""Writes of one ring that wait for a sync; the oldest are not measured where there are more."""


class Histogram:
    """Durations, counted by bucket. One thread adds, any thread reads."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_ns = 0

    def add(self, took_ns: int, count: int = 1) -> None:
        """Count `count` things that took so long each."""
        self._counts[bisect_left(_BOUNDS_NS, took_ns)] += count
        self._sum_ns += took_ns * count

    def facts(self) -> dict[str, Any]:
        """Bounds in seconds, how many lie in each bucket, and the sum of all."""
        return {
            "bounds_s": list(BOUNDS_S),
            "counts": self._counts.copy(),
            "sum_s": self._sum_ns / 1e9,
        }


class Latencies:
    """Durations in rings on disk: the sync thread adds to `sync`, the loop to `confirm`."""

    def __init__(self, meter: Callable[[], int]) -> None:
        """meter: nanoseconds from any beginning."""
        self.sync = Histogram()
        self.confirm = Histogram()
        self._meter = meter
        self._writes: dict[str, deque[tuple[int, int, int]]] = {}
        """Ring -> (where a write ends, when it was made, its bundles), in order."""

    def wrote(self, ring: str, end_lsn: int, bundles: int) -> None:
        """A write of bundles went into a ring; the loop waits for the sync that covers it."""
        writes = self._writes.get(ring)
        if writes is None:
            writes = self._writes[ring] = deque(maxlen=_WRITES_MAX)
        writes.append((end_lsn, self._meter(), bundles))

    def confirmed(self, ring: str, lsn: int) -> None:
        """The loop sends the confirms of what was written to a ring up to `lsn`."""
        writes = self._writes.get(ring)
        if not writes:
            return
        now = self._meter()
        while writes and writes[0][0] <= lsn:
            _, wrote, bundles = writes.popleft()
            self.confirm.add(now - wrote, bundles)

    def forget(self, ring: str) -> None:
        """A ring was removed."""
        self._writes.pop(ring, None)

    def facts(self) -> dict[str, Any]:
        """For BROKER_INFO and metrics."""
        return {"sync": self.sync.facts(), "confirm": self.confirm.facts()}
