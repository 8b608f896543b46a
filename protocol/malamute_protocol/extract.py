"""Extraction: a derived batch that holds only the selected rows of another.

Owns the gathering of rows from columns, for one selection (`extract`) or for many that take a few
rows each of one batch (`Scatter`), and the copying of rows into a content that stands by itself.
The rule: a derived batch keeps the offsets, times and headers of its rows, compacts the header
tables, has checksums of its own, and carries properties as the bytes that they are; batches with a
codec or an Arrow body are never extracted from. Source: SPEC.md, section 5.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from struct import pack
from typing import Any

import google_crc32c
import numpy as np

from malamute_protocol.bodies import Bodies
from malamute_protocol.columns import Array
from malamute_protocol.content import Content
from malamute_protocol.content_layout import (
    ARROW,
    BLOB,
    CRC_BYTES,
    LIST,
    OFFSET_DELTAS,
    PROPERTIES_COLUMN,
    PROPERTIES_CONSTANT,
    PROPERTIES_DICTIONARY,
    SUBJECT_CODES,
)
from malamute_protocol.encode import _assemble, plain_content
from malamute_protocol.encode_headers import Options, pack_subjects
from malamute_protocol.errors import LocalProtocolError
from malamute_protocol.limits import UNBOUNDED
from malamute_protocol.stamp import DERIVED, STAMP_BYTES, Stamp, pack_stamps

_PRODUCER_BYTES = slice(24, 36)
"""Bytes of the head that have the producer's id and epoch."""
_SEQUENCE_BYTES = slice(40, 48)
"""Bytes of the head that have the first sequence."""
_SMALL_ENTRY_BYTES = 32
"""Mean size up to which an index for each byte is quicker than a slice for each row."""
_SHARED_BYTES_MAX = 4096
"""Bytes of properties that rows share and that each derived batch repeats: more than these would
make small batches large, one for each selection."""


def extractable(content: Content) -> bool:
    """Whether rows can be extracted: no codec, not Arrow, and little that copies would repeat.

    A broker delivers any other batch whole, with a bitmap of the selected rows.
    """
    head = content.head
    if head.codec or head.body_kind == ARROW:
        return False
    flags = head.flags
    if not flags & (PROPERTIES_CONSTANT | PROPERTIES_DICTIONARY):
        return True
    shared = head.properties_bytes - (4 * head.count if flags & PROPERTIES_DICTIONARY else 0)
    return shared <= _SHARED_BYTES_MAX


def extract(stamp: Stamp, content: Content, rows: Any) -> tuple[bytes, bytes]:
    """Return (stamp, content) of the rows that the boolean mask `rows` selects.

    For readers that select a small part of a batch. Raises LocalProtocolError: no row is selected,
    or the batch is not extractable.
    """
    if not extractable(content):
        raise LocalProtocolError("unsupported", "the rows of this batch stay together")
    mask = np.asarray(rows, dtype=np.bool_)
    if len(mask) != content.head.count:
        raise LocalProtocolError("bad_batch", f"a mask of {len(mask)} for {len(content)} records")
    chosen = _row_numbers(mask)
    head = content.head
    # What a derived batch keeps of the original's head and columns.
    options: Options = {
        "limits": UNBOUNDED,
        "producer_id": head.producer_id,
        "producer_epoch": head.producer_epoch,
        "first_sequence": head.first_sequence,
        "transaction_id": head.transaction_id,
        "schema_id": head.schema_id,
    }
    deltas = content.offset_deltas
    # A row's number is its delta, unless the batch itself was derived.
    options["offset_deltas"] = chosen.astype(np.uint32) if deltas is None else deltas[chosen]
    appended, expiries = content.append_times, content.expiries
    if appended is not None:
        options["append_times_ms"] = appended[chosen]
    if expiries is not None:
        options["expires_at_ms"] = expiries[chosen]
    derived = _content_of(content, chosen, options)
    crc = int.from_bytes(derived[CRC_BYTES], "little")
    restamped = stamp._replace(
        flags=stamp.flags | DERIVED,
        size=STAMP_BYTES + len(derived),
        count=len(chosen),
        content_crc=crc,
        stamp_bytes=STAMP_BYTES,
    )
    return restamped.pack(), derived


