"""Values as people type them, and as they read them: times, durations, sizes, positions.

Owns the text forms. The rules: a bare number where an offset may stand is an offset (@MILLISECONDS
is the time); a time without a zone is local; text that cannot be read is refused with an example.
The clock of a text's `now` comes in as an argument; ages are counted by the broker's, as times are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final

from malamute_py import units
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.health.words import size

TIMES: Final = "2026-01-31T10:00, now-1h or @1769853600000"
"""Examples of times, for an error."""
_FOR_EVER_MS: Final = 1 << 53
"""Bound of a time in milliseconds: a larger number is no time."""
_SENSIBLE_MS: Final = 100_000_000_000
"""Least number that is taken for a time, March 1973: a smaller one is a duration without its
unit."""
_broker_ahead_ms: ContextVar[int] = ContextVar("broker_ahead_ms", default=0)
"""Milliseconds by which the clock of the broker that the command talks to is before this one's."""


def now_ms() -> int:
    """Return the wall clock's time."""
    return time.time_ns() // 1_000_000


def broker_now_ms() -> int:
    """Return the time by the clock of the broker that go_by_broker() was told of; else now_ms()."""
    return now_ms() + _broker_ahead_ms.get()


def go_by_broker(clock_ms: int) -> None:
    """Have broker_now_ms() go by a broker's clock. clock_ms: its time now."""
    _broker_ahead_ms.set(clock_ms - now_ms())


def duration_ms(text: str) -> int:
    """Read 500ms, 10s, 5m, 2h, 7d, 1w, or several: 1h30m. Raises CommandFailed."""
    try:
        return round(units.duration_ms(text))
    except ValueError as error:
        raise CommandFailed(str(error), USAGE) from None


def size_bytes(text: str) -> int:
    """Read 4096, 64MiB, 1GiB, 2.5GB. Raises CommandFailed."""
    try:
        return units.size_bytes(text)
    except ValueError as error:
        raise CommandFailed(str(error), USAGE) from None


def time_ms(text: str, clock_ms: int | None = None) -> int:
    """Read a time: ISO 8601, now, now-1h, milliseconds since 1970, @milliseconds.

    clock_ms: the time that `now` is; None: the wall clock's. Raises CommandFailed: it is no time.
    """
    wanted = text.strip()
    if wanted.lower().startswith("now"):
        rest = wanted[3:].strip()
        clock = now_ms() if clock_ms is None else clock_ms
        if not rest:
            return clock
        if rest[0] in "+-":
            shift = duration_ms(rest[1:])
            return clock + (shift if rest[0] == "+" else -shift)
    digits = wanted.removeprefix("@")
    if digits.isascii() and digits.isdigit() and int(digits) < _FOR_EVER_MS:
        return int(digits)
    try:
        stamp = datetime.fromisoformat(wanted)
        return round((stamp if stamp.tzinfo else stamp.astimezone()).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise CommandFailed(f"{text!r} is not a time; write for instance {TIMES}", USAGE) from None


def later_ms(text: str) -> int:
    """Read a time, or a duration from now: 10m. Raises CommandFailed."""
    if units.begins_with_a_duration(text):
        return now_ms() + duration_ms(text)
    # A bare number, too small to be a time.
    if is_offset(text) and int(text) < _SENSIBLE_MS:
        raise CommandFailed(f"{text!r} has no unit: write a duration as 500ms, 10s or 10m", USAGE)
    return time_ms(text)


def is_offset(text: str) -> bool:
    """Whether the text is a bare number, which stands for an offset where a time may stand, too."""
    return text.isascii() and text.isdigit()


def pairs(texts: Iterable[str] | None, option: str) -> dict[str, str]:
    """Read NAME=VALUE pairs. option: the option that has them, for the error CommandFailed."""
    found = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            empty = f"; {name}= for an empty value" if name else ""
            raise CommandFailed(f"{option} {text!r}: write it as NAME=VALUE{empty}", USAGE)
        found[name] = value
    return found


def setting_pairs(texts: Iterable[str] | None) -> dict[str, str]:
    """Read the KEY=VALUE pairs of --set, of a broker's configuration. Raises CommandFailed."""
    found = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise CommandFailed(f"--set {text}: write it as KEY=VALUE", USAGE)
        found[key.strip()] = value
    return found


def typed(text: str) -> Any:
    """Read the value of a setting that has no unit: a number, true, false, or the text itself."""
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    try:
        return int(text)
    except ValueError:
        return text


# --- for people ------------------------------------------------------------------------


def time_text(at_ms: int) -> str:
    """Write a local time, to the millisecond; 0: a dash."""
    # The first 23 characters: the zone follows.
    return _local(at_ms).isoformat(" ", "milliseconds")[:23] if at_ms else "-"


@lru_cache(maxsize=1024)  # The records of a batch share their append time.
def iso_text(at_ms: int) -> str:
    """Write a time as UTC in ISO 8601, for programs."""
    try:
        stamp = _in_utc(at_ms)
    except (ValueError, OverflowError, OSError):
        return str(at_ms)
    return stamp.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _local(at_ms: int) -> datetime:
    """Return a time in the local zone; one that Python has no form for as that of 1970."""
    try:
        return _in_utc(at_ms).astimezone()
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, UTC)


