"""Large header tables are read in steps, and end as equal tables or equal refusals."""

from __future__ import annotations

import contextlib
import gc
import weakref
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from malamute_protocol.content import Content
from malamute_protocol.content_layout import has_large_table
from malamute_protocol.encode import encode
from malamute_protocol.errors import BatchError
from malamute_protocol.header import (
    STEP_ENTRIES,
    TABLE_BYTES_MAX,
    Header,
    HeaderTable,
    Remains,
    TableReading,
    items_of,
    pair_text,
    parse_table,
)
from malamute_protocol.limits import DEFAULT_LIMITS, Limits

TEXT = st.text(max_size=3)
SUBJECTS = st.lists(st.one_of(TEXT, st.lists(TEXT, max_size=3)), max_size=5)
MAPS = st.lists(st.dictionaries(TEXT, TEXT, max_size=3), max_size=5)
LIMITS = Limits(header_entries_max=12, keys_max=2, fields_max=2, headers_max=4)
pack = msgspec.msgpack.encode


def facts(table: HeaderTable) -> tuple[object, ...]:
    return (
        table.keys, table.fieldmaps, table.entries, table.subject_bytes, table.keys_most,
        table.fields_most, table.field_name_bytes, table.field_value_bytes,
    )  # fmt: skip


def outcome(subjects: bytes, maps: bytes, *, steps: bool) -> object:
    try:
        if steps:
            table = TableReading(subjects, maps, LIMITS).table()
        else:
            table = parse_table(subjects, maps, LIMITS)
        table.check(LIMITS)
    except BatchError as error:
        return error.code
    return facts(table)


@pytest.mark.moderate
@given(SUBJECTS, MAPS, st.binary(max_size=2), st.integers(0, 30))
def test_a_table_read_in_steps_is_the_table_or_the_refusal_of_one_read_at_once(
    subjects: list[str | list[str]], maps: list[dict[str, str]], tail: bytes, cut: int
) -> None:
    data, fields = pack(subjects), pack(maps)
    for one, other in ((data, fields), (data + tail, fields), (data, fields[: max(1, cut)])):
        at_once = outcome(one, other, steps=False)
        in_steps = outcome(one, other, steps=True)
        # An error may name either of two faults.
        assert in_steps == at_once or {in_steps, at_once} == {"too_large", "bad_batch"}


def large(maps: int, fields: int) -> bytes:
    table = [{f"n{at}": f"v{number}" for at in range(fields)} for number in range(maps)]
    return encode([b""] * maps, fields=table)


@pytest.mark.moderate
def test_no_step_reads_more_than_a_bound_of_entries() -> None:
    content = Content(large(1_000, 64))
    assert has_large_table(content.buffer)
    reading = content.reading(DEFAULT_LIMITS)
    assert reading is not None
    sizes: list[int] = []

    def more() -> bool:
        sizes.append(len(reading._table.fieldmaps))
        return False

    while not reading.run(more):
        pass
    steps = [after - before for before, after in pairwise(sizes)]
    assert max(steps) * 64 <= STEP_ENTRIES + 64
    assert len(steps) > 1_000 * 64 // STEP_ENTRIES
    content.check()
    table = content.table
    assert table is reading.table()
    texts = [pair_text(*pair) for entry in table.fieldmaps for pair in entry.items()]
    assert table.outline is not None
    assert sorted(table.outline.items) == sorted(items_of([*table.keys[0], *texts]))


def test_a_small_table_is_read_at_once() -> None:
    content = Content(large(10, 3))
    assert not has_large_table(content.buffer)
    assert content.reading(DEFAULT_LIMITS) is None