def copy_rows(content: Content, rows: Any, *, expiries: bool = False) -> bytes:
    """Return a content that stands by itself with the rows that the boolean mask `rows` selects.

    It has no producer, and without `expiries` no expiry, as a copy in a dead-letter mailbox. Raises
    LocalProtocolError: no row is selected, or the content is not extractable.
    """
    if not extractable(content):
        raise LocalProtocolError("unsupported", "the rows of this batch stay together")
    options: Options = {"limits": UNBOUNDED}  # The rows were checked as part of `content`.
    chosen = _row_numbers(np.asarray(rows, dtype=np.bool_))
    if expiries and content.expiries is not None:
        options["expires_at_ms"] = content.expiries[chosen]
    return _content_of(content, chosen, options)


def _row_numbers(mask: Array) -> Array:
    """Return the numbers of selected rows, for extract() and copy_rows().

    Raises LocalProtocolError: there is none.
    """
    chosen = np.flatnonzero(mask)
    if not len(chosen):
        raise LocalProtocolError("bad_batch", "no row is selected")
    return chosen


def copy_whole(content: Content) -> bytes:
    """Return a content with all rows of another and without its producer, for dead letters.

    For contents that are not extractable: the bytes are changed in place, not made anew.
    """
    copy = bytearray(content.view)
    copy[_PRODUCER_BYTES] = bytes(_PRODUCER_BYTES.stop - _PRODUCER_BYTES.start)
    copy[_SEQUENCE_BYTES] = bytes(_SEQUENCE_BYTES.stop - _SEQUENCE_BYTES.start)
    # numpy arrays, unlike slices, may be handed to the CRC without a copy.
    crc = google_crc32c.value(np.frombuffer(copy, np.uint8, offset=CRC_BYTES.stop))
    copy[CRC_BYTES] = crc.to_bytes(4, "little")
    return bytes(copy)


def _content_of(content: Content, chosen: Array, options: Options) -> bytes:
    """Return a content of the rows of these numbers.

    options: of the encoder, all but headers, client times and properties, which are added here.
    """
    _headers(content, chosen, options)
    times = content.client_times
    if times is not None:
        options["client_time_ms"] = times[chosen]
    _properties(content, chosen, options)
    body, parts_count = _bodies(content.bodies(), chosen)
    kind = LIST if content.head.body_kind == LIST else BLOB
    return _assemble(len(chosen), kind, body, options, parts_count=parts_count)


