"""An archive back into a stream, in the order of time.

Owns the plan of a replay and its pace. The rules: a replay has a name, and its plan is kept in the
archive when it begins, so that a run that goes on has the same rows in the same steps; each step is
published once, by the sink; the broker's stream of commits says how far the replay is.
Source: ARCHITECTURE.md, The archive and the other pipelines.
"""

from __future__ import annotations

import functools
import itertools
import operator
import time as clock
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf

from pyspark_malamute import links, sink
from pyspark_malamute.errors import OptionError
from pyspark_malamute.pipelines.archive_log import ArchiveError, State
from pyspark_malamute.pipelines.archiving import day
from pyspark_malamute.pipelines.folder import Folder
from pyspark_malamute.pipelines.given import texts
from pyspark_malamute.pipelines.reading import opened, rows_of
from pyspark_malamute.sink_commits import BatchName, CommitRecord, commit_records
from pyspark_malamute.sink_options import SinkOptions, parse_sink_options
from pyspark_malamute.sink_task import Written, linked, own_link, write_partition

STEP_ROWS: Final = 500_000
PACED_ROWS: Final = 50_000
"""Rows of a step, about; those of a paced one are held in the driver."""
_BUCKETS: Final = 100_000
"""Buckets of equal time in which _steps() counts records, at most."""
TICK_MS: Final = 100
"""Records of a paced replay that are due within this time are published together."""
_EVER: Final = 1 << 53
"""Time after all others, in milliseconds."""
_ORDER_COLUMNS: Final = ("at_ms", "stream", "offset", "appended_ms", "date")
"""Columns by which rows are found and put in order, which are not published."""


class PlannedStep(NamedTuple):
    """A range of time that is published as one batch of the sink."""

    begin_ms: int
    end_ms: int
    records: int


class Bound(NamedTuple):
    """Bound of a stream's records; a replay has those that lie within one of its bounds."""

    offset: int
    """Offset before which they lie."""
    appended_ms: int
    """Greatest time at which one of them was appended. It tells the records of a stream that was
    made again from those of the former one, which may have the same offsets."""


class Plan(msgspec.Struct, frozen=True):
    """A replay as it was begun."""

    settings: dict[str, Any]
    reached: dict[str, int]
    """Stream -> offset; the replay has what lies before."""
    steps: list[PlannedStep]
    tick_ms: int = 0
    """Records within this time of the archive are published together; 0: all of a step."""
    bounds: dict[str, list[Bound]] = {}
    """Stream -> bounds within `reached`. A stream without a row has none; of a plan of an older
    version no stream has any."""

    def has(self) -> Column:
        """Whether a row was archived when the replay was begun: a column for a condition."""
        found = sf.lit(False)
        for stream, offset in self.reached.items():
            # A plan of an older version has no bounds: offsets alone tell then.
            bounds = self.bounds.get(stream, []) if self.bounds else [Bound(offset, _EVER)]
            if not bounds:
                continue  # The archive had no row of the stream.
            within = [
                (sf.col("offset") < bound.offset) & (sf.col("appended_ms") <= bound.appended_ms)
                for bound in bounds
            ]
            any_of = functools.reduce(operator.or_, within)
            found = sf.when(sf.col("stream") == stream, any_of).otherwise(found)
        return found


class Replayed(NamedTuple):
    """How far a replay is."""

    steps: int
    steps_done: int
    records: int
    records_done: int
    time_ms: int
    """Time up to which the archive's records are published."""
    late_ms: int
    """How much later than its pace asks for the newest tick was published."""


