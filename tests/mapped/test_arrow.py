"""Arrow over a running log: without a copy of the bodies, and queried in place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from malamute_protocol.batch import encode_lists
from malamute_protocol.content import Content
from malamute_py.journal import Append
from malamute_py.mapped import LogReader, MappedBatch, Overwritten
from malamute_py.mapped.segments import MAPS_MAX
from tests.mapped.logs import LAP, Log, batches, body_at, lap


def trades_of(log: Log) -> int:
    """A stream with subjects, fields, times and properties."""
    trades = log.create("trades")
    for number in range(40):
        log.put(
            trades, b"%03d" % number, body_at(number), subject=["forex.eur", "forex.gbp"],
            fields=[{"desk": "a"}, {}], client_time_ms=[1, 2], properties=[{"p": number}, {}],
        )  # fmt: skip
    return trades


def address(view: memoryview) -> tuple[int, int]:
    """Where the bytes of a view begin and end."""
    buffer = pa.py_buffer(view)
    return buffer.address, buffer.address + buffer.size


def test_bodies_and_times_lie_in_the_mapping_and_offsets_and_codes_do_not(
    log: Log, reader: LogReader
) -> None:
    trades_of(log)
    batch = reader.read("trades").next_batch(0)
    assert isinstance(batch, MappedBatch)
    low, high = address(batch.segment.view)
    columns = batch.to_arrow()

    def mapped(column: str, buffer: int) -> bool:
        found = columns[column].buffers()[buffer]
        return found is not None and low <= found.address < high

    assert mapped("body", 2)
    assert mapped("client_time", 1)
    assert not mapped("body", 1)
    assert not mapped("subject", 1)
    assert not mapped("fields", 1)
    assert not mapped("properties", 1)


@pytest.mark.moderate
def test_columns_are_those_of_a_batch_that_came_by_a_link(log: Log, reader: LogReader) -> None:
    trades_of(log)
    for decode in (False, True):
        for batch in batches(reader.read("trades", until="tail")):
            assert isinstance(batch, MappedBatch)
            own = reader.read("trades", start=batch.base_offset, copy=True).next_batch(0)
            assert own is not None
            assert batch.to_arrow(decode=decode).equals(own.to_arrow(decode=decode))


@pytest.mark.moderate
def test_lists_of_blobs_are_read_in_place(log: Log, reader: LogReader) -> None:
    lists = log.create("lists")
    content = encode_lists([[b"a", b"bc"], [], [b"d"]], subject="s")
    crc = Content(content).head.content_crc
    log.ring("main").append([Append(lists, 0, 3, 1000, content, crc)])
    table = reader.read("lists", until="tail").to_arrow()
    assert table["body"].to_pylist() == [[b"a", b"bc"], [], [b"d"]]


@pytest.mark.moderate
def test_bytes_that_change_amid_the_making_of_columns_are_told(
    log: Log, reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A content that is being overwritten gives no columns."""
    from malamute_py.mapped.segments import SegmentMap

    trades_of(log)
    batch = reader.read("trades").next_batch(0)
    assert batch is not None
    monkeypatch.setattr(SegmentMap, "intact", lambda self: False)
    with pytest.raises(Overwritten):
        batch.to_arrow()


@pytest.mark.moderate
def test_a_pattern_s_columns_are_those_of_the_rows_that_match(log: Log, reader: LogReader) -> None:
    trades_of(log)
    reading = reader.read("trades", "forex.gbp", until="tail")
    table = reading.to_arrow(decode=True)
    assert table["offset"].to_pylist() == list(range(1, 80, 2))
    assert set(table["subject"].to_pylist()) == {"forex.gbp"}


def test_an_empty_reading_has_the_columns_of_any(log: Log, reader: LogReader) -> None:
    log.create("empty")
    table = reader.read("empty", until="tail").to_arrow()
    assert (table.num_rows, table.schema.names[0]) == (0, "offset")
    arrow = reader.read("empty", until="tail").arrow_reader()
    assert arrow.read_all().equals(table)


