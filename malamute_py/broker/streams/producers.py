"""Idempotent producers: the owner of each id, and the next sequence in each stream.

Owns the sequences. The rules: an id belongs to the identity that opened it; a batch is taken
exactly when its first sequence is the next one; a batch that is in the log already is confirmed,
with the original's position, only when the original is; a batch with the sequence of an original
and another content is in conflict with it, as long as the checksum is remembered; a batch that was
in the log and lies in damage is neither confirmed nor taken; any other batch is out of sequence. An
epoch that was fenced is refused. A recovered sequence is the newest that snapshot and journal have.
Source: docs/design.md, Promises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Any, NamedTuple

import msgspec

from malamute_protocol.content import Content
from malamute_py.broker.log.ring import RingState, Waiter
from malamute_py.broker.log.stream import Stream
from malamute_py.changelog.shares import Shares
from malamute_py.changelog.snapshots import (
    PackedSequence,
    ProducerFact,
    Sequence64,
    pack_sequence,
)


class Original(NamedTuple):
    """Position in the log of a batch that came again."""

    offset: int
    append_time_ms: int


FORGOTTEN = Original(-1, 0)
"""Stands for a batch that is in the log and whose position is no longer remembered: its producer is
told that it is a duplicate, with offset -1."""
FORGET_AT_ONCE = 100
"""Producers that are forgotten together, at most, when there are too many."""
LOOKED_AT = 1_000
"""Producers of an identity that are looked at to find one to forget: those that wrote since the
last look are passed over."""
_CONTENT = Struct("<QI")
"""First sequence of a batch and the CRC of its content."""


class ProducerStream:
    """One producer in one stream."""

    __slots__ = ("contents", "epoch", "next", "next_taken", "packed", "runs", "under_way")

    def __init__(self, epoch: int, next: int = 0) -> None:
        self.epoch = epoch
        self.next = next
        """The sequence after the last one that the log has."""
        self.next_taken = next
        """The sequence that the next batch must begin with: those on their way into the log count,
        too."""
        self.runs: deque[tuple[int, int, int, int]] = deque()
        """Runs of batches: (first sequence, offset, append time, count). Neighbours in sequence and
        offset are one run. A batch between two runs was in the log, and a start could not read
        it."""
        self.contents = bytearray()
        """The newest batches, oldest first: 12 bytes each, where objects take 120."""
        self.under_way: dict[int, Pending] = {}
        """Publishes on their way, by first sequence."""
        self.packed: PackedSequence | None = None
        """The runs, encoded as snapshots have them; None after any change. Each segment begins with
        a snapshot, and packing all runs of 10,000 producers anew took 68 ms (6 MB of runs of
        producers at rest)."""

    def appended(
        self, sequence: int, count: int, offset: int, time_ms: int, crc: int, runs_max: int
    ) -> None:
        """Note that the log has a batch. crc: of its content. runs_max: runs that are remembered.

        A batch of the same time, next in sequence and offset, prolongs the last run.
        """
        self.under_way.pop(sequence, None)
        self.packed = None
        self.next = sequence + count
        if self.next_taken < self.next:
            self.next_taken = self.next
        contents = self.contents
        contents += _CONTENT.pack(sequence, crc)
        if len(contents) > runs_max * _CONTENT.size:
            del contents[: _CONTENT.size]
        runs = self.runs
        if runs:
            first, at, then, length = runs[-1]
            if then == time_ms and first + length == sequence and at + length == offset:
                runs[-1] = (first, at, then, length + count)
                return
        runs.append((sequence, offset, time_ms, count))
        if len(runs) > runs_max:
            runs.popleft()

    def refused(self, sequence: int, code: str = "", reason: str = "") -> None:
        """Forget a batch that was not taken, and all after it: they did not happen."""
        self.under_way.pop(sequence, None)
        if sequence < self.next_taken:
            self.next_taken = max(self.next, sequence)

    def fault(self, sequence: int, crc: int) -> str:
        """Return why a batch of a taken sequence is no duplicate: `conflict`, `damaged`; "": it is.

        crc: of its content.
        """
        if self._damaged(sequence):
            return "damaged"
        return "conflict" if self._conflicts(sequence, crc) else ""

    def _damaged(self, sequence: int) -> bool:
        """Whether the batch of a sequence is missing between those that are remembered."""
        runs = self.runs
        if not runs or not runs[0][0] <= sequence < self.next:
            return False
        return self.original(sequence) is FORGOTTEN

    def _conflicts(self, sequence: int, crc: int) -> bool:
        """Whether a batch of this sequence is known to differ from the one that was taken."""
        original = self.under_way.get(sequence)
        if original is not None:
            return original.content.head.content_crc != crc
        if sequence >= self.next:
            # The sequence lies amid a batch that is on its way.
            return True
        contents = self.contents
        if not contents or sequence < _CONTENT.unpack_from(contents)[0]:
            return False
        return (sequence, crc) not in _CONTENT.iter_unpack(contents)

    def original(self, sequence: int) -> Original:
        """Return where a batch is whose sequence was taken before; FORGOTTEN: not known."""
        for first, offset, time_ms, count in reversed(self.runs):
            if first <= sequence < first + count:
                return Original(offset + sequence - first, time_ms)
        return FORGOTTEN


class Producer:
    """One producer id."""

    __slots__ = ("epoch", "faults", "id", "identity", "streams", "used")

    def __init__(self, id: int, identity: str, epoch: int) -> None:
        self.id = id
        self.identity = identity
        self.epoch = epoch
        self.streams: dict[int, ProducerStream] = {}
        """Number of a stream -> the producer's position there."""
        self.faults: tuple[str, ...] = ()
        """Reasons why batches that came again were no duplicates, as far as the operator was
        told."""
        self.used = False
        """Whether the producer wrote since it was last looked at to be forgotten."""


