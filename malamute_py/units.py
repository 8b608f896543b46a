"""Sizes and durations as people write them: 64MiB, 2.5GB, 500ms, 1h30m.

Owns the units and what each is worth. The rule: a text that cannot be read raises ValueError with
an example, and never becomes another number.
"""

from __future__ import annotations

import re
from typing import Final

_DURATION_MS: Final = {
    "us": 0.001, "ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000,
    "w": 604_800_000,
}  # fmt: skip
_SIZE: Final = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gib": 1 << 30, "gb": 10**9,
    "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip
_NUMBER: Final = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*([a-zA-Z]*)")
"""A number of so few digits that no float of it is infinite, and its unit."""


def duration_ms(text: str) -> float:
    """Read 500ms, 10s, 5m, 2h, 7d, 1w, or several: 1h30m. Raises ValueError.

    Each number needs a unit.
    """
    total = 0.0
    position = 0  # What lies before it was read: numbers follow each other without a gap.
    for match in _NUMBER.finditer(text.strip()):
        unit = _DURATION_MS.get(match[2].lower())
        if match.start() != position or unit is None:
            break
        total += float(match[1]) * unit
        position = match.end()
    if not text.strip() or position != len(text.strip()):
        raise ValueError(
            f"{text!r} is not a duration; write a number and its unit: 500ms, 10s, 5m, 2h, 7d"
        )
    return total


def size_bytes(text: str) -> int:
    """Read 4096, 64MiB, 1GiB, 2.5GB. Raises ValueError."""
    match = _NUMBER.fullmatch(text.strip())
    factor = _SIZE.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write for instance 4096, 64MiB or 1GiB")
    # A large whole number has no float of its own value.
    return int(match[1]) * factor if match[1].isdecimal() else round(float(match[1]) * factor)


def begins_with_a_duration(text: str) -> bool:
    """Whether a text is a duration rather than a time: it begins with a number and its unit."""
    match = _NUMBER.match(text.strip())
    return match is not None and match[2].lower() in _DURATION_MS


def in_unit_of(name: str, text: str) -> int | None:
    """Return the value of a setting that was typed, in the unit that its name ends in.

    A bare number has that unit already. None: the name has no unit, and the text is not read.
    name: as ring_bytes, publish_bytes_s, lease_ms or turn_us. Raises ValueError.
    """
    if "bytes" in name:
        return size_bytes(text)
    if not name.endswith(("_ms", "_us")):
        return None
    if text.strip().isdecimal():
        return int(text)
    value = duration_ms(text) * (1_000 if name.endswith("_us") else 1)
    if value != int(value):
        raise ValueError(f"{text!r} is no whole number of {name[-2:]}")
    return int(value)
