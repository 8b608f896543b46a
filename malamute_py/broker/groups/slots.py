"""Slots of a keyed group: which member a record belongs to by its key.

Owns the division of 1,024 slots among the members, by rendezvous hash. The rule: a slot moves only
when its member holds nothing of it, so that records of one key are in one place, in order. Source:
docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

SLOTS: Final = 1_024
NOBODY: Final = -1
Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
SlotsOfRows: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Places: TypeAlias = "np.ndarray[Any, np.dtype[np.int16]]"


class Candidate(Protocol):
    """The facts about a member that decide which slots it gets."""

    place: int
    """Its number within the group."""
    session: bytes
    number: int


class Slots:
    """Which member of a keyed group each slot belongs to."""

    __slots__ = ("_best", "_holder", "_late", "_target", "held", "owner", "settled", "waiting")

    def __init__(self) -> None:
        self.owner: Places = np.full(SLOTS, NOBODY, np.int16)
        """Owner of each slot now; -1 while the slot moves or a record of it is late."""
        self._target: Places = np.full(SLOTS, NOBODY, np.int16)
        """Owner that each slot is to have."""
        self._best = np.zeros(SLOTS, np.uint64)
        """Weight of the member that the slot is to belong to."""
        self._holder: Places = np.full(SLOTS, NOBODY, np.int16)
        """Member that was given each slot's last records."""
        self.held: Numbers = np.zeros(SLOTS, np.int64)
        """Records of each slot in a member's hands, or on their way out."""
        self._late: Numbers = np.zeros(SLOTS, np.int64)
        self.waiting: Numbers = np.zeros(SLOTS, np.int64)
        self.settled = True
        """Whether every slot belongs to the member that it is to belong to."""

    def enter(self, member: Candidate) -> None:
        """Give a member the slots where its hash is highest, each once none of its records is held.

        The slots of the other members are not compared anew: a thousand members may come or go in
        one step.
        """
        weight = _weights([member], np.arange(SLOTS))[0]
        better = (weight > self._best) | (self._target == NOBODY)
        self._target[better] = member.place
        self._best[better] = weight[better]
        self.settle()

    def leave(self, places: list[int], members: Sequence[Candidate]) -> None:
        """Give the slots of members that have left to those of the others that weigh most."""
        lost = np.flatnonzero(np.isin(self._target, places))
        if members and len(lost):
            weights = _weights(members, lost)
            first = weights.argmax(axis=0)
            self._target[lost] = np.array([one.place for one in members], np.int16)[first]
            self._best[lost] = weights[first, np.arange(len(lost))]
        else:
            self._target[lost] = NOBODY
        self.settle()

    def settle(self) -> None:
        """Move slots to the members that they are to belong to, unless records are in hand.

        Until then a slot has no owner, so that none of its records is handed out.
        """
        free = (self.held == 0) | (self._holder == self._target)
        free &= self._late == 0
        self.owner = np.where(free, self._target, np.int16(NOBODY))
        self.settled = bool(free.all())

    def take_in(self, slots: SlotsOfRows) -> None:
        """Count records of these slots as waiting."""
        _count(self.waiting, slots, 1)

    def hand(self, slots: SlotsOfRows, place: int) -> None:
        """Count waiting records of these slots as in a member's hands."""
        if len(slots) == 1:
            slot = slots[0]
            self.waiting[slot] -= 1
            self.held[slot] += 1
        else:
            counts = np.bincount(slots, minlength=SLOTS)
            self.waiting -= counts
            self.held += counts
        self._holder[slots] = place

    def withhold(self, slots: SlotsOfRows) -> None:
        """Count waiting records as in hand: no member gets them."""
        _count(self.waiting, slots, -1)
        _count(self.held, slots, 1)

    def done(self, slots: SlotsOfRows) -> None:
        """Take records out of the hands of their members."""
        _count(self.held, slots, -1)
        if not self.settled:
            self.settle()

    def back(self, slots: SlotsOfRows, *, settle: bool = True) -> None:
        """Count records in hand as waiting again. settle: False where leave() settles after it."""
        _count(self.held, slots, -1)
        _count(self.waiting, slots, 1)
        if settle:
            self.settle()

    def closed(self, slots: SlotsOfRows) -> None:
        """Count waiting records as done."""
        _count(self.waiting, slots, -1)

    def delay(self, slots: SlotsOfRows) -> None:
        """Count records in hand as late: later records of their slots wait for them."""
        _count(self.held, slots, -1)
        _count(self._late, slots, 1)
        self.settle()

    def due(self, slots: SlotsOfRows) -> None:
        """Count late records as waiting again."""
        _count(self._late, slots, -1)
        _count(self.waiting, slots, 1)
        self.settle()


def _weights(members: Sequence[Candidate], slots: Numbers) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Rendezvous hash of each member (a row) with each of these slots (a column)."""
    names = (one.session + one.number.to_bytes(16, "little", signed=True) for one in members)
    seeds = [int.from_bytes(blake2b(name, digest_size=8).digest(), "little") for name in names]
    numbers = (slots + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    weight = numbers ^ np.array(seeds, np.uint64)[:, np.newaxis]
    weight = (weight ^ (weight >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    weight = (weight ^ (weight >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: np.ndarray[Any, np.dtype[np.uint64]] = weight ^ (weight >> np.uint64(31))
    return found


def _count(counts: Numbers, slots: SlotsOfRows, each: int) -> None:
    """Add to the counts of slots; for one record without a walk over all slots."""
    if len(slots) == 1:
        counts[slots[0]] += each
    elif each > 0:
        counts += np.bincount(slots, minlength=SLOTS)
    else:
        counts -= np.bincount(slots, minlength=SLOTS)
