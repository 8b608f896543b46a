"""Windowed statistics as a stream: equal to those computed by hand, and published once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from malamute_py.client.sync.client import SyncClient
from pyspark_malamute.errors import MalamuteSourceError, OptionError
from pyspark_malamute.pipelines import aggregate, aggregating, archive, read_archive, replay
from pyspark_malamute.pipelines.archive_log import ArchiveError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]


@pytest.fixture
def run(spark: SparkSession, endpoint: str, stream: str, tmp_path: Path) -> Callable[..., Any]:
    """Aggregates what there is now."""

    def go(**options: Any) -> Any:
        given = {"endpoint": endpoint, "stream": stream, "field": "price", **options}
        query = aggregate(spark, f"{stream}-bars", str(tmp_path / "checkpoint"), **given)
        assert query.awaitTermination(180)
        return query

    return go


def publish(client: SyncClient, stream: str, ticks: list[tuple[str, int, str]]) -> None:
    """Ticks: (subject, seconds, price)."""
    for subject, at_s, price in ticks:
        client.publish(
            stream, b"", subject=subject, client_time_ms=at_s * 1000, fields={"price": price}
        )


def bars(client: SyncClient, stream: str) -> list[dict[str, Any]]:
    with client.subscribe(f"{stream}-bars", start="earliest", until="tail") as reading:
        return [
            {"subject": each.subject, "at_s": (each.client_time_ms or 0) // 1000,
             **json.loads(each.body)}
            for each in reading
        ]  # fmt: skip


def test_a_window_has_open_high_low_close_and_is_published_once_though_its_batch_runs_again(
    client: SyncClient, stream: str, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.errors import StreamingQueryException

    publish(client, stream, [
        ("A", 20, "3"), ("A", 10, "2"), ("A", 59, "1.5"), ("B", 30, "7"), ("A", 61, "4"),
        ("A", 62, "none"), ("A", 200, "9"),
    ])  # fmt: skip
    publisher = aggregating._Publisher
    whole = publisher.publish_batch

    def dies(self: Any, results: Any, batch_id: int) -> None:
        whole(self, results, batch_id)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(publisher, "publish_batch", dies)
        # The batch that moves the watermark, and the one that publishes what it closed.
        for _ in range(2):
            with pytest.raises(StreamingQueryException, match="ZeroDivisionError"):
                run()
    query = run()
    assert bars(client, stream) == [
        {"subject": "A", "at_s": 60, "start": "1970-01-01T00:00:00.000Z",
         "end": "1970-01-01T00:01:00.000Z", "count": 3, "min": 1.5, "max": 3.0,
         "mean": 6.5 / 3, "first": 2.0, "last": 1.5},
        {"subject": "B", "at_s": 60, "start": "1970-01-01T00:00:00.000Z",
         "end": "1970-01-01T00:01:00.000Z", "count": 1, "min": 7.0, "max": 7.0, "mean": 7.0,
         "first": 7.0, "last": 7.0},
        {"subject": "A", "at_s": 120, "start": "1970-01-01T00:01:00.000Z",
         "end": "1970-01-01T00:02:00.000Z", "count": 1, "min": 4.0, "max": 4.0, "mean": 4.0,
         "first": 4.0, "last": 4.0},
    ]  # fmt: skip
    assert query.exception() is None
    publish(client, stream, [("B", 100, "1"), ("B", 300, "5")])
    query = run()
    told = query.recentProgress
    assert sum(each.stateOperators[0].numRowsDroppedByWatermark for each in told) == 1
    seen = [each.observedMetrics[aggregating.OBSERVED] for each in told if each.observedMetrics]
    assert (sum(each.records for each in seen), len(bars(client, stream))) == (2, 4)


def test_windows_slide_and_a_record_may_be_as_late_as_the_watermark_says(
    client: SyncClient, stream: str, run: Callable[..., Any]
) -> None:
    given = {"window": "1 minute", "slide": "30 seconds", "watermark": "1 minute"}
    publish(client, stream, [("A", 10, "1"), ("A", 40, "2"), ("A", 150, "9")])
    run(**given)
    assert [(bar["at_s"], bar["count"]) for bar in bars(client, stream)] == [
        (30, 1), (60, 2), (90, 1),
    ]  # fmt: skip
    publish(client, stream, [("A", 100, "3"), ("A", 20, "4"), ("A", 400, "5")])
    run(**given)
    # The record of second 100 is late and counts, that of second 20 is too late.
    assert [(bar["at_s"], bar["last"]) for bar in bars(client, stream)[3:]] == [
        (120, 3), (150, 3), (180, 9), (210, 9),
    ]  # fmt: skip


def test_windows_may_be_over_the_time_of_appending(
    client: SyncClient, stream: str, run: Callable[..., Any]
) -> None:
    for price in ("1", "2"):
        client.publish(stream, b"", subject="A", fields={"price": price})
        time.sleep(0.3)
    run(time="append_time", window="100 milliseconds", watermark="0 seconds")
    assert [bar["last"] for bar in bars(client, stream)] == [1]


def test_a_checkpoint_of_another_window_is_refused(
    client: SyncClient, stream: str, run: Callable[..., Any]
) -> None:
    publish(client, stream, [("A", 20, "3")])
    run()
    with pytest.raises(MalamuteSourceError, match="begun with window '1 minute', and this run has"):
        run(window="5 minutes")
    with pytest.raises(OptionError, match=r"'field'.*only one"):
        run(column="price")


def test_a_typed_streams_column_is_aggregated_and_the_stream_archived_but_not_replayed(
    spark: SparkSession, client: SyncClient, endpoint: str, stream: str, tmp_path: Path,
    run: Callable[..., Any],
) -> None:  # fmt: skip
    columns: Any = [("carrier", pa.string()), ("delay", pa.int32())]
    schema: Any = pa.schema(columns)
    client.create_stream(stream, schema=schema)
    at: Any = pa.timestamp("ms", "UTC")
    wider = schema.append(pa.field("at", at))
    ticks = [{"carrier": "AA", "delay": delay, "at": at_s * 1000}
             for at_s, delay in ((10, 4), (20, 6), (90, 1))]  # fmt: skip
    client.publish_table(stream, pa.Table.from_pylist(ticks, wider), client_time="at")
    run(field="", column="delay")
    assert [(bar["first"], bar["mean"], bar["last"]) for bar in bars(client, stream)] == [(4, 5, 6)]

    path = str(tmp_path / "archive")
    given: dict[str, Any] = {"endpoint": endpoint, "stream": stream, "bodyType": "typed"}
    assert archive(spark, path, date_of="client_time", **given).awaitTermination(180)
    found = read_archive(spark, path).select("offset", "carrier", "delay").collect()
    assert sorted(map(tuple, found)) == [(0, "AA", 4), (1, "AA", 6), (2, "AA", 1)]
    with pytest.raises(ArchiveError, match="an archive of a typed stream"):
        replay(spark, path, "x", name="x", endpoint=endpoint)


def test_a_window_is_told_in_utc_where_the_session_s_clock_is_put_forward(
    spark: SparkSession,
) -> None:
    zone = spark.conf.get("spark.sql.session.timeZone") or "UTC"
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        # In Berlin, the wall clock of 2026-03-29 goes from 02:00 to 03:00.
        results = spark.sql(
            "select 'A' subject, named_struct("
            "'start', timestamp '2026-03-29 02:30:00 UTC', "
            "'end', timestamp_millis(-1)) window, "
            "1 count, 1d min, 1d max, 1d mean, 1d first, 1d last"
        )
        row = aggregating.records(results).first()
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    assert row is not None
    told = json.loads(row.body)
    assert (told["start"], told["end"]) == ("2026-03-29T02:30:00.000Z", "1969-12-31T23:59:59.999Z")


def test_of_two_first_runs_the_later_one_is_held_to_the_settings_of_the_other() -> None:
    class Raced:
        """A folder in which another run creates the file between a look and the creation."""

        uri = "memory:/"
        content = b""

        def read(self, name: str) -> bytes:
            if not self.content:
                raise FileNotFoundError(name)
            return self.content

        def create(self, _: str, __: bytes) -> bool:
            self.content = b'{"window":"1 minute"}'
            return False

    folder: Any = Raced()
    with pytest.raises(MalamuteSourceError, match="was begun with window '1 minute'"):
        aggregating._check_same_settings(folder, {"window": "2 minutes"})
