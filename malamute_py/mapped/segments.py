"""The segment files of one ring, mapped for reading.

Owns the mappings, each of one life of one file, and the unpacked indexes, which all readers of the
process share. The rules: nothing is written and no file is locked; pages are asked of the kernel
before they are touched, so that a page that cannot be read is an error with a name instead of a
signal; a mapping tells whether its file was given to another segment, since the writer changes the
header before it overwrites a batch; an unpacked index is used for the very bytes that it was
unpacked from.

Words: a ring is a circle of segment files of one size, and an LSN a position in it, counted in
bytes ever written. A file lives several times: the broker renames the oldest one to be the next
segment. To bring in pages is to have the kernel read them before they are touched. Source:
FORMAT.md, sections 2 and 8.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Final

from malamute_protocol.stamp import STAMP_BYTES, Stamp, stamp_here
from malamute_py.journal.check import stamp_or_fault
from malamute_py.journal.errors import NotAFile
from malamute_py.journal.index import StoredIndex, read_index
from malamute_py.journal.layout import (
    CLOSED_FILE,
    Closed,
    RingMeta,
    index_name,
    index_number,
    read_segment_header,
    segment_name,
    segment_number,
)
from malamute_py.journal.marks import read_mark
from malamute_py.journal.storage import FileStorage, open_regular, read_sound
from malamute_py.journal.types import SEGMENT_HEADER_BYTES

MAPS_MAX: Final = 8
"""Mappings of one ring that are kept besides those of batches that the caller holds."""
INDEX_BYTES_MAX: Final = 16 << 20
"""Bytes of the index files whose contents the process keeps."""
_HEADER_BYTES: Final = 128
_PIECE_BYTES: Final = 256 << 10
"""Bytes that one call asks the kernel to bring in."""
_MADV_POPULATE_READ: Final = 22
"""madvise() brings in pages by it, from Linux 5.14 on. Python's mmap has no name for it."""
_UNREADABLE: Final = (errno.EFAULT, errno.EIO, 133)
"""Errors of madvise() for a page that cannot be read; 133 is EHWPOISON. Its other errors say
nothing about the page: the kernel is older, or has no memory for the moment."""


