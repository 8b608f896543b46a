"""Idempotent producers: the owner of each id, and the next sequence in each stream.

A producer id, with a sequence number for each record, lets the broker recognize a batch that comes
again. A place is one producer in one stream, with its sequences there; places are bounded, and the
producers that were unused for longest are forgotten. Owns the sequences. The rules: an id belongs
to the identity that opened it; a batch is taken exactly when its first sequence is the next one; a
batch that is in the log already is confirmed, with the original's position, only when the original
is; a batch with the sequence of an original and another content is in conflict with it, as long as
the checksum is remembered; a batch that was in the log and lies in damage is neither confirmed nor
taken; any other batch is out of sequence. An epoch that was fenced is refused. A recovered sequence
is the newest that snapshot and journal have. Source: docs/design.md, Promises.
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
    """Place of one producer in one stream: the sequences that the log has, and those on their way.

    A sequence is the producer's own number of a record, by which a batch that comes again is known.
    """

    __slots__ = ("contents", "epoch", "next", "next_taken", "packed", "runs", "under_way")

    def __init__(self, epoch: int, next: int = 0) -> None:
        self.epoch = epoch
        self.next = next
        """The sequence after the last one that the log has."""
        self.next_taken = next
        """The sequence that the next batch must begin with: those on their way into the log count,
        too."""
        self.runs: deque[tuple[int, int, int, int]] = deque()
        """Where the newest batches are in the log, oldest first, as runs of neighbours: (first
        sequence, offset, append time, count of records). Neighbours in sequence and offset are one
        run. A batch between two runs was in the log, and a start could not read it."""
        self.contents = bytearray()
        """Checksums of the newest batches, oldest first, in the form _CONTENT: 12 bytes each, where
        objects take 120. They tell a batch that comes again from another one of its sequence."""
        self.under_way: dict[int, Pending] = {}
        """Publishes on their way, by first sequence."""
        self.packed: PackedSequence | None = None
        """The runs, encoded as snapshots have them; None after any change. Each segment begins with
        a snapshot, and packing all runs of 10,000 producers anew took 68 ms (6 MB of runs of
        producers at rest)."""

    def appended(
        self, sequence: int, count: int, offset: int, time_ms: int, crc: int, runs_max: int
    ) -> None:
        """Remember a batch that the log has, so that it is recognized when its producer resends it.

        Called for each batch that the journal appended, and for those that a start finds there.
        sequence, count, offset: of its records. crc: of its content. runs_max: runs, and checksums,
        that are remembered.
        """
        self.under_way.pop(sequence, None)
        self.packed = None
        self.next = sequence + count
        if self.next_taken < self.next:
            # A start takes batches up from the journal, without their having been under way.
            self.next_taken = self.next
        contents = self.contents
        contents += _CONTENT.pack(sequence, crc)
        if len(contents) > runs_max * _CONTENT.size:
            del contents[: _CONTENT.size]
        runs = self.runs
        if runs:
            first, at, then, length = runs[-1]
            if then == time_ms and first + length == sequence and at + length == offset:
                # The batch follows on the last run, and has its append time: the run grows.
                runs[-1] = (first, at, then, length + count)
                return
        runs.append((sequence, offset, time_ms, count))
        if len(runs) > runs_max:
            runs.popleft()

    def refused(self, sequence: int, code: str = "", reason: str = "") -> None:
        """Take a batch back that the journal refused: the producer goes on at its sequence.

        code, reason: of the refusal; a subclass (arrivals.py) hands them on.
        """
        self.under_way.pop(sequence, None)
        if sequence < self.next_taken:
            # Batches after it are refused with it. The log's own sequences are never taken back.
            self.next_taken = max(self.next, sequence)

    def fault(self, sequence: int, crc: int) -> str:
        """Return why a batch whose sequence was taken before is no copy of the one taken then.

        `damaged`: the first one was in the log and is lost; `conflict`: it had another content; "":
        the batch is a duplicate, as far as is remembered. crc: of its content.
        """
        if self._damaged(sequence):
            return "damaged"
        return "conflict" if self._conflicts(sequence, crc) else ""

    def _damaged(self, sequence: int) -> bool:
        """Whether the log had a batch of this sequence and damage took it away.

        Batches are forgotten from the oldest on. So one that is not remembered, while older ones
        are, was found damaged by a start.
        """
        runs = self.runs
        if not runs:
            return False
        oldest_remembered, *_ = runs[0]
        if not oldest_remembered <= sequence < self.next:
            return False
        return self.original(sequence) is FORGOTTEN

    def _conflicts(self, sequence: int, crc: int) -> bool:
        """Whether a batch of this sequence is known to differ from the one that was taken.

        Where nothing is remembered, it counts as a copy.
        """
        original = self.under_way.get(sequence)
        if original is not None:
            return original.content.head.content_crc != crc
        if sequence >= self.next:
            # The sequence lies amid a batch that is on its way.
            return True
        contents = self.contents
        if not contents:
            return False
        oldest_remembered, _ = _CONTENT.unpack_from(contents)
        if sequence < oldest_remembered:
            return False
        return (sequence, crc) not in _CONTENT.iter_unpack(contents)

    def original(self, sequence: int) -> Original:
        """Return where the log has a batch of a producer that comes again.

        FORGOTTEN: it is older than what is remembered, or damage took it: _damaged() tells which.
        """
        for first, offset, time_ms, count in reversed(self.runs):
            if first <= sequence < first + count:
                return Original(offset + sequence - first, time_ms)
        return FORGOTTEN


class Producer:
    """One producer id, which a client got by OPEN_PRODUCER so that its resends are recognized."""

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
        """Id -> producer."""
        self._places: dict[int, dict[int, ProducerStream]] = {}
        """Position of each producer in each stream: a snapshot of a ring or a removal asks by
        stream."""
        self.places = 0
        """Number of all places: each is one producer in one stream."""
        self._shares: Shares[int] = Shares()
        """Producers of each identity, the longest unused first."""
        self._places_of: dict[str, int] = {}
        """Number of places of each identity's producers."""
        self._log_epoch = log_epoch
        self._minted = 0
        """Ids that were given in this run."""

    def __len__(self) -> int:
        return len(self._table)

    def mint(self) -> int:
        """Return an id for a new producer, which none of this log had: its epochs only rise."""
        self._minted += 1
        return self._log_epoch << 32 | self._minted

    def get(self, id: int) -> Producer | None:
        """Return the producer of this id; None: it was never opened, or is forgotten."""
        return self._table.get(id)

    def used(self, id: int) -> None:
        """Note that a client goes on with a producer: others of its identity are to go first."""
        producer = self._table.get(id)
        if producer is not None:
            self._shares.renew(producer.identity, id)

    def opened(self, id: int, identity: str, epoch: int) -> None:
        """Take up a producer that the change log has opened, or the epoch of its fencing."""
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
        """Return a producer's place in a stream, for a batch of it that has come.

        A place that did not exist, and the first one of a new epoch of the id, is at sequence 0.
        """
        place = producer.streams.get(number)
        if place is not None and place.epoch == producer.epoch:
            return place
        # A new epoch of an id counts from 0 again.
        place = ProducerStream(producer.epoch)
        self._put(producer, number, place)
        return place

    def _put(self, producer: Producer, number: int, place: ProducerStream) -> None:
        """Set a producer's place in a stream, and count it if it is a further one."""
        if number not in producer.streams:
            self.places += 1
            identity = producer.identity
            self._places_of[identity] = self._places_of.get(identity, 0) + 1
        producer.streams[number] = place
        self._places.setdefault(number, {})[producer.id] = place

    def _drop_place(self, number: int, producer: Producer) -> None:
        """Drop a producer's place in a stream; the caller drops it from `producer.streams`."""
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
        """Return ids to forget so that one more producer may be opened where there are too many.

        They are the longest unused of the identity that has the most, which keeps an equal share.
        """
        identity, _ = self._shares.next_out()
        # As many as _lot() forgets together, but no more than the identity has beyond its share.
        spare = self._shares.count(identity) - self._shares.fair
        return self._unused(identity, max(1, min(self._lot(identity), spare)), None)

    def crowded_out(self, producer: Producer) -> list[int]:
        """Return ids to forget so that a producer may write to one more stream.

        Called where there are as many places (a producer in a stream) as may be. The ids are the
        longest unused of the producer's own identity when that has an equal share of the places or
        more, else of the identity that has the most. Empty: there is no other producer.
        """
        places = self._places_of
        identity = producer.identity
        equal_share = self.places // max(1, len(places))
        if places.get(identity, 0) < equal_share:
            identity = max(places, key=places.__getitem__)
        return self._unused(identity, self._lot(identity), producer)

    def _unused(self, identity: str, count: int, but: Producer | None) -> list[int]:
        """Return at most `count` ids of an identity's producers, the longest unused first.

        Publishing only marks a producer as used, which costs less than moving it to the end of its
        identity's order; a marked one is moved there now, and loses the mark. but: a producer that
        is not returned. At least one id is returned, if there is another producer.
        """
        some = self._shares.oldest(identity, LOOKED_AT)
        found: list[int] = []
        for id in some:
            producer = self._table[id]
            if producer is but:
                continue
            if producer.used:
                producer.used = False
                self._shares.renew(identity, id)
                continue
            found.append(id)
            if len(found) == count:
                break
        return found or [id for id in some if self._table[id] is not but][:1]

    def _lot(self, identity: str) -> int:
        """Number of an identity's producers that are forgotten together: a tenth, within bounds."""
        return min(FORGET_AT_ONCE, max(1, self._shares.count(identity) // 10))

    def stream_removed(self, number: int) -> None:
        """Forget the positions of all producers in a stream."""
        for id in self._places.pop(number, ()):
            producer = self._table[id]
            del producer.streams[number]
            self._uncount_place(producer.identity)

    # --- over restarts ------------------------------------------------------------------

    def sequences(self, streams: Iterable[int], runs_max: int) -> Iterator[PackedSequence]:
        """Yield the places in these streams for the snapshot with which a ring's segment begins.

        runs_max: runs and checksums of each place at most; the same at each call, since places that
        did not change since the last call are not packed anew.
        """
        for number in streams:
            for id, place in self._places.get(number, {}).items():
                # A place at sequence 0 is what a start takes for granted.
                if place.next:
                    if place.packed is None:
                        runs = list(place.runs)[-runs_max:]
                        contents = bytes(place.contents[-runs_max * _CONTENT.size :])
                        place.packed = pack_sequence(
                            Sequence64(id, place.epoch, number, place.next, runs, contents)
                        )
                    yield place.packed

    def restore(self, sequence: Sequence64) -> None:
        """Take up a place that a start found in a ring's snapshot, unless a newer one is known."""
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

        Called in the order of the log. runs_max: runs that are remembered of a place.
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


class Pending(msgspec.Struct):
    """One publish that was taken and is on its way into the journal."""

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
    """Waiters of duplicates that came while the original was on its way."""
    place: ProducerStream | None = None
    """Place of its producer in the stream; None: the publish has no producer."""
    sequence: int = 0
    """First sequence of the batch, where it has a producer."""
