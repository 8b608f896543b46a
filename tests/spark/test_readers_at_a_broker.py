"""The readers as Spark calls them, against a broker and without a Spark session."""

from __future__ import annotations

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from malamute_py.client.sync.client import SyncClient
from pyspark_malamute.errors import CheckpointMismatch, SourceUnavailable
from pyspark_malamute.options import parse_options
from pyspark_malamute.planning import Range
from pyspark_malamute.stream_reader import MalamuteStreamReader

ALL = ReadAllAvailable()


def reader_of(endpoint: str, stream: str, **more: str) -> MalamuteStreamReader:
    given = {"endpoint": endpoint, "stream": stream, "startingOffsets": "earliest", **more}
    return MalamuteStreamReader(parse_options(given))


def test_available_now_refuses_a_stream_that_was_recreated_and_is_empty(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    client.publish_many(stream, [b"x"] * 100)
    reader = reader_of(endpoint, stream)
    end = reader.latestOffset(reader.initialOffset(), ALL)
    client.remove_stream(stream)
    client.create_stream(stream)
    restarted = reader_of(endpoint, stream)
    restarted.prepareForTriggerAvailableNow()
    with pytest.raises(CheckpointMismatch, match="was recreated"):
        restarted.latestOffset(end, ALL)


def test_available_now_refuses_an_expression_that_the_broker_cannot_read_on_an_empty_stream(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    client.create_stream(stream)
    reader = reader_of(endpoint, stream, pattern="regex:(")
    reader.prepareForTriggerAvailableNow()
    begin = reader.initialOffset()
    with pytest.raises(SourceUnavailable, match="Correct option 'pattern'"):
        reader.latestOffset(begin, ALL)


def test_a_cap_of_records_counts_those_that_match(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    for _ in range(10):
        client.publish_many(
            stream, [b"x" * 100] * 1000,
            subjects=["hit" if row % 100 == 0 else "miss" for row in range(1000)],
        )  # fmt: skip
    reader = reader_of(endpoint, stream, pattern="hit", maxOffsetsPerTrigger="40")
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, reader.getDefaultReadLimit())
    assert end["streams"][stream]["offset"] == 3901
    tasks = [task for task in reader.partitions(begin, end) if isinstance(task, Range)]
    rows = sum(batch.num_rows for task in tasks for batch in reader.read(task))
    assert rows == 40


def test_tasks_of_a_checkpoint_know_with_which_record_the_stream_begins_now(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    client.publish_many(stream, [b"x"] * 100, confirm="synced")
    reader = reader_of(endpoint, stream)
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, ALL)
    client.edit_stream(stream, max_records=10)
    client.publish_many(stream, [b"x"] * 10, confirm="synced")
    first = client.plan_read(stream).first
    assert first
    restarted = reader_of(endpoint, stream, failOnDataLoss="false")
    tasks = restarted.partitions(begin, end)
    assert [(task.start, task.first) for task in tasks if isinstance(task, Range)] == [(0, first)]
