"""Options of the Spark source: what is understood, and what is refused in which words."""

from __future__ import annotations

import pytest

from pyspark_malamute.errors import OptionError
from pyspark_malamute.options import EVER, OPTIONS, Place, Places, parse_options, refuse_options_of

LEAST = {"endpoint": "tcp://127.0.0.1:9797", "stream": "flights"}
KEY = "x" * 40


def refusal(**more: str) -> str:
    with pytest.raises(OptionError) as caught:
        parse_options({**LEAST, **more})
    return str(caught.value)


def test_endpoint_and_stream_suffice_and_everything_else_has_a_default() -> None:
    options = parse_options(LEAST)
    assert options.endpoints == ("tcp://127.0.0.1:9797",)
    assert options.pattern == ["all"]
    assert options.fail_on_data_loss
    assert options.split_bytes == 32 << 20
    assert options.bytes_per_trigger == 1 << 30
    assert options.starting == Places()


def test_every_default_in_the_table_is_one_that_a_user_could_write() -> None:
    for option in OPTIONS:
        if option.default:
            option.parse(option.default)


SAMPLES = {
    "endpoint": "tcp://b:2", "stream": "weather", "streams": "a,b", "streamsPattern": "a.*",
    "pattern": "a.#", "startingOffsets": "5",
    "startingTimestamp": "5", "startingOffsetsByTimestampStrategy": "latest",
    "endingOffsets": "7", "endingTimestamp": "7", "clientTimeFrom": "5", "clientTimeTo": "7",
    "pushFilters": "true", "failOnDataLoss": "false", "maxRecordsPerTrigger": "5",
    "minRecordsPerTrigger": "5", "cursor": "spark-1", "cursorPinBytes": "5m",
    "maxTriggerDelay": "5s", "maxBytesPerTrigger": "5k", "minPartitions": "5",
    "maxRecordsPerPartition": "5", "splitBytes": "5m", "columns": "offset",
    "fieldColumns": "carrier", "includeFields": "false", "includeKeys": "true",
    "includeProperties": "true", "bodyType": "list", "user": "ann", "password": "of ann",
    "curveServerKey": KEY, "curvePublicKey": KEY, "curveSecretKey": KEY, "identity": "spark-1",
    "connectTimeoutMs": "5", "requestTimeoutMs": "5", "brokerOutageMs": "5",
    "fetchTimeoutMs": "5", "fetchRetries": "5", "idleWaitMs": "5", "logDirectory": "/data",
}  # fmt: skip
"""A value of each option that is not its default."""
TOGETHER = (
    {"cursor", "cursorPinBytes"}, {"user", "password"},
    {"curveServerKey", "curvePublicKey", "curveSecretKey"},
)  # fmt: skip
"""Options that mean nothing without each other."""


@pytest.mark.parametrize("option", [option.name for option in OPTIONS])
def test_no_option_is_read_and_then_forgotten(option: str) -> None:
    names = next((names for names in TOGETHER if option in names), {option})
    given = {**LEAST, **{name: SAMPLES[name] for name in names}}
    other = {**given, option: "6" * 40} if len(names) > 1 else LEAST
    if option.startswith("streams"):
        del given["stream"]
    assert parse_options(given) != parse_options(other)


def test_keys_are_understood_in_any_case_as_spark_hands_them_over() -> None:
    options = parse_options({**LEAST, "startingoffsets": "Earliest", "SPLITBYTES": "64M"})
    assert options.starting == Places(Place("earliest"))
    assert options.split_bytes == 64 << 20


