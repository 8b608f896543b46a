"""spark.read: one bounded read.

Owns the planning of a batch read. The rule: start and end are fixed once, when Spark
plans, so that every task reads from the same picture of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from pyspark_malamute.fetch import fetch_all
from pyspark_malamute.links import Broker
from pyspark_malamute.options import EVER, Place, SourceOptions
from pyspark_malamute.planning import (
    Range,
    ask_plan,
    check_plan,
    grouped,
    locate,
    locate_start,
    ranges,
)
from pyspark_malamute.streams import begin_with, together


class MalamuteReader(DataSourceReader):
    """Plans in one process of the driver, reads in the executors."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the tasks of the read, in the driver; they end where option endingOffsets says.

        Raises SourceUnavailable, OptionError, DataLoss.
        """
        options = self._options
        with Broker(options) as broker:
            names = _names(broker, options)
            chosen = options.bounds.streams  # by the query's filters
            names = [name for name in names if chosen is None or name in chosen]
            found = together(lambda name: _ranges(broker, options.of(name)), names)
            return grouped([part for parts in found.values() for part in parts], options)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the records of one task as Arrow record batches, in an executor."""
        return fetch_all(self._options, partition)


def ends(options: SourceOptions) -> dict[str, int]:
    """Return by stream the offset after the last record of a read that would be planned now.

    For counting.read(), whose rows and counts all end there.

    Raises SourceUnavailable, OptionError, DataLoss.
    """
    with Broker(options) as broker:
        return together(lambda name: _end(broker, options.of(name)), _names(broker, options))


def _names(broker: Broker, options: SourceOptions) -> list[str]:
    """Return the names of the streams that the options select."""
    return [options.stream] if options.stream else list(begin_with(broker, options))


def _end(broker: Broker, options: SourceOptions) -> int:
    """Return the offset at which the read of one stream ends: an option's, or the present end."""
    place = options.ending.of(options.stream) or Place("latest")
    option = "endingTimestamp" if place.kind == "time" else "endingOffsets"
    return locate(broker, options, place, option).offset


def _ranges(broker: Broker, options: SourceOptions) -> list[Range]:
    """Plan one stream: return its ranges, as tasks read them; none where nothing is to be read."""
    start = locate_start(broker, options, "earliest")
    end = _end(broker, options)
    first, stop = _within_filters(broker, options, start.offset, end)
    # Asked for an empty range, too: the broker refuses an expression that it cannot read.
    plan = ask_plan(broker, options, first, start.epoch, end=stop)
    if first >= stop:
        return []
    check_plan(broker, options, plan, first, start.epoch)
    return ranges(broker, options, plan, max(first, plan.first), stop)


def _within_filters(
    broker: Broker, options: SourceOptions, first: int, stop: int
) -> tuple[int, int]:
    """Return the range [first, stop) cut to the query's filters on offset and append time.

    Where they leave nothing, both are equal.
    """
    low, high = options.bounds.offsets
    first, stop = max(first, low), min(stop, high)
    since_ms, until_ms = options.bounds.append_ms
    if since_ms > -EVER:
        first = max(first, _at(broker, options, since_ms))
    if until_ms < EVER:
        stop = min(stop, _at(broker, options, until_ms))
    return first, max(first, stop)


def _at(broker: Broker, options: SourceOptions, time_ms: int) -> int:
    """Return the offset of the first record that was appended at or after a time."""
    return locate(broker, options, Place("time", time_ms), option="").offset
