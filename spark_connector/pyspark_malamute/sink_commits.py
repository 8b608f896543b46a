"""The stream of commits: what of a batch is published, as tasks and driver read and write it.

Owns the records of that stream. A chunk's record is published in one step with the chunk's rows, so
that one is there when the other is; a batch's record follows when the driver has seen that exactly
the chunks of its tasks are there. The rule: only durable records are believed. The broker forgets
keys when there are too many; these records are what it remembers instead.
Source: ARCHITECTURE.md, The Spark sink.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from malamute_protocol.batch import Record
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.pattern import Pattern, any_of, prefix, topic
from malamute_py.client.sync.client import SyncClient
from pyspark_malamute.errors import BatchChanged
from pyspark_malamute.sink_options import SinkOptions

VERSION: Final = 1
"""Version of the chunking and of the contents' form, on which checksums depend."""


class BatchName(NamedTuple):
    """Name of a batch, by which its records and keys are known."""

    writer: str
    """Id of the streaming query, or sinkId."""
    number: int

    @property
    def subject(self) -> str:
        """Beginning of the subjects of the batch's records in the stream of commits."""
        return f"{self.writer}.{self.number}"

    @property
    def commit(self) -> str:
        """Subject of the record that says that all of the batch is published."""
        return f"{self.subject}.commit"

    def chunks(self, partition: int) -> str:
        """Subject of the records of a partition's chunks."""
        return f"{self.subject}.{partition}"


class ChunkRecord(msgspec.Struct, frozen=True):
    """A chunk that is published."""

    partition: int
    chunk: int
    rows: int
    bytes: int
    checksum: int
    last: bool
    """Whether the task knew of no further row. Spark ends the rows of a task that fails as if there
    were no more, so that a later attempt may have some."""
    streams: list[str]
    version: int = VERSION

    def check(self, again: ChunkRecord, batch: BatchName) -> None:
        """Raise BatchChanged if a task has other rows now than were published in this chunk.

        again: record of the chunk as the task has it now. A partition of one chunk may have its
        rows in another order, since no cut depends on it.
        """
        # Checksums tell only where the order is bound, and both are of one version.
        alone = self.chunk == 0 and self.last and again.last
        exact = self.version == again.version and not alone
        if (self.rows, self.bytes) == (again.rows, again.bytes) and (
            not exact or self.checksum == again.checksum
        ):
            return
        raise BatchChanged(
            f"malamute sink: batch {batch.number} of '{batch.writer}' was published in part, and "
            f"partition {self.partition} has other rows now: chunk {self.chunk} had {self.rows} "
            f"rows and has {again.rows}, or has them in another order. {REMEDY}"
        )


class CommitRecord(msgspec.Struct, frozen=True):
    """A batch of which everything is published."""

    writer: str
    batch: int
    rows: int
    next: dict[str, int]
    """Stream -> offset before which all records of the batch lie, and after which those of the
    writer's next batch do."""


REMEDY: Final = (
    "A batch that is run again must give the same rows to the same partitions, and in the same "
    "order where a partition is larger than chunkBytes: put the query, its options and its number "
    "of partitions back as they were, let it finish the batch, and change them then"
)


class Published(NamedTuple):
    """Records of a batch that are published."""

    commit: CommitRecord | None
    chunks: dict[tuple[int, int], ChunkRecord]
    """(partition, number of the chunk) -> its record."""


def read_published(
    client: SyncClient, options: SinkOptions, batch: BatchName, partition: int | None = None
) -> Published:
    """Read what is published of a batch, of one partition or of all (None), and its commit.

    A task asks for its partition before it publishes, the driver for all before it commits. Raises
    what a subscription raises.
    """
    pattern = prefix(f"{batch.subject}.")
    if partition is not None:
        pattern = any_of(topic(batch.commit), topic(batch.chunks(partition)))
    commit: CommitRecord | None = None
    chunks: dict[tuple[int, int], ChunkRecord] = {}
    for record in commit_records(client, options, pattern):
        if record.subject == batch.commit:
            commit = msgspec.json.decode(record.body, type=CommitRecord)
        else:
            found = msgspec.json.decode(record.body, type=ChunkRecord)
            chunks[found.partition, found.chunk] = found
    return Published(commit, chunks)


def commit_records(
    client: SyncClient, options: SinkOptions, pattern: str | Pattern
) -> Iterator[Record]:
    """Yield the durable records in the stream of commits; none where no sink has written yet.

    Raises what a subscription raises.
    """
    try:
        with client.subscribe(
            options.commit_stream,
            pattern,
            start="earliest",
            until="tail",
            visibility="durable",
            timeout_ms=options.request_timeout_ms,
        ) as reading:
            yield from reading
    except BrokerRefused as error:
        if error.code != "unknown_stream":
            raise
