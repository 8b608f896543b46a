"""A consumer's place amid a batch, and the notices that it met.

Owns what the subscriptions of both shells share. The rule: rows that were not handed over
stay at hand, whatever becomes of the caller's loop, and a gap is never silent. The batch at hand is
the one whose records are being handed over one by one; `_left` of them have not been.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from malamute_protocol.batch import Batch, Record
from malamute_py.client.arguments import callback_of, truth
from malamute_py.client.engine.log import LOG, guarded
from malamute_py.client.position import Position
from malamute_py.client.session.subscription import (
    BegunNotice,
    GapError,
    GapNotice,
    ModeNotice,
    Notice,
    PassedOverNotice,
    RewoundNotice,
    cut,
)

_NOTICES_KEPT: Final = 1000
"""Notices that notices() can return; older ones are forgotten."""


class SubscriptionBase:
    """Base of the subscriptions of both shells: the place in a batch, and notices."""

    def __init__(self, strict: bool, on_notice: Callable[[Notice], None] | None) -> None:
        """Raises LocalProtocolError: strict is no bool, or on_notice cannot be called."""
        self._strict = truth("strict", strict)
        callback_of("on_notice", on_notice)
        self._on_notice = on_notice
        self._notices: deque[Notice] = deque(maxlen=_NOTICES_KEPT)
        self._batch: Batch | None = None
        self._rows: Iterator[Record] = iter(())
        self._left = 0
        """Records of the batch that were not handed over yet."""
        self.gaps = 0
        """Gaps and rewinds met so far, and losses of records that had not come."""
        self._shortened = 0
        """Value of `shortened` of the state that was taken note of last."""

    def _open(self, batch: Batch) -> None:
        """Have a batch at hand, to hand its records over one by one."""
        self._batch = batch
        self._rows = batch.records()
        self._left = len(batch)

    def _rest(self) -> Batch | None:
        """Take what is left of the batch whose records are being iterated."""
        if not self._left or self._batch is None:
            return None
        whole = len(self._batch)
        rest = self._batch if self._left == whole else cut(self._batch, whole - self._left, whole)
        self._left = 0
        self._rows = iter(())
        return rest

    def _place(self, following: Position | None) -> Position | None:
        """Position to go on from later; following: the one after the batch at hand."""
        if following is None or not self._left or self._batch is None:
            return following
        return following._replace(next=self._next_offset())

    def _next_offset(self) -> int:
        """Return the offset of the next record of the batch at hand, of which some are left."""
        assert self._batch is not None
        return int(self._batch.offsets[len(self._batch) - self._left])

    def _note(self, notice: Notice) -> None:
        """Pass a notice on: to notices(), to on_notice or the log, and to `gaps`.

        Raises GapError for a gap or a rewind when the subscription is strict. A ModeNotice tells of
        live and lagging alone, which is no loss.
        """
        self._notices.append(notice)
        if isinstance(notice, BegunNotice):
            LOG.info("a subscription from the earliest record begins at offset %d", notice.offset)
        elif isinstance(notice, PassedOverNotice):
            if self._on_notice is None:
                LOG.warning("a member of a group is passed over: a lease of its records has ended")
        elif not isinstance(notice, ModeNotice):
            self.gaps += 1
            if self._on_notice is None and not self._strict:
                LOG.warning("a subscription lost records: %s", notice)
        if self._on_notice is not None:
            guarded("on_notice", self._on_notice, notice)
        if self._strict and isinstance(notice, GapNotice | RewoundNotice):
            raise GapError(notice)

    def notices(self) -> list[Notice]:
        """The notices since the last call, oldest first; at most the newest 1,000."""
        found = list(self._notices)
        self._notices.clear()
        return found
