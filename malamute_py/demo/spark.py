"""Spark reads the stream: the average delay of each carrier, as a batch and as a stream.

Owns the demonstration's Spark session. Source: spark_connector/README or the package's
own documentation for the options.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from malamute_py.demo.report import Report


def session(workdir: Path) -> Any:
    """Start a local Spark session with what makes Python data sources quick.

    workdir: gets the log of the JVM, and tables.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder
    builder = (
        builder.master("local[2]")
        .appName("malamute-demo")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.sql.warehouse.dir", str(workdir / "warehouse"))
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        # A run of a minute is not worth compiling well: a third less processor time.
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.ui.showConsoleProgress", "false")
    )
    with _output_to(workdir / "spark.log"):
        return builder.getOrCreate()


@contextlib.contextmanager
def _output_to(file: Path) -> Iterator[None]:
    """Have programs that start meanwhile write to a file: the JVM's messages are of no use here."""
    sys.stdout.flush()
    sys.stderr.flush()
    # The descriptors 1 and 2, which programs inherit, are exchanged: sys.stdout is this one's only.
    kept = os.dup(1), os.dup(2)
    with file.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        for number, descriptor in enumerate(kept, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def averages(frame: Any) -> dict[str, float]:
    """Have Spark compute each carrier's average delay from records' bodies and fields."""
    from pyspark.sql import functions as f

    rows = (
        frame.select(
            f.col("fields")["carrier"].alias("carrier"),
            f.get_json_object(f.col("body").cast("string"), "$.dep_delay")
            .cast("double").alias("delay"),
        )
        .where("delay is not null")
        .groupBy("carrier")
        .agg(f.avg("delay").alias("delay"))
        .collect()
    )  # fmt: skip
    return {row["carrier"]: row["delay"] for row in rows}


def compare(
    report: Report, claim: str, expected: dict[str, float], found: dict[str, float]
) -> None:
    """Check averages that Spark found against the table's, carrier by carrier.

    They may differ by what the order of adding changes.
    """
    worst = max(
        (abs(expected[carrier] - found.get(carrier, float("inf"))) for carrier in expected),
        default=float("inf"),
    )
    report.holds(
        claim,
        f"{len(expected)} to 1e-9 min",
        f"{len(found)}, {f'off by {worst:.0e}' if worst else 'no difference'}",
        set(expected) == set(found) and worst < 1e-9,
    )


def run(
    report: Report,
    endpoint: str,
    stream: str,
    expected: dict[str, float],
    count: int,
    workdir: Path,
) -> None:
    """Read the stream by a batch and by a streaming query, and compare each with the table.

    expected: average delay of each carrier by the table. count: records that the stream has.
    """
    report.begin("Spark")
    spark = session(workdir)
    try:
        options = {"endpoint": endpoint, "stream": stream}
        frame = spark.read.format("malamute").options(**options).load()
        compare(report, "average delay per carrier, batch read", expected, averages(frame))
        late = spark.read.format("malamute").options(pattern="fields:delayed", **options).load()
        report.say(f"{late.count():,} late departures, selected by the broker")
        query = (
            spark.readStream.format("malamute")
            .options(startingOffsets="earliest", maxOffsetsPerTrigger="100000", **options)
            .load()
            .writeStream.format("parquet")
            .option("path", str(workdir / "table"))
            .option("checkpointLocation", str(workdir / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        report.say(f"{len(query.recentProgress)} micro-batches of at most 100,000 offsets")
        written = spark.read.parquet(str(workdir / "table"))
        report.equal("records in Parquet by Structured Streaming", count, written.count())
        compare(report, "average delay per carrier, from Parquet", expected,
                averages(written))  # fmt: skip
    finally:
        spark.stop()
