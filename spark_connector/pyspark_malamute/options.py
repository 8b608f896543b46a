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
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from malamute_protocol.address import name_fault
from malamute_protocol.errors import BrokerRefused, ProtocolError
from malamute_protocol.pattern import Pattern, from_text, to_text
from pyspark_malamute.errors import MalamuteSourceError, OptionError

MIB: Final = 1 << 20
EVER: Final = 1 << 62
"""Bound of a client-time window that is open on one side, in milliseconds."""
_SCHEMES: Final = ("tcp://", "ipc://")
_CURVE_KEY_CHARACTERS: Final = 40
_SUFFIXES: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DURATION: Final = re.compile(r"(\d+)\s*(ms|s|m|h)")
_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_BYTES: Final = re.compile(r"(\d+)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


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
        both = streams if self.streams is None or streams is None else self.streams & streams
        return Bounds(
            _common(self.offsets, offsets),
            _common(self.append_ms, append_ms),
            self.streams if both is None else both,
        )


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])


class SourceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """All options of one source, checked. Passwords and keys are left out of its repr."""

    endpoints: tuple[str, ...]
    stream: str
    """The stream that is read; of a query that may read several: empty, or as of() has set it."""
    streams: tuple[str, ...]
    """The streams that are read, by name; empty: those that match streams_pattern."""
    streams_pattern: str
    """A regular expression over whole names; empty: they are named."""
    pattern: Pattern
    pattern_text: str
    starting: Places
    starting_strategy: str
    ending: Places
    client_time: tuple[int, int] | None
    fail_on_data_loss: bool
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
    columns: tuple[str, ...]
    """Names of the columns, in order; each is one of COLUMNS or of field_columns."""
    field_columns: tuple[str, ...]
    """Fields that have a column of their own."""
    body_type: str
    user: str
    password: str
    curve_keys: tuple[str, str, str]
    """Server, public and secret key; all empty: no CURVE."""
    identity: str
    connect_timeout_ms: int
    request_timeout_ms: int
    broker_outage_ms: int
    fetch_timeout_ms: int
    fetch_retries: int
    idle_wait_ms: int
    push_filters: bool
    bounds: Bounds = Bounds()

    def __repr__(self) -> str:
        """Without credentials: this text may end up in a log or a plan."""
        return f"SourceOptions({', '.join(self.endpoints)}, {self.reads}, {self.pattern_text})"

    @property
    def reads(self) -> str:
        """Name of the stream, or names of the streams, that the query reads, for a message."""
        if self.stream:
            return f"stream '{self.stream}'"
        return f"streams '{self.streams_pattern or ', '.join(self.streams)}'"

    @property
    def is_alone(self) -> bool:
        """Whether the one stream is all that the query can ever read."""
        return self.streams == (self.stream,)

    def of(self, name: str) -> SourceOptions:
        """Return these options for one of the streams."""
        return msgspec.structs.replace(self, stream=name)


class Option(NamedTuple):
    """One row of the table."""

    name: str
    parse: Callable[[str], Any]
    default: str | None
    """Default value as a user would write it; None: there is none."""
    meaning: str
    only: str = ""
    """"read" or "readStream" when it means nothing to the other."""
    aliases: tuple[str, ...] = ()
    """Other names of the option: Kafka's, where they differ from ours."""


# --- reading one value -----------------------------------------------------------------


def _text(value: str) -> str:
    return value.strip()


def _flag(value: str) -> bool:
    match value.strip().lower():
        case "true":
            return True
        case "false":
            return False
        case _:
            raise ValueError(f"{value!r} is neither true nor false")


