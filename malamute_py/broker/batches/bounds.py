"""Bounds of a stream, looked at again when an answer of the journal is handed out.

Owns the look at what grew too old, or one too many, while the journal read it. The rule: records
are judged when they are handed out, by the append time of each, which in a derived batch differs
from row to row. Source: SPEC.md, section 13.
"""

from __future__ import annotations

from malamute_protocol.content import Content
from malamute_protocol.stamp import STAMP_BYTES, append_time_of
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.ready import HistoryRead, HistoryRun


def first_within_bounds(stream: Stream, answer: HistoryRead, now_ms: int) -> int:
    """First offset within the stream's bounds, as far as the hot window and an answer tell."""
    first = stream.first_at(now_ms)
    oldest_ms = stream.oldest_ms(now_ms)
    if not oldest_ms:
        return first
    aged = 0
    for run in answer.runs:
        after, more = _aged(run, oldest_ms)
        aged = max(aged, after)
        if not more:
            break
    return max(first, min(aged, stream.pinned))


def _aged(run: HistoryRun, oldest_ms: int) -> tuple[int, bool]:
    """Offset after the run's last record past its age (0: none is), and whether all are."""
    data = memoryview(run.data)
    aged = 0
    for at, size, base, count in run.spans:
        content = Content(data[at + STAMP_BYTES : at + size])
        times, deltas = content.append_times, content.offset_deltas
        if times is not None:
            old = int((times < oldest_ms).sum())
            if 0 < old < count:
                return base + (old if deltas is None else int(deltas[old])), False
            young = not old
        else:
            young = append_time_of(bytes(data[at : at + STAMP_BYTES])) >= oldest_ms
        if young:
            return aged, False
        aged = run.next or base + count
    return aged, True
