"""Records of the simulated clients, and the reading of deliveries.

Owns a second, small codec of stamps and contents, written from the layout and not from
`malamute_protocol`: plain uncompressed blobs, one subject a record, fields, expiry. The rule: every
record of a run has a serial number of its own in its body, so that each record that is ever seen
can be traced to the one send that made it. Source: SPEC.md, section 5.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import google_crc32c
import msgpack
import msgspec

CONTENT_HEAD = struct.Struct("<IHHIIIBBHQIIQQqqqIIIIIIIIQQ")
STAMP = struct.Struct("<IHHIIQQQQQqIIIIHHIQ")
STAMP_BYTES = 96
HEAD_BYTES = 128
SERIAL = struct.Struct("<Q")
assert CONTENT_HEAD.size == HEAD_BYTES
assert STAMP.size == STAMP_BYTES

EXPIRY, SUBJECT_CODES, FIELD_CODES, DELTAS, APPEND_TIMES = 2, 128, 256, 32, 512


@dataclass(slots=True, frozen=True)
class Sent:
    """One record as a client made it."""

    serial: int
    producer: int
    """Number of the simulated producer."""
    stream: str
    subject: str
    fields: dict[str, str] | None
    expiry_ms: int
    """0: never."""
    length: int
    """Bytes of the body."""

    def body(self) -> bytes:
        """Return the serial, and filling up to the record's length."""
        return SERIAL.pack(self.serial).ljust(self.length, b"\xa5")


