"""Compaction: how the ring of a stream with keys gets room again.

When such a ring fills, its oldest segments are given up; the newest record of each subject in them
is appended again before, as a copy in a hidden stream of the ring, and keeps its offset (it has
moved). Owns the trims of such streams, and these copies. The rules: a copy is appended only while
its record is its subject's newest in the journal, so that whatever replaces the record lies after
the copy; a segment is given up once every newest record in it has a copy, and each other record one
that replaces it, which no power loss can take back, the copies in it before the records; what waits
for room is refused `full` by name, and never takes a newest record's place. Source: SPEC.md,
section 8; ARCHITECTURE.md, Decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from malamute_protocol.encode import encode
from malamute_protocol.limits import UNBOUNDED
from malamute_py.broker.context import Shard
from malamute_py.broker.log.newest import COPIES_MAX, Keys
from malamute_py.broker.log.ring import RingState, Settlement
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.ready import (
    Append,
    AppendBundle,
    Appended,
    AppendRefused,
    IndexFailure,
)
from malamute_py.broker.streams.retention import Retention
from malamute_py.changelog.copies import MOVED_STREAM

FORGOTTEN_AT_ONCE = 1_000
"""Deleted keys that one look forgets at most."""
MOVED_BYTES = 512 << 10
"""Bytes of such a batch from which on no record is added."""
MOVED_BYTES_MIN = 16 << 10
"""Bytes from which on none is added in the smallest rings: a quarter of their segments."""
CRC_AT = 8
"""Position of the checksum in a content."""


class Copies(msgspec.Struct, eq=False):
    """Copies of newest records on their way into the ring."""

    stream: Stream
    keys: Keys
    records: list[tuple[str, int]]
    """(subject, offset) of all records that were to be copied."""
    batches: list[tuple[Any, list[int]]]
    """Each copy, a batch of one or more of the records, and the offsets of its rows."""
    then: Callable[[], None]
    """Called once the copies are durable: looks for what is left to be copied."""
    base: int = 0
    """Place of the first copy in the hidden stream, once the journal is handed the copies."""


class Compaction:
    """Gives up the oldest segments of rings that fill, and copies the newest records in them."""

    def __init__(
        self,
        shard: Shard,
        retention: Retention,
        when_visible: Callable[[RingState, int, Settlement], None],
    ) -> None:
        """retention: has the trims that the shell is asked for. when_visible: of Publishing."""
        self._shard = shard
        self._retention = retention
        self.queue: list[Copies] = []
        """Copies that the journal is to be handed."""
        self.handed: dict[int, Copies] = {}
        """Copies that the journal was handed, by the token of their bundle."""
        self._when_visible = when_visible

    # --- looking for room ---------------------------------------------------------------

    def look(self, stream: Stream) -> None:
        """Have the oldest segments of a stream's ring given up, once it has grown far enough.

        Called whenever the ring has taken a batch, or has no room for one. Until the answer, and
        the copies that it may ask for, `asked` keeps further calls from asking; `_found` sets
        `look_lsn`, the end of the ring from which on it is time again.
        """
        keys = stream.keys
        if keys is None or keys.room.asked or stream.ring.end_lsn < keys.room.look_lsn:
            return
        keys.room.asked = True
        self._look(stream, keys, may_copy=True)

    def _look(self, stream: Stream, keys: Keys, *, may_copy: bool) -> None:
        """Ask the journal which segments are the oldest; `_found` gets the answer.

        may_copy: whether newest records of a segment may be copied, so that it can be given up.
        False where copying has just ended: a segment that has some left stays for now.
        """
        self._shard.ask(
            stream.ring.name, stream.number, "oldest_segments", {},
            partial(self._found, stream, keys, may_copy),
        )  # fmt: skip

    def _found(self, stream: Stream, keys: Keys, may_copy: bool, value: Any) -> None:
        """Give up the oldest segments, one after the other, as far as room is needed and may be.

        It ends at a segment that a cursor pins, at one whose newest records have to be copied
        first, or at one whose records are replaced by others that are not durable yet; in the last
        two cases a later call goes on. may_copy: whether newest records may be copied now. value:
        the journal's answer, with the size of the ring and its oldest segments: the end of each,
        and by stream the first offset after it.
        """
        room = keys.room
        room.asked = False
        if stream.removed:
            return
        if isinstance(value, IndexFailure):
            self._failed(stream, keys, value)
            return
        before_ms = self._shard.now_ms - self._shard.settings.deleted_keys_ms
        keys.forget_deleted(before_ms, FORGOTTEN_AT_ONCE)
        room.learn_size(value["segment_bytes"], value["segments"])
        room.learn_start(value["start_lsn"])
        for end_lsn, nexts in value["oldest"]:
            if stream.ring.end_lsn < room.look_lsn:
                room.failed = ""
                return  # The ring has room enough again.
            # The first record, and the first copy, that lie after the segment.
            following, copy = nexts.get(stream.number, 0), nexts.get(MOVED_STREAM, 0)
            if following > stream.pinned:
                break
            has_newest = keys.before(following, copy, most=1, bytes_max=0)
            if has_newest:
                if may_copy and room.takes_copies(stream.ring.end_lsn):
                    room.asked = True
                    self._copy(stream, keys, following, copy)
                    return
                break
            if stream.ring.visible < stream.ring.end_lsn:
                # A power loss may take back what has replaced the records of the segment.
                room.asked = True
                self._when_visible(
                    stream.ring, stream.ring.end_lsn,
                    partial(self._replaced, stream, keys, following, copy, end_lsn),
                )  # fmt: skip
                return
            self._give_up(stream, following, copy)
            room.learn_start(end_lsn)
        room.failed = ""
        if stream.ring.end_lsn >= room.look_lsn:
            # One segment's records are copied for each eighth of a segment that is written: more
            # would copy the same records again and again where they fill much of the ring.
            room.look_lsn = stream.ring.end_lsn + room.segment_bytes // 8

    def _failed(self, stream: Stream, keys: Keys, failure: IndexFailure) -> None:
        """Report that the journal did not answer; the next record that is taken asks again.

        The event is told once until an answer comes. A ring that is still being opened (`wait`) has
        not failed.
        """
        if stream.removed or failure.code == "wait":
            return
        self._shard.counters["compaction_failures"] += 1
        if not keys.room.failed:
            self._shard.event(
                "compaction_failed", "error", stream=stream.name, code=failure.code,
                reason=failure.reason,
            )  # fmt: skip
        keys.room.failed = failure.reason

    def _replaced(
        self, stream: Stream, keys: Keys, following: int, copy: int, end_lsn: int,
        failure: tuple[str, str] | None,
    ) -> None:  # fmt: skip
        """Give up a segment whose records are all replaced, durably, and look at the next one.

        following, copy: the stream's first offset, and the first copy, after the segment. end_lsn:
        where the segment ends. failure: code and reason where what replaced the records is not
        durable: the segment stays.
        """
        keys.room.asked = False
        if failure is not None or stream.removed or following > stream.pinned:
            return
        self._give_up(stream, following, copy)
        keys.room.learn_start(end_lsn)
        self.look(stream)

    def _give_up(self, stream: Stream, following: int, copy: int) -> None:
        """Have the shell give up a segment in which no newest record lies any more.

        following: offset of the stream after the segment. copy: place of the first copy after it;
        0: there is none. The ring loses what both streams, its own and the hidden one, have before.
        """
        trims = self._retention.trims
        if copy:
            # Copies go first: a copy that outlived the record by which it was replaced would come
            # back at a start.
            trims.append((stream.ring.name, MOVED_STREAM, copy))
        if following > stream.trim_asked:
            stream.trim_asked = following
            trims.append((stream.ring.name, stream.number, following))

    # --- copying ------------------------------------------------------------------------

    def _copy(self, stream: Stream, keys: Keys, following: int, copy: int) -> None:
        """Copy a portion of the newest records in a segment that is to be given up.

        following: offset of the stream after the segment. copy: place of the first copy after it:
        newest records that were copied into the segment before are copied again. Once none is left,
        or there is no room for copies, the journal is asked anew, and the segment goes in the first
        case.
        """
        room = keys.room
        # All copies of a portion are one batch, which has to fit into a segment.
        size = min(MOVED_BYTES, max(MOVED_BYTES_MIN, room.segment_bytes // 4))
        records = keys.before(following, copy, room.copies_max, size)
        if not records or not room.takes_copies(stream.ring.end_lsn):
            self._look(stream, keys, may_copy=False)
            return
        places: dict[int, list[int]] = {}  # Place of an earlier copy -> offsets of its records.
        offsets = []  # Of the records that lie where they were appended.
        for subject, offset in records:
            place = keys.copy_of(subject)
            if place is None:
                offsets.append(offset)
            else:
                places.setdefault(place, []).append(offset)

        def made(value: Any) -> None:
            """Queue the copies that the journal made of the records; the next portion follows them.

            value: see Copies.batches; or an IndexFailure.
            """
            if isinstance(value, IndexFailure):
                keys.room.asked = False
                self._failed(stream, keys, value)
                return
            keys.room.failed = ""
            then = partial(self._copy, stream, keys, following, copy)
            self.queue.append(Copies(stream, keys, records, value, then))

        self._shard.ask(
            stream.ring.name, stream.number, "copies", {"offsets": offsets, "places": places}, made
        )

    def take(self) -> list[AppendBundle]:
        """Return the bundles of copies for the journal; each must be answered before the next take.

        Each is one batch of the hidden stream, whose records are the copies. Records that damage
        took, or that were replaced since they were read, are left out.
        """
        queue, self.queue = self.queue, []
        bundles: list[AppendBundle] = []
        for copies in queue:
            self._drop_lost(copies)
            self._drop_replaced(copies)
            if not copies.batches:
                copies.then()  # Nothing is left of this portion.
                continue
            keys, ring = copies.keys, copies.stream.ring
            # Each copy, a batch, is the body of one record.
            frame = encode([bytes(batch) for batch, _ in copies.batches], limits=UNBOUNDED)
            crc = int.from_bytes(frame[CRC_AT : CRC_AT + 4], "little")
            copies.base = keys.copies_next
            token = self._shard.token()
            self.handed[token] = copies
            append = Append(
                MOVED_STREAM, copies.base, len(copies.batches), self._shard.now_ms, frame, crc,
                keys=None,
            )  # fmt: skip
            bundles.append(AppendBundle(ring.name, token, (append,)))
        return bundles

    def _drop_lost(self, copies: Copies) -> None:
        """Forget keys whose newest record lies in damage: the journal could not copy it.

        Nothing is left that could be kept, and the segment could never be given up.
        """
        read = {offset for _, offsets in copies.batches for offset in offsets}
        for subject, offset in copies.records:
            if offset in read:
                continue
            newest, _deletion = copies.keys.find(subject) or (None, False)
            # A key whose newest record is another by now has lost nothing.
            if newest == offset:
                self._shard.event(
                    "key_lost", "error", stream=copies.stream.name, key=subject, offset=offset
                )
                copies.keys.forget(subject)

    def _drop_replaced(self, copies: Copies) -> None:
        """Drop copies with a record that was replaced while they were made: they are made anew.

        At a start, a copy that lies after the record that replaced it would seem to be newer.
        """
        newest: set[int] = set()
        for subject, offset in copies.records:
            now, _deletion = copies.keys.find(subject) or (None, False)
            if now == offset:
                newest.add(offset)
        copies.batches = [
            (batch, offsets) for batch, offsets in copies.batches if newest.issuperset(offsets)
        ]

    def appended(self, answer: Appended) -> None:
        """Take the news that the journal has copies; they take effect once they are durable.

        The next portion may be twice as large, up to COPIES_MAX, since a refusal may have made it
        small.
        """
        copies = self.handed.pop(answer.token)
        ring, keys = copies.stream.ring, copies.keys
        ring.end_lsn = answer.end_lsn
        keys.copies_next = copies.base + len(copies.batches)
        keys.room.copies_max = min(COPIES_MAX, 2 * keys.room.copies_max)
        self._shard.counters["records_moved"] += sum(len(rows) for _, rows in copies.batches)
        self._when_visible(ring, answer.end_lsn, partial(self._durable, copies))

    def _durable(self, copies: Copies, failure: tuple[str, str] | None) -> None:
        """Note where the copied records are from now on, and go on with the next portion.

        failure: why the copies are not durable; then nothing moves, and a later look may copy anew.
        """
        if failure is not None or copies.stream.removed:
            copies.keys.room.asked = False
            return
        subjects = {offset: subject for subject, offset in copies.records}
        for place, (_, offsets) in enumerate(copies.batches, copies.base):
            for offset in offsets:
                copies.keys.moved(subjects[offset], offset, place)
        copies.then()

    def refused(self, answer: AppendRefused) -> str:
        """Forget copies that the journal refused; the next look tries again, with fewer.

        All copies of a batch have to fit into a segment; how large those of a codec are is not
        known before they are made. Returns the name of the ring, in which publishing spares what
        was handed over after the copies (Publishing.spared).
        """
        copies = self.handed.pop(answer.token)
        room = copies.keys.room
        room.copies_max = max(1, room.copies_max // 4)
        room.asked = False
        return copies.stream.ring.name
