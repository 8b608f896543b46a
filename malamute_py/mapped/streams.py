"""Which streams a data directory has: their names, numbers, uuids, rings and settings.

Owns the tables as ring main's files tell them: the snapshot at a segment's start, and the changes
since, which are records of their own in ring main. The rule: what cannot be read of the changes is
passed over, as a start of the broker does. Source: FORMAT.md, section 4; malamute_py/changelog.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from malamute_protocol.errors import BatchError
from malamute_protocol.stamp import CHANGE, Stamp
from malamute_py.changelog.applying import STREAM_CHANGES, apply
from malamute_py.changelog.records import decode_change
from malamute_py.changelog.settings import StreamSettings
from malamute_py.changelog.snapshots import decode_snapshot
from malamute_py.changelog.tables import PurgeMark, Queues, StreamRow, Tables
from malamute_py.journal import Follower, FollowLost
from malamute_py.journal.errors import NotAFile
from malamute_py.journal.layout import RingMeta, control_bodies
from malamute_py.mapped.segments import Segments
from malamute_py.mapped.tail import RingTail
from malamute_py.mapped.walk import first_snapshot


class StreamEntry(NamedTuple):
    """One stream of the log."""

    name: str
    uuid: bytes
    ring: str
    """Name of the ring that holds its records."""
    settings: StreamSettings
    number: int
    """Number of the stream in the ring's files."""
    created_ms: int
    trimmed: int
    """Offset before which callers of the broker removed all records."""
    purges: tuple[PurgeMark, ...]
    """Records that they removed by subject."""


class Catalogue:
    """All streams, as of the part of ring main that was read."""

    def __init__(self, segments: Segments, tail: RingTail) -> None:
        """segments, tail: of ring main."""
        self._segments = segments
        self._tail = tail
        self._tables = Tables()
        self._change_next = 0
        """Number of the next change to apply: the tables have those before it."""
        self._lsn = 0
        """Position in the ring up to which changes were applied."""
        self._times_lost = -1
        """Times that the tail had lost its place when the tables were loaded; -1: they were not."""

    def refresh(self) -> None:
        """Take in what changed since the last call. Raises OSError."""
        self._tail.advance()
        if self._tail.times_lost != self._times_lost:
            # The ring came round, or a broker was started anew: what was followed is gone.
            self._times_lost = self._tail.times_lost
            self._load()
        while self._lsn < self._tail.end_lsn:
            try:
                self._follow()
            except FollowLost as lost:
                if lost.code == "retention":
                    self._load()  # the changes in between are in a newer snapshot
                    self._lsn = max(lost.to_lsn, self._lsn)
                else:
                    self._lsn = max(lost.to_lsn, self._lsn + 1)  # past the damage
            except NotAFile:
                # Something else has the segment's name: go on with the next segment.
                size = self._segments.segment_bytes
                self._lsn = (self._lsn // size + 1) * size

    def entries(self) -> list[StreamEntry]:
        """All streams, by name."""
        return sorted(map(_entry, self._tables.streams.values()))

    def rings(self) -> set[str]:
        """Names of the rings of all streams."""
        return {row.ring for row in self._tables.streams.values()}

    def find(self, name: str) -> StreamEntry | None:
        """The stream of a name; None: there is none."""
        number = self._tables.names.get(name)
        return None if number is None else self.entry(number)

    def entry(self, number: int) -> StreamEntry | None:
        """The stream of a number; None: it was removed."""
        row = self._tables.streams.get(number)
        return None if row is None else _entry(row)

    def _load(self) -> None:
        """Begin (anew) with the newest snapshot that can be read: changes before it were missed."""
        self._tables, self._change_next = Tables(), 0
        for number in reversed(self._segments.numbers()):
            snapshot = first_snapshot(self._segments, number)
            if snapshot is None:
                continue
            try:
                state = decode_snapshot(snapshot.bodies) if snapshot.bodies else None
            except msgspec.MsgspecError:
                continue  # damaged: an older one, and more changes after it, tell as well
            if state is not None:
                self._tables, self._change_next = state.tables, state.change_next
            self._lsn = snapshot.facts.as_of_lsn
            return
        self._lsn = self._tail.end_lsn

    def _follow(self) -> None:
        """Apply the changes of streams that the log has beyond what was read before."""
        meta = RingMeta(self._segments.uuid, self._segments.segment_bytes)
        follower = Follower(self._segments.storage, meta)
        queues = Queues()  # apply() wants them, and changes of streams do not touch them
        for stamp, content in follower.read(self._lsn, self._tail.end_lsn, _is_change):
            for row, body in enumerate(_bodies(content)):
                number = stamp.base_offset + row
                if number >= self._change_next:  # earlier ones are in the snapshot
                    self._change_next = number + 1
                    change = decode_change(body)
                    if isinstance(change, STREAM_CHANGES):
                        apply(self._tables, queues, change)
            self._lsn = stamp.lsn + stamp.size
        self._lsn = max(self._lsn, follower.position, self._tail.end_lsn)


def _entry(row: StreamRow) -> StreamEntry:
    """Return a row of the tables as readers see it."""
    return StreamEntry(
        row.name,
        row.uuid,
        row.ring,
        row.settings,
        row.number,
        row.created_ms,
        row.trimmed,
        tuple(row.purges),
    )


def _bodies(content: memoryview) -> tuple[bytes, ...]:
    """Return the changes in a control batch; none of a damaged one."""
    try:
        return control_bodies(content)
    except BatchError:
        return ()


def _is_change(stamp: Stamp) -> bool:
    """Whether a batch of ring main is one of the change log's."""
    return stamp.control_kind == CHANGE