class Scatter:
    """Extraction for many selections of one plain batch, each of a few rows.

    Makes what extract() would make, byte for byte, without an array: those cost by the batch's rows
    for each selection, this by the rows that are taken.
    """

    __slots__ = ("_blob", "_bounds", "_codes", "_content", "_keys", "_stamp")

    def __init__(self, stamp: Stamp, content: Content) -> None:
        """content: one that can_scatter() allows."""
        bodies = content.bodies()
        self._stamp = stamp
        self._content = content
        self._blob = bytes(bodies.blob)
        self._bounds: list[int] = bodies.offsets.tolist()
        codes = content.subject_codes
        self._codes: list[int] | None = None if codes is None else codes.tolist()
        self._keys = content.table.keys

    def extract(self, selections: Sequence[Sequence[int]]) -> list[tuple[bytes, bytes]]:
        """Return (stamp, content) of each selection: its rows, ascending, at least one."""
        contents = [self._content_of(rows) for rows in selections]
        stamp = self._stamp
        # The fields of the batch's stamp in their order, but those that tell of the content.
        stamps = pack_stamps(
            (
                stamp.flags | DERIVED, stamp.lsn, stamp.bundle_lsn, stamp.synced_lsn, stamp.epoch,
                stamp.base_offset, stamp.append_time_ms, stamp.stream, stamp.origin,
                STAMP_BYTES + len(content), len(rows), stamp.control_kind, 0,
                int.from_bytes(content[CRC_BYTES], "little"), 0,
            )
            for rows, content in zip(selections, contents, strict=True)
        )  # fmt: skip
        return list(zip(stamps, contents, strict=True))

    def _content_of(self, rows: Sequence[int]) -> bytes:
        """Return a content of these rows alone, for a batch of blobs with subjects and no more."""
        head, keys, codes, bounds, blob = (
            self._content.head, self._keys, self._codes, self._bounds, self._blob,
        )  # fmt: skip
        count = len(rows)
        flags, column = OFFSET_DELTAS, b""
        # Only the subjects in use, renumbered; a lone one needs no column of codes.
        if codes is None:
            subjects: Sequence[Sequence[str]] = keys[:1]
        elif count == 1:
            subjects = (keys[codes[rows[0]]],)
        else:
            used = sorted({codes[row] for row in rows})
            subjects = [keys[code] for code in used]
            if len(used) > 1:
                flags |= SUBJECT_CODES
                place = {code: at for at, code in enumerate(used)}
                column = pack(f"<{count}i", *[place[codes[row]] for row in rows])
        pieces = [blob[bounds[row] : bounds[row + 1]] for row in rows]
        ends = accumulate(map(len, pieces), initial=0)
        body = b"".join((pack(f"<{count + 1}i", *ends), *pieces))
        return plain_content(
            head, count, flags, pack_subjects(subjects), len(subjects),
            column, pack(f"<{count}I", *rows), body,
        )  # fmt: skip


def can_scatter(content: Content) -> bool:
    """Whether a Scatter can be made of a batch: it has bodies and subjects, and nothing else.

    A broker asks when many subscriptions take few rows each; of any other batch it extracts the
    rows for one after the other.
    """
    head = content.head
    return (
        head.codec == 0
        and head.body_kind == BLOB
        and not head.flags & ~SUBJECT_CODES
        and not head.fieldmaps_count
    )


def _headers(content: Content, chosen: Array, options: Options) -> None:
    """Add the headers of the chosen rows to the options of the encoder, without unused ones."""
    table = content.table
    subjects, fields = content.subject_codes, content.field_codes
    if subjects is None:
        options["subject_table"] = table.keys[:1]
    else:
        used, codes = _compact(subjects[chosen], len(table.keys))
        options["subject_table"] = [table.keys[i] for i in used.tolist()]
        options["subject_codes"] = codes if len(used) > 1 else None
    if not table.fieldmaps:
        return
    if fields is None:
        options["field_table"] = table.fieldmaps[:1]
        return
    # Shifted by one, so that "no fields" is code 0 while compacting. bare: some row has none.
    used, codes = _compact(fields[chosen] + 1, len(table.fieldmaps) + 1)
    bare = int(used[0]) == 0
    maps = [table.fieldmaps[i - 1] for i in used.tolist() if i]
    options["field_table"] = maps
    options["field_codes"] = None if len(maps) == 1 and not bare else codes - (1 if bare else 0)


def _compact(codes: Array, entries: int) -> tuple[Array, Array]:
    """Return (entries in use, ascending; the codes renumbered into them).

    So a batch of few rows lists no header that none of them has. entries: how many the table has.
    Linear, where np.unique would sort.
    """
    place = np.zeros(entries, np.int32)
    place[codes] = 1  # Marked; numbered below.
    used = np.flatnonzero(place)
    place[used] = np.arange(len(used), dtype=np.int32)
    return used, place[codes]


