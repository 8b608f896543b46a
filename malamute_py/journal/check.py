"""Reading batches back: is what lies at a position a batch, and what does it say?

Owns the check of one position and the search for later batches. The rule: a batch is
valid only where its LSN equals its position, within its segment, with both checksums
good; whether it follows on its predecessor is recovery's to decide. Source: FORMAT.md,
sections 3 and 7.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import google_crc32c
import numpy as np

from malamute_protocol.content import Content
from malamute_protocol.content_layout import (
    CLIENT_TIME,
    CONTENT_MAGIC,
    CONTENT_VERSION,
    EXPIRY,
    HEAD,
    Head,
)
from malamute_protocol.errors import BatchError
from malamute_protocol.header import HeaderTable
from malamute_protocol.stamp import PADDING, STAMP_BYTES, STAMP_MAGIC, Stamp, stamp_here
from malamute_py.journal.index import NEVER, NO_CLIENT_TIME
from malamute_py.journal.types import Buffer

_PROBE = 0x0123_4567_89AB_CDEF
_LSN_AT: Final = (
    Stamp(0, _PROBE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0).pack().index(struct.pack("<Q", _PROBE))
)
"""Place of the LSN in a stamp: found out, so that the protocol alone owns the layout."""
_SEARCH_WORDS = 1 << 19
"""Words of 8 bytes that are compared in one step: 4 MiB, which bounds the memory for it."""
CRC_FROM: Final = 12
"""Byte of a content from which on its checksum covers it (SPEC.md, section 5.2)."""


_COPIED_BYTES: Final = 2048
"""A content below this is copied for its checksum: cheaper than an array over it."""
_HEAD_START: Final = struct.Struct(HEAD.format[:7]).unpack_from
assert Head._fields[:6] == (
    "magic", "version", "head_bytes", "content_crc", "content_bytes", "count",
)  # fmt: skip


class FoundBatch(NamedTuple):
    """A batch at a position of a segment's bytes."""

    stamp: Stamp
    position: int
    """Position in the segment."""
    content_good: bool
    """False: the stamp is right and the content damaged; nothing of it may be served."""
    reason: str = ""

    @property
    def end(self) -> int:
        """LSN after it."""
        return self.stamp.lsn + self.stamp.size


def check(data: memoryview, base_lsn: int, position: int) -> FoundBatch | str:
    """Return the batch at a position of one segment's bytes, or why there is none.

    For recoveries and readers. Only checked in itself: whether it goes on with the log is its
    caller's to decide. data: the whole segment, or a part of it. base_lsn: the LSN of its first
    byte.
    """
    stamp = stamp_here(data, position, base_lsn + position)
    if stamp is None:
        # No usual stamp is here: a longer one of a later version, or a fault with its words.
        found = stamp_or_fault(data, position, base_lsn + position)
        if isinstance(found, str):
            return found
        stamp = found
    if stamp.size > len(data) - position:
        return f"a batch of {stamp.size} bytes that would leave its segment"
    if stamp.bundle_lsn > stamp.lsn:
        return "a batch before the beginning of its bundle"
    if stamp.synced_lsn > stamp.lsn:
        return "a batch that was synced before it was written"
    if stamp.control_kind == PADDING:
        return FoundBatch(stamp, position, True)  # its bytes mean nothing and have no checksum
    wrong = content_fault(data, position + stamp.stamp_bytes, position + stamp.size, stamp)
    return FoundBatch(stamp, position, not wrong, wrong)


def stamp_or_fault(data: Any, position: int, lsn: int) -> Stamp | str:
    """Return a good stamp that says this LSN, also a longer one of a later version; or the fault.

    The fault is a sentence for a person.
    """
    try:
        stamp = Stamp.unpack(data, position)
    except BatchError as error:
        return error.reason
    return stamp if stamp.lsn == lsn else f"a batch of position {stamp.lsn} where {lsn} belongs"


def content_fault(data: Any, begin: int, end: int, stamp: Stamp) -> str:
    """Return what is wrong with the content in data[begin:end]; "" when nothing is.

    stamp: that of its batch, which names the content's checksum, size and count.
    """
    if end - begin < HEAD.size:
        return "a content without room for its head"
    magic, version, head_bytes, crc, content_bytes, count = _HEAD_START(data, begin)
    if magic != CONTENT_MAGIC or crc != stamp.content_crc:
        return "the content's head does not fit its stamp"
    if version != CONTENT_VERSION:
        return f"the content's version {version} is not known"
    covered: Any
    if end - begin < _COPIED_BYTES:
        covered = bytes(data[begin + CRC_FROM : end])
    else:
        # An array is taken without the copy that a memoryview would need here.
        covered = np.frombuffer(data, np.uint8, end - begin - CRC_FROM, begin + CRC_FROM)
    if google_crc32c.value(covered) != crc:
        return "the content's checksum does not fit"
    if content_bytes != end - begin or count != stamp.count:
        return "the content's size or count is not its stamp's"
    if head_bytes != HEAD.size and not _fills(data, begin, end):
        # No checksum covers this field; but a wrong one moves every section.
        return "the content's head has a length that its sections do not bear out"
    return ""


