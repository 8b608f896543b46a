"""Administration of groups: GROUP_INFO, EDIT_GROUP and REMOVE_GROUP.

Owns the facts that clients are given about groups, their settings, and the removal of a group by
name. Source: SPEC.md, section 4.7.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from malamute_protocol.commands import EditGroup, GroupInfo, RemoveGroup
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.groups.group import Group
from malamute_py.broker.groups.member import Member
from malamute_py.broker.links.link import Link
from malamute_py.broker.log.answers import RESULT_BYTES_MAX, Answer, Answers
from malamute_py.broker.log.pages import Entries, Pages
from malamute_py.broker.log.steps import Steps, Then
from malamute_py.broker.mail.mailboxes import Mailboxes
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.streams.named import Named, Place
from malamute_py.changelog.records import GroupEdited, GroupRemoved
from malamute_py.changelog.settings import GroupSettings, queue_settings

BESIDE_BYTES: Final = 2_000
"""Bytes of an answer beside a group's facts and members: an absent holder, and what frames all."""
_UNKNOWN: Final[dict[str, Any]] = {
    "link": 0, "subscription": 0, "held": 0, "since_ms": 0, "oldest_ms": 0, "credit_records": 0,
    "lease_ms": 0, "aside": False, "holds": False,
}  # fmt: skip
"""Facts of a holder whose place is kept from before the broker began."""


