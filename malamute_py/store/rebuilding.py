"""Making the tables anew from the log, and going on where a part of it is lost.

Owns the decision whether the log has everything. The rules: of a log that may lack a change, tables
are made only with the operator's consent; what is made, or given up, is durable before it is used,
so that the operator consents once; the old tables are set aside and never removed. Source:
FORMAT.md, section 4.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from malamute_py.journal import FollowLost
from malamute_py.store.checkpoint import Checkpoint
from malamute_py.store.database import Position, create_file, damaged, position_of, writing
from malamute_py.store.errors import ChangesLost
from malamute_py.store.opening import LogFacts
from malamute_py.store.reading import Changes, Following


def rebuild(
    directory: Path,
    log: LogFacts,
    follow: Following,
    change_next: int,
    *,
    accept_lost: bool = False,
    number_next: int = 1,
) -> None:
    """Make new tables of all that the log has, where the old ones are missing or damaged.

    For a start, and for a repair. change_next: the next offset of the change log. accept_lost: also
    of a log that may lack something; number_next is then the first number for a mailbox or a
    service, above all that were given. The caller has the lock. Raises ChangesLost, FollowLost,
    StoreError, OSError: nothing was changed.
    """
    if log.start_lsn and not accept_lost:
        # What came before is gone, and may have held changes.
        raise ChangesLost(f"the log begins at position {log.start_lsn}")
    first = -1 if log.start_lsn else 0  # as of Changes: -1 for the first change that there is
    position = Position(
        log.start_lsn, first, number_next if accept_lost else 1, log.directory, log.ring
    )

    def fill(connection: sqlite3.Connection) -> None:
        """Apply the whole log to empty tables. Raises ChangesLost: it ends before `change_next`."""
        checkpoint = Checkpoint(connection, follow, accept_lost=accept_lost)
        checkpoint.advance(log.end_lsn, [(log.start_lsn, log.end_lsn)])
        reached = checkpoint.position.change_next
        if reached < change_next and not accept_lost:
            raise ChangesLost(f"the log ends at change {reached} of {change_next}")
        # Changes that are accepted as lost are not waited for.
        _expect_next(connection, change_next)

    try:
        create_file(directory, position, fill)
    except sqlite3.Error as error:
        raise damaged(error) from error


def accept(
    connection: sqlite3.Connection, log: LogFacts, follow: Following, change_next: int
) -> str:
    """Have the tables go on after what the log lacks; returns what that is, "" for nothing.

    Called where the operator accepts the loss, before the tables are read. change_next: offset of
    the next change of the log. Raises StoreError, JournalError, OSError: nothing was changed.
    """
    position = position_of(connection)
    begin = max(position.lsn, log.start_lsn)
    changes = Changes(follow, position.change_next)
    # First the log is read for nothing but what it lacks, which raises.
    try:
        for _ in changes.read([(begin, log.end_lsn)]):
            pass
        if 0 <= changes.next < change_next:
            raise ChangesLost(f"the log ends at change {changes.next} of {change_next}")
    except (ChangesLost, FollowLost) as error:
        checkpoint = Checkpoint(connection, follow, accept_lost=True)
        checkpoint.advance(log.end_lsn, [(begin, log.end_lsn)])
        with writing(connection):
            _expect_next(connection, change_next)
        return str(error)
    return ""


def _expect_next(connection: sqlite3.Connection, change_next: int) -> None:
    """Have the tables expect the change of this offset next, though they lack some before it."""
    connection.execute("UPDATE position SET change_next = max(change_next, ?)", (change_next,))
