"""Known batches: later searches read little of them, and get what whole batches would bring."""

from __future__ import annotations

import random
from typing import Any

import pytest

from malamute_protocol.batch import iter_batches
from malamute_protocol.content import Content
from malamute_protocol.stamp import Stamp
from malamute_py.journal import Gap, History, Ring, RingSettings
from malamute_py.journal import known as known_module
from malamute_py.journal.known import KnownBatches
from malamute_py.matcher import rows_by_subject
from tests.journal.rings import Place, S, put
from tests.journal.test_rare_rows import RARE, many, search, selected
from tests.seeds import seeds

SETTINGS = RingSettings(segment_bytes=S, ring_bytes=64 * S, index_interval_bytes=2048)
BATCHES = 12


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 100 rows are large enough, and have many blocks."""
    monkeypatch.setattr(known_module, "KNOWN_FROM", 4096)
    monkeypatch.setattr(known_module, "_BLOCK_BYTES", 256)


@pytest.fixture
def ring(place: Place) -> Ring:
    opened, _ = place.open(SETTINGS)
    return opened


@pytest.fixture
def read(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read of a file."""
    sizes: list[int] = []
    inner = ring._storage.read

    def counted(file: Any, position: int, size: int) -> bytes:
        sizes.append(size)
        return inner(file, position, size)

    monkeypatch.setattr(ring._storage, "read", counted)
    return sizes


def data_of(history: History) -> list[bytes]:
    return [bytes(run.data) for run in history.runs]


def wanted(ring: Ring, **options: Any) -> History:
    return search(ring, RARE, by_rows=True, **options)


def test_a_second_search_brings_the_same_and_reads_a_fraction(ring: Ring, read: list[int]) -> None:
    for number in range(BATCHES):
        fields = [{"n": str(row % 7)} if row % 3 else None for row in range(100)]
        many(ring, {number: b"rare %d" % number, 90: b""}, fields=fields, time_ms=1000 + number)
    first, whole = wanted(ring), sum(read)
    read.clear()
    again = wanted(ring)
    assert data_of(again) == data_of(first)
    assert (again.next, again.gaps) == (first.next, ())
    assert len(selected(again, RARE, 0, 1 << 40)) == 2 * BATCHES
    assert 0 < 4 * sum(read) < whole
    # What was found for one subject serves another.
    read.clear()
    other = search(ring, ["topic", "one.50"], by_rows=True)
    assert len(selected(other, ["topic", "one.50"], 0, 1 << 40)) == BATCHES
    assert 4 * sum(read) < whole


def test_a_selection_that_is_asked_for_again_reads_its_rows_alone(
    ring: Ring, read: list[int]
) -> None:
    for number in range(BATCHES):
        fields = [{"n": str(row % 7)} if row % 3 else None for row in range(100)]
        times = [row if row % 2 else None for row in range(100)]
        many(
            ring, {number: b"rare %d" % number, 90: b""}, fields=fields, client_time_ms=times,
            time_ms=1000 + number,
        )  # fmt: skip
    first = wanted(ring)
    wanted(ring)
    read.clear()
    again = wanted(ring)
    assert data_of(again) == data_of(first)
    assert (again.next, again.gaps) == (first.next, ())
    # The stamps, and the bodies of two rows each.
    rows = selected(again, RARE, 0, 1 << 40)
    assert sorted(read) == sorted([96] * BATCHES + [len(row[-1]) for row in rows])
    # Part of a batch, and rows by their time.
    part = wanted(ring, first=305, end=1095)
    assert selected(part, RARE, 305, 1095) == [row for row in rows if 305 <= row[0] < 1095]
    for _ in range(3):
        young = wanted(ring, client_time=(0, 6))
        assert [row[3] for row in selected(young, RARE, 0, 1 << 40)] == [1, 3, 5]


def test_part_of_a_batch_is_not_remembered_as_what_a_selection_finds_in_all_of_it(
    ring: Ring,
) -> None:
    many(ring, {20: b"one", 70: b"two"})
    whole = selected(wanted(ring), RARE, 0, 100)
    for first, end in ((50, 100), (0, 50), (0, 100), (50, 100), (0, 50), (0, 100)):
        found = selected(wanted(ring, first=first, end=end), RARE, first, end)
        assert found == [row for row in whole if first <= row[0] < end]


