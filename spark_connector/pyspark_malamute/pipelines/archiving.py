"""Streams into partitioned Parquet, every record once.

Owns the query that archives. The rules: the archive's log says where it goes on, so that a run
needs no checkpoint of an earlier one; the files of a batch and the position after it become the
archive's in one entry; records that are gone before they were archived end the run by name, or
stand in the log as a gap where the caller accepts that. Source: ARCHITECTURE.md, The archive.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery

from pyspark_malamute.errors import CheckpointMismatch, OptionError
from pyspark_malamute.links import Broker
from pyspark_malamute.offsets import NEVER_READ, StreamOffset, read_offsets, to_json
from pyspark_malamute.options import SourceOptions, parse_options
from pyspark_malamute.pipelines.archive_log import (
    ArchivedFile,
    ArchiveError,
    ArchiveLog,
    Entry,
    Gap,
    Settings,
    State,
)
from pyspark_malamute.pipelines.folder import Folder
from pyspark_malamute.pipelines.given import of_source
from pyspark_malamute.pipelines.seeding import position_after, seed
from pyspark_malamute.streams import find_streams

SELECTING: Final = (
    "stream", "streams", "streamsPattern", "pattern", "clientTimeFrom", "clientTimeTo",
    "fieldColumns", "includeFields", "includeKeys", "includeProperties", "bodyType",
)  # fmt: skip
"""Options of the source that say what an archive has; they stay as they were in its first run."""
_STARTING_OPTIONS: Final = (
    "startingOffsets", "startingTimestamp", "startingOffsetsByTimestampStrategy",
)  # fmt: skip
PARTITIONS: Final = ("date", "subject_tokens")
"""Columns that are in a file's path."""
_DAY_US: Final = 24 * 3_600_000_000


def archive(
    spark: SparkSession,
    path: str,
    *,
    date_of: str = "append_time",
    subject_tokens: int = 1,
    follow: bool = False,
    every_ms: int = 10_000,
    **options: Any,
) -> StreamingQuery:
    """Archive streams into Parquet files, each record once, and return the query that does so.

    path: directory of the archive, made where there is none. date_of: append_time or client_time,
    the column whose day (UTC) is in the path of a file. subject_tokens: tokens of the subject that
    are in the path as well; 0: none. These two hold from the first run on. follow: go on with what
    comes, a batch each every_ms; otherwise the query ends with what is there now. options: of the
    source. failOnDataLoss is `all` unless it is given; with false, records that are gone when the
    run begins are noted in the archive, as a gap.
    Raises ArchiveError, OptionError, SourceUnavailable, CheckpointMismatch; the query ends with
    what its reader raises, and with ArchiveError when another run archives the same.
    """
    given = of_source(options)
    for name in ("columns", "endingOffsets", "endingTimestamp"):
        if name in given:
            raise OptionError(name, "is not for an archive: it has all columns and goes on; remove")
    if date_of not in ("append_time", "client_time"):
        raise ArchiveError(f"date_of {date_of!r} is neither append_time nor client_time")
    log = ArchiveLog(folder := Folder(spark, path), clock_ms)
    state = log.load()
    source = dict(given)
    accepts_loss = not parse_options(given).fail_on_data_loss
    if accepts_loss or "failOnDataLoss" not in given:
        # What is lost amid a run ends it, so that the next run notes it.
        source["failOnDataLoss"] = "all"
    if state is not None:
        _check_settings(state.settings, given, date_of, subject_tokens)
    # Where the query begins: as the caller says, or where the archive ends.
    if state is None or not state.position:
        if "startingTimestamp" not in source:
            source.setdefault("startingOffsets", "earliest")
    else:
        for name in _STARTING_OPTIONS:
            if name in given:
                raise OptionError(name, "is for the first run; the archive goes on. Remove it")
        state = _with_gaps(folder, log, state, parse_options(source), accepted=accepts_loss)
    # An archive keeps the columns of its first run, also where a stream's schema has grown.
    columns = state.settings.columns if state else _typed_columns(given)
    if columns:
        source["columns"] = columns
    frame = with_stream(spark.readStream.format("malamute").options(**source).load(), given)
    if state is None:
        settings = Settings(
            {name: text for name, text in given.items() if name in SELECTING},
            date_of, subject_tokens, frame.schema.json(), columns,
        )  # fmt: skip
        # commit() calls it with the newest state: another run may have begun the archive meanwhile.
        state = log.commit(lambda newest: _first_entry(log, newest, settings))
    # Spark wants a checkpoint; this one lasts for the run, and begins at the archive's position.
    checkpoint = Path(tempfile.mkdtemp(prefix="malamute-archive-"))
    atexit.register(shutil.rmtree, checkpoint, ignore_errors=True)
    if state.position:
        seed(checkpoint, state.position)
    run = _Run(folder, log, state, checkpoint)
    writer = (
        frame.writeStream.foreachBatch(run.archive_batch)
        .queryName(f"archive {folder.uri}")
        .option("checkpointLocation", checkpoint.as_uri())
    )
    if follow:
        return writer.trigger(processingTime=f"{every_ms} milliseconds").start()
    return writer.trigger(availableNow=True).start()


