"""Writeback: files that are written during an advance are synced meanwhile, and no others."""

from __future__ import annotations

import contextlib
import io
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from malamute_py.journal.directory import RINGS, directory_name
from malamute_py.store import follow
from malamute_py.store.database import DATABASE, Position, connect, create_file
from malamute_py.store.writeback import Writeback
from tests.store.logs import DIRECTORY, LoggedQueues, RandomChanges

WAL = f"{DATABASE}-wal"


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were synced by another thread than the test's."""
    names: list[str] = []
    main, real = threading.get_ident(), os.fdatasync

    def fdatasync(fd: int) -> None:
        if threading.get_ident() != main:
            names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return names


@pytest.mark.moderate
def test_what_is_written_during_an_advance_is_synced_meanwhile(
    tmp_path: Path, synced: list[str]
) -> None:
    create_file(tmp_path, Position(0, 0, 1, DIRECTORY, bytes(16)))
    connection = connect(tmp_path / DATABASE)
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    files = Writeback(tmp_path)
    with files.advancing():
        until(lambda: DATABASE in synced)
        connection.execute("UPDATE position SET lsn = 7")
    # The WAL came after the files were opened: the next advance finds it.
    with files.advancing():
        until(lambda: WAL in synced)
        synced.clear()
        time.sleep(0.05)
        assert synced == [], "nothing was written: nothing is synced"
        connection.execute("UPDATE position SET lsn = 8")
        until(lambda: synced)
        assert set(synced) == {WAL}
        connection.execute("PRAGMA wal_checkpoint").fetchall()
        until(lambda: DATABASE in synced)
    time.sleep(0.05)
    synced.clear()
    connection.execute("UPDATE position SET lsn = 9")
    time.sleep(0.05)
    assert synced == [], "outside of an advance SQLite's own syncs are enough"
    # SQLite's locks are still there: they would go with any descriptor that is closed.
    other = sqlite3.connect(tmp_path / DATABASE, timeout=0, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("BEGIN IMMEDIATE")
    other.close()
    connection.close()


def test_a_sync_that_fails_ends_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_file(tmp_path, Position(0, 0, 1, DIRECTORY, bytes(16)))
    tries: list[int] = []

    def failing(fd: int) -> None:
        tries.append(fd)
        raise OSError(5, "I/O error")

    monkeypatch.setattr(os, "fdatasync", failing)
    with Writeback(tmp_path).advancing():
        until(lambda: tries)
        os.utime(tmp_path / DATABASE)
        until(lambda: len(tries) == 2)


def test_each_advance_of_the_process_is_written_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = LoggedQueues(tmp_path / RINGS / directory_name(follow.MAIN))
    drawn = RandomChanges(logged, 1)
    for _ in range(20):
        logged.log(*drawn.bundle())
    logged.ring.sync()
    create_file(tmp_path, Position(0, 0, 1, DIRECTORY, logged.ring.uuid))
    seen: list[Any] = []

    class Noted(Writeback):
        @contextlib.contextmanager
        def advancing(self) -> Iterator[None]:
            with super().advancing():
                seen.append(lsn())
                yield
                seen.append(lsn())

    def lsn() -> int:
        connection = connect(tmp_path / DATABASE, read_only=True)
        try:
            return int(connection.execute("SELECT lsn FROM position").fetchone()[0])
        finally:
            connection.close()

    class Requests:
        def __init__(self, parent: int) -> None:
            self._left = [follow.Follow(logged.ring.end_lsn, [(0, logged.ring.end_lsn)])]

        def next(self) -> follow.Follow | None:
            return self._left.pop() if self._left else None

        def going_on(self) -> bool:
            return True

        def quiet(self) -> bool:
            return False

    class Output:
        buffer = io.BytesIO()

    monkeypatch.setattr(follow, "Writeback", Noted)
    monkeypatch.setattr(follow, "_Input", Requests)
    monkeypatch.setattr(sys, "stdout", Output)
    follow._run(tmp_path, os.getpid(), accept_lost=False)
    assert seen == [0, logged.ring.end_lsn]
