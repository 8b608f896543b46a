"""The hold of a checkpoint: nothing at or beyond it goes, whatever else gives way."""

from __future__ import annotations

import errno

import pytest

from malamute_py.journal import DiskFull, Journal, JournalFull, MemoryStorage, Ring, RingSettings
from malamute_py.journal.layout import segment_name
from tests.journal.rings import Faulty, Place, S, everything, put
from tests.journal.test_retention import FOUR, fill, segments, tidy


def fill_until_full(ring: Ring, *, housekeeping: bool = True) -> str:
    """Append until the ring takes no more; returns why, and checks that nothing was written."""
    for _ in range(200):
        end, after = ring.end_lsn, ring.next_offset(1)
        try:
            fill(ring, 1)
        except JournalFull as error:
            assert (ring.end_lsn, ring.next_offset(1)) == (end, after)
            return str(error)
        ring.sync()
        if housekeeping:
            tidy(ring)
    raise AssertionError("the ring laps its hold")


@pytest.mark.moderate
def test_a_held_ring_refuses_rather_than_retire_and_goes_on_when_the_hold_is_raised(
    place: Place,
) -> None:
    ring, _ = place.open(FOUR)
    fill(ring, 1)
    ring.hold(0)
    reason = fill_until_full(ring)
    assert "held by a checkpoint at position 0" in reason
    assert f"{ring.end_lsn} bytes behind" in reason
    tidy(ring)
    assert [o for o, _ in everything(ring, 1)] == list(range(ring.next_offset(1)))
    assert len(segments(place)) == 4
    assert ring.take_events() == []

    ring.hold(S - 1)
    with pytest.raises(JournalFull):
        fill(ring, 3)
    ring.hold(S)
    fill(ring, 3)
    assert segments(place)[0] == 1
    with pytest.raises(JournalFull):
        fill(ring, 3)
    ring.hold(None)
    fill(ring, 30)
    assert (ring.held_lsn, ring.held_bytes) == (None, 0)
    assert ring.start_lsn > S


@pytest.mark.moderate
def test_no_append_is_refused_for_the_hold_while_it_stays_within_the_capacity(
    place: Place,
) -> None:
    ring, _ = place.open(FOUR)
    fill(ring, 8)
    assert ring.capacity_bytes == 3 * S
    # Wherever in a segment the hold lies: a hold at every bundle, and a ring filled from there.
    for _ in range(12):
        held = ring.end_lsn
        ring.hold(held)
        while True:
            before = ring.held_bytes
            try:
                put(ring, 1, bytes(3000))
            except JournalFull:
                # A turn costs the rest of its segment, header and snapshot, too.
                assert before + 3000 + 2 * 4096 + 1000 > ring.capacity_bytes
                break
            assert ring.held_bytes == ring.end_lsn - held
        assert ring.start_lsn <= held


def test_housekeeping_retires_nothing_that_is_held(place: Place) -> None:
    ring, _ = place.open(RingSettings(segment_bytes=S, ring_bytes=10 * S))
    fill(ring, 18)
    held = 3 * S + 5000
    ring.hold(held)
    ring.remove_before(1, offset=17)
    ring.sync()
    tidy(ring)
    assert ring.start_lsn == 3 * S
    fill(ring, 3)
    ring.sync()
    tidy(ring, now_ms=1 << 60)
    assert ring.start_lsn == 3 * S
    ring.hold(ring.end_lsn)
    tidy(ring)
    assert ring.start_lsn > 3 * S


def test_expired_records_stay_while_they_are_held(place: Place) -> None:
    ring, _ = place.open(RingSettings(segment_bytes=S, ring_bytes=10 * S))
    ring.hold(0)
    for _ in range(12):
        put(ring, 1, bytes(20_000), expires_at_ms=5000)
    ring.sync()
    tidy(ring, now_ms=9000)
    assert ring.first_offset(1) == 0
    ring.hold(2 * S)
    tidy(ring, now_ms=9000)
    assert ring.start_lsn == 2 * S


def test_a_hold_is_never_lowered_and_lies_in_the_ring(place: Place) -> None:
    ring, _ = place.open(FOUR)
    fill(ring, 12)
    with pytest.raises(ValueError, match="cannot be held"):
        ring.hold(ring.start_lsn - 1)
    with pytest.raises(ValueError, match="cannot be held"):
        ring.hold(ring.end_lsn + 8)
    assert (ring.held_lsn, ring.held_bytes) == (None, 0)
    ring.hold(ring.end_lsn)
    with pytest.raises(ValueError, match="cannot be lowered"):
        ring.hold(ring.end_lsn - 8)
    with pytest.raises(ValueError, match="cannot be held"):
        ring.hold(ring.end_lsn + 8)
    assert ring.held_lsn == ring.end_lsn
    ring.hold(ring.end_lsn)
    ring.hold(None)
    ring.hold(ring.start_lsn)
    assert ring.held_bytes == ring.end_lsn - ring.start_lsn


