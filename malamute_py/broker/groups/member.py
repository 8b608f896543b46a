"""Members: the records that each has in hand, and how quick each has shown to be.

Owns the facts of one member, and the number of records worth giving it at once, its lot. The rule:
where it does not pay to give each member one record, a member gets at most what it has shown to be
quick with. Source: docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Final

from malamute_py.broker.groups.slots import NOBODY
from malamute_py.broker.links.link import Link, Owner, Receiver
from malamute_py.changelog.records import Holder

if TYPE_CHECKING:
    from malamute_protocol.commands import JoinGroup

DEAL_MS: Final = 0.1
"""Time of the broker for one delivery and its acknowledgement: 20 to 40 us in the core and some 50
us a message in the transport."""
SPREAD_MIN: Final = 32
"""Members among whom a batch is spread however quick they are: records are not all alike."""

LEASE_STEPS: Final = 3
"""Leases end at multiples of an eighth of their length: `lease_ms >> 3`."""


class Member(Receiver):
    """One subscription of one link that takes part in a group, with counts of its records."""

    __slots__ = (
        "aside",
        "filed",
        "held",
        "hold_ms",
        "identity",
        "joined",
        "joined_ms",
        "lease_ms",
        "pace_ms",
        "pattern_bytes",
        "place",
        "served",
        "session",
        "timed",
        "timed_deliveries",
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
        """Time for which its place is kept as the holder once its link was lost."""
        self.joined_ms = now_ms
        self.pattern_bytes = 0
        self.lease_ms = 0
        """Time for which it holds a record without a word about it; 0: while its link lives."""
        self.aside = False
        """Whether it is passed over: a lease of it has ended, and it has said nothing since."""
        self.held = 0
        """Number of records that it has and has not acknowledged."""
        self.served = 0
        """Number of the group's deliveries when it was served last."""
        self.joined = 0
        """Number of the members that had ever joined the group when it did, with itself."""
        self.filed = False
        """Whether the member stands among FreeMembers, who may be given something."""
        self.place = NOBODY
        """Its number in the arrays of a keyed group."""
        self.pace_ms = 0.0
        """Milliseconds that a recent record took, by a measurement of several; 0: not known yet."""
        self.timed = self.timed_left = self.timed_ms = self.timed_deliveries = 0
        """The measurement of its pace under way: records in hand at its start, those of them that
        are left (0: none is under way), the time of its start, and the group's deliveries until
        then."""

    @property
    def able(self) -> bool:
        """Whether it may be given something: it has credit, its link room; it is not `aside`."""
        return (
            self.left_records > 0 and self.left_bytes > 0 and self.link.room > 0 and not self.aside
        )

    def lease_end(self, now_ms: int) -> int:
        """Return when a lease ends that begins now.

        It is rounded up by at most an eighth of a lease, so that many leases share one time.
        """
        step_ms = max(1, self.lease_ms >> LEASE_STEPS)
        return -(-(now_ms + self.lease_ms) // step_ms) * step_ms  # Negated: it rounds up.

    # --- how quick it is ----------------------------------------------------------------------

    def handed(self, count: int, now_ms: int, deliveries: int) -> None:
        """Count records that the member was given; begin to measure its pace unless that goes on.

        Called with each delivery to it. deliveries: number of the group's deliveries before the
        batch that the records are of.
        """
        self.held += count
        if not self.timed_left:
            self.timed = self.timed_left = self.held
            self.timed_ms, self.timed_deliveries = now_ms, deliveries

    def acknowledged(self, count: int, now_ms: int, deliveries: int) -> None:
        """Note that held records are done; the last of the timed ones gives a new pace.

        deliveries: number of the group's deliveries until now. The broker's time for those since
        the hand-out is not the member's, and is subtracted: a thousand take 100 ms, and no member
        would ever be quick if they counted. Time and subtraction are estimates. So one
        measurement halves the pace at most; it raises the pace by a quarter of the difference only,
        for it is often too long by what the machine did beside. If lots get too large, fewer
        deliveries are subtracted, and the pace corrects itself.
        """
        self.held -= count
        if not self.timed_left:
            return
        self.timed_left -= count
        if self.timed_left > 0:
            return
        self.timed_left = 0
        # The clock counts whole milliseconds: almost one more may have passed.
        took_ms = now_ms - self.timed_ms + 1
        if not self.pace_ms:
            self.pace_ms = took_ms / self.timed
            return
        member_ms = max(took_ms - (deliveries - self.timed_deliveries) * DEAL_MS, 1)
        pace_ms = member_ms / self.timed
        if pace_ms < self.pace_ms:
            self.pace_ms = max(pace_ms, self.pace_ms / 2)
        else:
            self.pace_ms += (pace_ms - self.pace_ms) / 4

    def count_returned(self, count: int) -> None:
        """Subtract records that came back undone; the measurement of its pace has no result."""
        self.held -= count
        self.timed_left = 0

    def lot(self, most_deliveries: int) -> int:
        """Number of records to give it at once so that all of a batch are done soonest.

        most_deliveries: if each record, or each member, had one of its own. Lots of n make that
        d / n deliveries (d: most_deliveries), one after the other, and the last record of a lot
        waits for n - 1 others: d / n * DEAL_MS + n * pace is least for n * n = d * DEAL_MS / pace.
        What the member has in hand already counts towards it. 0 or less: none beyond its share.
        """
        if not self.pace_ms:
            return 0
        most = int(sqrt(most_deliveries * DEAL_MS / self.pace_ms))
        return min(most, most_deliveries // SPREAD_MIN) - self.held

    def is_again(self, lost: Member | Holder) -> bool:
        """Whether a lost holder has come back as this member: the same session, or identity."""
        return self.session == lost.session or bool(self.identity == lost.identity != "")
