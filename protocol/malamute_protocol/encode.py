"""Encoding record batches: from bodies and their headers to the content's bytes.

Owns the way from Python objects and from Arrow-like columns to a content. The rule: a content that
is made passes Content.verify(); input that would not raises LocalProtocolError, naming what and
where, before a byte is made. Source: SPEC.md, sections 5.2 to 5.6.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, Unpack

import google_crc32c
import numpy as np

from malamute_protocol.codec import codec_number, compress
from malamute_protocol.columns import I4, I8, NO_TIME, Array, earliest, time_range
from malamute_protocol.content import Content
from malamute_protocol.content_layout import (
    APPEND_TIMES,
    ARROW,
    BLOB,
    CLIENT_TIME,
    CONTENT_BYTES,
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
    Head,
)
from malamute_protocol.encode_headers import (
    Options,
    check_table,
    fieldmaps_of,
    pack_properties,
    pack_subjects,
    properties_of,
    subjects_of,
    times_of,
)
from malamute_protocol.errors import BatchTooLarge, LocalProtocolError
from malamute_protocol.limits import DEFAULT_LIMITS, Limits
from malamute_protocol.stamp import STAMP_BYTES

_HEAD_UP_TO_CRC = struct.Struct("<IHHI")
"""The first fields of a head: magic, version, bytes of the head, checksum of all that follows."""
_HEAD_AFTER_CRC = struct.Struct("<IIBBHQIIQQqqqIIIIIIII16x")
"""The fields of a head after its checksum."""
_PLAIN_OPTIONS = frozenset(("subject", "limits", "producer_id", "producer_epoch", "first_sequence"))
_FEW_RECORDS: Final = 128
"""Number of records up to which plain Python beats numpy's call overhead."""
_LARGE_BODY_BYTES: Final = 4096
"""Mean size of bodies from which on each is copied by itself."""
_BULK_BYTES: Final = 64 << 10
"""Size from which on a second copy costs more than numpy's calls."""
_PADDING: Final = tuple(bytes(n) for n in range(8))
"""Zeros by their number: _PADDING[-size & 7] brings a section to a multiple of 8 bytes."""
_OPTIONS: Final = frozenset(Options.__annotations__)


def encode(bodies: Sequence[bytes], **options: Unpack[Options]) -> bytes:
    """Make a content of records with one blob each, for a producer's batch.

    Raises LocalProtocolError: a limit is broken, a type or a length is wrong.
    """
    limits = options.get("limits", DEFAULT_LIMITS)
    if len(bodies) <= _FEW_RECORDS and options.keys() <= _PLAIN_OPTIONS:
        plain = _encode_plain(bodies, options.get("subject"), limits, options)
        if plain is not None:
            return plain
    offsets, pieces = _offsets_and_pieces(bodies, limits, "record")
    return _assemble(len(bodies), BLOB, [offsets, *pieces], options)


