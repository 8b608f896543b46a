"""Reading the broker's files in place: what the wire gives, or the wire itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from malamute_py.client.position import Position
from malamute_py.client.sync.client import SyncClient, connect_sync
from pyspark_malamute import fetch as fetching
from pyspark_malamute import local_log
from pyspark_malamute.errors import MalamuteSourceError
from pyspark_malamute.fetch import fetch_all
from pyspark_malamute.kept_links import KEPT
from pyspark_malamute.options import SourceOptions, parse_options
from pyspark_malamute.planning import Range, Ranges
from pyspark_malamute.typed import typed_schema, with_schema
from tests.spark.conftest import serve

ALL = {"columns": "stream,offset,append_time,client_time,subject,keys,fields,properties,body"}


class Machine:
    """A broker, its directory, and how often a task asked it for records."""

    def __init__(self, directory: Path, endpoint: str, client: SyncClient) -> None:
        self.directory = directory
        self.endpoint = endpoint
        self.client = client
        self.subscriptions = 0

    def options(self, stream: str, **more: str) -> SourceOptions:
        given = {"endpoint": self.endpoint, "stream": stream, "brokerOutageMs": "0"}
        return parse_options({**given, **more})

    def whole(self, stream: str) -> Range:
        """All records that there ever were: from offset 1 on where the newest ones are kept."""
        plan = self.client.plan_read(stream)
        keeps = self.client.stream_info(stream).settings.get("keep")
        start = plan.first if keeps else 0
        return Range(stream, plan.stream.hex(), plan.epoch, start, plan.tail, first=plan.first)

    def over_both(
        self, stream: str, caplog: pytest.LogCaptureFixture, **more: str
    ) -> tuple[list[Any], str, int]:
        """(rows, loss or error, subscriptions), alike over the wire and in place."""
        found = []
        for directory in ("", str(self.directory)):
            options = self.options(stream, logDirectory=directory, **more)
            if options.body_type == "typed":
                options = with_schema(options, typed_schema(options))
            caplog.clear()
            local_log._logged.clear()
            self.subscriptions = 0
            rows: list[Any] = []
            told = ""
            try:
                for piece in fetch_all(options, self.whole(stream)):
                    rows += piece.to_pylist()
            except MalamuteSourceError as error:
                told = str(error)
            told += "".join(each for each in caplog.messages if "over the wire" not in each)
            found.append((rows, told))
        assert found[0] == found[1]
        return *found[1], self.subscriptions


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    directory = tmp_path_factory.mktemp("machine")
    with serve(directory) as server, connect_sync(server.endpoints[0]) as client:
        yield Machine(directory, server.endpoints[0], client)


@pytest.fixture
def machine(place: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    subscribe = fetching._subscribe

    def counted(*given: Any) -> Any:
        place.subscriptions += 1
        return subscribe(*given)

    monkeypatch.setattr(fetching, "_subscribe", counted)
    yield place
    KEPT.close()


def mixed(client: SyncClient, stream: str, records: int = 1000) -> None:
    """Publish records with everything that a record can have."""
    for first in range(0, records, 250):
        rows = range(first, first + 250)
        client.publish_many(
            stream,
            [f"body {row}".encode() for row in rows],
            subjects=[[f"flights.{row % 7}.{row % 3}", f"key.{row % 5}"] for row in rows],
            fields=[{"carrier": f"c{row % 4}"} if row % 2 else None for row in rows],
            properties=[{"row": row} if row % 5 == 0 else None for row in rows],
            client_time_ms=[1000 * row if row % 3 else None for row in rows],
            codec="gzip" if first else None,
        )  # fmt: skip


Prepare = Callable[[SyncClient, str], None]


def typed(client: SyncClient, stream: str) -> None:
    old, new = (
        pa.schema({"number": kind, "name": pa.string()}) for kind in (pa.int32(), pa.int64())
    )
    client.create_stream(stream, schema=old)
    rows = [{"number": number, "name": "x"} for number in range(100)]
    client.publish_table(stream, pa.Table.from_pylist(rows, old))
    client.edit_stream(stream, schema=new)


def steps(client: SyncClient, stream: str) -> None:
    mixed(client, stream, 250)
    with client.atomic() as step:
        for number in range(10):
            step.publish(stream, b"in a step %d" % number, subject="flights.1.1")


def expired(client: SyncClient, stream: str) -> None:
    mixed(client, stream, 250)
    client.publish_many(stream, [b"x"] * 10, expires_at_ms=[1, 2, 3, 1 << 50, 5] * 2)


def purged(client: SyncClient, stream: str) -> None:
    mixed(client, stream)
    client.purge(stream, "flights.3.*")
    mixed(client, stream, 250)


@pytest.mark.moderate
@pytest.mark.parametrize("prepare", [mixed, steps, expired, purged])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"pattern": "flights.3.*"},
        {"pattern": "any:carrier=c1"},
        {"pattern": "nothing"},
        {"clientTimeFrom": "100000", "clientTimeTo": "200000"},
    ],
    ids=["all", "topic", "fields", "nothing", "client time"],
)
def test_records_are_read_in_place_without_the_broker(
    machine: Machine, stream: str, caplog: pytest.LogCaptureFixture, prepare: Prepare,
    more: dict[str, str],
) -> None:  # fmt: skip
    machine.client.create_stream(stream)
    prepare(machine.client, stream)
    rows, told, subscriptions = machine.over_both(stream, caplog, **ALL, **more)
    assert not told
    assert subscriptions == 0
    assert bool(rows) == (more.get("pattern") != "nothing")


def test_typed_columns_are_read_in_place(
    machine: Machine, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    typed(machine.client, stream)
    rows, told, subscriptions = machine.over_both(stream, caplog, bodyType="typed")
    assert rows == [{"number": number, "name": "x"} for number in range(100)]
    assert not told
    assert subscriptions == 0


@pytest.mark.moderate
@pytest.mark.parametrize("prepare", [mixed, expired, purged])
def test_rows_without_columns_are_as_many_as_rows_with_them(
    machine: Machine, stream: str, caplog: pytest.LogCaptureFixture, prepare: Prepare
) -> None:
    machine.client.create_stream(stream)
    prepare(machine.client, stream)
    for more in ({}, {"pattern": "flights.2.*"}):
        rows, _, _ = machine.over_both(stream, caplog, **more)
        counted, _, subscriptions = machine.over_both(stream, caplog, columns="", **more)
        assert len(counted) == len(rows)
        assert not any(counted)
        assert subscriptions == 0
        in_one, _, subscriptions = machine.over_both(stream, caplog, columns="records", **more)
        assert in_one == ([{"records": len(rows)}] if rows else [])
        assert subscriptions == 0


def trimmed(client: SyncClient, stream: str) -> None:
    mixed(client, stream)
    client.trim(stream, Position(b"", 0, 300))


def bounded(client: SyncClient, stream: str) -> None:
    client.edit_stream(stream, max_records=500)
    mixed(client, stream)


def aged(client: SyncClient, stream: str) -> None:
    mixed(client, stream)
    client.edit_stream(stream, max_age_ms=1)


@pytest.mark.parametrize("prepare", [trimmed, bounded, aged])
@pytest.mark.parametrize("fail", ["true", "false", "all"])
def test_what_is_lost_the_broker_decides(
    machine: Machine, stream: str, caplog: pytest.LogCaptureFixture, prepare: Prepare, fail: str
) -> None:
    machine.client.create_stream(stream)
    prepare(machine.client, stream)
    _, told, subscriptions = machine.over_both(stream, caplog, **ALL, failOnDataLoss=fail)
    assert ("removed by a trim" if prepare is trimmed else "cannot be read any more") in told
    assert subscriptions == 1


@pytest.mark.moderate
def test_damage_amid_a_range_is_told_as_the_broker_tells_it(
    machine: Machine, stream: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bodies = [f"{stream} body {number}".encode() for number in range(30)]
    with serve(tmp_path) as server, connect_sync(server.endpoints[0]) as client:
        for body in bodies:
            client.publish(stream, body)
    for path in tmp_path.rglob("*.seg"):
        data = path.read_bytes()
        if bodies[12] in data:
            path.write_bytes(data.replace(bodies[12], b"X" * len(bodies[12])))
    with serve(tmp_path) as server, connect_sync(server.endpoints[0]) as client:
        damaged = Machine(tmp_path, server.endpoints[0], client)
        for fail in ("true", "false"):
            rows, told, _ = damaged.over_both(stream, caplog, failOnDataLoss=fail)
            assert "offsets 12 to 12 cannot be read any more: damaged" in told
            assert [row["body"] for row in rows] == (bodies[:12] + bodies[13:]) * (fail == "false")
        KEPT.close()


@pytest.mark.moderate
def test_a_stream_that_keeps_the_newest_of_each_subject_is_read_over_the_wire(
    machine: Machine, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine.client.create_stream(stream, keep="last-per-subject", ring_bytes=1 << 20)
    for key in ["first", *["a", "b", "c"] * 10]:
        machine.client.publish(stream, b"x", subject=key)
    rows, told, subscriptions = machine.over_both(stream, caplog, **ALL)
    assert rows
    assert not told
    assert subscriptions == 1
    assert "which of its records were replaced" in caplog.text


def read(options: SourceOptions, *parts: Range) -> list[int]:
    pieces = fetch_all(options, Ranges(list(parts)))
    return [offset for piece in pieces for offset in piece.column("offset").to_pylist()]


def test_a_stream_in_memory_is_read_over_the_wire_beside_one_that_is_in_the_files(
    machine: Machine, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = f"{stream}-memory"
    machine.client.create_stream(other, memory=True)
    for name in (stream, other):
        machine.client.publish_many(name, [b"x"] * 10)
    machine.subscriptions = 0
    options = machine.options(stream, logDirectory=str(machine.directory))
    parts = [machine.whole(name) for name in (other, stream, other)]
    assert read(options, *parts) == [*range(10)] * 3
    assert machine.subscriptions == 2
    assert caplog.text.count(f"stream '{other}' is read over the wire") == 1


def test_a_directory_that_is_not_here_or_may_not_be_read_is_no_error(
    machine: Machine, stream: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.client.publish_many(stream, [b"x"] * 10)
    for directory in (tmp_path / "none", tmp_path):
        machine.subscriptions = 0
        options = machine.options(stream, logDirectory=str(directory))
        assert read(options, machine.whole(stream)) == list(range(10))
        assert machine.subscriptions == 1
        assert f"logDirectory '{directory}' cannot be used here" in caplog.text


@pytest.mark.moderate
def test_the_files_of_another_broker_are_not_read(
    machine: Machine, stream: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.client.publish_many(stream, [b"right"] * 10)
    with serve(tmp_path) as other, connect_sync(other.endpoints[0]) as client:
        client.publish_many(stream, [b"wrong"] * 10)
    options = machine.options(stream, logDirectory=str(tmp_path))
    pieces = list(fetch_all(options, machine.whole(stream)))
    assert {body for piece in pieces for body in piece.column("body").to_pylist()} == {b"right"}
    assert "they are of another broker" in caplog.text


@pytest.mark.moderate
def test_what_the_files_do_not_have_yet_comes_over_the_wire(
    machine: Machine, stream: str, tmp_path: Path
) -> None:
    """As a copy of the directory that is older than the plan."""
    machine.client.publish_many(stream, [b"x"] * 10)
    copy = tmp_path / "copy"
    shutil.copytree(machine.directory, copy)
    machine.client.publish_many(stream, [b"x"] * 10)
    machine.subscriptions = 0
    options = machine.options(stream, logDirectory=str(copy))
    assert read(options, machine.whole(stream)) == list(range(20))
    assert machine.subscriptions == 1


def test_nothing_of_the_files_stays_open_after_a_task(machine: Machine, stream: str) -> None:
    machine.client.publish_many(stream, [b"x"] * 10)
    options = machine.options(stream, logDirectory=str(machine.directory))
    assert read(options, machine.whole(stream)) == list(range(10))
    maps = Path("/proc/self/maps").read_text()
    assert str(machine.directory) not in maps
