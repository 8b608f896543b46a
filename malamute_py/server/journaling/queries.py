"""Questions to a ring's index, answered in the reader thread.

Owns the way from the core's questions to the ring's methods. A read brings runs: stored batches in
one piece of memory, with a span for each: where it lies, its size, its first offset, its records.
Copies are newest records of a stream with keys that were appended again, in a hidden stream of the
ring; a copy's place is its offset there. The rule: an answer is what the contract in
broker/ready.py says of the kind, in plain data. Source: broker/ready.py, IndexQuery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

import msgspec
import numpy as np
from pyroaring import BitMap

from malamute_protocol.content import Content
from malamute_protocol.extract import extract, extractable
from malamute_protocol.stamp import STAMP_BYTES, Stamp, append_time_of
from malamute_py.broker.batches.rows import within_client_time
from malamute_py.broker.log.newest import newest_columns, newest_rows
from malamute_py.broker.log.purges import Purges
from malamute_py.broker.ready import IndexQuery
from malamute_py.broker.streams.moved_plans import fewer
from malamute_py.broker.streams.start_positions import may_match
from malamute_py.changelog.copies import MOVED_STREAM, pack_copy, unpack_copy
from malamute_py.journal import Candidates, HeaderIndex, History, Plan, Ring
from malamute_py.journal.planning import clipped
from malamute_py.matcher import ByKey, asks_subjects_only, compile_pattern, rows_by_subject

_READ_BYTES = 4 << 20
_OLDEST = 8
"""Oldest segments of a ring that are told at once."""
_COUNTED_BYTES = 16 << 20
"""Bytes that one plan reads at most to count selected records: about 10 ms of the reader thread."""

Search: TypeAlias = Callable[[Any], Any] | None


def answer_query(ring: Ring, query: IndexQuery) -> Any:
    """Answer a question of the core, for Rings in the reader thread.

    Returns the value for IndexAnswer. Raises JournalError, OSError.
    """
    return _ANSWERS[query.kind](ring, query.stream, query.arguments)


def by_key(search: Search) -> Candidates | None:
    """Turn the core's search, over the matcher's view of an index, into one over the journal's.

    Such a search finds the index entries (stored batches) that may have what a pattern selects, so
    that a read passes over the others. None: there is no search, and every batch is read.
    """
    if search is None:
        return None

    def candidates(index: HeaderIndex) -> BitMap:
        found: BitMap = search(ByKey(index))
        return found

    return candidates


def _find_time(ring: Ring, stream: int, arguments: dict[str, Any]) -> int | None:
    """Return the first offset that was appended at a time or later; None: every record is older."""
    end = ring.next_offset(stream)
    found = ring.closest_offset(stream, arguments["time_ms"], inclusive=arguments["inclusive"])
    return None if found >= end else found


def _find_client_time(ring: Ring, stream: int, arguments: dict[str, Any]) -> int | None:
    """Return the first offset with a client time; None: every record has an older one, or none."""
    end = ring.next_offset(stream)
    least = arguments["time_ms"] + (0 if arguments["inclusive"] else 1)
    found = ring.closest_client_time(stream, least)
    return None if found >= end else found


def _last_per_subject(ring: Ring, stream: int, arguments: dict[str, Any]) -> Any:
    """Return the offset of the latest record that matches of each subject, in ascending order.

    For subscriptions that begin with the last record of each subject. One more than the limit is
    returned where there are more, so that the core sees it.
    """
    pattern, first, end = arguments["pattern"], arguments["from"], arguments["end"]
    matches = compile_pattern(pattern).matches
    latest: dict[str, int] = {}
    if asks_subjects_only(pattern):
        # The index has the last record of each subject: no record is read. The subject is the
        # first key of a header.
        for keys, offset in ring.last_per_subject(stream, by_key(arguments["candidates"]), end):
            if offset >= first and offset > latest.get(keys[0], -1) and matches(keys, ()):
                latest[keys[0]] = offset
    else:
        # The index does not know the latest record with given fields: the records are read.
        position = first
        while position < end:
            found = ring.read(stream, position, end, _READ_BYTES, by_key(arguments["candidates"]))
            for run in found.runs:
                view = memoryview(run.data)
                # Of each stored batch its place and size in the run, and its first offset.
                for at, size, base, _ in run.spans:
                    content = Content(view[at + STAMP_BYTES : at + size])
                    _note_latest(content, base, first, end, matches, latest)
            if found.next <= position:
                break
            position = found.next
    return sorted(latest.values())[: arguments["limit"] + 1]


def _note_latest(
    content: Content, base: int, first: int, end: int,
    matches: Callable[..., bool], latest: dict[str, int],
) -> None:  # fmt: skip
    """Put the newest offset of each subject that matches, of one batch, into `latest`.

    base: the batch's first offset. first, end: offsets that count.
    """
    # The batch's headers, each once, and for each row the number of its header (its code).
    headers, codes = content.headers()
    low, high = max(first - base, 0), min(end - base, len(content))  # rows that count
    if high <= low:
        return
    # The last row of each header that is used.
    if codes is None:
        last_rows = {0: high - 1}  # all rows have the only header
    else:
        # unique() tells where a code comes first: backwards, that is its last row.
        used, from_end = np.unique(codes[low:high][::-1], return_index=True)
        last_rows = {
            code: high - 1 - distance
            for code, distance in zip(used.tolist(), from_end.tolist(), strict=True)
        }
    for code, row in last_rows.items():
        header = headers[code]
        if matches(header.keys, header.fields):
            subject = header.keys[0]
            latest[subject] = max(latest.get(subject, -1), base + row)


def _plan(ring: Ring, stream: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Plan a bounded read, for a client that shares it among several readers (Spark).

    The arguments are those of StreamAdmin._plan in broker/streams. The answer: `to`: where the read
    ends; `splits`: its parts, of about equal size; `records`, `bytes`: an estimate of what it
    brings; `young`: the first offset that the stream's age and pins allow; `begin`: see Plan;
    `unbroken`: of a selection of everything, ranges of which a read brings every record.
    """
    first, end, most = arguments["from"], arguments["end"], arguments["records_max"]
    young = 0
    # Records before this time have expired, except for those that a cursor's pin keeps.
    if arguments["oldest_ms"]:
        young = ring.closest_offset(stream, arguments["oldest_ms"], inclusive=True)
        young = min(young, arguments["pinned"])
        first = min(max(first, young), end)
    # A purge removed what its pattern matches before an offset.
    purges = [(pattern, before) for pattern, before in arguments["purges"] if before > first]
    select_all = arguments["pattern"] == ["all"] and arguments["client_time"] is None
    everything = select_all and not purges
    purged = max((before for _, before in purges), default=0)  # from here on nothing was purged
    selected = None  # records that the pattern selects, where they were counted
    if most > 0 and not everything:
        # The index cannot count what is selected: the records are read, and the plan ends where
        # `records_max` of them were found.
        end, selected = _end_of_selected(ring, stream, first, arguments)
        most = 0
    plan: Plan = ring.plan(
        stream, first, end, by_key(arguments["candidates"]), most,
        arguments["bytes_max"], arguments["split_bytes"],
        [(_left_by(pattern), before) for pattern, before in purges],
        compile_pattern(arguments["pattern"]).matches, rows_by_subject(arguments["pattern"]),
        arguments["now_ms"] if select_all else None,
    )  # fmt: skip
    splits = fewer([list(split) for split in plan.splits], arguments["splits_max"])
    if selected is None or plan.end < end:
        # Where the cap of bytes ended the plan first, the offsets are the bound that is known.
        between = max(0, plan.end - max(first, ring.first_offset(stream)))
        selected = between if selected is None else min(between, selected)
    return {
        "young": young, "to": plan.end, "splits": splits, "records": selected, "bytes": plan.bytes,
        "begin": plan.begin,
        "unbroken": _longest(clipped(plan.unbroken, purged, plan.end), arguments["splits_max"]),
    }  # fmt: skip