class GroupAdministration:
    """Handlers of the commands about groups as a whole; other handlers find groups by it, too."""

    def __init__(
        self,
        shard: Shard,
        catalogue: Catalogue,
        steps: Steps,
        answers: Answers,
        pages: Pages,
        groups: Named[Group, Any],
        mailboxes: Mailboxes,
        wake: Callable[[Group], None],
    ) -> None:
        """wake: gives a group a turn."""
        self._shard = shard
        self._catalogue = catalogue
        self._steps = steps
        self._answers = answers
        self._pages = pages
        self._groups = groups
        self._mailboxes = mailboxes
        self._wake = wake
        self._edits: dict[Place, GroupSettings] = {}
        """Settings on their way into the log; the next change begins from them."""

    def find(
        self, link: Link, stream: str, name: str, doing: str, action: str = "manage_streams"
    ) -> Group:
        """Return a group for a command of a link. Raises BrokerRefused.

        action: the permission for the stream that the link needs. doing: what a refusal says that
        it may not do, as "remove groups of".
        """
        found = self._catalogue.find(link.owner, stream, action, doing)
        group = self._groups.get((found.number, name))
        if group is None:
            raise BrokerRefused("unknown_group", f"stream '{stream}' has no group '{name}'")
        return group

    def stands(self, group: Group) -> bool:
        """Whether the stream has a group of this name, be it another since a reset.

        Called for a group that is `gone`: it was reset if one of its name stands, else removed.
        """
        return self._groups.get((group.stream.number, group.name)) is not None

    def remove_group(self, link: Link, command: RemoveGroup) -> None:
        """Remove a group without members; the answer follows when the removal is durable.

        Raises BrokerRefused.
        """
        group = self.find(link, command.stream, command.group, "remove groups of")
        if group.in_use or group.gone:
            raise BrokerRefused("in_use", f"group '{command.group}' has members, or keeps a place")
        stream = group.stream
        change = GroupRemoved(stream.number, command.group)
        answer = Answer(self._answers, link, command)
        drop = Then(partial(self._drop, (stream.number, command.group)))
        self._steps.put([change], drop, answer, memory=stream.ring.memory)

    def _drop(self, place: Place, _: int) -> None:
        """Forget a group whose removal the log has; end members that joined it meanwhile."""
        group = self._groups.remove(place)
        if group is None:
            return
        for member in list(group.members):
            # The member joined while the removal was on its way.
            member.owner.end(member, "unknown_group")
        group.gone = True

    def settings_of(
        self,
        link: Link,
        values: dict[str, Any],
        over: GroupSettings | None,
        defaults: dict[str, Any] | None = None,
    ) -> GroupSettings:
        """Return settings made of those that a client named and of others. Raises BrokerRefused.

        For EDIT_GROUP, and for JOIN_GROUP, whose settings are those of a group that it creates.
        over: settings in force, which hold where the client named nothing; None: a new group.
        defaults: values that hold instead of `over`, as a command that replaces all settings asks.
        """
        limits = self._shard.settings
        settings = queue_settings(GroupSettings, values, limits.settings_bytes_max, over, defaults)
        mailbox = settings.dead_letters
        if (
            "dead_letters" in values
            and mailbox
            and not limits.permit(link.owner, "dead_letters", mailbox)
        ):
            raise BrokerRefused("forbidden", f"you may not send to mailbox '{mailbox}'")
        return settings

    def edit_group(self, link: Link, command: EditGroup) -> None:
        """Change the settings of a group; the answer follows when the change is durable.

        Raises BrokerRefused.
        """
        group = self.find(link, command.stream, command.group, "manage groups of")
        stream = group.stream
        # To replace is to begin from no values, that is, from the defaults of GroupSettings.
        defaults: dict[str, Any] | None = {} if command.replace else None
        settings = self.settings_of(link, command.settings, self.settings_to_be(group), defaults)
        change = GroupEdited(stream.number, group.name, settings, self._shard.now_ms)
        answer = Answer(self._answers, link, command, partial(self.facts, group))
        self._edits[stream.number, group.name] = settings
        editing = Then(
            partial(self._edited, group, settings), partial(self._forget_edit, group, settings)
        )
        self._steps.put([change], editing, answer, memory=stream.ring.memory)

    def settings_to_be(self, group: Group) -> GroupSettings:
        """Return the settings of a group once all edits on their way are appended.

        An edit or a reset begins from these, so that it takes back no edit before it.
        """
        return self._edits.get((group.stream.number, group.name), group.row.settings)

    def _forget_edit(self, group: Group, settings: GroupSettings, *_: Any) -> None:
        """Forget settings that are on their way to the log no more; those of a later edit stay."""
        place = group.stream.number, group.name
        if self._edits.get(place) is settings:
            del self._edits[place]

    def _edited(self, group: Group, settings: GroupSettings, _: int) -> None:
        """Go on with settings that the log has, as `group.row` has them by now."""
        self._forget_edit(group, settings)
        # Where attempts_max was lowered, records that wait may be dead letters now.
        group.may_bury = bool(group.row.tries)
        self._wake(group)

    def group_info(self, link: Link, command: GroupInfo) -> None:
        """Answer with facts about one group, or about a page of groups. Raises BrokerRefused.

        A page is of one stream or, without its name, of all; the name of the group may be a prefix
        with `*`. `after` of the command: where the page before has ended.
        """
        name = command.group
        # The permission by which the link may be told: any that lets it use the stream.
        told_by = self._catalogue.action_for_facts(link.owner, command.stream)
        if command.stream and name and not name.endswith("*"):
            group = self.find(link, command.stream, name, "read", told_by)
            self._answers.result(link, command, self.facts(group))
            return
        if command.stream:
            self._catalogue.find(link.owner, command.stream, told_by, "read")
        prefix = name.removesuffix("*")
        self._groups.page(self._pages, self._catalogue, link, command, prefix, self.facts)

    def facts(self, group: Group) -> dict[str, Any]:
        """Return facts about a group, as GROUP_INFO tells them; records are counted by their state.

        `next`: the position. `read`: the reader's position. `first`, `tail`: the stream's bounds.
        `lag`: records from the position on. `logged`: the log's position. `done`: records
        after the position that are done. `lost`: records gone before a member got them.
        """
        holdings, stream, row = group.holdings, group.stream, group.row
        low = holdings.low
        facts: dict[str, Any] = {
            "stream": stream.name,
            "group": group.name,
            "kind": group.kind,
            "visibility": int(group.durable),
            "pattern": group.selection.pattern,
            "next": low,
            "read": holdings.read,
            "first": stream.begin,
            "tail": stream.next,
            "lag": stream.next - low,
            "logged": row.next,
            "waiting": holdings.waiting,
            "late": holdings.late,
            # For clients, what waits for the log is still held.
            "held": holdings.held + holdings.withheld,
            "done": holdings.read - low - holdings.open,
            "lost": group.lost,
            "moved_ms": max(group.moved_ms, row.moved_ms),
            "by": row.by,
            "attempts": _attempts(group),
            **self._mailboxes.letters_in(group.dead_letters, group.default_dead_letters),
            "settings": msgspec.structs.asdict(row.settings),
        }
        room = RESULT_BYTES_MAX - BESIDE_BYTES - len(msgspec.msgpack.encode(facts))
        return {**facts, "members": self._members_facts(group, room)}

    def _members_facts(self, group: Group, bytes_max: int) -> list[dict[str, Any]]:
        """Return the facts of as many members as fit, and of a holder that is absent."""
        count = len(group.members)
        told: Entries[dict[str, Any]] = Entries(count, count, bytes_max)
        told.add_all(self._member_facts(group, member) for member in group.members)
        absent = group.absent_holder
        if absent is not None:
            # A holder from before the broker began is known by its identity only.
            lost = self._member_facts(group, absent) if isinstance(absent, Member) else {
                **_UNKNOWN, "identity": absent.identity,
            }  # fmt: skip
            told.found.append({**lost, "returns_ms": group.returns_ms})
        return told.found

    def _member_facts(self, group: Group, member: Member) -> dict[str, Any]:
        """Return a member's facts for an answer, as SPEC.md has their names.

        `oldest_ms`: since when it holds its oldest record. `aside`: it is passed over, as a lease
        has ended. `holds`: it is given records.
        """
        return {
            "identity": member.identity,
            "link": member.link.number,
            "subscription": member.number,
            "held": member.held,
            "since_ms": member.joined_ms,
            "oldest_ms": group.holdings.since(member),
            "credit_records": member.left_records,
            "lease_ms": member.lease_ms,
            "aside": member.aside,
            "holds": group.kind != "exclusive" or member is group.holder,
        }


def _attempts(group: Group) -> list[list[int]]:
    """Count the records that are not done by attempts, for GROUP_INFO: [attempts, records]."""
    counted: dict[int, int] = {}
    for first, end, times, _ in group.row.tries:
        counted[times] = counted.get(times, 0) + end - first
    return [[times, counted[times]] for times in sorted(counted)]
