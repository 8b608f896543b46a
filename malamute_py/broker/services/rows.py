"""Rows of batches of requests, as the parts of services pass them to each other.

Owns what is done to lists of rows. The rule: rows of a batch are a bitmap, never a list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from malamute_py.broker.services.service import RequestBatch
from malamute_py.changelog.records import rows_of

BatchRows: TypeAlias = tuple[RequestBatch, int]
"""A batch, and rows of it as a bitmap."""


def named(items: Iterable[BatchRows]) -> list[tuple[int, bytes]]:
    """Return rows as the changes of the log name them: base of the batch, bitmap as bytes."""
    found: list[tuple[int, bytes]] = []
    for batch, rows in items:
        assert rows, "an empty bitmap would name all rows that are left"
        found.append((batch.base, rows_of(rows)))
    return found


def merged(items: Iterable[BatchRows]) -> list[BatchRows]:
    """Return the rows with each batch once, as it may have come several times."""
    by_batch: dict[RequestBatch, int] = {}
    for batch, rows in items:
        by_batch[batch] = by_batch.get(batch, 0) | rows
    return list(by_batch.items())
