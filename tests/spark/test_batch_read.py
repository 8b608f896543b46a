"""spark.read: what is read is what was published, selected by the broker."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest

from malamute_py.client.sync.client import SyncClient
from pyspark_malamute import count_records
from pyspark_malamute import read as read_stream
from pyspark_malamute.errors import OptionError
from pyspark_malamute.pipelines.given import texts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]

CARRIERS = ("AA", "B6", "DL", "UA")
ORIGINS = ("JFK", "LGA", "EWR")
BEGIN_MS = 1_357_016_400_000


class Departures:
    """A small table of departures, as it is published and as it should be read."""

    def __init__(self, count: int) -> None:
        rows = range(count)
        self.carriers = [CARRIERS[row % 4] for row in rows]
        self.origins = [ORIGINS[row % 3] for row in rows]
        self.delays = [(row * 37) % 101 - 20 for row in rows]
        self.times_ms = [BEGIN_MS + row * 60_000 for row in rows]
        self.subjects = [
            f"flights.{origin}.{carrier}"
            for origin, carrier in zip(self.origins, self.carriers, strict=True)
        ]
        self.fields = [
            {"carrier": carrier, **({"late": ""} if delay >= 15 else {})}
            for carrier, delay in zip(self.carriers, self.delays, strict=True)
        ]
        self.bodies = [json.dumps({"row": r, "delay": self.delays[r]}).encode() for r in rows]

    def publish(self, client: SyncClient, stream: str) -> None:
        client.publish_many(
            stream, self.bodies, subjects=self.subjects, fields=self.fields,
            client_time_ms=self.times_ms,
        )  # fmt: skip


@pytest.fixture
def departures(client: SyncClient, stream: str) -> Departures:
    table = Departures(3000)
    table.publish(client, stream)
    return table


def offsets(frame: DataFrame) -> list[int]:
    return sorted(row.offset for row in frame.select("offset").collect())


def test_every_column_says_what_was_published(
    read: Callable[..., DataFrame], departures: Departures
) -> None:
    rows = read(includeKeys="true").orderBy("offset").collect()
    assert [row.offset for row in rows] == list(range(3000))
    assert [row.subject for row in rows] == departures.subjects
    assert [row["keys"] for row in rows] == [[subject] for subject in departures.subjects]
    assert [row.fields for row in rows] == departures.fields
    assert [bytes(row.body) for row in rows] == departures.bodies
    assert [
        round(row.client_time.replace(tzinfo=UTC).timestamp() * 1000) for row in rows
    ] == departures.times_ms
    ages = [datetime.now(UTC) - row.append_time.replace(tzinfo=UTC) for row in rows]
    assert all(0 <= age.total_seconds() < 600 for age in ages)


def test_a_count_needs_no_column_and_is_the_same(
    read: Callable[..., DataFrame], client: SyncClient, stream: str, departures: Departures
) -> None:
    for more in ({}, {"pattern": "flights.JFK.*"}, {"pattern": "nothing.#"}):
        lean = read(columns="", **more)
        assert not lean.columns
        assert lean.count() == read(**more).count()
    client.purge(stream, "flights.JFK.*")
    assert read(columns="").count() == read().count() < 3000


def test_a_count_by_ranges_is_the_same(
    read: Callable[..., DataFrame], client: SyncClient, stream: str, departures: Departures,
    spark: SparkSession, endpoint: str,
) -> None:  # fmt: skip
    def counted(**more: object) -> int:
        return count_records(spark, endpoint=endpoint, **{"stream": stream, **more})

    cases: list[dict[str, object]] = [
        {},
        {"pattern": "flights.JFK.*"},
        {"pattern": "nothing.#"},
        {"maxRecordsPerPartition": 1000},
        # Options of columns count for nothing.
        {"includeKeys": True, "includeHeaders": False, "fieldColumns": "carrier"},
        {"columns": "subject", "clientTimeTo": BEGIN_MS + 60_000},
    ]
    for more in cases:
        assert counted(**more) == read(**texts(more)).count()
        frame = read_stream(spark, endpoint=endpoint, **{"stream": stream, **more})
        assert frame.count() == counted(**more) == frame.select("*").count()
    rows = read(columns="stream,records", maxRecordsPerPartition="1000").collect()
    assert [row.asDict() for row in rows] == [{"stream": stream, "records": 1000}] * 3
    client.purge(stream, "flights.JFK.*")
    assert counted() == read().count() < 3000


def test_a_frame_of_a_stream_counts_by_the_plan(
    spark: SparkSession, endpoint: str, client: SyncClient, stream: str, departures: Departures
) -> None:
    frame = read_stream(spark, endpoint=endpoint, stream=stream, includeKeys=True)
    assert "keys" in frame.columns
    tracker = spark.sparkContext.statusTracker()
    spark.sparkContext.setJobGroup("counted", "by the plan")
    try:
        assert frame.count() == 3000
        jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup("counted")]
    finally:
        spark.sparkContext.setJobGroup("", "")
    # One stage, without a shuffle: the ranges are collected, and nothing walks rows to count them.
    assert [len(job.stageIds) for job in jobs if job] == [1]
    assert frame.where("offset < 10").count() == 10
    # The rows and the count are of the same records, whatever the stream has got since.
    departures.publish(client, stream)
    assert frame.count() == len(frame.collect()) == 3000
    frame = read_stream(spark, endpoint=endpoint, stream=stream)
    assert frame.count() == 6000
    client.purge(stream, "flights.JFK.*")
    assert frame.count() < 6000
    count = frame.cache().count()
    try:
        client.trim(stream, 3000)
        assert frame.count() == count == len(frame.collect())
    finally:
        frame.unpersist(blocking=True)
    assert frame.count() < count
    ranges = read_stream(spark, endpoint=endpoint, stream=stream, columns="stream,records")
    assert ranges.count() == len(ranges.collect()) < 3000
    with pytest.raises(OptionError, match="patern"):
        read_stream(spark, endpoint=endpoint, stream=stream, patern="flights.#")


@pytest.mark.parametrize("by", ["streams", "streamsPattern", "subscribePattern"])
def test_a_frame_of_many_streams_has_those_of_the_moment(
    spark: SparkSession, endpoint: str, client: SyncClient, stream: str, by: str
) -> None:
    first, second, later = (f"{stream}-{name}" for name in ("first", "second", "later"))
    for name in (first, second):
        client.publish_many(name, [b"row"] * 10)
    chosen = f"{first},{second}" if by == "streams" else f"{stream}-.*"
    frame = read_stream(spark, endpoint=endpoint, **{by: chosen})
    none = read_stream(spark, endpoint=endpoint, streamsPattern=f"{stream}-none")
    for name in (second, later):
        client.publish_many(name, [b"row"] * 5)
    assert frame.count() == len(frame.collect()) == 20
    client.publish(f"{stream}-none", b"row")
    assert none.count() == len(none.collect()) == 0
    one = read_stream(
        spark, endpoint=endpoint, streams=f"{first},{second}",
        endingOffsets=json.dumps({first: 3, second: "latest"}),
    )  # fmt: skip
    assert one.count() == len(one.collect()) == 18
    # What the options mean is what counts, and not how they are written.
    spaced = read_stream(spark, endpoint=endpoint, stream=f" {first} ")
    assert spaced.count() == len(spaced.collect()) == 10
    client.publish_many(first, [b"row"] * 5)
    client.trim(first, 12)
    assert spaced.count() == len(spaced.collect()) == 0, "the records went, and no others came"


def test_the_broker_selects_by_every_kind_of_pattern(
    read: Callable[..., DataFrame], departures: Departures
) -> None:
    expected: dict[str, Callable[[int], bool]] = {
        "flights.JFK.*": lambda row: departures.origins[row] == "JFK",
        "prefix:flights.L": lambda row: departures.origins[row] == "LGA",
        "regex:(AA|DL)$": lambda row: departures.carriers[row] in ("AA", "DL"),
        "fields:late,carrier=UA": lambda row: (
            departures.delays[row] >= 15 and departures.carriers[row] == "UA"
        ),
        '["or", ["topic", "flights.EWR.B6"], ["fields", "all", [["late"]]]]': lambda row: (
            departures.subjects[row] == "flights.EWR.B6" or departures.delays[row] >= 15
        ),
        "nothing.#": lambda row: False,
    }
    for pattern, selected in expected.items():
        assert offsets(read(pattern=pattern)) == [row for row in range(3000) if selected(row)]


def test_offsets_and_times_bound_a_read(
    read: Callable[..., DataFrame], client: SyncClient, stream: str, departures: Departures
) -> None:
    assert offsets(read(startingOffsets="1000", endingOffsets="1010")) == list(range(1000, 1010))
    window = {
        "clientTimeFrom": str(BEGIN_MS + 5 * 60_000),
        "clientTimeTo": "2013-01-01T05:09:00Z",
    }
    assert offsets(read(**window)) == [5, 6, 7, 8]
    young = client.publish(stream, b"young")
    asked = str(young.append_time_ms)
    assert 3000 in offsets(read(startingTimestamp=asked))
    assert 3000 not in offsets(read(endingTimestamp=asked))
    assert offsets(read(endingTimestamp=str(young.append_time_ms + 1)))[-1] == 3000
    assert offsets(read(startingOffsets="latest")) == []


def test_an_average_equals_the_one_computed_without_spark(
    read: Callable[..., DataFrame], departures: Departures
) -> None:
    from pyspark.sql import functions as f

    averages = (
        read()
        .select(
            f.col("fields")["carrier"].alias("carrier"),
            f.get_json_object(f.col("body").cast("string"), "$.delay").cast("int").alias("delay"),
        )
        .groupBy("carrier")
        .agg(f.avg("delay").alias("average"))
        .collect()
    )
    expected = {
        carrier: fmean(
            delay
            for delay, its in zip(departures.delays, departures.carriers, strict=True)
            if its == carrier
        )
        for carrier in CARRIERS
    }
    assert {row.carrier: row.average for row in averages} == pytest.approx(expected)


def test_a_large_read_is_cut_into_tasks_that_overlap_nowhere(
    read: Callable[..., DataFrame], client: SyncClient, stream: str
) -> None:
    body = b"x" * 1000
    # A task has whole batches: small ones, so that the cuts can lie near to what is asked for.
    for _ in range(32):
        client.publish_many(stream, [body] * 250, subject="bulk")
    frame = read(minPartitions="4")
    assert frame.rdd.getNumPartitions() >= 3
    assert offsets(frame) == list(range(8000))
    assert read(splitBytes="1m").rdd.getNumPartitions() >= 6


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"patern": "a"}, "did you mean 'pattern'?"),
        ({"pattern": '["glob", "a*"]'}, "no pattern kind 'glob'"),
        ({"pattern": "regex:("}, "Correct option 'pattern'"),
        ({"stream": "no-such-stream"}, "there is no stream 'no-such-stream'"),
        ({"startingOffsets": "999999"}, "is beyond the stream's end"),
        ({"maxRecordsPerTrigger": "5"}, "for spark.readStream only"),
        (
            {"endpoint": "tcp://127.0.0.1:9", "connectTimeoutMs": "300"},
            "correct option 'endpoint'",
        ),
    ],
)
def test_what_cannot_work_is_told_in_our_words(
    read: Callable[..., DataFrame],
    client: SyncClient,
    stream: str,
    more: dict[str, Any],
    words: str,
) -> None:
    from pyspark.errors import PySparkException

    client.publish(stream, b"x", subject="a")
    with pytest.raises(PySparkException) as caught:
        read(**more).collect()
    assert words in str(caught.value)


def test_a_schema_of_the_users_own_is_refused(
    spark: SparkSession, endpoint: str, client: SyncClient, stream: str
) -> None:
    from pyspark.errors import PySparkException

    client.publish(stream, b"x", subject="a")
    frame = spark.read.format("malamute").schema("body string")
    with pytest.raises(PySparkException, match="the schema is fixed"):
        frame.options(endpoint=endpoint, stream=stream).load().collect()


def test_a_view_works_in_sql_and_a_table_says_that_it_would(
    spark: SparkSession, endpoint: str, client: SyncClient, stream: str
) -> None:
    from pyspark.errors import PySparkException

    client.publish_many(stream, [b"x"] * 5, subject="a")
    using = f"USING malamute OPTIONS (endpoint '{endpoint}', stream '{stream}')"
    spark.sql(f"CREATE TEMPORARY VIEW five {using}")
    assert spark.sql("SELECT count(*) AS n FROM five").collect()[0].n == 5
    with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE five_again {using}")
    spark.sql("CREATE TABLE declared (offset BIGINT) USING malamute OPTIONS (stream 's')")
    with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW"):
        spark.sql("SELECT * FROM declared").collect()


def test_filters_that_the_broker_applies_give_the_same_answer(
    spark: SparkSession, read: Callable[..., DataFrame], departures: Departures
) -> None:
    from pyspark.sql import functions as f

    def selected(frame: DataFrame) -> list[int]:
        named = frame.where(f.col("subject").startswith("flights.JFK"))
        return offsets(named.where((f.col("carrier") == "UA") & (f.col("offset") >= 1500)))

    expected = [
        row
        for row in range(1500, 3000)
        if departures.origins[row] == "JFK" and departures.carriers[row] == "UA"
    ]
    assert selected(read(fieldColumns="carrier")) == expected
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        assert selected(read(fieldColumns="carrier", pushFilters="true")) == expected
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_pandas_on_spark_reads_the_source(
    read: Callable[..., DataFrame], departures: Departures
) -> None:
    frame = read(pattern="flights.JFK.*").select("offset", "subject").pandas_api()
    assert frame["offset"].sum() == sum(range(0, 3000, 3))
