"""The state that a ring holds for its caller, as a recovery finds it.

Owns what is collected for the caller: the newest snapshot (state of the ring and of its caller, the
first batch of each segment), the control batches and the facts of producers that follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from malamute_protocol.content_layout import CONTENT_BYTES
from malamute_protocol.stamp import (
    DATA,
    EPOCH_START,
    PADDING,
    SNAPSHOT,
    STAMP_BYTES,
    Stamp,
    stamp_here,
)
from malamute_py.journal.check import (
    FoundBatch,
    candidates,
    content_fault,
    producer_head,
    stamp_or_fault,
)
from malamute_py.journal.marks import Snapshot, parse_snapshot
from malamute_py.journal.segment import Segment
from malamute_py.journal.streams import StreamTable
from malamute_py.journal.types import SEGMENT_HEADER_BYTES, Control, Produced


class FoundState:
    """State of the caller, as a ring has it: the newest snapshot, and what follows it in the log.

    A snapshot is the first batch of a segment, with the state before its bundle. Control batches
    are those of the caller, as changes. Facts of producers tell which batches came before.
    """

    def __init__(self, streams: StreamTable) -> None:
        """streams: is told of the rows of a snapshot."""
        self.streams = streams
        self.snapshot: Snapshot | None = None
        self.controls: list[Control] = []
        self.produced: list[Produced] = []
        self.last_time_ms = 0
        """Append time of the last batch before the newest snapshot."""

    def note(self, found: FoundBatch, content: memoryview) -> None:
        """Take from a batch what the caller's state is rebuilt from; called in the log's order."""
        stamp = found.stamp
        if stamp.control_kind == SNAPSHOT:
            self._note_snapshot(stamp.lsn, content)
        elif stamp.control_kind == DATA:
            # The caller knows a producer's batch that is sent again by its sequence.
            head = producer_head(content)
            if head is not None:
                self.produced.append(
                    Produced(
                        stamp.lsn,
                        stamp.stream,
                        head.producer_id,
                        head.producer_epoch,
                        head.first_sequence,
                        stamp.count,
                        stamp.base_offset,
                        stamp.append_time_ms,
                        stamp.content_crc,
                    )
                )
        else:
            self.controls.append(
                Control(
                    stamp.control_kind,
                    stamp.lsn,
                    stamp.epoch,
                    stamp.stream,
                    stamp.base_offset,
                    stamp.count,
                    stamp.append_time_ms,
                    bytes(content),
                )
            )

    def _note_snapshot(self, lsn: int, content: memoryview) -> None:
        """Begin the state anew from a snapshot, with what came after its position."""
        snapshot = parse_snapshot(lsn, content)
        if snapshot is None:
            return  # unreadable: the one before it counts on
        as_of = snapshot.facts.as_of_lsn
        self.snapshot = snapshot
        self.controls = [control for control in self.controls if control.lsn >= as_of]
        self.produced = [fact for fact in self.produced if fact.lsn >= as_of]
        for number, row in snapshot.facts.streams.items():
            self.streams.note_row(number, row)
        self.last_time_ms = max(self.last_time_ms, snapshot.facts.last_append_time_ms)

    def complete(
        self, segments: Iterable[Segment], read: Callable[[Segment], SegmentState | None]
    ) -> None:
        """Add the changes, epochs and producers of segments of which only the index was read.

        Called once the end of the ring is known. segments: all of the ring, newest first. read:
        returns the state in one; None: the segment was walked, and note() has its state.
        """
        # Segments are read back to the position of the newest snapshot that there is. Any segment
        # may be known by its index only, whatever its neighbours are: an index is removed before
        # its segment is recycled, and may be damaged.
        newest = self.snapshot
        parts: list[SegmentState] = []
        for segment in segments:
            part = read(segment)
            if part is not None:
                parts.append(part)
                if part.snapshot is not None and (newest is None or part.snapshot.lsn > newest.lsn):
                    newest = self.snapshot = part.snapshot
                    for number, row in newest.facts.streams.items():
                        self.streams.note_row(number, row)
            if newest is not None and segment.base_lsn <= newest.facts.as_of_lsn:
                break  # the snapshot has the state before this segment
        least = 0 if newest is None else newest.facts.as_of_lsn
        for part in parts:
            # The bundle that a snapshot was written in may have begun before its segment: what
            # an epoch wrote there, the snapshot does not tell, and an index knows no epochs.
            for (number, epoch), (lsn, base) in part.begun.items():
                if lsn >= least:
                    self.streams.note_epoch(number, epoch, base)
        found: list[FoundState] = [self, *parts]
        controls = [each for part in found for each in part.controls if each.lsn >= least]
        produced = [each for part in found for each in part.produced if each.lsn >= least]
        self.controls = sorted(controls, key=lambda control: control.lsn)
        self.produced = sorted(produced, key=lambda fact: fact.lsn)


class SegmentState(FoundState):
    """The state batches of one segment, read apart from a walk.

    Stamps are walked; a content is looked at, and checked, only where it is state.
    """

    def __init__(self, segment: Segment, data: memoryview, end_lsn: int, epochs_max: int) -> None:
        """Read of a segment's batches what its index does not keep.

        data: the segment's bytes. end_lsn: end of the log, which may lie in the segment.
        """
        super().__init__(StreamTable(epochs_max))
        self.begun: dict[tuple[int, int], tuple[int, int]] = {}
        """(stream, epoch) -> (LSN, base offset) of its first batch here."""
        base = segment.base_lsn
        stop = min(end_lsn - base, len(data))
        position: int | None = SEGMENT_HEADER_BYTES
        while position is not None and stop - position >= STAMP_BYTES:
            stamp: Stamp | str | None = stamp_here(data, position, base + position)
            if stamp is None:
                stamp = stamp_or_fault(data, position, base + position)
            if isinstance(stamp, str):
                # Damage, which its reader tells: on with the next place that may be a batch.
                position = next(candidates(data, base, position), None)
                continue
            begin, end = position + stamp.stamp_bytes, position + stamp.size
            if stamp.control_kind == DATA:
                self.begun.setdefault((stamp.stream, stamp.epoch), (stamp.lsn, stamp.base_offset))
            if self._is_state(stamp, data, begin, min(end, stop)):
                self.note(FoundBatch(stamp, position, True), data[begin:end])
            position = end

    @staticmethod
    def _is_state(stamp: Stamp, data: memoryview, begin: int, end: int) -> bool:
        """Whether a batch may hold something that the caller's state is rebuilt from."""
        if stamp.control_kind in (PADDING, EPOCH_START) or end - begin < CONTENT_BYTES:
            return False
        if stamp.control_kind == DATA and producer_head(data[begin:end]) is None:
            return False
        return not content_fault(data, begin, end, stamp)
