"""Following a ring by position: whole batches of a range, from files that another writes.

Owns the read by LSN range for whoever keeps up with a ring: a checkpoint in a process of
its own, a replica, the broker itself at its start. The rule: nothing is written and
nothing locked, a range is read only up to where its reader was told that it is synced,
every batch passed over has its stamp checked, and what is not there any more is raised by
name, never left out. A segment may be retired and its file used again under a read: its
batches then bear other positions, which is how that is known. Source: FORMAT.md, sections
3 and 8; DESIGN.md, section 9.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import google_crc32c

from malamute_protocol.stamp import (
    PADDING,
    STAMP_BYTES,
    STAMP_MAGIC,
    STAMP_VERSION,
    Stamp,
)
from malamute_py.journal.check import Found, candidates, check
from malamute_py.journal.errors import FollowLost, JournalCorrupt
from malamute_py.journal.layout import (
    RING_FILE,
    RingMeta,
    read_segment_header,
    segment_name,
    segment_number,
)
from malamute_py.journal.marks import read_meta
from malamute_py.journal.storage import File, Storage, read_around
from malamute_py.journal.types import SEGMENT_HEADER_BYTES

Wanted: TypeAlias = Callable[[Stamp], bool]
"""Whether the content of a batch is asked for; paddings are never shown to it."""

_PIECE_BYTES: Final = 1 << 20

_STAMP = struct.Struct("<IHHIIQQQQQqIIIIHHIQ")
assert _STAMP.size == STAMP_BYTES
_CRC_FROM: Final = 12


class Follower:
    """Reads one ring's files; see the module. One thread at a time.

    For one life of the writer: when that is opened again, make a new one, as recovery may
    have put new files in the place of old ones.
    """

    def __init__(
        self, storage: Storage, meta: RingMeta | None = None, *, piece_bytes: int = _PIECE_BYTES
    ) -> None:
        """storage: the ring's directory, which may be open for reading only.

        meta: the ring's fixed facts; None reads them. piece_bytes: what one read brings.
        Raises JournalCorrupt: there is no ring, or its facts are damaged; OSError.
        """
        if meta is None:
            meta = read_meta(storage)
        if meta is None:
            raise JournalCorrupt(RING_FILE, f"there is no ring in {storage.describe()}")
        self._storage = storage
        self._ring = meta.uuid
        self._segment_bytes = meta.segment_bytes
        self._piece_bytes = max(piece_bytes, STAMP_BYTES)
        self.position = 0
        """The last read() came to here: every batch before it was given out or passed over."""

    def read(
        self, from_lsn: int, to_lsn: int, wanted: Wanted | None = None
    ) -> Iterator[tuple[Stamp, memoryview]]:
        """The batches in [from, to) in order, each with its content, both checksums good.

        from_lsn: where a batch begins, or the end of a bundle. to_lsn: at most what is
        synced; a batch that ends beyond it is not given out. wanted: None for all; the
        others are passed over by their size. A content is a view into a larger piece:
        copy what is kept. Raises FollowLost: `position` is how far it came; OSError.
        """
        size = self._segment_bytes
        self.position = from_lsn
        while self.position < to_lsn:
            number, at = divmod(self.position, size)
            if at < SEGMENT_HEADER_BYTES:
                self.position = number * size + SEGMENT_HEADER_BYTES
            elif size - at < STAMP_BYTES:
                self.position = (number + 1) * size
            else:
                yield from self._read_segment(number, to_lsn, wanted)

    def _read_segment(
        self, number: int, to_lsn: int, wanted: Wanted | None
    ) -> Iterator[tuple[Stamp, memoryview]]:
        """Read from the position on; it ends at the segment's end, or at to_lsn."""
        # Opened for each call: what stands under the name may be another file next time.
        file = self._open(number, to_lsn)
        base = number * self._segment_bytes
        stop = min(to_lsn - base, self._segment_bytes)
        least = STAMP_BYTES
        while True:
            at = self.position - base
            if stop - at < STAMP_BYTES:
                self.position = base + stop
                return
            data = self._read(file, at, min(max(self._piece_bytes, least), stop - at))
            least = yield from self._batches(data, stop - at, wanted)
            if least < 0:
                self._explain(number, to_lsn)
                least = STAMP_BYTES

    def _batches(
        self, data: bytes, room: int, wanted: Wanted | None
    ) -> Iterator[tuple[Stamp, memoryview]]:
        """Go through one piece, which begins at the position.

        room: bytes from its beginning to the end of the segment, or to to_lsn.
        Returns how many bytes are needed to go on, or -1: there is no good batch.
        """
        crc_of, unpack, make = google_crc32c.value, _STAMP.unpack_from, Stamp._make
        view = memoryview(data)
        begin = self.position
        at, last = 0, len(data) - STAMP_BYTES
        while at <= last:
            fields = unpack(data, at)
            ...
