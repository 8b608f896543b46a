"""A member's place amid a batch, and what was handed to its caller last.

Owns what the members of both shells share. The rule: a record is acknowledged when the member's
caller says so or, if it was asked for so, when the next one is asked for. Source: SPEC.md, section
4.8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from malamute_protocol.errors import LocalProtocolError
from malamute_py.client.arguments import one_of
from malamute_py.client.readers.records import SubscriptionBase
from malamute_py.client.session.held_batches import HeldBatch
from malamute_py.client.session.memberships import Membership
from malamute_py.client.session.subscription import Notice
from malamute_py.client.words import AckWhen


class MemberBase(SubscriptionBase):
    """Base of the members of both shells: the place in a batch, and what was handed over last."""

    _membership: Membership

    def __init__(
        self,
        ack: AckWhen,
        strict: bool,
        on_notice: Callable[[Notice], None] | None,
    ) -> None:
        """ack: "next" or "manual". Raises LocalProtocolError: an argument is wrong."""
        super().__init__(strict, on_notice)
        one_of("ack", ack, ("next", "manual"))
        self._acks_next = ack == "next"
        self._handed: list[int] = []
        """Offsets handed over last; acknowledged when the next is asked for."""
        self._handed_of: Any = None
        """The batch that the offsets of `_handed` were taken from."""

    def _handing(self, batch: Any, offsets: list[int]) -> None:
        """Note what is handed to the caller, if the next call is to acknowledge it."""
        if self._acks_next:
            self._handed_of, self._handed = batch, offsets

    def _take_handed(self) -> list[int]:
        """Take the offsets that were handed over last, to acknowledge them.

        Of records that a power loss took back they are numbers that no record has; see known().
        """
        handed, self._handed = self._handed, []
        known: list[int] = self._handed_of.known(handed)
        return known

    def _unhand(self, offsets: list[int]) -> None:
        """Forget offsets that the caller acknowledged itself: the next call need not."""
        if self._handed:
            named = set(offsets)
            self._handed = [offset for offset in self._handed if offset not in named]

    def _rest(self) -> HeldBatch | None:
        """Take what is left of the batch that is being iterated, as a held batch.

        None where a lease has ended: _take() has the broker say whose records these are.
        """
        return None if self._membership.lost_lease else self._left_over()

    def _take(self) -> HeldBatch | Notice | None:
        """Take the next batch or notice of the membership; None: nothing has come.

        Where a lease has ended, records at hand may be another member's by now: they go back to the
        membership first, in doubt, and come again once the broker has said whose they are.
        """
        if self._membership.lost_lease:
            rest = self._left_over()
            self._membership.doubt([rest] if rest is not None else [])
        return self._membership.take()

    def _left_over(self) -> HeldBatch | None:
        """Take what is left of the batch that is being iterated, even where a lease has ended."""
        rest = super()._rest()
        if rest is None or isinstance(rest, HeldBatch):
            return rest
        assert isinstance(self._batch, HeldBatch)
        return HeldBatch(rest, self._batch.opened, self._batch.uuid, self._batch.attempts)


def numbers_of(held: Any, membership: Membership) -> list[int]:
    """Return the offsets of a record or batch that this member was given, to acknowledge them.

    Of records that a power loss took back they are numbers that no record has; see known(). Raises
    LocalProtocolError: it is not of this membership.
    """
    batch = held if isinstance(held, HeldBatch) else getattr(held, "batch", None)
    if not isinstance(batch, HeldBatch) or batch.opened is not membership:
        raise LocalProtocolError("unexpected", f"{held!r} did not come from this member")
    return held.numbers if held is batch else batch.known([held.offset])
