"""Retention: what a stream may drop to stay within its bounds of bytes, age and records.

Owns the trims that the shell is asked for, by the ledger of each stream's bytes. The rule: the core
asks the journal to trim, and `first` moves only when the journal has trimmed. Source:
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
        """Trims for the shell: (ring, stream, offset)."""
        self.due_ms = 0
        """Time of the next look at bounded streams."""
        self._begun_ms = 0
        self._turn: list[Stream] = []
        """Bounded streams that were not looked at in this round; the next ones are last."""

    def tick(self, streams: Collection[Stream]) -> None:
        """Look at some bounded streams, if it is time: at all of them in each `retention_ms`."""
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
            ticks = -(-len(streams) // LOOKS_MAX)  # Rounded up.
            self.due_ms = now_ms + max(1, settings.retention_ms // (ticks + 1))
        else:
            self.due_ms = max(self._begun_ms + settings.retention_ms, now_ms + 1)

    def _retain(self, stream: Stream) -> None:
        """Ask the journal to drop records beyond a stream's bounds.

        Records that a power loss may take back push none out for good.
        """
        settings, ledger = stream.settings, stream.ledger
        keep_from = stream.trim_asked
        if ledger.unsplit and stream.first > ledger.begin:
            # A trim took some of the recovered piece, and its bytes count until they are known.
            self._split_ledger(stream, stream.first)
        if settings.max_bytes:
            if ledger.unsplit and ledger.bytes > settings.max_bytes:
                # The recovered piece is not dropped whole: most of it may be within the bound.
                self._split_ledger(stream, stream.first)
            else:
                within = ledger.first_within(settings.max_bytes, stream.visible_next)
                keep_from = max(keep_from, within or 0)
            keep_from = max(keep_from, _first_of_newest_batch(stream))
        keep_from = max(keep_from, stream.first_of_newest(stream.visible_next))
        if settings.max_age_ms:
            since_ms = stream.oldest_ms(self._shard.now_ms)
            # The ledger tells the age of its pieces, the hot window that of each batch.
            kept = stream.first_of_age(self._shard.now_ms)
            keep_from = max(keep_from, ledger.first_since(since_ms) or 0, kept)
            # A twentieth of the age is precise enough where the ledger has no times.
            due_ms = ledger.asked_ms + settings.max_age_ms // 20
            if ledger.coarse and self._shard.now_ms >= due_ms:
                ledger.asked_ms = self._shard.now_ms
                self._find_age(stream, since_ms)
        keep_from = min(keep_from, stream.pinned)
        self.trim(stream, keep_from)

    def trim(self, stream: Stream, before: int) -> None:
        """Ask the journal to drop records before an offset, pinned or not."""
        if before > stream.trim_asked:
            stream.trim_asked = before
            self.trims.append((stream.ring.name, stream.number, before))

    def overwritten(self, stream: Stream, first: int) -> None:
        """Count the records that a shared ring takes although the stream's own bounds keep them.

        A stream that loses its last record to the other streams of its ring is an event.
        """
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
        """Whether only the journal can tell how much of a stream is past its age."""
        now_ms = self._shard.now_ms
        in_memory = stream.first >= stream.hot_first or stream.first_of_age(now_ms)
        return bool(stream.oldest_ms(now_ms)) and not in_memory

    def measure_aged(
        self, stream: Stream, asker: Asker, then: Callable[[int, int], None],
        wanted: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Ask the journal for the first record that a stream keeps by its age.

        then: called with that offset and the bytes of the stream before it; with (0, 0) where the
        journal cannot answer, or no record is past its age. wanted: see IndexQuery.
        """

        def found(value: Any) -> None:
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
        """Ask the index how many bytes of a recovered stream lie where, unless it is asked already.

        The ledger has only the sum of these bytes. first: what lies before this offset is not
        counted any more.
        """
        ledger = stream.ledger
        if ledger.split_asked:
            return
        ledger.split_asked = True

        def planned(value: Any) -> None:
            ledger.split_asked = False
            if isinstance(value, dict):
                begin = min(first, value["begin"])
                ledger.split([(to, size) for _, to, size in value["splits"]], begin)

        # About 32 pieces within the bound are fine enough to drop by, none under 4 KiB.
        split_bytes = max(1 << 12, (stream.settings.max_bytes or ledger.bytes) // 32)
        self._shard.ask(
            stream.ring.name, stream.number, "plan",
            _every_byte(first, ledger.first_piece_end, split_bytes), planned,
        )  # fmt: skip

    def _find_age(self, stream: Stream, since_ms: int) -> None:
        """Ask the index which recovered records are too old, and trim these.

        The ledger has no times of recovered records.
        """

        def found(value: Any) -> None:
            if value is None and stream.ledger.bytes:  # Every record is older.
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
    """Return the arguments of a plan that counts all bytes of a range of offsets."""
    return {
        "from": first, "end": end, "pattern": ["all"], "candidates": None, "records_max": 0,
        "bytes_max": 0, "split_bytes": split_bytes, "client_time": None, "splits_max": 1000,
        "purges": (), "oldest_ms": 0, "pinned": 0, "now_ms": None,
    }  # fmt: skip


def _first_of_newest_batch(stream: Stream) -> int:
    """Return the first record that max_bytes leaves of the newest batch; 0: it leaves all of it.

    The bodies from there on are within the bound, but the newest record stays whatever its size.
    Bodies that are compressed or Arrow are not told apart: such a batch stays whole.
    """
    most, hot = stream.settings.max_bytes, stream.hot
    if not hot or hot[-1].size <= most or hot[-1].next > stream.visible_next:
        return 0
    content = hot[-1].content
    if content.head.codec or content.head.body_kind == ARROW:
        return 0
    bodies = content.bodies()
    ends = bodies.offsets if bodies.parts is None else bodies.parts[bodies.offsets]
    # The first row whose body begins so late that no more than `most` bytes follow.
    rows = int(np.searchsorted(ends, int(ends[-1]) - most))
    return hot[-1].base + min(rows, len(content) - 1)
