"""How long a source waits for records before it tells Spark that there are none.

Owns that decision. The rule: a source waits only while Spark asks it alone. Spark asks the sources
of a query one after the other, so that each would delay all others by its wait. A wait spares
questions: Spark asks an idle query every 10 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

_ALONE_S: Final = 0.1
"""Longest time between two calls of a query that has no other source and nothing to do."""
_FIRST_WAIT_S: Final = 0.005
"""Wait of the second call in a row that finds nothing; each further call doubles it."""
_PAUSE_MAX_S: Final = 0.05
"""Greatest pause between two questions within a wait; the least is _FIRST_WAIT_S."""


class IdleWait:
    """The waits of one source, from call to call of latestOffset()."""

    def __init__(
        self,
        wait_ms: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """wait_ms: longest wait of one call."""
        self._wait_max_s = wait_ms / 1000
        self._clock = clock
        self._sleep = sleep
        self._alone = True
        """Whether the query seems to have no other source, which a wait would delay."""
        self._start: Any = None
        """Start of the previous call, if that call found nothing; else None."""
        self._returned_s = 0.0
        """Time at which the previous call ended."""
        self._wait_s = 0.0
        """Longest wait of the present call, which doubles from call to call that finds nothing."""
        self._until_s = 0.0
        """Time at which the wait of the present call is over."""
        self._pause_s = _FIRST_WAIT_S

    def begin(self, start: Any) -> None:
        """Note that a call of latestOffset() begins, which asks for what lies after `start`."""
        now_s = self._clock()
        if start != self._start:  # The call before found something, or had another start.
            self._wait_s = 0.0
        elif now_s - self._returned_s > _ALONE_S:  # Spark was busy with another source meanwhile.
            self._alone = False
        else:
            self._wait_s = min(max(2 * self._wait_s, _FIRST_WAIT_S), self._wait_max_s)
        self._until_s = now_s + (self._wait_s if self._alone else 0.0)
        self._pause_s = _FIRST_WAIT_S

    def pause(self) -> bool:
        """Let some time pass before the broker is asked again; False: the wait is over."""
        if self._clock() + self._pause_s > self._until_s:
            return False
        self._sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _PAUSE_MAX_S)
        return True

    def end(self, found_nothing_after: Any) -> None:
        """Note that a call ends; found_nothing_after: its start, None where it found something."""
        self._start = found_nothing_after
        self._returned_s = self._clock()

    def batch_began(self) -> None:
        """Note that Spark begins a batch; if this source found nothing, the query has another."""
        if self._start is not None:
            self._alone = False
