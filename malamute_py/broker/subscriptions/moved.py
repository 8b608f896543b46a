"""Newest records that have moved: a lagging subscription reads their copies.

In a stream with keys, compaction copies newest records of the oldest segments into a hidden stream
of the ring before it gives the segments up; they keep their offsets. Owns the reads of these
copies, by their places in the hidden stream. The rule: older records of the same subjects are
covered without a word, since newer ones replaced them. Source: docs/design.md, Flow control.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

import numpy as np

from malamute_protocol.content import Content
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.broker.batches.encoding import encoding_of
from malamute_py.broker.batches.rows import rows_of_headers, unexpired, within_client_time
from malamute_py.broker.context import Shard
from malamute_py.broker.log.newest import Keys
from malamute_py.broker.log.stream import StampedBatch
from malamute_py.broker.ready import HistoryRead, HistoryRun, ReadRange
from malamute_py.broker.subscriptions.lagging import Lagging
from malamute_py.broker.subscriptions.live import Delivery
from malamute_py.broker.subscriptions.portion import Portion
from malamute_py.broker.subscriptions.selection import headers_chosen
from malamute_py.broker.subscriptions.subscription import Subscription

MOVED_AT_ONCE = 256
"""Newest records that have moved of which the copies are read at one time."""


class Moved:
    """The reads of copies of newest records, for subscriptions before their stream's first record.

    OwnTurns has `turn` begin a read; OnDemand has `deliver` send what the journal answers.
    """

    def __init__(self, shard: Shard, delivery: Delivery, lagging: Lagging) -> None:
        self._shard = shard
        self._delivery = delivery
        self._lagging = lagging
        self.reads: Final[dict[int, dict[int, list[int]]]] = {}
        """Reads under way by their tokens: {place of a copy: offsets}."""

    def turn(self, sub: Subscription, keys: Keys) -> None:
        """Begin a read of the next newest records that have moved, or go on after the last of them.

        The turn of a subscription before its stream's first record. Older records of the same
        subjects are covered without a word: newer ones replaced them.
        """
        stream = sub.stream
        to = min(stream.first, sub.stop, sub.tail)
        found = keys.moved_from(sub.position, to, MOVED_AT_ONCE)
        if not found:
            sub.position = to
            self._lagging.consider(sub)
        elif not self._lagging.turns.may_read:
            # As many reads are under way as may be: its turn comes when one has ended.
            sub.queued = True
            self._lagging.turns.starved.add(sub.link, sub)
        else:
            token = sub.reading = self._lagging.turns.begin(sub)
            places: dict[int, list[int]] = {}
            for offset, place in found:  # A copy may hold several records.
                places.setdefault(place, []).append(offset)
            self.reads[token] = places
            size = min(self._shard.settings.quantum_bytes, sub.left_bytes, sub.link.room)
            self._lagging.turns.reads.append(
                ReadRange(
                    stream.ring.name, stream.number, token, sub.position, to, size,
                    places=tuple(places),
                )
            )  # fmt: skip

    def deliver(self, sub: Subscription, answer: HistoryRead, places: dict[int, list[int]]) -> None:
        """Deliver newest records that have moved, in the order of their offsets.

        places: those that were asked for, by the place of their copy: their offsets. A copy that
        the journal did not find has moved once more, or its records were replaced, or it is
        damaged.
        """
        keys = sub.stream.keys
        assert keys is not None
        runs = {run.next: run for run in answer.runs}
        portion = Portion(self._delivery, sub, self._shard.settings.quantum_bytes)
        # A run's `next` is the place of its copy; the answer's is how many places were looked at.
        for place, offsets in islice(places.items(), answer.next):
            if not portion.takes_more:
                break
            run = runs.get(place)
            if run is not None:
                self._give_moved(sub, portion, run, offsets)
                continue
            portion.flush()
            places_now = dict(keys.moved_from(offsets[0], offsets[-1] + 1, len(offsets)))
            if any(places_now.get(offset, place) != place for offset in offsets):
                return  # They have moved once more: the next turn reads them there.
            for offset in offsets:
                if offset in places_now:  # Else a newer record has replaced it.
                    sub.position = max(sub.position, offset)
                    self._lagging.gap(
                        sub, offset + 1, "damaged", "the copy of the record is damaged"
                    )
        portion.flush()

    def _give_moved(
        self, sub: Subscription, portion: Portion, run: HistoryRun, offsets: list[int]
    ) -> None:
        """Deliver those rows of a copy that are newest records and that a subscription selects.

        offsets: of the records that were asked for; others in the copy were replaced since it was
        made.
        """
        data = memoryview(run.data)
        ((_, size, base, count),) = run.spans  # A copy is alone in its run.
        content, next = Content(data[STAMP_BYTES:]), offsets[-1] + 1
        deltas = content.offset_deltas  # Of each row, from `base` on; None: they follow on it.
        offset_of_row = base + (np.arange(count) if deltas is None else deltas.astype(np.int64))
        mask = np.isin(offset_of_row, offsets) & (offset_of_row >= sub.position)
        for narrower in (
            rows_of_headers(content, headers_chosen(sub, content)),
            unexpired(content, self._shard.now_ms),
            None if sub.client_time is None else within_client_time(content, sub.client_time),
        ):
            if narrower is not None:
                mask &= narrower
        batch = StampedBatch(
            sub.stream, bytes(data[:STAMP_BYTES]), data[STAMP_BYTES:], content, base, next, size
        )
        # Rows are extracted however small the batch is, and however many of its rows they are.
        encoding = encoding_of(batch, mask, bytes_min=0, share=2.0)
        if encoding is not None:
            encoding = encoding.for_(whole=False)
            if encoding.rows is None:  # Extracted, or all rows are taken.
                portion.add_whole(encoding.frames, next, encoding.count, encoding.bytes)
            else:
                portion.send_part(encoding, next)
        sub.position = next
