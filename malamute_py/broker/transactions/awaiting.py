"""Callers that wait for a committed transaction to be durable in its streams.

Owns the answers to AWAIT_TRANSACTION. The rule: every caller that waits is answered once, by the
end of the transaction or by the first ring that takes none of its batches for now. Source: SPEC.md,
section 4.11.
"""

from __future__ import annotations

from typing import Final

from malamute_protocol.commands import AwaitTransaction
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.transactions.transaction import Transaction

RECORDS_GIVEN_UP: Final = (
    "given_up",
    "the transaction is committed, and an operator gave up records that a ring did not take",
)
"""Code and reason for a caller whose transaction is over, and not in all of its streams."""


class Awaiting:
    """The callers that wait for the transactions of one core, by an AWAIT_TRANSACTION each."""

    def __init__(self, links: Links, answers: Answers) -> None:
        self._links = links
        self._answers = answers

    def add(self, link: Link, command: AwaitTransaction, transaction: Transaction) -> None:
        """Have a command answered once all of a transaction is durable.

        Raises BrokerRefused `wait`: the link waits for too many answers.
        """
        self._links.count_query(link)
        transaction.waiting.append((link, command))

    def answer_ended(self, link: Link, command: AwaitTransaction, end_lsn: int) -> None:
        """Have a command answered whose transaction has ended, once that is durable.

        end_lsn: of the newest end of any transaction, as the one that was asked for is forgotten.
        Raises BrokerRefused `wait`: the link waits for too many answers.
        """
        self._links.count_query(link)
        self._answers.settle(end_lsn, lambda failure: self._answer([(link, command)], failure))

    def appended(self, transaction: Transaction, end_lsn: int, *, given_up: bool = False) -> None:
        """Have all that wait for a transaction answered once its end is durable.

        end_lsn: the LSN of its end. given_up: an operator gave up records of it.
        """
        if transaction.waiting:
            outcome = RECORDS_GIVEN_UP if given_up else None
            waiting, transaction.waiting = transaction.waiting, []
            self._answers.settle(end_lsn, lambda failure: self._answer(waiting, failure or outcome))

    def put_off(self, transaction: Transaction, code: str, reason: str) -> None:
        """Tell all that wait for a transaction that a ring takes none of its batches for now."""
        waiting, transaction.waiting = transaction.waiting, []
        why = (
            f"the transaction is committed, and {len(transaction.staged)} of its batches follow "
            f"later ({code}: {reason})"
        )
        self._answer(waiting, ("put_off", why))

    def _answer(
        self, waiting: list[tuple[Link, AwaitTransaction]], failure: tuple[str, str] | None
    ) -> None:
        """Answer the commands that waited for a transaction's end, and that their links counted.

        failure: code and reason: the end is not durable, batches follow later, or records were
        given up; None: all of the transaction is durable.
        """
        for link, command in waiting:
            link.queries -= 1
            if failure is None:
                self._answers.result(link, command, {})
            else:
                self._answers.refuse(link, command, *failure)
