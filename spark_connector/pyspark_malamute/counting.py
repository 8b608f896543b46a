"""How many records a read would bring.

Owns the count as a function. The rules: it equals count() of a read with the same options, while
Spark is handed a row for each range and none for each record, and the tasks read only what the plan
could not count; module scope imports pyspark only, for the package does so too.
"""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql import SparkSession

_COLUMN_OPTIONS: Final = (
    "columns", "fieldColumns", "includeFields", "includeKeys", "includeProperties", "bodyType",
    "pushFilters",
)  # fmt: skip
"""Options that say which columns a read has, or what it does with filters: not how many records."""


def count_records(spark: SparkSession, **options: Any) -> int:
    """The number of records that a read with these options selects.

    options: those of spark.read; what they say of columns does not count. Raises what such a read
    raises before it has rows.
    """
    from pyspark_malamute.pipelines.given import of_source

    # One row for each range instead of the columns that were asked for.
    selecting = {
        name: text for name, text in of_source(options).items() if name not in _COLUMN_OPTIONS
    }
    given = {**selecting, "columns": "records"}
    rows = spark.read.format("malamute").options(**given).load().collect()
    return sum(row["records"] for row in rows)
