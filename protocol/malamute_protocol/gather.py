"""Gathering: one derived batch of rows that lay in several batches.

Owns the rows in hand and the batch made of them, so that a rare subject does not cost a batch a
record. The rules: rows of one stream and one epoch, in the order of their offsets, each with its
own append time; only rows that are their header, a client time and a blob. Source: SPEC.md,
section 5.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from malamute_protocol.content import (
    BLOB,
    CLIENT_TIME,
    FIELD_CODES,
    NO_TIME,
    SUBJECT_CODES,
    Content,
)
from malamute_protocol.encode import Options, _assemble
from malamute_protocol.header import Header
from malamute_protocol.stamp import DERIVED, STAMP_BYTES, Stamp

_PLAIN: Final = SUBJECT_CODES | FIELD_CODES | CLIENT_TIME
_OFFSETS_MAX: Final = 1 << 32
"""Offset deltas are u32."""
BYTES_A_ROW: Final = 32
"""What a gathered row counts beside its body."""
_BYTES_A_TEXT: Final = 5
"""What tells the length of a text, at most."""


class Row(NamedTuple):
    """One row of a gathered batch."""

    header: Header
    offset: int
    append_time_ms: int
    client_time_ms: int
    """NO_TIME: none."""
    body: bytes


class Gathered(NamedTuple):
    """A derived batch of rows from several."""

    stamp: bytes
    content: bytes
    base: int
    """Offset of the first row."""
    next: int
    """After the last row."""
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls here


class Gathering:
    """Rows in hand of one stream, in order."""

    def __init__(self, stream: int) -> None:
        """stream: its number, for the stamps."""
        self._stream = stream
        self._rows: list[Row] = []
        self._epoch = self._lsn = 0
        self._headers: set[Header] = set()
        self.bytes = 0
        """About what the batch of what is in hand will weigh."""

    def __len__(self) -> int:
        return len(self._rows)

    def takes(self, offset: int, epoch: int) -> bool:
        """Whether rows of this epoch, up to this offset, may join those in hand."""
        rows = self._rows
        return not rows or (epoch == self._epoch and offset - rows[0].offset < _OFFSETS_MAX)

    def add(self, rows: Sequence[Row], epoch: int, lsn: int) -> None:
        """Take rows of one epoch; lsn: of the first one's batch."""
        if not self._rows:
            self._epoch, self._lsn = epoch, lsn
        self._rows += rows
        self.bytes += self.weight_of(rows)
        self._headers.update(row.header for row in rows)

    def weight_of(self, rows: Sequence[Row]) -> int:
        """What these rows would add to it: their bodies, and the texts that are not in it yet."""
        new = {row.header for row in rows} - self._headers
        return sum(len(row.body) + BYTES_A_ROW for row in rows) + sum(map(weight_of, new))

    def take(self) -> Gathered | None:
        """The batch of what is in hand; None: there is nothing."""
        rows = self._rows
        if not rows:
            return None
        stamp, content = gather_rows(rows, self._stream, self._epoch, self._lsn)
        self._rows = []
        self._headers, self.bytes = set(), 0
        return Gathered(stamp, content, rows[0].offset, rows[-1].offset + 1, len(rows))


def weight_of(header: Header) -> int:
    """Bytes that the texts of a header take in the tables of a batch, at most."""
    keys, fields = header
    size = sum(len(key.encode()) + _BYTES_A_TEXT for key in keys)
    return size + sum(
        len(name.encode()) + len(value.encode()) + 2 * _BYTES_A_TEXT for name, value in fields
    )


def gatherable(content: Content) -> bool:
    """Whether rows of a content may be gathered: nothing belongs to them but what Row has."""
    head = content.head
    return not (head.codec or head.body_kind != BLOB or head.flags & ~_PLAIN)


def rows_of(stamp: Stamp, content: Content, places: Any) -> list[Row]:
    """The rows at these places of a gatherable content that was checked, as rows to gather."""
    headers, codes = content.headers()
    bodies, times = content.bodies(), content.client_times
    begins, ends = bodies.offsets[places].tolist(), bodies.offsets[places + 1].tolist()
    which = [0] * len(places) if codes is None else codes[places].tolist()
    told = [NO_TIME] * len(places) if times is None else times[places].tolist()
    base, appended, view = stamp.base_offset, stamp.append_time_ms, bodies.blob
    return [
        Row(headers[code], base + place, appended, time, bytes(view[begin:end]))
        for place, code, time, begin, end in zip(
            places.tolist(), which, told, begins, ends, strict=True
        )
    ]


def gather_rows(rows: Sequence[Row], stream: int, epoch: int, lsn: int) -> tuple[bytes, bytes]:
    """(stamp, content) of a derived batch of rows that lay in several batches of one epoch.

    rows: at least one, in the order of their offsets, the last within 2**32 of the first; blobs.
    lsn: of the first row's batch.
    """
    headers, offsets, appended, times, bodies = zip(*rows, strict=True)
    ends = np.zeros(len(rows) + 1, np.dtype("<i4"))
    np.cumsum(list(map(len, bodies)), out=ends[1:])
    base = offsets[0]
    options: Options = {
        "offset_deltas": np.array(offsets, np.int64) - base,
        "append_times_ms": np.array(appended, np.int64),
    }
    distinct = dict.fromkeys(headers)
    keys = {key: code for code, key in enumerate(dict.fromkeys(h.keys for h in distinct))}
    maps = {
        pairs: code
        for code, pairs in enumerate(dict.fromkeys(h.fields for h in distinct if h.fields))
    }
    options["subject_table"] = list(keys)
    if len(keys) > 1:
        options["subject_codes"] = np.array([keys[h.keys] for h in headers], np.int32)
    if maps:
        options["field_table"] = [dict(pairs) for pairs in maps]
        options["field_codes"] = np.array([maps.get(h.fields, -1) for h in headers], np.int32)
    if any(time != NO_TIME for time in times):
        options["client_time_ms"] = np.array(times, np.int64)
    content = _assemble(len(rows), BLOB, 0, [ends, b"".join(bodies)], options)
    stamp = Stamp(
        flags=DERIVED,
        lsn=lsn,
        bundle_lsn=lsn,
        synced_lsn=0,
        epoch=epoch,
        base_offset=base,
        append_time_ms=appended[0],
        stream=stream,
        origin=0,
        size=STAMP_BYTES + len(content),
        count=len(rows),
        control_kind=0,
        content_crc=int.from_bytes(content[8:12], "little"),
    )
    return stamp.pack(), content
