"""A wheel of timers: things that fall due, in slots of some milliseconds.

Owns the order in which things fall due. The rules: nothing falls due early; adding and removing
cost the same however many things there are; empty slots are dropped when there are twice as many
slots as were in use; one call of `take` returns a bounded number of things. Services have in it
their leases, deadlines and pauses.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

SLOT_MS: Final = 8
"""Length of a slot. A thing that falls due early in its slot waits for the slot's end."""
SLOTS_MIN: Final = 1_024
"""Number of slots up to which the wheel never looks for empty ones."""


class TimerWheel(Generic[T]):
    """Things that fall due."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[T, None]] = {}
        """Number of a slot, which ends at so many SLOT_MS -> its things."""
        self._order: list[int] = []
        """A heap of the numbers of the slots."""
        self._sweep_at = SLOTS_MIN
        """Number of slots from which on the empty ones are dropped."""

    def __len__(self) -> int:
        return sum(map(len, self._slots.values()))

    @property
    def due_ms(self) -> int | None:
        """When the next slot ends; None: the wheel is empty. Slots without things are dropped."""
        while self._order and not self._slots.get(self._order[0]):
            self._slots.pop(heappop(self._order), None)
        return self._order[0] * SLOT_MS if self._order else None

    def add(self, due_ms: int, thing: T) -> int:
        """Let a thing fall due; returns its slot, which `discard` needs."""
        slot = -(-due_ms // SLOT_MS)  # rounded up: nothing falls due early
        found = self._slots.get(slot)
        if found is None:
            if len(self._slots) >= self._sweep_at:
                self._sweep()
            found = self._slots[slot] = {}
            heappush(self._order, slot)
        found[thing] = None
        return slot

    def _sweep(self) -> None:
        """Drop the empty slots, whose time may be years away."""
        self._slots = {slot: found for slot, found in self._slots.items() if found}
        self._order = list(self._slots)
        heapify(self._order)
        self._sweep_at = max(SLOTS_MIN, 2 * len(self._slots))

    def discard(self, slot: int, thing: T) -> None:
        """Remove a thing from its slot; nothing happens when it is not there."""
        found = self._slots.get(slot)
        if found is not None:
            found.pop(thing, None)

    def take(self, now_ms: int, most: int) -> list[T]:
        """Remove and return at most `most` things that are due, the longest due first."""
        things: list[T] = []
        while self._order and self._order[0] * SLOT_MS <= now_ms and len(things) < most:
            slot = self._order[0]
            found = self._slots[slot]
            if len(found) <= most - len(things):
                things.extend(found)
                found.clear()
            else:
                for thing in list(found)[: most - len(things)]:
                    del found[thing]
                    things.append(thing)
            if not found:  # Otherwise the rest of the slot is left to the next call.
                heappop(self._order)
                del self._slots[slot]
        return things
