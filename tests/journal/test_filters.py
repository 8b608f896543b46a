"""Filters of entries: what they exclude never holds the item, and they are small."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from malamute_protocol import header
from malamute_protocol.header import TableReading, items_of, pair_text
from malamute_protocol.limits import UNCHECKED
from malamute_py.broker.streams.start_positions import may_match
from malamute_py.journal import History, Ring, RingSettings, filters
from malamute_py.journal.filters import EntryFilters
from malamute_py.journal.headers import HeaderTable
from malamute_py.journal.index import NEVER, NO_CLIENT_TIME, LiveIndex, StoredIndex, read_index
from malamute_py.journal.layout import index_name, pack_file
from malamute_py.journal.recovery import Scan
from malamute_py.journal.storage import read_file
from malamute_py.matcher import compile_pattern
from malamute_py.server.journaling.queries import by_key
from tests.journal.rings import Place, S, file_place, memory_place, put, records
from tests.journal.test_retention import tidy
from tests.seeds import examples, slow

PLAIN = (NO_CLIENT_TIME, NEVER, 0)
"""Facts of a batch whose records have no times."""

TEXTS = st.lists(st.integers(0, 40).map(str), max_size=12)
NOTES = st.lists(st.tuples(st.integers(0, 2), st.one_of(st.none(), TEXTS)), max_size=30)
"""Entries to go forward, and items that the entry reached holds (None: unknown)."""

PARTS = st.sampled_from(["a", "b", "c", ""])
KEYS = st.lists(st.lists(PARTS, min_size=1, max_size=3).map(".".join), min_size=1, max_size=3)
FIELDS = st.dictionaries(st.sampled_from(["f", "g"]), st.sampled_from(["", "1", "2"]), max_size=2)
BATCHES = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.tuples(KEYS, FIELDS), min_size=1, max_size=4)),
    min_size=1,
    max_size=40,
)
ONE_SUBJECT = KEYS.map(lambda keys: ["topic", keys[0] or "a"])
ONE_VALUE = st.tuples(st.sampled_from("fg"), st.sampled_from(["", "1", "2"])).map(
    lambda pair: ["fields", "all", [list(pair)]]
)
PATTERNS = st.recursive(
    st.one_of(ONE_SUBJECT, ONE_VALUE, st.just(["topic", "a.*"]), st.just(["prefix", "b"])),
    lambda inner: st.tuples(st.sampled_from(["and", "or"]), inner, inner).map(list),
    max_leaves=3,
)


def small(bound: int, interval: int = 700, size: int = S) -> RingSettings:
    return RingSettings(
        segment_bytes=size,
        ring_bytes=8 * size,
        index_interval_bytes=interval,
        distinct_headers_max=bound,
    )


def search(ring: Ring, pattern: Any) -> History:
    return ring.read(1, 0, ring.next_offset(1), 1 << 40, by_key(partial(may_match, pattern)))


def batches_read(ring: Ring, pattern: Any) -> int:
    return sum(len(run.spans) for run in search(ring, pattern).runs)


# --- the filters by themselves --------------------------------------------------------------


@pytest.mark.moderate
@given(NOTES, NOTES, st.sampled_from([0, 3, 20, 1000]))
def test_an_entry_is_never_excluded_from_what_it_holds(
    notes: list[Any], later: list[Any], waiting_max: int
) -> None:
    made = EntryFilters(waiting_max)
    held: dict[int, set[str]] = {}
    unknown: set[int] = set()
    entry = 0

    def check(one: EntryFilters) -> None:
        every = BitMap(held)
        for text in map(str, range(41)):
            want = {number for number, texts in held.items() if text in texts} | unknown
            assert want <= set(one.may_hold(every, text)) <= set(every)

    for part in (notes, later):
        for further, texts in part:
            entry += further
            made.add(entry, None if texts is None else items_of(texts))
            held.setdefault(entry, set()).update(texts or ())
            if texts is None:
                unknown.add(entry)
            check(made)
        check(EntryFilters(waiting_max, *made.pack()))
        made = EntryFilters(0, *made.pack())
        made.reopen(entry, waiting_max)


@pytest.mark.moderate
@given(
    st.dictionaries(st.integers(0, 40).map(str), st.sets(st.integers(0, 30))), st.integers(0, 30)
)
def test_filters_made_of_bitmaps_are_those_of_the_entries(
    bitmaps: dict[str, set[int]], stop: int
) -> None:
    made, other = EntryFilters(0), EntryFilters(1000)
    made.add_all(((text, BitMap(entries)) for text, entries in bitmaps.items()), stop)
    for entry in range(31):
        items = items_of(text for text, entries in bitmaps.items() if entry in entries)
        other.add(entry, items)
        if entry >= stop:
            made.add(entry, items_of([]))
    assert made.pack() == other.pack()


@pytest.mark.slow
@pytest.mark.parametrize(("entries", "items"), [(2000, 1), (300, 10), (40, 5000), (3, 50_000)])
def test_one_in_a_hundred_is_named_too_many_at_a_byte_and_a_quarter_an_item(
    entries: int, items: int
) -> None:
    made = EntryFilters(0)
    for entry in range(entries):
        numbers = range(entry * items, (entry + 1) * items)
        made.add(entry, items_of(f"customer.{number}.order" for number in numbers))
    sizes, bits = made.pack()
    assert len(bits) <= entries * (1.25 * items + 1)
    assert len(sizes) == 2 * entries
    made.close(entries)
    every, asked = BitMap(range(entries)), 60_000 // entries
    wrong = sum(len(made.may_hold(every, f"customer.{-n}.order")) for n in range(1, asked))
    assert wrong < 0.02 * asked * entries


def test_more_than_a_turn_of_the_loop_can_take_is_read_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filters, "_HELD_MAX", 10)
    made = EntryFilters(0)
    made.add_all([("a", BitMap(range(11)))], 9)
    for entry in range(9, 14):
        made.add(entry, items_of(["b"]))
    every = BitMap(range(14))
    # Of what was there at the switch nothing is known, nor of the entry that may still grow.
    assert made.may_hold(every, "a") == BitMap([*range(10), 13])
    assert made.may_hold(every, "b") == every


@given(NOTES, st.integers(1, 9))
def test_filters_made_in_slices_are_those_made_at_once(notes: list[Any], size: int) -> None:
    packed = []
    for slices in (size, 1 << 16):
        made = EntryFilters(1000)
        entry = 0
        for further, texts in notes:
            entry += further
            made.add(entry, None if texts is None else items_of(texts))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(filters, "_SLICE", slices)
            packed.append(made.pack())
    assert packed[0] == packed[1]


def test_an_entry_of_very_many_items_has_64_kib_at_most() -> None:
    made = EntryFilters(0)
    made.add(0, items_of(map(str, range(100_000))))
    made.add(1, items_of(["x"]))
    assert len(made.pack()[1]) == 65_535 + 2
    assert 0 in made.may_hold(BitMap([0, 1]), "99999")


def test_many_small_entries_wait_for_their_filters_in_proportion() -> None:
    made = EntryFilters(100)
    changes = 0
    for entry in range(20_000):
        before = len(made)
        made.add(entry, items_of([str(entry)]))
        changes += before != len(made)
        assert entry - len(made) <= 101 + 2 * entry / 64
    assert changes <= 100 + 64 * 2


# --- in a table -----------------------------------------------------------------------------


def test_entries_from_before_the_bound_was_passed_have_filters_as_well() -> None:
    table = HeaderTable(100)
    for number in range(40):
        table.add(1, number // 2, ([f"early.{number}"], [{"trace": f"e{number}"}]))
    assert table.stream(1).exact
    for number in range(40, 500):
        table.add(1, number // 2, ([f"late.{number}"], [{"trace": f"l{number}"}]))
    headers = table.stream(1)
    assert not headers.exact
    for number in range(40):
        for found in (
            headers.subject(f"early.{number}"),
            headers.field("trace", f"e{number}"),
        ):
            assert number // 2 in found
            assert len(found) < 60
    assert headers.field("trace", None) == BitMap(range(250))


def test_the_entry_amid_which_the_bound_is_passed_keeps_what_it_held() -> None:
    table = HeaderTable(10)
    for number in range(30):
        table.add(1, 7, ([f"s.{number}"], ()))
    for number in range(8, 200):
        table.add(1, number, ([f"t.{number}"], ()))
    headers = table.stream(1)
    assert all(7 in headers.subject(f"s.{number}") for number in range(30))
    assert sum(7 in headers.subject(f"s.{number}") for number in range(100, 200)) < 20


def test_a_table_of_headers_known_from_before_the_bound_was_passed_is_noted_anew() -> None:
    table = HeaderTable(10)
    same = (["again"], [{"f": "1"}])
    table.add(2, 0, same)
    for number in range(1, 100):
        table.add(1, number, ([f"s.{number}"], ()))
    assert not table.stream(2).exact
    table.add(2, 100, same)
    for number in range(101, 200):
        table.add(2, number, ([f"s.{number}"], ()))
    headers = table.stream(2)
    for found in (headers.everything(), headers.subject("again"), headers.field("f", "1")):
        assert {0, 100} <= set(found)
    assert 100 not in headers.subject("absent")


@pytest.mark.moderate
def test_tables_that_nobody_sends_again_are_not_held() -> None:
    """32 tables of 1,000 maps, each of 60 fields, stayed: they took 160 MiB."""
    table = HeaderTable(16)
    for size, each in ((5_000, 1), (4_000, 1), (60, 60), (1_000, 60)):
        for number in range(20):
            fields = [{f"id{n}": f"{number}.{row}" for n in range(each)} for row in range(size)]
            table.add(1, number, ([("a",)], fields))
            held = [sum(map(len, keys[1])) for keys, _ in table._memo.values()]
            assert sum(held) <= (1 << 15) + 4_096
            assert all(count <= 4_096 for count in held)
    assert held
    assert len(table._last) <= 1


def test_each_key_of_a_record_is_found_by_itself() -> None:
    table = HeaderTable(10)
    for number in range(100):
        table.add(1, number, ([(f"a.{number}", f"b.{number}"), f"c.{number}"], ()))
    table.filters.close(100)  # type: ignore[union-attr]
    headers = table.stream(1)
    for number in range(100):
        for letter in "abc":
            found = headers.subject(f"{letter}.{number}")
            assert number in found
            assert len(found) < 20


def test_headers_that_cannot_be_read_are_never_excluded() -> None:
    for known_before in (0, 5, 50):
        table = HeaderTable(10)
        for number in range(known_before):
            table.add(1, number, ([f"x.{number}"], ()))
        for number in (known_before, known_before + 1):
            table.add(1, number, (["a"], ()))
            table.add(1, number, None)
            table.add(1, number, None)
        for number in range(known_before + 2, known_before + 100):
            table.add(1, number, ([f"x.{number}"], [{"f": "1"}]))
        headers = table.stream(1)
        for found in (headers.subject("b"), headers.field("f", "2"), headers.field("g", None)):
            assert {known_before, known_before + 1} <= set(found)
        assert len(headers.subject("b")) < 50


# --- in a ring ------------------------------------------------------------------------------


def put_all(ring: Ring, batches: list[Any]) -> None:
    for stream, rows in batches:
        put(
            ring, stream, *(b"%d" % n for n in range(len(rows))),
            subject=[tuple(keys) for keys, _ in rows],
            fields=[fields for _, fields in rows],
        )  # fmt: skip


@pytest.mark.moderate
@given(BATCHES, st.sampled_from([0, 700, 5000]), st.sampled_from([1, 4, 12]), PATTERNS)
def test_a_pattern_finds_every_record_that_matches(
    batches: list[Any], interval: int, bound: int, pattern: Any
) -> None:
    place = memory_place()
    matches = compile_pattern(pattern).matches
    ring, _ = place.open(small(bound, interval))
    for opening in range(2):
        # What a walk rebuilds answers alike, and goes on.
        if opening:
            ring, _ = place.open(small(bound, interval))
        put_all(ring, batches)
        rows = [row for number, part in batches if number == 1 for row in part] * (opening + 1)
        want = {
            offset
            for offset, (keys, fields) in enumerate(rows)
            if matches(tuple(keys), tuple(sorted(fields.items())))
        }
        assert want <= {offset for offset, _ in records(search(ring, pattern))}


SUBJECTS = 100_000
BATCH = 500


def customers(ring: Ring, first: int, stop: int, of: int = BATCH) -> None:
    """Each record with a subject, and a value, of its own."""
    for number in range(first, stop, of):
        numbers = range(number, min(number + of, stop))
        put(
            ring, 1, *(b"%d" % n for n in numbers),
            subject=[f"c{n}" for n in numbers], fields=[{"order": f"o{n}"} for n in numbers],
        )  # fmt: skip


def asked_for(number: int) -> list[Any]:
    return [
        ["topic", f"c{number}"],
        ["fields", "all", [["order", f"o{number}"]]],
        ["and", ["topic", f"c{number}"], ["fields", "any", [["order", f"o{number}"]]]],
    ]


@pytest.mark.slow
def test_one_subject_among_100_000_is_found_in_a_few_of_200_batches(tmp_path: Path) -> None:
    place = file_place(tmp_path)
    settings = small(1000, 2048, 1 << 20)
    ring, _ = place.open(settings)
    customers(ring, 0, SUBJECTS)
    assert len(ring._space.segments) > 2

    def check(most: int) -> None:
        for number in (0, 1, 999, 1000, 1001, 50_123, SUBJECTS - 1):
            for pattern in asked_for(number):
                found = search(ring, pattern)
                assert (number, b"%d" % number) in records(found)
                # 1 in 100, and the last of each segment that has no index file yet.
                assert sum(len(run.spans) for run in found.runs) <= most
        assert batches_read(ring, ["topic", "absent"]) <= most

    check(12)
    ring.sync()
    tidy(ring)
    assert sum(segment.live is None for segment in ring._space.segments) > 1
    check(8)
    ring.close()
    ring, recovery = place.open(settings)
    assert recovery.clean
    check(8)
    # Without an orderly close the last segment is walked; without its index file, another.
    place.storage.remove(index_name(1))
    ring, _ = place.open(settings)
    check(8)


@pytest.mark.moderate
def test_small_batches_that_share_entries_are_told_apart_too(place: Place) -> None:
    ring, _ = place.open(small(40, 2048))
    customers(ring, 0, 1000, of=3)
    for number in range(0, 1000, 77):
        for pattern in asked_for(number):
            assert (number, b"%d" % number) in records(search(ring, pattern))
    read = batches_read(ring, ["topic", "absent"])
    assert read < sum(len(run.spans) for run in ring.read(1, 0, 1000, 1 << 40).runs) / 4


def test_an_entry_that_grows_after_an_opening_is_not_excluded() -> None:
    live = LiveIndex(100_000, 10)

    def add(number: int) -> None:
        keys = ([f"c{number}"], [{"order": f"o{number}"}])
        at = 4096 + 1000 * number
        live.add(1, at, 1000, number, number + 1, 1, PLAIN, keys)

    for number in range(250):
        if number % 40 == 39:
            # What an orderly close writes down, and the next opening goes on from.
            found = read_index(live.pack(b"r" * 16, 3, 1, 9), b"r" * 16, 3)
            assert found is not None
            live = LiveIndex(100_000, 10)
            assert live.restore(found)
        add(number)
    assert len(live.entries(1, 0, 250).rows) == 3
    for number in range(250):
        assert number // 100 in live.headers(1).subject(f"c{number}")
        assert number // 100 in live.headers(1).field("order", f"o{number}")


def stored(ring: Ring, place: Place, number: int = 0) -> StoredIndex:
    found = read_index(read_file(place.storage, index_name(number)) or b"", ring.uuid, number)
    assert found is not None
    return found


def sealed(place: Place) -> Ring:
    ring, _ = place.open(small(100, 2048))
    customers(ring, 0, 4000, of=100)
    ring.sync()
    tidy(ring)
    return ring


@pytest.mark.moderate
def test_an_index_of_an_earlier_version_has_its_batches_read_whole(tmp_path: Path) -> None:
    place = file_place(tmp_path)
    ring = sealed(place)
    segment = ring._files.segments()[0]
    end = segment.spans[1].next
    found = stored(ring, place)
    assert 5 in found.entries(1, 0, end).ordinals
    assert 5 not in found.headers(1).subject("absent")
    found._stored.filters = None
    older = read_index(pack_file(found._stored), ring.uuid, 0)
    assert older is not None
    assert older.headers(1).subject("absent") == older.headers(1).everything()
    ring._files._indexes[0] = older
    for number in range(0, 4000, 123):
        assert (number, b"%d" % number) in records(search(ring, ["topic", f"c{number}"]))

    # A segment that is still written goes on from such a file, with filters from there on.
    live = LiveIndex(2048, 100)
    assert live.restore(older)
    count = len(older.rows)
    for more in range(200):
        keys = ([f"more{more}"], ())
        base = end + more
        live.add(1, 70_000 + 3000 * more, 3000, base, base + 1, 1, PLAIN, keys)
    headers = live.headers(1)
    assert set(range(count)) <= set(headers.subject("absent"))
    assert len(headers.subject("absent")) < count + 60
    assert all(count + more in headers.subject(f"more{more}") for more in range(200))


@pytest.mark.moderate
def test_filters_that_do_not_fit_are_made_anew_from_the_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = file_place(tmp_path)
    ring = sealed(place)
    found = stored(ring, place)
    assert found._stored.filters is not None
    sizes, bits = found._stored.filters
    for wrong in ((sizes[:-2], bits), (sizes, bits[1:]), (sizes[1:], bits), (b"", bits)):
        found._stored.filters = wrong
        assert read_index(pack_file(found._stored), ring.uuid, 0) is None
    place.storage.remove(index_name(0))
    data = pack_file(found._stored)
    place.storage.write(place.storage.create(index_name(0), len(data)), 0, [data])
    rebuilt = []
    index_one = Scan.index_one

    def noted(self: Scan, segment: Any, file: Any) -> LiveIndex:
        rebuilt.append(segment.number)
        return index_one(self, segment, file)

    monkeypatch.setattr(Scan, "index_one", noted)
    assert 7 in {offset for offset, _ in records(search(ring, ["topic", "c7"]))}
    assert rebuilt == [0]
    index = ring._files.index(ring._files.segments()[0])
    assert isinstance(index, LiveIndex)
    again = read_index(index.pack(ring.uuid, 0, 1, 1), ring.uuid, 0)
    assert again is not None
    assert again._stored.filters == (sizes, bits)


def test_a_value_is_not_a_subject() -> None:
    assert pair_text("a", "b") != "ab"
    assert items_of([pair_text("a", "b")]) != items_of([pair_text("ab", "")])


@pytest.fixture
def taken_apart(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The subjects that were taken apart, one entry each time."""
    found: list[str] = []
    leading = header._leading

    def noted(key: str, depth: int) -> str:
        found.append(key)
        return leading(key, depth)

    monkeypatch.setattr(header, "_leading", noted)
    return found


