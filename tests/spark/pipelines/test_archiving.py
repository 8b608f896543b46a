"""Streams into Parquet: each record once over deaths, compaction and the seam to the log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from malamute_py.client.facts import ReadPlan
from malamute_py.client.sync.client import SyncClient
from pyspark_malamute.errors import DataLoss
from pyspark_malamute.pipelines import (
    aggregate,
    archive,
    archiving,
    compact,
    folder,
    history,
    read_archive,
    reading,
)
from pyspark_malamute.pipelines.archive_log import ArchiveError, ArchiveLog
from pyspark_malamute.pipelines.folder import Folder
from pyspark_malamute.planning import ask_plan
from pyspark_malamute.streams import find_streams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]

DAY_MS = 24 * 3_600_000


def publish(client: SyncClient, stream: str, first: int, count: int) -> None:
    client.publish_many(
        stream,
        [b"%d" % number for number in range(first, first + count)],
        subject=f"flights.{'JFK' if first % 2 else 'LGA'}",
        client_time_ms=[number * DAY_MS // 100 for number in range(first, first + count)],
    )


def numbers(frame: DataFrame) -> list[int]:
    return sorted(int(row.body) for row in frame.select("body").collect())


@pytest.fixture
def run(spark: SparkSession, endpoint: str, stream: str, tmp_path: Path) -> Callable[..., None]:
    """Archives what there is now."""

    def go(**options: Any) -> None:
        given = {"endpoint": endpoint, "stream": stream, **options}
        query = archive(spark, str(tmp_path / "archive"), date_of="client_time", **given)
        assert query.awaitTermination(180)

    return go


def test_an_archive_goes_on_where_it_was_and_history_has_the_log_after_it(
    spark: SparkSession, client: SyncClient, endpoint: str, stream: str, tmp_path: Path,
    run: Callable[..., None],
) -> None:  # fmt: skip
    path = str(tmp_path / "archive")
    publish(client, stream, 0, 150)
    run()
    publish(client, stream, 151, 49)
    run(maxRecordsPerTrigger=20)
    archived = read_archive(spark, path)
    expected = [*range(150), *range(151, 200)]
    assert numbers(archived) == expected
    found = {(str(row.date), row.subject_tokens) for row in archived.collect()}
    assert found == {("1970-01-01", "flights"), ("1970-01-02", "flights")}
    publish(client, stream, 300, 50)
    whole = history(spark, path, endpoint=endpoint)
    assert numbers(whole) == [*expected, *range(300, 350)]
    assert numbers(whole.where("date = '1970-01-02'")) == [n for n in expected if n >= 100]

    before = archived.count()
    assert compact(spark, path, target_bytes=1).files > 2
    # A session that bounds its files has a compaction make no smaller ones: it would never end.
    spark.conf.set("spark.sql.files.maxRecordsPerFile", 30)
    try:
        told = compact(spark, path, keep_ms=3_600_000)
    finally:
        spark.conf.unset("spark.sql.files.maxRecordsPerFile")
    assert told.files == 2 < told.files_before
    assert told.removed == 0
    # A reader that began before has its files still.
    assert archived.count() == before
    assert numbers(read_archive(spark, path)) == expected
    assert compact(spark, path, keep_ms=-1000).removed > 0
    assert numbers(read_archive(spark, path)) == expected
    run()
    assert numbers(read_archive(spark, path)) == [*expected, *range(300, 350)]


def test_a_run_that_follows_writes_as_often_as_it_is_told(
    spark: SparkSession, client: SyncClient, endpoint: str, stream: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    triggers: list[dict[str, Any]] = []
    trigger = DataStreamWriter.trigger

    def seen(writer: DataStreamWriter, **given: Any) -> DataStreamWriter:
        triggers.append(given)
        return trigger(writer, **given)

    monkeypatch.setattr(DataStreamWriter, "trigger", seen)
    publish(client, stream, 0, 10)
    given: dict[str, Any] = {"endpoint": endpoint, "stream": stream, "follow": True}
    archiver = archive(spark, str(tmp_path / "archive"), every_ms=70, **given)
    state = str(tmp_path / "state")
    aggregator = aggregate(spark, f"{stream}-bars", state, every_ms=80, **given)
    try:
        assert triggers == [{"processingTime": f"{every_ms} milliseconds"} for every_ms in (70, 80)]
        archiver.processAllAvailable()
        publish(client, stream, 10, 5)
        archiver.processAllAvailable()
        assert numbers(read_archive(spark, str(tmp_path / "archive"))) == [*range(15)]
    finally:
        archiver.stop()
        aggregator.stop()


def test_what_a_death_left_before_the_entry_is_written_anew_and_no_reader_sees_it(
    spark: SparkSession, client: SyncClient, stream: str, tmp_path: Path, run: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from pyspark.errors import StreamingQueryException

    path = str(tmp_path / "archive")
    publish(client, stream, 0, 10)
    run()
    publish(client, stream, 100, 10)
    with monkeypatch.context() as patch:
        patch.setattr(ArchiveLog, "commit", lambda *_: 1 / 0)
        with pytest.raises(StreamingQueryException, match="ZeroDivisionError"):
            run()
    assert numbers(read_archive(spark, path)) == [*range(10)]
    run()
    assert numbers(read_archive(spark, path)) == [*range(10), *range(100, 110)]
    on_disk = [file for file in Folder(spark, path).files() if file.path.endswith(".parquet")]
    assert len(on_disk) > len(read_archive(spark, path).inputFiles())


def test_of_two_runs_into_one_archive_one_ends(
    spark: SparkSession, client: SyncClient, endpoint: str, stream: str, tmp_path: Path,
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from pyspark.errors import StreamingQueryException

    publish(client, stream, 0, 10)
    write = archiving.write_files

    def slow(*given: Any) -> Any:
        monkeypatch.setattr(archiving, "write_files", write)
        # A session of its own, for Spark knows queries by their names.
        other = archive(
            spark.newSession(), str(tmp_path / "archive"), date_of="client_time",
            endpoint=endpoint, stream=stream,
        )  # fmt: skip
        assert other.awaitTermination(180)
        return write(*given)

    monkeypatch.setattr(archiving, "write_files", slow)
    with pytest.raises(StreamingQueryException, match="another run has archived"):
        run()
    run()
    assert numbers(read_archive(spark, str(tmp_path / "archive"))) == [*range(10)]


def test_a_file_takes_no_other_files_place_in_any_file_system(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for scheme in ("file", "hdfs"):
        monkeypatch.setattr(folder, "scheme_of", lambda _, found=scheme: found)
        here = Folder(spark, str(tmp_path / scheme))
        assert here.create("a/b.json", b"one")
        assert not here.create("a/b.json", b"two")
        assert here.read("a/b.json") == b"one"
        assert [(file.path, file.bytes) for file in here.files("a")] == [("a/b.json", 3)]
        with pytest.raises(FileNotFoundError):
            here.read("a/c.json")


def test_records_gone_before_they_were_archived_are_told_and_noted_where_that_is_accepted(
    spark: SparkSession, client: SyncClient, endpoint: str, stream: str, tmp_path: Path,
    run: Callable[..., None], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from pyspark.errors import StreamingQueryException

    path = str(tmp_path / "archive")
    publish(client, stream, 0, 10)
    run()
    publish(client, stream, 100, 10)
    client.trim(stream, 15)
    with pytest.raises(StreamingQueryException, match="offsets 10 to 14 were removed"):
        run()
    with pytest.raises(DataLoss, match="offsets 10 to 14 were removed"):
        history(spark, path, endpoint=endpoint)
    assert history(spark, path, endpoint=endpoint, FAILONDATALOSS=False).count() == 15
    run(failOnDataLoss=False)
    assert numbers(history(spark, path, endpoint=endpoint)) == [*range(10), *range(105, 110)]
    assert f"offsets 10 to 14 of stream '{stream}' were gone" in caplog.text


def test_history_goes_on_where_a_power_loss_took_archived_records_back_and_that_is_accepted(
    spark: SparkSession, client: SyncClient, endpoint: str, stream: str, tmp_path: Path,
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = str(tmp_path / "archive")
    publish(client, stream, 0, 10)
    run()

    def rewound(*given: Any, **more: Any) -> ReadPlan:
        # As of a stream that ended at 6 after the loss, and has 4 new records since.
        return msgspec.structs.replace(ask_plan(*given, **more), rewound=True, from_offset=6)

    monkeypatch.setattr(reading, "ask_plan", rewound)
    with pytest.raises(DataLoss, match="now ends at offset 6, before 10"):
        history(spark, path, endpoint=endpoint)
    whole = history(spark, path, endpoint=endpoint, failOnDataLoss=False)
    assert numbers(whole) == sorted([*range(10), *range(6, 10)])


def test_a_run_that_asks_for_another_selection_is_refused(
    client: SyncClient, stream: str, run: Callable[..., None]
) -> None:
    publish(client, stream, 0, 10)
    run(pattern="flights.#")
    with pytest.raises(
        ArchiveError, match=r"begun with pattern 'flights.#', .* comes with pattern 'x'"
    ):
        run(pattern="x")


def test_a_stream_that_came_while_no_run_was_on_is_archived_from_its_first_record(
    spark: SparkSession, client: SyncClient, endpoint: str, stream: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "archive")

    def go() -> None:
        query = archive(spark, path, endpoint=endpoint, streamsPattern=f"{stream}-.*",
                        subject_tokens=0)  # fmt: skip
        assert query.awaitTermination(180)

    publish(client, f"{stream}-a", 0, 10)
    go()
    publish(client, f"{stream}-b", 100, 10)
    client.publish(f"{stream}-b", b"110", subject="")
    go()
    found = read_archive(spark, path)
    assert numbers(found) == [*range(10), *range(100, 111)]
    assert {row.stream for row in found.collect()} == {f"{stream}-a", f"{stream}-b"}


def test_any_subject_may_be_in_a_files_path(
    spark: SparkSession, client: SyncClient, endpoint: str, stream: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "archive")
    subjects = ["", "a/b", "*?[x]{y}", "50%2F=", "über #", "plain.more"]
    for subject in subjects:
        client.publish(stream, b"", subject=subject)
    assert archive(spark, path, endpoint=endpoint, stream=stream).awaitTermination(180)
    client.publish(stream, b"", subject="")
    found = history(spark, path, endpoint=endpoint).select("subject", "subject_tokens").collect()
    assert sorted((row[0], row[1]) for row in found if row[0]) == sorted(
        (subject, subject.split(".")[0]) for subject in subjects if subject
    )
    assert [row[1] for row in found if not row[0]] == [None, None]


def test_a_gap_is_not_noted_where_another_run_has_archived_meanwhile(
    spark: SparkSession, client: SyncClient, endpoint: str, stream: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    other = f"{stream}-other"

    def run() -> None:
        query = archive(
            spark, str(tmp_path / "archive"), date_of="client_time", endpoint=endpoint,
            streamsPattern=f"{stream}.*", failOnDataLoss=False,
        )  # fmt: skip
        assert query.awaitTermination(180)

    for name in (stream, other):
        publish(client, name, 0, 4)
    run()
    client.remove_stream(other)
    publish(client, stream, 4, 4)
    calls: list[int] = []

    def other_run_first(*given: Any) -> Any:
        found = find_streams(*given)
        calls.append(1)
        if len(calls) == 1:
            run()
        return found

    monkeypatch.setattr(archiving, "find_streams", other_run_first)
    with pytest.raises(ArchiveError, match="another run has archived"):
        run()
    monkeypatch.undo()
    run()
    archived = read_archive(spark, str(tmp_path / "archive"))
    assert numbers(archived) == sorted([*range(8), *range(4)])