def _longest(parts: Sequence[tuple[int, int]], most: int) -> list[list[int]]:
    """Return at most `most` of the parts [from, to), the longest ones, in the order of offsets."""
    # The key is minus the length: the longest come first.
    longest = sorted(parts, key=lambda part: part[0] - part[1])[:most]
    return [list(part) for part in sorted(longest)]


def _left_by(pattern: bytes) -> Candidates:
    """Return a search for the index entries of which a purge by a pattern may leave something."""
    left = ["not", msgspec.msgpack.decode(pattern)]
    found = by_key(partial(may_match, left))
    assert found is not None
    return found


def _end_of_selected(
    ring: Ring, stream: int, first: int, arguments: dict[str, Any]
) -> tuple[int, int]:
    """Return the offset before which a pattern selects `records_max` records, and how many it does.

    For a plan of a read of so many records. It ends earlier, with fewer, once _COUNTED_BYTES were
    looked through, so that one question holds the reader thread no longer than a few reads do.
    """
    pattern, window = arguments["pattern"], arguments["client_time"]
    matches = compile_pattern(pattern).matches
    search = by_key(arguments["candidates"])  # passes over stored batches without such a header
    purges = Purges(arguments["purges"])
    position, end, most = first, arguments["end"], arguments["records_max"]
    found, budget = 0, _COUNTED_BYTES
    while position < end and budget > 0:
        history = ring.read(stream, position, end, _READ_BYTES, search, window, matches)
        for run in history.runs:
            view = memoryview(run.data)
            # Of each stored batch its place and size in the run, and its first offset.
            for at, size, base, _ in run.spans:
                content = Content(view[at + STAMP_BYTES : at + size])
                offsets = _selected_offsets(content, base, matches, window, purges)
                offsets = offsets[(offsets >= position) & (offsets < end)]
                if found + len(offsets) >= most:
                    return int(offsets[most - found - 1]) + 1, most  # just after the last wanted
                found += len(offsets)
            budget -= len(view)
        if history.next <= position:
            break  # the read came no further: nothing is stored there
        position = history.next
    return min(position, end), found


