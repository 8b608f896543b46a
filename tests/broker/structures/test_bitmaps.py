"""Bitmaps say the same as lists of rows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from malamute_py.broker.structures.bitmaps import (
    bits_of_rows,
    low_bit,
    lowest,
    places_of,
    rows_of_bits,
    runs_of,
)


def places(bits: int) -> list[int]:
    return [place for place, digit in enumerate(bin(bits)[:1:-1]) if digit == "1"]


@pytest.mark.moderate
def test_the_lowest_bits_of_a_mask_are_its_first_rows() -> None:
    dice = random.Random(1)
    for _ in range(200):
        bits = dice.getrandbits(dice.choice([3, 70, 5_000])) | 1 << dice.randrange(100)
        count = dice.randint(0, bits.bit_count() + 1)
        assert places(lowest(bits, count)) == places(bits)[:count]
        assert low_bit(bits) == places(bits)[0]


@pytest.mark.parametrize("mask", [0, 1, 0b1011, 0b11110000, (1 << 70) | 7, (1 << 64) - 1])
def test_the_lowest_bits_and_the_runs_of_a_mask_agree_with_its_rows(mask: int) -> None:
    rows = places(mask)
    assert [row for first, count in runs_of(mask) for row in range(first, first + count)] == rows
    for count in range(len(rows) + 2):
        assert places(lowest(mask, count)) == rows[:count]


def test_a_mask_and_its_rows_are_the_same() -> None:
    rows = np.array([True, False, True, True, False, False, False, False, False, True])
    assert places(bits_of_rows(rows)) == [0, 2, 3, 9]
    assert (rows_of_bits(bits_of_rows(rows), len(rows)) == rows).all()


def test_the_places_of_a_mask_are_its_bits() -> None:
    for bits in (1, 1 << 4_000, 0b1011, (1 << 70) - 1):
        assert places_of(bits) == places(bits)
