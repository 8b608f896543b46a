"""Index of one segment: where each stream's batches lie, and what is in them.

Owns the entries (runs of adjacent batches of one stream), the totals of each stream,
and the file that keeps them beside a finished segment. The rule: an entry is published
after its bytes are written and its headers are noted, by swapping one tuple; a reader
takes the published view first and the headers second, and so never misses one.
Source: FORMAT.md, section 6.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np

from malamute_py.journal.filters import EntryFilters
from malamute_py.journal.headers import (
    HeaderTable,
    StreamHeaders,
    pack_headers,
    unpack_headers,
)
from malamute_py.journal.layout import pack_file, unpack_file
from malamute_py.journal.spots import StreamSpots, find_spots, unpack_spots
from malamute_py.journal.types import UNINDEXED_FROM, Buffer

ENTRY = struct.Struct("<IIIIQQqqqq")
ENTRY_DTYPE: Final = np.dtype(
    [
        ("position", "<u4"),
        ("bytes", "<u4"),
        ("stream", "<u4"),
        ("batches", "<u4"),
        ("base", "<u8"),
        ("next", "<u8"),
        ("first_time", "<i8"),
        ("last_time", "<i8"),
        ("client_min", "<i8"),
        ("client_max", "<i8"),
    ]
)
assert ENTRY_DTYPE.itemsize == ENTRY.size == 64

NO_CLIENT_TIME: Final = (2**63 - 1, -(2**63))
"""(least, greatest) client time where no batch has any."""
NEVER: Final = 2**63 - 1
"""Expiry of records that do not expire; also an offset that no record has."""

_CHUNK = 1024
"""Entries in one piece of a live index's table: pieces do not move, as one growing array would."""
_BASE_AT: Final = 16
"""Byte position of `base` in an entry."""
_NEXT_AT: Final = 24
"""Byte position of `next` in an entry."""

Rows: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Ordinals: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]
"""Numbers of entries: their places in the segment's table, as bitmaps of headers name them."""
Entry: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int]
_NO_ENTRY: Final[Entry] = (-1, -1, -1, -1, -1, -1, -1, -1, -1, -1)
"""Stands for the last entry where there is none: it is of no stream."""


class Entries(NamedTuple):
    """Some of a stream's entries in one segment, in order."""

    ordinals: Ordinals
    rows: Rows
    """Rows of ENTRY_DTYPE."""


class Span(msgspec.Struct, array_like=True):
    """Totals of one stream in one segment."""

    first: int
    next: int
    bytes: int
    first_time_ms: int
    last_time_ms: int
    client_min_ms: int
    client_max_ms: int


Place: TypeAlias = tuple[int, int, int, int, int]
"""(position, size, base offset, next offset, append time) of a batch."""
BatchFacts: TypeAlias = tuple[tuple[int, int], int, int]
"""(least and greatest client time, latest expiry or NEVER, earliest expiry or 0) of a batch."""


