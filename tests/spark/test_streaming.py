"""spark.readStream: restarts, limits, losses, and what a person is told of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from malamute_py.client.sync.client import SyncClient, connect_sync
from malamute_py.config import LinksSection
from malamute_py.demo.daemon import Daemon
from tests.spark.conftest import serve

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]

README = Path(__file__).parents[2] / "spark_connector" / "README.md"
WAIT_S = 180
"""On a busy machine the first query of a session alone has taken 40 s."""


class Sink:
    """A parquet sink with its checkpoint, and what is in it."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self._spark = spark
        self.path = str(directory / "out")
        self.checkpoint = str(directory / "checkpoint")

    def start(self, frame: DataFrame, **trigger: Any) -> StreamingQuery:
        return (
            frame.select("offset", "subject", "body")
            .writeStream.format("parquet")
            .option("checkpointLocation", self.checkpoint)
            .trigger(**trigger)
            .start(self.path)
        )

    def run(self, frame: DataFrame) -> StreamingQuery:
        """All that is there now."""
        query = self.start(frame, availableNow=True)
        assert query.awaitTermination(WAIT_S)
        return query

    def offsets(self) -> list[int]:
        """Offsets of the rows, in their order, repeated ones too."""
        return sorted(row.offset for row in self._spark.read.parquet(self.path).collect())

    def extent(self) -> tuple[int, int, int, int]:
        """Rows, distinct offsets, least and greatest offset."""
        from pyspark.sql import functions as f

        rows = self._spark.read.parquet(self.path)
        offset = f.col("offset")
        counted = rows.agg(
            f.count(offset), f.count_distinct(offset), f.min(offset), f.max(offset)
        ).collect()
        return tuple(counted[0])


@pytest.fixture
def sink(spark: SparkSession, tmp_path: Path) -> Sink:
    return Sink(spark, tmp_path)


@pytest.fixture
def memory(spark: SparkSession, tmp_path: Path) -> Iterator[Callable[..., Memory]]:
    """Starts queries into memory, and stops them."""
    started: list[Memory] = []

    def start(frame: DataFrame) -> Memory:
        query = Memory(spark, frame, f"rows_{len(started)}_{tmp_path.name}", tmp_path)
        started.append(query)
        return query

    yield start
    for each in started:
        each.query.stop()


class Memory:
    """A running query whose rows can be looked at."""

    def __init__(self, spark: SparkSession, frame: DataFrame, name: str, directory: Path) -> None:
        self._spark = spark
        self._name = name.replace("-", "_")
        self.query: StreamingQuery = (
            frame.select("offset", "subject")
            .writeStream.format("memory")
            .queryName(self._name)
            .option("checkpointLocation", str(directory / self._name))
            .start()
        )

    def offsets(self) -> list[int]:
        self.query.processAllAvailable()
        return sorted(row.offset for row in self._spark.table(self._name).collect())


def publish(client: SyncClient, stream: str, count: int, subject: str = "a.b") -> None:
    client.publish_many(stream, [b"x" * 50] * count, subject=subject)


def failure_of(query: StreamingQuery) -> str:
    """Wait for the query to fail, and return its error."""
    from pyspark.errors import StreamingQueryException

    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(WAIT_S)
    return str(caught.value)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.02)


def trim(client: SyncClient, stream: str, to_offset: int) -> None:
    """Have retention remove the records before about this offset, and wait until it did."""
    client.edit_stream(stream, max_bytes=1)
    wait_until(lambda: client.stream_info(stream).first >= to_offset)


# --- restarts --------------------------------------------------------------------------------


def test_a_query_goes_on_from_its_checkpoint_without_loss_or_repeat(
    read_stream: Callable[..., DataFrame], client: SyncClient, stream: str, sink: Sink
) -> None:
    publish(client, stream, 500)
    sink.run(read_stream())
    publish(client, stream, 300)
    sink.run(read_stream())
    assert sink.offsets() == list(range(800))
    idle = sink.run(read_stream())
    assert sink.offsets() == list(range(800))
    assert all(progress.numInputRows == 0 for progress in idle.recentProgress)


