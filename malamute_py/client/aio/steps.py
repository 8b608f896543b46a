"""One atomic step, in asyncio.

Owns its commit as an awaitable. The rule: a step whose commit was cancelled may still be taken, and
then is taken whole.
"""

from __future__ import annotations

import asyncio
from typing import Any

from malamute_protocol.errors import (
    BrokerRefused,
    ConnectionLost,
    LocalProtocolError,
    Timeout,
)
from malamute_py.client.aio.link import LoopLink
from malamute_py.client.aio.tables import Tables
from malamute_py.client.arguments import name_of
from malamute_py.client.engine.waits import STEP
from malamute_py.client.position import Confirmation
from malamute_py.client.session.calls import Properties
from malamute_py.client.session.step import OPEN, Step
from malamute_py.client.settings import Wait
from malamute_py.client.words import ConfirmAt


class AtomicStep(Step):
    """One step, taken as a whole when its `async with` block ends without an exception.

    One that the program lets go of, without a commit, is given up as by an exception.
    """

    __slots__ = ("_link",)

    def __init__(self, link: LoopLink, confirm: ConfirmAt = "default", key: bytes = b"") -> None:
        """See Client.atomic()."""
        super().__init__(confirm, key)
        if self.key and not link.session.identity:
            raise LocalProtocolError(
                "bad_setting",
                "a step's key belongs to an identity, and this client has none: the next process "
                'would have the step taken again. Give connect(identity="...")',
            )
        self._link = link

    def __del__(self) -> None:
        """Have a step that its program let go of give back what it was to acknowledge."""
        if getattr(self, "lent", None) and self.state == OPEN:  # none: __init__() has failed
            self._link.dropped(self)

    async def __aenter__(self) -> AtomicStep:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit; after an exception nothing of it happens."""
        if kind is None:
            await self.commit()
        else:
            if self._link.is_here():  # sync: with self._link.lock:
                self.give_up()

    async def publish_table(
        self,
        stream: str,
        table: Any,
        *,
        subject: str = "",
        client_time: str = "",
        properties: Properties | None = None,
        codec: str | None = None,
    ) -> None:
        """Add the rows of a table for a typed stream, validated in full; the step grows by all.

        Arguments: as of Client.publish_table(). Asks the broker for the stream's schema, and waits
        for that. Raises LocalProtocolError `bad_schema`: the table does not fit; BrokerRefused: the
        stream has no schema. Then the step has none of the rows.
        """
        self.check_open()
        name_of("stream", stream)
        contents = await Tables(self._link).encoded(
            stream, table, properties, subject=subject, client_time=client_time, codec=codec
        )
        for content in contents:
            # Step's own, not that of TracedStep: it would put the span's context into the content
            # once more, which `properties` have brought already.
            super().publish_batch(stream, content, typed=True)

    # sync: def _lend(self, holder: Any, numbers: list[int]) -> None:
    # sync:     with self._link.lock:
    # sync:         super()._lend(holder, numbers)

    async def commit(self, timeout_ms: Wait = "default") -> Confirmation | None:
        """Have the step taken, and wait for the confirm; None: there was nothing in it.

        Raises BrokerRefused (nothing of it happened), LocalProtocolError (nothing was sent),
        Timeout or ConnectionLost (it may have been taken, as a whole). If it is not taken after a
        Timeout or a cancellation, what it was to acknowledge goes back to the broker.
        """
        if not self.parts:
            return None
        link = self._link
        future: asyncio.Future[Confirmation] = link.loop.create_future()
        left = await self._put(future, timeout_ms)
        try:
            return await link.limit(future, left, STEP)
        except _TOLD:
            raise
        except (Timeout, asyncio.CancelledError):
            # It is not sent again; if it was not taken, what it was to acknowledge goes back.
            if link.is_here():  # sync: with link.lock:
                link.session.steps.withdraw(self)
                link.wake_up()
            raise

    # sync: def commit_nowait(self, timeout_ms: Wait = "default") -> Pending[Confirmation | None]:
    # sync:     """Put it on its way; waits only for room in the window. Result as of commit()."""
    # sync:     pending: Pending[Confirmation | None] = self._link.pending_type(self._link)
    # sync:     if self.parts:
    # sync:         self._put(pending, timeout_ms)
    # sync:     else:
    # sync:         pending.settle(None)
    # sync:     return pending

    async def _put(self, future: asyncio.Future[Any], timeout_ms: Wait) -> Wait:
        """Put the step on its way once there is room; returns what is left of timeout_ms."""
        link = self._link
        if link.is_here():  # sync: with link.lock:
            if not link.has_room():
                try:
                    timeout_ms = await link.room(self.size, timeout_ms, "a step")
                except (Timeout, asyncio.CancelledError):
                    self.end_untaken()  # what it was to acknowledge goes back to the broker
                    link.wake_up()
                    raise
            link.session.steps.add(self, future)
            link.wake_up()
        return timeout_ms


_TOLD = BrokerRefused, ConnectionLost, LocalProtocolError
"""Errors that tell a caller of a step which was not taken: it has again what the step took."""