def _fills(data: Any, begin: int, end: int) -> bool:
    """Whether the sections of the content in data[begin:end] end where it ends.

    Asked of a head of unusual length, from which the places of the sections follow.
    """
    try:
        return Content(memoryview(data)[begin:end]).sections.end == end - begin
    except BatchError:
        return False


def is_begun(data: memoryview, base_lsn: int, position: int) -> bool:
    """Whether a stamp of this position was begun here: its magic and LSN are, whatever follows.

    For those who met no good batch here. It is so where a write was cut off, or where a batch is
    damaged; old bytes of the file say another LSN.
    """
    magic = int.from_bytes(data[position : position + 4], "little")
    lsn = int.from_bytes(data[position + _LSN_AT : position + _LSN_AT + 8], "little")
    return magic == STAMP_MAGIC and lsn == base_lsn + position


def candidates(data: memoryview, base_lsn: int, position: int) -> Iterator[int]:
    """Yield the positions after this one at which a batch may begin: they have their LSN in place.

    For recoveries and readers that meet damage: where to go on. Each place is still to be checked.
    """
    # Batches begin at multiples of 8: all words of 8 bytes are compared at once, each with the LSN
    # that the stamp would have which it is a word of.
    first = (position + 8) & ~7  # the next multiple of 8
    words = np.frombuffer(data, "<u8", len(data) // 8)
    lag = _LSN_AT // 8
    at = first // 8
    last = (len(data) - STAMP_BYTES) // 8
    while at <= last:
        stop = min(at + _SEARCH_WORDS, last + 1)
        own = np.arange(base_lsn + at * 8, base_lsn + stop * 8, 8, dtype=np.uint64)
        hits = np.flatnonzero(words[at + lag : stop + lag] == own)
        for hit in hits.tolist():
            place = (at + hit) * 8
            if int(words[place // 8]) & 0xFFFFFFFF == STAMP_MAGIC:
                yield place
        at = stop


class Facts(NamedTuple):
    """Facts about a data batch's content that the index keeps."""

    client: tuple[int, int]
    expires_at_ms: int
    """Latest expiry, or NEVER."""
    earliest_expiry_ms: int
    """0: no record expires."""


_FLAGS: Final = Head._fields.index("flags")
_CLIENT_MIN: Final = Head._fields.index("client_time_min_ms")
_CLIENT_MAX: Final = Head._fields.index("client_time_max_ms")
_PRODUCER: Final = Head._fields.index("producer_id")
_EARLIEST_EXPIRY: Final = Head._fields.index("earliest_expiry_ms")
_PLAIN = Facts(NO_CLIENT_TIME, NEVER, 0)


def content_facts(content: Buffer) -> Facts:
    """Return client time range, latest and earliest expiry of a data batch's content, unchecked.

    For each batch that is indexed.
    """
    head = HEAD.unpack_from(content)
    flags = head[_FLAGS]
    if not flags & (CLIENT_TIME | EXPIRY):
        return _PLAIN  # no record has a client time or expires
    client, expires = NO_CLIENT_TIME, NEVER
    if flags & CLIENT_TIME:
        client = (head[_CLIENT_MIN], head[_CLIENT_MAX])
    if flags & EXPIRY:
        try:
            column = Content(content).expiries
        except BatchError:
            column = None
        # 0 stands for a record that does not expire: then the batch is never as good as empty.
        if column is not None and len(column) and int(column.min()) > 0:
            expires = int(column.max())
    return Facts(client, expires, head[_EARLIEST_EXPIRY])


def producer_head(content: Buffer) -> Head | None:
    """The head of a content that names a producer; None for any other.

    For a start, which learns from it what each producer sent last. No checksum is looked at.
    """
    head = HEAD.unpack_from(content)
    return Head._make(head) if head[_PRODUCER] else None


def header_table(content: Buffer) -> HeaderTable | None:
    """Return the content's distinct headers, for the index; None when they cannot be read."""
    try:
        return Content(content).table
    except BatchError:
        return None
