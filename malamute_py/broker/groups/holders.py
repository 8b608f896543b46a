"""Holders: which member has the place of an exclusive group, as the log has it.

Owns the records of the log that name the holder, and the windows of holders from before the broker
began. The holder is the member that an exclusive group's records go to; it has the place. The
window is the time (`hold_ms`) for which the place is kept for a holder whose link was lost. The
rules: a member is told that it is the holder, and given records, once the log durably has it, so
that no restart gives the place to another one; a holder from before a restart has its whole window
to return, since it could not while the broker was away. Source: SPEC.md, section 4.8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from malamute_protocol.commands import Mode
from malamute_py.broker.context import Shard
from malamute_py.broker.groups.group import Group
from malamute_py.broker.groups.member import Member
from malamute_py.broker.groups.reader import GroupReader
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.log.steps import Steps, Then
from malamute_py.broker.structures.timers import Timers
from malamute_py.changelog.records import GroupHeld, Holder

RETRY_MS: Final = 1_000
"""Pause before the log is told once more of a holder that it has refused."""


class Holders:
    """The holders of all exclusive groups of one core.

    Groups and Leases choose a group's holder, and have it logged here before it is given records.
    """

    def __init__(
        self,
        shard: Shard,
        links: Links,
        steps: Steps,
        answers: Answers,
        reader: GroupReader,
        timers: Timers,
    ) -> None:
        self._shard = shard
        self._links = links
        self._steps = steps
        self._answers = answers
        self._reader = reader
        self._timers = timers

    def settle(self, group: Group) -> None:
        """Log which member has the place of an exclusive group, then let that member begin.

        Called whenever the place may have gone to another member, and when the log has answered: a
        change that came meanwhile is logged then.
        """
        if group.gone:
            return
        place = group.place
        # While False, no member is given records.
        group.place_logged = not group.logging and place == group.row.holder
        if group.place_logged:
            self._begin(group)
        elif not group.logging:
            group.logging = True
            change = GroupHeld(group.stream.number, group.name, place)
            logging = Then(partial(self._logged, group, place), partial(self._refused, group))
            self._steps.put([change], logging, memory=group.stream.ring.memory)

    def tell_place_lost(self, group: Group, member: Member) -> None:
        """Tell a member that it is the holder no more, unless it was never told that it is."""
        if group.told is member:
            group.told = None
            self._links.say(member.link, Mode(member.number, live=False, offset=group.holdings.low))

    def _begin(self, group: Group) -> None:
        """Tell the member that has the place, unless it knows, and have records handed to it.

        A holder that is passed over, as its lease has ended, is not told and gets none.
        """
        holder = group.holder
        if holder is not None and holder.aside:
            holder = None
        if holder is not group.told:
            group.told = holder
            if holder is not None:
                self._links.say(
                    holder.link, Mode(holder.number, live=True, offset=group.holdings.low)
                )
        self._reader.wake(group)

    def _logged(self, group: Group, place: Holder | None, end_lsn: int) -> None:
        """Go on with a group's new holder once the log's record of it is durable.

        place: the holder that was logged; None: the place is free, which needs no wait.
        """
        if place is None:
            # No member waits for it: 0 is durable at once, and the next holder can be logged.
            end_lsn = 0
        self._answers.settle(end_lsn, partial(self._durable, group))

    def _durable(self, group: Group, failure: tuple[str, str] | None) -> None:
        """Let the holder begin, or log the next one if the place has changed meanwhile.

        After a failure of the ring, which takes nothing more, the group stands still.
        """
        if failure is None:
            group.logging = False
            self.settle(group)

    def _refused(self, group: Group, code: str, reason: str, retry_ms: int) -> None:
        """Look at the group again in a while, since the log refused its new holder."""
        group.logging = False
        due_ms = self._shard.now_ms + (retry_ms or RETRY_MS)
        self._timers.set(due_ms, partial(self.settle, group))

    # --- over restarts ----------------------------------------------------------------------

    def take_up(self, group: Group, give_up: Callable[[Group, Member | Holder], None]) -> None:
        """Keep a group's place for the holder that the log has, when the broker starts.

        give_up: gives the place to another member if the holder has not returned by then.
        """
        holder = group.row.holder
        if holder is not None:
            group.absent_holder = holder
            # The window begins when the time is known, which is at the first turn.
            self._timers.set(0, partial(self._begin_window, group, holder, give_up))

    def _begin_window(
        self, group: Group, holder: Holder, give_up: Callable[[Group, Member | Holder], None]
    ) -> None:
        """Begin the time within which an absent holder from before a restart may come back."""
        if group.absent_holder is holder:
            group.returns_ms = self._shard.now_ms + holder.hold_ms
            self._timers.set(group.returns_ms, partial(give_up, group, holder))