def test_damage_of_a_row_that_is_remembered_is_told_and_of_its_neighbours_is_not(
    place: Place, ring: Ring
) -> None:
    lsns = [many(ring, {50: b"rare %d" % number}) for number in range(3)]
    for _ in range(2):
        wanted(ring)
    place.flip(place_of(place, lsns[0], b"rare 0") + 8)
    assert wanted(ring).gaps == ()
    place.flip(place_of(place, lsns[1], b"rare 1"))
    place.flip(lsns[2] + 20)
    history = wanted(ring)
    assert [gap[:3] for gap in history.gaps] == [(100, 200, "damaged"), (200, 300, "damaged")]
    assert [row[0] for row in selected(history, RARE, 0, 1 << 40)] == [50]


def place_of(place: Place, lsn: int, text: bytes) -> int:
    return lsn + place.read(lsn, 16_000).index(text)


@pytest.mark.parametrize("where", ["row", "codes", "stamp"])
def test_damage_where_a_known_batch_is_read_is_told_as_ever(
    place: Place, ring: Ring, where: str
) -> None:
    lsns = [many(ring, {50: b"rare %d" % number}) for number in range(3)]
    assert wanted(ring).gaps == ()
    if where == "row":
        # Of a neighbour in the same block, the row itself is as it was.
        place.flip(place_of(place, lsns[1], b"rare 1") + 8)
    elif where == "codes":
        codes = Content(
            place.read(lsns[1], 16_000)[96 : Stamp.unpack(place.read(lsns[1], 96)).size]
        )
        place.flip(lsns[1] + 96 + codes.sections.subject_codes + 4 * 50)
    else:
        place.flip(lsns[1] + 20)
    history = wanted(ring)
    assert [gap[:3] for gap in history.gaps] == [(100, 200, "damaged")]
    assert [row[0] for row in selected(history, RARE, 0, 1 << 40)] == [50, 250]
    assert history.next == 300


def test_damage_beside_what_is_read_of_a_known_batch_is_told_to_who_reads_it(
    place: Place, ring: Ring
) -> None:
    lsns = [many(ring, {50: b"rare %d" % number}) for number in range(3)]
    wanted(ring)
    size = Stamp.unpack(place.read(lsns[1], 96)).size
    place.flip(lsns[1] + size - 150)  # in row 98
    assert wanted(ring).gaps == ()
    assert len(selected(wanted(ring), RARE, 0, 1 << 40)) == 3
    told = search(ring, ["topic", "one.98"], by_rows=True).gaps
    assert [gap[:3] for gap in told] == [Gap(100, 200, "damaged", "")[:3]]


def test_a_known_batch_of_which_many_rows_are_wanted_leaves_whole(ring: Ring) -> None:
    many(ring, {50: b"rare"})
    wanted(ring)
    history = search(ring, ["prefix", "one."], by_rows=True)
    ((run),) = history.runs
    (batch,) = iter_batches([run.data])
    assert not batch.stamp.derived
    assert len(batch) == 100


def test_another_batch_at_the_place_of_a_known_one_is_not_taken_for_it(
    place: Place, ring: Ring
) -> None:
    many(ring, {})  # after the snapshot that the segment begins with
    lsn = many(ring, {50: b"rare"})
    data = place.read(lsn, Stamp.unpack(place.read(lsn, 96)).size)
    stamp = Stamp.unpack(data)
    known, rows = KnownBatches(), rows_by_subject(RARE)
    assert rows is not None
    known.note(b"ring", stamp, data, 0)
    found = known.get(b"ring", stamp.lsn, stamp.size)
    assert found is not None

    def choose(table: Any, codes: Any, times: Any) -> Any:
        return rows.of(table, codes)

    def reading(held: bytes) -> Any:
        return lambda position, size: held[position : position + size]

    taken = found.rows(reading(data), 0, choose)
    assert taken is not None
    assert [row.body for row in taken] == [b"rare"]
    # The same content, appended in another life of the ring at another offset.
    other = stamp._replace(epoch=stamp.epoch + 1, base_offset=stamp.base_offset + 7).pack()
    assert found.rows(reading(other + data[96:]), 0, choose) is None
    assert known.get(b"ring", stamp.lsn, stamp.size - 8) is None
    assert known.get(b"other", stamp.lsn, stamp.size) is None


