"""Bodies of mail, requests and replies: the newest in memory, the others read back by number.

Owns the bounded window of recent batches of the mail stream, the batches that are in memory only,
and the reads that are under way. The rules: the window keeps up to `mail_hot_bytes` of logged
batches, and a batch that has left it is read again when it is wanted; one read serves all callers
that want the same batch; reads under way are bounded by count and bytes, and further ones wait in
order. Source: docs/design.md (Flow control; Queues and the checkpoint).

A batch has the number of its first message, and its rows are its messages; a mask is a set of rows.
The mailbox or service in which messages of a batch wait is its owner: a batch has two while some of
its requests are dead letters.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError
from malamute_protocol.extract import extract, extractable
from malamute_protocol.stamp import LAST_OF_BUNDLE, STAMP_BYTES, Stamp
from malamute_py.broker.context import Shard
from malamute_py.broker.log.stream import headers_memory
from malamute_py.broker.ready import MAIL_STREAM, BodiesFound, BodiesRead
from malamute_py.broker.structures.bitmaps import rows_of_bits

READ_NUMBERS: Final = 256
"""Batches that one read asks for at most."""
AGAIN_SHARE: Final = 8
"""Divisor of the window: an eighth of its bytes is for batches that were read back."""
OVERHEAD: Final = 500
"""Bytes, about, that a batch in memory takes beside its own and its headers."""


class Body:
    """One batch of the mail stream in memory."""

    __slots__ = ("_content", "_shard", "frame", "frames", "memory", "size", "stamp")

    def __init__(
        self, shard: Shard | None, stamp: Any, frame: Any, content: Content | None,
        whole: Any = None,
    ) -> None:  # fmt: skip
        """shard: reports errors; None: rows cannot be extracted from the batch.

        content: None: parsed out of `frame` when it is first asked for. whole: stamp and content
        as one buffer, if they are one.
        """
        self._shard = shard
        self.stamp = stamp
        self.frame = frame
        self._content = content
        self.frames: tuple[Any, ...] = (stamp, frame) if whole is None else (whole,)
        """The frames of a delivery of the whole batch."""
        self.size = STAMP_BYTES + len(frame if content is None else content.view)
        self.memory = 0
        """Bytes that the batch takes in memory, about, while it is in a window."""

    @property
    def content(self) -> Content:
        """The content, parsed when it is first asked for."""
        content = self._content
        if content is None:
            content = self._content = Content(self.frame)
        return content

    def rows(self, mask: int, bytes_min: int, share: float) -> tuple[tuple[Any, ...], bool, int]:
        """Return a delivery of some rows: (frames, whether a row bitmap goes with them, bytes).

        Few rows of a large batch are extracted, as from a batch of a stream: rows that are less
        than `share` of a batch of `bytes_min` bytes. Otherwise the whole batch is delivered, and
        the bitmap says which rows are meant.
        """
        if self.size >= bytes_min and mask.bit_count() < share * self.content.head.count:
            frames = self.extracted(mask)
            if frames is not None:
                stamp, content = frames
                return frames, False, len(stamp) + len(content)
        return self.frames, True, self.size

    def extracted(self, mask: int) -> tuple[Any, ...] | None:
        """Return stamp and content of some rows alone; None: they cannot be extracted.

        The caller then delivers the whole batch with a bitmap of the rows, which is possible
        whatever is in it.
        """
        content, shard = self.content, self._shard
        if shard is None or not extractable(content):
            return None
        stamp = Stamp.unpack(self.stamp, verify=False)
        try:
            return extract(stamp, content, rows_of_bits(mask, content.head.count))
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            self._shard = None  # No row is taken out of this batch again.
            base = stamp.base_offset
            shard.quarantine("(mail)", base, base + content.head.count, "taking rows out", error)
            return None


OnBody: TypeAlias = Callable[[Body | None], None]
"""Called with a batch, or with None when it cannot be read."""


class Bodies:
    """The batches of the mail stream that are in memory, or wanted there."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._hot: OrderedDict[int, Body] = OrderedDict()
        """Newest batches that were appended, by number: the window of `mail_hot_bytes`."""
        self.hot_bytes = 0
        self._kept: dict[int, Body] = {}
        """Batches that are in memory only."""
        self._shares: dict[int, int] = {}
        """Number of such a batch -> its owners besides one: some of its requests may wait in their
        service while others are dead letters."""
        self.kept_bytes = 0
        self._again: OrderedDict[int, Body] = OrderedDict()
        """Newest batches that were read back: a reader with little credit gets one in parts."""
        self.again_bytes = 0
        self._gone: set[int] = set()
        """Batches that were dropped while they were being read."""
        self._wanted: dict[int, list[OnBody]] = {}
        """Number -> calls that wait for the batch, whether its read is under way or not."""
        self.queue: deque[tuple[int, int]] = deque()
        """(number, bytes) of batches that are wanted and that no read was begun for."""
        self._reads: dict[int, tuple[tuple[int, ...], int]] = {}
        """Token of a read under way -> (numbers, bytes)."""
        self._reading_bytes = 0
        self.failed = ""
        """Reason why a read failed, during the calls that wait for it; empty: a batch is lost."""

    @property
    def gauges(self) -> dict[str, int]:
        """Counts for the metrics."""
        return {
            "mail_hot_bytes": self.hot_bytes + self.again_bytes,
            "mail_memory_bytes": self.kept_bytes,
            "mail_reads_under_way": len(self._reads),
        }

    # --- in memory ------------------------------------------------------------------------

    def keep(self, base: int, stamp: bytes, frame: Any, content: Content) -> Body:
        """Add a batch, which the log has now, to the window; the oldest batches leave for it."""
        body = Body(self._shard, stamp, frame, content)
        self._hot[base] = body
        body.memory = body.size + OVERHEAD + headers_memory(body.content)
        self.hot_bytes += body.memory
        if self.hot_bytes > self._shard.settings.mail_hot_bytes:
            self._shrink()
        return body

    def _shrink(self) -> None:
        """Forget the oldest batches in memory until they take at most mail_hot_bytes."""
        hot, most = self._hot, self._shard.settings.mail_hot_bytes
        while self.hot_bytes > most and len(hot) > 1:  # The newest stays, however large.
            _, oldest = hot.popitem(last=False)
            self.hot_bytes -= oldest.memory

    def hold(self, base: int, stamp: bytes | None, frame: Any, content: Content) -> Body:
        """Keep a batch that is in memory only, until each of its owners has dropped it.

        A mailbox or service in memory owns its batches; one that a second owner takes is shared.
        stamp: None for a batch that is new; the broker's stamp is made here.
        """
        if base in self._kept:
            self.share(base)
            return self._kept[base]
        if stamp is None:
            shard, head = self._shard, content.head
            # The batch is in no ring: its LSNs are 0, and it is a bundle of its own.
            stamp = Stamp(
                flags=LAST_OF_BUNDLE, lsn=0, bundle_lsn=0, synced_lsn=0, epoch=shard.epoch,
                base_offset=base, append_time_ms=shard.now_ms, stream=MAIL_STREAM, origin=0,
                size=STAMP_BYTES + head.content_bytes, count=head.count, control_kind=0,
                content_crc=head.content_crc,
            ).pack()  # fmt: skip
        body = self._kept[base] = Body(self._shard, stamp, frame, content)
        self.kept_bytes += body.size
        return body

    def get(self, base: int) -> Body | None:
        """Return a batch if it is in memory."""
        return self._hot.get(base) or self._kept.get(base) or self._again.get(base)

    def share(self, base: int) -> None:
        """Note one more owner of a batch, if it is in memory only: `drop` keeps it for the other.

        A logged batch needs no count: it can be read again.
        """
        if base in self._kept:
            self._shares[base] = self._shares.get(base, 0) + 1

    def _unshare(self, base: int) -> bool:
        """Note one owner less of a batch; False: it has a single one, or is not in memory only."""
        shares = self._shares.pop(base, 0)
        if shares > 1:
            self._shares[base] = shares - 1
        return shares > 0

    def drop(self, base: int, *, wanted: bool = False) -> None:
        """Forget a batch of which an owner wants nothing any more, unless another owner does.

        An owner is a mailbox, or a service. wanted: whether another owner wants a batch that is in
        the log; of a batch in memory alone, the owners are counted here.
        """
        if (self._shares and self._unshare(base)) or wanted:
            return
        if base in self._wanted:  # It is being read back: its body is not kept when it comes.
            self._gone.add(base)
        body = self._hot.pop(base, None)
        if body is not None:
            self.hot_bytes -= body.memory
            return
        body = self._kept.pop(base, None)
        if body is not None:
            self.kept_bytes -= body.size
            return
        body = self._again.pop(base, None)
        if body is not None:
            self.again_bytes -= body.memory

    # --- reading back ---------------------------------------------------------------------

    def want(self, base: int, size: int, call: OnBody) -> None:
        """Have a call made with a batch: now if it is in memory, else when it was read.

        size: bytes of the batch, as the tables have them.
        """
        body = self.get(base)
        if body is not None:
            call(body)
            return
        waiting = self._wanted.get(base)
        if waiting is not None:  # One read of the batch serves all.
            waiting.append(call)
            return
        self._wanted[base] = [call]
        self.queue.append((base, size))

    def begin_reads(self) -> list[BodiesRead]:
        """Begin reads of batches that are wanted, and return them for the shell; once a turn.

        The reads under way are bounded by `mail_reads_max` and, together, by `mail_read_bytes`.
        """
        queue = self.queue
        if not queue:
            return []
        settings = self._shard.settings
        begun: list[BodiesRead] = []
        while queue and len(self._reads) < settings.mail_reads_max:
            room = settings.mail_read_bytes - self._reading_bytes
            if room <= 0 and self._reads:  # One read is allowed, however large its batch.
                break
            numbers: list[int] = []
            size = 0
            # A read asks for its share only, so that the first callers are answered first.
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
        """Take the answer to a read: make the calls that wait for its batches."""
        numbers, size = self._reads.pop(answer.token, ((), 0))
        self._reading_bytes -= size
        # A call that gets None looks here for why: the read failed and may be tried again, or the
        # batch is lost.
        self.failed = answer.failed
        batches = answer.batches
        for number in numbers:
            waiting = self._wanted.pop(number, ())
            data = batches.get(number)
            body = None if data is None else self._parsed(number, data)
            if number in self._gone:  # Its owner dropped it during the read.
                self._gone.discard(number)
            elif body is not None:
                self._keep_again(number, body)
            for call in waiting:
                call(body)
        self.failed = ""

    def _keep_again(self, number: int, body: Body) -> None:
        """Keep a batch that was read back for its next reader, in place of the oldest such ones."""
        again, most = self._again, self._shard.settings.mail_hot_bytes // AGAIN_SHARE
        again[number] = body
        body.memory = body.size + OVERHEAD + headers_memory(body.content)
        self.again_bytes += body.memory
        # One stays, however large it is: the next call may be for another portion of it.
        while self.again_bytes > most and len(again) > 1:
            _, oldest = again.popitem(last=False)
            self.again_bytes -= oldest.memory

    def _parsed(self, number: int, data: Any) -> Body | None:
        """Return the body that bytes of the journal hold; None, with an event: they are damaged."""
        view = memoryview(data)
        try:
            content = Content(view[STAMP_BYTES:])
            Stamp.unpack(view[:STAMP_BYTES], verify=False)  # The journal has verified the rest.
        except BatchError as error:
            self._shard.event("mail_damaged", "error", number=number, reason=error.reason)
            return None
        return Body(self._shard, view[:STAMP_BYTES], view[STAMP_BYTES:], content, data)