@pytest.mark.moderate
@pytest.mark.parametrize("in_steps", [False, True])
def test_keys_and_fields_of_all_headers_together_have_a_limit(in_steps: bool) -> None:
    frame = large(1_000, 64)
    assert len(frame) > TABLE_BYTES_MAX
    for most, refused in ((64_001, False), (64_000, True)):
        limits = Limits(header_entries_max=most)
        content = Content(frame)
        reading = content.reading(limits) if in_steps else None
        if reading is not None:
            reading.run(lambda: True)
        if not refused:
            content.check(limits)
            continue
        with pytest.raises(BatchError) as raised:
            content.check(limits)
        assert raised.value.code == "too_large"
        if reading is not None:
            assert sum(map(len, reading._table.fieldmaps)) <= most


def test_a_table_that_is_wrong_is_free_when_it_was_refused() -> None:
    """The collector found 15 MiB of each such table seconds later: 55 messages took 870 MiB."""
    limits = msgspec.structs.replace(LIMITS, header_entries_max=3)
    gc.disable()
    try:
        reading = TableReading(pack(["a", "b", "c", "d"]), b"", limits)
        with contextlib.suppress(BatchError):
            reading.table()
        known = weakref.ref(reading)
        del reading
        assert known() is None
    finally:
        gc.enable()


def test_a_step_parses_few_bytes() -> None:
    """A step that looked at all entries once took 20 ms for 65,536 subjects of many parts."""
    data = pack([f"{at}{'.x' * 100}" for at in range(2 * STEP_ENTRIES)])
    reading = TableReading(data, b"", DEFAULT_LIMITS, outlined=False)
    steps = 1
    while not reading.run(lambda: False):
        steps += 1
    assert steps > len(data) / 70_000


def test_a_table_with_long_texts_and_large_arrays_reads_the_same_in_steps() -> None:
    texts = ["a" * size for size in (1, 31, 32, 255, 256, 65_536)]
    subjects = [*texts, texts, ["b"] * 17, ["c"] * 3]
    maps = [{text: text for text in texts}, {}, {f"n{at}": "v" for at in range(17)}]
    limits = Limits(keys_max=17, fields_max=17)
    whole = parse_table(pack(subjects), pack(maps), limits)
    stepped = TableReading(pack(subjects), pack(maps), limits).table()
    assert facts(stepped) == facts(whole)


def test_a_table_whose_reading_is_given_up_is_free_at_once() -> None:
    """A peer that is cut amid its table left 10 MiB; a collector that may not rest kept them."""
    gc.disable()
    try:
        reading = TableReading(pack([f"a.{at}" for at in range(5_000)]), b"", DEFAULT_LIMITS)
        assert not reading.run(lambda: False)
        known = weakref.ref(reading)
        del reading
        assert known() is None
    finally:
        gc.enable()


@pytest.mark.moderate
def test_a_table_that_nobody_needs_is_freed_in_steps() -> None:
    remains = Remains()
    maps = [{"n": str(at)} for at in range(100)]
    content = Content(
        encode([b""] * 9_000, subject=[f"a.{at:09}" for at in range(9_000)],
               field_table=maps, field_codes=[at % 100 for at in range(9_000)])
    )  # fmt: skip
    assert content.reading(DEFAULT_LIMITS, remains=remains) is not None
    header = content.headers()[0][8_999]
    assert not remains.parts
    del content
    left = []
    while remains.parts:
        left.append(sum(map(len, remains.parts)))
        remains.free(1_000)
    # Keys and headers of 9,000 subjects, 100 field maps and their sorted items.
    assert left == list(range(18_200, 0, -1_000))
    assert header == Header(("a.000008999",), (("n", "99"),))


def test_a_table_that_is_wrong_is_refused_in_the_same_words_each_time() -> None:
    reading = TableReading(b"\xc1", b"", LIMITS)
    said: list[tuple[str, str]] = []
    for _ in range(2):
        with pytest.raises(BatchError) as raised:
            reading.table()
        said.append((raised.value.code, raised.value.reason))
    with pytest.raises(BatchError) as raised:
        parse_table(b"\xc1", b"", LIMITS)
    assert said == [(raised.value.code, raised.value.reason)] * 2
