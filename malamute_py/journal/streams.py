"""Stream table of a ring: offsets, epochs and bytes of each stream.

Owns that table. The rule: `next` and the floors (first offsets as limits and removals left them)
only rise, so that an offset is never given twice and a record once gone stays gone. Each field has
one writing thread; everything handed out is a copy. A recovery fills it, from snapshots (the state
at the begin of a segment), indexes and batches. Source: FORMAT.md, section 4.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import cast

from malamute_protocol.stamp import DATA, Stamp
from malamute_py.journal.index import Span
from malamute_py.journal.layout import StreamRow
from malamute_py.journal.types import EpochStart


class StreamState:
    """One stream."""

    __slots__ = ("epochs", "floor", "held_bytes", "kept", "last_epoch", "next", "retired_bytes")

    def __init__(self) -> None:
        self.next = 0
        """Offset of the next record (loop thread)."""
        self.epochs: tuple[EpochStart, ...] = ()
        """Where each of the newest epochs begins, ascending (loop thread)."""
        self.last_epoch = 0
        """Epoch of the newest of these (loop thread); 0: there is none."""
        self.held_bytes = 0
        """Ever appended, or found at opening (loop thread); only grows."""
        self.retired_bytes = 0
        """Bytes among them in segments that are gone (housekeeping thread); only grows."""
        self.kept = -1
        """Oldest offset in the files (the thread that retires); -1: nothing is there yet."""
        self.floor = 0
        """Oldest offset that limits and removals left (any thread, through note_floor)."""

    @property
    def first(self) -> int:
        """Oldest offset that is served; `next` when there is none."""
        kept = self.next if self.kept < 0 else self.kept
        return min(max(kept, self.floor), self.next)


class StreamTable:
    """All streams of a ring by number."""

    def __init__(self, epochs_max: int) -> None:
        """epochs_max: pairs kept of each stream; the oldest go first."""
        self._floors = threading.Lock()
        self._epochs_max = epochs_max
        self.states: dict[int, StreamState] = {}
        self.unseen_next = 0
        """Where a stream goes on of which the recovery found nothing, since damage may have held
        its records: an offset beyond all that these could have had. 0: no such damage."""

    def state(self, number: int) -> StreamState:
        """The stream's state, made when it is new."""
        found = self.states.get(number)
        # setdefault is one step: two threads never make two states of one stream.
        return self.states.setdefault(number, StreamState()) if found is None else found

    def note_batch(self, number: int, base: int, after: int, epoch: int, size: int) -> None:
        """Count a data batch that became part of the ring, by an append or a recovery.

        base, after: its offsets, [base, after). size: its bytes in the file.
        """
        state = self.states.get(number) or self.state(number)
        if epoch > state.last_epoch:
            self._note_epoch(state, epoch, base)
        if state.kept < 0:
            # The ring's first batch of the stream, and what it serves begins here. But where the
            # stream goes on beyond damage that may have held its records, these count as kept from
            # offset 0 on: a reader of them is told of damage, not that they were retired.
            state.kept = 0 if 0 < self.unseen_next <= base else base
        if after > state.next:
            state.next = after
        state.held_bytes += size

    def note_lost(self, stamp: Stamp) -> None:
        """Count the offsets of a batch with a good stamp and a damaged content as given.

        For a recovery, so that none of them is given again.
        """
        if stamp.control_kind == DATA:
            state = self.state(stamp.stream)
            if stamp.epoch > state.last_epoch:
                self._note_epoch(state, stamp.epoch, stamp.base_offset)
            if state.kept < 0:
                state.kept = stamp.base_offset
            state.next = max(state.next, stamp.next_offset)

    def note_span(self, number: int, span: Span) -> None:
        """Take in what a whole segment has of a stream, by its index, at a start.

        Segments come oldest first: the first one that has records of the stream decides `kept`.
        """
        state = self.state(number)
        if state.kept < 0:
            state.kept = span.first
        state.next = max(state.next, span.next)
        state.held_bytes += span.bytes

    def note_row(self, number: int, row: StreamRow) -> None:
        """Take what a snapshot, or the file `active`, says of a stream, where the ring says less.

        For a recovery. An epoch begins where the row says, also if batches say a later offset.
        """
        state = self.state(number)
        state.next = max(state.next, row.next)
        state.floor = max(state.floor, row.first)
        pairs = {epoch: EpochStart(epoch, first) for epoch, first in row.epochs}
        pairs.update({pair.epoch: pair for pair in state.epochs if pair.epoch not in pairs})
        merged = tuple(pairs[epoch] for epoch in sorted(pairs))[-self._epochs_max :]  # the newest
        state.epochs = merged
        state.last_epoch = merged[-1].epoch if merged else 0

    def note_next(self, number: int, after: int) -> None:
        """Note that offsets before this one were given, and are not given again.

        For a start, where damage hides what a manifest, or ring main, tells of the stream.
        """
        state = self.state(number)
        state.next = max(state.next, after)

    def note_lost_beginning(self, number: int, floor: int) -> None:
        """Note that damage took what the ring had first of a stream: it is no retired part.

        floor: offset at which the stream began, if it is known; 0: it is not.
        """
        state = self.state(number)
        state.kept = 0  # as if it were in the files: what is not found there is damage
        state.floor = max(state.floor, floor)

    def note_epoch(self, number: int, epoch: int, first: int) -> None:
        """Note that a batch of this epoch begins at this offset: the epoch began here or before.

        For a recovery that reads segments newest first.
        """
        state = self.state(number)
        pairs = {pair.epoch: pair for pair in state.epochs}
        known = pairs.get(epoch)
        if known is None or first < known.first_offset:
            pairs[epoch] = EpochStart(epoch, first)
            state.epochs = tuple(pairs[one] for one in sorted(pairs))[-self._epochs_max :]
            state.last_epoch = state.epochs[-1].epoch

    def note_floor(self, number: int, first: int) -> None:
        """Move a stream's first offset up, as a limit or a removal asks; it never moves back."""
        state = self.state(number)
        with self._floors:
            if first > state.floor:
                state.floor = first

    def rows(self) -> Mapping[int, StreamRow]:
        """Return the facts of every stream for a snapshot.

        They are plain tuples, for 10,000 streams are encoded in the loop thread.
        """
        # A copy, for a removal in another thread may add a stream meanwhile.
        states = self.states.copy()
        rows = {number: (state.next, state.first, state.epochs) for number, state in states.items()}
        return cast("dict[int, StreamRow]", rows)

    def bounds(self, number: int) -> tuple[int, int]:
        """(first, next) offset of a stream; of an unknown one zeros, and it stays unknown."""
        state = self.states.get(number)
        return (0, 0) if state is None else (state.first, state.next)

    def retire(self, spans: Iterable[tuple[int, Span]]) -> dict[int, int]:
        """Count what a segment held as gone, before its file is used again.

        spans: its totals by stream. Returns stream -> new first offset, where that moved.
        """
        moved = {}
        for number, span in spans:
            state = self.state(number)
            before = state.first
            state.kept = max(state.kept, span.next)
            state.retired_bytes += span.bytes
            if state.first > before:
                moved[number] = state.first
        return moved

    def _note_epoch(self, state: StreamState, epoch: int, first: int) -> None:
        """Note that an epoch above all known ones begins at an offset."""
        state.last_epoch = epoch
        state.epochs = (*state.epochs, EpochStart(epoch, first))[-self._epochs_max :]
