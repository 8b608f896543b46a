"""Counting without reading: the number is that of a read, whatever takes records out.

Each case compares three counts of the same options: the rows of a read, the column `records`, and
rows without a column. It says how many records are counted from the plan, so that a case of which
everything were read, or everything guessed, fails.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from malamute_protocol.encode import encode
from malamute_py.client.sync.client import SyncClient, connect_sync
from malamute_py.config import JournalSection
from pyspark_malamute.batch_reader import MalamuteReader
from pyspark_malamute.errors import MalamuteSourceError
from pyspark_malamute.kept_links import KEPT
from pyspark_malamute.options import parse_options
from pyspark_malamute.planning import ranges_of
from tests.spark.conftest import serve

RECORDS = 2_000


class Counted(NamedTuple):
    """Result of a count."""

    records: int
    planned: int
    """Records of these that no task reads."""
    told: str
    """The error, without its offsets."""


def count(endpoint: str, columns: str, **given: str) -> Counted:
    """Count what a read selects, as Spark's tasks do."""
    reader = MalamuteReader(parse_options({"endpoint": endpoint, "columns": columns, **given}))
    records = planned = 0
    try:
        for task in reader.partitions():
            planned += sum(each.end - each.start for each in ranges_of(task) if each.counted)
            for batch in reader.read(task):
                rows = batch.to_pylist()
                records += (
                    sum(row["records"] for row in rows) if "records" in columns else len(rows)
                )
    except MalamuteSourceError as error:
        return Counted(0, 0, str(error))
    return Counted(records, planned, "")


def count_alike(endpoint: str, **given: str) -> Counted:
    """The count by ranges, which is that of a read, and of rows without a column."""
    read = count(endpoint, "offset", **given)
    assert read.planned == 0
    by_range, by_row = (count(endpoint, columns, **given) for columns in ("records", ""))
    assert by_range == by_row
    assert (by_range.records, by_range.told) == (read.records, read.told)
    return by_range


def fill(client: SyncClient, stream: str, records: int = RECORDS) -> None:
    """Publish records with an even offset under "a", the others under "b", 100 in a batch."""
    for first in range(0, records, 100):
        client.publish_many(
            stream, [b"x" * 100] * 100, subjects=["a", "b"] * 50,
            client_time_ms=[1_000 * row for row in range(first, first + 100)],
        )  # fmt: skip


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("more", "records"),
    [
        ({}, RECORDS),
        ({"startingOffsets": "150"}, 1_850),
        ({"startingOffsets": "150", "endingOffsets": "1999"}, 1_849),
        ({"startingOffsets": "150", "endingOffsets": "150"}, 0),
        ({"startingOffsets": "latest"}, 0),
        ({"minPartitions": "7"}, RECORDS),
        ({"maxRecordsPerPartition": "130", "startingOffsets": "1"}, 1_999),
    ],
)
def test_nothing_is_read_where_everything_is_there(
    endpoint: str, client: SyncClient, stream: str, more: dict[str, str], records: int
) -> None:
    fill(client, stream)
    assert count_alike(endpoint, stream=stream, **more) == (records, records, "")


@pytest.mark.moderate
def test_rows_without_a_column_come_in_pieces_however_many_they_are(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    for _ in range(5):
        client.publish_many(stream, [b""] * 60_000)
    assert count_alike(endpoint, stream=stream) == (300_000, 300_000, "")
    given = {"endpoint": endpoint, "stream": stream, "columns": ""}
    reader = MalamuteReader(parse_options(given))
    (task,) = reader.partitions()
    assert [batch.num_rows for batch in reader.read(task)] == [1 << 17, 1 << 17, 37_856]


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("more", "records"),
    [
        ({"pattern": "a"}, 1_000),
        ({"pattern": "fields:f"}, 0),
        ({"clientTimeFrom": "50000", "clientTimeTo": "150000"}, 100),
    ],
)
def test_what_selects_is_read(
    endpoint: str, client: SyncClient, stream: str, more: dict[str, str], records: int
) -> None:
    fill(client, stream)
    assert count_alike(endpoint, stream=stream, **more) == (records, 0, "")