def test_a_query_killed_amid_a_batch_ends_with_every_record_once(
    read_stream: Callable[..., DataFrame],
    client: SyncClient,
    endpoint: str,
    stream: str,
    tmp_path: Path,
    sink: Sink,
) -> None:
    total = 200_000
    for _ in range(4):
        publish(client, stream, total // 4)
    program = [sys.executable, "-m", "tests.spark.killed_query", endpoint, stream, str(tmp_path)]
    with (tmp_path / "killed.log").open("wb") as log:
        killed = subprocess.Popen(program, stdout=log, stderr=log, start_new_session=True)
    try:
        begun = Path(sink.checkpoint) / "offsets" / "2"
        wait_until(lambda: begun.exists() or killed.poll() is not None)
        assert killed.poll() is None, (tmp_path / "killed.log").read_text()[-3000:]
    finally:
        # The whole group: the workers, too, must go in the middle of what they do.
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    committed = len(list((Path(sink.checkpoint) / "commits").glob("[0-9]*")))
    assert 0 < committed < total // 10_000
    sink.run(read_stream())
    assert sink.extent() == (total, total, 0, total - 1)


def test_a_capped_query_takes_several_batches_and_shows_its_lag(
    read_stream: Callable[..., DataFrame], client: SyncClient, stream: str, sink: Sink
) -> None:
    for _ in range(10):
        publish(client, stream, 100)
    query = sink.run(read_stream(maxRecordsPerTrigger="300"))
    assert sink.offsets() == list(range(1000))
    counts = [progress.numInputRows for progress in query.recentProgress]
    assert len([count for count in counts if count]) >= 4
    assert max(counts) <= 300
    told = query.recentProgress[0].sources[0].latestOffset
    assert '"recordsBehindLatest": 700' in told or '"recordsBehindLatest":700' in told


def test_only_matching_records_come_and_the_position_survives_a_restart(
    read_stream: Callable[..., DataFrame], client: SyncClient, stream: str, sink: Sink
) -> None:
    for subject in ("a.b", "c.d", "a.b", "c.d"):
        publish(client, stream, 100, subject)
    sink.run(read_stream(pattern="c.*"))
    publish(client, stream, 50, "a.b")
    publish(client, stream, 10, "c.d")
    sink.run(read_stream(pattern="c.*"))
    assert sink.offsets() == [*range(100, 200), *range(300, 400), *range(450, 460)]


def test_a_query_starts_at_a_time_when_it_is_new(
    read_stream: Callable[..., DataFrame],
    spark: SparkSession,
    endpoint: str,
    client: SyncClient,
    stream: str,
    sink: Sink,
) -> None:
    publish(client, stream, 100)
    time.sleep(0.01)
    young = client.publish(stream, b"young")
    options = {"endpoint": endpoint, "stream": stream}
    asked = {"startingTimestamp": str(young.append_time_ms)}
    sink.run(spark.readStream.format("malamute").options(**options, **asked).load())
    assert sink.offsets() == [100]


def test_many_streams_are_one_query_and_new_ones_are_found(
    spark: SparkSession, endpoint: str, client: SyncClient, stream: str, sink: Sink
) -> None:
    names = [f"{stream}.{number}" for number in range(20)]

    def frame() -> DataFrame:
        options = {"subscribePattern": rf"{stream}\..*", "startingOffsets": "earliest"}
        return spark.readStream.format("malamute").options(endpoint=endpoint, **options).load()

    def rows() -> list[tuple[str, int]]:
        found = spark.read.parquet(sink.path).select("stream", "offset").collect()
        return sorted(tuple(row) for row in found)

    def run() -> None:
        query = (
            frame()
            .writeStream.format("parquet")
            .option("checkpointLocation", sink.checkpoint)
            .trigger(availableNow=True)
            .start(sink.path)
        )
        assert query.awaitTermination(WAIT_S)

    for name in names[:15]:
        publish(client, name, 30)
    run()
    for name in names[10:]:
        publish(client, name, 30)
    run()
    assert rows() == [
        (name, offset)
        for number, name in sorted(enumerate(names), key=lambda pair: pair[1])
        for offset in range(60 if 10 <= number < 15 else 30)
    ]


def test_the_recipe_for_foreach_batch_publishes_a_batch_that_is_run_again_once(
    read_stream: Callable[..., DataFrame],
    endpoint: str,
    client: SyncClient,
    stream: str,
    tmp_path: Path,
) -> None:
    section = README.read_text().partition("\n### foreachBatch\n")[2]
    recipe = section.partition("```python\n")[2].partition("```")[0]
    for old, new in (
        ("tcp://127.0.0.1:9797", endpoint), ("/data", str(tmp_path)),
        ('stream="bodies"', f'stream="{stream}-copy"'),
        ('stream="delayed"', f'stream="{stream}-delayed"'),
    ):  # fmt: skip
        assert old in recipe
        recipe = recipe.replace(old, new)
    publish(client, stream, 100)
    publish(client, stream, 100, "c.d")
    names: dict[str, Any] = {"flights": read_stream(maxRecordsPerTrigger="150")}
    exec(recipe, names)
    assert names["query"].trigger(availableNow=True).start().awaitTermination(WAIT_S)
    # Spark runs the last batch again when the query died before it was committed.
    commits = Path(tmp_path / "checkpoints" / "delayed" / "commits")
    last = max(commits.glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    (commits / f".{last.name}.crc").unlink(missing_ok=True)
    names = {"flights": read_stream(maxRecordsPerTrigger="150")}
    exec(recipe, names)
    assert names["query"].trigger(availableNow=True).start().awaitTermination(WAIT_S)
    copied = client.subscribe(f"{stream}-copy", start="earliest", until="tail")
    published = client.subscribe(stream, start="earliest", until="tail")
    bodies = sorted(record.body for record in copied)
    assert len(bodies) == 200
    assert bodies == sorted(record.body for record in published)


# --- running -----------------------------------------------------------------------------------


def test_two_queries_follow_a_stream_each_at_its_own_pace(
    read_stream: Callable[..., DataFrame],
    client: SyncClient,
    stream: str,
    memory: Callable[..., Memory],
) -> None:
    publish(client, stream, 100)
    everything = memory(read_stream())
    assert everything.offsets() == list(range(100))
    some = memory(read_stream(pattern="c.#", startingOffsets="latest"))
    assert some.offsets() == []
    publish(client, stream, 20, "c.d")
    publish(client, stream, 20, "a.b")
    assert everything.offsets() == list(range(140))
    assert some.offsets() == list(range(100, 120))


def test_a_query_outlives_the_broker_being_killed_and_started_again(
    read_stream: Callable[..., DataFrame], tmp_path: Path, memory: Callable[..., Memory]
) -> None:
    with Daemon(tmp_path / "broker") as daemon, connect_sync(daemon.endpoint) as client:
        publish(client, "s", 100)
        query = memory(read_stream(endpoint=daemon.endpoint, stream="s"))
        assert query.offsets() == list(range(100))
        daemon.kill()
        daemon.start()
        publish(client, "s", 100)
        assert query.offsets() == list(range(200))
        query.query.stop()


def test_a_query_that_is_stopped_says_goodbye_to_the_broker(
    read_stream: Callable[..., DataFrame], tmp_path: Path, memory: Callable[..., Memory]
) -> None:
    # Silence would end a link after the time that is waited for here: only a goodbye can.
    patient = LinksSection(heartbeat_ms=60_000, expiry_beats=20)
    with (
        serve(tmp_path / "broker", links=patient) as server,
        connect_sync(server.endpoints[0]) as client,
    ):
        publish(client, "s", 10)
        query = memory(read_stream(endpoint=server.endpoints[0], stream="s"))
        assert query.offsets() == list(range(10))
        # Those of the executors stay for the tasks of other queries.
        links = len(client.list_links())
        query.query.stop()
        wait_until(lambda: len(client.list_links()) < links)


# --- what no longer fits -------------------------------------------------------------------------


def test_a_stream_that_was_recreated_ends_the_query_by_name(
    read_stream: Callable[..., DataFrame], client: SyncClient, stream: str, sink: Sink
) -> None:
    publish(client, stream, 100)
    sink.run(read_stream())
    client.remove_stream(stream)
    publish(client, stream, 200)
    text = failure_of(sink.start(read_stream(), availableNow=True))
    assert f"stream '{stream}' was recreated" in text
    assert "checkpointLocation" in text


def test_a_changed_pattern_ends_the_query_by_name(
    read_stream: Callable[..., DataFrame], client: SyncClient, stream: str, sink: Sink
) -> None:
    publish(client, stream, 100)
    sink.run(read_stream(pattern="a.#"))
    text = failure_of(sink.start(read_stream(pattern="c.#"), availableNow=True))
    assert "the pattern has changed" in text


def test_a_stream_that_does_not_exist_and_a_broker_that_is_not_there_end_the_query_by_name(
    read_stream: Callable[..., DataFrame], sink: Sink
) -> None:
    text = failure_of(sink.start(read_stream(stream="missing"), availableNow=True))
    assert "there is no stream 'missing'" in text
    nowhere = read_stream(endpoint="tcp://127.0.0.1:9", connectTimeoutMs="300")
    text = failure_of(sink.start(nowhere, availableNow=True))
    assert "Is the broker running there" in text


def test_a_purge_and_a_trim_between_two_triggers_end_no_query_and_bring_nothing_twice(
    read_stream: Callable[..., DataFrame], client: SyncClient, stream: str, sink: Sink
) -> None:
    publish(client, stream, 100)
    sink.run(read_stream(maxRecordsPerTrigger="30"))
    publish(client, stream, 100)
    publish(client, stream, 100, subject="gone")
    publish(client, stream, 50)
    client.trim(stream, 120)
    client.purge(stream, "gone")
    sink.run(read_stream(maxRecordsPerTrigger="30"))
    assert sink.offsets() == [*range(100), *range(120, 200), *range(300, 350)]


def test_records_gone_by_retention_end_the_query_or_are_skipped(
    read_stream: Callable[..., DataFrame], client: SyncClient, stream: str, sink: Sink
) -> None:
    publish(client, stream, 100)
    sink.run(read_stream())
    for _ in range(40):
        client.publish_many(stream, [b"x" * 10_000] * 50, subject="a.b")
    trim(client, stream, 101)
    first = client.stream_info(stream).first
    text = failure_of(sink.start(read_stream(), availableNow=True))
    assert f"offsets 100 to {first - 1} cannot be read any more" in text
    assert "failOnDataLoss to false" in text
    sink.run(read_stream(failOnDataLoss="false"))
    assert sink.offsets() == [*range(100), *range(first, 2100)]
