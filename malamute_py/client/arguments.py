"""Arguments of callers, checked in the call that was made.

Owns the types and bounds of arguments, and the words in which a wrong one is refused. The rule:
whatever a caller got wrong is raised as LocalProtocolError before anything was queued: `too_large`
for what is over a limit, `bad_batch` for what makes a record, `bad_start` for a place in a stream,
else `bad_setting`; the reason names the argument, shows its value and says what is allowed. A
right value costs a comparison. A function takes the argument's name and value, and returns the
value, checked and in the form that the rest of the client takes.
Source: SPEC.md, sections 3, 11 and 12.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import Any, Final, get_origin, get_type_hints

import numpy as np

from malamute_protocol.address import NAME_BYTES_MAX
from malamute_protocol.codec import CODECS
from malamute_protocol.commands import Command
from malamute_protocol.errors import LocalProtocolError
from malamute_protocol.framing import check_command
from malamute_protocol.limits import (
    DEFAULT_LIMITS,
    KEY_BYTES_MAX,
    PRIORITY_MAX,
    PRIORITY_MIN,
    REASON_BYTES_MAX,
    TIME_MAX,
)

_SHOWN_MAX: Final = 60
"""Characters of a wrong value that its refusal shows."""
_SHORT: Final = 3
"""Characters of a name up to which another one is near only if it differs by case or a sign."""
_NEAR: Final = 0.8
"""Likeness, as difflib has it, from which on a name is taken for a misspelling of another."""
NAMES: Final[set[str]] = set()
"""Names that can be sent: where many calls name the same few places, each is looked at once."""
_NAMES_MAX: Final = 1_024
_INT64: Final = 1 << 63
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_SENSIBLE_MS: Final = 100_000_000_000
"""March 1973: more than any duration in milliseconds, and than today in seconds since 1970."""
_TIMES: Final = "a time: milliseconds since 1970 as an integer, or a datetime"
_FOUND: Final = re.compile(
    r"\w+: (?:(?P<message>Expected `.*) - at `(?P<name>\w+?)(?P<inner>[\[.].*)?`"
    r"|(?P<field>\w+)=.*)",
    re.DOTALL,
)
"""A field that cannot be sent, or that a peer would not read, after its command's name."""
_EXPECTED: Final = re.compile(
    r"Expected `(?P<type>\w+)(?: \| null)?`(?P<bound> of length .*?| [<>].*?)?"
    r"(?:, got `(?P<got>\w+)`)?$"
)
_WORDS: Final = {
    "str": "a str", "int": "an integer", "float": "a float", "bytes": "bytes", "array": "a list",
    "object": "a mapping by str", "bool": "True or False", "null": "None",
}  # fmt: skip
"""Types of the wire as callers know them."""
_SORTS: Final = {
    str: "a str", int: "an integer", bytes: "bytes", bool: "True or False", list: "a list",
    tuple: "a list", dict: "a mapping by str",
}  # fmt: skip
_SCALARS: Final = (bool, int, float, str, bytes, type(None))


def wrong(name: str, value: Any, allowed: str, code: str = "bad_setting") -> LocalProtocolError:
    """Return the error for an argument: its name, its value, and what is allowed instead."""
    try:
        shown = repr(value)
    except Exception:  # noqa: BLE001 - a value may be nested too deep, and its repr is the caller's
        shown = f"({type(value).__name__} that cannot be shown)"
    if len(shown) > _SHOWN_MAX:
        shown = f"{shown[:_SHOWN_MAX]}..."
    return LocalProtocolError(code, f"{name}={shown}: allowed is {allowed}")


def integer(
    name: str, value: Any, least: int, most: int = _INT64 - 1, code: str = "bad_setting"
) -> int:
    """A whole number in [least, most], of any type that has __index__ but bool.

    Raises LocalProtocolError, `bad_setting` or as `code` says.
    """
    if type(value) is int and least <= value <= most:
        return value
    allowed = f"an integer from {least} to {most}"
    if isinstance(value, bool):
        raise wrong(name, value, allowed, code)
    try:
        number = operator.index(value)
    except TypeError:
        raise wrong(name, value, f"{allowed}, not a {type(value).__name__}", code) from None
    if not least <= number <= most:
        raise wrong(name, value, allowed, code)
    return number


def text(name: str, value: Any, most: int, code: str = "bad_setting") -> str:
    """A string of at most so many bytes as UTF-8. Raises LocalProtocolError."""
    if not isinstance(value, str):
        raise wrong(name, value, f"a str, not a {type(value).__name__}", code)
    # An ASCII string, which most are, has as many bytes as characters.
    size = len(value)
    if not value.isascii():
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise wrong(name, value, "text that UTF-8 can express", code) from None
    if size > most:
        raise wrong(name, value, f"at most {most} bytes, not {size}", "too_large")
    return value


