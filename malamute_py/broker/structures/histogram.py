"""A histogram of durations, in buckets whose bounds all histograms share.

Owns the bounds of the buckets and what is counted in them. The rule: to count costs one search
among the bounds. For times of syncs, confirms, deliveries and requests, as the metrics tell them.
Source: deploy/metrics.md.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Final

BOUNDS_S: Final[tuple[float, ...]] = (
    0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds of the buckets, in seconds; one more bucket has everything above."""
_BOUNDS_NS: Final = [round(1e9 * bound) for bound in BOUNDS_S]


class Histogram:
    """Durations, counted by bucket. One thread adds, any thread reads."""

    def __init__(self) -> None:
        self.zeros = 0
        """Durations of less than the clock shows, which the measuring code adds here: a look among
        the bounds for each lone publish took 5% of its time."""
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_ns = 0

    def add(self, took_ns: int, count: int = 1) -> None:
        """Count `count` things that took so long each."""
        self._counts[bisect_left(_BOUNDS_NS, took_ns)] += count
        self._sum_ns += took_ns * count

    def facts(self) -> dict[str, Any]:
        """Bounds in seconds, how many lie in each bucket, and the sum of all, for the metrics."""
        return {
            "bounds_s": list(BOUNDS_S),
            "counts": [self._counts[0] + self.zeros, *self._counts[1:]],
            "sum_s": self._sum_ns / 1e9,
        }
