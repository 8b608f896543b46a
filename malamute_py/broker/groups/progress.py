"""Progress: how far each group has come, as the log is told.

Owns the changes of the log that say which records of a group are done where no confirmed
acknowledgement says so: the member asked for no confirm (no tracker), or the records expired or
are gone. The rule: such records are done in the log a bounded time later; a restart before that
brings acknowledged ones again. Source: docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from malamute_py.broker.context import Shard
from malamute_py.broker.groups.group import Group
from malamute_py.broker.groups.holdings import LOGGED, LOGGING, UNLOGGED
from malamute_py.broker.log.steps import Steps, Then
from malamute_py.broker.structures.timers import Timers
from malamute_py.changelog.records import GroupDone, Range

RANGES_AT_ONCE: Final = 1_000
"""Ranges in one change from which on no further page is added; the rest is logged later."""


class Progress:
    """Positions of groups on their way into the log.

    flush_later() is called wherever records are done without a confirm; a timer does the rest.
    """

    def __init__(self, shard: Shard, steps: Steps, timers: Timers) -> None:
        self._shard = shard
        self._steps = steps
        self._timers = timers

    def flush_later(self, group: Group) -> None:
        """Log within `group_flush_ms` which records of a group are done, unless that is planned."""
        if not group.flush_at_ms and not group.flushing and not group.gone:
            group.flush_at_ms = self._shard.now_ms + self._shard.settings.group_flush_ms
            self._timers.set(group.flush_at_ms, partial(self._flush, group))

    def _flush(self, group: Group) -> None:
        """Log which records of a group are done that the log does not have as done.

        Called by the timer of flush_later().
        """
        group.flush_at_ms = 0
        if group.gone or group.flushing:
            return  # _flushed() looks again at what has been done since.
        holdings = group.holdings
        low = holdings.low  # All records before it are done.
        ranges: list[Range] = []
        if low > group.row.next:
            ranges.append((group.row.next, low))
        for page in holdings.pages:
            if page.logging is UNLOGGED and len(ranges) < RANGES_AT_ONCE:
                # Done records beyond the position; those before it are in the first range.
                ranges += [(first, end) for first, end in holdings.done_ahead(page) if end > low]
                page.logging = LOGGING
        if not ranges:
            return
        change = GroupDone(group.stream.number, group.name, ranges, self._shard.epoch)
        group.flushing = True
        flushing = Then(partial(self._flushed, group), partial(self._not_flushed, group))
        self._steps.put([change], flushing, memory=group.stream.ring.memory)

    def _flushed(self, group: Group, _: int) -> None:
        """Go on when the log has how far a group is; log again later if it has moved since."""
        self._settle(group, LOGGED)
        group.holdings.tidy()
        if group.has_unlogged:
            self.flush_later(group)

    def _not_flushed(self, group: Group, *_: Any) -> None:
        """Mark the group's done records as unlogged again, as the log refused; log them later."""
        self._settle(group, UNLOGGED)
        self.flush_later(group)

    def _settle(self, group: Group, logging: int) -> None:
        """Mark the pages that were being logged, now that the log has answered.

        logging: LOGGED where it has them, UNLOGGED where it refused.
        """
        group.flushing = False
        for page in group.holdings.pages:
            if page.logging is LOGGING:
                page.logging = logging
