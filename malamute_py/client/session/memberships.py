"""Membership of a group: what the broker handed to this member, and what it acknowledged.

Owns the records in hand, the credit, and what is acknowledged of them. The rules: credit comes back
as records are acknowledged, so that a member that is slow is given less; a record that was handed
over is handed over once, also when the broker gives it to this member again after a reconnect;
nothing is acknowledged that the broker does not take for ours. Source: SPEC.md, section 4.8.

Words: records are named by their offsets; a range is (first, end), without `end`. A record is in
hand from its delivery until it is acknowledged or lent to an atomic step. A member is passed over
once a lease of its records has ended: it is given none until it says a word (ACK_RECORDS).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, Final, Protocol

from malamute_protocol.batch import Batch
from malamute_protocol.commands import (
    AckRecords,
    Cover,
    Deliver,
    Gap,
    JoinGroup,
    Mode,
    Rewound,
    Schema,
    Subscribed,
)
from malamute_protocol.errors import (
    BrokerRefused,
    MalamuteError,
    RemoteProtocolError,
)
from malamute_protocol.limits import Limits
from malamute_protocol.schema import Schemas
from malamute_py.client.session.acknowledgements import (
    Ack,
    AckForm,
    Acks,
    Range,
    ranges_of_numbers,
)
from malamute_py.client.session.doubts import Doubts, size_of, without
from malamute_py.client.session.group_options import AGAIN, DONE, RENEWED, GroupOptions
from malamute_py.client.session.held_batches import HeldBatch
from malamute_py.client.session.letters import chosen, ranges_of, rows_of
from malamute_py.client.session.receiver import AWAY_MAX
from malamute_py.client.session.standing import Standing
from malamute_py.client.session.subscription import (
    GapNotice,
    Notice,
    PassedOverNotice,
    RewoundNotice,
    with_version,
)
from malamute_py.client.session.unreadable import Unreadable, taken_in
from malamute_py.client.session.warnings import Warnings

_RENEWALS: Final = 3
"""Renewals of a lease within its time."""


class MembershipOwner(Protocol):
    """The part of a session that a membership calls (joined_groups.Memberships)."""

    acks: Acks
    warnings: Warnings
    not_held: int
    """Acknowledgements that came too late."""

    def told(self, token: Any, outcome: Any) -> None:
        """Tell a caller what became of its acknowledgement: True, all was taken; False, some not.

        A membership calls it with True, or with None for False, of what needs no answer of the
        broker. What the broker answers comes from `acks`: a Confirm is True, a refusal `not_held`
        False; another error goes on to the caller.
        """

    def give_credit(self, membership: Membership) -> None:
        """Give credit for records that a membership has in hand no longer."""

    def found(self, membership: Membership) -> None:
        """Wake the reader of a membership: what it may take was in doubt before."""

    def note_lease(self, membership: Membership) -> None:
        """Renew the leases of a membership, or no longer, by the lease that SUBSCRIBED told."""

    def over(self, membership: Membership) -> None:
        """Forget a membership that has ended."""


class Membership(Standing):
    """One member of one group, over all links."""

    def __init__(self, number: int, asked: GroupOptions, memberships: MembershipOwner) -> None:
        super().__init__(number, asked.credit_records, asked.credit_bytes)
        self.asked = asked
        self.queue: deque[HeldBatch | Notice] = deque()
        """Batches and notices that no caller has taken yet."""
        self.in_hand: set[int] = set()
        """Offsets that were delivered on this link, and neither acknowledged nor lent."""
        self.stream_uuid = b""
        self.lease_ms = 0
        """Time for which it has a record without a word about it; 0: while its link lives."""
        self.renew_at_ms = 0
        self._unplanned = False
        """Whether its program has asked for records since the link was last told when to wake."""
        self.schemas: Schemas | None = None
        """Versions of the stream's declared schema; None: it has none, or is not known yet."""
        self.tail = 0
        """Tail of the stream when the broker accepted the membership."""
        self._gets = asked.kind != "exclusive"
        """Whether it is given records; a member of an exclusive group is told when it is."""
        self.lost_lease = False
        """Whether a lease of its records has ended since its program asked for some last."""
        self.leaving = False
        """Whether no caller reads it: it ends once all that was acknowledged is confirmed."""
        self._memberships = memberships
        self._lent: set[int] = set()
        """In a step that is not answered."""
        self._acked: set[int] = set()
        """Acknowledged, and not yet confirmed by the broker."""
        self._seen: tuple[int, int] = (0, 0)
        """(epoch, offset) after the newest record that was delivered; JOIN_GROUP of a later link
        tells it, so that the broker can say what a power loss took back meanwhile."""
        self._rewinds: list[tuple[int, int]] = []
        """(epoch, offset): of that epoch and those before it, records from there on are void."""
        self._of_earlier_links: dict[int, None] = {}
        """With the reader since an earlier link; the broker may have given them to others."""
        self._doubts: Final = Doubts()
        """Batches that no caller had taken when a lease ended."""
        self._dropped: tuple[int, int] | None = None
        """Range of one record of an exclusive group that was dropped when a lease ended. A word of
        it has the broker give this member records again."""
        self._asks = False
        """Whether take() has asked for the records that were dropped, or to join again."""
        self._waiting: Final[set[int]] = set()
        """Offsets in the queue, of a group with leases; the program may have them as well."""
        self._queued_bytes = 0

    # --- the reader's side -------------------------------------------------------------------

    def take(self) -> HeldBatch | Notice | None:
        """The next records, or a notice; None: none yet."""
        # The program goes on after a pause, so that a renewal is due again: the link was last told
        # no time for one.
        self._unplanned |= not self.progressed
        self.lost_lease = False
        self._asks |= self.note_progress()
        if self._doubts and not self._doubts.asked and self.active:
            # A renewal tells which of them are ours still: acked() hands those over.
            self._doubts.asked = True
            self._memberships.acks.add(self, RENEWED, self._doubts.ranges())
        if self._dropped is not None and self.passed_over and self.active:
            # A word of this member, for which the broker gives it records again.
            self._memberships.acks.add(self, RENEWED, [self._dropped])
            self._dropped = None
            self._asks = True
        self.waits = not self.queue
        if self.waits:
            return None
        item = self.queue.popleft()
        if isinstance(item, HeldBatch):
            self._queued_bytes -= item.stamp.size
            if self._waiting:
                self._waiting.difference_update(item.numbers)
        return item

    def give_up(self, offsets: Iterable[int]) -> list[int]:
        """Take records out of hand that are acknowledged now; returns those that were in hand."""
        mine = []
        for offset in offsets:
            if offset in self.in_hand:
                self.in_hand.discard(offset)
                mine.append(offset)
        self._drop_copies(mine)
        return mine

    def doubt(self, batches: list[HeldBatch]) -> None:
        """Keep batches that others may have by now until the broker has said whose they are.

        Called when a lease has ended: for what waits here, and for what the reader has at hand.
        """
        # What was delivered again waits in the queue, and is ours.
        rest = [batch.part(self._waiting, inside=False) for batch in batches]
        left = [batch for batch in rest if batch is not None]
        if self.asked.kind != "exclusive":
            self._doubts.add(left)
            self._count_bytes()
            return
        for batch in left:
            # The next holder of the group's place gets all of them.
            self.in_hand.difference_update(batch.numbers)
            if self.passed_over:  # take() renews one of them, to be given records again
                first = batch.numbers[0]
                self._dropped = first, first + 1

    def ack(self, offsets: Sequence[int], form: AckForm = DONE, token: Any = None) -> None:
        """Acknowledge records: they are done, or the form says what else is to become of them.

        token: gets True when the broker has confirmed all of them, else False: what it does not
        take for ours, because the link went, it gives to some member again.
        """
        if self.ended:
            # Nothing would ever be said of them, and nothing be idle any more.
            if token is not None:
                self._memberships.told(token, None)
            return
        self.note_progress()
        mine = self.give_up(offsets)
        if form is DONE:
            # Should the broker give them to us again, they are done already.
            self._acked.update(offset for offset in offsets if offset in self._of_earlier_links)
            self._acked.update(mine)
        else:
            # Should the broker give them to us again, the reader sees them again.
            for offset in offsets:
                self._of_earlier_links.pop(offset, None)
        self._say(form, mine, offsets, token)
        self._memberships.give_credit(self)

    def renew(self, offsets: Sequence[int], token: Any) -> None:
        """Begin the leases of records anew. token: gets True, or False if some are not held.

        A program that does so goes on: what it is still to get keeps its leases, too.
        """
        self.note_progress()
        # Of a membership that has ended nothing would ever be said, as in ack().
        mine = [offset for offset in offsets if offset in self.in_hand and not self.ended]
        self._say(RENEWED, mine, offsets, token)

    def _say(self, form: AckForm, mine: list[int], offsets: Sequence[int], token: Any) -> None:
        """Gather an acknowledgement of those records of a call that are in hand (`mine`).

        token: gets False at once where that is not all of them; of no records at all it is done.
        """
        whole = len(mine) == len(offsets)
        if mine:
            ranges = ranges_of_numbers(mine)
            self._memberships.acks.add(self, form, ranges, token if whole else None)
        if token is not None and not (mine and whole):
            self._memberships.told(token, whole or None)

    def renew_all(self, now_ms: int) -> None:
        """Begin all leases anew, if that is due and the program goes on.

        Not while the member is passed over: the broker would refuse it, take that for a word of
        the program, and hand it the same records again.
        """
        self._unplanned = self._asks = False  # this is the turn that these have the link woken for
        if not self.in_hand or self.passed_over:
            self.renew_at_ms = 0
        elif not self.renew_at_ms:
            self.renew_at_ms = now_ms + self.next_renewal_ms
            self.progressed = False
        elif self.progressed and self.active and self.renew_at_ms <= now_ms:
            self._memberships.acks.add(self, RENEWED, ranges_of_numbers(self.in_hand))
            self.renew_at_ms = now_ms + self.next_renewal_ms
            self.progressed = False

    @property
    def next_renewal_ms(self) -> int:
        """Milliseconds between two renewals."""
        return max(1, self.lease_ms // _RENEWALS)

    @property
    def wakes_link(self) -> bool:
        """Whether take() has given the link something to do, so that its shell is to wake it.

        The broker is to say which records are still the member's, or the program goes on after a
        pause, so that its renewals have a time again (_unplanned).
        """
        return bool(self._doubts) or self._asks or (self._unplanned and self.renew_at_ms > 0)

    def discard(self) -> None:
        """Drop what waits, as the link or the reader has gone: the broker gives it to others."""
        self.queue.clear()
        self._doubts.clear()
        self._waiting.clear()
        self._queued_bytes = 0

    def void_since(self, uuid: bytes, epoch: int) -> float:
        """Offset from which on records of a stream and an epoch were rewound; inf: none were."""
        if uuid != self.stream_uuid:
            return 0  # they are of a former stream of the name: all are void
        return min((to for last_epoch, to in self._rewinds if epoch <= last_epoch), default=inf)

    @property
    def settling(self) -> bool:
        """Whether acknowledgements or steps of it are under way on this link: leaving waits."""
        return bool(self._lent) or any(
            offset not in self._of_earlier_links for offset in self._acked
        )

    # --- steps -------------------------------------------------------------------------------

    def lend(self, numbers: list[int]) -> None:
        """Give records in hand to an atomic step, which alone acknowledges them.

        Raises BrokerRefused `not_held`: nothing was lent. What the reader has since an earlier
        link is then shown to it again, should the broker hand it out to this member.
        """
        if self.left_out:
            # This call has the member join the link again, which take() wakes the link for: the
            # step does not leave where it is refused below.
            self._asks = self.note_progress()
        if not self.in_hand.issuperset(numbers):
            for number in numbers:
                self._of_earlier_links.pop(number, None)
            raise BrokerRefused(
                "not_held", "not in hand: acknowledged already, or the link was lost since"
            )
        self.in_hand.difference_update(numbers)
        self._drop_copies(numbers)
        self._lent.update(numbers)

    def settled(self, numbers: list[int]) -> None:
        """Take note that an atomic step with these acknowledgements was taken."""
        self._lent.difference_update(numbers)
        # Records that came again on a later link, before the step was answered, are done, too.
        self.in_hand.difference_update(numbers)
        for number in numbers:
            self._of_earlier_links.pop(number, None)
        self._memberships.give_credit(self)

    def regained(self, numbers: list[int]) -> None:
        """Take records back from a step that was refused: those of this link are in hand again."""
        mine = self._lent.intersection(numbers)
        self._lent -= mine
        self.in_hand |= mine
        for number in numbers:
            # A record of an earlier link is shown to the reader again if it comes again.
            self._of_earlier_links.pop(number, None)

    def lost_to_others(self, numbers: list[int]) -> None:
        """Do nothing: an acknowledgement of each, or the link's end, tells whose they are."""

    def give_back(self, numbers: list[int]) -> None:
        """Have the broker hand out records again that came back from a step whose caller has gone.

        No program knows that they are in hand again: see Step.give_back_untold.
        """
        mine = self.give_up(numbers)
        if mine and not self.ended:
            self._memberships.acks.add(self, AGAIN, ranges_of_numbers(mine))
            self._memberships.give_credit(self)

    # --- acknowledgements --------------------------------------------------------------------

    @property
    def question(self) -> AckForm | None:
        """Return a renewal, which counts no attempt, as the question that Acks may put.

        None: its records have no leases, so that none can have come again.
        """
        return RENEWED if self.lease_ms else None

    def ack_command(self, form: AckForm, ranges: list[Range], tracker: int) -> AckRecords:
        """Return ACK_RECORDS for these offsets."""
        return AckRecords(self.number, ranges, tracker, 0, form.again_ms, form.state, form.reason)

    def acked(self, form: AckForm, ranges: list[Range]) -> None:
        """Take note that the broker has confirmed an acknowledgement or a renewal of these records.

        Acknowledged ones are forgotten, and copies of them that came again meanwhile are dropped;
        ones in doubt that were renewed go to the caller. The credit of all is given back.
        """
        if form == DONE:
            for first, end in ranges:
                self._acked.difference_update(range(first, end))
            if self.lease_ms:
                # Those in hand came again, as their lease had ended, before they were done.
                again = set().union(*(self.in_hand.intersection(range(*each)) for each in ranges))
                self.in_hand -= again
                self._drop_queued(again)
        elif form == RENEWED and self._doubts:
            for batch in self._doubts.take(ranges):
                self.queue.append(batch)
                self._waiting.update(batch.numbers)
            # A part of a batch counts with the whole batch's bytes.
            self._count_bytes()
            self._memberships.found(self)
        self._memberships.give_credit(self)

    def _drop_copies(self, offsets: Iterable[int]) -> None:
        """Drop the untaken copies of records that the reader is done with, or that come again."""
        if self._doubts:
            self._doubts.drop(offsets)
            self._count_bytes()
        if self._waiting:
            self._drop_queued(self._waiting.intersection(offsets))

    def _drop_queued(self, offsets: set[int]) -> None:
        """Drop records from the queue, where they are copies that no caller has taken."""
        if offsets:
            self._waiting.difference_update(offsets)
            self.queue = without(self.queue, offsets)
            self._count_bytes()

    def _count_bytes(self) -> None:
        """Count anew the bytes that no caller has taken, which take credit."""
        self._queued_bytes = size_of(self.queue) + self._doubts.size

    def not_acked(self, form: AckForm, number: int, error: MalamuteError) -> None:
        """Warn of a record that was acknowledged when another member had it already.

        After a refused renewal the record is another's: it is dropped, and no warning is due.
        """
        self._acked.discard(number)
        if form.state == RENEWED.state:
            self.in_hand.discard(number)
            if self._doubts:
                self._doubts.drop((number,))
                self._count_bytes()
            self._memberships.give_credit(self)
            return
        self._memberships.not_held += 1
        self._memberships.warnings.add(
            "acknowledged too late",
            f"record {number} of group {self.asked.group} of {self.asked.stream}: {error}",
        )

    def takes_default(self) -> bool:
        """Return False: an ACK_RECORDS asks for no level."""
        return False

    def ack_lost(self, ack: Ack) -> bool:
        """Tell the callers (None) that it came too late; return False: it is sent no more.

        Should the broker hand the record to this member again, it is acknowledged then.
        """
        ack.acks.settle(ack, None)
        return False

    # --- commands to the broker --------------------------------------------------------------

    def open(self) -> JoinGroup:
        """Return JOIN_GROUP for a new link, with what was seen of the stream, and new credit."""
        asked = self.asked
        self._begin_credit()
        seen_epoch, seen_next = self._seen
        return JoinGroup(
            self.number,
            asked.stream,
            asked.group,
            asked.pattern,
            asked.kind,
            asked.start,
            self._granted_records,
            self._granted_bytes,
            asked.hold_ms,
            asked.visibility,
            (seen_next, seen_epoch, self.stream_uuid) if seen_next else None,
            asked.create,
            asked.settings,
        )

    def _credit_limits(self) -> tuple[int, int]:
        """Return how many records and bytes, in all, the broker may have sent on this link."""
        held = len(self.in_hand) + len(self._lent)
        return (
            self._received_records + self.asked.credit_records - held,
            self._received_bytes + self.asked.credit_bytes - self._queued_bytes,
        )

    # --- commands from the broker ------------------------------------------------------------

    def receive(self, command: Any, frames: Sequence[Any], limits: Limits) -> None:
        """Take any command of the membership but ENDED.

        Raises RemoteProtocolError: the command is not one for a member, or its content is wrong.
        """
        kind = type(command)
        if kind is Deliver:
            self._deliver(command, frames, limits)
        elif kind is Subscribed:
            self.active = self._accepted = True
            self.passed_over = self.lost_lease = False
            self._dropped = None
            self._gets = self.asked.kind != "exclusive"
            if self.stream_uuid != command.stream:
                # Another stream of the name: nothing that was delivered of the first one counts.
                self._seen = 0, 0
                self._rewinds.clear()
                self._of_earlier_links.clear()
                self._acked.clear()
            self.stream_uuid = command.stream
            self.schemas = Schemas(command.schemas) if command.schemas else None
            self.tail = command.tail
            self.lease_ms = command.lease_ms
            self._memberships.note_lease(self)
        elif kind is Gap:
            self.queue.append(GapNotice(command.from_, command.to, command.code, command.reason))
        elif kind is Rewound:
            self._rewind(command)
        elif kind is Schema:
            self.schemas = with_version(self.schemas, command)
        elif kind is Mode:
            # `live` tells a member whether it is given records: a member of an exclusive group
            # that has not been given any was not its holder, and is not passed over.
            self.passed_over = self._gets and not command.live
            self._gets = command.live
            self._dropped = None
            if self.passed_over:
                self._pass_over(command)
        elif kind is not Cover:
            # Covers are the group's reader's, and say nothing of this member.
            raise RemoteProtocolError("unexpected", f"{kind.__name__} for a member of a group")

    def _pass_over(self, command: Mode) -> None:
        """Take note that leases have ended: others may have what waits here and in the program.

        Its batches wait for the broker's word (see `doubt`); notices stay in the queue.
        """
        self.lost_lease = True
        self.progressed, self.renew_at_ms = False, 0
        items, self.queue = self.queue, deque()
        self._waiting.clear()
        self.doubt([item for item in items if isinstance(item, HeldBatch)])
        self.queue.extend(item for item in items if not isinstance(item, HeldBatch))
        self.queue.append(PassedOverNotice(command.offset))
        self._count_bytes()

    def _rewind(self, command: Rewound) -> None:
        """Void what was delivered from an offset on: its offsets are those of other records now.

        The place that a later JOIN_GROUP tells goes back to that offset, in the epoch of what was
        delivered: the records that take the offsets are of a later one. `void_since` remembers it
        for records that the program still has.
        """
        epoch, _ = self._seen
        if epoch:  # Otherwise nothing was delivered yet, and nothing is void.
            self._rewinds.append((epoch, command.to))
            self._seen = epoch, command.to
        for offset in [offset for offset in self._of_earlier_links if offset >= command.to]:
            del self._of_earlier_links[offset]
        self._acked -= {offset for offset in self._acked if offset >= command.to}
        self.queue.append(RewoundNotice(command.from_, command.to, command.epoch))

    def _deliver(self, command: Deliver, frames: Sequence[Any], limits: Limits) -> None:
        """Take in one delivery of a group, without the records that the reader has already."""
        batches, unreadable = taken_in(frames, command.rows, limits)
        if self.schemas is not None:
            for batch in batches:
                batch.schemas = self.schemas
        for batch in batches:
            offsets = batch.offsets
            if offsets[0] < command.from_ or offsets[-1] >= command.next:
                raise RemoteProtocolError(
                    "unexpected",
                    f"records beyond what DELIVER names, of subscription {self.number}",
                )
        for found in unreadable:
            at = found.readable_before
            following = batches[at : at + 1]  # the readable batch after it, if any
            until = int(following[0].offsets[0]) if following else command.next
            self._acknowledge_unreadable(found, until)
        # A member that leaves takes no more: the broker gives its records to others.
        for batch in () if self.leaving else batches:
            # Records that the reader has already took credit, too.
            self._received_records += len(batch)
            self._received_bytes += batch.stamp.size
            left = self._without_known(batch) if self._of_earlier_links else batch
            if left is None:
                continue
            held = HeldBatch(left, self, self.stream_uuid, command.attempts)
            last = int(batch.offsets[-1])
            self._seen = max(self._seen, (held.stamp.epoch, last + 1))
            numbers = held.numbers
            if self.lease_ms:
                # Of records that come again, as their leases had ended, the newest delivery counts.
                self._drop_copies(numbers)
                self._memberships.acks.came_again(self, numbers)
                self._waiting.update(numbers)
            self.in_hand.update(numbers)
            self.queue.append(held)
            self._queued_bytes += held.stamp.size

    def _acknowledge_unreadable(self, found: Unreadable, until: int) -> None:
        """Tell of a batch that cannot be read, and be done with its records.

        No member could read them: they would be handed from one to the next for ever. Those of a
        derived batch (made of rows of others, so their offsets cannot be told) stay where they are.
        until: where the next readable batch begins, or the delivery ends.
        """
        first, ranges = found.stamp.base_offset, found.ranges
        self._received_records += found.records
        self._received_bytes += found.size
        self.queue.append(GapNotice(first, found.end(until), "damaged", found.reason))
        if ranges:
            self._memberships.acks.add(self, DONE, ranges)

    def _without_known(self, batch: Batch) -> Batch | None:
        """Return the rows that the reader did not have on an earlier link; None: there are none.

        Rows that the reader has acknowledged since are acknowledged once more; those that it has
        still are in hand again.
        """
        rows: list[int] = []
        done: list[int] = []
        for row in rows_of(batch):
            offset = batch.offset_of(row)
            if offset not in self._of_earlier_links:
                rows.append(row)
                continue
            del self._of_earlier_links[offset]
            if offset in self._acked:
                done.append(offset)
            else:
                self.in_hand.add(offset)  # the reader has it, and it is ours again
        if done:
            self._memberships.acks.add(self, DONE, ranges_of_numbers(done))
        if len(rows) == len(batch):
            return batch
        return chosen(batch, rows) if rows else None

    def link_down(self) -> None:
        """Drop what no caller took, and note what the reader has as of an earlier link.

        On the next link a record is in hand again only when the broker has handed it out again.
        """
        super().link_down()
        for item in self.queue:
            if isinstance(item, HeldBatch):
                for first, end in ranges_of(item):
                    self.in_hand.difference_update(range(first, end))
        for first, end in self._doubts.ranges():
            self.in_hand.difference_update(range(first, end))
        self.discard()
        self.lost_lease = False
        self.renew_at_ms = 0
        for offset in sorted(self.in_hand | self._acked | self._lent):
            self._of_earlier_links[offset] = None
        while len(self._of_earlier_links) > AWAY_MAX:  # a bound on memory
            oldest = next(iter(self._of_earlier_links))
            del self._of_earlier_links[oldest]
            self._acked.discard(oldest)
        self.in_hand.clear()
        # A step that was under way names its records: the broker knows whether it was taken.
        self._lent.clear()

    def over(self) -> None:
        """Forget the membership, which has ended."""
        self.lease_ms = 0  # nothing of it is renewed any more
        self._memberships.over(self)


def decided(member: Membership) -> bool:
    """Whether the broker has accepted or refused a membership, for edit_group() to wait for."""
    return member.accepted or member.ended


def has_left(member: Membership) -> bool:
    """Whether a membership is not just being left: it has ended, or has a reader.

    Verbs that a member would hinder, as remove_group(), wait for it.
    """
    return member.ended or not member.leaving
