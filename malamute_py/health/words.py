"""Figures as a person reads them: sizes, counts, spans of time.

Owns the text forms that the sentences of health and the pages of the console share.
"""

from __future__ import annotations

from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_SPANS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def size(count: float | None) -> str:
    """Return bytes with a unit; a dash for None, which stands for a figure that is not known."""
    if count is None:
        return "–"
    amount = float(count)
    for unit in _UNITS[:-1]:
        if abs(amount) < 1_024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1_024
    return f"{amount:.1f} {_UNITS[-1]}"


def count(number: float | None) -> str:
    """Return a number with its thousands apart."""
    return "–" if number is None else f"{number:,.0f}"


def many(number: float, noun: str) -> str:
    """Return a number of things: 1 record, 2 records."""
    return f"{count(number)} {noun if number == 1 else noun + 's'}"


def span(seconds: float) -> str:
    """Return a duration by its two largest units: 3 d 4 h."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for worth, unit in _SPANS:
        amount, left = divmod(left, worth)
        if amount or (unit == "s" and not parts):
            parts.append(f"{amount} {unit}")
    return " ".join(parts[:2])


def age(at_ms: float, now_ms: float) -> str:
    """Return how long ago a time was; a dash for 0, which stands for never."""
    return span((now_ms - at_ms) / 1_000) if at_ms else "–"
