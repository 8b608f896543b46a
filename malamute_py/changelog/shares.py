"""Shares of a bounded number of entries: how many each owner has, and who loses the next one.

Owns the accounting by owner. The rules: when the bound is reached, the owner with the most entries
loses its oldest entry, and among owners with equally many the one whose oldest entry is older. Each
of n owners so keeps at least an n-th of the bound, whatever the others do. The choice follows from
the entries and their order alone, so that a start that adds them in order, and every replica, makes
the same choice. A call costs about the same however many entries there are. Entries are keys of
commands, by their sender's owner (tables.py), and producers, by their identity.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

K = TypeVar("K")

_STALE_MAX: Final = 64
"""Stale entries that a heap, or the set of moved owners, may have beside as many valid ones."""


class _Equals:
    """Owners that have equally many entries."""

    __slots__ = ("heap", "owners")

    def __init__(self) -> None:
        self.owners: dict[str, int] = {}
        """Owner -> place of its oldest entry."""
        self.heap: list[tuple[int, str]] = []
        """A heap of the oldest entry of each owner, stale ones included; not kept for a lone
        owner."""

    def add(self, owner: str, oldest: int) -> None:
        """Note an owner that now has this number of entries, or another oldest entry.

        Entries of the heap that have become wrong stay until there are too many, or `first` meets
        them.
        """
        owners, heap = self.owners, self.heap
        owners[owner] = oldest
        count = len(owners)
        if count == 2 or len(heap) > 2 * count + _STALE_MAX:
            # The heap is made anew: a second owner has come, or too many entries are stale.
            heap[:] = [(place, one) for one, place in owners.items()]
            heapify(heap)
        elif count > 2:
            heappush(heap, (oldest, owner))

    def first(self) -> str:
        """Return the owner whose oldest entry is the oldest of all."""
        heap, owners = self.heap, self.owners
        if len(owners) == 1:
            return next(iter(owners))
        oldest, owner = heap[0]
        while owners.get(owner) != oldest:  # The entry is stale.
            heappop(heap)
            oldest, owner = heap[0]
        return owner


class Shares(Generic[K]):
    """Entries by owner, each owner's entries in order."""

    __slots__ = ("_equals", "_most", "_moved", "_next", "_owners", "_ranked", "total")

    def __init__(self) -> None:
        self._owners: dict[str, OrderedDict[K, int]] = {}
        """Owner -> entry -> its place among the entries of all owners."""
        self._moved: dict[str, None] = {}
        """Owners whose count differs from the one by which they are ranked, or that are not ranked
        yet. Adding an entry only notes its owner here; ranking waits until a caller asks which
        entry is to go."""
        self._ranked: dict[str, int] = {}
        """Owner -> the count under which `_equals` has it."""
        self._equals: dict[int, _Equals] = {}
        """Count -> the owners that are ranked with this count."""
        self._most = 0
        """The greatest count with which an owner is ranked."""
        self._next = 0
        self.total = 0

    def count(self, owner: str) -> int:
        """Return how many entries an owner has."""
        return len(self._owners.get(owner, ()))

    def add(self, owner: str, entry: K) -> None:
        """Add an entry as the newest of all; an entry that is there already stays where it is."""
        mine = self._owners.get(owner)
        if mine is None:
            mine = self._owners[owner] = OrderedDict()
        elif entry in mine:
            return
        mine[entry] = self._next
        self._next += 1
        self.total += 1
        self._moved[owner] = None

    def swap_in(self, owner: str, entry: K) -> K:
        """Add an entry that is not there yet; remove and return the one that makes room for it.

        Called when the bound of all entries is reached.
        """
        if self._moved:
            self._rank()
        mine = self._owners.get(owner)
        if mine is None or len(mine) < self._most:  # Another owner has more.
            self.add(owner, entry)
            loser, out = self.next_out()
            self.drop(loser, out)
            return out
        # The owner that has the most takes the place of its own oldest entry: no count changes. A
        # lone busy owner always does this.
        mine[entry] = self._next
        self._next += 1
        out, _ = mine.popitem(last=False)
        self._equals[self._most].add(owner, next(iter(mine.values())))
        return out

    def drop(self, owner: str, entry: K) -> None:
        """Remove an entry; nothing happens when it is not there."""
        mine = self._owners.get(owner)
        if mine is None or mine.pop(entry, None) is None:
            return
        self.total -= 1
        self._moved[owner] = None
        if not mine:
            del self._owners[owner]
            if len(self._moved) > 2 * len(self._owners) + _STALE_MAX:
                # Owners come and go without a call that ranks them.
                self._rank()

    def renew(self, owner: str, entry: K) -> None:
        """Make an entry the newest of its owner, as it is used again: others go before it."""
        self.drop(owner, entry)
        self.add(owner, entry)

    def next_out(self) -> tuple[str, K]:
        """Return owner and entry that are to go next; there must be an entry."""
        if self._moved:
            self._rank()
        owner = self._equals[self._most].first()
        return owner, next(iter(self._owners[owner]))

    def oldest(self, owner: str, count: int) -> list[K]:
        """Return up to so many of an owner's entries, the oldest first."""
        return [entry for entry, _ in zip(self._owners.get(owner, ()), range(count), strict=False)]

    @property
    def fair(self) -> int:
        """Return how many entries each owner would have if all had equally many.

        An owner with more has some to spare when room is needed.
        """
        return self.total // max(1, len(self._owners))

    def _rank(self) -> None:
        """File each owner whose count has changed (`_moved`) under its present count.

        Called before the owner with the most entries is looked for: `_equals` has the owners by
        their counts, and `_most` is the greatest count.
        """
        ranked, equals_of = self._ranked, self._equals
        for owner in self._moved:
            before = ranked.pop(owner, 0)
            if before:  # It leaves the owners that have as many as it had.
                equals = equals_of[before]
                del equals.owners[owner]
                if not equals.owners:
                    del equals_of[before]
            mine = self._owners.get(owner)
            if mine is None:  # It has no entry left.
                continue
            count = ranked[owner] = len(mine)
            found = equals_of.get(count)
            if found is None:
                found = equals_of[count] = _Equals()
            oldest = next(iter(mine.values()))
            found.add(owner, oldest)
            if count > self._most:
                self._most = count
        self._moved.clear()
        if self._most not in equals_of:
            # Where entries make room for others, the owner that left the top is just below it.
            below = self._most - 1
            self._most = below if below in equals_of else max(equals_of, default=0)
