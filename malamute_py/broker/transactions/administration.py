"""Questions about transactions, and their end by an operator.

Owns LIST_TRANSACTIONS, END_TRANSACTION and AWAIT_TRANSACTION. The rules: the permission
`manage_clients` decides who may list and end other clients' transactions; a commit is never taken
back: of a committed transaction an operator can only give up, by name, what a ring puts off, and
every client that waits for the commit is told. Source: SPEC.md, section 4.11.

A ring that refuses batches of a committed transaction puts them off; they are tried again until it
takes them, or an operator gives them up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from malamute_protocol.commands import AwaitTransaction, EndTransaction, ListTransactions
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.log.answers import Answer, Answers
from malamute_py.broker.log.pages import Entries
from malamute_py.broker.ready import MAIN
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.transactions.awaiting import Awaiting
from malamute_py.broker.transactions.transaction import State, Transaction
from malamute_py.broker.transactions.transactions import ENDED, GIVEN_UP, WHY, Transactions

STREAMS_MAX = 16
"""Streams of one transaction that a list names."""


class TransactionAdmin:
    """Handlers of the commands about transactions that a RESULT answers."""

    def __init__(
        self, shard: Shard, catalogue: Catalogue, answers: Answers, transactions: Transactions,
        awaiting: Awaiting,
    ) -> None:  # fmt: skip
        self._shard = shard
        self._catalogue = catalogue
        self._answers = answers
        self._transactions = transactions
        self._awaiting = awaiting

    def handlers(self) -> dict[type, Callable[[Link, Any], None]]:
        """Handlers of the commands that are no parts of steps."""
        return {
            ListTransactions: self.list_transactions,
            EndTransaction: self.end_transaction,
            AwaitTransaction: self.await_transaction,
        }

    def list_transactions(self, link: Link, command: ListTransactions) -> None:
        """Answer with a page of the transactions, oldest first, for LIST_TRANSACTIONS.

        A client sees its own; an administrator all, or those of its namespace.
        """
        settings = self._shard.settings
        all_of_them = settings.permit(link.owner, "manage_clients", "transactions")
        known = list(self._transactions.by_id.values())
        ids = [transaction.id for transaction in known]
        # A transaction that has ended meanwhile marks no place: the list begins anew.
        begin = ids.index(command.after) + 1 if command.after in ids else 0
        page: Entries[dict[str, Any]] = Entries(command.limit, settings.page_max)
        more = page.add_all(
            self._facts(transaction)
            for transaction in known[begin:]
            if transaction.row.holder == link.holder
            or (all_of_them and settings.shares_namespace(link.owner, transaction.row.by))
        )
        self._answers.result(link, command, {"transactions": page.found, "more": more})

    def _facts(self, transaction: Transaction) -> dict[str, Any]:
        """Return the facts of one transaction that a list shows.

        streams: names of those that it has batches for, STREAMS_MAX at most.
        """
        row = transaction.row
        numbers = {batch.stream for batch in transaction.staged.values()}
        streams = [self._catalogue.by_number(number) for number in numbers]
        names = sorted(stream.name for stream in streams if stream is not None)
        return {
            "transaction": row.id, "identity": row.holder, "by": row.by,
            "state": transaction.state.value, "since_ms": row.at_ms,
            "touched_ms": transaction.touched_ms, "timeout_ms": row.timeout_ms,
            "deadline_ms": transaction.deadline_ms, "batches": len(transaction.staged),
            "records": transaction.records, "bytes": transaction.bytes,
            "streams": names[:STREAMS_MAX], "committed_ms": row.committed_ms,
            "put_off": [
                self._why_put_off(transaction, ring) for ring in transaction.put_off
            ],
        }  # fmt: skip

    def _why_put_off(self, transaction: Transaction, ring: str) -> dict[str, Any]:
        """Facts of a ring that takes nothing of a transaction for now. stream: "": of ring main."""
        why, waiting = transaction.put_off[ring], transaction.in_order(ring)
        stream = self._catalogue.by_number(waiting[0].stream) if waiting else None
        return {
            "stream": "" if stream is None or ring == MAIN else stream.name, "code": why.code,
            "reason": why.reason, "since_ms": why.since_ms,
            "records": sum(batch.count for batch in waiting),
        }  # fmt: skip

    def end_transaction(self, link: Link, command: EndTransaction) -> None:
        """Roll a transaction of any client back, or give up what is put off of a committed one.

        For END_TRANSACTION of an operator; answered when that is durable. Raises BrokerRefused: it
        is not allowed, there is no such transaction, or its state does not permit it.
        """
        settings = self._shard.settings
        transaction = self._transactions.by_id.get(command.transaction)
        if not settings.permit(link.owner, "manage_clients", "transactions"):
            raise BrokerRefused("forbidden", "you may not end transactions")
        if transaction is None or not settings.shares_namespace(link.owner, transaction.row.by):
            raise BrokerRefused(
                "unknown_transaction",
                f"there is no transaction {command.transaction.hex()}, or not any more",
            )
        if transaction.state is State.COMMITTED and transaction.put_off:
            self._end_put_off(link, command, transaction)
            return
        if transaction.state is not State.OPEN or command.give_up:
            why = f"the transaction is {transaction.state.value}"
            if command.give_up:
                why += ", and no ring puts off any of it"
            raise BrokerRefused("conflict", why)
        self._shard.counters["transactions_ended"] += 1
        self._shard.event(
            "transaction_ended", "warning", transaction=transaction.id.hex(), by=link.owner,
            identity=transaction.row.holder, records=transaction.records, bytes=transaction.bytes,
        )  # fmt: skip
        self._transactions.end(transaction, ENDED, Answer(self._answers, link, command))

    def _end_put_off(self, link: Link, command: EndTransaction, transaction: Transaction) -> None:
        """Give up what rings put off of a committed transaction, if the command says so.

        Raises BrokerRefused: the command does not say so, and is told what would be given up; or
        there is nothing that can be.
        """
        apart = [ring for ring in transaction.put_off if ring != MAIN]
        if not apart:  # Ring main has failed: the commit itself may be lost, and a start will tell.
            code, reason = transaction.put_off[MAIN].code, transaction.put_off[MAIN].reason
            raise BrokerRefused(
                "conflict", f"ring main takes nothing ({code}: {reason}): see the broker's log"
            )
        if not command.give_up:
            waiting = [self._why_put_off(transaction, ring) for ring in apart]
            told = "; ".join(
                f"{one['records']} records for stream {one['stream']} ({one['code']}: "
                f"{one['reason']})" for one in waiting
            )  # fmt: skip
            raise BrokerRefused(
                "conflict",
                "the transaction is committed and cannot be rolled back; make room in the ring, or "
                f"end it with give_up (--give-up), which drops for good what waits: {told}",
            )
        if transaction.ender is not None:
            raise BrokerRefused("conflict", "what is put off is being given up already")
        answer = Answer(self._answers, link, command, lambda: {"given_up": transaction.given_up})
        self._transactions.give_up(transaction, answer)

    def await_transaction(self, link: Link, command: AwaitTransaction) -> None:
        """Answer once all of a committed transaction is durable in its streams.

        Raises BrokerRefused: records of it were given up, or it is not committed.
        """
        transaction = self._transactions.by_id.get(command.transaction)
        if transaction is None and self._transactions.was_given_up(command.transaction):
            raise BrokerRefused(*WHY[GIVEN_UP])
        if transaction is None or transaction.row.holder != link.holder:
            # Its end may be appended and not durable yet. Another client's counts as not there.
            self._awaiting.answer_ended(link, command, self._transactions.last_end_lsn)
        elif transaction.state is State.OPEN:
            raise BrokerRefused("conflict", "the transaction is open")
        else:
            self._awaiting.add(link, command, transaction)
