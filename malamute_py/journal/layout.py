"""Layout of the ring's own files: names, segment headers, markers, control contents.

Owns the bytes that are the journal's and not the protocol's. The rule: every structure
carries a magic, a version and a CRC32C, and reading one returns None rather than
guess. Source: FORMAT.md, sections 2 to 5.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import google_crc32c
import msgspec

from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_protocol.errors import BatchError
from malamute_protocol.limits import Limits
from malamute_py.journal.types import SEGMENT_HEADER_BYTES, Buffer

RING_FILE: Final = "ring"
CLOSED_FILE: Final = "closed"
ACTIVE_FILE: Final = "active"
FAILED_FILE: Final = "failed"
TRIMS_FILE: Final = "trims"
LOCK_FILE: Final = "lock"
MANIFEST_FILE: Final = "manifest"
"""Name of the manifest where a ring is alone in its directory, without a data directory."""
PREPARING_FILE: Final = "preparing.tmp"
REWRITE_FILE: Final = "rewrite.tmp"
_SMALL_FILES: Final = (CLOSED_FILE, ACTIVE_FILE, FAILED_FILE, TRIMS_FILE, MANIFEST_FILE)
TEMPORARIES: Final = frozenset(
    [PREPARING_FILE, REWRITE_FILE, "index.tmp"]
    + [f"{name}.tmp" for name in (RING_FILE, *_SMALL_FILES)]
)
"""Names of files that are never the only copy of anything: opening removes leftovers."""
BESIDE_SEGMENTS: Final = TEMPORARIES.union(_SMALL_FILES)
"""Names of a ring's files beside RING_FILE, segments and indexes."""

_CONTROL_LIMITS: Final = Limits(
    record_bytes_max=1 << 31, batch_bytes_max=1 << 31, batch_records_max=1 << 31
)
"""Control batches are the journal's own: a segment's size bounds them."""

_SEGMENT_NAME = re.compile(r"(\d{12})\.seg")
_INDEX_NAME = re.compile(r"(\d{12})\.idx")

_SEGMENT_MAGIC: Final = 0x31534C4D  # "MLS1"
_SEGMENT = struct.Struct("<IHHII16sQQQQ64x")
assert _SEGMENT.size == 128
_FILE_MAGIC: Final = 0x31464C4D  # "MLF1"
FILE_VERSION: Final = 1
"""Version of small files. A change of any file that earlier programs cannot read raises it: they
then refuse the directory by the version of its file `journal`."""
_FILE = struct.Struct("<IHHII")


def segment_name(number: int) -> str:
    """Name of a segment's file."""
    return f"{number:012d}.seg"


def index_name(number: int) -> str:
    """Name of the index file beside a segment."""
    return f"{number:012d}.idx"


def segment_number(name: str) -> int | None:
    """The number in a segment file's name; None for any other name."""
    match = _SEGMENT_NAME.fullmatch(name)
    return int(match[1]) if match else None


def index_number(name: str) -> int | None:
    """The number in an index file's name; None for any other name."""
    match = _INDEX_NAME.fullmatch(name)
    return int(match[1]) if match else None


class SegmentHeader(NamedTuple):
    """Header in the first bytes of a segment's file."""

    ring: bytes
    number: int
    epoch: int
    segment_bytes: int
    synced_lsn: int
    """LSN up to which the ring was known to be synced when the segment was prepared."""

    def pack(self) -> bytes:
        """Return the header as 4,096 bytes; all of its fields lie in the first sector."""
        # Its checksum, in bytes 8 to 11, is of all that follows it.
        body = _SEGMENT.pack(_SEGMENT_MAGIC, 1, _SEGMENT.size, 0, 0, *self)
        crc = google_crc32c.value(body[12:])
        return (body[:8] + struct.pack("<I", crc) + body[12:]).ljust(SEGMENT_HEADER_BYTES, b"\0")


