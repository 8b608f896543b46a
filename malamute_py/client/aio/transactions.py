"""Open transactions in asyncio.

Owns begin, publish, commit and rollback as awaitables. The rules: as in client.py: a cancelled call
leaves all others as they were; one chunk of records is under way while the next one gathers, so
that a transaction of any size needs little memory; a commit whose call was cancelled may still be
taken, and then is taken whole; a commit whose wait was over can be asked for again, under its key;
until its outcome is told, no other transaction begins, whose records might be the same ones.

Words: a step is commands that the broker takes together or not at all; here the beginning, each
chunk of records, the commit, the rollback. To stage is to have the broker keep a chunk until the
commit. A step that is sent again under its key is taken once. `_opened` is the session's half of
the transaction: its chunk, and whether it is open. A transaction is in doubt when its commit has
left and its caller was not told the outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from malamute_protocol import commands as c
from malamute_protocol.errors import (
    BatchTooLarge,
    BrokerRefused,
    LocalProtocolError,
    MalamuteError,
    Timeout,
)
from malamute_py.client.aio.link import LoopLink
from malamute_py.client.aio.tables import Tables
from malamute_py.client.arguments import duration, name_of
from malamute_py.client.engine.engine import clock_ms
from malamute_py.client.engine.waits import APPENDED, COMMIT, NOT_STAGED, STAGED, STEP, timed_out
from malamute_py.client.position import Confirmation
from malamute_py.client.session.calls import (
    Bodies,
    Body,
    Fields,
    Properties,
    Time,
    make_row,
)
from malamute_py.client.session.rows import OutgoingRow
from malamute_py.client.session.step import Step, rows_of_columns
from malamute_py.client.session.steps import KEY_BYTES
from malamute_py.client.session.transactions import ID_BYTES, OpenTransaction
from malamute_py.client.settings import Wait
from malamute_py.client.words import ConfirmAt


class Transaction:
    """One open transaction; for one task at a time.

    It is committed when its `async with` block ends, and rolled back after an exception.
    """

    def __init__(self, link: LoopLink, timeout_ms: int, confirm: ConfirmAt) -> None:
        """See Client.transaction()."""
        self._link = link
        self._timeout_ms = duration("timeout_ms", timeout_ms)
        self._confirm = confirm
        self._opened = self._new()
        self._tables = Tables(link)
        self._step: Step | None = None
        """The beginning or chunk that is under way, whose answer `_future` gets; without a future
        one whose wait was over, which is asked for again."""
        self._commit_unanswered: Step | None = None
        """The step that commits, as long as the broker has not answered it."""
        self._committed: Confirmation | None = None
        """Answer to the commit, as long as records of it may be on their way to their streams."""
        self._in_doubt = False
        """Whether a commit has left whose outcome its caller was not told."""
        self._taking_back: Step | None = None
        """The step that rolls back what a commit may have taken, until the broker answers it."""
        self._future: asyncio.Future[Confirmation] | None = None
        """Gets the answer to `_step`."""

    @property
    def id(self) -> bytes:
        """Name of the transaction at the broker, as client.transactions() lists it."""
        return self._opened.id

    # --- life ------------------------------------------------------------------------------

    async def begin(self, timeout_ms: Wait = "default") -> None:
        """Open it, and wait until the broker has.

        One that is open, as in its block, stays the one it is: the call only waits for the broker.
        One that is over begins anew, as another transaction. Raises BrokerRefused `limit`, Timeout:
        it is over then; LocalProtocolError: the outcome of its commit is not known, since the call
        was cancelled or its wait was over.
        """
        if not self._opened.open:
            await self._begin()
        try:
            await self._until_taken(timeout_ms)
        except BaseException:
            # The broker may open it yet, and would keep it until its time is over.
            self._abandon()
            raise

    async def _begin(self) -> None:
        """Have the broker open it, while the first records gather; the answer is not waited for."""
        self._check_told()
        if self._opened.begun:
            # Another id: the broker may know the former one yet, and batches are numbered anew.
            self._opened = self._new()
            # A stream may have been made anew meanwhile, with another schema.
            self._tables = Tables(self._link)
            self._commit_unanswered = self._committed = self._taking_back = None
        step = self._opened.begin(self._timeout_ms, self._link.session.steps.limits)
        await self._send(step)

    def _check_told(self) -> None:
        """Raise LocalProtocolError if a commit's outcome was not told: no other may begin."""
        if self._in_doubt:
            raise LocalProtocolError(
                "unexpected",
                "the commit of the transaction may have been taken: call commit() again to learn "
                "its outcome, or roll_back(). Where neither tells it, look whether the records are "
                "there, and make another transaction",
            )

    def _new(self) -> OpenTransaction:
        """Return a transaction that has not begun, with a name and a key of its own."""
        random = self._link.session.steps.random
        return OpenTransaction(random(ID_BYTES), random(KEY_BYTES), self._confirm)

    async def commit(self, timeout_ms: Wait = "default") -> Confirmation:
        """Have all of it appended to its streams, and wait until readers of the tail get it.

        timeout_ms: bounds the whole call. Raises BrokerRefused (nothing of it happened:
        `transaction_timed_out`, `transaction_ended`, `unknown_transaction`, `unknown_stream`, as a
        stream was removed after the broker had got records for it, and others; but after `put_off`
        it is committed, and the records of a stream follow once its ring takes them, or after
        `given_up` never do), Timeout or ConnectionLost (it may have been taken, as a whole). After
        Timeout or `put_off` it may be called again, and goes on with the same commit;
        `unknown_transaction` does not tell then whether it was taken.
        """
        link = self._link
        wait_ms = link.engine.settings.wait_ms(timeout_ms)
        until_ms = None if wait_ms is None else clock_ms() + wait_ms
        repeated = self._in_doubt  # an earlier call may have had it taken
        try:
            confirmation = self._committed
            if confirmation is None:
                confirmation = self._committed = await self._decide(until_ms)
            if self._opened.was_staged:
                # Its records are committed, and on their way into their streams.
                id = self._opened.id
                await link.ask(lambda number: c.AwaitTransaction(number, id), _left(until_ms))
        except Timeout:
            raise timed_out(self._stands(), "", wait_ms, link.standing()) from None
        except (BrokerRefused, LocalProtocolError) as error:
            # A broker forgets, in time, what it has taken: then it knows of no such transaction.
            self._in_doubt = repeated and error.code in _UNTOLD
            raise
        # Its records have arrived. Without the answer another commit() is refused: it is over.
        self._committed, self._in_doubt = None, False
        return confirmation

    def _stands(self) -> str:
        """Return the words of a Timeout for how far the commit has come."""
        if self._committed is not None:
            return APPENDED
        if self._commit_unanswered is not None:
            return COMMIT
        return STAGED if self._opened.open else NOT_STAGED

    async def _decide(self, until_ms: int | None) -> Confirmation:
        """Have the broker commit it; a refusal ends the transaction.

        A commit that was sent and not answered, by an earlier call, is sent again under its key.
        """
        opened, unanswered = self._opened, self._commit_unanswered
        if unanswered is None:
            opened.check_open()
        try:
            if unanswered is None:
                await self._until_taken(_left(until_ms))
                step = opened.commit()
            else:
                step = opened.repeated(unanswered)
            return await self._commit(step, until_ms)
        except (BrokerRefused, LocalProtocolError):
            self._commit_unanswered = None
            # A part of it cannot be had any more: the rest is not to wait for its timeout.
            with contextlib.suppress(MalamuteError):
                await self._end(_left(until_ms))
            raise

    async def _commit(self, step: Step, until_ms: int | None) -> Confirmation:
        """Send the commit; records that were not sent yet go in the same step.

        Records of a stream with a ring of its own cannot go along: they are staged, and the commit
        is sent again.
        """
        opened = self._opened
        while True:
            self._commit_unanswered, self._in_doubt = step, True
            try:
                confirmation = await self._take(step, _left(until_ms))
            except _REFUSED as error:
                # `cross_ring`: a stream has a ring of its own, for which the commit has no way.
                # commit_again() makes a step that stages the records before it commits them.
                if error.code != "cross_ring" or opened.was_staged:
                    self._commit_unanswered, self._in_doubt = None, False
                    await self._stage_smaller(error, _left(until_ms))
            else:
                self._commit_unanswered = None
                return confirmation
            step = opened.commit_again()

    async def _stage_smaller(self, error: BrokerRefused | BatchTooLarge, timeout_ms: Wait) -> None:
        """Stage what was refused in smaller batches. Raises the refusal where that cannot be.

        A wait that is over ends the transaction: a commit would lack the halves that have not left.
        """
        opened = self._opened
        if error.code != "too_large" or not opened.split():
            raise error
        while (step := opened.take_half()) is not None:
            try:
                await self._take(step, timeout_ms)
            except _REFUSED as again:
                if again.code != "too_large" or not opened.split():  # it cuts this half in two
                    raise
            except BaseException:
                self._abandon()
                raise

    async def roll_back(self, timeout_ms: Wait = "default") -> None:
        """End it; nothing of it is ever seen. Nothing happens where it is over already.

        Raises LocalProtocolError: its commit left before, and the broker may have taken it. Where
        it has not, it never will, and nothing is raised.
        """
        if self._opened.open:
            await self._end(timeout_ms)
        elif self._in_doubt:
            await self._take_back(timeout_ms)

    async def _take_back(self, timeout_ms: Wait) -> None:
        """Roll back what a commit may have taken; raises where the broker took it, or may have."""
        if self._committed is not None:
            self._check_told()  # raises: the broker has said that it took the commit
        opened, unanswered = self._opened, self._taking_back
        # A rollback whose answer was lost is sent again, under its key.
        if unanswered is None:
            self._taking_back = opened.roll_back()
        else:
            self._taking_back = opened.repeated(unanswered)
        try:
            await self._take(self._taking_back, timeout_ms)
        except BrokerRefused as error:
            self._taking_back = None
            if error.code not in _ROLLED_BACK:
                self._check_told()  # raises: the commit may have been taken
        self._commit_unanswered = self._taking_back = None
        self._in_doubt = False

    async def _end(self, timeout_ms: Wait) -> None:
        """Roll it back, as is asked for or as its commit was refused; it may be over already."""
        self._stop_waiting()
        try:
            await self._take(self._opened.roll_back(), timeout_ms)
        except BrokerRefused as error:
            if error.code not in _OVER:
                raise

    def _stop_waiting(self) -> None:
        """Stop waiting for the answer to the chunk under way: the transaction is rolled back."""
        future = self._future  # asyncio only
        step, self._step, self._future = self._step, None, None
        if future is not None and future.done():  # asyncio only
            future.exception()  # A refusal that no caller waits for is no error.
        if step is None:
            return
        if self._link.is_here():  # sync: with self._link.lock:
            self._link.session.steps.withdraw(step)  # it is not sent, or not sent again

    def _abandon(self) -> None:
        """Have it rolled back without waiting for the answer, as when the caller is cancelled."""
        self._stop_waiting()
        if self._link.is_here():  # sync: with self._link.lock:
            with contextlib.suppress(MalamuteError):
                self._link.session.steps.add(self._opened.roll_back(), None)
            self._link.wake_up()

    async def __aenter__(self) -> Transaction:
        """Begin; a refusal is raised where it is waited for next, at the commit at the latest."""
        try:
            if not self._opened.open:
                await self._begin()
            # The beginning leaves, and a cancellation shows before the block begins.
            await asyncio.sleep(0)  # asyncio only
        except BaseException:
            if self._opened.open:  # The block does not begin, and so does not end it.
                self._abandon()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit; after an exception roll back, which the broker does by time if it must."""
        if not self._opened.open:
            return
        if kind is None:
            try:
                await self.commit()
            except Exception:
                raise  # a refusal, or a Timeout, after which the caller may commit again
            except BaseException:
                # A commit that has left goes on; before that the block ends as one cancelled.
                if self._opened.open:
                    self._abandon()
                raise
        elif issubclass(kind, Exception):
            with contextlib.suppress(MalamuteError):
                await self.roll_back()
        else:
            self._abandon()  # a cancellation or an interrupt: nothing is waited for

    # --- records ---------------------------------------------------------------------------

    async def publish(
        self,
        stream: str,
        body: Body,
        *,
        subject: str | Sequence[str] = "",
        fields: Fields | None = None,
        client_time_ms: Time | None = None,
        expires_at_ms: Time | None = None,
        properties: Properties | None = None,
        codec: str | None = None,
    ) -> None:
        """Add a record for a stream. Waits only while a chunk before it is under way.

        Raises LocalProtocolError: an argument is wrong, or the transaction is over; BrokerRefused:
        a chunk before this record was refused, and the transaction cannot be committed any more.
        """
        name_of("stream", stream)
        row = make_row(
            body, subject, fields, client_time_ms, expires_at_ms, properties, None, codec
        )
        await self._add(stream, [row])

    async def publish_many(
        self,
        stream: str,
        bodies: Bodies,
        *,
        subject: str | Sequence[str | Sequence[str]] = "",
        subjects: Sequence[str | Sequence[str]] | None = None,
        fields: Fields | Sequence[Fields | None] | None = None,
        client_time_ms: int | Sequence[int | None] | None = None,
        expires_at_ms: int | Sequence[int | None] | None = None,
        properties: Properties | Sequence[Properties | None] | None = None,
        codec: str | None = None,
    ) -> None:
        """Add records for a stream; what is given as a sequence has one value a record.

        Raises as publish(), and LocalProtocolError: the columns differ in length. A Timeout amid
        them ends the transaction, which would have some of the records alone.
        """
        name_of("stream", stream)
        rows = rows_of_columns(
            bodies, subject, subjects, fields, client_time_ms, expires_at_ms, properties, codec
        )
        await self._add(stream, rows)

    async def publish_batch(self, stream: str, content: bytes, *, typed: bool = False) -> None:
        """Add records for a stream, as one batch content that malamute_protocol.batch encoded.

        typed: the stream must have a declared schema. Raises as publish(), and LocalProtocolError:
        the content is no batch, or has a producer. A call that raises has added nothing.
        """
        if self._opened.lacks_room_for(content):
            await self._flush()
        self._opened.chunk.publish_batch(stream, content, typed=typed)

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
        """Add the rows of a table for a typed stream, validated in full before they are sent.

        Arguments: as of Client.publish_table(). Raises as publish(), and LocalProtocolError
        `bad_schema`: the table does not fit. A Timeout amid the rows ends the transaction, which
        would have some of them alone.
        """
        opened = self._opened
        opened.check_open()
        name_of("stream", stream)
        contents = await self._tables.encoded(
            stream, table, properties, subject=subject, client_time=client_time, codec=codec
        )
        for at, content in enumerate(contents):
            try:
                # Not that of TracedTransaction, which would give each batch a span of its own.
                await Transaction.publish_batch(self, stream, content, typed=True)
            except BaseException:
                if at and opened.open:
                    self._abandon()
                raise

    async def _add(self, stream: str, rows: Sequence[OutgoingRow]) -> None:
        """Add rows for a stream, and stage each chunk that gets full."""
        opened = self._opened
        at = opened.add(stream, rows)  # how many rows are in; fewer than all: the chunk is full
        while at < len(rows):
            try:
                await self._flush()
            except BaseException:
                if at:
                    # A commit would have some of the rows of this call alone.
                    self._abandon()
                raise
            at = opened.add(stream, rows, at)

    async def _flush(self) -> None:
        """Stage the records that have gathered, once the broker has taken the chunk before them."""
        await self._until_taken("default")
        await self._send(self._opened.take())

    async def _send(self, step: Step) -> None:
        """Put the beginning or a chunk on its way; _until_taken() waits for the answer later."""
        future: asyncio.Future[Confirmation] = self._link.loop.create_future()
        # Before the wait for room: a step that did not get any leaves with the next call.
        self._step = step
        await self._put(step, future, "default")
        self._future = future

    async def _until_taken(self, timeout_ms: Wait) -> None:
        """Wait until the broker has taken the beginning or chunk that is under way.

        Raises what it answered, also to records of earlier calls. A chunk that is refused as too
        large is staged in smaller batches.
        """
        step, future, self._future = self._step, self._future, None
        if step is None:
            return
        try:
            if future is not None:
                await self._link.limit(future, timeout_ms, STEP)
            else:
                # A wait for it was over before: without it there is nothing to commit.
                await self._take(self._opened.repeated(step), timeout_ms)
        except _REFUSED as error:
            self._step = None
            await self._stage_smaller(error, timeout_ms)
        except BaseException:
            if self._link.is_here():  # sync: with self._link.lock:
                self._link.session.steps.withdraw(step)
            raise
        self._step = None

    async def _take(self, step: Step, timeout_ms: Wait) -> Confirmation:
        """Have the broker take a step, and wait for its confirm.

        After a Timeout or a cancellation the step is not sent again; it may have been taken.
        """
        link = self._link
        future: asyncio.Future[Confirmation] = link.loop.create_future()
        left = await self._put(step, future, timeout_ms)
        try:
            return await link.limit(future, left, STEP)
        except (Timeout, asyncio.CancelledError):
            if link.is_here():  # sync: with link.lock:
                link.session.steps.withdraw(step)
            raise

    async def _put(
        self, step: Step, future: asyncio.Future[Confirmation], timeout_ms: Wait
    ) -> Wait:
        """Put a step on its way once there is room; returns what is left of timeout_ms."""
        link = self._link
        if link.is_here():  # sync: with link.lock:
            if not link.has_room():
                timeout_ms = await link.room(step.size, timeout_ms, "a transaction")
            link.session.steps.add(step, future)
            link.wake_up()
        return timeout_ms


def _left(until_ms: int | None) -> int | None:
    """Return what is left of a wait; None: it has no end."""
    return None if until_ms is None else max(1, until_ms - clock_ms())


_REFUSED = BrokerRefused, BatchTooLarge
"""Refusals of the broker, and of the client itself: a chunk gathers by the bytes of its bodies."""
_ROLLED_BACK = frozenset({"transaction_timed_out", "transaction_ended"})
"""Refusals that say that nothing of a transaction is ever seen."""
_UNTOLD = frozenset({"unknown_transaction", "unexpected"})
"""Refusals of a repeated commit that do not say what became of the first one."""
_OVER = frozenset({"unknown_transaction", *_ROLLED_BACK})
"""Refusals that say that a transaction is over."""