def _number(value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a whole number") from None
    if number < 0:
        raise ValueError(f"{number} is negative; give 0 or more")
    return number


def _positive(value: str) -> int:
    number = _number(value)
    if number == 0:
        raise ValueError("0 cannot work; give 1 or more")
    return number


def _bytes(value: str) -> int:
    found = _BYTES.fullmatch(value.strip())
    if found is None:
        raise ValueError(f"{value!r} is not a size; write bytes, or 32m, 1g")
    return int(found[1]) * _SUFFIXES[found[2].lower()]


def _duration(value: str) -> int:
    """Milliseconds, from 500ms, 5s, 15m or 1h."""
    found = _DURATION.fullmatch(value.strip().lower())
    if found is None:
        raise ValueError(f"{value!r} is not a duration; write 500ms, 5s, 15m or 1h")
    return int(found[1]) * _UNITS_MS[found[2]]


def _names(value: str) -> tuple[str, ...]:
    names = tuple(map(str.strip, value.split(",")))
    if not all(names):
        raise ValueError(f"{value!r} has an empty name; separate names by single commas")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is named twice")
    return names


def _time(value: str) -> int:
    """Milliseconds since 1970, from that number or from ISO 8601."""
    text = value.strip()
    if text.isascii() and text.removeprefix("-").isdigit():
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{value!r} is not a time; write milliseconds since 1970 or 2013-01-01T05:00:00Z"
        ) from None
    if time.tzinfo is None:
        raise ValueError(f"{value!r} has no time zone; end it with Z or +01:00")
    since = time.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1000 + since.microseconds // 1000


_KAFKAS_PLACES: Final = {-2: "earliest", -1: "latest"}


def _offset(value: Any) -> Place:
    """A place from earliest, latest, an offset, or Kafka's -2 and -1."""
    text = str(value).strip().lower()
    if text in ("earliest", "latest"):
        return Place(text)
    if text.isascii() and text.isdigit():
        return Place("offset", int(text))
    raise ValueError(f"{value!r} is none of earliest, latest or an offset such as 1200")


def _place_in_time(value: Any) -> Place:
    return Place("time", _time(str(value)))


