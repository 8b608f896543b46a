"""Bitmaps: integers as sets of rows.

Owns the operations on masks that Python's integers do not have. The rule: an operation costs by
words or by the bits that are set, never by the rows of a batch one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

Rows: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"


def ones(count: int) -> int:
    """A mask of so many bits."""
    return (1 << count) - 1


def low_bit(mask: int) -> int:
    """Place of the lowest bit of a mask that has one."""
    return (mask & -mask).bit_length() - 1


def first_bits(mask: int, count: int) -> int:
    """The lowest `count` bits of a mask that has more."""
    low = (mask & -mask).bit_length() - 1
    run = mask >> low
    if not run & ((1 << count) - 1) ^ ((1 << count) - 1):
        return ((1 << count) - 1) << low
    places = np.flatnonzero(rows_of_bits(mask, mask.bit_length()))
    return mask & ones(int(places[count]))


def rows_of_bits(mask: int, count: int) -> Rows:
    """A mask as an array of `count` booleans."""
    data = np.frombuffer(mask.to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(data, count=count, bitorder="little").view(np.bool_)


def places_of(mask: int) -> list[int]:
    """Places of the bits of a mask, ascending."""
    if mask.bit_count() == 1:
        return [mask.bit_length() - 1]
    found: list[int] = np.flatnonzero(rows_of_bits(mask, mask.bit_length())).tolist()
    return found


def bits_of_rows(rows: Rows) -> int:
    """An array of booleans as a mask."""
    return int.from_bytes(np.packbits(rows, bitorder="little").tobytes(), "little")


def rows_in(mask: int) -> Iterator[int]:
    """The rows of a bitmap, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def lowest(mask: int, count: int) -> int:
    """The first so many rows of a bitmap; it has that many."""
    first = (mask & -mask).bit_length() - 1
    run = ((1 << count) - 1) << first
    if mask & run == run:
        return run
    found = 0
    for _ in range(count):
        low = mask & -mask
        found |= low
        mask ^= low
    return found


def runs_of(mask: int) -> Iterator[tuple[int, int]]:
    """The rows of a bitmap as runs: (first, how many), ascending."""
    at = 0
    while mask:
        skip = (mask & -mask).bit_length() - 1
        mask >>= skip
        at += skip
        length = (~mask & (mask + 1)).bit_length() - 1
        yield at, length
        mask >>= length
        at += length


def every(count: int) -> int:
    """All rows of a batch of so many."""
    return (1 << count) - 1
