# DO NOT EDIT: made from ../aio/steps.py by `make sync-client` (tools/sync_client.py).
"""One atomic step, for threads.

Owns its commit as a blocking call. The rule: a step whose commit timed out may still be taken,
whole.
"""

from __future__ import annotations

from typing import Any

from malamute_protocol.errors import (
    BrokerRefused,
    ConnectionLost,
    LocalProtocolError,
)
from malamute_py.client.arguments import name_of
from malamute_py.client.engine.waits import STEP
from malamute_py.client.position import Confirmation
from malamute_py.client.session.calls import Properties
from malamute_py.client.session.step import OPEN, Step
from malamute_py.client.settings import Wait
from malamute_py.client.sync.link import Pending, ThreadLink
from malamute_py.client.sync.tables import Tables
from malamute_py.client.words import ConfirmAt


class SyncAtomicStep(Step):
    """One step, taken as a whole when its `with` block ends without an exception.

    One that the program lets go of, without a commit, is given up as by an exception.
    """

    __slots__ = ("_link",)

    def __init__(self, link: ThreadLink, confirm: ConfirmAt = "default", key: bytes = b"") -> None:
        """See SyncClient.atomic()."""
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

    def __enter__(self) -> SyncAtomicStep:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit; after an exception nothing of it happens."""
        if kind is None:
            self.commit()
        else:
            with self._link.lock:
                self.give_up()

    def publish_table(
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

        Arguments: as of SyncClient.publish_table(). Asks the broker for the stream's schema, and
        waits for that. Raises LocalProtocolError `bad_schema`: the table does not fit;
        BrokerRefused: the stream has no schema. Then the step has none of the rows.
        """
        self.check_open()
        name_of("stream", stream)
        contents = Tables(self._link).encoded(
            stream, table, properties, subject=subject, client_time=client_time, codec=codec
        )
        for content in contents:
            # Step's own, not that of TracedStep: it would put the span's context into the content
            # once more, which `properties` have brought already.
            super().publish_batch(stream, content, typed=True)

    def _lend(self, holder: Any, numbers: list[int]) -> None:
        with self._link.lock:
            super()._lend(holder, numbers)

    def commit(self, timeout_ms: Wait = "default") -> Confirmation | None:
        """Have the step taken, and wait for the confirm; None: there was nothing in it.

        Raises BrokerRefused (nothing of it happened), LocalProtocolError (nothing was sent),
        Timeout or ConnectionLost (it may have been taken, as a whole). If it is not taken after a
        Timeout or a cancellation, what it was to acknowledge goes back to the broker.
        """
        if not self.parts:
            return None
        link = self._link
        pending: Pending[Confirmation] = Pending(link)
        left = self._put(pending, timeout_ms)
        try:
            return pending.result(left, STEP)
        except _TOLD:
            raise
        except BaseException:
            # It is not sent again; if it was not taken, what it was to acknowledge goes back.
            with link.lock:
                link.session.steps.withdraw(self)
                link.wake_up()
            raise

    def commit_nowait(self, timeout_ms: Wait = "default") -> Pending[Confirmation | None]:
        """Put it on its way; waits only for room in the window. Result as of commit()."""
        pending: Pending[Confirmation | None] = self._link.pending_type(self._link)
        if self.parts:
            self._put(pending, timeout_ms)
        else:
            pending.settle(None)
        return pending

    def _put(self, pending: Pending[Any], timeout_ms: Wait) -> Wait:
        """Put the step on its way once there is room; returns what is left of timeout_ms."""
        link = self._link
        with link.lock:
            if not link.has_room():
                try:
                    timeout_ms = link.room(timeout_ms, "a step")
                except BaseException:
                    self.end_untaken()  # what it was to acknowledge goes back to the broker
                    link.wake_up()
                    raise
            link.session.steps.add(self, pending)
            link.wake_up()
        return timeout_ms


_TOLD = BrokerRefused, ConnectionLost, LocalProtocolError
"""Errors that tell a caller of a step which was not taken: it has again what the step took."""
