"""DataFrames of streams that know how many records they have, and the count by itself.

Owns the count as a function, and the DataFrame that asks it. The rules: it equals the number of
rows of a read with the same options, while Spark is handed a row for each range and none for each
record, and the tasks read only what the plan could not count; module scope imports pyspark only,
for the package does so too. Source: ARCHITECTURE.md, "The Spark source beside the broker".
"""

from __future__ import annotations

import json
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

_COLUMN_OPTIONS: Final = (
    "columns", "fieldColumns", "includeFields", "includeKeys", "includeProperties", "bodyType",
    "pushFilters",
)  # fmt: skip
"""Options that say which columns a read has, or what it does with filters: not how many records."""


def read(spark: SparkSession, **options: Any) -> DataFrame:
    """Return the DataFrame of what streams have now, whose own count() is fast.

    Spark asks no Python source for a number, and its count() walks a row for each record. That of
    this DataFrame is count_records() of the same options instead, unless it is cached: then Spark
    counts, and fills the cache. DataFrames that are derived from it, by select() or where(), are
    Spark's and count as Spark does. Which streams there are and where each ends is settled in this
    call, so that rows and counts are of the same records. options: those of spark.read; a value
    may be a number or a boolean. Raises OptionError: an option is not known, or its value is
    wrong; MalamuteSourceError: the broker cannot be asked.
    """
    from pyspark_malamute.batch_reader import ends
    from pyspark_malamute.options import parse_options
    from pyspark_malamute.pipelines.given import of_source

    given = of_source(options)
    chosen = parse_options(given)
    found = ends(chosen)
    for option in ("streamsPattern", "streams", "endingTimestamp", "endingOffsets"):
        given.pop(option, None)
    if chosen.stream:
        given["endingOffsets"] = str(found[chosen.stream])
    elif found:
        given |= {"streams": ",".join(found), "endingOffsets": json.dumps(found)}
    else:
        given["streamsPattern"] = "(?!)"  # that of the caller finds no stream now, and this none
    frame = spark.read.format("malamute").options(**given).load()
    if "records" in frame.columns:
        return frame  # a row of this one is a range, not a record
    rows = frame.count

    def count() -> int:
        """Return the number of rows, from the broker's plan unless Spark keeps the rows."""
        level = frame.storageLevel
        kept = level.useMemory or level.useDisk
        return rows() if kept else count_records(spark, **given)

    # On the object, so that DataFrames of Spark Connect have it as those of the classic session.
    frame.count = count  # type: ignore[method-assign]
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
