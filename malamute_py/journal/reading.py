"""Reading a ring's history: by offset, by time, by subject.

Owns every read of a segment's file while the ring is open. The rule: what is handed out
had both checksums good at that moment and lay in a segment that was not retired before
the read was over; everything else is a named gap. Runs in the reader thread: few, large
reads, each off the interpreter lock. Source: FORMAT.md, section 8.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import google_crc32c
import numpy as np
from pyroaring import BitMap

from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError
from malamute_protocol.gather import BYTES_A_ROW, Row, weight_of
from malamute_protocol.stamp import PADDING, STAMP_BYTES
from malamute_py.journal.check import check
from malamute_py.journal.choosing import WantedSpots, choose, wanted_spots, weights_of
from malamute_py.journal.chunks import Batch, Part, Runs, batches_in, group_entries, pick_in
from malamute_py.journal.cutting import Cutter
from malamute_py.journal.errors import JournalCorrupt
from malamute_py.journal.gathering import RareRows, WantedRows
from malamute_py.journal.index import (
    Entries,
    LiveIndex,
    StoredIndex,
    read_index,
)
from malamute_py.journal.layout import index_name, segment_name
from malamute_py.journal.mapping import Mappings
from malamute_py.journal.segment import Segment
from malamute_py.journal.spots import Matches
from malamute_py.journal.storage import File, Storage, read_around, read_file
from malamute_py.journal.streams import StreamTable
from malamute_py.journal.taking import Out, Wanted, parts
from malamute_py.journal.types import (
    SEGMENT_HEADER_BYTES,
    UNINDEXED_FROM,
    Candidates,
    ChosenRows,
    Gap,
    History,
    Plan,
    RingSettings,
    Run,
)

_SAMPLED_FROM_BYTES = 32 << 20
"""Bytes of a planned read from which on a few batches are looked at for how much is wanted."""
_SAMPLES = 4
_SAMPLE_BYTES_MAX = 4 << 20
_FEWEST = 16
"""A planned part has at most so many times as many bytes of batches as were asked for: where few
rows are wanted, looking for them costs about that much."""


class Reader:
    """The reading side of one ring."""

    def __init__(
        self,
        storage: Storage,
        ring: bytes,
        settings: RingSettings,
        streams: StreamTable,
        segments: Callable[[], tuple[Segment, ...]],
        rebuild: Callable[[Segment], LiveIndex],
        mappings: Mappings | None,
    ) -> None:
        """segments: the ring's present ones. rebuild: an index by scanning the segment.

        mappings: those of the journal; None: everything is read by position.
        """
        self._storage = storage
        self._ring = ring
        self._settings = settings
        self._streams = streams
        self._segments = segments
        self._rebuild = rebuild
        self._mappings = mappings
        self._lock = threading.Lock()
        """Guards the two caches only; never held over a read."""
        self._indexes: OrderedDict[int, StoredIndex] = OrderedDict()
        self._index_bytes = 0
        self._files: OrderedDict[int, File] = OrderedDict()

    # --- indexes and files ------------------------------------------------------------

    def index(self, segment: Segment) -> LiveIndex | StoredIndex:
        """The segment's index, from memory or its file, rebuilt when the file is damaged."""
        live = segment.live
        if live is not None:
            return live
        with self._lock:
            found = self._indexes.get(segment.number)
            if found is not None:
                self._indexes.move_to_end(segment.number)
                return found
        try:
            data = read_file(self._storage, index_name(segment.number))
        except OSError:
            data = None
        found = None if data is None else read_index(data, self._ring, segment.number)
        if found is None:
            try:
                rebuilt = self._rebuild(segment)
            except OSError:
                if not segment.retired:
                    raise
                # It went while we looked: there is nothing in it for any reader.
                return LiveIndex(0, 1)
            segment.live = rebuilt
            return rebuilt
        with self._lock:
            if self._indexes.setdefault(segment.number, found) is found:
                self._index_bytes += found.size
            while self._index_bytes > self._settings.index_memory_bytes and len(self._indexes) > 1:
                _, old = self._indexes.popitem(last=False)
                self._index_bytes -= old.size
        return found

    def forget(self, number: int) -> None:
        """Drop what is cached of a retired segment."""
        with self._lock:
            old = self._indexes.pop(number, None)
            if old is not None:
                self._index_bytes -= old.size
            self._files.pop(number, None)

    def file(self, segment: Segment) -> File:
        """The segment's file, opened if need be. Raises OSError."""
        held = segment.file
        if held is not None:
            return held
        with self._lock:
            cached = self._files.get(segment.number)
            if cached is not None:
                self._files.move_to_end(segment.number)
                return cached
        opened = self._storage.open(segment.name)
        with self._lock:
            self._files[segment.number] = opened
            while len(self._files) > self._settings.open_files_max:
                self._files.popitem(last=False)
        return opened

    # --- by offset --------------------------------------------------------------------

    def read(
        self,
        stream: int,
        from_offset: int,
        end_offset: int,
        bytes_max: int,
        search: Candidates | None,
        client_time: tuple[int, int] | None,
        matches: Matches | None,
        oldest_ms: int,
        pinned: int,
        chosen_rows: ChosenRows | None,
    ) -> History:
        """See Ring.read."""
        state = self._streams.states.get(stream)
        if state is None:
            if from_offset >= end_offset or not self._streams.unseen_next:
                return History((), from_offset)
            # Damage took all that there was of it.
            gap = Gap(from_offset, end_offset, "damaged", "nothing of the stream is in the ring")
            return History((), end_offset, (gap,))
        end = min(end_offset, state.next)
        runs: list[Run] = []
        gaps: list[Gap] = []
        position = self._skip_retired(stream, from_offset, end, gaps)
        if oldest_ms and position < end:
            young = min(self.closest_offset(stream, oldest_ms, inclusive=True), pinned, end)
            if young > position:
                gaps.append(Gap(position, young, "retention", "past the age that the stream keeps"))
                position = young
        left = max(bytes_max, 1)
        gathering = RareRows(stream, runs)
        wanted = None
        if chosen_rows is not None:
            wanted = WantedRows(chosen_rows, client_time, position, end)
        out = Out(self._ring, runs, gaps, gathering, wanted)
        told = 0
        for segment in self._segments():
            span = segment.spans.get(stream)
            if span is None or span.next <= position:
                continue
            if position >= end or left <= 0:
                break
            if span.first > position:
                stop = min(span.first, end)
                self._name_gap(stream, position, stop, f"before {segment.name}", gaps)
                position = stop
                if position >= end:
                    break
            if len(gaps) > told:
                # One batch must not hold rows from before a gap and from after it.
                gathering.flush()
                told = len(gaps)
            index = self.index(segment)
            entries = index.entries(stream, position, end)
            rare = None
            if matches is not None and search is not None:
                rare = wanted_spots(
                    index, stream, entries, search, matches, client_time, position, end
                )
            if rare is None:
                chosen = choose(index, stream, entries, search, client_time)
                position, left = self._read_segment(
                    segment, stream, entries, chosen, position, end, left, out
                )
            else:
                position, left = self._read_rare(
                    segment, stream, entries, rare, position, end, left, out
                )
            if segment.retired:
                position = self._skip_retired(stream, position, end, gaps)
        else:
            if position < end and left > 0:
                self._name_gap(stream, position, end, "the batches are not in the ring", gaps)
                position = end
        gathering.flush()
        return History(tuple(runs), max(position, from_offset), _gaps_before(position, gaps))

    def _name_gap(
        self, stream: int, position: int, stop: int, reason: str, gaps: list[Gap]
    ) -> None:
        """Name [position, stop): what was retired meanwhile as such, the rest as damage."""
        position = self._skip_retired(stream, position, stop, gaps)
        if position < stop:
            gaps.append(Gap(position, stop, "damaged", reason))

    def _skip_retired(self, stream: int, position: int, end: int, gaps: list[Gap]) -> int:
        """Return the position, or the stream's first offset if that is later: the gap is noted."""
        first, _ = self._streams.bounds(stream)
        if position >= first or position >= end:
            return position
        stop = min(first, end)
        gaps.append(Gap(position, stop, "retention", "removed to keep the log within its bounds"))
        return stop

    def _read_segment(
        self,
        segment: Segment,
        stream: int,
        entries: Entries,
        chosen: Any,
        position: int,
        end: int,
        left: int,
        out: Out,
    ) -> tuple[int, int]:
        """Read the chosen entries of a segment from `position` up to `end`, into `out`.

        left: bytes that the read may still return. Returns the offset come to, and the bytes left.
        """
        rows = entries.rows
        wanted: list[Wanted] = []
        wanted_bytes = 0
        stop = position
        cut = False
        for at, size, base, after, take in zip(
            rows["position"].tolist(),
            rows["bytes"].tolist(),
            rows["base"].tolist(),
            rows["next"].tolist(),
            chosen,
            strict=True,
        ):
            if base > stop:
                # An index rebuilt while its segment was retired has holes of its own.
                self._name_gap(stream, stop, min(base, end), f"amid {segment.name}", out.gaps)
            stop = after
            if take:
                entry = out.entry(segment, at, size, base, after)
                wanted.append(entry)
                wanted_bytes += out.least(entry)
                if wanted_bytes >= left:
                    cut = after < end
                    break
        read = None
        for known, part in parts(wanted):
            if left <= 0:
                return position, left
            found = None
            if known is not None and read is None and (file := self._opened(segment)):
                read = partial(self._storage.read, file)
            if known is not None and out.wanted is not None and read is not None:
                found = out.wanted.of_known(known, read, part.position)
            if known is None or found is None:
                position, left, whole = self._read_part(
                    segment, stream, part, position, end, left, out
                )
                if not whole:
                    return position, left
                continue
            if segment.retired:
                return position, left
            left = out.gather(found, known.stamp, left, known=True)
            position = min(known.stamp.next_offset, end)
        # What was not even wanted for want of room is for the next read, whatever is left.
        return min(max(stop, position), end), 0 if cut else left

    def _read_rare(
        self,
        segment: Segment,
        stream: int,
        entries: Entries,
        rare: WantedSpots,
        position: int,
        end: int,
        left: int,
        out: Out,
    ) -> tuple[int, int]:
        """Read rare rows by themselves, and between them the chosen entries, into `out`.

        left: bytes that the read may still return. Returns the offset come to, and the bytes left.
        """
        chosen, nexts, spots = rare.chosen, entries.rows["next"], rare.spots
        begin = done = 0
        while begin < len(nexts):
            # Up to the next chosen entry all is rows; from there, up to the next row, entries.
            stop = next((at for at in range(begin, len(chosen)) if chosen[at]), len(nexts))
            if stop > begin:
                after = int(nexts[stop - 1])
                last = int(np.searchsorted(spots["offset"], after))
                position, left = self._gather(
                    segment, rare, done, last, position, min(after, end), left, out
                )
                if position < min(after, end) or left <= 0:
                    return position, left
                begin, done = stop, last
            if stop < len(nexts):
                begin = next((at for at in range(stop, len(chosen)) if not chosen[at]), len(nexts))
                part = Entries(entries.ordinals[stop:begin], entries.rows[stop:begin])
                position, left = self._read_segment(
                    segment, stream, part, chosen[stop:begin], position, end, left, out
                )
                if position < min(int(nexts[begin - 1]), end) or left <= 0:
                    return position, left
        return position, left

    def _gather(
        self,
        segment: Segment,
        rare: WantedSpots,
        first: int,
        last: int,
        position: int,
        after: int,
        left: int,
        out: Out,
    ) -> tuple[int, int]:
        """Read the rare rows [first, last), all that is wanted up to offset `after`, into `out`.

        left: bytes that the read may still return. Returns the offset come to, and the bytes left.
        """
        gathering = out.gathering
        spots = rare.spots[first:last]
        costs = spots["bytes"].astype(np.int64) + BYTES_A_ROW
        if len(costs):
            # The texts of a header where it comes first.
            which, at = np.unique(rare.codes[first:last], return_index=True)
            costs[at] += [weight_of(rare.headers[code]) for code in which.tolist()]
        costs = np.cumsum(costs)
        room = min(int(np.searchsorted(costs, left)) + 1, gathering.left)
        cut = room < len(spots)
        if cut:
            after = int(spots["offset"][room])
            spots = spots[:room]
        rows: list[Row] = []
        held: list[tuple[list[Row], int, int]] = []
        lost: list[Gap] = []
        epoch = lsn = -1
        headers, crc_of = rare.headers, google_crc32c.value
        file = self._opened(segment) if len(spots) else None
        read = self._storage.read
        for (offset, appended, client, of, batch, at, size, crc), code in zip(
            spots.tolist(), rare.codes[first:last].tolist(), strict=False
        ):
            try:
                body = read(file, at, size) if file is not None else b""
            except OSError:
                body = b""
            if len(body) != size or crc_of(body) != crc:
                reason = f"{segment.name} at byte {at}: a record's checksum does not fit"
                lost.append(Gap(offset, offset + 1, "damaged", reason))
                epoch = -1
                continue
            if of != epoch:
                rows = []
                epoch, lsn = of, segment.base_lsn + batch
                held.append((rows, epoch, lsn))
            rows.append(Row(headers[code], offset, appended, client, body))
        if segment.retired:
            # It may have been overwritten under the reads: the bytes mean nothing.
            return position, left
        if lost:
            segment.damaged = True
            out.gaps.extend(lost)
        for rows, epoch, lsn in held:
            if lost:
                gathering.flush()
            gathering.add(rows, epoch, lsn)
        if len(costs):
            left -= int(costs[min(room, len(costs)) - 1])
        return max(position, after), 0 if cut or gathering.left <= 0 else left

    def _read_part(
        self,
        segment: Segment,
        stream: int,
        part: Part,
        position: int,
        end: int,
        left: int,
        out: Out,
    ) -> tuple[int, int, bool]:
        """Read the batches of one part of a segment into `out`.

        left: bytes that the read may still return. Returns the offset come to, the bytes left, and
        whether to go on.
        """
        data = self._view(segment, part.position, part.size)
        if segment.retired:
            # It may have been overwritten under the read: the bytes mean nothing.
            return position, left, False
        view = memoryview(data)
        builder, gathering = Runs(view, out.runs), out.gathering
        for batch in batches_in(data, segment.base_lsn + part.position, part, stream):
            if batch.next <= position:
                continue
            if batch.base >= end:
                break
            if left <= 0:
                builder.close()
                return position, left, False
            if batch.found is None:
                start = max(batch.base, position)
                reason = f"{segment.name} at byte {part.position + batch.at}: {batch.reason}"
                out.gaps.append(Gap(start, min(batch.next, end), "damaged", reason))
                gathering.flush()
                segment.damaged = True
            elif (rows := out.rows_of(view, batch, batch.found.stamp)) is None:
                gathering.flush()
                builder.add(batch)
                left -= batch.size
            else:
                if rows:
                    builder.close()
                left = out.gather(rows, batch.found.stamp, left)
            position = min(batch.next, end)
        builder.close()
        return position, left, True

    def _opened(self, segment: Segment) -> File | None:
        """The segment's file; None: it is retired, or the file is gone.

        Raises OSError when the file cannot be opened (too many are, say): that is no damage.
        """
        try:
            return self.file(segment)
        except OSError as error:
            if segment.retired or isinstance(error, FileNotFoundError):
                return None
            raise

    def _bytes(self, segment: Segment, position: int, size: int) -> bytes:
        """Return bytes of a segment; unreadable pages are zeros, and so fail their batch's check.

        A retired segment, or one whose file is gone, gives zeros. Raises as _opened().
        """
        file = self._opened(segment)
        return bytes(size) if file is None else read_around(self._storage, file, position, size)

    def _view(self, segment: Segment, position: int, size: int) -> memoryview:
        """Return bytes of a segment, mapped where it is sealed and enough is wanted of it.

        Otherwise, and where a page cannot be read, as _bytes().
        """
        mappings = self._mappings
        if mappings is not None and segment.file is None:
            file = self._opened(segment)
            if file is not None:
                mapped = mappings.view(self._storage, segment, file, position, size)
                if mapped is not None:
                    return mapped
        return memoryview(self._bytes(segment, position, size))

    def read_batches(self, stream: int, offsets: Sequence[int]) -> list[bytes | None]:
        """See Ring.read_batches."""
        found: list[bytes | None] = [None] * len(offsets)
        first, after = self._streams.bounds(stream)
        places = sorted(range(len(offsets)), key=offsets.__getitem__)
        ascending = [offsets[place] for place in places]
        done, stop = bisect_left(ascending, first), bisect_left(ascending, after)
        for segment in self._segments():
            span = segment.spans.get(stream)
            if done == stop or span is None or span.next <= ascending[done]:
                continue
            done = bisect_left(ascending, span.first, done, stop)
            here = ascending[done : bisect_left(ascending, span.next, done, stop)]
            if here:
                for at, batch in self._pick(segment, stream, here):
                    found[places[done + at]] = batch
                done += len(here)
        return found

    def _pick(
        self, segment: Segment, stream: int, offsets: list[int]
    ) -> Iterator[tuple[int, bytes]]:
        """Yield (place among `offsets`, the stored batch that holds it) for those in a segment."""
        rows = self.index(segment).entries(stream, offsets[0], offsets[-1] + 1).rows
        wanted = np.array(offsets, np.uint64)
        chosen = np.unique(np.searchsorted(rows["next"], wanted, side="right"))
        fields = rows[chosen[chosen < len(rows)]][["position", "bytes", "base", "next"]]
        for part in group_entries(fields.tolist()):
            data = self._bytes(segment, part.position, part.size)
            if segment.retired:
                return  # it may have been overwritten under the read
            yield from pick_in(data, segment.base_lsn + part.position, part, stream, offsets)

    # --- by time ----------------------------------------------------------------------

    def closest_offset(self, stream: int, time_ms: int, inclusive: bool) -> int:
        """See Ring.closest_offset."""
        least = time_ms if inclusive else time_ms + 1
        for segment, entries in self._entries(stream):
            if segment.spans[stream].last_time_ms < least:
                continue
            rows = entries.rows
            for place in np.flatnonzero(rows["last_time"] >= least).tolist():
                damaged = -1
                for batch in self._batches_of(segment, stream, rows[place]):
                    if batch.found is None:
                        # Its time cannot be read: it may be the first.
                        damaged = batch.base if damaged < 0 else damaged
                    elif batch.found.stamp.append_time_ms >= least:
                        begin = batch.base if damaged < 0 else damaged
                        return max(begin, self._streams.bounds(stream)[0])
                    else:
                        damaged = -1
                if damaged >= 0:
                    return max(damaged, self._streams.bounds(stream)[0])
        return self._streams.bounds(stream)[1]

    def closest_client_time(self, stream: int, time_ms: int) -> int:
        """See Ring.closest_client_time."""
        first, _ = self._streams.bounds(stream)
        for segment, entries in self._entries(stream):
            if segment.spans[stream].client_max_ms < time_ms:
                continue
            rows = entries.rows
            for place in np.flatnonzero(rows["client_max"] >= time_ms).tolist():
                damaged = -1
                for batch, view in self._chunk(segment, stream, rows[place]):
                    if batch.found is None:
                        damaged = batch.base if damaged < 0 else damaged
                        continue
                    times = _content(batch, view).client_times
                    if times is not None:
                        hits = np.flatnonzero(times >= time_ms) + batch.base
                        hits = hits[hits >= first]
                        if len(hits):
                            return max(damaged, first) if damaged >= 0 else int(hits[0])
                    damaged = -1
                if damaged >= 0:
                    return max(damaged, first)
        return self._streams.bounds(stream)[1]

    def _entries(self, stream: int) -> Iterator[tuple[Segment, Entries]]:
        """Yield each segment that has batches of a stream, with their entries in its index."""
        state = self._streams.states.get(stream)
        if state is None:
            return
        for segment in self._segments():
            span = segment.spans.get(stream)
            if span is not None and span.next > state.first:
                yield segment, self.index(segment).entries(stream, state.first, state.next)

    def _batches_of(self, segment: Segment, stream: int, row: Any) -> Iterator[Batch]:
        """Yield the batches of one index entry, damaged ones too."""
        for batch, _ in self._chunk(segment, stream, row):
            yield batch

    def _chunk(self, segment: Segment, stream: int, row: Any) -> list[tuple[Batch, memoryview]]:
        """Read the batches of one index entry, with the bytes; none if it was retired."""
        position, size = int(row["position"]), int(row["bytes"])
        entry = (position, size, int(row["base"]), int(row["next"]))
        view = self._view(segment, position, size)
        if segment.retired:
            return []
        part = Part(position, size, [entry])
        batches = batches_in(view, segment.base_lsn + position, part, stream)
        return [(batch, view) for batch in batches]

    def _contents_of(
        self, segment: Segment, stream: int, row: Any
    ) -> Iterator[tuple[Batch, Content]]:
        """Yield the good batches of one index entry with their contents."""
        for batch, view in self._chunk(segment, stream, row):
            if batch.found is not None:
                yield batch, _content(batch, view)

    # --- by subject ---------------------------------------------------------------------

    def last_per_subject(
        self, stream: int, search: Candidates | None, end_offset: int | None
    ) -> list[tuple[tuple[str, ...], int]]:
        """See Ring.last_per_subject."""
        state = self._streams.states.get(stream)
        if state is None:
            return []
        end = state.next if end_offset is None else min(end_offset, state.next)
        latest: dict[tuple[str, ...], int] = {}
        for segment in reversed(self._segments()):
            span = segment.spans.get(stream)
            if span is None or span.first >= end or span.next <= state.first:
                continue
            self._last_in_segment(segment, stream, state.first, end, search, latest)
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

        latest: subject -> offset, of those that are known already; it gets the others.
        """
        index = self.index(segment)
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
        waiting: dict[int, list[tuple[tuple[str, ...] | None, BitMap]]] = {}
        heap: list[int] = []

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
            wait(None, allowed.copy())
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
        """Return each subject's newest offset among the batches of one index entry."""
        latest: dict[tuple[str, ...], int] = {}
        for batch, content in self._contents_of(segment, stream, row):
            low, high = max(first - batch.base, 0), min(end, batch.next) - batch.base
            if high <= low:
                continue
            keys, codes = content.table.keys, content.subject_codes
            if codes is None:
                latest[keys[0]] = batch.base + high - 1
                continue
            part = codes[low:high]
            used, from_end = np.unique(part[::-1], return_index=True)
            for code, distance in zip(used.tolist(), from_end.tolist(), strict=True):
                latest[keys[code]] = batch.base + high - 1 - distance
        return latest

    # --- raw and retention --------------------------------------------------------------

    def read_raw(self, lsn: int, end_lsn: int, bytes_max: int) -> tuple[int, Any, int]:
        """See Ring.read_raw."""
        size = self._settings.segment_bytes
        if lsn >= end_lsn:
            return lsn, b"", lsn
        if lsn % size == 0:
            lsn += SEGMENT_HEADER_BYTES
        number, position = divmod(lsn, size)
        segment = next((s for s in self._segments() if s.number == number), None)
        if segment is None:
            raise JournalCorrupt(segment_name(number), "the segment is not in the ring", position)
        left = min(end_lsn, segment.base_lsn + size) - lsn
        data = b""
        for want in (min(max(bytes_max, STAMP_BYTES), left), left):
            data = self._storage.read(self.file(segment), position, want)
            stop, padding = self._whole_batches(data, lsn, size - position)
            if segment.retired:
                raise JournalCorrupt(segment.name, "the segment was retired", position)
            if stop:
                after = segment.base_lsn + size if padding else lsn + stop
                return lsn, memoryview(data)[:stop], after
        found = check(memoryview(data), lsn, 0, room=size - position)
        reason = found if isinstance(found, str) else found.reason
        raise JournalCorrupt(segment.name, reason, position)

    @staticmethod
    def _whole_batches(data: bytes, lsn: int, room: int) -> tuple[int, bool]:
        """(bytes of the good batches that lie whole in the data, whether padding ends them)."""
        view, at = memoryview(data), 0
        while at < len(data):
            found = check(view, lsn, at, room=room - at)
            if isinstance(found, str) or not found.content_good:
                break
            if found.stamp.control_kind == PADDING:
                return at + found.stamp.stamp_bytes, True
            at += found.stamp.size
        return at, False

    def offset_within(self, stream: int, bytes_max: int) -> int:
        """The least offset from which on the stream's batches fit into so many bytes."""
        state = self._streams.states.get(stream)
        if state is None:
            return 0
        left = bytes_max
        offset = state.first
        newest = True
        for segment in reversed(self._segments()):
            span = segment.spans.get(stream)
            if span is None or span.next <= state.first:
                continue
            if span.bytes <= left:
                left -= span.bytes
                newest = False
                continue
            rows = self.index(segment).entries(stream, state.first, state.next).rows
            held = np.cumsum(rows["bytes"][::-1].astype(np.int64))
            fitting = int(np.searchsorted(held, left, side="right"))
            if fitting == 0 and newest:
                fitting = 1
            offset = int(rows["base"][len(rows) - fitting]) if fitting else span.next
            break
        return max(offset, state.first)

    # --- plans --------------------------------------------------------------------------

    def plan(
        self,
        stream: int,
        from_offset: int,
        end_offset: int,
        search: Candidates | None,
        records_max: int,
        bytes_max: int,
        split_bytes: int,
        left: Sequence[tuple[Candidates, int]],
        matches: Matches | None,
        rows_of: ChosenRows | None,
    ) -> Plan:
        """See Ring.plan."""
        state = self._streams.states.get(stream)
        if state is None:
            return Plan(from_offset, (), 0)
        end = min(end_offset, state.next)
        gaps: list[Gap] = []
        position = self._skip_retired(stream, from_offset, end, gaps)
        if records_max > 0:
            end = min(end, position + records_max)
        cutter = Cutter(position, bytes_max)
        whole: list[tuple[Segment, Any]] = []
        for segment in self._segments():
            span = segment.spans.get(stream)
            if span is None or span.next <= position:
                continue
            if span.first >= end or cutter.full():
                break
            index = self.index(segment)
            entries = index.entries(stream, position, end)
            rows = entries.rows
            chosen = np.asarray(choose(index, stream, entries, search, None), np.bool_)
            for those_left, before in left:
                if before > position and len(rows):
                    kept = choose(index, stream, entries, those_left, None)
                    chosen &= np.asarray(kept, np.bool_) | (rows["next"] > before)
            weighed = np.where(chosen, rows["bytes"], 0).astype(np.int64)
            if matches is not None and search is not None and not left:
                rare = wanted_spots(index, stream, entries, search, matches, None, position, end)
                if rare is not None:
                    weighed = weights_of(rare, rows)
                    chosen = np.asarray(rare.chosen, np.bool_)
            if chosen.any():
                whole.append((segment, rows[chosen]))
            weights = weighed.tolist()
            for weight, after in zip(weights, rows["next"].tolist(), strict=True):
                cutter.add(weight, min(after, end))
                if cutter.full():
                    break
            position = max(position, cutter.position)
        stop = cutter.position if cutter.full() else max(end, from_offset)
        one_in = 1
        if rows_of is not None and cutter.total >= _SAMPLED_FROM_BYTES and split_bytes > 0:
            one_in = self._one_in(stream, whole, rows_of)
        return Plan(stop, cutter.splits(stop, split_bytes, one_in), cutter.total, tuple(gaps))

    def _one_in(self, stream: int, entries: list[tuple[Segment, Any]], rows_of: ChosenRows) -> int:
        """Return of how many bytes of some entries about one is wanted: 1 to _FEWEST.

        A few batches are looked at, and the one of which most is wanted counts.
        """
        share = 1 / _FEWEST
        for segment, rows in entries[:: -(-len(entries) // _SAMPLES) or 1]:
            row = rows[len(rows) // 2]
            if row["bytes"] > _SAMPLE_BYTES_MAX:
                return 1
            for _, content in self._contents_of(segment, stream, row):
                try:
                    found = rows_of(content)
                except BatchError:
                    found = None
                if found is None:
                    return 1
                share = max(share, len(found) / max(1, content.head.count))
            if share > 0.5:
                return 1
        return int(1 / share)


def _content(batch: Batch, view: memoryview) -> Content:
    """Return the content of a batch that was found in these bytes."""
    assert batch.found is not None
    begin = batch.at + batch.found.stamp.stamp_bytes
    return Content(view[begin : batch.at + batch.size])


def _gaps_before(position: int, gaps: list[Gap]) -> tuple[Gap, ...]:
    """Return the part of the gaps that lies before the offset that a read came to.

    Holes of an index are named ahead of the entries that are read then, and the read may stop
    before them.
    """
    if gaps and gaps[-1].to_offset > position:
        return tuple(
            gap
            if gap.to_offset <= position
            else Gap(gap.from_offset, position, gap.code, gap.reason)
            for gap in gaps
            if gap.from_offset < position
        )
    return tuple(gaps)