def encode_bulk(
    bodies: Sequence[bytes], bounds: Array, **options: Unpack[Options]
) -> bytes | bytearray:
    """Do the work of encode() for a large batch: its bodies are copied once, into a bytearray.

    For a producer of many records at once. bounds: n+1 ascending positions, of which each two
    neighbours are a body's length apart. The checksum, which stands before the bodies, is filled in
    at the end; a result of bytes could not be changed. So encode() copies small bodies twice, and
    reads large ones twice, the second time from memory that no cache holds any more.
    """
    count = len(bodies)
    total = int(bounds[-1] - bounds[0]) if count else 0
    if total < _BULK_BYTES or codec_number(options.get("codec", 0)):
        return encode(bodies, **options)
    limits = options.get("limits", DEFAULT_LIMITS)
    if total > limits.batch_bytes_max:
        raise BatchTooLarge(_batch_too_large_reason(total, limits))
    if total > limits.record_bytes_max:
        _check_sizes(bodies, limits, "record")
    offsets = np.subtract(bounds, bounds[0], dtype=np.int64).astype(I4)
    body_bytes = offsets.nbytes + total
    rest, sections = _head_and_sections(
        count, BLOB, parts_count=0, codec=0, body_bytes=body_bytes, raw_bytes=body_bytes,
        options=options,
    )  # fmt: skip
    try:
        # Zeros in the place of the first fields, which are filled in with the checksum.
        content = bytearray().join(
            [
                bytes(_HEAD_UP_TO_CRC.size),
                rest,
                *sections,
                offsets,
                *bodies,
                _PADDING[-body_bytes & 7],
            ]
        )
    except TypeError:
        return encode(bodies, **options)  # The other function says which body is no bytes.
    _, _, _, _, content_bytes, *_ = HEAD.unpack_from(content)
    if len(content) != content_bytes:
        # Some body is a view of items wider than a byte: its len() is not its size.
        return encode(bodies, **options)
    # An array, because the CRC takes no memoryview.
    crc = google_crc32c.value(np.frombuffer(content, np.uint8, offset=_HEAD_UP_TO_CRC.size))
    _HEAD_UP_TO_CRC.pack_into(content, 0, CONTENT_MAGIC, CONTENT_VERSION, CONTENT_BYTES, crc)
    return content


def _encode_plain(
    bodies: Sequence[bytes], subject: Any, limits: Limits, options: Options
) -> bytes | None:
    """Encode a few records with one subject and nothing else, at a third of the general cost.

    Byte for byte what the general way makes; None where an argument needs the general way.
    """
    count = len(bodies)
    if not count or count > limits.batch_records_max or type(subject) is not str:
        return None
    try:
        packed = pack_subjects((subject,))
        bounds = list(accumulate(map(len, bodies), initial=0))
        blob = b"".join(bodies)
    except (TypeError, UnicodeEncodeError):
        return None
    total = bounds[-1]
    # What may be over a limit goes the general way, which names it. So do bodies of which len()
    # does not count bytes.
    if (
        len(blob) != total
        or total > limits.record_bytes_max
        or total > limits.batch_bytes_max >> 1
        or len(packed) > limits.subject_bytes_max
    ):
        return None
    body_bytes = 4 * (count + 1) + total
    subjects_bytes = len(packed)
    # The zeros that bring both sections to a multiple of 8 bytes.
    subjects_pad, body_pad = _PADDING[-subjects_bytes & 7], _PADDING[-body_bytes & 7]
    size = CONTENT_BYTES + subjects_bytes + len(subjects_pad) + body_bytes + len(body_pad)
    if size + STAMP_BYTES > limits.batch_bytes_max:
        return None
    get = options.get
    try:
        # The fields of Head from content_bytes on; 0: such a content has no codec, flags and so on.
        rest = _HEAD_AFTER_CRC.pack(
            size, count, 0, BLOB, 0,
            get("producer_id", 0), get("producer_epoch", 0), 0, get("first_sequence", 0), 0,
            0, 0, 0, subjects_bytes, 1, 0, 0, 0, body_bytes, body_bytes, 0,
        )  # fmt: skip
    except struct.error:
        return None
    offsets = struct.pack(f"<{count + 1}i", *bounds)
    content = b"".join((rest, packed, subjects_pad, offsets, blob, body_pad))
    crc = google_crc32c.value(content)
    return _HEAD_UP_TO_CRC.pack(CONTENT_MAGIC, CONTENT_VERSION, CONTENT_BYTES, crc) + content