@pytest.mark.parametrize(
    ("kafkas", "ours", "value"),
    [
        ("subscribe", "streams", "flights,weather"),
        ("subscribePattern", "streamsPattern", "flights-.*"),
        ("startingOffsetsByTimestamp", "startingTimestamp", '{"flights": {"0": 5}}'),
        ("endingOffsetsByTimestamp", "endingTimestamp", '{"flights": {"0": 5}}'),
        ("endpoints", "endpoint", "tcp://127.0.0.1:9797"),
        ("maxOffsetsPerTrigger", "maxRecordsPerTrigger", "7"),
        ("minOffsetsPerTrigger", "minRecordsPerTrigger", "7"),
        ("includeHeaders", "includeFields", "false"),
    ],
)
def test_kafkas_name_of_an_option_means_ours(kafkas: str, ours: str, value: str) -> None:
    replaced = {ours, "stream"} if ours.startswith("streams") else {ours}
    least = {name: text for name, text in LEAST.items() if name not in replaced}
    assert parse_options({**least, kafkas: value}) == parse_options({**least, ours: value})
    assert parse_options({**least, kafkas.upper(): value}) == parse_options({**least, ours: value})


def test_places_by_stream_are_ours_or_kafkas() -> None:
    given = '{"a": 5, "b": "latest", "c": {"0": -2}, "d": -1}'
    options = parse_options(
        {"endpoint": "tcp://a:1", "streamsPattern": ".*", "startingOffsets": given}
    )
    places = [options.starting.of(name) for name in "abcde"]
    assert places == [
        Place("offset", 5), Place("latest"), Place("earliest"), Place("latest"), None,
    ]  # fmt: skip
    options = parse_options({**LEAST, "endingTimestamp": '{"flights": "2013-01-01T05:00:00Z"}'})
    assert options.ending.of("flights") == Place("time", 1_357_016_400_000)


def test_a_place_in_a_stream_that_the_expression_does_not_select_is_refused() -> None:
    given = {"endpoint": "tcp://a:1", "streamsPattern": "flights.*"}
    for option in ("startingOffsets", "startingTimestamp", "endingOffsets", "endingTimestamp"):
        parse_options({**given, option: '{"flights.JFK": 5}'})
        with pytest.raises(OptionError, match=rf"'{option}': names stream 'weather', which is not"):
            parse_options({**given, option: '{"flights.JFK": 5, "weather": 5}'})


def test_no_columns_are_an_empty_list_of_them_and_no_typed_stream() -> None:
    assert parse_options({**LEAST, "columns": " "}).counts_only
    assert not parse_options({**LEAST, "columns": "offset"}).counts_only
    assert not parse_options({**LEAST, "bodyType": "typed"}).counts_only
    assert "leave out bodyType" in refusal(bodyType="typed", columns="")


def test_counts_by_range_have_no_column_of_a_record_beside_them() -> None:
    for columns in ("records", "stream,records"):
        options = parse_options({**LEAST, "columns": columns})
        assert options.counts_by_range
        assert options.counts_only
    assert "has no 'subject'" in refusal(columns="records,subject")
    fields = parse_options({**LEAST, "columns": "records,body", "fieldColumns": "records"})
    assert not fields.counts_by_range
    assert not fields.counts_only
    typed = parse_options({**LEAST, "columns": "records", "bodyType": "typed"})
    assert not typed.counts_by_range
    assert not typed.counts_only


def test_several_streams_have_a_column_that_says_which() -> None:
    several = parse_options({"endpoint": "tcp://a:1", "streams": "flights, weather"})
    assert several.streams == ("flights", "weather")
    assert several.columns[:2] == ("stream", "offset")
    assert "stream" not in parse_options(LEAST).columns
    assert parse_options({**LEAST, "columns": "stream,body"}).columns == ("stream", "body")


def test_field_columns_take_the_place_of_the_map_unless_it_is_asked_for() -> None:
    plain = parse_options(LEAST).columns
    assert plain == ("offset", "append_time", "client_time", "subject", "fields", "body")
    some = parse_options({**LEAST, "fieldColumns": "carrier, origin"}).columns
    assert some == (
        "offset", "append_time", "client_time", "subject", "carrier", "origin", "body",
    )  # fmt: skip
    both = parse_options({**LEAST, "fieldColumns": "carrier", "includeFields": "true"}).columns
    assert both[4:] == ("carrier", "fields", "body")
    none = parse_options({**LEAST, "includeFields": "false"}).columns
    assert none[4:] == ("body",)
    chosen = parse_options({**LEAST, "columns": "body,keys,origin", "fieldColumns": "origin"})
    assert chosen.columns == ("body", "keys", "origin")