class _SparseRuns:
    """Entries of one stream without header index, as of mail: each covers a part of the file.

    Batches of other streams may lie in that part; readers pass over them.
    """

    __slots__ = ("bases", "rows", "view")

    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self.bases: list[int] = []
        self.view: tuple[int, Entry | None] = (0, None)
        """(how many rows there are, the entry that may grow), swapped as one."""

    def add(self, stream: int, batches: Sequence[Place], interval: int) -> int:
        """Note batches that were appended, in order; returns their bytes.

        interval: bytes of the file that one entry covers at most, unless by a single batch.
        """
        # The last entry is taken apart, grown batch by batch, and published once at the end.
        _, entry = self.view
        count = base = begin = first_time = last_time = 0
        stop, following = 0, -1
        if entry is not None:
            begin, size, _, count, base, following, first_time, last_time, _, _ = entry
            stop = begin + size
        total = 0
        for position, size, low, after, time_ms in batches:
            total += size
            # An entry goes on while offsets follow each other and all of it fits the interval.
            if low == following and position + size - begin <= interval:
                count += 1
            else:
                if count:
                    entry = (
                        begin, stop - begin, stream, count, base, following,
                        first_time, last_time, *NO_CLIENT_TIME,
                    )  # fmt: skip
                    self.rows.append(ENTRY.pack(*entry))
                    self.bases.append(base)
                begin, base, first_time, count = position, low, time_ms, 1
            stop, following, last_time = position + size, after, time_ms
        entry = (
            begin, stop - begin, stream, count, base, following,
            first_time, last_time, *NO_CLIENT_TIME,
        )  # fmt: skip
        self.view = (len(self.rows), entry)
        return total

    def restore(self, rows: Sequence[bytes]) -> None:
        """Go on from the stored entries of a segment that is not full; the last one may still grow.

        rows: the entries, each as ENTRY has it; at least one.
        """
        self.rows = list(rows[:-1])
        self.bases = [base for _, _, _, _, base, *_ in map(ENTRY.unpack, self.rows)]
        self.view = (len(self.rows), ENTRY.unpack(rows[-1]))

    def entries(self, from_offset: int, end_offset: int) -> Entries:
        """Return the entries that hold any offset in [from_offset, end_offset), as a table.

        No bitmap names these entries, so they are numbered from 0.
        """
        count, entry = self.view
        # The last entry that begins at or before the offset may hold it.
        low = max(bisect_right(self.bases, from_offset, 0, count) - 1, 0)
        rows = self.rows[low : bisect_left(self.bases, end_offset, low, count)]
        if entry is not None:
            _, _, _, _, last_base, *_ = entry
            if last_base < end_offset:
                rows.append(ENTRY.pack(*entry))
        table = np.frombuffer(b"".join(rows), ENTRY_DTYPE)
        table = table[table["next"] > from_offset]
        return Entries(np.arange(len(table), dtype=np.uint32), table)

    def table(self) -> bytes:
        """Return all entries as the index file has them, the last one, which may grow, too."""
        count, entry = self.view
        data = b"".join(self.rows[:count])
        return data if entry is None else data + ENTRY.pack(*entry)


