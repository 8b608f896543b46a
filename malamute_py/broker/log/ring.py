"""Rings: the position up to which each can no longer lose anything.

Owns `visible` of each ring, and the queue of batches and steps that wait for it. The rules:
`visible` moves at the ends of bundles only, and never back; a ring in memory is visible up to its
end. A ring knows no streams: publishing adds a batch to the queue and removes it once it is
visible. Source: docs/design.md (The core and its shell; Promises).

A ring is a circle of segment files, or of memory; an LSN is a position in it, in bytes ever
written. A waiter is a client that is to be confirmed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from malamute_py.broker.links.link import Link
from malamute_py.broker.ready import MAIN, RingFacts
from malamute_py.changelog.settings import StreamSettings

EPOCH_SHIFT = 40
"""Bits by which the epoch is shifted: a stream in memory begins each epoch at that offset."""
Settlement: TypeAlias = Callable[[tuple[str, str] | None], None]
"""Called with None once an LSN is visible, or with the code and reason why it never will be."""


class Waiter(msgspec.Struct, eq=False):
    """One publish or one step that is to be confirmed."""

    link: Link
    tracker: int
    level: int
    size: int
    """Bytes of the link's window that the publish or step occupies."""
    duplicate: bool = False
    epoch: int = 0
    offset: int = -1
    append_time_ms: int = 0
    patient: bool = False
    """Whether the confirm may wait until something else is sent to the link."""
    command: int = 10
    """Number of the command that is to be answered: PUBLISH, or that of a step."""


class Unsettled(msgspec.Struct, eq=False):
    """A batch or a step that waits for a ring to be visible up to an LSN."""

    end_lsn: int
    bytes: int
    batch: Any = None
    """The StampedBatch of a stream (stream.py): a ring knows no streams."""
    waiters: tuple[Waiter, ...] = ()
    call: Settlement | None = None
    """Called when the LSN is visible; for a change that waits."""


class RingState:
    """One ring, as the core knows it."""

    __slots__ = (
        "awaited", "end_lsn", "failed", "memory", "name", "numbers", "unsettled", "visible",
    )  # fmt: skip

    def __init__(self, name: str, memory: bool, facts: RingFacts | None) -> None:
        self.name = name
        self.memory = memory
        """Whether the ring is in memory: an append there is as durable as it will ever be."""
        self.end_lsn = facts.end_lsn if facts else 0
        self.visible = self.end_lsn
        """LSN up to which no crash and no power loss can take anything back."""
        self.unsettled: deque[Unsettled] = deque()
        self.awaited = self.end_lsn
        """LSN up to which a peer waits for the ring to be visible; the rest may be synced later."""
        self.failed: tuple[str, str] | None = None
        """Code and reason, once the ring refuses every append."""
        self.numbers: set[int] = set()
        """Numbers of the streams that live in the ring."""


def ring_name(settings: StreamSettings, uuid: bytes) -> str:
    """Return the name of the ring for a new stream of these settings; uuid: the stream's."""
    if settings.ring_bytes:
        return f"{'memory' if settings.memory else 'stream'}-{uuid.hex()}"
    return "memory" if settings.memory else MAIN
