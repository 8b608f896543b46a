"""Rates at which Spark reads a stream and writes one, beside its rate source and Parquet.

python -m perf.spark [--rows 1000000] [--records 10000000] [--triggers 3] [--sizes 140 1024]
                     [--json]

A broker in a process of its own, local[2], two tasks a trigger, bodies of 140 B and 1 KiB with
1,000 subjects and two fields. All of it runs in one session, so that ratios hold on a busy machine
as well. A trigger's time is all of it: the plan, the write-ahead log, the tasks, the commit. The
first trigger of each query, which starts workers and compiles, is left out.

Read into `noop`: all columns; without the map of fields, over the wire and in place; with a string
column for each of two fields; the same columns from Spark's rate source and from Parquet files of
the same rows. Written: what the rate source makes, exactly once and synced. Batch reads: count(),
beside a Python source that makes as many rows without a column and reads nothing, which is the
least that Spark takes for any; the count() of read(), which hands Spark a row for each range, of
everything, which the broker's plan counts, and of a tenth by pattern, which is read; one record in
1,000 of `--records` by the broker's pattern and by Spark's filter, of a stream of 1,000 subjects
and of one of 20 and a rare one, beside a job without a row. Each batch read is repeated, so that
what counts is a selection that was asked for before.
Tiny triggers: one record each, beside the rate source, and in a union with 8 idle streams.
The ratios that the program is for stand below the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from malamute_protocol.batch import encode_fixed
from malamute_py.client.sync.client import connect_sync
from malamute_py.demo.daemon import Daemon
from perf.curves.brokers import OUT

SIZES = (140, 1024)
SUBJECTS = [f"flights.{number % 10}.{number}" for number in range(1000)]
THOUSANDTH = SUBJECTS[777]
FEW_SUBJECTS = [*SUBJECTS[:20], THOUSANDTH]
"""Subjects of which the last one is rare."""
IDLE = 8
"""Idle streams in a union: each has a process of the driver."""
FIELDS = [{"carrier": f"c{number % 20}", "origin": f"o{number % 50}"} for number in range(100)]
BATCH_BYTES = 1 << 20
TINY_TRIGGERS = 40
ROUNDS = 5
SETTLE_S = 0.3
"""Pause before a batch read is timed: the workers of the one before collect garbage after their
task, which takes two of them 45 ms each."""
LEAN = {"includeFields": "false"}
READS: dict[str, dict[str, str]] = {
    "all columns": {},
    "without fields": LEAN,
    "two field columns": {"fieldColumns": "carrier,origin"},
}


class Figure(NamedTuple):
    """Result of one way to do one thing."""

    what: str
    bytes: int
    rows: int
    """Rows of a trigger or of a batch read."""
    ms: float
    """Time of a trigger or of a batch read: the median."""
    parts_ms: dict[str, float]


class Ratio(NamedTuple):
    """How a figure stands to another one of the same run."""

    what: str
    bytes: int
    value: float


RATIOS = [
    ("1 in 1,000 of 1,000 subjects: Spark's filter / pattern",
     "1 in 1,000 by Spark's filter", "1 in 1,000 by pattern"),
    ("1 in 1,000 of 1,000 subjects: Spark's filter / pattern, in place",
     "1 in 1,000 by Spark's filter", "1 in 1,000 by pattern, in place"),
    ("1 in 1,000 of 21 subjects: Spark's filter / pattern",
     "1 rare of 21 by Spark's filter", "1 rare of 21 by pattern"),
    ("count(): no column / as many rows made", "count(), no column", "count(), rows made"),
    ("count(): rows made / Parquet", "count(), rows made", "count(), Parquet"),
    ("count() of read() / count() of Parquet", "count() of read()", "count(), Parquet"),
    ("tiny trigger / rate source", "tiny trigger", "tiny trigger, rate source"),
    (f"tiny trigger with {IDLE} idle streams / alone",
     f"tiny trigger, {IDLE} idle streams", "tiny trigger"),
]  # fmt: skip


def ratios(figures: list[Figure]) -> list[Ratio]:
    """Return the ratios of times whose two figures were measured."""
    times = {(each.what, each.bytes): each.ms for each in figures}
    return [
        Ratio(what, size, times[one, size] / times[other, size])
        for what, one, other in RATIOS
        for size in dict.fromkeys(each.bytes for each in figures)
        if (one, size) in times and (other, size) in times
    ]


def publish(
    endpoint: str, stream: str, rows: int, size: int, subjects: list[str] = SUBJECTS
) -> None:
    """Fill a stream with records of `size` bytes in batches of about a MiB.

    subjects: SUBJECTS in turn; or FEW_SUBJECTS, of which the last has one record in 1,000.
    """
    most = min(65_536, BATCH_BYTES // size)
    blob = np.random.default_rng(7).integers(0, 256, size * most, np.uint8).tobytes()
    codes = np.arange(most, dtype=np.int32)
    of = codes % len(subjects)
    if subjects is FEW_SUBJECTS:
        of = np.where(codes % 1000 == 777, len(subjects) - 1, codes % (len(subjects) - 1))
    with connect_sync(endpoint) as client, client.publisher(stream, keep=False) as window:
        left = rows
        while left:
            count = min(left, most)
            window.publish_batch(
                encode_fixed(
                    blob[: count * size], size, subject_table=subjects,
                    subject_codes=of[:count].astype(np.int32),
                    # A hundred pairs with each subject would make each header rare.
                    field_table=FIELDS if subjects is SUBJECTS else FIELDS[:1],
                    field_codes=codes[:count] % len(FIELDS) if subjects is SUBJECTS else None,
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


class Runs:
    """Measurements in one session at one broker."""

    def __init__(
        self, spark: Any, endpoint: str, log: Path, rows: int, records: int, triggers: int
    ) -> None:
        """log: the broker's data directory. rows: of 140 B, of a trigger.

        records: of 140 B, of the streams that are searched.
        """
        self._spark = spark
        self._endpoint = endpoint
        self._log = {"logDirectory": str(log)}
        self._rows = rows
        self._records = records
        self._triggers = triggers
        self.figures: list[Figure] = []

    def measure(self, size: int) -> None:
        """Measure everything with bodies of one size."""
        rows = max(1000, self._rows * SIZES[0] // size)
        stream = f"perf-{size}"
        publish(self._endpoint, stream, rows * (self._triggers + 1), size)
        for way, more in READS.items():
            self._triggered(way, size, self._stream(stream, rows, **more))
        in_place = self._stream(stream, rows, **LEAN, **self._log)
        self._triggered("without fields, in place", size, in_place)
        with tempfile.TemporaryDirectory() as files:
            # One file a task of a trigger.
            parts = {"maxRecordsPerPartition": str(-(-rows // 2)), "splitBytes": "1g"}
            self._batch(stream, **LEAN, **parts).write.parquet(files, mode="overwrite")
            lean = self._batch(stream, **LEAN)
            source = self._spark.readStream.schema(lean.schema).option("maxFilesPerTrigger", "2")
            self._triggered("Parquet, without fields", size, source.parquet(files))
            self._counts(stream, size, rows * (self._triggers + 1), files)
        self._triggered("rate source", size, self._rate(rows, size))
        self._rare(size, max(1000, self._records * SIZES[0] // size))
        for way, fields in (("written", False), ("written, a field", True)):
            self._written(way, size, rows, fields)

    def tiny(self) -> None:
        """Measure triggers of one record."""
        publish(self._endpoint, "tiny", TINY_TRIGGERS + 1, SIZES[0])
        self._triggered("tiny trigger", SIZES[0], self._stream("tiny", 1, minPartitions="1"))
        rate = self._rate(1, SIZES[0], partitions=1)
        self._triggered("tiny trigger, rate source", SIZES[0], rate, TINY_TRIGGERS)
        union = self._stream("tiny", 1, minPartitions="1")
        for number in range(IDLE):
            name = f"idle-{number}"
            publish(self._endpoint, name, 1, SIZES[0])
            union = union.union(self._stream(name, 1, minPartitions="1", startingOffsets="latest"))
        self._triggered(f"tiny trigger, {IDLE} idle streams", SIZES[0], union)

    # --- sources -----------------------------------------------------------------------------

    def _stream(self, stream: str, per_trigger: int, **more: str) -> Any:
        given = {
            "endpoint": self._endpoint, "stream": stream, "startingOffsets": "earliest",
            "maxRecordsPerTrigger": str(per_trigger), "maxBytesPerTrigger": "0",
            "minPartitions": "2", "splitBytes": "1g",
        }  # fmt: skip
        return self._spark.readStream.format("malamute").options(**{**given, **more}).load()

    def _batch(self, stream: str, **more: str) -> Any:
        given = {"endpoint": self._endpoint, "stream": stream, **more}
        return self._spark.read.format("malamute").options(**given).load()

    def _rate(self, rows: int, size: int, partitions: int = 2) -> Any:
        """Rows of the rate source with as many columns as ours have without fields."""
        from pyspark.sql import functions as f

        source = self._spark.readStream.format("rate-micro-batch")
        frame = source.option("rowsPerBatch", str(rows)).option("numPartitions", str(partitions))
        number = f.col("value")
        return frame.load().select(
            number.alias("offset"),
            f.col("timestamp").alias("append_time"),
            f.col("timestamp").alias("client_time"),
            f.concat(f.lit("flights."), (number % 10).cast("string")).alias("subject"),
            f.rpad(number.cast("string"), size, "x").cast("binary").alias("body"),
        )

    # --- measurements ------------------------------------------------------------------------

    def _triggered(self, way: str, size: int, frame: Any, triggers: int = 0) -> None:
        """Run a query into noop; triggers: of a source that has no end; 0: as many as we publish.

        A source that ends is read with availableNow, up to its end.
        """
        endless = way.endswith("rate source")
        with tempfile.TemporaryDirectory() as checkpoint:
            sink = frame.writeStream.format("noop").option("checkpointLocation", checkpoint)
            query = (sink if endless else sink.trigger(availableNow=True)).start()
            most = (triggers or self._triggers) + 1 if endless else 1 << 30
            while len(query.recentProgress) < most and not query.awaitTermination(1):
                pass
            query.stop()
        self._note(way, size, query)

    def _written(self, way: str, size: int, rows: int, fields: bool) -> None:
        from pyspark.sql import functions as f

        frame = self._rate(rows, size).select("subject", "body")
        if fields:
            frame = frame.withColumn("fields", f.create_map(f.lit("origin"), f.lit("JFK")))
        with tempfile.TemporaryDirectory() as checkpoint:
            query = (
                frame.writeStream.format("malamute")
                .options(endpoint=self._endpoint, stream=f"sink-{size}-{fields}")
                .option("checkpointLocation", checkpoint)
                .start()
            )
            while len(query.recentProgress) <= self._triggers and not query.awaitTermination(1):
                pass
            query.stop()
        self._note(way, size, query)

    def _note(self, way: str, size: int, query: Any) -> None:
        """Take the medians of a query's triggers but the first."""
        progress = [p for p in query.recentProgress if p.numInputRows][1:]
        parts = {
            name: statistics.median(p.durationMs.get(name, 0) for p in progress)
            for name in ("latestOffset", "queryPlanning", "addBatch", "walCommit", "commitOffsets")
        }
        rows = int(statistics.median(p.numInputRows for p in progress))
        times = [p.durationMs["triggerExecution"] for p in progress]
        self.figures.append(Figure(way, size, rows, statistics.median(times), parts))

    def _rare(self, size: int, rows: int) -> None:
        """One record in 1,000 of two streams: by the broker's pattern and by Spark's filter."""
        ways = {"no row": made(self._spark, 0)}
        for begin, subjects in (("1 in 1,000", SUBJECTS), ("1 rare of 21", FEW_SUBJECTS)):
            stream = f"search-{size}-{len(subjects)}"
            settings = {"ring_bytes": 2 * rows * (size + 60) + (1 << 30)}
            with connect_sync(self._endpoint) as client:
                client.create_stream(stream, settings)
            publish(self._endpoint, stream, rows, size, subjects)
            wanted = {"pattern": THOUSANDTH, **LEAN}
            ways |= {
                f"{begin} by pattern": self._batch(stream, **wanted),
                f"{begin} by pattern, in place": self._batch(stream, **wanted, **self._log),
                f"{begin} by Spark's filter": self._batch(stream, **LEAN).where(
                    f"subject = '{THOUSANDTH}'"
                ),
            }
        self._timed({way: _into_noop(frame) for way, frame in ways.items()}, size, rows)

    def _counts(self, stream: str, size: int, rows: int, files: str) -> None:
        from pyspark_malamute import read

        frames = {
            "count(), all columns": self._batch(stream),
            "count(), one column": self._batch(stream, columns="offset"),
            "count(), no column": self._batch(stream, columns=""),
            "count(), rows made": made(self._spark, rows),
            "count(), Parquet": self._spark.read.parquet(files),
        }
        ways = {way: frame.count for way, frame in frames.items()}
        given = {"endpoint": self._endpoint, "stream": stream}
        ways["count() of read()"] = read(self._spark, **given).count
        given["pattern"] = "flights.7.*"
        ways["count() of read(), a tenth"] = read(self._spark, **given).count
        ways["count() of read(), a tenth, in place"] = read(self._spark, **given, **self._log).count
        self._timed(ways, size, rows)

    def _timed(self, ways: dict[str, Callable[[], Any]], size: int, rows: int) -> None:
        """Take the medians of rounds in which each way has its turn, but for a first one."""
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS + 1):
            for way, work in ways.items():
                time.sleep(SETTLE_S)
                begun = time.perf_counter()
                work()
                times[way].append((time.perf_counter() - begun) * 1000)
        for way, taken in times.items():
            self.figures.append(Figure(way, size, rows, statistics.median(taken[1:]), {}))