def _places(place: Callable[[Any], Place], value: str) -> Places:
    """One place for all streams, or a JSON object of places by stream."""
    if not value.strip().startswith("{"):
        return Places(place(value))
    try:
        given = msgspec.json.decode(value.encode(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ValueError(f"is no JSON object by stream: {error}") from None
    return Places(None, {name: _in_stream(place, name, found) for name, found in given.items()})


def _in_stream(place: Callable[[Any], Place], name: str, value: Any) -> Place:
    if isinstance(value, dict):
        # Kafka's form, by partition: a stream is one.
        if set(value) != {"0"}:
            raise ValueError(f"stream {name!r} has the one partition '0', not {', '.join(value)}")
        value = value["0"]
    if place is not _place_in_time and type(value) is int:
        value = _KAFKAS_PLACES.get(value, value)
    return place(value)


def _ending_offset(value: Any) -> Place:
    place = _offset(value)
    if place.kind == "earliest":
        raise ValueError("'earliest' would read nothing; give latest or an offset (exclusive)")
    return place


def _expression(value: str) -> str:
    text = value.strip()
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    return text


def _endpoints(value: str) -> tuple[str, ...]:
    endpoints = tuple(filter(None, map(str.strip, value.split(","))))
    if not endpoints:
        raise ValueError("is empty; give the broker's address, such as tcp://127.0.0.1:9999")
    for endpoint in endpoints:
        if endpoint.startswith("inproc://"):
            raise ValueError(f"{endpoint!r} is no address for Spark: its tasks are other processes")
        if not endpoint.startswith(_SCHEMES):
            raise ValueError(f"{endpoint!r} does not begin with {' or '.join(_SCHEMES)}")
    return endpoints


def _pattern(value: str) -> Pattern:
    text = value.strip()
    if text in ("", "#"):
        return ["all"]
    try:
        return from_text(text)
    except (ProtocolError, BrokerRefused) as error:
        raise ValueError(error.reason) from error


def _curve_key(value: str) -> str:
    key = value.strip()
    if len(key) != _CURVE_KEY_CHARACTERS:
        raise ValueError(f"a CURVE key has {_CURVE_KEY_CHARACTERS} characters, this has {len(key)}")
    return key


def _one_of(*known: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        text = value.strip().lower()
        if text not in known:
            raise ValueError(f"{value!r} is none of {', '.join(known)}")
        return text

    return parse


# --- the table ---------------------------------------------------------------------------

COLUMNS: Final = (
    "stream", "offset", "append_time", "client_time", "subject", "keys", "fields", "properties",
    "body",
)  # fmt: skip
"""Columns that there can be, in the order in which they stand unless `columns` says another."""

OPTIONS: Final[tuple[Option, ...]] = (
    Option("endpoint", _endpoints, None, "the broker's address; several, with commas, are tried",
           aliases=("endpoints",)),
    Option("stream", _text, None, "the stream to read"),
    Option("streams", _names, None, "the streams to read, with commas", aliases=("subscribe",)),
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
        "startingOffsetsByTimestampStrategy", _one_of("error", "latest"), "error",
        "what to do when no record is as young as startingTimestamp",
    ),
    Option("endingOffsets", partial(_places, _ending_offset), None,
           "latest or an offset (exclusive); or JSON by stream", "read"),
    Option("endingTimestamp", partial(_places, _place_in_time), None,
           "only records appended before this; or JSON by stream", "read",
           ("endingOffsetsByTimestamp",)),
    Option("clientTimeFrom", _time, None, "only records whose client time is at or after this"),
    Option("clientTimeTo", _time, None, "only records whose client time is before this"),
    Option("pushFilters", _flag, "false",
           "the broker applies filters on stream, subject, times, offset and fieldColumns; needs "
           "`spark.sql.python.filterPushdown.enabled`", "read"),
    Option("failOnDataLoss", _flag, "true", "fail, or log and go on, when records are gone"),
    Option("maxRecordsPerTrigger", _positive, None, "most selected records in one micro-batch",
           "readStream", ("maxOffsetsPerTrigger",)),
    Option("minRecordsPerTrigger", _positive, None,
           "a micro-batch waits for so many selected records, maxTriggerDelay at most",
           "readStream", ("minOffsetsPerTrigger",)),
    Option("maxTriggerDelay", _duration, "15m",
           "how long fewer records than minRecordsPerTrigger make no micro-batch", "readStream"),
    Option("maxBytesPerTrigger", _bytes, "1g", "most bytes in one micro-batch; 0: no bound",
           "readStream"),
    Option("cursor", _text, "", "a cursor at the broker that follows the query", "readStream"),
    Option("cursorPinBytes", _bytes, None,
           "the cursor keeps what the query has not read, up to so many bytes of each stream",
           "readStream"),
    Option("minPartitions", _number, "0", "at least so many tasks, where the data allow it"),
    Option("maxRecordsPerPartition", _positive, None, "most selected records of one task"),
    Option("splitBytes", _bytes, "32m", "about how many bytes one task reads"),
    Option("columns", _names, None,
           "names of the columns, in order; what is not named is not made"),
    Option("fieldColumns", _names, None,
           "fields that get a string column each, in place of the map of all"),
    Option("includeFields", _flag, None,
           "a column with the map of each record's fields; `true` without fieldColumns",
           aliases=("includeHeaders",)),
    Option("includeKeys", _flag, None, "a column with all keys of each record"),
    Option("includeProperties", _flag, None, "a column with each record's properties"),
    Option("bodyType", _one_of("binary", "list"), "binary", "list: for bodies of several blobs"),
    Option("user", _text, "", "user name, with password"),
    Option("password", str, "", "its password"),
    Option("curveServerKey", _curve_key, None, "public key of the broker"),
    Option("curvePublicKey", _curve_key, None, "our public key"),
    Option("curveSecretKey", _curve_key, None, "our secret key"),
    Option("identity", _text, "", "the identity to ask for; the credential must allow it"),
    Option("connectTimeoutMs", _positive, "15000",
           "how long a new query tries to reach the broker"),
    Option("requestTimeoutMs", _positive, "30000",
           "how long a broker that is there may take to answer"),
    Option("brokerOutageMs", _number, "300000",
           "how long a query that has reached the broker waits for it while it is away"),
    Option("fetchTimeoutMs", _positive, "60000", "silence after which a fetch is asked again"),
    Option("fetchRetries", _number, "3", "how often a fetch is asked again without progress"),
    Option("idleWaitMs", _number, "200",
           "how long the driver waits for new records, where the query has one source",
           "readStream"),
)  # fmt: skip

_BY_KEY: Final = {
    name.lower(): option for option in OPTIONS for name in (option.name, *option.aliases)
}
_OPPOSITES: Final = (
    ("min", "max"), ("starting", "ending"), ("from", "to"), ("connect", "request"),
)  # fmt: skip
"""Words that are never a misspelling of each other."""

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


# --- all of them ---------------------------------------------------------------------------


def parse_options(raw: Mapping[str, str]) -> SourceOptions:
    """Check everything that can be checked without the broker.

    raw: as Spark gives them, keys in any case. Raises OptionError.
    """
    given: dict[str, str] = {}
    keys: dict[str, str] = {}
    for key in raw:
        option = _BY_KEY.get(key.lower())
        if option is None:
            raise OptionError(key, _unknown(key))
        if option.name in given:
            raise OptionError(key, f"says the same as '{keys[option.name]}'; give only one of them")
        given[option.name] = raw[key]
        keys[option.name] = key
    values: dict[str, Any] = {}
    for option in OPTIONS:
        text = given.get(option.name, option.default)
        try:
            values[option.name] = None if text is None else option.parse(text)
        except ValueError as error:
            raise OptionError(keys.get(option.name, option.name), str(error)) from None
    if values["endpoint"] is None:
        raise OptionError(
            "endpoint", 'is missing; add .option("endpoint", "tcp://host:port") for the broker'
        )
    stream, streams = _streams(keys, values)
    pattern = values["pattern"]
    return SourceOptions(
        endpoints=values["endpoint"],
        stream=stream,
        streams=streams,
        streams_pattern=values["streamsPattern"] or "",
        pattern=pattern,
        pattern_text="#" if pattern == ["all"] else to_text(pattern),
        starting=_places_of(given, values, streams, "startingTimestamp", "startingOffsets"),
        starting_strategy=values["startingOffsetsByTimestampStrategy"],
        ending=_places_of(given, values, streams, "endingTimestamp", "endingOffsets"),
        client_time=_window(values["clientTimeFrom"], values["clientTimeTo"]),
        fail_on_data_loss=values["failOnDataLoss"],
        rows_per_trigger=values["maxRecordsPerTrigger"] or 0,
        min_rows_per_trigger=_least(values),
        max_delay_ms=values["maxTriggerDelay"],
        bytes_per_trigger=values["maxBytesPerTrigger"],
        cursor=_cursor(values),
        cursor_pin_bytes=values["cursorPinBytes"] or 0,
        min_partitions=values["minPartitions"],
        rows_per_partition=values["maxRecordsPerPartition"] or 0,
        split_bytes=_at_least_a_mib(values["splitBytes"]),
        columns=_columns(given, values),
        field_columns=values["fieldColumns"] or (),
        body_type=values["bodyType"],
        user=values["user"],
        password=values["password"],
        curve_keys=_credentials(values),
        identity=values["identity"],
        connect_timeout_ms=values["connectTimeoutMs"],
        request_timeout_ms=values["requestTimeoutMs"],
        broker_outage_ms=values["brokerOutageMs"],
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
        option = _BY_KEY.get(key.lower())
        if option is not None and option.only == other:
            raise OptionError(option.name, f"is for spark.{other} only; remove it")


def _unknown(key: str) -> str:
    typed = key.lower()
    meant = _ELSEWHERE.get(typed)
    if meant is None:
        close = difflib.get_close_matches(typed, _BY_KEY, 5, 0.6)
        meant = next((_BY_KEY[name].name for name in close if not _opposite(typed, name)), None)
    if meant is not None:
        return f"there is no such option; did you mean '{meant}'?"
    return f"there is no such option; known are {', '.join(option.name for option in OPTIONS)}"


def _opposite(typed: str, name: str) -> bool:
    """Whether one says the contrary of the other."""
    return any(
        (one in typed and other in name and other not in typed)
        or (other in typed and one in name and one not in typed)
        for one, other in _OPPOSITES
    )


def _streams(keys: Mapping[str, str], values: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """(the stream that is named alone, all that are named). Raises OptionError."""
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
    given: Mapping[str, str], values: Mapping[str, Any], streams: tuple[str, ...],
    one: str, other: str,
) -> Places:  # fmt: skip
    """The places of whichever of two options was given. Raises OptionError."""
    if one in given and other in given:
        raise OptionError(one, f"says the same as '{other}'; give only one of them")
    name = one if one in given else other
    places: Places = values[name] or Places()
    stranger = next((each for each in places.by_stream if streams and each not in streams), None)
    if stranger is not None:
        raise OptionError(name, f"names stream '{stranger}', which is not read")
    return places


def _least(values: Mapping[str, Any]) -> int:
    least, most = values["minRecordsPerTrigger"] or 0, values["maxRecordsPerTrigger"]
    if most and least > most:
        raise OptionError(
            "minRecordsPerTrigger", f"{least} is more than maxRecordsPerTrigger, {most}"
        )
    return least


def _cursor(values: Mapping[str, Any]) -> str:
    name: str = values["cursor"]
    fault = name_fault(name) if name else ""
    if fault:
        raise OptionError("cursor", fault)
    if values["cursorPinBytes"] and not name:
        raise OptionError("cursor", "is missing beside cursorPinBytes")
    return name


def _columns(given: Mapping[str, str], values: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the columns, in order. Raises OptionError."""
    fields: tuple[str, ...] = values["fieldColumns"] or ()
    taken = next((name for name in fields if name in COLUMNS), None)
    if taken is not None:
        raise OptionError(
            "fieldColumns", f"a column '{taken}' is there already; take that field out of the map"
        )
    if values["columns"] is None:
        wanted = dict.fromkeys(COLUMNS, True)
        wanted["stream"] = not values["stream"]
        for name in ("keys", "properties"):
            wanted[name] = bool(values[f"include{name.capitalize()}"])
        maps = values["includeFields"]
        wanted["fields"] = not fields if maps is None else maps
        place = COLUMNS.index("fields")
        ordered = (*COLUMNS[:place], *fields, *COLUMNS[place:])
        return tuple(name for name in ordered if wanted.get(name, True))
    columns: tuple[str, ...] = values["columns"]
    for name in ("includeFields", "includeKeys", "includeProperties"):
        if name in given:
            raise OptionError(name, "and 'columns' say the same; give only one of them")
    for name in columns:
        if name not in COLUMNS and name not in fields:
            close = difflib.get_close_matches(name, (*COLUMNS, *fields), 1, 0.6)
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
    if begin is None and end is None:
        return None
    window = (-EVER if begin is None else begin, EVER if end is None else end)
    if window[0] >= window[1]:
        raise OptionError("clientTimeTo", "is not after clientTimeFrom, so no record can match")
    return window


def _at_least_a_mib(size: int) -> int:
    if size < MIB:
        raise OptionError("splitBytes", f"{size} is less than 1m: tasks would cost more than data")
    return size


def _credentials(values: Mapping[str, Any]) -> tuple[str, str, str]:
    names = ("curveServerKey", "curvePublicKey", "curveSecretKey")
    missing = [name for name in names if not values[name]]
    if values["password"] and not values["user"]:
        raise OptionError("user", "is missing beside password")
    if len(missing) == len(names):
        return ("", "", "")
    if missing:
        raise OptionError(missing[0], f"is missing; CURVE needs all of {', '.join(names)}")
    if values["user"]:
        raise OptionError("user", "and CURVE keys exclude each other; give one kind of credential")
    return values["curveServerKey"], values["curvePublicKey"], values["curveSecretKey"]
