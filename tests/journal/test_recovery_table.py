"""Every row of the decision table in FORMAT.md, section 7, by its name."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from malamute_protocol.errors import BatchError
from malamute_protocol.stamp import CHANGE, STAMP_BYTES, Stamp
from malamute_py.journal import JournalCorrupt, JournalFailed, Ring, RingSettings
from malamute_py.journal.layout import (
    ACTIVE_FILE,
    CLOSED_FILE,
    PREPARING_FILE,
    SegmentHeader,
    index_name,
    segment_name,
)
from malamute_py.journal.storage import File, replace_file
from tests.journal import test_missing_files
from tests.journal.rings import (
    HEAD,
    SMALL,
    Faulty,
    Place,
    S,
    batch,
    content_of,
    everything,
    file_place,
    put,
    read_all,
    records,
)

FORMAT = Path(__file__).parents[2] / "malamute_py" / "journal" / "FORMAT.md"


def fill(ring: Ring, stream: int, segments: int, size: int = 3000) -> None:
    """Append until the ring has begun so many more segments."""
    target = ring.end_lsn + segments * S
    while ring.end_lsn < target:
        put(ring, stream, bytes(size))


def prepare(ring: Ring) -> None:
    while ring.prepare_step():
        pass


# --- files -----------------------------------------------------------------------------


def test_f1_a_temporary_of_ours_is_removed(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    place.storage.create(PREPARING_FILE, 100)
    ring, recovery = place.open()
    assert PREPARING_FILE not in place.storage.names()
    assert not recovery.unknown
    assert everything(ring, 1) == [(0, b"a")]


def test_f2_a_file_that_is_not_ours_is_left_alone_and_named(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    replace_file(place.storage, "notes.txt", b"keep me")
    ring, recovery = place.open()
    assert [unknown.file for unknown in recovery.unknown] == ["notes.txt"]
    assert "notes.txt" in place.storage.names()
    assert everything(ring, 1) == [(0, b"a")]


def test_f3_a_segment_of_the_wrong_size_is_left_alone_and_named(place: Place) -> None:
    ring, _ = place.open()
    fill(ring, 1, 2)
    ring.sync()
    replace_file(place.storage, segment_name(1), b"short")
    ring, recovery = place.open()
    assert [unknown.file for unknown in recovery.unknown] == [segment_name(1)]
    assert "5 bytes" in recovery.unknown[0].reason
    assert [(d.from_lsn, d.to_lsn) for d in recovery.damages] == [(S, 2 * S)]
    assert read_all(ring, 1).gaps[0].code == "damaged"


def test_f4_a_segment_of_another_ring_is_left_alone_and_never_served(place: Place) -> None:
    ring, _ = place.open()
    fill(ring, 1, 2)
    ring.sync()
    header = SegmentHeader(b"another ring 16b", 1, 1, S, 0).pack()
    place.write(S, header)
    before = place.read(S, S)
    ring, recovery = place.open()
    assert "another ring" in recovery.unknown[0].reason
    assert place.read(S, S) == before
    assert [(d.from_lsn, d.to_lsn) for d in recovery.damages] == [(S, 2 * S)]


def test_f4_a_foreign_segment_where_the_ring_goes_on_stops_it_by_name(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    ring.close()
    replace_file(place.storage, segment_name(1), b"short")
    ring, _ = place.open()
    with pytest.raises(JournalCorrupt, match=r"000000000001\.seg.*move it away"):
        fill(ring, 1, 2)


def test_f5_a_damaged_segment_header_is_named_and_its_good_batches_are_served(
    place: Place,
) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    ring.sync()
    place.flip(40)
    ring, recovery = place.open()
    assert [(d.from_lsn, d.to_lsn) for d in recovery.damages] == [(0, HEAD)]
    assert everything(ring, 1) == [(0, b"a")]
    put(ring, 1, b"b")
    assert everything(ring, 1) == [(0, b"a"), (1, b"b")]


@pytest.mark.parametrize("state", ["no header", "older number"])
def test_f6_an_interrupted_preparation_is_finished(place: Place, state: str) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    ring.sync()
    prepare(ring)
    assert segment_name(1) in place.storage.names()
    old = SegmentHeader(ring.uuid, 0, 1, S, 0).pack()
    place.write(S, bytes(HEAD) if state == "no header" else old)
    ring, recovery = place.open()
    assert not recovery.damages
    assert not recovery.unknown
    fill(ring, 1, 1)
    assert ring.prepared_in_append == 0
    kept = everything(ring, 1)
    ring.sync()
    ring, recovery = place.open()
    assert not recovery.damages
    assert everything(ring, 1) == kept


def test_f7_a_missing_segment_is_a_named_gap(place: Place) -> None:
    ring, _ = place.open()
    fill(ring, 1, 3)
    ring.sync()
    kept = everything(ring, 1)
    place.storage.remove(segment_name(1))
    ring, recovery = place.open()
    assert [(d.from_lsn, d.to_lsn) for d in recovery.damages] == [(S, 2 * S)]
    history = read_all(ring, 1)
    (gap,) = history.gaps
    lost = set(range(gap.from_offset, gap.to_offset))
    assert records(history) == [pair for pair in kept if pair[0] not in lost]
    assert ring.next_offset(1) == len(kept)


@pytest.mark.parametrize("fate", ["missing", "damaged", "another segment's"])
def test_f8_an_index_is_rebuilt_when_it_cannot_be_used(tmp_path: Path, fate: str) -> None:
    place = file_place(tmp_path)  # memory keeps its indexes in memory
    ring, _ = place.open()
    fill(ring, 1, 3)
    kept = everything(ring, 1)
    ring.sync()
    prepare(ring)
    if fate == "missing":
        place.storage.remove(index_name(1))
    elif fate == "damaged":
        file = place.storage.open(index_name(1))
        place.storage.write(file, 60, [b"\xff" * 8])
    else:
        place.storage.rename(index_name(2), index_name(1))
    ring, recovery = place.open()
    assert not recovery.damages
    assert not recovery.unknown
    assert everything(ring, 1) == kept


def test_f8_an_index_without_its_segment_is_removed(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    replace_file(place.storage, index_name(7), b"left over")
    place.open()
    assert index_name(7) not in place.storage.names()


@pytest.mark.moderate
def test_f9_what_the_disk_cannot_read_is_named_and_the_rest_is_served(tmp_path: Path) -> None:
    place = file_place(tmp_path)
    ring, _ = place.open()
    for number in range(200):
        put(ring, 1, b"%d" % number * 100)
        ring.sync()
    kept = everything(ring, 1)

    class BadSector(Faulty):
        def _note(self, call: str, subject: object) -> None:
            if call == "read" and isinstance(subject, tuple):
                name, position, size = subject
                if name == segment_name(0) and position < 33_000 < position + size:
                    raise OSError(errno.EIO, "bad sector")

    storage = BadSector(place.storage)
    ring, recovery = Ring.open(storage, settings=SMALL, epoch=2)
    assert any("cannot be read" in unknown.reason for unknown in recovery.unknown)
    assert recovery.damages
    history = read_all(ring, 1)
    lost = {o for gap in history.gaps for o in range(gap.from_offset, gap.to_offset)}
    assert lost
    assert records(history) == [pair for pair in kept if pair[0] not in lost]


# --- positions ---------------------------------------------------------------------------


def test_p1_what_is_valid_and_follows_is_kept(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a", b"b")
    put(ring, 2, b"c")
    end = ring.end_lsn
    ring, recovery = place.open()
    assert recovery.end_lsn == end
    assert not recovery.dropped
    assert everything(ring, 1) == [(0, b"a"), (1, b"b")]
    assert everything(ring, 2) == [(0, b"c")]


def test_p2_nothing_valid_and_nothing_proven_is_the_end(place: Place) -> None:
    ring, recovery = place.open()
    assert recovery.end_lsn == 0
    put(ring, 1, b"a")
    prepare(ring)
    end = ring.end_lsn
    _, recovery = place.open()
    assert recovery.end_lsn == end
    assert recovery.dropped == ()
    assert recovery.damages == ()


@pytest.mark.parametrize("where", ["stamp", "content"])
def test_p3_a_torn_unproven_tail_is_dropped_and_said_so(place: Place, where: str) -> None:
    ring, _ = place.open()
    put(ring, 1, b"kept")
    ring.sync()
    torn = put(ring, 1, b"torn" * 100)
    place.flip(torn.lsn + (80 if where == "stamp" else 300))
    ring, recovery = place.open()
    assert [dropped.from_lsn for dropped in recovery.dropped] == [torn.lsn]
    assert recovery.damages == ()
    assert everything(ring, 1) == [(0, b"kept")]
    put(ring, 1, b"new")
    assert everything(ring, 1) == [(0, b"kept"), (1, b"new")]


def test_p3_a_batch_forged_inside_a_record_proves_nothing(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    torn = put(ring, 1, b"torn")
    inner, crc = content_of([b"forged"])
    size = STAMP_BYTES + len(inner)
    body = content_of([b"#" * size])[0].index(b"#" * 16)
    lsn = ring.end_lsn + STAMP_BYTES + body + -body % 8
    stamp = Stamp(1, lsn, lsn, lsn, 1, 9, 1000, 1, 0, size, 1, 0, crc).pack()
    put(ring, 1, bytes(-body % 8) + stamp + inner)
    assert place.read(lsn, size) == stamp + inner
    place.zero(torn.lsn, torn.end_lsn - torn.lsn)
    ring, recovery = place.open()
    assert recovery.damages == ()
    assert recovery.end_lsn == torn.lsn
    assert everything(ring, 1) == [(0, b"a")]


def test_p4_a_batch_of_another_position_is_the_end(place: Place) -> None:
    settings = RingSettings(segment_bytes=S, ring_bytes=3 * S)
    ring, _ = place.open(settings)
    fill(ring, 1, 7)
    ring.sync()
    end, first = ring.end_lsn, ring.first_offset(1)
    kept = everything(ring, 1)
    # The segment is recycled: behind the end lie older batches of the same epoch.
    behind = Stamp.unpack(place.read(_next_stamp(place, end), STAMP_BYTES))
    assert behind.epoch == 1
    assert behind.lsn < end
    ring, recovery = place.open(settings)
    assert recovery.end_lsn == end
    assert recovery.dropped == ()
    assert recovery.damages == ()
    assert ring.first_offset(1) == first
    assert everything(ring, 1) == kept


def _next_stamp(place: Place, lsn: int) -> int:
    while True:
        try:
            Stamp.unpack(place.read(lsn, STAMP_BYTES))
        except BatchError:
            lsn += 8
        else:
            return lsn


def test_p5_a_lower_epoch_behind_the_end_is_a_ghost_and_never_served(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"kept")
    ring.sync()
    first = put(ring, 1, b"x" * 10)
    second = put(ring, 1, b"ghost")
    place.flip(first.lsn + 50)
    ring, recovery = place.open()
    assert [dropped.from_lsn for dropped in recovery.dropped] == [first.lsn]
    put(ring, 1, b"new")
    end = ring.end_lsn
    # Place what a crash could have left: a whole, valid batch of epoch 1 just behind the end.
    body = batch(ring, 1, [b"ghost"], base=2)
    ghost = Stamp.unpack(second.stamps[0])._replace(
        lsn=end,
        bundle_lsn=end,
        base_offset=2,
        size=STAMP_BYTES + len(body.content),
        content_crc=body.content_crc,
    )
    place.write(end, ghost.pack() + bytes(body.content))
    ring, recovery = place.open()
    assert recovery.end_lsn == end
    assert everything(ring, 1) == [(0, b"kept"), (1, b"new")]


def test_p6_a_bundle_without_its_end_is_dropped_whole(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"kept")
    bundle = ring.append(
        [
            batch(ring, 1, [b"half"]),
            batch(ring, 2, [b"half"]),
            batch(ring, 3, [b"torn away"]),
        ]
    )
    last = Stamp.unpack(bundle.stamps[2])
    place.zero(last.lsn, last.size)
    ring, recovery = place.open()
    assert [dropped.from_lsn for dropped in recovery.dropped] == [bundle.lsn]
    assert recovery.end_lsn == bundle.lsn
    assert everything(ring, 1) == [(0, b"kept")]
    assert everything(ring, 2) == []
    assert ring.next_offset(2) == 0


def test_p6_a_bundle_over_two_segments_without_its_end_is_dropped_whole(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"kept")
    bundle = ring.append([batch(ring, n, [bytes(30_000)]) for n in (1, 2, 3)])
    last = Stamp.unpack(bundle.stamps[2])
    assert last.lsn // S == 1
    place.flip(last.lsn + 1000)
    ring, recovery = place.open()
    assert [dropped.from_lsn for dropped in recovery.dropped] == [bundle.lsn]
    assert everything(ring, 1) == [(0, b"kept")]
    put(ring, 2, bytes(50_000))
    kept = everything(ring, 2)
    ring, recovery = place.open()
    assert not recovery.dropped
    assert everything(ring, 2) == kept


def test_p7_the_rest_of_an_unknown_bundle_is_the_end(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"kept")
    stray = put(ring, 1, b"stray")
    stamp = Stamp.unpack(stray.stamps[0])
    place.write(stamp.lsn, stamp._replace(bundle_lsn=stamp.lsn - 8).pack())
    ring, recovery = place.open()
    assert recovery.end_lsn == stray.lsn
    assert everything(ring, 1) == [(0, b"kept")]


def test_p8_damage_that_a_later_batch_proves_is_skipped_with_a_named_gap(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    bad = put(ring, 1, b"b")
    ring.sync()
    put(ring, 1, b"c")
    put(ring, 2, b"d")
    place.zero(bad.lsn, STAMP_BYTES)
    ring, recovery = place.open()
    (damage,) = recovery.damages
    assert (damage.from_lsn, damage.to_lsn) == (bad.lsn, bad.end_lsn)
    assert recovery.dropped == ()
    history = ring.read(1, 0, 3, 1 << 20)
    assert records(history) == [(0, b"a"), (2, b"c")]
    assert [(g.from_offset, g.to_offset, g.code) for g in history.gaps] == [(1, 2, "damaged")]
    assert everything(ring, 2) == [(0, b"d")]
    put(ring, 1, b"e")
    assert everything(ring, 1) == [(0, b"a"), (2, b"c"), (3, b"e")]
    # It is met again at each opening, until the ring laps it.
    _, recovery = place.open()
    assert [(d.from_lsn, d.to_lsn) for d in recovery.damages] == [(bad.lsn, bad.end_lsn)]


def test_p9_a_damaged_content_under_a_good_stamp_spends_its_offsets(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    bad = put(ring, 2, b"b", b"c")
    ring.sync()
    put(ring, 1, b"d")
    place.flip(bad.lsn + 200)
    ring, recovery = place.open()
    assert [(d.from_lsn, d.to_lsn) for d in recovery.damages] == [(bad.lsn, bad.end_lsn)]
    assert ring.next_offset(2) == 2
    history = ring.read(2, 0, 2, 1 << 20)
    assert history.runs == ()
    assert [(g.from_offset, g.to_offset, g.code) for g in history.gaps] == [(0, 2, "damaged")]
    assert everything(ring, 1) == [(0, b"a"), (1, b"d")]


def test_p10_a_tail_torn_after_an_orderly_close_is_damage(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    bad = put(ring, 1, b"b")
    ring.close()
    place.zero(bad.lsn, bad.end_lsn - bad.lsn)
    ring, recovery = place.open()
    assert not recovery.clean
    assert [(d.from_lsn, d.to_lsn) for d in recovery.damages] == [(bad.lsn, bad.end_lsn)]
    assert recovery.end_lsn == bad.end_lsn
    assert everything(ring, 1) == [(0, b"a")]
    put(ring, 2, b"c")
    ring, recovery = place.open()
    assert everything(ring, 2) == [(0, b"c")]
    assert [(d.from_lsn, d.to_lsn) for d in recovery.damages] == [(bad.lsn, bad.end_lsn)]


def test_p11_a_later_segment_proves_what_was_durable_before_it(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    bad = put(ring, 1, b"b")
    ring.sync()
    prepare(ring)  # the next segment's header says synced up to here
    place.zero(bad.lsn, bad.end_lsn - bad.lsn)
    ring, recovery = place.open()
    assert [(d.from_lsn, d.to_lsn) for d in recovery.damages] == [(bad.lsn, bad.end_lsn)]
    assert recovery.end_lsn == bad.end_lsn


def test_p12_damage_up_to_the_end_of_a_segment_goes_on_in_the_next(place: Place) -> None:
    ring, _ = place.open()
    fill(ring, 1, 3)
    ring.sync()
    put(ring, 1, b"later")
    kept = everything(ring, 1)
    place.zero(S + 30_000, S - 30_000)
    ring, recovery = place.open()
    (damage,) = recovery.damages
    assert abs(damage.from_lsn - (S + 30_000)) < 4000
    assert damage.to_lsn == 2 * S
    history = read_all(ring, 1)
    (gap,) = history.gaps
    lost = set(range(gap.from_offset, gap.to_offset))
    assert records(history) == [pair for pair in kept if pair[0] not in lost]


def test_p12_damage_at_a_segments_end_hides_no_later_segment_when_a_mark_proves_it(
    place: Place,
) -> None:
    ring, _ = place.open()
    while ring.end_lsn < S - 6000:
        put(ring, 1, bytes(1000))
    bad = put(ring, 1, b"bad")
    ring.sync()
    ring, _ = place.open()  # `closed` proves everything up to here
    put(ring, 1, bytes(20_000))  # padding, and the next segment
    ring.sync()
    last = put(ring, 1, b"later")
    ring.sync()
    place.zero(bad.lsn, S - bad.lsn)  # epoch start and padding, too
    kept = ring.next_offset(1)
    ring, recovery = place.open()
    assert [(d.from_lsn, d.to_lsn) for d in recovery.damages] == [(bad.lsn, S)]
    assert recovery.end_lsn == last.end_lsn
    assert ring.next_offset(1) == kept


def test_p12_an_unproven_later_segment_does_not_stretch_damage_over_a_torn_tail(
    place: Place,
) -> None:
    ring, _ = place.open()
    while ring.end_lsn < S - 6000:
        put(ring, 1, bytes(1000))
    bad = put(ring, 1, b"bad")
    ring.sync()
    ring, _ = place.open()
    put(ring, 1, bytes(20_000))  # never synced: its first part is lost, its second is not
    place.zero(bad.lsn, S - bad.lsn)
    ring, recovery = place.open()
    assert [(d.from_lsn, d.to_lsn) for d in recovery.damages] == [(bad.lsn, bad.end_lsn)]
    assert recovery.end_lsn == bad.end_lsn


# --- what is done about it -------------------------------------------------------------


def test_e1_an_unproven_tail_is_written_again_and_synced_before_it_is_served(
    place: Place,
) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    ring.sync()
    tail = put(ring, 1, b"b")
    storage = Faulty(place.storage)
    storage.persistent = True
    ring, recovery = Ring.open(storage, settings=SMALL, epoch=2)
    assert recovery.end_lsn == tail.end_lsn
    name = segment_name(0)
    assert ("sync", name) in storage.calls
    written = [position for call, at in storage.calls if call == "write" for _, position in [at]]
    assert min(written) <= tail.lsn
    assert ring.synced_lsn == tail.end_lsn


def test_e2_after_a_failed_sync_the_tail_is_copied_to_a_new_file(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    ring.sync()
    storage = Faulty(place.storage)
    ring, _ = Ring.open(storage, settings=SMALL, epoch=2)
    marks = place.storage.child("marks")
    ring._marks = marks
    put(ring, 1, b"b")
    storage.fail["sync"] = OSError(errno.EIO, "broken")
    with pytest.raises(JournalFailed) as failure:
        ring.sync()
    assert failure.value.synced_lsn == ring.synced_lsn
    assert "failed" in marks.names()
    storage.fail.clear()
    storage.calls.clear()
    ring, recovery = Ring.open(storage, settings=SMALL, epoch=3, marks=marks)
    assert recovery.rewritten == (segment_name(0),)
    assert ("rename", ("rewrite.tmp", segment_name(0))) in storage.calls
    assert "failed" not in marks.names()
    assert everything(ring, 1) == [(0, b"a"), (1, b"b")]
    put(ring, 1, b"c")
    ring.sync()


def test_e3_a_tail_that_cannot_be_read_after_a_failed_sync_is_dropped_by_name(
    place: Place,
) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    ring.sync()
    storage = Faulty(place.storage)
    ring, _ = Ring.open(storage, settings=SMALL, epoch=2)
    lost = put(ring, 1, b"b")
    storage.fail["sync"] = OSError(errno.EIO, "broken")
    with pytest.raises(JournalFailed):
        ring.sync()
    # The kernel dropped the pages: the old bytes are back.
    place.zero(lost.lsn + 96, 64)
    # With the marker's own file on the failing storage, nothing could be noted; write it.
    assert "failed" not in place.storage.names()
    ring, recovery = place.open()
    place.epoch = 3
    assert everything(ring, 1) == [(0, b"a")]
    assert len(recovery.dropped) == 1
    assert recovery.dropped[0].from_lsn == lost.lsn


@pytest.mark.moderate
def test_e5_a_damaged_snapshot_is_replaced_by_an_older_one_and_what_followed(
    place: Place,
) -> None:
    changes: list[bytes] = []
    ring, _ = place.open(snapshot=lambda: list(changes))
    for number in range(60):
        change = b"%d" % number * 1000
        ring.append([batch(ring, 0, [change], base=0, kind=CHANGE)])
        changes.append(b"%d" % number)
    ring.sync()
    put(ring, 1, b"last")
    newest = ring.end_lsn // S
    assert newest >= 2
    place.flip(newest * S + HEAD + 150)
    _, recovery = place.open()
    assert recovery.snapshot
    told = len(recovery.snapshot)
    assert recovery.snapshot_lsn < newest * S
    assert told + len(recovery.controls) == 60
    assert [d.from_lsn for d in recovery.damages] == [newest * S + HEAD]


def test_e6_a_damaged_closed_file_is_only_a_missing_proof(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    ring.close()
    file = place.storage.open(CLOSED_FILE)
    place.storage.write(file, 18, [b"\xff\xff"])
    ring, recovery = place.open()
    assert not recovery.clean
    assert everything(ring, 1) == [(0, b"a")]


def test_e6_a_mark_that_the_disk_cannot_read_is_only_a_missing_proof(place: Place) -> None:
    ring, _ = place.open()
    put(ring, 1, b"a")
    ring.close()

    class Bad(Faulty):
        def read(self, file: File, position: int, size: int) -> bytes:
            if file.name == CLOSED_FILE:
                raise OSError(errno.EIO, "a bad sector", file.name)
            return super().read(file, position, size)

    ring, recovery = Ring.open(Bad(place.storage), settings=SMALL, epoch=2)
    assert not recovery.clean
    assert everything(ring, 1) == [(0, b"a")]


@pytest.mark.moderate
def test_e7_a_dropped_batch_is_not_completed_by_the_first_bytes_of_the_next(
    tmp_path: Path,
) -> None:
    place = file_place(tmp_path)
    ring, _ = place.open()
    put(ring, 1, b"a")
    while ring.end_lsn % 512 != 504:
        put(ring, 1, b"a")
    ring.sync()
    end = ring.end_lsn
    lost = ring.append([batch(ring, 1, [b"lost"])])
    stamp = place.read(end, 8)
    place.zero(end, 8)  # the sector of its first eight bytes is lost, the next is kept
    ring, recovery = place.open()
    assert recovery.end_lsn == end
    assert place.read(end, STAMP_BYTES) == bytes(STAMP_BYTES)
    place.write(end, stamp)  # the new one's first sector is kept, the next is lost
    ring, recovery = place.open()
    assert recovery.end_lsn == end < lost.end_lsn


def test_e8_what_a_close_wrote_of_the_last_segment_is_ignored_where_it_does_not_fit(
    tmp_path: Path,
) -> None:
    """tests/journal/test_orderly_close.py has every way in which it may not fit."""
    place = file_place(tmp_path / "ring")
    ring, _ = place.open()
    put(ring, 1, b"kept")
    ring.close()
    file = place.storage.open(ACTIVE_FILE)
    place.storage.write(file, file.size - 1, [b"\xff"])
    ring, recovery = place.open()
    assert recovery.clean
    assert recovery.unknown == ()
    assert everything(ring, 1) == [(0, b"kept")]


def test_every_row_of_the_table_has_a_test_named_by_it() -> None:
    text = FORMAT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([FPEM]\d+) \|", text, re.MULTILINE)
    assert len(rows) == len(set(rows)) >= 20
    names = [*globals(), *vars(test_missing_files)]
    tests = {match[1].upper() for name in names if (match := re.match(r"test_([fpem]\d+)_", name))}
    assert set(rows) == tests
