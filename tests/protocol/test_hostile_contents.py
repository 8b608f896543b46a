"""Contents made to harm: refused by name, at a cost that their sender has paid in bytes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from malamute_protocol import commands as wire
from malamute_protocol.batch import Batch, iter_batches, lone_batch
from malamute_protocol.content import Content
from malamute_protocol.content_layout import (
    PROPERTIES_COLUMN,
    PROPERTIES_CONSTANT,
    PROPERTIES_DICTIONARY,
)
from malamute_protocol.encode import encode, encode_arrow
from malamute_protocol.errors import BatchError, LocalProtocolError, RemoteProtocolError
from malamute_protocol.extract import extract, extractable
from malamute_protocol.framing import check_command, decode_message
from malamute_protocol.header import HeaderMemo
from malamute_protocol.limits import DEFAULT_LIMITS, ELEMENTS_MAX, SETTINGS_MAX, Limits
from malamute_protocol.stamp import STAMP_BYTES, Stamp
from tests.protocol.hostile import MAP_32, RESERVED, claim, craft, ints, packed, with_reserved

STAMP = Stamp(0, 0, 0, 0, 1, 0, 1, 7, 0, 0, 0, 0, 0)
MANY = 1 << 21


@contextmanager
def within(memory_bytes: int) -> Iterator[None]:
    """Check that code in the block makes objects of no more than so many bytes at once."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < memory_bytes


def refusal(data: bytes, limits: Limits = DEFAULT_LIMITS) -> str:
    content = Content(data)
    with pytest.raises(BatchError) as raised:
        content.check(limits)
    return raised.value.code


def test_a_transaction_id_is_refused() -> None:
    assert refusal(with_reserved(48)) == "unsupported"


@RESERVED
def test_what_is_reserved_in_a_head_is_refused_where_it_is_taken_and_read_where_it_is_stored(
    at: int,
) -> None:
    data = with_reserved(at)
    with pytest.raises(BatchError) as raised:
        Content(data).check(taking=True)
    assert (raised.value.code, raised.value.position) == ("unsupported", min(at, 112))
    Content(data).verify()
    crc = int.from_bytes(data[8:12], "little")
    stamp = Stamp(1, 0, 0, 0, 1, 0, 0, 1, 0, STAMP_BYTES + len(data), 2, 0, crc)
    frames = [stamp.pack(), data]
    lone = lone_batch(frames, None, DEFAULT_LIMITS)
    assert lone is not None
    for batch in (lone, *iter_batches(frames)):
        batch.verify()
        assert [record.body for record in batch] == [b"a", b"b"]


