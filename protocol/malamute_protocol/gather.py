"""Gathering: one derived batch of rows that lay in several batches.

Owns the rows that are gathered and the batch made of them, so that a rare subject does not cost a
batch for each record. The rules: rows of one stream and one epoch, in the order of their offsets,
each with its own append time; only rows that consist of a header, a client time and a blob. Source:
SPEC.md, section 5.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from malamute_protocol.columns import NO_TIME, Array
from malamute_protocol.content import Content
from malamute_protocol.content_layout import (
    APPEND_TIMES,
    BLOB,
    CLIENT_TIME,
    CONTENT_BYTES,
    CRC_BYTES,
    FIELD_CODES,
    OFFSET_DELTAS,
    SUBJECT_CODES,
)
from malamute_protocol.encode import _assemble, gathered_content
from malamute_protocol.encode_headers import Options, pack_subjects
from malamute_protocol.extract import gather
from malamute_protocol.header import Header
from malamute_protocol.limits import UNBOUNDED
from malamute_protocol.stamp import DERIVED, STAMP_BYTES, Stamp, pack_stamps

_GATHERED_FLAGS: Final = SUBJECT_CODES | FIELD_CODES | CLIENT_TIME
"""Flags that a content may have whose rows are gathered."""
_OFFSETS_MAX: Final = 1 << 32
"""Largest offset delta, which is u32."""
_BLOB_BYTES_MAX: Final = 1 << 30
"""Largest bound of bodies, which is i32."""
BYTES_A_ROW: Final = 32
"""Bytes that a gathered row counts beside its body."""
_BYTES_A_TEXT: Final = 5
"""Bytes that the length of a text, of an array or of a map takes at most."""
_BYTES_A_BATCH: Final = STAMP_BYTES + CONTENT_BYTES + 6 * 7 + 2 * _BYTES_A_TEXT + 4
"""Bytes of a batch beside its rows and texts, at most: the zeros that pad six sections, the lengths
of two tables, the bound before the first body."""


class Row(NamedTuple):
    """One row of a gathered batch."""

    header: Header
    offset: int
    append_time_ms: int
    client_time_ms: int
    """Client time; NO_TIME: none."""
    body: bytes


class Gathered(NamedTuple):
    """A derived batch of rows from several."""

    stamp: bytes
    content: bytes
    base: int
    """Offset of the first row."""
    next: int
    """Offset after the last row."""
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not called here


class Gathering:
    """Rows gathered so far of one stream, in order, for one reader."""

    def __init__(self, stream: int) -> None:
        """stream: its number, for the stamps."""
        self._stream = stream
        self._rows: list[Row] = []
        self._epoch = self._lsn = 0
        self._headers: set[Header] = set()
        self.bytes = 0
        """Bytes of the batch of the rows gathered so far, at most: credit is measured by it."""

    def __len__(self) -> int:
        return len(self._rows)

    def takes(self, offset: int, epoch: int) -> bool:
        """Whether rows of this epoch, up to this offset, fit into one batch with those so far.

        Asked before add(). Where they do not, the caller takes the batch and begins another.
        """
        rows = self._rows
        return not rows or (epoch == self._epoch and offset - rows[0].offset < _OFFSETS_MAX)

    def add(self, rows: Sequence[Row], epoch: int, lsn: int) -> None:
        """Take in rows of one epoch, after those so far; lsn: of the first one's batch."""
        if not self._rows:
            self._epoch, self._lsn = epoch, lsn
            self.bytes = _BYTES_A_BATCH
        self._rows += rows
        self.bytes += self.weight_of(rows)
        self._headers.update(self._new_headers(rows))

    def weight_of(self, rows: Sequence[Row]) -> int:
        """Return the bytes that these rows would add: for add(), and to ask before if they fit."""
        bodies = sum([len(row.body) for row in rows])
        return bodies + BYTES_A_ROW * len(rows) + sum(map(weight_of, self._new_headers(rows)))

    def _new_headers(self, rows: Sequence[Row]) -> set[Header]:
        """Return the headers of these rows that no row so far has: a batch lists each once."""
        # Rows of one batch mostly share few header objects, and a header's hash costs its texts'.
        distinct = {id(row.header): row.header for row in rows}
        return set(distinct.values()).difference(self._headers)

    def take(self) -> Gathered | None:
        """Return the batch of the rows gathered so far, and begin anew; None: there are none."""
        rows = self._rows
        if not rows:
            return None
        stamp, content = gather_rows(rows, self._stream, self._epoch, self._lsn)
        self._rows = []
        self._headers, self.bytes = set(), 0
        return Gathered(stamp, content, rows[0].offset, rows[-1].offset + 1, len(rows))


def weight_of(header: Header) -> int:
    """Return the bytes that the texts of a header take in the tables of a batch, at most."""
    keys, fields = header
    size = sum(len(key.encode()) + _BYTES_A_TEXT for key in keys)
    # Several keys are an array, fields a map.
    size += ((len(keys) != 1) + bool(fields)) * _BYTES_A_TEXT
    return size + sum(
        len(name.encode()) + len(value.encode()) + 2 * _BYTES_A_TEXT for name, value in fields
    )


