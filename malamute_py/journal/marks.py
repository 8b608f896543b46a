"""Reading the small files and snapshots of a ring.

Owns the decision what an unreadable one means. The rule: a mark is a proof, and without
it there is a proof less; the ring's own identity is never guessed. Source: FORMAT.md,
sections 1, 4 and 7.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, TypeVar

import msgspec

from malamute_protocol.errors import BatchError
from malamute_py.journal.errors import JournalCorrupt, is_damage
from malamute_py.journal.layout import (
    RING_FILE,
    RingMeta,
    SnapshotFacts,
    control_bodies,
    read_segment_header,
    segment_number,
    unpack_file,
)
from malamute_py.journal.manifest import Expected
from malamute_py.journal.storage import Storage, read_file, read_sound
from malamute_py.journal.types import SEGMENT_HEADER_BYTES

_Mark = TypeVar("_Mark", bound=msgspec.Struct)


class Snapshot(NamedTuple):
    """A snapshot control batch as it was found."""

    lsn: int
    facts: SnapshotFacts
    bodies: tuple[bytes, ...]


def parse_snapshot(lsn: int, content: Any) -> Snapshot | None:
    """Return the snapshot of the ring's state in a control batch; None: it cannot be understood.

    For recoveries, copies and readers of the files. lsn: position of the batch.
    """
    try:
        bodies = control_bodies(content)
    except BatchError:
        return None
    # The journal's own facts are the first record, the caller's state the others.
    facts = unpack_file(bodies[0], SnapshotFacts) if bodies else None
    return None if facts is None else Snapshot(lsn, facts, bodies[1:])


def read_mark(storage: Storage, name: str, kind: type[_Mark]) -> _Mark | None:
    """Return the record in one of the small files; None when there is none, or not a whole one.

    Raises OSError, but not for a bad sector.
    """
    data = read_sound(storage, name)
    found: _Mark | None = None if data is None else unpack_file(data, kind)
    return found


def read_meta(storage: Storage) -> RingMeta | None:
    """Return the ring's fixed facts for a reader, which repairs nothing; None in a new directory.

    Raises JournalCorrupt as find_meta(), without a manifest.
    """
    meta, _ = find_meta(storage, expected=None)
    return meta


def find_meta(storage: Storage, expected: Expected | None) -> tuple[RingMeta | None, str]:
    """Return the ring's fixed facts, and why the file `ring` has to be made anew ("": it is good).

    Where the file is missing or damaged the ring's manifest (expected) has the same facts, and so
    have the headers of its segments. (None, ""): a new directory. Raises JournalCorrupt: nothing
    tells; OSError, but not for a bad sector.
    """
    data: bytes | None
    try:
        data = read_file(storage, RING_FILE)
    except OSError as error:
        if not is_damage(error):
            raise
        data = b""
    meta: RingMeta | None = None if data is None else unpack_file(data, RingMeta)
    if meta is not None:
        return meta, ""
    what = "it was missing" if data is None else "it was damaged"
    if expected is not None:
        found = RingMeta(expected.ring, expected.segment_bytes)
        return found, f"{what}; the ring's manifest says the same"
    said = _said_by_headers(storage)
    if len(said) == 1:  # all headers agree
        return RingMeta(*said.pop()), f"{what}; the headers of the ring's segments say the same"
    if data is None and not any(segment_number(name) is not None for name in storage.names()):
        return None, ""
    raise JournalCorrupt(
        RING_FILE,
        f"the ring's own facts in {storage.describe()} are {what.removeprefix('it was ')}, and"
        " neither a manifest nor the headers of its segments tell them: restore this file from a"
        " snapshot, or move the directory away to go on without what is in it",
    )


def _said_by_headers(storage: Storage) -> set[tuple[bytes, int]]:
    """Return the distinct (uuid, segment_bytes) in the segments' headers that are good.

    For a ring whose own file is bad: what all headers agree on takes its place.
    """
    said = set()
    for name in storage.names():
        if segment_number(name) is not None:
            with contextlib.suppress(OSError):
                data = storage.read(storage.open(name), 0, SEGMENT_HEADER_BYTES)
                header = read_segment_header(data)
                if header is not None:
                    said.add((header.ring, header.segment_bytes))
    return said
