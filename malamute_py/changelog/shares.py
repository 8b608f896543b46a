"""Shares: who has how many of what is bounded over all, and who is to lose the next one.

Owns the accounting by owner. The rules: the owner that has the most loses its oldest, and among
owners that have as many the one whose oldest is older; so each of n owners keeps at least an n-th
of the bound, whatever the others do. Which one that is follows from the entries and their order
alone: a start that adds them in order, and every replica, finds the same. Each call costs about
the same however many there are.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

K = TypeVar("K")

_STALE_MAX: Final = 64
"""Entries of a heap that hold no more, beside as many as hold."""


class _Equals:
    """Owners that have equally many."""

    __slots__ = ("heap", "owners")

    def __init__(self) -> None:
        self.owners: dict[str, int] = {}
        """Owner -> place of its oldest."""
        self.heap: list[tuple[int, str]] = []
        """The same, the oldest first, and entries that hold no more; of one alone not kept."""

    def add(self, owner: str, oldest: int) -> None:
        """An owner has so many now, or another oldest."""
        owners, heap = self.owners, self.heap
        owners[owner] = oldest
        count = len(owners)
        if count == 2 or len(heap) > 2 * count + _STALE_MAX:
            heap[:] = [(place, one) for one, place in owners.items()]
            heapify(heap)
        elif count > 2:
            heappush(heap, (oldest, owner))

    def first(self) -> str:
        """The owner whose oldest is the oldest of all."""
        heap, owners = self.heap, self.owners
        if len(owners) == 1:
            return next(iter(owners))
        while owners.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][1]


class Shares(Generic[K]):
    """Entries by owner, each owner's in order."""

    __slots__ = ("_equals", "_most", "_next", "_owners", "total")

    def __init__(self) -> None:
        self._owners: dict[str, OrderedDict[K, int]] = {}
        """Owner -> entry -> its place among all."""
        self._equals: dict[int, _Equals] = {}
        """How many -> the owners that have so many."""
        self._most = 0
        self._next = 0
        self.total = 0

    def count(self, owner: str) -> int:
        """How many an owner has."""
        return len(self._owners.get(owner, ()))

    def add(self, owner: str, entry: K) -> None:
        """The newest of all; one that is there already stays where it is."""
        mine = self._owners.get(owner)
        if mine is None:
            mine = self._owners[owner] = OrderedDict()
        elif entry in mine:
            return
        mine[entry] = self._next
        self._next += 1
        self.total += 1
        self._moved(owner, mine, len(mine) - 1)

    def turn(self, owner: str, entry: K) -> K:
        """Add one that is not there, and return the one that goes for it, which has gone."""
        mine = self._owners.get(owner)
        if mine is None or len(mine) < self._most:
            self.add(owner, entry)
            loser, out = self.next_out()
            self.drop(loser, out)
            return out
        # It has the most already, as a lone busy owner always has: nobody's count changes.
        mine[entry] = self._next
        self._next += 1
        out, _ = mine.popitem(last=False)
        self._equals[self._most].add(owner, next(iter(mine.values())))
        return out

    def drop(self, owner: str, entry: K) -> None:
        """It is there no more."""
        mine = self._owners.get(owner)
        if mine is None or mine.pop(entry, None) is None:
            return
        self.total -= 1
        self._moved(owner, mine, len(mine) + 1)

    def renew(self, owner: str, entry: K) -> None:
        """It is the newest again."""
        self.drop(owner, entry)
        self.add(owner, entry)

    def next_out(self) -> tuple[str, K]:
        """Owner and entry that are to go next; there must be one."""
        owner = self._equals[self._most].first()
        return owner, next(iter(self._owners[owner]))

    def oldest(self, owner: str, count: int) -> list[K]:
        """So many of an owner's, the oldest first."""
        return [entry for entry, _ in zip(self._owners.get(owner, ()), range(count), strict=False)]

    @property
    def fair(self) -> int:
        """What each owner may have when all have equally many."""
        return self.total // max(1, len(self._owners))

    def _moved(self, owner: str, mine: OrderedDict[K, int], before: int) -> None:
        """An owner has another count than before."""
        if before:
            equals = self._equals[before]
            del equals.owners[owner]
            if not equals.owners:
                del self._equals[before]
        count = len(mine)
        if not count:
            del self._owners[owner]
        else:
            found = self._equals.get(count)
            if found is None:
                found = self._equals[count] = _Equals()
            found.add(owner, next(iter(mine.values())))
        if count > self._most:
            self._most = count
        elif self._most not in self._equals:
            # Counts move by one: whoever left the top is just below it.
            self._most = count
