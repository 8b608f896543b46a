"""Reading a ring's history: by offset, by time, by subject.

Owns every read of a segment's file while the ring is open. The rule: what is handed out
had both checksums good at that moment and lay in a segment that was not retired before
the read was over; everything else is a named gap. Runs in the reader thread: few, large
reads, each off the interpreter lock. Source: FORMAT.md, section 8.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import google_crc32c
import numpy as np

from malamute_protocol.gather import BYTES_A_ROW, Row, weight_of
from malamute_protocol.stamp import PADDING, STAMP_BYTES
from malamute_py.journal.check import check
from malamute_py.journal.choosing import WantedSpots, choose, wanted_spots
from malamute_py.journal.chunks import Part, Runs, batches_in, group_entries, pick_in
from malamute_py.journal.errors import JournalCorrupt
from malamute_py.journal.gathering import RareRows, WantedRows
from malamute_py.journal.index import NEVER, Entries
from malamute_py.journal.layout import segment_name
from malamute_py.journal.searching import Searches
from malamute_py.journal.segment import Segment
from malamute_py.journal.segment_files import SegmentFiles
from malamute_py.journal.spots import Matches
from malamute_py.journal.streams import StreamTable
from malamute_py.journal.taking import Out, Wanted, parts
from malamute_py.journal.types import (
    SEGMENT_HEADER_BYTES,
    Candidates,
    ChosenRows,
    Gap,
    History,
    Run,
)


class Reader:
    """The reading side of one ring."""

    def __init__(self, files: SegmentFiles, searches: Searches) -> None:
        self._files = files
        self._streams = files.streams
        self._searches = searches

    # --- by offset --------------------------------------------------------------------

    def read(
        self,
        stream: int,
        from_offset: int,
        end_offset: int,
        bytes_max: int,
        candidates: Candidates | None = None,
        client_time: tuple[int, int] | None = None,
        matches: Matches | None = None,
        oldest_ms: int = 0,
        pinned: int = NEVER,
        rows: ChosenRows | None = None,
    ) -> History:
        """Whole batches that hold offsets in [from, end), in order.

        Stops once bytes_max is reached; one batch is always returned when there is one.
        candidates: skips entries that cannot match. client_time: [least, most) of a
        record's client time; skips entries without any such record. matches: whether a single
        header is wanted, exactly; given it, rare rows may come gathered into derived batches
        (Run.next), of which every row is wanted. oldest_ms: records that were appended before
        are a gap by retention, but for those from the offset `pinned` on. rows: the rows of a
        batch that `matches` wants; given it, few wanted rows of a batch come gathered as well.
        Raises OSError when a segment's file cannot be opened; what cannot be read in it
        is a gap.
        """
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
        position = skip_retired(self._streams, stream, from_offset, end, gaps)
        if oldest_ms and position < end:
            young = self._searches.closest_offset(stream, oldest_ms, inclusive=True)
            young = min(young, pinned, end)
            if young > position:
                gaps.append(Gap(position, young, "retention", "past the age that the stream keeps"))
                position = young
        left = max(bytes_max, 1)
        gathering = RareRows(stream, runs)
        wanted = None
        if rows is not None:
            wanted = WantedRows(rows, client_time, position, end)
        out = Out(self._files.ring, runs, gaps, gathering, wanted)
        told = 0  # Gaps that the gathering was flushed for.
        for segment in self._files.segments():
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
            index = self._files.index(segment)
            entries = index.entries(stream, position, end)
            rare = None
            if matches is not None and candidates is not None:
                rare = wanted_spots(
                    index, stream, entries, candidates, matches, client_time, position, end
                )
            if rare is None:
                chosen = choose(index, stream, entries, candidates, client_time)
                position, left = self._read_segment(
                    segment, stream, entries, chosen, position, end, left, out
                )
            else:
                position, left = self._read_rare(
                    segment, stream, entries, rare, position, end, left, out
                )
            if segment.retired:
                position = skip_retired(self._streams, stream, position, end, gaps)
        else:
            # All segments were gone through: what is still missing is in none.
            if position < end and left > 0:
                self._name_gap(stream, position, end, "the batches are not in the ring", gaps)
                position = end
        gathering.flush()
        return History(tuple(runs), max(position, from_offset), _gaps_before(position, gaps))

    def _name_gap(
        self, stream: int, position: int, stop: int, reason: str, gaps: list[Gap]
    ) -> None:
        """Name [position, stop): what was retired meanwhile as such, the rest as damage."""
        position = skip_retired(self._streams, stream, position, stop, gaps)
        if position < stop:
            gaps.append(Gap(position, stop, "damaged", reason))

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
        # Entries before and after a hole are read apart: gaps are named in order, and no batch is
        # gathered over one.
        holes = np.flatnonzero(rows["base"][1:] != rows["next"][:-1]) + 1
        begin = 0
        for stop in (*holes.tolist(), len(rows)):
            part = Entries(entries.ordinals[begin:stop], rows[begin:stop])
            position, left = self._read_entries(
                segment, stream, part, chosen[begin:stop], position, end, left, out
            )
            if stop == len(rows) or left <= 0 or position < min(int(rows["next"][stop - 1]), end):
                break
            begin = stop
        return position, left

    def _read_entries(
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
        """Read the chosen ones of some entries without a hole between them, as _read_segment()."""
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
                # Damage that a start has found leaves a hole, and so does an index that is rebuilt
                # while its segment is retired.
                out.gathering.flush()
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
        # A known batch gives its few wanted rows alone; every other part is read whole.
        for known, part in parts(wanted):
            if left <= 0:
                return position, left
            found = None
            if known is not None and read is None and (file := self._files.opened(segment)):
                read = partial(self._files.storage.read, file)
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
        # 0 bytes left end the read: entries that it had no room for are the next read's.
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
        """Read rare rows by themselves, and between them the entries to be read whole, into `out`.

        rare: its spots say where each wanted row lies; its list `whole` says which entries may hold
        a match without a spot. left: bytes that the read may still return. Returns the offset come
        to, and the bytes left.
        """
        whole, nexts, spots = rare.whole, entries.rows["next"], rare.spots
        begin = spots_from = 0
        while begin < len(nexts):
            # Rows, up to the next entry to be read whole; then entries, up to the next row.
            stop = next((at for at in range(begin, len(whole)) if whole[at]), len(nexts))
            if stop > begin:
                after = int(nexts[stop - 1])
                spots_to = int(np.searchsorted(spots["offset"], after))
                position, left = self._gather(
                    segment, rare, spots_from, spots_to, position, min(after, end), left, out
                )
                if position < min(after, end) or left <= 0:
                    return position, left
                begin, spots_from = stop, spots_to
            if stop < len(nexts):
                begin = next((at for at in range(stop, len(whole)) if not whole[at]), len(nexts))
                part = Entries(entries.ordinals[stop:begin], entries.rows[stop:begin])
                position, left = self._read_segment(
                    segment, stream, part, whole[stop:begin], position, end, left, out
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
        # Bytes of the result after each row, so that the first rows that fit are found.
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
        file = self._files.opened(segment) if len(spots) else None
        read = self._files.storage.read
        for (offset, appended, client, of_epoch, batch_at, at, size, crc), code in zip(
            spots.tolist(), rare.codes[first:last].tolist(), strict=False
        ):
            try:
                body = read(file, at, size) if file is not None else b""
            except OSError:
                body = b""
            if len(body) != size or crc_of(body) != crc:
                reason = f"{segment.name} at byte {at}: a record's checksum does not fit"
                lost.append(Gap(offset, offset + 1, "damaged", reason))
                epoch = -1  # The next row begins a list of its own.
                continue
            if of_epoch != epoch:
                rows = []
                epoch, lsn = of_epoch, segment.base_lsn + batch_at
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
                # Rows before and after a lost one do not share a batch.
                gathering.flush()
            gathering.add(rows, epoch, lsn)
        if lost:
            gathering.flush()
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
        data = self._files.view(segment, part.position, part.size)
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

    def read_batches(self, stream: int, offsets: Sequence[int]) -> list[bytes | None]:
        """For each offset the whole batch (stamp and content) that holds it, checked.

        None where it is gone: removed, retired or damaged. Cheapest when the offsets lie
        close together: neighbours share a read. Raises OSError: a file cannot be opened.
        """
        found: list[bytes | None] = [None] * len(offsets)
        first, after = self._streams.bounds(stream)
        places = sorted(range(len(offsets)), key=offsets.__getitem__)
        ascending = [offsets[place] for place in places]
        done, stop = bisect_left(ascending, first), bisect_left(ascending, after)
        for segment in self._files.segments():
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
        rows = self._files.index(segment).entries(stream, offsets[0], offsets[-1] + 1).rows
        wanted = np.array(offsets, np.uint64)
        chosen = np.unique(np.searchsorted(rows["next"], wanted, side="right"))
        fields = rows[chosen[chosen < len(rows)]][["position", "bytes", "base", "next"]]
        for part in group_entries(fields.tolist()):
            data = self._files.read(segment, part.position, part.size)
            if segment.retired:
                return  # it may have been overwritten under the read
            yield from pick_in(data, segment.base_lsn + part.position, part, stream, offsets)

    # --- raw --------------------------------------------------------------------------

    def read_raw(self, lsn: int, end_lsn: int, bytes_max: int) -> tuple[int, Any, int]:
        """(position, batches as they are, position after them) for append_raw() elsewhere.

        See Ring.read_raw.
        """
        size = self._files.settings.segment_bytes
        if lsn >= end_lsn:
            return lsn, b"", lsn
        if lsn % size == 0:
            lsn += SEGMENT_HEADER_BYTES
        number, position = divmod(lsn, size)
        segment = next((s for s in self._files.segments() if s.number == number), None)
        if segment is None:
            raise JournalCorrupt(segment_name(number), "the segment is not in the ring", position)
        left = min(end_lsn, segment.base_lsn + size) - lsn
        data = b""
        # Once more with all that is left: a single batch may be larger than bytes_max.
        for want in (min(max(bytes_max, STAMP_BYTES), left), left):
            data = self._files.storage.read(self._files.file(segment), position, want)
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


def skip_retired(
    streams: StreamTable, stream: int, position: int, end: int, gaps: list[Gap]
) -> int:
    """Return the position, or the stream's first offset if that is later: the gap is noted."""
    first, _ = streams.bounds(stream)
    if position >= first or position >= end:
        return position
    stop = min(first, end)
    gaps.append(Gap(position, stop, "retention", "removed to keep the log within its bounds"))
    return stop


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
