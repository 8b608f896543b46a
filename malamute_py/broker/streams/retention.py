"""Retention: what a stream may drop to stay within its bounds of bytes, age and records.

Owns the trims that the shell is asked for, by the ledger of each stream's bytes. A ledger has the
bytes of a stream by ranges of offsets (pieces); of what a start found in the journal (the recovered
piece) it has only the sum, until the journal's index told how these bytes lie (a split). The rule:
the core asks the journal to trim, and `first` moves only when the journal has trimmed. Source:
docs/design.md, Journal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from malamute_protocol.content_layout import ARROW
from malamute_py.broker.context import Asker, Shard
from malamute_py.broker.ready import IndexFailure

if TYPE_CHECKING:
    from malamute_py.broker.log.stream import Stream

LOOKS_MAX = 512
"""Streams that one tick looks at: 10,000 took 11 ms, in which nothing else had the loop."""


class Retention:
    """Applies the bounds of streams."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.trims: list[tuple[str, int, int]] = []
        """Trims for the shell: (ring, stream, first offset that stays)."""
        self.due_ms = 0
        """Time of the next look at bounded streams."""
        self._begun_ms = 0
        """Time at which the present round over the bounded streams began."""
        self._turn: list[Stream] = []
        """Bounded streams that were not looked at in this round; the next ones are last."""

    def tick(self, streams: Collection[Stream]) -> None:
        """Look at some bounded streams, if it is time: at all of them in each `retention_ms`.

        Called in each turn of the broker that comes after `due_ms`. streams: those with bounds.
        """
        settings, now_ms = self._shard.settings, self._shard.now_ms
        if now_ms < self.due_ms:
            return
        if not self._turn:
            self._begun_ms = now_ms
            self._turn = list(streams)
        some, self._turn = self._turn[-LOOKS_MAX:], self._turn[:-LOOKS_MAX]
        for stream in some:
            if not stream.removed:
                self._retain(stream)
        if self._turn:
            # The looks of one round lie apart evenly, so that it ends within retention_ms.
            ticks = -(-len(streams) // LOOKS_MAX)  # Rounded up.
            self.due_ms = now_ms + max(1, settings.retention_ms // (ticks + 1))
        else:
            self.due_ms = max(self._begun_ms + settings.retention_ms, now_ms + 1)

    def _retain(self, stream: Stream) -> None:
        """Ask the journal to drop the records beyond a stream's bounds of bytes, number and age.

        Records after `visible_next`, which a power loss may take back, push no others out: these
        could not come back. `keep_from` is the first offset that all bounds together leave.
        """
        settings, ledger = stream.settings, stream.ledger
        keep_from = stream.trim_asked
        if ledger.unsplit and stream.first > ledger.begin:
            # A trim took some of the recovered piece; until the split, the ledger counts it whole.
            self._split_ledger(stream, stream.first)
        if settings.max_bytes:
            if ledger.unsplit and ledger.bytes > settings.max_bytes:
                # The recovered piece is not dropped whole: most of it may be within the bound.
                self._split_ledger(stream, stream.first)
            else:
                within = ledger.first_within(settings.max_bytes, stream.visible_next)
                keep_from = max(keep_from, within or 0)
            # One batch may exceed the bound alone: it is cut between its rows.
            keep_from = max(keep_from, _first_of_newest_batch(stream))
        keep_from = max(keep_from, stream.first_of_newest(stream.visible_next))
        if settings.max_age_ms:
            since_ms = stream.oldest_ms(self._shard.now_ms)
            # The ledger tells the age of its pieces, the hot window that of each batch.
            kept = stream.first_of_age(self._shard.now_ms)
            keep_from = max(keep_from, ledger.first_since(since_ms) or 0, kept)
            # The journal's index tells the age of recovered records (`coarse`), of which the ledger
            # has no times. To ask it once in a twentieth of the age is precise enough.
            due_ms = ledger.asked_ms + settings.max_age_ms // 20
            if ledger.coarse and self._shard.now_ms >= due_ms:
                ledger.asked_ms = self._shard.now_ms
                self._find_age(stream, since_ms)
        keep_from = min(keep_from, stream.pinned)
        self.trim(stream, keep_from)

    def trim(self, stream: Stream, before: int) -> None:
        """Ask the journal to drop records before an offset, pinned or not, for a bound or TRIM."""
        if before > stream.trim_asked:
            stream.trim_asked = before
            self.trims.append((stream.ring.name, stream.number, before))

    def overwritten(self, stream: Stream, first: int) -> None:
        """Count the records that a ring has overwritten although the stream's own bounds keep them.

        Called when the journal says that the ring gave up a segment, which other streams of the
        ring may have filled. first: the oldest record of the stream that is left. The loss of its
        last record is an event for the operator.
        """
        # Records before `trim_asked` were to go anyway.
        taken = min(first, stream.next) - max(stream.first, stream.trim_asked)
        if taken <= 0:
            return
        self._shard.counters["records_overwritten"] += taken
        if first >= stream.next:
            self._shard.event(
                "stream_overwritten", "warning",
                stream=stream.name, ring=stream.ring.name, offset=stream.next, records=taken,
            )  # fmt: skip

    def asks_for_age(self, stream: Stream) -> bool:
        """Whether only the journal can tell how much of a stream is past its bound of age.

        For STREAM_INFO. The hot window (in memory) tells it where the whole stream is in there, or
        some record past its age: then all before the window are older still.
        """
        now_ms = self._shard.now_ms
        in_memory = stream.first >= stream.hot_first or stream.first_of_age(now_ms)
        has_bound = bool(stream.oldest_ms(now_ms))
        return has_bound and not in_memory

    def measure_aged(
        self, stream: Stream, asker: Asker, then: Callable[[int, int], None],
        wanted: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Ask the journal for the first record that a stream keeps by its age, for STREAM_INFO.

        then: called with that offset and the bytes of the stream before it; with (0, 0) where the
        journal cannot answer, or no record is past its age. asker: the link that wants to know.
        wanted: whether it still does. Two questions follow on each other: which is the first record
        young enough, and how many bytes lie before it.
        """

        def found(value: Any) -> None:
            """Take the offset of the first record young enough; None: the journal has none."""
            if isinstance(value, IndexFailure):
                then(0, 0)
                return
            young = min(stream.hot_first if value is None else value, stream.pinned)
            if young <= stream.first:
                then(0, 0)
                return
            self._shard.ask(
                stream.ring.name, stream.number, "plan",
                # One split has it all: only the sum is wanted.
                _every_byte(stream.first, young, split_bytes=1 << 62),
                partial(measured, young), asker, wanted,
            )  # fmt: skip

        def measured(young: int, value: Any) -> None:
            """Take the plan of what is too old: where its first batch begins, and its bytes."""
            if isinstance(value, IndexFailure):
                then(0, 0)
            else:
                # A batch that a trim left some of counts as a whole.
                then(young, stream.ledger.bytes_before(value["begin"]) + value["bytes"])

        self._shard.ask(
            stream.ring.name, stream.number, "find_time",
            {"time_ms": stream.oldest_ms(self._shard.now_ms), "inclusive": True}, found, asker,
            wanted,
        )  # fmt: skip

    def _split_ledger(self, stream: Stream, first: int) -> None:
        """Have the index split the recovered piece of a stream's ledger, unless it was asked.

        The ledger has only the sum of these bytes, and retention needs to know which offsets have
        how many. first: what lies before this offset is not counted any more.
        """
        ledger = stream.ledger
        if ledger.split_asked:
            return
        ledger.split_asked = True

        def planned(value: Any) -> None:
            """Take the answer: ranges of offsets with their bytes; no dict: the index failed."""
            ledger.split_asked = False
            if isinstance(value, dict):
                # The first batch may begin before `first`, and its bytes count as a whole.
                begin = min(first, value["begin"])
                ledger.split([(end, size) for _begin, end, size in value["splits"]], begin)

        # About 32 pieces within the bound are fine enough to drop by, none under 4 KiB.
        split_bytes = max(1 << 12, (stream.settings.max_bytes or ledger.bytes) // 32)
        self._shard.ask(
            stream.ring.name, stream.number, "plan",
            _every_byte(first, ledger.first_piece_end, split_bytes), planned,
        )  # fmt: skip

    def _find_age(self, stream: Stream, since_ms: int) -> None:
        """Ask the index which recovered records came before a time, and trim these.

        The ledger has no times of recovered records.
        """

        def found(value: Any) -> None:
            """Trim before the first record young enough.

            value: its offset; None: all recovered ones are too old; else the index has failed.
            """
            if value is None and stream.ledger.bytes:
                value = stream.ledger.recovered_end
            if isinstance(value, int):
                first = min(value, stream.pinned)
                self.trim(stream, first)
                if stream.ledger.unsplit and stream.ledger.begin < first:
                    self._split_ledger(stream, first)

        self._shard.ask(
            stream.ring.name, stream.number, "find_time",
            {"time_ms": since_ms, "inclusive": True}, found,
        )  # fmt: skip


def _every_byte(first: int, end: int, split_bytes: int) -> dict[str, Any]:
    """Return the arguments of the index's question `plan` that counts a range's bytes, unfiltered.

    split_bytes: bytes of each part into which the answer divides the range.
    """
    # 0, None and () mean no cap and no filter.
    return {
        "from": first, "end": end, "pattern": ["all"], "candidates": None, "records_max": 0,
        "bytes_max": 0, "split_bytes": split_bytes, "client_time": None, "splits_max": 1000,
        "purges": (), "oldest_ms": 0, "pinned": 0, "now_ms": None,
    }  # fmt: skip


def _first_of_newest_batch(stream: Stream) -> int:
    """Return the first record that max_bytes leaves of the newest batch; 0: it leaves all of it.

    The bodies from there on are within the bound, but the newest record stays whatever its size.
    Where bodies are compressed or Arrow, each record counts as an equal share of its batch.
    """
    most, hot = stream.settings.max_bytes, stream.hot
    newest = hot[-1] if hot else None
    if newest is None or newest.size <= most or newest.next > stream.visible_next:
        return 0
    content = newest.content
    if content.head.codec or content.head.body_kind == ARROW:
        kept = max(1, most * len(content) // newest.size)
        return newest.next - kept
    bodies = content.bodies()
    # Row n begins at place n, and the last place is the end of all; a body may be of many parts.
    places = bodies.offsets if bodies.parts is None else bodies.parts[bodies.offsets]
    # The first row whose body begins so late that no more than `most` bytes follow.
    row = int(np.searchsorted(places, int(places[-1]) - most))
    return newest.base + min(row, len(content) - 1)
