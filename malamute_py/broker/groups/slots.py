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
    """A member, as far as slots are concerned."""

    place: int
    """Its number within the group."""
    session: bytes
    number: int


class Slots:
    """Which member of a keyed group each slot belongs to."""

    __slots__ = ("_best", "_holder", "_late", "_target", "held", "owner", "settled", "waiting")

    def __init__(self) -> None:
        self.owner: Places = np.full(SLOTS, NOBODY, np.int16)
        """Owner of each slot now; NOBODY while the slot moves or something is late."""
        self._target: Places = np.full(SLOTS, NOBODY, np.int16)
        """Owner that each slot is to have."""
        self._best = np.zeros(SLOTS, np.uint64)
        """The weight by which that was decided."""
        self._holder: Places = np.full(SLOTS, NOBODY, np.int16)
        """Member that was given each slot's last records."""
        self.held: Numbers = np.zeros(SLOTS, np.int64)
        """Records in a member's hands, or leaving them."""
        self._late: Numbers = np.zeros(SLOTS, np.int64)
        self.waiting: Numbers = np.zeros(SLOTS, np.int64)
        self.settled = True
        """Every slot belongs to whom it is to belong to."""

    def enter(self, member: Candidate) -> None:
        """A member takes the slots in which it weighs most; those in hand stay until they are not.

        What others have of each other is not looked at: a thousand may come or go in one step.
        """
        weight = _weights([member], np.arange(SLOTS))[0]
        better = (weight > self._best) | (self._target == NOBODY)
        self._target[better] = member.place
        self._best[better] = weight[better]
        self.settle()

    def leave(self, places: list[int], members: Sequence[Candidate]) -> None:
        """The slots of members that have left go to those of the others who weigh most."""
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
        """Let slots go to whom they are to belong to, where nothing of them is in hand."""
        free = (self.held == 0) | (self._holder == self._target)
        free &= self._late == 0
        self.owner = np.where(free, self._target, np.int16(NOBODY))
        self.settled = bool(free.all())

    def take_in(self, slots: SlotsOfRows) -> None:
        """Records of these slots wait."""
        _count(self.waiting, slots, 1)

    def hand(self, slots: SlotsOfRows, place: int) -> None:
        """Waiting records of these slots are in a member's hands."""
        if len(slots) == 1:
            slot = slots[0]
            self.waiting[slot] -= 1
            self.held[slot] += 1
        else:
            counts = np.bincount(slots, minlength=SLOTS)
            self.waiting -= counts
            self.held += counts
        self._holder[slots] = place

    def done(self, slots: SlotsOfRows) -> None:
        """Take records out of the hands of their members."""
        _count(self.held, slots, -1)
        if not self.settled:
            self.settle()

    def back(self, slots: SlotsOfRows, *, settle: bool = True) -> None:
        """Records in hand wait again. settle: False: leave() follows."""
        _count(self.held, slots, -1)
        _count(self.waiting, slots, 1)
        if settle:
            self.settle()

    def closed(self, slots: SlotsOfRows) -> None:
        """Waiting records are done."""
        _count(self.waiting, slots, -1)

    def delay(self, slots: SlotsOfRows) -> None:
        """Records in hand are late: what follows them waits for them."""
        _count(self.held, slots, -1)
        _count(self._late, slots, 1)
        self.settle()

    def due(self, slots: SlotsOfRows) -> None:
        """Late records wait again."""
        _count(self._late, slots, -1)
        _count(self.waiting, slots, 1)
        self.settle()


def _weights(members: Sequence[Candidate], slots: Numbers) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """How much each member (a row) weighs in each of these slots (a column)."""
    names = (one.session + one.number.to_bytes(16, "little", signed=True) for one in members)
    seeds = [int.from_bytes(blake2b(name, digest_size=8).digest(), "little") for name in names]
    numbers = (slots + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    weight = numbers ^ np.array(seeds, np.uint64)[:, np.newaxis]
    weight = (weight ^ (weight >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    weight = (weight ^ (weight >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: np.ndarray[Any, np.dtype[np.uint64]] = weight ^ (weight >> np.uint64(31))
    return found


def _count(counts: Numbers, slots: SlotsOfRows, each: int) -> None:
    """Count records of slots; one alone without a walk over all slots."""
    if len(slots) == 1:
        counts[slots[0]] += each
    elif each > 0:
        counts += np.bincount(slots, minlength=SLOTS)
    else:
        counts -= np.bincount(slots, minlength=SLOTS)
