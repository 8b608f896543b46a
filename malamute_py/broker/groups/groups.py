"""Groups: cursors with members, who share the records of a stream.

Owns the groups at run time, JOIN_GROUP, and the members that come and go. The rules: a group exists
once its creation is in the log, and lets members in once the creation is durable; records held by a
member that leaves or dies go to other members; a group of a stream in memory lives in memory only.
Source: docs/design.md, Queues and the checkpoint; fan-out and consumer groups as in Luxun, the hold
window as in LocalMQ (docs/design.md, References).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from malamute_protocol.address import name_fault
from malamute_protocol.commands import (
    EditGroup,
    Ended,
    GroupInfo,
    JoinGroup,
    Mode,
    RemoveGroup,
    RequeueGroup,
    ResetGroup,
    Rewound,
    Schema,
    StartKind,
    Subscribed,
)
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.groups.acknowledgements import Acknowledgements
from malamute_py.broker.groups.administration import GroupAdministration
from malamute_py.broker.groups.dead_letters import DeadLetters
from malamute_py.broker.groups.group import KINDS, Group
from malamute_py.broker.groups.holders import Holders
from malamute_py.broker.groups.leases import Leases
from malamute_py.broker.groups.member import Member
from malamute_py.broker.groups.progress import Progress
from malamute_py.broker.groups.reader import GroupReader
from malamute_py.broker.groups.requeueing import Requeueing
from malamute_py.broker.groups.resetting import Resetting
from malamute_py.broker.groups.returns import NO_ATTEMPT, Returns
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import ERRED, Links
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.log.pages import Pages
from malamute_py.broker.log.steps import Part, Steps, Then
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.mail.puts import Puts
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.streams.conditions import check_ready
from malamute_py.broker.streams.named import Named, Place
from malamute_py.broker.streams.start_positions import Begin, Starts, by_offset
from malamute_py.broker.structures.timers import Timers
from malamute_py.broker.subscriptions.live import Delivery
from malamute_py.broker.subscriptions.matching import Matching
from malamute_py.changelog.ranges import with_done, without_tries
from malamute_py.changelog.records import Change, GroupDone, GroupRemoved, GroupSet, Holder
from malamute_py.changelog.settings import GroupSettings
from malamute_py.changelog.tables import GroupRow
from malamute_py.matcher import compile_pattern

JOIN_GROUP: Final = 63
"""Number of the command, by which a refusal or a failure of a membership names it."""
REMOVED_AT_ONCE: Final = 1_000
"""Groups whose removal one step logs."""
DIED: Final = "died"
"""Reason of an attempt that the loss of a member's link has ended."""
LEFT_IN_ORDER: Final = ("bye", "kicked")
"""Ends of a link (`Link.happened`) after which its place in an exclusive group is not kept."""


