"""Copies of newest records as batches that readers can be handed.

Owns the way from a copy, which may have rows of a batch with holes between them, to batches without
holes. Source: malamute_py/journal/FORMAT.md, section 15.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from malamute_protocol.content import Content
from malamute_protocol.extract import extract
from malamute_protocol.stamp import STAMP_BYTES, Stamp
from malamute_py.broker.log.stream import StampedBatch, Stream
from malamute_py.broker.ready import HistoryRun


def batches_of_copy(
    stream: Stream, run: HistoryRun, offsets: Sequence[int]
) -> Iterator[StampedBatch]:
    """Yield batches without holes that have the records at these offsets of a copy.

    For readers of a stream with keys, whose oldest newest records lie in copies. run: the copy as
    the journal read it, one batch. A batch whose offsets follow on one another is yielded whole,
    and its reader selects among the rows; of one with holes each record is yielded alone.
    """
    data = memoryview(run.data)
    ((_, size, base, count),) = run.spans
    content = Content(data[STAMP_BYTES:size])
    deltas = content.offset_deltas
    if deltas is None:  # The offsets follow on one another.
        stamp = bytes(data[:STAMP_BYTES])
        yield StampedBatch(stream, stamp, data[STAMP_BYTES:size], content, base, base + count, size)
        return
    places = base + deltas.astype(np.int64)  # the offset of each row
    for offset in offsets:
        stamp, frame = extract(Stamp.unpack(data, verify=False), content, places == offset)
        size = len(stamp) + len(frame)
        yield StampedBatch(stream, stamp, frame, Content(frame), offset, offset + 1, size)
