"""Counted warnings for the log, of what no caller waits for.

Owns what happened since the last line. The rule: one broker's restart may make every answer
under way come too late, most of which it had taken before; such things are gathered for a
moment and told in one line a kind, and seldom.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from malamute_py.client.session.events import Event, Warned

GATHER_MS: Final = 1_000
"""Time after the first of a kind at which a line is written."""
_QUIET_MS: Final = 10_000
"""Between two lines."""


class Warnings:
    """The warnings of one part of a session."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self.gathered: dict[str, tuple[int, str]] = {}
        """By kind: how many, and the first of them."""
        self.due_ms: int | None = None
        """When what is gathered is written; None: nothing is gathered, or wake() was not called."""
        self._quiet_until_ms = 0
        """No line is written before this time, as the last ones were written not long ago."""

    def add(self, kind: str, what: str) -> None:
        """Count one more warning of a kind. what: the text for the first of them only."""
        count, first = self.gathered.get(kind, (0, what))
        self.gathered[kind] = count + 1, first

    def wake(self, now_ms: int) -> None:
        """Write what is due: a second after the first of them, and ten after the last lines.

        Called in each step while warnings are gathered.
        """
        if self.due_ms is None:
            self.due_ms = max(now_ms + GATHER_MS, self._quiet_until_ms)
        if now_ms >= self.due_ms:
            self._quiet_until_ms = now_ms + _QUIET_MS
            self.flush()

    def flush(self) -> None:
        """Write all that is gathered, one line a kind, as events for the shell's log."""
        for kind, (count, first) in self.gathered.items():
            self._emit(Warned(f"{kind}: {first}" + (f" (and {count - 1} more)" * (count > 1))))
        self.gathered.clear()
        self.due_ms = None

    def next_wake(self, other_ms: int | None) -> int | None:
        """Latest time of the next wake(), or `other_ms` where that is sooner; None: no need."""
        due_ms = self.due_ms
        if due_ms is None or other_ms is None:
            return other_ms if due_ms is None else due_ms
        return min(due_ms, other_ms)
