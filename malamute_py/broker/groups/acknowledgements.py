"""Acknowledgements of groups: ACK_RECORDS, by which records are done or wanted again.

Owns the changes that an acknowledgement makes. The rules: acknowledgements come in any order, and
the position is the least offset that is not done; a record that was acknowledged and confirmed
never comes again after a restart, and a record that was not acknowledged is not lost.

The records that a command names are `picked`: pages of the group's holdings, each with the mask of
their offsets. While the log is being told of them, they are withheld from all members. A part with
`memory` set is not logged and takes effect at once. An effect is called when its part is taken into
a step, and when the log has the step (`appended`) or refuses it. Source: docs/design.md, Queues and
the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from malamute_protocol.commands import AckRecords, WorkState
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.groups.group import FAILED, Group
from malamute_py.broker.groups.holdings import UNLOGGED, Page, Picked, slots_of
from malamute_py.broker.groups.leases import Leases
from malamute_py.broker.groups.member import Member
from malamute_py.broker.groups.progress import Progress
from malamute_py.broker.groups.reader import GroupReader
from malamute_py.broker.groups.returns import Returns
from malamute_py.broker.links.link import Link
from malamute_py.broker.log.steps import Effect, Part, Then, changing
from malamute_py.changelog.records import GroupDone

REASON_MAX: Final = 300
"""Characters of a member's reason that are kept: records that fail apart keep one each."""
RELEASED: Final = int(WorkState.RELEASED)
"""State of records that a member gives back untried: no attempt is counted."""


