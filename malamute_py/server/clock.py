"""The broker's time: the wall clock, but one that never goes back and never stands still.

Owns the reading of the system's clocks. The rule: where the wall clock was set back, time goes on
at half its speed until the wall clock has caught up; a time that stood still for so long would let
heartbeats, leases and syncs wait, and clients take the broker for dead. Where the wall clock was
set forward, time follows at once, as what is stored bears wall time. Source: docs/design.md, The
core and its shell.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Milliseconds since 1970; any thread may call it."""

    def __init__(
        self,
        wall_ns: Callable[[], int] = time.time_ns,
        steady_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """wall_ns: may be set back and forward. steady_ns: goes on evenly, from any beginning."""
        self._wall_ns = wall_ns
        self._steady_ns = steady_ns
        self._last = wall_ns(), steady_ns()
        """(time returned last, the steady clock's time then); replaced as a whole."""

    def __call__(self) -> int:
        """Return the time in milliseconds."""
        steady, now = self._steady_ns(), self._wall_ns()
        said, at = self._last
        # As a rule the wall clock went on by at least half of what the steady clock did. Where it
        # was set back, the time goes on by that half.
        gone = now - said
        if gone < 0 or gone + gone < steady - at:
            now = max(now, said + max(steady - at, 0) // 2)
        self._last = now, steady
        return now // 1_000_000
