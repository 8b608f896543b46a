"""Values as a person reads and types them on the pages: times, positions, text of strangers.

Owns the text forms. The rules: times are UTC, since the browser's zone is not known here; text that
clients sent is shown with control characters and marks of direction as escapes, so that it cannot
pose as something else; what cannot be read is refused with an example.
"""

from __future__ import annotations

import re
import unicodedata
from datetime import UTC, datetime
from typing import Any, Final

from malamute_protocol.errors import MalamuteError
from malamute_py.client.position import AtTime, StartPoint

TEXT_BYTES_MAX: Final = 2_000
"""Bytes of one body that a page shows."""
_UNSEEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_AGO: Final = re.compile(r"now(?:\s*-\s*(\d{1,9})\s*(s|m|min|h|d))?", re.IGNORECASE)
_AGO_MS: Final = {"s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_PARTS_MAX: Final = 16
_OFFSET_MAX: Final = 1 << 62


class NotUnderstood(MalamuteError):
    """A value of a form cannot be read: the sentence says what to write."""


class Shown(str):
    """Text whose characters can all be seen; it may have lines and tabs."""

    __slots__ = ()


def visible(text: str, kept: str = "") -> str:
    r"""Return a text of a client's with escapes such as \u{202e} for what a page would not show.

    Such a character (control, direction) could make the text pose as another. kept: characters that
    stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        f"\\u{{{ord(each):x}}}"
        if unicodedata.category(each) in _UNSEEN and each not in kept
        else each
        for each in text
    )


def body_text(body: Any, most: int = TEXT_BYTES_MAX, whole: int = 0) -> Shown:
    """Return a body for a page: as text where it is UTF-8, else in hexadecimal; cut short.

    body: bytes, a list of them, or any other value of a typed row. most: bytes that are shown.
    whole: bytes of the body of which `body` is only the beginning; 0: it is all of it.
    """
    if isinstance(body, list):
        return Shown(" | ".join(body_text(each, most // 4) for each in body[:_PARTS_MAX]))
    if not isinstance(body, bytes):
        return Shown(visible(str(body)))
    head = body[:most]
    hidden = max(len(body), whole) - len(head)
    try:
        text = visible(head.decode(), kept="\n\t")
    except UnicodeDecodeError as error:
        # Text all the same, where the cut lies within its last character of at most four bytes.
        if hidden and error.start >= len(head) - 4:
            text = visible(head[: error.start].decode(), kept="\n\t")
        else:
            # A byte takes three characters in hexadecimal, so that fewer are shown.
            text = head[: most // 4].hex(" ")
            hidden = max(len(body), whole) - len(head[: most // 4])
    return Shown(f"{text} … {hidden:,} more bytes" if hidden else text)


def time_text(at_ms: float | None) -> str:
    """Return a time in UTC to the millisecond; a dash for none."""
    if not at_ms:
        return "–"
    try:
        at = datetime.fromtimestamp(at_ms / 1_000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(at_ms)
    return f"{at:%Y-%m-%d %H:%M:%S}.{int(at_ms) % 1_000:03}"


def start_point(text: str, now_ms: int) -> StartPoint:
    """Return the place in a stream that a person's text names.

    Such as `earliest`, `latest`, 4711 (an offset), 2026-01-31T10:00 or now-10m. now_ms: the
    broker's clock; 0: it is not known. Raises NotUnderstood.
    """
    wanted = text.strip()
    if wanted in ("earliest", "latest"):
        return wanted  # type: ignore[return-value]  # mypy knows no literals of a tuple
    # Thirty digits are beyond any offset, and int() refuses thousands of them.
    digits = wanted.isascii() and wanted.isdigit()
    if digits and len(wanted) < 30 and int(wanted) < _OFFSET_MAX:
        return int(wanted)
    ago = _AGO.fullmatch(wanted)  # now, or now-10m with the number and the unit as groups
    if ago is not None and not now_ms:
        raise NotUnderstood(
            "the broker does not tell its time just now: try again, or write a time such as "
            "2026-01-31T10:00 (UTC)"
        )
    if ago is not None:
        back_ms = int(ago[1]) * _AGO_MS[ago[2].lower()] if ago[1] else 0
        return AtTime(max(0, now_ms - back_ms))
    try:
        at = datetime.fromisoformat(wanted)
        # A time without a zone is one of UTC.
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        return AtTime(max(0, round(at.timestamp() * 1_000)))
    except (ValueError, OverflowError):
        raise NotUnderstood(
            f"“{visible(wanted[:60])}” is no place in a stream: write an offset such as 4711, a "
            "time such as 2026-01-31T10:00 (UTC) or now-10m, earliest or latest"
        ) from None


def whole_number(text: str, least: int, most: int, what: str) -> int:
    """Return a number of a form. Raises NotUnderstood."""
    wanted = text.strip()
    if wanted.isascii() and wanted.isdigit() and len(wanted) < 20 and least <= int(wanted) <= most:
        return int(wanted)
    raise NotUnderstood(f"{what} is a number from {least} to {most}, not “{visible(wanted[:40])}”")
