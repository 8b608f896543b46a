"""Rows as chunks and batch contents, without Spark and without a broker."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from malamute_protocol.batch import Batch, Content, Record, Stamp
from malamute_protocol.limits import DEFAULT_LIMITS, Limits
from pyspark_malamute import sink_rows
from pyspark_malamute.errors import UnwritableRows
from pyspark_malamute.sink_options import SinkOptions, parse_sink_options
from pyspark_malamute.sink_rows import ROWS_MAX, Chunk, checksum, chunks, contents

KINDS: dict[str, Any] = {
    "stream": pa.string(), "subject": pa.string(), "body": pa.binary(),
    "fields": pa.map_(pa.string(), pa.string()), "properties": pa.map_(pa.string(), pa.string()),
    "client_time": pa.timestamp("us", tz="UTC"),
}  # fmt: skip


def options(**more: str) -> SinkOptions:
    stream = {} if "noStream" in more else {"stream": "out"}
    more.pop("noStream", None)
    return parse_sink_options({"endpoint": "tcp://a:1", **stream, **more}, streaming=True)


def table(**columns: list[Any]) -> Any:
    kinds: Any = pa.schema([(name, KINDS.get(name, pa.string())) for name in columns])
    return pa.table(columns, schema=kinds)


def nothing(number: int) -> None:
    """No chunk is published."""


def records(content: bytes) -> list[Record]:
    found = Content(memoryview(content))
    found.verify(DEFAULT_LIMITS)
    head = found.head
    stamp = Stamp(1, 0, 0, 0, 1, 0, 0, 1, 0, 96 + len(content), head.count, 0, head.content_crc)
    return list(Batch(stamp, found))


def written(chosen: SinkOptions, rows: Any, at_once: int = 1 << 20) -> list[tuple[str, Record]]:
    batches = rows.to_batches(max_chunksize=at_once)
    return [
        (stream, record)
        for chunk in chunks(chosen, batches, nothing)
        for stream, content in contents(chosen, chunk)
        for record in records(content)
    ]


MAPS = st.none() | st.lists(
    st.tuples(st.sampled_from("abc"), st.text(max_size=3)), max_size=3, unique_by=lambda p: p[0]
)
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["s1", "s2"]), st.sampled_from(["a.b", "a.c", "é"]), st.binary(max_size=9),
        MAPS, MAPS, st.none() | st.integers(-(10**15), 2 * 10**15),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@pytest.mark.moderate
@given(ROWS, st.integers(1, 7), st.booleans())
def test_each_row_becomes_a_record_with_all_that_it_has(
    rows: list[Any], at_once: int, sliced: bool
) -> None:
    columns = dict(zip(KINDS, map(list, zip(*rows, strict=True)), strict=True))
    frame = table(**columns)
    if sliced:
        frame, rows = frame.slice(1), rows[1:]
    found = written(options(noStream=""), frame, at_once)
    expected = [
        (
            stream, subject, body, dict(fields or ()), dict(properties or ()),
            None if time_us is None else time_us // 1000,
        )
        for stream, subject, body, fields, properties, time_us in rows
    ]  # fmt: skip
    got = [
        (
            stream, record.subject, record.body, dict(record.fields), dict(record.properties),
            record.client_time_ms,
        )
        for stream, record in found
    ]  # fmt: skip
    # Rows of two streams have no order between them.
    for name in ("s1", "s2"):
        assert [each for each in got if each[0] == name] == [
            each for each in expected if each[0] == name
        ]


@given(
    st.lists(st.integers(0, 40_000), min_size=1, max_size=30),
    st.lists(st.integers(0, 5), max_size=9),
)
def test_the_same_rows_make_the_same_chunks_however_they_arrive(
    sizes: list[int], counts: list[int]
) -> None:
    chosen = options(chunkBytes="64k")
    frame = table(body=[bytes(size) for size in sizes], subject=["a"] * len(sizes))

    def cut() -> Iterator[Any]:
        begin = 0
        for count in (*counts, len(sizes)):
            yield from frame.slice(begin, count).to_batches()
            begin += count

    whole = list(chunks(chosen, frame.to_batches(), nothing))
    parts = list(chunks(chosen, cut(), nothing))

    def facts(chunk: Chunk) -> tuple[Any, ...]:
        return (*chunk._replace(rows=chunk.rows.num_rows), checksum(contents(chosen, chunk)))

    assert list(map(facts, whole)) == list(map(facts, parts))
    assert [chunk.last for chunk in whole] == [False] * (len(whole) - 1) + [True]
    assert all(chunk.size <= 64 << 10 or chunk.rows.num_rows == 1 for chunk in whole)


@pytest.mark.moderate
@given(st.lists(st.integers(1, 9), max_size=5), st.integers(1, 4))
def test_where_chunks_are_published_the_cuts_are_theirs(fixed: list[int], at_once: int) -> None:
    frame = table(body=[b"%d" % number for number in range(50)])
    known = dict(enumerate(fixed))
    found = list(chunks(options(), frame.to_batches(max_chunksize=at_once), known.get))
    left = 50 - sum(fixed)
    assert [chunk.rows.num_rows for chunk in found] == fixed + ([left] if left else [])
    assert [chunk.first for chunk in found] == [sum(fixed[:n]) for n in range(len(found))]


@pytest.mark.moderate
def test_a_chunk_has_a_bound_of_rows_and_of_distinct_fields() -> None:
    many = table(body=[b""] * (ROWS_MAX + 1))
    assert [chunk.rows.num_rows for chunk in chunks(options(), many.to_batches(), nothing)] == [
        ROWS_MAX,
        1,
    ]
    count = 30_000
    wide = table(
        body=[b""] * count, **{f"c{n}": [f"{row}" for row in range(count)] for n in range(12)}
    )
    chosen = options(fieldColumns=",".join(f"c{n}" for n in range(12)))
    assert len(written(chosen, wide)) == count


@given(st.lists(st.integers(0, 5), max_size=9), st.integers(1, 4))
def test_a_chunk_has_a_bound_of_streams_however_its_rows_arrive(
    streams: list[int], at_once: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink_rows, "STREAMS_MAX", 2)
        names = [f"s{number}" for number in streams]
        frame = table(stream=names, body=[b""] * len(names))
        chosen = options(noStream="")
        found = list(chunks(chosen, frame.to_batches(max_chunksize=at_once), nothing))
        whole = list(chunks(chosen, frame.to_batches(), nothing))
    cuts = [[row["stream"] for row in chunk.rows.to_pylist()] for chunk in found]
    assert cuts == [[row["stream"] for row in chunk.rows.to_pylist()] for chunk in whole]
    assert [name for cut in cuts for name in cut] == names
    assert all(len(set(cut)) <= 2 for cut in cuts)
    assert all(len({*cut, after[0]}) == 3 for cut, after in pairwise(cuts))


@pytest.mark.parametrize(
    ("limits", "most"),
    [(Limits(step_parts_max=64), 63), (Limits(batch_bytes_max=128 << 10), 128)],
)
def test_a_chunk_of_many_streams_keeps_what_a_step_of_the_broker_may_have(
    limits: Limits, most: int
) -> None:
    """Each stream is a part of the step, and adds a stamp and a head to its bytes."""
    names = [f"s{number}" for number in range(300)]
    frame = table(stream=names, body=[b""] * len(names))
    found = list(chunks(options(noStream=""), frame.to_batches(), nothing, lambda: limits))
    assert [len(chunk.rows) for chunk in found] == [
        *[most] * (300 // most), 300 % most
    ]  # fmt: skip


def test_an_empty_partition_has_no_chunk() -> None:
    assert list(chunks(options(), table(body=[]).to_batches(), nothing)) == []
    assert list(chunks(options(), [], nothing)) == []


def test_option_stream_is_for_all_rows_whatever_the_column_says() -> None:
    frame = table(stream=["a", None], body=[b"1", b"2"])
    assert [stream for stream, _ in written(options(), frame)] == ["out", "out"]


def test_string_columns_become_fields_where_they_are_not_null() -> None:
    frame = table(body=[b"1", b"2", b"3"], x=["1", None, "1"], y=["2", None, None])
    found = written(options(fieldColumns="x,y"), frame)
    assert [dict(record.fields) for _, record in found] == [{"x": "1", "y": "2"}, {}, {"x": "1"}]


def test_the_order_of_rows_and_their_stream_tell_checksums_apart() -> None:
    def of(**columns: list[Any]) -> int:
        chosen = options(noStream="") if "stream" in columns else options()
        [chunk] = chunks(chosen, table(**columns).to_batches(), nothing)
        return checksum(contents(chosen, chunk))

    assert of(body=[b"1", b"2"]) == of(body=[b"1", b"2"])
    assert of(body=[b"1", b"2"]) != of(body=[b"2", b"1"])
    assert of(body=[b"1"], stream=["a"]) != of(body=[b"1"], stream=["b"])


GOOD: dict[str, list[Any]] = {"subject": ["a"] * 3, "body": [b"x"] * 3}


@pytest.mark.parametrize(
    ("column", "values", "fault"),
    [
        ("subject", ["a", None, None], "is null"),
        ("subject", ["a", "x" * 256, "b"], "has 256 bytes, at most 255"),
        ("body", [b"", None, b""], "is null"),
        ("body", [b"", bytes((8 << 20) + 1), b""], "has 8388609 bytes, at most 8388608"),
        ("stream", ["a", None, "a"], "is null"),
        ("stream", ["a", "a b", "a"], "names no stream"),
        ("fields", [[("a", "b")], [("k", None)], None], "has null under 'k'"),
        ("fields", [None, [("k", "x" * 1025)], None], "1025 bytes, at most 1024"),
        ("fields", [None, [(f"{n}", "") for n in range(65)], None], "has 65 fields, at most 64"),
        ("properties", [None, [("k", "x" * 70_000)], None], "at most 65536"),
        ("c", ["", "x" * 1025, ""], "has 1025 bytes, at most 1024"),
    ],
)
def test_a_row_that_cannot_be_a_record_is_named_by_number_and_column(
    column: str, values: list[Any], fault: str
) -> None:
    more = {"fieldColumns": "c"} if column == "c" else {}
    chosen = options(noStream="", **more) if column == "stream" else options(**more)
    columns: dict[str, list[Any]] = {**GOOD, column: values}
    frame = table(**columns)
    with pytest.raises(UnwritableRows, match=fault) as caught:
        written(chosen, frame)
    assert f"column '{column}' of row 1 of the partition" in str(caught.value)
    with pytest.raises(UnwritableRows, match="of row 4 of the partition"):
        written(chosen, pa.concat_tables([frame.slice(0, 1)] * 3 + [frame]))


def test_a_time_before_1970_is_rounded_down_as_any_other() -> None:
    time = datetime(1969, 12, 31, 23, 59, 59, 999_500, tzinfo=UTC)
    [(_, record)] = written(options(), table(body=[b""], client_time=[time]))
    assert record.client_time_ms == -1


@pytest.mark.moderate
def test_properties_are_measured_as_they_are_stored() -> None:
    many = [(f"k{number:04}", "v") for number in range(3_000)]
    largest = [("k", "x" * 65_530)]
    frame = table(subject=["a", "a"], body=[b"", b""], properties=[many, largest])
    found = [dict(record.properties) for _, record in written(options(), frame)]
    assert found == [dict(many), dict(largest)]
    frame = table(subject=["a", "a"], body=[b"", b""], properties=[many, [("k", "x" * 65_531)]])
    with pytest.raises(UnwritableRows, match=r"of row 1 .* has 65537 bytes, at most 65536"):
        written(options(), frame)
