"""The files of a ring: which are segments, which are ours otherwise, which are not.

Owns the reading of names and headers. The rule: only names, headers and indexes are
looked at here, nothing is changed, and what is not understood is left alone and named.
No file stays open: a ring may have more segments than a process may have files. Source:
FORMAT.md, sections 1, 2 and 7.
"""

from __future__ import annotations

from typing import Final

from malamute_py.journal.errors import NotAFile
from malamute_py.journal.index import read_index
from malamute_py.journal.layout import (
    ACTIVE_FILE,
    CLOSED_FILE,
    FAILED_FILE,
    LOCK_FILE,
    MANIFEST_FILE,
    RING_FILE,
    TEMPORARIES,
    TRIMS_FILE,
    index_name,
    index_number,
    read_segment_header,
    segment_number,
)
from malamute_py.journal.segment import Segment
from malamute_py.journal.storage import Storage, read_file
from malamute_py.journal.types import SEGMENT_HEADER_BYTES, Unknown

_OWN_FILES: Final = frozenset(
    [RING_FILE, CLOSED_FILE, ACTIVE_FILE, FAILED_FILE, TRIMS_FILE, LOCK_FILE, MANIFEST_FILE]
)


class Listing:
    """One look at a ring's directory."""

    def __init__(self, storage: Storage, ring: bytes, segment_bytes: int) -> None:
        """ring: the uuid that segments and indexes must have."""
        self.segments: list[Segment] = []
        """Segments of this ring, by number."""
        self.headless: set[int] = set()
        """Numbers of segments whose header cannot be read."""
        self.stale: set[int] = set()
        """Numbers of segments with an older number in their header."""
        self.short: dict[int, int] = {}
        """Number -> bytes of segments whose file was cut off."""
        self.indexed: set[int] = set()
        """Numbers of segments with a good index file."""
        self.unknown: list[Unknown] = []
        """Entries that are left alone, and why."""
        self.temporaries: list[str] = []
        """Files that an interrupted write has left."""
        self.orphans: list[str] = []
        """Index files without their segment, or unreadable."""
        self._storage = storage
        self._ring = ring
        self._segment_bytes = segment_bytes

    def classify(self) -> None:
        """Sort everything in the directory into the lists above, by names, sizes and headers."""
        indexes: dict[int, str] = {}
        strangers = self._storage.strangers()
        for name, kind in strangers.items():
            if name not in TEMPORARIES:
                self._leave(name, f"is {kind} and no file")
        for name in self._storage.children():
            self._leave(name, "is a directory and no file")
        for name in self._storage.names():
            if name in strangers and name not in TEMPORARIES:
                continue  # no file, and named above; under a temporary's name it is removed
            number = segment_number(name)
            if number is not None:
                self._classify_segment(name, number)
            elif index_number(name) is not None:
                indexes[index_number(name) or 0] = name
            elif name in TEMPORARIES:
                self.temporaries.append(name)
            elif name not in _OWN_FILES:
                self.unknown.append(Unknown(name, "not a file of a ring; it was left alone"))
        self.segments.sort(key=lambda segment: segment.number)
        known = {segment.number for segment in self.segments}
        self.orphans = [name for number, name in indexes.items() if number not in known]

    def _classify_segment(self, name: str, number: int) -> None:
        """Enter a file with a segment's name by its size and header, or leave it alone, named.

        Without a good header it may be a spare of which the preparation was interrupted, or be
        damaged: its batches tell. A header with a lower number is left from the file's last use.
        """
        try:
            file = self._storage.open(name)
            head = self._storage.read(file, 0, SEGMENT_HEADER_BYTES)
        except OSError as error:
            self._leave(name, f"cannot be read ({error})")
            return
        header = read_segment_header(head)
        if file.size != self._segment_bytes:
            if file.size > self._segment_bytes or (header is None and any(head)):
                self._leave(name, f"has {file.size} bytes, a segment has {self._segment_bytes}")
                return
            # A segment has its whole size from its first moment: this one was cut off.
            self.short[number] = file.size
        segment = Segment(number, self._segment_bytes, None)
        if header is None:
            self.headless.add(number)
        elif header.ring != self._ring:
            self._leave(name, f"belongs to another ring ({header.ring.hex()})")
            return
        elif header.segment_bytes != self._segment_bytes or header.number > number:
            self._leave(name, f"is segment {header.number} by its header")
            return
        elif header.number < number:
            self.stale.add(number)
        else:
            segment.header_lsn = header.synced_lsn
        self.segments.append(segment)

    def _leave(self, name: str, reason: str) -> None:
        """Note an entry that is left alone, and why."""
        self.unknown.append(Unknown(name, reason + "; it was left alone"))

    def load_indexes(self) -> None:
        """Take what finished segments hold from their index files, where these are good.

        A start need not read these segments. The last one is still being written, and has none.
        """
        for segment in self.segments[:-1]:
            name = index_name(segment.number)
            try:
                data = read_file(self._storage, name)
            except NotAFile:
                continue  # named already; what stands there is not ours to remove
            except OSError:
                data = b""  # no good index: an orphan, as one that is damaged
            if data is None or segment.number in self.headless | self.stale:
                continue
            index = read_index(data, self._ring, segment.number)
            if index is None:
                self.orphans.append(name)  # damaged: it is removed and made anew
                continue
            if segment.number in self.short:
                # What is left of it is read; that all of it was durable, the index proves.
                segment.header_lsn = max(segment.header_lsn, segment.base_lsn + self._segment_bytes)
                self.orphans.append(name)
                continue
            segment.spans = index.spans
            segment.expires_at_ms = index.expires_at_ms
            segment.last_epoch = index.last_epoch
            segment.last_time_ms = index.last_time_ms
            self.indexed.add(segment.number)

    def proven_lsn(self) -> int:
        """Return the LSN before which all was durable, by segment headers and index files.

        What cannot be read before it is damage, and not the end of the log.
        """
        floor = 0
        for segment in self.segments:
            floor = max(floor, segment.header_lsn)  # synced when the segment was prepared
            if segment.number in self.indexed:
                # An index file is written only once its whole segment was synced.
                floor = max(floor, segment.base_lsn + self._segment_bytes)
        return floor
