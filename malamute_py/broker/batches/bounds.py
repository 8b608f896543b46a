"""Bounds of a stream, looked at again when an answer of the journal is handed out.

Owns the look at what grew too old, or one too many, while the journal read it. The rule: records
are judged when they are handed out, by the append time of each, which in a derived batch differs
from row to row. Source: SPEC.md, section 13.

A run is batches of an answer back to back. A derived batch is made of rows of several.
"""

from __future__ import annotations

from malamute_protocol.content import Content
from malamute_protocol.stamp import STAMP_BYTES, append_time_of
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.ready import HistoryRead, HistoryRun


def first_within_bounds(stream: Stream, answer: HistoryRead, now_ms: int) -> int:
    """Return the first offset within the stream's bounds, as the hot window and an answer tell.

    Called when history that was read is to be handed to a reader: records before that offset have
    gone out of the stream's bounds meanwhile, and become a gap. answer: the read; its records are
    looked at one by one, since the index tells ages by the batch.
    """
    first = stream.first_at(now_ms)
    oldest_ms = stream.oldest_ms(now_ms)
    if not oldest_ms:  # The stream has no bound by age.
        return first
    aged = 0
    for run in answer.runs:
        after, all_aged = _aged(run, oldest_ms)
        aged = max(aged, after)
        if not all_aged:
            break
    return max(first, min(aged, stream.pinned))  # A cursor's pin keeps records whatever their age.


def _aged(run: HistoryRun, oldest_ms: int) -> tuple[int, bool]:
    """Return the offset after the run's last record past its age (0: none), and whether all are.

    oldest_ms: append time of the oldest records that the stream keeps.
    """
    data = memoryview(run.data)
    aged = 0
    for at, size, base, count in run.spans:
        content = Content(data[at + STAMP_BYTES : at + size])
        times, deltas = content.append_times, content.offset_deltas
        if times is not None:  # A derived batch: each row has a time, and deltas tell its offset.
            old = int((times < oldest_ms).sum())
            if 0 < old < count:
                return base + (old if deltas is None else int(deltas[old])), False
            young = not old
        else:
            young = append_time_of(bytes(data[at : at + STAMP_BYTES])) >= oldest_ms
        if young:
            return aged, False
        aged = run.next or base + count  # run.next: offset after a batch derived from several.
    return aged, True
