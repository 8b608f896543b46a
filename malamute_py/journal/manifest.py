"""The manifest of a ring: which segments should be there, and how far its streams had come.

Owns the file of two slots that lies apart from the ring it speaks of. The rule: it is written
so that a crash between any two of its writes and the ring's own is no false alarm: a segment is
in it before append() may use that segment, and out of it before the file is touched; one of the
two slots is always whole, and a write takes no new space. Source: FORMAT.md, section 13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from malamute_py.journal.errors import DiskFull, NotAFile
from malamute_py.journal.layout import pack_file, unpack_file
from malamute_py.journal.storage import Storage, read_file

SLOT_BYTES: Final = 4096
STREAMS_MAX: Final = 150
"""A slot has room for so many streams. In a ring of more, such as ring main with all of its
streams, the snapshot at each segment's start has to do."""
_OFFSETS_PER_BYTE: Final = 1 << 13
"""More records than a byte of a ring can hold: a content of a million records without bodies
takes more than 128 bytes."""


class Expected(msgspec.Struct, array_like=True, frozen=True):
    """One slot of the file."""

    ring: bytes
    segment_bytes: int
    sequence: int
    """Number of this write: of two slots the one with the higher number counts."""
    epoch: int
    first: int
    """Number of the oldest segment that holds, or may hold, a batch."""
    last: int
    """Number of the newest segment that append() may have used; `first` - 1: none."""
    end_lsn: int
    """The ring's end when this slot was written."""
    clean: bool
    """The ring was closed in order and not opened since: it ends at end_lsn."""
    streams: dict[int, tuple[int, int]] | None
    """Stream -> (next offset, first offset) at end_lsn; None: too many for a slot."""
    beyond: dict[int, int] = {}
    """Stream -> offset before which none is given again, whatever the ring says: a repair, or
    damage, left nothing in the ring that tells."""

    def has(self, number: int) -> bool:
        """Whether a segment should be there and may hold something.

        After an orderly close a segment beyond the end is a spare, which holds nothing.
        """
        used = not self.clean or number * self.segment_bytes < self.end_lsn
        return used and self.first <= number <= self.last


def skipped(doubtful_bytes: int) -> int:
    """How many offsets to leave out for so many bytes of which nothing is known.

    Whatever lay in them had fewer records, so that no offset is given twice.
    """
    return doubtful_bytes * _OFFSETS_PER_BYTE


class Manifest:
    """The file of one ring; written by one thread at a time."""

    def __init__(self, storage: Storage, name: str) -> None:
        """storage: where the file lies, on another place than the ring's own when there is one."""
        self._storage = storage
        self._name = name
        self._slot = 0
        self.expected = self._read()
        """Facts in the file's newest whole slot; None: there is no file, or no whole slot in it."""
        self._sequence = 0 if self.expected is None else self.expected.sequence
        self._new = self.expected is None
        """The next write makes the file anew: a damaged file is not to be trusted again."""

    def _read(self) -> Expected | None:
        """Return the newer of the file's two slots, or the one that is whole; None: neither is.

        A write goes over the older slot: a crash amid it leaves the newer one whole.
        """
        try:
            data = read_file(self._storage, self._name)
        except OSError:
            return None  # a lost segment may go unnoticed until the next write makes it anew
        if data is None:
            return None
        found: Expected | None = None
        for slot in range(2):
            one: Expected | None = unpack_file(data[slot * SLOT_BYTES :][:SLOT_BYTES], Expected)
            if one is not None and (found is None or one.sequence > found.sequence):
                found, self._slot = one, slot
        return found

    def write(
        self,
        ring: bytes,
        segment_bytes: int,
        epoch: int,
        first: int,
        last: int,
        end_lsn: int,
        streams: Mapping[int, tuple[int, int]] | None,
        *,
        clean: bool = False,
        beyond: Mapping[int, int] | None = None,
    ) -> None:
        """Write durably what there should be, so that a start notices what is missing.

        Called at an opening, at a close, and before a segment is taken up or given up. first, last,
        end_lsn: the segments, and where the log ends. streams: their offsets, left out if the slot
        has no room: the snapshots have them. clean: the ring was closed in order, so that all
        before end_lsn is durable. beyond: offsets that are not given again; None keeps those of the
        slot before. Raises DiskFull, also where a slot has no room for them; OSError.
        """
        rows = None if streams is None else dict(streams)
        if beyond is None:
            beyond = {} if self.expected is None else self.expected.beyond
        self._sequence += 1
        wanted = Expected(
            ring, segment_bytes, self._sequence, epoch, first, last, end_lsn, clean, rows,
            dict(beyond),
        )  # fmt: skip
        data = pack_file(wanted)
        if len(data) > SLOT_BYTES:
            wanted = msgspec.structs.replace(wanted, streams=None)
            data = pack_file(wanted)
        if len(data) > SLOT_BYTES:
            raise DiskFull(f"the manifest {self._name} has no room for {len(beyond)} streams")
        self._put(data.ljust(SLOT_BYTES, b"\0"))
        self.expected = wanted

    def _put(self, data: bytes) -> None:
        """Write the older slot in place and sync it, or make the file where none is usable."""
        storage = self._storage
        try:
            # A damaged file is replaced, and not written in place.
            file = None if self._new else storage.open(self._name)
        except (FileNotFoundError, NotAFile):
            file = None
        if file is not None and file.size == 2 * SLOT_BYTES:
            # In place, so that a full disk does not refuse it: the other slot stays whole.
            slot = 1 - self._slot  # of two slots the other one
            storage.write(file, slot * SLOT_BYTES, [data])
            storage.sync(file)
            self._slot = slot
            return
        temporary = f"{self._name}.tmp"
        file = storage.create(temporary, 2 * SLOT_BYTES)
        storage.write(file, 0, [data])
        storage.sync(file)
        storage.rename(temporary, self._name)
        storage.sync_directory()
        self._new, self._slot = False, 0
