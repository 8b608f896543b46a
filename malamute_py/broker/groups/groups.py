"""Groups: cursors with members, who share the records of a stream.

Owns the groups at run time, JOIN_GROUP, ACK_RECORDS, GROUP_INFO and REMOVE_GROUP, and the one
reader of each group. The rules: a record goes once to the group when no member dies; what a member
that leaves or dies held goes to others; acknowledgements come in any order, and the position is the
least offset that is not done; offsets that are not selected, have expired or are gone count as
done; nothing that was acknowledged and confirmed comes again after a restart, and nothing
unacknowledged is lost; a group of a stream in memory lives in memory only. Source: docs/design.md,
Queues and the checkpoint; fan-out and consumer groups as in Luxun, the hold window as in LocalMQ
(docs/design.md, References).

Why not a Subscription with the group in the place of its link: what a subscription is given joins
into covers of one peer and never comes back, its credit is one, and it is either live or behind.
A group hands one batch to several peers, rows that come back are wanted again from the middle of
what was read, and a keyed group skips what waits for a member without credit. So a group has a
small reader of its own over the hot window and ReadRange, woken by the fan-out, and uses what
there is for matching, expiry, extraction and the outbox. It keeps no bodies: what found no
credit is read again, from the hot window as a rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any, Final

import msgspec

from malamute_protocol.address import name_fault
from malamute_protocol.commands import (
    AckRecords,
    Ended,
    Gap,
    GroupInfo,
    JoinGroup,
    Mode,
    RemoveGroup,
    Rewound,
    StartKind,
    Subscribed,
)
from malamute_protocol.content import Content
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.broker.batches.encoding import Parts
from malamute_py.broker.batches.rows import unexpired
from malamute_py.broker.context import Shard
from malamute_py.broker.groups.group import (
    DEALS_AT_ONCE,
    KINDS,
    Group,
    Looked,
    Member,
    slot_of,
    slots_of,
)
from malamute_py.broker.groups.holdings import Page, Picked
from malamute_py.broker.links.links import ERRED, Link, Links
from malamute_py.broker.log.answers import Answer, Answers
from malamute_py.broker.log.steps import Effect, Part, Steps, Then, changing
from malamute_py.broker.log.stream import Batch, Stream
from malamute_py.broker.ready import HistoryRead, ReadFailed, ReadRange
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.streams.named import Named, Place
from malamute_py.broker.streams.start_positions import Begin, Starts, by_offset, may_match
from malamute_py.broker.structures.bitmaps import bits_of_rows
from malamute_py.broker.subscriptions.live import Delivery
from malamute_py.broker.subscriptions.matching import MATCHING, Choosing, Matching, is_quick
from malamute_py.changelog.records import Change, GroupDone, GroupRemoved, GroupSet, Range
from malamute_py.changelog.tables import GroupRow, Queues, with_done
from malamute_py.matcher import compile_pattern

JOIN_GROUP: Final = 63
TURN_BATCHES_MAX: Final = 256
"""Batches that one turn looks at, selected or not: some 4 ms when each has one record."""
READ_BYTES_MAX: Final = 256 << 10
"""What one read of history brings: of batches of one record some 800, which take 5 to 15 ms."""
READ_DEALS_MAX: Final = 2 * DEALS_AT_ONCE
"""Small deliveries that a keyed group deals of one read, at most."""
DEAL_BYTES: Final = 32 << 10
"""What a small delivery of a keyed group weighs in a step's budget, however few bytes it has."""
IDLE_READS_MAX: Final = 3
HELD_UP_MS: Final = 30_000
"""So long a group that reads no further may stand before its operator is told."""
EXTRACT_ROW_BYTES: Final = 512
"""Rows of at least this size are extracted whatever their share of a batch: sending a batch once
to each of several members costs more than copying its rows."""
RANGES_AT_ONCE: Final = 1_000
"""Ranges of unconfirmed acknowledgements in one record of the log; the others come later."""
REMOVED_AT_ONCE: Final = 1_000
MEMBERS_OF_A_PAGE: Final = 5_000
"""Members that one page of GROUP_INFO tells of, unless a single group has more."""
LEFT_IN_ORDER: Final = ("bye", "kicked")
"""How a link ended whose place in an exclusive group is not kept."""


