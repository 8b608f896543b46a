"""Confirms: what was promised to a producer, and when it holds.

Owns who waits for which ring to be visible up to where. The rules: `stored` is answered when the
journal has the batch; `synced` when `visible` of its ring covers it, a number that moves at the
ends of bundles only; a confirm states the level it reached, never more. A batch of a stream in
memory is confirmed as `none`, which is what it survives; who asks for more there by name is refused
at the publish. Source: docs/design.md, Promises.
"""

from __future__ import annotations

from typing import Final

from malamute_protocol.commands import Confirm, Level
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.ring import RingState, Unsettled, Waiter

DEFAULT: Final = int(Level.DEFAULT)
NONE: Final = int(Level.NONE)
STORED: Final = int(Level.STORED)
SYNCED: Final = int(Level.SYNCED)
LEVEL_NAMES: Final = {int(level): level.name.lower() for level in Level}


class Confirms:
    """Answers what has come true."""

    def __init__(self, links: Links) -> None:
        self._links = links

    def confirm(self, waiter: Waiter, level: int) -> None:
        """Tell the producer the level that was reached."""
        link = waiter.link
        link.unconfirmed_bytes -= waiter.size
        # Who asked for no promise is told of a refusal only.
        if link.open and waiter.level != NONE:
            confirm = Confirm(
                waiter.tracker, level, waiter.epoch, waiter.offset,
                waiter.append_time_ms, waiter.duplicate,
            )  # fmt: skip
            if waiter.patient:
                self._links.say_later(link, confirm)
            else:
                self._links.say(link, confirm)

    def refuse(self, waiter: Waiter, code: str, reason: str, retry_ms: int = 0) -> None:
        """Tell the producer that nothing was stored."""
        link = waiter.link
        link.unconfirmed_bytes -= waiter.size
        if link.open and waiter.tracker:
            self._links.refuse(link, waiter.command, waiter.tracker, code, reason, retry_ms)

    def settle_by(self, ring: RingState, waiter: Waiter, end_lsn: int) -> None:
        """Confirm now if the waiter's level is reached at `end_lsn`, else when it is."""
        if ring.memory:
            self.confirm(waiter, NONE)
        elif waiter.level <= STORED:
            self.confirm(waiter, STORED)
        elif ring.visible >= end_lsn:
            self.confirm(waiter, SYNCED)
        else:
            ring.unsettled.append(Unsettled(end_lsn, 0, None, (waiter,)))
            ring.awaited = end_lsn
