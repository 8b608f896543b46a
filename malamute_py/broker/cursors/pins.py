"""Pins: the history that cursors hold back in their rings.

A cursor with the setting `pin` keeps the journal from overwriting what lies after it. Owns a cursor
at run time, the marks that tell where in its ring an offset of a stream lies, and the pins. The
rules: a pin holds history up to its bound in bytes, those of other streams in the ring included;
the broker warns of it at four fifths and breaks it beyond; a broken pin is set again once its
cursor has moved. Source: docs/design.md (Journal); SPEC.md, section 4.8.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from malamute_py.broker.context import Shard
from malamute_py.broker.log.stream import NEVER, Stream
from malamute_py.changelog.tables import CursorRow

WARN_ABOVE: Final = 0.8
"""Share of a pin's bound from which on the broker warns of it."""
LOOK_SHARE: Final = 10
"""Part (a tenth) of the smallest bound of a stream's pins: when the ring has grown by so much, the
stream's next append has its pins looked at. A second holds ten times a small bound."""
GROWTH_MIN: Final = 1 << 10
"""Bytes, at least, between two such looks."""
MARKS_MAX: Final = 256
"""Marks that a stream has at most; beyond that every second one is removed."""
MARK_MS: Final = 1_000
"""Time in which each pin is looked at once, also where other streams fill the ring."""
STALE_MAX: Final = 64
"""Offsets of pins that have moved since, above as many as cursors, that a heap keeps."""
LOOKS_MAX: Final = 512
"""Pins that one tick looks at: 100,000 would hold the loop for 0.1 s."""


class Cursor:
    """One cursor at run time."""

    __slots__ = ("broken", "clamped", "held_bytes", "name", "pinned_at", "row", "stream", "warned")

    def __init__(self, stream: Stream, row: CursorRow) -> None:
        self.stream = stream
        self.name = row.name
        self.row = row
        """The row of the tables."""
        self.clamped = False
        """Whether a trim has passed the cursor since it was moved; reported once."""
        self.warned = False
        """Whether the broker has warned that the pin is near its bound."""
        self.broken = False
        """Whether the pin was broken; it holds nothing until the cursor has moved."""
        self.pinned_at: int | None = None
        """Offset of the pin that the journal has; None: it has none."""
        self.held_bytes = 0
        """Bytes that the pin holds back, when they were last measured."""

    @property
    def next(self) -> int:
        """The next offset to read; offsets that were removed are skipped."""
        return max(self.row.next, self.stream.first)


class Marks:
    """Pins of one stream, and a coarse map from its offsets to LSNs: how many bytes a pin holds.

    A mark is an offset and the LSN at which the ring ended when the stream ended there.
    """

    __slots__ = (
        "_bytes_before", "_first_offset", "_least", "_lsns", "_offsets", "_pushes", "cursors",
        "look_lsn", "wake",
    )  # fmt: skip

    def __init__(self, stream: Stream, wake: Callable[[], None]) -> None:
        """wake: called at each append of the stream."""
        self.wake = wake
        self.look_lsn = NEVER
        """End of the ring from which on an append of the stream has its pins looked at."""
        self.cursors: dict[Cursor, None] = {}
        """Cursors of the stream whose setting is to pin."""
        self._pushes = count()
        """Order of the heap's entries, as cursors cannot be compared."""
        self._least: list[tuple[int, int, Cursor]] = []
        """Heap of (offset, order, cursor), in which offsets of pins that have moved since are left
        for a while: a search for the least among 10,000 cursors at each move would cost too
        much."""
        self._offsets = [stream.next]
        """The offset of each mark, ascending."""
        self._lsns = [stream.ring.end_lsn]
        """The LSN of each mark, whose offset has the same place in `_offsets`."""
        self._first_offset = stream.first
        self._bytes_before = stream.ledger.bytes
        """The stream's own bytes before the first mark: the LSNs there are not known."""

    def add_mark(self, stream: Stream) -> None:
        """Add a mark where the stream ends now, if it has grown; of too many, drop every second.

        Called at each look at the stream's pins: held() is as exact as the marks are close.
        """
        if stream.next <= self._offsets[-1]:
            return
        self._offsets.append(stream.next)
        self._lsns.append(stream.ring.end_lsn)
        if len(self._offsets) > MARKS_MAX:
            # The first mark and the newest stay.
            self._offsets[1:-1] = self._offsets[1:-1:2]
            self._lsns[1:-1] = self._lsns[1:-1:2]

    def note_pin(self, cursor: Cursor) -> None:
        """Note the new offset of a cursor's pin, so that least() finds it."""
        assert cursor.pinned_at is not None
        if len(self._least) > 2 * len(self.cursors) + STALE_MAX:
            # Old offsets stay until they are the least, or until they are most of the heap.
            self._least = [
                (one.pinned_at, next(self._pushes), one)
                for one in self.cursors
                if one.pinned_at is not None and one is not cursor
            ]
            heapify(self._least)
        heappush(self._least, (cursor.pinned_at, next(self._pushes), cursor))

    def least(self) -> int:
        """Return the least offset that is pinned, for retention; NEVER: none is."""
        heap = self._least
        while heap:
            offset, _order, cursor = heap[0]
            if cursor.pinned_at == offset and cursor in self.cursors:
                return offset
            heappop(heap)  # The pin has moved or is gone since.
        return NEVER

    def held(self, stream: Stream, offset: int) -> int:
        """Return about how many bytes of the ring a pin at an offset of the stream holds back."""
        end = stream.ring.end_lsn
        first = self._offsets[0]
        if offset >= first:
            last_mark_before = bisect_right(self._offsets, offset) - 1
            return end - self._lsns[last_mark_before]
        # Before the first mark no LSN is known: a share of the stream's own bytes stands for them.
        share = (first - offset) / max(1, first - self._first_offset)
        return end - self._lsns[0] + int(self._bytes_before * min(1.0, share))


