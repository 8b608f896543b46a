"""Resetting: RESET_GROUP, by which a group stands at another place of its stream.

Owns the way of a group to its new position. The rules: no member is at work while a group is reset,
so that nothing which it was delivered before counts for the new position; members that join
meanwhile wait; whatever becomes of the reset, the group goes on as the log has it. Source: SPEC.md,
section 4.8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from malamute_protocol.commands import ResetGroup, StartKind
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.groups.administration import GroupAdministration
from malamute_py.broker.groups.group import Group
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.answers import Answer, Answers
from malamute_py.broker.log.steps import Steps, Then
from malamute_py.broker.streams.named import Named
from malamute_py.broker.streams.start_positions import Begin, Starts
from malamute_py.changelog.records import Change, GroupHeld, GroupSet


class Resetting:
    """The command RESET_GROUP."""

    def __init__(
        self,
        shard: Shard,
        links: Links,
        steps: Steps,
        starts: Starts,
        answers: Answers,
        groups: Named[Group, Any],
        *,
        end_members: Callable[[Group], None],
        renewed: Callable[[Group, int], None],
        administration: GroupAdministration,
    ) -> None:
        """end_members: ends the memberships of a group, and has members that join wait.

        renewed: has a group go on as the log has it, which is durable at an LSN (0: in memory).
        """
        self._shard = shard
        self._links = links
        self._steps = steps
        self._starts = starts
        self._answers = answers
        self._groups = groups
        self._end_members = end_members
        self._renewed = renewed
        self._administration = administration

    def reset(self, link: Link, command: ResetGroup) -> None:
        """Move a group to another position; the answer follows when that is durable.

        The position is looked for first, as it may be a time. Raises BrokerRefused.
        """
        group = self._group(link, command)
        self._links.count_query(link)
        found = self._links.contained(
            link, "RESET_GROUP", partial(self._found, link, command, group)
        )
        self._starts.resolve(
            group.stream, command.start, group.durable, group.selection.pattern, found,
            end=group.stream.next, asker=link, wanted=lambda: link.open,
        )  # fmt: skip

    def _group(self, link: Link, command: ResetGroup) -> Group:
        """Return the group of a command, which may be reset now. Raises BrokerRefused."""
        group = self._administration.find(link, command.stream, command.group, "reset groups of")
        kind, *_ = command.start or [StartKind.LATEST]
        if kind == StartKind.LAST_PER_SUBJECT:
            raise BrokerRefused("bad_start", "a group stands at one position")
        if group.gone:
            raise BrokerRefused("in_use", f"group '{group.name}' is being reset")
        if group.in_use and not command.force:
            raise BrokerRefused("in_use", f"group '{group.name}' has members, or keeps a place")
        return group

    def _found(
        self, link: Link, command: ResetGroup, group: Group, begin: Begin | BrokerRefused
    ) -> None:
        """Log the new position that was found, and end the group's members.

        begin: the position, or why none was found.
        """
        link.queries -= 1
        try:
            if isinstance(begin, BrokerRefused):
                raise begin
            # Members may have joined, and the stream may have gone, since the start was looked for.
            if self._group(link, command) is not group:
                raise BrokerRefused("unknown_group", f"group '{group.name}' is another one now")
            if begin.rewound_from is not None:
                raise BrokerRefused("bad_start", f"the stream ends at {group.tail}")
        except BrokerRefused as error:
            self._answers.refuse_with(link, command, error)
            return
        stream, row, before = group.stream, group.row, group.holdings.low
        change = GroupSet(
            stream.number, group.name, row.kind, row.pattern, max(begin.next, stream.begin),
            self._shard.now_ms, "reset", row.by, self._shard.epoch, row.durable,
            self._administration.settings_to_be(group),
        )  # fmt: skip
        renewing = Then(partial(self._renewed, group), partial(self._stays, group))
        answer = Answer(self._answers, link, command, partial(self._told, group, before))
        self._end_members(group)
        changes: list[Change] = [change]
        if row.kind == "exclusive":
            # The place is free: its holder has to join again as all members have.
            changes.append(GroupHeld(stream.number, group.name, holder=None))
        self._steps.put(changes, renewing, answer, memory=stream.ring.memory)

    def _stays(self, group: Group, code: str, reason: str, retry_ms: int) -> None:
        """Take the group up where it stood, as the log has refused its reset."""
        self._renewed(group, 0)  # 0: no LSN has to be durable first.

    def _told(self, before: Group, stood: int) -> dict[str, Any]:
        """Return facts about a group that was reset, for the answer; none if it has gone.

        stood: its position before, which the operator may go back to.
        """
        group = self._groups.get((before.stream.number, before.name))
        return {} if group is None else {**self._administration.facts(group), "before": stood}
