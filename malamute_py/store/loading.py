"""Loading the tables at start-up.

Owns the way from the database to Queues in memory. The rules: when one row's checksum is wrong,
nothing is loaded; the order of each map is that of the log. Source: docs/design.md, Queues and the
checkpoint.
"""

from __future__ import annotations

import gc
import sqlite3
from typing import Any

from malamute_py.changelog.tables import Keys, Queues
from malamute_py.store.database import check_form, damaged, position_of
from malamute_py.store.errors import StoreDamaged
from malamute_py.store.forms import (
    ADDED,
    CURSORS,
    ENDS,
    FORMS,
    GROUPS,
    KEYS,
    MAILBOXES,
    MESSAGES,
    REQUESTS,
    SERVICES,
    STAGED,
    TRANSACTIONS,
    Form,
)


def load(connection: sqlite3.Connection) -> Queues:
    """Load all rows, without bodies, into the maps that a broker works on in memory.

    For a start, and for checks of a copy. Raises StoreDamaged: a row cannot be read, or the
    database is of another version; StoreError: SQLite cannot read it now.
    """
    collecting = gc.isenabled()
    # Python's collector would look at each of a million new objects again and again, for nothing.
    gc.disable()
    try:
        check_form(connection)
        position = position_of(connection)
        return Queues(
            _rows(connection, MAILBOXES),
            _rows(connection, SERVICES),
            _rows(connection, MESSAGES),
            _rows(connection, REQUESTS),
            _rows(connection, CURSORS),
            _rows(connection, GROUPS),
            Keys(_rows(connection, KEYS)),
            _rows(connection, TRANSACTIONS),
            _rows(connection, STAGED),
            _rows(connection, ENDS),
            position.next_number,
        )
    except sqlite3.Error as error:
        raise damaged(error) from error
    finally:
        if collecting:
            gc.enable()


def _rows(connection: sqlite3.Connection, form: Form[Any, Any]) -> dict[Any, Any]:
    """Return all rows of a table by key, in the order in which they came.

    Raises StoreDamaged: a row cannot be read, or two rows have one key, which only damage does.
    """
    if not _has(connection, form):
        return {}  # A database of an earlier version has no such rows.
    unpack = form.unpack
    rows = dict(
        unpack(data) for (data,) in connection.execute(f"SELECT row FROM {form.table} ORDER BY at")
    )
    count = connection.execute(f"SELECT count(*) FROM {form.table}").fetchone()[0]
    # SQLite counts by the smallest index: so rows that the table lost show, too.
    if count != len(rows):
        raise StoreDamaged(f"the table {form.table} has {len(rows)} rows and an index of {count}")
    return rows


def _has(connection: sqlite3.Connection, form: Form[Any, Any]) -> bool:
    """Whether a database has the table of a form: one of an earlier version may lack it."""
    if form not in ADDED:
        return True
    found = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (form.table,))
    return found.fetchone() is not None


def check(connection: sqlite3.Connection, *, whole: bool = False) -> None:
    """Look for damage in the file's structure; whole: also in its bodies and every index.

    Raises StoreDamaged: there is some; StoreError: SQLite cannot look for it now.
    """
    try:
        # Without a table's name SQLite checks all of the file; the usual check leaves the bodies
        # out, which may be large, and are checked when they are read.
        present = [form for form in FORMS if _has(connection, form)]
        tables = [""] if whole else [f"({form.table})" for form in present]
        kind = "integrity_check" if whole else "quick_check"
        for table in tables:
            for (found,) in connection.execute(f"PRAGMA {kind}{table}"):
                if found != "ok":
                    raise StoreDamaged(f"SQLite finds it damaged: {found}")
    except sqlite3.Error as error:
        raise damaged(error) from error
