"""Rows of batches of requests, as the parts of services pass them to each other.

Owns what is done to lists of rows. The rule: rows of a batch are a bitmap, never one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from malamute_py.broker.services.queue import RequestBatch
from malamute_py.changelog.tables import rows_of

Rows: TypeAlias = tuple[RequestBatch, int]
"""Rows of one batch, as a bitmap."""


def named(items: Iterable[Rows]) -> list[tuple[int, bytes]]:
    """Rows as the records of the log name them."""
    found: list[tuple[int, bytes]] = []
    for batch, rows in items:
        assert rows, "an empty bitmap would name all rows that are left"
        found.append((batch.base, rows_of(rows)))
    return found


def attempts_of(batch: RequestBatch, rows: int) -> list[tuple[int, int]]:
    """Rows by how often they were handed out."""
    attempts = batch.row.attempts
    if len(attempts) == 1:
        ((times, some),) = attempts.items()
        if not rows & ~some:
            return [(times, rows)] if rows else []
    found: list[tuple[int, int]] = []
    for times, some in attempts.items():
        hit = some & rows
        if hit:
            found.append((times, hit))
            rows ^= hit
    if rows:
        found.append((0, rows))
    return found


def merged(items: Iterable[Rows]) -> list[Rows]:
    """Return the rows with each batch once."""
    by_batch: dict[RequestBatch, int] = {}
    for batch, rows in items:
        by_batch[batch] = by_batch.get(batch, 0) | rows
    return list(by_batch.items())
