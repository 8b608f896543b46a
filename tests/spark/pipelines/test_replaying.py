"""An archive back into a stream: in its order, at its pace, each record once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from malamute_py.client.sync.client import SyncClient
from pyspark_malamute.errors import CheckpointMismatch, DataLoss, OptionError
from pyspark_malamute.pipelines import Replayed, archive, history, replay, replaying
from pyspark_malamute.pipelines.archive_log import ArchiveError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]

COUNT = 60


@pytest.fixture
def archived(
    spark: SparkSession, client: SyncClient, endpoint: str, stream: str, tmp_path: Path
) -> str:
    """An archive of records 50 ms apart by client time, published in another order."""
    order = [*range(COUNT // 2, COUNT), *range(COUNT // 2)]
    client.publish_many(
        stream,
        [b"%d" % number for number in order],
        subject="a.b",
        client_time_ms=[50 * number for number in order],
        fields={"kind": "x"},
    )
    path = str(tmp_path / "archive")
    query = archive(spark, path, endpoint=endpoint, stream=stream, date_of="client_time")
    assert query.awaitTermination(180)
    return path


@pytest.fixture
def again(
    spark: SparkSession, endpoint: str, stream: str, archived: str
) -> Callable[..., Replayed]:
    """Replays it into another stream."""

    def go(**options: Any) -> Replayed:
        given = {"name": stream, "endpoint": endpoint, **options}
        return replay(spark, archived, f"{stream}-again", **given)

    return go


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits of a paced replay, which take no time."""
    waits: list[float] = []

    class Clock:
        now_s = 0.0

        def monotonic(self) -> float:
            return self.now_s

        def sleep(self, wait_s: float) -> None:
            waits.append(wait_s)
            self.now_s += wait_s

    monkeypatch.setattr(replaying, "clock", Clock())
    return waits


def replayed(client: SyncClient, stream: str) -> list[tuple[int, str, int | None, str]]:
    with client.subscribe(f"{stream}-again", start="earliest", until="tail") as reading:
        return [
            (int(each.body), each.subject, each.client_time_ms, each.fields["kind"])
            for each in reading
        ]


EXPECTED = [(number, "a.b", 50 * number, "x") for number in range(COUNT)]


