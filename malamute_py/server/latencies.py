"""How long syncs and confirms take.

Owns when a sync or a write begins and ends. The rule: it costs one look at a clock and one search
among a histogram's bounds, and a message costs nothing. Source: deploy/metrics.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from malamute_py.broker.structures.histogram import Histogram

_WRITES_MAX: Final = 65_536
"""Writes of one ring that wait for a sync; the oldest are not measured where there are more."""


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
        """Note that bundles went into a ring; confirmed() tells when the sync has covered them."""
        writes = self._writes.get(ring)
        if writes is None:
            writes = self._writes[ring] = deque(maxlen=_WRITES_MAX)
        writes.append((end_lsn, self._meter(), bundles))

    def confirmed(self, ring: str, lsn: int) -> None:
        """Count the time of each write to a ring up to `lsn`: the loop sends its confirms now."""
        writes = self._writes.get(ring)
        if not writes:
            return
        now = self._meter()
        while writes:
            end_lsn, wrote, bundles = writes[0]
            if end_lsn > lsn:
                break
            writes.popleft()
            self.confirm.add(now - wrote, bundles)

    def forget(self, ring: str) -> None:
        """Forget a ring that was removed."""
        self._writes.pop(ring, None)

    def facts(self) -> dict[str, Any]:
        """Return the times for BROKER_INFO and metrics."""
        return {"sync": self.sync.facts(), "confirm": self.confirm.facts()}
