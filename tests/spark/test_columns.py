"""Batches as Arrow columns: Spark's schema to the letter, and what the records say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from malamute_protocol.batch import Batch, Content, Stamp, encode, encode_arrow, encode_lists
from pyspark_malamute import columns
from pyspark_malamute.columns import RECORD_BATCH_BYTES_MAX, Gather, RecordCount, RowCount
from pyspark_malamute.errors import MalamuteSourceError
from pyspark_malamute.options import SourceOptions, parse_options
from pyspark_malamute.schema import check_schema, spark_schema

ALL = {"includeKeys": "true", "includeProperties": "true"}


def options(**more: str) -> SourceOptions:
    return parse_options({"endpoint": "tcp://127.0.0.1:9797", "stream": "flights", **more})


def stamped(content: bytes, base: int, rows: Sequence[bool] | None = None) -> Batch:
    view = Content(content)
    stamp = Stamp(
        1, 0, 0, 0, 1, base, 1_700_000_000_123, 1, 0, 96 + len(content), len(view), 0,
        view.head.content_crc,
    )  # fmt: skip
    return Batch(stamp, view, None if rows is None else np.array(rows))


def gathered(chosen: SourceOptions, *batches: Batch) -> list[dict[str, Any]]:
    gather = Gather(chosen)
    for batch in batches:
        gather.add(batch)
    found: list[dict[str, Any]] = []
    expected = to_arrow_schema(spark_schema(chosen), timezone="UTC")
    for piece in gather.take():
        piece.validate(full=True)
        assert piece.schema.equals(expected)
        found += piece.to_pylist()
    return found


def as_told_by_records(*batches: Batch) -> list[dict[str, Any]]:
    """Return the rows by the slow route: record by record, in Python."""
    return [
        {
            "offset": record.offset,
            "append_time_ms": record.append_time_ms,
            "client_time_ms": record.client_time_ms,
            "subject": record.subject,
            "keys": list(record.keys),
            "fields": dict(record.fields),
            "body": record.body,
        }
        for batch in batches
        for record in batch.records()
    ]


def as_told_by_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "offset": row["offset"],
            "append_time_ms": round(row["append_time"].timestamp() * 1000),
            "client_time_ms": row["client_time"] and round(row["client_time"].timestamp() * 1000),
            "subject": row["subject"],
            "keys": row["keys"],
            "fields": dict(row["fields"]),
            "body": row["body"],
        }
        for row in rows
    ]


def mixed() -> list[Batch]:
    """Batches with and without each column, whole and in part, of several header tables."""
    plain = encode([b"x", b"", b"zz"], subject="a.b")
    rich = encode(
        [b"1", b"22", b"333", b"4444"],
        subject=["a", ("b", "c", "d"), "a", "é"],
        fields=[{"x": "1", "y": ""}, None, {}, {"x": "1", "y": ""}],
        client_time_ms=[5, 6, None, -8],
    )
    constant = encode([b"p", b"q"], subject="a.b", fields={"carrier": "UA"}, client_time_ms=9)
    packed = encode([b"r" * 100] * 5, subject=["s", "t", "s", "t", "u"], codec="zstd")
    return [
        stamped(plain, 0),
        stamped(rich, 3),
        stamped(rich, 10, [True, False, True, True]),
        stamped(constant, 20),
        stamped(packed, 30, [False, True, True, False, True]),
        stamped(plain, 40, [False, False, True]),
    ]


def test_columns_say_what_the_records_say() -> None:
    batches = mixed()
    assert as_told_by_columns(gathered(options(**ALL), *batches)) == as_told_by_records(*batches)


def test_each_batch_alone_gives_the_same_as_all_together() -> None:
    batches = mixed()
    alone = [row for batch in batches for row in gathered(options(**ALL), batch)]
    assert alone == gathered(options(**ALL), *batches)


def test_a_gather_begins_anew_after_it_was_taken_from() -> None:
    gather = Gather(options())
    for batch in mixed():
        gather.add(batch)
        rows = [row for piece in gather.take() for row in piece.to_pylist()]
        assert [row["offset"] for row in rows] == batch.offsets.tolist()
    assert list(gather.take()) == []


def test_a_batch_of_which_nothing_was_delivered_adds_nothing() -> None:
    batch = stamped(encode([b"a", b"b"], subject="s"), 0, [False, False])
    assert gathered(options(), batch) == []


def test_columns_that_were_not_asked_for_are_not_there() -> None:
    rows = gathered(options(includeFields="false"), *mixed())
    assert list(rows[0]) == ["offset", "append_time", "client_time", "subject", "body"]


def test_named_columns_are_made_in_their_order_and_say_the_same() -> None:
    whole = gathered(options(**ALL), *mixed())
    names = ["body", "keys", "offset", "client_time"]
    assert gathered(options(columns=",".join(names)), *mixed()) == [
        {name: row[name] for name in names} for row in whole
    ]
    for name in ("offset", "append_time", "subject", "fields", "properties"):
        rows = gathered(options(columns=name), *mixed())
        assert rows == [{name: row[name]} for row in whole]


def test_rows_without_columns_are_counted_and_nothing_of_them_is_looked_at() -> None:
    count = RowCount()
    for _ in range(2):
        for batch in mixed():
            count.add(batch)
        rows = list(count.take())
        assert [each.num_rows for each in rows] == [sum(map(len, mixed()))]
        assert rows[0].schema == to_arrow_schema(spark_schema(options(columns="")))
    assert list(count.take()) == []
    assert not count.full
    first = next(iter(mixed()))
    while not count.full:
        count.add(first)


def test_a_column_of_counts_has_one_row_for_a_range_and_nothing_of_a_record_is_looked_at() -> None:
    for names in ("records", "stream,records", "records,stream"):
        chosen = options(columns=names)
        count = RecordCount(chosen)
        for batch in mixed():
            count.add(batch)
        assert not count.full
        (row,) = count.take()
        assert row.schema == to_arrow_schema(spark_schema(chosen))
        whole = {"records": sum(map(len, mixed())), "stream": chosen.stream}
        assert row.to_pylist() == [{name: whole[name] for name in names.split(",")}]
        assert list(count.take()) == []


def test_a_field_with_a_column_of_its_own_is_a_string_or_null() -> None:
    whole = gathered(options(), *mixed())
    rows = gathered(options(fieldColumns="carrier,x,nowhere"), *mixed())
    assert "fields" not in rows[0]
    for name in ("carrier", "x", "nowhere"):
        assert [row[name] for row in rows] == [dict(row["fields"]).get(name) for row in whole]
    assert {row["x"] for row in rows} == {"1", None}


def test_bodies_that_are_not_asked_for_may_be_of_any_kind() -> None:
    content = encode_arrow(b"\0" * 64, 2, schema_id=1, subject="s")
    rows = gathered(options(columns="offset,subject"), stamped(content, 5))
    assert rows == [{"offset": 5, "subject": "s"}, {"offset": 6, "subject": "s"}]


def test_rows_without_bodies_come_in_large_record_batches() -> None:
    gather = Gather(options(columns="offset"))
    batch = stamped(encode([b"x" * 1000] * 8000, subject="s"), 0)
    gather.add(batch)
    assert not gather.full
    (piece,) = gather.take()
    assert piece.num_rows == 8000


def test_properties_are_text_and_what_is_not_text_is_json() -> None:
    content = encode(
        [b"a", b"b"],
        subject="s",
        properties=[{"trace": "abc", "n": 3, "ok": True, "raw": b"zz"}, None],
    )
    rows = gathered(options(**ALL), stamped(content, 0), stamped(encode([b"c"], subject="s"), 2))
    assert [dict(row["properties"]) for row in rows] == [
        {"trace": "abc", "n": "3", "ok": "true", "raw": "eno="},
        {},
        {},
    ]


def test_bodies_of_several_blobs_need_the_option_that_says_so() -> None:
    content = encode_lists([[b"a", b"bb"], [], [b"c"]], subject="s")
    with pytest.raises(MalamuteSourceError, match=r'add \.option\("bodyType", "list"\)'):
        gathered(options(), stamped(content, 0))
    rows = gathered(
        options(bodyType="list"), stamped(content, 0), stamped(encode([b"x"], subject="s"), 3)
    )
    assert [row["body"] for row in rows] == [[b"a", b"bb"], [], [b"c"], [b"x"]]


def test_arrow_bodies_are_refused_by_name() -> None:
    content = encode_arrow(b"\0" * 64, 2, schema_id=1, subject="s")
    with pytest.raises(MalamuteSourceError, match="kind 'arrow'"):
        gathered(options(), stamped(content, 0))


def test_small_batches_come_together_and_large_ones_are_cut() -> None:
    gather = Gather(options())
    small = stamped(encode([b"x" * 100] * 10, subject="s"), 0)
    gather.add(small)
    full_before = gather.full
    large = stamped(encode([b"x" * 1000] * 8000, subject="s"), 10)
    gather.add(large)
    assert (full_before, gather.full) == (False, True)
    pieces = list(gather.take())
    assert len(pieces) >= 4
    assert all(piece.nbytes <= RECORD_BATCH_BYTES_MAX * 1.1 for piece in pieces)
    offsets = [offset for piece in pieces for offset in piece.column("offset").to_pylist()]
    assert offsets == list(range(10)) + list(range(10, 8010))


def pieces_of(chosen: SourceOptions, batch: Batch) -> Iterator[Any]:
    """As a task fetches: piece by piece, taken as soon as there is enough."""
    gather = Gather(chosen)
    for piece in gather.pieces(batch):
        gather.add(piece)
        if gather.full:
            yield from gather.take()
    yield from gather.take()


@pytest.mark.parametrize("what", ["fields", "one", "few", "many"])
def test_what_many_records_share_comes_in_pieces_of_a_bounded_size(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """65,536 records with the largest map of fields would be 5 GiB at once."""
    monkeypatch.setattr(columns, "PIECE_BYTES_MAX", 1 << 20)
    count = 3_000
    forms: dict[str, dict[str, Any]] = {
        "fields": {"fields": {f"{name:02}" * 20: "v" * 200 for name in range(20)}},
        "one": {"properties": {"k": "v" * 3_000}},
        "few": {"properties": [{"k": "v" * (100 * (row % 3))} for row in range(count)]},
        "many": {"properties": [{"k": f"{row}" * 20} for row in range(count)]},
    }
    batch = stamped(encode([b"x"] * count, subject="s", **forms[what]), 7)
    chosen = options(**ALL)
    offsets: list[int] = []
    for piece in pieces_of(chosen, batch):
        assert piece.nbytes <= 4 << 20
        for row in piece.to_pylist():
            offsets.append(row["offset"])
            record = batch.offset_of(row["offset"] - 7) - 7
            assert dict(row["properties"]) == dict(batch.properties_of(record))
            assert dict(row["fields"]) == dict(batch.fields_of(record))
    assert offsets == list(range(7, 7 + count))


def test_a_batch_as_most_are_is_one_piece() -> None:
    for batch in mixed():
        assert list(Gather(options(**ALL)).pieces(batch)) == [batch]


def test_a_frame_that_lies_askew_is_read_all_the_same() -> None:
    content = encode([b"abc"] * 9, subject=["s", "t", "u"] * 3, client_time_ms=list(range(9)))
    askew = memoryview(b"\0" * 3 + content)[3:]
    straight = stamped(content, 0)
    rows = gathered(options(), Batch(straight.stamp, Content(askew), None))
    assert rows == gathered(options(), straight)


def test_a_schema_of_the_users_own_is_refused_with_what_to_do() -> None:
    ours = spark_schema(options())
    check_schema(ours, options())
    with pytest.raises(MalamuteSourceError, match=r"remove \.schema\(\.\.\.\)"):
        check_schema(spark_schema(options(includeKeys="true")), options())


@pytest.mark.moderate
def test_a_table_at_the_address_of_one_that_is_gone_has_its_own_subjects() -> None:
    # Each header table is too large for the memo of tables, and lives no longer than its batch.
    gather = Gather(options(columns="subject"))
    for number in range(600):
        fields = {f"f{field}": f"{number}".ljust(1024, "x") for field in range(64)}
        gather.add(stamped(encode([b""], subject=f"s{number}", fields=fields), number))
    found = [row["subject"] for piece in gather.take() for row in piece.to_pylist()]
    assert found == [f"s{number}" for number in range(600)]


def test_a_time_beyond_those_of_spark_is_its_last_or_first_one() -> None:
    gather = Gather(options(columns="client_time"))
    times = [1 << 62, 5, None, -(1 << 62)]
    gather.add(stamped(encode([b""] * 4, client_time_ms=times), 0))
    (piece,) = gather.take()
    last = ((1 << 63) - 1) // 1000 * 1000
    assert piece.column(0).cast("int64").to_pylist() == [last, 5_000, None, -last]
