"""The readers as Spark calls them, against a broker and without a Spark session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from malamute_py.client.sync.client import SyncClient, connect_sync
from pyspark_malamute.batch_reader import MalamuteReader
from pyspark_malamute.errors import CheckpointMismatch, DataLoss, SourceUnavailable
from pyspark_malamute.options import parse_options
from pyspark_malamute.planning import Range
from pyspark_malamute.stream_reader import MalamuteStreamReader
from tests.spark.conftest import serve

ALL = ReadAllAvailable()


def reader_of(endpoint: str, stream: str, **more: str) -> MalamuteStreamReader:
    given = {"endpoint": endpoint, "stream": stream, "startingOffsets": "earliest", **more}
    return MalamuteStreamReader(parse_options(given))


@pytest.mark.moderate
def test_a_rare_pattern_is_read_on_over_a_restart_of_the_broker(
    tmp_path: Path, stream: str
) -> None:
    with serve(tmp_path) as server, connect_sync(server.endpoints[0]) as client:
        endpoint = server.endpoints[0]
        client.publish_many(stream, [b"x"] * 10, subject="no")
        given = {"endpoint": endpoint, "stream": stream, "startingOffsets": "earliest"}
        query = MalamuteStreamReader(parse_options({**given, "pattern": "yes"}))
        begin = query.initialOffset()
        assert query.latestOffset(begin, ReadAllAvailable()) == begin
    with serve(tmp_path, endpoint), connect_sync(endpoint) as client:
        for _ in range(2):
            client.publish_many(stream, [b"x"] * 10, subject="no")
            assert query.latestOffset(begin, ReadAllAvailable()) == begin
        client.publish(stream, b"x", subject="yes")
        end = query.latestOffset(begin, ReadAllAvailable())
        assert end["streams"][stream]["offset"] == 31
        query.stop()


@pytest.mark.moderate
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


@pytest.mark.moderate
def test_available_now_refuses_an_expression_that_the_broker_cannot_read_on_an_empty_stream(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    client.create_stream(stream)
    reader = reader_of(endpoint, stream, pattern="regex:(")
    reader.prepareForTriggerAvailableNow()
    begin = reader.initialOffset()
    with pytest.raises(SourceUnavailable, match="Correct option 'pattern'"):
        reader.latestOffset(begin, ALL)


@pytest.mark.moderate
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


def offsets_of(reader: Any, tasks: Sequence[Any]) -> list[int]:
    """Offsets that the tasks of a batch bring, in their order."""
    return [
        offset
        for task in tasks
        for batch in reader.read(task)
        for offset in batch.column("offset").to_pylist()
    ]


def by_turns(client: SyncClient, stream: str, records: int = 2_000) -> None:
    """Publish records with an even offset under "a", the others under "b", 100 in a batch."""
    for _ in range(records // 100):
        client.publish_many(stream, [b"x" * 100] * 100, subjects=["a", "b"] * 50)


ODD = list(range(1, 2_000, 2))


@pytest.mark.moderate
def test_caps_and_tasks_count_no_purged_records(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    by_turns(client, stream)
    client.purge(stream, "a")
    reader = reader_of(endpoint, stream, maxRecordsPerTrigger="300", maxRecordsPerPartition="100")
    begin = reader.initialOffset()
    read: list[int] = []
    for _ in range(3):
        end = reader.latestOffset(begin, reader.getDefaultReadLimit())
        tasks = reader.partitions(begin, end)
        assert [len(offsets_of(reader, [task])) for task in tasks] == [100, 100, 100]
        read += offsets_of(reader, tasks)
        begin = end
    assert read == ODD[:900]


def test_a_batch_has_tasks_for_what_a_purge_left_only(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    client.publish_many(stream, [b"x" * 50_000] * 40, subject="a")
    client.publish_many(stream, [b"x" * 50_000] * 40, subject="b")
    client.purge(stream, "a")
    given = {"endpoint": endpoint, "stream": stream, "minPartitions": "8"}
    reader = MalamuteReader(parse_options(given))
    tasks = reader.partitions()
    assert all(task.end > 40 for task in tasks if isinstance(task, Range))
    assert offsets_of(reader, tasks) == list(range(40, 80))


@pytest.mark.moderate
@pytest.mark.parametrize("most", ["1", "8"])
def test_a_purge_between_the_plan_and_the_read_leaves_its_records_out_and_is_no_loss(
    endpoint: str, client: SyncClient, stream: str, most: str
) -> None:
    by_turns(client, stream)
    given = {"endpoint": endpoint, "stream": stream, "minPartitions": most}
    batch = MalamuteReader(parse_options(given))
    tasks = batch.partitions()
    following = reader_of(endpoint, stream, minPartitions=most)
    begin = following.initialOffset()
    end = following.latestOffset(begin, ALL)
    parts = following.partitions(begin, end)
    client.purge(stream, "a")
    assert offsets_of(batch, tasks) == ODD
    assert offsets_of(following, parts) == ODD


@pytest.mark.moderate
def test_a_purge_of_everything_between_two_triggers_makes_no_batch_and_what_follows_comes(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    by_turns(client, stream)
    reader = reader_of(endpoint, stream, maxRecordsPerTrigger="500")
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, reader.getDefaultReadLimit())
    assert len(offsets_of(reader, reader.partitions(begin, end))) == 500
    client.purge(stream, "#")
    assert reader.latestOffset(end, reader.getDefaultReadLimit()) == end
    client.publish_many(stream, [b"later"] * 7, subject="a")
    after = reader.latestOffset(end, reader.getDefaultReadLimit())
    assert offsets_of(reader, reader.partitions(end, after)) == list(range(2_000, 2_007))
    again = reader_of(endpoint, stream)
    again.prepareForTriggerAvailableNow()
    assert again.latestOffset(after, ALL) == after


@pytest.mark.moderate
def test_a_trim_between_the_plan_and_the_read_or_two_triggers_is_no_loss(
    endpoint: str, client: SyncClient, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    by_turns(client, stream)
    batch = MalamuteReader(parse_options({"endpoint": endpoint, "stream": stream}))
    tasks = batch.partitions()
    reader = reader_of(endpoint, stream, maxRecordsPerTrigger="500")
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, reader.getDefaultReadLimit())
    parts = reader.partitions(begin, end)
    client.trim(stream, 300)
    assert offsets_of(reader, parts) == list(range(300, 500))
    assert offsets_of(batch, tasks) == list(range(300, 2_000))
    client.trim(stream, 700)
    strict = reader_of(endpoint, stream, failOnDataLoss="all")
    with pytest.raises(DataLoss, match="offsets 500 to 699 were removed by a trim"):
        strict.latestOffset(end, ALL)
    after = reader.latestOffset(end, reader.getDefaultReadLimit())
    assert offsets_of(reader, reader.partitions(end, after)) == list(range(700, 1_200))
    assert "offsets 500 to 699 were removed by a trim" in caplog.text


@pytest.mark.moderate
def test_keys_whose_records_have_moved_are_read_once_each_and_none_is_missed(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    client.create_stream(stream, keep="last-per-subject", ring_bytes=1 << 20)
    client.publish_many(
        stream, [b"%d" % n for n in range(50)], subjects=[f"k{n}" for n in range(50)]
    )
    kv = client.kv(stream)
    while client.stream_info(stream).first < 60:
        client.publish_many(stream, [b"x" * 900] * 20, subject="busy")
    kv.put("k7", b"new")
    given = {"endpoint": endpoint, "stream": stream, "minPartitions": "8"}
    reader = MalamuteReader(parse_options(given))
    read = offsets_of(reader, reader.partitions())
    assert len(read) == len(set(read))
    newest = set(kv.keys().values())
    assert newest <= set(read)
    assert {offset for offset in read if offset <= 50} == {n + 1 for n in range(50) if n != 7}
    following = reader_of(endpoint, stream, maxRecordsPerTrigger="20")
    begin, came = following.initialOffset(), []
    for _ in range(3):
        end = following.latestOffset(begin, following.getDefaultReadLimit())
        some = offsets_of(following, following.partitions(begin, end))
        assert len(some) <= 20
        came += some
        begin = end
    assert came[:49] == sorted({n + 1 for n in range(50)} - {8})


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


@pytest.mark.moderate
def test_records_outside_the_window_of_client_times_are_not_read(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    client.publish_many(stream, [b"x"] * 50, client_time_ms=[1000 * n for n in range(50)])
    for more, expected in (
        ({"clientTimeFrom": "10000", "clientTimeTo": "20000"}, range(10, 20)),
        ({"clientTimeFrom": "10000"}, range(10, 50)),
        ({"clientTimeTo": "20000"}, range(20)),
    ):
        reader = MalamuteReader(parse_options({"endpoint": endpoint, "stream": stream, **more}))
        assert offsets_of(reader, reader.partitions()) == list(expected)
