"""Gathering: rare rows, read one by one, leave as few derived batches.

Owns how many rows one read takes, and where their batches go. The rule: what was read before a
row, or is read after it, stays before or after it. Source: FORMAT.md, section 8.
"""

from __future__ import annotations

from typing import Final

from malamute_protocol.gather import Gathering, Row
from malamute_py.journal.types import Run

ROWS_MAX: Final = 4_096
"""Rows that one read gathers: each is a read of its own, of about 2 us."""


class RareRows:
    """The rare rows of one read of one stream."""

    def __init__(self, stream: int, runs: list[Run]) -> None:
        """runs: where finished batches go."""
        self._gathering = Gathering(stream)
        self._runs = runs
        self.left = ROWS_MAX
        """Rows that may still be taken."""

    def add(self, rows: list[Row], epoch: int, lsn: int) -> None:
        """Take rows of one epoch; lsn: of the first one's batch."""
        if not self._gathering.takes(rows[-1].offset, epoch):
            self.flush()
        self._gathering.add(rows, epoch, lsn)
        self.left -= len(rows)

    def flush(self) -> None:
        """Make a batch of what is in hand: something else comes after it."""
        found = self._gathering.take()
        if found is not None:
            data = found.stamp + found.content
            self._runs.append(Run(data, ((0, len(data), found.base, found.count),), found.next))
