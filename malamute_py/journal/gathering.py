"""Gathering: few rows of many batches leave as few derived batches.

Owns how many rows one read takes, which batches have so few wanted rows that these are taken out,
and where the rows' batches go. A derived batch is one that is made of rows of others, for a reader
that wants few of them. The rule: what was read before a row, or is read after it, stays before or
after it. Source: FORMAT.md, section 8.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np

from malamute_protocol.columns import NO_TIME
from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError
from malamute_protocol.gather import Gathering, Row, gatherable, rows_of
from malamute_protocol.header import HeaderTable
from malamute_protocol.stamp import Stamp
from malamute_py.journal.known import KNOWN, KnownBatch, Read
from malamute_py.journal.types import ChosenRows, Run

ROWS_MAX: Final = 4_096
"""Rows that one read gathers: each is a read of its own, of about 2 us."""
TAKEN_MAX: Final = 32
"""Rows of one batch that are taken out of it, at most: each costs about 3 us."""
ROWS_A_TAKEN: Final = 16
"""Rows of a batch for each that is taken out of it, at least: others leave with their batch."""
_LOOKED_AT: Final = 16
"""Bytes of batches that are looked through for each byte of a read's bound: a read that finds
nothing holds the reader thread about as long as one that finds much."""
_LOOKED_AT_KNOWN: Final = 4 * _LOOKED_AT
"""Bytes of known batches that are looked through for each byte of a read's bound: one of them takes
about a third of the time of another batch."""


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
        """True when another batch might have more wanted rows than may be taken: the read ends."""
        return self.left < TAKEN_MAX

    def add(self, rows: list[Row], epoch: int, lsn: int) -> int:
        """Take rows of one epoch; lsn: of the first one's batch. Returns the bytes they add.

        They join the derived batch in hand, or begin another one where that cannot take them: a
        batch has one epoch, and its offsets span a bounded range.
        """
        gathering = self._gathering
        if not gathering.takes(rows[-1].offset, epoch):
            self.flush()
        before = gathering.bytes
        gathering.add(rows, epoch, lsn)
        self.left -= len(rows)
        return gathering.bytes - before

    def flush(self) -> None:
        """Give out the rows in hand as one derived batch, if there are any.

        Called before something else, a gap or a whole batch, is given out after them.
        """
        found = self._gathering.take()
        if found is not None:
            data = found.stamp + found.content
            only_batch = (0, len(data), found.base, found.count)
            self._runs.append(Run(data, (only_batch,), found.next))


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
        self._selection = chosen.selection, client_time
        """Key under which a known batch remembers the rows that were found in it."""

    def of(self, stamp: Stamp, content: Content) -> list[Row] | None:
        """Return the wanted rows of a batch that was read and checked; None: it leaves whole.

        It leaves whole when many of its rows are wanted, or when they cannot be taken out of it.
        """
        try:
            if not gatherable(content):  # compressed, or more than header, time and body a row
                return None
            places = self._few(stamp, self._chosen(content), content.client_times)
            if places is None:
                return None
            return rows_of(stamp, content, places) if len(places) else []
        except BatchError:
            return None  # its reader tells what is wrong with it

    def of_known(self, batch: KnownBatch, read: Read, at: int) -> list[Row] | None:
        """Return the wanted rows of a batch that a search read before; None: read it whole.

        Only parts of the batch are read. read: reads bytes of its segment. at: position of the
        batch in its segment.
        """

        def few(table: HeaderTable, codes: Any, times: Any) -> Any:
            """Choose rows by their headers, offsets and client times; None: too many."""
            return self._few(batch.stamp, self._chosen.of(table, codes), times)

        stamp, selection = batch.stamp, self._selection
        inside = self._first <= stamp.base_offset and stamp.next_offset <= self._end
        try:
            # The same selection may have found its rows in this batch before.
            rows = batch.found_by(read, at, selection)
            if rows is not None:
                return rows if inside else [r for r in rows if self._first <= r.offset < self._end]
            # To be remembered, rows must be all of the batch that the selection wants: not so where
            # the batch reaches beyond the offsets of this read.
            remember = partial(KNOWN.remember, batch, selection) if inside else None
            return batch.rows(read, at, few, remember)
        except OSError:
            return None  # a page that cannot be read is named where all are read

    def _few(self, stamp: Stamp, places: Any, times: Any) -> Any:
        """Return those of some rows that have an offset and a client time that are asked for.

        places: of the rows within the batch; None: not known. times: client times of all rows of
        the batch; None: no row has one. Returns None where the rows are too many to be taken out.
        """
        if places is None:
            return None
        if stamp.base_offset < self._first or stamp.next_offset > self._end:
            offsets = stamp.base_offset + places
            places = places[(offsets >= self._first) & (offsets < self._end)]
        if self._client_time is not None:
            low, high = self._client_time
            told = np.full(len(places), NO_TIME) if times is None else times[places]
            places = places[(told >= low) & (told < high) & (told != NO_TIME)]
        count = len(places)
        return None if count > TAKEN_MAX or count * ROWS_A_TAKEN > stamp.count else places


def least_cost(size: int, *, known: bool = False) -> int:
    """Return the bytes of a read's bound that a batch uses up when only rows of it leave.

    Without them a read that finds few rows would look through a whole ring at once. known: a search
    read the batch before, so that looking through it costs less.
    """
    return size // (_LOOKED_AT_KNOWN if known else _LOOKED_AT)
