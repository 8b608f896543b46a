"""Rows of typed streams as the values of their columns.

Owns the way from a record to the columns of its row. The rule: a batch is turned into values once,
however many of its records are looked at. Source: SPEC.md, section 5.9.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from malamute_protocol.batch import Batch, Record


def row_of(record: Record) -> dict[str, Any] | None:
    """Return the columns of a typed stream's row by name; None: it has none that can be read.

    Raises BatchError: its batch is damaged.
    """
    from malamute_protocol.content_layout import ARROW

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
