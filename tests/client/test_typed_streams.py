"""Typed streams through both shells: declared, published from tables, read as columns."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from malamute_protocol.arrow import parse_schema
from malamute_protocol.commands import Schema, Subscribed
from malamute_protocol.content import Content
from malamute_protocol.encode import encode_arrow
from malamute_protocol.errors import BrokerRefused, LocalProtocolError, Timeout
from malamute_protocol.limits import DEFAULT_LIMITS
from malamute_protocol.schema import Schemas, schema_id
from malamute_py.client.session.subscription import SubscribeOptions, SubscriptionState
from malamute_py.client.session.tables import TableRows, schema_message
from malamute_py.embedded import EmbeddedBroker
from tests.client.shells import SHELLS

columns: Any = pa.schema  # its stubs know one form of columns at a time
REQUIRED: Any = pa.field("item", pa.int32(), nullable=False)
LIST_OF_REQUIRED: pa.DataType = pa.list_(REQUIRED)
STRUCT_OF_REQUIRED: pa.DataType = pa.struct([REQUIRED])
OLD: pa.Schema = columns([pa.field("carrier", pa.string(), nullable=False), ("delay", pa.int32())])
NEW: pa.Schema = columns(
    [*OLD.set(1, pa.field("delay", pa.int64())), pa.field("gate", pa.string())]
)
TABLE = pa.table({"carrier": ["AA", "UA", "AA"], "delay": pa.array([1, None, 3], pa.int32())})


async def table_of(shell: Any, pattern: str = "#", **options: Any) -> pa.Table:
    reading = shell.client.subscribe("s", pattern, start="earliest", until="tail")
    table: pa.Table = await shell.call(reading.to_arrow, **options)
    return table


async def test_a_stream_that_validates_in_full_takes_tables_and_refuses_what_does_not_fit(
    shell: Any,
) -> None:
    facts = await shell.do("create_stream", "s", schema=OLD, validate="full")
    assert facts.settings["validate"] == "full"
    (confirmed,) = await shell.do("publish_table", "s", TABLE, subject="carrier")
    assert (confirmed.offset, confirmed.count) == (0, 3)
    bad: Any = [b"no rows of the schema"]
    with pytest.raises(BrokerRefused, match="bodies are Arrow"):
        await shell.do("publish_many", "s", bad)
    assert await table_of(shell) == TABLE.cast(OLD)
    edited = await shell.do("edit_stream", "s", validate="schema")
    assert edited.settings.get("validate", "schema") == "schema"


async def test_a_table_comes_back_as_the_columns_that_were_declared(shell: Any) -> None:
    facts = await shell.do("create_stream", "s", schema=OLD)
    assert facts.settings["body_kind"] == "arrow"
    assert await shell.do("stream_schema", "s") == OLD
    (confirmed,) = await shell.do("publish_table", "s", TABLE, subject="carrier")
    assert (confirmed.offset, confirmed.count) == (0, 3)
    assert await table_of(shell) == TABLE.cast(OLD)
    chosen = await table_of(shell, "AA", header=["subject", "offset"], decode=True)
    assert chosen.column("subject").to_pylist() == ["AA", "AA"]
    assert chosen.column("offset").to_pylist() == [0, 2]
    assert chosen.column("delay").to_pylist() == [1, 3]


async def test_what_does_not_fit_is_refused_by_the_broker_and_before_by_the_client(
    shell: Any,
) -> None:
    await shell.do("create_stream", "s", schema=OLD)
    with pytest.raises(BrokerRefused, match="bad_schema"):
        await shell.do("publish", "s", b"no rows")
    with pytest.raises(LocalProtocolError, match="bad_schema: column 'delay'"):
        await shell.do("publish_table", "s", pa.table({"carrier": ["a"], "delay": ["late"]}))
    with pytest.raises(LocalProtocolError, match="no column 'wings'"):
        await shell.do("publish_table", "s", pa.table({"carrier": ["a"], "wings": [2]}))
    with pytest.raises(BrokerRefused, match="bad_schema: column 'delay'"):
        await shell.do("edit_stream", "s", schema=OLD.set(1, pa.field("delay", pa.string())))
    await shell.do("publish", "plain", b"x")
    with pytest.raises(BrokerRefused, match="has no schema"):
        await shell.do("publish_table", "plain", TABLE)


@pytest.mark.parametrize("again", [False, True], ids=["removed", "without a schema"])
@pytest.mark.parametrize("by", ["window", "step", "transaction"])
async def test_a_table_makes_no_stream_anew_that_was_removed(
    shell: Any, by: str, again: bool
) -> None:
    await shell.do("create_stream", "s", schema=OLD)
    opened = {
        "window": lambda: shell.client.publisher("s"),
        "step": shell.client.atomic,
        "transaction": shell.client.transaction,
    }[by]()
    where: tuple[str, ...] = () if by == "window" else ("s",)
    if by == "transaction":
        await shell.call(opened.begin)
    await shell.call(opened.publish_table, *where, TABLE)
    if by == "window":
        await shell.call(opened.wait)
    await shell.do("remove_stream", "s")
    if again:
        await shell.do("create_stream", "s")
    if by == "window":  # It knows the schema, and does not ask for it again.
        await shell.call(opened.publish_table, TABLE)
    with pytest.raises(BrokerRefused, match="bad_schema" if again else "unknown_stream"):
        await shell.call(opened.wait if by == "window" else opened.commit)
    if again:
        assert (await shell.do("stream_info", "s")).records == 0
    else:
        with pytest.raises(BrokerRefused, match="unknown_stream"):
            await shell.do("stream_info", "s")


@pytest.mark.parametrize("by", ["alone", "step", "transaction"])
async def test_an_encoded_batch_says_that_its_stream_must_have_a_schema(
    shell: Any, by: str
) -> None:
    content = encode_arrow(b"of a schema of the program's own", 1, schema_id=7)

    async def publish(*, typed: bool) -> None:
        if by == "alone":
            await shell.do("publish_batch", "s", content, typed=typed)
        elif by == "step":
            step = shell.client.atomic()
            step.publish_batch("s", content, typed=typed)
            await shell.call(step.commit)
        else:
            transaction = shell.client.transaction()
            await shell.call(transaction.begin)
            await shell.call(transaction.publish_batch, "s", content, typed=typed)
            await shell.call(transaction.commit)

    with pytest.raises(BrokerRefused, match="unknown_stream"):
        await publish(typed=True)
    await publish(typed=False)


@pytest.mark.moderate
async def test_a_subscription_goes_over_to_a_newer_version_as_it_comes(shell: Any) -> None:
    await shell.do("create_stream", "s", schema=OLD)
    await shell.do("publish_table", "s", TABLE)
    reading = shell.client.subscribe("s", start="earliest")
    first = await shell.call(reading.next_batch, 5_000)
    assert first.to_arrow().schema == OLD
    await shell.do("edit_stream", "s", schema=NEW)
    await shell.do("publish_table", "s", pa.table({"carrier": ["DL"], "gate": ["B4"]}))
    second = await shell.call(reading.next_batch, 5_000)
    assert second.to_arrow().to_pylist() == [{"carrier": "DL", "delay": None, "gate": "B4"}]
    assert (await table_of(shell)).schema == NEW
    await shell.call(reading.close)


@pytest.mark.moderate
async def test_a_window_finds_out_that_the_schema_has_grown(shell: Any) -> None:
    await shell.do("create_stream", "s", schema=OLD)
    window = shell.client.publisher("s")
    await shell.call(window.publish_table, TABLE)
    await shell.do("edit_stream", "s", schema=NEW)
    await shell.call(window.publish_table, TABLE)
    await shell.call(window.publish_table, pa.table({"carrier": ["DL"], "gate": ["B4"]}))
    await shell.call(window.wait, 5_000)
    assert (await table_of(shell)).column("gate").to_pylist() == [None] * 6 + ["B4"]


@pytest.mark.moderate
async def test_a_step_has_all_rows_of_a_table_or_none(shell: Any) -> None:
    await shell.do("create_stream", "s", schema=OLD, validate="full")
    step = shell.client.atomic()
    step.publish("plain", b"before")
    with pytest.raises(LocalProtocolError, match="bad_schema: column 'delay'"):
        await shell.call(step.publish_table, "s", pa.table({"carrier": ["a"], "delay": ["late"]}))
    with pytest.raises(BrokerRefused, match="unknown_stream"):
        await shell.call(step.publish_table, "none", TABLE)
    rows = ["x", "y" * 17_000_000]
    with pytest.raises(LocalProtocolError, match="too_large"):
        await shell.call(step.publish_table, "s", pa.table({"carrier": rows}))
    await shell.call(step.publish_table, "s", TABLE, subject="carrier", properties={"x": 1})
    assert (await shell.call(step.commit)).level == "synced"
    assert (await table_of(shell, "AA", header=["offset"])).to_pylist() == [
        {"offset": 0, "carrier": "AA", "delay": 1}, {"offset": 2, "carrier": "AA", "delay": 3},
    ]  # fmt: skip
    with pytest.raises(LocalProtocolError, match="unexpected"):
        await shell.call(step.publish_table, "s", TABLE)


@pytest.mark.moderate
async def test_a_transaction_takes_tables_of_more_than_a_chunk(shell: Any) -> None:
    await shell.do("create_stream", "s", schema=OLD, validate="full")
    rows = 40_000
    table = pa.table({"carrier": ["x" * 50] * rows, "delay": pa.array(range(rows), pa.int32())})
    transaction = shell.client.transaction()
    with pytest.raises(LocalProtocolError, match="unexpected"):
        await shell.call(transaction.publish_table, "s", table)
    await shell.call(transaction.begin)
    await shell.call(transaction.publish, "plain", b"1")
    bad = pa.table({"carrier": ["a"], "delay": ["late"]})
    with pytest.raises(LocalProtocolError, match="bad_schema: column 'delay'"):
        await shell.call(transaction.publish_table, "s", bad)
    await shell.call(transaction.publish_table, "s", table, subject="carrier")
    await shell.do("edit_stream", "s", schema=NEW)
    new = pa.table({"carrier": ["DL"], "gate": ["B4"]})
    await shell.call(transaction.publish_table, "s", new)
    assert (await shell.do("stream_info", "s")).records == 0
    await shell.call(transaction.commit)
    found = await table_of(shell)
    assert found.column("delay").to_pylist() == [*range(rows), None]
    assert found.column("gate").to_pylist()[-1] == "B4"


async def test_each_transaction_asks_for_the_schema_of_a_stream_that_may_have_been_made_anew(
    shell: Any,
) -> None:
    transaction = shell.client.transaction()
    for schema in (OLD, NEW):
        await shell.do("create_stream", "s", schema=schema)
        await shell.call(transaction.begin)
        await shell.call(transaction.publish_table, "s", TABLE)
        await shell.call(transaction.commit)
        assert (await table_of(shell)).num_rows == TABLE.num_rows
        await shell.do("remove_stream", "s")


@pytest.mark.moderate
async def test_a_table_whose_chunk_is_refused_ends_its_transaction(shell: Any) -> None:
    await shell.do("create_stream", "s", schema=OLD)
    table = pa.table({"carrier": ["x" * 50] * 100_000})
    transaction = shell.client.transaction()
    await shell.call(transaction.begin)
    flush, left = transaction._flush, [1]

    def break_off(*arguments: Any) -> Any:
        if not left:
            raise Timeout("no room")
        left.pop()
        return flush(*arguments)

    transaction._flush = break_off
    with pytest.raises(Timeout):
        await shell.call(transaction.publish_table, "s", table)
    with pytest.raises(LocalProtocolError, match="unexpected"):
        await shell.call(transaction.publish, "s", b"")
    async with asyncio.timeout(5):
        while await shell.do("transactions"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await shell.do("stream_info", "s")).records == 0


async def test_members_of_a_group_get_typed_batches(shell: Any) -> None:
    await shell.do("create_stream", "s", schema=OLD)
    await shell.do("publish_table", "s", TABLE)
    member = shell.client.group("s", "g", start="earliest")
    batch = await shell.call(member.next_batch, 5_000)
    assert batch.to_arrow().num_rows == 3
    assert batch.cut(1, 3).to_arrow().column(0).to_pylist() == ["UA", "AA"]
    await shell.call(member.close)


def test_a_subscription_takes_up_the_schemas_of_each_link() -> None:
    reading = SubscriptionState(1, SubscribeOptions("s", ["all"], [0]))
    reading.receive(Subscribed(1, bytes(16), 1, 0, 0, 0, schemas=[(5, b"a")]), (), DEFAULT_LIMITS)
    reading.receive(Schema(1, 6, b"b"), (), DEFAULT_LIMITS)
    assert reading.schemas is not None
    assert reading.schemas.versions == {5: b"a", 6: b"b"}
    again = [(5, b"a"), (6, b"b"), (7, b"c")]
    reading.receive(Subscribed(1, bytes(16), 1, 0, 0, 0, schemas=again), (), DEFAULT_LIMITS)
    assert reading.schemas.newest == 7
    reading.receive(Subscribed(1, bytes(16), 1, 0, 0, 0), (), DEFAULT_LIMITS)
    assert reading.schemas is None


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("package", "table"),
    [
        ("pyarrow", lambda _: TABLE.combine_chunks().to_batches()[0]),
        (
            "polars",
            lambda pl: pl.DataFrame({"carrier": ["AA"], "delay": pl.Series([1], dtype=pl.Int32)}),
        ),
        ("pandas", lambda pd: pd.DataFrame({"carrier": ["AA"], "delay": np.array([1], "i4")})),
        ("duckdb", lambda duckdb: duckdb.sql("select 'AA' as carrier, 1::int as delay")),
    ],
    ids=["pyarrow", "polars", "pandas", "duckdb"],
)
async def test_a_table_may_come_from_any_of_them(
    broker: EmbeddedBroker, package: str, table: Any
) -> None:
    library = pytest.importorskip(package)
    made = SHELLS[0]()
    await made.connect(broker.endpoint, context=broker.context)
    await made.do("create_stream", "s", schema=OLD)
    await made.do("publish_table", "s", table(library))
    assert (await table_of(made)).column("carrier")[0].as_py() == "AA"
    with pytest.raises(LocalProtocolError, match="allowed is a table"):
        await made.do("publish_table", "s", [1, 2])
    await made.do("close")


# --- tables into contents --------------------------------------------------------------------


def encoded(table: Any, batch_bytes: int = 1 << 20, **options: Any) -> list[tuple[Content, int]]:
    message = schema_message(OLD)
    options = {"subject": "", "client_time": "", "codec": None, **options}
    rows = TableRows(table, Schemas([(schema_id(message), message)]), **options)
    found = rows.contents(batch_bytes, DEFAULT_LIMITS)
    return [(Content(content), count) for content, count in found]


def test_a_large_table_is_cut_into_batches() -> None:
    table = pa.table({"carrier": ["AA"] * 10_000})
    found = encoded(table, batch_bytes=16 << 10)
    assert sum(count for _, count in found) == 10_000
    assert len(found) > 3
    assert all(content.head.content_bytes < 32 << 10 for content, _ in found)
    assert encoded(table.slice(0, 0)) == []


def test_rows_that_are_too_large_together_are_halved() -> None:
    names = ["x" * 3_000_000 if n % 4 == 0 else "y" for n in range(16)]
    found = encoded(pa.table({"carrier": names}), batch_bytes=64 << 20)
    assert sum(count for _, count in found) == 16
    with pytest.raises(LocalProtocolError, match="too_large"):
        encoded(pa.table({"carrier": ["x" * 17_000_000]}))


@pytest.mark.moderate
@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()], ids=str)
def test_a_batch_of_views_has_the_bytes_of_its_own_rows_alone(kind: Any) -> None:
    message = schema_message(columns([("note", kind)]))
    schemas = Schemas([(schema_id(message), message)])
    table = pa.table({"note": pa.array([f"{n:07d}" + "x" * 50 for n in range(400_000)], kind)})
    found = list(TableRows(table, schemas).contents(8 << 20, DEFAULT_LIMITS))
    assert sum(count for _, count in found) == 400_000
    assert sum(len(content) for content, _ in found) < 45_000_000
    small = TableRows(table.slice(7, 10), schemas)
    ((content, _),) = small.contents(8 << 20, DEFAULT_LIMITS)
    assert len(content) < 4_000


def test_categories_of_views_are_published_and_name_subjects() -> None:
    values = pa.array(["AA", "UA", None], pa.string_view())
    for places in (pa.array([1, 0, 1], pa.uint32()), pa.array([1, 0, 1], pa.int8())):
        named = pa.DictionaryArray.from_arrays(places, values)
        table = pa.Table.from_arrays([pa.chunked_array([named, named])], names=["carrier"])
        ((content, count),) = encoded(table, subject="carrier")
        assert count == 6
        assert content.subject_codes is not None
        assert [content.table.keys[code] for code in content.subject_codes] == [
            ("UA",), ("AA",), ("UA",), ("UA",), ("AA",), ("UA",),
        ]  # fmt: skip


def test_columns_that_cannot_be_subjects_are_refused_by_name() -> None:
    null = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["a", None]))
    for column, why in (
        (null, "'who' has nulls"), (pa.array([["a"], ["b"], ["c"]]), "column 'who'"),
        (pa.array([b"a", b"\xff", b"c"]), "column 'who'"),
    ):  # fmt: skip
        with pytest.raises(LocalProtocolError, match=why):
            encoded(TABLE.append_column("who", column), subject="who")


@pytest.mark.parametrize(
    ("declared", "rows"),
    [
        (LIST_OF_REQUIRED, pa.array([[1], [2, None]], LIST_OF_REQUIRED)),
        (LIST_OF_REQUIRED, pa.array([[1], [2, None]], pa.list_(pa.int32()))),
        (STRUCT_OF_REQUIRED, pa.array([{"item": 1}, {"item": None}], STRUCT_OF_REQUIRED)),
    ],
)
def test_a_value_that_is_missing_within_lists_and_structs_is_refused_before_it_is_sent(
    declared: pa.DataType, rows: Any
) -> None:
    message = schema_message(columns([("a", declared)]))
    schemas = Schemas([(schema_id(message), message)])
    assert list(TableRows(pa.table({"a": rows.slice(0, 1)}), schemas).contents(1, DEFAULT_LIMITS))
    with pytest.raises(LocalProtocolError, match="'a': 'item' is not nullable, and has nulls"):
        TableRows(pa.table({"a": rows}), schemas)


def test_a_table_with_two_columns_of_one_name_is_refused_by_it() -> None:
    message = schema_message(columns([("a", pa.int64())]))
    schemas = Schemas([(schema_id(message), message)])
    for names in (["a", "a"], ["a", "s", "s"]):
        table = pa.table([pa.array([1])] * len(names), names=names)
        with pytest.raises(LocalProtocolError, match="several columns of the table are named"):
            TableRows(table, schemas, subject="s")


def test_categories_of_several_chunks_may_be_more_than_their_codes_count() -> None:
    message = schema_message(columns([("a", pa.int64())]))
    chunks: list[Any] = [
        pa.DictionaryArray.from_arrays(
            pa.array(range(100), pa.int8()), pa.array([f"{name}{n}" for n in range(100)])
        )
        for name in "xy"
    ]
    named: Any = {"a": list(range(200)), "s": pa.chunked_array(chunks)}
    table: Any = pa.table(named)
    rows = TableRows(table, Schemas([(schema_id(message), message)]), subject="s")
    ((content, count),) = rows.contents(1 << 20, DEFAULT_LIMITS)
    headers, codes = Content(content).headers()
    assert codes is not None
    assert [headers[code].subject for code in codes] == table.column("s").to_pylist()
    assert count == 200


def test_a_time_that_milliseconds_cannot_tell_is_refused() -> None:
    message = schema_message(columns([("a", pa.int64())]))
    schemas = Schemas([(schema_id(message), message)])
    for seconds, told in ((2**40, 2**40 * 1000), (2**62, None)):
        table: Any = pa.table({"a": [1], "t": pa.array([seconds], pa.timestamp("s"))})
        made = TableRows(table, schemas, client_time="t").contents(1 << 20, DEFAULT_LIMITS)
        if told is None:
            with pytest.raises(LocalProtocolError, match="the client times"):
                list(made)
        else:
            assert Content(next(made)[0]).head.client_time_max_ms == told


def test_columns_of_subjects_and_times_need_not_be_in_the_schema() -> None:
    table = TABLE.append_column("who", pa.array(["a", "b", "a"]).dictionary_encode())
    table = table.append_column("at", pa.array([5_000_000, None, 7_000_000], pa.timestamp("us")))
    ((content, _),) = encoded(table, subject="who", client_time="at")
    assert content.table.keys == [("a",), ("b",)]
    codes, times = content.subject_codes, content.client_times
    assert codes is not None
    assert times is not None
    assert codes.tolist() == [0, 1, 0]
    assert times.tolist() == [5_000, -(2**63), 7_000]
    with pytest.raises(LocalProtocolError, match="no column 'then'"):
        encoded(TABLE, client_time="then")
    with pytest.raises(LocalProtocolError, match="client times"):
        encoded(TABLE, client_time="carrier")
    with pytest.raises(LocalProtocolError, match="'delay' has nulls"):
        encoded(TABLE, subject="delay")


@pytest.mark.parametrize("subject", ["Carrier", "CARRIER", "carier", "_carrier"])
def test_a_misspelled_column_is_not_taken_for_the_subject_of_all_rows(subject: str) -> None:
    with pytest.raises(LocalProtocolError, match="but 'carrier'"):
        encoded(TABLE, subject=subject)


@pytest.mark.parametrize("subject", ["", "flights", "departures.jfk", "x", "car"])
def test_a_subject_that_no_column_is_like_is_that_of_all_rows(subject: str) -> None:
    ((content, _),) = encoded(TABLE, subject=subject)
    assert content.table.keys == [(subject,)]


def test_a_body_under_a_codec_is_compressed() -> None:
    ((content, _),) = encoded(pa.table({"carrier": ["AA"] * 1_000}), codec="gzip")
    assert content.head.codec
    assert content.head.body_bytes < content.head.body_raw_bytes


def test_a_table_that_is_damaged_is_not_sent() -> None:
    bounds = np.array([0, 2], "<i4").tobytes()
    wrong = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(bounds), pa.py_buffer(b"\xff\xfe")]
    )
    with pytest.raises(LocalProtocolError, match="bad_batch: the table"):
        encoded(pa.table({"carrier": wrong}))


def test_a_schema_is_declared_without_what_no_stream_can_have() -> None:
    coded = pa.schema([("x", pa.dictionary(pa.int8(), pa.string()))], metadata={"pandas": "{}"})
    assert parse_schema(schema_message(coded)) == pa.schema([("x", pa.string())])
    assert parse_schema(schema_message(coded)).metadata is None
    with pytest.raises(LocalProtocolError, match="bad_schema"):
        schema_message(b"x")
    with pytest.raises(LocalProtocolError, match="a pyarrow schema"):
        schema_message("x: int8")
