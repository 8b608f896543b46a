"""Slots of a keyed group: which member a record belongs to by its key.

Owns the division of 1,024 slots among the members, by rendezvous hash: a slot belongs to the member
whose hash with it, its weight, is highest. The rule: a slot moves only when its member holds
nothing of it, so that records of one key are in one place, in order. The arrays have an entry for
each slot; a member stands in them by its number, `place`. Source: docs/design.md, Queues and the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from malamute_py.broker.structures.bitmaps import bits_of_rows, rows_of_bits

SLOTS: Final = 1_024
NOBODY: Final = -1
"""Number in the place of a member's: the slot belongs to no member now."""
Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
SlotsOfRows: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
"""The slot of each of some records."""
Places: TypeAlias = "np.ndarray[Any, np.dtype[np.int16]]"
"""Members by their numbers within the group."""
_ALL: Final = slice(None)
"""Every slot, as an index."""
_MIXED: Final = np.arange(1, SLOTS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
"""Part that each slot adds to the hash of a member with it."""


class Candidate(Protocol):
    """The facts about a member that decide which slots it gets."""

    place: int
    """Its number within the group."""
    session: bytes
    number: int


class Slots:
    """Which member of a keyed group each slot belongs to.

    The group has members enter and leave here, and names the slots of records whenever these change
    their state: a slot is named once for each of its records.
    """

    __slots__ = ("_best", "_holder", "_late", "_target", "held", "owner", "settled", "waiting")

    def __init__(self) -> None:
        self.owner: Places = np.full(SLOTS, NOBODY, np.int16)
        """Member that gets each slot's records now; -1 while the slot moves or a record of it is
        late, as later ones must not overtake it."""
        self._target: Places = np.full(SLOTS, NOBODY, np.int16)
        """Member that each slot is to belong to: the one of the highest weight."""
        self._best = np.zeros(SLOTS, np.uint64)
        """Weight of that member with the slot."""
        self._holder: Places = np.full(SLOTS, NOBODY, np.int16)
        """Member that was given each slot's last records."""
        self.held: Numbers = np.zeros(SLOTS, np.int64)
        """Records of each slot in a member's hands, or withheld from all until the log answers."""
        self._late: Numbers = np.zeros(SLOTS, np.int64)
        """Records of each slot that wait for the end of a pause."""
        self.waiting: Numbers = np.zeros(SLOTS, np.int64)
        """Records of each slot that wait for its member."""
        self.settled = True
        """Whether every slot belongs to the member that it is to belong to: none moves."""

    def enter(self, member: Candidate) -> None:
        """Give a member the slots where its hash is highest, each once none of its records is held.

        The slots of the other members are not compared anew: a thousand members may come or go in
        one step.
        """
        (weight,) = _weights([member], _ALL)
        better = (weight > self._best) | (self._target == NOBODY)
        self._target[better] = member.place
        self._best[better] = weight[better]
        self.settle()

    def leave(self, places: list[int], members: Sequence[Candidate], *, gone: bool = False) -> None:
        """Give the slots of members that have left to those of the others that weigh most.

        places: numbers of those that have left. members: the others, which may be given records.
        gone: they do not come back, and their numbers may be given to members that join.
        """
        if gone:
            # A new member of the same number must wait for records that are withheld, as any other.
            self._holder[_those_of(self._holder, places)] = NOBODY
        lost = np.flatnonzero(_those_of(self._target, places))
        if members and len(lost):
            weights = _weights(members, lost)
            heaviest = weights.argmax(axis=0)  # For each lost slot, an index into `members`.
            self._target[lost] = np.array([one.place for one in members], np.int16)[heaviest]
            self._best[lost] = weights[heaviest, np.arange(len(lost))]
        else:
            self._target[lost] = NOBODY
        self.settle()

    def settle(self) -> None:
        """Move slots to the members that they are to belong to, unless records are in hand.

        Until then a slot has no owner, so that none of its records is handed out. A slot whose
        records are in the hands of that member itself need not wait.
        """
        free = (self.held == 0) | (self._holder == self._target)
        free &= self._late == 0
        self.owner = np.where(free, self._target, np.int16(NOBODY))
        self.settled = bool(free.all())

    def take_in(self, slots: SlotsOfRows) -> None:
        """Count records of these slots as waiting: they were read and selected."""
        _count(self.waiting, slots, 1)

    def hand(self, slots: SlotsOfRows, place: int) -> None:
        """Count waiting records of these slots as in a member's hands."""
        if len(slots) == 1:  # Without a walk over all slots.
            slot = slots[0]
            self.waiting[slot] -= 1
            self.held[slot] += 1
        else:
            counts = np.bincount(slots, minlength=SLOTS)
            self.waiting -= counts
            self.held += counts
        self._holder[slots] = place

    def withhold(self, slots: SlotsOfRows) -> None:
        """Count waiting records as in hand: their slots do not move until the log answers."""
        _count(self.waiting, slots, -1)
        _count(self.held, slots, 1)

    def hold_back(self, slots: SlotsOfRows) -> None:
        """Let these slots rest, as records of them are to come again once the log is told of it.

        Later records of a slot would overtake them, were they given to the member that had them.
        It goes on once none of its records is withheld or in hand.
        """
        self._holder[slots] = NOBODY
        self.settle()

    def done(self, slots: SlotsOfRows) -> None:
        """Take records that are done out of the hands of their members; slots may move then."""
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
        """Count waiting records as done, as they are gone from the stream."""
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


def rows_by_owner(owners: Places, bits: int) -> list[tuple[int, int]]:
    """Divide rows of a batch by their owners, for a delivery to each: (owner's number, its rows).

    owners: the number of each row's owner.
    """
    count = len(owners)
    rows = np.flatnonzero(rows_of_bits(bits, count))
    row_owners = owners[rows]
    if (row_owners == row_owners[0]).all():
        return [(int(row_owners[0]), bits)]
    # Rows of one owner come to stand beside each other; a new one begins where the number changes.
    order = np.argsort(row_owners, kind="stable")
    row_owners, rows = row_owners[order], rows[order]
    firsts = np.flatnonzero(np.concatenate(([True], row_owners[1:] != row_owners[:-1])))
    found = []
    for place, some in zip(row_owners[firsts].tolist(), np.split(rows, firsts[1:]), strict=True):
        chosen = np.zeros(count, np.bool_)
        chosen[some] = True
        found.append((place, bits_of_rows(chosen)))
    return found


def _those_of(members: Places, places: list[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return of each slot whether its member is among these. Most often one leaves alone."""
    return members == places[0] if len(places) == 1 else np.isin(members, places)


def _weights(
    members: Sequence[Candidate], slots: Numbers | slice
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Rendezvous hash of each member (a row) with each of these slots (a column).

    A slot is to belong to the member with the greatest one. The hash comes of the member's session
    and number, so other members that come or go do not change it. The factors are those of the
    mixer splitmix64, by which every bit of a slot and of a member bears on every bit of the hash.
    """
    # signed: a client chooses its members' numbers, and may choose a negative one.
    names = (one.session + one.number.to_bytes(16, "little", signed=True) for one in members)
    seeds = [int.from_bytes(blake2b(name, digest_size=8).digest(), "little") for name in names]
    weight = _MIXED[slots] ^ np.array(seeds, np.uint64)[:, np.newaxis]
    weight = (weight ^ (weight >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    weight = (weight ^ (weight >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: np.ndarray[Any, np.dtype[np.uint64]] = weight ^ (weight >> np.uint64(31))
    return found


def _count(counts: Numbers, slots: SlotsOfRows, each: int) -> None:
    """Add `each` (1 or -1) to the counts of slots for each record that they are named for.

    For one record there is no walk over all slots.
    """
    if len(slots) == 1:
        counts[slots[0]] += each
    elif each > 0:
        counts += np.bincount(slots, minlength=SLOTS)
    else:
        counts -= np.bincount(slots, minlength=SLOTS)
