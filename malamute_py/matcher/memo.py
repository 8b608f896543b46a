"""Headers seen before, each with the numbers of the patterns that match it.

Owns the bound on what is remembered and how it is kept right when patterns come and go. The rule: a
change costs the same however much is remembered. Changes go to a short log; an entry that is looked
up catches up with the log, or counts as unknown when it missed more than the log still holds. A
number leaves the log only when no entry can be brought up to date from before its discard: only
then may it be given to another pattern. Result bitmaps are replaced, never changed: a caller keeps
what it was given.
"""

from __future__ import annotations

from collections import OrderedDict

from pyroaring import BitMap

from malamute_py.matcher.kinds import Fields, Keys, Predicate

LOG_MAX = 64
"""Changes that an entry may lag behind; catching up with more costs as much as a new look-up."""

_ENTRY_BYTES = 700
"""Bytes of an entry besides its texts and numbers: key tuples, dictionary slot, bitmap."""


_FIELD_BYTES = 120
"""Bytes of a field besides its texts: a tuple and the heads of two strings."""


class _Entry:
    """The patterns that match one header, as of a generation: the count of changes until then."""

    __slots__ = ("bytes", "generation", "numbers")

    def __init__(self, numbers: BitMap, generation: int, size: int) -> None:
        self.numbers = numbers
        self.generation = generation
        self.bytes = size


class Memo:
    """A bounded memory of headers, the oldest forgotten first."""

    def __init__(self, headers_max: int, bytes_max: int) -> None:
        self._headers_max = headers_max
        self._bytes_max = bytes_max
        # OrderedDict, as deleting at the front of a dict makes the next deletion slower.
        self._entries: OrderedDict[tuple[Keys, Fields], _Entry] = OrderedDict()
        self._generation = 0
        """Number of the next change of patterns."""
        self._log: list[tuple[int, Predicate | None] | None] = [None] * LOG_MAX
        """Change g is at g % LOG_MAX: (number, its predicate), or (number, None) if discarded."""
        self.bytes = 0
        """Bytes of all entries, about."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def generation(self) -> int:
        """Return how many times patterns came or went: a match in steps sees whether any did."""
        return self._generation

    def get(self, keys: Keys, fields: Fields) -> BitMap | None:
        """Return what matches the header now, or None if that is not known."""
        entry = self._entries.get((keys, fields))
        if entry is None:
            return None
        if entry.generation == self._generation:
            return entry.numbers
        return self._catch_up(entry, keys, fields)

    def put(self, keys: Keys, fields: Fields, numbers: BitMap) -> None:
        """Remember what matches the header now; the oldest headers go where that is too much."""
        header = (keys, fields)
        size = _ENTRY_BYTES + _bitmap_bytes(numbers) + sum(map(len, keys))
        for name, value in fields:
            size += _FIELD_BYTES + len(name) + len(value)
        known = self._entries.get(header)
        if known is not None:
            self.bytes -= known.bytes
        self._entries[header] = _Entry(numbers, self._generation, size)
        self.bytes += size
        while len(self._entries) > self._headers_max or self.bytes > self._bytes_max:
            _, oldest = self._entries.popitem(last=False)
            self.bytes -= oldest.bytes

    def note(self, number: int, predicate: Predicate | None) -> int | None:
        """Note that a pattern came or, without a predicate, that it went.

        Returns the number of an earlier pattern whose discard falls out of the log by this; None:
        no discard does. No remembered header that can still be brought up to date has the number.
        """
        slot = self._generation % LOG_MAX
        overwritten = self._log[slot]
        self._log[slot] = number, predicate
        self._generation += 1
        if overwritten is None:
            return None
        earlier, predicate_of_it = overwritten
        return earlier if predicate_of_it is None else None

    def _catch_up(self, entry: _Entry, keys: Keys, fields: Fields) -> BitMap | None:
        """Apply the changes since an entry was last right; return its numbers, or None: too many.

        None has the caller match the header anew.
        """
        if self._generation - entry.generation > LOG_MAX:
            return None
        before = entry.numbers
        numbers = before
        seen: set[int] = set()
        for generation in range(self._generation - 1, entry.generation - 1, -1):  # Newest first.
            change = self._log[generation % LOG_MAX]
            assert change is not None
            number, predicate = change
            if number in seen:
                # The last change of a number counts: a pattern that comes and goes again costs
                # nothing.
                continue
            seen.add(number)
            holds = predicate is not None and predicate(keys, fields)
            if holds != (number in numbers):
                if numbers is before:
                    numbers = before.copy()  # callers have the bitmap from before
                if holds:
                    numbers.add(number)
                else:
                    numbers.discard(number)
        entry.generation = self._generation
        if numbers is not before:
            entry.numbers = numbers
            size = _bitmap_bytes(numbers) - _bitmap_bytes(before)
            entry.bytes += size
            self.bytes += size
        return entry.numbers


def _bitmap_bytes(numbers: BitMap) -> int:
    """Return about how many bytes the bitmap takes.

    A roaring bitmap is a container for each 65,536 numbers: two bytes a number, 8 KiB at most.
    """
    count = len(numbers)
    return min(2 * count, 8192 * ((numbers.max() >> 16) + 1)) if count else 0
