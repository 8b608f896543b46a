"""Small rings to break: storages, appending in one line, reading everything back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_protocol.stamp import Stamp
from malamute_py.journal import (
    Append,
    Appended,
    FileStorage,
    History,
    MemoryStorage,
    Recovery,
    Ring,
    RingSettings,
    Storage,
)
from malamute_py.journal.layout import segment_name
from malamute_py.journal.mapping import Part
from malamute_py.journal.storage import File, Lock

S = 65_536
"""Bytes of a segment in these tests."""
HEAD = 4096
SMALL = RingSettings(segment_bytes=S, ring_bytes=8 * S, index_interval_bytes=2048)


def content_of(bodies: Sequence[bytes], **options: Any) -> tuple[bytes, int]:
    options.setdefault("subject", "s")
    content = encode(bodies, **options)
    return content, Content(content).head.content_crc


def batch(
    ring: Ring,
    stream: int,
    bodies: Sequence[bytes],
    *,
    base: int | None = None,
    time_ms: int = 1000,
    kind: int = 0,
    **options: Any,
) -> Append:
    content, crc = content_of(bodies, **options)
    offset = ring.next_offset(stream) if base is None else base
    keys = Content(content).table
    return Append(stream, offset, len(bodies), time_ms, content, crc, keys, kind)


def put(ring: Ring, stream: int, *bodies: bytes, time_ms: int = 1000, **options: Any) -> Appended:
    """Append one batch as a bundle."""
    return ring.append([batch(ring, stream, bodies, time_ms=time_ms, **options)])


def records(history: History) -> list[tuple[int, bytes]]:
    """(offset, body) of everything in the runs."""
    out = []
    for run in history.runs:
        view = memoryview(run.data)
        for position, size, base, count in run.spans:
            stamp = Stamp.unpack(view, position)
            assert (stamp.base_offset, stamp.count, stamp.size) == (base, count, size)
            content = Content(view[position + stamp.stamp_bytes : position + size])
            content.verify()
            blob, offsets, _ = content.bodies()
            bounds = offsets.tolist()
            out += [(base + n, bytes(blob[bounds[n] : bounds[n + 1]])) for n in range(count)]
    return out


def everything(ring: Ring, stream: int) -> list[tuple[int, bytes]]:
    """All records that the ring serves of a stream."""
    return records(read_all(ring, stream))


def read_all(ring: Ring, stream: int) -> History:
    return ring.read(stream, ring.first_offset(stream), ring.next_offset(stream), 1 << 40)


class Place:
    """Where a ring lives over several openings."""

    def __init__(self, storage: Storage, reopen: Callable[[], Storage]) -> None:
        self.storage = storage
        self._reopen = reopen
        self.epoch = 0

    def open(self, settings: RingSettings = SMALL, **options: Any) -> tuple[Ring, Recovery]:
        """Open the ring in a new epoch; whatever was open before is simply forgotten."""
        self.storage = self._reopen()
        self.epoch += 1
        return Ring.open(self.storage, settings=settings, epoch=self.epoch, **options)

    def read(self, lsn: int, size: int) -> bytes:
        number, position = divmod(lsn, S)
        return self.storage.read(self.storage.open(segment_name(number)), position, size)

    def write(self, lsn: int, data: bytes) -> None:
        number, position = divmod(lsn, S)
        self.storage.write(self.storage.open(segment_name(number)), position, [data])

    def flip(self, lsn: int, bit: int = 0) -> None:
        """Turn one bit over."""
        self.write(lsn, bytes([self.read(lsn, 1)[0] ^ 1 << bit]))

    def zero(self, lsn: int, size: int) -> None:
        while size:
            part = min(size, S - lsn % S)
            self.write(lsn, bytes(part))
            lsn, size = lsn + part, size - part


def file_place(path: Path) -> Place:
    return Place(FileStorage(path), lambda: FileStorage(path))


def memory_place() -> Place:
    storage = MemoryStorage()
    return Place(storage, lambda: storage)


class Faulty:
    """A storage that fails on request, and notes what it was asked."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.persistent = inner.persistent
        self.fail: dict[str, Exception] = {}
        """Operation -> what to raise."""
        self.calls: list[tuple[str, Any]] = []

    def _note(self, call: str, subject: Any) -> None:
        self.calls.append((call, subject))
        if call in self.fail:
            raise self.fail[call]

    def child(self, name: str) -> Storage:
        return self.inner.child(name)

    def children(self) -> list[str]:
        return self.inner.children()

    def remove_child(self, name: str) -> None:
        self._note("remove_child", name)
        self.inner.remove_child(name)

    def strangers(self) -> dict[str, str]:
        return self.inner.strangers()

    def names(self) -> list[str]:
        return self.inner.names()

    def create(self, name: str, size: int) -> File:
        self._note("create", name)
        return self.inner.create(name, size)

    def open(self, name: str) -> File:
        return self.inner.open(name)

    def read(self, file: File, position: int, size: int) -> bytes:
        self._note("read", (file.name, position, size))
        return self.inner.read(file, position, size)

    def map(self, file: File, position: int, size: int) -> Part | None:
        self._note("map", (file.name, position, size))
        return self.inner.map(file, position, size)

    def write(self, file: File, position: int, buffers: Sequence[Any]) -> None:
        self._note("write", (file.name, position))
        self.inner.write(file, position, buffers)

    def sync(self, file: File) -> None:
        self._note("sync", file.name)
        self.inner.sync(file)

    def sync_directory(self) -> None:
        self._note("sync_directory", None)
        self.inner.sync_directory()

    def rename(self, old: str, new: str) -> None:
        self._note("rename", (old, new))
        self.inner.rename(old, new)

    def remove(self, name: str) -> None:
        self._note("remove", name)
        self.inner.remove(name)

    def lock(self, name: str) -> Lock:
        return self.inner.lock(name)

    def free_bytes(self) -> int:
        return self.inner.free_bytes()

    def describe(self) -> str:
        return self.inner.describe()