def plain_content(
    head: Head, count: int, flags: int, subjects: bytes, subjects_count: int,
    subject_codes: bytes, deltas: bytes, body: bytes,
) -> bytes:  # fmt: skip
    """Make a derived content of subjects, offset deltas and bodies, from sections made already.

    For Scatter. head: of the content that it is derived from. Byte for byte what _assemble() would
    make, at a fraction of its cost.
    """
    # Each section is followed by the zeros that bring it to a multiple of 8 bytes.
    sections = b"".join(
        (
            subjects, _PADDING[-len(subjects) & 7],
            subject_codes, _PADDING[-len(subject_codes) & 7],
            deltas, _PADDING[-len(deltas) & 7], body, _PADDING[-len(body) & 7],
        )
    )  # fmt: skip
    # The fields of Head from content_bytes on; 0: no codec, times, field maps and properties.
    rest = _HEAD_AFTER_CRC.pack(
        CONTENT_BYTES + len(sections), count, 0, BLOB, flags,
        head.producer_id, head.producer_epoch, head.schema_id, head.first_sequence,
        head.transaction_id, 0, 0, 0, len(subjects), subjects_count, 0, 0, 0,
        len(body), len(body), 0,
    )  # fmt: skip
    content = rest + sections
    crc = google_crc32c.value(content)
    return _HEAD_UP_TO_CRC.pack(CONTENT_MAGIC, CONTENT_VERSION, CONTENT_BYTES, crc) + content


def gathered_content(
    count: int, flags: int, subjects: bytes, deltas: bytes, times: bytes, body: Sequence[Any]
) -> bytes:
    """Make a derived content of rows of one subject from several batches, from ready sections.

    For SharedGathering. body: the pieces of the body section, offsets first. Byte for byte what
    _assemble() would make.
    """
    body_bytes = sum(map(len, body))
    # Each section is followed by the zeros that bring it to a multiple of 8 bytes.
    sections = b"".join(
        (
            subjects, _PADDING[-len(subjects) & 7], deltas, _PADDING[-len(deltas) & 7],
            times, *body, _PADDING[-body_bytes & 7],
        )
    )  # fmt: skip
    # The fields of Head from content_bytes on; 0: rows of several producers have no common one.
    rest = _HEAD_AFTER_CRC.pack(
        CONTENT_BYTES + len(sections), count, 0, BLOB, flags, 0, 0, 0, 0, 0, 0, 0, 0,
        len(subjects), 1, 0, 0, 0, body_bytes, body_bytes, 0,
    )  # fmt: skip
    content = rest + sections
    crc = google_crc32c.value(content)
    return _HEAD_UP_TO_CRC.pack(CONTENT_MAGIC, CONTENT_VERSION, CONTENT_BYTES, crc) + content


def encode_lists(bodies: Sequence[Sequence[bytes]], **options: Unpack[Options]) -> bytes:
    """Make a content of records with a list of blobs each.

    Raises LocalProtocolError: as encode().
    """
    limits = options.get("limits", DEFAULT_LIMITS)
    parts = [part for body in bodies for part in body]
    part_offsets, pieces = _offsets_and_pieces(parts, limits, "part")
    offsets = np.zeros(len(bodies) + 1, I4)
    np.cumsum(np.fromiter(map(len, bodies), np.int64, len(bodies)), out=offsets[1:])
    # Offsets of records count parts, and those of parts count bytes: together they give each size.
    sizes = np.diff(np.frombuffer(part_offsets, I4)[offsets])
    if len(sizes) and int(sizes.max()) > limits.record_bytes_max:
        row = int(sizes.argmax())
        raise LocalProtocolError(
            "too_large", _too_large_reason("record", row, int(sizes[row]), limits)
        )
    body = [offsets, part_offsets, *pieces]
    return _assemble(len(bodies), LIST, body, options, parts_count=len(parts))


def encode_fixed(blob: bytes, width: int, **options: Unpack[Options]) -> bytes:
    """Make a content of records of `width` bytes each, back to back in `blob`.

    Raises LocalProtocolError: as encode(), or the blob is no multiple of the width.
    """
    size = memoryview(blob).nbytes
    if width <= 0 or size % width:
        raise LocalProtocolError(
            "bad_batch", f"{size} bytes do not divide into records of {width} bytes"
        )
    count = size // width
    return encode_columns(np.arange(count + 1, dtype=np.int64) * width, blob, **options)


