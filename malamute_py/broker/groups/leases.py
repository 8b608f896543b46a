"""Leases of a group's records: what a member holds without a word about it goes to others.

Owns the end of leases, and which members are passed over (`Member.aside`). The rules: a lease
begins with the hand-out, and again when the member renews it; the end of a lease is an attempt of
the record; a member whose lease has ended is told so by a MODE, and is given nothing more until it
acknowledges something. Records are `picked` as pages of the group's holdings, each with the mask of
their offsets. Source: SPEC.md, section 4.8.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from malamute_protocol.commands import Mode
from malamute_py.broker.context import Shard
from malamute_py.broker.groups.group import Group
from malamute_py.broker.groups.holders import Holders
from malamute_py.broker.groups.holdings import Picked
from malamute_py.broker.groups.member import Member
from malamute_py.broker.groups.reader import GroupReader
from malamute_py.broker.groups.returns import Returns
from malamute_py.broker.links.links import Links
from malamute_py.broker.structures.bitmaps import low_bit
from malamute_py.broker.structures.timers import Timers

LEASE: Final = "lease"
"""Reason of an attempt that the end of a lease has ended."""


class Leases:
    """The leases of all groups of one core: a timer for each group takes back what is over."""

    def __init__(
        self,
        shard: Shard,
        links: Links,
        holders: Holders,
        reader: GroupReader,
        returns: Returns,
        timers: Timers,
    ) -> None:
        self._shard = shard
        self._links = links
        self._holders = holders
        self._reader = reader
        self._returns = returns
        self._timers = timers

    def of(self, group: Group) -> int:
        """Return the lease of a member that joins a group now; 0: it has none."""
        settings, lease_ms = self._shard.settings, group.row.settings.lease_ms
        if not lease_ms:
            return 0
        return min(max(lease_ms, settings.lease_min_ms), settings.lease_max_ms)

    def watch(self, group: Group) -> None:
        """Set the timer of a group for its next lease's end, in the place of the one before.

        Called when a lease begins that ends before that timer, and after each look.
        """
        if group.gone:
            return
        due_ms = group.holdings.next_lease()
        if due_ms:
            group.lease_due_ms = due_ms
            self._timers.set(due_ms, partial(self._end, group, due_ms))

    def renew(self, group: Group, member: Member, picked: Picked, _: int) -> None:
        """Begin the leases of records anew that a member holds, as its ACK_RECORDS asks for."""
        if not member.lease_ms:
            return
        due_ms = member.lease_end(self._shard.now_ms)
        for page, mask in picked:
            held = mask & page.held.get(member, 0)  # Less what has gone to others.
            if held:
                group.holdings.lease(page, member, held, due_ms)

    def bring_back(self, group: Group, member: Member) -> None:
        """Give records again to a member whose lease had ended: it has acknowledged something."""
        if not member.aside:
            return
        group.bring_back(member)
        if group.kind == "exclusive":
            # It may be the holder again, which the log is told first, and then the member.
            self._holders.settle(group)
        else:
            self._say(group, member, gets=True)
        self._reader.wake(group)

    def _end(self, group: Group, due_ms: int) -> None:
        """Take back the records of a group whose leases are over, and wait for the next end.

        due_ms: the time that this look was planned for.
        """
        if group.gone or group.lease_due_ms != due_ms:
            return  # A sooner look, for a lease that ends before, has taken the place of this.
        group.lease_due_ms = 0
        for member, picked in group.holdings.leases_over(self._shard.now_ms):
            self._take(group, member, picked)
        self.watch(group)

    def _take(self, group: Group, member: Member, picked: Picked) -> None:
        """Take records whose leases are over from a member, and pass the member over.

        They go to other members, where attempts are bounded once the log has the ended attempt.
        """
        before = group.holder
        if group.kind == "exclusive":
            self._holders.tell_place_lost(group, member)
        elif not member.aside:  # Otherwise an earlier lease has ended, and it was told then.
            self._say(group, member, gets=False)
        group.set_aside(member)
        if group.kind == "exclusive" and before is member:
            # An exclusive group's records go to one member only: the next one gets all that this
            # one holds, also what it holds by leases that are not over.
            picked = group.holdings.held_by(member)
        count = sum(mask.bit_count() for _, mask in picked)
        first_page, first_mask = picked[0]
        self._shard.counters["group_leases_ended"] += count
        self._shard.counters["group_records_returned"] += count
        self._shard.event(
            "group_lease_ended", "warning", stream=group.stream.name, group=group.name,
            link=member.link.number, identity=member.identity, records=count,
            offset=first_page.base + low_bit(first_mask),
        )  # fmt: skip
        member.count_returned(count)
        group.withhold_from(member, picked)
        if group.counts_attempts:
            self._returns.log_attempt(group, picked, LEASE)
        else:
            self._reader.back(group, picked, after_ms=0)
        if group.holder is not before:
            self._holders.settle(group)  # The log is told of the next holder.

    def _say(self, group: Group, member: Member, *, gets: bool) -> None:
        """Tell a member by a MODE whether it is given records from now on."""
        self._links.say(member.link, Mode(member.number, live=gets, offset=group.holdings.low))
