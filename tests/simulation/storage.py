"""SimulatedStorage: the journal's `Storage` over the simulated disk.

Owns the translation and the handles. The rule: a handle or a lock of a process that died
is dead; using one is an error of the simulation, not a fault. The fault model stands at
the top of disk.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from malamute_py.journal.errors import DiskFull, JournalLocked
from tests.simulation.disk import Disk, Inode


class SimulatedFile:
    """An open file of one process."""

    __slots__ = ("inode", "name", "opening")

    def __init__(self, name: str, inode: Inode, opening: int) -> None:
        self.name = name
        self.inode = inode
        self.opening = opening

    @property
    def size(self) -> int:
        """Return its bytes, as the page cache shows them."""
        return self.inode.size


class SimulatedPart(np.ndarray[Any, Any]):
    """A mapped part of a file: it shows what is written to the file until it is detached."""

    storage: SimulatedStorage
    place: tuple[SimulatedFile, int]

    def populate(self) -> None:
        """Meet bad sectors, as a read does."""
        file, position = self.place
        self.storage.read(file, position, len(self))

    def detach(self) -> None:
        """Leave these bytes as they are: later writes go to a copy."""
        inode = self.place[0].inode
        inode.live = bytearray(inode.live)


class SimulatedLock:
    """A lock that is held until released or until the process dies."""

    def __init__(self, disk: Disk, name: str) -> None:
        self._disk, self._name, self._opening = disk, name, disk.opening
        disk.locks[name] = disk.opening

    def release(self) -> None:
        """Let another opener in."""
        if self._disk.locks.get(self._name) == self._opening:
            del self._disk.locks[self._name]


class SimulatedStorage:
    """One directory of the simulated disk."""

    persistent = True

    def __init__(self, disk: Disk, directory: str = "") -> None:
        """directory: its path without a trailing slash; the root is empty."""
        self.disk = disk
        self.directory = directory
        self._prefix = directory + "/" if directory else ""

    def child(self, name: str) -> SimulatedStorage:
        path = self._prefix + name
        self.disk.directories.add(path)
        return SimulatedStorage(self.disk, path)

    def children(self) -> list[str]:
        length = len(self._prefix)
        return sorted(
            path[length:]
            for path in self.disk.directories
            if path.startswith(self._prefix) and "/" not in path[length:]
        )

    def remove_child(self, name: str) -> None:
        inside = self._prefix + name + "/"
        if not any(each.startswith(inside) for each in (*self.disk.names, *self.disk.directories)):
            self.disk.directories.discard(self._prefix + name)

    def strangers(self) -> dict[str, str]:
        return {}

    def names(self) -> list[str]:
        length = len(self._prefix)
        return sorted(
            name[length:]
            for name in self.disk.names
            if name.startswith(self._prefix) and "/" not in name[length:]
        )

    def create(self, name: str, size: int) -> SimulatedFile:
        path = self._prefix + name
        disk = self.disk
        self._pause("create")
        old = disk.names.get(path)
        if old is not None:
            disk.truncate(old, 0)
        try:
            inode = disk.allocate(path, size)
        except OSError as error:
            if old is not None:
                disk.remove(path)
            raise self._explained(error, name) from error
        return SimulatedFile(name, inode, disk.opening)

    def open(self, name: str) -> SimulatedFile:
        return SimulatedFile(name, self.disk.inode(self._prefix + name), self.disk.opening)

    def read(self, file: Any, position: int, size: int) -> bytes:
        inode = self._alive(file)
        self._pause("read")
        data = self.disk.read(inode, position, size)
        self._pause("read")
        return data

    def map(self, file: Any, position: int, size: int) -> Any:
        inode = self._alive(file)
        if position + size > inode.size:
            return None
        bytes_of_file = np.frombuffer(inode.live, np.uint8, size, position)
        part = bytes_of_file.view(SimulatedPart)
        part.storage, part.place = self, (file, position)
        return part

    def write(self, file: Any, position: int, buffers: Sequence[Any]) -> None:
        try:
            self.disk.write(self._alive(file), position, buffers)
        except OSError as error:
            raise self._explained(error, file.name) from error

    def sync(self, file: Any) -> None:
        inode = self._alive(file)
        self._pause("sync")
        self.disk.sync(inode)
        self._pause("sync")

    def sync_directory(self) -> None:
        self.disk.sync_directory(self.directory)

    def rename(self, old: str, new: str) -> None:
        self.disk.rename(self._prefix + old, self._prefix + new)

    def remove(self, name: str) -> None:
        if self._prefix + name in self.disk.names:
            self.disk.remove(self._prefix + name)

    def lock(self, name: str) -> SimulatedLock:
        path = self._prefix + name
        if path in self.disk.locks:
            raise JournalLocked(self.describe(), "in use: stop that broker")
        self.disk.create(path)
        return SimulatedLock(self.disk, path)

    def free_bytes(self) -> int:
        return max(0, self.disk.capacity - self.disk.used())

    def describe(self) -> str:
        return f"simulated:{self.directory}"

    def _alive(self, file: SimulatedFile) -> Inode:
        assert file.opening == self.disk.opening, f"{file.name} belongs to a process that died"
        return file.inode

    def _pause(self, what: str) -> None:
        between = self.disk.between
        if between is not None:
            between(what)

    def _explained(self, error: OSError, name: str) -> Exception:
        if error.errno == errno.ENOSPC:
            return DiskFull(f"{self.describe()} is full ({name}): {os.strerror(errno.ENOSPC)}")
        return error
