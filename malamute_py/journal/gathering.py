"""Gathering: few rows of many batches leave as few derived batches.

Owns how many rows one read takes, which batches have so few wanted rows that these are taken out,
and where the rows' batches go. The rule: what was read before a row, or is read after it, stays
before or after it. Source: FORMAT.md, section 8.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from malamute_protocol.content import NO_TIME, Content
from malamute_protocol.errors import BatchError
from malamute_protocol.gather import BYTES_A_ROW, Gathering, Row, gatherable, rows_of, weight_of
from malamute_protocol.stamp import Stamp
from malamute_py.journal.types import ChosenRows, Run

ROWS_MAX: Final = 4_096
"""Rows that one read gathers: each is a read of its own, of about 2 us."""
TAKEN_MAX: Final = 32
"""Rows of one batch that are taken out of it, at most: each costs about 3 us."""
_ROWS_A_TAKEN: Final = 16
"""Rows of a batch for each that is taken out of it, at least: others leave with their batch."""
_LOOKED_AT: Final = 16
"""Bytes of batches that are looked through for each byte of a read's bound: a read that finds
nothing holds the reader thread about as long as one that finds much."""


class RareRows:
    """The rare rows of one read of one stream."""

    def __init__(self, stream: int, runs: list[Run]) -> None:
        """runs: where finished batches go."""
        self._gathering = Gathering(stream)
        self._stream = stream
        self._runs = runs
        self.left = ROWS_MAX
        """Rows that may still be taken."""

    @property
    def full(self) -> bool:
        """True when another batch might have more wanted rows than may be taken."""
        return self.left < TAKEN_MAX

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


class WantedRows:
    """The rows of a batch that a search wants, where they are few."""

    def __init__(
        self, chosen: ChosenRows, client_time: tuple[int, int] | None, first: int, end: int
    ) -> None:
        """client_time: [least, most) of a row's client time. first, end: offsets, end exclusive."""
        self._chosen = chosen
        self._client_time = client_time
        self._first = first
        self._end = end

    def of(self, stamp: Stamp, content: Content) -> list[Row] | None:
        """Return the wanted rows of a checked batch; None: it leaves whole."""
        try:
            if not gatherable(content):
                return None
            places = self._chosen(content)
            if places is None:
                return None
            places = places[self._inside(stamp, content, places)]
            count = len(places)
            if count > TAKEN_MAX or count * _ROWS_A_TAKEN > content.head.count:
                return None
            return rows_of(stamp, content, places) if count else []
        except BatchError:
            return None  # its reader tells what is wrong with it

    def _inside(self, stamp: Stamp, content: Content, places: Any) -> Any:
        """Return which rows have an offset and a client time that are asked for."""
        offsets = stamp.base_offset + places
        inside = (offsets >= self._first) & (offsets < self._end)
        if self._client_time is not None:
            low, high = self._client_time
            times = content.client_times
            if times is None:
                return np.zeros(len(places), np.bool_)
            told = times[places]
            inside &= (told >= low) & (told < high) & (told != NO_TIME)
        return inside


def cost(size: int, rows: list[Row]) -> int:
    """Return what a batch, of which only these rows leave, takes of a read's bound in bytes."""
    texts = sum(map(weight_of, {row.header for row in rows}))
    return size // _LOOKED_AT + texts + sum(len(row.body) + BYTES_A_ROW for row in rows)


def least_cost(size: int) -> int:
    """Return what a batch, of which only rows leave, takes at least of a read's bound."""
    return size // _LOOKED_AT
