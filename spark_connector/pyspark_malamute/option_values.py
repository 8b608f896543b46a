"""Tables of options and single values, as the source and the sink have them.

Owns how the text of one option becomes a value, and what is told where it cannot. The rule: an
option is refused by its name before anything connects; nothing is ignored.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from pyspark_malamute.errors import OptionError

_SCHEMES: Final = ("tcp://", "ipc://")
_CURVE_KEY_CHARACTERS: Final = 40
_SUFFIXES: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DURATION: Final = re.compile(r"(\d+)\s*(ms|s|m|h)")
_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_BYTES: Final = re.compile(r"(\d+)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


class Option(NamedTuple):
    """One row of a table of options."""

    name: str
    parse: Callable[[str], Any]
    default: str | None
    """Default value as a user would write it; None: there is none."""
    meaning: str
    only: str = ""
    """"read" or "readStream" when it means nothing to the other."""
    aliases: tuple[str, ...] = ()
    """Other names of the option: Kafka's, where they differ from ours."""


# --- parsers of single options: the text as the user wrote it becomes the option's value ----------


def as_text(value: str) -> str:
    """Text without the blanks around it."""
    return value.strip()


def as_flag(value: str) -> bool:
    """True or false. Raises ValueError, as each as_...() here does."""
    match value.strip().lower():
        case "true":
            return True
        case "false":
            return False
        case _:
            raise ValueError(f"{value!r} is neither true nor false")


def as_number(value: str) -> int:
    """A whole number from 0 on."""
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a whole number") from None
    if number < 0:
        raise ValueError(f"{number} is negative; give 0 or more")
    return number


def as_positive(value: str) -> int:
    """A whole number from 1 on."""
    number = as_number(value)
    if number == 0:
        raise ValueError("0 cannot work; give 1 or more")
    return number


def as_size(value: str) -> int:
    """Bytes, from a number with or without k, m, g or t."""
    found = _BYTES.fullmatch(value.strip())
    if found is None:
        raise ValueError(f"{value!r} is not a size; write bytes, or 32m, 1g")
    return int(found[1]) * _SUFFIXES[found[2].lower()]


def as_duration(value: str) -> int:
    """Milliseconds, from 500ms, 5s, 15m or 1h."""
    found = _DURATION.fullmatch(value.strip().lower())
    if found is None:
        raise ValueError(f"{value!r} is not a duration; write 500ms, 5s, 15m or 1h")
    return int(found[1]) * _UNITS_MS[found[2]]


def as_names(value: str) -> tuple[str, ...]:
    """Names between commas, each once."""
    names = tuple(map(str.strip, value.split(",")))
    if not all(names):
        raise ValueError(f"{value!r} has an empty name; separate names by single commas")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is named twice")
    return names


def as_time(value: str) -> int:
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


def as_endpoints(value: str) -> tuple[str, ...]:
    """Addresses of a broker, between commas."""
    endpoints = tuple(filter(None, map(str.strip, value.split(","))))
    if not endpoints:
        raise ValueError("is empty; give the broker's address, such as tcp://127.0.0.1:9999")
    for endpoint in endpoints:
        if endpoint.startswith("inproc://"):
            raise ValueError(f"{endpoint!r} is no address for Spark: its tasks are other processes")
        if not endpoint.startswith(_SCHEMES):
            raise ValueError(f"{endpoint!r} does not begin with {' or '.join(_SCHEMES)}")
    return endpoints


def as_curve_key(value: str) -> str:
    """A CURVE key in its text form."""
    key = value.strip()
    if len(key) != _CURVE_KEY_CHARACTERS:
        raise ValueError(f"a CURVE key has {_CURVE_KEY_CHARACTERS} characters, this has {len(key)}")
    return key


def one_of(*known: str) -> Callable[[str], str]:
    """Make the parser of an option that has one of a few words."""

    def parse(value: str) -> str:
        """Return the word that the text is, in lower case. Raises ValueError: it is none."""
        text = value.strip().lower()
        if text not in known:
            raise ValueError(f"{value!r} is none of {', '.join(known)}")
        return text

    return parse


class LinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a source or a sink that a link needs."""

    side: ClassVar[str]
    """The side of the connector, for errors and the log."""
    endpoints: tuple[str, ...]
    stream: str
    pattern_text: str = ""
    """The pattern as its user wrote it; empty: the broker is sent none."""
    user: str
    password: str
    curve_keys: tuple[str, str, str]
    """Server, public and secret key; all empty: no CURVE."""
    identity: str = ""
    """The identity to ask for; empty: a credential has its own."""
    connect_timeout_ms: int
    request_timeout_ms: int
    broker_outage_ms: int

    @property
    def permission(self) -> str:
        """The permission that a link needs, for the error of one that lacks it."""
        raise NotImplementedError


class OptionTable:
    """The options that the source has, or the sink, by all of their names."""

    def __init__(self, side: str, rows: Iterable[Option], elsewhere: Mapping[str, str]) -> None:
        """side: "source" or "sink". elsewhere: lower-case name that others use -> name here."""
        self.side = side
        self.rows = tuple(rows)
        self.by_key = {
            name.lower(): option for option in self.rows for name in (option.name, *option.aliases)
        }
        self._elsewhere = elsewhere

    def read(self, raw: Mapping[str, str]) -> Given:
        """The options of a user; raw: as Spark gives them, keys in any case. Raises OptionError."""
        # By the names of the table: texts of the options, and their names as the user wrote them.
        given: dict[str, str] = {}
        keys: dict[str, str] = {}
        for key in raw:
            option = self.by_key.get(key.lower())
            if option is None:
                raise self.error(key, self._unknown_option_text(key))
            if option.name in given:
                raise self.error(
                    key, f"says the same as '{keys[option.name]}'; give only one of them"
                )
            given[option.name] = raw[key]
            keys[option.name] = key
        values: dict[str, Any] = {}
        for option in self.rows:
            text = given.get(option.name, option.default)
            try:
                values[option.name] = None if text is None else option.parse(text)
            except ValueError as error:
                raise self.error(keys.get(option.name, option.name), str(error)) from None
        if values["endpoint"] is None:
            raise self.error(
                "endpoint", 'is missing; add .option("endpoint", "tcp://host:port") for the broker'
            )
        return Given(given, keys, values)

    def error(self, option: str, why: str) -> OptionError:
        """Make the error that names an option."""
        return OptionError(option, why, self.side)

    def _unknown_option_text(self, key: str) -> str:
        """Return the error text for an option that does not exist, with the likely one."""
        typed = key.lower()
        meant = self._elsewhere.get(typed)
        if meant is None:
            close = difflib.get_close_matches(typed, self.by_key, n=5, cutoff=0.6)
            names = (self.by_key[name].name for name in close if not _opposite(typed, name))
            meant = next(names, None)
        if meant is not None:
            return f"there is no such option; did you mean '{meant}'?"
        known = ", ".join(option.name for option in self.rows)
        return f"there is no such option; known are {known}"

    def linking(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of LinkOptions that source and sink both have, from their options.

        values: as of Given. Raises as credentials().
        """
        return {
            "endpoints": values["endpoint"],
            "user": values["user"],
            "password": values["password"],
            "curve_keys": self.credentials(values),
            "connect_timeout_ms": values["connectTimeoutMs"],
            "request_timeout_ms": values["requestTimeoutMs"],
            "broker_outage_ms": values["brokerOutageMs"],
        }

    def credentials(self, values: Mapping[str, Any]) -> tuple[str, str, str]:
        """Return CURVE's keys, all empty without. Raises OptionError: half a credential, or two.

        values: as of Given.
        """
        names = ("curveServerKey", "curvePublicKey", "curveSecretKey")
        missing = [name for name in names if not values[name]]
        if values["password"] and not values["user"]:
            raise self.error("user", "is missing beside password")
        if len(missing) == len(names):
            return ("", "", "")
        if missing:
            raise self.error(missing[0], f"is missing; CURVE needs all of {', '.join(names)}")
        if values["user"]:
            raise self.error(
                "user", "and CURVE keys exclude each other; give one kind of credential"
            )
        return values["curveServerKey"], values["curvePublicKey"], values["curveSecretKey"]


class Given(NamedTuple):
    """The options of a user, by their names in the table."""

    texts: Mapping[str, str]
    """Texts of those that were given."""
    keys: Mapping[str, str]
    """Names as the user wrote them."""
    values: Mapping[str, Any]
    """Values of all options, defaults included."""


_OPPOSITES: Final = (
    ("min", "max"), ("starting", "ending"), ("from", "to"), ("connect", "request"),
)  # fmt: skip
"""Words that are never a misspelling of each other."""


def _opposite(typed: str, name: str) -> bool:
    """Whether names differ by opposite words, so that "did you mean" offers no max for a min."""
    return any(
        (one in typed and other in name and other not in typed)
        or (other in typed and one in name and one not in typed)
        for one, other in _OPPOSITES
    )
