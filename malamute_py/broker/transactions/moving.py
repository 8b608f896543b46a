"""Appending what committed transactions have staged to its streams.

Owns the way of staged batches from the mail stream into their streams. The rules: it begins once
the log has the commit, in the same ring, so that nothing of it can survive without the commit; a
bundle has the batches and the change that says so, so that none is appended twice or left out over
a crash; one bundle is on its way at a time and transactions take turns, so that none holds a turn
of the loop for longer than a bundle takes; a batch of a stream that was removed is dropped with
that stream. Source: ARCHITECTURE.md, Decisions; SPEC.md, section 4.11.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from malamute_py.broker.context import Shard
from malamute_py.broker.log.bodies import Bodies, Body
from malamute_py.broker.log.ring import Settlement
from malamute_py.broker.log.steps import Effect, Part, Steps
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.streams.publishing import Publishing
from malamute_py.broker.structures.timers import Timers
from malamute_py.broker.transactions.transaction import Transaction
from malamute_py.changelog.records import TransactionEnded, TransactionMoved, TransactionStaged
from malamute_py.changelog.tables import StagedRow

BATCHES_MAX: Final = 256
"""Batches that one bundle appends at most."""
AHEAD_BYTES: Final = 64 << 20
"""Bytes that were appended and not yet synced from which on the next bundle waits for the disk."""


class _Bundle(msgspec.Struct, eq=False):
    """Batches of one transaction that are appended together."""

    transaction: Transaction
    batches: list[StagedRow | TransactionStaged]
    bodies: list[Body | None]
    missing: int
    """Bodies that are still being read."""
    failed: str = ""


class Moving:
    """Committed transactions whose batches are being appended."""

    def __init__(
        self,
        shard: Shard,
        steps: Steps,
        bodies: Bodies,
        catalogue: Catalogue,
        publishing: Publishing,
        timers: Timers,
        when_visible: Callable[[int, Settlement], None],
        ended: Callable[[Transaction, int], None],
        weigh: Callable[[Transaction, int], None],
    ) -> None:
        """ended: called with a transaction of which all is appended, and the LSN of its end.

        weigh: called with bytes that are staged no more, as a negative number.
        """
        self._shard = shard
        self._steps = steps
        self._bodies = bodies
        self._catalogue = catalogue
        self._publishing = publishing
        self._timers = timers
        self._when_visible = when_visible
        self._ended = ended
        self._weigh = weigh
        self._queue: deque[Transaction] = deque()
        self._busy = False
        """Whether a bundle is being read, or is on its way to the log, or waits for the disk."""

    def begin(self, transaction: Transaction) -> None:
        """Append all of a transaction, whose commit the log has, in its turn."""
        self._queue.append(transaction)
        self._go_on()

    def _go_on(self) -> None:
        """Read the staged batches of the next bundle, from the transaction whose turn it is.

        One bundle is under way at a time; `_found` puts together what is read.
        """
        if self._busy or not self._queue:
            return
        self._busy = True
        transaction = self._queue.popleft()
        batches: list[StagedRow | TransactionStaged] = []
        size, most = 0, self._shard.settings.commit_bytes
        for batch in transaction.in_order():
            if batches and (size + batch.size > most or len(batches) >= BATCHES_MAX):
                break
            batches.append(batch)
            size += batch.size
        bundle = _Bundle(transaction, batches, [None] * len(batches), len(batches))
        for at, batch in enumerate(batches):
            self._bodies.want(batch.base, batch.size, partial(self._found, bundle, at))

    def _found(self, bundle: _Bundle, at: int, body: Body | None) -> None:
        bundle.bodies[at] = body
        if body is None and self._bodies.failed:
            bundle.failed = self._bodies.failed
        bundle.missing -= 1
        if bundle.missing:
            return
        if bundle.failed:
            self._later(bundle)
        else:
            self._append(bundle)

    def _later(self, bundle: _Bundle) -> None:
        """Try a bundle again in a while: its bodies could not be read, or the log refused it."""
        self._queue.appendleft(bundle.transaction)
        pause_ms = 10 * self._shard.settings.retry_ms
        self._timers.set(self._shard.now_ms + pause_ms, self._resume)

    def _resume(self) -> None:
        """Begin the next bundle: the last one is done."""
        self._busy = False
        self._go_on()

    def _append(self, bundle: _Bundle) -> None:
        transaction = bundle.transaction
        bases = [batch.base for batch in bundle.batches]
        whole = len(bases) == len(transaction.staged)
        if whole:
            now_ms = self._shard.now_ms
            change: Any = TransactionEnded(transaction.id, bases, "committed", now_ms)
        else:
            change = TransactionMoved(transaction.id, bases)
        parts: list[Part] = []
        for batch, body in zip(bundle.batches, bundle.bodies, strict=True):
            stream = self._catalogue.by_number(batch.stream)
            if body is None:
                self._lost(transaction, stream, batch)
            elif stream is not None and not stream.removed:
                parts.append(self._publishing.later_part(stream, body.content, body.frame))
        self._steps.take([*parts, Part([change], effects=[_Moved(self, bundle, whole)])])

    def _lost(
        self, transaction: Transaction, stream: Stream | None, batch: StagedRow | TransactionStaged
    ) -> None:
        """Report a batch that damage has taken: the rest of the transaction is appended."""
        self._shard.counters["staged_records_lost"] += batch.count
        self._shard.event(
            "staged_records_lost", "error", transaction=transaction.id.hex(),
            stream="" if stream is None else stream.name, number=batch.base, count=batch.count,
        )  # fmt: skip

    def moved(self, bundle: _Bundle, whole: bool, end_lsn: int) -> None:
        """Take the news that the log has a bundle."""
        transaction = bundle.transaction
        for batch in bundle.batches:
            self._bodies.drop(batch.base)
            transaction.remove(batch)
            self._weigh(transaction, -batch.size)
        if whole:
            self._ended(transaction, end_lsn)
        else:
            self._queue.append(transaction)
        if self._steps.unsettled_bytes + self._publishing.unsettled_bytes > AHEAD_BYTES:
            self._when_visible(end_lsn, self._settled)
        else:
            self._resume()

    def _settled(self, failure: tuple[str, str] | None) -> None:
        """Go on once the last bundle is durable, or its ring failed."""
        # A ring that has failed refuses the next bundle by name, and each later one.
        self._resume()

    def refused(self, bundle: _Bundle) -> None:
        """Take the news that the log refused a bundle."""
        self._later(bundle)


class _Moved(Effect):
    """Batches that leave a transaction for their streams."""

    moving: Moving
    bundle: _Bundle
    whole: bool

    def appended(self, part: Part, end_lsn: int) -> None:
        """Drop the staged batches, which their streams have now, and go on with the next bundle."""
        self.moving.moved(self.bundle, self.whole, end_lsn)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Try the bundle again later."""
        self.moving.refused(self.bundle)
