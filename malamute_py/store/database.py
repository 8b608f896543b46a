"""The database file: its tables, how it is opened, and which process may write it.

Owns the schema, the settings of SQLite that durability depends on, the row with the position of the
tables, and the lock. The rules: WAL with synchronous=FULL, so that a commit is on disk when it
returns; a new file appears under its name only when it is whole, with its directory entry synced;
one process writes. Source: docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from malamute_py.journal.storage import kind_of, open_regular
from malamute_py.store.errors import StoreDamaged, StoreError, StoreLocked
from malamute_py.store.forms import ADDED, FORMS, Form

DATABASE: Final = "queues.db"
LOCK: Final = "queues.lock"
MARK: Final = "queues"
"""A small file that says that there was a database: where it lies without one, the database is
missing."""
FILES: Final = frozenset(
    [
        *(DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", f"{DATABASE}-journal"),
        *(f"{DATABASE}.tmp", f"{DATABASE}.tmp-journal", LOCK, MARK, f"{MARK}.tmp"),
    ]
)
"""Files that the store has in a data directory."""

APPLICATION: Final = 0x4D4C5131  # "MLQ1"
VERSION: Final = 1
_BUSY_S: Final = 5.0
_WAL_BYTES: Final = 64 << 20
_CACHE_KIB: Final = 16 << 10


class Position(NamedTuple):
    """The position that the tables have reached, and the log that it belongs to."""

    lsn: int
    """Everything in ring main before this position is in the tables."""
    change_next: int
    """Offset of the next record of the change log; -1: not known, as the beginning of the log is
    gone and held no change records."""
    next_number: int
    """The tables' Queues.next_number."""
    directory: bytes
    """uuid of the data directory."""
    ring: bytes
    """uuid of ring main."""


def connect(
    path: str | Path, *, read_only: bool = False, any_thread: bool = False
) -> sqlite3.Connection:
    """Open a connection that begins no transaction by itself: callers send BEGIN and COMMIT.

    any_thread: the caller sees to it that one thread uses it at a time. Raises StoreDamaged: what
    has the name, or the name of its WAL, is no file; sqlite3.Error.
    """
    # SQLite would follow a link to another place, and wait for a FIFO's other end.
    for beside in ("", "-wal", "-shm", "-journal"):
        kind = kind_of(f"{path}{beside}")
        if kind:
            raise StoreDamaged(f"{kind} stands where {Path(path).name}{beside} should be")
    uri = f"{Path(path).absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
    return sqlite3.connect(
        uri, uri=True, isolation_level=None, timeout=_BUSY_S, check_same_thread=not any_thread
    )


def set_up(connection: sqlite3.Connection) -> None:
    """Make the settings of a writer: what a commit syncs, and bounds of memory and WAL.

    They hold for this connection alone.
    """
    execute = connection.execute
    execute("PRAGMA synchronous = FULL")
    execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
    execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    # Debian's SQLite has it on: it wrote each deleted body once more, as zeros (32 MB of bodies
    # made 32 MB of WAL, now 90 kB), and on a full disk nothing could be deleted. The ring has the
    # bodies, too.
    execute("PRAGMA secure_delete = OFF")
    execute("PRAGMA temp_store = MEMORY")


def create(connection: sqlite3.Connection, position: Position) -> None:
    """Make the tables in an empty database. position: where they begin."""
    execute = connection.execute
    # To be set before the first table; by it Checkpoint.tidy() can give space back.
    execute("PRAGMA auto_vacuum = INCREMENTAL")
    execute("PRAGMA synchronous = FULL")
    execute("BEGIN IMMEDIATE")
    execute(f"PRAGMA application_id = {APPLICATION}")
    execute(f"PRAGMA user_version = {VERSION}")
    for form in FORMS:
        _create_table(execute, form)
    execute("CREATE TABLE bodies (base INTEGER PRIMARY KEY, batch BLOB NOT NULL) STRICT")
    execute(
        "CREATE TABLE position (one INTEGER PRIMARY KEY CHECK (one = 1), lsn INTEGER NOT NULL,"
        " change_next INTEGER NOT NULL, next_number INTEGER NOT NULL,"
        " directory BLOB NOT NULL, ring BLOB NOT NULL) STRICT"
    )
    execute("INSERT INTO position VALUES (1, ?, ?, ?, ?, ?)", position)
    execute("COMMIT")


def _create_table(execute: Callable[[str], object], form: Form[Any, Any]) -> None:
    """Make the table of a form: a column for each part of the key, and the row as bytes.

    `at` is the place of a row in the order of the table's rows (maps.py).
    """
    columns = ", ".join(f"{column} NOT NULL" for column in form.columns)
    # A column of a form is its name, then its type.
    names = ", ".join(column.split()[0] for column in form.columns)
    execute(
        f"CREATE TABLE {form.table} (at INTEGER PRIMARY KEY, {columns}, row BLOB NOT NULL) STRICT"
    )
    execute(f"CREATE UNIQUE INDEX {form.table}_by_key ON {form.table} ({names})")


