"""Batches as Arrow: columns, schema, misaligned frames, and foreign Arrow bodies."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from malamute_protocol import arrow
from malamute_protocol.arrow import arrow_schema, to_arrow
from malamute_protocol.batch import (
    Batch,
    Content,
    Stamp,
    encode,
    encode_arrow,
    encode_lists,
    iter_batches,
    row_bitmap,
)
from malamute_protocol.errors import BatchError
from malamute_protocol.header import HeaderTable


def framed(content: bytes) -> list[bytes]:
    head = Content(content).head
    size, crc = 96 + len(content), head.content_crc
    stamp = Stamp(1, 0, 0, 0, 1, 100, 1_700_000_000_000, 1, 0, size, head.count, 0, crc)
    return [stamp.pack(), content]


def batch_of(content: bytes, rows: bytes | None = None) -> Batch:
    (batch,) = iter_batches(framed(content), rows)
    return batch


CONTENT = encode(
    [b"one", b"", b"three"],
    subject=["a", ("b", "c"), "a"],
    fields=[{"k": "v"}, None, {"k": "v"}],
    client_time_ms=[5, None, -7],
    expires_at_ms=[0, 99, 0],
    properties=[{"n": 1}, None, {"n": 1}],
)


@pytest.mark.parametrize("decode", [False, True])
def test_columns_hold_what_the_records_hold(decode: bool) -> None:
    batch = batch_of(CONTENT)
    table = batch.to_arrow(decode=decode)
    table.validate(full=True)
    assert table.schema == arrow_schema(decode=decode)
    columns = table.to_pydict()
    assert columns["offset"] == [100, 101, 102]
    assert columns["subject"] == ["a", "b", "a"]
    assert columns["keys"] == [["a"], ["b", "c"], ["a"]]
    assert columns["fields"] == [[("k", "v")], None, [("k", "v")]]
    assert columns["body"] == [b"one", b"", b"three"]
    assert columns["properties"] == [b"\x81\xa1n\x01", None, b"\x81\xa1n\x01"]
    assert table.column("client_time").cast(pa.int64()).to_pylist() == [5, None, -7]
    assert table.column("expires").cast(pa.int64()).to_pylist() == [None, 99, None]
    assert table.column("append_time").cast(pa.int64()).to_pylist() == [1_700_000_000_000] * 3


def test_rows_that_were_not_delivered_are_left_out() -> None:
    batch = batch_of(CONTENT, row_bitmap([True, False, True]))
    table = batch.to_arrow()
    assert table.column("offset").to_pylist() == [100, 102]
    assert table.column("body").to_pylist() == batch.bodies()


def test_lists_of_blobs_become_a_list_column() -> None:
    table = batch_of(encode_lists([[b"a", b""], [], [b"c"]])).to_arrow()
    table.validate(full=True)
    assert table.schema == arrow_schema(lists=True)
    assert table.column("body").to_pylist() == [[b"a", b""], [], [b"c"]]


def test_a_misaligned_frame_gives_the_same_table() -> None:
    stamp, content = framed(CONTENT)
    shifted = memoryview(b"x" * 3 + stamp + content)[3:]
    (batch,) = iter_batches([shifted])
    assert batch.to_arrow().equals(batch_of(CONTENT).to_arrow())


def test_buffers_of_a_whole_batch_are_not_copied() -> None:
    batch = batch_of(encode([b"x" * 100] * 50, subject="s"))
    body: Any = batch.to_arrow().column("body")
    address = body.buffers()[2].address
    start = pa.py_buffer(batch.content.view).address
    assert start < address < start + len(batch.content.view)


def test_codes_that_lie_are_found_before_arrow_sees_them() -> None:
    bad = bytearray(CONTENT)
    at = Content(CONTENT).sections.subject_codes
    bad[at : at + 4] = (1 << 30).to_bytes(4, "little")
    stamp, _ = framed(CONTENT)
    with pytest.raises(BatchError):
        Batch(Stamp.unpack(stamp), Content(bytes(bad))).to_arrow()


FIELDS: list[Any] = [("x", pa.int64()), ("s", pa.string())]
SCHEMA = pa.schema(FIELDS)


def arrow_content() -> bytes:
    rows = pa.RecordBatch.from_pydict({"x": [1, 2, 3], "s": ["a", None, "c"]}, schema=SCHEMA)
    return encode_arrow(rows.serialize().to_pybytes(), 3, subject="typed", schema_id=1)


def test_an_arrow_body_is_read_with_its_schema() -> None:
    batch = batch_of(arrow_content(), row_bitmap([False, True, True]))
    assert to_arrow(batch, schema=SCHEMA).to_pydict() == {"x": [2, 3], "s": [None, "c"]}
    with pytest.raises(TypeError):
        batch.to_arrow()


def test_a_broken_arrow_body_is_refused_whatever_is_broken() -> None:
    good = arrow_content()
    at = Content(good).sections.body
    end = at + Content(good).head.body_bytes
    stamp = Stamp.unpack(framed(good)[0])
    for position in range(at, end):
        bad = bytearray(good)
        bad[position] ^= 0x55
        batch = Batch(stamp, Content(bytes(bad)))
        try:
            to_arrow(batch, schema=SCHEMA).to_pydict()
        except BatchError:
            continue


@pytest.mark.moderate
def test_arrow_is_imported_by_nobody_who_does_not_ask_for_it() -> None:
    import subprocess
    import sys

    code = "import sys, malamute_protocol.batch, malamute_protocol.framing; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"pyarrow", "zstandard", "lz4", "cramjam", "zmq", "msgpack"}


@pytest.mark.parametrize("decode", [False, True])
def test_columns_that_batches_share_are_those_of_each_batch(decode: bool) -> None:
    """Batches of one header table, and of as many rows, share columns."""
    pieces: list[dict[str, Any]] = [{"subject": "a"}, {"subject": "b", "fields": {"f": "1"}}]
    for count in (2, 3, 2):
        for options in pieces * 2:
            table = to_arrow(batch_of(encode([b"x"] * count, **options)), decode=decode)
            fields = list(options["fields"].items()) if "fields" in options else None
            rows = table.to_pydict()
            assert rows["subject"] == [options["subject"]] * count
            assert rows["keys"] == [[options["subject"]]] * count
            assert rows["fields"] == [fields] * count
            assert rows["properties"] == rows["client_time"] == rows["expires"] == [None] * count


def test_a_table_with_entries_that_no_record_uses_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hostile batch may have as many of them as a table may have."""
    batch = batch_of(encode([b"x"] * 7, subject="a"))
    arrow._one_header_columns.cache_clear()
    assert to_arrow(batch).column("subject").to_pylist() == ["a"] * 7
    assert arrow._one_header_columns.cache_info().currsize == 1
    arrow._one_header_columns.cache_clear()
    monkeypatch.setattr(Content, "table", HeaderTable([("a",), ("b",)], []))
    assert to_arrow(batch).column("subject").to_pylist() == ["a"] * 7
    assert arrow._one_header_columns.cache_info().currsize == 0