@pytest.mark.moderate
@pytest.mark.parametrize("parts", [*slow([1, 3]), 120])
@pytest.mark.parametrize("differ", ["first", "last"])
@pytest.mark.parametrize("each", [65_536, 1_000])
def test_subjects_are_taken_apart_a_few_times_however_many_parts_they_have(
    taken_apart: list[str], parts: int, differ: str, each: int
) -> None:
    """A batch of 65,536 subjects of 120 parts took the loop 19 s."""
    rest = ".x" * (parts - 1)
    names = [f"n{at}{rest}" if differ == "first" else f"n{rest}.{at}" for at in range(65_536)]
    table = HeaderTable(16_384)
    for ordinal, first in enumerate(range(0, len(names), each)):
        table.add(1, ordinal, (names[first : first + each], ()))
    # Each once, those that the table has once more when their names are given up, and a sample of
    # them once a depth: a table rebuilt for each depth held a turn for 0.13 s.
    assert len(taken_apart) <= 65_536 + 17_384 + 9 * 1_024
    assert table.depth is not None
    for at in (0, 999, 1_000, 65_535):
        assert at // each in table.stream(1).subject(names[at])
    assert sum(map(len, table.streams.values())) <= 16_384


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("devices", "depth"),
    [(10, 2), (1_000, 2), (1_001, 2), (1_024, 2), (4_001, 2), (7_001, 2), (12_000, 1)],
)
def test_as_many_leading_parts_are_kept_as_fit(devices: int, depth: int) -> None:
    """A sample of 1,024 subjects may differ in most places where all of them do not."""
    table = HeaderTable(16_384)
    names = [f"site.{at % devices}.{at}" for at in range(20_000)]
    for ordinal, first in enumerate(range(0, len(names), 500)):
        table.add(1, ordinal, (names[first : first + 500], ()))
    assert table.depth == depth
    assert len(table.stream(1).tops) == (devices if depth == 2 else 1)


