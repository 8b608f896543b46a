"""Partitions and commits of the sink at a broker, without Spark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from malamute_py import EmbeddedBroker
from malamute_py.client.sync.client import SyncClient
from malamute_py.config import Authentication, Grant
from malamute_py.server.authentication.credentials import hash_password
from pyspark_malamute import links, sink, sink_task
from pyspark_malamute.errors import (
    BatchChanged,
    MalamuteSourceError,
    SourceUnavailable,
    UnwritableRows,
)
from pyspark_malamute.kept_links import KEPT
from pyspark_malamute.sink import commit
from pyspark_malamute.sink_commits import BatchName, Published, read_published
from pyspark_malamute.sink_options import SinkOptions, parse_sink_options
from pyspark_malamute.sink_task import Written, write_partition
from tests.spark.conftest import serve


def options(endpoint: str, stream: str, **more: str) -> SinkOptions:
    least = {"endpoint": endpoint, "stream": stream, "chunkBytes": "64k"}
    return parse_sink_options({**least, **more}, streaming=True)


def rows(first: int, last: int, size: int = 1000) -> Any:
    """Record batch of bodies that begin with their number."""
    numbers = range(first, last)
    bodies = [b"%06d" % number + bytes(size - 6) for number in numbers]
    made: Any = pa
    return made.record_batch(
        {
            "subject": made.array(["a.b"] * len(numbers), made.string()),
            "body": made.array(bodies, made.binary()),
        }
    )


def numbers(client: SyncClient, stream: str) -> list[int]:
    """Numbers of the rows that a stream has, in their order."""
    with client.subscribe(stream, start="earliest", until="tail") as reading:
        return [int(record.body[:6]) for record in reading]


@pytest.fixture
def batch(stream: str) -> BatchName:
    """A batch that no other test writes."""
    return BatchName(f"writer-{stream}", 3)


@pytest.fixture
def write(endpoint: str, stream: str, batch: BatchName) -> Callable[..., Written]:
    """Writes a partition of the batch."""

    def write(*batches: Any, partition: int = 0) -> Written:
        return write_partition(options(endpoint, stream), batch, partition, iter(batches))

    return write


@pytest.mark.moderate
def test_a_partition_that_is_written_again_is_published_once(
    client: SyncClient, stream: str, write: Callable[..., Written]
) -> None:
    first = write(rows(0, 200))
    again = write(rows(0, 50), rows(50, 200))
    assert (first.rows, first.chunks) == (again.rows, again.chunks) == (200, 4)
    assert numbers(client, stream) == list(range(200))


@pytest.mark.moderate
def test_a_task_that_died_amid_its_rows_is_gone_on_with(
    client: SyncClient, stream: str, endpoint: str, batch: BatchName, write: Callable[..., Written]
) -> None:
    def dying() -> Iterator[Any]:
        yield rows(0, 150)
        raise RuntimeError("the task dies")

    with pytest.raises(RuntimeError):
        write_partition(options(endpoint, stream), batch, 0, dying())
    published = numbers(client, stream)
    assert 0 < len(published) < 200
    write(rows(0, 200))
    assert numbers(client, stream) == list(range(200))


@pytest.mark.moderate
def test_a_chunk_whose_key_the_broker_forgot_is_known_by_its_record(
    client: SyncClient, stream: str, write: Callable[..., Written],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write(rows(0, 200))
    # Keys of another identity are other keys.
    monkeypatch.setattr(SinkOptions, "named", lambda self, name: _asking(self, f"other-{name}"))
    write(rows(0, 200))
    assert numbers(client, stream) == list(range(200))


def _asking(chosen: SinkOptions, identity: str) -> SinkOptions:
    return msgspec.structs.replace(chosen, identity=identity)


def test_a_chunk_that_is_published_meanwhile_is_known_by_its_key(
    client: SyncClient, stream: str, write: Callable[..., Written],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Two attempts of a task may both have found nothing when they began."""
    write(rows(0, 200))
    reads: list[int] = []

    def blind_at_first(*arguments: Any) -> Published:
        reads.append(1)
        return read_published(*arguments) if len(reads) > 1 else Published(None, {})

    monkeypatch.setattr(sink_task, "read_published", blind_at_first)
    write(rows(0, 200))
    assert numbers(client, stream) == list(range(200))


