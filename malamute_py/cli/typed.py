"""Rows of typed streams as values that a terminal and JSON can show.

Owns the way from a record to the columns of its row. The rule: a batch is turned into values once,
however many of its records are shown. Source: SPEC.md, section 5.9.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from malamute_protocol.content import ARROW

if TYPE_CHECKING:
    from malamute_protocol.batch import Batch, Record


def row_of(record: Record) -> dict[str, Any] | None:
    """Return the columns of a typed stream's row by name; None: it has none that can be read.

    Raises BatchError: its batch is damaged.
    """
    batch = record.batch
    if batch.content.head.body_kind != ARROW or batch.schemas is None:
        return None
    return _rows(batch).get(record.offset)


@lru_cache(maxsize=1)
def _rows(batch: Batch) -> dict[int, dict[str, Any]]:
    """Return the delivered rows of a batch by their offsets; none without pyarrow."""
    try:
        rows = batch.to_arrow()
    except ModuleNotFoundError:
        return {}
    return dict(zip(batch.offsets.tolist(), rows.to_pylist(), strict=True))


def as_json(value: Any) -> bytes:
    """Return a row, or a value of one, as JSON; what JSON has no form for is text."""
    import msgspec

    return msgspec.json.encode(value, enc_hook=str)


def as_text(value: Any) -> str:
    """Return a value of a row for a person."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else as_json(value).decode().strip('"')
