"""Windowed statistics of a stream by subject, published as a stream.

Owns the query and what it publishes. The rules: a window is published once, when the watermark has
passed its end; the results of a batch are kept before they are published, so that a batch that is
run again after a death publishes the same ones, whatever the order in which Spark adds numbers.
Source: ARCHITECTURE.md, The archive and the other pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery

from pyspark_malamute.errors import MalamuteSourceError, OptionError
from pyspark_malamute.foreach_batch import write_batch
from pyspark_malamute.pipelines.archiving import day
from pyspark_malamute.pipelines.folder import Folder
from pyspark_malamute.pipelines.given import of_source
from pyspark_malamute.sink_options import LINK_OPTIONS

OBSERVED: Final = "malamute"
"""Name of the figures in the query's progress that count records without a value or a time."""
_SETTINGS: Final = "malamute.json"
"""File in the checkpoint's directory that has the settings of the first run."""
_DAY_MS: Final = 24 * 3_600_000
_CLOCK: Final = ((3_600_000, 24), (60_000, 60), (1_000, 60), (1, 1_000))
"""Hours, minutes, seconds and milliseconds: (milliseconds of one, how many make the next unit)."""


def aggregate(
    spark: SparkSession,
    into: str,
    checkpoint: str,
    *,
    field: str = "",
    column: str = "",
    window: str = "1 minute",
    slide: str = "",
    watermark: str = "10 seconds",
    time: str = "client_time",
    follow: bool = False,
    every_ms: int = 1_000,
    **options: Any,
) -> StreamingQuery:
    """Publish count, min, max, mean, first and last by subject and window; return the query.

    into: the stream of the results, a JSON object each, under the subject, with the window's end as
    client time. checkpoint: directory of the query's state. field: name of the field with the
    number; column: name of the column of a typed stream; neither: the body is the number, as text.
    window, slide, watermark: durations as Spark writes them; a window is published when the
    watermark, which is that much behind the latest time, has passed its end. time: client_time or
    append_time. follow: go on with what comes. options: of the source.
    Raises OptionError, SourceUnavailable.
    """
    given = _options_of_source(options, field, column)
    settings: dict[str, object] = {
        "into": into, "field": field, "column": column, "window": window,
        "slide": slide or window, "watermark": watermark, "time": time,
    }  # fmt: skip
    folder = Folder(spark, checkpoint)
    _check_same_settings(folder, settings)
    source = dict(given)
    if "startingTimestamp" not in source:
        source.setdefault("startingOffsets", "earliest")
    # Only the columns that the statistics need are made.
    columns = ["offset", "subject", time]
    if column:
        source["columns"] = ",".join([*columns, column])
    elif field:
        source["columns"] = ",".join([*columns, field])
    else:
        source["columns"] = ",".join([*columns, "body"])
    frame = spark.readStream.format("malamute").options(**source).load()
    rows = numbers(frame, field or column, time)
    # Records that are in no result are counted in the query's progress, so that a user sees them.
    counted = rows.observe(
        OBSERVED,
        sf.count(sf.lit(1)).alias("records"),
        sf.count_if(sf.col("value").isNull()).alias("without_value"),
        sf.count_if(sf.col("time").isNull()).alias("without_time"),
    )
    results = statistics(counted.withWatermark("time", watermark), window, slide or window)
    sink = {name: text for name, text in given.items() if name in ("endpoint", *LINK_OPTIONS)}
    publisher = _Publisher(folder, {**sink, "stream": into})
    writer = (
        results.writeStream.outputMode("append")
        .foreachBatch(publisher.publish_batch)
        .queryName(f"aggregate into {into}")
        .option("checkpointLocation", f"{folder.uri}/query")
    )
    if follow:
        return writer.trigger(processingTime=f"{every_ms} milliseconds").start()
    return writer.trigger(availableNow=True).start()


def numbers(frame: DataFrame, name: str, time: str) -> DataFrame:
    """Return columns subject, time, offset and value of each record, for statistics().

    name: of the column with the number; "": the body is it, as text. time: name of the column with
    the time. What is no number becomes null.
    """
    number = sf.col(name) if name else sf.col("body").cast("string")
    return frame.select("subject", sf.col(time).alias("time"), "offset",
                        number.try_cast("double").alias("value"))  # fmt: skip