class Groups:
    """All groups of one core.

    The broker calls its handlers, and tells it what becomes of links, credit and streams.
    """

    def __init__(
        self,
        shard: Shard,
        links: Links,
        catalogue: Catalogue,
        steps: Steps,
        starts: Starts,
        delivery: Delivery,
        matching: Matching,
        answers: Answers,
        pages: Pages,
        puts: Puts,
        groups: Named[Group, Any],
        is_cursor: Callable[[Place], bool],
    ) -> None:
        """groups: empty. is_cursor: whether a cursor of a stream has a name, or is to have it."""
        self._shard = shard
        self._is_cursor = is_cursor
        self._links = links
        self._catalogue = catalogue
        self._steps = steps
        self._starts = starts
        self._answers = answers
        self._groups: Named[Group, tuple[Member, JoinGroup]] = groups
        """Groups, and members that wait for one whose creation or reset is on its way."""
        self._members: dict[Member, Group | None] = {}
        """The group of each member; None until the group is there."""
        self._wakers: dict[Group, Callable[[], None]] = {}
        """The call by which a stream wakes each group that has members when there is more."""
        self.timers: Final = Timers()
        """Calls that give up a kept place, bring back delayed records or log a position."""
        self._progress = progress = Progress(shard, steps, self.timers)
        dead_letters = DeadLetters(shard, steps, puts, progress)
        self.reader: Final = GroupReader(
            shard, links, delivery, matching, progress, self.timers, dead_letters
        )
        self._returns = returns = Returns(shard, steps, self.reader, self.timers)
        self._holders = holders = Holders(shard, links, steps, answers, self.reader, self.timers)
        self._leases = Leases(shard, links, holders, self.reader, returns, self.timers)
        self.acknowledgements: Final = Acknowledgements(
            shard, self.reader, progress, returns, self._leases, self._members
        )
        self._administration = GroupAdministration(
            shard, catalogue, steps, answers, pages, self._groups, puts.mailboxes,
            self.reader.wake,
        )  # fmt: skip
        self._requeueing = Requeueing(
            shard, steps, answers, puts, self.reader, self.timers, self._administration
        )
        self._resetting = Resetting(
            shard, links, steps, starts, answers, self._groups,
            end_members=self._end_members, renewed=self._renewed,
            administration=self._administration,
        )  # fmt: skip

    # --- facts ------------------------------------------------------------------------------

    @property
    def gauges(self) -> dict[str, int]:
        """Counts for the broker's metrics, by name."""
        return {
            "groups": len(self._groups),
            "group_members": len(self._members),
            "group_records_held": sum(group.holdings.held for group in self._groups),
            "group_reads_under_way": self.reader.turns.reads_under_way,
        }

    def handlers(self) -> dict[type, Callable[[Link, Any], None]]:
        """Handlers of the commands that are no steps; ACK_RECORDS outside ATOMIC is a step."""
        return {
            JoinGroup: self.join,
            GroupInfo: self._administration.group_info,
            EditGroup: self._administration.edit_group,
            RequeueGroup: self._requeueing.requeue,
            ResetGroup: self._resetting.reset,
            RemoveGroup: self._administration.remove_group,
        }

    # --- over restarts ---------------------------------------------------------------------------

    def recovered(self) -> None:
        """Take up the groups that the log has; log the end of those whose stream is gone.

        Called once, when the broker starts. Positions outside of what a stream has are clamped.
        """
        orphans: list[Change] = []
        for (number, name), row in list(self._shard.queues.groups.items()):
            stream = self._catalogue.by_number(number)
            if stream is None:
                orphans.append(GroupRemoved(number, name))
                continue
            clamping = self._clamp(stream, row)
            group = self._take_up(stream, row)
            if clamping:
                self._steps.put(
                    clamping, Then(partial(self._refresh, group)), memory=stream.ring.memory
                )
        for at in range(0, len(orphans), REMOVED_AT_ONCE):
            self._steps.take([Part(orphans[at : at + REMOVED_AT_ONCE])])

    def _clamp(self, stream: Stream, row: GroupRow) -> list[Change]:
        """Return changes that bring a group's row within its stream; they are made in the row, too.

        The position may lie beyond the stream's end after a power loss, or before its beginning
        where retention or a trim removed records while the group's row was not told.
        """
        first, end = stream.begin, stream.position_end(row.epoch)
        before, epoch = row.next, self._shard.epoch
        changes: list[Change] = []
        # The end of the last records that the log has as done, or tried: both lists are ascending.
        _, done_end = row.done[-1] if row.done else (0, 0)
        _, tries_end, *_ = row.tries[-1] if row.tries else (0, 0)
        newest = max(done_end, tries_end)
        if max(row.next, newest) > end:
            # A power loss took records back: their offsets will be given again to others.
            done = [(begin, min(stop, end)) for begin, stop in row.done if begin < end]
            tries = without_tries(row.tries, [(end, newest)]) if newest > end else row.tries
            changes.append(
                GroupSet(
                    row.stream, row.name, row.kind, row.pattern, min(row.next, end),
                    row.moved_ms, "clamped", row.by, epoch, row.durable, row.settings, tries,
                )
            )  # fmt: skip
            if done:  # A GroupSet has no done ranges beyond the position: it forgets them.
                changes.append(GroupDone(row.stream, row.name, done, epoch))
            row.next, row.done, row.tries = min(row.next, end), done, tries
            self._say_clamped(stream, row.name, before, row.next, "rewound")
        if row.next < first:
            changes.append(GroupDone(row.stream, row.name, [(row.next, first)], epoch))
            row.tries = without_tries(row.tries, [(row.next, first)])
            row.next, row.done = with_done(row.next, row.done, [(row.next, first)])
            purged = first <= stream.row.trimmed
            code = "purged" if purged else "retention"
            self._say_clamped(stream, row.name, before, row.next, code)
        return changes

    def _refresh(self, group: Group, _: int) -> None:
        """Take up a group's row anew, as the log has _clamp()'s changes: it is another object."""
        row = self._shard.queues.groups.get((group.stream.number, group.name))
        if row is not None and not group.gone:
            group.row = row

    def _say_clamped(self, stream: Stream, name: str, before: int, after: int, code: str) -> None:
        """Count and report that _clamp() moved a group's position into its stream. code: why."""
        self._shard.counters["groups_clamped"] += 1
        facts = {"stream": stream.name, "group": name, "from": before, "to": after, "code": code}
        level = "info" if code == "purged" else "warning"
        self._shard.event("group_clamped", level, **facts)

    def _take_up(self, stream: Stream, row: GroupRow) -> Group:
        """Make the group of a row of the tables, and keep its place for the holder in the row."""
        window = self._shard.settings.group_window_records
        group = Group(stream, row, window, self._leases.watch)
        self._groups.add((stream.number, row.name), group, row.by)
        self._holders.take_up(group, self._give_up)
        return group

    # --- members ------------------------------------------------------------------------------

    def join(self, link: Link, command: JoinGroup) -> None:
        """Take up a member; SUBSCRIBED or a refusal follows when its group is there.

        `hold_ms` of the command: how long the place of a holder is kept whose link was lost. Raises
        BrokerRefused: nothing was done.
        """
        self._check(link, command)
        settings = self._shard.settings
        hold_ms = min(command.hold_ms or settings.group_hold_ms, settings.group_hold_max_ms)
        member = Member(self, link, command, self._shard.now_ms, hold_ms)
        link.receivers[member.number] = member
        self._members[member] = None
        member.pattern_bytes = len(msgspec.msgpack.encode(command.pattern))
        self._shard.quotas.add_receiver(link.quota_owner, "subscriptions", member.pattern_bytes)

        def use(stream: Stream) -> None:
            """Go on once the stream exists, which may just have been created."""
            if not member.ended:
                self._find_group(member, command, stream)

        self._catalogue.use(
            command.stream, link.owner,
            self._links.contained(link, "JOIN_GROUP", use, JOIN_GROUP, member.number),
            partial(self._turn_away, member),
        )  # fmt: skip

    def _check(self, link: Link, command: JoinGroup) -> None:
        """Raise BrokerRefused unless a link may join a group as the command says."""
        settings = self._shard.settings
        self._links.check_number(link, command.subscription)
        if not settings.permit(link.owner, "read", command.stream):
            raise BrokerRefused("forbidden", f"you may not read stream '{command.stream}'")
        if not settings.permit(link.owner, "replay", command.stream):
            raise BrokerRefused(
                "forbidden", f"you may not replay stream '{command.stream}', which a group does"
            )
        if not command.create and self._catalogue.get(command.stream) is None:
            reason = self._catalogue.absent(link.owner, command.stream)
            raise BrokerRefused("unknown_stream", reason)
        fault = name_fault(command.group)
        if fault:
            raise BrokerRefused("bad_name", f"group: {fault}")
        if command.kind not in KINDS:
            raise BrokerRefused("unsupported", f"a group is one of {', '.join(KINDS)}")
        size = len(msgspec.msgpack.encode(command.pattern))
        if size > settings.pattern_bytes_max:
            most = settings.pattern_bytes_max
            raise BrokerRefused("too_large", f"a pattern of {size} bytes, at most {most}")
        self._shard.quotas.check_receiver(link.quota_owner, "subscriptions", size)
        compile_pattern(command.pattern)
        if command.settings:
            self._administration.settings_of(link, command.settings, over=None)

    def _turn_away(self, member: Member, code: str, reason: str, retry_ms: int = 0) -> None:
        """Refuse the JOIN_GROUP of a member that is in no group yet, and forget the member."""
        if not member.ended:
            self._links.refuse(member.link, JOIN_GROUP, member.number, code, reason, retry_ms)
            self._forget(member)

    def _forget(self, member: Member) -> Group | None:
        """End a member for its link and its quotas; returns its group, None if it is in none yet.

        The caller takes the member out of the group itself.
        """
        member.leave()
        self._shard.quotas.add_receiver(
            member.link.quota_owner, "subscriptions", member.pattern_bytes, sign=-1
        )
        return self._members.pop(member)

    def _find_group(self, member: Member, command: JoinGroup, stream: Stream) -> None:
        """Let a member enter its group; one that does not exist is created.

        `coming` has the members that wait for a group whose creation or reset is on its way.
        """
        try:
            if stream.keys is not None:
                # The newest record of each key may still be looked for, after a start.
                check_ready(stream, stream.keys)
        except BrokerRefused as error:
            self._turn_away(member, error.code, error.reason, error.retry_ms)
            return
        place = stream.number, command.group
        waiting = self._groups.coming.get(place)
        if waiting is not None:
            waiting.append((member, command))
            return
        group = self._groups.get(place)
        if group is not None:
            self._enter(member, command, group)
            return
        link = member.link
        try:
            self._check_new(link, command, stream)
        except BrokerRefused as error:
            self._turn_away(member, error.code, error.reason, error.retry_ms)
            return
        self._groups.coming[place] = [(member, command)]
        self._groups.count_creation(place, link.owner)
        self._create_at_start(member, command, stream)

    def _create_at_start(self, member: Member, command: JoinGroup, stream: Stream) -> None:
        """Find the offset at which a member's new group is to start, then create it there."""
        link, place = member.link, (stream.number, command.group)

        def create_at(begin: Begin | BrokerRefused) -> None:
            """Create the group at the start that was found, or turn the waiting members away."""
            link.queries -= 1  # _check_new() counted the question.
            if isinstance(begin, BrokerRefused):
                self._not_created(place, begin.code, begin.reason, begin.retry_ms)
            elif stream.removed:
                self._not_created(
                    place, "stream_removed", f"'{stream.name}' was removed", retry_ms=0
                )
            else:
                self._create(stream, command, max(begin.next, stream.begin), link)

        def create_or_turn_away(begin: Begin | BrokerRefused) -> None:
            """Run `create_at`; an error that it raises turns the waiting members away first."""
            try:
                create_at(begin)
            except Exception:
                # Other members may wait for the same group; the next JOIN_GROUP creates it.
                self._not_created(place, "internal", ERRED, retry_ms=0)
                raise

        self._starts.resolve(
            stream, command.start or [int(StartKind.LATEST)], bool(command.visibility),
            command.pattern,
            self._links.contained(
                link, "JOIN_GROUP", create_or_turn_away, JOIN_GROUP, member.number
            ),
            end=stream.next, asker=link, wanted=lambda: True,
        )  # fmt: skip

    def _check_new(self, link: Link, command: JoinGroup, stream: Stream) -> None:
        """Raise BrokerRefused unless a link may create a group.

        It counts the question for the start in `link.queries`, which the answer counts off again.
        """
        if self._is_cursor((stream.number, command.group)):
            raise BrokerRefused(
                "conflict",
                f"'{command.group}' is a cursor of stream '{stream.name}', which a group would not"
                " move: name the group otherwise, or remove the cursor",
            )
        self._groups.check_room(link.owner, self._shard.settings.groups_max)
        kind, *_ = command.start or [StartKind.LATEST]
        if kind == StartKind.LAST_PER_SUBJECT:
            raise BrokerRefused("bad_start", "a group reads every record from its start on")
        self._links.count_query(link)

    def _create(self, stream: Stream, command: JoinGroup, next: int, link: Link) -> None:
        """Log a new group with the pattern and settings of its first member. next: its position."""
        place = stream.number, command.group
        settings = GroupSettings()
        if command.settings:
            settings = self._administration.settings_of(link, command.settings, None)
        change = GroupSet(
            stream.number, command.group, command.kind, msgspec.msgpack.encode(command.pattern),
            next, self._shard.now_ms, "created", link.owner, self._shard.epoch,
            bool(command.visibility),  # -1, no wish, is durable in a new group.
            settings,
        )  # fmt: skip
        founding = Then(partial(self._founded, stream, place), partial(self._not_created, place))
        self._steps.put([change], founding, memory=stream.ring.memory)

    def _founded(self, stream: Stream, place: Place, end_lsn: int) -> None:
        """Take up a group whose creation the log has; its members enter once that is durable."""
        if stream.removed:
            self._not_created(place, "stream_removed", f"'{stream.name}' was removed", retry_ms=0)
            return
        self._groups.end_creation(place)
        group = self._take_up(stream, self._shard.queues.groups[place])
        # A group that a power loss could take back could begin again at a later record.
        self._answers.settle(end_lsn, partial(self._let_in, stream, group))

    def _let_in(self, stream: Stream, awaited: Group, failure: tuple[str, str] | None) -> None:
        """Let the members that wait for a group enter once it is durable, or turn them away.

        awaited: the group as it was when its creation or reset was logged. failure: code and reason
        where its ring has failed.
        """
        place = stream.number, awaited.name
        group = self._groups.get(place)
        if failure is not None or group is None:
            code, reason = failure or ("stream_removed", f"'{stream.name}' was removed")
            self._not_created(place, code, reason, retry_ms=0)
            return
        if group is not awaited or group.gone:
            # The group was reset meanwhile: they wait until its newest position is durable.
            return
        for member, join in self._groups.coming.pop(place, ()):
            if not member.ended:
                self._enter(member, join, group)

    def _not_created(self, place: Place, code: str, reason: str, retry_ms: int) -> None:
        """Turn away the members that wait for a group that could not be created or taken up."""
        self._groups.end_creation(place)
        for member, _ in self._groups.coming.pop(place, ()):
            self._turn_away(member, code, reason, retry_ms)

    def _enter(self, member: Member, command: JoinGroup, group: Group) -> None:
        """Begin a membership, unless the group has another kind, selection or visibility.

        A group has these from its first member; a program that expects others would get the wrong
        records.
        """
        most = self._shard.settings.group_members_max
        if command.kind != group.kind:
            self._turn_away(
                member, "bad_setting", f"group '{group.name}' is {group.kind}, not {command.kind}"
            )
        elif (
            command.pattern != group.selection.pattern
            # Patterns may be written otherwise and select the same.
            and compile_pattern(command.pattern).canonical
            != compile_pattern(group.selection.pattern).canonical
        ):
            self._turn_away(
                member, "bad_setting", f"group '{group.name}' selects by another pattern"
            )
        # A negative visibility: the member takes the group's.
        elif command.visibility >= 0 and command.visibility != group.durable:
            name = "durable" if group.durable else "live"
            self._turn_away(member, "bad_setting", f"group '{group.name}' has visibility '{name}'")
        elif len(group.members) >= most:
            self._turn_away(member, "limit", f"at most {most} members of a group")
        else:
            self._begin(member, command, group)

    def _begin(self, member: Member, command: JoinGroup, group: Group) -> None:
        """Let a member in, and tell it with SUBSCRIBED.

        In an exclusive group a MODE tells a member that does not hold the place, and one that loses
        it by this. A holder that came back gets its records again.
        """
        stream, links = group.stream, self._links
        if not group.members:  # The first member: from here on the stream wakes the group.
            wake = self._wakers[group] = partial(self.reader.wake, group)
            stream.audience.add_reader(wake, group.durable)
        self._members[member] = group
        member.lease_ms = self._leases.of(group)
        before = group.holder
        released = group.enter(member)  # None: it is no holder that has come back.
        if before is not None and group.holder is not before:
            self._holders.tell_place_lost(group, before)
        low = group.holdings.low
        links.say(
            member.link,
            Subscribed(
                member.number, stream.uuid, self._shard.epoch, next=low, first=stream.begin,
                tail=stream.next, lease_ms=member.lease_ms, schemas=list(stream.schemas.items()),
                begin=int(stream.keys is not None),  # Its first offset: 1 in a stream with keys.
            ),
        )  # fmt: skip
        if command.seen:
            # The last position that the client saw: a power loss may have taken it back.
            begin = by_offset(stream, stream.next, *command.seen)
            if begin.rewound_from is not None:
                rewound = Rewound(member.number, begin.rewound_from, begin.next, self._shard.epoch)
                links.say(member.link, rewound)
        if group.kind == "exclusive":
            if member is not group.holder:
                links.say(member.link, Mode(member.number, live=False, offset=low))
            self._holders.settle(group)
        self._shard.event(
            "group_joined", stream=stream.name, group=group.name, link=member.link.number,
            identity=member.identity, returned=released is not None,
        )  # fmt: skip
        if released and group.counts_attempts:
            # The loss of its link has ended an attempt; the records wait once the log has that.
            self._returns.log_attempt(group, released, DIED)
        self.reader.wake(group)

    def resume(self, member: Member) -> None:
        """Give a member's group a turn, as the member's credit or its link's room has grown.

        Called by the member's link, as `end` and `link_ended` are: a member is a receiver.
        """
        group = self._members[member]
        if group is not None:
            group.free.file(member)
            self.reader.wake(group)

    def end(self, member: Member, code: str) -> None:
        """End a membership with an ENDED; records that it held go to other members.

        Called when its client cancels it, and where the broker ends it, as after a removal. Its
        place as the holder is not kept, and no attempt of the records is counted.
        """
        group = self._members[member]
        low = 0 if group is None else group.holdings.low
        self._links.say(member.link, Ended(member.number, low, code))
        self._remove(member, keep_ms=0, why=code, fault=False)

    def link_ended(self, link: Link, members: list[Member]) -> None:
        """Remove the members of an ended link; other members get what they held.

        The holder of an exclusive group keeps its place for `hold_ms`, unless its link ended in
        order (LEFT_IN_ORDER). Members of one group leave together, so that what they held is
        divided once.
        """
        fault = link.happened not in NO_ATTEMPT
        together: dict[Group, list[Member]] = {}
        for member in members:
            group = self._members[member]
            if group is not None and group.kind != "exclusive":
                together.setdefault(group, []).append(member)
                continue
            keep_ms = 0 if link.happened in LEFT_IN_ORDER else member.hold_ms
            self._remove(member, keep_ms, link.happened, fault)
        for group, leaving in together.items():
            self._remove_together(group, leaving, link.happened, fault)

    def _remove(self, member: Member, keep_ms: int, why: str, fault: bool) -> None:
        """Remove one member from its group, and let others have what it held.

        keep_ms: for how long the place of an exclusive group waits for it; 0: not at all. why: for
        the event. fault: the end counts as a failed attempt of what it held.
        """
        group = self._members[member]
        if group is None or group.kind != "exclusive":
            self._remove_together(group, [member], why, fault)
            return
        self._forget(member)
        now_ms = self._shard.now_ms
        before, held = group.holder, member.held
        released = group.leave(member, now_ms + keep_ms if keep_ms else 0, fault)
        self._go_on_without(group, member, held, why, count=1)
        if fault and group.counts_attempts:
            # The records are withheld until the log has the attempt.
            self._returns.log_attempt(group, released, DIED)
        if group.absent_holder is member:
            self.timers.set(group.returns_ms, partial(self._give_up, group, member))
        elif before is member:
            self._holders.settle(group)  # Another member is the holder, which the log is told.

    def _remove_together(
        self, group: Group | None, members: list[Member], why: str, fault: bool
    ) -> None:
        """Remove the members of one link at once, so that what they held is divided once.

        group: theirs; None: they wait for one. why: for the event. fault: the end counts as a
        failed attempt of what they held.
        """
        held = 0
        for member in members:
            self._forget(member)
            held += member.held
        if group is None:
            return
        released = group.leave_together(members, fault)
        self._go_on_without(group, members[0], held, why, len(members))
        if fault and group.counts_attempts:
            self._returns.log_attempt(group, released, DIED)

    def _go_on_without(self, group: Group, member: Member, held: int, why: str, count: int) -> None:
        """Let a group go on without members of one link, and report that they have left.

        member: one of them. held: records that they held in all. count: how many members left.
        """
        # Records that came back may have been removed from the stream while they were held.
        self.reader.drop_gone(group)
        wake = None if group.members else self._wakers.pop(group, None)
        if wake is not None:  # Its last member has left: the stream need not wake the group.
            group.stream.audience.remove_reader(wake, group.durable)
        if held:
            self._shard.counters["group_records_returned"] += held
        self._shard.event(
            "group_left", stream=group.stream.name, group=group.name, link=member.link.number,
            identity=member.identity, members=count, held=held, why=why,
        )  # fmt: skip
        if group.has_unlogged:
            self._progress.flush_later(group)
        self.reader.wake(group)

    def put_off(self, ms: int) -> None:
        """Let leases and kept places last longer by a time in which no member could be heard.

        Called when the broker finds that it stood still.
        """
        for group in self._groups:
            group.holdings.put_off_leases(ms)
            group.returns_ms += ms

    def _give_up(self, group: Group, absent: Member | Holder) -> None:
        """Give up the kept place of a holder that did not return in time.

        absent: the holder that the timer was set for; it has returned if it is not the absent one.
        """
        if group.absent_holder is not absent or group.gone:
            return
        if group.returns_ms > self._shard.now_ms:  # put_off() has given it more time.
            self.timers.set(group.returns_ms, partial(self._give_up, group, absent))
            return
        self._shard.counters["group_places_lost"] += 1
        self._shard.event(
            "group_place_lost", stream=group.stream.name, group=group.name,
            identity=absent.identity, held=absent.held if isinstance(absent, Member) else 0,
        )  # fmt: skip
        released = group.give_up_absent_holder()
        if group.counts_attempts:
            self._returns.log_attempt(group, released, DIED)
        self.reader.drop_gone(group)
        self._holders.settle(group)
        self.reader.wake(group)

    # --- a reset --------------------------------------------------------------------------------

    def _end_members(self, group: Group) -> None:
        """End the memberships of a group that is being reset; members that join now wait."""
        # The entry makes _find_group() let them wait.
        self._groups.coming.setdefault((group.stream.number, group.name), [])
        # What members, timers and the log still say of this run of the group has no effect.
        group.gone = True
        # An exclusive group's holder, which is the first, goes last: none of the others follows it.
        for member in reversed(list(group.members)):
            self.end(member, "group_reset")
        if group.absent_holder is not None:
            group.give_up_absent_holder()

    def _renewed(self, group: Group, end_lsn: int) -> None:
        """Take a group up anew as the log has it, and let in the members that wait.

        Called when the log has its reset, or has refused it (end_lsn 0: nothing is awaited).
        """
        stream, place = group.stream, (group.stream.number, group.name)
        if stream.removed:
            self._not_created(place, "stream_removed", f"'{stream.name}' was removed", retry_ms=0)
            return
        group = self._take_up(stream, self._shard.queues.groups[place])
        self._answers.settle(end_lsn, partial(self._let_in, stream, group))

    # --- what is gone -------------------------------------------------------------------------

    def trimmed(self, stream: Stream) -> None:
        """Count records as done in a stream's groups that a trim or the journal has dropped."""
        for group in self._groups.of(stream.number):
            self.reader.drop_gone(group)

    def schema_changed(self, stream: Stream, number: int, schema: bytes) -> None:
        """Tell the members of a stream's groups of a new version of its schema, before its data."""
        for group in self._groups.of(stream.number):
            for member in group.members:
                if member.link.typed:
                    self._links.say(member.link, Schema(member.number, number, schema))

    def stream_removed(self, stream: Stream) -> None:
        """End the groups of a stream that is removed, and log their removal."""
        groups = self._groups.remove_stream(stream.number)
        for group in groups.values():
            for member in list(group.members):
                self.end(member, "stream_removed")
            group.gone = True
        removed: list[Change] = [GroupRemoved(stream.number, name) for name in groups]
        for at in range(0, len(removed), REMOVED_AT_ONCE):
            self._steps.put(removed[at : at + REMOVED_AT_ONCE], memory=stream.ring.memory)
