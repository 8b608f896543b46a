"""`malamute spark ...`: pipelines between streams and Parquet that run as they are.

Owns the Spark session of a pipeline, and how its progress is shown. The rules: a person sees one
line that changes, a pipe gets a line a batch, JSON where it was asked for; Ctrl-C ends a pipeline
that goes on with what comes, and running it again goes on where it was.
Source: pyspark_malamute.pipelines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from malamute_py.cli import complete, output
from malamute_py.cli.commands import group, say
from malamute_py.cli.contexts import chosen
from malamute_py.cli.failures import FAILED, INTERRUPTED, USAGE, CommandFailed
from malamute_py.cli.options import options
from malamute_py.cli.parameters import OneStream
from malamute_py.cli.progress import Progress
from malamute_py.cli.replay import factor_of
from malamute_py.cli.values import (
    count_text,
    duration_ms,
    duration_text,
    iso_text,
    pairs,
    size_bytes,
    size_text,
    time_ms,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

app = group("spark")

_LOOK_S: Final = 1
"""Time between two looks at how far a query is."""
_QUIET: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.streaming.forceDeleteTempCheckpointLocation": "true",
}
"""Settings of Spark for a command: no page, no output of its own, times in UTC."""
_SILENT: Final = """\
rootLogger.level = off
rootLogger.appenderRef.none.ref = none
appender.none.type = Null
appender.none.name = none
"""
"""Configuration of Spark's log; without an appender Spark takes its own."""
_OURS: Final = "pyspark_malamute."
"""Beginning of the names of the connector's errors in Spark's text."""

Directory = Annotated[
    str, typer.Argument(metavar="PATH", help="The archive: a directory or an URI.")
]
Master = Annotated[
    str, typer.Option(metavar="URL", help="Where Spark runs: local[*], spark://HOST:PORT, yarn.")
]
Conf = Annotated[
    list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="Spark's settings.")
]
Source = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="Options of format('malamute')."),
]
Into = Annotated[
    str,
    typer.Option("--into", metavar="NAME", help="The stream to publish into.",
                 autocompletion=complete.streams),
]  # fmt: skip
Follow = Annotated[bool, typer.Option("--follow", help="Go on with what comes.")]
Json = Annotated[bool, typer.Option("--json", help="JSON lines: a batch each, and the end.")]


@app.command(
    "archive",
    epilog="""\b
Examples:
  malamute spark archive trades archive/trades
  malamute spark archive trades s3a://bucket/trades --follow""",
)
def archive(
    ctx: typer.Context,
    stream: OneStream,
    path: Directory,
    pattern: Annotated[str, typer.Option(metavar="PATTERN", help="Which records.")] = "#",
    date_of: Annotated[
        Literal["append", "client"], typer.Option(help="The time whose day is in a file's path.")
    ] = "append",
    subject_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Tokens of the subject in a file's path.")
    ] = 1,
    follow: Follow = False,
    every: Annotated[
        str, typer.Option(metavar="DURATION", help="With --follow: how often files are written.")
    ] = "10s",
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Note what is gone already, and go on.")
    ] = False,
    source: Source = None,
    master: Master = "local[*]",
    conf: Conf = None,
    as_json: Json = False,
) -> int:
    """Archive a stream into Parquet by day and subject, each record once."""
    given: dict[str, Any] = {**_link_options(ctx), "stream": stream, **pairs(source, "--option")}
    if pattern != "#":
        given["pattern"] = pattern
    if accept_loss:
        given["failOnDataLoss"] = "false"
    with _session(master, conf) as spark:
        from pyspark_malamute import pipelines

        def start() -> StreamingQuery:
            """Start the query; called by _run_query(), which tells its errors in one line."""
            return pipelines.archive(
                spark, path, date_of=f"{date_of}_time", subject_tokens=subject_tokens,
                follow=follow, every_ms=duration_ms(every), **given,
            )  # fmt: skip

        return _run_query(start, f"archiving {stream}", path, as_json)


@app.command(
    "compact",
    epilog="""\b
Examples:
  malamute spark compact archive/trades --target 256MiB""",
)
def compact(
    path: Directory,
    target: Annotated[
        str, typer.Option(metavar="SIZE", help="Most bytes of files that become one.")
    ] = "128MiB",
    keep: Annotated[
        str, typer.Option(metavar="DURATION", help="How long readers may need the old files.")
    ] = "24h",
    master: Master = "local[*]",
    conf: Conf = None,
    as_json: output.Json = False,
) -> None:
    """Make larger files of an archive's small ones; it may be read and written meanwhile."""
    with _session(master, conf) as spark, Progress(f"compacting {path}"):
        from pyspark_malamute import pipelines

        with _told_in_a_line():
            told = pipelines.compact(
                spark, path, target_bytes=size_bytes(target), keep_ms=duration_ms(keep)
            )
    output.done(
        f"{count_text(told.files_before, 'file')} are {told.files:,} now, {size_text(told.bytes)};"
        f" {told.removed:,} removed from disk",
        told._asdict(),
        as_json=as_json,
    )


