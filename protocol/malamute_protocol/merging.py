"""Merging: one batch of many small ones, for those who pay for each batch.

Owns which batches are small and the batch that takes their place. A table with a chunk for each of
40,000 lone records takes polars seconds to read; one of their rows together takes milliseconds. The
rules: the records and their order stay, and what cannot be gathered stays a batch of its own.
Source: SPEC.md, section 5.7.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from malamute_protocol.batch import Batch
from malamute_protocol.content import Content
from malamute_protocol.gather import SharedGathering
from malamute_protocol.stamp import Stamp

_FEW: Final = 64
"""Records up to which a batch is small: of more, a batch costs less than to gather them."""
_SMALL_BYTES: Final = 16 << 10
_MERGED_RECORDS_MAX: Final = 65_536
"""Records of a batch that was made of small ones, at most: no batch may have more."""


def is_small(batch: Batch) -> bool:
    """Whether a batch has so few records that it is merged with others like it."""
    return batch.content.head.count <= _FEW and batch.stamp.size <= _SMALL_BYTES


def merged(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches, with small ones that follow each other in one stream as one.

    For tables of Arrow and polars, which pay for each batch as a chunk. Raises BatchError: a batch
    is not what its head says.
    """
    run = _Run()
    for batch in batches:
        if not run.takes(batch):
            yield from run.take()
            if not run.takes(batch):  # Not even an empty run takes it: it stays as it is.
                yield batch
                continue
        run.add(batch)
    yield from run.take()


class _Run:
    """Small batches that follow each other, gathered so far."""

    def __init__(self) -> None:
        """Begin without a batch; the first one says which stream it is."""
        self._batches: list[Batch] = []
        self._gathering = SharedGathering(0)
        self._firsts: list[int] = []
        """Place of each batch's first row among all rows gathered."""

    def takes(self, batch: Batch) -> bool:
        """Whether a batch may join those so far: it is small, and later in the same stream."""
        gathering, stamp = self._gathering, batch.stamp
        if self._batches:
            last = self._batches[-1].stamp
            if stamp.stream != last.stream or stamp.base_offset < last.next_offset:
                return False
        return (
            is_small(batch)
            and gathering.rows + batch.content.head.count <= _MERGED_RECORDS_MAX
            and gathering.takes(stamp, batch.content)
        )

    def add(self, batch: Batch) -> None:
        """Gather a batch that takes() allows. Raises BatchError: a code has no entry."""
        if not self._batches:
            self._gathering = SharedGathering(batch.stamp.stream)
        gathering, content = self._gathering, batch.content
        content.check_codes()
        self._firsts.append(gathering.rows)
        gathering.add(batch.stamp, content)
        self._batches.append(batch)

    def take(self) -> list[Batch]:
        """Return the batch of all that were gathered, and begin anew; a lone one stays as it is."""
        batches, gathering = self._batches, self._gathering
        if len(batches) > 1:
            # The gathering has all rows of the batches; those not delivered are left out now.
            delivered = np.ones(gathering.rows, np.bool_)
            for batch, first in zip(batches, self._firsts, strict=True):
                if batch.rows is not None:
                    delivered[first : first + len(batch.rows)] = batch.rows
            rows = np.flatnonzero(delivered)
            if len(rows):
                (found,) = gathering.gather(rows, [len(rows)])
                batches = [Batch(Stamp.unpack(found.stamp), Content(found.content))]
            else:
                batches = batches[:1]  # No row was delivered: one batch of no rows says so, too.
        self._batches, self._firsts, self._gathering = [], [], SharedGathering(0)
        return batches
