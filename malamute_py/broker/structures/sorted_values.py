"""Ordered collections that never have to be walked: numbers in order, and what is due when.

Owns a sorted list in chunks. The rule: adding at the end and taking from the front cost the
same whatever is in it, and every other change a few comparisons more; what was removed leaves
nothing behind. A heap with lazy deletion would keep what was acknowledged until it is due.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar

CHUNK: Final = 512
"""Entries of a chunk; removing one from its front moves so many words."""

T = TypeVar("T", bound=Any)


class Ordered(Generic[T]):
    """Distinct values in ascending order."""

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: list[list[T]] = []
        """None of them is empty."""

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __iter__(self) -> Iterator[T]:
        for chunk in self._chunks:
            yield from chunk

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    @property
    def first(self) -> T:
        """The least; there must be one."""
        return self._chunks[0][0]

    @property
    def last(self) -> T:
        """The greatest; there must be one."""
        return self._chunks[-1][-1]

    def add(self, value: T) -> None:
        """Put a value in its place; nothing happens when it is there."""
        chunks = self._chunks
        if not chunks:
            chunks.append([value])
            return
        chunk = chunks[-1]
        if value > chunk[-1]:
            if len(chunk) < CHUNK:
                chunk.append(value)
            else:
                chunks.append([value])
            return
        place = bisect_left(chunks, value, key=_greatest)
        chunk = chunks[place]
        at = bisect_left(chunk, value)
        if chunk[at] == value:
            return
        chunk.insert(at, value)
        if len(chunk) > 2 * CHUNK:
            chunks.insert(place + 1, chunk[CHUNK:])
            del chunk[CHUNK:]

    def discard(self, value: T) -> None:
        """Remove a value; nothing happens when it is not there."""
        chunks = self._chunks
        if not chunks:
            return
        chunk = chunks[0]
        if chunk[0] == value:
            place = at = 0
        else:
            place = bisect_left(chunks, value, key=_greatest)
            if place == len(chunks):
                return
            chunk = chunks[place]
            at = bisect_left(chunk, value)
            if chunk[at] != value:
                return
        del chunk[at]
        if not chunk:
            del chunks[place]

    def after(self, value: T) -> Iterator[T]:
        """Yield the values greater than a value, ascending; the set must not change meanwhile."""
        chunks = self._chunks
        place = bisect_right(chunks, value, key=_greatest)
        if place == len(chunks):
            return
        chunk = chunks[place]
        yield from chunk[bisect_right(chunk, value) :]
        for chunk in chunks[place + 1 :]:
            yield from chunk

    def floor(self, value: T) -> T | None:
        """The greatest that is not greater than a value."""
        chunks = self._chunks
        place = bisect_left(chunks, value, key=_greatest)
        if place < len(chunks):
            chunk = chunks[place]
            at = bisect_right(chunk, value)
            if at:
                return chunk[at - 1]
        return chunks[place - 1][-1] if place else None


def _greatest(chunk: list[T]) -> T:
    return chunk[-1]


Pair = tuple[int, int]
"""Mailbox and number, as the tables have them."""


class Schedule:
    """When something is to be done about a place: one time for each."""

    __slots__ = ("_at", "_order")

    def __init__(self) -> None:
        self._at: dict[Pair, int] = {}
        self._order: Ordered[tuple[int, Pair]] = Ordered()

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, place: Pair) -> bool:
        return place in self._at

    def time(self, place: Pair) -> int | None:
        """When something is to be done about it; None: never."""
        return self._at.get(place)

    @property
    def due_ms(self) -> int | None:
        """When the next is due."""
        return self._order.first[0] if self._at else None

    def set(self, place: Pair, at_ms: int) -> None:
        """Make a place due at this time, and at no other."""
        known = self._at.get(place)
        if known is not None:
            if known == at_ms:
                return
            self._order.discard((known, place))
        self._at[place] = at_ms
        self._order.add((at_ms, place))

    def drop(self, place: Pair) -> None:
        """Nothing is to be done about it."""
        known = self._at.pop(place, None)
        if known is not None:
            self._order.discard((known, place))

    def pop_due(self, now_ms: int) -> Pair | None:
        """The next that is due by now, which it is no more; None: nothing is."""
        if not self._order:
            return None
        at_ms, place = self._order.first
        if at_ms > now_ms:
            return None
        self._order.discard((at_ms, place))
        del self._at[place]
        return place
