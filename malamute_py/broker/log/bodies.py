"""Bodies of mail, requests and replies: the newest in memory, the others read back by number.

Owns the bounded window of recent batches of the mail stream, the batches that live in memory only,
and the reads that are under way. The rules: what is durable is kept within `mail_hot_bytes` and
read again when it is wanted later; one read serves all who want the same batch; what is under way
is bounded by count and bytes, and who wants more waits in order. Source: docs/design.md (Flow
control; Queues and the checkpoint).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError
from malamute_protocol.extract import extract, extractable
from malamute_protocol.stamp import STAMP_BYTES, Stamp
from malamute_py.broker.context import Shard
from malamute_py.broker.ready import BodiesFound, BodiesRead
from malamute_py.broker.structures.bitmaps import rows_of_bits

READ_NUMBERS: Final = 256
"""Batches that one read asks for at most."""
AGAIN_SHARE: Final = 8
"""What was read back is kept within this part of the window, for who wants more of it soon."""
OVERHEAD: Final = 500
"""About what a batch in memory takes beside its bytes."""


class Body:
    """One batch of the mail stream in memory."""

    __slots__ = ("_content", "_shard", "frame", "frames", "size", "stamp")

    def __init__(
        self, shard: Shard | None, stamp: Any, frame: Any, content: Content | None,
        whole: Any = None,
    ) -> None:  # fmt: skip
        """shard: to be told of errors. whole: stamp and content as one buffer, if they are."""
        self._shard = shard
        """None: rows cannot be taken out of it."""
        self.stamp = stamp
        self.frame = frame
        self._content = content
        self.frames: tuple[Any, ...] = (stamp, frame) if whole is None else (whole,)
        """As they are delivered."""
        self.size = STAMP_BYTES + len(frame if content is None else content.view)

    @property
    def content(self) -> Content:
        """Its columns."""
        content = self._content
        if content is None:
            content = self._content = Content(self.frame)
        return content

    def rows(self, mask: int, bytes_min: int, share: float) -> tuple[tuple[Any, ...], bool, int]:
        """How some rows go out: (frames, whether a row bitmap goes with them, bytes).

        Few rows of a large batch are extracted, like a stream's.
        """
        if self.size >= bytes_min and mask.bit_count() < share * self.content.head.count:
            frames = self.extracted(mask)
            if frames is not None:
                return frames, False, len(frames[0]) + len(frames[1])
        return self.frames, True, self.size

    def extracted(self, mask: int) -> tuple[Any, ...] | None:
        """Stamp and content of these rows alone; None: they cannot be taken out of the batch.

        As a whole, with a bitmap of its rows, it can be delivered whatever is in it.
        """
        content, shard = self.content, self._shard
        if shard is None or not extractable(content):
            return None
        stamp = Stamp.unpack(self.stamp, verify=False)
        try:
            return extract(stamp, content, rows_of_bits(mask, content.head.count))
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            self._shard = None
            base = stamp.base_offset
            shard.quarantine("(mail)", base, base + content.head.count, "taking rows out", error)
            return None


Then: TypeAlias = Callable[[Body | None], None]
"""Called with the batch, or with None when it cannot be had."""


class Bodies:
    """The batches of the mail stream, as far as they are in memory or wanted there."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._hot: OrderedDict[int, Body] = OrderedDict()
        self.hot_bytes = 0
        self._kept: dict[int, Body] = {}
        """Bodies of what is in memory only."""
        self.kept_bytes = 0
        self._again: OrderedDict[int, Body] = OrderedDict()
        """Newest bodies that were read back: a reader with little credit takes a batch in parts."""
        self.again_bytes = 0
        self._gone: set[int] = set()
        """Dropped while they were being read."""
        self._wanted: dict[int, list[Then]] = {}
        """Number -> who waits for it, whether its read is under way or not."""
        self._queue: deque[tuple[int, int]] = deque()
        """(number, bytes) of what no read was begun for."""
        self._reads: dict[int, tuple[tuple[int, ...], int]] = {}
        self._reading_bytes = 0
        self.failed = ""
        """Why the last read failed, while its waiters are told; empty: it is nowhere."""

    @property
    def gauges(self) -> dict[str, int]:
        """How much there is in memory, and how much is being read."""
        return {
            "mail_hot_bytes": self.hot_bytes + self.again_bytes,
            "mail_memory_bytes": self.kept_bytes,
            "mail_reads_under_way": len(self._reads),
        }

    # --- in memory ------------------------------------------------------------------------

    def keep(self, base: int, stamp: bytes, frame: Any, content: Content) -> Body:
        """Take a batch that was appended into the window; the oldest leave for it."""
        body = Body(self._shard, stamp, frame, content)
        self._hot[base] = body
        self.hot_bytes += body.size + OVERHEAD
        if self.hot_bytes > self._shard.settings.mail_hot_bytes:
            self._shrink()
        return body

    def _shrink(self) -> None:
        hot, most = self._hot, self._shard.settings.mail_hot_bytes
        while self.hot_bytes > most and len(hot) > 1:
            _, oldest = hot.popitem(last=False)
            self.hot_bytes -= oldest.size + OVERHEAD

    def hold(self, base: int, stamp: bytes, frame: Any, content: Content) -> Body:
        """Keep a batch that is in memory only, until it is dropped."""
        body = self._kept[base] = Body(self._shard, stamp, frame, content)
        self.kept_bytes += body.size
        return body

    def get(self, base: int) -> Body | None:
        """The batch, when it is in memory."""
        return self._hot.get(base) or self._kept.get(base) or self._again.get(base)

    def drop(self, base: int) -> None:
        """Nothing of a batch is wanted any more."""
        if base in self._wanted:
            self._gone.add(base)
        body = self._hot.pop(base, None)
        if body is not None:
            self.hot_bytes -= body.size + OVERHEAD
            return
        body = self._kept.pop(base, None)
        if body is not None:
            self.kept_bytes -= body.size
            return
        body = self._again.pop(base, None)
        if body is not None:
            self.again_bytes -= body.size + OVERHEAD

    # --- reading back ---------------------------------------------------------------------

    def want(self, base: int, size: int, then: Then) -> None:
        """Call with the batch: now when it is in memory, else when it was read.

        size: its bytes, as the tables have them.
        """
        body = self.get(base)
        if body is not None:
            then(body)
            return
        waiting = self._wanted.get(base)
        if waiting is not None:
            waiting.append(then)
            return
        self._wanted[base] = [then]
        self._queue.append((base, size))

    def take(self) -> list[BodiesRead]:
        """The reads to be begun now."""
        queue = self._queue
        if not queue:
            return []
        settings = self._shard.settings
        begun: list[BodiesRead] = []
        while queue and len(self._reads) < settings.mail_reads_max:
            room = settings.mail_read_bytes - self._reading_bytes
            if room <= 0 and self._reads:
                break
            numbers: list[int] = []
            size = 0
            # One read takes its share, so that what comes first is answered first.
            share = max(1, settings.mail_read_bytes // settings.mail_reads_max)
            while queue and len(numbers) < READ_NUMBERS and (not numbers or size < share):
                number, some = queue.popleft()
                numbers.append(number)
                size += some
            token = self._shard.token()
            ascending = tuple(sorted(numbers))
            self._reads[token] = ascending, size
            self._reading_bytes += size
            begun.append(BodiesRead(token, ascending))
        self._shard.counters["mail_reads"] += len(begun)
        return begun

    def found(self, answer: BodiesFound) -> None:
        """A read is answered: tell all who wait for what it asked for."""
        numbers, size = self._reads.pop(answer.token, ((), 0))
        self._reading_bytes -= size
        self.failed = answer.failed
        batches = answer.batches
        for number in numbers:
            waiting = self._wanted.pop(number, ())
            data = batches.get(number)
            body = None if data is None else self._parsed(number, data)
            if number in self._gone:
                self._gone.discard(number)
            elif body is not None:
                self._keep_again(number, body)
            for then in waiting:
                then(body)
        self.failed = ""

    def _keep_again(self, number: int, body: Body) -> None:
        again, most = self._again, self._shard.settings.mail_hot_bytes // AGAIN_SHARE
        again[number] = body
        self.again_bytes += body.size + OVERHEAD
        while self.again_bytes > most:
            _, oldest = again.popitem(last=False)
            self.again_bytes -= oldest.size + OVERHEAD

    def _parsed(self, number: int, data: Any) -> Body | None:
        view = memoryview(data)
        try:
            content = Content(view[STAMP_BYTES:])
            Stamp.unpack(view[:STAMP_BYTES], verify=False)
        except BatchError as error:
            self._shard.event("mail_damaged", "error", number=number, reason=error.reason)
            return None
        return Body(self._shard, view[:STAMP_BYTES], view[STAMP_BYTES:], content, data)