def test_what_is_known_is_bounded_and_what_was_not_asked_for_the_longest_goes_first(
    place: Place, ring: Ring
) -> None:
    lsn = [many(ring, {row: b"rare"}) for row in range(2)][1]
    data = place.read(lsn, Stamp.unpack(place.read(lsn, 96)).size)
    stamp = Stamp.unpack(data)
    known = KnownBatches(bytes_max=20_000)
    for number in range(40):
        known.note(b"%d" % number, stamp, data, 0)
        assert known.get(b"0", lsn, stamp.size) is not None
    assert 2 < len(known) < 40
    assert known.get(b"1", lsn, stamp.size) is None
    assert known.get(b"39", lsn, stamp.size) is not None


def test_few_selections_of_a_batch_are_remembered_and_count_within_the_bound(
    place: Place, ring: Ring
) -> None:
    lsn = [many(ring, {row: b"rare"}) for row in range(2)][1]
    data = place.read(lsn, Stamp.unpack(place.read(lsn, 96)).size)
    stamp = Stamp.unpack(data)
    known = KnownBatches(bytes_max=20_000)
    known.note(b"ring", stamp, data, 0)
    batch = known.get(b"ring", lsn, stamp.size)
    assert batch is not None
    for number in range(10):
        known.remember(batch, number, b"x" * 1000)
        known.remember(batch, number, b"x" * 1000)
    assert list(batch.found) == [6, 7, 8, 9]
    # One that is larger than the bound has the batch forgotten, and what is known is empty.
    known.remember(batch, 10, b"x" * 30_000)
    assert known.get(b"ring", lsn, stamp.size) is None
    assert len(known) == known._bytes == 0
    known.remember(batch, 11, b"x")
    assert 11 not in batch.found
    known.note(b"ring", stamp, data, 0)
    again = known.get(b"ring", lsn, stamp.size)
    assert again is not None
    assert (again.found, known._bytes) == ({}, again.weight)


@pytest.mark.moderate
@pytest.mark.parametrize("seed", seeds(1, 5))
def test_searches_of_known_batches_bring_what_whole_batches_would(ring: Ring, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(16):
        count = chance.choice((80, 200, 600))
        rare = ["rare", "one.5", ["two", "keys.3"], ["two", "keys.4"]]
        subjects: list[Any] = [
            chance.choice(rare) if chance.random() < 0.1 else f"one.{row % 90}"
            for row in range(count)
        ]
        options: dict[str, Any] = {}
        if chance.random() < 0.6:
            options["fields"] = [
                chance.choice((None, {"a": "1"}, {"b": "2"})) for _ in range(count)
            ]
        if chance.random() < 0.5:
            options["client_time_ms"] = [chance.randrange(100) for _ in range(count)]
        fixed = chance.random() < 0.4
        bodies = [b"%09d" % row if fixed else b"y" * chance.randrange(90) for row in range(count)]
        put(ring, 1, *bodies, subject=subjects, time_ms=1000 + number, **options)
    tail = ring.next_offset(1)
    for _ in range(24):
        pattern = chance.choice((RARE, ["topic", "one.5"], ["topic", "two"], ["prefix", "keys.3"]))
        # Whole batches are what is remembered.
        first = chance.choice((0, chance.randrange(tail)))
        end = chance.choice((tail, chance.randrange(first, tail + 1)))
        window = chance.choice((None, (20, 60)))
        expected = selected(search(ring, pattern, first, end), pattern, first, end)
        if window is not None:
            expected = [row for row in expected if row[3] is not None and 20 <= row[3] < 60]
        found: list[tuple[Any, ...]] = []
        at = first
        while at < end:
            history = search(
                ring, pattern, at, end, chance.choice((3_000, 1 << 30)), window, by_rows=True
            )
            found += selected(history, pattern, at, end)
            assert history.next > at
            at = history.next
        if window is not None:
            found = [row for row in found if row[3] is not None and 20 <= row[3] < 60]
        assert found == expected
