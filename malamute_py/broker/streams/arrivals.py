"""Arrivals: staged batches that a ring of a stream's own has, by marks in that ring.

A transaction stages its batches in the mail stream of ring main; after its commit they move into
their streams. Owns which of them a stream's own ring has while ring main does not say so yet.
The rules: a batch bears its number in the mail stream as its producer id, so that the ring has it
and its mark together, or neither; a mark stays in the ring's snapshots until the change that takes
the batch out of the table of what is staged is durable, so that no start appends a batch twice.
Source: ARCHITECTURE.md, Decisions; SPEC.md, section 4.11.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from struct import Struct
from typing import Any, Final

import google_crc32c
import numpy as np

from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.streams.producers import ProducerStream
from malamute_py.changelog.snapshots import MARK, PackedSequence, Sequence64, pack_sequence

_CRC_AT: Final = 8
"""Position of the checksum in a content; it covers all that follows it."""
_CRC: Final = Struct("<I")
_PRODUCER_AT: Final = 24
"""Position of the producer id in a content."""
_PRODUCER: Final = Struct("<Q")


def marked(frame: Any, base: int) -> bytearray:
    """Return a copy of a staged content with a mark: its number in the mail stream as producer id.

    Made when the batch moves into a ring of a stream's own, whose recovery then finds the mark with
    the batch. base: that number.
    """
    copy = bytearray(frame)
    _PRODUCER.pack_into(copy, _PRODUCER_AT, MARK | base)  # The bit MARK is in no producer's id.
    # numpy arrays, unlike slices, may be handed to the CRC without a copy.
    crc = google_crc32c.value(np.frombuffer(copy, np.uint8, offset=_CRC_AT + _CRC.size))
    _CRC.pack_into(copy, _CRC_AT, crc)
    return copy


def check_ring(stream: Stream, *, staged: bool) -> None:
    """Raise BrokerRefused where a step or transaction cannot have a batch for a stream.

    stream: not in ring main. staged: a transaction stages the batch.
    """
    if stream.ring.memory:
        raise BrokerRefused(
            "cross_ring",
            f"stream '{stream.name}' is in memory, which a restart empties, and a step or "
            "transaction holds over restarts: publish to it beside, or make it a stream on disk",
        )
    if not staged:
        raise BrokerRefused(
            "cross_ring",
            f"stream '{stream.name}' has a ring of its own, and a step is written to ring main "
            "alone; a transaction reaches both",
        )


class Arrival(ProducerStream):
    """The way of one marked batch into its ring: calls when the ring has it, or refused it.

    It stands where other batches have their producer's place in the stream, which publishing tells
    of both.
    """

    __slots__ = ("_done",)

    def __init__(self, done: Callable[[tuple[str, str] | None], None]) -> None:
        """done: called with None, or with the code and reason of the refusal."""
        super().__init__(0)
        self._done = done

    def appended(
        self, sequence: int, count: int, offset: int, time_ms: int, crc: int, runs_max: int
    ) -> None:
        """Call `done`, since the stream's ring has the batch; its sequences mean nothing here."""
        self._done(None)

    def refused(self, sequence: int, code: str = "", reason: str = "") -> None:
        """Call `done` with the reason for which the journal did not take the batch."""
        self._done((code, reason))


class Arrivals:
    """Marks of all rings of which ring main does not say yet, durably, that the batch has moved."""

    def __init__(self) -> None:
        self._marks: dict[int, dict[int, int]] = {}
        """Stream -> number of the batch in the mail stream -> its records."""

    def __contains__(self, arrival: tuple[int, int]) -> bool:
        """Whether a stream's ring has the batch of a number. arrival: (stream, number)."""
        stream, base = arrival
        return base in self._marks.get(stream, ())

    def add(self, stream: int, base: int, count: int) -> None:
        """Note that a stream's ring has a staged batch. base, count: of it in the mail stream."""
        self._marks.setdefault(stream, {})[base] = count

    def drop(self, stream: int, base: int) -> None:
        """Forget the mark of a batch, since ring main says durably that it has moved."""
        marks = self._marks.get(stream)
        if marks is not None:
            marks.pop(base, None)
            if not marks:
                del self._marks[stream]

    # --- over restarts ------------------------------------------------------------------

    def witness(self, producer: int, stream: int, count: int) -> None:
        """Take up a mark that a start found in a ring or its snapshot.

        producer: id that a batch bears; below MARK it is a real producer's, which is no mark.
        """
        if producer >= MARK:
            self.add(stream, producer - MARK, count)

    def keep_only(self, staged: Container[int]) -> None:
        """Forget the marks of batches that a start did not find staged: main has their move."""
        for stream, marks in list(self._marks.items()):
            for base in list(marks):
                if base not in staged:
                    self.drop(stream, base)

    def sequences(self, streams: Iterable[int]) -> Iterator[PackedSequence]:
        """Yield the marks of these streams for a snapshot, in the form of producers' sequences."""
        marks = self._marks
        if marks:
            for stream in streams:
                for base, count in marks.get(stream, {}).items():
                    yield pack_sequence(Sequence64(MARK | base, 0, stream, count))