def test_several_endpoints_are_tried_in_turn() -> None:
    options = parse_options({"endpoints": "tcp://a:1, tcp://b:2", "stream": "s"})
    assert options.endpoints == ("tcp://a:1", "tcp://b:2")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("startingOffset", "startingOffsets"),
        ("patern", "pattern"),
        ("kafka.bootstrap.servers", "endpoint"),
        ("topic", "stream"),
        ("topics", "streams"),
        ("path", "stream"),
        ("maxrowspertrigger", "maxRecordsPerTrigger"),
        ("failOnDataLos", "failOnDataLoss"),
        ("minOffsetPerTrigger", "minRecordsPerTrigger"),
        ("maxOffsetPerTrigger", "maxRecordsPerTrigger"),
        ("minRecordsTrigger", "minRecordsPerTrigger"),
        ("endingOffset", "endingOffsets"),
        ("endTimestamp", "endingTimestamp"),
        ("clientTimeT", "clientTimeTo"),
        ("headers", "includeFields"),
    ],
)
def test_an_unknown_option_is_named_with_what_was_probably_meant(typed: str, meant: str) -> None:
    text = refusal(**{typed: "1"})
    assert f"'{typed}'" in text
    assert f"did you mean '{meant}'?" in text


def test_an_option_like_no_other_is_answered_with_the_list_of_all() -> None:
    text = refusal(zzzzzz="1")
    assert "there is no such option" in text
    assert "startingTimestamp" in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"endpoint": "kafka:9092"}, "does not begin with tcp:// or ipc://"),
        ({"endpoint": "inproc://x"}, "its tasks are other processes"),
        ({"endpoint": " "}, "give the broker's address"),
        ({"endpoints": "tcp://b:1"}, "give only one of them"),
        ({"subscribe": "other"}, "both name streams"),
        ({"streamsPattern": "other.*"}, "both name streams"),
        ({"startingOffsets": '{"weather": 5}'}, "names stream 'weather', which is not read"),
        ({"startingOffsets": '{"flights": -3}'}, "none of earliest, latest or an offset"),
        ({"startingOffsets": '{"flights": {"1": 5}}'}, "has the one partition '0'"),
        ({"startingOffsets": '{"flights"'}, "is no JSON object by stream"),
        ({"endingOffsets": '{"flights": -2}'}, "would read nothing"),
        ({"endingTimestamp": '{"flights": "noon"}'}, "milliseconds since 1970"),
        ({"stream": " "}, "add .option"),
        ({"startingOffsets": "newest"}, "none of earliest, latest or an offset"),
        ({"startingOffsets": "-2"}, "none of earliest, latest or an offset"),
        ({"startingOffsets": "5", "startingTimestamp": "5"}, "give only one of them"),
        ({"startingTimestamp": "yesterday"}, "milliseconds since 1970"),
        ({"startingTimestamp": "2013-01-01T05:00:00"}, "no time zone"),
        ({"endingOffsets": "earliest"}, "would read nothing"),
        ({"clientTimeFrom": "10", "clientTimeTo": "10"}, "is not after clientTimeFrom"),
        ({"failOnDataLoss": "maybe"}, "none of true, false, all"),
        ({"maxRecordsPerTrigger": "0"}, "give 1 or more"),
        ({"maxOffsetsPerTrigger": "9", "maxRecordsPerTrigger": "8"}, "give only one of them"),
        ({"maxBytesPerTrigger": "much"}, "32m"),
        ({"splitBytes": "1000"}, "less than 1m"),
        ({"minPartitions": "-1"}, "negative"),
        ({"pattern": "a.b*"}, "mixes a wildcard with text"),
        ({"pattern": '["glob", "x"]'}, "no pattern kind 'glob'"),
        ({"bodyType": "json"}, "none of binary, list"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "more than maxRecords"),
        ({"maxTriggerDelay": "15 minutes"}, "write 500ms, 5s, 15m or 1h"),
        ({"maxRecordsPerPartition": "0"}, "give 1 or more"),
        ({"columns": "offset,,body"}, "an empty name"),
        ({"columns": "offset,offset"}, "named twice"),
        ({"columns": "ofset"}, "did you mean 'offset'?"),
        ({"columns": "carrier"}, "the fields that fieldColumns names"),
        ({"includeKeys": "true", "columns": "keys"}, "give only one of them"),
        ({"fieldColumns": "body"}, "a column 'body' is there already"),
        ({"fieldColumns": "carrier", "columns": "offset"}, "is not among 'columns'"),
        ({"cursor": "~x"}, "is reserved"),
        ({"cursorPinBytes": "1g"}, "is missing beside cursorPinBytes"),
        ({"password": "x"}, "is missing beside password"),
        ({"curveServerKey": "x"}, "a CURVE key has 40 characters"),
        ({"curveServerKey": KEY}, "CURVE needs all of"),
        (
            {"curveServerKey": KEY, "curvePublicKey": KEY, "curveSecretKey": KEY, "user": "u"},
            "exclude each other",
        ),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_what_would(
    more: dict[str, str], words: str
) -> None:
    text = refusal(**more)
    assert words in text
    assert next(iter(more)) in text or "option" in text