def replay(
    spark: SparkSession,
    path: str,
    into: str,
    *,
    name: str,
    pace: float | None = None,
    by: str = "",
    start_ms: int | None = None,
    end_ms: int | None = None,
    told: Callable[[Replayed], None] | None = None,
    **options: Any,
) -> Replayed:
    """Publish the records of an archive into a stream, each once, and return when that is done.

    into: the stream. name: of the replay; run again with it, a replay goes on where it was. pace:
    factor of the original pace; None: as fast as possible. by: append_time or client_time, the
    time by which records are in order and paced; a record without client time has its append time;
    default: the archive's date_of. start_ms, end_ms: times, the end exclusive. told: is called with
    the progress. options: of the sink.
    Raises ArchiveError: there is no archive, or the replay was begun otherwise. Raises OptionError,
    SourceUnavailable, BatchChanged.
    """
    folder, state = opened(spark, path)
    by = by or state.settings.date_of
    if by not in ("append_time", "client_time"):
        raise OptionError("by", f"{by!r} is neither append_time nor client_time", "sink")
    if pace is not None and not 0 < pace < 1e9:
        raise OptionError("pace", f"{pace} is no factor above 0", "sink")
    for option, argument in (("stream", "into"), ("sinkId", "name")):
        if option.lower() in map(str.lower, options):
            raise OptionError(option, f"the replay has it by its argument {argument}", "sink")
    given = {**texts(options), "stream": into, "sinkId": name}
    sink_options = parse_sink_options(given, streaming=False)
    rows = _rows(rows_of(spark, folder, state, [*state.files]), state, by)
    settings = {"into": into, "by": by, "start_ms": start_ms, "end_ms": end_ms}
    # Records that the pace brings within TICK_MS of each other are published together.
    tick_ms = 0 if pace is None else max(1, round(TICK_MS * pace))
    plan = _planned(folder, state, rows, name, settings, tick_ms)
    run = _Run(rows, plan, sink_options, given, told or (lambda _: None))
    return run.go(pace)


class _Run:
    """A run of a replay."""

    def __init__(
        self,
        rows: DataFrame,
        plan: Plan,
        options: SinkOptions,
        given: Mapping[str, str],
        told: Callable[[Replayed], None],
    ) -> None:
        """given: options of the sink, as Spark takes them. told: called with the progress."""
        self._rows = rows
        self._plan = plan
        self._options = options
        self._given = given
        self._told = told
        self._first_ms = 0
        """Time of the first record of this run, which is published at once."""
        self._began_s = 0.0
        """When this run began, by monotonic()."""
        self._late_ms = 0

    def go(self, pace: float | None) -> Replayed:
        """Publish the steps that are not published yet.

        pace: factor of the original pace; None: as fast as possible.
        """
        done = self._done()
        if done < len(self._plan.steps):  # The pace counts from where this run begins.
            self._first_ms = self._plan.steps[done].begin_ms
            self._began_s = clock.monotonic()
        progress = self._progress(done)
        self._told(progress)
        for number in range(done, len(self._plan.steps)):
            if pace is None:
                self._publish(number)
            else:
                self._publish_paced(number, pace)
            progress = self._progress(number + 1)
            self._told(progress)
        return progress

    def _done(self) -> int:
        """Return how many steps earlier runs have published, by the broker's stream of commits.

        Steps are published in order, each as a batch of the sink with its number, so that the
        greatest number tells. Raises SourceUnavailable.
        """
        name = self._options.sink_id
        with (
            own_link(self._options, f"spark-{name}-replay") as own_options,
            links.explained(own_options, "read what is published"),
        ):
            records = commit_records(linked(own_options), own_options, f"{name}.*.commit")
            found = (msgspec.json.decode(each.body, type=CommitRecord) for each in records)
            return max((record.batch + 1 for record in found), default=0)

    def _progress(self, done: int) -> Replayed:
        """Return how far the replay is. done: steps that were published."""
        steps = self._plan.steps
        return Replayed(
            steps=len(steps),
            steps_done=done,
            records=sum(step.records for step in steps),
            records_done=sum(step.records for step in steps[:done]),
            time_ms=steps[done - 1].end_ms if done else 0,
            late_ms=self._late_ms,
        )

    def _step(self, number: int) -> DataFrame:
        """The rows of a step in their order, in one partition."""
        begin_ms, end_ms, _ = self._plan.steps[number]
        found = self._rows.where(
            (sf.col("at_ms") >= begin_ms) & (sf.col("at_ms") < end_ms) & self._plan.has()
        )
        if "date" in found.columns:
            # Spark leaves out the files of other days.
            days = [day(sf.timestamp_millis(sf.lit(at))) for at in (begin_ms, end_ms - 1)]
            found = found.where(sf.col("date").between(*days))
        # Two streams that had one name may have records of the same time and offset.
        return found.repartition(1).sortWithinPartitions("at_ms", "stream", "offset", "appended_ms")

    def _publish(self, number: int) -> None:
        """Publish a step at once: Spark's tasks write it, as one batch of the sink."""
        frame = self._step(number).drop(*_ORDER_COLUMNS)
        writer = frame.write.format("malamute").mode("append")
        writer.options(**self._given, batchId=str(number)).save()

    def _publish_paced(self, number: int, pace: float) -> None:
        """Publish the records of a step when they are due, from this process.

        The sink gets each tick as a partition of the step's batch.
        """
        batch = BatchName(self._options.sink_id, number)
        messages: list[Written] = []
        for partition, (at_ms, rows) in enumerate(_ticks(self._step(number), self._plan.tick_ms)):
            due_s = (at_ms - self._first_ms) / 1000 / pace
            wait_s = self._began_s + due_s - clock.monotonic()
            if wait_s > 0:
                clock.sleep(wait_s)
            self._late_ms = max(0, round(-wait_s * 1000))
            messages.append(write_partition(self._options, batch, partition, iter(rows)))
        sink.commit(self._options, messages)


