"""Parts of a plan of which every record is there: what a read of them brings."""

from __future__ import annotations

from pathlib import Path

import pytest

from malamute_py.journal import Ring
from malamute_py.journal.index import NEVER, NO_CLIENT_TIME, LiveIndex, read_index
from malamute_py.journal.layout import index_name, pack_file, segment_name
from malamute_py.journal.storage import read_file
from tests.journal.rings import batch, file_place, memory_place, put, records
from tests.journal.test_retention import tidy

BATCHES = 40
NOW_MS = 50_000


def filled(ring: Ring, batches: int = BATCHES) -> list[int]:
    """Append batches of two records over several segments; returns where they lie."""
    return [put(ring, 1, bytes(2_500), bytes(2_500)).lsn for _ in range(batches)]


def unbroken(ring: Ring, first: int = 0, end: int = 10_000) -> list[tuple[int, int]]:
    """The parts, of which a read is shown to bring every record."""
    plan = ring.plan(1, first, end, now_ms=NOW_MS)
    for begin, after in plan.unbroken:
        read = {offset for offset, _ in records(ring.read(1, begin, after, 1 << 30))}
        assert read >= set(range(begin, after))
    return list(plan.unbroken)


def test_segments_that_follow_each_other_are_one_part() -> None:
    ring, _ = memory_place().open()
    filled(ring)
    put(ring, 2, b"of another stream")
    filled(ring, 1)
    assert len(ring._files.segments()) > 3
    assert unbroken(ring) == [(0, 2 * BATCHES + 2)]
    assert unbroken(ring, 3, 71) == [(3, 71)]
    assert ring.plan(1, 0, 80).unbroken == ()
    capped = ring.plan(1, 1, 80, bytes_max=40_000, now_ms=NOW_MS)
    assert capped.unbroken == ((1, capped.end),)
    assert capped.end < 20
    assert ring.plan(1, 1, 80, records_max=7, now_ms=NOW_MS).unbroken == ((1, 8),)
    assert ring.plan(9, 0, 80, now_ms=NOW_MS).unbroken == ()


def test_what_was_removed_is_in_no_part() -> None:
    ring, _ = memory_place().open()
    filled(ring)
    ring.remove_before(1, offset=21)
    assert unbroken(ring) == [(21, 2 * BATCHES)]


@pytest.mark.moderate
def test_damage_that_a_start_finds_leaves_its_segment_out(tmp_path: Path) -> None:
    place = file_place(tmp_path)
    ring, _ = place.open()
    lsns = filled(ring)
    after = ring._files.segments()[1].spans[1].first
    ring.sync()
    put(ring, 1, b"proves what lies before it")
    place.flip(lsns[2] + 300)
    ring, recovery = place.open()
    assert recovery.damages
    assert unbroken(ring) == [(after, 2 * BATCHES + 1)]


def test_a_segment_that_is_gone_lies_between_two_parts(tmp_path: Path) -> None:
    place = file_place(tmp_path)
    ring, _ = place.open()
    filled(ring)
    ring.sync()
    tidy(ring)
    span = ring._files.segments()[1].spans[1]
    for name in (segment_name(1), index_name(1)):
        (tmp_path / name).unlink()
    ring, _ = place.open()
    assert unbroken(ring) == [(0, span.first), (span.next, 2 * BATCHES)]


def test_offsets_that_were_left_out_lie_between_two_parts() -> None:
    ring, _ = memory_place().open()
    filled(ring, 3)
    ring.append([batch(ring, 1, [b"after damage at the end of the log"], base=11)])
    filled(ring, 3)
    assert len(ring._files.segments()) == 1
    assert unbroken(ring) == [(0, 6), (11, 18)]


def test_a_segment_in_which_a_reader_met_damage_is_in_no_part() -> None:
    place = memory_place()
    ring, _ = place.open()
    lsns = filled(ring)
    whole = unbroken(ring)
    place.flip(lsns[20] + 300)
    assert ring.read(1, 40, 42, 1 << 30).gaps
    (_, stop), (begin, _) = unbroken(ring)
    assert stop <= 40 < 42 <= begin
    assert whole == [(0, 2 * BATCHES)]


@pytest.mark.moderate
@pytest.mark.parametrize("reopened", [False, True])
def test_a_segment_of_which_a_record_of_the_stream_has_expired_is_in_no_part(
    tmp_path: Path, reopened: bool
) -> None:
    place = file_place(tmp_path)
    ring, _ = place.open()
    put(ring, 2, b"of another stream", expires_at_ms=[1])
    filled(ring, 30)
    put(ring, 1, b"", b"", b"", expires_at_ms=[0, NOW_MS, NOW_MS + 9])
    filled(ring, 30)
    ring.sync()
    if reopened:
        tidy(ring)
        ring.close()
        ring, _ = place.open()
    plan = ring.plan(1, 0, 1_000, now_ms=NOW_MS)
    (first, stop), (begin, end) = plan.unbroken
    assert (first, end) == (0, 123)
    assert 20 < stop <= 61 < begin < 100
    assert ring.plan(1, 0, 1_000, now_ms=NOW_MS - 1).unbroken == ((0, end),)


def test_an_index_of_an_earlier_version_tells_nothing_of_expiries(tmp_path: Path) -> None:
    place = file_place(tmp_path)
    ring, _ = place.open()
    filled(ring)
    ring.sync()
    tidy(ring)
    end = ring._files.segments()[0].spans[1].next
    found = read_index(read_file(place.storage, index_name(0)) or b"", ring.uuid, 0)
    assert found is not None
    found._stored.expiries = None
    older = read_index(pack_file(found._stored), ring.uuid, 0)
    assert older is not None
    ring._files._indexes[0] = older
    assert unbroken(ring) == [(end, 2 * BATCHES)]
    live = LiveIndex(2048, 100)
    assert live.restore(older)
    live.add(1, 60_000, 3_000, end, end + 1, 1, (NO_CLIENT_TIME, NEVER, 77), ((), ()))
    assert live.expiries is None


def test_the_earliest_expiry_of_a_stream_counts() -> None:
    live = LiveIndex(2048, 100)
    for base, expiry_ms in enumerate((0, 90, 70, 80)):
        live.add(
            1, 4_096 + 3_000 * base, 3_000, base, base + 1, 1,
            (NO_CLIENT_TIME, NEVER, expiry_ms), ((), ()),
        )  # fmt: skip
    assert live.expiries == {1: 70}
