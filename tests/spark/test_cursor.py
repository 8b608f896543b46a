"""The cursor at the broker that follows a query."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from malamute_py.client.settings import Plain
from malamute_py.client.sync.client import SyncClient, connect_sync
from malamute_py.config import Authentication, Grant
from malamute_py.server.authentication.credentials import hash_password
from pyspark_malamute.errors import SourceUnavailable
from pyspark_malamute.options import parse_options
from pyspark_malamute.stream_reader import MalamuteStreamReader
from tests.spark.conftest import serve

ALL = ReadAllAvailable()

Make = Callable[..., MalamuteStreamReader]


@pytest.fixture
def reader(endpoint: str, stream: str) -> Iterator[Make]:
    made: list[MalamuteStreamReader] = []

    def make(**more: str) -> MalamuteStreamReader:
        least = {"endpoint": endpoint, "startingOffsets": "earliest", "cursor": "spark-1"}
        if "streams" not in more:
            least["stream"] = stream
        given = {
            name: value for name, value in {**least, **more}.items() if value or name == "cursor"
        }
        made.append(MalamuteStreamReader(parse_options(given)))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def through_json(offset: Any) -> Any:
    return json.loads(json.dumps(offset))


def publish(client: SyncClient, stream: str, count: int) -> None:
    client.publish_many(stream, [b"x"] * count)


@pytest.mark.moderate
def test_a_cursor_stands_where_the_newest_batch_in_the_sink_ended(
    reader: Make, client: SyncClient, stream: str
) -> None:
    publish(client, stream, 100)
    query = reader()
    begin = through_json(query.initialOffset())
    end = through_json(query.latestOffset(begin, ALL))
    info = client.cursor_info(stream, "spark-1")
    assert (info.next, info.lag, info.pinned) == (0, 100, False)
    assert info.settings["description"] == "moved by a Spark query"
    publish(client, stream, 20)
    query.latestOffset(end, ALL)
    query.commit(end)
    info = client.cursor_info(stream, "spark-1")
    assert (info.next, info.lag) == (100, 20)
    # A query that goes on from its checkpoint finds the cursor and moves it on.
    again = reader()
    after = through_json(again.latestOffset(end, ALL))
    assert client.cursor_info(stream, "spark-1").next == 100
    again.commit(end)
    again.commit(after)
    assert client.cursor_info(stream, "spark-1").lag == 0


@pytest.mark.moderate
def test_a_cursor_that_is_ahead_stays_where_it_is(
    reader: Make, client: SyncClient, stream: str
) -> None:
    publish(client, stream, 100)
    query = reader()
    begin = through_json(query.initialOffset())
    end = through_json(query.latestOffset(begin, ALL))
    publish(client, stream, 50)
    client.cursor(stream, "spark-1").move(150)
    query.commit(end)
    assert client.cursor_info(stream, "spark-1").next == 150


def test_a_cursor_that_another_query_has_moved_on_is_told_of(
    reader: Make, client: SyncClient, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish(client, stream, 100)
    faster, slower = reader(), reader(maxRecordsPerTrigger="10")
    begin = through_json(faster.initialOffset())
    faster.commit(through_json(faster.latestOffset(begin, ALL)))
    # Its own cursor is behind a query that goes on.
    faster.latestOffset(begin, ALL)
    assert not caplog.text
    slower.latestOffset(begin, slower.getDefaultReadLimit())
    assert f"cursor 'spark-1' of stream '{stream}' stands at offset 100" in caplog.text
    assert "a cursor of its own" in caplog.text


def test_a_pin_keeps_what_the_query_has_not_read_up_to_its_bound(
    reader: Make, client: SyncClient, stream: str
) -> None:
    publish(client, stream, 100)
    query = reader(cursorPinBytes="64m")
    query.latestOffset(query.initialOffset(), ALL)
    info = client.cursor_info(stream, "spark-1")
    assert info.pinned
    assert info.settings["pin_bytes_max"] == 64 << 20


def test_without_the_option_there_is_no_cursor(
    reader: Make, client: SyncClient, stream: str
) -> None:
    publish(client, stream, 100)
    query = reader(cursor="")
    begin = query.initialOffset()
    end = query.latestOffset(begin, ALL)
    query.commit(end)
    assert client.list_cursors(stream) == []


@pytest.mark.moderate
def test_each_of_many_streams_has_the_cursor(reader: Make, client: SyncClient, stream: str) -> None:
    names = [f"{stream}.{number}" for number in range(5)]
    for name in names:
        publish(client, name, 10)
    query = reader(streams=",".join(names))
    end = through_json(query.latestOffset(through_json(query.initialOffset()), ALL))
    publish(client, names[2], 3)
    query.commit(end)
    lags = {name: client.cursor_info(name, "spark-1").lag for name in names}
    assert lags == {**dict.fromkeys(names, 0), names[2]: 3}


@pytest.mark.moderate
def test_a_stream_that_is_made_again_gets_the_cursor_and_its_pin(
    reader: Make, client: SyncClient, stream: str
) -> None:
    kept, again = f"{stream}.a", f"{stream}.b"
    publish(client, kept, 10)
    publish(client, again, 10)
    query = reader(
        streams="", streamsPattern=rf"{stream}\..*", failOnDataLoss="false", cursorPinBytes="64m"
    )
    end = through_json(query.latestOffset(through_json(query.initialOffset()), ALL))
    query.commit(end)
    client.remove_stream(again)
    publish(client, kept, 1)
    end = through_json(query.latestOffset(end, ALL))
    query.commit(end)
    publish(client, again, 5)
    end = through_json(query.latestOffset(end, ALL))
    info = client.cursor_info(again, "spark-1")
    assert (info.next, info.lag, info.pinned) == (0, 5, True)
    query.commit(end)
    assert client.cursor_info(again, "spark-1").lag == 0


@pytest.mark.slow
def test_who_may_not_pin_is_told_before_the_first_batch(tmp_path: Path) -> None:
    users = Authentication(
        mechanism="plain", users={name: hash_password(f"of {name}") for name in ("owner", "ann")}
    )
    permissions = {
        "owner": Grant(read=["*"], write=["*"], admin=True), "ann": Grant(read=["*"]),
    }  # fmt: skip
    with serve(tmp_path, authentication=users, permissions=permissions) as server:
        at = server.endpoints[0]
        with connect_sync(at, credential=Plain("owner", "of owner")) as client:
            publish(client, "s", 10)
            given = {
                "endpoint": at, "stream": "s", "startingOffsets": "earliest", "cursor": "c",
                "user": "ann", "password": "of ann",
            }  # fmt: skip
            pinned = MalamuteStreamReader(parse_options({**given, "cursorPinBytes": "1g"}))
            with pytest.raises(SourceUnavailable, match=r"does not allow .* to pin a cursor"):
                pinned.latestOffset(pinned.initialOffset(), ALL)
            pinned.stop()
            query = MalamuteStreamReader(parse_options(given))
            query.commit(query.latestOffset(query.initialOffset(), ALL))
            assert client.cursor_info("s", "c").next == 10
            query.stop()
