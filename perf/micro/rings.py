"""Rings over each storage: in memory, by position (pread, pwritev), and mapped.

`Mapped` is here to be compared with, as the laminarmq reference compares its back-ends;
ARCHITECTURE.md says why the journal does not map its files.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_py.journal import Append, FileStorage, MemoryStorage, Ring, RingSettings, Storage

SETTINGS = RingSettings(segment_bytes=64 << 20, ring_bytes=512 << 20)
STORAGES = ("memory", "file", "mapped")


class Mapped(FileStorage):
    """Files of a fixed size that are read and written through a mapping, and synced like others."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._path = directory
        self._views: dict[str, mmap.mmap] = {}

    def create(self, name: str, size: int) -> Any:
        file = super().create(name, size)
        if size:
            fd = os.open(self._path / name, os.O_RDWR)
            self._views[name] = mmap.mmap(fd, size)
            os.close(fd)
        return file

    def write(self, file: Any, position: int, buffers: Sequence[Any]) -> None:
        view = self._views.get(file.name)
        if view is None:
            super().write(file, position, buffers)
            return
        for buffer in buffers:
            end = position + len(buffer)
            view[position:end] = buffer
            position = end

    def read(self, file: Any, position: int, size: int) -> bytes:
        view = self._views.get(file.name)
        if view is None:
            return super().read(file, position, size)
        return view[position : position + size]

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        if old in self._views:
            self._views[new] = self._views.pop(old)


def storage(kind: str, directory: Path) -> Storage:
    if kind == "memory":
        return MemoryStorage()
    return FileStorage(directory) if kind == "file" else Mapped(directory)


class Writer:
    """Appends one batch over and over, with offsets that go on."""

    def __init__(self, storage: Storage, records: int, size: int) -> None:
        self.ring, _ = Ring.open(storage, settings=SETTINGS, epoch=1)
        # A ring whose next segments are prepared, as housekeeping would have them.
        self.ring._space.need(1)
        self._content = encode([bytes(size)] * records, subject="a.b.c", fields={"kind": "x"})
        parsed = Content(self._content)
        self._crc, self._keys = parsed.head.content_crc, parsed.table
        self._records = records
        self.batch_bytes = len(self._content) + 96
        self.offset = 0

    def room(self) -> int:
        """Return how many batches fit into a mebibyte; at least one."""
        return max(1, (1 << 20) // self.batch_bytes)

    def append(self, batches: int) -> None:
        for _ in range(batches):
            batch = Append(1, self.offset, self._records, 1000, self._content, self._crc,
                           self._keys)  # fmt: skip
            self.ring.append([batch])
            self.offset += self._records

    def preparing(self, batches: int) -> Callable[[], tuple[tuple[int], dict[str, int]]]:
        """Prepare the next segment between rounds, as housekeeping does."""

        def prepare() -> tuple[tuple[int], dict[str, int]]:
            self.ring._space.need(1)
            return (batches,), {}

        return prepare

    def reading(self) -> Callable[[], None]:
        end = self.offset

        def read() -> None:
            position = 0
            while position < end:
                position = self.ring.read(1, position, end, 1 << 20).next

        return read