def _properties(content: Content, chosen: Array, options: Options) -> None:
    """Give the options of the encoder the properties of the chosen rows, as bytes.

    No check has looked into these bytes yet, and cutting rows out does not, either. A dictionary
    stays whole: to tell its maps apart is to parse it.
    """
    column, stored = content.property_section()
    if stored is None:
        return
    # The column has codes of a dictionary or offsets of maps, and is None for one map of all rows.
    form = content.head.flags & (PROPERTIES_CONSTANT | PROPERTIES_DICTIONARY | PROPERTIES_COLUMN)
    if column is None:
        options["property_section"] = form, [bytes(stored)]
    elif form == PROPERTIES_COLUMN:
        options["property_section"] = form, [*gather(column, stored, chosen)]
    elif bool((column[chosen] >= 0).any()):  # Else no chosen row has properties.
        options["property_section"] = form, [column[chosen], bytes(stored)]


def _bodies(bodies: Bodies, chosen: Array) -> tuple[list[Any], int]:
    """Return (pieces of the chosen rows' body section, count of parts; 0: they are no lists)."""
    if bodies.parts is None:
        offsets, blob = gather(bodies.offsets, bodies.blob, chosen)
        return [offsets, blob], 0
    # Lists: a row's offsets count parts, so that the rows name the parts to gather.
    first, sizes = bodies.offsets[:-1][chosen], np.diff(bodies.offsets)[chosen]
    parts_of_rows = _ranges(first, sizes)
    list_offsets = np.zeros(len(chosen) + 1, np.dtype("<i4"))
    np.cumsum(sizes, out=list_offsets[1:])
    part_offsets, blob = gather(bodies.parts, bodies.blob, parts_of_rows)
    return [list_offsets, part_offsets, blob], len(parts_of_rows)


def gather(offsets: Array, blob: Any, chosen: Array) -> tuple[Array, Any]:
    """Return the chosen entries of an Arrow-like binary column, as such a column.

    chosen: their places, ascending. Entries of one width are taken as numpy items, small ones byte
    by byte, of all others each run of neighbours as a slice.
    """
    sizes = np.diff(offsets)
    count = len(sizes)
    new_offsets = np.zeros(len(chosen) + 1, np.dtype("<i4"))
    if not len(chosen):
        return new_offsets, b""
    width = int(sizes[0])  # The width of all entries, if they have one.
    # The cheap look at the end comes first: mostly it tells that they have not.
    if width and width * count == int(offsets[-1]) and bool((sizes == width).all()):
        new_offsets[:] = np.arange(len(chosen) + 1) * width
        column = np.frombuffer(blob, np.dtype((np.void, width)), count)
        return new_offsets, np.frombuffer(column[chosen].tobytes(), np.uint8)
    picked = sizes[chosen]
    np.cumsum(picked, out=new_offsets[1:])
    starts = offsets[:-1][chosen]
    if int(new_offsets[-1]) <= _SMALL_ENTRY_BYTES * len(chosen):
        if not int(new_offsets[-1]):
            return new_offsets, b""
        # Small entries: numpy picks each byte by its place.
        return new_offsets, np.frombuffer(blob, np.uint8)[_ranges(starts, picked)]
    # Neighbours leave as one slice: a run costs as much as a row.
    breaks = np.flatnonzero(np.diff(chosen) != 1) + 1
    firsts = np.concatenate(([0], breaks))
    lasts = np.concatenate((breaks, [len(chosen)])) - 1
    ends = offsets[1:][chosen]
    view = memoryview(blob)
    pieces = [view[i:j] for i, j in zip(starts[firsts].tolist(), ends[lasts].tolist(), strict=True)]
    return new_offsets, b"".join(pieces)


def _ranges(starts: Array, sizes: Array) -> Array:
    """Return [start, start+1, ... start+size-1] of each pair, one after the other."""
    # A plain count 0, 1, 2, ... over all pairs, shifted for each pair so that it begins at start.
    ends = np.cumsum(sizes, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    shifts = starts.astype(np.int64) - (ends - sizes)
    result: Array = np.arange(total, dtype=np.int64) + np.repeat(shifts, sizes)
    return result
