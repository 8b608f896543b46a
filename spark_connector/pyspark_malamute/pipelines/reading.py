"""An archive as a DataFrame, and the archive and the log as one history.

Owns the seam between the two. The rules: the archive has what lies before its position and the log
is read from there on, so that no record is there twice and none is missing; where the log begins
after the position, the gap is told by its offsets. Source: ARCHITECTURE.md, The archive.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DateType, StringType, StructField, StructType

from pyspark_malamute.links import Broker
from pyspark_malamute.loss import fail_or_log_removed
from pyspark_malamute.offsets import read_offsets
from pyspark_malamute.options import SourceOptions, parse_options
from pyspark_malamute.pipelines.archive_log import ArchiveError, Settings, State, load_state
from pyspark_malamute.pipelines.archiving import made_again, partitioned, with_stream
from pyspark_malamute.pipelines.folder import Folder
from pyspark_malamute.pipelines.given import of_source
from pyspark_malamute.planning import ask_plan, check_plan
from pyspark_malamute.streams import find_streams

LOG: Final = logging.getLogger("pyspark_malamute")


def read_archive(spark: SparkSession, path: str) -> DataFrame:
    """The archived records: the source's columns, `stream`, and `date` and `subject_tokens`.

    A filter on these two leaves out files. Raises ArchiveError: there is no archive.
    """
    folder, state = opened(spark, path)
    return rows_of(spark, folder, state, [*state.files])


def history(spark: SparkSession, path: str, **options: Any) -> DataFrame:
    """All records of an archive's streams: those archived, and those in the log after them.

    options: of the link to the broker, such as endpoint and user, and failOnDataLoss, which is
    `all` unless it is given: with false, records that are in neither are logged, not refused.
    Raises DataLoss: records between archive and log are gone. Raises CheckpointMismatch: a stream
    was recreated. Raises ArchiveError, OptionError, SourceUnavailable.
    """
    folder, state = opened(spark, path)
    for gap in state.gaps:
        LOG.warning("malamute archive %s: %s were gone before they were archived", folder.uri, gap)
    archived = rows_of(spark, folder, state, [*state.files])
    given = {"failOnDataLoss": "all", **of_source(options), **state.settings.selection}
    if state.settings.columns:
        given["columns"] = state.settings.columns
    starts = _check_seam(folder, state, parse_options(given))
    if state.position:
        given["startingOffsets"] = json.dumps(starts)
    log = spark.read.format("malamute").options(**given).load()
    # The log's rows get the archive's columns, those of its paths included.
    columns = StructType.fromJson(json.loads(state.settings.schema)).fieldNames()
    recent = with_stream(log, state.settings.selection).select(*columns)
    return archived.unionByName(partitioned(recent, state.settings))


def opened(spark: SparkSession, path: str) -> tuple[Folder, State]:
    """An archive's directory and its newest state. Raises ArchiveError."""
    folder = Folder(spark, path)
    state = load_state(folder)
    if state is None:
        raise ArchiveError(
            f"there is no archive at {folder.uri}: `malamute spark archive STREAM {path}` makes one"
        )
    return folder, state


def rows_of(spark: SparkSession, folder: Folder, state: State, paths: list[str]) -> DataFrame:
    """Return the records of some files of an archive as a frame. paths: from its directory."""
    schema = _schema(state.settings)
    if not paths:
        return spark.createDataFrame([], schema)
    # Spark takes `batch`, the first directory of a path, for a column, too.
    found = (
        spark.read.schema(StructType([*schema, StructField("batch", StringType())]))
        .option("basePath", folder.uri)
        .parquet(*(f"{folder.uri}/{_escaped(each)}" for each in paths))
    )
    return found.drop("batch")


def _schema(settings: Settings) -> StructType:
    """Return the columns of an archive: those of its rows, and those of its partitions."""
    rows = StructType.fromJson(json.loads(settings.schema))
    return StructType(
        [
            *(StructField(field.name, field.dataType) for field in rows),
            StructField("date", DateType()),
            StructField("subject_tokens", StringType()),
        ]
    )


def _escaped(path: str) -> str:
    """The path as Spark's reader takes it: characters of a glob stand for themselves."""
    return "".join(f"\\{letter}" if letter in "*?[]{}\\" else letter for letter in path)


def _check_seam(folder: Folder, state: State, options: SourceOptions) -> dict[str, int]:
    """Check that the log goes on where the archive ends; return from where each stream is read.

    That is the archive's end, or where the stream goes on after a power loss took records back
    that were archived. Raises DataLoss or CheckpointMismatch where a stream does not go on.
    """
    with Broker(options) as broker:
        found = find_streams(broker, options)
        positions = read_offsets(state.position, options) if state.position else {}
        starts: dict[str, int] = {}
        # check_plan() fails or logs by the same option.
        for name, at in positions.items():
            of = options.of(name)
            if name not in found:
                fail_or_log_removed(of)
                continue
            plan = ask_plan(broker, of, at.offset, at.epoch)
            if plan.stream.hex() != at.stream:
                raise made_again(folder, name, at)
            check_plan(broker, of, plan, at.offset, at.epoch)
            starts[name] = plan.from_offset if plan.rewound else at.offset
        return starts
