"""The source's options: names, defaults, meaning, and what can be wrong with them.

Owns the OPTIONS table, which is all there is to know about them, and the checks between
options. The rule: an option is refused by its name before anything connects; nothing is
ignored. Names follow Spark's Kafka source where it has the same thing.
Source: Structured Streaming and Kafka Integration Guide, for those names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from malamute_protocol.address import name_fault
from malamute_protocol.errors import BrokerRefused, ProtocolError
from malamute_protocol.pattern import Pattern, from_text, to_text
from pyspark_malamute.errors import MalamuteSourceError, OptionError
from pyspark_malamute.option_values import (
    LinkOptions,
    Option,
    OptionTable,
    as_curve_key,
    as_duration,
    as_endpoints,
    as_flag,
    as_names,
    as_number,
    as_positive,
    as_size,
    as_text,
    as_time,
    one_of,
)

MIB: Final = 1 << 20
EVER: Final = 1 << 62
"""Bound of a client-time window that is open on one side, in milliseconds."""


class Place(NamedTuple):
    """A point of a stream as an option names it: kind, and the offset or time."""

    kind: str
    """"earliest", "latest", "offset" or "time"."""
    value: int = 0
    """Offset, or milliseconds since 1970."""


class Places(NamedTuple):
    """Where reading begins or ends in each stream."""

    everywhere: Place | None = None
    """None: not said; a batch read then begins at the earliest record, a stream at the latest."""
    by_stream: Mapping[str, Place] = {}

    def of(self, stream: str) -> Place | None:
        """The place in one stream."""
        return self.by_stream.get(stream, self.everywhere)


class Bounds(NamedTuple):
    """Bounds that the filters of a query set to a batch read; each pair is [low, high)."""

    offsets: tuple[int, int] = (-EVER, EVER)
    append_ms: tuple[int, int] = (-EVER, EVER)
    streams: frozenset[str] | None = None
    """Names of the streams to read; None: all of them."""

    def within(
        self,
        *,
        offsets: tuple[int, int] = (-EVER, EVER),
        append_ms: tuple[int, int] = (-EVER, EVER),
        streams: frozenset[str] | None = None,
    ) -> Bounds:
        """Return bounds that keep what both these bounds and the given ones keep."""
        # Where one of both is None, which is no bound, the other one holds.
        both = streams if self.streams is None or streams is None else self.streams & streams
        return Bounds(
            _common(self.offsets, offsets),
            _common(self.append_ms, append_ms),
            self.streams if both is None else both,
        )


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Return what two ranges [low, high) have in common; empty where low is not below high."""
    return max(one[0], other[0]), min(one[1], other[1])


_COUNTING_FACTOR: Final = 8
"""Times splitBytes that a task gets whose rows are only counted: a task costs Spark 35 ms of a
worker, in which such rows of 300 MB are counted."""


