"""df.write and df.writeStream: the writers that Spark makes, and the end of a batch.

Owns what of a writer runs in the driver and what in a task. The rules: a streaming query is known
by the id in its checkpoint, a job by sinkId or else by a random id of its own; the driver commits a
batch when exactly the chunks that its tasks tell of are published, and a batch that is committed is
never published again. Source: PySpark's DataSourceStreamArrowWriter; ARCHITECTURE.md, The Spark
sink.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from malamute_protocol.batch import encode
from malamute_protocol.errors import BrokerRefused
from pyspark_malamute import links
from pyspark_malamute.errors import BatchChanged, MalamuteSourceError, UnwritableRows
from pyspark_malamute.sink_commits import REMEDY, BatchName, CommitRecord, read_published
from pyspark_malamute.sink_options import SinkOptions, columns_fault
from pyspark_malamute.sink_task import Written, linked, own_link, patience_ms, write_partition

_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"
"""Local properties that Spark gives the tasks of a micro-batch."""


class MalamuteStreamWriter(DataSourceStreamArrowWriter):
    """The sink of a streaming query."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Publish a partition of a micro-batch, in a task; returns its report for commit()."""
        context = _task_context()
        writer = context.getLocalProperty(_QUERY_ID)
        number = context.getLocalProperty(_BATCH_ID)
        if not writer or number is None:
            raise MalamuteSourceError(
                "malamute sink: Spark gives this task no id of its query, without which a batch "
                "that is run again would be published again. Use foreachBatch and "
                "pyspark_malamute.write_batch with a sinkId"
            )
        batch = BatchName(writer, int(number))
        return write_partition(self._options, batch, context.partitionId(), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Commit a micro-batch, in the driver. Raises BatchChanged, SourceUnavailable."""
        commit(self._options, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: chunks that are published are found when the batch is run again."""


class MalamuteWriter(DataSourceArrowWriter):
    """The sink of a job."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        # Made in the driver, once for all tasks and their repetitions.
        writer = options.sink_id or f"job-{uuid.uuid4()}"
        self._batch = BatchName(writer, options.batch_id)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Publish a partition of the job, in a task; returns its report for commit()."""
        return write_partition(self._options, self._batch, _task_context().partitionId(), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Commit the job, in the driver. Raises BatchChanged, SourceUnavailable."""
        commit(self._options, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: a job with a sinkId goes on when it is run again."""


def commit(options: SinkOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Publish the record of a batch whose tasks are done; a batch without rows has none.

    The last act of a batch, in the driver. messages: what the tasks returned; None: of a task that
    Spark knows nothing of. Raises BatchChanged: more is published of the batch than its tasks tell
    of, or it was committed with another number of rows.
    """
    reports = [each for each in messages if isinstance(each, Written) and each.rows]
    if not reports:
        return
    batch, rows = reports[0].batch, sum(each.rows for each in reports)
    for each in reports:
        # A task found the whole batch published: an earlier driver committed it.
        if each.rows_committed is not None:
            _check_committed(batch, each.rows_committed, rows)
            return
    with (
        own_link(options, f"spark-{batch.writer}-driver") as own_options,
        links.explained(own_options, "commit a batch"),
    ):
        client = linked(own_options)
        published = read_published(client, own_options, batch)
        if published.commit is not None:
            _check_committed(batch, published.commit.rows, rows)
            return
        # An earlier run of the batch may have published chunks that its rows do not make now.
        wanted = {(each.partition, chunk) for each in reports for chunk in range(each.chunks)}
        strangers = sorted(published.chunks.keys() - wanted)
        if strangers:
            partition, chunk = strangers[0]
            raise BatchChanged(
                f"malamute sink: batch {batch.number} of '{batch.writer}' was published in "
                f"part before, and chunk {chunk} of partition {partition} is "
                f"not among what its tasks have now. {REMEDY}"
            )
        streams = sorted({stream for each in reports for stream in each.streams})
        record = CommitRecord(
            batch.writer,
            batch.number,
            rows,
            {stream: client.stream_info(stream).tail for stream in streams},
        )
        # The broker takes a step with this key once, however often it is sent.
        key = f"{batch.writer}/{batch.number}/commit".encode()
        step = client.atomic(confirm="synced", key=key)
        content = encode([msgspec.json.encode(record)], subject=batch.commit)
        step.publish_batch(own_options.commit_stream, content)
        try:
            step.commit(patience_ms(own_options))
        except BrokerRefused as error:
            # Another driver has committed the batch meanwhile, and saw other tails.
            published = read_published(client, own_options, batch)
            if error.code != "conflict" or published.commit is None:
                raise
            _check_committed(batch, published.commit.rows, rows)


def check_columns(schema: StructType, options: SinkOptions) -> None:
    """Raise UnwritableRows: the frame's columns cannot be written; asked before any task runs."""
    columns = {field.name: field.dataType.simpleString() for field in schema}
    fault = columns_fault(columns, options)
    if fault:
        raise UnwritableRows(f"malamute sink: {fault}")


def refuse_overwriting(overwrite: bool) -> None:
    """Raise UnwritableRows: records that are published are not taken back."""
    if overwrite:
        raise UnwritableRows(
            "malamute sink: a stream cannot be overwritten: use mode append for write, and output "
            "mode append for writeStream"
        )


def _check_committed(batch: BatchName, committed: int, rows: int) -> None:
    """Raise BatchChanged if a batch that was committed before now has another number of rows."""
    if committed != rows:
        raise BatchChanged(
            f"malamute sink: batch {batch.number} of '{batch.writer}' is committed with "
            f"{committed} rows, and has {rows} now, of which none was published. Is the sinkId "
            "used for something else as well? Each query and each write needs its own"
        )


def _task_context() -> TaskContext:
    """Return what Spark tells this task of itself."""
    context = TaskContext.get()
    assert context is not None, "a writer writes in a task"
    return context
