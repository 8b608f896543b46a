"""DataFrames of streams that know how many records they have, and the count by itself.

Owns the count as a function, and the DataFrame that asks it. The rules: it equals the number of
rows of a read with the same options, while Spark is handed a row for each range and none for each
record, and the tasks read only what the plan could not count; module scope imports pyspark only,
for the package does so too. Source: ARCHITECTURE.md, "The Spark source beside the broker".
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

_COLUMN_OPTIONS: Final = (
    "columns", "fieldColumns", "includeFields", "includeKeys", "includeProperties", "bodyType",
    "pushFilters",
)  # fmt: skip
"""Options that say which columns a read has, or what it does with filters: not how many records."""


def read(spark: SparkSession, **options: Any) -> DataFrame:
    """Return the DataFrame of spark.read with these options, whose own count() is fast.

    Spark asks no Python source for a number, and its count() walks a row for each record. That of
    this DataFrame is count_records() of the same options instead; DataFrames that are derived from
    it, by select() or where(), are Spark's and count as Spark does. options: those of spark.read;
    a value may be a number or a boolean. Raises OptionError: an option is not known, or its value
    is wrong; and what load() raises.
    """
    from pyspark_malamute.pipelines.given import of_source

    frame = spark.read.format("malamute").options(**of_source(options)).load()
    # On the object, so that DataFrames of Spark Connect have it as those of the classic session.
    if "records" not in frame.columns:  # a row of those is a range, not a record
        frame.count = partial(count_records, spark, **options)  # type: ignore[method-assign]
    return frame


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
