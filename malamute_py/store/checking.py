"""Check of the tables of a stopped broker, beside what the journal's own tool checks.

Owns the findings about queues.db. The rule: nothing is changed. Source: FORMAT.md, section 4.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from malamute_py.journal.storage import kind_of
from malamute_py.journal.types import Finding
from malamute_py.store.database import DATABASE, MARK, connect
from malamute_py.store.errors import StoreError
from malamute_py.store.loading import check, load

_NEXT = (
    "the next start makes it anew from the log where that has everything, and serves streams"
    " alone where it has not"
)


def findings(directory: Path) -> Iterator[Finding]:
    """Yield what is wrong with a data directory's tables, their bodies and indexes included.

    For `malamute journal verify`.
    """
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