@pytest.mark.moderate
def test_a_sample_that_misleads_costs_the_leading_parts_and_no_more() -> None:
    """A large table is judged by a sample; where the other names differ, no part is kept."""
    names = ["same.place" if at % 64 == 0 else f"n{at}.x" for at in range(65_536)]
    table = HeaderTable(16_384)
    table.add(1, 0, (names, ()))
    assert (table.depth, sum(map(len, table.streams.values()))) == (0, 1)
    assert all(0 in table.stream(1).subject(name) for name in names[:200])


def test_an_entry_of_so_many_items_that_a_filter_says_little_has_none() -> None:
    """Making a filter of 640,000 items took most of the 1.5 s for which the loop stood still."""
    made = EntryFilters(0)
    made.add(0, items_of(map(str, range(110_000))))
    made.add(1, items_of(["x"]))
    made.close(2)
    assert len(made.pack()[1]) == 2
    assert 0 in made.may_hold(BitMap([0]), "no such item")


def in_steps(subjects: list[Any], maps: list[dict[str, str]]) -> header.HeaderTable:
    """A table that was read in steps, as a broker reads a large one."""
    fields = msgspec.msgpack.encode(maps) if maps else b""
    return TableReading(msgspec.msgpack.encode(subjects), fields, UNCHECKED).table()