class Producers:
    """All producers; each identity has a share of them, and loses its longest unused first."""

    def __init__(self, log_epoch: int) -> None:
        self._table: dict[int, Producer] = {}
        self._places: dict[int, dict[int, ProducerStream]] = {}
        """Position of each producer in each stream: a snapshot of a ring or a removal asks by
        stream."""
        self.places = 0
        """Number of the streams of all producers."""
        self._shares: Shares[int] = Shares()
        """Producers of each identity, the longest unused first."""
        self._places_of: dict[str, int] = {}
        """Number of the streams of each identity's producers."""
        self._log_epoch = log_epoch
        self._minted = 0

    def __len__(self) -> int:
        return len(self._table)

    def mint(self) -> int:
        """Return an id that no producer of this log ever had."""
        self._minted += 1
        return self._log_epoch << 32 | self._minted

    def get(self, id: int) -> Producer | None:
        """The producer of this id."""
        return self._table.get(id)

    def used(self, id: int) -> None:
        """Move a producer to the end of its identity's order of forgetting."""
        producer = self._table.get(id)
        if producer is not None:
            self._shares.renew(producer.identity, id)

    def opened(self, id: int, identity: str, epoch: int) -> None:
        """Take up a producer that the change log has opened."""
        producer = self._table.get(id)
        if producer is None:
            self._table[id] = Producer(id, identity, epoch)
            self._shares.add(identity, id)
        elif epoch >= producer.epoch:
            producer.epoch = epoch

    def forgotten(self, ids: Iterable[int]) -> None:
        """Forget producers that the change log has forgotten."""
        for id in ids:
            producer = self._table.pop(id, None)
            if producer is not None:
                self._shares.drop(producer.identity, id)
                for number in producer.streams:
                    self._drop_place(number, producer)

    def enter(self, producer: Producer, number: int) -> ProducerStream:
        """Return the position of a producer in a stream; at sequence 0 when it was never there."""
        place = producer.streams.get(number)
        if place is not None and place.epoch == producer.epoch:
            return place
        # A new epoch of an id counts from 0 again.
        place = ProducerStream(producer.epoch)
        self._put(producer, number, place)
        return place

    def _put(self, producer: Producer, number: int, place: ProducerStream) -> None:
        """Set the position of a producer in a stream."""
        if number not in producer.streams:
            self.places += 1
            identity = producer.identity
            self._places_of[identity] = self._places_of.get(identity, 0) + 1
        producer.streams[number] = place
        self._places.setdefault(number, {})[producer.id] = place

    def _drop_place(self, number: int, producer: Producer) -> None:
        """Drop the position of a producer in a stream; its own table is the caller's."""
        places = self._places[number]
        del places[producer.id]
        if not places:
            del self._places[number]
        self._uncount_place(producer.identity)

    def _uncount_place(self, identity: str) -> None:
        """Count one place (a producer in one stream) less, in all and of its identity."""
        self.places -= 1
        left = self._places_of[identity] - 1
        if left:
            self._places_of[identity] = left
        else:
            del self._places_of[identity]

    def in_the_way(self) -> list[int]:
        """Ids to forget where producers are too many: the longest unused of the largest owner."""
        identity, _ = self._shares.next_out()
        spare = self._shares.count(identity) - self._shares.fair
        return self._unused(identity, max(1, min(self._lot(identity), spare)), None)

    def crowded_out(self, producer: Producer) -> list[int]:
        """Ids to forget so that a producer may write to one more stream, where places are short.

        The longest unused producers of its own identity when that has an equal share of the places
        or more, else of the identity that has the most. Empty: there is no other producer.
        """
        places = self._places_of
        owner = producer.identity
        if places.get(owner, 0) < self.places // max(1, len(places)):
            owner = max(places, key=places.__getitem__)
        return self._unused(owner, self._lot(owner), producer)

    def _unused(self, identity: str, count: int, but: Producer | None) -> list[int]:
        """The longest unused producers of an identity; one used since the last look is passed over.

        At least one, if there is another producer than `but`.
        """
        some = self._shares.oldest(identity, LOOKED_AT)
        found: list[int] = []
        for id in some:
            producer = self._table[id]
            if producer.used and producer is not but:
                producer.used = False
                self._shares.renew(identity, id)
            elif producer is not but:
                found.append(id)
                if len(found) == count:
                    break
        return found or [id for id in some if self._table[id] is not but][:1]

    def _lot(self, identity: str) -> int:
        """Number of an identity's producers that are forgotten together."""
        return min(FORGET_AT_ONCE, max(1, self._shares.count(identity) // 10))

    def stream_removed(self, number: int) -> None:
        """Forget the positions of all producers in a stream."""
        for id in self._places.pop(number, ()):
            producer = self._table[id]
            del producer.streams[number]
            self._uncount_place(producer.identity)

    # --- over restarts ------------------------------------------------------------------

    def sequences(self, streams: Iterable[int], runs_max: int) -> Iterator[PackedSequence]:
        """Positions in these streams for a snapshot, with at most so many runs each.

        runs_max: the same at each call: positions that did not change since the last call are not
        packed anew.
        """
        for number in streams:
            for id, place in self._places.get(number, {}).items():
                if place.next:
                    if place.packed is None:
                        runs = list(place.runs)[-runs_max:]
                        contents = bytes(place.contents[-runs_max * _CONTENT.size :])
                        place.packed = pack_sequence(
                            Sequence64(id, place.epoch, number, place.next, runs, contents)
                        )
                    yield place.packed

    def restore(self, sequence: Sequence64) -> None:
        """Take up a position of a snapshot, unless a newer one is known."""
        producer = self._table.get(sequence.producer)
        if producer is None:
            return
        known = producer.streams.get(sequence.stream)
        if known is not None and (known.epoch, known.next) >= (sequence.epoch, sequence.next):
            return
        place = ProducerStream(sequence.epoch, sequence.next)
        place.runs.extend(sequence.runs)
        place.contents += sequence.contents
        self._put(producer, sequence.stream, place)

    def witness(self, fact: ProducerFact, runs_max: int) -> None:
        """Take up a batch that a start found in the journal after the snapshot, unless it is known.

        runs_max: see appended().
        """
        producer = self._table.get(fact.producer_id)
        if producer is None:
            return
        place = producer.streams.get(fact.stream)
        if place is None or place.epoch < fact.producer_epoch:
            place = ProducerStream(fact.producer_epoch)
            self._put(producer, fact.stream, place)
        if place.epoch == fact.producer_epoch and fact.first_sequence >= place.next:
            if fact.first_sequence > place.next and not place.runs:
                # Damage took the first batches. An empty run at the sequence at which they began
                # shows that nothing older was forgotten, so that a gap after it is damage.
                offset, time_ms, count = -1, 0, 0
                place.runs.append((place.next, offset, time_ms, count))
            place.appended(
                fact.first_sequence, fact.count, fact.base_offset, fact.append_time_ms,
                fact.content_crc, runs_max,
            )  # fmt: skip


class Pending(msgspec.Struct, eq=False):
    """One publish on its way into the journal."""

    ring: RingState
    frame: Any
    content: Content
    size: int
    stream: Stream
    waiter: Waiter | None = None
    base: int = -1
    """First offset, once the publish is handed to the shell."""
    time_ms: int = 0
    followers: list[Waiter] | None = None
    """Duplicates that came while the original was on its way."""
    place: ProducerStream | None = None
    sequence: int = 0