def _ticks(frame: DataFrame, tick_ms: int) -> Iterator[tuple[int, list[Any]]]:
    """(time of the first, Arrow batches) of the records that are published together.

    The cuts follow from the records' times alone, so that a run that goes on has the same ones.
    """
    import numpy as np

    table: Any = frame.toArrow()
    times = table.column("at_ms").to_numpy()
    rows = table.select(
        [name for name in table.column_names if name not in _ORDER_COLUMNS]
    ).combine_chunks()
    # The rows are in the order of time: a tick ends where the number of the next row's is another.
    ticks = times // tick_ms
    bounds = [0, *(np.flatnonzero(np.diff(ticks)) + 1).tolist(), len(ticks)]
    for begin, end in itertools.pairwise(bounds):
        if end > begin:  # A step without rows has the bounds 0 and 0.
            yield int(times[begin]), rows.slice(begin, end - begin).to_batches()


def _rows(frame: DataFrame, state: State, by: str) -> DataFrame:
    """The archive's rows as the sink takes them, with the columns of _ORDER_COLUMNS.

    by: append_time or client_time, the time by which they are in order. Raises ArchiveError: the
    sink cannot write such rows.
    """
    if "body" not in frame.columns or frame.schema["body"].dataType.typeName() != "binary":
        raise ArchiveError(
            "the archive has no bodies of one blob each, and the sink writes no others: an archive "
            "of a typed stream, or of lists, cannot be replayed"
        )
    at: Column = sf.col(by) if by == "append_time" else sf.coalesce(by, "append_time")
    fields = state.settings.selection.get("fieldColumns", "")
    kept = ["subject", "body", "client_time", "properties", "fields"]
    columns = [name for name in kept if name in frame.columns]
    if fields and "fields" not in columns:
        raise ArchiveError(
            "the archive has single fields (fieldColumns) and not the map of all: it cannot be "
            "replayed whole"
        )
    # A time and a date of the same column: _step() leaves out the files of other days by it.
    dates = ["date"] if by == state.settings.date_of == "append_time" else []
    appended_ms = sf.unix_millis("append_time").alias("appended_ms")
    at_ms = sf.unix_millis(at).alias("at_ms")
    return frame.select(*columns, "stream", "offset", appended_ms, *dates, at_ms)