class Acknowledgements:
    """The command ACK_RECORDS: `prepare` makes its part of a step, and the effects do the rest."""

    def __init__(
        self,
        shard: Shard,
        reader: GroupReader,
        progress: Progress,
        returns: Returns,
        leases: Leases,
        members: Mapping[Member, Group | None],
    ) -> None:
        """members: the group of each member; None: the group is not there yet."""
        self.shard = shard
        self.reader = reader
        self.progress = progress
        self._returns = returns
        self._leases = leases
        self._members = members

    def prepare(self, link: Link, command: AckRecords, frame: Any = None) -> Part:
        """Prepare the part of an ACK_RECORDS outside ATOMIC. Raises BrokerRefused.

        With a state, or an `again_ms` from 0 on, the records are not done: they failed, are wanted
        again after `again_ms`, or the member renews its leases. An acknowledgement without a
        tracker is logged a little later, with others that have come by then: a restart before that
        brings the records again.
        """
        group, member, picked = self._picked(link, command)
        if command.again_ms >= 0 or command.state:
            # A delay is bounded: no member can end it, and one without end would hold the group up.
            after_ms = max(0, min(command.again_ms, self.shard.settings.lease_max_ms))
            if command.state == WorkState.FAILED:
                reason = command.reason[:REASON_MAX]
                why = f"{FAILED}: {reason}" if reason else FAILED
                return self._logged_return_part(group, member, picked, after_ms=0, why=why)
            if command.state == WorkState.RENEWED:
                renewing = Then(partial(self._leases.renew, group, member, picked))
                return Part(effects=[renewing], memory=True, level=group.stream.level)
            if command.state not in (0, RELEASED):
                raise BrokerRefused("unsupported", f"no state {command.state} of records")
            # Wanted again (state 0) counts as an attempt; RELEASED does not.
            if group.counts_attempts and not command.state:
                return self._logged_return_part(group, member, picked, after_ms, "returned")
            return self._unlogged_return_part(group, member, picked, after_ms)
        if command.tracker:
            return self._done_part(group, member, picked)
        return Part(effects=[_Acknowledging(self, group, member, picked)], memory=True)

    def prepare_together(self, link: Link, command: AckRecords, frame: Any = None) -> Part:
        """Prepare the part of an ACK_RECORDS within an ATOMIC, which may only say `done`.

        Raises BrokerRefused.
        """
        group, member, picked = self._picked(link, command)
        if command.again_ms >= 0 or command.state:
            raise BrokerRefused(
                "unsupported", "a step cannot want records again: a step is logged, and that is not"
            )
        return self._done_part(group, member, picked)

    def _picked(self, link: Link, command: AckRecords) -> tuple[Group, Member, Picked]:
        """Find the records that an acknowledgement names, all of which the member must hold.

        A member that was passed over has said something, and is given records again. Raises
        BrokerRefused.
        """
        member = link.receivers.get(command.subscription)
        if not isinstance(member, Member):
            raise BrokerRefused(
                "unknown_subscription", f"no membership {command.subscription} on this link"
            )
        group = self._members.get(member)
        picked = None
        if group is not None:
            # The holder of an exclusive group that is back after a lost link may acknowledge what
            # it had: that waits again, and counts as held. Of one that is passed over, only the
            # word that records are done is of use: to fail or renew what waits again does nothing.
            is_done = command.again_ms < 0 and not command.state
            also_waiting = member is group.holder and (is_done or not member.aside)
            picked = group.holdings.pick(member, command.ranges, also_waiting)
            if member.aside:
                # Its leases had ended, and it is alive. This comes last: it may get the same
                # records again, which this does not acknowledge.
                self._leases.bring_back(group, member)
        if group is None or picked is None:
            raise BrokerRefused(
                "not_held", "this member does not hold all of these records (any more)"
            )
        return group, member, picked

    def _done_part(self, group: Group, member: Member, picked: Picked) -> Part:
        """Return a part by which the log has records as done: for an acknowledgement to confirm."""
        stream = group.stream
        ranges = group.holdings.ranges(picked, logged=group.row.next)
        change = GroupDone(stream.number, group.name, ranges, self.shard.epoch)
        memory = self.shard.queues if stream.ring.memory else None
        finishing = _Finishing(self, group, member, picked)
        return changing([change], [finishing], memory=memory, level=stream.level)

    def done(self, group: Group, picked: Picked) -> None:
        """Note that withheld records are done, and give the group a turn.

        Called when the log has that, or at once for an acknowledgement without a tracker. picked: a
        mask may be 0, as of a page whose records had all left the member's hands.
        """
        group.acknowledged([(page, mask) for page, mask in picked if mask])
        group.moved_ms = self.shard.now_ms
        self.shard.counters["group_records_done"] += sum(mask.bit_count() for _, mask in picked)
        group.holdings.tidy()
        # The window has room again, or a slot has moved.
        self.reader.wake(group)

    def _logged_return_part(
        self, group: Group, member: Member, picked: Picked, after_ms: int, why: str
    ) -> Part:
        """Return a part by which records wait again, and the log counts an ended attempt of each.

        Taken for records that failed, and for returned ones where attempts are counted. why: how
        the attempt ended. after_ms: pause before the records are handed out again.
        """
        stream = group.stream
        # Records that a holder had before it was lost may wait already; they go on to wait. If all
        # do, the change names none, and its confirm has the level that the command asks for.
        held = [
            (page, mask & page.held.get(member, 0)) for page, mask in picked
            if mask & page.held.get(member, 0)
        ]  # fmt: skip
        memory = self.shard.queues if stream.ring.memory else None
        returning = _Returning(self, group, member, held, after_ms=after_ms)
        change = self._returns.change(group, held, why)
        return changing([change], [returning], memory=memory, level=stream.level)

    def give_back(self, group: Group, picked: Picked, after_ms: int) -> None:
        """Let withheld records wait again after a pause, but at once those that are dead letters.

        Called when the log has the attempt that ended: it may have been the last one.
        """
        dying: Picked = []
        late: Picked = []
        for page, mask in picked:
            rows = 0
            for _, some in group.dying_of(page.base, mask):
                rows |= some
            if rows:
                dying.append((page, rows))
            if mask ^ rows:
                late.append((page, mask ^ rows))
        self.reader.back(group, late, after_ms)
        if dying:
            self.reader.back(group, dying, after_ms=0)

    def _unlogged_return_part(
        self, group: Group, member: Member, picked: Picked, after_ms: int
    ) -> Part:
        """Return a part by which records wait again, at once or after a pause; nothing is logged.

        Taken for records that are released, and where the group does not count attempts.
        """
        wanting = Then(partial(self._return_unlogged, group, member, picked, after_ms))
        return Part(effects=[wanting], memory=True, level=group.stream.level)

    def _return_unlogged(
        self, group: Group, member: Member, picked: Picked, after_ms: int, _: int
    ) -> None:
        """Let records that a member has given back wait again, at once or after a pause.

        The log is not told, for no attempt is counted. after_ms: the pause. The last argument is
        the LSN that an effect is called with: 0, as nothing is logged.
        """
        holdings = group.holdings
        late: Picked = []
        for page, mask in picked:
            # Records that a holder had before it was lost may wait already; they go on to wait.
            held = mask & page.held.get(member, 0)
            if not held:
                continue
            holdings.unhand(page, member, held)
            member.count_returned(held.bit_count())
            self.shard.counters["group_records_returned"] += held.bit_count()
            if after_ms:
                holdings.delay(page, held)
                late.append((page, held))
                if group.slots is not None:
                    group.slots.delay(slots_of(page, held))
                continue
            holdings.wait(page, held)
            if group.slots is not None:
                group.slots.back(slots_of(page, held))
        if late:
            self.reader.put_off(group, late, after_ms)
        self.reader.drop_gone(group)
        self.reader.wake(group)


