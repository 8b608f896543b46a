"""All groups that a session has joined: their acknowledgements, leases and ends.

Owns which memberships have leases to be renewed, and which are to be left. The rule: a member whose
reader is gone leaves when the broker has confirmed what it acknowledged, not before.
Source: SPEC.md, section 4.8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from malamute_protocol.commands import Unsubscribe
from malamute_protocol.errors import ConnectionLost
from malamute_py.client.session.acknowledgements import Acknowledging, Acks
from malamute_py.client.session.events import Event
from malamute_py.client.session.group_options import GroupOptions
from malamute_py.client.session.memberships import Membership
from malamute_py.client.session.outgoing import CommandSink, Trackers
from malamute_py.client.session.receiver import Opened


class Memberships(Acknowledging):
    """All memberships of a session, and their acknowledgements."""

    def __init__(
        self,
        trackers: Trackers,
        emit: Callable[[Event], None],
        opening: Callable[[Callable[[int], Membership]], Membership],
        ending: Callable[[Opened], None],
        consumed: Callable[[Opened], bool],
        arrived: Callable[[Opened], None],
    ) -> None:
        """opening, ending: the session's open() and end() of what has a number.

        consumed: has CREDIT sent, if it is due. arrived: has a reader look at what has come.
        """
        super().__init__(Acks(trackers, self.told), emit)
        self.not_held = 0
        """Acknowledgements that came too late."""
        self._open = opening
        self._end = ending
        self._consumed = consumed
        self._arrived = arrived
        self._leaving: Final[dict[Membership, None]] = {}
        self._leased: Final[dict[Membership, None]] = {}
        """Memberships with a lease, which is renewed."""
        self.queues: Final = (self._leaving, self._leased, *self.acks.queues)
        """While all of them are empty, take() has nothing to do."""

    def join(self, asked: GroupOptions) -> Membership:
        """Become a member. Raises what ended the session."""
        return self._open(lambda number: Membership(number, asked, self))

    def leave(self, membership: Membership) -> None:
        """End a membership whose reader is gone: unacknowledged records go to other members."""
        membership.leaving = True
        membership.discard()
        if self._linked and not membership.ended and not membership.left_out:
            self._leaving[membership] = None
        elif not membership.ended:  # the broker has no member to take leave of
            self._end(membership)
        self._arrived(membership)  # a caller that waits for a record stops

    def note_lease(self, membership: Membership) -> None:
        """Renew the leases of a membership, or no longer, by the lease that SUBSCRIBED told."""
        if membership.lease_ms:
            self._leased[membership] = None
        else:
            self._leased.pop(membership, None)

    def found(self, membership: Membership) -> None:
        """Wake the reader of a membership: what it may take was in doubt before."""
        self._arrived(membership)

    def give_credit(self, membership: Membership) -> None:
        """Give credit for records that a membership has in hand no longer."""
        self._consumed(membership)

    def over(self, membership: Membership) -> None:
        """Forget a membership that has ended; callers that wait for it get its error."""
        self._leaving.pop(membership, None)
        self._leased.pop(membership, None)
        error = membership.error or ConnectionLost("the membership was closed")
        self.acks.forget(membership, error)

    # --- outgoing --------------------------------------------------------------------------------

    def link_down(self) -> None:
        """Take note that the link has ended, and with it the memberships that were to be left."""
        super().link_down()
        for membership in list(self._leaving):
            self._end(membership)

    def take(self, now_ms: int, out: CommandSink) -> bool:
        """Acknowledge, renew leases, leave groups that no caller reads."""
        self.acks.take(now_ms, out)
        if self._leased:
            # Afterwards: a renewal that comes too late has the broker hand the same records out
            # again, and an acknowledgement after it would be taken for that hand-out.
            for membership in self._leased:
                membership.renew_all(now_ms)
            self.acks.take(now_ms, out)
        for membership in list(self._leaving):
            if not membership.settling:
                # Not before: ENDED would overtake the confirms, which wait for the disk.
                del self._leaving[membership]
                membership.ending = True
                out.put(Unsubscribe(membership.number), None)
        return True

    def next_wake(self) -> int | None:
        """Latest time of the next take(), for renewals of programs that go on; None: no need."""
        at = super().next_wake()
        for membership in self._leased:
            due_ms = membership.renew_at_ms
            if due_ms and membership.progressed and (at is None or due_ms < at):
                at = due_ms
        return at
