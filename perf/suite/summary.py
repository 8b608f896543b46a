"""Summary of several runs: the median, how far they spread, and changes beyond noise.

Pure functions over plain numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

NOISE_FLOOR = 0.05
"""Change below which none is reported: two quiet runs of the same thing differ by as much."""


def median(values: Sequence[float]) -> float:
    """Return the median. Raises StatisticsError when there are no values."""
    return float(statistics.median(values))


def spread(values: Sequence[float]) -> float:
    """Return how far the extremes are apart, as a share of the median; 0 for one value."""
    middle = median(values)
    if len(values) < 2 or middle == 0:
        return 0.0
    return (max(values) - min(values)) / abs(middle)


def changed(before: Sequence[float], now: Sequence[float]) -> float | None:
    """Return the ratio of the medians when it is beyond the noise, else None.

    Beyond the noise means: the two ranges do not overlap, and the medians differ by more than the
    spread of either and than NOISE_FLOOR.
    """
    old, new = median(before), median(now)
    if old <= 0 or new <= 0:
        return None
    if min(now) <= max(before) and min(before) <= max(now):
        return None
    ratio = new / old
    noise = max(NOISE_FLOOR, spread(before), spread(now))
    return ratio if abs(ratio - 1) > noise else None
