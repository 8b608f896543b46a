"""df.write and df.writeStream: rows once over failed tasks, restarts and deaths."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from malamute_py.client.sync.client import SyncClient, connect_sync
from malamute_py.demo.daemon import Daemon
from tests.spark import killed_copy

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]


def bodies(client: SyncClient, stream: str) -> list[bytes]:
    with client.subscribe(stream, start="earliest", until="tail") as reading:
        return [body for batch in reading.batches() for body in batch.bodies()]


def commits(client: SyncClient, stream: str) -> list[dict[str, Any]]:
    """Records of finished batches that wrote into a stream."""
    with client.subscribe("spark.commits", "regex:.*\\.commit", start="earliest", until="tail",
                          create=True) as reading:  # fmt: skip
        found = [json.loads(record.body) for record in reading]
    return [record for record in found if stream in record["next"]]


@pytest.fixture
def write(endpoint: str, stream: str) -> Callable[..., None]:
    """Writes a frame into the test's stream, with options."""

    def save(frame: DataFrame, **options: Any) -> None:
        given = {"endpoint": endpoint, "stream": stream, **options}
        frame.write.format("malamute").mode("append").options(**given).save()

    return save


@pytest.fixture
def query(endpoint: str, stream: str, tmp_path: Path) -> Callable[..., Any]:
    """Runs a query into the test's stream, with one checkpoint, over all that is there."""

    def run(frame: DataFrame, **options: Any) -> Any:
        given = {"endpoint": endpoint, "stream": stream, **options}
        started = (
            frame.writeStream.format("malamute")
            .options(**given)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .queryName(f"into {stream}")
            .trigger(availableNow=True)
            .start()
        )
        assert started.awaitTermination(180)
        return started

    return run


