"""Planning a bounded read: where it may be cut, and how much it brings.

Owns the walk over the indexes that no byte of a batch is needed for, but for a few samples. The
rule: a plan names the gaps that are known already, and splits between entries (runs of adjacent
batches of one stream, index.py) only. Source: FORMAT.md, section 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from malamute_protocol.errors import BatchError
from malamute_py.journal.choosing import choose, wanted_spots, weights_of
from malamute_py.journal.index import Entries, LiveIndex, StoredIndex
from malamute_py.journal.reading import skip_retired
from malamute_py.journal.segment import Segment
from malamute_py.journal.segment_files import SegmentFiles
from malamute_py.journal.spots import Matches
from malamute_py.journal.types import Candidates, ChosenRows, Gap, Plan, Split

_SAMPLED_FROM_BYTES = 32 << 20
"""Bytes of a planned read from which on a few batches are looked at for how much is wanted."""
_SAMPLES = 4
_SAMPLE_BYTES_MAX = 4 << 20
_FEWEST = 16
"""A planned part has at most so many times as many bytes of batches as were asked for: where few
rows are wanted, looking for them costs about that much."""


class Planner:
    """The plans of reads of one ring."""

    def __init__(self, files: SegmentFiles) -> None:
        self._files = files
        self._streams = files.streams

    def plan(
        self,
        stream: int,
        from_offset: int,
        end_offset: int,
        candidates: Candidates | None = None,
        records_max: int = 0,
        bytes_max: int = 0,
        split_bytes: int = 0,
        left: Sequence[tuple[Candidates, int]] = (),
        matches: Matches | None = None,
        rows: ChosenRows | None = None,
        now_ms: int | None = None,
    ) -> Plan:
        """Return how far a read bounded so would come, cut into parts, by the index.

        For readers that share the work of one read, as Spark's tasks do. Bytes count the index
        entries that may match. records_max, bytes_max: bounds of the read; 0: none. split_bytes:
        size of a part; 0: there is one. left: pairs of candidates and an offset, for a reader that
        has taken already what the candidates do not select before the offset: of the entries that
        end by it, only those count that they select. matches, rows: as of Reader.read(); given
        them, of rare rows their own bytes count, and the parts of a long read in which few rows are
        wanted are larger: their bytes are an estimate by a few batches. now_ms: given it, the plan
        tells which of its parts are unbroken.
        """
        state = self._streams.states.get(stream)
        if state is None:
            return Plan(from_offset, (), 0, begin=from_offset)
        end = min(end_offset, state.next)
        gaps: list[Gap] = []
        reached = skip_retired(self._streams, stream, from_offset, end, gaps)
        if records_max > 0:
            end = min(end, reached + records_max)
        asked_from = reached
        cutter = _Cutter(reached, bytes_max)
        # Entries that may match: a few of them are looked at, for _one_in().
        whole: list[tuple[Segment, Any]] = []
        unbroken: list[tuple[int, int]] = []
        begin = -1  # offset at which the first entry begins; -1: none was met
        for segment in self._files.segments():
            span = segment.spans.get(stream)
            if span is None or span.next <= reached:
                continue
            if span.first >= end or cutter.full():
                break
            index = self._files.index(segment)
            entries = index.entries(stream, reached, end)
            listed = entries.rows
            if now_ms is not None and _is_sound(segment, index, stream, now_ms):
                _join(unbroken, listed)
            if begin < 0 and len(listed):
                begin = int(listed["base"][0])
            chosen, weights = _weighed(
                index, stream, entries, (reached, end), candidates, left, matches
            )
            if chosen.any():
                whole.append((segment, listed[chosen]))
            # A part may end after any entry: each is added, with 0 bytes where none are wanted.
            for weight, after in zip(weights.tolist(), listed["next"].tolist(), strict=True):
                cutter.add(weight, min(after, end))
                if cutter.full():
                    break
            reached = max(reached, cutter.reached)
        stop = cutter.reached if cutter.full() else max(end, from_offset)
        # Where few rows of a long read are wanted, its parts are larger, by a sample of batches.
        one_in = 1
        if rows is not None and cutter.total >= _SAMPLED_FROM_BYTES and split_bytes > 0:
            one_in = self._one_in(stream, whole, rows)
        splits = cutter.splits(stop, split_bytes, one_in)
        parts = clipped(unbroken, asked_from, stop)
        begin = from_offset if begin < 0 else begin
        return Plan(stop, splits, cutter.total, tuple(gaps), begin, parts)

    def _one_in(self, stream: int, entries: list[tuple[Segment, Any]], rows_of: ChosenRows) -> int:
        """Return n where about one byte in n of some entries is wanted: 1 to _FEWEST.

        A plan makes its parts so many times larger. A few batches are read and looked at, and the
        one of which most is wanted counts. 1, also where a batch cannot tell: it leaves whole.
        """
        share = 1 / _FEWEST
        step = -(-len(entries) // _SAMPLES) or 1  # rounded up
        for segment, rows in entries[::step]:
            row = rows[len(rows) // 2]  # the entry in the middle
            if row["bytes"] > _SAMPLE_BYTES_MAX:
                return 1
            for _, content in self._files.contents(segment, stream, row):
                try:
                    found = rows_of(content)
                except BatchError:
                    found = None
                if found is None:
                    return 1
                share = max(share, len(found) / max(1, content.head.count))
            if share > 0.5:
                return 1  # int(1 / share) cannot come to more: the other samples are spared
        return int(1 / share)


def _weighed(
    index: LiveIndex | StoredIndex,
    stream: int,
    entries: Entries,
    bounds: tuple[int, int],
    candidates: Candidates | None,
    left: Sequence[tuple[Candidates, int]],
    matches: Matches | None,
) -> tuple[Any, Any]:
    """Return which of a segment's entries are read whole, and the bytes that are wanted of each.

    bounds: offsets [from, to) that the plan is of. candidates, left, matches: as of Planner.plan().
    """
    begin, end = bounds
    rows = entries.rows
    whole = np.asarray(choose(index, stream, entries, candidates, None), np.bool_)
    for those_left, before in left:
        if before > begin and len(rows):
            # Entries that end by the offset `before` count only where they may hold one of the
            # records that are left.
            kept = choose(index, stream, entries, those_left, None)
            whole &= np.asarray(kept, np.bool_) | (rows["next"] > before)
    if matches is not None and candidates is not None and not left:
        rare = wanted_spots(index, stream, entries, candidates, matches, None, begin, end)
        if rare is not None:
            # Places of wanted rows are known: these rows alone are read of the other entries.
            return np.asarray(rare.whole, np.bool_), weights_of(rare, rows)
    return whole, np.where(whole, rows["bytes"], 0).astype(np.int64)


def clipped(parts: Iterable[tuple[int, int]], begin: int, end: int) -> tuple[tuple[int, int], ...]:
    """Return ranges of offsets [from, to) cut to [begin, end), without those that are empty then.

    For the unbroken ranges of a plan.
    """
    cut = ((max(first, begin), min(stop, end)) for first, stop in parts)
    return tuple(part for part in cut if part[0] < part[1])


def _is_sound(segment: Segment, index: LiveIndex | StoredIndex, stream: int, now_ms: int) -> bool:
    """Whether all records of a stream that a segment's index names would come, as far as is known.

    For the `unbroken` ranges of a plan: a damaged, retired or expired record is none that comes.
    Expiries that are None are not known: an earlier version wrote the index. Asked after the
    entries were taken, since the expiries of a batch are noted before its entry.
    """
    if segment.damaged or segment.retired or index.expiries is None:
        return False
    expires_ms = index.expiries.get(stream, 0)
    return expires_ms == 0 or expires_ms > now_ms


def _join(parts: list[tuple[int, int]], rows: Any) -> None:
    """Add the offsets that index entries cover to `parts`, each [from, to) without a hole.

    For the unbroken ranges of a plan. rows: entries of the next segment, by offset.
    """
    if not len(rows):
        return
    # Place of each entry that ends before the next one begins.
    holes = np.flatnonzero(rows["base"][1:] != rows["next"][:-1])
    begins = [int(rows["base"][0]), *rows["base"][holes + 1].tolist()]
    ends = [*rows["next"][holes].tolist(), int(rows["next"][-1])]
    if parts:
        first, stop = parts[-1]
        if stop == begins[0]:
            # The last part goes on in this segment.
            begins[0] = first
            parts.pop()
    parts.extend(zip(begins, ends, strict=True))


class _Cutter:
    """Cuts a walk over a stream's entries into the splits of a plan, and says when it ends."""

    def __init__(self, start: int, bytes_max: int) -> None:
        """bytes_max: the walk ends with the entry that reaches so many; 0: no bound."""
        self.reached = start
        """Offset after the newest entry."""
        self.total = 0
        """Bytes of the entries in which something is selected."""
        self._start = start
        self._bytes_max = bytes_max if bytes_max > 0 else 1 << 62  # more than any read has
        self._entries: list[tuple[int, int]] = []
        """(bytes, offset after it) of each entry, in order."""

    def full(self) -> bool:
        """Whether the walk is to end here."""
        return self.total >= self._bytes_max

    def add(self, weight: int, after: int) -> None:
        """Count an entry that ends before an offset; an entry that was counted is passed over.

        weight: its bytes; 0: nothing in it is selected.
        """
        if after <= self.reached:
            return
        self.reached = after
        self.total += weight
        self._entries.append((weight, after))

    def splits(self, stop: int, split_bytes: int, one_in: int) -> tuple[Split, ...]:
        """Return the splits up to offset `stop`, each of about `split_bytes`; 0: a single one.

        one_in: about one byte in so many is wanted. A split covers so many times more bytes of
        entries, and tells the wanted bytes alone.
        """
        most = split_bytes * one_in if split_bytes > 0 else 1 << 62  # more than any read has
        found: list[Split] = []
        begin, size = self._start, 0
        for weight, after in self._entries:
            size += weight
            if size >= most:
                found.append(Split(begin, after, -(-size // one_in)))  # rounded up
                begin, size = after, 0
        if stop > begin:
            found.append(Split(begin, stop, -(-size // one_in)))
        return tuple(found)