@pytest.mark.moderate
@pytest.mark.parametrize("keys", [1, 16])
@pytest.mark.parametrize("differ", ["first", "last"])
def test_noting_a_table_that_was_read_in_steps_takes_no_subject_apart(
    taken_apart: list[str], keys: int, differ: str
) -> None:
    """16,000 subjects of 16 keys were 288,000 at once, and 80 ms."""

    def name(at: int) -> str:
        return f"n{at}.x.y" if differ == "first" else f"n.x.{at}"

    count = 32_000 // keys
    subjects = [[name(at * keys + key) for key in range(keys)] for at in range(count)]
    table = in_steps(subjects, [{"even": "1", f"f{at % 7}": f"{at}"} for at in range(count)])
    noted = HeaderTable(16_384)
    noted.add(1, 0, (["b.c.d.e"], ()))
    taken_apart.clear()
    noted.add(1, 1, table)
    # The one that was there is cut, once a depth; of the others none.
    assert len(taken_apart) <= 8
    assert noted.depth == (0 if differ == "first" else 2)
    assert noted.filters is not None
    noted.filters.close(2)
    for at in (0, 5, count - 1):
        assert list(noted.stream(1).subject(subjects[at][0])) == [1]
        assert 1 in noted.stream(1).field(f"f{at % 7}", f"{at}")
    assert list(noted.stream(1).subject("b.c.d.e")) == [0]


