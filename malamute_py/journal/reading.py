"""Reading a ring's history: by offset, by time, by subject.

Owns every read of a segment's file while the ring is open. The rule: what is handed out
had both checksums good at that moment and lay in a segment that was not retired before
the read was over; everything else is a named gap. Runs in the reader thread: few, large
reads, each off the interpreter lock. Words: an entry of the index is a run of adjacent batches of
one stream; a spot is the place of one rare row; rows leave gathered in a derived batch, all other
batches whole. Source: FORMAT.md, section 8.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import google_crc32c
import numpy as np

from malamute_protocol.gather import BYTES_A_ROW, Row, weight_of
from malamute_py.journal.choosing import WantedSpots, choose, wanted_spots
from malamute_py.journal.chunks import Part, Runs, batches_in, group_entries, pick_in
from malamute_py.journal.gathering import RareRows, WantedRows
from malamute_py.journal.index import NEVER, Entries
from malamute_py.journal.searching import Searches
from malamute_py.journal.segment import Segment
from malamute_py.journal.segment_files import SegmentFiles
from malamute_py.journal.spots import Matches
from malamute_py.journal.streams import StreamTable
from malamute_py.journal.taking import Out, Wanted, parts
from malamute_py.journal.types import (
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
        """Return whole batches that hold offsets in [from_offset, end_offset), in order.

        For subscriptions that read history, and all others that read a stream. Stops once
        bytes_max is reached; one batch is always returned when there is one.
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
                return History((), from_offset)  # nothing was appended to it yet
            # Damage took all that there was of it.
            gap = Gap(from_offset, end_offset, "damaged", "nothing of the stream is in the ring")
            return History((), end_offset, (gap,))
        end = min(end_offset, state.next)
        runs: list[Run] = []
        gaps: list[Gap] = []
        # Offset up to which everything was read, excluded by the index, or named as a gap.
        reached = skip_retired(self._streams, stream, from_offset, end, gaps)
        if oldest_ms and reached < end:
            # The first record that is young enough, or that a cursor pins.
            young = self._searches.closest_offset(stream, oldest_ms, inclusive=True)
            young = min(young, pinned, end)
            if young > reached:
                gaps.append(Gap(reached, young, "retention", "past the age that the stream keeps"))
                reached = young
        left = max(bytes_max, 1)  # bytes that may still be returned; 0 or less end the read
        gathering = RareRows(stream, runs)
        wanted = None
        if rows is not None:
            wanted = WantedRows(rows, client_time, reached, end)
        out = Out(self._files.ring, runs, gaps, gathering, wanted)
        told = 0  # how many of the gaps had the gathering flushed
        for segment in self._files.segments():
            span = segment.spans.get(stream)
            if span is None or span.next <= reached:
                continue
            if reached >= end or left <= 0:
                break
            if span.first > reached:
                stop = min(span.first, end)
                self._name_gap(stream, reached, stop, f"before {segment.name}", gaps)
                reached = stop
                if reached >= end:
                    break
            if len(gaps) > told:
                # One batch must not hold rows from before a gap and from after it.
                gathering.flush()
                told = len(gaps)
            # The index excludes what cannot match; where it knows the places of all wanted rows
            # (`rare`), these are read by themselves.
            index = self._files.index(segment)
            entries = index.entries(stream, reached, end)
            rare = None
            if matches is not None and candidates is not None:
                rare = wanted_spots(
                    index, stream, entries, candidates, matches, client_time, reached, end
                )
            if rare is None:
                chosen = choose(index, stream, entries, candidates, client_time)
                reached, left = self._read_segment(
                    segment, stream, entries, chosen, reached, end, left, out
                )
            else:
                reached, left = self._read_rare(
                    segment, stream, entries, rare, reached, end, left, out
                )
            if segment.retired:
                reached = skip_retired(self._streams, stream, reached, end, gaps)
        else:
            # All segments were gone through: what is still missing is in none.
            if reached < end and left > 0:
                self._name_gap(stream, reached, end, "the batches are not in the ring", gaps)
                reached = end
        gathering.flush()
        return History(tuple(runs), max(reached, from_offset), _gaps_before(reached, gaps))

    def _name_gap(self, stream: int, reached: int, stop: int, reason: str, gaps: list[Gap]) -> None:
        """Add gaps for the offsets [reached, stop), which the index has not.

        What was retired meanwhile is a gap by retention, the rest one by damage, for this reason.
        """
        reached = skip_retired(self._streams, stream, reached, stop, gaps)
        if reached < stop:
            gaps.append(Gap(reached, stop, "damaged", reason))

    def _read_segment(
        self,
        segment: Segment,
        stream: int,
        entries: Entries,
        chosen: Any,
        reached: int,
        end: int,
        left: int,
        out: Out,
    ) -> tuple[int, int]:
        """Read the chosen entries of a segment from offset `reached` up to `end`, into `out`.

        chosen: for each entry whether it may hold a match. left: bytes that the read may still
        return. Returns the offset come to, and the bytes left.
        """
        rows = entries.rows
        # Entries before and after a hole are read apart: gaps are named in order, and no batch is
        # gathered over one.
        holes = np.flatnonzero(rows["base"][1:] != rows["next"][:-1]) + 1
        begin = 0
        for stop in (*holes.tolist(), len(rows)):  # stop: place after the last entry of a part
            part = Entries(entries.ordinals[begin:stop], rows[begin:stop])
            reached, left = self._read_entries(
                segment, stream, part, chosen[begin:stop], reached, end, left, out
            )
            # Nothing more is read where the bound ended the part early, or the segment went.
            if stop == len(rows) or left <= 0 or reached < min(int(rows["next"][stop - 1]), end):
                break
            begin = stop
        return reached, left

    def _read_entries(
        self,
        segment: Segment,
        stream: int,
        entries: Entries,
        chosen: Any,
        reached: int,
        end: int,
        left: int,
        out: Out,
    ) -> tuple[int, int]:
        """Read the chosen ones of some entries without a hole between them, as _read_segment().

        A hole may lie before the first of them.
        """
        # First the entries that the bound has room for are listed, then they are read.
        rows = entries.rows
        wanted: list[Wanted] = []
        wanted_bytes = 0
        stop = reached  # offset after the last entry that was listed or excluded
        cut = False  # whether the bound ended the list
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
                # while its segment is retired. No batch has rows from before and after a gap.
                out.gathering.flush()
                self._name_gap(stream, stop, min(base, end), f"amid {segment.name}", out.gaps)
            stop = after
            if take:
                entry = out.entry(segment, at, size, base, after)
                wanted.append(entry)
                wanted_bytes += out.least_cost_of(entry)
                if wanted_bytes >= left:
                    cut = after < end
                    break
        read = None
        # A known batch gives its few wanted rows alone; every other part is read whole.
        for known, part in parts(wanted):
            if left <= 0:
                return reached, left
            found = None
            if known is not None and read is None and (file := self._files.opened(segment)):
                read = partial(self._files.storage.read, file)
            if known is not None and out.wanted is not None and read is not None:
                found = out.wanted.of_known(known, read, part.position)
            if known is None or found is None:
                reached, left, go_on = self._read_part(
                    segment, stream, part, reached, end, left, out
                )
                if not go_on:
                    return reached, left
                continue
            if segment.retired:
                # It may have been overwritten under the read: the rows mean nothing.
                return reached, left
            left = out.gather(found, known.stamp, left, known=True)
            reached = min(known.stamp.next_offset, end)
        # 0 bytes left end the read: entries that it had no room for are the next read's.
        return min(max(stop, reached), end), 0 if cut else left

    def _read_rare(
        self,
        segment: Segment,
        stream: int,
        entries: Entries,
        rare: WantedSpots,
        reached: int,
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
        begin = spots_from = 0  # next entry, next spot
        while begin < len(nexts):
            # In the order of offsets: the spots of all entries up to the next one that is read
            # whole, then all entries that are read whole up to the next one with spots.
            stop = next((at for at in range(begin, len(whole)) if whole[at]), len(nexts))
            if stop > begin:
                after = int(nexts[stop - 1])
                spots_to = int(np.searchsorted(spots["offset"], after))
                reached, left = self._gather_spots(
                    segment, rare, spots_from, spots_to, reached, min(after, end), left, out
                )
                if reached < min(after, end) or left <= 0:
                    return reached, left
                begin, spots_from = stop, spots_to
            if stop < len(nexts):
                begin = next((at for at in range(stop, len(whole)) if not whole[at]), len(nexts))
                part = Entries(entries.ordinals[stop:begin], entries.rows[stop:begin])
                reached, left = self._read_segment(
                    segment, stream, part, whole[stop:begin], reached, end, left, out
                )
                if reached < min(int(nexts[begin - 1]), end) or left <= 0:
                    return reached, left
        return reached, left

    def _gather_spots(
        self,
        segment: Segment,
        rare: WantedSpots,
        first: int,
        last: int,
        reached: int,
        after: int,
        left: int,
        out: Out,
    ) -> tuple[int, int]:
        """Read the spots [first, last) of `rare`, all rows wanted before offset `after`.

        Each row is read by itself and checked by its spot's checksum, then joins a derived batch in
        `out`. left: bytes that the read may still return. Returns the offset come to, and the bytes
        left; 0 where not all of the rows found room.
        """
        gathering = out.gathering
        spots = rare.spots[first:last]
        costs = _costs_up_to(rare, first, last)
        # One row more than fits, so that each read brings one at least.
        room = min(int(np.searchsorted(costs, left)) + 1, gathering.left)
        cut = room < len(spots)
        if cut:
            after = int(spots["offset"][room])
            spots = spots[:room]
        # Rows of one epoch make a list, with the epoch and the LSN of the first one's batch.
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
            return reached, left
        if lost:
            segment.damaged = True  # it gets no index file, so that a start meets the damage
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
        return max(reached, after), 0 if cut or gathering.left <= 0 else left

    def _read_part(
        self,
        segment: Segment,
        stream: int,
        part: Part,
        reached: int,
        end: int,
        left: int,
        out: Out,
    ) -> tuple[int, int, bool]:
        """Read the batches of one part of a segment, each checked, into `out`.

        A batch leaves whole, or, where few of its rows are wanted, these rows alone. left: bytes
        that the read may still return. Returns the offset come to, the bytes left, and whether to
        go on with the next part: not so when the bytes are spent or the segment was retired.
        """
        data = self._files.view(segment, part.position, part.size)
        if segment.retired:
            # It may have been overwritten under the read: the bytes mean nothing.
            return reached, left, False
        view = memoryview(data)
        builder, gathering = Runs(view, out.runs), out.gathering
        for batch in batches_in(data, segment.base_lsn + part.position, part, stream):
            if batch.next <= reached:
                continue
            if batch.base >= end:
                break
            if left <= 0:
                builder.close()
                return reached, left, False
            if batch.found is None:
                start = max(batch.base, reached)
                reason = f"{segment.name} at byte {part.position + batch.at}: {batch.reason}"
                out.gaps.append(Gap(start, min(batch.next, end), "damaged", reason))
                gathering.flush()
                segment.damaged = True
            elif (rows := out.rows_of(view, batch, batch.found.stamp)) is None:
                # It leaves whole, after the rows that were gathered before it.
                gathering.flush()
                builder.add(batch)
                left -= batch.size
            else:
                if rows:
                    # The rows come after the whole batches before them.
                    builder.close()
                left = out.gather(rows, batch.found.stamp, left)
            reached = min(batch.next, end)
        builder.close()
        return reached, left, True

    def read_batches(self, stream: int, offsets: Sequence[int]) -> list[bytes | None]:
        """Return for each offset the whole batch (stamp and content) that holds it, checked.

        For bodies of mail and requests that are not in memory any more. None where it is gone:
        removed, retired or damaged. Cheapest when the offsets lie close together: neighbours share
        a read. Raises OSError: a file cannot be opened.
        """
        found: list[bytes | None] = [None] * len(offsets)
        first, after = self._streams.bounds(stream)
        # Looked for in ascending order; `places` says where each answer goes.
        places = sorted(range(len(offsets)), key=offsets.__getitem__)
        ascending = [offsets[place] for place in places]
        # Of `ascending`, those from `done` to `stop` are still looked for.
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
        """Yield (place among `offsets`, the stored batch that holds it), read from one segment.

        The part of read_batches() in a segment. Index entries of batches that lie close together
        are read at once. offsets: of the stream, ascending, all in this segment. Ends early when
        the segment was retired meanwhile: what is not yielded is gone.
        """
        # Of each offset the entry that may hold it: the first one that ends after it.
        rows = self._files.index(segment).entries(stream, offsets[0], offsets[-1] + 1).rows
        wanted = np.array(offsets, np.uint64)
        chosen = np.unique(np.searchsorted(rows["next"], wanted, side="right"))
        fields = rows[chosen[chosen < len(rows)]][["position", "bytes", "base", "next"]]
        for part in group_entries(fields.tolist()):
            data = self._files.read(segment, part.position, part.size)
            if segment.retired:
                return  # it may have been overwritten under the read
            yield from pick_in(data, segment.base_lsn + part.position, part, stream, offsets)


def _costs_up_to(rare: WantedSpots, first: int, last: int) -> Any:
    """Return for each of the spots [first, last) the bytes of a derived batch that ends with it."""
    costs = rare.spots[first:last]["bytes"].astype(np.int64) + BYTES_A_ROW
    if len(costs):
        # The texts of a header count where it comes first: the batch has them once.
        which, at = np.unique(rare.codes[first:last], return_index=True)
        costs[at] += [weight_of(rare.headers[code]) for code in which.tolist()]
    return np.cumsum(costs)


def skip_retired(streams: StreamTable, stream: int, reached: int, end: int, gaps: list[Gap]) -> int:
    """Return the offset that a read goes on from: `reached`, or the stream's first one if later.

    Asked as a read begins, and where offsets are missing or a segment was retired under the read.
    Offsets skipped so, up to `end`, become a gap by retention.
    """
    first, _ = streams.bounds(stream)
    if reached >= first or reached >= end:
        return reached
    stop = min(first, end)
    gaps.append(Gap(reached, stop, "retention", "removed to keep the log within its bounds"))
    return stop


def _gaps_before(reached: int, gaps: list[Gap]) -> tuple[Gap, ...]:
    """Return the part of the gaps that lies before the offset that a read came to.

    Holes of an index are named ahead of the entries that are read then, and the read may stop
    before them.
    """
    if gaps and gaps[-1].to_offset > reached:
        # A gap that goes on beyond is cut there; later ones are left to the next read.
        return tuple(
            gap if gap.to_offset <= reached else Gap(gap.from_offset, reached, gap.code, gap.reason)
            for gap in gaps
            if gap.from_offset < reached
        )
    return tuple(gaps)
