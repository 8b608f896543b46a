"""Departures joined with the weather by Spark: equal to pandas, and able not to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import typer
from rich.console import Console

from malamute_py.demo import chart, spark, weather
from malamute_py.demo.__main__ import main
from malamute_py.demo.arrivals import HOUR_MS, lateness_ms
from malamute_py.demo.daemon import Daemon
from malamute_py.demo.expected import Expected, Result
from malamute_py.demo.picture import draw, mean_delay
from malamute_py.demo.report import Check, Report
from malamute_py.demo.weather import Seen
from perf.curves.apart import apart

JANUARY = 27_004
"""Departures of the first month."""


def play_january(folder: Path) -> tuple[list[Check], list[Result]]:
    report = Report(Console(quiet=True))
    with Daemon(folder / "broker") as daemon:
        session = spark.session(folder)
        found = weather.play(report, session, daemon.endpoint, folder, limit=JANUARY)
    return report.checks, found


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_month_of_departures_with_the_weather_is_equal_to_pandas_late_records_included(
    tmp_path: Path,
) -> None:
    # A process has one Spark session, which may be that of tests/spark here.
    checks, found = apart(play_january, tmp_path)
    assert checks
    assert not [check for check in checks if not check.holds]
    dropped = next(check for check in checks if "too late" in check.claim)
    assert int(dropped.found) > 0
    assert {result.rain for result in found} == {"dry", "light rain", "moderate rain", "heavy rain"}
    assert "La Guardia" in chart.rain(found, 80)
    draw(found, tmp_path / "month.png")
    assert (tmp_path / "month.png").read_bytes().startswith(b"\x89PNG")


# --- that its checks can fail ------------------------------------------------------------------

FOUND = [
    Result("2013-01-01", "EWR", "dry", 2, 0, 4.5, [0, 2]),
    Result("2013-01-01", "EWR", "heavy rain", 0, 1, None, [3]),
]
EXPECTED = Expected(
    FOUND, [1, 4], [0, HOUR_MS], late_departures=[1], late_reports=1, without_late_report=1,
    never_reported=0, late_but_counted=0,
)  # fmt: skip
SEEN = Seen([0, HOUR_MS], dropped=2, seconds=1.0)


def failed(expected: Expected, found: list[Result], seen: Seen) -> set[str]:
    report = Report(Console(quiet=True))
    weather.compare(report, expected, found, seen, 5)
    return {check.claim for check in report.checks if not check.holds}


def test_equal_results_hold() -> None:
    assert failed(EXPECTED, FOUND, SEEN) == set()


def test_another_watermark_and_another_number_of_dropped_records_are_told() -> None:
    assert failed(EXPECTED, FOUND, replace(SEEN, watermarks_ms=[0, 2 * HOUR_MS])) == {
        "triggers with the same watermark"
    }
    assert failed(EXPECTED, FOUND, replace(SEEN, dropped=1)) == {
        "departures and reports dropped as too late"
    }


def test_a_result_that_is_missing_altered_or_there_twice_is_told() -> None:
    assert "results by day, airport and rain" in failed(EXPECTED, FOUND[:1], SEEN)
    altered = [FOUND[0]._replace(mean_delay=4.500001), FOUND[1]]
    assert failed(EXPECTED, altered, SEEN) == {"results that differ"}
    assert "departures that are counted twice" in failed(EXPECTED, [*FOUND, FOUND[1]], SEEN)


def test_another_departure_that_is_left_out_is_told() -> None:
    swapped = [FOUND[0]._replace(rows=[0, 1]), FOUND[1]]
    assert "departures that are in no result" in failed(EXPECTED, swapped, SEEN)


# --- its parts ---------------------------------------------------------------------------------


def test_a_seed_gives_the_same_late_records_some_later_than_the_watermark_allows() -> None:
    late_ms = lateness_ms(100_000, 13)
    assert (late_ms == lateness_ms(100_000, 13)).all()
    assert (late_ms % HOUR_MS == 0).all()
    assert 2_500 < ((late_ms > 0) & (late_ms < weather.WATERMARK_MS)).sum() < 3_500
    assert 200 < (late_ms >= weather.WATERMARK_MS).sum() < 400


def test_a_mean_of_results_weighs_each_departure_and_no_cancelled_one() -> None:
    more = FOUND[0]._replace(departed=1, mean_delay=9.0)
    assert mean_delay([*FOUND, more]) == 6.0
    assert mean_delay([FOUND[1]]) == 0.0


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="needs Spark"):
        main(with_weather=True, with_spark=False)
    for picture, with_weather in ((Path("a.png"), False), (Path("a.pdf"), True)):
        with pytest.raises(typer.BadParameter, match=r"\.svg or \.png"):
            main(picture=picture, with_weather=with_weather)
