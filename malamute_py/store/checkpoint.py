"""The checkpoint: the tables follow the log, one transaction at a time.

Owns one advance: from the position of the tables to a later position of the log, with the broker's
own `apply`. The rules: an advance is one transaction with the position in it, so that it is done
whole or not at all; rows and bodies pass through memory a few at a time; a body is copied only when
its put outlives the advance, and deleted with the last of its rows. A body here is a whole batch of
the mail stream, known by the number of its first message (base). It knows no threads, processes
or clocks, so that the simulator runs it as it is. Source: docs/design.md, Queues and the
checkpoint.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from malamute_protocol.stamp import DATA, Stamp
from malamute_py.changelog.applying import STREAM_CHANGES, apply
from malamute_py.changelog.records import decode_change
from malamute_py.changelog.tables import Queues, Tables
from malamute_py.journal import FollowLost
from malamute_py.store.database import Position, damaged, position_of, writing
from malamute_py.store.errors import StoreDamaged, StoreMoved
from malamute_py.store.forms import (
    CURSORS,
    ENDS,
    GROUPS,
    KEYS,
    MAILBOXES,
    MESSAGES,
    REQUESTS,
    SERVICES,
    STAGED,
    TRANSACTIONS,
)
from malamute_py.store.maps import KeyMap, TableMap
from malamute_py.store.reading import MAIL_STREAM, BodySpan, Changes, Following

_ROWS_MAX: Final = 50_000
"""Rows in memory before they are written into the open transaction: about 50 MB."""
_BODIES_AT_ONCE: Final = 10_000
"""Batches that are looked for in the log in one go."""
_VACUUM_PAGES: Final = 2_000
"""Pages that one call of tidy() gives back."""

_SURVIVORS: Final = (
    "SELECT base FROM messages WHERE base >= ?1 UNION SELECT base FROM requests WHERE base >= ?1"
    " UNION SELECT base FROM staged WHERE base >= ?1"
)
"""Batches from a number on of which a row is left, so that their bodies are kept."""
_LEFT: Final = (
    "DELETE FROM bodies WHERE base = ?1"
    " AND NOT EXISTS (SELECT 1 FROM messages WHERE base = ?1)"
    " AND NOT EXISTS (SELECT 1 FROM requests WHERE base = ?1)"
    " AND NOT EXISTS (SELECT 1 FROM staged WHERE base = ?1)"
)
"""Deletes the body of a batch of which no row is left."""


class Done(msgspec.Struct, array_like=True, frozen=True):
    """The result of one advance."""

    lsn: int
    change_next: int
    changes: int = 0
    rows: int = 0
    """Rows written or deleted."""
    bodies: int = 0
    """Bodies copied."""
    missing: int = 0
    """Bodies of living puts that the log did not give: damage."""
    lost: int = 0
    """Changes that the log lacks; only where the operator accepted that."""
    damages: Sequence[str] = ()
    mail_next: int = 0
    """Number after the last body that was passed; 0: there was none."""


class Checkpoint:
    """Tables that follow one ring; one thread may use them at a time."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        follow: Following,
        *,
        accept_lost: bool = False,
        make_room: Callable[[int], None] | None = None,
    ) -> None:
        """connection: in autocommit (see database.connect). accept_lost: see Changes.

        make_room: called, before anything is committed, with the size that the file is to have.
        Committed pages lie in the WAL first. On a full disk they would never come out of it, and so
        no row could ever be deleted either.
        Raises StoreDamaged: the tables do not say how far they came.
        """
        self.position = position_of(connection)
        self.before_commit: Callable[[], None] = lambda: None
        """Called when everything is written and nothing committed; tests kill the process there."""
        self._connection = connection
        self._read_log = follow
        self._accept_lost = accept_lost
        self._make_room = make_room
        self._messages = TableMap(connection, MESSAGES)
        self._requests = TableMap(connection, REQUESTS)
        self._staged = TableMap(connection, STAGED)
        self._queues = Queues(
            TableMap(connection, MAILBOXES),
            TableMap(connection, SERVICES),
            self._messages,
            self._requests,
            TableMap(connection, CURSORS),
            TableMap(connection, GROUPS),
            KeyMap(connection, KEYS),
            TableMap(connection, TRANSACTIONS),
            self._staged,
            TableMap(connection, ENDS),
            self.position.next_number,
        )
        self._maps: tuple[TableMap[object, object], ...] = tuple(
            getattr(self._queues, name)
            for name in Queues.__struct_fields__
            if name != "next_number"
        )
        self._tables = Tables()
        """Empty: apply() needs it for changes of streams, which are passed over."""

    def advance(
        self,
        to_lsn: int,
        ranges: Iterable[tuple[int, int]] | None = None,
        *,
        going_on: Callable[[], bool] = lambda: True,
    ) -> Done:
        """Follow the log up to a position, durably.

        to_lsn: the end of a bundle, and no further than what is synced. ranges: the parts that may
        hold something for the queues, ascending, each from a bundle's beginning to a bundle's end
        (None: all of it). going_on: asked now and then; False gives up. Raises StoreMoved,
        StoreDamaged, StoreError, ChangesLost, FollowLost, OSError, Abandoned: nothing was changed.
        """
        begin = self.position
        if to_lsn < begin.lsn:
            raise StoreMoved(
                f"the tables are at position {begin.lsn}, after {to_lsn}, where they should end"
            )
        spans = _clipped(ranges, begin.lsn, to_lsn)
        rows_before = sum(each.rows for each in self._maps)
        try:
            with writing(self._connection):
                if position_of(self._connection) != begin:
                    raise StoreMoved("the tables were moved on by another process")
                done = self._follow(begin, to_lsn, spans, going_on)
                if self._make_room is not None:
                    self._make_room(self._file_bytes())
                self.before_commit()
        except BaseException as error:
            # The transaction was taken back: what the maps have in memory counts no more.
            for each in self._maps:
                each.reset()
            self._queues.next_number = begin.next_number
            if isinstance(error, sqlite3.Error):
                raise damaged(error) from error
            raise
        self.position = begin._replace(
            lsn=to_lsn, change_next=done.change_next, next_number=self._queues.next_number
        )
        rows = sum(each.rows for each in self._maps) - rows_before
        return msgspec.structs.replace(done, rows=rows)

    def _follow(
        self,
        begin: Position,
        to_lsn: int,
        spans: list[tuple[int, int]],
        going_on: Callable[[], bool],
    ) -> Done:
        """Apply the changes of these spans of the log, copy their bodies, and set the new position.

        begin: where the tables are. going_on: asked now and then; Abandoned is raised when it says
        no. All of it is in the transaction of advance(), so that an error leaves nothing of it.
        """
        changes = Changes(self._read_log, begin.change_next, accept_lost=self._accept_lost)
        count = 0
        departed: list[int] = []  # numbers of batches of which rows were deleted
        for _, record in changes.read(spans):
            count += 1
            if count % 64 == 0:
                # Both looks cost more than a change does.
                if count % 1024 == 0 and not going_on():
                    raise Abandoned
                if sum(each.held for each in self._maps) > _ROWS_MAX:
                    self._flush(departed)
            try:
                change = decode_change(record)
            except msgspec.MsgspecError as error:
                raise StoreDamaged(f"the log holds a change that is not known: {error}") from error
            if not isinstance(change, STREAM_CHANGES):  # the tables have nothing of streams
                apply(self._tables, self._queues, change)
        self._flush(departed)
        # The body of a batch goes with the last of its rows.
        self._connection.executemany(_LEFT, ((base,) for base in departed))
        copied, missing = self._copy_bodies(changes.places, going_on)
        change_next = changes.next
        self._connection.execute(
            "UPDATE position SET lsn = ?, change_next = ?, next_number = ?",
            (to_lsn, change_next, self._queues.next_number),
        )
        return Done(
            lsn=to_lsn,
            change_next=change_next,
            changes=count,
            bodies=copied,
            missing=missing,
            lost=changes.lost,
            damages=tuple(changes.damages),
            mail_next=changes.mail_next,
        )

    def _file_bytes(self) -> int:
        """Return the size to allocate for the database file: all pages, the WAL's included."""
        execute = self._connection.execute
        pages: int = execute("PRAGMA page_count").fetchone()[0]
        size: int = execute("PRAGMA page_size").fetchone()[0]
        return pages * size

    def _flush(self, departed: list[int]) -> None:
        """Write the changed rows into the open transaction, and free their memory.

        departed: gets the numbers of batches of which a row was deleted.
        """
        departed += [base for _, base in self._messages.departed]
        departed += self._requests.departed
        departed += self._staged.departed
        for each in self._maps:
            each.flush()
            each.departed.clear()

    # --- bodies ------------------------------------------------------------------------

    def _copy_bodies(self, places: list[BodySpan], going_on: Callable[[], bool]) -> tuple[int, int]:
        """Copy the bodies of puts of this advance that still have a row, from the log.

        places: parts of the log with bodies, ascending. Returns how many batches were copied, and
        how many the log did not give.
        """
        if not places:
            return 0, 0
        copied = missing = 0
        # The cursor stays open while other tables are written, which SQLite allows.
        survivors = self._connection.execute(_SURVIVORS, (places[0].base,))
        while found := survivors.fetchmany(_BODIES_AT_ONCE):
            wanted = {base for (base,) in found}
            self._connection.executemany(
                "INSERT OR REPLACE INTO bodies VALUES (?, ?)",
                self._bodies(places, wanted, going_on),
            )
            # _bodies() has taken those that it found out of `wanted`.
            copied += len(found) - len(wanted)
            missing += len(wanted)
        return copied, missing

    def _bodies(
        self, places: list[BodySpan], wanted: set[int], going_on: Callable[[], bool]
    ) -> Iterator[tuple[int, bytes]]:
        """Yield (number, batch) of wanted batches, read from the log; each leaves `wanted`.

        What is damaged there stays in `wanted`.
        """
        # A wanted body lies in the last place that begins at its number or before.
        starts = [place.base for place in places]

        def asked(stamp: Stamp) -> bool:
            """Whether a stamp is that of a wanted batch of the mail stream."""
            return (
                stamp.stream == MAIL_STREAM
                and stamp.control_kind == DATA
                and stamp.base_offset in wanted
            )

        for number in sorted({bisect_right(starts, base) - 1 for base in wanted}):
            if not going_on():
                raise Abandoned
            place = places[number]
            lsn = place.lsn
            while lsn < place.stop:
                try:
                    for stamp, content in self._read_log(lsn, place.stop, asked):
                        wanted.discard(stamp.base_offset)
                        yield stamp.base_offset, stamp.pack() + content
                    break
                except FollowLost as lost:
                    if lost.code == "retention":
                        raise  # The log does not reach so far back: the advance cannot be made.
                    lsn = lost.to_lsn  # on after the damage

    # --- keeping -----------------------------------------------------------------------

    def tidy(self) -> bool:
        """Give back a little of the space that deleted rows and bodies left in the file.

        Returns whether there is more. Called again and again while the broker asks for nothing
        else. On a full disk nothing is given back; a later call does it.
        """
        execute = self._connection.execute
        try:
            free = execute("PRAGMA freelist_count").fetchone()[0]
            pages = execute("PRAGMA page_count").fetchone()[0]
            # Only where more than half of the file is free.
            if free <= _VACUUM_PAGES or free * 2 <= pages:
                return False
            execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()
            left = execute("PRAGMA freelist_count").fetchone()[0]
        except sqlite3.OperationalError:
            return False
        return bool(left < free)


class Abandoned(Exception):
    """The advance was given up because its caller wants it no more."""


def _clipped(
    ranges: Iterable[tuple[int, int]] | None, begin: int, end: int
) -> list[tuple[int, int]]:
    """Return the parts of these ranges within [begin, end); None stands for all of it."""
    if ranges is None:
        return [(begin, end)] if begin < end else []
    clipped = [(max(first, begin), min(stop, end)) for first, stop in ranges]
    return [(first, stop) for first, stop in clipped if first < stop]
