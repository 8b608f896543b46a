"""Own turns: one lagging subscription is served from memory, or by a read of history for it alone.

Owns what one subscription is given in a turn. The newest batches are in memory, in the hot window;
all older ones are history, which the journal reads. The rules: one quantum of bytes a turn and one
read at a time; a subscription becomes live in the turn in which its position equals the tail;
records that were read and found no credit are dropped and read again, never kept. Source:
docs/design.md, Flow control.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from struct import unpack_from
from typing import Any

from malamute_protocol.content import Content
from malamute_protocol.gather import gatherable
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.broker.batches.bounds import first_within_bounds
from malamute_py.broker.batches.encoding import encoding_of
from malamute_py.broker.batches.rows import Mask
from malamute_py.broker.context import Shard
from malamute_py.broker.log.stream import NEVER, StampedBatch
from malamute_py.broker.ready import HistoryRead, HistoryRun, ReadRange
from malamute_py.broker.streams.start_positions import may_match
from malamute_py.broker.subscriptions.audience import audience_of
from malamute_py.broker.subscriptions.lagging import Lagging
from malamute_py.broker.subscriptions.live import Delivery
from malamute_py.broker.subscriptions.matching import (
    MATCHING,
    Choosing,
    Matching,
    PreparedRows,
    is_quick,
)
from malamute_py.broker.subscriptions.moved import Moved
from malamute_py.broker.subscriptions.portion import GATHERED_ROWS_MAX, TURN_BATCHES_MAX, Portion
from malamute_py.broker.subscriptions.selection import select
from malamute_py.broker.subscriptions.subscription import Subscription
from malamute_py.matcher import compile_pattern, rows_by_subject

EXPIRY_AT = STAMP_BYTES + 56
"""Position of a stored batch's earliest expiry."""
SPARSE_BYTES = 64 << 10
"""Bytes of one read when single records are looked for, of a start `last per subject`."""


