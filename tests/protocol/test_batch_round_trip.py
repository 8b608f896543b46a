"""Encoded batches come back: bodies, headers, columns, in every form of each."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from malamute_protocol.batch import (
    Batch,
    Content,
    Stamp,
    encode,
    encode_columns,
    encode_fixed,
    encode_lists,
    extract,
    iter_batches,
    row_bitmap,
)
from malamute_protocol.errors import BatchError, LocalProtocolError
from malamute_protocol.gather import gather_rows, rows_of
from malamute_protocol.header import parse_table
from malamute_protocol.limits import Limits


def stamped(content: bytes, base_offset: int = 100, **changes: Any) -> tuple[Stamp, bytes]:
    view = Content(content)
    stamp = Stamp(
        flags=1,
        lsn=4096,
        bundle_lsn=4096,
        synced_lsn=0,
        epoch=3,
        base_offset=base_offset,
        append_time_ms=1_700_000_000_000,
        stream=7,
        origin=0,
        size=96 + len(content),
        count=len(view),
        control_kind=0,
        content_crc=view.head.content_crc,
    )
    return stamp._replace(**changes), content


def batch_of(content: bytes, rows: bytes | None = None) -> Batch:
    stamp, data = stamped(content)
    (batch,) = iter_batches([stamp.pack(), data], rows)
    batch.verify()
    return batch


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_bodies_come_back_under_every_codec(codec: str) -> None:
    bodies = [b"", b"a", b"bc" * 500, b"\0" * 77]
    assert batch_of(encode(bodies, subject="s", codec=codec)).bodies() == bodies


def test_equal_bodies_come_back_by_the_quick_path() -> None:
    bodies = [b"%012d" % i for i in range(1000)]
    batch = batch_of(encode(bodies, subject="s"))
    assert batch.bodies() == bodies
    assert encode_fixed(b"".join(bodies), 12, subject="s") == encode(bodies, subject="s")


def test_a_slice_of_columns_is_the_same_batch_as_its_bodies() -> None:
    blob, offsets = b"0123456789", np.array([2, 4, 4, 9], np.int64)
    assert encode_columns(offsets, blob, subject="s") == encode([b"23", b"", b"45678"], subject="s")


def test_lists_of_blobs_come_back() -> None:
    bodies = [[b"a", b"", b"ccc"], [], [b"d"]]
    batch = batch_of(encode_lists(bodies, subject="s"))
    assert [record.parts for record in batch] == bodies
    with pytest.raises(TypeError, match="parts"):
        batch.bodies()


def test_every_attribute_of_a_record_is_what_was_given() -> None:
    batch = batch_of(
        encode(
            [b"one", b"two", b"three"],
            subject=["a.b", ("c", "d"), "a.b"],
            fields=[{"k": "v"}, None, {"k": "", "l": "ü"}],
            client_time_ms=[5, None, -7],
            expires_at_ms=[0, 99, 50],
            properties=[{"trace": b"\1\2"}, None, {"n": 1.5}],
            producer_id=9,
            first_sequence=4,
        )
    )
    records = list(batch)
    assert [r.offset for r in records] == [100, 101, 102]
    assert [r.subject for r in records] == ["a.b", "c", "a.b"]
    assert [r.keys for r in records] == [("a.b",), ("c", "d"), ("a.b",)]
    assert [dict(r.fields) for r in records] == [{"k": "v"}, {}, {"k": "", "l": "ü"}]
    assert [r.client_time_ms for r in records] == [5, None, -7]
    assert [r.expires_at_ms for r in records] == [None, 99, 50]
    assert [dict(r.properties) for r in records] == [{"trace": b"\1\2"}, {}, {"n": 1.5}]
    assert [r.body for r in records] == [b"one", b"two", b"three"]
    assert batch.content.head.earliest_expiry_ms == 50
    assert (batch.content.head.client_time_min_ms, batch.content.head.client_time_max_ms) == (-7, 5)
    assert [r.id for r in records] == sorted(r.id for r in records)


def test_a_record_shows_the_beginning_of_its_body() -> None:
    short, long = batch_of(encode([b"gate 12", b"x" * 61], subject="a"))
    assert repr(short) == "<Record offset=100 subject='a' body=b'gate 12'>"
    assert repr(long) == f"<Record offset=101 subject='a' body={b'x' * 60!r}...>"
    (listed,) = batch_of(encode_lists([[b"a", b"b"]], subject="a"))
    assert repr(listed) == "<Record offset=100 subject='a'>"


def test_distinct_headers_are_named_once_and_rows_point_at_them() -> None:
    content = Content(
        encode([b""] * 4, subject=["a", "b", "a", "b"], fields=[{"x": "1"}, None] * 2)
    )
    headers, codes = content.headers()
    assert codes is not None
    assert [headers[i] for i in codes.tolist()] == [
        (("a",), (("x", "1"),)),
        (("b",), ()),
        (("a",), (("x", "1"),)),
        (("b",), ()),
    ]
    assert len(headers) == 2
    mask = content.rows_of([headers.index((("b",), ()))])
    assert mask is not None
    assert mask.tolist() == [False, True, False, True]
    assert content.rows_of([0, 1]) is None


def test_one_subject_needs_no_codes() -> None:
    content = Content(encode([b"x"] * 3, subject="only"))
    assert content.headers() == (((("only",), ()),), None)
    assert content.rows_of([0]) is None
    nothing = content.rows_of([])
    assert nothing is not None
    assert not nothing.any()


def test_a_row_bitmap_selects_the_rows_of_a_delivery() -> None:
    content = encode([b"%d" % i for i in range(10)], subject="s")
    batch = batch_of(content, row_bitmap([i % 3 == 0 for i in range(10)]))
    assert len(batch) == 4
    assert batch.bodies() == [b"0", b"3", b"6", b"9"]
    assert batch.offsets.tolist() == [100, 103, 106, 109]
    assert batch.to_arrow().column("body").to_pylist() == batch.bodies()


def test_rows_are_taken_from_a_batch_that_was_checked_under_limits_above_the_defaults() -> None:
    limits = Limits(field_value_bytes_max=5_000, subject_bytes_max=2_000)
    fields = {f"f{n}": "x" * 3_000 for n in range(8)}
    content = Content(
        encode([b"a", b"b", b"c"], subject=["s" * 1_000, "t", "u"], fields=fields, limits=limits)
    )
    content.check(limits)
    stamp, _ = stamped(bytes(content.view))
    (derived,) = iter_batches(extract(stamp, content, [True, True, False]), limits=limits)
    assert [record.fields for record in derived] == [fields, fields]
    rows = rows_of(stamp, content, np.array([0, 2]))
    (gathered,) = iter_batches(gather_rows(rows, 1, 1, 4096), limits=limits)
    assert [record.keys for record in gathered] == [("s" * 1_000,), ("u",)]


def test_an_extracted_batch_is_the_selected_rows() -> None:
    content = encode(
        [b"a" * i for i in range(9)],
        subject=list("xyzxyzxyz"),
        fields=[{"n": str(i % 2)} if i % 4 else None for i in range(9)],
        client_time_ms=list(range(9)),
        properties=[{"i": i} if i % 2 else None for i in range(9)],
    )
    stamp, _ = stamped(content)
    mask = np.array([i in (1, 2, 4, 7) for i in range(9)])
    (whole,) = iter_batches([stamp.pack(), content], row_bitmap(mask))
    (derived,) = iter_batches(extract(stamp, Content(content), mask))
    derived.verify()
    assert derived.stamp.derived
    for name in ("offset", "keys", "fields", "client_time_ms", "properties", "body", "id"):
        assert [getattr(r, name) for r in derived] == [getattr(r, name) for r in whole]


def test_a_run_of_batches_comes_apart_in_order() -> None:
    first, second = stamped(encode([b"a"] * 2)), stamped(encode([b"b"] * 3), base_offset=102)
    joined = b"".join([first[0].pack(), first[1], second[0].pack(), second[1]])
    for frames in ([joined], [first[0].pack(), first[1], second[0].pack(), second[1]]):
        assert [b.base_offset for b in iter_batches(frames)] == [100, 102]
    with pytest.raises(BatchError):
        list(iter_batches([joined[:-8]]))
    with pytest.raises(BatchError, match="without its content"):
        list(iter_batches([first[0].pack()]))


def test_limits_are_named_with_the_record_that_breaks_them() -> None:
    limits = Limits(record_bytes_max=10)
    with pytest.raises(LocalProtocolError, match="record 1 has 11 bytes"):
        encode([b"a", b"b" * 11], limits=limits)
    with pytest.raises(LocalProtocolError, match="subject of record 1"):
        encode([b"a", b"b"], subject=["ok", "x" * 256])
    with pytest.raises(LocalProtocolError, match="not bytes"):
        encode([b"a", "text"])  # type: ignore[list-item]
    with pytest.raises(LocalProtocolError, match="at least one record"):
        encode([])


def test_headers_of_one_field_map_share_its_fields() -> None:
    # A table of 300 subjects has some 600 headers, and hundreds of tables are remembered.
    table = parse_table(
        msgspec.msgpack.encode([f"s{n}" for n in range(50)]),
        msgspec.msgpack.encode([{"b": "1", "a": "2"}, {"a": "2"}]),
    )
    found = [table.header(subject, code) for subject in range(50) for code in (0, 1)]
    assert found[0] == (("s0",), (("a", "2"), ("b", "1")))
    assert found[1] == (("s0",), (("a", "2"),))
    assert len({id(header.fields) for header in found}) == 2
