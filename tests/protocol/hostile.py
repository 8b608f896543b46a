"""Contents that keep the format's frame and have anything inside: right CRC, right sections.

A peer can send such a content, which no damage on the way would make.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import google_crc32c
import msgspec
import pytest

from malamute_protocol.content_layout import (
    APPEND_TIMES,
    CLIENT_TIME,
    CONTENT_BYTES,
    CONTENT_MAGIC,
    EXPIRY,
    FIELD_CODES,
    HEAD,
    OFFSET_DELTAS,
    SUBJECT_CODES,
)
from malamute_protocol.encode import encode

RESERVED = pytest.mark.parametrize("at", [36, 112, 127], ids=["schema", "first", "last"])
"""Positions in a head that a client leaves at 0, and earlier brokers have stored with others."""
ARRAY_32 = b"\xdd"
MAP_32 = b"\xdf"


def claim(count: int, kind: bytes = ARRAY_32) -> bytes:
    """The beginning of a MessagePack array or map that says how long it is."""
    return kind + count.to_bytes(4, "big")


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def ints(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def longs(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def with_reserved(at: int) -> bytes:
    """Two records whose head has a byte other than 0 at a position, under the right CRC."""
    data = bytearray(encode([b"a", b"b"], subject="s"))
    data[at] = 1
    data[8:12] = google_crc32c.value(bytes(data[12:])).to_bytes(4, "little")
    return bytes(data)


def craft(
    count: int = 1,
    *,
    subjects: bytes = packed(["s"]),
    subjects_count: int = 1,
    fieldmaps: bytes = b"",
    fieldmaps_count: int = 0,
    subject_codes: Sequence[int] | None = None,
    field_codes: Sequence[int] | None = None,
    client_times: Sequence[int] | None = None,
    client_range: tuple[int, int] = (0, 0),
    expiries: Sequence[int] | None = None,
    earliest_ms: int = 0,
    properties: tuple[int, bytes] | None = None,
    deltas: Sequence[int] | None = None,
    append_times: Sequence[int] | None = None,
    body: bytes | None = None,
    body_raw: int = -1,
    codec: int = 0,
    body_kind: int = 0,
    parts_count: int = 0,
    **head: int,
) -> bytes:
    """A content of these sections, as they are."""
    if body is None:
        body = ints(range(count + 1)) + b"x" * count
    flags = head.pop("flags", 0)
    sections = [subjects, fieldmaps]
    for flag, column, pack in (
        (SUBJECT_CODES, subject_codes, ints),
        (FIELD_CODES, field_codes, ints),
        (CLIENT_TIME, client_times, longs),
        (EXPIRY, expiries, longs),
    ):
        if column is not None:
            flags |= flag
            sections.append(pack(column))
    if properties is not None:
        flags |= properties[0]
        sections.append(properties[1])
    if deltas is not None:
        flags |= OFFSET_DELTAS
        sections.append(ints(deltas))
    if append_times is not None:
        flags |= APPEND_TIMES
        sections.append(longs(append_times))
    data = b"".join(section + bytes(-len(section) & 7) for section in [*sections, body])
    rest = HEAD.pack(
        CONTENT_MAGIC, 1, CONTENT_BYTES, 0, CONTENT_BYTES + len(data), count, codec, body_kind,
        flags, head.pop("producer_id", 0), 0, 0, head.pop("first_sequence", 0), 0, earliest_ms,
        *client_range, len(subjects), subjects_count, len(fieldmaps), fieldmaps_count,
        0 if properties is None else len(properties[1]), len(body),
        len(body) if body_raw < 0 else body_raw, parts_count,
    )[12:]  # fmt: skip
    assert not head, f"unknown: {head}"
    crc = google_crc32c.extend(google_crc32c.value(rest), data)
    return struct.pack("<IHHI", CONTENT_MAGIC, 1, CONTENT_BYTES, crc) + rest + data