def clock_ms() -> int:
    """Return the wall clock's time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def partitioned(frame: DataFrame, settings: Settings) -> DataFrame:
    """The rows with the columns that are in a file's path: the day, and the subject's first tokens.

    Without tokens the column is null, for a path has no empty text.
    """
    tokens = sf.substring_index("subject", ".", settings.subject_tokens)
    return frame.withColumns(
        {
            "date": day(sf.col(settings.date_of)),
            "subject_tokens": sf.nullif(tokens, sf.lit("")),
        }
    )


def day(at: Column) -> Column:
    """The day in UTC of a column of times, whatever the session's time zone is."""
    return sf.date_from_unix_date(sf.floor(sf.unix_micros(at) / _DAY_US).cast("int"))


def write_files(
    folder: Folder, frame: DataFrame, settings: Settings, *, whole: bool = False
) -> list[ArchivedFile]:
    """Write rows into new files, which an entry of the log is to make the archive's.

    whole: a task's rows of a partition become one file, whatever the session bounds files by.
    """
    name = f"batch={uuid.uuid4().hex}"
    rows = frame if "date" in frame.columns else partitioned(frame, settings)
    writer = rows.write.option("maxRecordsPerFile", 0) if whole else rows.write
    writer.partitionBy(*PARTITIONS).parquet(f"{folder.uri}/{name}")
    # Spark writes files of its own beside those of the partitions.
    return [
        ArchivedFile(file.path, file.bytes)
        for file in folder.files(name)
        if file.path.endswith(".parquet") and "/date=" in file.path
    ]


class _Run:
    """A run of an archive: what foreachBatch calls."""

    def __init__(self, folder: Folder, log: ArchiveLog, state: State, checkpoint: Path) -> None:
        self._folder = folder
        self._log = log
        self._settings = state.settings
        self._position = state.position
        self._checkpoint = checkpoint

    def archive_batch(self, rows: DataFrame, batch_id: int) -> None:
        """Write the files of a batch, and make them the archive's.

        Raises ArchiveError: another run has added files since this one last did.
        """
        position = position_after(self._checkpoint, batch_id)
        files = write_files(self._folder, rows, self._settings)
        change = {"add": files, "position": position}
        folder, log, before = self._folder, self._log, self._position
        # Called again with the state that another writer, a compaction, has made meanwhile.
        log.commit(lambda newest: _next_entry(folder, log, newest, before, change))
        self._position = position


def _next_entry(
    folder: Folder,
    log: ArchiveLog,
    newest: State | None,
    before: dict[str, Any],
    change: dict[str, Any],
) -> Entry:
    """Return the entry for a change that a run made of the archive, for ArchiveLog.commit().

    newest: state that the log has by now. before: position of the archive on which the change
    builds. change: arguments of ArchiveLog.entry().

    Raises ArchiveError: another run has moved the position.
    """
    if newest is None or newest.position != before:
        raise ArchiveError(
            f"another run has archived into {folder.uri} meanwhile. Nothing is there twice; let "
            "one run go on"
        )
    return log.entry(newest, **change)


