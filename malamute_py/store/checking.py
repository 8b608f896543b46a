"""Check of the tables of a stopped broker, beside what the journal's own tool checks.

Owns the findings about queues.db, and whether ring main is the one that it goes with. The rule:
nothing is changed. Source: FORMAT.md, section 4.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from malamute_py.journal.directory import RINGS, directory_name, expected_of
from malamute_py.journal.errors import JournalError
from malamute_py.journal.marks import read_mark, read_meta
from malamute_py.journal.storage import FileStorage, Storage, kind_of
from malamute_py.journal.types import Finding
from malamute_py.store.database import DATABASE, MARK, connect
from malamute_py.store.errors import StoreError
from malamute_py.store.loading import check, load
from malamute_py.store.opening import Mark
from malamute_py.store.snapshot import MAIN

_NEXT = (
    "the next start makes it anew from the log where that has everything, and serves streams"
    " alone where it has not"
)


def findings(directory: Path) -> Iterator[Finding]:
    """Yield what is wrong with a data directory's tables, their bodies and indexes included.

    For `malamute journal verify`.
    """
    foreign = foreign_main(FileStorage(directory, read_only=True))
    if foreign:
        yield Finding(MAIN, "damaged", foreign)
    path = directory / DATABASE
    if not os.path.lexists(path):
        if os.path.lexists(directory / MARK):
            yield Finding("", "missing", f"{DATABASE} is missing; {_NEXT}")
        return
    try:
        with contextlib.closing(connect(path, read_only=True)) as connection:
            check(connection, whole=True)
            load(connection)  # raises for a row that cannot be read
    except (StoreError, sqlite3.Error, OSError) as error:
        yield Finding("", "damaged", f"{DATABASE}: {error}; {_NEXT}")
    if kind_of(directory / MARK):
        yield Finding("", "unknown", f"{MARK} is {kind_of(directory / MARK)} and no file")


def foreign_main(storage: Storage) -> str:
    """Say that the directory of ring main has another ring; "": it has not, or nothing tells.

    storage: the data directory. Its manifest and the mark of the tables must both tell of one ring,
    and the directory of another: one of the files alone may be another directory's. For a start,
    which would go on in the wrong ring, with offsets that were given already.
    """
    # What cannot be read tells nothing; others who read it say so.
    with contextlib.suppress(JournalError, OSError):
        mark, expected = read_mark(storage, MARK, Mark), expected_of(storage, MAIN)
        if mark is None or expected is None or mark.ring != expected.ring:
            return ""
        meta = read_meta(storage.child(RINGS).child(directory_name(MAIN)))
        if meta is not None and meta.uuid != mark.ring:
            return (
                f"{RINGS}/{MAIN} is ring {meta.uuid.hex()}, and this directory's is"
                f" {mark.ring.hex()}, by its manifest and its tables: the directories of two rings"
                " may have been exchanged"
            )
    return ""
