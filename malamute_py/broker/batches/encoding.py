"""Encodings: the frames of one batch for all readers that select the same rows.

Owns the choice between the batch as it is with a bitmap, and a batch of the selected rows. The
rule: an encoding that many readers take is made once and handed on by reference. Source:
docs/design.md, Speed; SPEC.md, section 5.

Readers that select few rows of a large batch get a derived batch of these rows alone, which are
extracted from it; others the whole batch with a bitmap of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from malamute_protocol.extract import Scatter, can_scatter, extract, extractable
from malamute_protocol.stamp import Stamp, row_bitmap
from malamute_py.broker.batches.rows import (
    Mask,
)
from malamute_py.broker.log.stream import StampedBatch
from malamute_py.broker.structures.bitmaps import places_of, rows_of_bits

FEW_ROWS = 64
"""Rows up to which copying one by one is cheaper than masks; more rows of a large batch."""


class Encoding:
    """The frames of one batch for all readers that select the same rows."""

    __slots__ = ("_batch", "_extracted", "_mask", "bytes", "count", "extracts", "frames", "rows")

    def __init__(self, batch: StampedBatch, mask: Mask | None, count: int, extracts: bool) -> None:
        self._batch = batch
        self._mask = mask
        self.count = count
        """Number of the selected records."""
        self.frames: tuple[Any, ...] = (batch.stamp, batch.frame)
        self.bytes = batch.size
        self.rows = None if mask is None else row_bitmap(mask)
        self.extracts = extracts
        """Whether extracting the rows is worth while."""
        self._extracted: Encoding | None = None

    def for_(self, whole: bool) -> Encoding:
        """Return the extracted rows where that is worth while and allowed, else the batch.

        whole: the reader wants whole batches, with a bitmap of its rows. The extracted rows are
        made for the first reader that takes them, and kept for the others.
        """
        if whole or not self.extracts:
            return self
        if self._extracted is None:
            batch = self._batch
            stamp = Stamp.unpack(batch.stamp, verify=False)
            frames = extract(stamp, batch.content, self._mask)
            derived = Encoding(batch, None, self.count, extracts=False)
            derived.frames = frames
            derived.bytes = len(frames[0]) + len(frames[1])
            self._extracted = derived
        return self._extracted


def encoding_of(
    batch: StampedBatch, mask: Mask | None, bytes_min: int, share: float
) -> Encoding | None:
    """Return the encoding of the rows in `mask` (None: all); None when there is no such row.

    bytes_min, share: rows are extracted from a batch of at least so many bytes when they are less
    than this share of it; other readers get the whole batch with a bitmap.
    """
    count = batch.content.head.count
    if mask is None:
        return Encoding(batch, None, count, extracts=False)
    selected = int(np.count_nonzero(mask))
    if selected == 0:
        return None
    if selected == count:
        return Encoding(batch, None, count, extracts=False)
    extracts = batch.size >= bytes_min and selected < share * count and extractable(batch.content)
    return Encoding(batch, mask, selected, extracts)


class PartEncodings:
    """Encodings of parts of one batch, each for one member of a group that shares it out.

    share, bytes_min: rows that are a smaller share of a batch of this size or more are extracted.
    row_bytes: rows of at least this mean size are extracted whatever their share of the batch.
    """

    __slots__ = ("_batch", "_bytes_min", "_extracted", "_scatter", "_share")

    def __init__(self, batch: StampedBatch, bytes_min: int, share: float, row_bytes: int) -> None:
        self._batch = batch
        self._bytes_min = bytes_min
        self._share = 1.0 if batch.size >= row_bytes * (batch.next - batch.base) else share
        self._extracted = 0
        self._scatter: Scatter | None = None

    def frames(self, rows: int) -> tuple[list[Any], bytes | None, int]:
        """Return (frames, row bitmap or None, bytes) by which a member gets the rows of a mask.

        The batch itself if the rows are all of it; a derived batch of the rows if they are a small
        part of a large batch; else the batch with a bitmap of the rows.
        """
        batch = self._batch
        count, total = rows.bit_count(), batch.next - batch.base
        if count == total:
            return [batch.stamp, batch.frame], None, batch.size
        content, size = batch.content, batch.size
        if count >= self._share * total or size < self._bytes_min or not extractable(content):
            return [batch.stamp, batch.frame], rows.to_bytes((total + 7) // 8, "little"), size
        # A Scatter takes few rows out quickly, but making it costs as much as the batch. It is made
        # once the parts that were extracted have cost as much, by a rough measure: one part for
        # each 1,024 rows or 512 KiB of the batch, whichever are more.
        spent = self._extracted >= max(1, total >> 10, size >> 19)
        if count <= FEW_ROWS and spent and can_scatter(content):
            if self._scatter is None:
                self._scatter = Scatter(Stamp.unpack(batch.stamp, verify=False), content)
            ((stamp, derived),) = self._scatter.extract((places_of(rows),))
        else:
            self._extracted += 1
            stamp, derived = extract(
                Stamp.unpack(batch.stamp, verify=False), content, rows_of_bits(rows, total)
            )
        return [stamp, derived], None, len(stamp) + len(derived)


def scattered(batch: StampedBatch, selections: Sequence[Sequence[int]]) -> list[Encoding]:
    """Encodings of a few rows each, for live readers, all made in one go.

    Each alone would cost a mask of the whole batch: see extract.Scatter.
    """
    found: list[Encoding] = []
    stamp = Stamp.unpack(batch.stamp, verify=False)
    frames = Scatter(stamp, batch.content).extract(selections)
    for rows, (derived_stamp, derived) in zip(selections, frames, strict=True):
        encoding = Encoding(batch, None, len(rows), extracts=False)
        encoding.frames = derived_stamp, derived
        encoding.bytes = len(derived_stamp) + len(derived)
        found.append(encoding)
    return found
