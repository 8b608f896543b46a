"""Stamps packed and read many at a time are equal to those packed and read one by one."""

from __future__ import annotations

import random

import pytest

from malamute_protocol.stamp import (
    LAST_OF_BUNDLE,
    STAMP_BYTES,
    Stamp,
    pack_stamps,
    stamp_here,
)


def some(chance: random.Random) -> Stamp:
    return Stamp(
        chance.choice([0, LAST_OF_BUNDLE]),
        chance.getrandbits(64),
        chance.getrandbits(64),
        chance.getrandbits(64),
        chance.getrandbits(64),
        chance.getrandbits(64),
        chance.getrandbits(63),
        chance.getrandbits(32),
        chance.getrandbits(32),
        chance.randrange(96, 1 << 32, 8),
        chance.getrandbits(32),
        chance.randrange(8),
        chance.getrandbits(32),
    )


def test_a_stamp_packed_among_many_is_the_stamp_packed_alone() -> None:
    chance = random.Random(3)
    stamps = [some(chance) for _ in range(200)]
    rows = [(*stamp[:12], 0, stamp.content_crc, 0) for stamp in stamps]
    assert pack_stamps(rows) == [stamp.pack() for stamp in stamps]
    assert pack_stamps([]) == []


@pytest.mark.parametrize("kind", [bytes, memoryview, bytearray])
def test_a_stamp_is_found_where_its_lsn_says_and_nowhere_else(kind: type) -> None:
    stamp = some(random.Random(4))
    data = kind(b"8 bytes!" + stamp.pack() + b"content")
    assert stamp_here(data, 8, stamp.lsn) == stamp
    assert isinstance(stamp_here(data, 8, stamp.lsn), Stamp)
    assert stamp_here(data, 8, stamp.lsn + 8) is None
    assert stamp_here(data, 0, stamp.lsn) is None
    assert stamp_here(data, 16, stamp.lsn) is None
    assert stamp_here(data, 1000, stamp.lsn) is None


def test_a_stamp_with_any_bit_turned_over_is_none() -> None:
    stamp = some(random.Random(5))
    packed = stamp.pack()
    for bit in range(STAMP_BYTES * 8):
        broken = bytearray(packed)
        broken[bit // 8] ^= 1 << bit % 8
        assert stamp_here(bytes(broken), 0, stamp.lsn) is None, bit


def test_a_good_checksum_over_a_size_or_flags_that_cannot_be_is_none() -> None:
    stamp = some(random.Random(6))
    for wrong in (stamp._replace(size=88), stamp._replace(size=100), stamp._replace(flags=8)):
        assert stamp_here(wrong.pack(), 0, stamp.lsn) is None