def name_of(name: str, value: Any) -> None:
    """Check the name of a stream, mailbox or service, as far as it decides if it can be sent.

    name: of the argument. Which characters a name may have the broker says, in its answer to the
    command. A good one is remembered in NAMES, by which callers pass over the next check. Raises
    LocalProtocolError.
    """
    text(name, value, NAME_BYTES_MAX, "bad_name")
    if len(NAMES) >= _NAMES_MAX:
        NAMES.clear()
    NAMES.add(value)


def key_of(value: Any, name: str = "key") -> bytes:
    """A sender's name for a message, request, step or transaction. Raises LocalProtocolError."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise wrong(name, value, f"bytes, at most {KEY_BYTES_MAX}, not a {type(value).__name__}")
    key = bytes(value)
    if len(key) > KEY_BYTES_MAX:
        raise wrong(name, value, f"at most {KEY_BYTES_MAX} bytes, not {len(key)}", "too_large")
    return key


def priority_of(value: Any) -> int:
    """A message's priority. Raises LocalProtocolError."""
    return integer("priority", value, PRIORITY_MIN, PRIORITY_MAX)


def time_of(
    name: str, value: Any, least: int = 0, most: int = TIME_MAX, code: str = "bad_setting"
) -> int:
    """Milliseconds since 1970 of a time: an integer or a datetime. Raises LocalProtocolError.

    A datetime without a zone is local time. least, most: bounds of the milliseconds. code: of the
    error.
    """
    if isinstance(value, datetime):
        try:
            zoned = value if value.tzinfo is not None else value.astimezone()
            # In integers: a float of seconds, as timestamp() gives, does not have each millisecond.
            value = (zoned.astimezone(UTC) - _EPOCH) // _MILLISECOND
        except (ValueError, OverflowError) as error:
            allowed = f"milliseconds since 1970, or a datetime whose time in UTC exists: {error}"
            raise wrong(name, value, allowed, code) from error
    elif isinstance(value, float):
        allowed = "whole milliseconds since 1970, which int(...) makes of it, or a datetime"
        raise wrong(name, value, allowed, code)
    elif isinstance(value, bool) or not hasattr(value, "__index__"):
        raise wrong(name, value, f"{_TIMES}, not a {type(value).__name__}", code)
    return integer(name, value, least, most, code)


def later_of(name: str, value: Any, code: str = "bad_setting") -> int:
    """Milliseconds since 1970 of a time to come; 0: none. Raises LocalProtocolError.

    A number of the first years is a duration, or seconds, and would be over long ago.
    """
    at_ms = time_of(name, value, code=code)
    if 0 < at_ms < _SENSIBLE_MS:
        raise wrong(name, value, f"{_TIMES}; for a duration add it to the time now", code)
    return at_ms


def column_time(name: str, value: Any) -> int:
    """A time in a column of a batch, which has 64 bits, also before 1970.

    The least of 64 bits is left out: there it stands for no time. Raises LocalProtocolError.
    """
    return time_of(name, value, 1 - _INT64, _INT64 - 1, "bad_batch")


def duration(name: str, value: Any, least: int = 0) -> int:
    """A duration in milliseconds. Raises LocalProtocolError."""
    return integer(name, value, least, TIME_MAX)


def reason_of(value: Any) -> str:
    """Words for a person, cut to what a command may carry. Raises LocalProtocolError."""
    if not isinstance(value, str):
        raise wrong("reason", value, f"a str, not a {type(value).__name__}")
    # What UTF-8 cannot express came from a file name or the like: it must not cost the reason. It
    # becomes longer by that, and so is cut once more.
    return value[:REASON_BYTES_MAX].encode(errors="backslashreplace").decode()[:REASON_BYTES_MAX]


def one_of(name: str, value: Any, known: Sequence[str], code: str = "bad_setting") -> None:
    """Check that a value is one of a few words. Raises LocalProtocolError by `code`."""
    if not isinstance(value, str) or value not in known:
        raise wrong(name, value, f"one of {', '.join(map(repr, known))}", code)


def codec_of(value: Any) -> int:
    """The number of a codec, from its name; None is no compression. Raises LocalProtocolError."""
    if value is None:
        return 0
    one_of("codec", value, CODECS, "bad_batch")
    return CODECS.index(value)


def truth(name: str, value: Any) -> bool:
    """A bool. Raises LocalProtocolError."""
    if type(value) is not bool:
        raise wrong(name, value, "True or False")
    return value


