"""A disk that loses power: any subset of unsynced sectors stays, directory changes in order.

Faults that it makes: unsynced sectors keep their old or their new bytes, each on its own;
unsynced creations, renames and removals survive up to a point and are undone after it; the power
may be lost amid an operation, before one of its changes.
Not made: sectors that were synced change, bytes within a sector mix.
"""

from __future__ import annotations

import copy
import errno
import random
from collections.abc import Sequence
from typing import Any

from malamute_py.journal.storage import File, Lock

SECTOR = 512


class PowerLost(BaseException):
    """The power went before a change; it passes through every `except Exception`."""


class DiskFile:
    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.data = bytearray(size)
        self.before: dict[int, bytes] = {}
        """Sector -> its durable bytes, where they differ from what is read now."""

    @property
    def size(self) -> int:
        return len(self.data)


class _Unlocked:
    def release(self) -> None:
        pass


class Disk:
    """One directory; see the module."""

    persistent = True

    def __init__(self) -> None:
        self.files: dict[str, DiskFile] = {}
        self._durable_names: dict[str, DiskFile] = {}
        self._changes: list[dict[str, DiskFile]] = []
        self.changes_left: int | None = None
        """Writes, syncs and changes of names that are still done before PowerLost is raised."""

    def copy(self) -> Disk:
        """Another disk with the same files, synced as far as these."""
        return copy.deepcopy(self)

    def _change(self) -> None:
        if self.changes_left is not None:
            if not self.changes_left:
                raise PowerLost
            self.changes_left -= 1

    def crash(self, chance: random.Random, *, power: bool) -> None:
        """The process dies; with `power` the machine does, too."""
        if not power:
            return
        states = [self._durable_names, *self._changes]
        self.files = dict(chance.choice(states))
        self._durable_names, self._changes = dict(self.files), []
        keep = chance.choice([0.0, 0.2, 0.5, 0.9, 1.0])
        for name, file in self.files.items():
            file.name = name
            for sector, old in file.before.items():
                if chance.random() >= keep:
                    file.data[sector * SECTOR : sector * SECTOR + len(old)] = old
            file.before.clear()

    def child(self, name: str) -> Disk:
        raise NotImplementedError

    def children(self) -> list[str]:
        return []

    def remove_child(self, name: str) -> None:
        raise NotImplementedError

    def strangers(self) -> dict[str, str]:
        return {}

    def names(self) -> list[str]:
        return sorted(self.files)

    def _changed(self) -> None:
        self._changes.append(dict(self.files))

    def create(self, name: str, size: int) -> File:
        self._change()
        file = self.files[name] = DiskFile(name, size)
        self._changed()
        return file

    def open(self, name: str) -> File:
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return self.files[name]

    def read(self, file: File, position: int, size: int) -> bytes:
        assert isinstance(file, DiskFile)
        return bytes(file.data[position : position + size])

    def map(self, file: File, position: int, size: int) -> None:
        return None

    def write(self, file: File, position: int, buffers: Sequence[Any]) -> None:
        assert isinstance(file, DiskFile)
        self._change()
        data = b"".join(map(bytes, buffers))
        for sector in range(position // SECTOR, -(-(position + len(data)) // SECTOR)):
            at = sector * SECTOR
            file.before.setdefault(sector, bytes(file.data[at : at + SECTOR]))
        file.data[position : position + len(data)] = data

    def sync(self, file: File) -> None:
        assert isinstance(file, DiskFile)
        self._change()
        file.before.clear()

    def sync_directory(self) -> None:
        self._change()
        self._durable_names, self._changes = dict(self.files), []

    def rename(self, old: str, new: str) -> None:
        self._change()
        file = self.files.pop(old)
        file.name = new
        self.files[new] = file
        self._changed()

    def remove(self, name: str) -> None:
        self._change()
        if self.files.pop(name, None) is not None:
            self._changed()

    def lock(self, name: str) -> Lock:
        return _Unlocked()

    def free_bytes(self) -> int:
        return 1 << 40

    def describe(self) -> str:
        return "a disk that may lose power"
