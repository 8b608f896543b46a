"""Rare rows of a segment: which row of a large batch has a header that few of its rows have.

Owns the places of rare rows and their stored form. The rule: a header is *spotted* in a batch
when each of its rows there has a spot, with a checksum of its own taken while the batch's was
known to be good; a search may then read these rows and leave the batch alone. What is not
spotted is found by the batch, as ever. Spots are never needed and cost at most 1% of their
batch. Written by the loop thread, read by others: rows are published before the bitmaps that
promise them, and bitmaps only grow. Source: FORMAT.md, sections 6 and 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import google_crc32c
import msgspec
import numpy as np
from pyroaring import BitMap

from malamute_protocol.columns import NO_TIME
from malamute_protocol.content import Content
from malamute_protocol.content_layout import FIELD_CODES, SUBJECT_CODES
from malamute_protocol.errors import BatchError
from malamute_protocol.gather import gatherable
from malamute_protocol.header import Header
from malamute_py.journal.headers import StreamHeaders
from malamute_py.journal.types import Buffer

SPOT: Final = np.dtype(
    [
        ("offset", "<u8"),
        ("append_time", "<i8"),
        ("client_time", "<i8"),
        ("epoch", "<u8"),
        ("batch", "<u4"),
        ("body", "<u4"),
        ("bytes", "<u4"),
        ("crc", "<u4"),
    ]
)
"""batch, body: positions in the segment; crc: of the body's bytes."""
BATCH_BYTES_A_SPOT: Final = 100 * SPOT.itemsize
"""A batch has at most one spot for so many of its bytes."""
_HEADERS_MAX: Final = 64
"""A batch of more distinct headers gets no spots: mostly all are rare there, and the few that 1% of
its bytes has room for would answer hardly any search."""
_CODED: Final = SUBJECT_CODES | FIELD_CODES

Spots: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Matches: TypeAlias = Callable[[tuple[str, ...], tuple[tuple[str, str], ...]], bool]
"""Whether one header (keys; fields by name) is wanted."""


class BatchSpots(NamedTuple):
    """The rare rows of one batch."""

    rows: list[tuple[Header, bytes]]
    """Each spotted header with its spots."""
    others: list[Header]
    """Headers whose rows have no spots: `spotted` promises no subject, field or pair of theirs."""


class StreamSpots:
    """One stream's rare rows in one segment."""

    __slots__ = ("_rows", "spotted")

    def __init__(self) -> None:
        self._rows: dict[Header, list[bytes]] = {}
        self.spotted = StreamHeaders(depth=None)
        """Entries in which all rows of a subject, a field name, a (name, value) have spots."""

    def add(self, ordinal: int, found: BatchSpots) -> None:
        """Note the rare rows of an index entry that is a single batch; called as it is appended.

        ordinal: the entry's number.
        """
        for header, data in found.rows:
            self._rows.setdefault(header, []).append(data)
        # `spotted` promises that all rows with a subject, name or pair have spots: it gets none
        # that a row without a spot has, too.
        keys = {other.keys for other in found.others}
        pairs = {pair for other in found.others for pair in other.fields}
        names = {name for name, _ in pairs}
        spotted = self.spotted
        for header, _ in found.rows:
            if header.keys not in keys:
                spotted.tops.setdefault(header.keys, BitMap()).add(ordinal)
            for pair in header.fields:
                name, _ = pair
                if pair not in pairs:
                    spotted.pairs.setdefault(pair, BitMap()).add(ordinal)
                if name not in names:
                    spotted.names.setdefault(name, BitMap()).add(ordinal)

    def by_header(self, matches: Matches) -> list[tuple[Header, Spots]]:
        """Return each header that a search wants, with its spots in the whole segment.

        Any thread: copies are taken, as the loop thread may add rows meanwhile.
        """
        return [
            (header, np.frombuffer(b"".join(held.copy()), SPOT))
            for header, held in self._rows.copy().items()
            if matches(*header)
        ]

    def pack(self) -> bytes:
        """Return the spots by header for the index file, and which entries have spots of all rows.

        These entries are bitmaps: by subject (`tops`), by field name, and by name and value.
        """
        spotted = self.spotted
        return msgspec.msgpack.encode(
            _Stored(
                [(list(header.keys), list(header.fields), b"".join(held))
                 for header, held in self._rows.items()],
                [(list(top), bitmap.serialize()) for top, bitmap in spotted.tops.items()],
                [(name, bitmap.serialize()) for name, bitmap in spotted.names.items()],
                [(name, value, bitmap.serialize())
                 for (name, value), bitmap in spotted.pairs.items()],
            )
        )  # fmt: skip


class _Stored(msgspec.Struct, array_like=True):
    """A StreamSpots in the index file: spots by header, and its `spotted` bitmaps."""

    rows: list[tuple[list[str], list[tuple[str, str]], bytes]]
    tops: list[tuple[list[str], bytes]]
    names: list[tuple[str, bytes]]
    pairs: list[tuple[str, str, bytes]]