def gatherable(content: Content) -> bool:
    """Whether rows of a content may be gathered: they have no parts but those of Row."""
    head = content.head
    return not (head.codec or head.body_kind != BLOB or head.flags & ~_GATHERED_FLAGS)


def rows_of(stamp: Stamp, content: Content, places: Any) -> list[Row]:
    """Return the rows at these places of a gatherable, checked content, as rows to gather.

    places: row numbers, an array. Raises BatchError: a code has no entry in the header table.
    """
    content.check_codes()
    table, bodies, times = content.table, content.bodies(), content.client_times
    begins, ends = bodies.offsets[places].tolist(), bodies.offsets[places + 1].tolist()
    client_times = [NO_TIME] * len(places) if times is None else times[places].tolist()
    subjects, fields = content.subject_codes, content.field_codes
    by_subject = [0] * len(places) if subjects is None else subjects[places].tolist()
    default = 0 if table.fieldmaps else -1  # Without codes all rows have the first map.
    by_fields = [default] * len(places) if fields is None else fields[places].tolist()
    field_choices = len(table.fieldmaps) + 1  # Each map, and none.
    # The headers of these rows only: those of all rows would cost by the batch's rows. Each pair
    # of codes is one number, as HeaderTable.headers() takes it.
    codes = zip(by_subject, by_fields, strict=True)
    headers = table.headers([subject * field_choices + field + 1 for subject, field in codes])
    base, appended, view = stamp.base_offset, stamp.append_time_ms, bodies.blob
    return [
        Row(header, base + place, appended, time, bytes(view[begin:end]))
        for place, header, time, begin, end in zip(
            places.tolist(), headers, client_times, begins, ends, strict=True
        )
    ]


def gather_rows(rows: Sequence[Row], stream: int, epoch: int, lsn: int) -> tuple[bytes, bytes]:
    """Return (stamp, content) of a derived batch of rows that lay in several batches of one epoch.

    rows: at least one, in the order of their offsets, the last within 2**32 of the first. lsn: of
    the first row's batch.
    """
    headers, offsets, appended, times, bodies = zip(*rows, strict=True)
    bounds = np.zeros(len(rows) + 1, np.dtype("<i4"))
    np.cumsum(list(map(len, bodies)), out=bounds[1:])
    base = offsets[0]
    options = _options(
        headers,
        np.array(offsets, np.int64) - base,
        np.array(appended, np.int64),
        np.array(times, np.int64),
    )
    content = _assemble(len(rows), BLOB, [bounds, b"".join(bodies)], options)
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
        content_crc=int.from_bytes(content[CRC_BYTES], "little"),
    )
    return stamp.pack(), content


def _options(headers: Sequence[Header], deltas: Array, appended: Array, times: Array) -> Options:
    """Return the encoding's arguments for rows with these headers, beside their bodies.

    deltas, appended, times: of each row the offset after the base, the append time, and the client
    time. Keys and field maps become a table of distinct ones and a code for each row.
    """
    options: Options = {
        "offset_deltas": deltas, "append_times_ms": appended, "limits": UNBOUNDED,
    }  # fmt: skip
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
    if bool((times != NO_TIME).any()):
        options["client_time_ms"] = times
    return options


