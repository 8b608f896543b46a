"""Scattered offsets: each one's whole batch, few reads, and None for what is gone."""

from __future__ import annotations

import random

import pytest

from malamute_protocol.content import Content
from malamute_protocol.stamp import STAMP_BYTES, Stamp
from malamute_py.journal import NO_KEYS, UNINDEXED_FROM, Append, Ring, RingSettings
from tests.journal.rings import Faulty, Place, S, batch, content_of, put
from tests.journal.test_retention import FOUR, tidy

MAIL = UNINDEXED_FROM + 254


def body_of(found: bytes, offset: int) -> bytes:
    stamp = Stamp.unpack(found)
    assert stamp.size == len(found)
    assert stamp.base_offset <= offset < stamp.next_offset
    content = Content(found[STAMP_BYTES:])
    content.verify()
    blob, offsets, _ = content.bodies()
    row = offset - stamp.base_offset
    return bytes(blob[int(offsets[row]) : int(offsets[row + 1])])


def mail(ring: Ring, *bodies: bytes, base: int | None = None) -> Append:
    content, crc = content_of(bodies)
    offset = ring.next_offset(MAIL) if base is None else base
    return Append(MAIL, offset, len(bodies), 1000, content, crc, NO_KEYS)


def bodies_of(ring: Ring, stream: int, offsets: list[int]) -> list[bytes | None]:
    found = ring.read_batches(stream, offsets)
    return [
        None if data is None else body_of(data, offset)
        for offset, data in zip(offsets, found, strict=True)
    ]


@pytest.mark.moderate
@pytest.mark.parametrize("stream", [1, MAIL])
def test_each_offset_gets_the_batch_that_holds_it_in_any_order(place: Place, stream: int) -> None:
    ring, _ = place.open(RingSettings(segment_bytes=S, ring_bytes=16 * S))
    chance = random.Random(5)
    bodies: list[bytes] = []
    while len(bodies) < 900:
        bundle, base = [], len(bodies)
        for _ in range(chance.choice([1, 1, 7])):
            part = [b"%d:" % (base + n) + bytes(chance.randrange(400)) for n in range(3)]
            bundle.append(batch(ring, stream, part, base=base))
            bundle.append(batch(ring, 2, [b"between"], base=ring.next_offset(2) + len(bundle)))
            bodies += part
            base = len(bodies)
        ring.append(bundle)
        if chance.random() < 0.1:
            ring.sync()
            tidy(ring)
    offsets = [chance.randrange(900) for _ in range(200)]
    assert bodies_of(ring, stream, offsets) == [bodies[offset] for offset in offsets]
    everything = list(range(len(bodies)))
    assert bodies_of(ring, stream, everything) == bodies
    assert bodies_of(ring, stream, everything[::-1]) == bodies[::-1]
    ring.sync()
    ring, _ = place.open(RingSettings(segment_bytes=S, ring_bytes=16 * S))
    assert bodies_of(ring, stream, offsets) == [bodies[offset] for offset in offsets]


def test_what_was_never_there_or_is_gone_is_none(place: Place) -> None:
    ring, _ = place.open(FOUR)
    assert ring.read_batches(MAIL, [0, 5]) == [None, None]
    assert ring.read_batches(MAIL, []) == []
    for number in range(14):
        ring.append([mail(ring, b"%d:" % number + bytes(20_000))])
    first = ring.first_offset(MAIL)
    assert 0 < first < 13
    found = bodies_of(ring, MAIL, [0, first - 1, first, 13, 14, 99])
    assert [None if body is None else body.split(b":")[0] for body in found] == [
        None, None, b"%d" % first, b"13", None, None,
    ]  # fmt: skip
    ring.remove_before(MAIL, offset=13)
    assert ring.read_batches(MAIL, [first]) == [None]


def test_offsets_in_a_hole_are_none(place: Place) -> None:
    ring, _ = place.open(FOUR)
    ring.append([mail(ring, b"a"), mail(ring, b"b", base=5)])
    assert bodies_of(ring, MAIL, [0, 1, 4, 5]) == [b"a", None, None, b"b"]


def test_a_damaged_batch_is_none_and_its_neighbours_are_read(place: Place) -> None:
    ring, _ = place.open(FOUR)
    lsns = []
    for number in range(6):
        lsns.append(ring.append([mail(ring, b"%d" % number)]).lsn)
        put(ring, 1, b"between")
    # After the first one in the bundle lie snapshot and epoch start; count back from the end.
    place.flip(lsns[2] + 40)
    place.flip(lsns[4] + STAMP_BYTES + 130)
    assert bodies_of(ring, MAIL, [1, 2, 3, 4, 5]) == [b"1", None, b"3", None, b"5"]


def test_neighbours_share_one_read(place: Place) -> None:
    storage = Faulty(place.storage)
    ring, _ = Ring.open(storage, settings=FOUR, epoch=1)
    for number in range(60):
        ring.append([mail(ring, b"%d" % number)])
    storage.calls.clear()
    assert bodies_of(ring, MAIL, list(range(10, 40))) == [b"%d" % n for n in range(10, 40)]
    assert len([call for call in storage.calls if call[0] == "read"]) == 1


def test_a_segment_retired_under_the_read_gives_none(place: Place) -> None:
    ring, _ = place.open(FOUR)
    for _ in range(9):
        ring.append([mail(ring, bytes(20_000))])

    class Lapping(Faulty):
        lapped = False

        def read(self, file: object, position: int, size: int) -> bytes:
            data = self.inner.read(file, position, size)  # type: ignore[arg-type]
            if not self.lapped:
                self.lapped = True
                for _ in range(9):
                    ring.append([mail(ring, bytes(20_000))])
            return data

    ring._files.storage = Lapping(place.storage)
    first = ring.first_offset(MAIL)
    assert ring.read_batches(MAIL, [first, 8])[0] is None
