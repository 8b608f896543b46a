"""A member of a group, in asyncio.

Owns how a member takes its records and acknowledges them, as awaitables. The rule: as in client.py:
a cancelled call leaves all others as they were.

Words: `_membership` is the session's half of the member, with what has arrived. A record is handed
over when the program gets it; with ack="next" it is acknowledged when the next one is asked for. A
lease is the time after which the broker gives a record that this member is silent about to another
one. link.wake_up() has the session's messages leave.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final

from malamute_protocol.batch import Record
from malamute_protocol.errors import BrokerRefused
from malamute_py.client.aio.link import LoopLink
from malamute_py.client.arguments import duration
from malamute_py.client.engine.waits import ACKED, NOTHING, OPENED, PASSED_OVER
from malamute_py.client.readers.group import MemberBase, numbers_of
from malamute_py.client.session.acknowledgements import AckForm
from malamute_py.client.session.group_options import AGAIN, DONE, RELEASED, GroupOptions, failed
from malamute_py.client.session.held_batches import Held, HeldBatch
from malamute_py.client.session.subscription import Notice
from malamute_py.client.settings import Wait
from malamute_py.client.words import AckWhen

JOINING: Final = "the membership"
_PAUSE_EVERY: Final = 256  # asyncio only
"""Records after which the event loop gets its turn, though more are at hand."""


class Member(MemberBase):
    """A member of a group, with records that no other member gets; for one task at a time."""

    def __init__(
        self,
        link: LoopLink,
        asked: GroupOptions,
        *,
        ack: AckWhen,
        strict: bool,
        on_notice: Callable[[Notice], None] | None,
        timeout_ms: int | None = None,
    ) -> None:
        """See Client.group(). Raises what ended the session."""
        super().__init__(ack, strict, on_notice)
        self._link = link
        self._timeout_ms = timeout_ms
        self._until_pause = _PAUSE_EVERY  # asyncio only
        self._closed = False
        if link.is_here():  # sync: with link.lock:
            self._members = link.session.memberships
            self._membership = self._members.join(asked)
            link.wake_up()
        # `async for record in client.group(...)` with a break leaves no caller that closes it.
        self._finalizer = weakref.finalize(self, link.dropped, self._membership)
        self._finalizer.atexit = False

    @property
    def ended(self) -> bool:
        """Nothing more will arrive."""
        return self._closed or self._membership.ended

    async def accepted(self, timeout_ms: Wait = "default") -> None:
        """Wait until the broker accepted. Raises the refusal, or Timeout."""
        membership = self._membership
        if self._link.is_here():  # sync: with self._link.lock:
            await self._link.until(
                lambda: membership.accepted or self.ended,
                membership,
                timeout_ms,
                OPENED,
                JOINING,
            )
        if not membership.accepted:
            raise membership.error or BrokerRefused("cancelled")

    # --- taking ----------------------------------------------------------------------------

    async def next_batch(self, timeout_ms: int | None = None) -> HeldBatch | None:
        """The next batch; None at the end.

        Raises Timeout (nothing is lost), the broker's refusal, or GapError when strict.
        """
        self._acknowledge_handed()
        batch = self._rest()  # of a batch that was iterated by records
        if batch is None:
            batch = await self._next(timeout_ms)
        if batch is not None:
            self._handing(batch, batch.offsets.tolist())
        return batch

    async def _next(self, timeout_ms: int | None) -> HeldBatch | None:
        """Return the next batch of records, past the notices before it; None once closed."""
        membership, link = self._membership, self._link
        while True:
            if link.is_here():  # sync: with link.lock:
                if self._closed:
                    return None
                item = self._take()
                # Credit is to be given back, or the membership has something to say.
                if link.session.consumed(membership) or membership.wakes_link:
                    link.wake_up()
                if item is None:
                    if membership.error is not None:
                        raise membership.error
                    if membership.ended:
                        return None
                    try:
                        timeout_ms = await link.until(
                            lambda: bool(membership.queue) or self.ended,
                            membership,
                            timeout_ms,
                            PASSED_OVER if membership.passed_over else NOTHING,
                            "record",
                        )
                    except BaseException:
                        membership.waits = False  # this caller waits for a record no longer
                        raise
                    continue
            if isinstance(item, HeldBatch):
                return item
            self._note(item)

    async def batches(self) -> AsyncIterator[HeldBatch]:
        """The batches, to the end. Raises as next_batch()."""
        while (batch := await self.next_batch(self._timeout_ms)) is not None:
            yield batch
            # Batches at hand cost no waiting: without this the loop would never turn.
            await asyncio.sleep(0)  # asyncio only

    def __aiter__(self) -> Member:
        return self

    async def __anext__(self) -> Record:
        self._acknowledge_handed()
        self._until_pause -= 1  # asyncio only
        if self._until_pause <= 0:  # asyncio only
            self._until_pause = _PAUSE_EVERY
            await asyncio.sleep(0)
        # Records at hand whose lease was lost: _next() has the broker say first whose they are.
        while not self._left or self._membership.lost_lease:
            batch = await self._next(self._timeout_ms)
            if batch is None:
                raise StopAsyncIteration
            self._open(batch)
        record = next(self._rows)
        self._left -= 1
        self._handing(self._batch, [record.offset])
        return record

    # --- acknowledging ---------------------------------------------------------------------

    def _acknowledge_handed(self, form: AckForm = DONE) -> None:
        """Acknowledge the records that were handed to the caller last, with ack="next".

        form: as what: done, or given back.
        """
        if not self._handed:
            return
        if self._link.is_here():  # sync: with self._link.lock:
            self._membership.ack(self._take_handed(), form)
            self._link.wake_up()

    def ack_nowait(self, held: Held) -> asyncio.Future[bool]:
        """Say that a record or batch is done; the future is what ack() returns."""
        return self._ack(held, DONE)

    async def ack(self, held: Held, timeout_ms: Wait = "default") -> bool:
        """Say that a record or batch is done; returns True once the broker has confirmed it.

        False: the broker did not confirm all of it, as the link was lost or a lease ended in
        between. Another member may get it again, and after the end of a lease this one, too; what
        comes to this one after a lost link is acknowledged then, and not handed over. So what was
        made of it is not to be undone. Raises Timeout, or LocalProtocolError: not from this member.
        """
        future = self._ack(held, DONE)
        return await self._link.limit(future, timeout_ms, ACKED, "an acknowledgement")

    async def nack(self, held: Held, delay_ms: int = 0, timeout_ms: Wait = "default") -> bool:
        """Give a record or batch back, for any member to get after a delay. As ack().

        That counts as an attempt, where the group has a bound of attempts.
        """
        future = self._ack(held, AckForm(again_ms=duration("delay_ms", delay_ms)))
        return await self._link.limit(future, timeout_ms, ACKED, "an acknowledgement")

    async def release(self, held: Held, timeout_ms: Wait = "default") -> bool:
        """Give a record or batch back at once, which counts as no attempt. As ack().

        For a member that stops, not for a record that cannot be done: that one would never end.
        """
        future = self._ack(held, RELEASED)
        return await self._link.limit(future, timeout_ms, ACKED, "an acknowledgement")

    async def renew(self, held: Held, timeout_ms: Wait = "default") -> bool:
        """Begin the leases of a record or batch anew, for one that takes long. As ack().

        Records that were not handed over yet are renewed by themselves while records are asked
        for, acknowledged or renewed. Only groups with `lease_ms` have leases.
        """
        future = self._say(partial(self._membership.renew, numbers_of(held, self._membership)))
        return await self._link.limit(future, timeout_ms, ACKED, "a renewal")

    async def fail(self, held: Held, reason: str = "", timeout_ms: Wait = "default") -> bool:
        """Give a record or batch up: to the group's dead letters, with the reason. As ack()."""
        future = self._ack(held, failed(reason))
        return await self._link.limit(future, timeout_ms, ACKED, "an acknowledgement")

    def _ack(self, held: Held, form: AckForm) -> asyncio.Future[bool]:
        """Acknowledge a record or batch, as `form` says: done, given back, or failed.

        The result gets True, or False: it came too late.
        """
        offsets = numbers_of(held, self._membership)
        self._unhand(offsets)  # ack="next" has no more to say of them
        return self._say(partial(self._membership.ack, offsets, form))

    def _say(self, say: Callable[[Any], None]) -> asyncio.Future[bool]:
        """Have the membership say something of records, and give the result to its token.

        The result gets True, or False: it came too late. say: takes the token.
        """
        future: asyncio.Future[bool] = self._link.loop.create_future()
        if self._link.is_here():  # sync: with self._link.lock:
            if self._membership.ended:
                future.set_result(False)
            else:
                say(future)
                self._link.wake_up()
        return future

    # --- life ------------------------------------------------------------------------------

    async def close(self) -> None:
        """Leave the group; what was not acknowledged goes to other members."""
        if self._closed:
            return
        self._finalizer.detach()
        self._left = 0
        if self._link.is_here():  # sync: with self._link.lock:
            # At once, not with ENDED: a task that waits, or asks later, finds the end.
            self._closed = True
            self._members.leave(self._membership)
            self._link.notify(self._membership)
            self._link.wake_up()

    async def __aenter__(self) -> Member:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave; without an exception what was handed over last is done, too (ack="next").

        After one (but not after a cancellation) what was handed over last has had an attempt.
        """
        if kind is None:
            self._acknowledge_handed()
        elif issubclass(kind, Exception):
            self._acknowledge_handed(AGAIN)
        await self.close()