class SourceOptions(LinkOptions, frozen=True, kw_only=True):
    """All options of one source, checked. Passwords and keys are left out of its repr."""

    side = "source"
    stream: str
    """The stream that is read; of a query that may read several: empty, or as of() has set it."""
    streams: tuple[str, ...]
    """The streams that are read, by name; empty: those that match streams_pattern."""
    streams_pattern: str
    """A regular expression over whole names; empty: they are named."""
    pattern: Pattern
    starting: Places
    starting_strategy: str
    ending: Places
    client_time: tuple[int, int] | None
    fail_on_data_loss: bool
    fail_on_trim: bool
    """Whether records that a trim has removed fail the query, too."""
    rows_per_trigger: int
    min_rows_per_trigger: int
    max_delay_ms: int
    """How long fewer records than min_rows_per_trigger may make no batch."""
    bytes_per_trigger: int
    cursor: str
    """Name of the cursor that the query moves; empty: none."""
    cursor_pin_bytes: int
    min_partitions: int
    rows_per_partition: int
    split_bytes: int
    log_directory: str
    """Data directory of the broker, for tasks on its machine; empty: all is read over the wire."""
    columns: tuple[str, ...]
    """Names of the columns, in order; each is one of COLUMNS or of field_columns. Empty: rows have
    no column, or with bodyType typed all of the stream's."""
    field_columns: tuple[str, ...]
    """Fields that have a column of their own."""
    body_type: str
    fetch_timeout_ms: int
    fetch_retries: int
    idle_wait_ms: int
    push_filters: bool
    bounds: Bounds = Bounds()
    typed: bytes = b""
    """With bodyType typed: Arrow schema message of the query's columns; typed.py sets it."""

    def __repr__(self) -> str:
        """Without credentials: this text may end up in a log or a plan."""
        return f"SourceOptions({', '.join(self.endpoints)}, {self.reads}, {self.pattern_text})"

    @property
    def permission(self) -> str:
        """The permission that a link needs, for the error of one that lacks it."""
        return f"read permission on stream '{self.stream}'"

    @property
    def reads(self) -> str:
        """Name of the stream, or names of the streams, that the query reads, for errors."""
        if self.stream:
            return f"stream '{self.stream}'"
        return f"streams '{self.streams_pattern or ', '.join(self.streams)}'"

    @property
    def counts_only(self) -> bool:
        """Whether nothing of a record is in a row, so that only their number is of interest."""
        return self.body_type != "typed" and (not self.columns or self.counts_by_range)

    @property
    def counts_by_range(self) -> bool:
        """Whether a row tells how many records a range has, as count_records() asks for it."""
        # The stream may have a column or a field of this name, which goes before.
        of_the_stream = self.body_type == "typed" or RECORDS in self.field_columns
        return RECORDS in self.columns and not of_the_stream

    @property
    def task_bytes(self) -> int:
        """About how many bytes of batches one task is given: more where rows are only counted."""
        return self.split_bytes * (_COUNTING_FACTOR if self.counts_only else 1)

    @property
    def is_alone(self) -> bool:
        """Whether the one stream is all that the query can ever read."""
        return self.streams == (self.stream,)

    def of(self, name: str) -> SourceOptions:
        """Return these options for one of the streams."""
        return msgspec.structs.replace(self, stream=name)


_KAFKAS_PLACES: Final = {-2: "earliest", -1: "latest"}
"""Numbers that stand for places in the JSON of Kafka's source."""


def _offset(value: Any) -> Place:
    """Return the place that earliest, latest or an offset names. Raises ValueError."""
    text = str(value).strip().lower()
    if text in ("earliest", "latest"):
        return Place(text)
    if text.isascii() and text.isdigit():
        return Place("offset", int(text))
    raise ValueError(f"{value!r} is none of earliest, latest or an offset such as 1200")


def _place_in_time(value: Any) -> Place:
    """Return the place of the first record from a time on. Raises ValueError: it is none."""
    return Place("time", as_time(str(value)))


