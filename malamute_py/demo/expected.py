"""Delays by day, airport and rain as pandas finds them, by Spark's rule of what is too late.

Owns the expectation of weather.py. The rule, which is Spark's: after each trigger the watermark is
the newest time of each stream less the allowed lateness, the lower of the two, and never goes back;
a trigger drops each record of either stream whose time is not after the watermark that was in force
in the trigger before. Everything else takes part in the join, however late it came.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from typing import Any, NamedTuple

from malamute_py.demo.flights import data_file


class Result(NamedTuple):
    """One record of the results."""

    day: str
    origin: str
    rain: str
    departed: int
    cancelled: int
    mean_delay: float | None
    """Minutes; None: all were cancelled."""
    rows: list[int]
    """Row numbers of the departures that are counted."""


class Reading(NamedTuple):
    """How a stream is read: what its query and the expectation have in common."""

    late_ms: Any
    """Milliseconds from each record's time to its arrival, by row."""
    per_trigger: int
    """Records that one trigger takes."""


@dataclass(frozen=True, slots=True)
class Expected:
    """All that pandas finds."""

    results: list[Result]
    missing: list[int]
    """Rows of departures that are in no result."""
    watermarks_ms: list[int]
    """The watermark of each trigger, the last one after the records included."""
    late_departures: list[int]
    """Rows of departures that were dropped as too late."""
    late_reports: int
    """Weather reports that were dropped as too late."""
    without_late_report: int
    """Departures whose report was dropped, and which themselves were not."""
    never_reported: int
    """Departures for whose hour the table has no report."""
    late_but_counted: int
    """Departures of the results that came later than the allowed lateness, or whose report did."""


def expect(
    departures: Reading, reports: Reading, *, watermark_ms: int, closing_ms: int, limit: int | None
) -> Expected:
    """Return what the query of weather.py is to find: read the tables, drop what Spark drops, join.

    departures, reports: how the query reads either stream. watermark_ms: the allowed lateness.
    closing_ms: time of the record that closes each stream. limit: so many departures, and the
    reports up to the last of them.
    """
    import pandas as pd

    folder = data_file().parent
    with zipfile.ZipFile(data_file()) as archive:
        name = next(each for each in archive.namelist() if each.endswith("flights.csv"))
        with archive.open(name) as file:
            left = pd.read_csv(file, usecols=["origin", "dep_delay", "time_hour"], nrows=limit)
    right = pd.read_csv(
        folder / "weather.csv", usecols=["origin", "precip", "time_hour"],
        float_precision="round_trip",
    )  # fmt: skip
    # `left` are departures and `right` reports, each with the hour that it is about in `at`.
    for table in (left, right):
        table["at"] = pd.to_datetime(table.pop("time_hour"), utc=True)
    right = right[right["at"] <= left["at"].max()].reset_index(drop=True) if limit else right
    left["row"] = left.index
    closing = pd.Timestamp(closing_ms, unit="ms", tz="UTC")
    left = _triggers(left, departures, closing)
    right = _triggers(right, reports, closing)

    # By trigger: the newest time of each stream so far, and the watermark that follows from both.
    allowed = pd.Timedelta(milliseconds=watermark_ms)
    newest = pd.concat([side.groupby("trigger")["at"].max().cummax() for side in (left, right)],
                       axis=1).ffill()  # fmt: skip
    after = (newest.min(axis=1) - allowed).cummax()
    begin = pd.Timestamp(0, tz="UTC")
    in_force = after.shift(1, fill_value=begin)  # what one trigger computes, the next goes by
    # By the rule above, of the trigger before: hence shifted once more.
    for side in (left, right):
        side["dropped"] = side["at"] <= side["trigger"].map(in_force.shift(1, fill_value=begin))

    left = left[left["origin"] != ""].astype({"row": int})  # without the closing row
    # Each departure with the report of its hour, if the table has one; counted if neither dropped.
    both = left.merge(right, on=["origin", "at"], how="left", suffixes=("", "_report"))
    counted = both[~both["dropped"] & both["dropped_report"].eq(False)].copy()
    late = (counted["late"] > allowed) | (counted["late_report"] > allowed)
    # The day begins at 5:00 UTC, as New York's does in winter.
    counted["day"] = (counted["at"] - pd.Timedelta(hours=5)).dt.strftime("%Y-%m-%d")
    counted["rain"] = pd.cut(
        counted["precip"], [-1.0, 0.0, 0.1, 0.3, float("inf")],
        labels=["dry", "light rain", "moderate rain", "heavy rain"],
    ).astype(str)  # fmt: skip
    results = [
        _result(key, group["dep_delay"], group["row"])
        for key, group in counted.groupby(["day", "origin", "rain"])
    ]
    watermarks = [*in_force, after.iloc[-1]]
    return Expected(
        results,
        missing=sorted(set(both["row"]) - set(counted["row"])),
        watermarks_ms=[int(at.timestamp()) * 1000 for at in watermarks],
        late_departures=sorted(left.loc[left["dropped"], "row"].tolist()),
        late_reports=int(right["dropped"].sum()),
        without_late_report=int((~both["dropped"] & both["dropped_report"].eq(True)).sum()),
        never_reported=int((~both["dropped"] & both["dropped_report"].isna()).sum()),
        late_but_counted=int(late.sum()),
    )


def _result(key: tuple[str, str, str], delays: Any, rows: Any) -> Result:
    """Return the result of a day, an airport and a rain; no delay: the departure was cancelled."""
    departed, cancelled = int(delays.count()), int(delays.isna().sum())
    mean = float(delays.mean()) if departed else None
    return Result(*key, departed, cancelled, mean, sorted(rows.tolist()))


def _triggers(table: Any, reading: Reading, closing: Any) -> Any:
    """Return a table in the order of arrival, each row with the trigger that takes it, a number.

    closing: time of the row that closes the stream, which is added as the last one.
    """
    import pandas as pd

    table["late"] = pd.to_timedelta(reading.late_ms, unit="ms")
    arrival = (table["at"] + table["late"]).sort_values(kind="stable").index
    last = pd.DataFrame({"origin": [""], "at": [closing], "late": [pd.Timedelta(0)]})
    ordered = pd.concat([table.loc[arrival], last], ignore_index=True)
    ordered["trigger"] = ordered.index // reading.per_trigger
    return ordered
