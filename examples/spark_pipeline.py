"""A Spark pipeline: the mean of each subject a minute, from a stream, by the time of the client.

Run it beside a broker: `python examples/spark_pipeline.py`. Needs malamute-py[spark] and a Java of
17 or later.
"""

from __future__ import annotations

import sys
import tempfile

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, mean, window

import malamute_py as malamute

ENDPOINT = "tcp://127.0.0.1:9797"
STREAM = "readings"
MINUTE_MS = 60_000


def publish(endpoint: str, minutes: int) -> None:
    """Publish readings of two sensors, one each second of so many minutes."""
    seconds = range(minutes * 60)
    with malamute.connect_sync(endpoint) as client:
        for sensor in ("north", "south"):
            client.publish_many(
                STREAM,
                [b"%d" % (second % 60) for second in seconds],
                subject=f"sensor.{sensor}",
                client_time_ms=[second * 1_000 for second in seconds],
            )


def means(spark: SparkSession, endpoint: str) -> dict[tuple[str, int], float]:
    """Return the mean by subject and minute of all that the stream has now."""
    readings = (
        spark.readStream.format("malamute")
        .option("endpoint", endpoint)
        .option("stream", STREAM)
        .option("pattern", "sensor.*")
        .option("startingOffsets", "earliest")
        .load()
        .select("subject", "client_time", col("body").cast("string").cast("int").alias("value"))
    )
    by_minute = (
        readings.withWatermark("client_time", "10 seconds")
        .groupBy("subject", window("client_time", "1 minute"))
        .agg(mean("value").alias("mean"))
    )
    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            by_minute.writeStream.format("memory")
            .queryName("means")
            .outputMode("complete")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    found = spark.sql("select subject, unix_millis(window.start) as start, mean from means")
    return {(row.subject, row.start // MINUTE_MS): row.mean for row in found.collect()}


def main(endpoint: str) -> dict[tuple[str, int], float]:
    """Publish readings, and return their means."""
    publish(endpoint, minutes=5)
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    return means(spark, endpoint)


if __name__ == "__main__":
    found = main(sys.argv[1] if len(sys.argv) > 1 else ENDPOINT)
    for (subject, minute), value in sorted(found.items()):
        print(subject, minute, value)
