"""Copies of newest records: how one lies in the hidden stream of a ring with keys.

Owns the form of a copy: which rows of a batch count, then the batch, as the stream had it or of
some of its rows. The rule: a row that does not count says nothing about its subject, for a newer
record may lie before the copy. Source: malamute_py/journal/FORMAT.md, section 15.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import pack, unpack_from

import numpy as np

from malamute_protocol.content import Content
from malamute_protocol.extract import extract
from malamute_protocol.stamp import STAMP_BYTES, Stamp
from malamute_py.broker.log.stream import StampedBatch, Stream
from malamute_py.broker.ready import HistoryRun


def pack_copy(batch: bytes, rows: Sequence[int]) -> bytes:
    """Return a copy. rows: those that count; empty: all of them."""
    head = pack(f"<I{len(rows)}I", len(rows), *rows)
    return head + bytes(-len(head) % 8) + batch


def unpack_copy(copy: bytes) -> tuple[bytes, Sequence[int]]:
    """Return the batch of a copy, and the rows that count; none: all of them."""
    (count,) = unpack_from("<I", copy)
    size = 4 + 4 * count
    return copy[size + -size % 8 :], unpack_from(f"<{count}I", copy, 4)


def batches_of_copy(
    stream: Stream, run: HistoryRun, offsets: Sequence[int]
) -> Iterator[StampedBatch]:
    """Yield batches without holes that have the records at these offsets of a copy.

    A batch of rows that stay together is yielded whole.
    """
    data = memoryview(run.data)
    ((_, size, base, count),) = run.spans
    content = Content(data[STAMP_BYTES:size])
    deltas = content.offset_deltas
    if deltas is None:
        stamp = bytes(data[:STAMP_BYTES])
        yield StampedBatch(stream, stamp, data[STAMP_BYTES:size], content, base, base + count, size)
        return
    places = base + deltas.astype(np.int64)
    for offset in offsets:
        stamp, frame = extract(Stamp.unpack(data, verify=False), content, places == offset)
        size = len(stamp) + len(frame)
        yield StampedBatch(stream, stamp, frame, Content(frame), offset, offset + 1, size)