def statistics(rows: DataFrame, window: str, slide: str) -> DataFrame:
    """The results by subject and window; records without a value or a time are in none.

    rows: as numbers() makes them. window, slide: as of aggregate().
    """
    place = sf.struct("time", "offset")  # of records of one time, the lower offset is the first
    value = sf.col("value")
    return (
        rows.where("value is not null and time is not null")
        .groupBy("subject", sf.window("time", window, slide))
        .agg(
            sf.count(value).alias("count"),
            sf.min(value).alias("min"),
            sf.max(value).alias("max"),
            sf.mean(value).alias("mean"),
            sf.min_by(value, place).alias("first"),
            sf.max_by(value, place).alias("last"),
        )
    )


def records(results: DataFrame) -> DataFrame:
    """Return the results as the sink takes them: subject, window's end as time, JSON as body."""
    fields: list[Column] = [
        _iso("window.start").alias("start"), _iso("window.end").alias("end"),
        *(sf.col(name) for name in ("count", "min", "max", "mean", "first", "last")),
    ]  # fmt: skip
    return results.select(
        "subject",
        sf.col("window.end").alias("client_time"),
        sf.to_json(sf.struct(*fields)).alias("body"),
    )


class _Publisher:
    """Publishes the results of each batch once: what foreachBatch calls."""

    def __init__(self, folder: Folder, sink: Mapping[str, str]) -> None:
        self._folder = folder
        self._sink = sink

    def publish_batch(self, results: DataFrame, batch_id: int) -> None:
        """Keep the results of a batch, and publish what is kept."""
        place = f"results/batch={batch_id}"
        there = {file.path.rpartition("/")[2] for file in self._folder.files(place)}
        if "_SUCCESS" in there:  # which Spark writes last: an earlier run has kept all of them
            # Spark asks for the new state of every partition, whatever is done with the rows.
            results.write.format("noop").mode("overwrite").save()
        else:
            kept = records(results).coalesce(1).write.mode("overwrite")
            kept.parquet(f"{self._folder.uri}/{place}")
        spark = results.sparkSession
        rows = spark.read.schema(records(results).schema).parquet(f"{self._folder.uri}/{place}")
        # One partition in one order: the sink compares what comes again with what it published.
        ordered = rows.coalesce(1).sortWithinPartitions("client_time", "subject")
        write_batch(ordered, batch_id, **self._sink)
        # Spark runs none but the newest batches again: what was kept of older ones goes.
        self._folder.remove(f"results/batch={batch_id - 2}")


def _iso(name: str) -> Column:
    """The time in UTC as ISO 8601 text with milliseconds, whatever the session's time zone is."""
    at = sf.col(name)
    # A timestamp moved to UTC is wrong where the session's wall clock leaves that hour out.
    of_day = sf.pmod(sf.unix_millis(at), sf.lit(_DAY_MS))
    return sf.format_string(
        "%sT%02d:%02d:%02d.%03dZ", day(at).cast("string"),  # hours, minutes, seconds, milliseconds
        *((sf.floor(of_day / unit_ms) % most) for unit_ms, most in _CLOCK),
    )  # fmt: skip


def _options_of_source(options: Mapping[str, Any], field: str, column: str) -> dict[str, str]:
    """The caller's options for the source as text, and those by which it reads the number.

    field, column: as of aggregate(). Raises OptionError.
    """
    given = of_source(options)
    if field and column:
        raise OptionError("field", "and column both name the number; give only one of them")
    for name in ("columns", "fieldColumns", "bodyType"):
        if name in given:
            raise OptionError(name, "follows from field and column; remove it")
    if field:
        given["fieldColumns"] = field
    if column:
        given["bodyType"] = "typed"
    return given


def _check_same_settings(folder: Folder, settings: Mapping[str, object]) -> None:
    """Keep the settings of a first run; raise MalamuteSourceError where a later one has others."""
    try:
        kept = folder.read(_SETTINGS)
    except FileNotFoundError:
        # Of two first runs one creates the file, and both go by it.
        folder.create(_SETTINGS, msgspec.json.encode(settings))
        kept = folder.read(_SETTINGS)
    before = msgspec.json.decode(kept, type=dict[str, object])
    changed = next((name for name in settings if settings[name] != before.get(name)), None)
    if changed is not None:
        raise MalamuteSourceError(
            f"the checkpoint {folder.uri} was begun with {changed} {before.get(changed)!r}, and "
            f"this run has {settings[changed]!r}. Put the old one back, or begin another checkpoint"
        )
