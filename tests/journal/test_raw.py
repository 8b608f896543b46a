"""Raw copies by position, and cutting: what a follower will need."""

from __future__ import annotations

import pytest

from malamute_py.journal import JournalCorrupt, Ring, RingSettings
from malamute_py.journal.layout import FAILED_FILE, Failed, pack_file
from malamute_py.journal.storage import replace_file
from tests.journal.rings import (
    HEAD,
    Place,
    S,
    batch,
    everything,
    memory_place,
    put,
)

SETTINGS = RingSettings(segment_bytes=S, ring_bytes=8 * S)


def follow(leader: Ring, follower: Ring, piece: int = 50_000) -> None:
    while follower.end_lsn < leader.end_lsn:
        lsn, data, after = leader.read_raw(follower.end_lsn, leader.end_lsn, piece)
        assert follower.append_raw(lsn, data) == after


def lead(ring: Ring, count: int = 12) -> None:
    for number in range(count):
        put(ring, 1, b"%d" % number * 9000)
        ring.append([batch(ring, 2, [b"x"]), batch(ring, 3, [b"y"])])


@pytest.mark.parametrize("piece", [1, 5000, 1 << 20])
def test_a_follower_holds_the_same_bytes_at_the_same_positions(place: Place, piece: int) -> None:
    leader, _ = memory_place().open(SETTINGS, snapshot=lambda: [b"leader's state"])
    lead(leader)
    follower, _ = place.open(SETTINGS)
    follow(leader, follower, piece)
    assert follower.end_lsn == leader.end_lsn
    for stream in (1, 2, 3):
        assert everything(follower, stream) == everything(leader, stream)
    assert follower.facts(1) == leader.facts(1)
    follower.sync()
    follower, recovery = place.open(SETTINGS)
    assert recovery.snapshot == (b"leader's state",)
    assert recovery.dropped == ()
    assert everything(follower, 1) == everything(leader, 1)
    put(follower, 1, b"led by the follower now")


def test_raw_data_that_does_not_fit_is_refused_with_nothing_written(place: Place) -> None:
    leader, _ = memory_place().open(SETTINGS)
    lead(leader, 2)
    follower, _ = place.open(SETTINGS)
    lsn, data, _ = leader.read_raw(0, leader.end_lsn, 1 << 20)
    raw = bytearray(data)
    with pytest.raises(ValueError, match="goes on at 4096"):
        follower.append_raw(lsn + 8, raw)
    raw[5000] ^= 1
    with pytest.raises(ValueError, match="raw data for position"):
        follower.append_raw(lsn, raw)
    with pytest.raises(ValueError, match="raw data for position"):
        follower.append_raw(lsn, bytes(data)[:-8])
    with pytest.raises(ValueError, match="without a batch"):
        follower.append_raw(lsn, b"")
    assert follower.end_lsn == 0
    follower.append_raw(lsn, data)
    assert everything(follower, 1) == everything(leader, 1)
    with pytest.raises(JournalCorrupt):
        leader.read_raw(HEAD + 8, leader.end_lsn, 100)


def test_a_cut_ring_ends_there_and_writes_on(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    put(ring, 1, b"kept")
    cut = ring.end_lsn
    lead(ring, 20)
    ring.sync()
    recovery = ring.truncate(cut)
    assert recovery.end_lsn == ring.end_lsn == ring.synced_lsn == cut
    assert everything(ring, 1) == [(0, b"kept")]
    assert ring.next_offset(2) == 0
    put(ring, 1, b"new")
    ring.sync()
    ring, recovery = place.open(SETTINGS)
    assert recovery.damages == ()
    assert everything(ring, 1) == [(0, b"kept"), (1, b"new")]
    lead(ring, 20)
    with pytest.raises(ValueError, match="not in the ring"):
        ring.truncate(ring.end_lsn + 8)


def test_a_follower_that_went_astray_is_cut_and_follows_on(place: Place) -> None:
    leader, _ = memory_place().open(SETTINGS)
    lead(leader, 3)
    follower, _ = place.open(SETTINGS)
    follow(leader, follower)
    common = leader.end_lsn
    place.epoch += 5
    follower, _ = place.open(SETTINGS)
    put(follower, 1, b"never confirmed by anybody")
    follower.truncate(common)
    lead(leader, 3)
    follow(leader, follower)
    assert everything(follower, 1) == everything(leader, 1)


def test_a_cut_in_a_segment_written_anew_after_a_failed_sync_stays_cut(place: Place) -> None:
    ring, _ = place.open()
    lsns = [put(ring, 1, bytes(1000)).lsn for _ in range(20)]
    synced = ring.sync()
    mark = Failed(ring.uuid, synced, synced, ring.epoch, "a sync failed")
    replace_file(place.storage, FAILED_FILE, pack_file(mark))
    ring, recovery = place.open()
    assert recovery.rewritten  # and its header proves all of it
    recovery = ring.truncate(lsns[10])
    assert (recovery.end_lsn, recovery.damages) == (lsns[10], ())
    assert ring.next_offset(1) == 10