def _in_utc(at_ms: int) -> datetime:
    # From the year 2112 on a float of seconds does not have each millisecond.
    return datetime.fromtimestamp(at_ms // 1000, UTC).replace(microsecond=at_ms % 1000 * 1000)


def size_text(count: int) -> str:
    """Write a size: 1.5 MiB."""
    return size(count)


def duration_text(span_ms: int, units_max: int = 3) -> str:
    """Write a duration by its largest units: 7 d, 1 h 30 m 5 s, 2.5 s."""
    if span_ms < 60_000:
        return f"{span_ms} ms" if span_ms < 1000 else f"{span_ms / 1000:.3g} s"
    hours, seconds = divmod(span_ms // 1000, 3600)
    parts = [(hours // 24, "d"), (hours % 24, "h"), (seconds // 60, "m"), (seconds % 60, "s")]
    return " ".join([f"{count} {unit}" for count, unit in parts if count][:units_max])


def age_text(span_ms: int) -> str:
    """Write an age, as in a column, by two units at most: 1 d 2 h. A negative one is 0 ms."""
    return duration_text(max(0, span_ms), 2)


def count_text(count: int, noun: str = "") -> str:
    """Write a count: 1,234 records; the noun's plural is made with s."""
    text = f"{count:,}"
    return f"{text} {noun}{'' if count == 1 else 's'}" if noun else text


def within(facts: Mapping[str, Any], counts: Sequence[int], percent: int) -> float | None:
    """Return the bound in seconds below which so many of a hundred lie; None: it has none.

    facts: a histogram of the broker. counts: how many lie in each of its buckets, of which the
    last one has no bound.
    """
    total = sum(counts)
    for bound_s, reached in zip(facts["bounds_s"], accumulate(counts), strict=False):
        if reached and 100 * reached >= percent * total:
            return float(bound_s)
    return None


def pattern_text(pattern: list[Any]) -> str:
    """Return a pattern as it is typed; the list itself where no text stands for it.

    pattern: in the form of the protocol: its kind, then what it is made of.
    """
    match pattern:
        case [] | ["all"]:
            return "#"
        case ["topic", str(text)]:
            return text
        case ["prefix" | "regex" as kind, str(text)]:
            return f"{kind}:{text}"
        case ["fields", str(mode), list(criteria)]:
            listed = ",".join("=".join(map(str, each)) for each in criteria)
            return f"{'any' if mode == 'any' else 'fields'}:{listed}"
        case _:
            return str(pattern)
