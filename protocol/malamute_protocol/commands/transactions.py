"""The commands of open transactions (feature TRANSACTIONS).

Owns the commands 93 to 99. Source: SPEC.md, section 4.
"""

from __future__ import annotations

from malamute_protocol.commands.command import Command, WithContent
from malamute_protocol.commands.fields import Key, Time


class BeginTransaction(Command, tag=93, frozen=True):
    """Open a transaction: what is staged in it is appended to streams by its commit, or never."""

    transaction: Key
    """The client's name for it, one space for all clients: 16 random bytes."""
    tracker: int
    timeout_ms: Time = 0
    """Time after which the broker rolls it back; 0: the broker's default."""
    level: int = 0


class Stage(WithContent, tag=94, frozen=True):
    """Put one batch for a stream aside, in an open transaction; owns one content frame."""

    transaction: Key
    stream: str
    place: Time
    """Place of the batch among those of the transaction, whose records come in this order."""
    tracker: int
    level: int = 0
    typed: bool = False
    """True: only for a stream with a declared schema."""


class CommitTransaction(Command, tag=95, frozen=True):
    """Have all that a transaction staged appended to its streams."""

    transaction: Key
    count: Time
    """Batches that were staged: a commit that would lack one is refused."""
    tracker: int
    level: int = 0


class RollBackTransaction(Command, tag=96, frozen=True):
    """End a transaction; what it staged is dropped, and no reader ever sees it."""

    transaction: Key
    tracker: int
    level: int = 0


class ListTransactions(Command, tag=97, frozen=True):
    """List the open transactions, and committed ones that are being appended, oldest first."""

    request: int
    after: Key = b""
    """Transactions after this one; empty: from the first."""
    limit: int = 1000


class EndTransaction(Command, tag=98, frozen=True):
    """Operator rolls an open transaction of any client back, or gives up what is put off of it.

    RESULT: {} after a rollback; else `given_up`: map of stream to records that were given up.
    """

    request: int
    transaction: Key
    give_up: bool = False
    """True: of a committed one, the records that a ring puts off are never appended."""


class AwaitTransaction(Command, tag=99, frozen=True):
    """Wait until all records of a committed transaction are in their streams, durably.

    RESULT: {}; at once where the broker has no such transaction of this client (any more).
    """

    request: int
    transaction: Key