class LiveIndex:
    """Index of a segment being written: one writer, any number of readers."""

    def __init__(self, interval_bytes: int, distinct_max: int) -> None:
        """interval_bytes: most bytes of an entry with more than one batch."""
        self._interval = interval_bytes
        self._headers = HeaderTable(distinct_max)
        self._chunks: list[bytearray] = []
        """Table of the closed entries, as the file has it, in pieces of _CHUNK entries."""
        self._ordinals: dict[int, array[int]] = {}
        """Stream -> numbers of its entries."""
        self._view: tuple[int, Entry | None] = (0, None)
        """(entries, the last one, which may still grow); swapped whole, for readers."""
        self._sparse: dict[int, _SparseRuns] = {}
        """Streams without headers, as those of mail and changes -> where their batches lie."""
        self._spots: dict[int, StreamSpots] = {}
        self.spans: dict[int, Span] = {}
        self.expires_at_ms = 0
        """When the last record expires; NEVER when some record does not; 0: no data."""
        self.expiries: dict[int, int] | None = {}
        """Stream -> when the first of its records expires, where one does; None: not known."""

    def restore(self, stored: StoredIndex) -> bool:
        """Go on from what an orderly close stored of the last segment, which is not full.

        Called by a start, on an index that is still empty. Returns False where what is stored
        contradicts itself: this index is of no use then.
        """
        rows, table = stored.rows, stored.table
        streams = rows["stream"]
        # Entries of streams with a header index come first in the table, all others after them.
        count = int(np.count_nonzero(streams < UNINDEXED_FROM))
        if np.any(streams[:count] >= UNINDEXED_FROM):
            return False
        if count:
            # The last entry may still grow; the others, which do not, lie in whole chunks.
            closed = table[: (count - 1) * ENTRY.size]
            step = _CHUNK * ENTRY.size
            self._chunks = [
                bytearray(closed[at : at + step].ljust(step, b"\0"))
                for at in range(0, len(closed), step)
            ]
            self._view = (count - 1, ENTRY.unpack_from(table, (count - 1) * ENTRY.size))
        # Entries by stream, those of one stream in their order.
        order = np.argsort(streams, kind="stable")
        numbers, begins = np.unique(streams[order], return_index=True)
        ends = [*begins[1:].tolist(), len(order)]
        for number, begin, end in zip(numbers.tolist(), begins.tolist(), ends, strict=False):
            places = order[begin:end]
            # A stream's totals must begin and end with its entries.
            span = stored.spans.get(number)
            low, high = rows["base"][places[0]], rows["next"][places[-1]]
            if span is None or (span.first, span.next) != (low, high):
                return False
            if number < UNINDEXED_FROM:
                self._ordinals[number] = array("I", places.astype(np.uint32).tobytes())
            else:
                at = [int(place) * ENTRY.size for place in places]
                runs = self._sparse[number] = _SparseRuns()
                runs.restore([table[place : place + ENTRY.size] for place in at])
        self._headers.restore(stored.depth, stored.filters, stored.all_headers(), count - 1)
        self._spots = stored.all_spots()
        self.spans.update(stored.spans)
        self.expires_at_ms = stored.expires_at_ms
        self.expiries = stored.expiries
        # Totals of a stream without an entry would promise batches that are nowhere.
        return len(numbers) == len(self.spans)

    def add(
        self,
        stream: int,
        position: int,
        size: int,
        base: int,
        next_offset: int,
        time_ms: int,
        facts: BatchFacts,
        keys: Any,
        content: Buffer | None = None,
        epoch: int = 0,
    ) -> None:
        """Note one data batch that has been written, for append() and for recovery.

        position, size: in the segment. base, next_offset: its offsets, [base, next_offset). keys:
        its headers, as of HeaderTable.add(). content: with a good checksum, and stamped in `epoch`:
        places of its rare rows are kept (spots.py); None: none are.
        """
        # The batch joins the last entry, or closes it and begins one. Readers see it only at the
        # end, by the swap of `_view`: its headers and spots are there by then.
        count, entry = self._view
        (least, most), expires_at_ms, earliest_expiry_ms = facts
        # The fields of the last entry, in the order of ENTRY_DTYPE.
        begin, held, whose, batches, first, following, first_ms, _, low, high = entry or _NO_ENTRY
        if (
            whose == stream
            and begin + held == position
            and following == base
            and held + size <= self._interval
        ):
            entry = (
                begin,
                held + size,
                stream,
                batches + 1,
                first,
                next_offset,
                first_ms,
                time_ms,
                min(low, least),
                max(high, most),
            )
        else:
            if entry is not None:
                slot = count % _CHUNK
                if slot == 0:
                    self._chunks.append(bytearray(_CHUNK * ENTRY.size))
                ENTRY.pack_into(self._chunks[-1], slot * ENTRY.size, *entry)
                count += 1
            entry = (position, size, stream, 1, base, next_offset, time_ms, time_ms, least, most)
            ordinals = self._ordinals.get(stream)
            if ordinals is None:
                ordinals = self._ordinals[stream] = array("I")
            ordinals.append(count)
        self._headers.add(stream, count, keys)
        # A batch of more than an interval stays alone in its entry: its spots speak for all of it.
        if size > self._interval and content is not None and self._headers.depth is None:
            found = find_spots(content, position, size, base, time_ms, epoch)
            if found is not None:
                spots = self._spots.get(stream)
                if spots is None:
                    spots = self._spots[stream] = StreamSpots()
                spots.add(count, found)
        span = self.spans.get(stream)
        if span is None:
            self.spans[stream] = Span(base, next_offset, size, time_ms, time_ms, least, most)
        else:
            span.next = next_offset
            span.bytes += size
            span.last_time_ms = time_ms
            if least < span.client_min_ms:
                span.client_min_ms = least
            if most > span.client_max_ms:
                span.client_max_ms = most
        if expires_at_ms > self.expires_at_ms:
            self.expires_at_ms = expires_at_ms
        if earliest_expiry_ms and self.expiries is not None:
            known_ms = self.expiries.get(stream, NEVER)
            self.expiries[stream] = min(known_ms, earliest_expiry_ms)
        self._view = (count, entry)

    def add_sparse(self, stream: int, batches: Sequence[Place]) -> int:
        """Note written batches of a stream without header index, as mail; returns their bytes.

        For append() and for recovery. Neither client times nor expiries are looked at: none of its
        records ever expires.
        """
        runs = self._sparse.get(stream)
        if runs is None:
            runs = self._sparse.setdefault(stream, _SparseRuns())
        total = runs.add(stream, batches, self._interval)
        _, _, _, after, last_time = batches[-1]
        span = self.spans.get(stream)
        if span is None:
            _, _, base, _, first_time = batches[0]
            self.spans[stream] = Span(base, after, total, first_time, last_time, *NO_CLIENT_TIME)
        else:
            span.next = after
            span.bytes += total
            span.last_time_ms = last_time
        self.expires_at_ms = NEVER
        return total

    def entries(self, stream: int, from_offset: int, end_offset: int) -> Entries:
        """Return the stream's entries that hold any offset in [from_offset, end_offset).

        For reads and searches, in any thread, while the writer goes on: it never changes an entry
        before number `count` of the view, and the entry at `count` is the view's own copy.
        """
        if stream >= UNINDEXED_FROM:  # mail and the like, which have no header index
            runs = self._sparse.get(stream)
            return (runs or _SparseRuns()).entries(from_offset, end_offset)
        count, entry = self._view
        ordinals = self._ordinals.get(stream)
        if ordinals is None:
            return Entries(np.empty(0, np.uint32), np.empty(0, ENTRY_DTYPE))
        # A slice copies under the interpreter lock; a buffer view would make the
        # writer's next append to the array fail.
        held = ordinals[:]
        chunks = self._chunks
        # How many of the stream's entries do not grow any more, and so lie in the chunks.
        closed = bisect_left(held, count)

        def field(at: int) -> Callable[[int], int]:
            """Return a function from an entry's number to its field at a byte position."""
            place = struct.Struct("<Q")

            def get(ordinal: int) -> int:
                """Read the field out of the chunk that has the entry."""
                chunk = chunks[ordinal // _CHUNK]
                value: int = place.unpack_from(chunk, ordinal % _CHUNK * ENTRY.size + at)[0]
                return value

            return get

        # From the first entry that ends after `from_offset`, to those that begin before the end.
        low = bisect_right(held, from_offset, 0, closed, key=field(_NEXT_AT))
        high = bisect_left(held, end_offset, low, closed, key=field(_BASE_AT))
        chosen = np.array(held[low:high], np.uint32)
        parts = []
        for number in np.unique(chosen // _CHUNK).tolist():
            table = np.frombuffer(chunks[number], ENTRY_DTYPE)
            parts.append(table[chosen[chosen // _CHUNK == number] % _CHUNK])
        # The entry that may still grow is in no chunk.
        _, _, whose, _, base, following, *_ = entry or _NO_ENTRY
        if entry is not None and whose == stream and following > from_offset and base < end_offset:
            chosen = np.append(chosen, np.uint32(count))
            parts.append(np.array([entry], ENTRY_DTYPE))
        rows = np.concatenate(parts) if parts else np.empty(0, ENTRY_DTYPE)
        return Entries(chosen, rows)

    def headers(self, stream: int) -> StreamHeaders:
        """The stream's inverted index; taken after entries()."""
        return self._headers.stream(stream)

    def spots(self, stream: int) -> StreamSpots | None:
        """The stream's rare rows, if any are known; taken after headers()."""
        return self._spots.get(stream)

    def table(self) -> bytes:
        """Return all entries as an index file has them: to store them, and to check such a file."""
        count, entry = self._view
        data = b"".join(self._chunks)[: count * ENTRY.size]
        if entry is not None:
            data += ENTRY.pack(*entry)
        # Last, as the numbers of the others stand in bitmaps.
        return data + b"".join(self._sparse[stream].table() for stream in sorted(self._sparse))

    def pack(self, ring: bytes, number: int, last_epoch: int, last_time_ms: int) -> bytes:
        """Return the bytes of the index file of a segment that is finished or orderly closed.

        ring, number: the segment's, by which a reader knows that the file is of it.
        """
        depth, headers = pack_headers(self._headers)
        # Spots are told apart by whole subjects and values: none are kept where these are not.
        exact, filters = depth is None, self._headers.filters
        stored = _Stored(
            ring,
            number,
            last_epoch,
            last_time_ms,
            self.expires_at_ms,
            self.spans,
            self.table(),
            depth,
            headers,
            {number: spots.pack() for number, spots in self._spots.items()} if exact else {},
            None if filters is None else filters.pack(),
            self.expiries,
        )
        return pack_file(stored)


class _Stored(msgspec.Struct, array_like=True):
    """The fields of an index file, in their order."""

    ring: bytes
    number: int
    last_epoch: int
    last_time_ms: int
    expires_at_ms: int
    spans: dict[int, Span]
    table: bytes
    depth: int | None
    headers: dict[int, bytes]
    spots: dict[int, bytes] = {}
    filters: tuple[bytes, bytes] | None = None
    """Filters, like `spots`, are missing in files of earlier versions."""
    expiries: dict[int, int] | None = None
    """Expiries are missing in files of earlier versions, and not known then."""


class StoredIndex:
    """Index of a finished segment, from its file."""

    def __init__(self, stored: _Stored, size: int) -> None:
        """size: bytes of the file, for the bound on memory. Raises ValueError: it is not sound."""
        self._stored = stored
        self._rows: Rows = np.frombuffer(stored.table, ENTRY_DTYPE)
        self._ordinals: dict[int, Ordinals] = {}
        self._headers: dict[int, StreamHeaders] = {}
        self._spots: dict[int, StreamSpots] = {}
        exact, filters = stored.depth is None, stored.filters or ()
        self.filters = None if exact else EntryFilters(0, *filters)
        """Filters of the entries; None: the headers are exact."""
        self.spans = stored.spans
        self.expires_at_ms = stored.expires_at_ms
        self.expiries = stored.expiries
        self.last_epoch = stored.last_epoch
        self.last_time_ms = stored.last_time_ms
        self.size = size

    @property
    def table(self) -> bytes:
        """All entries as they are stored."""
        return self._stored.table

    @property
    def rows(self) -> Rows:
        """The entries as an array of ENTRY_DTYPE."""
        return self._rows

    @property
    def depth(self) -> int | None:
        """Leading parts kept of each subject; None: whole subjects and values."""
        return self._stored.depth

    def all_headers(self) -> dict[int, StreamHeaders]:
        """Every stream's inverted index."""
        return {number: self.headers(number) for number in self._stored.headers}

    def entries(self, stream: int, from_offset: int, end_offset: int) -> Entries:
        """Return the stream's entries that hold any offset in [from_offset, end_offset)."""
        ordinals = self._ordinals.get(stream)
        if ordinals is None:
            ordinals = np.flatnonzero(self._rows["stream"] == stream).astype(np.uint32)
            self._ordinals[stream] = ordinals
        # From the first entry that ends after `from_offset`, to those that begin before the end.
        base, after = self._rows["base"], self._rows["next"]
        low = bisect_right(ordinals, from_offset, key=lambda o: int(after[o]))
        high = bisect_left(ordinals, end_offset, low, key=lambda o: int(base[o]))
        chosen = ordinals[low:high]
        return Entries(chosen, self._rows[chosen])

    def headers(self, stream: int) -> StreamHeaders:
        """Return the stream's inverted index, unpacked at the first call."""
        found = self._headers.get(stream)
        if found is None:
            packed = self._stored.headers.get(stream)
            if packed is None:
                # A stream without headers, or without batches in this segment.
                return StreamHeaders(self._stored.depth)
            found = unpack_headers(self._stored.depth, packed, self.filters)
            self._headers[stream] = found
        return found

    def all_spots(self) -> dict[int, StreamSpots]:
        """Every stream's rare rows."""
        return {number: unpack_spots(packed) for number, packed in self._stored.spots.items()}

    def spots(self, stream: int) -> StreamSpots | None:
        """The stream's rare rows, if any are known; taken after headers()."""
        found = self._spots.get(stream)
        if found is None:
            packed = self._stored.spots.get(stream)
            if packed is not None:
                found = self._spots[stream] = unpack_spots(packed)
        return found


def read_index(data: bytes, ring: bytes, number: int) -> StoredIndex | None:
    """Return the index in a file's bytes; None when it is damaged or another segment's.

    Callers then read the batches of the segment instead.
    """
    stored = unpack_file(data, _Stored)
    if stored is None or stored.ring != ring or stored.number != number:
        return None
    try:
        return StoredIndex(stored, len(data))
    except ValueError:
        return None
