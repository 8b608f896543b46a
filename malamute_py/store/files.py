"""Files of a data directory as a snapshot or a repair copies them.

Owns how they are opened, copied, summed and made durable. The rule: no link is followed, and what
is no regular file is never opened. Source: FORMAT.md, section 5.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Final

import google_crc32c

from malamute_py.journal.storage import DIRECTORY_MODE, FILE_MODE, open_regular
from malamute_py.store.database import sync_directory

PIECE_BYTES: Final = 4 << 20
"""Bytes that one read of a copy brings."""


def regular(path: Path) -> FileIO:
    """Open a file for reading and follow no link. Raises NotAFile, OSError."""
    return FileIO(open_regular(path, os.O_RDONLY), "rb")


def copy_small(source: Path, to: Path) -> None:
    """Copy a file; nothing happens when there is none. Raises NotAFile, OSError."""
    with contextlib.suppress(FileNotFoundError), regular(source) as data:
        to.write_bytes(data.read())


def copy_allocated(source: Path, to: Path, size: int) -> None:
    """Copy a file, for a restore.

    Its space is allocated first: a full disk refuses now, not amid an append.
    """
    with regular(source) as data, to.open("xb") as copy:
        if size:
            os.posix_fallocate(copy.fileno(), 0, size)
        shutil.copyfileobj(data, copy, PIECE_BYTES)


def sums(content: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (path below the directory, (size, CRC32C)) of each file, for a snapshot's manifest."""
    for path in sorted(content.rglob("*")):
        if path.is_file():
            yield str(path.relative_to(content)), sum_of(path)


def sum_of(path: Path) -> tuple[int, int]:
    """Return size and CRC32C of a file, by which a snapshot's copy of it is verified."""
    crc = size = 0
    with regular(path) as file:
        while data := file.read(PIECE_BYTES):
            crc = google_crc32c.extend(crc, data)
            size += len(data)
    return size, crc


def sync_all(directory: Path) -> None:
    """Make a copy durable before it gets its name, and readable for no other user."""
    for path in [directory, *directory.rglob("*")]:
        if path.is_dir():
            path.chmod(DIRECTORY_MODE)
            sync_directory(path)
        else:
            path.chmod(FILE_MODE)
            with path.open("rb") as file:
                os.fsync(file.fileno())
