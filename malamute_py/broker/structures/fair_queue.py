"""Fair queue: items that wait, by owner, and the owners have their turns.

Owns the order in which items leave. The rule: an owner with 1,000 items does not hold up one with a
single item. For questions to the journal, reads of history, looks into mailboxes, and pages.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class FairQueue(Generic[K, T]):
    """Distinct items that wait, by owner."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: Final[dict[K, dict[T, None]]] = {}
        """Owner -> its items, none of them empty; the owners have their turns in this order. What
        looks at many queues in each turn looks at this one: __bool__() costs a call in Python."""

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def add(self, owner: K, item: T) -> None:
        """Let an item wait, after the others of its owner."""
        self.waiting.setdefault(owner, {})[item] = None

    def take(self) -> T:
        """Remove and return the first item of the owner whose turn it is; there must be one."""
        owner = next(iter(self.waiting))
        mine = self.waiting.pop(owner)
        item = next(iter(mine))
        del mine[item]
        if mine:  # The owner has its next turn after all others.
            self.waiting[owner] = mine
        return item

    def turn(self) -> T:
        """Return the first item of the owner whose turn it is, and leave it there.

        There must be one. It is first until discard(), so that items are done in their order.
        """
        owner = next(iter(self.waiting))
        mine = self.waiting.pop(owner)
        self.waiting[owner] = mine  # The owner has its next turn after all others.
        return next(iter(mine))

    def discard(self, owner: K, item: T) -> None:
        """Let an item wait no longer; nothing happens when it does not."""
        mine = self.waiting.get(owner)
        if mine is not None:
            mine.pop(item, None)
            if not mine:
                del self.waiting[owner]
