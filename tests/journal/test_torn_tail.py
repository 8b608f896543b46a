"""The last bundle cut at every byte, and every byte of it turned over: nothing else is lost."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest

from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.journal import MemoryStorage, Recovery, Ring
from tests.journal.rings import SMALL, Place, batch, everything, file_place, put

KEPT = [(0, b"kept"), (1, b"kept too")]
LAST = [b"x" * 40, b"y" * 41]


def scene(place: Place) -> tuple[int, int]:
    """A ring with a synced bundle and an unsynced one; returns where the second lies."""
    ring, _ = place.open()
    put(ring, 1, b"kept", b"kept too")
    ring.sync()
    last = ring.append([batch(ring, 1, LAST, base=2), batch(ring, 2, [b"z"])])
    return last.lsn, last.end_lsn


def memory_scenes() -> Iterator[tuple[Place, int, int]]:
    """Yield one scene without end, each time on a copy of its storage."""
    storage = MemoryStorage()
    original = Place(storage, lambda: storage)
    begin, end = scene(original)
    while True:
        twin = copy.deepcopy(storage)
        place = Place(twin, lambda twin=twin: twin)  # type: ignore[misc]
        place.epoch = 1
        yield place, begin, end


def check_dropped_and_writable(place: Place, begin: int) -> None:
    ring, recovery = place.open()
    check(ring, recovery, begin)
    put(ring, 1, b"after")
    put(ring, 2, b"after")
    assert everything(ring, 1) == [*KEPT, (2, b"after")]
    ring, recovery = place.open()
    assert recovery.dropped == ()
    assert recovery.damages == ()
    assert everything(ring, 1) == [*KEPT, (2, b"after")]
    assert everything(ring, 2) == [(0, b"after")]


def check(ring: Ring, recovery: Recovery, begin: int) -> None:
    assert recovery.end_lsn == begin
    assert recovery.damages == ()
    assert everything(ring, 1) == KEPT
    assert everything(ring, 2) == []


@pytest.mark.slow
def test_a_tail_cut_at_every_byte_is_dropped_whole_and_the_ring_writes_on() -> None:
    scenes = memory_scenes()
    _, begin, end = next(scenes)
    for cut in range(begin, end):
        place, _, _ = next(scenes)
        if not any(place.read(cut, end - cut)):
            break  # only the padding is cut, and zeros are what it is made of
        place.zero(cut, end - cut)
        check_dropped_and_writable(place, begin)
    assert end - cut < 8


@pytest.mark.moderate
def test_the_same_on_files(tmp_path: object) -> None:
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    for number, cut in enumerate((0, 1, 8, 11, 50, 95, 96, 97, 200, 300, 420)):
        place = file_place(tmp_path / str(number))
        begin, end = scene(place)
        place.zero(begin + cut, end - begin - cut)
        check_dropped_and_writable(place, begin)


@pytest.mark.moderate
def test_every_byte_of_an_unconfirmed_tail_turned_over_drops_it_and_nothing_else() -> None:
    scenes = memory_scenes()
    _, begin, end = next(scenes)
    for at in range(begin, end):
        place, _, _ = next(scenes)
        place.flip(at, bit=at % 8)
        ring, recovery = place.open()
        check(ring, recovery, begin)


@pytest.mark.moderate
@pytest.mark.parametrize("bit", [0, 7])
def test_every_byte_of_a_confirmed_batch_turned_over_is_a_named_gap_and_nothing_else(
    bit: int,
) -> None:
    storage = MemoryStorage()
    original = Place(storage, lambda: storage)
    ring, _ = original.open()
    put(ring, 1, b"before")
    target = put(ring, 1, b"target", b"target")
    ring.sync()
    put(ring, 1, b"behind")
    for at in range(target.lsn, target.end_lsn):
        twin = copy.deepcopy(storage)
        place = Place(twin, lambda twin=twin: twin)  # type: ignore[misc]
        place.epoch = 1
        place.flip(at, bit)
        ring, recovery = place.open()
        assert [(d.from_lsn, d.to_lsn) for d in recovery.damages] == [
            (target.lsn, target.end_lsn)
        ], at - target.lsn
        assert recovery.dropped == ()
        assert everything(ring, 1) == [(0, b"before"), (3, b"behind")]


def test_a_tail_cut_inside_its_stamp_is_still_told_when_the_stamp_says_where_it_is() -> None:
    place, begin, end = next(memory_scenes())
    place.zero(begin + STAMP_BYTES - 4, end - begin - STAMP_BYTES + 4)
    _, recovery = place.open()
    assert [dropped.from_lsn for dropped in recovery.dropped] == [begin]


def test_an_opened_ring_reads_while_its_file_is_damaged_under_it() -> None:
    storage = MemoryStorage()
    place = Place(storage, lambda: storage)
    ring, _ = place.open(SMALL)
    put(ring, 1, b"a")
    bad = put(ring, 1, b"b")
    put(ring, 1, b"c")
    place.flip(bad.lsn + 200)
    history = ring.read(1, 0, 3, 1 << 20)
    assert [(gap.from_offset, gap.to_offset, gap.code) for gap in history.gaps] == [
        (1, 2, "damaged")
    ]
    assert everything(ring, 1) == [(0, b"a"), (2, b"c")]