class SharedGathering:
    """Several batches of one stream and epoch, whose rows are gathered for many readers at once.

    Makes what gather_rows() would make for each reader, byte for byte, without an object for each
    row: those cost 5 us a row, this a fraction of one and about 8 us a reader.
    """

    def __init__(self, stream: int) -> None:
        """stream: its number, for the stamps."""
        self._stream = stream
        self._epoch = 0
        # Each list but _headers has one entry for each batch.
        self._lsns: list[int] = []
        self._ends: list[int] = []
        """Count of rows up to the end of each batch."""
        self._offsets: list[Array] = []
        self._times: list[int] = []
        """Append times."""
        self._counts: list[int] = []
        """Rows of each batch."""
        self._client_times: list[Array | None] = []
        """Client time of each row; None: a batch without."""
        self._headers: list[Header] = []
        """Distinct headers of all batches, one batch after the other."""
        self._codes: list[Array] = []
        """Place of each row's header in `_headers`."""
        self._blobs: list[Any] = []
        """Bodies of each batch; `_bounds` says where each ends, counted over all."""
        self._bounds: list[Array] = []
        self._blob_bytes = 0
        self.base = 0
        """Offset of the first row."""
        self.rows = 0

    def takes(self, stamp: Stamp, content: Content) -> bool:
        """Whether a batch may join the others: it is gatherable, and of their epoch."""
        if not gatherable(content) or self._blob_bytes + stamp.size > _BLOB_BYTES_MAX:
            return False
        if not self.rows:
            return True
        ahead = stamp.base_offset + content.head.count - self.base
        return stamp.epoch == self._epoch and ahead < _OFFSETS_MAX

    def add(self, stamp: Stamp, content: Content) -> None:
        """Add a checked batch, after the others."""
        count = content.head.count
        if not self.rows:
            self._epoch, self.base = stamp.epoch, stamp.base_offset
        self.rows += count
        self._lsns.append(stamp.lsn)
        self._ends.append(self.rows)
        self._offsets.append(np.arange(stamp.base_offset, stamp.base_offset + count))
        self._times.append(stamp.append_time_ms)
        self._counts.append(count)
        self._client_times.append(content.client_times)
        headers, codes = content.headers()
        first = len(self._headers)
        self._headers += headers
        # Numbers of headers, and bounds of bodies below, count over all batches: each batch's are
        # shifted by what came before.
        self._codes.append(np.full(count, first, np.int64) if codes is None else codes + first)
        bodies = content.bodies()
        self._blobs.append(bodies.blob)
        bounds = bodies.offsets.astype(np.int64) + self._blob_bytes
        self._bounds.append(bounds[1:] if self._bounds else bounds)
        self._blob_bytes += len(bodies.blob)

    def sizes(self) -> Array:
        """Return the bytes of the body of each row here, by which a reader's credit is counted."""
        return np.diff(np.concatenate(self._bounds))

    def gather(self, rows: Array, counts: Sequence[int]) -> list[Gathered]:
        """Make a batch for each reader: counts[0] of `rows` are the first one's, and so on.

        rows: places among all rows here, ascending for each reader, which has one at least.
        """
        # Columns of all batches as one, of which the rows are taken, reader after reader.
        offsets = np.concatenate(self._offsets)[rows]
        appended = np.repeat(np.array(self._times, np.int64), self._counts)[rows]
        codes = np.concatenate(self._codes)[rows]
        client_times = self._client_times_of(rows)
        bounds, blob = gather(np.concatenate(self._bounds), b"".join(self._blobs), rows)
        blob, ends = memoryview(blob).cast("B"), np.cumsum(counts)
        firsts: Array = ends - np.array(counts, np.int64)
        # Which readers' rows all have one header. It is compared as a whole, since its texts have
        # other codes in another batch: equal headers get one number, and where the least and the
        # greatest number of a reader's rows are the same, all are.
        number_of: dict[Header, int] = {}
        present = np.zeros(len(self._headers), np.bool_)
        present[codes] = True
        used = np.flatnonzero(present)
        numbers = np.zeros(len(self._headers), np.int64)
        numbers[used] = [
            number_of.setdefault(self._headers[code], len(number_of)) for code in used.tolist()
        ]
        by_row = numbers[codes]
        uniform = np.minimum.reduceat(by_row, firsts) == np.maximum.reduceat(by_row, firsts)
        # Offsets of a reader's rows, counted from those of its first row.
        deltas = (offsets - np.repeat(offsets[firsts], counts)).astype("<u4")
        contents: list[bytes] = []
        for first, end, same in zip(firsts.tolist(), ends.tolist(), uniform.tolist(), strict=True):
            own_bounds = bounds[first : end + 1] - bounds[first]
            body = blob[int(bounds[first]) : int(bounds[end])]
            header = self._headers[int(codes[first])]
            if same and not header.fields and client_times is None:
                # One subject and nothing else: the quick way.
                contents.append(
                    gathered_content(
                        end - first,
                        OFFSET_DELTAS | APPEND_TIMES,
                        pack_subjects((header.keys,)),
                        deltas[first:end].tobytes(),
                        appended[first:end].tobytes(),
                        (own_bounds.tobytes(), body),
                    )
                )
                continue
            headers = [self._headers[code] for code in codes[first:end].tolist()]
            times = np.full(1, NO_TIME) if client_times is None else client_times[first:end]
            options = _options(headers, deltas[first:end], appended[first:end], times)
            contents.append(_assemble(end - first, BLOB, [own_bounds, bytes(body)], options))
        bases, lasts = offsets[firsts].tolist(), offsets[ends - 1].tolist()
        # The batch of a reader's first row is the first that ends after it.
        lsns = np.array(self._lsns)[np.searchsorted(self._ends, rows[firsts], "right")].tolist()
        # Fields of a stamp in their order, as in gather_rows().
        stamps = pack_stamps(
            (
                DERIVED, lsn, lsn, 0, self._epoch, base, time, self._stream, 0,
                STAMP_BYTES + len(content), count, 0, 0,
                int.from_bytes(content[CRC_BYTES], "little"), 0,
            )
            for lsn, base, time, content, count in zip(
                lsns, bases, appended[firsts].tolist(), contents, counts, strict=True
            )
        )  # fmt: skip
        return [
            Gathered(stamp, content, base, last + 1, count)
            for stamp, content, base, last, count in zip(
                stamps, contents, bases, lasts, counts, strict=True
            )
        ]

    def _client_times_of(self, rows: Array) -> Array | None:
        """Return the client times of the rows; None: no batch has any."""
        if all(times is None for times in self._client_times):
            return None
        of_all: Array = np.concatenate(
            [
                np.full(count, NO_TIME, np.int64) if times is None else times
                for count, times in zip(self._counts, self._client_times, strict=True)
            ]
        )
        return of_all[rows]
