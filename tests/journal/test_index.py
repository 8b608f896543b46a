"""The index against brute force: what it leaves out never holds a match."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from malamute_py.journal import HeaderIndex, MemoryStorage, Ring, RingSettings
from malamute_py.journal.headers import HeaderTable, pack_headers, unpack_headers
from malamute_py.journal.index import NEVER, NO_CLIENT_TIME, LiveIndex, read_index
from tests.journal.rings import Place, S, batch, content_of, everything, put, records

PARTS = st.sampled_from(["a", "b", "c", "d"])
SUBJECTS = st.lists(PARTS, min_size=1, max_size=3).map(".".join)
FIELDS = st.dictionaries(st.sampled_from(["f", "g"]), st.sampled_from(["", "1", "2"]), max_size=2)
RECORDS = st.tuples(SUBJECTS, FIELDS)
BATCHES = st.lists(
    st.tuples(st.integers(0, 2), st.lists(RECORDS, min_size=1, max_size=4)),
    min_size=1,
    max_size=60,
)
BOUNDS = st.tuples(st.sampled_from([0, 700, 5000]), st.sampled_from([1, 4, 12, 1000]))


def build(batches: list[tuple[int, list[Any]]], bounds: tuple[int, int]) -> tuple[Ring, Place]:
    storage = MemoryStorage()
    place = Place(storage, lambda: storage)
    ring, _ = place.open(
        RingSettings(
            segment_bytes=S,
            ring_bytes=8 * S,
            index_interval_bytes=bounds[0],
            distinct_headers_max=bounds[1],
        )
    )
    for stream, rows in batches:
        put(
            ring,
            stream,
            *(b"%d" % n for n in range(len(rows))),
            subject=[subject for subject, _ in rows],
            fields=[fields for _, fields in rows],
        )
    return ring, place


def covers(top: str, subject: str, exact: bool) -> bool:
    if exact:
        return top == subject
    return top in ("", subject) or subject.startswith(top + ".")


def subject_search(subject: str) -> Any:
    def search(index: HeaderIndex) -> BitMap:
        found = BitMap()
        for keys, bitmap in index.subjects():
            if any(covers(key, subject, index.exact) for key in keys):
                found |= bitmap
        return found & index.subject(subject)

    return search


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(BATCHES, BOUNDS, SUBJECTS)
def test_a_subject_is_found_wherever_it_is(
    batches: list[Any], bounds: tuple[int, int], subject: str
) -> None:
    ring, _ = build(batches, bounds)
    for stream in range(3):
        rows = [row for number, part in batches if number == stream for row in part]
        want = {offset for offset, (s, _) in enumerate(rows) if s == subject}
        history = ring.read(stream, 0, len(rows), 1 << 30, subject_search(subject))
        found = {offset for offset, _ in records(history)}
        assert want <= found
        assert history.gaps == ()
        assert history.next == len(rows)
        if bounds == (0, 1000):
            base = 0
            for number, part in batches:
                if number == stream:
                    here = set(range(base, base + len(part)))
                    assert bool(here & found) == any(s == subject for s, _ in part)
                    base += len(part)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(BATCHES, BOUNDS, st.sampled_from(["f", "g"]), st.sampled_from([None, "", "1", "2"]))
def test_a_field_is_found_wherever_it_is(
    batches: list[Any], bounds: tuple[int, int], name: str, value: str | None
) -> None:
    ring, _ = build(batches, bounds)
    for stream in range(3):
        rows = [row for number, part in batches if number == stream for row in part]
        want = {
            offset
            for offset, (_, fields) in enumerate(rows)
            if name in fields and (value is None or fields[name] == value)
        }
        history = ring.read(stream, 0, len(rows), 1 << 30, lambda index: index.field(name, value))
        assert want <= {offset for offset, _ in records(history)}


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(BATCHES, BOUNDS, st.integers(0, 60))
def test_the_latest_of_each_subject_is_what_reading_everything_finds(
    batches: list[Any], bounds: tuple[int, int], end: int
) -> None:
    ring, _ = build(batches, bounds)
    for stream in range(3):
        rows = [row for number, part in batches if number == stream for row in part]
        stop = min(end, len(rows))
        want = {(subject,): offset for offset, (subject, _) in enumerate(rows[:stop])}
        assert dict(ring.last_per_subject(stream, end_offset=end)) == want


@pytest.mark.moderate
@given(BATCHES, BOUNDS, st.integers(0, 100), st.integers(0, 100), st.integers(1, 5000))
def test_reading_in_pieces_is_reading_at_once(
    batches: list[Any], bounds: tuple[int, int], low: int, high: int, piece: int
) -> None:
    ring, _ = build(batches, bounds)
    for stream in range(3):
        whole = everything(ring, stream)
        position, got = low, []
        while position < min(high, len(whole)):
            history = ring.read(stream, position, high, piece)
            assert history.next > position
            got += [pair for pair in records(history) if position <= pair[0] < history.next]
            position = history.next
        assert got == whole[low : min(high, len(whole))]


@pytest.mark.moderate
@given(BATCHES, BOUNDS)
def test_an_index_from_its_file_answers_as_the_one_in_memory(
    batches: list[Any], bounds: tuple[int, int]
) -> None:
    live = LiveIndex(*bounds)
    nexts: dict[int, int] = {}
    position = 4096
    for number, (stream, rows) in enumerate(batches):
        content, _ = content_of([b"x"] * len(rows))
        keys = ([subject for subject, _ in rows], [fields for _, fields in rows])
        base = nexts.get(stream, 0)
        nexts[stream] = base + len(rows)
        client = (number, number + 5) if number % 3 else NO_CLIENT_TIME
        facts = (client, NEVER, 900 - number if number % 2 else 0)
        live.add(stream, position, len(content), base, nexts[stream], 7 * number, facts, keys)
        position += len(content) if number % 4 else len(content) + 800
    stored = read_index(live.pack(b"r" * 16, 3, 1, 9), b"r" * 16, 3)
    assert stored is not None
    assert stored.spans == live.spans
    assert stored.expiries == live.expiries
    for stream, after in nexts.items():
        for low in range(0, after, 3):
            ours, theirs = (i.entries(stream, low, after) for i in (live, stored))
            assert ours.ordinals.tolist() == theirs.ordinals.tolist()
            assert ours.rows.tolist() == theirs.rows.tolist()
        one, two = live.headers(stream), stored.headers(stream)
        assert one.exact == two.exact
        assert dict(one.subjects()) == dict(two.subjects())
        assert (one.names, one.pairs, one.everything()) == (two.names, two.pairs, two.everything())
        for subject, fields in {(s, tuple(f.items())) for n, rows in batches for s, f in rows}:
            # The last entries have their filters in the file only.
            assert one.subject(subject) >= two.subject(subject)
            for name, value in fields:
                assert one.field(name, value) >= two.field(name, value)
    assert read_index(live.pack(b"r" * 16, 3, 1, 9), b"x" * 16, 3) is None
    assert read_index(live.pack(b"r" * 16, 3, 1, 9), b"r" * 16, 4) is None


def test_too_many_headers_leave_leading_parts_and_say_so() -> None:
    table = HeaderTable(100)
    for number in range(1000):
        keys = ([f"top{number % 3}.mid{number % 11}.leaf{number}"], [{"trace": str(number)}])
        table.add(1, number, keys)
    headers = table.stream(1)
    assert not headers.exact
    assert {keys for keys, _ in headers.subjects()} == {
        (f"top{n % 3}.mid{n % 11}",) for n in range(33)
    }
    assert len(headers.field("trace", None)) == 1000
    assert headers.field("trace", "7") >= BitMap([7])
    assert headers.everything() == BitMap(range(1000))
    depth, packed = pack_headers(table)
    again = unpack_headers(depth, packed[1], table.filters)
    assert dict(again.subjects()) == dict(headers.subjects())
    assert again.subject("top1.mid7.leaf7") == headers.subject("top1.mid7.leaf7")


def test_headers_that_cannot_be_bounded_exclude_nothing() -> None:
    table = HeaderTable(10)
    for number in range(100):
        table.add(1, number, ([f"{number}.x"], [{f"name{number}": "v"}]))
    headers = table.stream(1)
    assert headers.field("anything", None) == BitMap(range(100))
    everywhere = [bitmap for keys, bitmap in headers.subjects() if keys == ("",)]
    assert everywhere == [BitMap(range(100))]


def test_headers_that_cannot_be_read_exclude_nothing() -> None:
    table = HeaderTable(1000)
    table.add(1, 0, (["a"], ()))
    table.add(1, 1, None)
    headers = table.stream(1)
    assert not headers.exact
    assert headers.field("f", None) == BitMap([0, 1])
    assert 1 in headers.field("f", "v")
    assert 1 in headers.subject("b")
    assert dict(headers.subjects()) == {("",): BitMap([0, 1])}
    table.add(1, 2, None)
    assert table.stream(1).field("f", None) == BitMap([0, 1, 2])


def test_equal_header_tables_cost_one_look_up(monkeypatch: Any) -> None:
    table = HeaderTable(1000)
    resolved = []
    resolve = table._resolve

    def note(stream: int, ordinal: int, keys: Any) -> Any:
        resolved.append(keys)
        return resolve(stream, ordinal, keys)

    monkeypatch.setattr(table, "_resolve", note)
    first, second = (["a"], ()), (["b"], ())
    for number in range(100):
        table.add(1, number, first if number % 2 else second)
    assert len(resolved) == 2


@pytest.mark.moderate
def test_many_entries_are_found_by_offset() -> None:
    storage = MemoryStorage()
    place = Place(storage, lambda: storage)
    ring, _ = place.open(RingSettings(segment_bytes=1 << 20, ring_bytes=4 << 20))
    for number in range(2500):
        ring.append([batch(ring, number % 2, [b"%d" % number])])
    for offset in (0, 1, 600, 1023, 1024, 1025, 1249):
        for stream in (0, 1):
            history = ring.read(stream, offset, offset + 1, 1)
            assert records(history)[0] == (offset, b"%d" % (2 * offset + stream))
