"""Values of typed rows as a terminal and JSON can show them, and JSON lines as typed rows again.

Owns the text forms. The rules: what JSON has no form for is text, and the type of its column says
how that is read again. Source: SPEC.md, section 5.9.
"""

from __future__ import annotations

import base64
import math
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def as_json(value: Any) -> bytes:
    """Return a row, or a value of one, as JSON; what JSON has no form for is text."""
    import msgspec

    return msgspec.json.encode(value, enc_hook=str)


def as_text(value: Any) -> str:
    """Return a value of a row for a person."""
    if value is None:
        return "-"
    # A time and its like are a text in JSON, in quotes.
    return value if isinstance(value, str) else as_json(value).decode().strip('"')


def plain(value: Any) -> Any:
    """Return a value of a row with text for numbers that JSON does not have: NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def from_json(value: Any, kind: pa.DataType) -> Any:
    """Return a value of JSON as pyarrow takes it for a column of this type: plain() reversed.

    Raises ValueError, TypeError: it is no such value.
    """
    import pyarrow as pa

    types = pa.types
    if value is None:
        return None
    if types.is_struct(kind):
        # pyarrow would drop a misspelt column without a word.
        if unknown := value.keys() - {field.name for field in kind}:
            raise ValueError(f"there is no column {min(unknown)!r}")
        return {field.name: from_json(value.get(field.name), field.type) for field in kind}
    if types.is_map(kind):  # In JSON a list of pairs, since its keys may be no texts.
        return [
            (from_json(key, kind.key_type), from_json(item, kind.item_type)) for key, item in value
        ]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [from_json(item, kind.value_type) for item in value]
    if types.is_floating(kind):
        return float(value)  # Also of "nan" and "inf".
    if isinstance(value, str) and not (types.is_string(kind) or types.is_large_string(kind)):
        return _from_text(value, kind)
    return value


def _from_text(text: str, kind: pa.DataType) -> Any:
    """Return the value of a column whose type JSON has no form for, from its text."""
    import msgspec
    import pyarrow as pa

    types = pa.types
    # Python's datetime has microseconds at most.
    if types.is_timestamp(kind) and kind.unit == "ns":
        return pa.scalar(text).cast(kind)
    if types.is_timestamp(kind):
        return datetime.fromisoformat(text)
    if types.is_date(kind):
        return date.fromisoformat(text)
    if types.is_time(kind):
        return time.fromisoformat(text)
    if types.is_duration(kind):
        return msgspec.convert(text, timedelta)
    if types.is_decimal(kind):
        return Decimal(text)
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return base64.b64decode(text, validate=True)
    return text