def test_of_rows_that_were_cut_off_the_last_chunk_is_not_published(
    client: SyncClient, stream: str, write: Callable[..., Written],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sink_task, "end_check", lambda _: lambda: False)
    with pytest.raises(SourceUnavailable, match="rows of partition 0 were cut off"):
        write(rows(0, 70))
    # A chunk is known to be full when there is a row after it.
    assert numbers(client, stream) == list(range(63))


@pytest.mark.moderate
def test_other_rows_than_were_published_are_refused(
    client: SyncClient, stream: str, write: Callable[..., Written],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write(rows(0, 200))
    for other in (rows(0, 199), rows(1, 201), rows(0, 10), rows(0, 200, size=999)):
        with pytest.raises(BatchChanged, match="has other rows now"):
            write(other)
    nothing = iter([Published(None, {})])
    monkeypatch.setattr(
        sink_task, "read_published", lambda *given: next(nothing, None) or read_published(*given)
    )
    with pytest.raises(BatchChanged, match="chunk 0 had 63 rows and has 63"):
        write(rows(1, 201))
    assert numbers(client, stream) == list(range(200))


@pytest.mark.moderate
def test_rows_that_spark_cut_off_are_gone_on_after(
    client: SyncClient, stream: str, write: Callable[..., Written],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where a task fails that feeds the sink, its rows end as if there were no more."""
    write(rows(0, 10))
    nothing = iter([Published(None, {})])
    monkeypatch.setattr(
        sink_task, "read_published", lambda *given: next(nothing, None) or read_published(*given)
    )
    with pytest.raises(SourceUnavailable, match=r"with 10 instead of 63 rows\. Have the task run"):
        write(rows(0, 200))
    write(rows(0, 100))
    write(rows(0, 200))
    assert numbers(client, stream) == list(range(200))


def test_a_partition_of_one_chunk_may_come_in_another_order(
    client: SyncClient, stream: str, write: Callable[..., Written]
) -> None:
    write(rows(0, 20))
    write(rows(10, 20), rows(0, 10))
    assert numbers(client, stream) == list(range(20))
    with pytest.raises(BatchChanged):
        write(rows(0, 20, size=999))


def test_a_partition_of_one_chunk_may_be_published_meanwhile_in_another_order(
    client: SyncClient, stream: str, write: Callable[..., Written],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write(rows(0, 20))
    nothing = iter([Published(None, {})])
    monkeypatch.setattr(
        sink_task, "read_published", lambda *given: next(nothing, None) or read_published(*given)
    )
    write(rows(10, 20), rows(0, 10))
    assert numbers(client, stream) == list(range(20))


def test_a_batch_that_another_driver_commits_meanwhile_is_committed_once(
    client: SyncClient, stream: str, endpoint: str, batch: BatchName,
    write: Callable[..., Written], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    chosen, told = options(endpoint, stream), [write(rows(0, 20))]
    commit(chosen, told)
    client.publish(stream, b"999999", subject="a.b")  # The other driver saw another tail.
    before = read_published(client, chosen, batch)
    blind = iter([Published(None, before.chunks)])
    monkeypatch.setattr(
        sink, "read_published", lambda *given: next(blind, None) or read_published(*given)
    )
    commit(chosen, told)
    assert read_published(client, chosen, batch) == before


@pytest.mark.moderate
def test_a_batch_is_committed_once_with_its_rows_and_where_they_end(
    client: SyncClient, stream: str, endpoint: str, batch: BatchName, write: Callable[..., Written]
) -> None:
    chosen = options(endpoint, stream)
    told = [write(rows(0, 200)), write(partition=1), write(rows(200, 210), partition=2)]
    for _ in range(2):
        commit(chosen, told)
    with client.subscribe("spark.commits", f"{batch.subject}.commit", start="earliest",
                          until="tail") as reading:  # fmt: skip
        found = [json.loads(record.body) for record in reading]
    assert found == [{"writer": batch.writer, "batch": 3, "rows": 210, "next": {stream: 210}}]


def test_a_committed_batch_is_not_written_again(
    client: SyncClient, stream: str, endpoint: str, write: Callable[..., Written]
) -> None:
    chosen = options(endpoint, stream)
    commit(chosen, [write(rows(0, 20))])
    again = write(rows(30, 50), partition=7)
    commit(chosen, [again])
    assert numbers(client, stream) == list(range(20))


def test_a_name_that_was_used_for_other_rows_is_refused(
    stream: str, endpoint: str, write: Callable[..., Written]
) -> None:
    chosen = options(endpoint, stream)
    told = write(rows(0, 20))
    commit(chosen, [told])
    with pytest.raises(BatchChanged, match="committed with 20 rows, and has 30 now"):
        commit(chosen, [write(rows(0, 30))])
    told.rows = 19
    with pytest.raises(BatchChanged, match="committed with 20 rows, and has 19 now"):
        commit(chosen, [told])


def test_a_batch_with_fewer_partitions_than_were_published_is_not_committed(
    stream: str, endpoint: str, batch: BatchName, client: SyncClient, write: Callable[..., Written]
) -> None:
    write(rows(0, 20), partition=1)
    told = [write(rows(0, 20))]
    with pytest.raises(BatchChanged, match="chunk 0 of partition 1 is not among"):
        commit(options(endpoint, stream), told)
    assert read_published(client, options(endpoint, stream), batch).commit is None


def test_an_empty_batch_asks_the_broker_nothing(stream: str, batch: BatchName) -> None:
    chosen = options("tcp://127.0.0.1:1", stream)
    told = write_partition(chosen, batch, 0, iter([rows(0, 0)]))
    commit(chosen, [told, None])
    commit(chosen, [])


def test_rows_of_several_streams_go_in_one_step(
    client: SyncClient, stream: str, endpoint: str, batch: BatchName
) -> None:
    chosen = parse_sink_options({"endpoint": endpoint}, streaming=True)
    names = [f"{stream}-b", f"{stream}-a"] * 5
    frame = rows(0, 10).append_column("stream", pa.array(names))
    told = write_partition(chosen, batch, 0, iter([frame]))
    commit(chosen, [told])
    assert numbers(client, f"{stream}-b") == [0, 2, 4, 6, 8]
    assert numbers(client, f"{stream}-a") == [1, 3, 5, 7, 9]
    published = read_published(client, chosen, batch)
    assert published.commit is not None
    assert published.commit.next == {f"{stream}-a": 5, f"{stream}-b": 5}


def test_the_records_of_chunks_and_batches_go_where_the_option_says(
    client: SyncClient, stream: str, endpoint: str, batch: BatchName
) -> None:
    chosen = options(endpoint, stream, commitStream=f"{stream}-commits")
    commit(chosen, [write_partition(chosen, batch, 0, iter([rows(0, 10)]))])
    with client.subscribe(f"{stream}-commits", start="earliest", until="tail") as reading:
        assert [record.subject for record in reading] == [batch.chunks(0), batch.commit]


def test_a_stream_that_no_step_reaches_is_refused_by_name(
    client: SyncClient, stream: str, write: Callable[..., Written]
) -> None:
    client.create_stream(stream, memory=True)
    with pytest.raises(SourceUnavailable, match="streams of ring main only"):
        write(rows(0, 10))


def test_links_that_asked_for_a_name_are_closed_when_the_task_ends(
    write: Callable[..., Written],
) -> None:
    write(rows(0, 10))
    assert not [key for key in KEPT._links if "spark-writer" in str(key)]


@pytest.mark.moderate
def test_links_of_a_credential_share_its_identity_and_are_kept(
    tmp_path: Path, stream: str, batch: BatchName
) -> None:
    section = Authentication(
        mechanism="plain", users={name: hash_password("secret") for name in ("sink", "other")}
    )
    names = [stream, "spark.commits"]
    permissions = {"sink": Grant(read=names, write=names), "other": Grant(read=names)}
    with serve(tmp_path, authentication=section, permissions=permissions) as server:
        chosen = options(server.endpoints[0], stream, user="sink", password="secret")
        for partition in (0, 1, 0, 1):
            write_partition(chosen, batch, partition, iter([rows(0, 10)]))
        kept = [link for key, link in KEPT._links.items() if "secret" in key]
        assert [link.identity for link in kept] == ["sink"]
        assert sorted(numbers(kept[0], stream)) == sorted([*range(10)] * 2)
        links.drop(chosen)
        other = options(server.endpoints[0], stream, user="other", password="secret")
        with pytest.raises(SourceUnavailable, match="Have permission to write and read stream"):
            write_partition(other, batch, 5, iter([rows(0, 10)]))
        links.drop(other)


def test_a_link_without_identity_is_refused(
    endpoint: str, stream: str, batch: BatchName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SinkOptions, "named", lambda self, _: self)
    with pytest.raises(MalamuteSourceError, match="gives this link no identity"):
        write_partition(options(endpoint, stream), batch, 0, iter([rows(0, 1)]))


@pytest.mark.moderate
def test_rows_of_more_streams_than_a_step_has_parts_are_published(
    client: SyncClient, endpoint: str, stream: str, batch: BatchName
) -> None:
    made: Any = pa
    names = [f"{stream}-{number % 600}" for number in range(1200)]
    bodies = [b"%06d" % number for number in range(1200)]
    several = made.record_batch({"stream": names, "body": made.array(bodies, made.binary())})
    chosen = parse_sink_options({"endpoint": endpoint}, streaming=True)
    told = write_partition(chosen, batch, 0, iter([several]))
    assert (told.rows, len(told.streams)) == (1200, 600)
    assert numbers(client, names[0]) == [0, 600]
    assert numbers(client, names[599]) == [599, 1199]


@pytest.mark.moderate
def test_chunks_keep_the_limits_of_the_broker(batch: BatchName) -> None:
    low: dict[str, Any] = {
        "limits.batch_bytes_max": 256 << 10, "limits.record_bytes_max": 64 << 10,
        "limits.batch_records_max": 50,
    }  # fmt: skip
    with EmbeddedBroker(tcp=True, **low) as small:
        chosen = parse_sink_options(
            {"endpoint": small.tcp_endpoint, "stream": "out"}, streaming=True
        )
        told = write_partition(chosen, batch, 0, iter([rows(0, 120, 10), rows(120, 200, 20_000)]))
        assert told.rows == 200
        with small.connect_sync() as client:
            assert numbers(client, "out") == list(range(200))


@pytest.mark.moderate
def test_a_row_above_the_limits_of_the_broker_is_named_and_nothing_of_its_chunk_is_published(
    batch: BatchName,
) -> None:
    low: dict[str, Any] = {
        "limits.batch_bytes_max": 64 << 10, "limits.record_bytes_max": 64 << 10,
    }  # fmt: skip
    with EmbeddedBroker(tcp=True, **low) as small, small.connect_sync() as client:
        chosen = parse_sink_options(
            {"endpoint": small.tcp_endpoint, "stream": "out"}, streaming=True
        )
        large = iter([rows(0, 50), rows(50, 60, 4_000), rows(60, 62, 70_000)])
        with pytest.raises(UnwritableRows) as caught:
            write_partition(chosen, batch, 3, large)
        assert str(caught.value) == (
            "malamute sink: column 'body' of row 60 of the partition has 70000 bytes for stream "
            "'out', at most 65536 by the broker's limits.record_bytes_max; this is partition 3"
        )
        assert max(numbers(client, "out")) < 60
        # Of several streams, each row may have another.
        made: Any = pa
        bodies = made.array([b"1", bytes(70_000)], made.binary())
        several = made.record_batch({"stream": ["one", "two"], "body": bodies})
        chosen = parse_sink_options({"endpoint": small.tcp_endpoint}, streaming=True)
        with pytest.raises(UnwritableRows, match=r"row 1 of the partition .* for stream 'two'"):
            write_partition(chosen, batch, 4, iter([several]))
        # A body that a record may have, in a batch that is larger for its stamp and its head.
        chosen = parse_sink_options(
            {"endpoint": small.tcp_endpoint, "stream": "brim"}, streaming=True
        )
        with pytest.raises(UnwritableRows, match=r"row 1 of the partition .* takes 65536 bytes"):
            write_partition(chosen, batch, 5, iter([rows(0, 1), rows(1, 2, 64 << 10)]))
