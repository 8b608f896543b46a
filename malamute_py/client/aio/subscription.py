"""A subscription in asyncio: records, batches, notices.

Owns the way from what has arrived to the caller's loop. The rule: nothing is lost to a
cancelled wait, a broken-off loop, or a change from records to batches amid a batch.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Final

from malamute_protocol.batch import Batch, Record
from malamute_protocol.errors import RequestRejected
from malamute_py.client.aio.link import LoopLink
from malamute_py.client.engine.waits import NOTHING, OPENED, timed_out
from malamute_py.client.position import Position
from malamute_py.client.readers.records import Cursor
from malamute_py.client.session.subscription import (
    Arrival,
    Notice,
    Request,
    cut,
)
from malamute_py.client.settings import Wait

_PAUSE_EVERY: Final = 256
"""Records after which the event loop gets its turn, though more are at hand."""


class Subscription(Cursor):
    """Records of one stream, as an async iterator; for one task at a time."""

    def __init__(
        self,
        link: LoopLink,
        request: Request,
        *,
        strict: bool,
        on_notice: Callable[[Notice], None] | None,
    ) -> None:
        """See Client.subscribe(). Raises what ended the session."""
        super().__init__(strict, on_notice)
        self._link = link
        self._reading = link.session.subscribe(request)
        self._arrival = link.arrivals(self._reading)
        self._until_pause = _PAUSE_EVERY
        # `async for record in client.subscribe(...)` with a break leaves no one to close it.
        self._finalizer = weakref.finalize(self, link.dropped, self._reading)
        self._finalizer.atexit = False
        link.wake_up()

    # --- where it is -----------------------------------------------------------------------

    @property
    def position(self) -> Position | None:
        """Where a later reader goes on after the last record handed over; None: not known yet."""
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
        """Wait until the broker accepted; where delivery begins. Raises the refusal, or Timeout."""
        wait_ms = self._link.engine.settings.wait_ms(timeout_ms)
        reading = self._reading
        while reading.next < 0:
            if reading.ended:
                raise reading.error or RequestRejected("cancelled")
            self._arrival.clear()
            await self._link.within(self._arrival, wait_ms, OPENED, "the subscription")
        position = reading.position
        assert position is not None
        return position

    # --- batches ---------------------------------------------------------------------------

    async def next_batch(self, timeout_ms: int | None = None) -> Batch | None:
        """The next batch; None at the end.

        Raises Timeout (nothing is lost), the broker's refusal, or GapError when strict.
        """
        rest = self._rest()
        if rest is not None:
            return rest
        if timeout_ms is None:
            return await self._next()
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self._next()
        except TimeoutError:
            standing = self._link.standing()
            raise timed_out(NOTHING, "record", timeout_ms, standing) from None

    async def _next(self) -> Batch | None:
        reading, arrival, session = self._reading, self._arrival, self._link.session
        while True:
            item = reading.take()
            if session.consumed(reading):
                self._link.wake_up()
            if item is None:
                if reading.error is not None:
                    raise reading.error
                if reading.ended:
                    return None
                arrival.clear()
                await arrival.wait()
            elif not isinstance(item, Arrival):
                self._note(item)
            elif item.batch is not None:
                return item.batch

    async def batches(self) -> AsyncIterator[Batch]:
        """The batches, to the end. Raises as next_batch()."""
        while True:
            batch = await self.next_batch()
            if batch is None:
                return
            yield batch
            # Batches at hand cost no waiting: without this the loop would never turn.
            await asyncio.sleep(0)

    async def to_arrow(self, records: int | None = None, *, decode: bool = False) -> Any:
        """A pyarrow Table of so many records, fewer at the end; None: to the end.

        decode: plain columns instead of dictionaries. Raises as next_batch().
        """
        from malamute_protocol.arrow import table_of

        pieces = []
        left = records
        while left is None or left > 0:
            batch = await self.next_batch()
            if batch is None:
                break
            if left is not None:
                if len(batch) > left:
                    self._put_back(cut(batch, left, len(batch)))
                    batch = cut(batch, 0, left)
                left -= len(batch)
            pieces.append(batch.to_arrow(decode=decode))
        return table_of(pieces, decode=decode)

    # --- records ---------------------------------------------------------------------------

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Record:
        self._until_pause -= 1
        if self._until_pause <= 0:
            self._until_pause = _PAUSE_EVERY
            await asyncio.sleep(0)
        while True:
            if self._left:
                record = next(self._rows)
                self._left -= 1
                return record
            batch = await self._next()
            if batch is None:
                raise StopAsyncIteration
            self._open(batch)

    # --- life ------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the subscription; what has arrived and was not consumed is dropped."""
        self._finalizer.detach()
        position = self.position
        self._left = 0
        self._reading.closed_at(position)
        self._link.session.unsubscribe(self._reading)
        # At once, not with ENDED: a task that waits, or asks later, finds the end.
        self._reading.ended = True
        self._link.forget(self._reading)
        self._arrival.set()
        self._link.wake_up()

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