@app.command(
    "aggregate",
    epilog="""\b
Examples:
  malamute spark aggregate trades --into mean --checkpoint state --field price""",
)
def aggregate(
    ctx: typer.Context,
    stream: OneStream,
    into: Into,
    checkpoint: Annotated[
        str, typer.Option(metavar="PATH", help="Directory of the query's state; keep it.")
    ],
    field: Annotated[str, typer.Option(metavar="NAME", help="The field with the number.")] = "",
    column: Annotated[
        str, typer.Option(metavar="NAME", help="The typed stream's column with the number.")
    ] = "",
    window: Annotated[
        str, typer.Option(metavar="DURATION", help="Length of a window.")
    ] = "1 minute",
    slide: Annotated[
        str, typer.Option(metavar="DURATION", help="From one window to the next; its length.")
    ] = "",
    watermark: Annotated[
        str, typer.Option(metavar="DURATION", help="How late a record may come.")
    ] = "10 seconds",
    time: Annotated[
        Literal["append", "client"], typer.Option(help="The time of a record.")
    ] = "client",
    pattern: Annotated[str, typer.Option(metavar="PATTERN", help="Which records.")] = "#",
    follow: Follow = False,
    source: Source = None,
    master: Master = "local[*]",
    conf: Conf = None,
    as_json: Json = False,
) -> int:
    """Publish count, min, max, mean, first and last by subject and window as a stream."""
    given: dict[str, Any] = {
        **_link_options(ctx),
        "stream": stream,
        "pattern": pattern,
        **pairs(source, "--option"),
    }
    with _session(master, conf) as spark:
        from pyspark_malamute import pipelines

        def start() -> StreamingQuery:
            """Start the query; called by _run_query(), which tells its errors in one line."""
            return pipelines.aggregate(
                spark, into, checkpoint, field=field, column=column, window=window, slide=slide,
                watermark=watermark, time=f"{time}_time", follow=follow, **given,
            )  # fmt: skip

        return _run_query(start, f"aggregating {stream}", into, as_json)


@app.command(
    "replay",
    epilog="""\b
Examples:
  malamute spark replay archive/trades --into trades.again --name replay-1
  malamute spark replay archive/trades --into test --name test-1 --pace 10x""",
)
def replay(
    ctx: typer.Context,
    path: Directory,
    into: Into,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="The replay's; the same goes on where it was.")
    ],
    pace: Annotated[
        str, typer.Option(metavar="PACE", help="flat (out), real, or a factor: 2x, 0.5x.")
    ] = "flat",
    begin: Annotated[str | None, typer.Option("--from", metavar="TIME", help="First time.")] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="TIME", help="End of times.")] = None,
    by: Annotated[
        Literal["append", "client"] | None,
        typer.Option(help="The time of the order and the pace; default: that of the archive."),
    ] = None,
    master: Master = "local[*]",
    conf: Conf = None,
    as_json: Json = False,
) -> int:
    """Publish an archive into a stream in the order of time, each record once."""
    given = _link_options(ctx)
    factor = factor_of(pace)
    start_ms = None if begin is None else time_ms(begin)
    end_ms = None if end is None else time_ms(end)
    with _session(master, conf) as spark, Progress(f"replaying {path}", total=1) as progress:
        from pyspark_malamute import pipelines

        def tell(done: pipelines.Replayed) -> None:
            """Print how far the replay is; the pipeline calls it as it goes on."""
            # Only a paced replay can be late.
            late = f", {duration_text(done.late_ms)} late" if factor else ""
            place = f" up to {iso_text(done.time_ms)}" if done.steps_done else ""
            text = f"{done.records_done:,} of {count_text(done.records, 'record')}{place}{late}"
            progress.update(done.records_done, text, total=max(1, done.records))
            if as_json:
                output.print_json(done._asdict(), compact=True)
            elif not progress.shown:
                print(text)
            sys.stdout.flush()

        try:
            with _told_in_a_line():
                done = pipelines.replay(
                    spark, path, into, name=name, pace=factor, by=f"{by}_time" if by else "",
                    start_ms=start_ms, end_ms=end_ms, told=tell, **given,
                )  # fmt: skip
        except KeyboardInterrupt:
            progress.stop()
            say(f"stopped; `--name {name}` goes on where it was")
            return INTERRUPTED
    if not as_json:
        print(f"{count_text(done.records_done, 'record')} replayed into {into}")
    return 0


@app.command(
    "package",
    epilog="""\b
Examples:
  malamute spark package malamute.zip""",
)
def package(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The zip that is written.")],
    as_json: output.Json = False,
) -> None:
    """Write the connector as one zip for spark-submit --py-files."""
    from pyspark_malamute.shipping import NEEDED, build_zip

    count = build_zip(file)
    output.done(
        f"{file}: {count_text(count, 'module')}; executors need {', '.join(NEEDED)} installed",
        {"file": str(file), "modules": count, "needed": list(NEEDED)},
        as_json=as_json,
    )


