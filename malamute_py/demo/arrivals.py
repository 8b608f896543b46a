"""The order in which departures and weather reports reach the broker: some of them late.

Owns the plan of lateness, which is the input of both routes, as the tables are. The rule: a seed
decides it, so that each run has the same late records.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

HOUR_MS: Final = 3_600_000
_LATE: Final = 0.03
"""Share of records that come 1 to 20 hours late, which the watermark allows for."""
_VERY_LATE: Final = 0.003
"""Share of records that come 1 to 30 days late, which it does not."""


def lateness_ms(count: int, seed: int) -> Any:
    """Return milliseconds from each record's time to its arrival: whole hours, mostly 0.

    seed: the same one gives the same array.
    """
    dice = np.random.default_rng(seed)
    fate = dice.random(count)
    late, very_late = dice.integers(1, 21, count), dice.integers(24, 24 * 30 + 1, count)
    hours = np.where(fate < _VERY_LATE, very_late, np.where(fate < _VERY_LATE + _LATE, late, 0))
    return hours * HOUR_MS