def test_what_is_missing_is_named_with_the_call_to_add() -> None:
    with pytest.raises(OptionError, match=r"'endpoint': is missing; add .option"):
        parse_options({"stream": "s"})
    with pytest.raises(OptionError, match=r"'stream': is missing; add .option"):
        parse_options({"endpoint": "tcp://a:1"})


def test_times_are_numbers_or_iso_8601() -> None:
    options = parse_options({**LEAST, "startingTimestamp": "2013-01-01T05:00:00Z"})
    assert options.starting == Places(Place("time", 1_357_016_400_000))
    options = parse_options({**LEAST, "startingTimestamp": "2013-01-01T06:00:00.250+01:00"})
    assert options.starting == Places(Place("time", 1_357_016_400_250))
    options = parse_options({**LEAST, "startingTimestamp": "1357016400000"})
    assert options.starting == Places(Place("time", 1_357_016_400_000))


def test_a_client_time_window_may_be_open_on_either_side() -> None:
    assert parse_options({**LEAST, "clientTimeFrom": "5"}).client_time == (5, EVER)
    assert parse_options({**LEAST, "clientTimeTo": "5"}).client_time == (-EVER, 5)
    assert parse_options(LEAST).client_time is None


def test_patterns_have_the_text_form_of_the_command_line() -> None:
    assert parse_options({**LEAST, "pattern": "flights.JFK.#"}).pattern == [
        "topic",
        "flights.JFK.#",
    ]
    assert parse_options({**LEAST, "pattern": "fields:delayed,carrier=UA"}).pattern == [
        "fields",
        "all",
        [["delayed"], ["carrier", "UA"]],
    ]
    assert parse_options({**LEAST, "pattern": "#"}).pattern == ["all"]


def test_options_of_a_stream_are_refused_to_a_batch_read_and_the_reverse() -> None:
    with pytest.raises(OptionError, match=r"'endingOffsets': is for spark\.read only"):
        refuse_options_of("read", {"ENDINGOFFSETS": "latest"})
    with pytest.raises(OptionError, match=r"'maxBytesPerTrigger': is for spark\.readStream only"):
        refuse_options_of("readStream", {"maxBytesPerTrigger": "1g"})
    refuse_options_of("readStream", {"endingOffsets": "latest", "stream": "s"})


def test_no_credential_shows_when_options_are_printed() -> None:
    options = parse_options({**LEAST, "user": "ann", "password": "hunter2"})
    assert "hunter2" not in repr(options)
    options = parse_options(
        {**LEAST, "curveServerKey": KEY, "curvePublicKey": KEY, "curveSecretKey": KEY}
    )
    assert KEY not in repr(options)
