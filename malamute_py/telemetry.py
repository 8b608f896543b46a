"""Log lines of the daemon.

Owns the set-up of the log and how often a line is written. The rule: nothing here is global, so
that several brokers fit in one process and an embedded one leaves the program's own logging alone;
a message is never logged, it is counted. Source: docs/design.md, Safety.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol, TextIO

import structlog

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class Log(Protocol):
    """The part of a structlog logger that the shell uses."""

    def debug(self, event: str, **facts: Any) -> Any: ...  # noqa: D102
    def info(self, event: str, **facts: Any) -> Any: ...  # noqa: D102
    def warning(self, event: str, **facts: Any) -> Any: ...  # noqa: D102
    def error(self, event: str, **facts: Any) -> Any: ...  # noqa: D102
    def critical(self, event: str, **facts: Any) -> Any: ...  # noqa: D102


def open_log(level: str = "info", form: str = "auto", stream: TextIO | None = None) -> Log:
    """Return a logger that writes to `stream` (standard error when None).

    form: `console` for people, `json` for machines, `auto`: console on a terminal.
    """
    out = sys.stderr if stream is None else stream
    console = form == "console" or (form == "auto" and out.isatty())
    render: Any
    if console:
        # Columns of the event's name, by position: versions of structlog name it otherwise.
        render = structlog.dev.ConsoleRenderer(28, colors=out.isatty())
    else:
        render = structlog.processors.JSONRenderer(sort_keys=False, default=str)
    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not console:  # a console renders tracebacks itself
        processors.append(structlog.processors.dict_tracebacks)
    log: Log = structlog.wrap_logger(
        structlog.PrintLogger(out),
        processors=[*processors, render],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
    )
    return log


class Limiter:
    """Lets each event name through a few times in a period, and counts the rest.

    A hostile peer can cause an event with each message; a line costs 7 us, a full log a disk.
    """

    def __init__(self, lines_max: int = 20, period_ms: int = 10_000) -> None:
        """lines_max: lines of one name that may be written in period_ms."""
        self._lines_max = lines_max
        self._period_ms = period_ms
        self._since_ms = 0
        self._seen: dict[str, int] = {}
        """Name -> lines in this period, those that were withheld included."""

    def allows(self, name: str, now_ms: int) -> bool:
        """Whether a line of this name may be written now."""
        if now_ms - self._since_ms >= self._period_ms:
            self._since_ms = now_ms
            self._seen.clear()
        count = self._seen.get(name, 0) + 1
        self._seen[name] = count
        return count <= self._lines_max

    def suppressed(self, now_ms: int) -> dict[str, int]:
        """Return names and counts of what was withheld in a period that is over; told once."""
        if now_ms - self._since_ms < self._period_ms or not self._seen:
            return {}
        most = self._lines_max
        held = {name: seen - most for name, seen in self._seen.items() if seen > most}
        self._since_ms = now_ms
        self._seen.clear()
        return held


class Refusals:
    """Rings that refuse appends: logged when a refusal begins, changes and ends, else counted.

    A full disk refuses as often as its producers try; a line for each would say nothing new.
    """

    def __init__(self, period_ms: int = 10_000) -> None:
        """period_ms: how often the refusals of rings that still refuse are reported."""
        self._period_ms = period_ms
        self._since_ms = 0
        """Beginning of the period."""
        self._codes: dict[str, str] = {}
        """Ring -> why it refuses now."""
        self._counts: dict[str, int] = {}
        """Ring -> its further refusals in this period."""
        self._last_ms: dict[str, int] = {}
        """Ring -> time of its last refusal."""

    def begins(self, ring: str, code: str, now_ms: int) -> bool:
        """Count a refusal; True when the ring did not refuse for this reason before."""
        self._last_ms[ring] = now_ms
        if self._codes.get(ring) == code:
            self._counts[ring] += 1
            return False
        self._codes[ring] = code
        self._counts[ring] = 0
        return True

    def ends(self, ring: str) -> tuple[str, int] | None:
        """Note an append that was taken, or a ring that is gone.

        Returns code and count of the refusals that end by this; None: the ring did not refuse.
        """
        if not self._codes:
            return None
        code = self._codes.pop(ring, None)
        if code is None:
            return None
        del self._last_ms[ring]
        return code, self._counts.pop(ring)

    def last(self, now_ms: int) -> dict[str, dict[str, Any]]:
        """Return code and age of the last refusal of each ring that refuses, for BROKER_INFO."""
        return {
            ring: {"code": code, "ms_ago": now_ms - self._last_ms.get(ring, now_ms)}
            for ring, code in self._codes.copy().items()
        }

    def counts(self, now_ms: int) -> list[tuple[str, str, int]]:
        """Return (ring, code, count) of rings that still refuse, once a period, for the log."""
        if now_ms - self._since_ms < self._period_ms:
            return []
        self._since_ms = now_ms
        found = [(ring, self._codes[ring], n) for ring, n in self._counts.items() if n]
        self._counts = dict.fromkeys(self._counts, 0)
        return found
