"""Typed streams in Spark: the declared schema is the DataFrame's."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from malamute_protocol.batch import Batch
from malamute_py.client.sync.client import SyncClient
from pyspark_malamute.errors import MalamuteSourceError, OptionError
from pyspark_malamute.options import parse_options
from pyspark_malamute.source import DefaultSource
from pyspark_malamute.typed import TypedGather

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

columns: Any = pa.schema  # its stubs know one form of columns at a time
OLD = columns([pa.field("carrier", pa.string(), nullable=False), ("delay", pa.int32())])
NEW = columns([*OLD.set(1, pa.field("delay", pa.int64())), ("tags", pa.list_(pa.string()))])
ROWS: list[dict[str, Any]] = [{"carrier": "AA", "delay": 4}, {"carrier": "UA", "delay": None}]


def publish(client: SyncClient, stream: str, rows: list[dict[str, Any]], schema: Any) -> None:
    client.publish_table(stream, pa.Table.from_pylist(rows, schema), subject="carrier")


@pytest.fixture
def typed(client: SyncClient, stream: str) -> str:
    client.create_stream(stream, schema=OLD)
    publish(client, stream, ROWS, OLD)
    return stream


def source(endpoint: str, stream: str, **more: str) -> DefaultSource:
    return DefaultSource({"endpoint": endpoint, "stream": stream, "bodyType": "typed", **more})


def listed(rows: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rows.to_pylist()
    return found


def rows_of(endpoint: str, stream: str, schema: StructType | None = None, **more: str) -> Any:
    made = source(endpoint, stream, **more)
    reader = made.reader(made.schema() if schema is None else schema)
    found = [rows for part in reader.partitions() for rows in reader.read(part)]
    return [row for rows in found for row in listed(rows)]


@pytest.mark.moderate
def test_the_schema_is_the_streams_and_columns_name_what_is_made(endpoint: str, typed: str) -> None:
    assert source(endpoint, typed).schema().simpleString() == "struct<carrier:string,delay:int>"
    assert [field.nullable for field in source(endpoint, typed).schema()] == [False, True]
    assert rows_of(endpoint, typed) == ROWS
    assert rows_of(endpoint, typed, columns="offset,delay,stream,subject") == [
        {"offset": n, "delay": row["delay"], "stream": typed, "subject": row["carrier"]}
        for n, row in enumerate(ROWS)
    ]
    assert rows_of(endpoint, typed, pattern="UA") == ROWS[1:]


@pytest.mark.moderate
def test_what_makes_no_sense_is_refused_by_name(endpoint: str, typed: str) -> None:
    with pytest.raises(MalamuteSourceError, match="no column 'wings'"):
        source(endpoint, typed, columns="wings").schema()
    with pytest.raises(OptionError, match="fieldColumns"):
        source(endpoint, typed, fieldColumns="x").schema()
    with pytest.raises(OptionError, match="bodyType"):
        DefaultSource({"endpoint": endpoint, "streams": "a,b", "bodyType": "typed"}).schema()


@pytest.mark.moderate
def test_an_untyped_stream_says_that_it_has_no_schema(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    client.publish(stream, b"x")
    with pytest.raises(MalamuteSourceError, match="has no schema"):
        source(endpoint, stream).schema()


def test_older_batches_are_cast_and_a_query_keeps_its_columns(
    endpoint: str, client: SyncClient, typed: str
) -> None:
    begun = source(endpoint, typed).schema()
    client.edit_stream(typed, schema=NEW)
    publish(client, typed, [{"carrier": "DL", "delay": 7, "tags": ["x"]}], NEW)
    newest = rows_of(endpoint, typed)
    assert newest == [*({**row, "tags": None} for row in ROWS),
                      {"carrier": "DL", "delay": 7, "tags": ["x"]}]  # fmt: skip
    assert rows_of(endpoint, typed, begun) == [*ROWS, {"carrier": "DL", "delay": 7}]
    publish(client, typed, [{"carrier": "DL", "delay": 1 << 40, "tags": None}], NEW)
    with pytest.raises(MalamuteSourceError, match=r"column 'delay'.*again"):
        rows_of(endpoint, typed, begun)


def test_types_that_spark_has_not_come_in_wider_ones(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    schema = columns([("n", pa.uint32()), ("at", pa.timestamp("ns")), ("t", pa.time32("s"))])
    client.create_stream(stream, schema=schema)
    client.publish_table(stream, pa.table({"n": pa.array([1 << 31], pa.uint32())}))
    assert rows_of(endpoint, stream, columns="n,at") == [{"n": 1 << 31, "at": None}]
    with pytest.raises(MalamuteSourceError, match="no type for column 't'"):
        source(endpoint, stream).schema()


def test_times_of_any_kind_are_cut_off_where_they_are_finer_than_sparks(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    fine = pa.timestamp("ns")
    schema = columns([("took", pa.duration("ns")), ("at", pa.list_(fine)), ("from", fine)])
    client.create_stream(stream, schema=schema)
    rows = pa.table({"took": [1_500], "at": [[1_500, None]], "from": [1_500]})
    client.publish_table(stream, rows.cast(schema))
    micro = datetime.fromisoformat("1970-01-01T00:00:00.000001")
    assert rows_of(endpoint, stream) == [
        {"took": timedelta(microseconds=1), "at": [micro, None], "from": micro}
    ]


def test_a_type_that_is_too_wide_for_spark_is_named(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    client.create_stream(stream, schema=columns([("wide", pa.decimal256(40, 2))]))
    with pytest.raises(MalamuteSourceError, match="no type for column 'wide'"):
        source(endpoint, stream).schema()


@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_a_query_computes_with_typed_columns(
    spark: SparkSession, endpoint: str, client: SyncClient, typed: str
) -> None:
    def reading(how: Any) -> Any:
        return (
            how.format("malamute").option("endpoint", endpoint).option("stream", typed)
            .option("bodyType", "typed").option("startingOffsets", "earliest").load()
        )  # fmt: skip

    assert reading(spark.read).groupBy().sum("delay").collect()[0][0] == 4
    seen: list[Any] = []
    lock = threading.Lock()

    def take(frame: Any, _: int) -> None:
        with lock:
            seen.extend(row.asDict() for row in frame.collect())

    query = reading(spark.readStream).writeStream.foreachBatch(take).trigger(availableNow=True)
    assert query.start().awaitTermination(180)
    assert sorted(seen, key=str) == ROWS


def test_what_rows_share_is_made_only_where_it_is_named_and_in_bounded_pieces(
    endpoint: str, typed: str, client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [{"carrier": "x" * 100, "delay": number} for number in range(100)]
    table = pa.Table.from_pylist(many, OLD)
    client.publish_table(typed, table, subject="carrier", properties={"p": "x" * 100})
    monkeypatch.setattr("malamute_protocol.arrow.COLUMN_BYTES_MAX", 5_000)
    monkeypatch.setattr("pyspark_malamute.columns.PIECE_BYTES_MAX", 3_000)
    added: list[int] = []
    add = TypedGather.add

    def counted(gather: TypedGather, batch: Batch) -> None:
        added.append(len(batch))
        add(gather, batch)

    monkeypatch.setattr(TypedGather, "add", counted)
    found = rows_of(endpoint, typed, columns="offset,delay")
    assert [row["offset"] for row in found] == list(range(102))
    added.clear()
    found = rows_of(endpoint, typed, columns="keys,subject")
    assert found[2:] == [{"keys": ["x" * 100], "subject": "x" * 100}] * 100
    assert sum(added) == 102
    assert max(added) < 20


@pytest.mark.parametrize(("beside", "reads"), [("offset", False), ("subject", True)])
def test_the_header_of_a_batch_is_read_only_for_its_columns(beside: str, reads: bool) -> None:
    class Headed:
        """A batch of very many subjects, whose header takes its time to be read."""

        read = False

        def __len__(self) -> int:
            return 1

        @property
        def content(self) -> Any:
            self.read = True
            return SimpleNamespace(table=SimpleNamespace(subject_bytes=10))

    schema: Any = pa.schema([(beside, pa.string()), ("carrier", pa.string())])
    options = parse_options({"endpoint": "tcp://127.0.0.1:9797", "stream": "s"})
    gather = TypedGather(msgspec.structs.replace(options, typed=schema.serialize().to_pybytes()))
    batch: Any = Headed()
    assert list(gather.pieces(batch)) == [batch]
    assert batch.read == reads
