"""A ring in use: appending, syncing, reading, finding. On files and in memory alike."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from pyroaring import BitMap

from malamute_protocol.content import Content
from malamute_protocol.stamp import CHANGE, EPOCH_START, Stamp
from malamute_py.journal import (
    Append,
    BatchTooLarge,
    DiskFull,
    EpochStart,
    HeaderIndex,
    JournalFailed,
    JournalFull,
    Ring,
    RingSettings,
)
from malamute_py.journal.index import Span
from malamute_py.journal.storage import File
from tests.journal.rings import (
    HEAD,
    SMALL,
    Faulty,
    Place,
    S,
    batch,
    content_of,
    everything,
    put,
    read_all,
    records,
)


def test_what_is_appended_is_read_in_order_by_stream(place: Place) -> None:
    ring, _ = place.open()
    for number in range(100):
        put(ring, number % 3, b"%d" % number)
    for stream in range(3):
        want = [(n // 3, b"%d" % n) for n in range(stream, 100, 3)]
        assert everything(ring, stream) == want


def test_the_stamps_say_where_everything_is(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 9, b"first")
    ring.sync()
    synced = ring.synced_lsn
    answer = ring.append([batch(ring, 1, [b"a"]), batch(ring, 2, [b"b", b"c"])])
    one, two = map(Stamp.unpack, answer.stamps)
    assert (one.lsn, two.lsn) == (answer.lsn, answer.lsn + one.size)
    assert one.bundle_lsn == two.bundle_lsn == answer.lsn
    assert (one.flags, two.flags) == (0, 1)
    assert one.synced_lsn == two.synced_lsn == synced
    assert one.epoch == two.epoch == 1
    assert two.lsn + two.size == answer.end_lsn == ring.end_lsn
    assert Stamp.unpack(place.read(two.lsn, 96)) == two
    assert ring.sync() == ring.synced_lsn == answer.end_lsn


def test_the_first_batch_of_an_epoch_is_an_epoch_start(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    ring, _ = place.open()
    before = ring.end_lsn
    put(ring, 1, b"b")
    stamp = Stamp.unpack(place.read(before, 96))
    assert (stamp.control_kind, stamp.epoch) == (EPOCH_START, 2)
    assert ring.facts(1).epochs == (EpochStart(1, 0), EpochStart(2, 1))


def test_append_time_never_goes_back(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a", time_ms=5000)
    later = put(ring, 1, b"b", time_ms=4000)
    assert Stamp.unpack(later.stamps[0]).append_time_ms == 5000
    ring, recovery = place.open()
    assert recovery.last_append_time_ms == 5000
    again = put(ring, 2, b"c", time_ms=1)
    assert Stamp.unpack(again.stamps[0]).append_time_ms == 5000


def test_an_offset_is_never_given_twice(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a", b"b")
    end = ring.end_lsn
    with pytest.raises(ValueError, match="given twice"):
        ring.append([batch(ring, 1, [b"c"], base=1)])
    with pytest.raises(ValueError, match="given twice"):
        ring.append([batch(ring, 2, [b"c", b"d"], base=0), batch(ring, 2, [b"e"], base=1)])
    assert ring.end_lsn == end


def test_a_bundle_is_read_back_over_segments_with_its_padding(place: Place) -> None:
    ring, _ = place.open()
    bodies = [bytes([n]) * 25_000 for n in range(5)]
    ring.append([batch(ring, 1, [body], base=n) for n, body in enumerate(bodies)])
    want = list(enumerate(bodies))
    assert everything(ring, 1) == want
    assert ring.end_lsn > 2 * S
    ring, recovery = place.open()
    assert everything(ring, 1) == want
    assert not recovery.dropped


def test_a_batch_that_fits_no_segment_is_refused_with_nothing_written(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    end = ring.end_lsn
    with pytest.raises(BatchTooLarge, match="use larger segments"):
        put(ring, 1, bytes(S))
    with pytest.raises(BatchTooLarge, match="raise ring_bytes"):
        ring.append([batch(ring, 2, [bytes(60_000)], base=n) for n in range(6)])
    assert ring.end_lsn == end
    assert everything(ring, 1) == [(0, b"a")]


@pytest.mark.moderate
def test_the_end_of_a_segment_is_met_at_every_distance(place: Place) -> None:
    """Rests of 0 to 400 bytes: exact fits, rests too small for a stamp, paddings."""
    for rest in range(0, 400, 8):
        ring, _ = place.open()
        stream = rest + 1
        put(ring, stream, b"")
        empty = 96 + len(content_of([b""])[0])
        room = -ring.end_lsn % S
        if room < empty + rest:
            put(ring, stream, bytes(room))  # begins a new segment
            room = -ring.end_lsn % S
        fill = room - rest - empty
        put(ring, stream, bytes(fill))
        assert -ring.end_lsn % S in (rest, 0, rest - rest % 8)
        put(ring, stream, b"next")
        kept = everything(ring, stream)
        ring, recovery = place.open()
        assert not recovery.dropped
        assert not recovery.damages
        assert everything(ring, stream) == kept
        assert kept[-1][1] == b"next"


# --- recovery hands back the caller's state -------------------------------------------


def test_recovery_returns_the_newest_snapshot_and_what_followed_it(place: Place) -> None:
    state: list[bytes] = []
    ring, _ = place.open(snapshot=lambda: [b"".join(state)])
    for number in range(100):
        ring.append([batch(ring, 0, [b"%03d" % number * 500], base=0, kind=CHANGE)])
        state.append(b"%03d" % number)
    ring, recovery = place.open()
    (snapshot,) = recovery.snapshot
    told = [snapshot[at : at + 3] for at in range(0, len(snapshot), 3)]
    for control in recovery.controls:
        assert control.kind == CHANGE
        assert control.lsn >= recovery.snapshot_lsn
        blob = bytes(Content(control.content).bodies().blob)
        told.append(blob[:3])
    assert told == [b"%03d" % number for number in range(100)]


def test_a_bundle_that_spans_segments_is_told_whole_after_its_own_snapshot(place: Place) -> None:
    state = [b"before"]
    ring, _ = place.open(snapshot=lambda: list(state))
    put(ring, 1, b"a")
    ring.append([batch(ring, 0, [b"%d" % n * 25_000], base=0, kind=CHANGE) for n in range(4)])
    assert ring.end_lsn > S
    _, recovery = place.open()
    assert recovery.snapshot == (b"before",)
    assert len(recovery.controls) == 4


def test_recovery_returns_the_producers_facts_after_the_snapshot(place: Place) -> None:
    ring, _ = place.open()
    for number in range(3):
        put(
            ring,
            1,
            b"a",
            b"b",
            producer_id=77,
            producer_epoch=2,
            first_sequence=10 + 2 * number,
            time_ms=1000 + number,
        )
    put(ring, 1, b"not idempotent")
    _, recovery = place.open()
    assert [
        (p.stream, p.producer_id, p.producer_epoch, p.first_sequence, p.count, p.base_offset)
        for p in recovery.produced
    ] == [(1, 77, 2, 10 + 2 * n, 2, 2 * n) for n in range(3)]
    assert [p.append_time_ms for p in recovery.produced] == [1000, 1001, 1002]


def test_offsets_go_on_even_when_every_batch_of_the_stream_is_gone(place: Place) -> None:
    settings = RingSettings(segment_bytes=S, ring_bytes=3 * S)
    ring, _ = place.open(settings)
    put(ring, 7, b"a", b"b", b"c")
    for _ in range(20):
        put(ring, 1, bytes(30_000))
    assert ring.first_offset(7) == ring.next_offset(7) == 3
    ring, _ = place.open(settings)
    assert (ring.first_offset(7), ring.next_offset(7)) == (3, 3)
    assert ring.facts(7).epochs == (EpochStart(1, 0),)
    put(ring, 7, b"d")
    assert everything(ring, 7) == [(3, b"d")]


@pytest.mark.parametrize("clean", [False, True])
def test_where_an_epoch_begins_is_known_though_its_first_bundle_spans_segments(
    place: Place, clean: bool
) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    ring, _ = place.open()
    # The snapshot of the second segment is the state before the bundle: without its epoch.
    ring.append([batch(ring, 1, [bytes(25_000)], base=1 + n) for n in range(4)])
    assert ring.end_lsn > S
    epochs = ring.facts(1).epochs
    assert epochs == (EpochStart(1, 0), EpochStart(2, 1))
    ring.sync()
    while ring.prepare_step(1 << 20):
        pass
    for _ in range(3):
        if clean:
            ring.close()
        ring, _ = place.open()
        assert ring.facts(1).epochs == epochs
    put(ring, 1, b"b")
    assert ring.facts(1).epochs == (*epochs, EpochStart(5, 5))


def test_an_epoch_that_does_not_rise_is_refused(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    with pytest.raises(ValueError, match="must be above 1"):
        Ring.open(place.storage, settings=SMALL, epoch=1)


def test_the_segment_size_is_fixed_for_the_rings_life(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    ring, _ = place.open(RingSettings(segment_bytes=4 * S, ring_bytes=16 * S))
    assert ring.settings.segment_bytes == S
    assert everything(ring, 1) == [(0, b"a")]
    with pytest.raises(ValueError, match="three segments"):
        place.open(RingSettings(segment_bytes=S, ring_bytes=2 * S))


def test_an_orderly_close_is_told_and_so_is_its_absence(place: Place) -> None:
    ring, recovery = place.open()
    assert not recovery.clean
    put(ring, 1, b"a")
    ring.close()
    ring, recovery = place.open()
    assert recovery.clean
    put(ring, 1, b"b")
    _, recovery = place.open()
    assert not recovery.clean


# --- failing -----------------------------------------------------------------------------


def test_after_a_failed_sync_the_ring_takes_nothing_more_and_reads_go_on(place: Place) -> None:
    storage = Faulty(place.storage)
    ring, _ = Ring.open(storage, settings=SMALL, epoch=1)
    put(ring, 1, b"a")
    ring.sync()
    good = ring.synced_lsn
    put(ring, 1, b"b")
    storage.fail["sync"] = OSError(errno.EIO, "gone")
    with pytest.raises(JournalFailed) as first:
        ring.sync()
    assert first.value.synced_lsn == good
    storage.fail.clear()
    with pytest.raises(JournalFailed, match="restart the broker"):
        ring.sync()
    with pytest.raises(JournalFailed):
        put(ring, 1, b"c")
    assert ring.synced_lsn == good
    assert everything(ring, 1) == [(0, b"a"), (1, b"b")]
    with pytest.raises(JournalFailed):
        ring.close()


def test_a_full_disk_refuses_the_append_whole_and_says_what_to_do(place: Place) -> None:
    storage = Faulty(place.storage)
    ring, _ = Ring.open(storage, settings=SMALL, epoch=1)
    put(ring, 1, bytes(40_000))
    storage.fail["create"] = DiskFull("the disk is full: free space there, or lower ring_bytes")
    end = ring.end_lsn
    with pytest.raises(DiskFull, match="lower ring_bytes"):
        put(ring, 1, bytes(40_000))
    assert ring.end_lsn == end
    put(ring, 1, b"small ones go on while the segment has room")
    storage.fail.clear()
    put(ring, 1, bytes(40_000))
    assert len(everything(ring, 1)) == 3


@pytest.mark.parametrize("call", ["write", "sync", "rename"])
@pytest.mark.parametrize("error", [DiskFull("full"), OSError(errno.EIO, "broken")])
def test_a_segment_that_cannot_be_finished_gives_its_space_back_at_once(
    place: Place, call: str, error: Exception
) -> None:
    storage = Faulty(place.storage)
    ring, _ = Ring.open(storage, settings=SMALL, epoch=1)
    put(ring, 1, bytes(40_000))
    ring.sync()
    before = storage.names()
    storage.fail[call] = error
    with pytest.raises(type(error)):
        ring.prepare_step(1 << 20)
    assert storage.names() == before
    storage.fail.clear()
    put(ring, 1, bytes(40_000))
    assert len(everything(ring, 1)) == 2


def test_a_write_that_fails_for_want_of_space_leaves_nothing_behind(place: Place) -> None:
    storage = Faulty(place.storage)
    ring, _ = Ring.open(storage, settings=SMALL, epoch=1)
    put(ring, 1, b"a")
    end = ring.end_lsn
    storage.fail["write"] = OSError(errno.ENOSPC, "no space")
    with pytest.raises(DiskFull):
        put(ring, 1, b"b")
    storage.fail.clear()
    assert ring.end_lsn == end
    put(ring, 1, b"c")
    assert everything(ring, 1) == [(0, b"a"), (1, b"c")]


def test_a_write_that_fails_otherwise_seals_the_ring(place: Place) -> None:
    storage = Faulty(place.storage)
    ring, _ = Ring.open(storage, settings=SMALL, epoch=1)
    put(ring, 1, b"a")
    storage.fail["write"] = OSError(errno.EIO, "broken")
    with pytest.raises(JournalFailed):
        put(ring, 1, b"b")
    storage.fail.clear()
    with pytest.raises(JournalFailed):
        put(ring, 1, b"b")
    assert everything(ring, 1) == [(0, b"a")]


def test_a_segment_that_cannot_be_prepared_refuses_the_append_and_is_tried_again(
    place: Place,
) -> None:
    storage = Faulty(place.storage)
    ring, _ = Ring.open(storage, settings=SMALL, epoch=1)
    put(ring, 1, bytes(40_000))
    ring.sync()
    storage.fail["sync"] = OSError(errno.EIO, "broken")
    end = ring.end_lsn
    with pytest.raises(DiskFull, match="no segment could be prepared"):
        put(ring, 1, bytes(40_000))
    assert ring.end_lsn == end
    assert ring.failure is None
    storage.fail.clear()
    put(ring, 1, bytes(40_000))
    assert len(everything(ring, 1)) == 2


def test_an_end_that_cannot_be_written_down_fails_the_closing(place: Place) -> None:
    storage = Faulty(place.storage)
    ring, _ = Ring.open(storage, settings=SMALL, epoch=1)
    put(ring, 1, b"a")
    ring.sync()
    storage.fail["create"] = OSError(errno.EIO, "broken")
    with pytest.raises(JournalFailed, match="could not be written down"):
        ring.close()
    ring.close()


def test_a_ring_that_refuses_is_full_until_something_is_removed(place: Place) -> None:
    ring, _ = place.open(RingSettings(segment_bytes=S, ring_bytes=4 * S, full="refuse"))
    with pytest.raises(JournalFull, match="raise ring_bytes"):
        fill(ring, 100)
    count = ring.next_offset(1)
    assert count >= 4
    assert ring.first_offset(1) == 0
    assert len(everything(ring, 1)) == count
    ring.remove_before(1, offset=count // 2)
    put(ring, 1, bytes(30_000))
    assert [o for o, _ in everything(ring, 1)] == list(range(count // 2, count + 1))


def fill(ring: Ring, count: int) -> None:
    for _ in range(count):
        put(ring, 1, bytes(30_000))


# --- reading -------------------------------------------------------------------------------


def test_a_read_stops_at_its_bytes_but_gives_one_batch_at_least(place: Place) -> None:
    ring, _ = place.open()
    for number in range(20):
        put(ring, 1, bytes([number]) * 1000)
    history = ring.read(1, 0, 20, 1)
    assert [o for o, _ in records(history)] == [0]
    assert history.next == 1
    history = ring.read(1, 1, 20, 5000)
    assert history.next == 1 + len(records(history))
    assert 4 <= len(records(history)) <= 6
    history = ring.read(1, 5, 7, 1 << 20)
    assert [o for o, _ in records(history)] == [5, 6]
    assert history.next == 7


def test_a_read_amid_a_batch_gives_the_whole_batch(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a", b"b", b"c")
    put(ring, 1, b"d")
    history = ring.read(1, 1, 2, 1 << 20)
    assert [o for o, _ in records(history)] == [0, 1, 2]
    assert history.next == 2


def test_a_read_of_what_is_gone_names_the_gap(place: Place) -> None:
    ring, _ = place.open(RingSettings(segment_bytes=S, ring_bytes=3 * S))
    for _ in range(20):
        put(ring, 1, bytes(30_000))
    first = ring.first_offset(1)
    assert first > 0
    history = ring.read(1, 0, 20, 1 << 30)
    assert [(g.from_offset, g.to_offset, g.code) for g in history.gaps] == [(0, first, "retention")]
    assert [o for o, _ in records(history)] == list(range(first, 20))


@pytest.mark.parametrize("in_one_entry", [False, True])
def test_a_read_names_records_past_their_age_as_a_gap_to_the_batch(
    place: Place, in_one_entry: bool
) -> None:
    interval = 1 << 20 if in_one_entry else 0
    settings = RingSettings(segment_bytes=S, ring_bytes=8 * S, index_interval_bytes=interval)
    ring, _ = place.open(settings)
    for number in range(10):
        put(ring, 1, b"a", b"b", time_ms=1_000 + 500 * number)
    history = ring.read(1, 3, 20, 1 << 20, oldest_ms=3_000)
    assert [tuple(gap)[:3] for gap in history.gaps] == [(3, 8, "retention")]
    assert [offset for offset, _ in records(history)] == list(range(8, 20))
    pinned = ring.read(1, 3, 20, 1 << 20, oldest_ms=3_000, pinned=6)
    assert [tuple(gap)[:2] for gap in pinned.gaps] == [(3, 6)]
    assert [offset for offset, _ in records(pinned)] == list(range(6, 20))
    young = ring.read(1, 9, 20, 1 << 20, oldest_ms=3_000)
    assert young.gaps == ()
    old = ring.read(1, 0, 20, 1 << 20, oldest_ms=9_000)
    assert (old.runs, old.next) == ((), 20)
    assert [tuple(gap)[:2] for gap in old.gaps] == [(0, 20)]


def test_an_unknown_stream_reads_as_nothing(place: Place) -> None:
    ring, _ = place.open()
    assert ring.read(5, 3, 9, 100).next == 3
    assert ring.facts(5).next == 0
    assert ring.last_per_subject(5) == []
    assert ring.closest_offset(5, 0) == 0
    assert ring.plan(5, 0, 10).splits == ()


def test_runs_follow_on_one_another_and_skip_what_cannot_match(place: Place) -> None:
    ring, _ = place.open(RingSettings(segment_bytes=S, ring_bytes=8 * S, index_interval_bytes=0))
    for number in range(60):
        put(ring, 1, b"%d" % number, subject="rare" if number % 20 == 7 else "often")
        put(ring, 2, b"other")

    def rare(index: HeaderIndex) -> BitMap:
        found = BitMap()
        for keys, bitmap in index.subjects():
            if keys == ("rare",):
                found |= bitmap
        return found

    history = ring.read(1, 0, 60, 1 << 20, rare)
    assert records(history) == [(n, b"%d" % n) for n in (7, 27, 47)]
    assert history.next == 60
    assert history.gaps == ()
    assert len(history.runs) == 3
    whole = ring.read(1, 0, 60, 1 << 20)
    assert len(whole.runs) == 1
    assert len(whole.runs[0].data) == sum(size for _, size, _, _ in whole.runs[0].spans)


def test_times_are_found_inclusive_and_exclusive(place: Place) -> None:
    ring, _ = place.open()
    for number in range(30):
        put(ring, 1, b"a", b"b", time_ms=1000 + 10 * (number // 2))
    assert ring.closest_offset(1, 0) == 0
    assert ring.closest_offset(1, 1000) == 0
    assert ring.closest_offset(1, 1000, inclusive=False) == 4
    assert ring.closest_offset(1, 1005) == 4
    assert ring.closest_offset(1, 1140) == 56
    assert ring.closest_offset(1, 1141) == 60
    ring.remove_before(1, time_ms=1050)
    assert ring.first_offset(1) == 20
    assert ring.closest_offset(1, 0) == 20


def test_client_times_are_found_to_the_record_and_select_entries(place: Place) -> None:
    ring, _ = place.open(RingSettings(segment_bytes=S, ring_bytes=8 * S, index_interval_bytes=0))
    put(ring, 1, b"none")
    put(ring, 1, b"a", b"b", client_time_ms=[500, 700])
    put(ring, 1, b"c", b"d", client_time_ms=[None, 300])
    put(ring, 1, b"e", client_time_ms=[900])
    assert ring.closest_client_time(1, 600) == 2
    assert ring.closest_client_time(1, 100) == 1
    assert ring.closest_client_time(1, 901) == 6
    history = ring.read(1, 0, 6, 1 << 20, None, (250, 400))
    assert [o for o, _ in records(history)] == [3, 4]
    assert history.next == 6


def test_the_latest_record_of_each_subject_is_found_up_to_a_position(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"0", subject="a")
    put(ring, 1, b"1", b"2", b"3", subject=["b", "a", "c"])
    put(ring, 1, b"4", subject=[["a", "alias"]])
    put(ring, 1, b"5", subject="b")
    assert ring.last_per_subject(1) == [
        (("a",), 2),
        (("c",), 3),
        (("a", "alias"), 4),
        (("b",), 5),
    ]
    assert ring.last_per_subject(1, end_offset=3) == [(("b",), 1), (("a",), 2)]


def test_a_plan_cuts_the_range_into_parts_of_about_equal_bytes(place: Place) -> None:
    ring, _ = place.open()
    for _ in range(40):
        put(ring, 1, bytes(1000), bytes(1000))
    plan = ring.plan(1, 3, 71, split_bytes=20_000)
    assert plan.splits[0].from_offset == 3
    assert plan.splits[-1].to_offset == plan.end == 71
    for left, right in zip(plan.splits, plan.splits[1:], strict=False):
        assert left.to_offset == right.from_offset
    assert all(split.bytes <= 26_000 for split in plan.splits)
    assert sum(split.bytes for split in plan.splits) == plan.bytes
    assert ring.plan(1, 0, 80, records_max=10).end == 10
    assert 15_000 < ring.plan(1, 0, 80, bytes_max=15_000).bytes < 20_000


@pytest.mark.moderate
def test_a_thousand_streams_share_a_ring(place: Place) -> None:
    ring, _ = place.open(RingSettings(segment_bytes=4 * S, ring_bytes=32 * S))
    for round_ in range(3):
        ring.append([batch(ring, n, [b"%d.%d" % (n, round_)]) for n in range(1000)])
    ring.sync()
    assert len(ring.streams()) == 1000
    ring, recovery = place.open(RingSettings(segment_bytes=4 * S, ring_bytes=32 * S))
    assert not recovery.dropped
    assert len(ring.streams()) == 1000
    for stream in (0, 1, 500, 999):
        assert everything(ring, stream) == [(r, b"%d.%d" % (stream, r)) for r in range(3)]
    files = [name for name in place.storage.names() if name.endswith(".seg")]
    assert len(files) <= 8


def test_any_buffer_can_be_appended(place: Place) -> None:
    ring, _ = place.open()
    content, crc = content_of([b"a"])
    forms: list[Any] = [content, bytearray(content), memoryview(content)]
    for number, form in enumerate(forms):
        ring.append([Append(1, number, 1, 1, form, crc)])
    assert everything(ring, 1) == [(n, b"a") for n in range(3)]


def test_a_snapshot_begins_every_segment(place: Place) -> None:
    ring, _ = place.open()
    for _ in range(6):
        put(ring, 1, bytes(30_000))
    for number in range(ring.end_lsn // S):
        stamp = Stamp.unpack(place.read(number * S + HEAD, 96))
        assert stamp.control_kind == 2
    assert read_all(ring, 1).gaps == ()


def test_asking_for_a_stream_that_is_not_there_does_not_make_it(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    assert ring.closest_offset(9, 0) == ring.closest_client_time(9, 0) == 0
    assert ring.remove_before(9, offset=5) == ring.remove_before(9, time_ms=5) == 0
    assert ring.read(9, 0, 5, 100).gaps == ()
    assert set(ring.streams()) == {1}


def test_a_file_that_cannot_be_opened_just_now_is_no_damage(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    monkeypatch.setattr(ring._space.segments[0], "file", None)
    with monkeypatch.context() as starved:

        def full(name: str) -> File:
            raise OSError(errno.EMFILE, "too many open files", name)

        starved.setattr(place.storage, "open", full)
        with pytest.raises(OSError, match="too many"):
            ring.read(1, 0, 1, 100)
    assert everything(ring, 1) == [(0, b"a")]


def test_a_bad_page_hides_no_other_batch_from_a_search(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, _ = place.open(RingSettings(segment_bytes=S, ring_bytes=8 * S))
    lsns = [put(ring, 1, b"x" * 3000, subject=f"s{n}", time_ms=n).lsn for n in range(4)]
    bad = (lsns[2] + 2000) // 4096 * 4096
    real = place.storage.read

    def read(file: File, position: int, size: int) -> bytes:
        if position < bad + 4096 and position + size > bad:
            raise OSError(errno.EIO, "a bad page")
        return real(file, position, size)

    monkeypatch.setattr(place.storage, "read", read)
    found = dict(ring.last_per_subject(1))
    assert found[("s0",)] == 0
    assert ("s2",) not in found
    assert ring.closest_offset(1, 0) == 0


def test_the_facts_of_all_streams_look_into_each_segment_once(place: Place) -> None:
    """Streams times segments would be 3 million looks at a start with 10,000 streams in 20 GiB."""

    class Counted(dict[int, Span]):
        looks = 0

        def __contains__(self, number: object) -> bool:
            Counted.looks += 1
            return super().__contains__(number)

        def copy(self) -> Counted:
            Counted.looks += 1
            return self

    ring, _ = place.open(RingSettings(segment_bytes=4 * S, ring_bytes=32 * S))
    for round_ in range(3):
        ring.append([batch(ring, n, [b"%d.%d" % (n, round_)]) for n in range(500)])
    one_by_one = {number: ring.facts(number) for number in ring.streams()}
    segments = ring._space.segments
    for segment in segments:
        segment.spans = Counted(segment.spans)
    assert ring.streams() == one_by_one
    assert Counted.looks == len(segments) >= 2


@pytest.mark.parametrize("size", [1, 40_000])
def test_a_time_that_may_lie_in_damage_that_a_start_found_begins_there(
    place: Place, size: int
) -> None:
    """A start leaves damage out of the index: no time of its records is known."""
    ring, _ = place.open()
    for number in range(3):
        put(ring, 1, b"a" * size, time_ms=1000 + number)
    bad = put(ring, 1, b"b", time_ms=1010)
    for number in range(3):
        put(ring, 1, b"c", time_ms=1020 + number)
    ring.sync()
    ring.close()
    place.flip(bad.lsn + 200)
    ring, _ = place.open()
    assert ring.closest_offset(1, 1002) == 2
    assert ring.closest_offset(1, 1015) == 3
    assert ring.closest_offset(1, 1021) == 5
    assert [(gap.from_offset, gap.to_offset) for gap in read_all(ring, 1).gaps] == [(3, 4)]