# --- header tables ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subjects", "fieldmaps"),
    [
        (claim(MANY) + b"\xa0" * MANY, b""),
        (b"\x91" + claim(MANY) + b"\xa0" * MANY, b""),
        (packed(["s"]), claim(MANY) + b"\x80" * MANY),
        (packed(["s"]), b"\x91" + claim(MANY // 2, MAP_32) + b"\xa0" * MANY),
        (claim(MANY), b""),
        (b"\x91" + claim(1 << 31), b""),
    ],
    ids=["subjects", "keys", "maps", "fields", "claimed subjects", "claimed keys"],
)
def test_a_header_table_is_counted_before_it_is_parsed(subjects: bytes, fieldmaps: bytes) -> None:
    for counts in ((1, 1), (MANY, MANY)):
        data = craft(
            subjects=subjects, subjects_count=counts[0],
            fieldmaps=fieldmaps, fieldmaps_count=counts[1] if fieldmaps else 0,
        )  # fmt: skip
        # The table's bytes are copied, as a key of the memo; nothing is made of them.
        with within(len(data) + (1 << 20)):
            assert refusal(data) == "too_large"


def test_a_memo_that_knows_a_table_from_laxer_limits_does_not_let_it_through() -> None:
    memo, lax = HeaderMemo(), Limits(keys_max=100)
    table = packed([["k"] * 50])
    with pytest.raises(BatchError, match="of length"):
        memo.table(table, b"")
    assert len(memo.table(table, b"", lax).keys[0]) == 50
    with pytest.raises(BatchError, match="keys of a record: 50, at most 16"):
        memo.table(table, b"").check(DEFAULT_LIMITS)


def test_equal_tables_with_other_codes_have_headers_of_their_own() -> None:
    table = packed(["a", "b"])
    plain = Content(craft(2, subjects=table, subjects_count=2))
    coded = Content(craft(2, subjects=table, subjects_count=2, subject_codes=[1, 0]))
    bare = Content(craft(2, subjects=table, subjects_count=2, field_codes=[-1, -1]))
    for content in (plain, coded, bare):
        content.check()
        headers, codes = content.headers()
        assert codes is not None or len(headers) == 1
    assert plain.headers_key == bare.headers_key == plain.headers()[0] != coded.headers_key
    assert coded.headers_key is coded.table
    assert [keys for keys, _ in coded.headers()[0]] == [("a",), ("b",)]
    assert [keys for keys, _ in plain.headers()[0]] == [("a",)]


# --- properties -------------------------------------------------------------------------------

BIG = packed({"k": "v" * 65_536})
REFUSED = {
    "constant over the limit": (PROPERTIES_CONSTANT, BIG),
    "column over the limit": (PROPERTIES_COLUMN, ints([0, len(BIG), len(BIG)]) + BIG),
    "column that falls": (PROPERTIES_COLUMN, ints([0, 5, 3]) + b"abc"),
    "column cut short": (PROPERTIES_COLUMN, ints([0, 1])),
    "column beyond its bytes": (PROPERTIES_COLUMN, ints([0, 1, 900]) + b"abc"),
    "codes cut short": (PROPERTIES_DICTIONARY, ints([0])),
    "codes beyond the maps": (PROPERTIES_DICTIONARY, ints([0, 1]) + packed([{}])),
    "codes below -1": (PROPERTIES_DICTIONARY, ints([0, -2]) + packed([{}])),
    "no dictionary": (PROPERTIES_DICTIONARY, ints([0, 0]) + packed({})),
    "a dictionary of nothing": (PROPERTIES_DICTIONARY, ints([0, 0])),
    "more maps than bytes": (PROPERTIES_DICTIONARY, ints([0, 0]) + claim(50) + b"\x80"),
    "more maps than records may be": (
        PROPERTIES_DICTIONARY, ints([0, 0]) + claim(MANY) + b"\x80" * MANY,
    ),
    "a dictionary over the limit": (PROPERTIES_DICTIONARY, ints([0, 0]) + packed([{"k": BIG}])),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_properties_of_a_wrong_form_or_size_are_refused(name: str) -> None:
    large = "limit" in name or "records may be" in name
    assert refusal(craft(2, properties=REFUSED[name])) == ("too_large" if large else "bad_batch")
    content = Content(craft(2, properties=REFUSED[name]))
    with within(3 << 20 if large else 1 << 20), pytest.raises(BatchError):
        content.properties()


UNREADABLE = {
    "constant": (PROPERTIES_CONSTANT, b"\xc1 no MessagePack"),
    "empty constant": (PROPERTIES_CONSTANT, b""),
    "column": (PROPERTIES_COLUMN, ints([0, 2, 4, 4, 7]) + b"\xc1\xc1\x80\x80\xc1 x"),
    "dictionary": (PROPERTIES_DICTIONARY, ints([0, 1, -1, 1]) + b"\x92\xc1\xc1"),
    "nested": (PROPERTIES_DICTIONARY, ints([0, 0, 0, 0]) + b"\x91\x81\xa1k" + b"\x91" * 50_000),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_rows_are_cut_out_without_a_look_at_properties(name: str) -> None:
    data = craft(4, properties=UNREADABLE[name])
    content = Content(data)
    content.check()
    mask = np.array([True, False, True, False])
    if not extractable(content):
        assert name == "nested"
        with pytest.raises(LocalProtocolError):
            extract(STAMP, content, mask)
        return
    stamp, derived = extract(STAMP, content, mask)
    cut = Content(derived)
    cut.check(derived=True)
    column, stored = cut.property_section()
    if name == "column":
        assert column is not None
        assert column.tolist() == [0, 2, 2]
        assert bytes(stored) == b"\xc1\xc1"
    elif name == "dictionary":
        assert column is not None
        assert column.tolist() == [0, -1]
        assert bytes(stored) == b"\x92\xc1\xc1"
    else:
        assert bytes(stored) == UNREADABLE[name][1]
    batch = Batch(Stamp.unpack(stamp), cut)
    assert batch.bodies() == [b"x", b"x"]
    if name != "empty constant":
        with pytest.raises(BatchError, match="propert"):
            batch.properties_of(0)


def test_rows_without_properties_are_cut_out_of_a_batch_whose_others_have_some() -> None:
    properties = [{"a": 1}, {}, {"a": 1}, {}]
    content = Content(encode([b"x"] * 4, properties=properties))
    assert content.head.flags & PROPERTIES_DICTIONARY
    _, derived = extract(STAMP, content, np.array([False, True, False, True]))
    assert Content(derived).property_section() == (None, None)
    stamp, derived = extract(STAMP, content, np.array([False, True, True, False]))
    batch = Batch(Stamp.unpack(stamp), Content(derived))
    assert [dict(batch.properties_of(row)) for row in (0, 1)] == [{}, {"a": 1}]


def test_properties_that_many_rows_share_are_not_copied_for_each_reader() -> None:
    small, large = {"k": "v" * 100}, {"k": "v" * 5_000}
    for properties in (small, [small, small, {}, {}]):
        assert extractable(Content(encode([b"x"] * 4, properties=properties)))
    for properties in (large, [large, large, {}, {}]):
        assert not extractable(Content(encode([b"x"] * 4, properties=properties)))
    of_each_row = [{"k": f"{row}" * 5_000} for row in range(4)]
    assert extractable(Content(encode([b"x"] * 4, properties=of_each_row)))


# --- commands ---------------------------------------------------------------------------------


def test_commands_are_counted_before_they_are_parsed() -> None:
    count = 400_000
    frame = claim(count) + b"\x91\x03" * count
    with within(1 << 20), pytest.raises(RemoteProtocolError) as raised:
        decode_message([frame])
    assert raised.value.code == "too_large"


@pytest.mark.parametrize("name", ["pattern", "settings"])
def test_a_field_holds_a_bounded_number_of_elements(name: str) -> None:
    for over in (0, 1):
        inside = [0] * (ELEMENTS_MAX - 1 + over)
        command: wire.Command = wire.Subscribe(1, "s", ["all", inside][1:], [0])
        if name == "settings":
            command = wire.CreateStream(1, "s", {"x": inside})
        frames = [packed([command])]
        if not over:
            decode_message(frames)
            continue
        with pytest.raises(RemoteProtocolError, match=f"`{name}` holds more than 65536") as raised:
            decode_message(frames)
        assert raised.value.code == "too_large"
    decode_message([packed([wire.Result(1, {"entries": [0] * 100_000})])])


def test_a_command_has_a_bounded_number_of_settings() -> None:
    """60,000 took 25 ms to be read, in which no peer had its turn."""
    settings = {f"k{number}": number for number in range(SETTINGS_MAX + 1)}
    command = wire.CreateStream(1, "s", settings)
    with pytest.raises(RemoteProtocolError) as raised:
        decode_message([packed([command])])
    assert raised.value.code == "too_large"
    with pytest.raises(LocalProtocolError, match="settings"):
        check_command(command)
    settings.popitem()
    decode_message([packed([command])])


# --- columns for Arrow ------------------------------------------------------------------------


def test_what_many_records_share_is_not_copied_for_each_without_a_bound() -> None:
    pytest.importorskip("pyarrow")
    fields = packed([{f"{name:02}" * 100: "v" * 1_000 for name in range(64)}])
    count = 65_536
    for name, data in {
        "properties": craft(count, properties=(PROPERTIES_CONSTANT, packed({"k": "v" * 60_000}))),
        "fields": craft(count, fieldmaps=fields, fieldmaps_count=1),
    }.items():
        batch = Batch(STAMP, Content(data))
        batch.verify()
        with pytest.raises(BatchError, match=f"the column {name} of 65536 records would") as raised:
            batch.to_arrow(decode=True)
        assert raised.value.code == "too_large"
        assert batch.to_arrow().num_rows == count
    few = Batch(STAMP, Content(craft(100, properties=(PROPERTIES_CONSTANT, packed({"k": "v"})))))
    assert few.to_arrow(decode=True).column("properties").to_pylist() == [packed({"k": "v"})] * 100


@pytest.mark.moderate
def test_a_consumer_parses_the_properties_of_the_records_that_it_asks() -> None:
    # 16 MiB of maps as small as can be took 107 s and 4 GiB, all of them for the first record.
    count = 65_536
    maps = b"".join(packed({"k": row}) for row in range(count))
    bounds = np.cumsum([0, *(len(packed({"k": row})) for row in range(count))])
    batch = Batch(
        STAMP, Content(craft(count, properties=(PROPERTIES_COLUMN, ints(bounds.tolist()) + maps)))
    )
    batch.verify()
    assert dict(batch.properties_of(7)) == {"k": 7}
    assert len(batch._parsed) == 1
    for row in range(count):
        assert batch.properties_of(row) == {"k": row}
    assert batch.properties_of(7) is batch.properties_of(7)


def arrow_message(batch: Any, compression: str | None) -> bytes:
    """The encapsulated message of a record batch, its buffers compressed by Arrow itself."""
    import pyarrow as pa

    arrow: Any = pa
    sink = arrow.BufferOutputStream()
    options = arrow.ipc.IpcWriteOptions(compression=compression)
    with arrow.ipc.new_stream(sink, batch.schema, options=options) as stream:
        stream.write_batch(batch)
    reader = arrow.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    return bytes(reader.read_next_message().serialize())


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_an_arrow_body_that_decompresses_to_more_than_a_batch_is_refused_before_it_does(
    codec: str,
) -> None:
    pa = pytest.importorskip("pyarrow")
    from malamute_protocol.arrow import to_arrow

    schema = pa.schema([("a", pa.int64()), ("b", pa.binary())])

    def body(rows: int, compression: str | None) -> Batch:
        columns = [pa.array([7] * rows), pa.array([b"x" * 10] * rows)]
        message = arrow_message(pa.RecordBatch.from_arrays(columns, schema=schema), compression)
        content = Content(encode_arrow(message, rows, schema_id=1))
        return Batch(STAMP, content)

    for compression in (None, codec):
        few = to_arrow(body(1_000, compression), schema=schema)
        assert few.column("a").to_pylist() == [7] * 1_000
    batch = body(65_536, codec)
    data = bytearray(bytes(batch.content.buffer))
    # 65,536 numbers of 8 bytes and as many of 10 are below it; a claim of more is not.
    assert to_arrow(batch, schema=schema).num_rows == 65_536
    claim_at = data.index((65_536 * 8).to_bytes(8, "little"), 300)
    data[claim_at : claim_at + 8] = (1 << 40).to_bytes(8, "little")
    hostile = Batch(STAMP, Content(bytes(data)))
    with pytest.raises(BatchError, match="an Arrow body that decompresses to") as raised:
        to_arrow(hostile, schema=schema)
    assert raised.value.code == "too_large"


@pytest.mark.moderate
def test_arrow_bodies_with_any_byte_changed_are_read_or_refused_by_name() -> None:
    pa = pytest.importorskip("pyarrow")
    from malamute_protocol.arrow import to_arrow

    schema = pa.schema([("a", pa.int64()), ("b", pa.binary())])
    columns = [pa.array([1, None, 3]), pa.array([b"x", b"", b"zzz"])]
    whole = pa.RecordBatch.from_arrays(columns, schema=schema)
    for compression in (None, "zstd"):
        message = arrow_message(whole, compression)
        refused = 0
        for place in range(len(message)):
            for value in (0, 1, 0x7F, 0x80, 0xFF):
                changed = bytearray(message)
                changed[place] = value
                content = Content(encode_arrow(bytes(changed), 3, schema_id=1))
                try:
                    to_arrow(Batch(STAMP, content), schema=schema)
                except BatchError:
                    refused += 1
        assert refused