def read_segment_header(data: bytes) -> SegmentHeader | None:
    """Return the header in a segment's first bytes; None when they are none, or damaged."""
    if len(data) < _SEGMENT.size:
        return None
    magic, version, size, crc, _, *rest = _SEGMENT.unpack_from(data)
    if magic != _SEGMENT_MAGIC or version != 1 or size != _SEGMENT.size:
        return None
    if google_crc32c.value(bytes(data[12 : _SEGMENT.size])) != crc:
        return None
    return SegmentHeader(*rest)


# --- small files --------------------------------------------------------------------


class RingMeta(msgspec.Struct, array_like=True):
    """The file `ring`."""

    uuid: bytes
    segment_bytes: int


class Closed(msgspec.Struct, array_like=True):
    """The file `closed`: everything before `end_lsn` was durable when it was written."""

    ring: bytes
    end_lsn: int
    epoch: int
    clean: bool
    """True: written by an orderly close, and the ring was not opened since."""


class Failed(msgspec.Struct, array_like=True):
    """The failed marker: what lies beyond `synced_lsn` cannot be trusted to be on disk."""

    ring: bytes
    synced_lsn: int
    end_lsn: int
    epoch: int
    reason: str


class Trims(msgspec.Struct, array_like=True):
    """The file `trims`: stream -> first offset, as limits and removals moved it."""

    ring: bytes
    first: dict[int, int]


class StreamRow(NamedTuple):
    """One stream in a snapshot."""

    next: int
    first: int
    epochs: Sequence[tuple[int, int]]


class Active(msgspec.Struct, array_like=True):
    """The file `active`: what a walk over the last segment of a closed ring would find."""

    ring: bytes
    number: int
    """Number of the segment."""
    end_lsn: int
    epoch: int
    """End and epoch as in the file `closed`, without which this file does not count."""
    last_lsn: int
    """LSN at which the ring's last batch begins."""
    streams: Mapping[int, StreamRow]
    """All streams of the ring, as in a snapshot."""
    index: bytes
    """An index file's bytes, of the segment up to the end."""


class SnapshotFacts(msgspec.Struct, array_like=True):
    """The journal's own part of a snapshot: its first record."""

    as_of_lsn: int
    """The bundle that the snapshot was written in begins here; the state is before it."""
    last_append_time_ms: int
    streams: Mapping[int, StreamRow]


def pack_file(record: msgspec.Struct) -> bytes:
    """A small file's bytes: magic, version, CRC, length, MessagePack."""
    body = msgspec.msgpack.encode(record)
    crc = google_crc32c.value(body)
    return _FILE.pack(_FILE_MAGIC, FILE_VERSION, _FILE.size, crc, len(body)) + body


def unpack_file(data: bytes, kind: type[Any]) -> Any:
    """Return the record of this type in a small file's bytes, as pack_file() wrote it.

    None: they are none, damaged, of another version or of another type.
    """
    if len(data) < _FILE.size:
        return None
    magic, version, head, crc, size = _FILE.unpack_from(data)
    body = data[head : head + size]
    if magic != _FILE_MAGIC or version != FILE_VERSION or len(body) != size:
        return None
    if google_crc32c.value(body) != crc:
        return None
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError:
        return None


def file_version(data: bytes) -> int | None:
    """The version that a small file says it has; None when it is not one."""
    if len(data) < _FILE.size:
        return None
    magic, version, _, _, _ = _FILE.unpack_from(data)
    return version if magic == _FILE_MAGIC else None


# --- contents of control batches -------------------------------------------------------


def control_content(bodies: Sequence[bytes]) -> tuple[bytes, int]:
    """(content, its CRC) of a control batch: one record a body, under the empty subject.

    An empty list becomes one empty record: a content has at least one.
    """
    content = encode(list(bodies) or [b""], subject="", limits=_CONTROL_LIMITS)
    return content, Content(content).head.content_crc


def control_bodies(content: Buffer) -> tuple[bytes, ...]:
    """The records of a control batch. Raises BatchError when they cannot be read."""
    bodies = Content(content).bodies(_CONTROL_LIMITS)
    if bodies.parts is not None:
        raise BatchError("bad_batch", "a control batch holds plain bodies")
    blob, offsets = bodies.blob, bodies.offsets.tolist()
    return tuple(bytes(blob[a:b]) for a, b in pairwise(offsets))
