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
from typing import Any, Final, NamedTuple

import msgspec

from malamute_protocol.errors import BrokerRefused, ProtocolError
from malamute_protocol.pattern import Pattern, from_text, to_text
from pyspark_malamute.errors import MalamuteSourceError, OptionError

MIB: Final = 1 << 20
EVER: Final = 1 << 62
"""Bound of a client-time window that is open on one side, in milliseconds."""
_SCHEMES: Final = ("tcp://", "ipc://")
_CURVE_KEY_CHARACTERS: Final = 40
_SUFFIXES: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_BYTES: Final = re.compile(r"(\d+)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


class Place(NamedTuple):
    """A point of a stream as an option names it: kind, and the offset or time."""

    kind: str
    """"earliest", "latest", "offset" or "time"."""
    value: int = 0
    """Offset, or milliseconds since 1970."""


class SourceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """All options of one source, checked. Passwords and keys are left out of its repr."""

    endpoints: tuple[str, ...]
    stream: str
    pattern: Pattern
    pattern_text: str
    starting: Place | None
    """None: not said; a batch read then begins at the earliest record, a stream at the latest."""
    starting_strategy: str
    ending: Place | None
    client_time: tuple[int, int] | None
    fail_on_data_loss: bool
    rows_per_trigger: int
    bytes_per_trigger: int
    min_partitions: int
    split_bytes: int
    include_fields: bool
    include_keys: bool
    include_properties: bool
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

    def __repr__(self) -> str:
        """Without credentials: this text may end up in a log or a plan."""
        return f"SourceOptions({', '.join(self.endpoints)}, {self.stream}, {self.pattern_text})"


class Option(NamedTuple):
    """One row of the table."""

    name: str
    parse: Callable[[str], Any]
    default: str | None
    """As a user would write it; None: there is none."""
    meaning: str
    only: str = ""
    """"read" or "readStream" when it means nothing to the other."""


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


def _starting(value: str) -> Place:
    text = value.strip().lower()
    if text in ("earliest", "latest"):
        return Place(text)
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{value!r} is none of earliest, latest or an offset such as 1200")
    return Place("offset", int(text))


def _ending(value: str) -> Place:
    place = _starting(value)
    if place.kind == "earliest":
        raise ValueError("'earliest' would read nothing; give latest or an offset (exclusive)")
    return place


def _place_in_time(value: str) -> Place:
    return Place("time", _time(value))


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

_ROWS = Option(
    "maxRecordsPerTrigger", _positive, None, "most matching records in one micro-batch",
    "readStream",
)  # fmt: skip

OPTIONS: Final[tuple[Option, ...]] = (
    Option("endpoint", _endpoints, None, "the broker's address; several, with commas, are tried"),
    Option("endpoints", _endpoints, None, "the same as endpoint"),
    Option("stream", _text, None, "the stream to read"),
    Option("pattern", _pattern, "#", "which records; the broker does the matching"),
    Option("startingOffsets", _starting, None, "earliest, latest or an offset, of a new query"),
    Option("startingTimestamp", _place_in_time, None, "first record appended at or after this"),
    Option(
        "startingOffsetsByTimestampStrategy", _one_of("error", "latest"), "error",
        "what to do when no record is as young as startingTimestamp",
    ),
    Option("endingOffsets", _ending, None, "latest or an offset (exclusive)", "read"),
    Option("endingTimestamp", _place_in_time, None, "only records appended before this", "read"),
    Option("clientTimeFrom", _time, None, "only records whose client time is at or after this"),
    Option("clientTimeTo", _time, None, "only records whose client time is before this"),
    Option("failOnDataLoss", _flag, "true", "fail, or log and go on, when records are gone"),
    Option("maxOffsetsPerTrigger", _positive, None, "Kafka's name of maxRecordsPerTrigger",
           "readStream"),
    _ROWS,
    Option("maxBytesPerTrigger", _bytes, "1g", "most bytes in one micro-batch; 0: no bound",
           "readStream"),
    Option("minPartitions", _number, "0", "at least so many tasks, where the data allow it"),
    Option("splitBytes", _bytes, "32m", "about how many bytes one task reads"),
    Option("includeFields", _flag, "true", "a column with each record's fields"),
    Option("includeKeys", _flag, "false", "a column with all keys of each record"),
    Option("includeProperties", _flag, "false", "a column with each record's properties"),
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

_BY_KEY: Final = {option.name.lower(): option for option in OPTIONS}

_ELSEWHERE: Final[dict[str, str]] = {
    "kafka.bootstrap.servers": "endpoint",
    "host": "endpoint",
    "url": "endpoint",
    "uri": "endpoint",
    "broker": "endpoint",
    "server": "endpoint",
    "subscribe": "stream",
    "topic": "stream",
    "assign": "stream",
    "path": "stream",
    "subscribepattern": "pattern",
    "subject": "pattern",
    "filter": "pattern",
    "includeheaders": "includeFields",
    "username": "user",
    "startingoffset": "startingOffsets",
    "starttime": "startingTimestamp",
    "endtime": "endingTimestamp",
    "maxrowspertrigger": "maxRecordsPerTrigger",
    "fetchoffset.numretries": "fetchRetries",
    "kafkaconsumer.polltimeoutms": "fetchTimeoutMs",
}
"""What users of other sources type -> what it is called here."""


# --- all of them ---------------------------------------------------------------------------


def parse_options(raw: Mapping[str, str]) -> SourceOptions:
    """Check everything that can be checked without the broker.

    raw: as Spark gives them, keys in any case. Raises OptionError.
    """
    given: dict[str, str] = {}
    for key in raw:
        option = _BY_KEY.get(key.lower())
        if option is None:
            raise OptionError(key, _unknown(key))
        given[option.name] = raw[key]
    values: dict[str, Any] = {}
    for option in OPTIONS:
        text = given.get(option.name, option.default)
        try:
            values[option.name] = None if text is None else option.parse(text)
        except ValueError as error:
            raise OptionError(option.name, str(error)) from None
    endpoints = _either(given, values, "endpoint", "endpoints")
    if endpoints is None:
        raise OptionError(
            "endpoint", 'is missing; add .option("endpoint", "tcp://host:port") for the broker'
        )
    if not values["stream"]:
        raise OptionError("stream", 'is missing; add .option("stream", "name of the stream")')
    pattern = values["pattern"]
    return SourceOptions(
        endpoints=endpoints,
        stream=values["stream"],
        pattern=pattern,
        pattern_text="#" if pattern == ["all"] else to_text(pattern),
        starting=_either(given, values, "startingTimestamp", "startingOffsets"),
        starting_strategy=values["startingOffsetsByTimestampStrategy"],
        ending=_either(given, values, "endingTimestamp", "endingOffsets"),
        client_time=_window(values["clientTimeFrom"], values["clientTimeTo"]),
        fail_on_data_loss=values["failOnDataLoss"],
        rows_per_trigger=_either(given, values, _ROWS.name, "maxOffsetsPerTrigger") or 0,
        bytes_per_trigger=values["maxBytesPerTrigger"],
        min_partitions=values["minPartitions"],
        split_bytes=_at_least_a_mib(values["splitBytes"]),
        include_fields=values["includeFields"],
        include_keys=values["includeKeys"],
        include_properties=values["includeProperties"],
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
    elsewhere = _ELSEWHERE.get(key.lower())
    if elsewhere is None:
        close = difflib.get_close_matches(key.lower(), _BY_KEY, 1, 0.6)
        elsewhere = _BY_KEY[close[0]].name if close else None
    if elsewhere is not None:
        return f"there is no such option; did you mean '{elsewhere}'?"
    return f"there is no such option; known are {', '.join(option.name for option in OPTIONS)}"


def _either(given: Mapping[str, str], values: Mapping[str, Any], one: str, other: str) -> Any:
    """The value of whichever of two options was given."""
    if one in given and other in given:
        raise OptionError(one, f"says the same as '{other}'; give only one of them")
    return values[one] if one in given else values[other]


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
