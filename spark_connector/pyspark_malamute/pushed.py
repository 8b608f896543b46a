"""Filters of a batch query that the broker applies before a byte travels.

Owns what a filter means to the broker. The rules: a filter narrows the read and never changes its
answer, for Spark applies each of them again; what has no meaning to the broker, or would be
refused, is left out. The class is one of its own, because Spark 4.3 refuses every read of a reader
that has pushFilters while spark.sql.python.filterPushdown.enabled is false, its default.
Source: PySpark's DataSourceReader.pushFilters.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from malamute_protocol.pattern import Pattern, PatternError, to_text, validate
from pyspark_malamute.batch_reader import MalamuteReader
from pyspark_malamute.options import EVER, SourceOptions

_ALTERNATIVES_MAX: Final = 64
"""Values of an IN that become a pattern; of more, Spark alone decides."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


class FilteredReader(MalamuteReader):
    """A batch read that is narrowed by the query's filters."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Narrow the read by a query's filters, which Spark hands over before partitions().

        Returns those that Spark is to apply, which is all of them.
        """
        self._options = narrowed(self._options, filters)
        return filters


def narrowed(options: SourceOptions, filters: Iterable[Filter]) -> SourceOptions:
    """The options of a read that leaves out what one of the filters would, as far as it may.

    Filters on offset, times and stream narrow the bounds of the read; those on the subject and on
    fields become patterns, all of which a record must match.
    """
    bounds, client_time = options.bounds, options.client_time
    patterns: list[Pattern] = []
    for each in filters:
        column: tuple[str, ...] = getattr(each, "attribute", ())
        if len(column) != 1:
            continue  # a field within a column, or no column at all
        (name,) = column
        low, high = _interval(each)
        if name == "offset":
            bounds = bounds.within(offsets=(low, high))
        elif name == "append_time":
            bounds = bounds.within(append_ms=(low, high))
        # A window without bounds would leave out records that have no client time.
        elif name == "client_time" and (low, high) != (-EVER, EVER):
            first, end = client_time or (-EVER, EVER)
            client_time = (max(first, low), min(end, high))
        elif name == "stream":
            bounds = bounds.within(streams=_values(each))
        elif name == "subject" or name in options.field_columns:
            pattern = _pattern(each, name)
            if pattern is not None and _is_within_bounds(pattern):
                patterns.append(pattern)
    if client_time is not None and client_time[0] >= client_time[1]:
        # Nothing passes: no offset is read, for the broker refuses an empty window.
        bounds, client_time = bounds.within(offsets=(0, 0)), options.client_time
    whole = options.pattern
    if patterns:
        parts = patterns if whole == ["all"] else [whole, *patterns]
        # Where they are beyond the broker's bounds together, Spark alone applies them.
        both = parts[0] if len(parts) == 1 else ["and", *parts]
        whole = both if _is_within_bounds(both) else whole
    return msgspec.structs.replace(
        options,
        bounds=bounds,
        client_time=client_time,
        pattern=whole,
        pattern_text="#" if whole == ["all"] else to_text(whole),
    )


def _interval(each: Filter) -> tuple[int, int]:
    """[low, high) in offsets or milliseconds, in which all that passes a filter lies."""
    match each:
        case EqualTo(value=value) | EqualNullSafe(value=value):
            return _first_of(value), _after(value)
        case GreaterThan(value=value) | GreaterThanOrEqual(value=value):
            return _first_of(value), EVER
        case LessThan(value=value) | LessThanOrEqual(value=value):
            return -EVER, _after(value)
        case In(value=values):
            return min(map(_first_of, values), default=0), max(map(_after, values), default=0)
        case _:
            return -EVER, EVER


def _first_of(value: Any) -> int:
    """Return the least whole number at or above which a filter's value lies; -EVER: not known."""
    whole = _whole(value)
    return -EVER if whole is None else whole


def _after(value: Any) -> int:
    """Return the whole number after a filter's value; EVER: not known."""
    whole = _whole(value)
    return EVER if whole is None else whole + 1


def _whole(value: Any) -> int | None:
    """An offset as it is, a time in whole milliseconds rounded down; None: neither."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return (value - _EPOCH) // _MILLISECOND
    return value if type(value) is int else None


def _values(each: Filter) -> frozenset[str] | None:
    """The values that pass; None: not known."""
    match each:
        case EqualTo(value=str(value)) | EqualNullSafe(value=str(value)):
            return frozenset([value])
        case In(value=values) if all(isinstance(value, str) for value in values):
            return frozenset(values)
        case _:
            return None


def _pattern(each: Filter, name: str) -> Pattern | None:
    """A pattern that matches all that passes a filter; None: there is none."""
    if isinstance(each, StringStartsWith) and name == "subject":
        return ["prefix", each.value]
    if isinstance(each, IsNotNull) and name != "subject":
        return ["fields", "all", [[name]]]
    values = _values(each)
    # No pattern: the values are not known, too many, or one is empty, which no topic may be.
    if not values or len(values) > _ALTERNATIVES_MAX or "" in values:
        return None
    if name == "subject":
        # In a topic these are wildcards.
        if any("*" in value or "#" in value for value in values):
            return None
        parts: list[Pattern] = [["topic", value] for value in sorted(values)]
    else:
        parts = [["fields", "all", [[name, value]]] for value in sorted(values)]
    return parts[0] if len(parts) == 1 else ["or", *parts]


def _is_within_bounds(pattern: Pattern) -> bool:
    """Whether the broker takes a pattern of this size; Spark alone applies a filter beyond it."""
    try:
        validate(pattern)
    except PatternError:
        return False
    return True
