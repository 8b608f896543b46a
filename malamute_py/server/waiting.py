"""Messages of a peer that came and wait for their turn, in little more memory than their bytes.

Owns how they are kept. The rule: small messages lie one behind the other in chunks, as a flood has
hundreds of thousands of them. One by one they would take two to three times their bytes, in memory
that Python keeps as long as any other small object lies beside them. Source: ARCHITECTURE.md, "What
a peer may cost".
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any, Final, NamedTuple

CHUNK_BYTES: Final = 64 << 10
"""Bytes from which on a chunk takes no further message."""
_CHUNK_MESSAGES: Final = 8_192
"""Messages from which on it takes none, either: they may be empty."""
_SMALL_BYTES: Final = 4 << 10
"""Size up to which a message of one frame lies in a chunk."""


class Arrived(NamedTuple):
    """A message as it came, and its bytes on the wire."""

    frames: list[Any]
    bytes: int
    parts: int


class _Chunk:
    """Small messages of one frame each, in their order."""

    __slots__ = ("at", "data", "lengths", "sizes", "taken")

    def __init__(self) -> None:
        self.data = bytearray()
        """Their frames."""
        self.lengths = array("I")
        """Bytes of each frame."""
        self.sizes = array("I")
        """Bytes of each message on the wire."""
        self.taken = 0
        """How many of the messages were taken."""
        self.at = 0
        """Where the frame of the next one begins."""

    def __len__(self) -> int:
        return len(self.lengths) - self.taken

    @property
    def is_full(self) -> bool:
        """Whether it takes no further message."""
        return len(self.data) >= CHUNK_BYTES or len(self.lengths) >= _CHUNK_MESSAGES

    def take(self) -> Arrived:
        """Take the first message that is left."""
        begin = self.at
        self.at += self.lengths[self.taken]
        size = self.sizes[self.taken]
        self.taken += 1
        with memoryview(self.data) as view:
            return Arrived([bytes(view[begin : self.at])], size, 1)


class Waiting:
    """Messages of one peer that wait, in the order in which they came."""

    __slots__ = ("_count", "_entries")

    def __init__(self) -> None:
        self._entries: deque[Arrived | _Chunk] = deque()
        self._count = 0

    def __len__(self) -> int:
        """Return how many messages wait."""
        return self._count

    def add(self, arrived: Arrived) -> None:
        """Keep a message behind the others."""
        entries = self._entries
        self._count += 1
        if arrived.parts != 1 or len(arrived.frames[0]) > _SMALL_BYTES:
            entries.append(arrived)
            return
        frame = arrived.frames[0]
        last = entries[-1] if entries else None
        if not isinstance(last, _Chunk) or last.is_full:
            last = _Chunk()
            entries.append(last)
        last.data += frame
        last.lengths.append(len(frame))
        last.sizes.append(arrived.bytes)

    def take(self) -> Arrived:
        """Take the first message. Raises IndexError: none waits."""
        first = self._entries[0]
        self._count -= 1
        if isinstance(first, Arrived):
            self._entries.popleft()
            return first
        arrived = first.take()
        if not first:
            self._entries.popleft()
        return arrived

    def drop(self) -> list[Any]:
        """Drop the last message, or chunk of messages; returns the frames that are to be freed."""
        last = self._entries.pop()
        if isinstance(last, Arrived):
            self._count -= 1
            return last.frames
        self._count -= len(last)
        return []
