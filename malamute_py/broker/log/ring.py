"""Rings: up to where each one can no longer lose what was appended.

Owns `visible` of each ring, and what waits for it. The rules: `visible` moves at the ends of
bundles only, and never back; a ring in memory is visible as far as it was appended. A ring knows
no streams: publishing puts a batch here, and takes it from here once it is visible. Source:
docs/design.md (The core and its shell; Promises).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from malamute_py.broker.links.links import Link
from malamute_py.broker.ready import MAIN, RingFacts
from malamute_py.changelog.settings import StreamSettings

EPOCH_SHIFT = 40
"""A stream in memory goes on at epoch << 40 after a restart: no offset comes twice."""
Settlement: TypeAlias = Callable[[tuple[str, str] | None], None]
"""Called with None, or with the code and reason why it will never be."""


class Waiter(msgspec.Struct, eq=False):
    """One publish, or one step, that is to be confirmed."""

    link: Link
    tracker: int
    level: int
    size: int
    """Bytes of the link's window that it takes."""
    duplicate: bool = False
    epoch: int = 0
    offset: int = -1
    append_time_ms: int = 0
    patient: bool = False
    """Its confirm may wait for what else is said to the link."""
    command: int = 10
    """Number of the command that is to be answered: PUBLISH, or that of a step."""


class Settled(msgspec.Struct, eq=False):
    """Something that waits for a ring to be visible up to an LSN."""

    end_lsn: int
    bytes: int
    batch: Any = None
    """The StampedBatch of a stream (stream.py): a ring knows no streams."""
    waiters: tuple[Waiter, ...] = ()
    call: Settlement | None = None
    """Called instead of confirming, where a change waits."""


class RingState:
    """One ring, as far as the core is concerned."""

    __slots__ = (
        "awaited", "end_lsn", "failed", "memory", "name", "numbers", "unsettled", "visible",
    )  # fmt: skip

    def __init__(self, name: str, memory: bool, facts: RingFacts | None) -> None:
        self.name = name
        self.memory = memory
        """Whether the ring is in memory: what is appended is as durable as it will ever be."""
        self.end_lsn = facts.end_lsn if facts else 0
        self.visible = self.end_lsn
        """Up to here nothing can be taken back: the least of all that must have happened."""
        self.unsettled: deque[Settled] = deque()
        self.awaited = self.end_lsn
        """LSN up to which a peer waits for the ring to be visible; the rest may be synced later."""
        self.failed: tuple[str, str] | None = None
        """Code and reason, once the ring takes nothing more."""
        self.numbers: set[int] = set()
        """Numbers of the streams that live in the ring."""


def ring_name(settings: StreamSettings, uuid: bytes) -> str:
    """The ring that a stream of these settings lives in."""
    if settings.ring_bytes:
        return f"{'memory' if settings.memory else 'stream'}-{uuid.hex()}"
    return "memory" if settings.memory else MAIN