def encode_columns(offsets: Any, blob: Any, **options: Unpack[Options]) -> bytes:
    """Make a content from an Arrow-like binary column: n+1 offsets and the blob they cut.

    For Arrow tables of a client, and rows of Spark. The first offset may be above 0 and the blob
    longer, as in a slice of an Arrow array. Raises LocalProtocolError: as encode(), or offsets that
    fall or leave the blob.
    """
    limits = options.get("limits", DEFAULT_LIMITS)
    bounds = np.asarray(offsets)
    data = memoryview(blob).cast("B")
    if bounds.ndim != 1 or not len(bounds) or bounds.dtype.kind not in "iu":
        raise LocalProtocolError("bad_batch", "offsets must be n+1 integers")
    # Compared, not subtracted: the difference of two unsigned integers is never below 0.
    falls = (bounds[1:] < bounds[:-1]).any()
    if falls or int(bounds[0]) < 0 or int(bounds[-1]) > len(data):
        raise LocalProtocolError("bad_batch", f"offsets fall or leave the blob of {len(data)}")
    sizes = np.diff(bounds)
    if len(sizes) and int(sizes.max()) > limits.record_bytes_max:
        row = int(sizes.argmax())
        raise LocalProtocolError(
            "too_large", _too_large_reason("record", row, int(sizes[row]), limits)
        )
    first, end = int(bounds[0]), int(bounds[-1])
    if end - first > limits.batch_bytes_max:
        raise BatchTooLarge(_batch_too_large_reason(end - first, limits))
    # An array, because the CRC takes no memoryview.
    piece = np.frombuffer(data, np.uint8)[first:end] if end > first else b""
    return _assemble(
        len(bounds) - 1, BLOB, [np.ascontiguousarray(bounds - first, dtype=I4), piece], options
    )


def encode_arrow(message: bytes | Array, count: int, **options: Unpack[Options]) -> bytes:
    """Make a content whose body is one Arrow IPC record-batch message of `count` rows.

    Raises LocalProtocolError: as encode(), or no schema_id is given.
    """
    if not options.get("schema_id"):
        raise LocalProtocolError("bad_batch", "an Arrow body needs the stream's schema_id")
    return _assemble(count, ARROW, [message], options)


def with_properties(content: Content, properties: Mapping[str, Any], limits: Limits) -> bytes:
    """Return a content with one map of properties for all its records, in place of the one it has.

    A traced client adds its trace so to a batch that is encoded already. Raises LocalProtocolError:
    its records have maps of their own, the map is none, or either is too large. Raises BatchError:
    the sections do not fill the content.
    """
    head, at, view = content.head, content.sections, content.view
    if head.flags & (PROPERTIES_DICTIONARY | PROPERTIES_COLUMN):
        raise LocalProtocolError("unsupported", "the records have properties of their own")
    packed = pack_properties(properties, limits, row=0)
    # The properties section ends where the next section that there is begins; the body always is.
    end = next(position for position in (at.deltas, at.append_times, at.body) if position >= 0)
    begin = end if at.properties < 0 else at.properties
    # The zeros bring the section to a multiple of 8 bytes, as each one is.
    made = bytearray().join((view[:begin], packed, _PADDING[-len(packed) & 7], view[end:]))
    if len(made) + STAMP_BYTES > limits.batch_bytes_max:
        raise BatchTooLarge(_batch_too_large_reason(len(made) + STAMP_BYTES, limits))
    changed = head._replace(
        content_bytes=len(made), flags=head.flags | PROPERTIES_CONSTANT,
        properties_bytes=len(packed),
    )  # fmt: skip
    HEAD.pack_into(made, 0, *changed)
    # numpy arrays, unlike slices, may be handed to the CRC without a copy.
    crc = google_crc32c.value(np.frombuffer(made, np.uint8, offset=_HEAD_UP_TO_CRC.size))
    _HEAD_UP_TO_CRC.pack_into(made, 0, CONTENT_MAGIC, CONTENT_VERSION, head.head_bytes, crc)
    return bytes(made)


# --- from options to sections ---------------------------------------------------------


