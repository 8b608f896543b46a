"""Keeping and giving up: ring size, bytes, age, expiry, pins, spares."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Literal

import pytest

from malamute_py.journal import DiskFull, FileStorage, JournalFull, Ring, RingSettings
from malamute_py.journal.layout import PREPARING_FILE, segment_number
from tests.journal.rings import (
    Faulty,
    Place,
    S,
    everything,
    memory_place,
    put,
    read_all,
    records,
)

FOUR = RingSettings(segment_bytes=S, ring_bytes=4 * S, index_interval_bytes=0)


def segments(place: Place) -> list[int]:
    return [n for n in map(segment_number, place.storage.names()) if n is not None]


def tidy(ring: Ring, now_ms: int | None = None) -> None:
    for _ in range(1000):
        if not ring.prepare_step(now_ms=now_ms):
            return
    raise AssertionError("housekeeping never ends")


def fill(ring: Ring, count: int, stream: int = 1, time_ms: int = 1000) -> None:
    for _ in range(count):
        put(ring, stream, bytes(20_000), time_ms=time_ms)


@pytest.mark.moderate
def test_a_ring_never_grows_beyond_its_size_and_reuses_its_files(place: Place) -> None:
    ring, _ = place.open(FOUR)
    for _ in range(15):
        fill(ring, 2)
        ring.sync()
        tidy(ring)
        assert len(segments(place)) <= 4
        assert ring.bytes_on_disk() == len(segments(place)) * S
    assert segments(place)[0] > 3
    assert ring.prepared_in_append == 1  # the very first
    assert [o for o, _ in everything(ring, 1)] == list(range(ring.first_offset(1), 30))
    retired = [event for event in ring.take_events() if event.name == "segment_retired"]
    assert retired[0].facts["segment"] == 0
    assert retired[0].facts["first_offsets"] == {1: 3}
    assert ring.take_events() == []


def test_preparing_goes_in_small_steps(place: Place) -> None:
    ring, _ = place.open(FOUR)
    put(ring, 1, b"a")
    steps = 1
    while ring.prepare_step(8192):
        steps += 1
    assert steps >= (7 if place.storage.persistent else 1)
    assert not ring.prepare_step(8192)
    assert segments(place) == [0, 1]


def test_a_streams_bytes_are_limited_to_its_newest(place: Place) -> None:
    ring, _ = place.open(FOUR)
    fill(ring, 4, stream=1)
    fill(ring, 2, stream=2)
    assert ring.limit_bytes(1, 50_000) == 2
    assert [o for o, _ in everything(ring, 1)] == [2, 3]
    assert ring.limit_bytes(1, 1 << 30) == 2
    assert ring.limit_bytes(1, 1) == 3
    assert [o for o, _ in everything(ring, 1)] == [3]
    assert len(everything(ring, 2)) == 2
    history = ring.read(1, 0, 4, 1 << 30)
    assert [(g.from_offset, g.to_offset, g.code) for g in history.gaps] == [(0, 3, "retention")]


def test_what_is_older_is_removed_and_stays_removed(place: Place) -> None:
    ring, _ = place.open(FOUR)
    for number in range(6):
        fill(ring, 1, time_ms=1000 * number)
    assert ring.remove_before(1, time_ms=3000) == 3
    assert ring.remove_before(1, offset=1) == 3
    tidy(ring)
    ring.sync()
    ring, _ = place.open(FOUR)
    if place.storage.persistent:
        assert ring.first_offset(1) == 3
        assert [o for o, _ in everything(ring, 1)] == [3, 4, 5]
    assert ring.remove_before(1, offset=99) == 6
    assert everything(ring, 1) == []


def test_removed_records_that_were_lost_do_not_hide_new_ones(place: Place) -> None:
    ring, _ = place.open(FOUR)
    put(ring, 1, b"a")
    ring.sync()
    lost = put(ring, 1, b"b")
    ring.remove_before(1, offset=2)
    tidy(ring)
    place.zero(lost.lsn, lost.end_lsn - lost.lsn)
    ring, _ = place.open(FOUR)
    put(ring, 1, b"c")
    assert (1, b"c") in everything(ring, 1)


@pytest.mark.moderate
def test_segments_in_which_nothing_is_served_give_their_space_back(place: Place) -> None:
    ring, _ = place.open(RingSettings(segment_bytes=S, ring_bytes=10 * S))
    fill(ring, 18)
    tidy(ring)
    assert len(segments(place)) >= 7
    ring.remove_before(1, offset=17)
    ring.sync()
    tidy(ring)
    assert len(segments(place)) <= 3
    assert [o for o, _ in everything(ring, 1)] == [17]
    fill(ring, 6)
    assert [o for o, _ in everything(ring, 1)] == list(range(17, 24))


@pytest.mark.moderate
def test_a_ring_goes_on_after_the_removal_of_a_segment_was_not_known_to_be_durable(
    place: Place,
) -> None:
    storage = Faulty(place.storage)
    settings = RingSettings(segment_bytes=S, ring_bytes=10 * S)
    ring, _ = Ring.open(storage, settings=settings, epoch=1)
    fill(ring, 18)
    ring.sync()
    tidy(ring)
    ring.remove_before(1, offset=17)
    plain = storage.sync_directory

    def broken() -> None:
        call, subject = storage.calls[-1]
        if call == "remove" and str(subject).endswith(".seg"):
            raise OSError(errno.EIO, "broken")
        plain()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "sync_directory", broken)
        with pytest.raises(OSError, match="broken"):
            tidy(ring)
    for _ in range(40):
        fill(ring, 1)
        ring.sync()
        tidy(ring)
    assert everything(ring, 1)[-1][0] == ring.next_offset(1) - 1
    ring.close()
    _, recovery = Ring.open(storage, settings=settings, epoch=2)
    assert recovery.clean
    assert recovery.unknown == ()


def test_a_ring_that_is_written_to_uses_empty_segments_again_before_it_gives_them_back(
    place: Place,
) -> None:
    ring, _ = place.open(RingSettings(segment_bytes=S, ring_bytes=20 * S))
    tidy(ring, now_ms=1_000)
    fill(ring, 24)
    ring.sync()
    tidy(ring, now_ms=2_000)
    held = len(segments(place))
    assert held >= 8
    ring.remove_before(1, offset=24)
    fill(ring, 3)
    ring.sync()
    tidy(ring, now_ms=3_000)
    left = len(segments(place))
    fill(ring, 6)
    ring.sync()
    tidy(ring, now_ms=4_000)
    if place.storage.persistent:
        # One is given back each minute, however much is written.
        assert left >= held - 1
        assert len(segments(place)) <= left
    tidy(ring, now_ms=64_000)
    assert len(segments(place)) <= 6  # what was written since, and two that are prepared
    ring.remove_before(1, offset=ring.next_offset(1))
    fill(ring, 3)
    ring.sync()
    tidy(ring, now_ms=65_000)
    tidy(ring, now_ms=1_000)  # a clock that was set back
    assert len(segments(place)) <= 4


@pytest.mark.moderate
@pytest.mark.parametrize("full", ["overwrite", "refuse"])
def test_what_expires_amid_a_load_gives_its_space_back_at_once(
    place: Place, full: Literal["overwrite", "refuse"]
) -> None:
    ring, _ = place.open(RingSettings(segment_bytes=S, ring_bytes=16 * S, full=full))
    now_ms = 1_000_000
    tidy(ring, now_ms=now_ms)
    for _ in range(100):
        now_ms += 1_000
        put(ring, 1, bytes(20_000), time_ms=now_ms, expires_at_ms=now_ms + 5_000)
        ring.sync()
        tidy(ring, now_ms=now_ms)
        assert len(segments(place)) <= 6


def test_segments_whose_every_record_expired_are_retired_and_others_stay(place: Place) -> None:
    ring, _ = place.open(RingSettings(segment_bytes=S, ring_bytes=10 * S))
    for _ in range(6):
        put(ring, 1, bytes(20_000), expires_at_ms=5000)
    for _ in range(3):
        put(ring, 1, bytes(20_000), bytes(10), expires_at_ms=[5000, 0])
    for _ in range(3):
        put(ring, 1, bytes(20_000))
    ring.sync()
    tidy(ring, now_ms=4999)
    assert ring.first_offset(1) == 0
    tidy(ring, now_ms=5000)
    assert 3 <= ring.first_offset(1) <= 6
    assert read_all(ring, 1).gaps == ()
    before = ring.first_offset(1)
    tidy(ring, now_ms=1 << 60)
    assert ring.first_offset(1) == before


def test_a_refusing_ring_keeps_every_record_until_it_is_removed(place: Place) -> None:
    settings = RingSettings(segment_bytes=S, ring_bytes=4 * S, full="refuse")
    ring, _ = place.open(settings)
    fill(ring, 9)
    tidy(ring)
    fill(ring, 3)
    with pytest.raises(JournalFull):
        fill(ring, 9)
    tidy(ring)
    held = ring.next_offset(1)
    assert [o for o, _ in everything(ring, 1)] == list(range(held))
    assert len(segments(place)) == 4
    ring, _ = place.open(settings)
    with pytest.raises(JournalFull):
        fill(ring, 9)
    assert ring.first_offset(1) == 0
    ring.remove_before(1, offset=5)
    fill(ring, 1)
    assert ring.first_offset(1) == 5


def test_a_pin_holds_the_ring_back_and_gives_way_at_its_bound_by_name(place: Place) -> None:
    ring, _ = place.open(
        RingSettings(segment_bytes=S, ring_bytes=4 * S, pin_bytes_max=3 * S, full="overwrite")
    )
    fill(ring, 2)
    ring.pin("slow replay", 1, 1)
    ring.pin("younger", 1, 1)
    while ring.first_offset(1) == 0 and ring.next_offset(1) < 100:
        assert len(segments(place)) <= 7
        fill(ring, 1)
        tidy(ring)
    broken = [e.facts["pin"] for e in ring.take_events() if e.name == "pin_broken"]
    assert broken == ["slow replay", "younger"]
    assert ring.first_offset(1) > 1
    tidy(ring)
    assert len(segments(place)) <= 4


def test_a_pin_that_is_taken_off_lets_the_ring_shrink(place: Place) -> None:
    ring, _ = place.open(RingSettings(segment_bytes=S, ring_bytes=4 * S, pin_bytes_max=100 * S))
    fill(ring, 1)
    ring.pin("replay", 1, 0)
    fill(ring, 20)
    assert ring.first_offset(1) == 0
    assert len(segments(place)) > 4
    ring.unpin("replay")
    tidy(ring)
    assert len(segments(place)) <= 4
    assert [o for o, _ in everything(ring, 1)] == list(range(ring.first_offset(1), 21))
    ring, recovery = place.open(FOUR)
    assert recovery.damages == ()


def test_a_full_disk_breaks_a_pin_rather_than_the_ring(place: Place) -> None:
    storage = Faulty(place.storage)
    ring, _ = Ring.open(storage, settings=FOUR, epoch=1)
    fill(ring, 11)
    ring.pin("replay", 1, ring.first_offset(1))
    storage.fail["create"] = DiskFull("full")
    fill(ring, 6)
    (broken,) = [e for e in ring.take_events() if e.name == "pin_broken"]
    assert broken.facts["reason"] == "full"
    assert ring.next_offset(1) == 17


def test_a_reader_amid_a_segment_that_is_retired_gets_a_named_gap(place: Place) -> None:
    ring, _ = place.open(FOUR)
    fill(ring, 9)
    storage = place.storage
    read = type(storage).read

    class Lapping(Faulty):
        lapped = False

        def read(self, file: object, position: int, size: int) -> bytes:
            data = read(storage, file, position, size)  # type: ignore[arg-type]
            if not self.lapped:
                self.lapped = True
                fill(ring, 9)
            return data

    ring._files.storage = Lapping(storage)
    history = ring.read(1, 0, 9, 1 << 30)
    gone = {o for gap in history.gaps for o in range(gap.from_offset, gap.to_offset)}
    assert {gap.code for gap in history.gaps} == {"retention"}
    assert gone | {o for o, _ in records(history)} == set(range(9))
    assert 0 in gone


@pytest.mark.parametrize("call", ["remove", "rename", "sync_directory", "write", "sync"])
def test_a_reuse_that_fails_half_way_is_finished_later_and_leaves_no_file_behind(
    place: Place, call: str
) -> None:
    storage = Faulty(place.storage)
    ring, _ = Ring.open(storage, settings=FOUR, epoch=1)
    while ring.end_lsn < 9 * S:
        fill(ring, 1)
        ring.sync()
        tidy(ring)
    fill(ring, 3)  # takes the spare
    ring.sync()
    while place.storage.persistent and any(s.live for s in ring._space.segments[:-1]):
        ring._space._write_one_index()
    files = len(segments(place))
    storage.fail[call] = OSError(errno.EIO, "broken")
    for _ in range(3):
        with pytest.raises(OSError, match="broken"):
            tidy(ring)
    storage.fail.clear()
    tidy(ring)
    assert len(segments(place)) == files
    assert len(ring._space.spares) == 1
    ring.close()
    _, recovery = Ring.open(storage, settings=FOUR, epoch=2)
    assert recovery.clean
    assert recovery.unknown == ()


def test_appends_that_outrun_the_zeroing_end_it(tmp_path: Path) -> None:
    storage = Faulty(FileStorage(tmp_path))

    def zeroing() -> int:
        return sum(call == ("sync", PREPARING_FILE) for call in storage.calls)

    large = RingSettings(segment_bytes=16 * S, ring_bytes=64 * S)
    ring, _ = Ring.open(storage, settings=large, epoch=1)
    put(ring, 1, b"a")
    assert zeroing() == 1  # for its header: append zeroes nothing
    ring.prepare_step(2 * S)
    ring.prepare_step(2 * S)
    assert zeroing() == 3  # nothing else goes on: it takes its time
    put(ring, 1, bytes(3 * S))
    tidy(ring)
    assert zeroing() == 4  # the header again, and nothing between
    assert ring.bytes_on_disk() == 2 * 16 * S


def test_zeros_reach_the_disk_a_mebibyte_at_a_time(tmp_path: Path) -> None:
    storage = Faulty(FileStorage(tmp_path))
    settings = RingSettings(segment_bytes=4 << 20, ring_bytes=16 << 20)
    ring, _ = Ring.open(storage, settings=settings, epoch=1)
    put(ring, 1, b"a")
    storage.calls.clear()
    ring.prepare_step(3 << 20)
    assert [call for call, file in storage.calls if file == PREPARING_FILE] == [
        "create", "sync", "sync", "sync",
    ]  # fmt: skip
    ring.close()


@pytest.mark.parametrize(("size", "spares"), [(16, 2), (8, 1)])
def test_a_large_ring_in_use_keeps_two_segments_prepared_and_a_small_one_keeps_one(
    size: int, spares: int
) -> None:
    ring, _ = memory_place().open(RingSettings(segment_bytes=S, ring_bytes=size * S))

    def prepared() -> int:
        ring.sync()
        tidy(ring)
        return ring.bytes_on_disk() // S - -(-ring.end_lsn // S) + ring.start_lsn // S

    fill(ring, 1)
    assert prepared() == 1  # it may never need more
    fill(ring, 4)
    assert prepared() == spares
    fill(ring, 100)
    assert prepared() == spares
    assert ring.bytes_on_disk() == size * S


def test_a_full_disk_does_not_keep_what_would_free_it(place: Place) -> None:
    storage = Faulty(place.storage)
    ring, _ = Ring.open(storage, settings=FOUR, epoch=1)
    fill(ring, 8)
    ring.sync()
    while not ring._space.spares:
        ring.prepare_step()
    held = ring.bytes_on_disk()
    ring.remove_before(1, offset=ring.next_offset(1))
    storage.fail["create"] = DiskFull("no space")
    with pytest.raises(DiskFull):
        tidy(ring)
    assert ring.bytes_on_disk() < held