def callback_of(name: str, value: Any) -> None:
    """Check that a value can be called, or is None. Raises LocalProtocolError `bad_setting`."""
    if value is not None and not callable(value):
        raise wrong(name, value, f"a function or None, not a {type(value).__name__}")


def subject_of(value: Any) -> Any:
    """A subject, or a sequence of the subject and further keys. Raises LocalProtocolError.

    The code is `bad_batch` for what is none, `too_large` for too many keys or a long one.
    """
    limits = DEFAULT_LIMITS
    if isinstance(value, str):
        text("subject", value, limits.subject_bytes_max, "bad_batch")
        return value
    if isinstance(value, bytes | bytearray | memoryview) or not isinstance(value, Sequence):
        kind = type(value).__name__
        raise wrong("subject", value, f"a str, or a sequence of several, not a {kind}", "bad_batch")
    if not 1 <= len(value) <= limits.keys_max:
        allowed = f"1 to {limits.keys_max} keys, not {len(value)}"
        raise wrong("subject", value, allowed, "too_large" if value else "bad_batch")
    for key in value:
        text("subject", key, limits.subject_bytes_max, "bad_batch")
    return value


def fields_of(value: Any) -> Mapping[str, str]:
    """Field values by name. Raises LocalProtocolError."""
    if not isinstance(value, Mapping):
        raise wrong(
            "fields", value, f"a mapping of str to str, not a {type(value).__name__}", "bad_batch"
        )
    limits = DEFAULT_LIMITS
    if len(value) > limits.fields_max:
        raise wrong("fields", value, f"at most {limits.fields_max}, not {len(value)}", "too_large")
    for name, entry in value.items():
        text("name of a field", name, limits.field_name_bytes_max, "bad_batch")
        text(f"fields[{name!r}]", entry, limits.field_value_bytes_max, "bad_batch")
    return value


def properties_of(value: Any) -> Mapping[str, Any]:
    """Properties of a record: names and scalars. Raises LocalProtocolError."""
    if not isinstance(value, Mapping):
        raise wrong(
            "properties", value, f"a mapping by str, not a {type(value).__name__}", "bad_batch"
        )
    for name, entry in value.items():
        if not isinstance(name, str):
            raise wrong(
                "name of a property", name, f"a str, not a {type(name).__name__}", "bad_batch"
            )
        if not isinstance(entry, _SCALARS):
            kind = type(entry).__name__
            raise wrong(
                f"properties[{name!r}]",
                entry,
                f"None, bool, int, float, str or bytes, not {kind}",
                "bad_batch",
            )
    return value


def _is_sequence(value: Any) -> bool:
    """Whether a value has elements in an order; text and bytes are one value."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return False
    try:
        len(value)
    except TypeError:
        return False  # An array of numpy without a dimension has a length that raises.
    return hasattr(value, "__getitem__")


def several(name: str, value: Any) -> Any:
    """A sequence of bodies that can be cut. Raises LocalProtocolError `bad_batch`: it is none."""
    if type(value) is list:
        return value
    if not _is_sequence(value):
        raise wrong(name, value, f"a sequence of bytes, not a {type(value).__name__}", "bad_batch")
    return _by_place(value)


def _by_place(value: Any) -> Any:
    """Return a sequence whose items and slices go by their positions, from 0.

    A deque has no slices, and a Series of pandas has its items by its index.
    """
    return value if isinstance(value, list | tuple | np.ndarray) else list(value)


def column_of(name: str, value: Any, count: int) -> Sequence[Any]:
    """A sequence of one value a record, which can be cut. Raises LocalProtocolError `bad_batch`."""
    if not _is_sequence(value):
        allowed = f"a sequence of one value a record, not a {type(value).__name__}"
        raise wrong(name, value, allowed, "bad_batch")
    if len(value) != count:
        raise LocalProtocolError("bad_batch", f"{len(value)} values in {name} for {count} records")
    return _by_place(value)  # type: ignore[no-any-return]


def pattern_of(value: Any) -> Any:
    """A pattern as topic() and the like return it, in its wire form. Raises LocalProtocolError."""
    if isinstance(value, bytes) or not isinstance(value, Sequence):
        kind = type(value).__name__
        raise wrong("pattern", value, f"text or what makes a pattern, not a {kind}")
    return value


def settings_of(settings: Any, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Settings from a mapping, and `more` that were given by name. Raises LocalProtocolError."""
    if settings is None:
        return dict(more or {})
    if not isinstance(settings, Mapping):
        raise wrong("settings", settings, f"a mapping by str, not a {type(settings).__name__}")
    for name in settings:
        if not isinstance(name, str):
            raise wrong("name of a setting", name, f"a str, not a {type(name).__name__}")
    return {**settings, **(more or {})}


