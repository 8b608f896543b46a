"""Returns: records that a member held wait in their group again, and their attempts are counted.

Owns the way of such records through the log. The rules: a group whose settings bound attempts hands
out a record again only once the log has the attempt that ended; an attempt that the log refuses is
logged later, and the record waits for that: it is withheld from all members meanwhile. Records are
`picked` as pages of the group's holdings, each with the mask of their offsets. Source: SPEC.md,
section 4.8.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from malamute_py.broker.context import Shard
from malamute_py.broker.groups.group import Group
from malamute_py.broker.groups.holdings import Picked, ranges_of
from malamute_py.broker.groups.reader import GroupReader
from malamute_py.broker.log.steps import Steps, Then
from malamute_py.broker.structures.timers import Timers
from malamute_py.changelog.records import GroupReturned

NO_ATTEMPT: Final = frozenset({"bye", "draining"})
"""Ends of a link (`Link.happened`) that are no attempt of the records that its members held."""
RETRY_MS: Final = 1_000
"""Pause before a change that the log refused is tried again."""


class Returns:
    """Records on their way back into groups that count attempts: the log comes first."""

    def __init__(self, shard: Shard, steps: Steps, reader: GroupReader, timers: Timers) -> None:
        self._shard = shard
        self._steps = steps
        self._reader = reader
        self._timers = timers

    def change(self, group: Group, picked: Picked, why: str) -> GroupReturned:
        """Return the change by which the log has one attempt more of records. why: how it ended."""
        return GroupReturned(
            group.stream.number, group.name, ranges_of(picked), why, self._shard.epoch
        )

    def log_attempt(self, group: Group, picked: Picked, why: str) -> None:
        """Log that an attempt of withheld records has ended; then they wait again.

        why: how it ended. Called for groups that count attempts (`Group.counts_attempts`).
        """
        if group.gone or not picked:
            return
        counting = Then(
            partial(self._counted, group, picked), partial(self._count_later, group, picked, why)
        )
        change = self.change(group, picked, why)
        self._steps.put([change], counting, memory=group.stream.ring.memory)

    def _counted(self, group: Group, picked: Picked, _: int) -> None:
        """Let the records wait again at once, as the log has the attempt."""
        self._reader.back(group, picked, after_ms=0)

    def _count_later(self, group: Group, picked: Picked, why: str, *_: Any) -> None:
        """Try again later, as the log refused the attempt; the records stay withheld until then."""
        due_ms = self._shard.now_ms + RETRY_MS
        self._timers.set(due_ms, partial(self.log_attempt, group, picked, why))