def test_a_replay_that_died_amid_its_steps_goes_on_and_has_each_record_once_in_order(
    client: SyncClient, stream: str, again: Callable[..., Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "STEP_ROWS", 20)
    whole = replaying._Run._publish

    def dies(run: Any, number: int) -> None:
        whole(run, number)
        if number == 1:
            raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(replaying._Run, "_publish", dies)
        with pytest.raises(ZeroDivisionError):
            again()
    told: list[Replayed] = []
    done = again(told=told.append)
    assert (told[0].steps_done, done.steps_done, done.records_done) == (2, 3, COUNT)
    assert replayed(client, stream) == EXPECTED
    assert again().records_done == COUNT
    assert len(replayed(client, stream)) == COUNT
    with pytest.raises(ArchiveError, match="was begun with end_ms None, and this run has 5"):
        again(end_ms=5)


def test_a_paced_replay_waits_as_long_as_the_records_times_say(
    client: SyncClient, stream: str, again: Callable[..., Replayed], virtual: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    done = again(pace=5.0, start_ms=1000)
    assert replayed(client, stream) == EXPECTED[20:]
    # A tick has 100 ms of the wall clock, 500 of the archive; the first is due at once.
    assert virtual == pytest.approx([0.1, 0.1, 0.1])
    assert (done.records_done, done.late_ms) == (40, 0)


def test_a_replay_goes_by_the_time_that_it_is_given_and_has_what_lies_between_two(
    client: SyncClient, stream: str, again: Callable[..., Replayed]
) -> None:
    # The archive is by client time, and the records were appended together, the later half first.
    again(by="append_time")
    half = COUNT // 2
    assert replayed(client, stream) == EXPECTED[half:] + EXPECTED[:half]
    assert again(name=f"{stream}-part", start_ms=500, end_ms=1000).records_done == 10
    assert replayed(client, stream)[COUNT:] == EXPECTED[10:20]


def test_records_of_a_stream_that_was_removed_are_replayed_too(
    spark: SparkSession, client: SyncClient, endpoint: str, stream: str, tmp_path: Path
) -> None:
    path, names = str(tmp_path / "removed"), (f"{stream}.kept", f"{stream}.gone")
    given: dict[str, Any] = {
        "endpoint": endpoint,
        "streamsPattern": rf"{stream}\..*",
        "failOnDataLoss": False,
    }
    for name in names:
        client.publish_many(name, [name.encode()] * 5, subject="a.b", fields={"kind": "x"})
    assert archive(spark, path, **given).awaitTermination(180)
    client.remove_stream(names[1])
    client.publish(names[0], b"more", subject="a.b", fields={"kind": "x"})
    with pytest.raises(DataLoss, match=rf"'{names[1]}' was removed, with what"):
        history(spark, path, endpoint=endpoint)
    assert history(spark, path, endpoint=endpoint, failOnDataLoss=False).count() == 11
    assert archive(spark, path, **given).awaitTermination(180)
    for option in ("STREAM", "sinkId"):
        twice: dict[str, Any] = {"endpoint": endpoint, option: "x"}
        with pytest.raises(OptionError, match="the replay has it by its argument"):
            replay(spark, path, f"{stream}-again", name=stream, **twice)
    done = replay(spark, path, f"{stream}-again", name=stream, endpoint=endpoint)
    assert done.records_done == 11
    with client.subscribe(f"{stream}-again", start="earliest", until="tail") as reading:
        found = Counter(each.body for each in reading)
    assert found == {names[0].encode(): 5, names[1].encode(): 5, b"more": 1}


def test_records_of_two_streams_of_one_name_are_replayed_and_none_that_came_since(
    spark: SparkSession, client: SyncClient, endpoint: str, stream: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path, seconds = str(tmp_path / "twice"), 3
    monkeypatch.setattr(replaying, "STEP_ROWS", 20)

    def published(word: str, count: int) -> list[bytes]:
        """Publish records, 20 of each second by client time, all streams from the first one on."""
        bodies = [b"%s %d" % (word.encode(), number) for number in range(count)]
        times = [1000 * (number % seconds) for number in range(count)]
        client.publish_many(
            stream, bodies, subject="a.b", client_time_ms=times, fields={"kind": "x"}
        )
        return bodies

    def run(**options: Any) -> None:
        query = archive(
            spark, path, endpoint=endpoint, stream=stream, date_of="client_time", **options
        )
        assert query.awaitTermination(180)

    former = published("former", 60)
    run()
    client.remove_stream(stream)
    newest = published("newest", 6)
    with pytest.raises(CheckpointMismatch, match=r"was removed and made again.*--accept-loss"):
        run()
    with pytest.raises(CheckpointMismatch, match="ends at offset 60 of the former one"):
        history(spark, path, endpoint=endpoint)
    run(failOnDataLoss=False)
    whole = history(spark, path, endpoint=endpoint)
    assert sorted(row.body for row in whole.collect()) == sorted(former + newest)

    publish = replaying._Run._publish

    def dies(run: Any, number: int) -> None:
        publish(run, number)
        raise ZeroDivisionError

    def go() -> Replayed:
        return replay(spark, path, f"{stream}-again", name=stream, endpoint=endpoint)

    with monkeypatch.context() as patch:
        patch.setattr(replaying._Run, "_publish", dies)
        with pytest.raises(ZeroDivisionError):
            go()
    # Of the same offsets and times as records of the former stream.
    published("later", 60)
    run()
    client.remove_stream(stream)
    published("last", 60)
    run(failOnDataLoss=False)
    assert go().records_done == 66
    with client.subscribe(f"{stream}-again", start="earliest", until="tail") as reading:
        found = [(each.client_time_ms or 0, each.body) for each in reading]
    assert sorted(body for _, body in found) == sorted(former + newest)
    assert [at for at, _ in found] == sorted(at for at, _ in found)


def test_a_replay_takes_in_nothing_of_a_stream_that_had_no_row_when_it_began(
    spark: SparkSession,
) -> None:
    rows = spark.createDataFrame(
        [("a", 1, 5), ("a", 1, 500), ("b", 1, 5)], "stream string, offset long, appended_ms long"
    )
    reached = {"a": 10, "b": 10}
    plan = replaying.Plan({}, reached, [], bounds={"a": [replaying.Bound(10, 100)]})
    assert [tuple(row) for row in rows.where(plan.has()).collect()] == [("a", 1, 5)]
    assert rows.where(replaying.Plan({}, reached, []).has()).count() == 3, "of an older version"
