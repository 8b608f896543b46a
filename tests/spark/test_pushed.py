"""Filters that the broker applies: the same answer from fewer records."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from malamute_protocol.pattern import PREFIX_BYTES_MAX, TOPIC_BYTES_MAX
from malamute_py.client.sync.client import SyncClient
from pyspark_malamute.batch_reader import MalamuteReader
from pyspark_malamute.options import parse_options
from pyspark_malamute.pushed import FilteredReader, narrowed
from pyspark_malamute.source import DefaultSource

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
SUBJECTS = ["a.b", "a.c", "b.*", "a", ""]
CARRIERS = [None, "UA", "AA", ""]
ROWS = 200

Row = dict[str, Any]


@pytest.fixture(scope="module")
def published(client: SyncClient) -> None:
    """Two streams."""
    for name in ("pushed.a", "pushed.b"):
        for first in range(0, ROWS, 20):
            numbers = range(first, first + 20)
            confirmed = client.publish_many(
                name, [b"%d" % number for number in numbers],
                subjects=[SUBJECTS[number % len(SUBJECTS)] for number in numbers],
                fields=[
                    None if carrier is None else {"carrier": carrier}
                    for carrier in (CARRIERS[number % len(CARRIERS)] for number in numbers)
                ],
                client_time_ms=[
                    None if number % 7 == 0 else _milliseconds(BEGIN) + number for number in numbers
                ],
            )  # fmt: skip
            # So that batches differ in their time.
            while _milliseconds(datetime.now(UTC)) <= confirmed[-1].append_time_ms:
                pass


def _milliseconds(time: datetime) -> int:
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


@pytest.fixture
def read(endpoint: str, published: None) -> Callable[..., list[Row]]:
    """The records that a read with these filters fetches."""

    def found(*filters: Filter) -> list[Row]:
        options = parse_options(
            {
                "endpoint": endpoint, "streams": "pushed.a,pushed.b", "fieldColumns": "carrier",
                "pushFilters": "true",
            }
        )  # fmt: skip
        reader = FilteredReader(options)
        assert list(reader.pushFilters(list(filters))) == list(filters)
        return [
            row
            for task in reader.partitions()
            for piece in reader.read(task)
            for row in piece.to_pylist()
        ]

    return found


def passes(row: Row, each: Filter) -> bool:
    """Whether Spark would keep a row."""
    if isinstance(each, Not):
        value = row[each.child.attribute[0]]  # type: ignore[attr-defined]
        return value is not None and not passes(row, each.child)
    value = row[each.attribute[0]]  # type: ignore[attr-defined]
    match each:
        case IsNull():
            return value is None
        case IsNotNull():
            return value is not None
        case EqualNullSafe(value=wanted):
            return bool(value == wanted)
    if value is None:
        return False
    match each:
        case EqualTo(value=wanted):
            return bool(value == wanted)
        case GreaterThan(value=wanted):
            return bool(value > wanted)
        case GreaterThanOrEqual(value=wanted):
            return bool(value >= wanted)
        case LessThan(value=wanted):
            return bool(value < wanted)
        case LessThanOrEqual(value=wanted):
            return bool(value <= wanted)
        case In(value=wanted):
            return value in wanted
        case StringStartsWith(value=wanted):
            return bool(value.startswith(wanted))
        case StringEndsWith(value=wanted):
            return bool(value.endswith(wanted))
        case StringContains(value=wanted):
            return wanted in value
    raise AssertionError(each)


MIDDLE = BEGIN + timedelta(milliseconds=100)
COMPARISONS: tuple[Callable[..., Filter], ...] = (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    LessThan,
    LessThanOrEqual,
)
FILTERS: list[list[Filter]] = [
    *([kind(("offset",), 50)] for kind in COMPARISONS),
    *([kind(("client_time",), MIDDLE)] for kind in COMPARISONS),
    *([kind(("client_time",), MIDDLE + timedelta(microseconds=300))] for kind in COMPARISONS),
    [In(("offset",), (5, 90, 91))],
    [EqualNullSafe(("offset",), 7)],
    [EqualTo(("subject",), "a.b")],
    [EqualTo(("subject",), "b.*")],
    [EqualTo(("subject",), "")],
    [In(("subject",), ("a.b", "a", "nothing"))],
    [StringStartsWith(("subject",), "a.")],
    [StringEndsWith(("subject",), ".b")],
    [StringContains(("subject",), ".")],
    [Not(EqualTo(("subject",), "a.b"))],
    [EqualTo(("stream",), "pushed.b")],
    [In(("stream",), ("pushed.a", "elsewhere")), EqualTo(("stream",), "pushed.b")],
    [EqualTo(("carrier",), "UA")],
    [EqualTo(("carrier",), "")],
    [In(("carrier",), ("UA", "AA"))],
    [IsNotNull(("carrier",))],
    [IsNull(("carrier",))],
    [IsNull(("client_time",))],
    [EqualNullSafe(("carrier",), None)],
    [GreaterThan(("offset",), 20), LessThan(("offset",), 90), EqualTo(("subject",), "a.c")],
    [LessThan(("offset",), 0)],
    [GreaterThan(("client_time",), MIDDLE), LessThan(("client_time",), BEGIN)],
    [GreaterThan(("offset",), 10**9)],
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_leave_out_nothing_that_passes_them(
    read: Callable[..., list[Row]], filters: list[Filter]
) -> None:
    whole = read()
    assert len(whole) == 2 * ROWS
    wanted = [row for row in whole if all(passes(row, each) for each in filters)]
    assert [row for row in read(*filters) if all(passes(row, each) for each in filters)] == wanted


@pytest.mark.moderate
@pytest.mark.parametrize("kind", COMPARISONS)
def test_filters_on_the_time_of_appending_bound_the_range(
    read: Callable[..., list[Row]], kind: Callable[..., Filter]
) -> None:
    whole = read()
    middle = whole[100]["append_time"]
    for time in (middle, middle + timedelta(microseconds=1)):
        each = kind(("append_time",), time)
        wanted = [row for row in whole if passes(row, each)]
        fetched = read(each)
        assert [row for row in fetched if passes(row, each)] == wanted
        assert len(fetched) < len(whole)


@pytest.mark.parametrize(
    ("each", "most"),
    [
        (EqualTo(("offset",), 50), 2),
        (GreaterThan(("offset",), 149), 102),
        (LessThan(("client_time",), BEGIN + timedelta(milliseconds=10)), 22),
        (EqualTo(("subject",), "a.b"), 80),
        (StringStartsWith(("subject",), "a."), 160),
        (EqualTo(("stream",), "pushed.b"), 200),
        (In(("carrier",), ("UA",)), 100),
        (IsNotNull(("carrier",)), 300),
    ],
    ids=str,
)
def test_the_broker_sends_no_more_than_a_filter_leaves(
    read: Callable[..., list[Row]], each: Filter, most: int
) -> None:
    assert 0 < len(read(each)) <= most


def test_only_the_option_gives_a_reader_that_takes_filters() -> None:
    """Spark refuses every read of such a reader while its own setting is off."""
    least = {"endpoint": "tcp://a:1", "stream": "s"}
    source = DefaultSource(least)
    assert type(source.reader(source.schema())) is MalamuteReader
    source = DefaultSource({**least, "pushFilters": "true"})
    assert type(source.reader(source.schema())) is FilteredReader


def test_a_filter_that_no_pattern_can_say_is_left_to_spark() -> None:
    options = parse_options({"endpoint": "tcp://a:1", "stream": "s", "pattern": "a.#"})
    long = StringStartsWith(("subject",), "x" * (PREFIX_BYTES_MAX + 1))
    assert narrowed(options, [long]) == options
    assert narrowed(options, [EqualTo(("subject",), "y" * (TOPIC_BYTES_MAX + 1))]) == options
    values = In(("subject",), tuple(f"s{n}" for n in range(60)))
    assert narrowed(options, [values] * 5) == options, "each is a pattern, and they are too many"