def unpack_spots(packed: bytes) -> StreamSpots:
    """Return one stream's spots out of the index file, as StreamSpots.pack() stored them."""
    stored = msgspec.msgpack.decode(packed, type=_Stored)
    spots = StreamSpots()
    for keys, fields, data in stored.rows:
        spots._rows[Header(tuple(keys), tuple(fields))] = [data]
    for top, data in stored.tops:
        spots.spotted.tops[tuple(top)] = BitMap.deserialize(data)
    for name, data in stored.names:
        spots.spotted.names[name] = BitMap.deserialize(data)
    for name, value, data in stored.pairs:
        spots.spotted.pairs[name, value] = BitMap.deserialize(data)
    return spots


class Unspotted:
    """An inverted index less what its spots answer: which entries a search must still read."""

    def __init__(self, headers: StreamHeaders, spotted: StreamHeaders) -> None:
        """headers: exact."""
        self._headers = headers
        self._spotted = spotted
        self.exact = True
        self.everything = headers.everything

    def subjects(self) -> Iterable[tuple[tuple[str, ...], BitMap]]:
        """(keys, entries with a row that has no spot) of each distinct subject."""
        spotted = self._spotted.tops
        for keys, bitmap in self._headers.subjects():
            held = spotted.get(keys)
            yield keys, bitmap if held is None else bitmap - held

    def subject(self, key: str) -> BitMap:
        """Return the entries with a row of exactly this key that has no spot."""
        tops = self._spotted.tops
        held = tops.get((key,))
        found = self._headers.subject(key)
        # `held` speaks of records of this key alone. Where there are some with further keys, no
        # entry is left out: they may be in it without a spot.
        return found if held is None or self._headers.multi_key_subjects(key) else found - held

    def field(self, name: str, value: str | None) -> BitMap:
        """Return the entries with a row that has the field, and the value, but no spot."""
        bitmap = self._headers.field(name, value)
        held: Mapping[Any, BitMap] = self._spotted.names if value is None else self._spotted.pairs
        found = held.get(name if value is None else (name, value))
        return bitmap if found is None else bitmap - found


def find_spots(
    content: Buffer, position: int, size: int, base: int, time_ms: int, epoch: int
) -> BatchSpots | None:
    """Return the rare rows of a batch whose checksum was found good; None: it has none.

    Called as a batch is indexed. position: of the batch in its segment, stamp included; size: of
    all of it; base, time_ms, epoch: of its stamp. Only batches whose rows may be gathered have any:
    what else belongs to a row would have to be read with it.
    """
    try:
        parsed = Content(content)
        head = parsed.head
        if not head.flags & _CODED or not gatherable(parsed):
            return None
        headers, codes = parsed.headers()
        most = size // BATCH_BYTES_A_SPOT
        if codes is None or not most or len(headers) > _HEADERS_MAX:
            return None  # most = 0: the batch is too small for one spot
        # The rarest headers get spots, as many as come to one for each BATCH_BYTES_A_SPOT bytes.
        counts = np.bincount(codes, minlength=len(headers))
        order = np.argsort(counts, kind="stable")
        order = order[counts[order] > 0]  # a header table may hold headers that no row has
        rare = order[np.cumsum(counts[order]) <= most]
        if not len(rare):
            return None
        end = position + size
        # Not rare: what `spotted` may promise of this batch depends on them (StreamSpots.add).
        others = [headers[code] for code in order[len(rare) :].tolist()]
        rows = [
            (headers[code], _spots_of(parsed, np.flatnonzero(codes == code), position, end, base))
            for code in rare.tolist()
        ]
    except BatchError:
        return None
    for _, spots in rows:
        spots["append_time"] = time_ms
        spots["epoch"] = epoch
    return BatchSpots([(header, spots.tobytes()) for header, spots in rows], others)


def _spots_of(content: Content, rows: Any, position: int, end: int, base: int) -> Spots:
    """Return the spots of some rows of a batch; the caller fills in append time and epoch.

    position, end: of the batch in its segment. base: offset of its first row.
    """
    bodies = content.bodies()
    times = content.client_times
    view = memoryview(bodies.blob)
    # The bodies' blob ends the batch, but for zeros up to a multiple of 8 (-n & 7 of them).
    blob_at = end - (-content.head.body_bytes & 7) - len(view)
    begins, ends = bodies.offsets[rows], bodies.offsets[rows + 1]
    spots = np.zeros(len(rows), SPOT)
    spots["offset"] = rows + base
    spots["client_time"] = NO_TIME if times is None else times[rows]
    spots["batch"] = position
    spots["body"] = begins.astype(np.int64) + blob_at
    spots["bytes"] = ends - begins
    spots["crc"] = [
        google_crc32c.value(bytes(view[begin:stop]))
        for begin, stop in zip(begins.tolist(), ends.tolist(), strict=True)
    ]
    return spots
