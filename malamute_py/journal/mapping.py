"""Mapped reads: parts of sealed segments in the page cache, for as long as a holder refers to them.

Owns which mapped parts are still referred to, and how many there may be. The rules: no page is
touched before the kernel was asked for it, so that one that cannot be read is an error instead of a
signal; before a segment's file is written over, its parts get memory of their own, so that no
reader, however slow, changes or holds up a ring. Source: FORMAT.md, section 8; madvise(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from malamute_py.journal.segment import Segment
    from malamute_py.journal.storage import File, Storage

PART_BYTES_MIN: Final = 64 << 10
"""Size from which on a read is mapped. Below it a copy is cheaper: libzmq copies such a frame, too,
and to map a page and to unmap it costs as much as to copy some."""
PARTS_MAX: Final = 256
"""Parts that are mapped at once, each at most one read of 4 MiB. Each has a descriptor and an entry
of vm.max_map_count (65,530). Reads beyond it are copies."""
_POPULATE_READ: Final = 22
_POPULATE_WRITE: Final = 23
"""MADV_POPULATE_READ and MADV_POPULATE_WRITE, Linux 5.14. Python's mmap has no names for them."""
# By ctypes and not by mmap.madvise(), which keeps the interpreter's lock: the loop would wait
# for the disk.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Part(Protocol):
    """A mapped part of a file. It is unmapped when nothing refers to it or to its bytes."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

    def populate(self) -> None:
        """Have the kernel read the pages into memory. Raises OSError: one cannot be read."""

    def detach(self) -> None:
        """Give the bytes memory of their own: the file may be written over.

        Raises OSError: the bytes are the file's still, and the file must stay as it is.
        """


class FilePart(mmap.mmap):
    """A part of a file of the operating system, from a whole page on."""

    def __new__(cls, fd: int, position: int, size: int) -> FilePart:
        """Map a part; position: of its first page. Raises OSError."""
        # Private, since only a private mapping can be given copies of its pages. It is not written.
        return super().__new__(cls, fd, size, access=mmap.ACCESS_COPY, offset=position)

    def populate(self) -> None:
        """Have the kernel read the pages into memory. Raises OSError: one cannot be read."""
        self._ask(_POPULATE_READ)

    def detach(self) -> None:
        """Give the bytes memory of their own: the file may be written over."""
        self._ask(_POPULATE_WRITE)

    def _ask(self, what: int) -> None:
        """Give the kernel an advice about all pages of the part. Raises OSError: it refuses."""
        if _madvise(ctypes.addressof(ctypes.c_char.from_buffer(self)), len(self), what):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


class Mappings:
    """Mapped parts of all rings of a journal. Used from any thread."""

    def __init__(self, part_bytes_min: int = PART_BYTES_MIN, parts_max: int = PARTS_MAX) -> None:
        """part_bytes_min, parts_max: beyond them a read is a copy."""
        self._part_bytes_min = part_bytes_min
        self._parts_max = parts_max
        self._parts: dict[int, tuple[weakref.ref[Any], Segment]] = {}
        """Key -> (mapped part, its segment), as long as something refers to the part."""
        self._keys = count()

    def __len__(self) -> int:
        return len(self._parts)

    def view(
        self, storage: Storage, segment: Segment, file: File, position: int, size: int
    ) -> memoryview | None:
        """Map a part of a sealed segment, with its pages read into memory; None: read it instead.

        The caller looks whether the segment was retired after the call. If it was not, the bytes
        never change from then on.
        """
        if size < self._part_bytes_min or len(self._parts) >= self._parts_max:
            return None
        start = position - position % mmap.PAGESIZE  # a mapping begins at a page
        try:
            part = storage.map(file, start, position + size - start)
            if part is None:
                return None
            # Known before the pages are asked for: who retires the segment meanwhile finds it.
            key = next(self._keys)
            gone = partial(_forget, self._parts, key)
            self._parts[key] = (weakref.ref(part, gone), segment)
            part.populate()
        except (OSError, ValueError):
            return None  # The ordinary read, which follows, names the bad page.
        return memoryview(part).toreadonly()[position - start :]

    def detach(self, segment: Segment) -> bool:
        """Give parts of a retired segment memory of their own; False: its file must stay.

        Called before the file is written over or removed.
        """
        done = True
        for reference, owner in self._parts.copy().values():
            part = reference() if owner is segment else None
            if part is not None:
                try:
                    part.detach()
                except OSError:
                    done = False
        return done


def _forget(parts: dict[int, Any], key: int, _: object) -> None:
    """Take a mapping out of the table when it is freed; called by its weak reference."""
    parts.pop(key, None)


def why_unmapped(storage: Storage, name: str) -> str:
    """Return why parts of this storage's files cannot be mapped; "": they can.

    Tried once at an opening that asks for mapped reads, with both calls that they need. name: of a
    small file that there is. Raises OSError: it cannot be opened.
    """
    file = storage.open(name)
    try:
        part = storage.map(file, 0, file.size)
        if part is None:
            return "the journal is in memory"
        part.populate()
        # What a ring does before it writes over a segment.
        part.detach()
    except (OSError, ValueError) as error:
        return f"the system refuses it ({error})"
    return ""


def populate_again(data: Any) -> bool:
    """Have the kernel read mapped bytes into memory again; False: a page cannot be read.

    For a read that is used again for another subscription. data: a view of a mapped part, which may
    have been paged out since it was read; other bytes are always there.
    """
    # The object that a view is of: a mapped part has populate(), other bytes have not.
    part = data.obj if isinstance(data, memoryview) else None
    populate = getattr(part, "populate", None)
    if populate is not None:
        with contextlib.suppress(OSError):
            populate()
            return True
        return False
    return True
