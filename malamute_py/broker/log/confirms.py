"""Confirms: the answer to a publish or a step, at the level that it asked for.

Owns the moment of each confirm. The rules: `stored` is confirmed when the journal has the batch;
`synced` when `visible` of the ring covers the batch, and `visible` moves at the ends of bundles
only; a confirm states the level that was reached, never more. A batch of a stream in memory
survives nothing and is confirmed as `none`; a publish that asks for more there by name is refused.
Source: docs/design.md, Promises.

A waiter is one publish or step that is to be confirmed; an LSN is a position in a ring.
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
    """Sends the answers that senders wait for."""

    def __init__(self, links: Links) -> None:
        self._links = links

    def confirm(self, waiter: Waiter, level: int) -> None:
        """Send a CONFIRM with the level that was reached, and free its bytes of the window."""
        link = waiter.link
        link.unconfirmed_bytes -= waiter.size
        # A sender that asked for level `none` gets refusals only.
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
        """Send a REFUSED, since nothing was stored, and free the bytes of the link's window."""
        link = waiter.link
        link.unconfirmed_bytes -= waiter.size
        if link.open:
            self._links.refuse(link, waiter.command, waiter.tracker, code, reason, retry_ms)

    def settle_by(self, ring: RingState, waiter: Waiter, end_lsn: int) -> None:
        """Confirm now if the level that a waiter asked for is reached, else when it is.

        For a command that came again, whose original the log has by now. end_lsn: where the ring
        has what is confirmed; `synced` is reached once the ring is visible up to there.
        """
        if ring.memory:
            self.confirm(waiter, NONE)
        elif waiter.level <= STORED:
            self.confirm(waiter, STORED)
        elif ring.visible >= end_lsn:
            self.confirm(waiter, SYNCED)
        else:
            ring.unsettled.append(Unsettled(end_lsn, bytes=0, waiters=(waiter,)))
            ring.awaited = end_lsn  # A sender waits: the sync is not put off.
