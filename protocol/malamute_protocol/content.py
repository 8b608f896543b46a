"""The content of a record batch: a view over the producer's bytes.

Owns how a content is read, and its validation. The rule: nothing is copied or parsed before it is
asked for, and whatever the bytes are, reading them raises BatchError or works. Source: SPEC.md,
sections 5.2 to 5.6.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Final

import google_crc32c
import numpy as np

from malamute_protocol.bodies import FEW, Bodies, bounds_of_few, check_record_sizes, read_bodies
from malamute_protocol.codec import CODECS
from malamute_protocol.columns import I4, I8, U4, Array, check_offsets, earliest, time_range
from malamute_protocol.content_layout import (
    APPEND_TIMES,
    AT,
    BLOB,
    BODY_KINDS,
    CLIENT_TIME,
    CONTENT_BYTES,
    CONTENT_FLAGS,
    CONTENT_MAGIC,
    CONTENT_VERSION,
    EXPIRY,
    FIELD_CODES,
    HEAD,
    LIST,
    OFFSET_DELTAS,
    PROPERTIES_COLUMN,
    PROPERTIES_CONSTANT,
    PROPERTIES_DICTIONARY,
    SUBJECT_CODES,
    TRANSACTION_CONTROL,
    Head,
    Sections,
    check_reserved,
)
from malamute_protocol.errors import BatchError
from malamute_protocol.header import (
    MEMO,
    TABLE_BYTES_MAX,
    Header,
    HeaderTable,
    Remains,
    TableReading,
    check_counts,
    claimed_length,
)
from malamute_protocol.limits import DEFAULT_LIMITS, UNCHECKED, Limits
from malamute_protocol.properties import parse_properties, split_maps
from malamute_protocol.stamp import STAMP_BYTES

_HEAD_BYTES_MAX: Final = 1024
_CRC_COUNTS_FROM: Final = AT.content_bytes
"""Position in a content from which on its CRC counts."""
_PROPERTIES: Final = PROPERTIES_CONSTANT | PROPERTIES_DICTIONARY | PROPERTIES_COLUMN
_KEPT_EXPANSION_MAX: Final = 8
"""Factor of their compressed bytes up to which decompressed bodies are kept from their check to
their use."""
_COPY_BELOW: Final = 4096
"""Size up to which copying costs less than making an array."""
_ARRAY_LENGTH_BYTES_MAX: Final = 5
"""Bytes that the length of a MessagePack array takes at most."""


class Content:
    """One batch's content, as broker or client got it, over any buffer, which must outlive it."""

    __slots__ = (
        "_bodies", "_few", "_headers", "_limits", "_reading", "_sections", "_table", "buffer",
        "head", "view",
    )  # fmt: skip

    def __init__(self, buffer: Any) -> None:
        """Read the head only.

        Raises BatchError: not a content of a version and shape that this code knows.
        """
        view = buffer if type(buffer) is memoryview else memoryview(buffer)
        # Positions below count bytes: views of other items or shapes become views of bytes.
        if view.ndim != 1 or view.format != "B" or not view.contiguous:
            view = view.cast("B") if view.contiguous else memoryview(view.tobytes())
        if len(view) < CONTENT_BYTES:
            raise BatchError("bad_batch", f"a content of {len(view)} bytes is cut short")
        self.buffer = buffer
        self.view = view
        fields = HEAD.unpack_from(view)
        self.head = Head._make(fields)
        # Found when they are first asked for.
        self._sections: Sections | None = None
        self._table: HeaderTable | None = None
        self._reading: TableReading | None = None
        """Reader of a large header table, as long as the table is not complete."""
        self._headers: tuple[tuple[Header, ...], Array | None] | None = None
        self._bodies: Bodies | None = None
        self._few: tuple[int, ...] | None = None
        """Bounds of the bodies, where check() found a few plain ones."""
        self._limits = UNCHECKED
        # Locals: to look up a field of `head` costs as much as ten of them.
        magic, version, head_bytes, _, content_bytes = fields[:5]
        if magic != CONTENT_MAGIC:
            raise BatchError("bad_batch", f"no content: the magic is 0x{magic:08X}")
        if version != CONTENT_VERSION:
            raise BatchError("bad_batch", f"content version {version} is not known", AT.version)
        if head_bytes < CONTENT_BYTES or head_bytes > _HEAD_BYTES_MAX or head_bytes % 8:
            raise BatchError("bad_batch", f"a content head of {head_bytes} bytes", AT.head_bytes)
        if content_bytes != len(view):
            raise BatchError(
                "bad_batch",
                f"{len(view)} bytes where the head says {content_bytes}",
                AT.content_bytes,
            )

    def __len__(self) -> int:
        """Return the count of records."""
        return self.head.count

    # --- layout ------------------------------------------------------------------

    @property
    def sections(self) -> Sections:
        """Return where the sections lie. Raises BatchError when they do not fill the content."""
        if self._sections is None:
            self._sections = self._locate()
        return self._sections

    def _locate(self) -> Sections:
        """Return where each section begins, by the head's flags and sizes; -1: it is missing.

        Each section is padded to a multiple of 8 bytes. Raises BatchError: they do not fill the
        content, or flags are unknown or exclude each other.
        """
        head = self.head
        flags, n = head.flags, head.count
        if flags & ~CONTENT_FLAGS:
            raise BatchError("unsupported", f"unknown content flags {flags:#x}", AT.flags)
        kinds = flags & _PROPERTIES
        if kinds & (kinds - 1):  # More than one bit is set.
            raise BatchError("bad_batch", "more than one form of properties is flagged", AT.flags)
        codes_bytes = (4 * n + 7) & ~7
        subjects = position = head.head_bytes
        position += (head.subjects_bytes + 7) & ~7
        fieldmaps = position
        position += (head.fieldmaps_bytes + 7) & ~7
        subject_codes = field_codes = client_time = expiry = properties = deltas = times = -1
        if flags & SUBJECT_CODES:
            subject_codes = position
            position += codes_bytes
        if flags & FIELD_CODES:
            field_codes = position
            position += codes_bytes
        if flags & CLIENT_TIME:
            client_time = position
            position += 8 * n
        if flags & EXPIRY:
            expiry = position
            position += 8 * n
        if kinds:
            properties = position
            position += (head.properties_bytes + 7) & ~7
        elif head.properties_bytes:
            raise BatchError("bad_batch", "properties without their flag", AT.properties_bytes)
        if flags & OFFSET_DELTAS:
            deltas = position
            position += codes_bytes
        if flags & APPEND_TIMES:
            times = position
            position += 8 * n
        body = position
        position += (head.body_bytes + 7) & ~7
        if position != head.content_bytes:
            raise BatchError(
                "bad_batch",
                f"the sections need {position} bytes, not {head.content_bytes}",
                AT.content_bytes,
            )
        return Sections._make(
            (
                subjects, fieldmaps, subject_codes, field_codes, client_time, expiry, properties,
                deltas, times, body, position,
            )
        )  # fmt: skip

    def _array(self, dtype: np.dtype[Any], position: int, count: int) -> Array:
        """Return a column as a view of the bytes. Raises BatchError: it is cut short."""
        if position + dtype.itemsize * count > len(self.view):
            raise BatchError("bad_batch", "a column is cut short", position)
        return np.frombuffer(self.view, dtype, count, position)

    # --- header ------------------------------------------------------------------

    @property
    def table(self) -> HeaderTable:
        """Return the header table, from the memo when its bytes were seen before."""
        if self._table is None:
            head, reading = self.head, self._reading
            if reading is None:
                at, view = self.sections, self.view
                subjects, fieldmaps, size = at.subjects, at.fieldmaps, head.fieldmaps_bytes
                table = MEMO.table(
                    bytes(view[subjects : subjects + head.subjects_bytes]),
                    bytes(view[fieldmaps : fieldmaps + size]) if size else b"",
                    self._limits,
                )
            else:  # Read in steps so far: the rest is read now.
                table = reading.table()
                self._reading = None
            check_counts(table, head.subjects_count, head.fieldmaps_count)
            self._table = table
        return self._table

    def reading(
        self, limits: Limits, *, outlined: bool = True, remains: Remains | None = None
    ) -> TableReading | None:
        """Return a reader of the header table in steps, before check(); None: it is quick to read.

        For a loop that does other work between steps. outlined: the reader also gathers what an
        index notes of the table. remains: takes the entries of the table once it is not needed any
        more; None: they are freed at once.

        A fault of the table is raised when it is asked for. Raises BatchError: the sections do not
        fill the content, or claim more headers than the limits allow.
        """
        head = self.head
        if head.subjects_bytes + head.fieldmaps_bytes <= TABLE_BYTES_MAX:
            return None
        if self._reading is None and self._table is None:
            self._check_counts(limits)
            at, view = self.sections, self.view
            self._reading = TableReading(
                view[at.subjects : at.subjects + head.subjects_bytes],
                view[at.fieldmaps : at.fieldmaps + head.fieldmaps_bytes],
                limits,
                outlined=outlined,
                remains=remains,
            )
        return self._reading

    def adopt(self, reading: TableReading) -> None:
        """Take over the reading of an equal content's header table, as far as it has come.

        Readers of one batch share it so, each of whom got the batch from the journal by itself.
        """
        if self._table is None:
            self._reading = reading

    def share(self, table: HeaderTable) -> None:
        """Use the header table of an equal content: the batch was read before, and came again."""
        self._table = table
        self._reading = None

    def make_headers(self) -> Iterator[None]:
        """Read the header table and make the headers in steps; headers() is quick then.

        For a broker's loop, which does other work after each step. Raises BatchError as headers().
        """
        if self._headers is not None:
            return
        reading = self.reading(self._limits, outlined=False)
        while reading is not None and not reading.run(more=_never):  # One step in each call.
            yield
        table = self.table
        if not table.fieldmaps:
            if self.subject_codes is not None:
                yield from table.make_headers(None)  # One header for each subject.
        elif self.subject_codes is not None or self.field_codes is not None:
            used, codes = self._used_pairs()
            yield
            yield from table.make_headers(used)
            self._headers = table.headers(used), codes
        self.headers()  # Puts the parts together; a lone header has none, and is made here.

    @property
    def subject_codes(self) -> Array | None:
        """Return int32[n] into table.keys; None: every record has code 0."""
        position = self.sections.subject_codes
        return None if position < 0 else self._array(I4, position, self.head.count)

    @property
    def field_codes(self) -> Array | None:
        """Return int32[n] into table.fieldmaps, -1 for none; None: 0 for all, if there is one."""
        position = self.sections.field_codes
        return None if position < 0 else self._array(I4, position, self.head.count)

    def headers(self) -> tuple[tuple[Header, ...], Array | None]:
        """Return (distinct headers, index of each row's header; None: all rows have header 0).

        Patterns are matched with each distinct header once. A header that no row uses may be among
        them when the producer listed one.
        """
        if self._headers is None:
            self._headers = self._resolve_headers()
        return self._headers

    def _resolve_headers(self) -> tuple[tuple[Header, ...], Array | None]:
        """Return the distinct headers, and the header of each row as a number among them.

        None for the numbers: every row has the one header.
        """
        table = self.table
        subjects, fields = self.subject_codes, self.field_codes
        default_field = 0 if table.fieldmaps else -1  # Without codes all rows have the first map.
        if subjects is None and (fields is None or not table.fieldmaps):
            if not table.keys:
                raise BatchError("bad_batch", "the batch has no subject", AT.subjects_count)
            self.check_codes()
            return (table.header(0, default_field),), None
        if not table.fieldmaps:
            self.check_codes()
            return table.plain(), subjects
        used, codes = self._used_pairs()
        return table.headers(used), codes

    def _used_pairs(self) -> tuple[list[int], Array]:
        """Return the pairs of codes that rows have, and each row's place among them.

        Pairs are as HeaderTable.headers() takes them. Only for a content with field maps and codes.
        """
        self.check_codes()
        table, subjects, fields = self.table, self.subject_codes, self.field_codes
        # A row's pair of codes is one number; +1, because the field code of no fields is -1.
        field_choices = len(table.fieldmaps) + 1
        row_fields = 0 if fields is None else fields
        row_subjects = 0 if subjects is None else subjects.astype(np.int64)
        pairs = np.asarray(row_subjects * field_choices + row_fields + 1, dtype=np.int64)
        span = len(table.keys) * field_choices  # pairs that there could be
        if span <= 1 << 20:
            # To mark pairs, and number the marks, is linear; np.unique sorts (3 ms a full batch).
            present = np.zeros(span, np.bool_)
            present[pairs] = True
            used = np.flatnonzero(present)
            place = np.zeros(span, np.int32)
            place[used] = np.arange(len(used), dtype=np.int32)
            codes = place[pairs]
        else:
            used, inverse = np.unique(pairs, return_inverse=True)
            codes = inverse.astype(np.int32)
        return used.tolist(), codes

    def row_of(self, delta: int) -> int:
        """Return the row of the record whose offset is the base offset + `delta`.

        In a derived batch, where rows are missing, its deltas tell.
        """
        deltas = self.offset_deltas
        return delta if deltas is None else int(np.searchsorted(deltas, delta))

    @property
    def headers_key(self) -> Any:
        """Return a key for a memo of the distinct headers: equal keys have equal headers.

        A broker remembers by it which readers take which of them. The key is the table, except
        where contents with the same table may have other headers: rows pair subjects with field
        maps, or all rows have the first of several subjects, since no codes are there.
        """
        head = self.head
        if head.fieldmaps_count or (head.subjects_count > 1 and not head.flags & SUBJECT_CODES):
            return self.headers()[0]
        return self.table

    def rows_of(self, headers: Iterable[int]) -> Array | None:
        """Return a mask of the rows with one of these headers; None: all rows.

        headers: indices into headers(), as patterns have chosen them.
        """
        distinct, codes = self.headers()
        chosen = np.zeros(len(distinct), np.bool_)
        chosen[list(headers)] = True
        if chosen.all():
            return None
        if codes is None:  # all rows have the one header, which is not chosen
            return np.zeros(self.head.count, np.bool_)
        mask: Array = chosen[codes]
        return mask

    # --- columns -----------------------------------------------------------------

    @property
    def client_times(self) -> Array | None:
        """Return int64[n], milliseconds, NO_TIME for a row without; None: no such column."""
        position = self.sections.client_time
        return None if position < 0 else self._array(I8, position, self.head.count)

    @property
    def expiries(self) -> Array | None:
        """Return int64[n], milliseconds, 0 for never; None: no such column."""
        position = self.sections.expiry
        return None if position < 0 else self._array(I8, position, self.head.count)

    @property
    def offset_deltas(self) -> Array | None:
        """Return uint32[n] to be added to the base offset; None: 0, 1, 2, ..."""
        position = self.sections.deltas
        return None if position < 0 else self._array(U4, position, self.head.count)

    @property
    def append_times(self) -> Array | None:
        """Return int64[n], milliseconds, of a gathered batch; None: all have the stamp's time."""
        position = self.sections.append_times
        return None if position < 0 else self._array(I8, position, self.head.count)

    def properties(self) -> tuple[list[bytes], Array | None]:
        """Return (property maps as MessagePack, code of each row, -1 for none).

        Codes None: all rows have map 0; an empty list: no row has any. Raises BatchError: they
        cannot be taken apart, or a map is over limits.property_bytes_max.
        """
        column, stored = self.property_section()
        flags, limits, position = self.head.flags, self._limits, self.sections.properties
        if stored is None:
            return [], None
        codes: Array | None = None
        if flags & PROPERTIES_CONSTANT:
            maps = [bytes(stored)]
        elif flags & PROPERTIES_DICTIONARY:
            codes = column
            maps = split_maps(bytes(stored), limits.batch_records_max)
            if codes is not None and len(codes) and int(codes.max()) >= len(maps):
                raise BatchError("bad_batch", "a property code is out of range", position)
        else:  # PROPERTIES_COLUMN
            assert column is not None
            blob = bytes(stored)
            maps = [blob[i:j] for i, j in pairwise(column.tolist())]
            # A row with an empty map has none.
            order = np.arange(len(maps), dtype=np.int32)
            codes = np.where(np.diff(column) == 0, np.int32(-1), order)
        self._check_property(max(map(len, maps), default=0), limits)
        return maps, codes

    def property_section(self) -> tuple[Array | None, Any]:
        """Return (codes of a dictionary or offsets of a column, the bytes after them).

        Neither is parsed. (None, None): no row has properties. Raises BatchError: the section is
        cut short, a code is below -1, or offsets do not span it.
        """
        head, position = self.head, self.sections.properties
        if position < 0:
            return None, None
        n, flags = head.count, head.flags
        end = position + head.properties_bytes
        if flags & PROPERTIES_CONSTANT:
            return None, self.view[position:end]
        width = 4 * n if flags & PROPERTIES_DICTIONARY else 4 * (n + 1)
        if head.properties_bytes < width:
            raise BatchError("bad_batch", "the properties are cut short", position)
        column = self._array(I4, position, width // 4)
        if flags & PROPERTIES_COLUMN:
            check_offsets(column, head.properties_bytes - width, "property", position)
        elif n and int(column.min()) < -1:
            raise BatchError("bad_batch", "a property code is below -1", position)
        return column, self.view[position + width : end]

    def _check_properties(self, limits: Limits) -> None:
        """Check form and sizes of properties, unparsed: to parse them would cost a broker too much.

        The sizes of a dictionary are the maps that it claims and the bytes that all have together.
        """
        column, stored = self.property_section()
        flags, largest = self.head.flags, len(stored)
        if flags & PROPERTIES_COLUMN:
            assert column is not None
            largest = int(np.diff(column).max()) if len(column) > 1 else 0
        elif flags & PROPERTIES_DICTIONARY:
            assert column is not None
            maps, position = claimed_length(stored), self.sections.properties
            if maps < 0 or maps > len(stored):
                raise BatchError("bad_batch", "the properties are no array of maps", position)
            if maps > limits.batch_records_max:
                raise BatchError(
                    "too_large",
                    f"{maps} property maps, at most {limits.batch_records_max}", position,
                )  # fmt: skip
            if len(column) and int(column.max()) >= maps:
                raise BatchError("bad_batch", "a property code is out of range", position)
            # Some map is at least as large as their mean, of which alone is known without parsing.
            largest = (len(stored) - _ARRAY_LENGTH_BYTES_MAX) // max(1, maps)
        self._check_property(largest, limits)

    def _check_property(self, size: int, limits: Limits) -> None:
        """Raise BatchError if properties of one record are larger than the limit."""
        if size > limits.property_bytes_max:
            raise BatchError(
                "too_large",
                f"properties of {size} bytes, at most {limits.property_bytes_max} a record",
                self.sections.properties,
            )

    # --- bodies ------------------------------------------------------------------

    def bodies(self, limits: Limits | None = None) -> Bodies:
        """Return the bodies, decompressed once; for an Arrow body `offsets` is empty.

        limits: by default those that check() was given. Raises BatchError: over
        limits.batch_bytes_max when decompressed, or offsets that leave the blob or fall.
        """
        if self._bodies is None:
            at = self.sections.body
            self._bodies = read_bodies(self.head, self.view, at, limits or self._limits)
        return self._bodies

    def check_bodies(self) -> None:
        """Check a compressed body as check() checks other bodies; for a consumer.

        The decompressed bodies are kept for bodies() unless they are very large beside the bytes
        that came: batches that wait to be read would take more memory than their reader gave credit
        for. Raises BatchError; `unsupported`: the codec's package is not installed here.
        """
        head = self.head
        if head.codec:
            check_record_sizes(head, self.bodies(), self.sections.body, self._limits)
            # Decompressed once more when they are asked for.
            if head.body_raw_bytes > _KEPT_EXPANSION_MAX * head.body_bytes:
                self._bodies = None

    def few_bodies(self) -> tuple[bytes, list[int]] | None:
        """Return all bodies back to back and their n+1 bounds, of few plain records; else None.

        Known once check() was called: half of the cost of a lone record is numpy's. For others see
        bodies().
        """
        bounds = self._few
        if bounds is None:
            return None
        at = self.sections.body + 4 * len(bounds)  # after the offsets, of 4 bytes each
        return bytes(self.view[at : at + bounds[-1]]), list(bounds)

    # --- validation ----------------------------------------------------------------

    def check(
        self,
        limits: Limits = DEFAULT_LIMITS,
        *,
        empty: bool = False,
        derived: bool = False,
        taking: bool = False,
        properties: bool = True,
    ) -> None:
        """Validate all that a broker relies on; never decompresses, never looks into a body.

        It checks head, CRC, section bounds, header tables and their limits, codes, the stated least
        and greatest times, the form and sizes of properties, and, when there is no codec, the body
        offsets. Vectorised. empty: a content of no records is allowed (control batches). derived:
        it has offset deltas, as only a broker's extracted batches have. taking: a broker takes it
        from a client, which leaves reserved bytes at 0; a reader ignores them, since earlier
        brokers stored others. properties: False leaves them to properties(), for a consumer, which
        may never ask for any. Raises BatchError, and nothing else, whatever the bytes are; its
        number is the position of the field at fault (SPEC.md, section 5.2).
        """
        self._limits = limits
        head = self.head
        n, flags, kind, size = head.count, head.flags, head.body_kind, head.content_bytes
        if size > limits.batch_bytes_max - STAMP_BYTES:
            raise BatchError(
                "too_large",
                f"a batch of {size + STAMP_BYTES} bytes, at most {limits.batch_bytes_max}",
                AT.content_bytes,
            )
        if size % 8:
            raise BatchError(
                "bad_batch", "the content's size is not a multiple of 8", AT.content_bytes
            )
        # numpy arrays, unlike memoryviews, may be handed to the CRC without a copy.
        tail: Any = self.view[_CRC_COUNTS_FROM:]
        tail = bytes(tail) if len(tail) < _COPY_BELOW else np.frombuffer(tail, np.uint8)
        if google_crc32c.value(tail) != head.content_crc:
            raise BatchError("corrupt", "the content's checksum does not fit", AT.content_crc)
        if n > limits.batch_records_max:
            raise BatchError(
                "too_large", f"{n} records in a batch, at most {limits.batch_records_max}", AT.count
            )
        if n == 0 and not empty:
            raise BatchError("bad_batch", "a batch without records", AT.count)
        if head.codec >= len(CODECS):
            raise BatchError("bad_batch", f"unknown codec {head.codec}", AT.codec)
        if kind >= len(BODY_KINDS):
            raise BatchError("bad_batch", f"unknown body kind {kind}", AT.body_kind)
        if head.body_raw_bytes > limits.batch_bytes_max:
            raise BatchError(
                "too_large", f"a body of {head.body_raw_bytes} bytes", AT.body_raw_bytes
            )
        # Parts that only derived batches have, and parts that none may have yet.
        if bool(flags & OFFSET_DELTAS) != derived:
            raise BatchError(
                "bad_batch", "offset deltas belong to derived batches, only they do", AT.flags
            )
        if flags & APPEND_TIMES and not derived:
            raise BatchError("bad_batch", "append times belong to derived batches", AT.flags)
        if flags & TRANSACTION_CONTROL:
            raise BatchError("unsupported", "transaction control is reserved", AT.flags)
        if head.transaction_id:
            raise BatchError("unsupported", "a transaction id is reserved", AT.transaction_id)
        if taking:
            check_reserved(head, self.view)
        if kind != LIST and head.parts_count:
            raise BatchError("bad_batch", "a count of parts without lists", AT.parts_count)
        # From here on the sections are looked into; the head alone was judged above.
        body_at = self.sections.body
        self._check_table(limits)
        self._check_times()
        if properties and flags & _PROPERTIES:
            self._check_properties(limits)
        if head.codec == 0:  # What is compressed, only its readers judge: check_bodies().
            if kind == BLOB and n <= FEW:
                self._few = bounds_of_few(head, self.view, body_at, limits)
            else:
                check_record_sizes(head, self.bodies(), body_at, limits)

    def _check_counts(self, limits: Limits) -> None:
        """Raise BatchError, before headers are read, if they are too many or counts disagree."""
        head = self.head
        fieldmaps, most = head.fieldmaps_count, limits.headers_max
        if head.subjects_count > most or fieldmaps > most:
            raise BatchError(
                "too_large", f"more than {most} distinct headers in a batch", AT.subjects_count
            )
        if (fieldmaps == 0) != (head.fieldmaps_bytes == 0):
            raise BatchError(
                "bad_batch", "field maps without count, or the reverse", AT.fieldmaps_bytes
            )

    def _check_table(self, limits: Limits) -> None:
        """Raise BatchError unless the header table is sound and within the limits.

        A table that passed these limits before is not checked again.
        """
        head = self.head
        if head.subjects_count > 1 or head.fieldmaps_count or head.fieldmaps_bytes:
            # One subject is within any limit.
            self._check_counts(limits)
        table = self.table
        if table.passed is not limits:
            table.check(limits)
        if head.count and not table.keys:
            raise BatchError("bad_batch", "the batch has no subject", AT.subjects_count)
        if head.flags & (SUBJECT_CODES | FIELD_CODES):
            self.check_codes()

    def check_codes(self) -> None:
        """Raise BatchError unless every header code has its entry, before one is looked up."""
        table, at = self.table, self.sections
        for codes, least, most, position in (
            (self.subject_codes, 0, len(table.keys), at.subject_codes),
            (self.field_codes, -1, len(table.fieldmaps), at.field_codes),
        ):
            if codes is not None and len(codes):
                low, high = int(codes.min()), int(codes.max())
                if low < least or high >= most:
                    raise BatchError(
                        "bad_batch", f"header codes {low} to {high}, {most} entries", position
                    )

    def _check_times(self) -> None:
        """Raise BatchError if the times in the head are not the columns', or offset deltas fall."""
        head = self.head
        if not (  # A content without these columns, and with zeros in the head, is right.
            head.flags & (CLIENT_TIME | EXPIRY | OFFSET_DELTAS)
            or head.client_time_min_ms
            or head.client_time_max_ms
            or head.earliest_expiry_ms
        ):
            return
        times, expiries, deltas = self.client_times, self.expiries, self.offset_deltas
        low, high = time_range(times)
        if (low, high) != (head.client_time_min_ms, head.client_time_max_ms):
            raise BatchError(
                "bad_batch",
                "least or greatest client time is not the column's",
                AT.client_time_min_ms,
            )
        if earliest(expiries) != head.earliest_expiry_ms:
            raise BatchError(
                "bad_batch", "the earliest expiry is not the column's", AT.earliest_expiry_ms
            )
        if deltas is not None and len(deltas) > 1 and not bool((deltas[1:] > deltas[:-1]).all()):
            raise BatchError("bad_batch", "offset deltas that do not rise", self.sections.deltas)

    def verify(
        self, limits: Limits = DEFAULT_LIMITS, *, empty: bool = False, derived: bool = False
    ) -> None:
        """Validate everything: check(), with `empty` and `derived`, then properties and bodies.

        Raises BatchError, and nothing else, whatever the bytes are.
        """
        self.check(limits, empty=empty, derived=derived)
        check_record_sizes(self.head, self.bodies(), self.sections.body, limits)
        maps, _ = self.properties()
        for properties in maps:
            if properties:
                parse_properties(properties)


def _never() -> bool:
    """Answer TableReading.run() so that it stops after one step."""
    return False