@pytest.mark.moderate
def test_times_bound_a_count(endpoint: str, client: SyncClient, stream: str) -> None:
    fill(client, stream, 300)
    time.sleep(0.01)
    middle = client.publish(stream, b"middle")
    time.sleep(0.01)
    fill(client, stream, 500)
    at = str(middle.append_time_ms)
    assert count_alike(endpoint, stream=stream, startingTimestamp=at) == (501, 501, "")
    assert count_alike(endpoint, stream=stream, endingTimestamp=at) == (300, 300, "")


@pytest.mark.moderate
def test_only_what_lies_before_a_purge_is_read(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    fill(client, stream)
    client.purge(stream, "a", before=1_000)
    for more in ({}, {"minPartitions": "7"}, {"maxRecordsPerPartition": "130"}):
        assert count_alike(endpoint, stream=stream, **more) == (1_500, 1_000, "")
    after = {"startingOffsets": "1000"}
    assert count_alike(endpoint, stream=stream, **after) == (1_000, 1_000, "")


@pytest.mark.moderate
@pytest.mark.parametrize("fail", ["true", "false", "all"])
def test_a_trim_is_told_as_by_a_read(
    endpoint: str, client: SyncClient, stream: str, fail: str
) -> None:
    fill(client, stream)
    client.trim(stream, 700)
    assert count_alike(endpoint, stream=stream, failOnDataLoss=fail) == (1_300, 1_300, "")
    earlier = {"startingOffsets": "0", "failOnDataLoss": fail}
    found = count_alike(endpoint, stream=stream, **earlier)
    if fail == "all":
        assert "removed by a trim" in found.told
    else:
        assert found == (1_300, 1_300, "")


@pytest.mark.parametrize("fail", ["true", "false"])
def test_what_retention_took_is_told_as_by_a_read(
    endpoint: str, client: SyncClient, stream: str, fail: str
) -> None:
    client.create_stream(stream, max_records=500)
    fill(client, stream)
    assert count_alike(endpoint, stream=stream, failOnDataLoss=fail) == (500, 500, "")
    earlier = {"startingOffsets": "0", "failOnDataLoss": fail}
    found = count_alike(endpoint, stream=stream, **earlier)
    if fail == "true":
        assert "offsets 0 to 1499 cannot be read any more" in found.told
    else:
        assert found == (500, 500, "")


@pytest.mark.moderate
def test_records_that_are_too_old_are_not_counted(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    client.create_stream(stream, max_age_ms=100)
    fill(client, stream, 300)
    time.sleep(0.2)
    assert count_alike(endpoint, stream=stream) == (0, 0, "")
    client.edit_stream(stream, max_age_ms=600_000)
    fill(client, stream, 200)
    assert count_alike(endpoint, stream=stream, startingOffsets="300") == (200, 200, "")


@pytest.mark.moderate
def test_a_stream_that_keeps_the_newest_of_each_subject_is_read(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    client.create_stream(stream, keep="last-per-subject", ring_bytes=1 << 20)
    fill(client, stream, 300)
    found = count_alike(endpoint, stream=stream)
    assert found.planned == 0
    assert found.records > 0


@pytest.mark.moderate
def test_a_transaction_counts_once_it_is_committed(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    fill(client, stream, 100)
    rolled_back = client.transaction()
    rolled_back.begin()
    rolled_back.publish_many(stream, [b"never"] * 10)
    rolled_back.roll_back()
    with client.transaction() as open_one:
        open_one.publish_many(stream, [b"later"] * 20)
        fill(client, stream, 100)
        assert count_alike(endpoint, stream=stream) == (200, 200, "")
    assert count_alike(endpoint, stream=stream) == (220, 220, "")


def test_a_stream_in_memory_is_counted(endpoint: str, client: SyncClient, stream: str) -> None:
    client.create_stream(stream, memory=True)
    fill(client, stream, 300)
    assert count_alike(endpoint, stream=stream) == (300, 300, "")


@pytest.mark.moderate
def test_several_streams_are_counted_by_one_task(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    for number in range(3):
        fill(client, f"{stream}-{number}", 100 * (number + 1))
    client.purge(f"{stream}-1", "a", before=150)
    given = {"streams": ",".join(f"{stream}-{number}" for number in range(3)), "minPartitions": "2"}
    assert count_alike(endpoint, **given) == (525, 450, "")
    options = {"endpoint": endpoint, "columns": "stream,records", **given}
    reader = MalamuteReader(parse_options(options))
    rows = [[row for batch in reader.read(task) for row in batch.to_pylist()]
            for task in reader.partitions()]  # fmt: skip
    assert rows == [
        [
            {"stream": f"{stream}-{number}", "records": count}
            for number, count in enumerate((100, 50, 300))
        ],
        [{"stream": f"{stream}-1", "records": 75}],
    ]


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("more", "records", "planned"),
    [
        ({}, 600, 600),
        ({"startingOffsets": {"a": 30, "b": "latest"}}, 370, 370),
        ({"endingOffsets": {"a": 30, "b": {"0": 60}}}, 390, 390),
        ({"startingOffsets": {"a": 30}, "endingOffsets": {"a": 50}, "pattern": "a"}, 260, 0),
        ({"startingTimestamp": {"a": 1}, "endingTimestamp": {"b": 1}}, 400, 400),
        ({"clientTimeFrom": "50000", "minPartitions": "2"}, 450, 0),
    ],
)
def test_streams_that_an_expression_selects_are_counted_between_their_places(
    endpoint: str, client: SyncClient, stream: str, more: dict[str, Any], records: int, planned: int
) -> None:
    for number, name in enumerate("abc"):
        fill(client, f"{stream}-{name}", 100 * (number + 1))
    given = {
        option: json.dumps({f"{stream}-{name}": place for name, place in value.items()})
        if isinstance(value, dict)
        else value
        for option, value in more.items()
    }
    expression = {"subscribePattern": rf"{stream}-[abc]"}
    assert count_alike(endpoint, **expression, **given) == (records, planned, "")


def expiring(client: SyncClient, stream: str, expires_at_ms: int) -> None:
    """Publish ten records, every second of which expires at a time."""
    content = encode([b"x"] * 10, subject="s", expires_at_ms=[0, expires_at_ms] * 5)
    with client.publisher(stream) as window:
        window.publish_batch(content)


@pytest.mark.moderate
def test_records_that_may_expire_are_counted_until_the_first_one_has(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    fill(client, stream, 100)
    expiring(client, stream, int(time.time() * 1000) + 600_000)
    assert count_alike(endpoint, stream=stream) == (110, 110, "")
    expiring(client, stream, 1_000)
    assert count_alike(endpoint, stream=stream) == (115, 0, "")


@pytest.mark.moderate
def test_only_segments_with_expired_records_are_read_also_after_a_restart(
    tmp_path: Path, stream: str
) -> None:
    journal = JournalSection(segment_bytes=65_536, ring_bytes=16 * 65_536)
    for begun in range(2):
        with serve(tmp_path, journal=journal) as server:
            endpoint = server.endpoints[0]
            if not begun:
                with connect_sync(endpoint) as client:
                    fill(client, stream)
                    expiring(client, stream, 1_000)
                    fill(client, stream)
            found = count_alike(endpoint, stream=stream)
            KEPT.close()
        assert found.records == 4_005
        assert 2_000 < found.planned < 3_900


def damage(directory: Path, body: bytes) -> None:
    """Change a body in the files of a broker that is stopped."""
    for path in directory.rglob("*.seg"):
        data = path.read_bytes()
        if body in data:
            path.write_bytes(data.replace(body, b"X" * len(body)))


def forget_the_close(directory: Path) -> None:
    """Let the next start read every segment, as one after a crash does."""
    for pattern in ("rings/main/active", "rings/main/*.idx"):
        for path in directory.glob(pattern):
            path.unlink()


@pytest.mark.moderate
@pytest.mark.parametrize("found_by", [forget_the_close, lambda _: None], ids=["start", "reader"])
def test_damage_is_told_as_by_a_read_once_a_start_or_a_reader_has_met_it(
    tmp_path: Path, stream: str, found_by: Callable[[Path], None]
) -> None:
    with serve(tmp_path) as server, connect_sync(server.endpoints[0]) as client:
        for number in range(30):
            client.publish(stream, b"body %d of them" % number)
    damage(tmp_path, b"body 12 of them")
    found_by(tmp_path)
    with serve(tmp_path) as server:
        given: dict[str, Any] = {"stream": stream, "brokerOutageMs": "0"}
        found = count_alike(server.endpoints[0], **given)
        assert "offsets 12 to 12 cannot be read any more: damaged" in found.told
        found = count_alike(server.endpoints[0], **given, failOnDataLoss="false")
        assert found.records == 29
        assert found.planned < 29
        KEPT.close()