def mappings(log: Log) -> int:
    """Number of mappings that this process has of files of the log."""
    return Path("/proc/self/maps").read_text().count(f" {log.path}/")


@pytest.mark.moderate
def test_a_reader_that_follows_lets_go_of_segments_whose_views_went(
    log: Log, reader: LogReader
) -> None:
    trades = log.create("trades")
    log.fill(trades, 1)
    reading = reader.read("trades")
    arrow = reading.arrow_reader()
    read = arrow.read_next_batch().num_rows
    while log.next(trades) < 4 * LAP:
        log.fill(trades, 20)
        log.tidy()
        for _ in range(20):
            read += arrow.read_next_batch().num_rows
    assert read == log.next(trades)
    assert mappings(log) <= MAPS_MAX + 1
    # Each view was right until it went, although the ring has come round since.
    reading.check()


@pytest.mark.moderate
def test_views_that_were_overwritten_before_they_went_are_told(log: Log, reader: LogReader) -> None:
    trades = log.create("trades")
    log.fill(trades, 2)
    reading = reader.read("trades")
    arrow = reading.arrow_reader()
    first, second = arrow.read_next_batch(), arrow.read_next_batch()
    del first
    reading.check()
    for _ in range(3):
        lap(log, trades)
    del second
    with pytest.raises(Overwritten):
        reading.check()


@pytest.mark.moderate
def test_a_view_keeps_its_segment_after_the_reading_was_closed(log: Log, reader: LogReader) -> None:
    trades = log.create("trades")
    log.fill(trades, 1)
    with reader.read("trades") as reading:
        body = reading.arrow_reader().read_next_batch()["body"]
    reader.close()
    assert mappings(log) == 1
    assert body.to_pylist() == [body_at(0)]
    del body
    assert mappings(log) == 0


def by_duckdb(arrow: pa.RecordBatchReader | pa.Table) -> list[Any]:
    duckdb = pytest.importorskip("duckdb")
    query = "select subject, count(*), sum(octet_length(body)) from arrow group by 1 order by 1"
    with duckdb.connect() as connection:
        found: list[Any] = connection.sql(query).fetchall()
        return found


@pytest.mark.moderate
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(
    "given", [lambda reading, decode: reading.arrow_reader(decode=decode),
              lambda reading, decode: reading.to_arrow(decode=decode)],
    ids=["stream", "table"],
)  # fmt: skip
def test_duckdb_queries_a_running_log_in_place(
    log: Log, reader: LogReader, given: Callable[[Any, bool], Any], decode: bool
) -> None:
    trades_of(log)
    reading = reader.read("trades", "forex.#", until="tail")
    found = by_duckdb(given(reading, decode))
    reading.check()
    assert found == [("forex.eur", 40, 120), ("forex.gbp", 40, 40_000)]


@pytest.mark.moderate
def test_polars_queries_a_running_log_in_place(log: Log, reader: LogReader) -> None:
    pl = pytest.importorskip("polars")
    trades_of(log)
    reading = reader.read("trades", until="tail")
    frame = pl.from_arrow(reading.to_arrow(decode=True))
    assert isinstance(frame, pl.DataFrame)
    sums = frame.group_by("subject").agg(
        pl.len().alias("count"), pl.col("body").bin.size().sum().alias("bytes")
    )
    reading.check()
    rows = sorted(sums.rows())
    assert rows == [("forex.eur", 40, 120), ("forex.gbp", 40, 40_000)]


@pytest.mark.moderate
def test_the_reader_does_without_arrow_until_a_table_is_asked_for() -> None:
    import subprocess

    code = (
        "import sys; from malamute_py.journal import open_reader; assert 'pyarrow' not in"
        " sys.modules; assert 'zmq' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.moderate
def test_a_table_of_lone_records_has_few_chunks(log: Log, reader: LogReader) -> None:
    trades = log.create("trades")
    log.fill(trades, 300)
    with reader.read("trades", until="tail") as reading:
        table = reading.to_arrow()
    assert table.column("body").num_chunks == 1
    assert table.column("offset").to_pylist() == list(range(300))
    assert table.column("body").to_pylist() == [body_at(n) for n in range(300)]