def _planned(
    folder: Folder, state: State, rows: DataFrame, name: str, settings: dict[str, Any], tick_ms: int
) -> Plan:  # fmt: skip
    """The plan of a replay, as it was begun or as it begins now.

    rows: of _rows(). tick_ms: 0 of a replay that is not paced. Raises ArchiveError: it was begun
    with other settings.
    """
    file = f"_replays/{name}.json"
    try:
        plan = msgspec.json.decode(folder.read(file), type=Plan)
    except FileNotFoundError:
        # A paced step is small: the driver holds its rows until they are due.
        steps = _steps(rows, settings, PACED_ROWS if tick_ms else STEP_ROWS)
        plan = Plan(settings, state.ends, steps, tick_ms=tick_ms, bounds=_bounds(rows, state))
        # Of two runs that begin the replay one creates the file, and both go by it.
        folder.create(file, msgspec.json.encode(plan))
        plan = msgspec.json.decode(folder.read(file), type=Plan)
    settings = {**settings, "paced": tick_ms > 0}
    before = {**plan.settings, "paced": plan.tick_ms > 0}
    for key, value in settings.items():
        if before.get(key) != value:
            raise ArchiveError(
                f"replay '{name}' was begun with {key} {before.get(key)!r}, and this run "
                f"has {value!r}. Put the old one back, or give the replay another name"
            )
    return plan


def _bounds(rows: DataFrame, state: State) -> dict[str, list[Bound]]:
    """Bounds of each stream's rows: of the present stream, and of former ones of the same name.

    A former stream needs a bound of its own where it had more records than the present one has by
    now: rows at or beyond the present end can only be a former one's.
    """
    reached = sf.lit(0)
    for stream, offset in state.reached.items():
        reached = sf.when(sf.col("stream") == stream, sf.lit(offset)).otherwise(reached)
    at = sf.col("appended_ms")
    latest = rows.groupBy("stream").agg(
        sf.max(at).alias("all"), sf.max(sf.when(sf.col("offset") >= reached, at)).alias("former")
    )
    found: dict[str, list[Bound]] = {}
    for stream, newest_ms, newest_former_ms in latest.collect():
        found[stream] = [Bound(state.reached.get(stream, 0), newest_ms)]
        if newest_former_ms is not None:
            found[stream].append(Bound(state.ends[stream], newest_former_ms))
    return found


def _steps(rows: DataFrame, settings: Mapping[str, Any], most: int) -> list[PlannedStep]:
    """Ranges of time that have about `most` records each.

    Records are counted in buckets of equal time, and buckets put together up to `most`. settings:
    of the plan, with the bounds of the replay's time.
    """
    begin = -_EVER if settings["start_ms"] is None else settings["start_ms"]
    end = _EVER if settings["end_ms"] is None else settings["end_ms"]
    chosen = rows.where((sf.col("at_ms") >= begin) & (sf.col("at_ms") < end))
    bounds = chosen.agg(sf.min("at_ms").alias("least"), sf.max("at_ms").alias("most")).first()
    if bounds is None or bounds.least is None:
        return []
    # Milliseconds of a bucket: a second or more, so that the buckets are _BUCKETS at most.
    width = max(1000, (bounds.most - bounds.least) // _BUCKETS + 1)
    counted = chosen.groupBy(sf.floor((sf.col("at_ms") - bounds.least) / width).alias("bucket"))
    steps: list[PlannedStep] = []
    for bucket, count in sorted((row[0], row[1]) for row in counted.count().collect()):
        first = bounds.least + bucket * width
        stop = min(end, first + width)
        if steps and steps[-1].records + count <= most:  # The bucket joins the step before.
            begin_ms, _, records = steps[-1]
            steps[-1] = PlannedStep(begin_ms, stop, records + count)
        else:
            steps.append(PlannedStep(first, stop, count))
    return steps
