"""Members: what each has in hand, and how quick it has shown to be.

Owns the facts of one member, and the lot that it is worth giving it at once. The rule: members to
whom it does not pay to give one record each are given at most what they have shown to be quick
with. Source: docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Final

from malamute_py.broker.groups.slots import NOBODY
from malamute_py.broker.links.links import Link, Owner, Receiver

if TYPE_CHECKING:
    from malamute_protocol.commands import JoinGroup

DEAL_MS: Final = 0.1
"""The broker's time for one delivery and its acknowledgement: 20 to 40 us in the core and some
50 us a message in the transport."""
SPREAD_MIN: Final = 32
"""Members among whom a batch is spread whatever they have shown: records are not all alike."""


class Member(Receiver):
    """One subscription of one link that takes part in a group."""

    __slots__ = (
        "filed",
        "held",
        "hold_ms",
        "identity",
        "joined",
        "joined_ms",
        "pace_ms",
        "pattern_bytes",
        "place",
        "served",
        "session",
        "timed",
        "timed_deals",
        "timed_left",
        "timed_ms",
    )

    def __init__(
        self, owner: Owner, link: Link, command: JoinGroup, now_ms: int, hold_ms: int
    ) -> None:
        super().__init__(
            owner, link, command.subscription, command.credit_records, command.credit_bytes
        )
        self.identity = link.identity
        self.session = link.session
        self.hold_ms = hold_ms
        self.joined_ms = now_ms
        self.pattern_bytes = 0
        self.held = 0
        """How many records it has and has not acknowledged."""
        self.served = 0
        """When it was served last, in deliveries of the group."""
        self.joined = 0
        """When it joined, in members of the group."""
        self.filed = False
        """Whether the member stands among those that may be given something."""
        self.place = NOBODY
        """Its number in the arrays of a keyed group."""
        self.pace_ms = 0.0
        """Milliseconds for a record of late, from hand-out to acknowledgement; 0: not known yet."""
        self.timed = self.timed_left = self.timed_ms = self.timed_deals = 0
        """Records that it had in hand at timed_ms, those of them that are left, and the deals until
        then."""

    @property
    def able(self) -> bool:
        """Whether it may be given something."""
        return self.left_records > 0 and self.left_bytes > 0 and self.link.room > 0

    # --- how quick it is ----------------------------------------------------------------------

    def handed(self, count: int, now_ms: int, deals: int) -> None:
        """Note that the member holds more records. deals: its group's deliveries before that."""
        self.held += count
        if not self.timed_left:
            self.timed = self.timed_left = self.held
            self.timed_ms, self.timed_deals = now_ms, deals

    def acknowledged(self, count: int, now_ms: int, deals: int) -> None:
        """Note that held records are done. deals: its group's deliveries until now.

        What the broker spent on deliveries meanwhile is not the member's time: a thousand take
        100 ms, and without that no member would ever be quick. That is an estimate, so a pace
        comes down by half at the most; and rises by a quarter, for a time is often too long by
        what the machine did beside. Should lots get too large, there are fewer deliveries to be
        taken off, and the pace is what it is.
        """
        self.held -= count
        if not self.timed_left:
            return
        self.timed_left -= count
        if self.timed_left > 0:
            return
        self.timed_left = 0
        # The clock counts whole milliseconds: it may have been almost one more.
        took_ms = now_ms - self.timed_ms + 1
        if not self.pace_ms:
            self.pace_ms = took_ms / self.timed
            return
        own_ms = max(took_ms - (deals - self.timed_deals) * DEAL_MS, 1)
        pace_ms = own_ms / self.timed
        if pace_ms < self.pace_ms:
            self.pace_ms = max(pace_ms, self.pace_ms / 2)
        else:
            self.pace_ms += (pace_ms - self.pace_ms) / 4

    def returned(self, count: int) -> None:
        """Note records that came back: the time of what is in hand is unknown then."""
        self.held -= count
        self.timed_left = 0

    def lot(self, deals: int) -> int:
        """How many records it may be given at once so that all of a batch are done soonest.

        deals: deliveries if each record, or each member, had one of its own. Lots of n make it
        deals / n deliveries, one after the other, and the last record wait for n - 1 others:
        the sum is least where n * n = deals * DEAL_MS / pace. It has no more than that in hand.
        """
        if not self.pace_ms:
            return 0
        most = int(sqrt(deals * DEAL_MS / self.pace_ms))
        return min(most, deals // SPREAD_MIN) - self.held

    def is_again(self, lost: Member) -> bool:
        """Whether this is a lost member that has come back."""
        return self.session == lost.session or bool(self.identity == lost.identity != "")
