"""Python's collector of cyclic garbage, as the daemon has it run.

Owns when it runs. The rule: no turn of the loop waits for a look at objects that lasted. A message
leaves no cycles behind, so that reference counts free what it took, and the collector looks for
cycles that no programmer foresaw. It looks at young objects after so many commands, and once more
at those that are left. Python itself counts objects made less objects freed, whatever their age: a
load that frees as much as it makes is never looked at, and the first burst then has all of it
looked at together (credit-abuse: 59,000 objects, 20 to 40 ms). All objects are looked at only while
the loop rests. Source: the documentation of Python's gc; ARCHITECTURE.md, Decisions.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Final

_YOUNG, _ONCE_MORE, _NEVER = 5_000, 1, 1 << 30
"""Thresholds of gc.set_threshold: new objects until the young are looked at; such looks until those
that remain are looked at once more; such looks until all old ones are looked at."""
COMMANDS_A_LOOK: Final = 256
"""Commands after which young objects are looked at: a command that lasts leaves some 14 of them."""
_LOOKS_LEAST = 100
"""Looks at remaining objects that must have happened since all were looked at: 768 commands or more
came before each."""
_PAUSE_LEAST_MS = 60_000
"""Least time between two looks at all objects."""
_PAUSE_FACTOR: Final = 1_000
"""Pause after a look at all objects, in multiples of the time that the look took."""


class Collector:
    """Decides when the collector looks at all objects; used by the loop's thread only."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        """clock_ns: nanoseconds from any beginning."""
        self._clock_ns = clock_ns
        self._next_ms = 0
        self._passes = 0
        self._garbage = 0

    def begin(self) -> None:
        """Leave the objects of the start, which is over, out of all looks; look at young ones."""
        # The recovered state stays: a look at a million rows takes 27 ms.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG, _ONCE_MORE, _NEVER)

    def facts(self) -> dict[str, int]:
        """Return counters: looks at all objects, and how many of these were garbage."""
        return {
            "collector_passes_total": self._passes,
            "collector_garbage_total": self._garbage,
        }

    def look(self) -> None:
        """Look at young objects, and every third time at those that were left before, too.

        The loop calls it after COMMANDS_A_LOOK commands.
        """
        # get_count()[1]: looks at young objects since the older ones were looked at.
        gc.collect(1 if gc.get_count()[1] > _ONCE_MORE else 0)

    def rest(self, now_ms: int) -> None:
        """Look at all objects, if it is time; called when no message has come for a while."""
        # get_count()[2]: looks at the older objects since all were looked at.
        if now_ms < self._next_ms or gc.get_count()[2] < _LOOKS_LEAST:
            return
        began = self._clock_ns()
        self._garbage += gc.collect()
        self._passes += 1
        took_ms = (self._clock_ns() - began) // 1_000_000
        self._next_ms = now_ms + max(_PAUSE_LEAST_MS, _PAUSE_FACTOR * took_ms)