def test_a_table_with_more_field_names_than_are_kept_leaves_no_leading_parts() -> None:
    table = in_steps(
        ["a.b"], [{f"n{64 * at + field}": "" for field in range(64)} for at in range(300)]
    )
    assert table.outline is not None
    assert table.outline.names is None
    noted = HeaderTable(16_384)
    noted.add(1, 0, table)
    assert noted.depth == 0
    assert 0 in noted.stream(1).field("n7", "")
    assert 0 in noted.stream(1).subject("a.b")


@pytest.mark.moderate
@given(
    st.lists(st.lists(st.text("ab.", max_size=5), min_size=1, max_size=3), min_size=1, max_size=12),
    st.integers(1, 8),
    st.integers(1, 5),
)
@settings(max_examples=examples(200))
def test_what_is_gathered_in_steps_is_what_is_found_at_once(
    subjects: list[list[str]], most: int, step: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(header, "LEADS_MAX", most)
        patched.setattr(header, "STEP_ENTRIES", step)
        outline = in_steps(subjects, []).outline
    assert outline is not None
    tops = [tuple(keys) for keys in subjects]
    wanted = [{header.leading_parts(top, depth) for top in tops} for depth in range(1, 9)]
    assert outline.leads == [leads for leads in wanted if sum(map(len, leads)) <= most]