class SegmentMap:
    """One segment's file, mapped. It is unmapped when nothing refers to it or to its bytes."""

    def __init__(self, fd: int, path: Path, number: int, segment_bytes: int, ring: bytes) -> None:
        """fd: of the file, which has a segment's header at least; it may be closed afterwards.

        path: of the file. ring: the uuid.
        """
        facts = os.fstat(fd)
        self.ring = ring
        self.number = number
        self.base_lsn = number * segment_bytes
        self.inode = facts.st_ino
        self.size = min(facts.st_size, segment_bytes)
        """Bytes that are there: less than a segment's where the file was cut off."""
        # Never more than the file has: a read of a mapping beyond the end of its file is a signal
        # that ends the process. The broker allocates a segment before it has its name, and cuts
        # none off.
        self._path = path
        self._fd = -1
        """A descriptor for copy(), once it was called."""
        self._map = mmap.mmap(fd, self.size, mmap.MAP_SHARED, mmap.PROT_READ)
        self.view = memoryview(self._map)
        self._present = bytearray(-(-self.size // _PIECE_BYTES))
        """For each piece of the file 1 once it was brought in."""
        self._ready = self._ready_end = 0
        """One part of the file that is known to be brought in and readable: the quick answer."""
        self._unreadable: set[int] = set()
        """Pages that the disk cannot read."""
        self._headless = bool(self.unreadable(0, _HEADER_BYTES))
        """Whether the disk could not read the header: to touch its page would end the process."""
        self.header = bytes(_HEADER_BYTES) if self._headless else bytes(self.view[:_HEADER_BYTES])

    def intact(self) -> bool:
        """True while no batch of this life of the file has been overwritten."""
        if self._headless:
            # A header that can be read now was written since.
            return self._fails_to_load(0, mmap.PAGESIZE)
        # As bytes: views are compared item by item.
        return bytes(self.view[:_HEADER_BYTES]) == self.header

    def unreadable(self, begin: int, end: int) -> str:
        """Have the kernel bring in [begin, end); returns what is wrong with it, or "".

        Called before these bytes are touched: for a page that cannot be read, a signal would come.
        """
        if self._ready <= begin and end <= self._ready_end:
            return ""
        if end > self.size:
            return f"the file was cut off at {self.size} bytes"
        first, after = begin // _PIECE_BYTES, (end - 1) // _PIECE_BYTES + 1
        for piece in range(first, after):
            if not self._present[piece]:
                self._bring(piece)
        if not self._unreadable:
            # The part that is known grows if this one touches it, and else begins here.
            if not self._ready <= first * _PIECE_BYTES <= self._ready_end:
                self._ready = first * _PIECE_BYTES
            self._ready_end = min(after * _PIECE_BYTES, self.size)
        if self._unreadable:
            for page in range(begin // mmap.PAGESIZE, (end - 1) // mmap.PAGESIZE + 1):
                if page in self._unreadable:
                    return f"the disk cannot read byte {page * mmap.PAGESIZE}"
        return ""

    def unreadable_alone(self, begin: int, end: int) -> str:
        """Have the kernel bring in the pages of [begin, end), and none beside them.

        For small parts that lie far apart, as bodies of rare rows, of which whole pieces would be
        read in vain. Returns what is wrong with it, or "".
        """
        first, last = begin // _PIECE_BYTES, max(begin, end - 1) // _PIECE_BYTES
        if end > self.size or (self._present[first] and self._present[last]):
            return self.unreadable(begin, end)  # which has the answer without another call
        page = begin - begin % mmap.PAGESIZE
        if self._fails_to_load(page, max(end - page, 1)):
            return f"the disk cannot read a page of bytes {begin} to {end}"
        return ""

    def copy(self, begin: int, size: int) -> bytes:
        """Return a copy of a small part, shorter at the end of the file. Raises OSError."""
        # This takes a third of the time of bringing in a mapped page and copying from it.
        if self._fd < 0:
            self._open()
        return os.pread(self._fd, size, begin)

    def _open(self) -> None:
        """Open the mapped file once more, for copy(): the mapping needs no descriptor.

        Raises OSError: another file stands under its name.
        """
        fd = open_regular(self._path, os.O_RDONLY)
        if os.fstat(fd).st_ino != self.inode:
            os.close(fd)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self._path))
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    def _bring(self, piece: int) -> None:
        """Have the kernel bring in one piece of the file, and note unreadable pages."""
        begin = piece * _PIECE_BYTES
        size = min(_PIECE_BYTES, self.size - begin)
        self._present[piece] = 1
        if self._fails_to_load(begin, size):
            # Some page of the piece: each is tried alone.
            for at in range(begin, begin + size, mmap.PAGESIZE):
                if self._fails_to_load(at, mmap.PAGESIZE):
                    self._unreadable.add(at // mmap.PAGESIZE)

    def _fails_to_load(self, begin: int, size: int) -> bool:
        """Have the kernel bring in bytes from the beginning of a page on; True: it cannot read one.

        Another error says nothing of the pages: they come in when they are touched.
        """
        try:
            self._map.madvise(_MADV_POPULATE_READ, begin, size)
        except OSError as error:
            return error.errno in _UNREADABLE
        return False

    def readable(self) -> memoryview:
        """Return all of the file, to be searched for batches: unreadable pages are zeros.

        RingTail asks for it to find a later batch that proves a place to be synced; resume(), to
        find the next good batch after damage.
        """
        self.unreadable(0, self.size)  # brings in all pages, and notes those that it cannot
        if not self._unreadable:
            return self.view
        data = bytearray(self.size)
        for begin in range(0, self.size, mmap.PAGESIZE):
            if begin // mmap.PAGESIZE not in self._unreadable:
                data[begin : begin + mmap.PAGESIZE] = self.view[begin : begin + mmap.PAGESIZE]
        return memoryview(data)

    def stamp(self, at: int) -> Stamp | str:
        """Return the stamp at a position of the segment, or a sentence why there is none."""
        if fault := self.unreadable(at, at + STAMP_BYTES):
            return fault
        found = stamp_here(self.view, at, self.base_lsn + at)  # the quick way, for a usual stamp
        return stamp_or_fault(self.view, at, self.base_lsn + at) if found is None else found


class Indexes:
    """Indexes of any ring, those that were asked for last. Used from any thread.

    Unpacking one takes some 40 times as long as reading its file, and each reading of a log is of
    the same files.
    """

    def __init__(self, bytes_max: int = INDEX_BYTES_MAX) -> None:
        """bytes_max: of files; beyond it what was not asked for the longest is forgotten."""
        self._bytes_max = bytes_max
        self._bytes = 0
        """Bytes of all files in `_held`."""
        self._held: OrderedDict[tuple[bytes, int], tuple[bytes, StoredIndex]] = OrderedDict()
        """(ring, segment) -> bytes of the file, and the index in them."""
        self._lock = threading.Lock()

    def of(self, data: bytes, ring: bytes, number: int) -> StoredIndex | None:
        """Return the index of a segment in the bytes of its file; None: they are not good."""
        key = ring, number
        with self._lock:
            unpacked_from, known = self._held.get(key, (None, None))
            if unpacked_from == data:
                self._held.move_to_end(key)
                return known
        # Unpacked without the lock: two threads may do it at once, and the later one's is kept.
        found = read_index(data, ring, number)
        if found is None:
            return None
        with self._lock:
            old, _ = self._held.pop(key, (b"", None))
            self._held[key] = data, found
            self._bytes += len(data) - len(old)
            while self._bytes > self._bytes_max:
                _, (forgotten, _) = self._held.popitem(last=False)
                self._bytes -= len(forgotten)
        return found


INDEXES: Final = Indexes()
"""Indexes that readers of this process have asked for."""


class Segments:
    """The segments of one ring, as its directory has them now. One thread at a time."""

    def __init__(self, storage: FileStorage, meta: RingMeta) -> None:
        """storage: the ring's directory."""
        self.storage = storage
        self.uuid = meta.uuid
        self.segment_bytes = meta.segment_bytes
        self._path = Path(storage.describe())
        self._maps: OrderedDict[int, SegmentMap] = OrderedDict()

    def numbers(self) -> list[int]:
        """Numbers of the files that are there, ascending; none when the ring was removed."""
        numbers = map(segment_number, self._names())
        return sorted(number for number in numbers if number is not None)

    def is_there(self, number: int) -> bool:
        """True when something has the name of a segment, whether or not it can be read."""
        return os.path.lexists(self._path / segment_name(number))

    def _names(self) -> list[str]:
        """Return the names of the ring's files; none: the ring was removed."""
        try:
            return self.storage.names()
        except FileNotFoundError:
            return []

    def map(self, number: int) -> SegmentMap | None:
        """Return the mapping of a segment; None: it is not there (any more), or was not begun.

        Raises OSError: the file cannot be opened.
        """
        held = self._maps.get(number)
        if held is not None:
            if held.intact():
                self._maps.move_to_end(number)
                return held
            del self._maps[number]
        try:
            fd = open_regular(self._path / segment_name(number), os.O_RDONLY)
        except (FileNotFoundError, NotAFile):
            return None
        try:
            if os.fstat(fd).st_size < SEGMENT_HEADER_BYTES:
                return None
            path = self._path / segment_name(number)
            found = SegmentMap(fd, path, number, self.segment_bytes, self.uuid)
        finally:
            os.close(fd)
        header = read_segment_header(found.header)
        # A damaged header says nothing: its batches prove themselves.
        if header is not None and (header.ring, header.number) != (self.uuid, number):
            return None
        self._maps[number] = found
        if len(self._maps) > MAPS_MAX:
            # A reader that goes through the map keeps it; without one it is unmapped here.
            self._maps.popitem(last=False)
        return found

    def replaced(self, number: int) -> bool:
        """True when another file stands under the name of a mapped segment, or none.

        The recovery of a broker that was started anew puts repaired copies in the place of files.
        """
        held = self._maps.get(number)
        if held is None:
            return False
        try:
            return (self._path / segment_name(number)).stat().st_ino != held.inode
        except OSError:
            return True

    def index(self, number: int) -> StoredIndex | None:
        """The index of a segment that is full and synced; None: there is none yet, or no good one.

        Raises OSError: the file cannot be opened.
        """
        data = read_sound(self.storage, index_name(number))
        return None if data is None else INDEXES.of(data, self.uuid, number)

    def proven(self) -> int:
        """Return a position before which everything was synced, without looking at batches.

        The file `closed`, the headers of the newest segments, and the newest index tell it.
        """
        closed = read_mark(self.storage, CLOSED_FILE, Closed)
        lsn = closed.end_lsn if closed is not None and closed.ring == self.uuid else 0
        # A header is written when its segment begins; that of the newest may not be there yet.
        for number in self.numbers()[-2:]:
            segment = self.map(number)
            header = None if segment is None else read_segment_header(segment.header)
            lsn = max(lsn, 0 if header is None else header.synced_lsn)
        # An index is written once its whole segment is synced.
        indexed = [number for number in map(index_number, self._names()) if number is not None]
        return max(lsn, (max(indexed) + 1) * self.segment_bytes if indexed else 0)

    def forget(self) -> None:
        """Drop cached mappings: other files may stand under the names."""
        self._maps.clear()