class Groups:
    """All groups of one core."""

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
    ) -> None:
        self._shard = shard
        self._links = links
        self._catalogue = catalogue
        self._steps = steps
        self._starts = starts
        self._delivery = delivery
        self._matching = matching
        self._answers = answers
        self._groups: Named[Group] = Named(shard.quotas, "groups")
        self._member_count = 0
        self._coming: dict[Place, list[tuple[Member, JoinGroup]]] = {}
        """Groups whose creation is on its way, and who waits for it."""
        self._creators: dict[Place, str] = {}
        """Whose quota these count for."""
        self._queue: Final[deque[Group]] = deque()
        self._starved: Final[dict[Group, None]] = {}
        self.queues: Final = (self._queue, self._starved)
        """While all of them are empty, nothing can be done at once."""
        self._reads: dict[int, Group] = {}
        self.reads: list[ReadRange] = []
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._armed = 0

    # --- facts ------------------------------------------------------------------------------

    @property
    def gauges(self) -> dict[str, int]:
        """How much there is of what comes and goes."""
        return {
            "groups": len(self._groups),
            "group_members": self._member_count,
            "group_records_held": sum(group.holdings.held for group in self._groups),
            "group_reads_under_way": len(self._reads),
        }

    def handlers(self) -> dict[type, Callable[[Link, Any], None]]:
        """What handles the commands that are no steps; ACK_RECORDS outside ATOMIC is a step."""
        return {
            JoinGroup: self.join,
            GroupInfo: self.group_info,
            RemoveGroup: self.remove_group,
        }

    @property
    def hungry(self) -> bool:
        """Whether more can be served at once."""
        return bool(self._queue) or (bool(self._starved) and self._may_read)

    @property
    def _may_read(self) -> bool:
        """Whether one more read of history may be under way."""
        return len(self._reads) < self._shard.settings.reads_max

    @property
    def due_ms(self) -> int | None:
        """When tick() has something to do."""
        return self._timers[0][0] if self._timers else None

    def tick(self) -> None:
        """Do what is due: places given up, delayed records, positions to be logged."""
        timers, now_ms = self._timers, self._shard.now_ms
        while timers and timers[0][0] <= now_ms:
            heappop(timers)[2]()

    def _at(self, due_ms: int, call: Callable[[], None]) -> None:
        self._armed += 1
        heappush(self._timers, (due_ms, self._armed, call))

    # --- answering ----------------------------------------------------------------------------

    def _put(self, stream: Stream, changes: list[Change], *effects: Effect) -> None:
        """Let changes take effect: by way of the log, or at once for a stream in memory."""
        self._steps.put(changes, *effects, memory=stream.ring.memory)

    @property
    def _queues(self) -> Queues:
        return self._shard.queues

    # --- over restarts ---------------------------------------------------------------------------

    def recovered(self) -> None:
        """Take up the groups that the log has; positions that the streams have not are clamped."""
        orphans: list[Change] = []
        for (number, name), row in list(self._queues.groups.items()):
            stream = self._catalogue.by_number(number)
            if stream is None:
                orphans.append(GroupRemoved(number, name))
                continue
            clamped = self._clamp(stream, row)
            group = self._take_up(stream, row)
            if clamped:
                self._put(stream, clamped, Then(partial(self._refresh, group)))
        for at in range(0, len(orphans), REMOVED_AT_ONCE):
            self._steps.take([Part(orphans[at : at + REMOVED_AT_ONCE])])

    def _clamp(self, stream: Stream, row: GroupRow) -> list[Change]:
        """What brings a group's row within what its stream has; the row is as that will be."""
        first, end = stream.first, stream.position_end(row.epoch)
        before, epoch = row.next, self._shard.epoch
        changes: list[Change] = []
        if row.next > end or (row.done and row.done[-1][1] > end):
            # A power loss took records back: their offsets will be given again.
            done = [(begin, min(stop, end)) for begin, stop in row.done if begin < end]
            changes.append(
                GroupSet(
                    row.stream, row.name, row.kind, row.pattern, min(row.next, end),
                    row.moved_ms, "clamped", row.by, epoch, row.durable,
                )
            )  # fmt: skip
            if done:
                changes.append(GroupDone(row.stream, row.name, done, epoch))
            row.next, row.done = min(row.next, end), done
            self._clamped(stream, row.name, before, row.next, "rewound")
        if row.next < first:
            changes.append(GroupDone(row.stream, row.name, [(row.next, first)], epoch))
            row.next, row.done = with_done(row.next, row.done, [(row.next, first)])
            self._clamped(stream, row.name, before, row.next, "retention")
        return changes

    def _refresh(self, group: Group, _: int) -> None:
        """The row of a group is another object now."""
        row = self._queues.groups.get((group.stream.number, group.name))
        if row is not None and not group.gone:
            group.row = row

    def _clamped(self, stream: Stream, name: str, before: int, after: int, code: str) -> None:
        self._shard.counters["groups_clamped"] += 1
        facts = {"stream": stream.name, "group": name, "from": before, "to": after, "code": code}
        self._shard.event("group_clamped", "warning", **facts)

    def _take_up(self, stream: Stream, row: GroupRow) -> Group:
        group = Group(stream, row, self._shard.settings.group_window_records)
        self._groups.add((stream.number, row.name), group, row.by)
        return group

    # --- members ------------------------------------------------------------------------------

    def join(self, link: Link, command: JoinGroup) -> None:
        """Take up a member; answered when its group is there."""
        try:
            self._check(link, command)
        except BrokerRefused as error:
            self._links.refuse(
                link, JOIN_GROUP, command.subscription, error.code, error.reason, error.retry_ms
            )
            return
        settings = self._shard.settings
        hold_ms = min(command.hold_ms or settings.group_hold_ms, settings.group_hold_max_ms)
        member = Member(self, link, command, self._shard.now_ms, hold_ms)
        link.receivers[member.number] = member
        self._member_count += 1
        member.pattern_bytes = len(msgspec.msgpack.encode(command.pattern))
        self._hold(member, 1)

        def use(stream: Stream) -> None:
            if not member.ended:
                self._find(member, command, stream)

        self._catalogue.use(
            command.stream, link.owner,
            self._links.contained(link, "JOIN_GROUP", use, JOIN_GROUP, member.number),
            partial(self._turn_away, member),
        )  # fmt: skip

    def _check(self, link: Link, command: JoinGroup) -> None:
        settings = self._shard.settings
        self._links.check_number(link, command.subscription)
        if not settings.permit(link.owner, "read", command.stream):
            raise BrokerRefused("forbidden", f"you may not read stream '{command.stream}'")
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
        self._shard.quotas.check(link.owner, "subscriptions")
        self._shard.quotas.check(link.owner, "pattern_bytes", size)
        compile_pattern(command.pattern)

    def _turn_away(self, member: Member, code: str, reason: str, retry_ms: int = 0) -> None:
        """Refuse a member that is in no group yet."""
        if not member.ended:
            self._links.refuse(member.link, JOIN_GROUP, member.number, code, reason, retry_ms)
            self._forget(member)

    def _hold(self, member: Member, sign: int) -> None:
        """Count a membership as its link's identity's, or no longer."""
        quotas, owner = self._shard.quotas, member.link.owner
        quotas.add(owner, "subscriptions", sign)
        quotas.add(owner, "pattern_bytes", sign * member.pattern_bytes)

    def _forget(self, member: Member) -> None:
        member.leave()
        self._member_count -= 1
        self._hold(member, -1)

    def _find(self, member: Member, command: JoinGroup, stream: Stream) -> None:
        """Its stream is there: find the group, or create it."""
        place = stream.number, command.group
        waiting = self._coming.get(place)
        if waiting is not None:
            waiting.append((member, command))
            return
        group = self._groups.get(place)
        if group is not None:
            self._enter(member, command, group)
            return
        settings, link = self._shard.settings, member.link
        if len(self._groups) + len(self._coming) >= settings.groups_max:
            self._turn_away(member, "limit", f"at most {settings.groups_max} groups")
            return
        try:
            self._shard.quotas.check(link.owner, "groups")
        except BrokerRefused as error:
            self._turn_away(member, error.code, error.reason)
            return
        if command.start and command.start[0] == StartKind.LAST_PER_SUBJECT:
            self._turn_away(member, "bad_start", "a group reads every record from its start on")
            return
        if link.queries >= settings.link_queries_max:
            self._turn_away(
                member, "wait", "too many unanswered questions on this link", settings.retry_ms
            )
            return
        self._coming[place] = [(member, command)]
        self._creators[place] = link.owner
        self._shard.quotas.add(link.owner, "groups")
        link.queries += 1

        def found(begin: Begin | BrokerRefused) -> None:
            link.queries -= 1
            if isinstance(begin, BrokerRefused):
                self._not_created(place, begin.code, begin.reason, begin.retry_ms)
            elif stream.removed:
                self._not_created(place, "stream_removed", f"'{stream.name}' was removed", 0)
            else:
                self._create(stream, command, max(begin.next, stream.first), link.owner)

        def create(begin: Begin | BrokerRefused) -> None:
            try:
                found(begin)
            except Exception:
                # Others may wait for the same group; the next one who asks creates it.
                self._not_created(place, "internal", ERRED, 0)
                raise

        self._starts.resolve(
            stream, command.start or [int(StartKind.LATEST)], bool(command.visibility),
            command.pattern,
            self._links.contained(link, "JOIN_GROUP", create, JOIN_GROUP, member.number),
            end=stream.next, asker=link, wanted=lambda: True,
        )  # fmt: skip

    def _create(self, stream: Stream, command: JoinGroup, next: int, by: str) -> None:
        place = stream.number, command.group
        change = GroupSet(
            stream.number, command.group, command.kind, msgspec.msgpack.encode(command.pattern),
            next, self._shard.now_ms, "created", by, self._shard.epoch, bool(command.visibility),
        )  # fmt: skip
        founding = Then(partial(self._founded, stream, place), partial(self._not_created, place))
        self._put(stream, [change], founding)

    def _founded(self, stream: Stream, place: Place, end_lsn: int) -> None:
        if stream.removed:
            self._not_created(place, "stream_removed", f"'{stream.name}' was removed", 0)
            return
        self._come(place)
        self._take_up(stream, self._queues.groups[place])
        # A group that a power loss could take back would begin anew, maybe further on.
        self._answers.settle(end_lsn, partial(self._let_in, stream, place))

    def _let_in(self, stream: Stream, place: Place, failure: tuple[str, str] | None) -> None:
        """Take up who waits for a group that is durable, or turn all away."""
        group = self._groups.get(place)
        if failure is not None or group is None:
            code, reason = failure or ("stream_removed", f"'{stream.name}' was removed")
            self._not_created(place, code, reason, 0)
            return
        for member, join in self._coming.pop(place, ()):
            if not member.ended:
                self._enter(member, join, group)

    def _come(self, place: Place) -> None:
        """A group's creation is no longer on its way: the group itself counts, if it came to be."""
        creator = self._creators.pop(place, None)
        if creator is not None:
            self._shard.quotas.add(creator, "groups", -1)

    def _not_created(self, place: Place, code: str, reason: str, retry_ms: int) -> None:
        self._come(place)
        for member, _ in self._coming.pop(place, ()):
            self._turn_away(member, code, reason, retry_ms)

    def _enter(self, member: Member, command: JoinGroup, group: Group) -> None:
        """Its group is there: begin, unless it wants another kind or other records."""
        most = self._shard.settings.group_members_max
        if command.kind != group.kind:
            self._turn_away(
                member, "bad_setting", f"group '{group.name}' is {group.kind}, not {command.kind}"
            )
        elif (
            command.pattern != group.pattern
            and compile_pattern(command.pattern).canonical
            != compile_pattern(group.pattern).canonical
        ):
            self._turn_away(
                member, "bad_setting", f"group '{group.name}' selects by another pattern"
            )
        elif command.visibility >= 0 and command.visibility != group.durable:
            name = "durable" if group.durable else "live"
            self._turn_away(member, "bad_setting", f"group '{group.name}' has visibility '{name}'")
        elif len(group.members) >= most:
            self._turn_away(member, "limit", f"at most {most} members of a group")
        else:
            self._begin(member, command, group)

    def _begin(self, member: Member, command: JoinGroup, group: Group) -> None:
        stream, links = group.stream, self._links
        if not group.members:
            group.waker = partial(self.wake, group)
            (stream.durable_readers if group.durable else stream.readers).append(group.waker)
            stream.durable += group.durable
        returned = group.enter(member)
        low = group.holdings.low
        links.say(
            member.link,
            Subscribed(
                member.number, stream.uuid, self._shard.epoch, low, stream.first, stream.next, -1
            ),
        )
        if command.seen:
            begin = by_offset(stream, stream.next, *command.seen)
            if begin.rewound_from is not None:
                rewound = Rewound(member.number, begin.rewound_from, begin.next, self._shard.epoch)
                links.say(member.link, rewound)
        if group.kind == "exclusive":
            links.say(member.link, Mode(member.number, member is group.holder, low))
        self._shard.event(
            "group_joined", stream=stream.name, group=group.name, link=member.link.number,
            identity=member.identity, returned=returned,
        )  # fmt: skip
        self.wake(group)

    def resume(self, member: Member) -> None:
        """Let a member have its turn: its credit or its link's room has grown."""
        if member.group is not None:
            member.group.file(member)
            self.wake(member.group)

    def end(self, member: Member, code: str) -> None:
        """Say that a membership has ended; what the member held goes to others."""
        group = member.group
        low = 0 if group is None else group.holdings.low
        self._links.say(member.link, Ended(member.number, low, code))
        self._part(member, 0, code)

    def link_ended(self, link: Link, members: list[Member]) -> None:
        """A link has ended: what its members held goes to others, or waits for their return."""
        together: dict[Group, list[Member]] = {}
        for member in members:
            group = member.group
            if group is not None and group.kind != "exclusive":
                together.setdefault(group, []).append(member)
                continue
            keep_ms = 0 if link.happened in LEFT_IN_ORDER else member.hold_ms
            self._part(member, keep_ms, link.happened)
        for group, leaving in together.items():
            self._part_together(group, leaving, link.happened)

    def _part(self, member: Member, keep_ms: int, why: str) -> None:
        """A member is one no longer."""
        group = member.group
        self._forget(member)
        if group is None:
            return
        now_ms = self._shard.now_ms
        before = group.holder
        held = group.leave(member, now_ms + keep_ms if keep_ms else 0)
        member.group = None
        self._parted(group, member, held, why, 1)
        if group.ghost is member:
            self._at(group.returns_ms, partial(self._give_up, group, member))
        elif before is member:
            self._say_holder(group)

    def _part_together(self, group: Group, members: list[Member], why: str) -> None:
        """Members of one link are none any longer: what they held is divided once."""
        held = 0
        for member in members:
            self._forget(member)
            held += member.held
        group.leave_together(members)
        for member in members:
            member.group = None
        self._parted(group, members[0], held, why, len(members))

    def _parted(self, group: Group, member: Member, held: int, why: str, count: int) -> None:
        """So many members of one link have left a group, which goes on without them."""
        self._gone_by(group)
        if not group.members and group.waker is not None:
            stream = group.stream
            (stream.durable_readers if group.durable else stream.readers).remove(group.waker)
            stream.durable -= group.durable
            group.waker = None
        if held:
            self._shard.counters["group_records_returned"] += held
        self._shard.event(
            "group_left", stream=group.stream.name, group=group.name, link=member.link.number,
            identity=member.identity, members=count, held=held, why=why,
        )  # fmt: skip
        if group.moved:
            self._flush_later(group)
        self.wake(group)

    def _give_up(self, group: Group, ghost: Member) -> None:
        """The time in which a lost holder could return is over."""
        if group.ghost is not ghost or group.gone:
            return
        self._shard.counters["group_places_lost"] += 1
        self._shard.event(
            "group_place_lost", stream=group.stream.name, group=group.name,
            identity=ghost.identity, held=ghost.held,
        )  # fmt: skip
        group.give_up_ghost()
        self._gone_by(group)
        self._say_holder(group)
        self.wake(group)

    def _say_holder(self, group: Group) -> None:
        holder = group.holder
        if holder is not None:
            self._links.say(holder.link, Mode(holder.number, True, group.holdings.low))

    # --- acknowledgements -----------------------------------------------------------------------

    def prepare_ack(self, link: Link, command: AckRecords, frame: Any = None) -> Part:
        """Records are done, or wanted again, by a command of its own. Raises BrokerRefused.

        What no member waits for is logged a little later, with what else has come by then: a
        restart before that brings the records again.
        """
        group, member, picked = self._picked(link, command)
        if command.again_ms >= 0:
            # No member could take back what is late: a delay without end would hold the group up.
            after_ms = min(command.again_ms, self._shard.settings.lease_max_ms)
            return self._again(group, member, picked, after_ms)
        if command.tracker:
            return self._leaving(group, member, picked)
        return Part(effects=[_Acknowledging(self, group, member, picked)], memory=True)

    def prepare_ack_together(self, link: Link, command: AckRecords, frame: Any = None) -> Part:
        """Prepare an ACK_RECORDS as a part of an atomic step. Raises BrokerRefused."""
        group, member, picked = self._picked(link, command)
        if command.again_ms >= 0:
            raise BrokerRefused(
                "unsupported", "who wants records again says so alone: that is not in the log"
            )
        return self._leaving(group, member, picked)

    def _picked(self, link: Link, command: AckRecords) -> tuple[Group, Member, Picked]:
        """Find the records that an acknowledgement names. Raises BrokerRefused."""
        member = link.receivers.get(command.subscription)
        if not isinstance(member, Member):
            raise BrokerRefused(
                "unknown_subscription", f"no membership {command.subscription} on this link"
            )
        group = member.group
        picked = None
        if group is not None:
            # What a holder had before it was lost, and comes again, it may be done with.
            picked = group.holdings.pick(member, command.ranges, member is group.holder)
        if group is None or picked is None:
            raise BrokerRefused(
                "not_held", "this member does not hold all of these records (any more)"
            )
        return group, member, picked

    def _leaving(self, group: Group, member: Member, picked: Picked) -> Part:
        """The part of a step by which records are done."""
        stream = group.stream
        ranges = group.holdings.ranges(picked, group.row.next)
        change = GroupDone(stream.number, group.name, ranges, self._shard.epoch)
        memory = self._queues if stream.ring.memory else None
        leaving = _Leaving(self, group, member, picked)
        return changing([change], [leaving], memory=memory, level=stream.level)

    def _done(self, group: Group, picked: Picked) -> None:
        group.acknowledged([(page, mask) for page, mask in picked if mask])
        group.moved_ms = self._shard.now_ms
        self._shard.counters["group_records_done"] += sum(mask.bit_count() for _, mask in picked)
        group.holdings.tidy()
        # The window has room again, or a slot has moved.
        self.wake(group)

    def _again(self, group: Group, member: Member, picked: Picked, after_ms: int) -> Part:
        """The part by which records are wanted again: not in the log, as who holds what is not."""
        wanting = Then(partial(self._want, group, member, picked, after_ms))
        return Part(effects=[wanting], memory=True, level=group.stream.level)

    def _want(self, group: Group, member: Member, picked: Picked, after_ms: int, _: int) -> None:
        """Records that a member has given back wait again."""
        holdings = group.holdings
        late: Picked = []
        for page, mask in picked:
            # What waits already, which an exclusive holder had before, goes on to wait.
            held = mask & page.held.get(member, 0)
            if not held:
                continue
            holdings.unhand(page, member, held)
            member.returned(held.bit_count())
            self._shard.counters["group_records_returned"] += held.bit_count()
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
            self._at(self._shard.now_ms + after_ms, partial(self._due, group, late))
        self._gone_by(group)
        self.wake(group)

    def _due(self, group: Group, late: Picked) -> None:
        if group.gone:
            return
        for page, mask in late:
            due = group.holdings.due(page, mask)
            if due and group.slots is not None:
                group.slots.due(slots_of(page, due))
        self._gone_by(group)
        self.wake(group)

    # --- what the log is told later ---------------------------------------------------------------

    def _flush_later(self, group: Group) -> None:
        if not group.timer and not group.flushing and not group.gone:
            group.timer = self._shard.now_ms + self._shard.settings.group_flush_ms
            self._at(group.timer, partial(self._flush, group))

    def _flush(self, group: Group) -> None:
        """Log how far a group has come where no acknowledgement has done so."""
        group.timer = 0
        if group.gone or group.flushing:
            return
        holdings = group.holdings
        low = holdings.low
        ranges: list[Range] = []
        if low > group.row.next:
            ranges.append((group.row.next, low))
        for page in holdings.pages:
            if page.dirty and len(ranges) < RANGES_AT_ONCE:
                ranges += [(first, end) for first, end in holdings.done_ahead(page) if end > low]
                page.dirty = False
        if not ranges:
            return
        change = GroupDone(group.stream.number, group.name, ranges, self._shard.epoch)
        group.flushing = True
        flushing = Then(partial(self._flushed, group), partial(self._not_flushed, group))
        self._put(group.stream, [change], flushing)

    def _flushed(self, group: Group, _: int) -> None:
        group.flushing = False
        group.holdings.tidy()
        if group.moved:
            self._flush_later(group)

    def _not_flushed(self, group: Group, *_: Any) -> None:
        group.flushing = False
        for page in group.holdings.pages:
            page.dirty = True
        self._flush_later(group)

    # --- serving ------------------------------------------------------------------------------

    def wake(self, group: Group) -> None:
        """Something about a group changed: it may have something to hand out."""
        if not group.queued and not group.reading and not group.gone and group.members:
            group.queued = True
            self._queue.append(group)

    def serve(self) -> None:
        """Give turns until all groups are served or the step's budget is used up, one at least."""
        budget = self._shard.settings.step_bytes
        queue = self._queue
        more = self._shard.share()
        while budget > 0 and self.hungry:
            # As long as a read is free: who waits for one may be gone, or need none any more.
            if self._starved and self._may_read:
                group = next(iter(self._starved))
                del self._starved[group]
            else:
                group = queue.popleft()
                group.queued = False
            # One that had its turn as starved may still stand in the queue.
            if not group.gone and not group.reading:
                try:
                    budget -= self._turn(group, more)
                except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                    self._erred(group, error)
            if not more():
                return

    def _erred(self, group: Group, error: Exception) -> None:
        """Serving a group failed: its members are told, and may join again."""
        self._shard.erred("serving a group", error, stream=group.stream.name, group=group.name)
        for member in list(group.members):
            self.end(member, "internal")

    def _turn(self, group: Group, more: Callable[[], bool]) -> int:
        """Hand out one quantum while the share lasts, or begin a read; returns the bytes given."""
        stream = group.stream
        if group.holdings.read < stream.first:
            self._gone_by(group)
        quantum = self._shard.settings.quantum_bytes
        given, began = 0, group.dealt
        for _ in range(TURN_BATCHES_MAX):
            offset = group.wanted()
            if offset is None:
                if not group.held_up and group.stuck:
                    group.held_up = True
                    self._watch(group, group.holdings.low, told=False)
                return given
            if given >= quantum or group.dealt - began >= DEALS_AT_ONCE:
                break
            if offset < stream.hot_first:
                self._read(group, offset)
                return given
            given += self._hand_out(group, self._hot(stream, offset))
            if group.reading:
                return given
            if not more():
                break
        self.wake(group)
        # What no subscription selected is work, too, and so are many small deliveries.
        return max(given, quantum, (group.dealt - began) * DEAL_BYTES)

    def _watch(self, group: Group, low: int, told: bool) -> None:
        """Look again after a while at a group that reads no further."""
        due_ms = self._shard.now_ms + HELD_UP_MS
        self._at(due_ms, partial(self._look_again, group, low, told))

    def _look_again(self, group: Group, before: int, told: bool) -> None:
        """Name who holds a group up, once, unless its position has moved meanwhile."""
        if group.gone or not group.stuck:
            group.held_up = False
            return
        low = group.holdings.low
        if low == before and not told:
            self._say_held_up(group, low)
        self._watch(group, low, told=low == before)

    def _say_held_up(self, group: Group, low: int) -> None:
        holdings, stream = group.holdings, group.stream
        self._shard.counters["groups_held_up"] += 1
        holder = holdings.holder(low)
        self._shard.event(
            "group_held_up", "warning", stream=stream.name, group=group.name, next=low,
            read=holdings.read, held=holdings.held,
            link=0 if holder is None else holder.link.number,
            identity="" if holder is None else holder.identity,
            since_ms=0 if holder is None else holdings.since(holder),
        )  # fmt: skip

    def _hot(self, stream: Stream, offset: int) -> Batch:
        newest = stream.hot[-1]
        return newest if newest.base <= offset else stream.hot[stream.hot_place(offset)]

    def _hand_out(self, group: Group, batch: Batch) -> int:
        """Read a batch if it was not, and hand out what waits of it; returns the bytes given.

        What of it cannot be handled is gone for the group, by name, as damage in the journal is.
        """
        try:
            return self._share_out(group, batch)
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            self._pass_over(group, batch, error)
            return batch.size

    def _pass_over(self, group: Group, batch: Batch, error: Exception) -> None:
        """A group goes without a batch that it cannot handle, and its members are told so."""
        reason = self._shard.quarantine(
            group.stream.name, batch.base, batch.next, "serving a group", error, group=group.name
        )
        for member in group.members:
            # Some had been taken out of their order for this batch.
            group.file(member)
        self._gap(group, (batch.base, batch.next, "damaged", reason))

    def _share_out(self, group: Group, batch: Batch) -> int:
        now_ms = self._shard.now_ms
        holdings = group.holdings
        if batch.next > holdings.read:
            if not self._prepared(group, batch):
                return 0
            group.take_in(batch, now_ms)
            if not holdings.open:
                self._flush_later(group)
        bits = holdings.waiting_in(batch.base, batch.next)
        if not bits:
            return 0
        alive = unexpired(batch.content, now_ms)
        if alive is not None:
            expired = bits & ~bits_of_rows(alive)
            if expired:
                group.close(batch.base, expired)
                self._flush_later(group)
                bits ^= expired
                if not bits:
                    return 0
        given = 0
        settings = self._shard.settings
        parts = Parts(batch, settings.extract_bytes_min, settings.extract_share, EXTRACT_ROW_BYTES)
        for member, rows in group.divided(batch, bits):
            given += self._deliver(group, batch, parts, member, rows)
        return given

    def _prepared(self, group: Group, batch: Batch) -> bool:
        """Whether it is known, or quick to find, what a group selects of a batch.

        Else that is found in slices; the group has its next turn then.
        """
        content, prepared = batch.content, group.prepared
        if not self._matching.sliced:
            return True
        if prepared is not None and prepared.base == batch.base:
            content.share(prepared.table)
            return True
        if is_quick(content):
            if not group.slow or group.knows(content):
                return True
        elif group.everything and group.slots is None:
            return True
        reading = self._matching.reading(group.stream.uuid, batch.base, content)
        number_of = None if group.slots is None else slot_of
        job = Choosing(group.predicate, content, number_of, reading)
        if self._matching.run(job):
            group.prepared = Looked(batch.base, job.chosen, job.numbers, content.table)
            return True
        group.reading = MATCHING

        def matched() -> None:
            group.reading = 0
            if not group.gone:
                group.prepared = Looked(batch.base, job.chosen, job.numbers, content.table)
                self.wake(group)

        def failed(error: Exception) -> None:
            group.reading = 0
            if not group.gone:
                self._pass_over(group, batch, error)
                self.wake(group)

        self._matching.later(job, matched, lambda: not group.gone, failed)
        return False

    def _deliver(self, group: Group, batch: Batch, parts: Parts, member: Member, rows: int) -> int:
        """Put rows of a batch into a member's outbox; returns the bytes given."""
        # Before they are in its hands: they would stay there if this raised.
        frames, bitmap, size = parts.frames(rows)
        count = group.hand(batch, member, rows, self._shard.now_ms)
        member.covered = batch.base
        self._delivery.put(member, batch.next, frames, bitmap, count, size)
        self._shard.counters["group_records_out"] += count
        return size

    # --- reads of history -------------------------------------------------------------------------

    def _read(self, group: Group, offset: int) -> None:
        stream = group.stream
        if not self._may_read:
            self._starved[group] = None
            return
        token = self._shard.token()
        group.reading, group.reading_from = token, offset
        self._reads[token] = group
        self._shard.counters["reads"] += 1
        self.reads.append(
            ReadRange(
                stream.ring.name, stream.number, token, offset,
                min(group.tail, stream.hot_first),
                min(self._shard.settings.quantum_bytes, READ_BYTES_MAX),
                None
                if group.everything or group.reads_all
                else partial(may_match, group.pattern),
            )
        )  # fmt: skip

    def history(self, answer: HistoryRead | ReadFailed) -> bool:
        """A read of history is answered; False: it was not asked for here."""
        group = self._reads.pop(answer.token, None)
        if group is None:
            return False
        group.reading = 0
        if group.gone:
            return True
        if isinstance(answer, ReadFailed):
            if answer.code == "internal" and not group.reads_all:
                # Reading for a selection looks into batches; reading all of them does not.
                group.reads_all = True
                self.wake(group)
            else:
                self._failed(group, answer)
            return True
        try:
            self._answered(group, answer)
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            self._erred(group, error)
        return True

    def _answered(self, group: Group, answer: HistoryRead) -> None:
        holdings = group.holdings
        before = holdings.read, group.deliveries, holdings.open
        offset = group.wanted()
        if offset is not None and (offset >= group.reading_from or group.kind == "shared"):
            # Else something older came back meanwhile, and goes first where there is an order.
            self._hand_out_history(group, answer)
            if (holdings.read, group.deliveries, holdings.open) != before:
                group.idle_reads = 0
            elif not group.reading:
                group.idle_reads += 1
        if group.idle_reads >= IDLE_READS_MAX:
            group.idle_reads = 0
            self._shard.event(
                "read_stuck", "error", stream=group.stream.name, group=group.name,
                offset=holdings.low,
            )  # fmt: skip
            for member in list(group.members):
                self.end(member, "internal")
            return
        self.wake(group)

    def _failed(self, group: Group, answer: ReadFailed) -> None:
        self._shard.event(
            "read_failed", "error", stream=group.stream.name, group=group.name,
            code=answer.code, reason=answer.reason,
        )  # fmt: skip
        for member in list(group.members):
            self.end(member, answer.code)

    def _hand_out_history(self, group: Group, answer: HistoryRead) -> None:
        holdings, stream = group.holdings, group.stream
        gaps, began = list(answer.gaps), group.dealt
        for run in answer.runs:
            data = memoryview(run.data)
            for at, size, base, count in run.spans:
                end = base + count
                while gaps and gaps[0][0] <= base:
                    self._gap(group, gaps.pop(0))
                if end <= holdings.read:
                    if not holdings.waiting_in(base, end):
                        continue
                    if not group.takes:
                        return
                elif not group.takes or not group.reads_on:
                    return
                if base > holdings.read:
                    # The reader skipped what cannot match.
                    group.read_to(base)
                stored = data[at : at + size]
                batch = Batch(
                    stream, bytes(stored[:STAMP_BYTES]), stored[STAMP_BYTES:],
                    Content(stored[STAMP_BYTES:]), base, end, size,
                )  # fmt: skip
                self._hand_out(group, batch)
                if group.reading or group.dealt - began >= READ_DEALS_MAX:
                    return
        for gap in gaps:
            self._gap(group, gap)
        if answer.next > holdings.read:
            group.read_to(min(answer.next, group.tail))
            if not holdings.open:
                self._flush_later(group)

    # --- what is gone -------------------------------------------------------------------------

    def trimmed(self, stream: Stream) -> None:
        """The journal has dropped what lies before a stream's first offset."""
        for group in self._groups.of(stream.number):
            self._gone_by(group)

    def _gone_by(self, group: Group) -> None:
        """What lies before the stream's first offset can be handed out no more."""
        first = group.stream.first
        before = group.holdings.low
        if before < first:
            self._lost(group, before, first, "retention", "", group.close_before(first))

    def _gap(self, group: Group, gap: tuple[int, int, str, str]) -> None:
        """The journal cannot give these offsets."""
        first, end, code, reason = gap
        self._lost(group, first, end, code, reason, group.close_between(first, end))

    def _lost(self, group: Group, first: int, end: int, code: str, reason: str, count: int) -> None:
        if not count:
            return
        group.lost += count
        self._shard.counters["group_records_lost"] += count
        self._shard.event(
            "group_gap", "warning", stream=group.stream.name, group=group.name,
            **{"from": first, "to": end}, records=count, code=code,
        )  # fmt: skip
        for member in group.members:
            self._links.say(member.link, Gap(member.number, first, end, code, reason))
        group.holdings.tidy()
        self._flush_later(group)

    def stream_removed(self, stream: Stream) -> None:
        """A stream is gone, and its groups with it."""
        groups = self._groups.remove_stream(stream.number)
        for group in groups.values():
            for member in list(group.members):
                self.end(member, "stream_removed")
            group.gone = True
        removed: list[Change] = [GroupRemoved(stream.number, name) for name in groups]
        for at in range(0, len(removed), REMOVED_AT_ONCE):
            self._put(stream, removed[at : at + REMOVED_AT_ONCE])

    # --- administration -----------------------------------------------------------------------

    def remove_group(self, link: Link, command: RemoveGroup) -> None:
        """Forget a group without members; answered when that is durable."""
        settings = self._shard.settings
        if not settings.permit(link.owner, "admin", command.stream):
            self._answers.refuse(
                link, command, "forbidden", f"you may not remove groups of '{command.stream}'"
            )
            return
        stream = self._catalogue.get(command.stream)
        if stream is None:
            self._answers.refuse(
                link, command, "unknown_stream", f"there is no stream '{command.stream}'"
            )
            return
        place = stream.number, command.group
        group = self._groups.get(place)
        if group is None:
            self._answers.refuse(
                link, command, "unknown_group", f"there is no group '{command.group}'"
            )
            return
        if group.members or group.ghost is not None:
            self._answers.refuse(
                link, command, "in_use", f"group '{command.group}' has members, or keeps a place"
            )
            return
        change = GroupRemoved(stream.number, command.group)
        answer = Answer(self._answers, link, command)
        self._put(stream, [change], Then(partial(self._drop, place)), answer)

    def _drop(self, place: Place, _: int) -> None:
        group = self._groups.remove(place)
        if group is None:
            return
        for member in list(group.members):
            # It joined while the removal was on its way.
            self.end(member, "cancelled")
        group.gone = True

    def group_info(self, link: Link, command: GroupInfo) -> None:
        """Facts about one group, or a page of them."""
        name, settings = command.group, self._shard.settings
        stream = None
        if command.stream:
            if not settings.permit(link.owner, "read", command.stream):
                self._answers.refuse(
                    link, command, "forbidden", f"you may not read '{command.stream}'"
                )
                return
            stream = self._catalogue.get(command.stream)
            if stream is None:
                self._answers.refuse(
                    link, command, "unknown_stream", f"there is no stream '{command.stream}'"
                )
                return
        if stream is not None and name and not name.endswith("*"):
            group = self._groups.get((stream.number, name))
            if group is None:
                self._answers.refuse(link, command, "unknown_group", f"there is no group '{name}'")
            else:
                self._answers.result(link, command, self._facts(group))
            return
        page, more = self._groups.page(
            self._catalogue, partial(settings.permit, link.owner, "read"), command.stream,
            name.removesuffix("*"), command.after, max(1, min(command.limit, settings.page_max)),
        )  # fmt: skip
        left = MEMBERS_OF_A_PAGE
        entries: list[dict[str, Any]] = []
        for _, group in page:
            left -= len(group.members)
            if left < 0 and entries:
                more = True
                break
            entries.append(self._facts(group))
        self._answers.result(link, command, {"entries": entries, "more": more})

    def _facts(self, group: Group) -> dict[str, Any]:
        holdings, stream, row = group.holdings, group.stream, group.row
        low = holdings.low
        members = [self._member_facts(group, member) for member in group.members]
        if group.ghost is not None:
            lost = self._member_facts(group, group.ghost)
            members.append({**lost, "returns_ms": group.returns_ms})
        return {
            "stream": stream.name,
            "group": group.name,
            "kind": group.kind,
            "visibility": int(group.durable),
            "pattern": group.pattern,
            "next": low,
            "read": holdings.read,
            "first": stream.first,
            "tail": stream.next,
            "lag": stream.next - low,
            "logged": row.next,
            "waiting": holdings.waiting,
            "late": holdings.late,
            "held": holdings.held + holdings.leaving,
            "done": holdings.read - low - holdings.open,
            "lost": group.lost,
            "moved_ms": max(group.moved_ms, row.moved_ms),
            "by": row.by,
            "members": members,
        }

    def _member_facts(self, group: Group, member: Member) -> dict[str, Any]:
        return {
            "identity": member.identity,
            "link": member.link.number,
            "subscription": member.number,
            "held": member.held,
            "since_ms": member.joined_ms,
            "oldest_ms": group.holdings.since(member),
            "credit_records": member.left_records,
            "holds": group.kind != "exclusive" or member is group.holder,
        }