def _assemble(
    count: int, body_kind: int, body: list[Any], options: Options, *, parts_count: int = 0
) -> bytes:
    """Return the content's bytes: head, header tables, columns and body, with the checksum.

    The general way, on which every encoding ends that has no quicker one. body: the pieces of the
    body section, compressed here if a codec is asked for. parts_count: of all lists together.
    """
    codec = codec_number(options.get("codec", 0))
    raw_bytes = body_bytes = sum(map(_size, body))
    if codec:
        body = [compress(codec, b"".join(body))]
        body_bytes = len(body[0])
    rest, sections = _head_and_sections(
        count, body_kind, parts_count, codec, body_bytes, raw_bytes, options
    )
    _add_padded(sections, *body)
    crc = google_crc32c.value(rest)
    for section in sections:
        crc = google_crc32c.extend(crc, section)
    prefix = _HEAD_UP_TO_CRC.pack(CONTENT_MAGIC, CONTENT_VERSION, CONTENT_BYTES, crc)
    return b"".join([prefix, rest, *sections])


def _head_and_sections(
    count: int, body_kind: int, parts_count: int, codec: int, body_bytes: int, raw_bytes: int,
    options: Options,
) -> tuple[bytes, list[Any]]:  # fmt: skip
    """Return (the head after its CRC, the padded sections before the body), all limits checked.

    The sections are made in their order in the content, each with its flag. body_bytes, raw_bytes:
    size of the body section as it is stored, and before compression.
    """
    if not options.keys() <= _OPTIONS:
        unknown = min(options.keys() - _OPTIONS)
        known = ", ".join(sorted(_OPTIONS))
        raise LocalProtocolError(
            "bad_setting", f"there is no option {unknown!r}; known are {known}"
        )
    limits = options.get("limits", DEFAULT_LIMITS)
    if not 0 < count <= limits.batch_records_max:
        if count:
            raise BatchTooLarge(f"{count} records in a batch, at most {limits.batch_records_max}")
        raise LocalProtocolError("bad_batch", "a batch needs at least one record")
    # The header table, and the codes by which records refer to it.
    subjects, subject_codes = subjects_of(count, options)
    fieldmaps, field_codes = fieldmaps_of(count, options)
    check_table(subjects, fieldmaps, subject_codes, field_codes, limits)
    (packed_subjects, subjects_count), (packed_maps, maps_count) = subjects, fieldmaps
    flags = 0
    sections: list[Any] = []
    _add_padded(sections, packed_subjects)
    _add_padded(sections, packed_maps)
    if subject_codes is not None:
        flags |= SUBJECT_CODES
        _add_padded(sections, subject_codes)
    if field_codes is not None:
        flags |= FIELD_CODES
        _add_padded(sections, field_codes)
    # Columns of times, whose bounds the head repeats. Eight bytes each, they need no padding.
    earliest_expiry = least_time = greatest_time = 0
    times = times_of(count, options.get("client_time_ms"), "client_time_ms", none=NO_TIME)
    if times is not None:
        flags |= CLIENT_TIME
        least_time, greatest_time = time_range(times)
        sections.append(times)
    expiries = times_of(count, options.get("expires_at_ms"), "expires_at_ms", none=0)
    if expiries is not None:
        flags |= EXPIRY
        earliest_expiry = earliest(expiries)
        sections.append(expiries)
    form, properties = properties_of(count, options, limits)
    flags |= form
    properties_bytes = sum(map(_size, properties))
    _add_padded(sections, *properties)
    # Columns of derived batches.
    deltas = options.get("offset_deltas")
    if deltas is not None:
        flags |= OFFSET_DELTAS
        _add_padded(sections, np.ascontiguousarray(deltas, dtype=np.dtype("<u4")))
    appended = options.get("append_times_ms")
    if appended is not None:
        flags |= APPEND_TIMES
        sections.append(np.ascontiguousarray(appended, dtype=I8))
    size = CONTENT_BYTES + sum(map(_size, sections)) + body_bytes + (-body_bytes & 7)
    if max(size + STAMP_BYTES, raw_bytes) > limits.batch_bytes_max:
        raise BatchTooLarge(_batch_too_large_reason(max(size + STAMP_BYTES, raw_bytes), limits))
    try:
        rest = _HEAD_AFTER_CRC.pack(
            size,
            count,
            codec,
            body_kind,
            flags,
            options.get("producer_id", 0),
            options.get("producer_epoch", 0),
            options.get("schema_id", 0),
            options.get("first_sequence", 0),
            options.get("transaction_id", 0),
            earliest_expiry,
            least_time,
            greatest_time,
            len(packed_subjects),
            subjects_count,
            len(packed_maps),
            maps_count,
            properties_bytes,
            body_bytes,
            raw_bytes,
            parts_count,
        )
    except struct.error as error:
        raise LocalProtocolError(
            "bad_batch", f"a number of the head is out of range: {error}"
        ) from (error)
    return rest, sections