def _selected_offsets(
    content: Content, base: int, matches: Callable[..., bool], window: tuple[int, int] | None,
    purges: Purges,
) -> np.ndarray[Any, np.dtype[np.int64]]:  # fmt: skip
    """Return the offsets of a batch's records that a pattern selects and that were not purged.

    matches: tests a header. window: the client times that are wanted, too; None: all.
    """
    # A batch has each header once, and for each record the number of its header (its code); no
    # codes: all records have the only header.
    headers, codes = content.headers()
    chosen = np.fromiter((matches(*header) for header in headers), np.bool_, len(headers))
    mask = np.broadcast_to(chosen[0], len(content)) if codes is None else chosen[codes]
    if window is not None:
        inside = within_client_time(content, window)
        mask = mask if inside is None else mask & inside
    offsets = _offsets(base, content)
    left = purges.left(content, base, offsets)
    return offsets[mask if left is None else mask & left]


def _batch(ring: Ring, stream: int, arguments: dict[str, Any]) -> Any:
    """Return the stored batch with an offset, or the copy that has it; None: it is gone."""
    copy = arguments["copy"]
    if copy is not None:
        return next(copies_at(ring, [copy]))
    return ring.read_batches(stream, [arguments["offset"]])[0]


def copies_at(ring: Ring, places: Sequence[int]) -> Iterator[Any]:
    """Yield what the copies of newest records at these places hold, in order; None: it is gone."""
    for place, batch in zip(places, ring.read_batches(MOVED_STREAM, places), strict=True):
        if batch is None:
            yield None
            continue
        # A place is an offset of the hidden stream, whose bodies are copies.
        view = memoryview(batch)
        bodies = Content(view[STAMP_BYTES:]).bodies()
        row = place - Stamp.unpack(batch, verify=False).base_offset
        copy = bytes(bodies.blob[int(bodies.offsets[row]) : int(bodies.offsets[row + 1])])
        stored, _ = unpack_copy(copy)  # a batch, and which of its rows count
        yield stored


def _copies(ring: Ring, stream: int, arguments: dict[str, Any]) -> list[tuple[bytes, list[int]]]:
    """Return copies of newest records, as _copy() makes them, each with the offsets in it.

    Asked for when the segment that has the records is to be overwritten. offsets: of records in
    their own batches. places: where records that were copied before lie now -> their offsets.
    """
    offsets, places = arguments["offsets"], arguments["places"]
    # By the base of each batch: the batch, and the offsets that are wanted of it.
    wanted: dict[int, tuple[bytes, list[int]]] = {}
    for offset, batch in zip(offsets, ring.read_batches(stream, offsets), strict=True):
        if batch is not None:
            base = Stamp.unpack(batch, verify=False).base_offset
            _, rows = wanted.setdefault(base, (batch, []))
            rows.append(offset)
    moved = zip(copies_at(ring, list(places)), places.values(), strict=True)
    found = [*wanted.values(), *((copy, its) for copy, its in moved if copy is not None)]
    return [(_copy(batch, its), its) for batch, its in found]