class _Acknowledging(Effect):
    """Records that are done; the log is told later."""

    groups: Groups
    group: Group
    member: Member
    picked: Picked

    def _take(self, page: Page, mask: int) -> tuple[int, int]:
        """Rows of a page leave the member's hands: those that it held, and those that waited."""
        group, holdings = self.group, self.group.holdings
        held, waited = holdings.unhand(page, self.member, mask)
        self.member.acknowledged(held.bit_count(), self.groups._shard.now_ms, group.deliveries)
        holdings.leave(page, held | waited)
        return held, waited

    def appended(self, part: Part, end_lsn: int) -> None:
        for page, mask in self.picked:
            self._take(page, mask)
            page.dirty = True
        self.groups._done(self.group, self.picked)
        self.groups._flush_later(self.group)


class _Leaving(_Acknowledging):
    """Records that are done once the log says so."""

    left: Sequence[tuple[Page, int, int]] = ()
    """Pages, each with what the member held of it and what waited there."""

    def taken(self, part: Part) -> None:
        self.left = [(page, *self._take(page, mask)) for page, mask in self.picked]

    def appended(self, part: Part, end_lsn: int) -> None:
        group = self.group
        self.groups._done(group, [(page, held | waited) for page, held, waited in self.left])
        if group.moved:
            self.groups._flush_later(group)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        group, member = self.group, self.member
        holdings, now_ms = group.holdings, self.groups._shard.now_ms
        there = not member.ended or group.ghost is member
        for page, held, waited in self.left:
            if waited:
                holdings.stay(page, waited, None, now_ms)
            if not held:
                continue
            holdings.stay(page, held, member if there else None, now_ms)
            if there:
                member.held += held.bit_count()
            elif group.slots is not None:
                group.slots.back(slots_of(page, held))
        self.groups.wake(group)
