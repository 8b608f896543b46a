"""Subscriptions, inboxes, offers and memberships: what a client opens under a number.

Owns what all of them share: the number, the states, and how a refusal is taken. The rule:
the session knows nothing of a delivery but its number; what was opened takes the command
in, gives credit back, and says how it is opened again on a new link. Credit is how many records and
bytes the broker may send, counted in all from the beginning of the link.
Source: SPEC.md, sections 4 and 8.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from malamute_protocol.commands import Command, Credit, Ended
from malamute_protocol.errors import BrokerRefused, MalamuteError
from malamute_protocol.limits import Limits

AWAY_MAX: Final = 1 << 17
"""Records or messages of lost links that are remembered; beyond it the oldest may be handed over
again."""
_PASSING: Final = frozenset({"wait", "draining"})
"""Codes of refusals that pass: the same again, after a while."""
_IN_ORDER: Final = frozenset({"end", "cancelled"})
"""Codes of ENDED that are no error."""


class Opened(ABC):
    """A subscription, inbox, offer or membership, over all its links."""

    consumes = False
    """Whether some of what arrives needs no caller, so that credit may be due at once."""

    def __init__(self, number: int, credit_records: int, credit_bytes: int) -> None:
        """number: unique among all that the session opens; the same over reconnects.

        credit_records, credit_bytes: what may wait in this client; CREDIT is sent when half of it
        is free again.
        """
        self.number = number
        self.error: MalamuteError | None = None
        self.ended = False
        """Nothing more will arrive."""
        self.ending = False
        """UNSUBSCRIBE was asked for."""
        self.active = False
        """The broker accepted it on the present link."""
        self.left_out = False
        """The present link began without it, and its program has made no call since."""
        self._accepted = False
        self._half_records = credit_records / 2
        self._half_bytes = credit_bytes / 2
        self._received_records = self._received_bytes = 0
        """Records and bytes that came on the present link."""
        self._granted_records = self._granted_bytes = 0
        """Credit on the present link, counted from its beginning."""

    @abstractmethod
    def open(self) -> Command:
        """Return the command that opens it on a link, be it the first or a later one."""

    @abstractmethod
    def receive(self, command: Any, frames: Sequence[Any], limits: Limits) -> None:
        """Take in a command that names the number, ENDED apart.

        Raises RemoteProtocolError (BatchError among them): the broker is at fault, and both
        this and the link are ended.
        """

    @property
    def stands_still(self) -> bool:
        """Whether a new link begins without it, until its program makes a call."""
        return False

    @property
    def accepted(self) -> bool:
        """Whether the broker has accepted it once."""
        return self._accepted

    @abstractmethod
    def _credit_limits(self) -> tuple[int, int]:
        """Return how many records and bytes the broker may send in all on this link."""

    def _begin_credit(self) -> None:
        """Begin to count records and bytes anew, for the command that opens it on a new link."""
        self._received_records = self._received_bytes = 0
        records, size = self._credit_limits()
        # Below 0 where more waits in the client since the last link than its credit.
        self._granted_records, self._granted_bytes = max(0, records), max(0, size)

    @property
    def credit_due(self) -> bool:
        """Whether CREDIT is to be sent: at least half of what may wait was freed since the last."""
        records, size = self._credit_limits()
        return (
            records - self._granted_records >= self._half_records
            or size - self._granted_bytes >= self._half_bytes
        )

    def credit(self) -> Credit:
        """Return CREDIT for what was consumed; the totals in it never go back."""
        records, size = self._credit_limits()
        self._granted_records = max(records, self._granted_records)
        self._granted_bytes = max(size, self._granted_bytes)
        return Credit(self.number, self._granted_records, self._granted_bytes)

    @abstractmethod
    def discard(self) -> None:
        """Drop what waits to be consumed: the caller consumes no more."""

    def link_down(self) -> None:
        """Take note that the link has ended; `open` is called when there is another."""
        self.active = self.left_out = False

    def refused(self, error: BrokerRefused) -> bool:
        """Return whether to open it again later, as the broker refused to open it only for now.

        Not if it was never accepted: then its caller, who waits for that, gets the error.
        """
        return self.accepted and error.code in _PASSING

    def end_with(self, command: Ended) -> None:
        """End by the broker's ENDED, in order, or by a code that becomes the consumer's error."""
        self.ended = True
        self.active = False
        if command.code not in _IN_ORDER:
            self.error = BrokerRefused(command.code)

    def fail(self, error: MalamuteError) -> None:
        """End with an error that the consumer gets after what waits; the first error counts."""
        self.ended = True
        self.active = False
        if self.error is None:
            self.error = error

    def over(self) -> None:  # noqa: B027 - most have nothing to do then
        """Clean up after the end, for whatever reason; called once."""
