"""The layout of a content's bytes: its head, its flags, and where its sections lie.

Owns the numbers of the format, and what can be read of a frame before it is known to be a content.
Source: SPEC.md, sections 5.2 to 5.6.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

from malamute_protocol.errors import BatchError
from malamute_protocol.header import TABLE_BYTES_MAX

CONTENT_MAGIC: Final = 0x31434C4D
CONTENT_VERSION: Final = 1
CONTENT_BYTES: Final = 128
"""Bytes of the head that this version writes."""

# Flags of a head. Each but TRANSACTION_CONTROL says that a section is there, or in which form.
CLIENT_TIME: Final = 1
EXPIRY: Final = 2
PROPERTIES_CONSTANT: Final = 4
PROPERTIES_DICTIONARY: Final = 8
PROPERTIES_COLUMN: Final = 16
OFFSET_DELTAS: Final = 32
TRANSACTION_CONTROL: Final = 64
SUBJECT_CODES: Final = 128
FIELD_CODES: Final = 256
APPEND_TIMES: Final = 512
CONTENT_FLAGS: Final = 1023

BODY_KINDS: Final[tuple[str, ...]] = ("blob", "list", "arrow")
"""Name of each body kind; its number is its index."""
BLOB, LIST, ARROW = range(3)

_FORMS: Final = "IHHIIIBBHQIIQQqqqIIIIIIII"
"""Form of each field of the head, in order, as struct has it."""
HEAD = struct.Struct(f"<{_FORMS}16x")
assert HEAD.size == CONTENT_BYTES
_TABLE_SIZES: Final = struct.Struct("<I4xI")
"""Bytes of the subjects and of the field maps, read from the head alone."""
_TABLE_SIZES_AT: Final = 80
_SCHEMA_ID: Final = struct.Struct("<I")
_SCHEMA_ID_AT: Final = 36
CRC_BYTES: Final = slice(8, 12)
"""Bytes of a content that have the checksum of all bytes after them; a stamp repeats it."""
_RESERVED: Final = slice(112, CONTENT_BYTES)
_ZEROS: Final = bytes(16)


class Head(NamedTuple):
    """The fixed head of a content, in the order of its bytes."""

    magic: int
    version: int
    head_bytes: int
    content_crc: int
    content_bytes: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not called here
    codec: int
    body_kind: int
    flags: int
    producer_id: int
    producer_epoch: int
    schema_id: int
    first_sequence: int
    transaction_id: int
    earliest_expiry_ms: int
    client_time_min_ms: int
    client_time_max_ms: int
    subjects_bytes: int
    subjects_count: int
    fieldmaps_bytes: int
    fieldmaps_count: int
    properties_bytes: int
    body_bytes: int
    body_raw_bytes: int
    parts_count: int


AT: Final = Head._make(struct.calcsize(f"<{_FORMS[:before]}") for before in range(len(_FORMS)))
"""Position of each field of the head in a content, for errors and for what is set afterwards."""


class Sections(NamedTuple):
    """Position of each section in the content; -1: absent."""

    subjects: int
    fieldmaps: int
    subject_codes: int
    field_codes: int
    client_time: int
    expiry: int
    properties: int
    deltas: int
    append_times: int
    body: int
    end: int


def check_reserved(head: Head, view: memoryview) -> None:
    """Raise BatchError where reserved parts of a head are in use; a broker that takes a batch asks.

    Readers do not: batches that earlier brokers stored may have them in use.
    """
    if head.schema_id and head.body_kind != ARROW:
        raise BatchError(
            "unsupported", "a schema id without an Arrow body is reserved", AT.schema_id
        )
    if bytes(view[_RESERVED]) != _ZEROS:
        raise BatchError("unsupported", "the last bytes of the head are reserved", _RESERVED.start)


def has_large_table(frame: Any, table_bytes: int = TABLE_BYTES_MAX) -> bool:
    """Whether a frame, if it is a content, has a header table of more than some bytes.

    A broker asks before the frame is known to be a content: only its length is relied on. One with
    more than TABLE_BYTES_MAX is to be read in steps by a loop.
    """
    if len(frame) <= CONTENT_BYTES + table_bytes:
        return False
    subjects_bytes, fieldmaps_bytes = _TABLE_SIZES.unpack_from(frame, _TABLE_SIZES_AT)
    return bool(subjects_bytes + fieldmaps_bytes > table_bytes)


def claimed_schema(frame: Any) -> int:
    """Return the schema id that a frame states if it is a content; 0: it is too short for one.

    A broker asks before the content is checked, to know whether the batch needs a full validation.
    """
    if len(frame) < CONTENT_BYTES:
        return 0
    return int(_SCHEMA_ID.unpack_from(frame, _SCHEMA_ID_AT)[0])
