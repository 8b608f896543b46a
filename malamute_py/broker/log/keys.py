"""The keys of a stream: the newest record of each subject.

Owns the index from a subject to the offset of its newest record, with the records that were taken
and are not in the journal yet. The rules: an offset enters the index when its batch was appended; a
condition is checked against what was taken, so that two changes of one turn see each other; once
the journal refuses a batch, nothing that was taken after it happened. Source: SPEC.md, section 8.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

import numpy as np

from malamute_protocol.content import Content
from malamute_protocol.keys import is_deletion
from malamute_py.broker.structures.sorted_values import Ordered

KEY_OVERHEAD = 250
"""Bytes of memory that a key takes beside its name, about."""
LOOK_SEGMENTS = 6
"""Segments that are left of a ring when its oldest ones are looked at: two of them are prepared
ahead, and empty."""
STOP_SEGMENTS = 4
"""Segments that are left of a ring when it takes no record more: newest records that have to move
need some."""
_SHIFT = 24
"""Bits of a value in the index below the offset: one number takes a third of three."""
_DELETED = 1
_UNIT_SHIFT = 3
"""The size of a record is kept in units of 16 bytes, above the bit that says it is a deletion."""
_SIZE_MAX = (1 << _SHIFT) - 1 >> 1


class NewestRow(NamedTuple):
    """The newest record of a subject within one batch."""

    subject: str
    row: int
    deletion: bool


class Taken(NamedTuple):
    """A batch that was taken and is not in the journal yet."""

    base: int
    rows: list[NewestRow]
    size: int
    row_bytes: int


def newest_rows(content: Content) -> list[NewestRow]:
    """Return the newest record of each subject of a batch."""
    headers, codes = content.headers()
    count = content.head.count
    if codes is None:
        header = headers[0]
        return [NewestRow(header.keys[0], count - 1, is_deletion(header.fields))]
    used, distances = np.unique(codes[::-1], return_index=True)
    newest: dict[str, NewestRow] = {}
    for code, distance in zip(used.tolist(), distances.tolist(), strict=True):
        header, row = headers[code], count - 1 - distance
        known = newest.get(header.keys[0])
        if known is None or known.row < row:
            newest[header.keys[0]] = NewestRow(header.keys[0], row, is_deletion(header.fields))
    return list(newest.values())


class Room:
    """The room of the ring that a stream with keys has to itself, in positions of the ring."""

    __slots__ = ("asked", "look_lsn", "segment_bytes", "segments", "stop_lsn")

    def __init__(self) -> None:
        self.segment_bytes = 0
        self.segments = 0
        """Segments that the ring may have; 0: the journal was not asked yet."""
        self.asked = False
        """Whether the journal is being asked for the oldest segments."""
        self.look_lsn = 0
        """End of the ring from which on segments are to be given up."""
        self.stop_lsn = 1 << 63
        """End of the ring beyond which no record is taken but a deletion marker."""

    def begin(self, start_lsn: int) -> None:
        """Note where the oldest segment begins that may hold a newest record."""
        self.look_lsn = start_lsn + (self.segments - LOOK_SEGMENTS) * self.segment_bytes
        self.stop_lsn = start_lsn + (self.segments - STOP_SEGMENTS) * self.segment_bytes

    def allows(self, end_lsn: int, deletion: bool) -> bool:
        """Whether a batch may make the ring as long as this."""
        return end_lsn <= self.stop_lsn + deletion * self.segment_bytes


class Keys:
    """The newest record of each subject of one stream."""

    __slots__ = (
        "_coming", "_newest", "_taken", "bytes", "deleted", "memory", "names", "ready", "room",
        "taken_bytes", "taken_next",
    )  # fmt: skip

    def __init__(self, next: int, *, ready: bool) -> None:
        """next: the stream's next offset. ready: there is no record that was not looked at."""
        self._newest: OrderedDict[str, int] = OrderedDict()
        """Subject -> offset, size and kind of its newest record, ordered by offset."""
        self.names: Ordered[str] = Ordered()
        """Subjects in the index, deleted ones included."""
        self.deleted: OrderedDict[str, int] = OrderedDict()
        """Deleted subject -> append time of its deletion marker, the oldest first."""
        self.ready = ready
        """False while a start reads the keys from the journal."""
        self.bytes = 0
        """Bytes of the newest records, about: a part of a batch counts an equal share of it."""
        self.memory = 0
        """Bytes of memory that the index takes, about."""
        self.room = Room()
        self.taken_next = next
        """Offset after everything that was taken."""
        self.taken_bytes = 0
        """Bytes of the batches that were taken and are not in the journal yet."""
        self._taken: deque[Taken] = deque()
        self._coming: dict[str, int] = {}
        """Subject -> its revision once everything is appended that was taken."""

    def __len__(self) -> int:
        return len(self._newest)

    def __contains__(self, subject: str) -> bool:
        return subject in self._newest or subject in self._coming

    # --- questions ----------------------------------------------------------------------

    def find(self, subject: str) -> tuple[int, bool] | None:
        """Return (offset, whether it is a deletion) of a subject's newest record in the journal."""
        value = self._newest.get(subject)
        return None if value is None else (value >> _SHIFT, bool(value & _DELETED))

    def revision(self, subject: str) -> int:
        """Return the revision of a key, counting what was taken; 0: there is no such key."""
        coming = self._coming.get(subject)
        if coming is not None:
            return coming
        value = self._newest.get(subject, _DELETED)
        return 0 if value & _DELETED else value >> _SHIFT

    @property
    def oldest(self) -> int | None:
        """Offset of the oldest record that is its subject's newest; None: there is none."""
        for value in self._newest.values():
            return value >> _SHIFT
        return None

    # --- changes ------------------------------------------------------------------------

    def take(self, rows: list[NewestRow], count: int, size: int) -> None:
        """Take a batch of `count` records and `size` bytes; its offsets follow the last ones."""
        base = self.taken_next
        self.taken_next = base + count
        self.taken_bytes += size
        self._taken.append(Taken(base, rows, size, size // count))
        for subject, row, deletion in rows:
            self._coming[subject] = 0 if deletion else base + row

    def appended(self, time_ms: int) -> None:
        """Enter the oldest batch that was taken into the index: the journal has it."""
        base, rows, size, row_bytes = self._taken.popleft()
        self.taken_bytes -= size
        for subject, row, deletion in rows:
            self.enter(subject, base + row, row_bytes, time_ms if deletion else None)
        if not self._taken:
            self._coming.clear()

    def dropped(self, next: int) -> None:
        """Forget everything that was taken: the journal refused it. next: the stream's."""
        self._taken.clear()
        self._coming.clear()
        self.taken_next = next
        self.taken_bytes = 0

    def weigh(self, rows: list[NewestRow]) -> int:
        """Return the bytes of memory that keys would take if all of them were new."""
        return sum(KEY_OVERHEAD + len(row.subject) for row in rows)

    def enter(self, subject: str, offset: int, size: int, deleted_ms: int | None) -> None:
        """Note the newest record of a subject. deleted_ms: append time of a deletion marker."""
        newest = self._newest
        before = newest.get(subject)
        units = min(size >> _UNIT_SHIFT, _SIZE_MAX & ~_DELETED) & ~_DELETED
        value = offset << _SHIFT | units | (deleted_ms is not None)
        if before is None:
            self.names.add(subject)
            self.memory += KEY_OVERHEAD + len(subject)
        else:
            self.bytes -= _size(before)
            newest.move_to_end(subject)
            if before & _DELETED:
                del self.deleted[subject]
        newest[subject] = value
        self.bytes += _size(value)
        if deleted_ms is not None:
            self.deleted[subject] = deleted_ms

    def forget_deleted(self, before_ms: int, most: int) -> None:
        """Forget keys that were deleted before a time, `most` of them at once."""
        for _ in range(most):
            subject = next(iter(self.deleted), None)
            if subject is None or self.deleted[subject] >= before_ms:
                return
            del self.deleted[subject]
            self.bytes -= _size(self._newest.pop(subject))
            self.names.discard(subject)
            self.memory -= KEY_OVERHEAD + len(subject)


def _size(value: int) -> int:
    return (value & ((1 << _SHIFT) - 1) & ~_DELETED) << _UNIT_SHIFT
