"""How long syncs, confirms and turns of the loop take.

Owns when a sync or a write begins and ends. The rule: it costs one look at a clock and one search
among a histogram's bounds, and a message costs nothing. Source: deploy/metrics.md.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from malamute_py.broker.structures.histogram import Histogram

_WRITES_MAX: Final = 65_536
"""Writes of one ring that wait for a sync; the oldest are not measured where there are more."""
_LONG_TURN_US: Final = 100_000
"""Processor time from which on a turn of the loop is logged: all peers have waited for it."""


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


class TurnLengths:
    """Lengths of the loop's turns in time of a processor: waiting for one makes no turn long."""

    def __init__(self, worked: Callable[[], int]) -> None:
        """worked: nanoseconds of a processor that the calling thread has used."""
        self.longest_us = 0
        self._worked = worked
        self._ended_ns = 0
        """Processor time that the thread had used when the last turn ended."""
        self._notable_ns = sys.maxsize
        """Processor time of the thread beyond which the turn is the longest so far, or a long one;
        the first turn is neither."""
        self._notable_turn_ns = 0

    def end(self) -> int:
        """Note that a turn ends. Returns its microseconds where it is to be logged, else 0."""
        worked_ns, took_us = self._worked(), 0
        if worked_ns > self._notable_ns:
            took_us = (worked_ns - self._ended_ns) // 1_000
            self.longest_us = max(self.longest_us, took_us)
            self._notable_turn_ns = 1_000 * min(self.longest_us, _LONG_TURN_US)
        self._ended_ns = worked_ns
        self._notable_ns = worked_ns + self._notable_turn_ns
        return took_us if took_us > _LONG_TURN_US else 0
