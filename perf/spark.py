"""Rates at which Spark reads a stream and writes one: rows a second of whole triggers.

python -m perf.spark [--rows 2000000] [--triggers 5] [--json]

A broker in a process of its own, local[2], two tasks a trigger, bodies of 140 B and 1 KiB with 100
subjects and one field. A trigger's time is all of it: the plan, the write-ahead log, the tasks, the
commit. The first trigger of each query, which starts workers and compiles, is left out. Reading
into `noop`, three ways: all columns; all columns of one record in ten, selected by the broker; and
a filter in Spark for the same tenth. Writing what Spark's rate source makes, exactly once and
synced: subject and body, and these with a field.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from malamute_protocol.batch import encode_fixed
from malamute_py.client.sync.client import connect_sync
from perf.curves.brokers import broker

SIZES = (140, 1024)
SUBJECTS = [f"flights.{number % 10}.{number}" for number in range(100)]
TENTH = "flights.3.*"
BATCH_BYTES = 1 << 20


def publish(endpoint: str, stream: str, rows: int, size: int) -> None:
    """Fill a stream with records of `size` bytes in batches of about a MiB."""
    most = min(65_536, BATCH_BYTES // size)
    blob = np.random.default_rng(7).integers(0, 256, size * most, np.uint8).tobytes()
    codes = np.arange(most, dtype=np.int32) % len(SUBJECTS)
    with connect_sync(endpoint) as client, client.publisher(stream, keep=False) as window:
        left = rows
        while left:
            count = min(left, most)
            window.publish_batch(
                encode_fixed(
                    blob[: count * size], size, subject_table=SUBJECTS,
                    subject_codes=codes[:count], fields={"origin": "JFK"},
                )
            )  # fmt: skip
            left -= count


def session(directory: str) -> Any:
    """Make a session with the settings that the recorded measurements had."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder: Any = SparkSession.builder
    spark = (
        builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.sql.warehouse.dir", directory)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def measure(
    spark: Any, endpoint: str, stream: str, per_trigger: int, pattern: str, where: str
) -> dict[str, Any]:
    """Run a query over the stream; returns figures of its triggers but the first."""
    frame = (
        spark.readStream.format("malamute")
        .options(endpoint=endpoint, stream=stream, startingOffsets="earliest", pattern=pattern)
        .options(maxRecordsPerTrigger=str(per_trigger), maxBytesPerTrigger="0")
        .options(minPartitions="2", splitBytes="1g")
        .load()
    )
    if where:
        frame = frame.where(where)
    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            frame.writeStream.format("noop")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    return figures(query)


def measure_sink(
    spark: Any, endpoint: str, stream: str, per_trigger: int, size: int, triggers: int, fields: bool
) -> dict[str, Any]:
    """Run a query that writes records of `size` bytes; returns figures of its triggers but one."""
    from pyspark.sql import functions as f

    rows = spark.readStream.format("rate-micro-batch").option("numPartitions", "2")
    frame = rows.option("rowsPerBatch", str(per_trigger)).load()
    number = f.col("value")
    columns = [
        f.concat(f.lit("flights."), (number % 10).cast("string")).alias("subject"),
        f.rpad(number.cast("string"), size, "x").alias("body"),
    ]
    if fields:
        columns.append(f.create_map(f.lit("origin"), f.lit("JFK")).alias("fields"))
    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            frame.select(*columns)
            .writeStream.format("malamute")
            .options(endpoint=endpoint, stream=stream, checkpointLocation=checkpoint)
            .start()
        )
        while len(query.recentProgress) <= triggers and not query.awaitTermination(0.1):
            pass
        query.stop()
    return figures(query)


def figures(query: Any) -> dict[str, Any]:
    """Medians of a query's triggers but the first."""
    progress = [p for p in query.recentProgress if p.numInputRows][1:]
    parts = {
        name: statistics.median(p.durationMs.get(name, 0) for p in progress)
        for name in ("latestOffset", "queryPlanning", "addBatch", "walCommit", "commitOffsets")
    }
    return {
        "triggers": len(progress),
        "rows": int(statistics.median(p.numInputRows for p in progress)),
        "trigger_ms": statistics.median(p.durationMs["triggerExecution"] for p in progress),
        "rows_per_s": statistics.median(
            p.numInputRows / p.durationMs["triggerExecution"] * 1000 for p in progress
        ),
        "parts_ms": parts,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000, help="records a trigger of 140 B")
    parser.add_argument("--triggers", type=int, default=5, help="triggers that count")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory, broker() as watched:
        spark = session(str(Path(directory)))
        for size in SIZES:
            per_trigger = max(1000, options.rows * SIZES[0] // size)
            stream = f"perf-{size}"
            publish(watched.endpoint, stream, per_trigger * (options.triggers + 1), size)
            for way, pattern, where in (
                ("all", "#", ""),
                ("tenth, broker", TENTH, ""),
                ("tenth, Spark", "#", "subject like 'flights.3.%'"),
            ):
                found = measure(spark, watched.endpoint, stream, per_trigger, pattern, where)
                results.append({"bytes": size, "way": way, **found})
            for way, fields in (("written", False), ("written, a field", True)):
                found = measure_sink(
                    spark, watched.endpoint, f"sink-{size}-{fields}", per_trigger, size,
                    options.triggers, fields,
                )  # fmt: skip
                results.append({"bytes": size, "way": way, **found})
        spark.stop()
    if options.json:
        print(json.dumps(results))
        return
    table = Table(title="Spark, whole triggers, local[2], 2 tasks (medians)")
    for name in ("body", "way", "rows", "trigger ms", "tasks ms", "rows/s", "MB/s"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for row in results:
        table.add_row(
            f"{row['bytes']:,} B",
            row["way"],
            f"{row['rows']:,}",
            f"{row['trigger_ms']:,.0f}",
            f"{row['parts_ms']['addBatch']:,.0f}",
            f"{row['rows_per_s']:,.0f}",
            f"{row['rows_per_s'] * row['bytes'] / 1e6:,.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