def made(spark: Any, rows: int) -> Any:
    """Rows without a column from two tasks of a Python source, which reads nothing."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
    from pyspark.sql.types import StructType

    class Made(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            return [InputPartition(rows // 2), InputPartition(rows - rows // 2)]

        def read(self, partition: InputPartition) -> Any:
            from pyspark_malamute.columns import RowCount

            yield from RowCount().batches_of(partition.value)

    class MadeSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return "made"

        def schema(self) -> StructType:
            return StructType([])

        def reader(self, schema: StructType) -> DataSourceReader:
            return Made()

    spark.dataSource.register(MadeSource)
    return spark.read.format("made").load()


def _into_noop(frame: Any) -> Callable[[], Any]:
    def run() -> None:
        frame.write.format("noop").mode("overwrite").save()

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="records a trigger of 140 B")
    parser.add_argument(
        "--records", type=int, default=10_000_000, help="records of 140 B to be searched"
    )
    parser.add_argument("--triggers", type=int, default=3, help="triggers that count")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of a body")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(dir=OUT) as folder,
        Daemon(Path(folder)) as daemon,
    ):
        spark = session(directory)
        log = Path(folder) / "data"
        runs = Runs(spark, daemon.endpoint, log, options.rows, options.records, options.triggers)
        for size in options.sizes:
            runs.measure(size)
        runs.tiny()
        spark.stop()
    if options.json:
        print(
            json.dumps(
                [
                    *(figure._asdict() for figure in runs.figures),
                    *(ratio._asdict() for ratio in ratios(runs.figures)),
                ]
            )
        )
        return
    table = Table(title="Spark, local[2], 2 tasks (medians)")
    for name in ("body", "way", "rows", "ms", "tasks ms", "rows/s"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for each in runs.figures:
        tasks_ms = each.parts_ms.get("addBatch")
        table.add_row(
            f"{each.bytes:,} B",
            each.what,
            f"{each.rows:,}",
            f"{each.ms:,.0f}",
            "" if tasks_ms is None else f"{tasks_ms:,.0f}",
            f"{each.rows / each.ms * 1000:,.0f}",
        )
    Console().print(table)
    for ratio in ratios(runs.figures):
        Console().print(f"{ratio.bytes:>5,} B  {ratio.value:8.2f}  {ratio.what}")


if __name__ == "__main__":
    main()
