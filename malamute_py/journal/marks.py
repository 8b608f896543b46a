"""Reading the small files and snapshots of a ring.

Owns the decision what an unreadable one means. The rule: a mark is a proof, and without
it there is a proof less; the ring's own identity is never guessed. Source: FORMAT.md,
sections 1, 4 and 7.
"""

from __future__ import annotations

import errno
from typing import Any, NamedTuple, TypeVar

import msgspec

from malamute_protocol.errors import BatchError
from malamute_py.journal.errors import JournalCorrupt, NotAFile
from malamute_py.journal.layout import (
    RING_FILE,
    RingMeta,
    SnapshotFacts,
    control_bodies,
    unpack_file,
)
from malamute_py.journal.storage import Storage, read_file

_Mark = TypeVar("_Mark", bound=msgspec.Struct)


class Snapshot(NamedTuple):
    """A snapshot control batch as it was found."""

    lsn: int
    facts: SnapshotFacts
    bodies: tuple[bytes, ...]


def parse_snapshot(lsn: int, content: Any) -> Snapshot | None:
    """The snapshot in a control batch's content; None when it cannot be understood."""
    try:
        bodies = control_bodies(content)
    except BatchError:
        return None
    facts = unpack_file(bodies[0], SnapshotFacts) if bodies else None
    return None if facts is None else Snapshot(lsn, facts, bodies[1:])


def read_mark(storage: Storage, name: str, kind: type[_Mark]) -> _Mark | None:
    """The record in one of the small files; None when there is none, or not a whole one."""
    try:
        data = read_file(storage, name)
    except OSError as error:
        if error.errno != errno.EIO and not isinstance(error, NotAFile):
            raise
        data = None  # a bad sector takes a proof, and not the ring; what is no file has none
    found: _Mark | None = None if data is None else unpack_file(data, kind)
    return found


def read_meta(storage: Storage) -> RingMeta | None:
    """The ring's fixed facts; None in a new directory.

    Raises JournalCorrupt when the file is there and cannot be understood.
    """
    data = read_file(storage, RING_FILE)
    if data is None:
        return None
    meta: RingMeta | None = unpack_file(data, RingMeta)
    if meta is None:
        raise JournalCorrupt(
            RING_FILE,
            f"the ring's own facts in {storage.describe()} are damaged; restore this file from a"
            " backup, or move the directory away to begin a new ring",
        )
    return meta