def _offsets_and_pieces(
    pieces: Sequence[bytes], limits: Limits, what: str
) -> tuple[Any, Sequence[bytes]]:
    """Return offsets of n+1 int32 and the pieces to write, checked by record and batch limits.

    For encode() and encode_lists(). what: `record` or `part`, which each piece is the body of, for
    errors.
    """
    count = len(pieces)
    try:
        if count <= _FEW_RECORDS:
            bounds = list(accumulate(map(len, pieces), initial=0))
            total = bounds[-1]
        else:
            sizes = np.fromiter(map(len, pieces), np.int64, count)
            total = int(sizes.sum())
        # Large bodies go into the content by one copy; small ones are cheaper joined first, because
        # the CRC costs 0.1 us for each piece.
        if total >= _LARGE_BODY_BYTES * count and set(map(type, pieces)) == {bytes}:
            written = pieces
        else:
            blob = b"".join(pieces)
            if len(blob) != total:
                # Some piece is a view of items wider than a byte: its len() is not its size.
                return _offsets_and_pieces([bytes(piece) for piece in pieces], limits, what)
            written = (blob,)
    except TypeError as error:
        row = next((i for i, p in enumerate(pieces) if type(p) not in (bytes, bytearray)), 0)
        raise LocalProtocolError(
            "bad_batch", f"body of {what} {row} is {type(pieces[row]).__name__}, not bytes: {error}"
        ) from error
    if total > limits.record_bytes_max:
        _check_sizes(pieces, limits, what)
    if total > limits.batch_bytes_max:
        raise BatchTooLarge(_batch_too_large_reason(total, limits))
    if count <= _FEW_RECORDS:
        return struct.pack(f"<{count + 1}i", *bounds), written
    offsets = np.zeros(count + 1, I4)
    np.cumsum(sizes, out=offsets[1:])
    return offsets, written


def _check_sizes(pieces: Sequence[bytes], limits: Limits, what: str) -> None:
    """Raise LocalProtocolError if a piece is larger than a record may be.

    what: as of _offsets_and_pieces().
    """
    for row, piece in enumerate(pieces):
        if len(piece) > limits.record_bytes_max:
            raise LocalProtocolError("too_large", _too_large_reason(what, row, len(piece), limits))


def _add_padded(sections: list[Any], *pieces: Any) -> None:
    """Append one section and the zeros that pad it to 8 bytes."""
    size = 0
    for piece in pieces:
        size += _size(piece)
        sections.append(piece)
    if size & 7:
        sections.append(_PADDING[-size & 7])


def _size(piece: Any) -> int:
    """Return the bytes of a piece; an array's len() would count its items."""
    size: int = piece.nbytes if type(piece) is np.ndarray else len(piece)
    return size


def _too_large_reason(what: str, row: int, size: int, limits: Limits) -> str:
    """Say that a body is larger than a record may be; what: as of _offsets_and_pieces()."""
    return f"{what} {row} has {size} bytes, at most {limits.record_bytes_max}; send it in chunks"


def _batch_too_large_reason(size: int, limits: Limits) -> str:
    """Say that a batch would have more bytes than it may."""
    return f"a batch of {size} bytes, at most {limits.batch_bytes_max}; send smaller batches"
