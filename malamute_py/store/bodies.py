"""StoredBodies by number, from the tables.

Owns the reading of bodies that the journal no longer has. The rules: one thread uses it; each read
is short, so that it never delays the writer's checkpoints of its WAL; both checksums of a batch are
checked when it is read. Source: docs/design.md (Journal; Queues and the checkpoint).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from malamute_protocol.errors import BatchError
from malamute_protocol.stamp import Stamp
from malamute_py.journal.check import content_fault
from malamute_py.store.database import connect, damaged
from malamute_py.store.errors import StoreError


class StoredBodies:
    """Reads bodies from the database; a database that is not there yet has no bodies."""

    def __init__(self, path: Path) -> None:
        """path: of the database, which is opened at the first read."""
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def read(self, numbers: Iterable[int]) -> tuple[dict[int, bytes], dict[int, str], str]:
        """Return the batches that are good, what is wrong with others, and an error of the read.

        For bodies of mail and requests whose segment the journal gave up. numbers: of the first
        message of each batch. A damaged batch does not hinder the others. The error tells why
        nothing more could be read now; "": there was none.
        """
        found: dict[int, bytes] = {}
        damages: dict[int, str] = {}
        failed = ""
        try:
            connection = self._connection
            if connection is None:
                if not self._path.exists():
                    return found, damages, ""
                connection = self._connection = connect(self._path, any_thread=True)
                connection.execute("PRAGMA query_only = 1")
            for number in numbers:
                row = connection.execute(
                    "SELECT batch FROM bodies WHERE base = ?", (number,)
                ).fetchone()
                if row is None:
                    continue
                (batch,) = row
                fault = _fault(number, batch)
                if fault:
                    damages[number] = f"in the tables: {fault}"
                else:
                    found[number] = batch
        except StoreError as error:
            failed = str(error)
        except sqlite3.Error as error:
            failed = str(damaged(error))
        return found, damages, failed

    def close(self) -> None:
        """Close the file; no other thread may read any more."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _fault(number: int, batch: bytes) -> str:
    """Say what is wrong with a stored batch, which should be of this number; "" when nothing is."""
    try:
        stamp = Stamp.unpack(batch)
    except BatchError as error:
        return error.reason
    if stamp.base_offset != number or stamp.size != len(batch):
        return "another batch lies there"
    return content_fault(batch, stamp.stamp_bytes, len(batch), stamp)
