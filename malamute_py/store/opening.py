"""Opening the tables beside a journal: new, as they were, or not at all.

Owns the decision whether tables and log belong together. The rules: nothing is guessed; tables that
are missing, damaged, of another directory, or ahead of the log are refused, with what to do; the
caller builds them again from a complete log (server/checkpointing/recovered.py); tables are made
only where the log says that there never were any. Whether the log goes on where the tables end
shows by its offsets when it is read (reading.py). Source: docs/design.md, Queues and the
checkpoint.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import NamedTuple

import msgspec

from malamute_py.journal.layout import pack_file, unpack_file
from malamute_py.journal.storage import FileStorage, read_file, replace_file
from malamute_py.store.database import (
    DATABASE,
    MARK,
    Position,
    create_file,
    damaged,
    open_database,
    position_of,
    writing,
)
from malamute_py.store.errors import StoreError, StoreMoved
from malamute_py.store.loading import check


class Mark(msgspec.Struct, array_like=True):
    """The small file that says that there are tables."""

    directory: bytes
    ring: bytes


class LogFacts(NamedTuple):
    """Facts about the log that the tables are compared with."""

    directory: bytes
    """uuid of the data directory."""
    ring: bytes
    """uuid of ring main."""
    start_lsn: int
    end_lsn: int
    held_mail: bool
    """True: the ring once held bodies of mail or requests."""


def open_store(
    directory: Path, log: LogFacts, *, accept_lost: bool = False
) -> tuple[sqlite3.Connection, bool]:
    """Open the tables of a data directory for writing; returns them and whether they are new.

    For a start, and for a repair. New ones are made where there never were any. accept_lost: tables
    that are ahead of the log are taken as they are, and stand at its end. The caller has the lock.
    Raises StoreDamaged, StoreMoved, StoreError, OSError: nothing was changed.
    """
    path = directory / DATABASE
    new = not os.path.lexists(path)
    try:
        if new:
            _check_new(directory, log)
            create_file(directory, _beginning(log))
        connection = open_database(path)
    except sqlite3.Error as error:
        raise damaged(error) from error
    try:
        check(connection)
        position = position_of(connection)
        _check_position(position, log, path, accept_lost=accept_lost)
        if position.lsn > log.end_lsn:
            # Accepted: from now on they follow the log from its end.
            with writing(connection):
                connection.execute("UPDATE position SET lsn = ?", (log.end_lsn,))
        # After the database: where the mark is and no database, one was lost.
        storage = FileStorage(directory)
        if read_file(storage, MARK) is None:
            replace_file(storage, MARK, pack_file(Mark(log.directory, log.ring)))
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error):
            raise damaged(error) from error
        raise
    return connection, new


def _beginning(log: LogFacts) -> Position:
    """Return the position of new tables: the oldest one of the log.

    Where the log does not begin at 0, it was written by an older program, which had no tables: the
    offset of its first change is not known.
    """
    change_next = 0 if log.start_lsn == 0 else -1
    return Position(log.start_lsn, change_next, 1, log.directory, log.ring)


def _check_new(directory: Path, log: LogFacts) -> None:
    """Raise StoreError when there must have been tables before: none may be made in their place."""
    mark = read_file(FileStorage(directory), MARK)
    if mark is None and not log.held_mail:
        return
    if mark is not None:
        known = unpack_file(mark, Mark)
        if known is not None and known.ring != log.ring:
            raise StoreMoved(f"the file {MARK} belongs to another journal than this one")
    raise StoreError(
        f"{DATABASE} is missing, and the log says that there was one: mailboxes, requests and"
        " cursors would be forgotten"
    )


def _check_position(position: Position, log: LogFacts, path: Path, *, accept_lost: bool) -> None:
    """Raise StoreMoved for tables of another directory, or beyond the end of the log.

    accept_lost: the operator accepts that the log has lost its end.
    """
    if position.directory != log.directory or position.ring != log.ring:
        raise StoreMoved(f"{path.name} belongs to another data directory than this journal")
    if position.lsn > log.end_lsn and not accept_lost:
        raise StoreMoved(
            f"{path.name} is at position {position.lsn} of a log that ends at {log.end_lsn}: the"
            " journal is older than its tables, or lost its end"
        )
