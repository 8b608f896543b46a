"""`malamute journal` on the files of a stopped broker."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from malamute_py import EmbeddedBroker
from tests.cli.running import run_cli

SEGMENT_BYTES = 1 << 20
SMALL = {
    "journal.segment_bytes": SEGMENT_BYTES,
    "journal.ring_bytes": 8 << 20,
    "limits.batch_bytes_max": 256 << 10,
    "limits.record_bytes_max": 128 << 10,
}


def fill(directory: Path) -> None:
    with EmbeddedBroker(directory, **SMALL) as broker, broker.connect_sync() as client:  # type: ignore[arg-type]
        for stream in ("orders", "other"):
            for number in range(20):
                client.publish(stream, f"{stream}-{number}".encode(), subject="s.t")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "data"
    fill(directory)
    return directory


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    fill(directory)
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    segment = next(path for path in files if path.stat().st_size == SEGMENT_BYTES)
    data = bytearray(segment.read_bytes())
    place = data.index(b"orders-3")
    data[place] ^= 1
    segment.write_bytes(data)
    return directory


@pytest.mark.moderate
def test_stat_tells_no_times_of_a_stream_without_records(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with EmbeddedBroker(directory, **SMALL) as broker, broker.connect_sync() as client:  # type: ignore[arg-type]
        client.publish_many("emptied", [b"1", b"2"])
        client.publish("kept", b"1")
        client.trim("emptied", 2)
    rows = run_cli("journal", "stat", str(directory)).ok().rows
    times = {row[3]: row[8:] for row in rows if row[0] == "stream"}
    assert times["emptied"] == ["", ""]
    assert all(time > "2020" for time in times["kept"])
    table = run_cli("journal", "stat", str(directory), "--json").ok().json
    (main,) = table["rings"]
    found = {
        table["stream_names"][number]: (facts["first_time_ms"], facts["last_time_ms"])
        for number, facts in main["streams"].items()
    }
    assert found["emptied"] == (None, None)
    assert all(found["kept"])


@pytest.mark.moderate
def test_stat_tells_rings_and_streams(whole: Path) -> None:
    rows = run_cli("journal", "stat", str(whole)).ok().rows
    assert ["ring", "main"] in [row[:2] for row in rows]
    streams = {row[3]: row[4:7] for row in rows if row[0] == "stream"}
    assert streams == {"orders": ["20", "0", "20"], "other": ["20", "0", "20"]}
    table = run_cli("journal", "stat", str(whole), "--json").ok().json
    assert sorted(table["stream_names"].values()) == ["orders", "other"]
    assert table["in_use"] is False


@pytest.mark.moderate
def test_a_whole_journal_is_verified(whole: Path) -> None:
    (row,) = run_cli("journal", "verify", str(whole)).ok().rows
    assert row[:2] == ["main", "ok"]
    (entry,) = run_cli("journal", "verify", str(whole), "--ring", "main", "--json").ok().json
    assert entry["kind"] == "ok"
    assert run_cli("journal", "verify", str(whole), "--ring", "nope").code == 1


@pytest.mark.moderate
def test_damage_is_found_named_and_code_1(damaged: Path) -> None:
    told = run_cli("journal", "verify", str(damaged))
    assert told.code == 1
    assert "damaged" in [row[1] for row in told.rows]
    assert "journal dump" in told.err


@pytest.mark.moderate
def test_a_dump_steps_over_damage_and_says_so(damaged: Path) -> None:
    told = run_cli("journal", "dump", str(damaged), "--stream", "orders", "--bodies-only")
    assert told.code == 1
    assert told.lines == [f"orders-{number}" for number in range(20) if number != 3]
    assert "bytes skipped" in told.err


@pytest.mark.moderate
def test_a_subscriber_is_told_of_the_gap_and_goes_on(damaged: Path) -> None:
    with EmbeddedBroker(damaged, tcp=True, **SMALL) as broker:  # type: ignore[arg-type]
        args = ("sub", "orders", "--until-tail", "--endpoint", broker.tcp_endpoint)
        told = run_cli(*args).ok()
        assert told.lines == [f"orders-{number}" for number in range(20) if number != 3]
        assert "gap: offsets 3 to 3 (1 record) are gone" in told.err
        strict = run_cli(*args, "--strict")
        assert (strict.code, strict.lines) == (1, ["orders-0", "orders-1", "orders-2"])


@pytest.mark.moderate
def test_a_dump_is_json_lines_that_pub_takes(whole: Path) -> None:
    records = run_cli("journal", "dump", str(whole)).ok()
    assert len(records.lines) == 40
    assert records.json_lines[0]["stream"] == "orders"
    with EmbeddedBroker(tcp=True) as broker:
        run_cli("pub", "back", "--json-lines", "--endpoint", broker.tcp_endpoint,
                stdin=records.bytes).ok()  # fmt: skip
        read = run_cli("sub", "back", "--until-tail", "--endpoint", broker.tcp_endpoint).ok()
        assert len(read.lines) == 40


@pytest.mark.moderate
def test_a_dump_can_be_cut_to_a_range(whole: Path) -> None:
    args = ("journal", "dump", str(whole), "--stream", "other", "--bodies-only")
    assert run_cli(*args, "--from", "5", "--to", "7").ok().lines == ["other-5", "other-6"]
    assert len(run_cli(*args, "--from", "now-1h").ok().lines) == 20
    assert run_cli(*args, "--to", "now-1h").ok().lines == []
    assert run_cli("journal", "dump", str(whole), "--from", "5").code == 2
    kinds = [each["kind"] for each in run_cli("journal", "dump", str(whole), "--batches").ok()
             .json_lines]  # fmt: skip
    assert {"epoch_start", "change", "data"} <= set(kinds)


@pytest.mark.moderate
def test_files_are_not_changed_by_looking(whole: Path) -> None:
    def files() -> Iterator[tuple[str, bytes]]:
        for path in sorted(whole.rglob("*")):
            # SQLite's readers note in -shm which pages they look at: it holds no data.
            if path.is_file() and not path.name.endswith("-shm"):
                yield path.name, path.read_bytes()

    before = list(files())
    for command in ("stat", "verify", "dump"):
        run_cli("journal", command, str(whole)).ok()
    assert list(files()) == before


@pytest.mark.moderate
def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "data", **SMALL):  # type: ignore[arg-type]
        for command in ("stat", "verify", "dump"):
            told = run_cli("journal", command, str(tmp_path / "data"))
            assert told.code == 1
            assert "stop the broker first" in told.err


def test_what_is_no_journal_is_said(tmp_path: Path) -> None:
    assert "no such directory" in run_cli("journal", "stat", str(tmp_path / "no")).err
    told = run_cli("journal", "verify", str(tmp_path))
    assert (told.code, "holds no journal" in told.err) == (1, True)
    assert run_cli("journal", "dump", str(tmp_path)).code == 1


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("fate", "kind"), [("missing", "missing"), ("empty", "damaged"), ("FIFO", "damaged")]
)
def test_lost_tables_are_named(tmp_path: Path, fate: str, kind: str) -> None:
    """`journal verify` reported no damage, and the broker did not start."""
    fill(tmp_path / "data")
    path = tmp_path / "data" / "queues.db"
    path.unlink()
    if fate == "empty":
        path.touch()
    elif fate == "FIFO":
        os.mkfifo(path)
    result = run_cli("journal", "verify", str(tmp_path / "data"))
    assert result.code == 1
    (row,) = [row for row in result.rows if row[1] != "ok"]
    assert row[1] == kind
    assert row[2].startswith("queues.db")
    assert "makes it anew" in row[2]


@pytest.mark.moderate
def test_a_missing_segment_ends_dump_and_verify_with_a_code(tmp_path: Path) -> None:
    fill(tmp_path / "data")
    (tmp_path / "data" / "rings" / "main" / "000000000000.seg").unlink()
    verified = run_cli("journal", "verify", str(tmp_path / "data"))
    assert verified.code == 1
    assert any(row[1] == "missing" for row in verified.rows)
    dumped = run_cli("journal", "dump", str(tmp_path / "data"))
    assert dumped.code == 1
    assert "the segment's file is missing" in dumped.err


@pytest.mark.moderate
def test_records_are_read_beside_a_running_broker(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with EmbeddedBroker(directory, **SMALL) as broker, broker.connect_sync() as client:  # type: ignore[arg-type]
        for number in range(20):
            client.publish("orders", b"%d" % number, subject=f"s.{number % 2}")
        args = ("journal", "read", str(directory), "orders")
        assert run_cli(*args).ok().lines == [str(number) for number in range(20)]
        assert run_cli(*args, "s.1", "--start", "5", "-n", "2").ok().lines == ["5", "7"]
        assert run_cli(*args, "--json", "-n", "1").ok().json_lines[0]["subject"] == "s.0"
        name = client.publish("orders", b"20").id.hex()
        assert run_cli(*args, "--json").ok().json_lines[20]["id"] == name
        assert run_cli(*args, "--start", name, "-n", "1").ok().lines == ["20"]
        assert run_cli(*args, "--start", f"after:{name}").ok().lines == []
        assert "message ID" in run_cli("journal", "read", "--help").ok().out
        client.trim("orders", 4)
        trimmed = run_cli(*args, "-n", "1").ok()
        assert trimmed.lines == ["4"]
        assert "the oldest record that is left has offset 4" in trimmed.err
        waiting = run_cli(*args, "--start", "latest", "--follow", "--timeout", "10ms")
        assert (waiting.code, waiting.lines) == (4, [])
        unknown = run_cli("journal", "read", str(directory), "order")
        assert unknown.code == 1
        assert "there are: orders" in unknown.err
        assert "malamute journal read" in run_cli("journal", "stat", str(directory)).err


@pytest.mark.moderate
def test_reading_the_files_tells_of_damage_by_its_exit_code(damaged: Path, tmp_path: Path) -> None:
    told = run_cli("journal", "read", str(damaged), "orders")
    assert told.code == 1
    assert told.lines == [f"orders-{number}" for number in range(20) if number != 3]
    assert "gap: offsets 3 to 3 (1 record) are gone" in told.err
    strict = run_cli("journal", "read", str(damaged), "orders", "--strict")
    assert (strict.code, strict.lines) == (1, ["orders-0", "orders-1", "orders-2"])
    empty = tmp_path / "empty"
    empty.mkdir()
    nothing = run_cli("journal", "read", str(empty), "orders")
    assert nothing.code == 1
    assert "holds no broker's log" in nothing.err


@pytest.mark.moderate
def test_rows_of_a_typed_stream_are_dumped_by_the_schema_that_it_had(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    directory = tmp_path / "data"
    with EmbeddedBroker(directory) as broker, broker.connect_sync() as client:
        client.create_stream("typed", schema=pa.schema([("a", pa.int32())]))
        client.publish_table("typed", pa.table({"a": pa.array([1, 2], pa.int32())}))
        client.edit_stream("typed", schema=pa.schema([("a", pa.int64()), ("b", pa.string())]))
        client.publish_table("typed", pa.table({"a": [1 << 40], "b": ["x"]}))
    dump = ("journal", "dump", str(directory), "--stream", "typed")
    rows = [{"a": 1, "b": None}, {"a": 2, "b": None}, {"a": 1 << 40, "b": "x"}]
    assert [each["row"] for each in run_cli(*dump).ok().json_lines] == rows
    assert [json.loads(line) for line in run_cli(*dump, "--bodies-only").ok().lines] == rows
