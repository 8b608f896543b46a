"""Effects of records about atomic steps and transactions.

Owns what such a record changes in `Queues`. The rule: a batch that is staged goes with its
transaction, or once it is in its stream; of a transaction that did not end as its client wanted,
the end is remembered.
Source: docs/design.md (Journal; Queues and the checkpoint).

A staged batch lies in the mail stream, aside from its stream, until its transaction is committed
and the batch is appended there.
apply() calls one of these functions for each record of the log, in the broker and in the process of
the checkpoint, whose maps write only rows that are set in them: a changed row is set again.
"""

from __future__ import annotations

from typing import Final

from malamute_py.changelog.records import (
    StepTaken,
    TransactionBegun,
    TransactionCommitted,
    TransactionEnded,
    TransactionMoved,
    TransactionStaged,
)
from malamute_py.changelog.tables import Effects, KeyRow, Queues, StagedRow, Tables, TransactionRow


def _step_taken(tables: Tables, queues: Queues, change: StepTaken) -> None:
    """Remember the key of an answer or step, so that it is taken once.

    Nothing was put under it (base -1). Minus the command's number stands where the key of a put has
    the number of its mailbox or service.
    """
    row = KeyRow(base=-1, count=0, at_ms=change.at_ms, use=-change.command, digest=change.digest)
    queues.remember(change.sender, change.key, row)


def _transaction_begun(tables: Tables, queues: Queues, change: TransactionBegun) -> None:
    """Open a transaction; how an earlier one of the name ended is forgotten."""
    queues.ends.pop(change.id, None)
    queues.transactions[change.id] = TransactionRow(
        change.id, change.holder, change.by, change.at_ms, change.timeout_ms
    )


def _transaction_staged(tables: Tables, queues: Queues, change: TransactionStaged) -> None:
    """Add a staged batch to its transaction, if that has not ended."""
    if change.id in queues.transactions:
        queues.staged[change.base] = StagedRow(
            change.base, change.id, change.place, change.stream, change.count, change.size,
            change.at_ms,
        )  # fmt: skip


def _transaction_committed(tables: Tables, queues: Queues, change: TransactionCommitted) -> None:
    """Note the commit: the staged batches stay until they are in their streams."""
    row = queues.transactions.get(change.id)
    if row is not None:
        row.committed_ms = change.at_ms
        queues.transactions[change.id] = row


def _transaction_moved(tables: Tables, queues: Queues, change: TransactionMoved) -> None:
    """Forget staged batches that are in their streams, or were given up."""
    for base in change.bases:
        queues.staged.pop(base, None)
    if change.given_up_ms:
        queues.note_end(change.id, "given_up", change.given_up_ms)


def _transaction_ended(tables: Tables, queues: Queues, change: TransactionEnded) -> None:
    """Forget a transaction and its batches; remember an end that its client did not want."""
    for base in change.bases:
        queues.staged.pop(base, None)
    queues.transactions.pop(change.id, None)
    if change.why not in ("committed", "rolled_back"):
        queues.note_end(change.id, change.why, change.at_ms)


EFFECTS: Final[Effects] = {
    StepTaken: _step_taken,
    TransactionBegun: _transaction_begun,
    TransactionStaged: _transaction_staged,
    TransactionCommitted: _transaction_committed,
    TransactionMoved: _transaction_moved,
    TransactionEnded: _transaction_ended,
}