class Row(NamedTuple):
    """One record as a delivery showed it."""

    offset: int
    serial: int
    subject: str
    length: int
    append_time_ms: int


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One batch of a delivery or a journal, decoded."""

    stream: int
    epoch: int
    base_offset: int
    count: int
    append_time_ms: int
    lsn: int
    bundle_lsn: int
    flags: int
    size: int
    control_kind: int
    synced_lsn: int
    rows: tuple[Row, ...]
    """Empty for a control batch."""


class Unreadable(Exception):
    """The broker showed bytes that it should never have shown."""


def _padded(section: bytes) -> bytes:
    return section + bytes(-len(section) % 8)


def encode(
    records: list[Sent], *, producer_id: int = 0, producer_epoch: int = 0, sequence: int = 0
) -> bytes:
    """Encode the content of one batch."""
    count = len(records)
    subjects: dict[str, int] = {}
    codes = [subjects.setdefault(record.subject, len(subjects)) for record in records]
    maps: list[dict[str, str]] = []
    field_codes = []
    for record in records:
        if record.fields is None:
            field_codes.append(-1)
            continue
        if record.fields not in maps:
            maps.append(record.fields)
        field_codes.append(maps.index(record.fields))
    flags = 0
    sections = [msgpack.packb(list(subjects))]
    maps_bytes = b""
    if maps:
        maps_bytes = msgpack.packb(maps)
        sections.append(maps_bytes)
    if len(subjects) > 1:
        flags |= SUBJECT_CODES
        sections.append(struct.pack(f"<{count}i", *codes))
    if maps:
        flags |= FIELD_CODES
        sections.append(struct.pack(f"<{count}i", *field_codes))
    expiries = [record.expiry_ms for record in records]
    timed = [expiry for expiry in expiries if expiry]
    if timed:
        flags |= EXPIRY
        sections.append(struct.pack(f"<{count}q", *expiries))
    offsets = [0]
    for record in records:
        offsets.append(offsets[-1] + record.length)
    body = struct.pack(f"<{count + 1}i", *offsets) + b"".join(record.body() for record in records)
    tail = b"".join(map(_padded, sections)) + _padded(body)
    size = HEAD_BYTES + len(tail)
    head = CONTENT_HEAD.pack(
        0x31434C4D, 1, HEAD_BYTES, 0, size, count, 0, 0, flags,
        producer_id, producer_epoch, 0, sequence, 0,
        min(timed, default=0), 0, 0,
        len(sections[0]), len(subjects), len(maps_bytes), len(maps), 0, len(body), len(body), 0,
        0, 0,
    )  # fmt: skip
    crc = google_crc32c.value(head[12:] + tail)
    return head[:8] + struct.pack("<I", crc) + head[12:] + tail


def decode_run(data: Any) -> list[Batch]:
    """Decode whole batches back to back; raises Unreadable for anything but that."""
    data = bytes(data)
    batches = []
    position = 0
    while position < len(data):
        batch = decode_batch(data, position)
        batches.append(batch)
        position += batch.size
    if position != len(data):
        raise Unreadable(f"a run of {len(data)} bytes holds batches of {position}")
    return batches


def decode_batch(data: bytes, position: int) -> Batch:
    """Decode one stamp and its content; both checksums are checked."""
    if len(data) - position < STAMP_BYTES:
        raise Unreadable("a stamp is cut short")
    (magic, version, stamp_bytes, crc, flags, lsn, bundle_lsn, synced, epoch, base_offset,
     append_time_ms, stream, _origin, size, count, kind, _, content_crc, _) = STAMP.unpack_from(
        data, position
    )  # fmt: skip
    if magic != 0x31424C4D or version != 1 or stamp_bytes != STAMP_BYTES:
        raise Unreadable(f"no stamp at byte {position}")
    if google_crc32c.value(data[position + 12 : position + 96]) != crc:
        raise Unreadable("a stamp's checksum does not fit")
    if len(data) - position < size:
        raise Unreadable("a batch is cut short")
    content = data[position + STAMP_BYTES : position + size]
    rows: tuple[Row, ...] = ()
    if kind == 0:
        rows = _decode_content(content, base_offset, count, content_crc, append_time_ms)
    return Batch(
        stream,
        epoch,
        base_offset,
        count,
        append_time_ms,
        lsn,
        bundle_lsn,
        flags,
        size,
        kind,
        synced,
        rows,
    )


def _decode_content(
    content: bytes, base: int, count: int, crc_copy: int, append_time_ms: int = 0
) -> tuple[Row, ...]:
    head = CONTENT_HEAD.unpack_from(content, 0)
    magic, crc, size, rows, codec, kind, flags = (
        head[0], head[3], head[4], head[5], head[6], head[7], head[8],
    )  # fmt: skip
    if magic != 0x31434C4D or codec or kind:
        raise Unreadable("not a content of ours")
    if size != len(content) or crc != crc_copy or rows != count:
        raise Unreadable("stamp and content do not belong together")
    if google_crc32c.value(content[12:]) != crc:
        raise Unreadable("a content's checksum does not fit")
    subjects_bytes, maps_bytes = head[17], head[19]
    raw_bytes = head[22]
    position = HEAD_BYTES
    subjects = msgpack.unpackb(content[position : position + subjects_bytes])
    position += subjects_bytes + -subjects_bytes % 8
    position += maps_bytes + -maps_bytes % 8
    codes: tuple[int, ...] = (0,) * count
    column = 4 * count + -(4 * count) % 8
    if flags & SUBJECT_CODES:
        codes = struct.unpack_from(f"<{count}i", content, position)
        position += column
    if flags & FIELD_CODES:
        position += column
    if flags & EXPIRY:
        position += 8 * count
    deltas: Any = range(count)
    if flags & DELTAS:
        deltas = struct.unpack_from(f"<{count}I", content, position)
        position += column
    times: tuple[int, ...] = (append_time_ms,) * count
    if flags & APPEND_TIMES:
        times = struct.unpack_from(f"<{count}q", content, position)
        position += 8 * count
    if position + raw_bytes + -raw_bytes % 8 != len(content):
        raise Unreadable(f"sections end at {position + raw_bytes} of {len(content)}")
    ends = struct.unpack_from(f"<{count + 1}i", content, position)
    blob = position + 4 * (count + 1)
    return tuple(
        Row(
            base + deltas[row],
            # Only the broker's own notices have no serial.
            SERIAL.unpack_from(content, blob + ends[row])[0] if ends[row + 1] > ends[row] else 0,
            subjects[codes[row]],
            ends[row + 1] - ends[row],
            times[row],
        )
        for row in range(count)
    )


def content_serials(content: bytes) -> list[int]:
    """Return serials of the records in a content that a client publishes."""
    head = CONTENT_HEAD.unpack_from(content, 0)
    return [row.serial for row in _decode_content(content, 0, head[5], head[3])]