class _Acknowledging(Effect):
    """Effect of an acknowledgement without a tracker: done at once, logged later with others.

    A restart before that brings its records again.
    """

    acknowledgements: Acknowledgements
    group: Group
    member: Member
    picked: Picked

    def _withhold(self, page: Page, mask: int) -> tuple[int, int]:
        """Withhold rows of a page from all members; returns those that (were held, waited).

        Rows that wait are those of a holder that came back: see Acknowledgements._picked().
        """
        group, holdings = self.group, self.group.holdings
        held, waited = holdings.unhand(page, self.member, mask)
        self.member.acknowledged(
            held.bit_count(), self.acknowledgements.shard.now_ms, group.deliveries
        )
        holdings.withhold(page, held | waited)
        return held, waited

    def appended(self, part: Part, end_lsn: int) -> None:
        """Take the records as done at once; the log is told later, with others (flush_ms)."""
        for page, mask in self.picked:
            self._withhold(page, mask)
            page.logging = UNLOGGED
        self.acknowledgements.done(self.group, self.picked)
        self.acknowledgements.progress.flush_later(self.group)


class _Finishing(_Acknowledging):
    """Effect of an acknowledgement that is confirmed: the records are done once the log has it."""

    withheld: Sequence[tuple[Page, int, int]] = ()
    """Pages, each with the rows that the member held and the rows that waited."""

    def taken(self, part: Part) -> None:
        """Withhold the records, in the member's hands or waiting, until the log answers."""
        self.withheld = [(page, *self._withhold(page, mask)) for page, mask in self.picked]

    def appended(self, part: Part, end_lsn: int) -> None:
        """Count the records as done, and have the group's position logged if it moved."""
        group = self.group
        self.acknowledgements.done(
            group, [(page, held | waited) for page, held, waited in self.withheld]
        )
        if group.has_unlogged:
            self.acknowledgements.progress.flush_later(group)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Let the records be held or wait as before, since the log did not take their end."""
        group, member = self.group, self.member
        holdings, now_ms = group.holdings, self.acknowledgements.shard.now_ms
        # A member that has left holds nothing, unless its place in an exclusive group is kept.
        may_hold = not member.ended or group.absent_holder is member
        for page, held, waited in self.withheld:
            if waited:
                holdings.restore(page, waited, member=None, now_ms=now_ms)
            if not held:
                continue
            holdings.restore(page, held, member if may_hold else None, now_ms)
            if may_hold:
                member.held += held.bit_count()
            elif group.slots is not None:
                # They wait for another member; the slots have counted them as held until now.
                group.slots.back(slots_of(page, held))
        self.acknowledgements.reader.wake(group)


class _Returning(_Finishing):
    """Effect of records that are given back: they wait again once the log has the attempt."""

    after_ms: int = 0

    def taken(self, part: Part) -> None:
        """Take the records from the member's hands; no member gets them until the log answers."""
        holdings, member = self.group.holdings, self.member
        withheld: list[tuple[Page, int, int]] = []
        for page, mask in self.picked:
            held, _ = holdings.unhand(page, member, mask)
            member.count_returned(held.bit_count())
            holdings.withhold(page, held)
            if held and self.group.slots is not None:
                self.group.slots.hold_back(slots_of(page, held))
            withheld.append((page, held, 0))  # Rows that waited already are not in `picked`.
        self.withheld = withheld

    def appended(self, part: Part, end_lsn: int) -> None:
        """Let the records wait again, or become dead letters if their attempts are used up."""
        self.acknowledgements.shard.counters["group_records_returned"] += sum(
            held.bit_count() for _, held, _ in self.withheld
        )
        self.acknowledgements.give_back(
            self.group, [(page, held) for page, held, _ in self.withheld], self.after_ms
        )
