"""Values of typed rows as a terminal and JSON can show them.

Owns the text forms. The rule: what JSON has no form for is text. Source: SPEC.md, section 5.9.
"""

from __future__ import annotations

from typing import Any


def as_json(value: Any) -> bytes:
    """Return a row, or a value of one, as JSON; what JSON has no form for is text."""
    import msgspec

    return msgspec.json.encode(value, enc_hook=str)


def as_text(value: Any) -> str:
    """Return a value of a row for a person."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else as_json(value).decode().strip('"')
