"""How many records a read would bring.

Owns the count as a function. The rules: it equals count() of a read with the same options, while
Spark is handed a row for each range and none for each record, and the tasks read only what the plan
could not count; module scope imports pyspark only, for the package does so too.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession


def count_records(spark: SparkSession, **options: Any) -> int:
    """The number of records that a read with these options selects.

    options: those of spark.read; `columns` is not one of them. Raises what such a read raises.
    """
    from pyspark_malamute.pipelines.given import texts

    given = {**texts(options), "columns": "records"}
    rows = spark.read.format("malamute").options(**given).load().collect()
    return sum(row["records"] for row in rows)
