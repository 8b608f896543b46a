"""Searching a ring: offsets by time, and the newest record of each subject.

Owns the questions to the indexes that no batch answers alone. The rule: a batch that is damaged
counts as one that may be meant, so that what is found is never too late. An entry is a run of
adjacent batches of one stream in a segment's index. Source: FORMAT.md, section 8.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
from pyroaring import BitMap

from malamute_py.journal.choosing import choose
from malamute_py.journal.chunks import Batch
from malamute_py.journal.segment import Segment
from malamute_py.journal.segment_files import SegmentFiles, content_of
from malamute_py.journal.types import UNINDEXED_FROM, Candidates


class Searches:
    """All searches of one ring."""

    def __init__(self, files: SegmentFiles) -> None:
        self._files = files
        self._streams = files.streams

    # --- by time ----------------------------------------------------------------------

    def closest_offset(self, stream: int, time_ms: int, *, inclusive: bool = True) -> int:
        """Return the offset of the first record appended at the time or later; else the next one.

        inclusive: False wants later ones only. For starts by time, and for limits by age.
        """
        least = time_ms if inclusive else time_ms + 1

        def first_in(batch: Batch, view: memoryview) -> int:
            """Return the batch's first offset; -1: it was appended too early."""
            assert batch.found is not None
            return batch.base if batch.found.stamp.append_time_ms >= least else -1

        return self._first_late_enough(stream, "last_time_ms", "last_time", least, first_in)

    def closest_client_time(self, stream: int, time_ms: int) -> int:
        """Return the offset of the first record (by offset) whose client time is this or later.

        The stream's next offset when there is none. For starts by the producers' time.
        """
        first, _ = self._streams.bounds(stream)

        def first_in(batch: Batch, view: memoryview) -> int:
            """Return the batch's first kept offset whose client time is this or later; -1: none."""
            times = content_of(batch, view).client_times
            if times is None:
                return -1
            hits = np.flatnonzero(times >= time_ms) + batch.base
            hits = hits[hits >= first]
            return int(hits[0]) if len(hits) else -1

        return self._first_late_enough(stream, "client_max_ms", "client_max", time_ms, first_in)

    def _first_late_enough(
        self,
        stream: int,
        of_span: str,
        of_entry: str,
        least: int,
        first_in: Callable[[Batch, memoryview], int],
    ) -> int:
        """Return the first offset that `first_in` finds in a batch; else the stream's next offset.

        of_span, of_entry: names of the fields with the latest time in a segment and in an entry:
        where that is before `least`, no batch is read. first_in: returns the wanted offset of a
        good batch, or -1. Where damage lies just before the batch found, its first offset is
        returned: the record wanted may have been there.
        """
        # `before` is the offset after the entry before, or the stream's first one, or -1: a batch
        # that begins later follows a hole, which a start has left out of the index, and what was
        # lost there may be the first.
        following, _ = self._streams.bounds(stream)  # offset after the segment before
        for segment, entries in self._files.entries(stream):
            rows = entries.rows
            before, following = following, int(rows["next"][-1]) if len(rows) else following
            if getattr(segment.spans[stream], of_span) < least:
                continue
            for place in np.flatnonzero(rows[of_entry] >= least).tolist():
                damaged = -1  # First offset of what is lost just before; -1: nothing is.
                if place:
                    before = int(rows["next"][place - 1])
                for batch, view in self._files.batches(segment, stream, rows[place]):
                    if 0 <= before < batch.base:
                        damaged = before
                    before = -1  # Only an entry's first batch can follow a hole.
                    if batch.found is None:
                        damaged = batch.base if damaged < 0 else damaged
                    elif (found := first_in(batch, view)) >= 0:
                        return self._first_kept(stream, found if damaged < 0 else damaged)
                    else:
                        damaged = -1  # What was lost lies before a batch that is too early.
                if damaged >= 0:
                    # The entry ends in damage, and has a time that is late enough.
                    return self._first_kept(stream, damaged)
        _, after = self._streams.bounds(stream)
        return after

    def _first_kept(self, stream: int, offset: int) -> int:
        """Return an offset, or the stream's first one where it was removed meanwhile."""
        first, _ = self._streams.bounds(stream)
        return max(offset, first)

    # --- by subject ---------------------------------------------------------------------

    def last_per_subject(
        self, stream: int, candidates: Candidates | None = None, end_offset: int | None = None
    ) -> list[tuple[tuple[str, ...], int]]:
        """Return (keys, offset) of the latest record of each distinct subject, by offset.

        For starts at the last record of each subject. keys: the subject and further keys of the
        record. candidates: looks only at index entries that may match. end_offset: as if the
        stream ended there.
        """
        state = self._streams.states.get(stream)
        if state is None:
            return []
        end = state.next if end_offset is None else min(end_offset, state.next)
        latest: dict[tuple[str, ...], int] = {}
        for segment in reversed(self._files.segments()):
            span = segment.spans.get(stream)
            if span is None or span.first >= end or span.next <= state.first:
                continue
            self._last_in_segment(segment, stream, state.first, end, candidates, latest)
        return sorted(latest.items(), key=lambda item: item[1])

    def _last_in_segment(
        self,
        segment: Segment,
        stream: int,
        first: int,
        end: int,
        search: Candidates | None,
        latest: dict[tuple[str, ...], int],
    ) -> None:
        """Note the newest offset of each subject in a segment, looking from its end.

        latest: subject -> offset, of those that later segments have; it gets the others. Each
        subject waits for the last entry that may hold it, so that an entry is read only where a
        subject waits for it.
        """
        index = self._files.index(segment)
        entries = index.entries(stream, first, end)
        chosen = choose(index, stream, entries, search, None)
        rows = {
            ordinal: row
            for ordinal, row, take in zip(
                entries.ordinals.tolist(), entries.rows, chosen, strict=True
            )
            if take
        }
        headers = index.headers(stream)
        allowed = BitMap(rows)
        # Number of an entry -> the subjects that wait for it, with all entries that may hold them.
        waiting: dict[int, list[tuple[tuple[str, ...] | None, BitMap]]] = {}
        heap: list[int] = []  # Numbers of entries, negated: the newest one comes out first.

        def wait(keys: tuple[str, ...] | None, bitmap: BitMap) -> None:
            """Queue keys whose newest record lies in one of these entries, under the last of them.

            keys: of a subject; None: of all subjects that the entries may hold.
            """
            if bitmap:
                last = bitmap.max()
                if last not in waiting:
                    heapq.heappush(heap, -last)
                waiting.setdefault(last, []).append((keys, bitmap))

        if headers.exact and stream < UNINDEXED_FROM:
            for keys, bitmap in headers.subjects():
                if keys not in latest:
                    wait(keys, bitmap & allowed)
        else:
            # Subjects are not known by the index: every entry that was chosen is read.
            wait(None, allowed.copy())
        # The newest entry first. A subject that is not in it after all waits for its next one.
        while heap:
            ordinal = -heapq.heappop(heap)
            here = self._last_in_entry(segment, stream, rows[ordinal], first, end)
            for keys, offset in here.items():
                latest.setdefault(keys, offset)
            for subject, bitmap in waiting.pop(ordinal):
                if subject is None or subject not in latest:
                    bitmap.discard(ordinal)
                    wait(subject, bitmap)

    def _last_in_entry(
        self, segment: Segment, stream: int, row: Any, first: int, end: int
    ) -> dict[tuple[str, ...], int]:
        """Return each subject's newest offset in [first, end) among the batches of one entry.

        row: the entry in the index.
        """
        latest: dict[tuple[str, ...], int] = {}
        for batch, content in self._files.contents(segment, stream, row):
            # Rows of the batch within the bounds: [low, high).
            low, high = max(first - batch.base, 0), min(end, batch.next) - batch.base
            if high <= low:
                continue
            keys, codes = content.table.keys, content.subject_codes
            if codes is None:
                # All rows have one subject.
                latest[keys[0]] = batch.base + high - 1
                continue
            part = codes[low:high]
            # A code is the place of a row's subject in the header table. The codes are looked at
            # backwards, so that the first place of each is that of its newest row.
            used, from_end = np.unique(part[::-1], return_index=True)
            for code, distance in zip(used.tolist(), from_end.tolist(), strict=True):
                latest[keys[code]] = batch.base + high - 1 - distance
        return latest

    # --- by size ------------------------------------------------------------------------

    def offset_within(self, stream: int, bytes_max: int) -> int:
        """Return the least offset from which on the stream's batches fit into so many bytes.

        For the limit of a stream by bytes, at the grain of index entries.
        """
        state = self._streams.states.get(stream)
        if state is None:
            return 0
        left = bytes_max
        offset = state.first
        newest = True  # whether no segment with the stream was counted yet
        for segment in reversed(self._files.segments()):
            span = segment.spans.get(stream)
            if span is None or span.next <= state.first:
                continue
            if span.bytes <= left:
                left -= span.bytes
                newest = False
                continue
            rows = self._files.index(segment).entries(stream, state.first, state.next).rows
            # Bytes of the newest entry, of the newest two, and so on.
            held = np.cumsum(rows["bytes"][::-1].astype(np.int64))
            fitting = int(np.searchsorted(held, left, side="right"))
            if fitting == 0 and newest:
                fitting = 1  # The newest entry stays, however large it is.
            offset = int(rows["base"][len(rows) - fitting]) if fitting else span.next
            break
        return max(offset, state.first)
