"""The demonstration as an end-to-end test: what it prints must hold, and must be able not to."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from malamute_py.demo import scenes, spark
from malamute_py.demo.__main__ import demonstrate, play
from malamute_py.demo.daemon import Daemon
from malamute_py.demo.flights import Figures, Flights, load
from malamute_py.demo.report import Check, Report
from perf.curves.apart import apart
from tests.waiting import WAIT_S

LIMIT = 12_000
"""Departures of the altered tables: the first two weeks of January."""


def play_a_year(folder: Path) -> tuple[list[Check], str, str]:
    said = io.StringIO()
    report = Report(Console(file=said, width=80))
    picture = demonstrate(report, folder)
    return report.checks, picture, said.getvalue()


@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_a_year_of_departures_goes_through_the_broker_and_every_claim_holds(
    tmp_path: Path,
) -> None:
    # A process has one Spark session, which may be that of tests/spark here.
    checks, picture, said = apart(play_a_year, tmp_path)
    assert all(check.holds for check in checks), said
    assert len(checks) >= 20
    assert "Departures a day from New York" in picture


# --- that its checks can fail ------------------------------------------------------------------


def columns(flights: Flights) -> list[list[Any]]:
    return [flights.subjects, flights.fields, flights.times_ms, flights.bodies]


def nothing(_: Flights) -> None:
    pass


def forget_the_last(flights: Flights) -> None:
    for column in columns(flights):
        column.pop()


def swap_two(flights: Flights) -> None:
    for column in columns(flights):
        column[5000], column[9000] = column[9000], column[5000]


def publish_one_twice(flights: Flights) -> None:
    for column in columns(flights):
        column.append(column[7])


def misstate(flights: Flights) -> None:
    # Selections get one too many, behind the last that belongs to them.
    flights.subjects[-1] = "flights.JFK.UA.LAX"
    flights.fields[-1] = {"carrier": "HA", "origin": "EWR", "delayed": ""}
    flights.times_ms[3] += 86_400_000
    flights.bodies[0] = flights.bodies[0].replace(b'"dep_delay":', b'"dep_delay":1')


EVERYTHING = {"live: everything", "slow: nothing lost", "the client finished by itself"}
CONTENT = "records of which subject, time, field or delay differ"
A_DAY = "departures and late ones of each day"


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize(
    ("alter", "broken"),
    [
        (nothing, set()),
        (forget_the_last, {*EVERYTHING, "records in the stream", CONTENT, A_DAY}),
        (swap_two, {*EVERYTHING, CONTENT}),
        (publish_one_twice, {*EVERYTHING, "records in the stream", "records that are there twice",
                             CONTENT, A_DAY}),
        (misstate, {
            "live: topic flights.JFK.#", "live: topic flights.*.UA.*", "live: regex (LAX|SFO)$",
            "live: all fields: origin=EWR, delayed", "live: any field: carrier=HA, cancelled",
            CONTENT, A_DAY,
        }),
    ],
)  # fmt: skip
def test_a_table_that_was_altered_on_its_way_breaks_the_claims_about_it(
    alter: Callable[[Flights], None], broken: set[str], tmp_path: Path
) -> None:
    flights = load(LIMIT)
    alter(flights)
    report = Report(Console(quiet=True))
    with Daemon(tmp_path / "broker") as daemon:
        stage = scenes.Stage(daemon, flights, Figures(tmp_path, LIMIT), report)
        asyncio.run(play(stage))
    assert broken <= {check.claim for check in report.checks if not check.holds}
    if not broken:
        assert report.all_hold, report.to_json()


def test_an_average_that_differs_or_is_missing_is_told() -> None:
    for found in ({"AA": 1.0, "UA": 2.0 + 1e-6}, {"AA": 1.0}, {}):
        report = Report(Console(quiet=True))
        spark.compare(report, "average", {"AA": 1.0, "UA": 2.0}, found)
        assert not report.all_hold


def test_a_report_without_checks_does_not_hold() -> None:
    assert not Report(Console(quiet=True)).all_hold


def test_rows_out_of_order_are_a_difference() -> None:
    report = Report(Console(quiet=True))
    report.same_rows("order", [1, 2, 3], [1, 3, 2])
    assert not report.all_hold
    assert "place 1" in report.checks[0].found


# --- for people --------------------------------------------------------------------------------


def test_the_table_of_checks_fits_a_terminal_of_80_columns() -> None:
    said = io.StringIO()
    report = Report(Console(file=said, width=80))
    report.begin("A scene")
    report.same_rows("a claim [with brackets]", list(range(336_776)), list(range(336_776)))
    report.console.print(report.table())
    assert max(map(len, said.getvalue().splitlines())) <= 80
    assert said.getvalue().count("[with brackets]") == 2


@pytest.mark.system
def test_without_java_it_says_what_to_type_and_starts_nothing() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "malamute_py.demo"], env={**os.environ, "JAVA_HOME": "/nowhere"},
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert "apt-get install openjdk" in run.stderr
    assert "--no-spark" in run.stderr
    assert run.stdout == ""
