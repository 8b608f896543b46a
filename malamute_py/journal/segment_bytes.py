"""The bytes of a segment as a recovery reads them: whole, whatever of it can be read.

Owns that a bad sector or a file that was cut off ends no recovery.
"""

from __future__ import annotations

from malamute_py.journal.segment import Segment
from malamute_py.journal.storage import File, Storage, read_around
from malamute_py.journal.types import Unknown

_PIECE = 4096


class SegmentBytes:
    """The bytes of segments, of which those of the last one asked for are kept."""

    def __init__(self, storage: Storage, segment_bytes: int, unknown: list[Unknown]) -> None:
        """unknown: gets the pieces that cannot be read."""
        self.kept: tuple[int, memoryview] | None = None
        """Number and bytes of a segment; None: none is kept."""
        self._unknown = unknown
        self._storage = storage
        self._segment_bytes = segment_bytes

    def of(self, segment: Segment) -> memoryview:
        """The whole segment; what cannot be read is zeros, and so fails its check."""
        if self.kept is None or self.kept[0] != segment.number:
            file = segment.file or self._storage.open(segment.name)
            self.kept = (segment.number, memoryview(self._read(file)))
        return self.kept[1]

    def _read(self, file: File) -> bytes | bytearray:
        """Return a segment's bytes; zeros stand where they cannot be read."""
        size = self._segment_bytes
        if file.size < size:
            return read_around(self._storage, file, 0, file.size).ljust(size, b"\0")
        try:
            # By read, not by mapping: a bad sector is an OSError here and would be
            # the death of the process (SIGBUS) under a mapping.
            return self._storage.read(file, 0, size)
        except OSError:
            data = bytearray(size)
        for position in range(0, size, _PIECE):
            try:
                piece = self._storage.read(file, position, _PIECE)
            except OSError as error:
                self._unknown.append(
                    Unknown(file.name, f"bytes from {position} cannot be read ({error})")
                )
            else:
                data[position : position + len(piece)] = piece
        return data
