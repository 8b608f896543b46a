"""Rare rows: read one by one and gathered, with the same outcome as reading whole batches."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol.batch import Batch, iter_batches
from malamute_protocol.content import Content
from malamute_py.broker.streams.start_positions import may_match
from malamute_py.journal import History, Plan, Ring, RingSettings
from malamute_py.journal import planning as planning_module
from malamute_py.journal.gathering import ROWS_MAX
from malamute_py.journal.index import read_index
from malamute_py.journal.layout import index_name, pack_file
from malamute_py.journal.spots import BATCH_BYTES_A_SPOT, SPOT
from malamute_py.journal.storage import read_file
from malamute_py.matcher import compile_pattern, rows_by_subject
from malamute_py.server.journaling.queries import by_key
from tests.journal.rings import Place, S, file_place, put
from tests.journal.test_retention import tidy
from tests.seeds import seeds

SETTINGS = RingSettings(segment_bytes=S, ring_bytes=64 * S, index_interval_bytes=2048)
RARE = ["topic", "rare"]


def search(
    ring: Ring, pattern: Any, first: int = 0, end: int = 1 << 40, bytes_max: int = 1 << 30,
    client_time: tuple[int, int] | None = None, *, by_rows: bool = False,
) -> History:  # fmt: skip
    candidates = by_key(partial(may_match, pattern))
    matches = compile_pattern(pattern).matches
    rows = rows_by_subject(pattern) if by_rows else None
    return ring.read(1, first, end, bytes_max, candidates, client_time, matches, rows=rows)


def batches_of(history: History) -> list[tuple[Batch, int]]:
    """Return the batches, each with `next` of its run."""
    found = []
    for run in history.runs:
        batches = list(iter_batches([run.data]))
        assert len(batches) == len(run.spans)
        assert all(batch.stamp.derived == bool(run.next) for batch in batches)
        found += [(batch, run.next) for batch in batches]
    return found


def selected(history: History, pattern: Any, first: int, end: int) -> list[tuple[Any, ...]]:
    """Return the records that a reader takes: matching rows of whole batches, all gathered ones."""
    matches = compile_pattern(pattern).matches
    rows = []
    for batch, gathered in batches_of(history):
        records = list(batch.records())
        if gathered:
            assert records[-1].offset + 1 == gathered
        for record in records:
            header = record.keys, tuple(sorted(record.fields.items()))
            wanted = first <= record.offset < end and matches(*header)
            if gathered:
                assert wanted
            if wanted:
                rows.append((
                    record.offset, record.epoch, record.append_time_ms, record.client_time_ms,
                    *header, record.body,
                ))  # fmt: skip
    return rows


def large(ring: Ring, rare: dict[int, bytes], *, time_ms: int = 1000, **options: Any) -> int:
    """Append a batch of 100 rows, of which these are rare; returns its LSN."""
    bodies = [rare.get(row, b"x" * 100) for row in range(100)]
    subjects = ["rare" if row in rare else "common" for row in range(100)]
    return put(ring, 1, *bodies, subject=subjects, time_ms=time_ms, **options).lsn


def test_rare_rows_of_many_batches_come_as_one_derived_batch(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    for number in range(12):
        large(ring, {7 * number: b"rare %d" % number}, time_ms=1000 + number)
    history = search(ring, RARE)
    ((batch, following),) = batches_of(history)
    assert (following, history.next, history.gaps) == (1178, 1200, ())
    assert [record.body for record in batch] == [b"rare %d" % number for number in range(12)]
    assert batch.offsets.tolist() == [107 * number for number in range(12)]
    assert [record.append_time_ms for record in batch] == list(range(1000, 1012))
    assert {record.subject for record in batch} == {"rare"}
    batch.verify()


@pytest.mark.moderate
def test_a_sealed_segment_and_one_that_was_opened_again_know_their_rare_rows(
    tmp_path: Path,
) -> None:
    place = file_place(tmp_path)
    ring, _ = place.open(SETTINGS)
    for number in range(12):
        large(ring, {3: b"rare %d" % number})
    ring.sync()
    tidy(ring)
    assert read_file(place.storage, index_name(0)) is not None
    ring.close()
    for orderly in (True, False):
        ring, _ = place.open(SETTINGS)
        history = search(ring, RARE)
        assert all(batch.stamp.derived for batch, _ in batches_of(history))
        assert len(selected(history, RARE, 0, 1200)) == 12
        if orderly:
            ring.close()


def test_an_index_of_an_earlier_version_has_the_batches_read_whole(tmp_path: Path) -> None:
    place = file_place(tmp_path)
    ring, _ = place.open(SETTINGS)
    for number in range(12):
        large(ring, {3: b"rare %d" % number})
    ring.sync()
    tidy(ring)
    found = read_index(read_file(place.storage, index_name(0)) or b"", ring.uuid, 0)
    assert found is not None
    assert found.spots(1) is not None
    found._stored.spots = {}
    older = read_index(pack_file(found._stored), ring.uuid, 0)
    assert older is not None
    assert older.spots(1) is None
    ring._files._indexes[0] = older
    ring._files.segments()[0].live = None
    history = search(ring, RARE)
    assert {batch.stamp.derived for batch, _ in batches_of(history)} == {True, False}
    assert len(selected(history, RARE, 0, 1200)) == 12


def test_a_damaged_row_is_a_gap_of_its_own_and_never_served(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    lsns = [large(ring, {50: b"rare %d" % number}) for number in range(3)]
    at = place.read(lsns[1], 12_000).index(b"rare 1")
    place.flip(lsns[1] + at)
    history = search(ring, RARE)
    assert [row[0] for row in selected(history, RARE, 0, 300)] == [50, 250]
    ((first, after, code, reason),) = history.gaps
    assert (first, after, code) == (150, 151, "damaged")
    assert "checksum" in reason
    assert [batch.base_offset for batch, _ in batches_of(history)] == [50, 250]
    assert history.next == 300


def test_no_batch_holds_rows_from_before_a_gap_and_from_behind_it(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    lsns = [large(ring, {50: b"rare %02d" % number}) for number in range(12)]
    # The last rare row of its segment: those of the next are gathered by another turn.
    last = next(at for at in range(1, 11) if lsns[at + 1] % S + 11_000 > S)
    at = place.read(lsns[last], 12_000).index(b"rare %02d" % last)
    place.flip(lsns[last] + at)
    history = search(ring, RARE)
    ((first, after, _, _),) = history.gaps
    assert (first, after) == (100 * last + 50, 100 * last + 51)
    spans = [(batch.base_offset, next) for batch, next in batches_of(history)]
    assert spans == [(50, 100 * last - 49), (100 * last + 150, 1151)]


def test_damage_beside_a_rare_row_costs_it_nothing(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    lsn = large(ring, {50: b"the rare one"})
    place.flip(lsn + 3000)
    assert [row[-1] for row in selected(search(ring, RARE), RARE, 0, 100)] == [b"the rare one"]
    assert search(ring, ["topic", "common"]).gaps[0][:3] == (0, 100, "damaged")


def test_a_read_is_bounded_and_goes_on_where_it_ended(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    for number in range(30):
        large(ring, {number: b"rare %02d" % number})
    found, position, reads = [], 0, 0
    while position < 3000:
        history = search(ring, RARE, position, bytes_max=200)
        found += selected(history, RARE, 0, 3000)
        assert history.next > position
        position, reads = history.next, reads + 1
    assert [row[-1] for row in found] == [b"rare %02d" % number for number in range(30)]
    assert reads >= 5
    assert len(batches_of(search(ring, RARE, 2900))) == 1
    assert ROWS_MAX >= 1000


def test_the_texts_of_headers_are_among_what_bounds_a_read(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    for number in range(12):
        text = f"{number:02}" * 100
        fields = [{"n": text} if row == 5 else None for row in range(100)]
        large(ring, {5: b"r"}, fields=fields)
    position, reads = 0, []
    while position < 1200:
        history = search(ring, RARE, position, bytes_max=1000)
        reads += [len(batch) for batch, _ in batches_of(history)]
        position = history.next
    assert sum(reads) == 12
    assert max(reads) == 4


def test_what_is_rare_in_one_batch_and_common_in_the_next_comes_in_order(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    for number in range(9):
        if number % 3 == 2:
            put(ring, 1, *[b"y" * 100] * 100, subject="rare")
        else:
            large(ring, {10: b"a", 90: b"b"})
    history = search(ring, RARE)
    assert [batch.stamp.derived for batch, _ in batches_of(history)] == [True, False] * 3
    offsets = [row[0] for row in selected(history, RARE, 0, 900)]
    assert offsets == sorted(offsets)
    assert len(offsets) == 3 * (4 + 100)


def test_spots_cost_at_most_a_hundredth_of_their_batch(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    subjects = ["common"] * 50 + [f"rare.{n}" for n in range(50)]
    size = put(ring, 1, *[b"x" * 300] * 100, subject=subjects).stamps[0]
    spots = ring._files.segments()[-1].live.spots(1)  # type: ignore[union-attr]
    assert spots is not None
    held = spots.by_header(lambda keys, fields: True)
    assert 0 < sum(len(rows) for _, rows in held) <= 33_000 // BATCH_BYTES_A_SPOT
    assert SPOT.itemsize * 100 == BATCH_BYTES_A_SPOT
    assert size


HEADERS: list[tuple[str | list[str], dict[str, str]]] = [
    ("common", {}),
    ("common", {"f": "1"}),
    ("rare", {}),
    (["rare", "common"], {"f": "2"}),
    (["other", "rare"], {}),
    ("other.rare", {"f": "1", "g": ""}),
    ("other", {"g": "x"}),
]
PATTERNS: list[Any] = [
    RARE,
    ["topic", "common"],
    ["topic", "other.#"],
    ["topic", "*"],
    ["prefix", "o"],
    ["regex", "ra.*|other"],
    ["fields", "all", [["f", "1"]]],
    ["fields", "any", [["g"], ["f", "2"]]],
    ["and", RARE, ["fields", "all", [["f", "2"]]]],
    ["or", RARE, ["topic", "other"]],
    ["not", ["topic", "common"]],
    ["not", ["fields", "all", [["f"]]]],
]


@pytest.mark.moderate
@pytest.mark.parametrize("seed", seeds(2, 12))
def test_any_search_finds_what_reading_everything_does(place: Place, seed: int) -> None:
    chance = random.Random(seed)
    ring, _ = place.open(SETTINGS)
    for step in range(60):
        count = chance.choice([1, 5, 80, 120])
        weights = [chance.choice([0, 0, 1, 1, 60]) for _ in HEADERS]
        weights[0] += 1
        rows = chance.choices(HEADERS, weights, k=count)
        if chance.random() < 0.3:
            # Where all headers are rare, none has spots.
            rows = [chance.choice([row, (f"one.{n}", row[1])]) for n, row in enumerate(rows)]
        options: dict[str, Any] = {"subject": [keys for keys, _ in rows]}
        if chance.random() < 0.7:
            options["fields"] = [fields for _, fields in rows]
        if chance.random() < 0.5:
            options["client_time_ms"] = [chance.choice([None, 5, 50, 500]) for _ in rows]
        if chance.random() < 0.1:
            options["expires_at_ms"] = 1 << 50
        put(ring, 1, *[chance.randbytes(chance.choice([0, 20, 150])) for _ in rows],
            time_ms=1000 + step, **options)  # fmt: skip
        if chance.random() < 0.1:
            put(ring, 2, b"between")
        if chance.random() < 0.2:
            ring.sync()
            tidy(ring)
        if chance.random() < 0.03:
            ring.sync()
            if chance.random() < 0.5:
                ring.close()
            ring, _ = place.open(SETTINGS)
    tail = ring.next_offset(1)
    whole = ring.read(1, 0, tail, 1 << 40)
    for pattern in PATTERNS:
        first, end = sorted(chance.randrange(tail + 1) for _ in range(2))
        window = chance.choice([None, (5, 50), (50, 501)])
        expected = [
            row for row in selected(whole, pattern, first, end)
            if window is None or (row[3] is not None and window[0] <= row[3] < window[1])
        ]  # fmt: skip
        found, position = [], first
        by_rows = chance.random() < 0.7
        while position < end:
            size = chance.choice([1, 300, 5000, 1 << 30])
            history = search(ring, pattern, position, end, size, window, by_rows=by_rows)
            assert not history.gaps
            assert history.next > position
            found += selected(history, pattern, position, end)
            position = history.next
        if window is not None:
            found = [row for row in found if row[3] is not None and window[0] <= row[3] < window[1]]
        assert found == expected, (pattern, window)


def many(ring: Ring, rare: dict[int, bytes], *, time_ms: int = 1000, **options: Any) -> int:
    """Append a batch of 100 subjects, of which these rows have the subject `rare`."""
    bodies = [rare.get(row, b"x" * 100) for row in range(100)]
    subjects = ["rare" if row in rare else f"one.{row}" for row in range(100)]
    return put(ring, 1, *bodies, subject=subjects, time_ms=time_ms, **options).lsn


def test_few_rows_of_batches_in_which_every_subject_is_rare_come_as_one_derived_batch(
    place: Place,
) -> None:
    ring, _ = place.open(SETTINGS)
    for number in range(12):
        many(ring, {7 * number: b"rare %d" % number}, time_ms=1000 + number)
    whole = search(ring, RARE)
    assert all(not batch.stamp.derived for batch, _ in batches_of(whole))
    history = search(ring, RARE, by_rows=True)
    ((batch, following),) = batches_of(history)
    assert (following, history.next, history.gaps) == (1178, 1200, ())
    assert selected(history, RARE, 0, 1200) == selected(whole, RARE, 0, 1200)
    batch.verify()


def test_a_batch_of_which_many_rows_are_wanted_leaves_whole_and_in_its_place(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    for number in range(9):
        many(ring, dict.fromkeys(range(40 if number % 3 == 2 else 2), b"rare"))
    history = search(ring, RARE, by_rows=True)
    assert [batch.stamp.derived for batch, _ in batches_of(history)] == [True, False] * 3
    offsets = [row[0] for row in selected(history, RARE, 0, 900)]
    assert offsets == sorted(offsets)
    assert len(offsets) == 6 * 2 + 3 * 40


def test_a_batch_whose_rows_expire_leaves_whole(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    many(ring, {5: b"rare"}, expires_at_ms=1 << 50)
    ((batch, _),) = batches_of(search(ring, RARE, by_rows=True))
    assert not batch.stamp.derived


def test_damage_anywhere_in_a_batch_of_which_rows_would_be_taken_is_told(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    lsns = [many(ring, {50: b"rare %d" % number}) for number in range(3)]
    place.flip(lsns[1] + 3000)
    history = search(ring, RARE, by_rows=True)
    assert [gap[:3] for gap in history.gaps] == [(100, 200, "damaged")]
    assert [batch.base_offset for batch, _ in batches_of(history)] == [50, 250]
    assert history.next == 300


def test_rows_from_before_damage_that_a_start_found_and_from_behind_it_leave_apart(
    place: Place,
) -> None:
    ring, _ = place.open(SETTINGS)
    lsns = [many(ring, {3: b"rare %d" % number}) for number in range(4)]
    ring.sync()
    put(ring, 2, b"its stamp says that the others were synced")
    place.flip(lsns[2] + 400)
    ring, _ = place.open(SETTINGS)
    for _ in range(2):  # the second search knows the batches
        history = search(ring, RARE, by_rows=True)
        assert [gap[:3] for gap in history.gaps] == [(200, 300, "damaged")]
        assert [(batch.base_offset, next) for batch, next in batches_of(history)] == [
            (3, 104), (303, 304),
        ]  # fmt: skip
        assert history.next == 400


def test_gaps_come_in_order_where_a_start_has_found_the_later_one(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    lsns = [many(ring, {3: b"rare %d" % number}) for number in range(5)]
    ring.sync()
    put(ring, 2, b"its stamp says that the others were synced")
    place.flip(lsns[3] + 400)
    ring, _ = place.open(SETTINGS)
    place.flip(lsns[1] + 400)
    for by_rows in (False, True):
        history = search(ring, RARE, by_rows=by_rows)
        assert [gap[:2] for gap in history.gaps] == [(100, 200), (300, 400)]
        assert [row[0] for row in selected(history, RARE, 0, 500)] == [3, 203, 403]


def test_a_row_after_one_that_is_damaged_is_not_gathered_with_those_before(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    lsns = [large(ring, {50: b"rare %d" % number}) for number in range(2)]
    # A small batch has no spots: it is read whole, and of it the row is taken.
    put(ring, 1, *[b"x"] * 60, b"rare 2", subject=["common"] * 60 + ["rare"])
    at = place.read(lsns[1], 12_000).index(b"rare 1")
    place.flip(lsns[1] + at)
    history = search(ring, RARE, by_rows=True)
    assert [gap[:2] for gap in history.gaps] == [(150, 151)]
    assert [batch.base_offset for batch, _ in batches_of(history)] == [50, 260]


@pytest.mark.moderate
def test_a_read_that_takes_rows_looks_through_more_than_its_bound_but_not_through_all(
    place: Place,
) -> None:
    ring, _ = place.open(SETTINGS)
    for number in range(60):
        many(ring, {number: b"rare %02d" % number})
    found, position, reads = [], 0, []
    while position < 6000:
        history = search(ring, RARE, position, bytes_max=11_000, by_rows=True)
        found += selected(history, RARE, 0, 6000)
        reads.append(history.next - position)
        position = history.next
    assert [row[-1] for row in found] == [b"rare %02d" % number for number in range(60)]
    assert max(reads) > 500
    assert len(reads) > 3


@pytest.mark.moderate
def test_one_read_gathers_no_more_rows_than_a_derived_batch_has(place: Place) -> None:
    ring, _ = place.open(RingSettings(segment_bytes=16 * S, ring_bytes=128 * S))
    batches = ROWS_MAX // 30 + 10
    subjects = ["rare"] * 30 + [f"one.{number}" for number in range(450)]
    for _ in range(batches):
        put(ring, 1, *[b""] * 480, subject=subjects)
    history = search(ring, RARE, by_rows=True)
    ((batch, _),) = batches_of(history)
    assert ROWS_MAX - 32 < len(batch) <= ROWS_MAX
    again = search(ring, RARE, history.next, by_rows=True)
    found = selected(history, RARE, 0, 1 << 40) + selected(again, RARE, 0, 1 << 40)
    assert len(found) == 30 * batches


def plan(ring: Ring, pattern: Any, **caps: Any) -> Plan:
    return ring.plan(
        1, 0, ring.next_offset(1), by_key(partial(may_match, pattern)),
        matches=compile_pattern(pattern).matches, rows=rows_by_subject(pattern), **caps,
    )  # fmt: skip


def test_a_plan_weighs_rare_rows_by_themselves(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    for number in range(30):
        large(ring, {number: b"rare"} if number % 3 else {})
    found = plan(ring, RARE, split_bytes=5_000)
    assert 20 * len(b"rare") < found.bytes < 20 * 100
    assert len(found.splits) == 1
    assert plan(ring, ["topic", "common"]).bytes > 30 * 9_000
    assert plan(ring, ["topic", "nothing"]).bytes == 0
    assert plan(ring, RARE, bytes_max=1).end == 200


def test_a_long_plan_of_which_few_rows_are_wanted_has_larger_parts(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, _ = place.open(SETTINGS)
    for number in range(40):
        many(ring, {number: b"rare"})
    short = plan(ring, RARE, split_bytes=30_000)
    assert len(short.splits) > 8
    monkeypatch.setattr(planning_module, "_SAMPLED_FROM_BYTES", 100_000)
    long = plan(ring, RARE, split_bytes=30_000)
    assert len(long.splits) == 1
    assert (long.end, long.bytes) == (short.end, short.bytes)
    assert 0 < long.splits[0].bytes <= 30_000
    assert plan(ring, ["prefix", "o"], split_bytes=30_000).splits == short.splits
    assert plan(ring, ["all"], split_bytes=30_000).splits == short.splits


def test_contents_that_are_no_contents_have_no_rare_rows() -> None:
    from malamute_py.journal.spots import find_spots

    assert find_spots(b"short", 0, 101, 0, 0, 0) is None


def test_a_row_keeps_what_it_had_when_it_is_cut_from_its_batch(place: Place) -> None:
    ring, _ = place.open(SETTINGS)
    for number in range(3):
        large(ring, {50: b"rare"}, time_ms=2000 + number)
    ((batch, _),) = batches_of(search(ring, RARE))
    assert Content(batch.content.view).append_times is not None
    assert [record.id for record in batch] == sorted(record.id for record in batch)
    times: Any = batch.to_arrow()["append_time"]
    assert times.cast("int64").to_pylist() == [2000, 2001, 2002]
