"""Writeback: what SQLite writes during an advance reaches the disk in small pieces.

Owns the thread that has the kernel write out the database and its WAL while they grow. The rules:
it changes no promise, as SQLite syncs its files itself before a commit returns; a file that was not
written is not synced. Without it a commit left up to 60 MB to one sync, and a sync of the journal
at the same time took 20 to 60 ms. Source: docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from malamute_py.journal.storage import open_regular
from malamute_py.store.database import DATABASE

_PAUSE_S: Final = 0.005
"""Pause between two looks; SQLite writes about 1 MB meanwhile."""


class Writeback:
    """A thread that syncs the files of a database, again and again, while an advance goes on."""

    def __init__(self, directory: Path) -> None:
        """directory: the data directory, which has the database."""
        self._paths = (directory / DATABASE, directory / f"{DATABASE}-wal")
        self._files: dict[int, int] = {}
        """Descriptor -> time of the last write that was synced, in nanoseconds."""
        self._advancing = threading.Event()
        threading.Thread(target=self._run, name="malamute-writeback", daemon=True).start()

    @contextlib.contextmanager
    def advancing(self) -> Iterator[None]:
        """Have the files synced while the block runs."""
        if len(self._files) < len(self._paths):
            self._open()
        self._advancing.set()
        try:
            yield
        finally:
            self._advancing.clear()

    def _open(self) -> None:
        """Open those of the two files that are there and not open yet.

        SQLite makes the WAL when it first needs it. The files stay open while the process lives:
        closing any descriptor of a file drops SQLite's locks on it.
        """
        for path in self._paths[len(self._files) :]:
            try:
                self._files[open_regular(path, os.O_RDWR)] = 0
            except OSError:
                return

    def _run(self) -> None:
        """Sync what was written since the last look, while an advance goes on."""
        while self._advancing.wait():
            for fd, synced_ns in list(self._files.items()):
                written_ns = os.fstat(fd).st_mtime_ns
                if written_ns != synced_ns:
                    self._files[fd] = written_ns
                    # SQLite meets the error, too, at a sync of its own, and reports it.
                    with contextlib.suppress(OSError):
                        os.fdatasync(fd)
            time.sleep(_PAUSE_S)