def _first_entry(log: ArchiveLog, state: State | None, settings: Settings) -> Entry:
    """Return the first entry of an archive, for ArchiveLog.commit().

    state: that the log has by now. Raises ArchiveError: another run has begun it.
    """
    if state is not None:
        raise ArchiveError("another run has begun this archive meanwhile. Let one run go on")
    return log.entry(None, settings=settings)


def _check_settings(
    settings: Settings, given: Mapping[str, str], date_of: str, subject_tokens: int
) -> None:
    """Raise ArchiveError where a run asks for another archive than the one that is there.

    settings: the archive's. given, date_of, subject_tokens: the run's.
    """
    now: dict[str, object] = {name: given.get(name) for name in SELECTING}
    before: dict[str, object] = {name: settings.selection.get(name) for name in SELECTING}
    now |= {"date_of": date_of, "subject_tokens": subject_tokens}
    before |= {"date_of": settings.date_of, "subject_tokens": settings.subject_tokens}
    changed = next((name for name in now if now[name] != before[name]), None)
    if changed is not None:
        raise ArchiveError(
            f"the archive was begun {_setting_in_words(changed, before[changed])}, and this run "
            f"comes {_setting_in_words(changed, now[changed])}. Give the old one, or begin another "
            "archive"
        )


def _setting_in_words(name: str, value: object) -> str:
    """Say that a run has a setting of this value, or none."""
    return f"without {name}" if value is None else f"with {name} {value!r}"


def _typed_columns(given: Mapping[str, str]) -> str:
    """Option `columns` for the archive of a typed stream, with what a record has besides; else "".

    given: options of the source.
    """
    if given.get("bodyType", "").strip().lower() != "typed":
        return ""
    from pyspark_malamute.typed import typed_schema

    names = typed_schema(parse_options(given)).fieldNames()
    beside = ("offset", "append_time", "client_time", "subject", "fields")
    return ",".join([*(name for name in beside if name not in names), *names])


def with_stream(frame: DataFrame, given: Mapping[str, str]) -> DataFrame:
    """Return the source's rows with a column `stream`, as an archive has it, also of one stream.

    given: options of the source.
    """
    if "stream" in frame.columns:
        return frame
    return frame.select(sf.lit(given["stream"]).alias("stream"), "*")


def made_again(folder: Folder, name: str, at: StreamOffset) -> CheckpointMismatch:
    """Make the error that an archive does not go on with a stream that was made again.

    at: where the archive ends in the former one.
    """
    return CheckpointMismatch(
        f"stream '{name}' was removed and made again, or the endpoint is another broker's: the "
        f"archive {folder.uri} ends at offset {at.offset} of the former one. To note that what "
        "came after is gone, and to archive the new stream from its first record, run archive with "
        "failOnDataLoss false (malamute spark archive --accept-loss)"
    )


def _with_gaps(
    folder: Folder, log: ArchiveLog, state: State, options: SourceOptions, *, accepted: bool
) -> State:
    """Note as gaps what is gone of the streams before it was archived; return the state after that.

    For a run that goes on with an archive, which then begins after the gaps. accepted: False notes
    nothing, for the query itself will tell what is gone. Raises CheckpointMismatch then: a stream
    was made again. Raises ArchiveError: another run has archived meanwhile.
    """
    with Broker(options) as broker:
        found = find_streams(broker, options)
    reached = dict(read_offsets(state.position, options)) if state.position else {}
    gaps: list[Gap] = []
    for name, at in list(reached.items()):
        facts = found.get(name)
        # The stream was removed; or it was made again; or its oldest records are gone.
        if facts is None:
            gaps.append(Gap(name, at.offset, 0))  # 0: the stream itself was removed
            del reached[name]
        elif facts.uuid.hex() != at.stream:
            if not accepted:
                raise made_again(folder, name, at)
            gaps.append(Gap(name, at.offset, 0))
            reached[name] = StreamOffset(facts.uuid.hex(), *NEVER_READ)  # from its first record on
        elif facts.first > at.offset and at.epoch:
            gaps.append(Gap(name, at.offset, facts.first))
            reached[name] = StreamOffset(at.stream, facts.epoch, facts.first)
    if not gaps or not accepted:
        return state
    change = {"position": to_json(reached, options), "gaps": gaps}
    return log.commit(lambda newest: _next_entry(folder, log, newest, state.position, change))
