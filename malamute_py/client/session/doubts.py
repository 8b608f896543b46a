"""Records of a group that a member has and that other members may have by now.

Owns the batches that no caller has taken when a lease of the member's records ends. The rules: the
broker does not say which leases ended, so a renewal asks for each record, and a record goes on to
the program only when the broker confirms that; a record that was delivered again takes the place
of the one in doubt. Records are named by their offsets. Source: SPEC.md, section 4.8.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypeVar

from malamute_py.client.session.acknowledgements import Range, merged
from malamute_py.client.session.held_batches import HeldBatch
from malamute_py.client.session.letters import ranges_of

Item = TypeVar("Item")


class Doubts:
    """The batches in doubt of one membership, in the order in which they were delivered."""

    __slots__ = ("_batches", "asked")

    def __init__(self) -> None:
        self._batches: list[HeldBatch] = []
        self.asked = False
        """Whether a renewal of all of them has been given to the acknowledgements."""

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def size(self) -> int:
        """Bytes of the batches."""
        return size_of(self._batches)

    def add(self, batches: list[HeldBatch]) -> None:
        """Keep batches whose leases may have ended until the broker has said whose they are.

        What was asked before does not cover them: all are asked for again.
        """
        if batches:
            self._batches += batches
            self.asked = False

    def ranges(self) -> list[Range]:
        """Return the offsets of all records in doubt, as ranges for the renewal that asks."""
        return merged([each for batch in self._batches for each in ranges_of(batch)])

    def drop(self, offsets: Iterable[int]) -> None:
        """Drop records that are others', or were delivered again."""
        gone = set(offsets)
        rest = [batch.part(gone, inside=False) for batch in self._batches]
        self._batches = [batch for batch in rest if batch is not None]

    def take(self, ranges: Iterable[Range]) -> list[HeldBatch]:
        """Take out the records in these ranges, whose renewal the broker has confirmed.

        They are the member's for certain, and go to its program.
        """
        sure = {offset for first, end in ranges for offset in range(first, end)}
        found = [batch.part(sure, inside=True) for batch in self._batches]
        self.drop(sure)
        return [batch for batch in found if batch is not None]

    def clear(self) -> None:
        """Drop all batches in doubt: the link has ended, or no caller reads the group any more."""
        self._batches.clear()
        self.asked = False


def without(items: Iterable[Item], offsets: set[int]) -> deque[Item]:
    """Return a member's queue without these records; its notices stay where they are."""
    left: deque[Item] = deque()
    for item in items:
        rest = item.part(offsets, inside=False) if isinstance(item, HeldBatch) else item
        if rest is not None:
            left.append(rest)  # type: ignore[arg-type]  # a part of a HeldBatch is one
    return left


def size_of(items: Iterable[object]) -> int:
    """Return the bytes of the batches among batches and notices."""
    return sum(item.stamp.size for item in items if isinstance(item, HeldBatch))