def _places(place: Callable[[Any], Place], value: str) -> Places:
    """Return one place for all streams, or the places of a JSON object by stream.

    place: reads a single place. Raises ValueError.
    """
    if not value.strip().startswith("{"):
        return Places(place(value))
    try:
        given = msgspec.json.decode(value.encode(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ValueError(f"is no JSON object by stream: {error}") from None
    return Places(None, {name: _in_stream(place, name, found) for name, found in given.items()})


def _in_stream(place: Callable[[Any], Place], name: str, value: Any) -> Place:
    """Return the place of one stream among those of several; Kafka's forms are understood.

    place: reads a single place. name: of the stream, for the error. Raises ValueError.
    """
    if isinstance(value, dict):
        # Kafka's form, by partition: a stream is one.
        if set(value) != {"0"}:
            raise ValueError(f"stream {name!r} has the one partition '0', not {', '.join(value)}")
        value = value["0"]
    if place is not _place_in_time and type(value) is int:
        value = _KAFKAS_PLACES.get(value, value)
    return place(value)


def _ending_offset(value: Any) -> Place:
    """Return the place where a read ends. Raises ValueError: it would read nothing, or is none."""
    place = _offset(value)
    if place.kind == "earliest":
        raise ValueError("'earliest' would read nothing; give latest or an offset (exclusive)")
    return place


def _expression(value: str) -> str:
    """Return a regular expression that compiles. Raises ValueError."""
    text = value.strip()
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    return text


def _pattern(value: str) -> Pattern:
    """Return a pattern from its text. Raises ValueError."""
    text = value.strip()
    if text in ("", "#"):  # Every subject: the broker need not look at any.
        return ["all"]
    try:
        return from_text(text)
    except (ProtocolError, BrokerRefused) as error:
        raise ValueError(error.reason) from error


def _column_names(value: str) -> tuple[str, ...]:
    """Return the names between commas; none for an empty text, which asks for rows without any."""
    return as_names(value) if value.strip() else ()


# --- the table ---------------------------------------------------------------------------

COLUMNS: Final = (
    "stream", "offset", "append_time", "client_time", "subject", "keys", "fields", "properties",
    "body",
)  # fmt: skip
"""Columns that there can be, in the order in which they stand unless `columns` says another."""
RECORDS: Final = "records"
"""Column of a row that stands for all selected records of a range; `stream` may be beside it."""

OPTIONS: Final[tuple[Option, ...]] = (
    Option("endpoint", as_endpoints, None, "the broker's address; several, with commas, are tried",
           aliases=("endpoints",)),
    Option("stream", as_text, None, "the stream to read"),
    Option("streams", as_names, None, "the streams to read, with commas", aliases=("subscribe",)),
    Option("streamsPattern", _expression, None,
           "a regular expression over whole names of streams; new streams are found",
           aliases=("subscribePattern",)),
    Option("pattern", _pattern, "#", "which records; the broker does the matching"),
    Option("startingOffsets", partial(_places, _offset), None,
           "earliest, latest or an offset, of a new query; or JSON by stream"),
    Option("startingTimestamp", partial(_places, _place_in_time), None,
           "first record appended at or after this; or JSON by stream",
           aliases=("startingOffsetsByTimestamp",)),
    Option(
        "startingOffsetsByTimestampStrategy", one_of("error", "latest"), "error",
        "what to do when no record is as young as startingTimestamp",
    ),
    Option("endingOffsets", partial(_places, _ending_offset), None,
           "latest or an offset (exclusive); or JSON by stream", "read"),
    Option("endingTimestamp", partial(_places, _place_in_time), None,
           "only records appended before this; or JSON by stream", "read",
           ("endingOffsetsByTimestamp",)),
    Option("clientTimeFrom", as_time, None, "only records whose client time is at or after this"),
    Option("clientTimeTo", as_time, None, "only records whose client time is before this"),
    Option("pushFilters", as_flag, "false",
           "the broker applies filters on stream, subject, times, offset and fieldColumns; needs "
           "`spark.sql.python.filterPushdown.enabled`", "read"),
    Option("failOnDataLoss", one_of("true", "false", "all"), "true",
           "fail, or log and go on, when records are gone; all: fail when a trim took them, too"),
    Option("maxRecordsPerTrigger", as_positive, None, "most selected records in one micro-batch",
           "readStream", ("maxOffsetsPerTrigger",)),
    Option("minRecordsPerTrigger", as_positive, None,
           "a micro-batch waits for so many selected records, maxTriggerDelay at most",
           "readStream", ("minOffsetsPerTrigger",)),
    Option("maxTriggerDelay", as_duration, "15m",
           "how long fewer records than minRecordsPerTrigger make no micro-batch", "readStream"),
    Option("maxBytesPerTrigger", as_size, "1g", "most bytes in one micro-batch; 0: no bound",
           "readStream"),
    Option("cursor", as_text, "", "a cursor at the broker that follows the query", "readStream"),
    Option("cursorPinBytes", as_size, None,
           "the cursor keeps what the query has not read, up to so many bytes of each stream",
           "readStream"),
    Option("minPartitions", as_number, "0", "at least so many tasks, where the data allow it"),
    Option("maxRecordsPerPartition", as_positive, None, "most selected records of one task"),
    Option("splitBytes", as_size, "32m",
           "about how many bytes one task reads; 8 times as many where `columns` is empty"),
    Option("logDirectory", as_text, "",
           "the broker's data directory: a task on the broker's machine that may read its files "
           "reads them in place"),
    Option("columns", _column_names, None,
           "names of the columns, in order; what is not named is not made; empty: none, for "
           "`count()`; `records`, beside `stream` or alone: how many records each range has"),
    Option("fieldColumns", as_names, None,
           "fields that get a string column each, in place of the map of all"),
    Option("includeFields", as_flag, None,
           "a column with the map of each record's fields; `true` without fieldColumns",
           aliases=("includeHeaders",)),
    Option("includeKeys", as_flag, None, "a column with all keys of each record"),
    Option("includeProperties", as_flag, None, "a column with each record's properties"),
    Option("bodyType", one_of("binary", "list", "typed"), "binary",
           "list: for bodies of several blobs; typed: the columns of the stream's declared schema"),
    Option("user", as_text, "", "user name, with password"),
    Option("password", str, "", "its password"),
    Option("curveServerKey", as_curve_key, None, "public key of the broker"),
    Option("curvePublicKey", as_curve_key, None, "our public key"),
    Option("curveSecretKey", as_curve_key, None, "our secret key"),
    Option("identity", as_text, "", "the identity to ask for; the credential must allow it"),
    Option("connectTimeoutMs", as_positive, "15000",
           "how long a new query tries to reach the broker"),
    Option("requestTimeoutMs", as_positive, "30000",
           "how long a broker that is there may take to answer"),
    Option("brokerOutageMs", as_number, "300000",
           "how long a query that has reached the broker waits for it while it is away"),
    Option("fetchTimeoutMs", as_positive, "60000", "silence after which a fetch is asked again"),
    Option("fetchRetries", as_number, "3", "how often a fetch is asked again without progress"),
    Option("idleWaitMs", as_number, "200",
           "how long the driver waits for new records, where the query has one source",
           "readStream"),
)  # fmt: skip

_ELSEWHERE: Final[dict[str, str]] = {
    "kafka.bootstrap.servers": "endpoint",
    "host": "endpoint",
    "url": "endpoint",
    "uri": "endpoint",
    "broker": "endpoint",
    "server": "endpoint",
    "topic": "stream",
    "topics": "streams",
    "streampattern": "streamsPattern",
    "assign": "stream",
    "path": "stream",
    "subject": "pattern",
    "filter": "pattern",
    "headers": "includeFields",
    "username": "user",
    "startingoffset": "startingOffsets",
    "starttime": "startingTimestamp",
    "endtime": "endingTimestamp",
    "maxrowspertrigger": "maxRecordsPerTrigger",
    "minrowspertrigger": "minRecordsPerTrigger",
    "fetchoffset.numretries": "fetchRetries",
    "kafkaconsumer.polltimeoutms": "fetchTimeoutMs",
}
"""Option as users of other sources write it -> name of the option here."""

TABLE: Final = OptionTable("source", OPTIONS, _ELSEWHERE)


# --- all of them ---------------------------------------------------------------------------


def parse_options(raw: Mapping[str, str]) -> SourceOptions:
    """Return the options of a source, checked as far as that goes without the broker.

    Spark has them parsed as it loads a source, and again for each reader that it makes.

    raw: as Spark gives them, keys in any case. Raises OptionError.
    """
    given, keys, values = TABLE.read(raw)
    stream, streams = _streams(keys, values)
    # Whether the query reads a stream of this name: it is one of those named, or matches.
    named = re.compile(values["streamsPattern"] or "").fullmatch
    reads = streams.__contains__ if streams else lambda name: named(name) is not None
    pattern = values["pattern"]
    return SourceOptions(
        **TABLE.linking(values),
        stream=stream,
        streams=streams,
        streams_pattern=values["streamsPattern"] or "",
        pattern=pattern,
        pattern_text="#" if pattern == ["all"] else to_text(pattern),
        starting=_places_of(given, values, reads, "startingTimestamp", "startingOffsets"),
        starting_strategy=values["startingOffsetsByTimestampStrategy"],
        ending=_places_of(given, values, reads, "endingTimestamp", "endingOffsets"),
        client_time=_window(values["clientTimeFrom"], values["clientTimeTo"]),
        fail_on_data_loss=values["failOnDataLoss"] != "false",
        fail_on_trim=values["failOnDataLoss"] == "all",
        rows_per_trigger=values["maxRecordsPerTrigger"] or 0,
        min_rows_per_trigger=_min_records(values),
        max_delay_ms=values["maxTriggerDelay"],
        bytes_per_trigger=values["maxBytesPerTrigger"],
        cursor=_cursor(values),
        cursor_pin_bytes=values["cursorPinBytes"] or 0,
        min_partitions=values["minPartitions"],
        rows_per_partition=values["maxRecordsPerPartition"] or 0,
        split_bytes=_at_least_a_mib(values["splitBytes"]),
        log_directory=values["logDirectory"],
        columns=(_typed_columns if values["bodyType"] == "typed" else _columns)(given, values),
        field_columns=values["fieldColumns"] or (),
        body_type=values["bodyType"],
        identity=values["identity"],
        fetch_timeout_ms=values["fetchTimeoutMs"],
        fetch_retries=values["fetchRetries"],
        idle_wait_ms=values["idleWaitMs"],
        push_filters=values["pushFilters"],
    )


def refuse_a_table(raw: Mapping[str, str]) -> None:
    """Raise MalamuteSourceError: Spark makes or reads a table of its catalog.

    Spark 4.3 adds `provider` and more to the options when CREATE TABLE asks for the schema, and
    hands over no option at all when the table is read.
    """
    if not raw or "provider" in {key.lower() for key in raw}:
        raise MalamuteSourceError(
            "malamute source: Spark hands a table's options to no Python source when the table is "
            "read, so that a table cannot be used. Use a view: CREATE TEMPORARY VIEW name USING "
            "malamute OPTIONS (endpoint 'tcp://host:port', stream 'name of the stream'), or "
            'spark.read.format("malamute") with these options'
        )


def refuse_options_of(other: str, raw: Mapping[str, str]) -> None:
    """Raise OptionError for an option that means something to `other` only.

    other: "read" or "readStream", the one that this is not.
    """
    for key in raw:
        option = TABLE.by_key.get(key.lower())
        if option is not None and option.only == other:
            raise OptionError(option.name, f"is for spark.{other} only; remove it")


def _streams(keys: Mapping[str, str], values: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """(the stream that is named alone, all that are named). Raises OptionError.

    Both are empty where a pattern of names selects the streams.
    """
    given = [name for name in ("stream", "streams", "streamsPattern") if values[name]]
    if not given:
        raise OptionError(
            "stream",
            'is missing; add .option("stream", "name of the stream"), or streams or streamsPattern',
        )
    if len(given) > 1:
        raise OptionError(
            keys[given[1]], f"and '{keys[given[0]]}' both name streams; give only one of them"
        )
    if values["streams"]:
        return "", values["streams"]
    return (values["stream"], (values["stream"],)) if values["stream"] else ("", ())


def _places_of(
    given: Mapping[str, str], values: Mapping[str, Any], reads: Callable[[str], bool],
    one: str, other: str,
) -> Places:  # fmt: skip
    """Return the places of whichever of two options was given. Raises OptionError.

    given, values: as of Given. reads: whether the query reads the stream of a name. one, other:
    names of the options, as startingTimestamp and startingOffsets.
    """
    if one in given and other in given:
        raise OptionError(one, f"says the same as '{other}'; give only one of them")
    name = one if one in given else other
    places: Places = values[name] or Places()
    stranger = next((each for each in places.by_stream if not reads(each)), None)
    if stranger is not None:
        raise OptionError(name, f"names stream '{stranger}', which is not read")
    return places


def _min_records(values: Mapping[str, Any]) -> int:
    """Return minRecordsPerTrigger; 0: not given. Raises OptionError: it is above the maximum."""
    least, most = values["minRecordsPerTrigger"] or 0, values["maxRecordsPerTrigger"]
    if most and least > most:
        raise OptionError(
            "minRecordsPerTrigger", f"{least} is more than maxRecordsPerTrigger, {most}"
        )
    return least


def _cursor(values: Mapping[str, Any]) -> str:
    """Return the name of the query's cursor; empty: none. Raises OptionError."""
    name: str = values["cursor"]
    fault = name_fault(name) if name else ""
    if fault:
        raise OptionError("cursor", fault)
    if values["cursorPinBytes"] and not name:
        raise OptionError("cursor", "is missing beside cursorPinBytes")
    return name


def _typed_columns(given: Mapping[str, str], values: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the columns of a typed stream; none: all of its schema. Raises OptionError.

    given, values: as of Given.
    """
    if not values["stream"]:
        raise OptionError("bodyType", "'typed' is of one stream, which option 'stream' names")
    for name in ("fieldColumns", "includeFields", "includeKeys", "includeProperties",
                 "pushFilters"):  # fmt: skip
        if name in given:
            raise OptionError(name, "says nothing with bodyType 'typed': leave it out")
    if values["columns"] == ():
        raise OptionError("columns", "is empty: leave out bodyType 'typed', to count records")
    columns: tuple[str, ...] = values["columns"] or ()
    return columns


def _columns(given: Mapping[str, str], values: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the columns, in order. Raises OptionError.

    They are those of option `columns`. Without it they are all COLUMNS but those that an include
    option leaves out, with single fields before the map of all; `stream` where several are read.
    given, values: as of Given.
    """
    fields: tuple[str, ...] = values["fieldColumns"] or ()
    taken = next((name for name in fields if name in COLUMNS), None)
    if taken is not None:
        raise OptionError(
            "fieldColumns", f"a column '{taken}' is there already; take that field out of the map"
        )
    if values["columns"] is None:  # The columns follow from the other options.
        wanted = dict.fromkeys(COLUMNS, True)
        wanted["stream"] = not values["stream"]
        for name in ("keys", "properties"):
            wanted[name] = bool(values[f"include{name.capitalize()}"])
        maps = values["includeFields"]
        # Single fields take the place of the map of all, unless it is asked for.
        wanted["fields"] = not fields if maps is None else maps
        place = COLUMNS.index("fields")
        ordered = (*COLUMNS[:place], *fields, *COLUMNS[place:])
        return tuple(name for name in ordered if wanted.get(name, True))
    columns: tuple[str, ...] = values["columns"]
    for name in ("includeFields", "includeKeys", "includeProperties"):
        if name in given:
            raise OptionError(name, "and 'columns' say the same; give only one of them")
    if RECORDS in columns and RECORDS not in fields:  # Rows that count; no field of this name.
        beside = next((name for name in columns if name not in (RECORDS, "stream")), None)
        if beside is not None:
            raise OptionError(
                "columns", f"'{RECORDS}' counts many records in a row, which has no '{beside}'; "
                f"beside it there may be 'stream' only"
            )  # fmt: skip
        return columns
    for name in columns:
        if name not in COLUMNS and name not in fields:
            close = difflib.get_close_matches(name, (*COLUMNS, *fields), n=1, cutoff=0.6)
            meant = f"did you mean '{close[0]}'? " if close else ""
            raise OptionError(
                "columns",
                f"there is no column '{name}'; {meant}Known are {', '.join(COLUMNS)}, and the "
                "fields that fieldColumns names",
            )
    unused = next((name for name in fields if name not in columns), None)
    if unused is not None:
        raise OptionError("fieldColumns", f"'{unused}' is not among 'columns'; name it there too")
    return columns


def _window(begin: int | None, end: int | None) -> tuple[int, int] | None:
    """Return the range of client times; None: there is no bound. Raises OptionError: it is empty.

    begin, end: its bounds in milliseconds; None: none on this side.
    """
    if begin is None and end is None:
        return None
    window = (-EVER if begin is None else begin, EVER if end is None else end)
    if window[0] >= window[1]:
        raise OptionError("clientTimeTo", "is not after clientTimeFrom, so no record can match")
    return window


def _at_least_a_mib(size: int) -> int:
    """Return splitBytes. Raises OptionError: it is too small for a task."""
    if size < MIB:
        raise OptionError("splitBytes", f"{size} is less than 1m: tasks would cost more than data")
    return size
