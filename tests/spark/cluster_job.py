"""A job that is submitted to a cluster: a query from a stream into another.

It imports nothing of these tests, for the cluster has the connector's zip only.
Usage: spark-submit --py-files malamute.zip cluster_job.py ENDPOINT STREAM DIRECTORY
"""

from __future__ import annotations

import sys
from typing import Any

from pyspark.sql import SparkSession


def main(endpoint: str, stream: str, directory: str) -> None:
    """Run until killed."""
    builder: Any = SparkSession.builder
    spark = builder.getOrCreate()
    given = {"endpoint": endpoint, "brokerOutageMs": "120000"}
    query = (
        spark.readStream.format("malamute")
        .options(**given, stream=stream, startingOffsets="earliest")
        .options(maxRecordsPerTrigger="5000", splitBytes="1m", minPartitions="2")
        .load()
        .select("subject", "body")
        .writeStream.format("malamute")
        .options(**given, stream=f"{stream}-copy", chunkBytes="128k")
        .option("checkpointLocation", f"{directory}/checkpoint")
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