def test_a_ring_opened_held_retires_nothing_until_the_hold_is_set(place: Place) -> None:
    ring, _ = place.open(FOUR)
    fill(ring, 11)
    ring.remove_before(1, offset=11)
    ring.close()
    ring, _ = place.open(FOUR, held=True)
    start = ring.start_lsn
    assert ring.held_lsn == start
    tidy(ring)
    assert ring.start_lsn == start
    ring.hold(ring.end_lsn)
    tidy(ring)
    fill(ring, 1)
    assert ring.start_lsn > start

    ring, _ = place.open(FOUR)
    tidy(ring)
    assert ring.held_lsn is None


def test_an_empty_ring_opened_held_is_held_from_its_beginning(place: Place) -> None:
    ring, _ = place.open(FOUR, held=True)
    ring.hold(0)
    assert "held by a checkpoint" in fill_until_full(ring)
    assert ring.first_offset(1) == 0


def test_a_journal_opens_a_ring_held(place: Place) -> None:
    with_hold, _ = Journal.open(MemoryStorage()).ring("main", FOUR, held=True)
    assert with_hold.held_lsn == 0


def test_a_ring_opened_with_fewer_bytes_than_are_held_takes_nothing_and_loses_nothing(
    place: Place,
) -> None:
    ring, _ = place.open(RingSettings(segment_bytes=S, ring_bytes=10 * S))
    fill(ring, 24)
    ring.close()
    ring, _ = place.open(FOUR, held=True)
    ring.hold(S)
    tidy(ring)
    assert ring.start_lsn == S  # what lies before the hold goes at once
    assert ring.held_bytes > ring.capacity_bytes
    assert "held by a checkpoint" in fill_until_full(ring)
    assert ring.start_lsn == S
    ring.hold(ring.end_lsn)
    tidy(ring)
    assert len(segments(place)) <= 4
    fill(ring, 3)


def test_a_held_segment_breaks_no_pin_and_a_pin_gives_the_hold_no_extra_space(
    place: Place,
) -> None:
    settings = RingSettings(segment_bytes=S, ring_bytes=4 * S, pin_bytes_max=3 * S)
    ring, _ = place.open(settings)
    fill(ring, 1)
    ring.pin("replay", 1, 0)
    ring.hold(0)
    assert "held by a checkpoint" in fill_until_full(ring)
    assert ring._space._pins == {"replay": (1, 0)}
    assert len(segments(place)) == 4

    # Freed by its hold the ring goes on on the pin's extra space, up to its bound; then the pin
    # breaks and the hold does not.
    held = ring.end_lsn
    ring.hold(held)
    assert "held by a checkpoint" in fill_until_full(ring)
    assert [e.facts["pin"] for e in ring.take_events() if e.name == "pin_broken"] == ["replay"]
    assert ring.start_lsn == held // S * S
    assert len(segments(place)) <= 7


def test_a_full_disk_breaks_a_pin_and_no_hold(place: Place) -> None:
    storage = Faulty(place.storage)
    ring, _ = Ring.open(storage, settings=FOUR, epoch=1)
    fill(ring, 11)
    ring.pin("replay", 1, ring.first_offset(1))
    ring.hold(ring.end_lsn)
    held = ring.next_offset(1)
    storage.fail["create"] = DiskFull("full")
    assert "held by a checkpoint" in fill_until_full(ring, housekeeping=False)
    assert ring.first_offset(1) <= held
    assert [e.name for e in ring.take_events() if e.name == "pin_broken"] == ["pin_broken"]


def test_a_refusing_ring_says_what_keeps_it_full(place: Place) -> None:
    settings = RingSettings(segment_bytes=S, ring_bytes=4 * S, full="refuse")
    ring, _ = place.open(settings)
    ring.hold(0)
    assert "held by a checkpoint" in fill_until_full(ring)
    ring.hold(ring.end_lsn)
    assert "may not overwrite what is kept" in fill_until_full(ring)
    ring.remove_before(1, offset=ring.next_offset(1))
    fill(ring, 1)


@pytest.mark.moderate
def test_a_reuse_that_failed_before_the_hold_was_set_is_finished_after_it(place: Place) -> None:
    storage = Faulty(place.storage)
    ring, _ = Ring.open(storage, settings=FOUR, epoch=1)
    while ring.end_lsn < 9 * S:
        fill(ring, 1)
        ring.sync()
        tidy(ring)
    fill(ring, 3)
    ring.sync()
    while place.storage.persistent and any(s.live for s in ring._space.segments[:-1]):
        ring._space._write_one_index()
    storage.fail["rename"] = OSError(errno.EIO, "broken")
    with pytest.raises(OSError, match="broken"):
        tidy(ring)
    assert ring._space._leaving is not None
    storage.fail.clear()
    ring.hold(ring.start_lsn)
    first = ring.first_offset(1)
    reason = fill_until_full(ring)
    assert "held by a checkpoint" in reason
    assert ring.first_offset(1) == first
    assert segment_name(ring.start_lsn // S) in place.storage.names()


def test_a_stuck_checkpoint_lets_housekeeping_rest(place: Place) -> None:
    ring, _ = place.open(FOUR)
    ring.hold(0)
    fill_until_full(ring)
    ring.sync()
    tidy(ring)
    assert not ring.prepare_step()
    assert not ring.prepare_step()