class OwnTurns:
    """The turns of subscriptions that are served alone, as OnDemand gives them."""

    def __init__(
        self, shard: Shard, delivery: Delivery, matching: Matching, lagging: Lagging, moved: Moved
    ) -> None:
        self._shard = shard
        self._delivery = delivery
        self._matching = matching
        self._lagging = lagging
        self._moved = moved

    def turn(self, sub: Subscription) -> int:
        """Give a subscription one quantum from memory, or begin a read of the journal for it.

        At its end it is ended, at the tail it goes live. Returns the bytes given.
        """
        stream = sub.stream
        if stream.keys is not None and sub.position < min(stream.first, sub.stop):
            # Newest records that have moved to copies come before the stream's own first record.
            self._moved.turn(sub, stream.keys)
            return 0
        if sub.wanted is not None:
            self._to_next_wanted(sub)
        self._lagging.past_what_is_gone(sub)
        if sub.position >= sub.stop:
            sub.owner.end(sub, "end")
            return 0
        if sub.position >= sub.tail:
            self._lagging.leave_history(sub)
            self._delivery.catch_up(sub)
            return 0
        if sub.position >= stream.hot_first:  # Its next record is in the hot window.
            self._lagging.leave_history(sub)
            given = self._from_memory(sub)
            self._lagging.consider(sub)
            return given
        if not self._lagging.turns.may_read:
            # As many reads are under way as may be: its turn comes when one has ended.
            sub.queued = True
            self._lagging.turns.starved.add(sub.link, sub)
            return 0
        self._read(sub)
        return 0

    def _to_next_wanted(self, sub: Subscription, portion: Portion | None = None) -> None:
        """Skip to the next offset that a start `last per subject` wants; after the last, take all.

        portion: what was gathered for the subscription so far.
        """
        wanted = sub.wanted
        assert wanted is not None
        place = int(wanted.searchsorted(sub.position))
        if place < len(wanted):
            sub.position = int(wanted[place])
        else:
            sub.position = max(sub.position, sub.wanted_to)
            if portion is not None:
                # After an error a subscription is served again from its last delivery on: this
                # must not lie among the records of which only some are wanted.
                portion.flush()
            sub.wanted = None

    def _from_memory(self, sub: Subscription) -> int:
        """Give a subscription up to a quantum of bytes from the hot window; returns the bytes.

        It ends early where credit, the link's room or the share of time is used up, or a batch has
        to be matched in steps. After an error the subscription is `careful`: each batch leaves by
        itself, and one that raises again is passed over as damaged.
        """
        stream = sub.stream
        end = min(sub.tail, sub.stop)
        quantum = self._shard.settings.quantum_bytes
        now_ms = self._shard.now_ms
        more = self._lagging.more
        may_be_slow = self._matching.sliced and not sub.everything
        portion = Portion(self._delivery, sub, quantum)
        place = stream.hot_place(sub.position)
        for batch in islice(stream.hot, place, place + TURN_BATCHES_MAX):
            if batch.base >= end or portion.given >= quantum or not portion.takes_more:
                break
            if batch.next <= sub.position:
                continue
            next = min(batch.next, end)
            try:
                if may_be_slow and not self._prepared(sub, batch.base, batch.content):
                    break
                anything, mask = select(sub, batch.content, batch.base, end, now_ms)
                if anything and mask is None:  # Every row.
                    count = batch.next - batch.base
                    portion.add_whole((batch.stamp, batch.frame), next, count, batch.size)
                elif mask is not None and anything:
                    self._give_part(sub, portion, batch, next, mask)
            except Exception as error:
                if not sub.careful:
                    raise
                self._lagging.damaged(sub, batch.base, next, error)
            if sub.careful:
                sub.careful -= 1
                portion.flush()
            sub.position = next
            sub.prepared = None
            if sub.wanted is not None:
                self._to_next_wanted(sub, portion)
            # A batch takes time only where its headers are matched, with a pattern or with purges.
            if (not sub.everything or next < stream.purges.before) and not more():
                break
        portion.flush()
        return portion.given

    # --- reads of history -------------------------------------------------------------------

    def _read(self, sub: Subscription) -> None:
        """Have the journal read for a subscription before the hot window, as much as it may take.

        The journal skips batches that the pattern cannot match, by its index, and may gather rare
        rows of several batches into one.
        """
        stream = sub.stream
        end = min(sub.tail, sub.stop, stream.hot_first)
        size = min(self._shard.settings.quantum_bytes, sub.left_bytes)
        plain = sub.everything and sub.client_time is None and sub.wanted is None
        shared = plain and self._lagging.enter_history(sub) > 1
        if not shared:
            # A shared read is for all subscriptions that lag, whatever room each link has; a read
            # for one alone would bring and hold more than the subscription can be given.
            size = min(size, sub.link.room)
        if sub.wanted is not None:
            end = min(end, sub.wanted_to)
            size = min(size, SPARSE_BYTES)
        token = sub.reading = self._lagging.turns.begin(sub)
        candidates = matches = rows = None
        # A careful read is of all batches: the look into one of them may have caused the error.
        if not sub.everything and not sub.careful:
            candidates = partial(may_match, sub.pattern)
            purged = sub.position < stream.purges.before
            if sub.gathered and self._lagging.may_gather and sub.wanted is None and not purged:
                matches = compile_pattern(sub.pattern).matches
                rows = sub.rows = sub.rows or rows_by_subject(sub.pattern)
        self._lagging.turns.reads.append(
            ReadRange(
                stream.ring.name, stream.number, token, sub.position, end, size,
                candidates, None if sub.careful else sub.client_time, matches, shared,
                alone=plain and not shared, oldest_ms=stream.oldest_ms(self._shard.now_ms),
                pinned=stream.pinned, rows=rows,
            )
        )  # fmt: skip

    def deliver_history(self, sub: Subscription, answer: HistoryRead) -> None:
        """Deliver what the journal read for a subscription, thinned out where not all is wanted.

        A run is a series of stored batches, or one batch of gathered rows. Gaps that the journal
        found are told between the batches, by their offsets. It ends early where credit, the
        link's room or the share of time is used up, or a batch has to be matched in steps: the rest
        is read again.
        """
        stream, end = sub.stream, min(sub.tail, sub.stop)
        now_ms = self._shard.now_ms
        if stream.bounded or sub.position < stream.first:
            kept = min(first_within_bounds(stream, answer, now_ms), end)
            if sub.position < kept:
                self._lagging.gap(sub, kept, "retention", "")
        portion = Portion(self._delivery, sub, self._shard.settings.quantum_bytes)
        gaps = list(answer.gaps)
        more = self._lagging.more
        # Without a window or wanted offsets only an expiry or a purge can thin a batch out.
        looks = (
            not sub.everything or sub.client_time is not None or sub.wanted is not None
            or sub.position < stream.purges.before
        )  # fmt: skip
        for run in answer.runs:
            if run.next:  # The journal has gathered the run from rows of several batches.
                if not self._gathered(sub, portion, run, gaps, end):
                    portion.flush()
                    return
                continue
            data = memoryview(run.data)
            for at, size, base, count in run.spans:
                next = base + count
                if next <= sub.position:
                    continue
                if gaps:
                    self._name_gaps(sub, portion, gaps, base)
                if not portion.takes_more or base >= end:
                    portion.flush()
                    return
                # The head's earliest expiry, at its place: for a batch that leaves as it is, no
                # content is made.
                (expiry_ms,) = unpack_from("<q", data, at + EXPIRY_AT)
                cut = base < sub.position or next > end
                expired = 0 < expiry_ms <= now_ms  # Some record of it; 0: none ever does.
                if not looks and not cut and not expired:
                    portion.add_stored(run.data, at, size, next, count)
                else:
                    try:
                        stored = data[at : at + size]
                        if not self._thinned(sub, portion, run.data, stored, at, base, end):
                            portion.flush()
                            return
                    except Exception as error:
                        if not sub.careful:
                            raise
                        self._lagging.damaged(sub, base, min(next, end), error)
                if sub.careful:
                    sub.careful -= 1
                    portion.flush()
                sub.position = max(sub.position, min(next, end))
                if looks and not more():
                    portion.flush()
                    return
        portion.flush()
        self._name_gaps(sub, portion, gaps, NEVER)
        sub.position = max(sub.position, min(answer.next, end))

    def _gathered(
        self, sub: Subscription, portion: Portion, run: HistoryRun, gaps: list[Any], end: int
    ) -> bool:
        """Deliver a batch of rows that the journal gathered from several; False: it is not taken.

        It cannot be divided: where credit or room is used up, where some of its rows are before the
        position or after the end, or may have been purged meanwhile, all is read again.
        """
        ((at, size, base, count),) = run.spans  # A gathered batch is alone in its run.
        self._name_gaps(sub, portion, gaps, base)
        if not portion.takes_more or max(sub.position, sub.stream.purges.before) > base:
            return False
        if run.next > end:
            return False
        portion.add_stored(run.data, at, size, run.next, count)
        sub.position = run.next
        return True

    def _name_gaps(
        self, sub: Subscription, portion: Portion, gaps: list[tuple[int, int, str, str]], base: int
    ) -> None:
        """Send GAP for gaps that the journal found and that begin at or before `base`.

        They leave `gaps`, which is in order. Records that were gathered before a gap go first.
        """
        while gaps:
            first, to, code, reason = gaps[0]
            if first > base:
                return
            del gaps[0]
            to = min(to, sub.stop)
            if to > sub.position:
                portion.flush()
                sub.position = max(sub.position, first)
                self._lagging.gap(sub, to, code, reason)

    # --- some rows of a batch ---------------------------------------------------------------

    def _thinned(
        self, sub: Subscription, portion: Portion, data: Any, stored: memoryview, at: int,
        base: int, end: int,
    ) -> bool:  # fmt: skip
        """Deliver what a subscription selects of one stored batch; False: it is being matched.

        Called for a batch that may not leave whole: one that a pattern is compared with, that the
        position or the end cuts, or of which a record has expired. data: bytes that the journal has
        read, in which the batch lies from `at` on. stored: the batch, stamp and content. base: its
        first offset. end: no record from there on is wanted.
        """
        content = Content(stored[STAMP_BYTES:])
        if not self._prepared(sub, base, content):
            return False
        anything, mask = select(sub, content, base, end, self._shard.now_ms)
        sub.prepared = None
        if not anything:
            return True
        next = base + content.head.count
        if mask is None:
            portion.add_stored(data, at, len(stored), next, content.head.count)
        else:
            batch = StampedBatch(
                sub.stream, bytes(stored[:STAMP_BYTES]), stored[STAMP_BYTES:], content, base, next,
                len(stored),
            )  # fmt: skip
            self._give_part(sub, portion, batch, min(next, end), mask)
        return True

    def _prepared(self, sub: Subscription, base: int, content: Content) -> bool:
        """Whether a subscription's selection of a batch is known, or quick to find by select().

        False: matching the batch's headers takes long; it goes on in later turns, and the
        subscription has its next turn afterwards. Called before each look at a batch.
        """
        if sub.everything or sub.careful or not self._matching.sliced:
            return True
        if sub.prepared is not None:
            if sub.prepared.base == base:
                content.share(sub.prepared.table)  # So that it is not read again.
                return True
            sub.prepared = None
        if not audience_of(sub.stream).index.slow and is_quick(content):
            return True
        reading = self._matching.reading(sub.stream.uuid, base, content)
        job = Choosing(compile_pattern(sub.pattern).matches, content, reading=reading)
        if self._matching.run(job):
            sub.prepared = PreparedRows(base, job.rows, content.table)
            return True
        sub.reading = MATCHING  # No turn comes meanwhile.

        def matched() -> None:
            """Keep the rows that were found for the next turn."""
            sub.reading = 0
            if sub.started:
                sub.prepared = PreparedRows(base, job.rows, content.table)
                self._lagging.consider(sub)

        def failed(error: Exception) -> None:
            """Serve the subscription batch by batch, after an error in matching."""
            sub.reading = 0
            if sub.started:
                self._lagging.erred(sub, error)

        self._matching.later(job, matched, lambda: sub.started, failed)
        return False

    def _give_part(
        self, sub: Subscription, portion: Portion, batch: StampedBatch, next: int, mask: Mask
    ) -> None:
        """Deliver some rows of a batch: gathered with those of other batches if they are few.

        mask: the rows. next: offset up to which the delivery covers.
        """
        settings = self._shard.settings
        encoding = encoding_of(batch, mask, settings.extract_bytes_min, settings.extract_share)
        assert encoding is not None, "something was selected"
        # `extracts`: rows so few of so large a batch go out without the others.
        few = encoding.extracts and encoding.count <= GATHERED_ROWS_MAX and not sub.careful
        if few and sub.gathered and self._lagging.may_gather and gatherable(batch.content):
            portion.add_rows(batch, next, mask)
            return
        encoding = encoding.for_(sub.whole)  # The batch with a bitmap, or its rows as a batch.
        portion.send_part(encoding, next)
