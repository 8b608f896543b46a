"""Options and columns of the Spark sink: what is understood, and what is refused in which words."""

from __future__ import annotations

import pytest
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from pyspark_malamute import DefaultSource
from pyspark_malamute.errors import OptionError, UnwritableRows
from pyspark_malamute.sink_options import SINK_OPTIONS, SinkOptions, parse_sink_options

LEAST = {"endpoint": "tcp://127.0.0.1:9797", "stream": "out"}
KEY = "x" * 40


def parse(streaming: bool = False, /, **more: str) -> SinkOptions:
    return parse_sink_options({**LEAST, **more}, streaming=streaming)


def refusal(streaming: bool = False, /, **more: str) -> str:
    with pytest.raises(OptionError) as caught:
        parse(streaming, **more)
    return str(caught.value)


SAMPLES = {
    "endpoint": "tcp://b:2", "stream": "other", "fieldColumns": "carrier", "sinkId": "nightly",
    "batchId": "7", "commitStream": "commits", "chunkBytes": "1m", "user": "ann",
    "password": "of ann", "curveServerKey": KEY, "curvePublicKey": KEY, "curveSecretKey": KEY,
    "connectTimeoutMs": "5", "requestTimeoutMs": "5", "brokerOutageMs": "5",
}  # fmt: skip
"""A value of each option that is not its default."""
TOGETHER = (
    {"sinkId", "batchId"}, {"user", "password"},
    {"curveServerKey", "curvePublicKey", "curveSecretKey"},
)  # fmt: skip
"""Options that mean nothing without each other."""


@pytest.mark.parametrize("option", [option.name for option in SINK_OPTIONS])
def test_no_option_is_read_and_then_forgotten(option: str) -> None:
    names = next((names for names in TOGETHER if option in names), {option})
    given = {name: SAMPLES[name] for name in names}
    other = {**given, option: "6" * 40} if len(names) > 1 else {}
    assert parse(**given) != parse(**other)


def test_every_default_in_the_table_is_one_that_a_user_could_write() -> None:
    for option in SINK_OPTIONS:
        if option.default:
            option.parse(option.default)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("strem", "stream"), ("topics", "stream"), ("path", "stream"), ("headers", "fieldColumns"),
        ("kafka.bootstrap.servers", "endpoint"), ("txnAppId", "sinkId"),
        ("chunkbyte", "chunkBytes"),
    ],
)  # fmt: skip
def test_a_near_miss_leads_to_what_was_meant(given: str, meant: str) -> None:
    assert f"malamute sink, option '{given}'" in refusal(**{given: "x"})
    assert f"did you mean '{meant}'" in refusal(**{given: "x"})


def test_kafkas_topic_is_our_stream() -> None:
    assert parse_sink_options({"endpoint": "tcp://a:1", "topic": "t"}, streaming=True).stream == "t"


def test_an_option_of_the_source_is_refused_as_such() -> None:
    assert "is an option of the source" in refusal(startingOffsets="earliest")


def test_what_spark_adds_to_a_querys_options_is_left_alone() -> None:
    assert parse(True, checkpointlocation="/c", queryname="q") == parse(True)


def test_a_streaming_query_has_its_names_from_its_checkpoint() -> None:
    assert "from its checkpoint" in refusal(True, sinkId="a")
    assert "from its checkpoint" in refusal(True, batchId="1")
    assert "is missing beside batchId" in refusal(batchId="1")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"sinkId": "a.b"}, "has a dot"), ({"sinkId": "x" * 65}, "at most 64"),
        ({"chunkBytes": "13m"}, "between 64k and 12m"), ({"stream": "a b"}, "a name is made of"),
        ({"user": "", "password": "p"}, "is missing beside password"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_connects(
    more: dict[str, str], why: str
) -> None:
    assert why in refusal(**more)


def test_credentials_stay_out_of_what_may_be_logged() -> None:
    assert "secret" not in repr(parse(user="ann", password="secret"))


def test_only_links_without_credential_ask_for_an_identity() -> None:
    assert parse().named("spark-1").identity == "spark-1"
    assert parse(user="ann", password="p").named("spark-1").identity == ""


TYPES: dict[str, DataType] = {
    "string": StringType(), "binary": BinaryType(), "int": IntegerType(), "bigint": LongType(),
    "map": MapType(StringType(), StringType()), "timestamp": TimestampType(),
}  # fmt: skip


def schema_of(columns: str) -> StructType:
    found = StructType()
    for column in columns.split(", "):
        name, kind = column.split()
        found.add(name, TYPES[kind])
    return found


def writers(columns: str, overwrite: bool = False, /, **more: str) -> None:
    found = schema_of(columns)
    DefaultSource({**LEAST, **more}).writer(found, overwrite)
    DefaultSource({**LEAST, **more}).streamWriter(found, overwrite)


def test_the_columns_of_a_record_can_be_written() -> None:
    writers("body string")
    writers(
        "stream string, subject string, body binary, fields map, "
        "properties map, client_time timestamp"
    )
    writers("body binary, carrier string", fieldColumns="carrier")


@pytest.mark.parametrize(
    ("schema", "more", "why"),
    [
        ("subject string", {}, "column 'body' .* is missing"),
        ("body int", {}, "column 'body' is int: it is to be binary or string"),
        ("body binary, offset bigint", {}, "column 'offset' is bigint: the sink has no such"),
        ("body binary, carrier string", {"fieldColumns": "origin"}, "'origin' .* is not there"),
        ("body binary, n int", {"fieldColumns": "n"}, "'n' of fieldColumns is to be a string"),
        ("body binary, subject string", {"fieldColumns": "subject"}, "a meaning of its own"),
        ("body binary, c string, fields map", {"fieldColumns": "c"}, "exclude"),
    ],
)  # fmt: skip
def test_a_column_that_cannot_be_written_is_named_when_the_query_starts(
    schema: str, more: dict[str, str], why: str
) -> None:
    with pytest.raises(UnwritableRows, match=why):
        writers(schema, **more)


def test_rows_need_a_stream_to_go_to() -> None:
    with pytest.raises(UnwritableRows, match="neither option 'stream' nor a column 'stream'"):
        DefaultSource({"endpoint": "tcp://a:1"}).writer(schema_of("body binary"), False)


def test_a_stream_cannot_be_overwritten() -> None:
    with pytest.raises(UnwritableRows, match="cannot be overwritten"):
        writers("body binary", True)
