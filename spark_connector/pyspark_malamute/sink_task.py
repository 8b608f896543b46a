"""A task of the sink: the rows of one partition, published once.

Owns the loop over a partition's chunks. The rules: a chunk, its record in the stream of commits and
their key are one atomic step; a chunk is sent when the one before is confirmed, so that a partition
keeps its order; a chunk that an earlier attempt published is compared, not published; what was
published is read once the link is there, after an older attempt of the task has lost its own.
Source: SPEC.md, section 4.8; ARCHITECTURE.md, The Spark sink.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from pyspark.sql.datasource import WriterCommitMessage

from malamute_protocol.batch import encode
from malamute_protocol.errors import BrokerRefused, LocalProtocolError
from malamute_protocol.limits import Limits
from malamute_py.client.position import Confirmation
from malamute_py.client.session.lanes import limits_of
from malamute_py.client.sync.client import SyncClient
from malamute_py.client.sync.link import Pending
from pyspark_malamute import links
from pyspark_malamute.errors import MalamuteSourceError, SourceUnavailable, UnwritableRows
from pyspark_malamute.rows_end import end_check
from pyspark_malamute.sink_commits import BatchName, ChunkRecord, Published, read_published
from pyspark_malamute.sink_options import SinkOptions
from pyspark_malamute.sink_rows import Chunk, checksum, chunks, contents, no_batch

_PUBLISH: Final = "publish rows"


class Written(WriterCommitMessage):
    """Report of a task to the driver about its partition."""

    def __init__(self, batch: BatchName, partition: int) -> None:
        self.batch = batch
        self.partition = partition
        self.rows = 0
        self.chunks = 0
        self.streams: Counter[str] = Counter()
        """Stream -> rows."""
        self.rows_committed: int | None = None
        """Rows of the batch, where the whole of it had been published before."""


def write_partition(
    options: SinkOptions, batch: BatchName, partition: int, batches: Iterator[Any]
) -> Written:
    """Publish the rows of a partition that are not published yet.

    batches: pyarrow.RecordBatch, as PySpark hands them over. Raises UnwritableRows, BatchChanged,
    SourceUnavailable.
    """
    all_rows_came = end_check(batches)
    report = Written(batch, partition)
    # An identity of this task's own: the broker ends the link of an older attempt that has it.
    try:
        with own_link(options, f"spark-{batch.writer}-{partition}") as own_options:
            task = _Task(own_options, batch, partition)
            for chunk in chunks(options, batches, task.rows_published, task.limits):
                if chunk.last and not all_rows_came():
                    raise SourceUnavailable(
                        f"malamute sink: the rows of partition {partition} were cut off, for the "
                        "task that makes them failed. The last of them are not published; Spark's "
                        "log tells why it failed"
                    )
                report.rows += chunk.rows.num_rows
                if task.published.commit is None:
                    task.publish(chunk, report)
                else:  # The whole batch was published before: the driver compares the rows.
                    report.rows_committed = task.published.commit.rows
            task.settle()  # for the last chunk
    except UnwritableRows as error:
        raise UnwritableRows(f"{error}; this is partition {partition}") from error
    return report


class _Task:
    """A partition under way; it asks for nothing before there is a row."""

    def __init__(self, options: SinkOptions, batch: BatchName, partition: int) -> None:
        self._options = options
        self._batch = batch
        self._partition = partition
        self._unconfirmed: tuple[Pending[Confirmation | None], ChunkRecord] | None = None
        """The chunk that was sent last, until settle() has its confirm."""

    @functools.cached_property
    def _client(self) -> SyncClient:
        """The link of this process, made at the first use."""
        return linked(self._options)

    @functools.cached_property
    def published(self) -> Published:
        """Chunks and commit that were published before the first row of this attempt."""
        return self._read()

    def rows_published(self, number: int) -> int | None:
        """Return how many rows a chunk has that is published already; None: it is not.

        For chunks(), whose cuts are to be those of the earlier attempt.
        """
        known = self.published.chunks.get((self._partition, number))
        return None if known is None else known.rows

    def limits(self) -> Limits:
        """Return the broker's limits, by which chunks() cuts a chunk that is not published."""
        welcome = self._client.welcome
        assert welcome is not None, "a chunk comes after `published`, which has made the link"
        return limits_of(welcome)

    def publish(self, chunk: Chunk, report: Written) -> None:
        """Have a chunk published, once, and count it in the report; its confirm is not awaited.

        Raises UnwritableRows: the broker takes no such batch. Raises BatchChanged: the chunk was
        published before with other rows.
        """
        found = contents(self._options, chunk)
        record = ChunkRecord(
            self._partition,
            chunk.number,
            chunk.rows.num_rows,
            chunk.size,
            checksum(found),
            chunk.last,
            [stream for stream, _ in found],
        )
        report.chunks += 1
        report.streams.update(record.streams)
        known = self.published.chunks.get((self._partition, chunk.number))
        if known is not None:
            known.check(record, self._batch)
            return
        # Only now, since this chunk was encoded while the one before was under way.
        self.settle()
        key = f"{self._batch.writer}/{self._batch.number}/{self._partition}/{chunk.number}"
        commit = encode([msgspec.json.encode(record)], subject=self._batch.chunks(self._partition))
        with links.explained(self._options, _PUBLISH):
            step = self._client.atomic(confirm="synced", key=key.encode())
            try:
                for stream, content in found:
                    step.publish_batch(stream, content)
                step.publish_batch(self._options.commit_stream, commit)
                self._unconfirmed = step.commit_nowait(self._options.broker_outage_ms), record
            except LocalProtocolError as error:
                why = error.reason
                if error.code == "too_large":
                    why += f"; the broker takes {self.limits().batch_bytes_max} bytes at once"
                raise no_batch(chunk, why) from error

    def settle(self) -> None:
        """Wait until the chunk that was sent last is confirmed.

        Where another attempt of the task took its key, the chunk must be the same. Raises
        SourceUnavailable: it has another number of rows. Raises BatchChanged: other rows.
        """
        if self._unconfirmed is None:
            return
        pending, record = self._unconfirmed
        self._unconfirmed = None
        with links.explained(self._options, _PUBLISH):
            # A link that is lost is made anew meanwhile, and the step sent again with its key.
            try:
                confirmed = pending.result(patience_ms(self._options))
                if confirmed is None or not confirmed.duplicate:
                    return
                # The broker had taken the key before: from this attempt, or from another one.
                known = self._known(record)
            except BrokerRefused as error:
                # Another attempt took the key, with other rows or with these in another order.
                known = self._known(record) if error.code == "conflict" else None
                if known is None:
                    raise
        if known is not None and known.rows != record.rows:
            raise SourceUnavailable(
                f"malamute sink: another attempt of the task published chunk {known.chunk} of "
                f"partition {self._partition} meanwhile, with {known.rows} instead of "
                f"{record.rows} rows. Have the task run again: it goes on after that chunk"
            )
        if known is not None:
            known.check(record, self._batch)

    def _known(self, record: ChunkRecord) -> ChunkRecord | None:
        """Return the record of a chunk that another attempt published; None: it is not there."""
        return self._read().chunks.get((self._partition, record.chunk))

    def _read(self) -> Published:
        """Read what of this partition is published now. Raises SourceUnavailable."""
        with links.explained(self._options, "read what is published"):
            return read_published(self._client, self._options, self._batch, self._partition)


@contextlib.contextmanager
def own_link(options: SinkOptions, identity: str) -> Iterator[SinkOptions]:
    """Give the options of a link with an identity of its own, unless a credential has one.

    The link is in use while the body runs. That of a credential stays for what the process does
    next, unless it has failed and no one else uses it, or the client is over: then the next attempt
    is to make another one.
    """
    own_options = options.named(identity)
    try:
        with links.in_use(own_options):
            yield own_options
    except SourceUnavailable as error:
        links.drop_failed(own_options, error.__cause__)
        raise
    finally:
        if not own_options.has_credential:
            # An identity that was asked for by name has one link: the next attempt's, elsewhere.
            links.drop(own_options)


def linked(options: SinkOptions) -> SyncClient:
    """Return this process's link. Raises MalamuteSourceError: the broker gives it no identity."""
    client = links.link(options)
    if not client.identity:
        raise MalamuteSourceError(
            "malamute sink: the credential gives this link no identity, and keys by which the "
            "broker takes each chunk once belong to one. Use a credential that has an identity"
        )
    return client


def patience_ms(options: SinkOptions) -> int:
    """Return how long a step may be without an answer: the broker may be away, and then answers."""
    return options.broker_outage_ms + options.request_timeout_ms