@contextlib.contextmanager
def _session(master: str, conf: list[str] | None) -> Iterator[SparkSession]:
    """Start a session of Spark, which ends with the block. Raises CommandFailed: it cannot.

    master: where Spark runs. conf: --conf, which goes before our settings.
    """
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    if not (os.environ.get("JAVA_HOME") or shutil.which("java")):
        raise CommandFailed("Spark needs Java 17 or later, and there is no java on the PATH")
    # What a pipeline raises inside Spark would be printed there, too, with its stack.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    # Spark's workers run the Python that has the connector.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory(prefix="malamute-spark-") as directory:
        builder: Any = SparkSession.builder
        builder = builder.master(master).appName("malamute spark")
        settings = {**_QUIET, **pairs(conf, "--conf")}
        if "spark.driver.extraJavaOptions" not in settings:
            # Spark's own log would break the line of progress; a failure is raised here anyway.
            file = Path(directory) / "log4j2.properties"
            file.write_text(_SILENT)
            settings["spark.driver.extraJavaOptions"] = f"-Dlog4j2.configurationFile={file}"
        for name, value in settings.items():
            builder = builder.config(name, value)
        try:
            spark: SparkSession = builder.getOrCreate()
        except PySparkRuntimeError as error:
            raise CommandFailed(f"Spark did not start: {error}") from error
        try:
            yield spark
        finally:
            with contextlib.suppress(Exception):  # A Java that Ctrl-C ended says so in many ways.
                spark.stop()


def _run_query(start: Any, title: str, where: str, as_json: bool) -> int:
    """Run a streaming query to its end, and show how far it is; return the exit code.

    start: starts the query and returns it. where: what it writes into, for the last line.
    """
    records = 0
    seen = -1  # The newest batch that was told.
    query: StreamingQuery | None = None
    with Progress(title) as progress:

        def look() -> None:
            """Print the batches that the query has done since the last look."""
            nonlocal records, seen
            assert query is not None
            for each in query.recentProgress:  # Also has batches of earlier looks.
                if each.batchId > seen:
                    seen = each.batchId
                    records += each.numInputRows
                    _tell(progress, each, records, as_json)

        try:
            with _told_in_a_line():
                query = start()
                while not query.awaitTermination(_LOOK_S):
                    look()
            look()  # Batches that ended with the query.
        except KeyboardInterrupt:
            progress.stop()
            if query is not None:
                with contextlib.suppress(Exception):  # Java may have heard Ctrl-C first.
                    query.stop()
            say(f"stopped after {count_text(records, 'record')}; run it again to go on")
            return INTERRUPTED
    if not as_json:
        print(f"{count_text(records, 'record')} into {where}")
    return 0


def _tell(progress: Progress, report: Any, records: int, as_json: bool) -> None:
    """Show what a query reports of a batch that it has finished.

    report: Spark's StreamingQueryProgress. records: of all batches so far.
    """
    import json

    # The connector's own figure, in what it tells Spark as the newest offset.
    lag = json.loads(report.sources[0].latestOffset or "{}").get("recordsBehindLatest", 0)
    # Records of windows that were closed already.
    late = sum(state.numRowsDroppedByWatermark for state in report.stateOperators)
    facts: dict[str, Any] = {
        "batch": report.batchId, "records": report.numInputRows, "records_done": records,
        "records_behind": lag, "records_late": late,
        **{name: row.asDict() for name, row in report.observedMetrics.items()},
    }  # fmt: skip
    text = f"{count_text(records, 'record')}, {lag:,} behind"
    if late:
        text += f", {late:,} too late"
    progress.update(records, text)
    if as_json:
        output.print_json(facts, compact=True)
    elif not progress.shown:
        print(f"batch {report.batchId}: {text}")
    sys.stdout.flush()


@contextlib.contextmanager
def _told_in_a_line() -> Iterator[None]:
    """Turn what a pipeline raises into CommandFailed with one line instead of Java's stack."""
    from pyspark.errors import PySparkException

    from pyspark_malamute.errors import MalamuteSourceError, OptionError

    try:
        yield
    except OptionError as error:
        raise CommandFailed(str(error), USAGE) from error
    except MalamuteSourceError as error:
        raise CommandFailed(str(error), FAILED) from error
    except PySparkException as error:
        raise CommandFailed(_last_of_ours(str(error)), FAILED) from error


def _last_of_ours(text: str) -> str:
    """Return the connector's message in Spark's text, or the text's first line.

    Spark writes a Python error as text among the lines of several stacks; the last one is the
    connector's last word.
    """
    lines = [line.strip() for line in text.splitlines() if _OURS in line and "Error: " in line]
    found = lines or [line.strip() for line in text.splitlines() if line.startswith(_OURS)]
    return found[-1].partition(": ")[2] if found else text.strip().splitlines()[0]


def _link_options(ctx: typer.Context) -> dict[str, str]:
    """Return the connector's options that link to the chosen broker, with its credential."""
    from malamute_py.client.settings import Curve, Plain

    context = chosen(options(ctx))
    found = {"endpoint": ",".join(context.endpoints)}
    match context.credential():
        case Plain(user, password):
            found |= {"user": user, "password": password}
        case Curve() as keys:
            found |= {
                "curveServerKey": keys.server_key, "curvePublicKey": keys.public_key,
                "curveSecretKey": keys.secret_key,
            }  # fmt: skip
    return found
