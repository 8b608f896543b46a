"""The keys of a stream: the newest record of each subject.

Owns the index from a subject to the offset of its newest record, with the records that were taken
and are not in the journal yet. The rules: an offset enters the index when its batch was appended; a
condition is checked against what was taken, so that two changes of one turn see each other; once
the journal refuses a batch, nothing that was taken after it happened. Source: SPEC.md, section 8.

A segment of the ring can be given up once its newest records were copied into a hidden stream: they
have moved, and keep their offsets. A batch's codes number its rows' headers in its header table.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from malamute_protocol.content import Content
from malamute_protocol.keys import is_deletion
from malamute_py.broker.structures.sorted_values import Ordered

ROW_OVERHEAD = 300
"""Bytes that a row of a batch takes beside its body when it is copied alone, about."""
KEY_OVERHEAD = 250
"""Bytes of memory that a key takes beside its name, about."""
LOOK_SEGMENTS = 7
"""Segments that are left of a ring when its oldest ones are looked at: two of them are prepared
ahead, and empty."""
STOP_SEGMENTS = 5
"""Segments that are left of a ring when it takes no record more: copies need some."""
COPIES_MAX = 256
"""Newest records that are copied in one batch at most: some 2 ms of the loop."""
COPY_SEGMENTS = 3
"""Segments that are left of a ring when it takes no copy more."""
_OFFSET_SHIFT = 24
"""Bits of a value in the index below the offset. A value packs offset, size and whether the record
is a deletion into one number, which takes a third of the memory of three."""
_DELETION_BIT = 1
"""Bit of a value that says that the record is a deletion."""
_UNIT_SHIFT = 3
"""The size of a record is kept in units of 16 bytes, above the bit that says it is a deletion."""
_SIZE_MAX = (1 << _OFFSET_SHIFT) - 1


class NewestRow(NamedTuple):
    """The newest record of a subject within one batch."""

    subject: str
    row: int
    deletion: bool
    size: int
    """Bytes that the record takes if it is copied, about."""


class Taken(NamedTuple):
    """A batch that was taken and is not in the journal yet."""

    base: int
    rows: list[NewestRow]
    size: int


class NewestColumns(NamedTuple):
    """The newest records of some subjects, each subject once, in the order of their offsets."""

    subjects: list[str]
    offsets: list[int]
    sizes: list[int]
    """Bytes that each record takes if it is copied, about."""
    deleted: dict[str, int]
    """Subject -> append time of its deletion marker, of those that are deleted."""


def newest_rows(content: Content, size: int) -> list[NewestRow]:
    """Return the newest record of each subject of one batch, in no certain order.

    For a publish into a stream with keys, before the batch is appended. size: bytes of the batch,
    of which each record is told its part.
    """
    if not content.head.fieldmaps_count and content.subject_codes is not None:
        # Without fields nothing is a deletion, and no header has to be made.
        subjects, found, own = _newest_without_fields(content, size)
        names = dict(zip(subjects, range(len(subjects)), strict=True))
        places = names.values() if len(names) < len(subjects) else range(len(subjects))
        no_deletion = False  # By place: keywords would cost as much again as half of the row.
        return [NewestRow(subjects[at], found[at], no_deletion, own[at]) for at in places]
    headers, codes = content.headers()
    count = content.head.count
    if codes is None:  # All rows have the only header, so that the last one is the newest.
        header = headers[0]
        size = size if count == 1 else _sizes(content, size)([count - 1])[0]
        return [NewestRow(header.keys[0], count - 1, is_deletion(header.fields), size)]
    used, rows = _last_rows(codes)
    sizes = _sizes(content, size)(rows)
    newest: dict[str, NewestRow] = {}
    for code, row, size in zip(used.tolist(), rows.tolist(), sizes, strict=True):
        header = headers[code]
        subject = header.keys[0]
        known = newest.get(subject)  # Headers with other fields may have the same subject.
        if known is None or known.row < row:
            newest[subject] = NewestRow(subject, row, is_deletion(header.fields), size)
    return list(newest.values())


def newest_columns(batches: Iterable[tuple[Content, int, int, int]]) -> NewestColumns:
    """Return the newest record of each subject of some batches, in the order of their offsets.

    For a start, which reads the keys of a stream from the journal, many batches at a time.
    batches: (content, its bytes with the stamp, base offset, append time) of each, in their order.
    """
    subjects: list[str] = []
    offsets: list[int] = []
    sizes: list[int] = []
    deleted: dict[str, int] = {}
    for content, size, base, time_ms in batches:
        if content.head.fieldmaps_count or content.subject_codes is None:
            for subject, row, deletion, own in sorted(newest_rows(content, size), key=_row):
                subjects.append(subject)
                offsets.append(base + row)
                sizes.append(own)
                if deletion:
                    deleted[subject] = time_ms
                elif deleted:  # A later record brings the subject back.
                    deleted.pop(subject, None)
            continue
        here, rows, own_sizes = _newest_without_fields(content, size)
        if deleted:
            for subject in here:
                deleted.pop(subject, None)
        subjects += here
        offsets += [base + row for row in rows]
        sizes += own_sizes
    # Subject -> the last place at which it stands; earlier ones are records that it replaced.
    last = dict(zip(subjects, range(len(subjects)), strict=True))
    if len(last) < len(subjects):
        places = sorted(last.values())
        subjects = [subjects[place] for place in places]
        offsets = [offsets[place] for place in places]
        sizes = [sizes[place] for place in places]
    return NewestColumns(subjects, offsets, sizes, deleted)


def _newest_without_fields(content: Content, size: int) -> tuple[list[str], list[int], list[int]]:
    """Return (subjects, rows, sizes) of a batch without fields, in the order of the rows.

    A subject that has several headers, which differ in further keys, comes once for each of them:
    callers take its last place.
    """
    content.check_codes()
    used, rows = _last_rows(content.subject_codes)
    order = np.argsort(rows)
    keys, rows = content.table.keys, rows[order]
    subjects = [keys[code][0] for code in used[order].tolist()]  # The first key is the subject.
    return subjects, rows.tolist(), _sizes(content, size)(rows)


def _row(newest: NewestRow) -> int:
    """Return the row of a newest record, to sort by."""
    return newest.row


def _last_rows(codes: Any) -> tuple[Any, Any]:
    """Return the codes that rows have, ascending, and the last row of each."""
    # unique() tells the first place of each code; from the end, that is the code's last row.
    used, distances = np.unique(codes[::-1], return_index=True)
    return used, len(codes) - 1 - distances


def _sizes(content: Content, size: int) -> Callable[[Any], list[int]]:
    """Return a function from rows of a batch to the bytes that each takes if it is copied alone.

    Of compressed bodies, and of kinds other than blobs, it is known only what all rows take
    together: each counts an equal share.
    """
    head = content.head
    if head.codec or head.body_kind:
        return lambda rows: [size // head.count + ROW_OVERHEAD] * len(rows)
    bounds = content.bodies().offsets
    found = np.diff(bounds) + ROW_OVERHEAD
    return lambda rows: found[rows].tolist()


CopiedRow: TypeAlias = tuple[str, int, int, int | None, int]
"""(subject, offset, size, append time of a deletion marker or None, place of the copy)."""


class Room:
    """The room of the ring that a stream with keys has to itself, in positions of the ring."""

    __slots__ = (
        "asked", "copies_max", "failed", "look_lsn", "newest_max", "segment_bytes", "segments",
        "stop_lsn",
    )  # fmt: skip

    def __init__(self) -> None:
        self.segment_bytes = 0
        self.segments = 0
        """Segments that the ring may have, each of `segment_bytes`; 0: the journal was not asked
        yet."""
        self.newest_max = 1 << 63
        """Bytes that newest records may take: with more, copying them would gain too little."""
        self.asked = False
        """Whether the journal is being asked for the oldest segments."""
        self.failed = ""
        """Why the journal did not answer the last question about the ring; empty: it did."""
        self.copies_max = COPIES_MAX
        """Newest records that are copied in one batch now."""
        self.look_lsn = 0
        """End of the ring from which on segments are to be given up."""
        self.stop_lsn = 1 << 63
        """End of the ring beyond which no record is taken but a deletion marker."""

    def learn_size(self, segment_bytes: int, segments: int) -> None:
        """Note how large the ring is; newest records may take half, the rest is for new ones."""
        self.segment_bytes, self.segments = segment_bytes, segments
        self.newest_max = segment_bytes * segments // 2

    def learn_start(self, start_lsn: int) -> None:
        """Note where the oldest segment begins that may hold a newest record.

        The ring may be longer from there by its segments less those that are to be left of it when
        compaction looks at its oldest ones, or when no record is taken more.
        """
        self.look_lsn = start_lsn + (self.segments - LOOK_SEGMENTS) * self.segment_bytes
        self.stop_lsn = start_lsn + (self.segments - STOP_SEGMENTS) * self.segment_bytes

    def takes_copies(self, end_lsn: int) -> bool:
        """Whether a ring that ends here has room for copies of newest records.

        They may go further than other records, to where COPY_SEGMENTS are left.
        """
        return end_lsn <= self.stop_lsn + (STOP_SEGMENTS - COPY_SEGMENTS) * self.segment_bytes

    def allows(self, end_lsn: int, deletion: bool) -> bool:
        """Whether a batch may make the ring as long as this; a deletion, a segment longer."""
        return end_lsn <= self.stop_lsn + deletion * self.segment_bytes


class Place(NamedTuple):
    """A newest record whose segment was given up, and where its copy lies."""

    value: int
    """Offset, size and kind, as in the index."""
    copy: int
    """Offset of the copy in the hidden stream of copies."""


class KeysMemory:
    """Bytes of memory that the keys of several streams take."""

    __slots__ = ("coming", "now")

    def __init__(self) -> None:
        self.now = 0
        self.coming = 0
        """Bytes of keys that are on their way into the log."""


class Keys:
    """The newest record of each subject of one stream."""

    __slots__ = (
        "_all", "_at", "_coming", "_moved", "_moved_offsets", "_newest", "_taken", "bytes",
        "coming_bytes", "coming_keys", "coming_memory", "copies_first", "copies_next", "deleted",
        "memory", "names", "ready", "room", "taken_bytes", "taken_next",
    )  # fmt: skip

    def __init__(self, next: int, *, ready: bool) -> None:
        """next: the stream's next offset. ready: there is no record that was not looked at."""
        self._newest: OrderedDict[str, int] = OrderedDict()
        """Subject -> offset, size and kind of its newest record, ordered by offset; those that lie
        where they were appended."""
        self._moved: OrderedDict[str, Place] = OrderedDict()
        """Subject -> newest record of which there is a copy, ordered by the copies."""
        self._moved_offsets: Ordered[int] = Ordered()
        """Offsets of records of which there is a copy, for readers of a range of offsets."""
        self._at: dict[int, str] = {}
        """Offset -> subject, of those of which there is a copy."""
        self.copies_first = 0
        """Oldest copy that is left when the broker starts."""
        self.copies_next = 0
        """Offset of the next copy in the hidden stream of copies."""
        self.names: Ordered[str] = Ordered()
        """Subjects in the index, deleted ones included."""
        self.deleted: OrderedDict[str, int] = OrderedDict()
        """Deleted subject -> append time of its deletion marker, the oldest first."""
        self.ready = ready
        """False while a start reads the keys from the journal."""
        self.bytes = 0
        """Bytes that copies of all newest records would take, about."""
        self.memory = 0
        """Bytes of memory that the index takes, about."""
        self._all = KeysMemory()
        """The memory of the keys of all streams that this one was counted among."""
        self.room = Room()
        self.taken_next = next
        """Offset after everything that was taken."""
        self.taken_bytes = 0
        """Bytes of the batches that were taken and are not in the journal yet."""
        self._taken: deque[Taken] = deque()
        """Batches that were taken and are not in the journal yet, the oldest first."""
        self._coming: dict[str, tuple[int, int]] = {}
        """Subject -> (revision, size of its newest record) once all is appended that was taken:
        what conditions see in the index's place. Its entries stay until `_taken` is empty."""
        self.coming_keys = self.coming_memory = 0
        """Subjects on their way into the log that the index does not have, and the memory that they
        will take there."""
        self.coming_bytes = 0
        """Bytes by which subjects on their way into the log make copies of all newest records
        larger."""

    def __len__(self) -> int:
        return len(self._newest) + len(self._moved)

    def __contains__(self, subject: str) -> bool:
        return self._value(subject) is not None or subject in self._coming

    # --- questions ----------------------------------------------------------------------

    def _value(self, subject: str) -> int | None:
        """Return the packed offset and size of a subject's newest record; None: no such key.

        The record lies in the ring, or has moved into a copy.
        """
        value = self._newest.get(subject)
        if value is None and self._moved:
            place = self._moved.get(subject)
            return None if place is None else place.value
        return value

    def find(self, subject: str) -> tuple[int, bool] | None:
        """Return (offset, whether it is a deletion) of a subject's newest record; None: no key."""
        value = self._value(subject)
        return None if value is None else (value >> _OFFSET_SHIFT, bool(value & _DELETION_BIT))

    def copy_of(self, subject: str) -> int | None:
        """Return where the copy of a subject's newest record lies; None: it has not moved."""
        place = self._moved.get(subject)
        return None if place is None else place.copy

    def revision(self, subject: str) -> int:
        """Return the revision of a key, counting what was taken; 0: there is no such key.

        A revision is the offset of the key's newest record, and what UPDATE_KEY is compared with.
        """
        coming = self._coming.get(subject)
        if coming is not None:
            revision, _ = coming
            return revision
        value = self._value(subject)
        return 0 if value is None or value & _DELETION_BIT else value >> _OFFSET_SHIFT

    def before(self, offset: int, copy: int, most: int, bytes_max: int) -> list[tuple[str, int]]:
        """Return (subject, offset) of newest records before an offset, or copied before a place.

        For the compaction, which copies them, since the oldest segment of the ring is to be given
        up: offset, copy: where the segment ends, in the stream and in the stream of copies. most,
        bytes_max: so many at once, and one at least if there is one. Both maps are in order, so
        that a walk ends with the first record beyond the segment.
        """
        found: list[tuple[str, int]] = []
        size = 0
        for subject, value in self._newest.items():
            if value >> _OFFSET_SHIFT >= offset or len(found) >= most or size > bytes_max:
                break
            found.append((subject, value >> _OFFSET_SHIFT))
            size += _size_in(value)
        for subject, place in self._moved.items():
            if place.copy >= copy or len(found) >= most or size > bytes_max:
                break
            found.append((subject, place.value >> _OFFSET_SHIFT))
            size += _size_in(place.value)
        return found

    def moved_from(self, offset: int, before: int, most: int) -> list[tuple[int, int]]:
        """Return (offset, place of its copy) of newest records that have moved, ascending.

        For readers of history: what has moved is read at its copy. offset, before: the range that
        the records lie in. most: so many at once.
        """
        found: list[tuple[int, int]] = []
        for at in self._moved_offsets.after(offset - 1):
            if at >= before or len(found) == most:
                break
            found.append((at, self._moved[self._at[at]].copy))
        return found

    @property
    def moved_count(self) -> int:
        """Number of newest records that have moved."""
        return len(self._moved)

    @property
    def average(self) -> int:
        """Bytes that a copy takes on average, about, for plans of reads; 1 at least."""
        return max(1, self.bytes // max(1, len(self)))

    def moved_runs(self, offset: int) -> Iterator[list[int]]:
        """Yield offsets from one on of records that have moved, ascending, for plans of reads."""
        return self._moved_offsets.runs_after(offset - 1)

    def moved_subject(self, offset: int) -> str:
        """Return the subject of a record that has moved."""
        return self._at[offset]

    def size_of_moved(self, offset: int) -> int:
        """Return the bytes that a copy of a record takes that has moved, about; 1 at least."""
        return max(1, _size_in(self._moved[self._at[offset]].value))

    # --- changes ------------------------------------------------------------------------

    def take(self, rows: list[NewestRow], count: int, size: int) -> None:
        """Count a batch that goes into the journal, before the journal answers.

        Conditions of later changes see its revisions at once (`_coming`). rows: its newest records.
        count, size: its records and bytes; its offsets follow the last ones taken.
        """
        base = self.taken_next
        self.taken_next = base + count
        self.taken_bytes += size
        self._taken.append(Taken(base, rows, size))
        coming = self._coming
        for subject, row, deletion, own in rows:
            # before: bytes of the record that this one replaces.
            known = coming.get(subject)
            if known is not None:
                _, before = known
            elif (value := self._value(subject)) is not None:
                before = _size_in(value)
            else:
                before = 0
                self.coming_keys += 1
                self.coming_memory += KEY_OVERHEAD + len(subject)
                self._all.coming += KEY_OVERHEAD + len(subject)
            self.coming_bytes += own - before
            coming[subject] = (0 if deletion else base + row, own)  # Revision 0: no such key.

    def appended(self, time_ms: int) -> None:
        """Enter the records of the oldest batch that was taken, since the journal now has it."""
        base, rows, batch_bytes = self._taken.popleft()
        self.taken_bytes -= batch_bytes
        for subject, row, deletion, size in rows:
            self.enter(subject, base + row, size, time_ms if deletion else None)
        if not self._taken:
            self._forget_coming()

    def dropped(self, next: int) -> None:
        """Forget all that was taken, since the journal refused a batch: nothing of it is appended.

        Conditions see the index alone again. next: the stream's next offset, which is given anew.
        """
        self._taken.clear()
        self._forget_coming()
        self.taken_next = next
        self.taken_bytes = 0

    def _forget_coming(self) -> None:
        """Clear the overlay of conditions and its three counts, as nothing taken is left.

        All of it is in the index now, or was refused.
        """
        self._coming.clear()
        self._all.coming -= self.coming_memory
        self.coming_keys = self.coming_memory = self.coming_bytes = 0

    def bytes_with(self, rows: list[NewestRow]) -> int:
        """Return the bytes that newest records would take with these, as copies, about.

        For the bound of a stream with keys: they take at most half of its ring.
        """
        replaced = (self._value(row.subject) for row in rows)
        more = sum(row.size for row in rows)
        return self.bytes + more - sum(_size_in(value) for value in replaced if value is not None)

    def weigh(self, rows: list[NewestRow]) -> int:
        """Return the memory that keys would take if all were new, for the bound of all keys."""
        return sum(KEY_OVERHEAD + len(row.subject) for row in rows)

    def count_among(self, others: KeysMemory) -> None:
        """Count the memory of these keys among that of others, and no longer where it was.

        Called when the stream is entered, and with a sum that is not read when it is removed.
        """
        self._all.now -= self.memory
        self._all.coming -= self.coming_memory
        self._all = others
        others.now += self.memory
        others.coming += self.coming_memory

    def _add_memory(self, more: int) -> None:
        """Count memory that the index takes more, or less, here and in the sum of all streams."""
        self.memory += more
        self._all.now += more

    def enter(self, subject: str, offset: int, size: int, deleted_ms: int | None) -> None:
        """Note the newest record of a subject. deleted_ms: append time, where it is a deletion."""
        value = _pack(offset, size, deleted_ms is not None)
        newest = self._newest
        known = newest.get(subject)
        if known is not None and not (known | value) & _DELETION_BIT:
            # Most changes are of a key that is there, and stays: its name is not looked for.
            del newest[subject]  # and entered at the end: the map is ordered by offset
            newest[subject] = value
            self.bytes += _size_in(value) - _size_in(known)
            return
        self._take_out(subject)
        newest[subject] = value
        self._count(subject, value, deleted_ms)

    def enter_many(self, found: NewestColumns) -> None:
        """Enter the newest records of some batches, later than all known ones, at a start.

        A record that has a copy, too, stays with its copy: what gave up its segment before the
        start was not durable, and the segment can be given up again without another copy. Whole
        columns are entered at once: a stream may have millions of keys.
        """
        if self._moved:
            found = self._without_copied(found)
        subjects, deleted = found.subjects, found.deleted
        # Older records of these subjects leave first, so that the totals below only grow.
        for known in (self._newest, self._moved):
            for subject in list(filter(known.__contains__, subjects)) if known else ():
                self._take_out(subject)
        units = _units(found.sizes)  # as `_pack` makes values, for all rows at once
        sized = zip(found.offsets, units.tolist(), strict=True)
        values = [offset << _OFFSET_SHIFT | size for offset, size in sized]
        self._newest.update(zip(subjects, values, strict=True))
        for subject in deleted:
            self._newest[subject] |= _DELETION_BIT
        self.deleted.update(deleted)
        self.names.add_many(subjects)
        self._add_memory(KEY_OVERHEAD * len(subjects) + sum(map(len, subjects)))
        self.bytes += int(units.sum()) << _UNIT_SHIFT

    def _without_copied(self, found: NewestColumns) -> NewestColumns:
        """Return the records of which no copy is known: not the one that the index has moved."""
        if not any(map(self._moved.__contains__, found.subjects)):
            return found
        copied = [
            (place := self._moved.get(subject)) is not None
            and place.value >> _OFFSET_SHIFT == offset
            for subject, offset in zip(found.subjects, found.offsets, strict=True)
        ]
        rest = [row for row, known in enumerate(copied) if not known]
        subjects = [found.subjects[row] for row in rest]
        return NewestColumns(
            subjects,
            [found.offsets[row] for row in rest],
            [found.sizes[row] for row in rest],
            {subject: found.deleted[subject] for subject in subjects if subject in found.deleted},
        )

    def enter_copies(self, rows: list[CopiedRow]) -> None:
        """Note copies that a start found, unless a newer record of the subject is known.

        rows: of each subject one, in the order of the copies. As in `enter_many`, whole columns
        are entered at once.
        """
        newest, moved = self._newest, self._moved
        if any(subject in moved or subject in newest for subject, _, _, _, _ in rows):
            rows = [row for row in rows if self._is_newer(subject=row[0], offset=row[1])]
            for subject, _, _, _, _ in rows:
                self._take_out(subject)
        if not rows:
            return
        subjects, offsets, sizes, deleted, copies = zip(*rows, strict=True)
        units = _units(sizes)
        # Values as `_pack` makes them; the last bit is _DELETION_BIT.
        values = [
            offset << _OFFSET_SHIFT | size | (time_ms is not None)
            for offset, size, time_ms in zip(offsets, units.tolist(), deleted, strict=True)
        ]
        moved.update(zip(subjects, map(Place, values, copies), strict=True))
        self._moved_offsets.add_many(offsets)
        self._at.update(zip(offsets, subjects, strict=True))
        markers = zip(subjects, deleted, strict=True)
        self.deleted.update((subject, time) for subject, time in markers if time is not None)
        self.names.add_many(subjects)
        self._add_memory(KEY_OVERHEAD * len(subjects) + sum(map(len, subjects)))
        self.bytes += int(units.sum()) << _UNIT_SHIFT

    def _is_newer(self, subject: str, offset: int) -> bool:
        """Whether the record at `offset` is as new as any that the index knows of its subject."""
        value = self._value(subject)
        return value is None or value >> _OFFSET_SHIFT <= offset

    def moved(self, subject: str, offset: int, copy: int) -> None:
        """Note where the copy of a record lies, if the record is still its subject's newest.

        Called once the copy is durable. The record may have had an older copy before.
        """
        value = self._value(subject)
        if value is None or value >> _OFFSET_SHIFT != offset:
            return
        if self._newest.pop(subject, None) is None:
            self._moved.pop(subject)
        self._put_moved(subject, value, copy)

    def _put_moved(self, subject: str, value: int, copy: int) -> None:
        """Enter a newest record that lies in a copy. value: as `_pack` makes it."""
        self._moved[subject] = Place(value, copy)
        self._moved_offsets.add(value >> _OFFSET_SHIFT)
        self._at[value >> _OFFSET_SHIFT] = subject

    def _count(self, subject: str, value: int, deleted_ms: int | None) -> None:
        """Count a key that is new, or has a new newest record, in the totals.

        value: as `_pack` makes it.
        """
        self.names.add(subject)
        self._add_memory(KEY_OVERHEAD + len(subject))
        self.bytes += _size_in(value)
        if deleted_ms is not None:
            self.deleted[subject] = deleted_ms

    def _take_out(self, subject: str) -> None:
        """Take a subject's newest record out of the index and the totals; its name stays."""
        value = self._newest.pop(subject, None)
        if value is None:
            place = self._moved.pop(subject, None)
            if place is None:
                return
            value = place.value
            self._moved_offsets.discard(value >> _OFFSET_SHIFT)
            del self._at[value >> _OFFSET_SHIFT]
        self.bytes -= _size_in(value)
        self._add_memory(-KEY_OVERHEAD - len(subject))
        self.deleted.pop(subject, None)

    def forget(self, subject: str) -> None:
        """Forget a key, as if it had never been there."""
        self._take_out(subject)
        self.names.discard(subject)

    def forget_deleted(self, before_ms: int, most: int) -> None:
        """Forget keys that were deleted before a time, `most` of them at once."""
        for _ in range(most):
            subject = next(iter(self.deleted), None)
            if subject is None or self.deleted[subject] >= before_ms:
                return
            self.forget(subject)


def _pack(offset: int, size: int, deletion: bool) -> int:
    """Return a value of the index: offset, size in units, and whether it is a deletion."""
    # The lowest bit of the size is given up for the deletion.
    units = min(size >> _UNIT_SHIFT, _SIZE_MAX) & ~_DELETION_BIT
    return offset << _OFFSET_SHIFT | units | deletion


def _units(sizes: Sequence[int]) -> Any:
    """Return sizes as `_pack` has them, for many at once."""
    return np.minimum(np.array(sizes, np.int64) >> _UNIT_SHIFT, _SIZE_MAX) & ~_DELETION_BIT


def _size_in(value: int) -> int:
    """Return the bytes of a record, about, by its value in the index."""
    return (value & _SIZE_MAX & ~_DELETION_BIT) << _UNIT_SHIFT