def beginning(prefix: Any) -> str:
    """The name in a command that asks for all whose names begin so. Raises LocalProtocolError."""
    return f"{text('prefix', prefix, NAME_BYTES_MAX)}*"


def numbers_of_requests(value: Any) -> list[int]:
    """Numbers of requests. Raises LocalProtocolError."""
    numbers = None
    if not isinstance(value, str | bytes | memoryview | Mapping):
        with contextlib.suppress(TypeError):  # An array of numpy without a dimension, for one.
            numbers = list(value)
    if numbers is None:
        raise wrong("numbers", value, "several integers")
    return [integer("numbers", number, 0) for number in numbers]


def ranges_of_messages(value: Any) -> list[tuple[int, int]]:
    """Half-open ranges of numbers of messages. Raises LocalProtocolError."""
    allowed = "several half-open ranges of numbers: (first, end)"
    if not _is_sequence(value):
        raise wrong("ranges", value, allowed)
    found: list[tuple[int, int]] = []
    for each in value:
        if not _is_sequence(each) or len(each) != 2:
            raise wrong("ranges", value, allowed)
        first, end = each
        first = integer("first of ranges", first, 0)
        found.append((first, integer("end of ranges", end, first)))
    return found


def checked(command: Command) -> Command:
    """The command as the broker will read it, numbers of other types made plain ones.

    Raises LocalProtocolError, which names the argument: it could not be sent, or would be refused.
    """
    try:
        return check_command(command)
    except LocalProtocolError as error:
        raise _in_words(command, error) from error


def _in_words(command: Command, error: LocalProtocolError) -> LocalProtocolError:
    """Return the fault that the encoder or decoder of a command found, in the words of wrong().

    By the words of its reason alone is it known which argument is wrong: `Expected ... at NAME` of
    a field that the broker would not read, `NAME=...` of one that cannot be encoded.
    """
    found = _FOUND.fullmatch(error.reason)
    if found is None:
        code = "bad_setting" if error.code == "malformed" else error.code
        return LocalProtocolError(code, error.reason)
    # inner: the place within the field, as `[0]` of a list.
    name, inner = found["field"] or found["name"], found["inner"] or ""
    # What is `from` on the wire is the field `from_`: a keyword of Python cannot name one.
    field = name if name in command.__struct_fields__ else f"{name}_"
    value = getattr(command, field)
    # A compiled module sets no cause.
    cause = error.__cause__ or error.__context__
    expected = _EXPECTED.match(found["message"] or "")
    if expected is not None:  # the decoder said what it wants
        allowed = _WORDS.get(expected["type"], expected["type"]) + (expected["bound"] or "")
        if expected["got"]:
            got = _WORDS.get(expected["got"], expected["got"])
            # Of a value within the field only the decoder's word for its type is known.
            allowed += f", not {got}" if inner else f", not a {type(value).__name__}"
    elif isinstance(cause, UnicodeEncodeError):
        allowed = "text that UTF-8 can express"
    else:  # the encoder could not: by the field's type it is found why
        hint = get_type_hints(type(command))[field]
        sort = get_origin(hint) or hint
        allowed = _SORTS.get(sort, "what MessagePack has")
        if sort is int and isinstance(value, int):
            allowed += " of at most 64 bits"
        elif sort in _SORTS and isinstance(value, sort):
            allowed += f" of what MessagePack has ({cause})"
        else:
            allowed += f", not a {type(value).__name__}"
            allowed += f" ({cause})" if sort not in _SORTS else ""
    code = "bad_setting" if error.code == "malformed" else error.code
    return wrong(name + inner, value, allowed, code)


def no_near_column(subject: str, columns: Sequence[str]) -> None:
    """Check that `subject` of publish_table() is no misspelt name of a column of the table.

    It is the name of a column, or else one subject for all rows: a misspelling would publish all
    rows under the wrong subject. Raises LocalProtocolError `bad_batch`: a column is called nearly
    so.
    """
    if not subject or subject in columns:
        return
    plain = {_plain(name): name for name in columns}
    near = plain.get(_plain(subject))
    if near is None and len(subject) > _SHORT:
        near = next(iter(get_close_matches(subject, columns, n=1, cutoff=_NEAR)), None)
    if near is not None:
        raise LocalProtocolError(
            "bad_batch",
            f"subject: the table has no column {subject!r}, but {near!r}; if {subject!r} is the one"
            " subject of all rows, rename the column",
        )


def _plain(name: str) -> str:
    """Return a name without what is easily mistaken: case, and signs between words."""
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")
