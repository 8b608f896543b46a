"""Where a reading of a stream begins: from a start point to an offset.

Owns the start points that files can tell: earliest, latest, an offset, a message, a time. The rule:
a reader that begins elsewhere than it asked gets a notice of it, before all batches.

Words: the floor is the offset below which retention or a trim left no record. A stream with `keep`
keeps the newest record of each subject, and copies it further on before its segment is overwritten
(the record has moved, and keeps its offset). Source: SPEC.md, section 6; FORMAT.md, sections 8
and 15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from malamute_protocol.commands import Start, StartKind
from malamute_protocol.errors import LocalProtocolError
from malamute_protocol.stamp import parse_message_id
from malamute_py.client.session.subscription import BegunNotice, RewoundNotice
from malamute_py.journal.layout import TRIMS_FILE, Trims
from malamute_py.journal.marks import read_mark
from malamute_py.mapped.missing import Missing
from malamute_py.mapped.segments import Segments
from malamute_py.mapped.streams import StreamEntry
from malamute_py.mapped.tail import RingTail
from malamute_py.mapped.times import at_append_time, at_client_time
from malamute_py.mapped.walk import END, begin_of, epoch_end, young_from

_KEPT_BEGIN: Final = 1
"""First offset of a stream with `keep`: as a key's revision, 0 says that there is no such key."""


class Beginning:
    """The beginning of one reading: made for one call of offset()."""

    def __init__(
        self,
        entry: StreamEntry,
        segments: Segments,
        tail: RingTail,
        missing: Missing,
        *,
        floor: int,
        stop: int,
        end: int,
        bound_lsn: int,
        oldest_ms: int,
    ) -> None:
        """entry: the stream. segments, tail, missing: of its ring.

        stop: offset after the last record there is. end: that at which the reading ends.
        bound_lsn: position in the ring up to which it sees records. oldest_ms: append time before
        which records are past the stream's age; 0: none are.
        """
        self.notices: list[BegunNotice | RewoundNotice] = []
        """Notices that the reader gets of its beginning, once offset() has returned."""
        self._entry = entry
        self._segments = segments
        self._tail = tail
        self._missing = missing
        self._floor = floor
        self._stop = stop
        self._end = end
        self._bound_lsn = bound_lsn
        self._oldest_ms = oldest_ms

    def offset(self, start: Start) -> int:
        """Return the offset to begin with; the reader's notices of it are in `notices` then.

        Raises LocalProtocolError `bad_start`: the start is of a kind that files do not tell.
        """
        kind, *arguments = start
        if kind == StartKind.EARLIEST:
            first = self._earliest()
            # With keep nothing is lost: what is missing was replaced.
            if first > 0 and not self._entry.settings.keep:
                self.notices.append(BegunNotice(first))
            return first
        if kind == StartKind.LATEST:
            return self._stop
        if kind == StartKind.OFFSET:
            return self._from_position(*arguments)
        if kind == StartKind.AFTER_ID:
            message_id, *inclusive = arguments
            time_ms, offset = parse_message_id(message_id)
            following = offset if any(inclusive) else offset + 1
            # A record older than the stream was one of a removed stream of the name.
            if 0 < time_ms < self._entry.created_ms:
                return self._from_earlier_stream(following)
            return self._no_later_than(following, self._stop)
        if kind == StartKind.TIME:
            time_ms, inclusive = arguments
            found = self._at_time(at_append_time, time_ms, inclusive)
            # Only records in place are searched. If the oldest of them is late enough, records that
            # have moved, which were all appended before it, may be so, too: it begins with them.
            return _KEPT_BEGIN if self._has_moved and found <= self._first_in_place else found
        if kind == StartKind.CLIENT_TIME:
            time_ms, inclusive = arguments
            found = self._at_time(at_client_time, time_ms, inclusive)
            # Records that moved keep their client times: any of them may be of that time.
            return _KEPT_BEGIN if self._has_moved else found
        raise LocalProtocolError(
            "bad_start",
            "a reader of the files knows no cursors, and no last record of each subject: ask the"
            " broker for them with a client",
        )

    def _earliest(self) -> int:
        """Return the offset of the first record that is kept and not past the stream's age."""
        if self._entry.settings.keep:
            return _KEPT_BEGIN  # a subject's newest record may be the stream's first one
        lsn, first = begin_of(self._segments, self._entry.number, self._floor)
        if self._missing.oldest:
            # Records of missing segments are not passed over in silence: the reading names them.
            first = min(first, self._missing.first(self._entry.number))
        first = max(first, self._floor)
        if not self._oldest_ms:
            return first
        young = young_from(
            self._segments, self._entry.number, lsn, first, self._oldest_ms, self._bound_lsn
        )
        return min(young, self._end)

    @property
    def _first_in_place(self) -> int:
        """Offset of the oldest record that still lies where it was first written."""
        return max(begin_of(self._segments, self._entry.number, self._floor)[1], self._floor)

    @property
    def _has_moved(self) -> bool:
        """Whether records of the stream may have moved."""
        return bool(self._entry.settings.keep) and self._first_in_place > _KEPT_BEGIN

    def _from_position(self, offset: int, epoch: int = 0, uuid: bytes = b"") -> int:
        """Return the offset to begin with, for a reader that stood at `offset`.

        uuid: of the stream that it read; empty: not told. Another stream of the name is read from
        its beginning. epoch: that of its last record, or 0; if a later epoch began before the
        offset, a power loss took records away there. Where the reader begins before its offset,
        it gets a RewoundNotice.
        """
        if uuid and uuid != self._entry.uuid:
            return self._from_earlier_stream(offset)
        last = epoch_end(self._segments, self._entry.number, epoch) if epoch else END
        return self._no_later_than(offset, min(last, self._stop))

    def _from_earlier_stream(self, offset: int) -> int:
        """Return the beginning, with a RewoundNotice: `offset` is of a removed stream of the name.

        Callers know that by a position's uuid, or by a message id older than the stream.
        """
        first = self._earliest()
        self.notices.append(RewoundNotice(offset, first, epoch=self._tail.epoch))
        return first

    def _no_later_than(self, offset: int, last: int) -> int:
        """Return the offset, or `last` if that comes before, with a RewoundNotice to the reader."""
        if offset > last:
            self.notices.append(RewoundNotice(offset, last, self._tail.epoch))
        return min(offset, last)

    def _at_time(self, find: Callable[..., int | None], time_ms: int, inclusive: bool) -> int:
        """Return the offset that a look-up by time finds; without one the end of the stream."""
        least = time_ms if inclusive else time_ms + 1
        # Not self._floor: a record that only max_records leaves out may be found, and is then told
        # as a gap, as to a subscription.
        floor = trim_floor(self._entry, self._segments)
        found = find(self._segments, self._entry.number, floor, least, self._bound_lsn)
        return self._stop if found is None else found


def trim_floor(entry: StreamEntry, segments: Segments) -> int:
    """Return the offset before which limits and removals left no record of a stream.

    The entry has the trims of callers, as of the last look at the change log; the ring's file
    `trims` has those of the broker, too.
    """
    trims = read_mark(segments.storage, TRIMS_FILE, Trims)
    if trims is None or trims.ring != segments.uuid:
        return entry.trimmed
    return max(entry.trimmed, trims.first.get(entry.number, 0))
