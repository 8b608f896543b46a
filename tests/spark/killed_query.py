"""A program that is killed: a query into parquet, slow enough to be met amid a batch.

Usage: python -m tests.spark.killed_query ENDPOINT STREAM DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.spark.conftest import start_spark


def main(endpoint: str, stream: str, directory: Path) -> None:
    """Run until killed."""
    spark = start_spark(directory / "warehouse")
    frame = (
        spark.readStream.format("malamute")
        .options(endpoint=endpoint, stream=stream, startingOffsets="earliest")
        .options(maxRecordsPerTrigger="10000", minPartitions="2")
        .load()
    )
    query = (
        frame.select("offset", "subject", "body")
        .writeStream.format("parquet")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .start(str(directory / "out"))
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
