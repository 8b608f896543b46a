"""Tables as maps: a row is loaded when it is asked for, and kept only until it is written.

Owns the maps over which the checkpoint runs the broker's `apply`. The rules: a map has a
dictionary's order, kept by the column `at`; a row that was put and taken away between two flushes
never touches the table; a flush writes within the transaction of its connection and empties the
memory. Source: docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, MutableMapping
from typing import Any, TypeVar, cast

from malamute_py.changelog.tables import Key, KeyRow, Remembering
from malamute_py.store.forms import Form

K = TypeVar("K")
V = TypeVar("V")


class TableMap(MutableMapping[K, V]):
    """One table as a map. A caller that changes a row which it got has to put it back."""

    def __init__(self, connection: sqlite3.Connection, form: Form[K, V]) -> None:
        """connection: in autocommit; the caller begins and ends transactions.

        form: names the table, the columns of its key, and how a row becomes bytes.
        """
        self._connection = connection
        self._form = form
        # The statements over this table. A column is a name, then its type. The column `at` is the
        # place of a row in the map's order; the values of an insertion are it, the key's, the row.
        names = [column.split()[0] for column in form.columns]
        table = form.table
        where = " AND ".join(f"{name} = ?" for name in names)
        values = ", ".join("?" * (1 + len(names) + 1))
        self._select = f"SELECT row FROM {table} WHERE {where}"
        self._insert = f"INSERT INTO {table} (at, {', '.join(names)}, row) VALUES ({values})"
        self._update = f"UPDATE {table} SET row = ? WHERE {where}"
        self._delete = f"DELETE FROM {table} WHERE {where}"
        self._scan = f"SELECT at, row FROM {table} WHERE at > ? ORDER BY at"
        self._bounds = f"SELECT coalesce(max(at), 0), count(*) FROM {table}"
        self.departed: list[K] = []
        """Keys of rows that were deleted; the checkpoint takes them, to delete their bodies."""
        self.rows = 0
        """Rows written or deleted since the beginning."""
        self.reset()

    def reset(self) -> None:
        """Forget what was not flushed, and read the table's bounds; after an undone transaction."""
        self._new: dict[K, V] = {}
        """Rows that are not in the table."""
        self._changed: dict[K, V] = {}
        """Rows that the table has in another form."""
        self._gone: set[K] = set()
        """Rows that the table has and that are to be deleted; a row that came back is in _new,
        too."""
        self._loaded: dict[K, V] = {}
        """Rows as the table has them."""
        self._emptied_at = 0
        """All rows at this place or before are in _gone."""
        self.departed.clear()
        # Place of the last row, and how many rows the map has.
        self._at, self._count = self._connection.execute(self._bounds).fetchone()

    # --- the map -----------------------------------------------------------------------

    def _find(self, key: K) -> V | None:
        """Return the row of a key, loaded from the file if need be; None: there is none."""
        row = self._new.get(key)
        if row is None:
            row = self._changed.get(key)
        if row is None:
            row = self._loaded.get(key)
        if row is not None or key in self._gone:
            return row  # None: it is deleted, which the file does not have yet
        found = self._connection.execute(self._select, self._form.values(key)).fetchone()
        if found is None:
            return None
        _, row = self._form.unpack(found[0])
        self._loaded[key] = row
        return row

    def get(self, key: K, default: Any = None) -> Any:
        """Return the row, loaded when it is not in memory."""
        row = self._find(key)
        return default if row is None else row

    def __getitem__(self, key: K) -> V:
        row = self._find(key)
        if row is None:
            raise KeyError(key)
        return row

    def __setitem__(self, key: K, row: V) -> None:
        """Put a row, which the next flush writes."""
        # A key that was deleted is new again: its row becomes the last one, as in a dictionary.
        if key in self._new:
            self._new[key] = row
        elif key in self._changed:
            self._changed[key] = row
        elif self._find(key) is None:
            self._new[key] = row
            self._count += 1
        else:
            self._loaded.pop(key, None)
            self._changed[key] = row

    def __delitem__(self, key: K) -> None:
        """Take a row away; one that was flushed before is deleted by the next flush."""
        if key in self._new:
            del self._new[key]  # it never touches the table
        else:
            if self._find(key) is None:
                raise KeyError(key)
            self._changed.pop(key, None)
            self._loaded.pop(key, None)
            self._gone.add(key)  # It is deleted from the table at the next flush.
            self.departed.append(key)
        self._count -= 1

    def __len__(self) -> int:
        return cast("int", self._count)

    def __iter__(self) -> Iterator[K]:
        """Yield all keys, the oldest first: those in the table, then those of new rows."""
        # Deleted rows are in the table until the next flush. A caller that takes the first row
        # again and again must not pass over all of them each time: leading ones are skipped.
        leading = True
        for at, data in self._connection.execute(self._scan, (self._emptied_at,)):
            key, _ = self._form.unpack(data)
            if key not in self._gone:
                leading = False
                yield key
            elif leading:
                self._emptied_at = at
        yield from list(self._new)

    # --- the table ---------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Return how many rows are in memory."""
        return len(self._new) + len(self._changed) + len(self._gone) + len(self._loaded)

    def flush(self) -> None:
        """Write all changes within the open transaction, and empty the memory.

        Called at the end of an advance, and during it when many rows are in memory.
        """
        execute, form = self._connection.executemany, self._form
        values, pack, at = form.values, form.pack, self._at
        # New rows get the places after the last one, in the order in which they came. Deletions
        # come first: a key that went and came back is in `_gone` and in `_new`.
        if self._gone:
            execute(self._delete, map(values, self._gone))
        if self._changed:
            execute(
                self._update,
                ((pack(key, row), *values(key)) for key, row in self._changed.items()),
            )
        if self._new:
            execute(
                self._insert,
                (
                    (at + place, *values(key), pack(key, row))
                    for place, (key, row) in enumerate(self._new.items(), 1)
                ),
            )
        self._at = at + len(self._new)
        self.rows += len(self._gone) + len(self._changed) + len(self._new)
        for kept in (self._new, self._changed, self._gone, self._loaded):
            kept.clear()


class KeyMap(TableMap[Key, KeyRow], Remembering):
    """The table of keys; the number and order of each owner's keys are counted in memory."""

    def reset(self) -> None:
        """Forget what was not flushed, and count again when that is asked for."""
        super().reset()
        self._shares = None