def numbers(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(count).selectExpr("cast(id as string) body")


def test_a_frame_is_written_with_all_of_its_columns(
    spark: SparkSession, client: SyncClient, stream: str, write: Callable[..., None]
) -> None:
    write(
        spark.range(100).selectExpr(
            "concat('a.', id % 7) subject",
            "to_binary(lpad(cast(id as string), 4, '0'), 'utf-8') body",
            "if(id % 2 = 0, map('k', cast(id % 3 as string)), null) fields",
            "if(id % 2 = 0, timestamp_millis(id), null) client_time",
            "map('p', 'q') properties", "'another' stream",
        )
    )  # fmt: skip
    with client.subscribe(stream, start="earliest", until="tail") as reading:
        found = sorted(reading, key=lambda record: record.body)
    assert [int(record.body) for record in found] == list(range(100))
    for number, record in enumerate(found):
        even = number % 2 == 0
        assert record.subject == f"a.{number % 7}"
        assert record.fields == ({"k": f"{number % 3}"} if even else {})
        assert record.client_time_ms == (number if even else None)
        assert record.properties == {"p": "q"}
    assert [record["rows"] for record in commits(client, stream)] == [100]


def test_a_task_that_fails_amid_its_rows_writes_them_once(
    spark: SparkSession, client: SyncClient, stream: str, write: Callable[..., None]
) -> None:
    def failing_at_first(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        for number, batch in enumerate(batches):
            if number == 2 and context.attemptNumber() < 2:
                raise RuntimeError("the task is to fail")
            yield batch

    wide = spark.range(60_000).selectExpr("lpad(cast(id as string), 100, ' ') body")
    write(wide.mapInArrow(failing_at_first, "body string"), chunkBytes="64k")
    found = bodies(client, stream)
    assert len(found) == 60_000
    assert sorted(map(int, found)) == list(range(60_000))
    # No attempt took the end of what failed for the end of the rows.
    with client.subscribe("spark.commits", start="earliest", until="tail") as reading:
        told = [json.loads(record.body) for record in reading]
    chunks = [chunk for chunk in told if stream in chunk.get("streams", ())]
    assert len({chunk["rows"] for chunk in chunks if not chunk["last"]}) == 1
    assert sum(chunk["last"] for chunk in chunks) == 2


def test_a_job_with_a_name_is_written_once_and_one_without_each_time(
    spark: SparkSession, client: SyncClient, stream: str, write: Callable[..., None]
) -> None:
    for _ in range(2):
        write(numbers(spark, 100), sinkId=f"job-{stream}", batchId="5")
    assert len(bodies(client, stream)) == 100
    write(numbers(spark, 100), sinkId=f"job-{stream}", batchId="6")
    write(numbers(spark, 100))
    assert set(Counter(bodies(client, stream)).values()) == {3}


def test_a_bad_row_ends_the_job_with_its_number_and_column(
    spark: SparkSession, write: Callable[..., None]
) -> None:
    from pyspark.errors import PySparkException

    frame = spark.range(100).coalesce(1).selectExpr("'x' body", "if(id = 70, null, 'a') subject")
    with pytest.raises(PySparkException, match="column 'subject' of row 70 of the partition is"):
        write(frame)


def test_a_query_that_wrote_a_batch_and_did_not_come_to_note_it_writes_it_once(
    spark: SparkSession, client: SyncClient, stream: str, tmp_path: Path,
    read_stream: Callable[..., DataFrame], query: Callable[..., Any],
) -> None:  # fmt: skip
    source = f"{stream}-source"
    client.publish_many(source, [b"%d" % number for number in range(3000)], subject="a.b")
    frame = read_stream(stream=source, maxRecordsPerTrigger="1000").select("subject", "body")
    query(frame)
    assert sorted(map(int, bodies(client, stream))) == list(range(3000))
    assert [record["next"] for record in commits(client, stream)] == [
        {stream: 1000}, {stream: 2000}, {stream: 3000},
    ]  # fmt: skip
    # The death between the sink's commit and Spark's.
    for name in ("2", ".2.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink(missing_ok=True)
    client.publish_many(source, [b"3000"], subject="a.b")
    query(frame)
    assert sorted(map(int, bodies(client, stream))) == list(range(3001))


def test_records_are_not_taken_back(
    client: SyncClient, stream: str, endpoint: str, tmp_path: Path,
    read_stream: Callable[..., DataFrame],
) -> None:  # fmt: skip
    source = f"{stream}-source"
    client.publish_many(source, [b"x"] * 10, subject="a.b")
    counted = read_stream(stream=source).groupBy("subject").count()
    writer = (
        counted.selectExpr("subject", "cast(count as string) body")
        .writeStream.format("malamute").outputMode("complete")
        .options(endpoint=endpoint, stream=stream)
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
    )  # fmt: skip
    with pytest.raises(Exception, match="cannot be overwritten"):
        writer.start().awaitTermination(180)


def test_foreach_batch_writes_each_batch_once(
    spark: SparkSession, client: SyncClient, stream: str, endpoint: str, tmp_path: Path,
    read_stream: Callable[..., DataFrame],
) -> None:  # fmt: skip
    from pyspark_malamute import write_batch

    source, deaths = f"{stream}-source", iter(range(1))
    client.publish_many(source, [b"%d" % number for number in range(300)], subject="a.b")

    def publish(rows: DataFrame, batch_id: int) -> None:
        write_batch(rows.select("body"), batch_id, endpoint=endpoint, stream=stream)
        write_batch(rows.select("body"), batch_id, endpoint=endpoint, stream=f"{stream}-too")
        if batch_id == 1 and next(deaths, None) is not None:
            raise RuntimeError("the driver is to die")

    def run() -> None:
        frame = read_stream(stream=source, maxRecordsPerTrigger="100")
        writer = frame.writeStream.foreachBatch(publish).trigger(availableNow=True)
        assert writer.option("checkpointLocation", str(tmp_path)).start().awaitTermination(180)

    with pytest.raises(Exception, match="the driver is to die"):
        run()
    run()
    for name in (stream, f"{stream}-too"):
        assert sorted(map(int, bodies(client, name))) == list(range(300))


def test_a_batch_of_no_query_needs_a_name(spark: SparkSession, endpoint: str) -> None:
    from pyspark_malamute import write_batch
    from pyspark_malamute.errors import OptionError

    with pytest.raises(OptionError, match="'sinkId': is missing"):
        write_batch(numbers(spark, 1), 7, endpoint=endpoint, stream="nowhere")


@pytest.mark.parametrize("killed", ["query", "broker"])
def test_a_copy_has_every_record_once_whatever_is_killed(tmp_path: Path, killed: str) -> None:
    """More kills by hand: python -m tests.spark.killed_copy."""
    rows, stream, chance = 200_000, "source", random.Random()
    with Daemon(tmp_path / "broker") as broker, connect_sync(broker.endpoint) as client:
        killed_copy.publish(client, stream, rows)
        with killed_copy.running(broker.endpoint, stream, tmp_path / "query") as first:
            for part in (1, 2):
                killed_copy.until(client, stream, rows * part // 5, first)
                time.sleep(chance.random() * 0.2)
                if killed == "broker":
                    broker.kill()
                    broker.start()
                    client.opened(timeout_ms=60_000)
            if killed == "broker":
                killed_copy.until(client, stream, rows, first)
        if killed == "query":
            assert killed_copy.copied(client, stream) < rows
            with killed_copy.running(broker.endpoint, stream, tmp_path / "query") as second:
                killed_copy.until(client, stream, rows, second)
        assert killed_copy.faults(client, stream, rows) == ""
