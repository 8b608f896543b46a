"""Transactions: BEGIN_TRANSACTION, STAGE, COMMIT_TRANSACTION, ROLL_BACK_TRANSACTION, and time.

Owns which transactions there are, and the parts of steps that change them. The rules: a staged
batch lies in the mail stream, which no reader of a stream sees; only the holder that began a
transaction changes it; a transaction that is not committed in time is rolled back; all bounds are
checked before a batch is taken. Source: ARCHITECTURE.md, Decisions; SPEC.md, section 4.11.

A part is what one command adds to a step, which happens as a whole; its effects are called when it
is taken, when it is numbered (`based`), and when the log has it or has refused it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from malamute_protocol.commands import (
    BeginTransaction,
    CommitTransaction,
    RollBackTransaction,
    Stage,
)
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.log.answers import Answer
from malamute_py.broker.log.bodies import Bodies
from malamute_py.broker.log.ring import Settlement
from malamute_py.broker.log.steps import Counting, Effect, Part, Steps, Then
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.ready import MAIN
from malamute_py.broker.streams.arrivals import Arrivals
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.streams.publishing import Publishing
from malamute_py.broker.structures.timers import Timers
from malamute_py.broker.transactions.awaiting import RECORDS_GIVEN_UP, Awaiting
from malamute_py.broker.transactions.moving import Moving
from malamute_py.broker.transactions.transaction import State, Transaction
from malamute_py.changelog.records import (
    TransactionBegun,
    TransactionCommitted,
    TransactionEnded,
    TransactionStaged,
)
from malamute_py.changelog.tables import TransactionRow

TIMED_OUT: Final = "timed_out"
ENDED: Final = "ended"
GIVEN_UP: Final = "given_up"
WHY: Final = {
    TIMED_OUT: ("transaction_timed_out", "the transaction was open for too long: rolled back"),
    ENDED: ("transaction_ended", "an operator rolled the transaction back"),
    GIVEN_UP: RECORDS_GIVEN_UP,
}


class Transactions:
    """All transactions of one core: parts for their commands, and their end by time."""

    def __init__(
        self,
        shard: Shard,
        steps: Steps,
        bodies: Bodies,
        catalogue: Catalogue,
        publishing: Publishing,
        arrivals: Arrivals,
        timers: Timers,
        awaiting: Awaiting,
        when_visible: Callable[[int, Settlement], None],
    ) -> None:
        self._shard = shard
        self._steps = steps
        self._bodies = bodies
        self._catalogue = catalogue
        self._publishing = publishing
        self._timers = timers
        self._awaiting = awaiting
        self._moving = Moving(
            shard, steps, bodies, catalogue, publishing, arrivals, timers, when_visible,
            self._finished, awaiting.put_off, self.weigh,
        )  # fmt: skip
        self._armed_ms = 0
        """Time at which the timer fires next; 0: it is not set."""
        self.last_end_lsn = 0
        """LSN of the newest end of a committed transaction, durable or not; 0: there was none."""
        self.by_id: dict[bytes, Transaction] = {}
        """Transactions in the order in which they began."""
        self.staged_bytes = 0

    def prepares(self) -> dict[type, Any]:
        """Return the methods that prepare parts of steps, by the type of their commands."""
        return {
            BeginTransaction: self.prepare_begin,
            Stage: self.prepare_stage,
            CommitTransaction: self.prepare_commit,
            RollBackTransaction: self.prepare_roll_back,
        }

    @property
    def gauges(self) -> dict[str, int]:
        """Counts for the metrics."""
        return {"transactions": len(self.by_id), "staged_bytes": self.staged_bytes}

    # --- over restarts ------------------------------------------------------------------------

    def recovered(self) -> None:
        """Take up what the tables have, at a start; the appending of committed ones goes on."""
        queues, shard = self._shard.queues, self._shard
        for row in list(queues.transactions.values()):
            # Its timeout went on while the broker was down; the clock may have been ahead before.
            end_ms = shard.trusted_end(row.at_ms + row.timeout_ms, row.timeout_ms)
            self.enter(Transaction(row, end_ms))
        for batch in list(queues.staged.values()):
            transaction = self.by_id.get(batch.id)
            if transaction is not None:
                # A batch whose stream was removed is dropped with the others of ring main.
                stream = self._catalogue.by_number(batch.stream)
                transaction.add(batch, MAIN if stream is None else stream.ring.name)
                if stream is not None:
                    transaction.names[batch.stream] = stream.name
                self.weigh(transaction, batch.size)
        for transaction in list(self.by_id.values()):
            if transaction.state is State.COMMITTED:
                self._moving.begin(transaction)

    # --- the table ----------------------------------------------------------------------------

    def enter(self, transaction: Transaction) -> None:
        """Add a transaction, which counts for its owner and ends by time."""
        self.by_id[transaction.id] = transaction
        self._shard.quotas.add(transaction.row.by, "transactions")
        self._arm(transaction.deadline_ms)

    def forget(self, transaction: Transaction) -> None:
        """Remove a transaction that is over, or that the log refused."""
        del self.by_id[transaction.id]
        self._shard.quotas.add(transaction.row.by, "transactions", -1)
        self.weigh(transaction, -transaction.bytes)

    def weigh(self, transaction: Transaction, size: int) -> None:
        """Count bytes that are staged, or (below 0) not any more, for the bound and the quota."""
        self.staged_bytes += size
        self._shard.quotas.add(transaction.row.by, "staged_bytes", size)

    def _finished(self, transaction: Transaction, end_lsn: int) -> None:
        """Forget a transaction of which all is in its streams, and answer callers that wait."""
        self.forget(transaction)
        self.last_end_lsn = max(self.last_end_lsn, end_lsn)
        self._awaiting.appended(transaction, end_lsn, given_up=self.was_given_up(transaction.id))

    def give_up(self, transaction: Transaction, ender: Answer) -> None:
        """Give up what rings put off of a committed transaction. ender: answered when it is."""
        self._moving.give_up(transaction, ender)

    def was_given_up(self, id: bytes) -> bool:
        """Whether the tables know that records of a committed transaction were given up."""
        end = self._shard.queues.ends.get(id)
        return end is not None and end.why == GIVEN_UP

    def _undecided(self) -> int:
        """Count the transactions that a client may still commit.

        The others wait for a ring; what they hold is bounded by the bytes that may be staged.
        """
        return sum(each.state is not State.COMMITTED for each in self.by_id.values())

    def _find(self, link: Link, id: bytes) -> Transaction:
        """Return the open transaction that a command of a link names.

        Raises BrokerRefused: there is none, it is another client's, or it is not open any more.
        """
        transaction = self.by_id.get(id)
        if transaction is None:
            # Ends that its client did not want are remembered, so that it is told what happened.
            end = self._shard.queues.ends.get(id)
            if end is not None:
                raise BrokerRefused(*WHY[end.why])
            raise BrokerRefused(
                "unknown_transaction",
                f"there is no transaction {id.hex()}, or not any more: begin another",
            )
        if transaction.row.holder != link.holder:
            raise BrokerRefused("not_held", f"transaction {id.hex()} is another client's")
        if transaction.state is not State.OPEN:
            raise BrokerRefused("conflict", f"the transaction is {transaction.state.value}")
        return transaction

    # --- parts of steps -----------------------------------------------------------------------

    def prepare_begin(self, link: Link, command: BeginTransaction, frame: Any = None) -> Part:
        """Return the part that opens a transaction, for a BEGIN_TRANSACTION.

        Raises BrokerRefused: by its name, its timeout, or the bounds of transactions.
        """
        shard = self._shard
        settings = shard.settings
        if not command.transaction:
            raise BrokerRefused("bad_name", "a transaction has a name of at least one byte")
        if command.transaction in self.by_id:
            raise BrokerRefused("conflict", "there is a transaction of this name already")
        timeout_ms = command.timeout_ms or settings.transaction_timeout_ms
        if timeout_ms > settings.transaction_timeout_max_ms:
            raise BrokerRefused(
                "limit",
                f"a timeout of {timeout_ms} ms; transactions.timeout_max_ms is "
                f"{settings.transaction_timeout_max_ms}",
            )
        # Committed transactions do not count, and are told apart only where all reach the bound.
        most = settings.transactions_max
        if len(self.by_id) >= most and self._undecided() >= most:
            reason = f"at most {most} transactions"
            raise shard.quotas.limit_told_to(link.owner, "transactions", reason)
        shard.quotas.check(link.owner, "transactions")
        change = TransactionBegun(
            command.transaction, link.holder, link.owner, shard.now_ms, timeout_ms
        )
        row = TransactionRow(change.id, change.holder, change.by, change.at_ms, timeout_ms)
        transaction = Transaction(row, shard.now_ms + timeout_ms)
        counting = Counting(shard.counters, 1, ("transactions_begun",))
        return Part([change], effects=[_Beginning(self, transaction), counting])

    def prepare_stage(self, link: Link, command: Stage, frame: Any) -> Part:
        """Return the part that puts a batch aside for a transaction, for a STAGE.

        frame: the batch. Raises BrokerRefused: as a PUBLISH of the batch would, or by the
        transaction's state or bounds.
        """
        settings = self._shard.settings
        transaction = self._find(link, command.transaction)
        stream = self._catalogue.get(command.stream)
        # What refuses the batch refuses it now: nothing may be left that could refuse the commit.
        checked = self._publishing.prepare(link, command, frame, stream)
        content, stream = checked.content, checked.stream
        assert content is not None
        assert stream is not None
        head = content.head
        size = STAMP_BYTES + head.content_bytes
        if command.place in transaction.staged:
            raise BrokerRefused("conflict", f"place {command.place} has a batch already")
        if transaction.bytes + size > settings.transaction_bytes_max:
            raise BrokerRefused(
                "too_large",
                f"the transaction would have {transaction.bytes + size} bytes; "
                f"transactions.bytes_max is {settings.transaction_bytes_max}",
            )
        if len(transaction.staged) >= settings.transaction_batches_max:
            raise BrokerRefused(
                "too_large", f"a transaction has at most {settings.transaction_batches_max} batches"
            )
        if self.staged_bytes + size > settings.staged_bytes_max:
            raise self._shard.quotas.limit_told_to(
                transaction.row.by, "bytes of open transactions",
                f"all transactions together have {self.staged_bytes} bytes; "
                f"transactions.all_bytes_max is {settings.staged_bytes_max}",
            )  # fmt: skip
        self._shard.quotas.check(transaction.row.by, "staged_bytes", size)
        not_numbered = -1  # `based` sets the number once the batch has one.
        change = TransactionStaged(
            transaction.id, command.place, stream.number, not_numbered, head.count, size,
            self._shard.now_ms,
        )  # fmt: skip
        effect = _Staging(self, transaction, change, stream)
        # `settling`: the first batch of a stream settles the kind of its bodies.
        effects = [effect, *self._publishing.settling(stream, content)]
        return Part([change], content=content, frame=frame, effects=effects)

    def prepare_commit(self, link: Link, command: CommitTransaction, frame: Any = None) -> Part:
        """Return the part that commits a transaction, for a COMMIT_TRANSACTION.

        Raises BrokerRefused: the transaction is not open, or not all of it can be appended.
        """
        transaction = self._find(link, command.transaction)
        staged = len(transaction.staged)
        if staged != command.count:  # A batch was refused, or has not come.
            raise BrokerRefused(
                "conflict", f"the transaction has {staged} batches, not {command.count}"
            )
        for number in {batch.stream for batch in transaction.staged.values()}:
            stream = self._catalogue.by_number(number)
            if stream is None or stream.removed:
                name = transaction.names.get(number)
                # After a restart nothing has the name of a stream that was removed before.
                which = f"of number {number}" if name is None else f"'{name}'"
                raise BrokerRefused(
                    "unknown_stream", f"the stream {which} was removed after records were staged"
                    " for it, and a commit is of all records: roll the transaction back",
                )  # fmt: skip
        # A commit is never taken back, and a ring that has failed would never take its batches.
        for ring in set(transaction.apart.values()):
            state = self._catalogue.rings.get(ring)
            if state is not None and state.failed is not None:
                raise BrokerRefused(*state.failed)
        counting = Counting(self._shard.counters, 1, ("transactions_committed",))
        if not staged:  # There is nothing to append: the commit is the end.
            return self._ending(transaction, "committed", counting)
        change = TransactionCommitted(transaction.id, self._shard.now_ms)
        return Part([change], effects=[_Committing(self, transaction), counting])

    def prepare_roll_back(
        self, link: Link, command: RollBackTransaction, frame: Any = None
    ) -> Part:
        """Return the part that ends a transaction without effect, for a ROLL_BACK_TRANSACTION.

        Raises BrokerRefused: the transaction is not open, or not the client's.
        """
        transaction = self._find(link, command.transaction)
        counting = Counting(self._shard.counters, 1, ("transactions_rolled_back",))
        return self._ending(transaction, "rolled_back", counting)

    def _ending(self, transaction: Transaction, why: str, *effects: Effect) -> Part:
        """Return the part that ends a transaction of which nothing is appended to a stream.

        why: as TransactionEnded has it.
        """
        bases: list[int] = []  # filled in when the part is taken: see _Ending
        change = TransactionEnded(transaction.id, bases, why, self._shard.now_ms)
        return Part([change], effects=[_Ending(self, transaction, bases, why), *effects])

    # --- against the holder's will ------------------------------------------------------------

    def end(self, transaction: Transaction, why: str, effect: Effect) -> None:
        """Roll an open transaction back by the broker's own step. why: TIMED_OUT or ENDED.

        effect: told what becomes of that.
        """
        self._steps.take([self._ending(transaction, why, effect)])

    def _arm(self, due_ms: int) -> None:
        """Have the one timer of all deadlines fire at a time, unless it fires before."""
        if not self._armed_ms or due_ms < self._armed_ms:
            self._armed_ms = due_ms
            self._timers.set(due_ms, partial(self._look, due_ms))

    def _look(self, due_ms: int) -> None:
        """Roll back what is open beyond its time, and set the timer anew.

        Called by a timer that was set for `due_ms`. Timers cannot be taken back: one that was set
        before an earlier one fires as well, and finds nothing due.
        """
        if due_ms == self._armed_ms:
            self._armed_ms = 0
        now_ms = self._shard.now_ms
        following = 0
        for transaction in list(self.by_id.values()):
            if transaction.state is not State.OPEN:
                continue
            if transaction.deadline_ms <= now_ms:
                self._time_out(transaction)
            elif not following or transaction.deadline_ms < following:
                following = transaction.deadline_ms
        if following:
            self._arm(following)

    def put_off(self, ms: int) -> None:
        """Let open transactions last so much longer: the broker stood still for that time."""
        for transaction in self.by_id.values():
            transaction.deadline_ms += ms

    def _time_out(self, transaction: Transaction) -> None:
        """Roll back a transaction that was open for too long, and report that."""
        self._shard.counters["transactions_timed_out"] += 1
        self._shard.event(
            "transaction_timed_out", "warning", transaction=transaction.id.hex(),
            identity=transaction.row.holder, timeout_ms=transaction.row.timeout_ms,
            records=transaction.records, bytes=transaction.bytes,
        )  # fmt: skip
        self.end(transaction, TIMED_OUT, Then(failed=partial(self._retry_timeout, transaction)))

    def _retry_timeout(self, transaction: Transaction, *_: Any) -> None:
        """Try a timeout again in a while that the log refused."""
        transaction.deadline_ms = self._shard.now_ms + 10 * self._shard.settings.retry_ms
        self._arm(transaction.deadline_ms)

    def reopened(self, transaction: Transaction) -> None:
        """Have a transaction open again, since the log refused its commit or end."""
        transaction.state = State.OPEN
        transaction.ending = None
        self._arm(transaction.deadline_ms)


class _Beginning(Effect):
    """A transaction that begins."""

    transactions: Transactions
    transaction: Transaction

    def taken(self, part: Part) -> None:
        """Add the transaction, which counts for its owner's quota."""
        self.transactions.enter(self.transaction)

    def appended(self, part: Part, end_lsn: int) -> None:
        """Use the row that the tables have from now on, which later changes are made in."""
        row = self.transactions._shard.queues.transactions.get(self.transaction.id)
        if row is not None:
            self.transaction.row = row

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Forget the transaction, and give back its quota."""
        self.transactions.forget(self.transaction)


class _Staging(Effect):
    """A batch that is put aside."""

    transactions: Transactions
    transaction: Transaction
    change: TransactionStaged
    stream: Stream

    def taken(self, part: Part) -> None:
        """Add the batch to the transaction, and its bytes to the owner's quota."""
        self.transaction.add(self.change, self.stream.ring.name)
        self.transaction.names[self.change.stream] = self.stream.name
        self.transactions.weigh(self.transaction, self.change.size)

    def based(self, part: Part) -> None:
        """Note the batch's number, also for the end of the transaction if that is under way."""
        self.change.base = part.base
        if self.transaction.ending is not None:
            self.transaction.ending.append(part.base)

    def appended(self, part: Part, end_lsn: int) -> None:
        """Keep the body in memory until the transaction ends, and count the records."""
        assert part.content is not None
        transactions = self.transactions
        transactions._bodies.keep(part.base, part.stamp, part.frame, part.content)
        transactions._shard.counters["staged_records"] += self.change.count

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Take the batch out of the transaction, and give back its bytes unless it has ended."""
        transaction, change = self.transaction, self.change
        if transaction.ending is not None and change.base in transaction.ending:
            # The number is another batch's now.
            transaction.ending.remove(change.base)
        transaction.remove(change)
        if self.transactions.by_id.get(transaction.id) is transaction:
            self.transactions.weigh(transaction, -change.size)


class _Committing(Effect):
    """A commit of a transaction that has staged batches."""

    transactions: Transactions
    transaction: Transaction

    def taken(self, part: Part) -> None:
        """Close the transaction to further batches until the log answers."""
        self.transaction.state = State.COMMITTING

    def appended(self, part: Part, end_lsn: int) -> None:
        """Begin to append the staged batches to their streams."""
        self.transaction.state = State.COMMITTED
        self.transactions._moving.begin(self.transaction, end_lsn)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Open the transaction again."""
        self.transactions.reopened(self.transaction)


class _Ending(Effect):
    """The end of a transaction, of which nothing is appended to a stream any more."""

    transactions: Transactions
    transaction: Transaction
    bases: list[int]
    """Batches that the change names. Those that are still on their way to the log add themselves
    when they are given a number, which is before the change is encoded."""
    why: str

    def taken(self, part: Part) -> None:
        """Close the transaction, and name its staged batches in the change."""
        self.transaction.state = State.ENDING
        self.bases += [base for base in self.transaction.bases if base >= 0]
        self.transaction.ending = self.bases

    def appended(self, part: Part, end_lsn: int) -> None:
        """Drop the staged batches and the transaction, and tell those that wait for its end."""
        transactions, transaction = self.transactions, self.transaction
        for base in transaction.bases:
            transactions._bodies.drop(base)
        transactions.forget(transaction)
        transactions._awaiting.appended(transaction, end_lsn)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Open the transaction again."""
        self.transactions.reopened(self.transaction)