def _add_tables(connection: sqlite3.Connection) -> None:
    """Make the tables that a database of an earlier version lacks, all of them or none."""
    known = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    lacking = [form for form in ADDED if form.table not in known]
    if lacking:
        with writing(connection):
            for form in lacking:
                _create_table(connection.execute, form)


def create_file(
    directory: Path,
    position: Position,
    fill: Callable[[sqlite3.Connection], None] = lambda connection: None,
) -> None:
    """Make a new database file, durably; what has its name is set aside once the new one is whole.

    fill: puts into the tables what they begin with. Raises sqlite3.Error, OSError, and what fill
    raises: nothing was changed.
    """
    path, temporary = directory / DATABASE, directory / f"{DATABASE}.tmp"
    for name in (temporary.name, f"{temporary.name}-journal"):
        (directory / name).unlink(missing_ok=True)  # the rest of an attempt that was killed
    # Bodies are for no other user to read; the files that SQLite puts beside it get the same
    # permissions.
    os.close(open_regular(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    connection = sqlite3.connect(temporary, isolation_level=None)
    try:
        create(connection, position)
        set_up(connection)
        fill(connection)
        connection.execute("PRAGMA journal_mode = WAL")
    except BaseException:
        connection.close()
        temporary.unlink(missing_ok=True)
        raise
    connection.close()
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    _set_aside(directory)
    temporary.replace(path)
    sync_directory(directory)


def _set_aside(directory: Path) -> None:
    """Make the database's name free: rename what has it, and its WAL, to queues.damaged-N.

    Called before a new database takes the name. Nothing that may be of use is removed.
    """
    number = 0  # the first one that no file has
    while os.path.lexists(directory / f"queues.damaged-{number}.db"):
        number += 1
    path, aside = directory / DATABASE, directory / f"queues.damaged-{number}.db"
    if os.path.lexists(path):
        path.rename(aside)
    wal = directory / f"{DATABASE}-wal"
    if os.path.lexists(wal):
        # SQLite would take the WAL of a removed file for the new one's.
        wal.rename(f"{aside}-wal")
    # SQLite's index of the WAL, which it makes anew. A directory is never removed.
    shm = directory / f"{DATABASE}-shm"
    if kind_of(shm) == "a directory":
        shm.rename(f"{aside}-shm")
    else:
        shm.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_database(path: str | Path) -> sqlite3.Connection:
    """Open the database for writing, with the settings of a writer and all tables of this version.

    Raises StoreDamaged: it is none, or of another version; StoreError: SQLite cannot open it now.
    """
    try:
        connection = connect(path)
    except sqlite3.Error as error:
        raise damaged(error) from error
    try:
        check_form(connection)
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StoreDamaged(f"SQLite keeps {path} in mode {mode} where WAL is needed")
        set_up(connection)
        _add_tables(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error):
            raise damaged(error) from error
        raise
    return connection


def check_form(connection: sqlite3.Connection) -> None:
    """Raise StoreDamaged: it is no database of ours, or of a later version; or sqlite3.Error."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION:
        raise StoreDamaged("it is no database of queues")
    if version != VERSION:
        raise StoreDamaged(f"its tables are of version {version}, this program knows {VERSION}")


def damaged(error: sqlite3.Error) -> StoreError:
    """Return one of our errors for SQLite's, for the caller to raise."""
    if isinstance(error, sqlite3.OperationalError):
        # The disk is full, or the file is busy: it may be good.
        return StoreError(f"SQLite: {error}")
    return StoreDamaged(f"SQLite: {error}")


def position_of(connection: sqlite3.Connection) -> Position:
    """Read the position of the tables. Raises StoreDamaged, sqlite3.Error."""
    row = connection.execute(
        "SELECT lsn, change_next, next_number, directory, ring FROM position"
    ).fetchone()
    if row is None:
        raise StoreDamaged("it does not say how far it came")
    return Position(*row)


@contextlib.contextmanager
def writing(connection: sqlite3.Connection) -> Iterator[None]:
    """Run one transaction: committed at the end, taken back when the block raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


class Lock:
    """The right to write one directory's tables; held until released, or until the process ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        """Give the right back, so that another process may write."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()


def lock(
    directory: Path,
    wait_s: float = 0.0,
    *,
    going_on: Callable[[], bool] = lambda: True,
    reading: bool = False,
) -> Lock:
    """Take the right to write a directory's tables; for at most wait_s it is waited for.

    The writer of a broker that was killed ends by itself, soon after it. going_on: False gives up.
    reading: only keep writers out; nothing is written or made. Raises StoreLocked naming the
    holder; FileNotFoundError: reading, and no writer ever was; OSError.
    """
    # The lock has a file of its own: closing any descriptor of the database would drop SQLite's
    # locks.
    fd = open_regular(directory / LOCK, os.O_RDONLY if reading else os.O_RDWR | os.O_CREAT)
    kind = fcntl.LOCK_SH if reading else fcntl.LOCK_EX
    deadline = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < deadline and going_on():
                    time.sleep(0.01)
                    continue
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise StoreLocked(
                    f"the tables in {directory} are being written by process {holder}"
                ) from None
        if not reading:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return Lock(fd)