class Pins:
    """The pins of all cursors of one core."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._pinning: dict[Cursor, None] = {}
        """Cursors of all streams whose setting is to pin."""
        self._marks: dict[Stream, Marks] = {}
        """Marks of each stream with a cursor that pins."""
        self.changed: list[tuple[str, str, int, int | None]] = []
        """Changes of pins for the shell to pass on to the journal: (ring, name of the pin, number
        of the stream, offset or None: the pin is gone)."""
        self._due_ms = 0
        """Time of the next look at some pins."""
        self._begun_ms = 0
        """Time at which the present round over all pins began."""
        self._turn: list[Cursor] = []
        """Cursors that are still to be looked at in this round."""

    @property
    def gauges(self) -> dict[str, int]:
        """Counts for the metrics."""
        return {
            "pins": sum(cursor.pinned_at is not None for cursor in self._pinning),
            "pinned_bytes": sum(cursor.held_bytes for cursor in self._pinning),
        }

    @property
    def due_ms(self) -> int | None:
        """Time at which `tick` has something to do; None: no cursor pins."""
        return self._due_ms if self._pinning else None

    def tick(self) -> None:
        """Look at some of the pins if that is due; each is looked at once in MARK_MS.

        A pin holds ever more although its cursor and stream stand still, where other streams fill
        the ring. A round over all pins begins with a mark of each stream.
        """
        now_ms = self._shard.now_ms
        if not self._pinning or now_ms < self._due_ms:
            return
        if not self._turn:
            self._begun_ms = now_ms
            for stream, marks in self._marks.items():
                marks.add_mark(stream)
            self._turn = list(self._pinning)
        some, self._turn = self._turn[-LOOKS_MAX:], self._turn[:-LOOKS_MAX]
        for cursor in some:
            if cursor in self._pinning:
                self._pin(cursor)
        if self._turn:
            # The ticks of a round are spread over MARK_MS evenly.
            ticks = -(-len(self._pinning) // LOOKS_MAX)  # Rounded up.
            self._due_ms = now_ms + max(1, MARK_MS // (ticks + 1))
        else:
            self._due_ms = max(self._begun_ms + MARK_MS, now_ms + 1)

    def measure(self, cursor: Cursor) -> None:
        """Measure anew the bytes that a cursor's pin holds back, for an answer with its facts."""
        if cursor.pinned_at is not None:
            stream = cursor.stream
            cursor.held_bytes = self._marks[stream].held(stream, cursor.next)

    def watch(self, cursor: Cursor) -> None:
        """Set, move or remove the pin of a cursor whose position or settings may have changed."""
        if not cursor.row.settings.pin:
            self.unwatch(cursor)
            return
        if cursor not in self._pinning:
            self._pinning[cursor] = None
            stream = cursor.stream
            if stream not in self._marks:
                marks = self._marks[stream] = Marks(stream, partial(self._grown, stream))
                stream.audience.add_reader(marks.wake, durable=False)
            self._marks[stream].cursors[cursor] = None
            self._due_ms = min(self._due_ms or NEVER, self._shard.now_ms + MARK_MS)
        self._pin(cursor)

    def unwatch(self, cursor: Cursor) -> None:
        """Remove the pin of a cursor that is gone, or that no longer pins."""
        if cursor not in self._pinning:
            return
        stream = cursor.stream
        del self._pinning[cursor], self._marks[stream].cursors[cursor]
        self._unpin(cursor)
        cursor.held_bytes = 0
        cursor.warned = cursor.broken = False
        if not self._marks[stream].cursors:
            stream.audience.remove_reader(self._marks.pop(stream).wake, durable=False)

    def _grown(self, stream: Stream) -> None:
        """Look at the pins of a stream that was appended to, if its ring has grown enough.

        Pins with small bounds cannot wait for their tick. Each look sets `look_lsn` anew, by the
        smallest bound.
        """
        marks = self._marks[stream]
        if stream.ring.end_lsn < marks.look_lsn or len(marks.cursors) > LOOKS_MAX:
            return  # Very many pins wait for their ticks.
        marks.add_mark(stream)
        marks.look_lsn = NEVER  # _pin() lowers it.
        for cursor in marks.cursors:
            self._pin(cursor)

    def _pin(self, cursor: Cursor) -> None:
        """See to the pin of a cursor: set it at its position, warn of it, or break it.

        Called when the cursor has moved, and to measure what the pin holds back. A broken one is
        left alone until its cursor has moved.
        """
        stream = cursor.stream
        if cursor.broken:
            return
        bound = cursor.row.settings.pin_bytes_max or self._shard.settings.pin_bytes_max
        marks = self._marks[stream]
        held = cursor.held_bytes = marks.held(stream, cursor.next)
        if held > bound:
            self.break_pin(cursor, f"it held back more than {bound} bytes")
            return
        growth = max(bound // LOOK_SHARE, GROWTH_MIN)
        marks.look_lsn = min(marks.look_lsn, stream.ring.end_lsn + growth)
        warn = held >= WARN_ABOVE * bound
        if warn and not cursor.warned:
            self._shard.counters["pins_near_limit"] += 1
            self._shard.event(
                "pin_near_limit", "warning", stream=stream.name, cursor=cursor.name,
                offset=cursor.next, bytes=held, pin_bytes_max=bound,
            )  # fmt: skip
        cursor.warned = warn
        if cursor.pinned_at != cursor.next:
            cursor.pinned_at = cursor.next
            marks.note_pin(cursor)
            self.changed.append((stream.ring.name, pin_name(cursor), stream.number, cursor.next))
            self._tell_retention(stream)

    def break_pin(self, cursor: Cursor, reason: str) -> None:
        """Let the journal overwrite what a cursor held back, until the cursor has moved.

        Called where the pin exceeds its bound, or its ring had no room for it. reason: for the
        event that tells the operator.
        """
        stream = cursor.stream
        self._shard.counters["pins_broken"] += 1
        self._shard.event(
            "pin_broken", "warning", stream=stream.name, cursor=cursor.name,
            offset=cursor.row.next, bytes=cursor.held_bytes, reason=reason,
        )  # fmt: skip
        cursor.broken = True
        cursor.held_bytes = 0
        self._unpin(cursor)

    def _unpin(self, cursor: Cursor) -> None:
        """Give up the pin that the journal has for a cursor, if it has one."""
        if cursor.pinned_at is not None:
            cursor.pinned_at = None
            stream = cursor.stream
            self.changed.append((stream.ring.name, pin_name(cursor), stream.number, None))
            self._tell_retention(stream)

    def _tell_retention(self, stream: Stream) -> None:
        """Set the offset from which on retention leaves a stream alone: its least pin."""
        stream.pinned = self._marks[stream].least()


def pin_name(cursor: Cursor) -> str:
    """Return the name that the journal has for the pin of a cursor."""
    return f"cursor-{cursor.stream.number}-{cursor.name}"
