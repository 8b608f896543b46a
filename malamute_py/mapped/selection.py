"""Selection of a reader: which rows of which batches it gets.

Owns the pattern, the client times and the ages of one reading. The rules: a header is matched once
and then looked up; which index entries are read at all is decided as the broker decides it; a
record that has expired, or is past its stream's age, is not handed out.

Words: a header is a record's subjects and fields. A content has each distinct header once, and for
each row a code, its place among them; no codes: all rows have the first one. A purge removed the
records of a subject before an offset. A rare row has a spot, a known batch was searched before: see
walk.py. Source: SPEC.md, sections 5 and 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np
from pyroaring import BitMap

from malamute_protocol.columns import NO_TIME, Array
from malamute_protocol.content import Content
from malamute_protocol.gather import Row
from malamute_protocol.header import Header
from malamute_protocol.pattern import Pattern
from malamute_py.changelog.tables import PurgeMark
from malamute_py.journal.choosing import WantedSpots, choose, wanted_spots
from malamute_py.journal.gathering import WantedRows
from malamute_py.journal.index import Entries, StoredIndex
from malamute_py.journal.known import KnownBatch, Read
from malamute_py.journal.types import HeaderIndex
from malamute_py.matcher import ByKey, candidates, compile_pattern, rows_by_subject

_HEADERS_MAX: Final = 65_536
"""Headers whose match is remembered."""


class Selection:
    """Records that one reading wants, as a choice of index entries and of rows."""

    def __init__(self, stream: int, pattern: Pattern, client_time: tuple[int, int] | None) -> None:
        """client_time: [from, to) of a record's own time. Raises PatternError: it is no pattern."""
        compiled = compile_pattern(pattern)
        self.everything = compiled.canonical in (("all",), ("topic", "#"))
        self._stream = stream
        self._matches = compiled.matches
        self._by_subject = rows_by_subject(pattern)
        self._search = partial(candidates, pattern)
        self._rare_rows: WantedRows | None = None
        """Finds wanted rows in batches that were searched before; None: not by subjects alone."""
        if self._by_subject is not None:
            self._rare_rows = WantedRows(self._by_subject, client_time, 0, 1 << 63)  # no bound
        self._client_time = client_time
        self._matched: dict[Header, bool] = {}
        """Headers that were asked about, and whether the pattern selects each."""
        self._unchecked = self.everything and client_time is None
        """Whether every record that has not expired is wanted: nothing of a row is looked at."""
        self._purges: Sequence[PurgeMark] = ()
        self._purgers: list[tuple[int, Callable[..., bool]]] = []
        """For each purge the offset before which it removed records, and the test of a header."""

    def purge(self, purges: Sequence[PurgeMark]) -> None:
        """Leave out records that were removed by subject; called after each look at the stream."""
        if purges != self._purges:
            self._purges = purges
            self._unchecked = self.everything and self._client_time is None and not purges
            self._purgers = [
                (before, compile_pattern(msgspec.msgpack.decode(pattern)).matches)
                for pattern, before in purges
            ]

    def choose(self, index: StoredIndex, entries: Entries) -> Sequence[bool]:
        """Return for each entry of a segment's index whether it may hold a wanted record."""
        search = None if self.everything else self._candidates
        return choose(index, self._stream, entries, search, self._client_time)

    def spots(self, index: StoredIndex, entries: Entries, first: int) -> WantedSpots | None:
        """Return the wanted rare rows from offset `first` on, and which entries must be read whole.

        None: the index has no usable spots, or every row is wanted, so that batches are read whole.
        """
        if self.everything or not len(entries.rows):
            return None
        end = int(entries.rows["next"][-1])  # the offset after the last entry
        found = wanted_spots(
            index, self._stream, entries, self._candidates, self._matches, self._client_time,
            first, end,
        )  # fmt: skip
        if found is None:
            return None
        # A row with a purged header counts only from the purge's offset on.
        kept = np.ones(len(found.spots), np.bool_)
        for before, matches in self._purgers:
            purged_headers = np.array([matches(*header) for header in found.headers], np.bool_)
            kept &= ~purged_headers[found.codes] | (found.spots["offset"] >= before)
        return found._replace(spots=found.spots[kept], codes=found.codes[kept])

    def of_known(self, batch: KnownBatch, read: Read, at: int) -> list[Row] | None:
        """Return the wanted rows of a known batch, at any offset; None: it is to be read whole.

        read: returns a copy of bytes of its segment. at: position of the batch there. What is
        remembered of a batch knows no purges: with any, batches are read whole.
        """
        if self._rare_rows is None or self._purges:
            return None
        return self._rare_rows.of_known(batch, read, at)

    def _candidates(self, index: HeaderIndex) -> BitMap:
        """Return the entries that may hold a wanted record, by the index's headers.

        The search gives None where the pattern rules out no entry.
        """
        found = self._search(ByKey(index))
        return index.everything() if found is None else found

    def rows(
        self, content: Content, base: int, offsets: tuple[int, int], now_ms: Callable[[], int]
    ) -> tuple[bool, Array | None]:
        """Return (whether any row of a batch is wanted, mask of those; None: all).

        base: offset of the first row. offsets: [from, to) that the reading takes. now_ms: called
        only where some row may have expired.
        Raises BatchError, IndexError: the content is not what its checksum was of.
        """
        count = content.head.count
        low, high = offsets
        inside = low <= base and base + count <= high
        if self._unchecked and inside and not content.head.earliest_expiry_ms:
            return True, None
        # A row is wanted that all masks keep; what keeps every row adds no mask.
        masks: list[Array] = []
        if not self.everything:
            mask = self._by_header(content)
            if not mask.any():
                return False, None
            if not mask.all():
                masks.append(mask)
        earliest_ms = content.head.earliest_expiry_ms
        if earliest_ms and earliest_ms <= (now := now_ms()):
            expiries = content.expiries
            if expiries is not None:
                masks.append((expiries == 0) | (expiries > now))  # 0: the row never expires
        if self._client_time is not None:
            masks.append(self._within(content))
        masks += self._unpurged(content, base)
        if not inside:
            numbers = np.arange(base, base + count)
            masks.append((numbers >= low) & (numbers < high))
        if not masks:
            return True, None
        mask = np.logical_and.reduce(masks)
        return (True, None) if mask.all() else (bool(mask.any()), mask)

    def _by_header(self, content: Content) -> Array:
        """Return the mask of the rows whose header is wanted.

        A pattern of subjects alone may find its rows by their codes, without headers as objects.
        """
        rows = None if self._by_subject is None else self._by_subject(content)
        if rows is not None:
            mask: Array = np.zeros(content.head.count, np.bool_)
            mask[rows] = True
            return mask
        distinct, codes = content.headers()
        chosen = np.fromiter(map(self._wanted, distinct), np.bool_, len(distinct))
        return np.full(content.head.count, chosen[0]) if codes is None else chosen[codes]

    def _unpurged(self, content: Content, base: int) -> Iterator[Array]:
        """Yield for each purge that takes any row of a batch the mask of those that it leaves."""
        for before, matches in self._purgers:
            if base < before:
                distinct, codes = content.headers()
                hit = np.fromiter((matches(*each) for each in distinct), np.bool_, len(distinct))
                if hit.any():
                    rows = np.full(content.head.count, hit[0]) if codes is None else hit[codes]
                    # A row stays whose header is another, or that came after the purge.
                    yield ~rows | (np.arange(base, base + len(rows)) >= before)

    def _wanted(self, header: Header) -> bool:
        """Whether a header is selected; headers that were asked about are remembered."""
        known = self._matched.get(header)
        if known is None:
            if len(self._matched) >= _HEADERS_MAX:
                self._matched.clear()
            known = self._matched[header] = self._matches(header.keys, header.fields)
        return known

    def _within(self, content: Content) -> Array:
        """Mask of the rows whose client time is within the window; without times: none."""
        times = content.client_times
        if times is None or self._client_time is None:
            return np.zeros(content.head.count, np.bool_)
        low, high = self._client_time
        mask: Array = (times >= low) & (times < high) & (times != NO_TIME)
        return mask