def _copy(batch: bytes, offsets: list[int]) -> bytes:
    """Return a copy of some records of a batch in the form in which a ring keeps it.

    For newest records whose segment is given up. The copy is a batch with the rows of it that
    count; none: all of them. Rows of a large batch are extracted, where its form allows it.
    """
    stamp, content = Stamp.unpack(batch, verify=False), Content(memoryview(batch)[STAMP_BYTES:])
    if content.head.count == len(offsets):
        return pack_copy(batch, ())
    mask = np.isin(_offsets(stamp.base_offset, content), offsets)
    if extractable(content):
        return pack_copy(b"".join(extract(stamp, content, mask)), ())
    return pack_copy(batch, np.flatnonzero(mask).tolist())


def _offsets(base: int, content: Content) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the offset of each row; a derived batch (deltas) leaves offsets out."""
    deltas = content.offset_deltas
    return base + (np.arange(content.head.count) if deltas is None else deltas.astype(np.int64))


def _moved_keys(ring: Ring, stream: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the newest record of each subject among some copies, in the order of the copies.

    The core asks at a start, to know where newest records lie. A row of the answer: what
    _keys_of_copy() yields, and the offset of the copy itself in its hidden stream.
    """
    rows: dict[str, tuple[str, int, int, int | None, int]] = {}
    found = ring.read(MOVED_STREAM, arguments["from"], arguments["end"], arguments["bytes"])
    for run in found.runs:
        view = memoryview(run.data)
        for at, size, base, count in run.spans:
            # Each body of a batch of the hidden stream is one copy.
            bodies = Content(view[at + STAMP_BYTES : at + size]).bodies()
            bounds = bodies.offsets.tolist()
            for row in range(count):
                copy = bytes(bodies.blob[bounds[row] : bounds[row + 1]])
                for key in _keys_of_copy(copy):
                    subject, offset, *_ = key
                    known = rows.get(subject)
                    _, known_offset, *_ = known or (subject, -1)
                    if known_offset <= offset:
                        rows.pop(subject, None)  # so that it comes last in its copy, too
                        rows[subject] = (*key, base + row)
    # In the order of the copies: itemgetter(4) is the offset of each row's copy.
    return {"rows": sorted(rows.values(), key=itemgetter(4)), "next": found.next}


def _keys_of_copy(copy: bytes) -> Iterator[tuple[str, int, int, int | None]]:
    """Yield newest records of a stored copy: (subject, offset, size, deletion's time or None)."""
    batch, counted = unpack_copy(copy)  # counted: the rows that count; none: all of them
    stamp, content = Stamp.unpack(batch, verify=False), Content(memoryview(batch)[STAMP_BYTES:])
    offsets = _offsets(stamp.base_offset, content)
    for subject, row, deletion, size in newest_rows(content, len(batch)):
        if not counted or row in counted:
            yield subject, int(offsets[row]), size, stamp.append_time_ms if deletion else None


def _keys(ring: Ring, stream: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the newest record of each subject among some batches, as columns.

    The core asks at a start, again from `next` on until all batches were read.
    """
    found = ring.read(stream, arguments["from"], arguments["end"], arguments["bytes"])
    return {"newest": newest_columns(_batches_of(found)), "next": found.next}


def _batches_of(found: History) -> Iterator[tuple[Content, int, int, int]]:
    """Yield (content, bytes with the stamp, base offset, append time) of each batch of a read."""
    for run in found.runs:
        view = memoryview(run.data)
        # Where a batch lies in the run, its size and its first offset.
        for at, size, base, _ in run.spans:
            time_ms = append_time_of(bytes(view[at : at + STAMP_BYTES]))
            yield Content(view[at + STAMP_BYTES : at + size]), size, base, time_ms


def _oldest_segments(ring: Ring, stream: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return facts about a ring's oldest segments, out of which the core copies newest records."""
    return {
        "segment_bytes": ring.settings.segment_bytes,
        "segments": ring.settings.ring_bytes // ring.settings.segment_bytes,
        "start_lsn": ring.start_lsn,
        "oldest": ring.oldest_segments(_OLDEST),
    }


_ANSWERS: dict[str, Callable[[Ring, int, dict[str, Any]], Any]] = {
    "find_time": _find_time,
    "find_client_time": _find_client_time,
    "last_per_subject": _last_per_subject,
    "plan": _plan,
    "batch": _batch,
    "copies": _copies,
    "moved_keys": _moved_keys,
    "keys": _keys,
    "oldest_segments": _oldest_segments,
}
"""Kind of question -> the function that answers it; what each is: IndexQuery, broker/ready.py."""
