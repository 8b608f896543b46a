"""A subscription in asyncio: records, batches, notices.

Owns the way from what has arrived to the caller's loop. The rule: nothing is lost to a
cancelled wait, a broken-off loop, or a change from records to batches amid a batch.

Words: `_reading` is the session's half of the subscription, with what has arrived and was not
taken. Its `next` is the offset at which what arrives next must begin, its `tail` the end of the
stream when the broker accepted it, and its `shortened` counts the links that found a lower tail
than the one before: the log had lost records that had not come. `_left` counts the rows at hand of
the batch that records are taken of. link.wake_up() has the session's messages leave.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Final

from malamute_protocol.batch import Batch, Record
from malamute_protocol.errors import BrokerRefused
from malamute_py.client.aio.link import LoopLink
from malamute_py.client.arguments import integer
from malamute_py.client.engine.waits import NOTHING, OPENED
from malamute_py.client.position import Position
from malamute_py.client.readers.records import SubscriptionBase
from malamute_py.client.session.subscription import (
    Arrival,
    Notice,
    RewoundNotice,
    SubscribeOptions,
    cut,
)
from malamute_py.client.settings import Wait

_PAUSE_EVERY: Final = 256  # asyncio only
"""Records after which the event loop gets its turn, though more are at hand."""
NO_OFFSET: Final = 1 << 63
"""Above every offset."""


class Subscription(SubscriptionBase):
    """Records of one stream, as an async iterator; for one task at a time."""

    def __init__(
        self,
        link: LoopLink,
        request: SubscribeOptions,
        *,
        strict: bool,
        on_notice: Callable[[Notice], None] | None,
        timeout_ms: int | None = None,
    ) -> None:
        """See Client.subscribe(). Raises what ended the session.

        timeout_ms: how long a loop over the records waits for the next batch; None: for good.
        """
        super().__init__(strict, on_notice)
        self._link = link
        self._timeout_ms = timeout_ms
        self._until_pause = _PAUSE_EVERY  # asyncio only
        if link.is_here():  # sync: with link.lock:
            self._reading = link.session.subscribe(request)
            link.wake_up()
        # A program that leaves `async for record in client.subscribe(...)` by a break never closes
        # the subscription: the link ends it when this object is freed, but not at the interpreter's
        # exit (atexit), where the link is closed as a whole.
        self._finalizer = weakref.finalize(self, link.dropped, self._reading)
        self._finalizer.atexit = False

    # --- where it is -----------------------------------------------------------------------

    @property
    def position(self) -> Position | None:
        """Position after the last record handed over, to go on from later; None: not known yet."""
        return self._place(self._reading.position)

    @property
    def live(self) -> bool:
        """Records come from the tail; otherwise from the journal, as credit is given."""
        return self._reading.live

    @property
    def ended(self) -> bool:
        """Nothing more will arrive."""
        return self._reading.ended

    async def accepted(self, timeout_ms: Wait = "default") -> Position:
        """Return where delivery begins, once the broker accepts. Raises its refusal, or Timeout.

        Raises BrokerRefused `cancelled` where it was closed before that.
        """
        reading = self._reading
        if self._link.is_here():  # sync: with self._link.lock:
            await self._link.until(
                lambda: reading.next >= 0 or reading.ended,
                reading,
                timeout_ms,
                OPENED,
                "the subscription",
            )
        position = reading.position
        if position is None:
            raise reading.error or BrokerRefused("cancelled")
        return position

    # --- batches ---------------------------------------------------------------------------

    async def next_batch(self, timeout_ms: int | None = None) -> Batch | None:
        """The next batch; None at the end.

        Raises Timeout (nothing is lost), the broker's refusal, or GapError when strict.
        """
        rest = self._rest()
        return rest if rest is not None else await self._next(timeout_ms)

    async def _next(self, timeout_ms: int | None, before: int = NO_OFFSET) -> Batch | None:
        """Return the next batch that has arrived, and give the caller the notices before it.

        None at the end, and once no record before the offset `before` is to come. `before`: given
        to next_record(), as by a view of keys, which asks so for the values there are.
        """
        reading, link = self._reading, self._link
        while True:
            if link.is_here():  # sync: with link.lock:
                if self._shortened != reading.shortened:
                    self._shortened = reading.shortened
                    self.gaps += 1
                    if before != NO_OFFSET:
                        # The log may never come to the former tail, and the caller would wait on.
                        before = reading.tail
                if before != NO_OFFSET and reading.goes_on_from(before):
                    return None
                item = reading.take()
                if link.session.consumed(reading):  # credit is to be given back
                    link.wake_up()
                if item is None:
                    if reading.error is not None:
                        raise reading.error
                    if reading.ended or reading.next >= before:
                        return None
                    timeout_ms = await link.until(
                        partial(self._goes_on, before),
                        reading,
                        timeout_ms,
                        NOTHING,
                        "record",
                    )
                    continue
            if not isinstance(item, Arrival):
                self._note(item)
                if isinstance(item, RewoundNotice) and before != NO_OFFSET:
                    # Offsets before `before` may not be there any more.
                    return await self._next(timeout_ms, reading.tail)
            elif item.batch is not None:
                return item.batch

    def _goes_on(self, before: int) -> bool:
        """Whether a call has something to do that waits for records before the offset `before`."""
        reading = self._reading
        shortened = reading.shortened != self._shortened  # _next() then goes on to another offset
        return bool(reading.inbox) or reading.ended or reading.next >= before or shortened

    async def batches(self) -> AsyncIterator[Batch]:
        """The batches, to the end. Raises as next_batch()."""
        while (batch := await self.next_batch(self._timeout_ms)) is not None:
            yield batch
            # Batches at hand cost no waiting: without this the loop would never turn.
            await asyncio.sleep(0)  # asyncio only

    async def to_arrow(
        self, records: int | None = None, *, decode: bool = False, header: Sequence[str] = ()
    ) -> Any:
        """A pyarrow Table of so many records, fewer at the end; None: to the end.

        decode: plain columns instead of dictionaries. Of a typed stream the table has the columns
        of the newest schema. header: names of columns before them, as of Batch.to_arrow().
        Raises as next_batch(); what had come until then is at hand for the next call.
        """
        from malamute_protocol.arrow import batches_to_table

        pieces: list[Batch] = []
        left = None if records is None else integer("records", records, 0)
        try:
            while left is None or left > 0:
                batch = await self.next_batch(self._timeout_ms)
                if batch is None:
                    break
                if left is not None:
                    if len(batch) > left:
                        # The rows beyond are at hand for the next call.
                        self._open(cut(batch, left, len(batch)))
                        batch = cut(batch, 0, left)
                    left -= len(batch)
                pieces.append(batch)
        except BaseException:
            # Nothing is lost: the batches come again with the next call.
            if self._link.is_here():  # sync: with self._link.lock:
                self._reading.take_back(pieces)
            raise
        return batches_to_table(pieces, decode=decode, header=header, schemas=self._reading.schemas)

    # --- records ---------------------------------------------------------------------------

    @property
    def tail(self) -> int:
        """Offset after the newest record when the broker accepted; -1: it has not accepted yet."""
        return self._reading.tail if self._reading.accepted else -1

    async def next_record(
        self, timeout_ms: int | None = None, *, before: int = NO_OFFSET
    ) -> Record | None:
        """The next record; None at the end. Raises as next_batch().

        before: an offset: None also once no record before it is to come. After a rewind, and where
        the log lost records that had not come, its place is taken by the tail that the broker told
        when it accepted anew.
        """
        if before != NO_OFFSET:
            integer("before", before, 0, NO_OFFSET)
            if self._left and self._next_offset() >= before:
                return None
        while not self._left:
            batch = await self._next(timeout_ms, before)
            if batch is None:
                return None
            self._open(batch)
        self._left -= 1
        return next(self._rows)

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Record:
        self._until_pause -= 1  # asyncio only
        if self._until_pause <= 0:  # asyncio only
            self._until_pause = _PAUSE_EVERY
            await asyncio.sleep(0)
        while True:
            if self._left:
                record = next(self._rows)
                self._left -= 1
                return record
            batch = await self._next(self._timeout_ms)
            if batch is None:
                raise StopAsyncIteration
            self._open(batch)

    # --- life ------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the subscription, also under a task that waits for it.

        What has arrived and was not consumed is dropped.
        """
        self._finalizer.detach()  # closed by its program: nothing is left for the collector to do
        if self._link.is_here():  # sync: with self._link.lock:
            position = self.position
            self._left = 0
            self._reading.closed_at(position)  # `position` goes on telling it
            self._link.session.unsubscribe(self._reading)
            # At once, not with ENDED: a task that waits, or asks later, finds the end.
            self._reading.ended = True
            self._link.wake_up()
            self._link.notify(self._reading)

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
