"""Collections in order: distinct values, and places by the time at which they are due.

Owns a sorted list in chunks. The rules: adding at the end and removing from the front cost the
same for any size, and every other change costs a few comparisons more; a removed value takes
no room. A heap with lazy deletion would keep acknowledged messages until they are due. For
the messages of mailboxes, and the keys of streams.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

CHUNK: Final = 512
"""Entries of a chunk: removing the first one moves all others."""

T = TypeVar("T", bound=Any)


class Ordered(Generic[T]):
    """Distinct values in ascending order."""

    __slots__ = ("_chunks", "_tops")

    def __init__(self) -> None:
        self._chunks: list[list[T]] = []
        """Values in ascending order, in chunks that are never empty."""
        self._tops: list[T] = []
        """The greatest value of each chunk: a search with a key would call Python for each look."""

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __iter__(self) -> Iterator[T]:
        for chunk in self._chunks:
            yield from chunk

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    @property
    def first(self) -> T:
        """The least value; there must be one."""
        return self._chunks[0][0]

    @property
    def last(self) -> T:
        """The greatest value; there must be one."""
        return self._tops[-1]

    def add(self, value: T) -> None:
        """Add a value; nothing happens when it is there."""
        chunks, tops = self._chunks, self._tops
        if not chunks or value > tops[-1]:
            if chunks and len(chunks[-1]) < CHUNK:
                chunks[-1].append(value)
                tops[-1] = value
            else:
                chunks.append([value])
                tops.append(value)
            return
        # The first chunk whose greatest value is not below the value is the one for it.
        place = bisect_left(tops, value)
        chunk = chunks[place]
        at = bisect_left(chunk, value)
        if chunk[at] == value:
            return
        chunk.insert(at, value)
        if len(chunk) > 2 * CHUNK:
            self._split(place)

    def add_many(self, values: Iterable[T]) -> None:
        """Add values, in any order; a value that is there is not added again.

        They are sorted, so that the search for each chunk begins at the last one.
        """
        chunks, tops, add = self._chunks, self._tops, self.add
        place = 0
        for value in sorted(values):
            place = bisect_left(tops, value, place)
            if place == len(tops):
                # The value comes after all others; so do those that follow it.
                add(value)
                place = len(tops) - 1
                continue
            chunk = chunks[place]
            at = bisect_left(chunk, value)
            if chunk[at] != value:
                chunk.insert(at, value)
                if len(chunk) > 2 * CHUNK:
                    self._split(place)

    def _split(self, place: int) -> None:
        """Make two chunks of one that has got too long."""
        chunk = self._chunks[place]
        self._chunks.insert(place + 1, chunk[CHUNK:])
        del chunk[CHUNK:]
        self._tops.insert(place, chunk[-1])

    def discard(self, value: T) -> None:
        """Remove a value; nothing happens when it is not there."""
        chunks, tops = self._chunks, self._tops
        if not chunks:
            return
        chunk = chunks[0]
        if chunk[0] == value:  # Values mostly leave in their order: no search is needed then.
            place = at = 0
        else:
            place = bisect_left(tops, value)
            if place == len(chunks):
                return
            chunk = chunks[place]
            at = bisect_left(chunk, value)
            if chunk[at] != value:
                return
        del chunk[at]
        if not chunk:
            del chunks[place], tops[place]
        elif at == len(chunk):  # The greatest value of the chunk was removed.
            tops[place] = chunk[-1]

    def after(self, value: T) -> Iterator[T]:
        """Yield the values greater than a value, ascending; the set must not change meanwhile."""
        for run in self.runs_after(value):
            yield from run

    def runs_after(self, value: T) -> Iterator[list[T]]:
        """Yield what after() yields in lists that are never empty, and not to be changed."""
        chunks = self._chunks
        place = bisect_right(self._tops, value)
        if place == len(chunks):
            return
        chunk = chunks[place]
        yield chunk[bisect_right(chunk, value) :]
        yield from chunks[place + 1 :]

    def floor(self, value: T) -> T | None:
        """Return the greatest value that is not above this one; None: there is none.

        Callers find with it the batch in which a number lies: that with the greatest first number.
        """
        chunks = self._chunks
        place = bisect_left(self._tops, value)
        if place < len(chunks):
            chunk = chunks[place]
            at = bisect_right(chunk, value)
            if at:
                return chunk[at - 1]
        # All of that chunk is above the value: the last one of the chunk before it is next.
        return self._tops[place - 1] if place else None


def names_after(names: Sequence[str], prefix: str, after: str) -> Iterator[str]:
    """Yield the names of a sorted list that begin with a prefix and come after a name, ascending.

    after: empty: from the first on. The list must not change meanwhile.
    """
    # Names with the prefix lie together; an `after` before all of them says nothing.
    begin = after and after >= prefix
    place = bisect_right(names, after) if begin else bisect_left(names, prefix)
    while place < len(names) and names[place].startswith(prefix):
        yield names[place]
        place += 1


Pair = tuple[int, int]
"""(number of a mailbox, number of a message), as the tables have them."""


class Schedule:
    """Pairs, called places here, by the time at which they are due; each place has one time."""

    __slots__ = ("_at", "_order")

    def __init__(self) -> None:
        self._at: dict[Pair, int] = {}
        """Place -> time at which it is due."""
        self._order: Ordered[tuple[int, Pair]] = Ordered()
        """(time, place), the next one first."""

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, place: Pair) -> bool:
        return place in self._at

    def time(self, place: Pair) -> int | None:
        """When a place is due; None: never."""
        return self._at.get(place)

    @property
    def due_ms(self) -> int | None:
        """When the next place is due; None: no place ever is."""
        return self._order.first[0] if self._at else None

    def set(self, place: Pair, at_ms: int) -> None:
        """Make a place due at this time and at no other."""
        known = self._at.get(place)
        if known is not None:
            if known == at_ms:
                return
            self._order.discard((known, place))
        self._at[place] = at_ms
        self._order.add((at_ms, place))

    def put_off(self, ms: int) -> None:
        """Make all places due so much later: the broker missed that time (skipped_time.py)."""
        for place, at_ms in list(self._at.items()):
            self.set(place, at_ms + ms)

    def drop(self, place: Pair) -> None:
        """Forget when a place is due."""
        known = self._at.pop(place, None)
        if known is not None:
            self._order.discard((known, place))

    def pop_due(self, now_ms: int) -> Pair | None:
        """Remove and return the place that has been due longest; None: no place is due."""
        if not self._order:
            return None
        at_ms, place = self._order.first
        if at_ms > now_ms:
            return None
        self._order.discard((at_ms, place))
        del self._at[place]
        return place
