"""Many streams in one source, against a broker and without a Spark session."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from malamute_py.client.sync.client import SyncClient
from pyspark_malamute.batch_reader import MalamuteReader
from pyspark_malamute.errors import CheckpointMismatch, DataLoss, OptionError, SourceUnavailable
from pyspark_malamute.links import Broker
from pyspark_malamute.options import parse_options
from pyspark_malamute.planning import Range, Ranges
from pyspark_malamute.stream_reader import MalamuteStreamReader
from pyspark_malamute.streams import find_streams

ALL = ReadAllAvailable()
_NUMBERS = count(1)

Rows = list[tuple[str, int]]


@pytest.fixture
def prefix() -> str:
    """Beginning of the names of this test's streams."""
    return f"many{next(_NUMBERS)}"


@pytest.fixture
def reader(endpoint: str, prefix: str) -> Iterator[Callable[..., MalamuteStreamReader]]:
    """Readers of this test's streams from their first records on, with options."""
    made: list[MalamuteStreamReader] = []

    def make(**more: str) -> MalamuteStreamReader:
        given = {"endpoint": endpoint, "startingOffsets": "earliest", **more}
        if "streams" not in given:
            given.setdefault("streamsPattern", rf"{prefix}\..*")
        made.append(MalamuteStreamReader(parse_options(given)))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def publish(client: SyncClient, stream: str, count: int) -> None:
    client.publish_many(stream, [b"x" * 50] * count, subject="a.b")


def batch(reader: MalamuteStreamReader, start: dict[str, Any], limit: Any = ALL) -> Any:
    """One batch as Spark makes it: (its end, its rows)."""
    end = json.loads(json.dumps(reader.latestOffset(json.loads(json.dumps(start)), limit)))
    return end, rows_of(reader, reader.partitions(start, end))


def rows_of(reader: Any, tasks: Any) -> Rows:
    rows: Rows = []
    for task in tasks:
        for piece in reader.read(task):
            names = piece.column("stream").to_pylist()
            rows += zip(names, piece.column("offset").to_pylist(), strict=True)
    return sorted(rows)


def expected(**counts: tuple[int, int]) -> Rows:
    return sorted((name, row) for name, bounds in counts.items() for row in range(*bounds))


@pytest.mark.moderate
def test_named_streams_are_read_together_and_say_which_they_are(
    reader: Callable[..., MalamuteStreamReader], client: SyncClient, prefix: str
) -> None:
    a, b, c = (f"{prefix}.{name}" for name in "abc")
    for name in (a, b, c):
        publish(client, name, 10)
    query = reader(streams=f"{a},{c}")
    end, rows = batch(query, query.initialOffset())
    assert rows == expected(**{a: (0, 10), c: (0, 10)})
    publish(client, a, 5)
    publish(client, b, 5)
    end, rows = batch(query, end)
    assert rows == expected(**{a: (10, 15)})
    assert query.latestOffset(end, ALL) == end


@pytest.mark.moderate
def test_a_query_goes_on_from_its_checkpoint_in_every_stream(
    reader: Callable[..., MalamuteStreamReader], client: SyncClient, prefix: str
) -> None:
    a, b = f"{prefix}.a", f"{prefix}.b"
    publish(client, a, 10)
    publish(client, b, 20)
    query = reader()
    begin = query.initialOffset()
    end, rows = batch(query, begin)
    again = reader()
    # The batch that Spark has in its log, and then what is new.
    assert rows_of(again, again.partitions(begin, end)) == rows
    publish(client, b, 5)
    _, rows = batch(again, end)
    assert rows == expected(**{b: (20, 25)})


def test_new_streams_are_found_and_read_from_their_first_record_on(
    reader: Callable[..., MalamuteStreamReader], client: SyncClient, prefix: str
) -> None:
    a, b = f"{prefix}.a", f"{prefix}.b"
    publish(client, a, 10)
    query = reader(startingOffsets="latest")
    begin = query.initialOffset()
    assert query.latestOffset(begin, ALL) == begin
    publish(client, b, 7)
    publish(client, f"other-{prefix}", 7)
    end, rows = batch(query, begin)
    assert rows == expected(**{b: (0, 7)})
    publish(client, a, 1)
    again = reader()
    assert rows_of(again, again.partitions(begin, end)) == rows
    _, rows = batch(again, end)
    assert rows == expected(**{a: (10, 11)})


