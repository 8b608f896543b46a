"""Storages that fail when a test wants it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from typing import Any

from malamute_py.journal import DiskFull, FileStorage
from malamute_py.journal.storage import File
from tests.waiting import WAIT_S


class Troubles:
    """The troubles to come, shared by a directory and those inside it."""

    def __init__(self) -> None:
        self.full = False
        self.failing_sync = False
        self.failing_remove = False
        self.may_create = threading.Event()
        """Cleared: the creation of a file waits until this is set."""
        self.may_create.set()


class TroubledStorage(FileStorage):
    """Files that refuse on demand."""

    def __init__(self, directory: Any, troubles: Troubles) -> None:
        super().__init__(directory)
        self.troubles = troubles

    def child(self, name: str) -> TroubledStorage:
        plain = super().child(name)
        return TroubledStorage(plain._directory, self.troubles)

    def create(self, name: str, size: int) -> File:
        assert self.troubles.may_create.wait(WAIT_S)
        self._check()
        return super().create(name, size)

    def write(self, file: File, position: int, buffers: Sequence[Any]) -> None:
        self._check()
        super().write(file, position, buffers)

    def sync(self, file: File) -> None:
        if self.troubles.failing_sync:
            raise OSError(errno.EIO, "Input/output error")
        super().sync(file)

    def remove(self, name: str) -> None:
        if self.troubles.failing_remove:
            raise OSError(errno.EIO, "Input/output error")
        super().remove(name)

    def _check(self) -> None:
        if self.troubles.full:
            raise DiskFull("the disk is full: free space there, or lower ring_bytes")