@pytest.mark.moderate
def test_a_new_stream_of_which_retention_has_taken_the_beginning_is_no_loss(
    reader: Callable[..., MalamuteStreamReader], client: SyncClient, prefix: str
) -> None:
    a, b = f"{prefix}.a", f"{prefix}.b"
    publish(client, a, 1)
    query = reader()
    end, _ = batch(query, query.initialOffset())
    for _ in range(40):
        client.publish_many(b, [b"x" * 10_000] * 50)
    client.edit_stream(b, max_bytes=1)
    while client.stream_info(b).first < 100:
        pass
    first = client.stream_info(b).first
    _, rows = batch(query, end)
    assert rows == expected(**{b: (first, 2000)})


def test_a_stream_that_was_removed_ends_the_query_or_is_logged_once(
    reader: Callable[..., MalamuteStreamReader],
    client: SyncClient,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b = f"{prefix}.a", f"{prefix}.b"
    publish(client, a, 10)
    publish(client, b, 10)
    query = reader()
    begin = query.initialOffset()
    end = query.latestOffset(begin, ALL)
    client.remove_stream(a)
    with pytest.raises(DataLoss, match=f"'{a}' was removed"):
        query.latestOffset(end, ALL)
    follower = reader(failOnDataLoss="false")
    with caplog.at_level(logging.WARNING):
        assert follower.latestOffset(end, ALL) == end
        assert follower.latestOffset(end, ALL) == end
    assert caplog.text.count(f"'{a}' was removed") == 1
    publish(client, b, 1)
    _, rows = batch(follower, end)
    assert rows == expected(**{b: (10, 11)})
    # The batch that Spark has in its log from before the removal.
    assert rows_of(follower, follower.partitions(begin, end)) == expected(**{b: (0, 10)})


def test_a_recreated_stream_among_many_ends_the_query_by_name(
    reader: Callable[..., MalamuteStreamReader], client: SyncClient, prefix: str
) -> None:
    a, b = f"{prefix}.a", f"{prefix}.b"
    for name in (a, b):
        publish(client, name, 10)
    query = reader()
    end, _ = batch(query, query.initialOffset())
    client.remove_stream(b)
    publish(client, b, 10)
    with pytest.raises(CheckpointMismatch, match=f"stream '{b}' was recreated"):
        query.latestOffset(end, ALL)
    now = reader(failOnDataLoss="false")
    now.prepareForTriggerAvailableNow()
    with pytest.raises(CheckpointMismatch, match=f"stream '{b}' was recreated"):
        now.latestOffset(end, ALL)


def test_what_was_seen_not_to_match_is_forgotten_when_a_stream_is_made_again(
    reader: Callable[..., MalamuteStreamReader], client: SyncClient, prefix: str
) -> None:
    a, b = f"{prefix}.a", f"{prefix}.b"
    publish(client, a, 10)
    client.publish_many(b, [b"x"] * 10, subject="no")
    query = reader(failOnDataLoss="false", pattern="a.b")
    end, _ = batch(query, query.initialOffset())
    assert query.latestOffset(end, ALL) == end
    client.remove_stream(b)
    publish(client, a, 1)
    end, _ = batch(query, end)
    publish(client, b, 20)
    end, rows = batch(query, end)
    assert rows == expected(**{b: (0, 20)})


@pytest.mark.moderate
def test_each_removal_of_a_stream_is_logged(
    reader: Callable[..., MalamuteStreamReader],
    client: SyncClient,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b = f"{prefix}.a", f"{prefix}.b"
    publish(client, a, 10)
    publish(client, b, 10)
    query = reader(failOnDataLoss="false")
    end, _ = batch(query, query.initialOffset())
    for times in (1, 2):
        client.remove_stream(b)
        publish(client, a, 1)
        end, _ = batch(query, end)
        publish(client, b, 1)
        end, _ = batch(query, end)
        assert caplog.text.count(f"'{b}' was removed") == times


def test_a_stream_that_is_named_and_not_there_is_told(
    reader: Callable[..., MalamuteStreamReader], client: SyncClient, endpoint: str, prefix: str
) -> None:
    publish(client, f"{prefix}.a", 1)
    told = rf"no stream '{prefix}\.b' .* Correct option 'streams'"
    with pytest.raises(SourceUnavailable, match=told):
        reader(streams=f"{prefix}.a,{prefix}.b").initialOffset()
    # A run of an archive asks so about a single stream as well.
    options = parse_options({"endpoint": endpoint, "stream": f"{prefix}.b"})
    broker = Broker(options)
    with pytest.raises(SourceUnavailable, match="Correct option 'stream', or create it"):
        find_streams(broker, options)
    broker.close()


@pytest.mark.moderate
def test_a_cap_is_shared_and_what_one_stream_leaves_another_takes(
    reader: Callable[..., MalamuteStreamReader], client: SyncClient, prefix: str
) -> None:
    a, b = f"{prefix}.a", f"{prefix}.b"
    publish(client, a, 10)
    publish(client, b, 1000)
    query = reader(maxRecordsPerTrigger="100")
    end, rows = batch(query, query.initialOffset(), query.getDefaultReadLimit())
    assert rows == expected(**{a: (0, 10), b: (0, 90)})
    taken = rows
    while True:
        end, rows = batch(query, end, ReadMaxRows(100))
        if not rows:
            break
        assert len(rows) <= 100
        taken += rows
    assert sorted(taken) == expected(**{a: (0, 10), b: (0, 1000)})


@pytest.mark.moderate
def test_a_cap_below_the_number_of_streams_reaches_all_of_them_in_turn(
    reader: Callable[..., MalamuteStreamReader], client: SyncClient, prefix: str
) -> None:
    names = [f"{prefix}.{number}" for number in range(5)]
    for name in names:
        publish(client, name, 3)
    query = reader(maxRecordsPerTrigger="2")
    end = query.initialOffset()
    taken: Rows = []
    for _ in range(8):
        end, rows = batch(query, end, query.getDefaultReadLimit())
        assert len(rows) <= 2
        taken += rows
    assert sorted(taken) == expected(**dict.fromkeys(names, (0, 3)))


@pytest.mark.moderate
def test_available_now_reads_every_stream_whatever_the_cap_leaves_out(
    reader: Callable[..., MalamuteStreamReader], client: SyncClient, prefix: str
) -> None:
    names = [f"{prefix}.{number}" for number in range(5)]
    for name in names:
        publish(client, name, 3)
    query = reader(maxRecordsPerTrigger="2")
    query.prepareForTriggerAvailableNow()
    end = query.initialOffset()
    # Later than the query began: not for this run.
    publish(client, names[0], 1)
    publish(client, f"{prefix}.9", 1)
    taken: Rows = []
    while (after := batch(query, end, query.getDefaultReadLimit()))[0] != end:
        end, rows = after
        taken += rows
    assert sorted(taken) == expected(**dict.fromkeys(names, (0, 3)))


def test_progress_counts_what_a_capped_batch_leaves_in_every_stream(
    reader: Callable[..., MalamuteStreamReader], client: SyncClient, prefix: str
) -> None:
    for number in range(5):
        publish(client, f"{prefix}.{number}", 30)
    query = reader(maxRecordsPerTrigger="2")
    query.latestOffset(query.initialOffset(), query.getDefaultReadLimit())
    told = query.reportLatestOffset()
    assert told is not None
    assert told["recordsBehindLatest"] == 148


def test_few_records_of_several_streams_count_together(
    reader: Callable[..., MalamuteStreamReader], client: SyncClient, prefix: str
) -> None:
    a, b = f"{prefix}.a", f"{prefix}.b"
    for name in (a, b):
        publish(client, name, 10)
    query = reader(minRecordsPerTrigger="10")
    end, _ = batch(query, query.initialOffset())
    publish(client, a, 6)
    assert query.latestOffset(end, query.getDefaultReadLimit()) == end
    publish(client, b, 4)
    _, rows = batch(query, end, query.getDefaultReadLimit())
    assert len(rows) == 10


@pytest.mark.slow
def test_two_hundred_streams_cost_one_question_while_they_are_idle(
    reader: Callable[..., MalamuteStreamReader],
    client: SyncClient,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"{prefix}.{number:03}" for number in range(200)]
    for name in names:
        publish(client, name, 2)
    query = reader(idleWaitMs="0")
    begin = query.initialOffset()
    end = query.latestOffset(begin, ALL)
    tasks = query.partitions(begin, end)
    # Small ranges come together: 200 tasks of a few records would cost seconds.
    (task,) = tasks
    assert isinstance(task, Ranges)
    assert rows_of(query, tasks) == expected(**dict.fromkeys(names, (0, 2)))
    link = query._broker._client
    assert link is not None
    asked: list[Any] = []
    ask = link._link.ask

    def counted(make: Any) -> Any:
        asked.append(make)
        return ask(make)

    monkeypatch.setattr(link._link, "ask", counted)
    assert query.latestOffset(end, ALL) == end
    assert len(asked) == 1
    publish(client, names[77], 1)
    end = query.latestOffset(end, ALL)
    # The list, and a plan of the one stream with news.
    assert len(asked) == 3
    told = query.reportLatestOffset()
    assert told is not None
    assert len(told["streams"]) == 200


@pytest.mark.parametrize("options", [{"minPartitions": "3"}, {"maxRecordsPerPartition": "1000"}])
def test_options_about_tasks_hold_for_many_streams(
    reader: Callable[..., MalamuteStreamReader],
    client: SyncClient,
    prefix: str,
    options: dict[str, str],
) -> None:
    for name in "abc":
        for _ in range(3):
            client.publish_many(f"{prefix}.{name}", [b"x" * 20_000] * 3)
    query = reader(**options)
    begin = query.initialOffset()
    tasks = query.partitions(begin, query.latestOffset(begin, ALL))
    assert len(tasks) == 3
    assert all(isinstance(task, Range) for task in tasks)


@pytest.mark.moderate
def test_a_batch_read_begins_and_ends_by_stream(
    endpoint: str, client: SyncClient, prefix: str
) -> None:
    a, b, c = (f"{prefix}.{name}" for name in "abc")
    for name in (a, b, c):
        publish(client, name, 10)
    young = client.publish(a, b"young")

    def read(**more: str) -> Rows:
        given = {"endpoint": endpoint, "streamsPattern": f"{prefix}.+", **more}
        batch_reader = MalamuteReader(parse_options(given))
        return rows_of(batch_reader, batch_reader.partitions())

    assert read(
        startingOffsets=json.dumps({a: 5, b: -1}),
        endingOffsets=json.dumps({a: {"0": 8}, c: -1}),
    ) == expected(**{a: (5, 8), c: (0, 10)})
    ends = {a: young.append_time_ms, b: young.append_time_ms}
    assert read(endingTimestamp=json.dumps(ends)) == expected(
        **{a: (0, 10), b: (0, 10), c: (0, 10)}
    )
    starts = {a: young.append_time_ms}
    assert read(startingTimestamp=json.dumps(starts)) == expected(
        **{a: (10, 11), b: (0, 10), c: (0, 10)}
    )
    assert read(pattern="nothing.#") == []


@pytest.mark.parametrize("option", ["startingOffsets", "startingTimestamp", "endingOffsets"])
def test_a_place_in_a_stream_that_is_not_there_is_refused_when_a_query_begins(
    endpoint: str, client: SyncClient, prefix: str, reader: Callable[..., MalamuteStreamReader],
    option: str,
) -> None:  # fmt: skip
    there, missing = f"{prefix}.a", f"{prefix}.missing"
    publish(client, there, 10)
    places = json.dumps({there: 0, missing: 3})
    pattern = {"streamsPattern": rf"{prefix}\..*"}
    told = rf"'{option}': names stream '{missing}', which is not there"
    with pytest.raises(OptionError, match=told):
        MalamuteReader(
            parse_options({"endpoint": endpoint, **pattern, option: places})
        ).partitions()
    if option == "startingOffsets":
        begun = reader().initialOffset()
        with pytest.raises(OptionError, match=told):
            reader(startingOffsets=places).initialOffset()
        # A query that goes on does not look at where it would begin.
        assert batch(reader(startingOffsets=places), begun)[1] == expected(**{there: (0, 10)})
