"""Look-ups by time: where in a stream the first record of a time, or of a later one, lies.

Owns the walks that look for it, for a reading that begins at a time. The rule: an index says which
batches may hold it, and a batch that is damaged or overwritten holds none. Source: SPEC.md,
section 6.
"""

from __future__ import annotations

from collections.abc import Iterator

from malamute_protocol.errors import BatchError
from malamute_py.mapped.segments import Segments
from malamute_py.mapped.walk import Choose, LocatedBatch, Walk, begin_of


def at_append_time(
    segments: Segments, stream: int, floor: int, least: int, bound: int
) -> int | None:
    """Return the offset of the first batch appended at `least` ms or later; None: there is none.

    floor: offset of the first record to look at. bound: position in the ring to look up to.
    """
    steps = _walk(
        segments, stream, floor, bound,
        lambda index, entries: (entries.rows["last_time"] >= least).tolist(), contents=False,
    )  # fmt: skip
    for step in steps:
        if step.stamp.append_time_ms >= least:
            return max(step.stamp.base_offset, floor)
    return None


def at_client_time(
    segments: Segments, stream: int, floor: int, least: int, bound: int
) -> int | None:
    """Return the offset of the first record with a client time of `least` ms or later; or None.

    floor, bound: as of at_append_time().
    """
    steps = _walk(
        segments, stream, floor, bound,
        lambda index, entries: (entries.rows["client_max"] >= least).tolist(), contents=True,
    )  # fmt: skip
    for step in steps:
        try:
            content = step.content()
            late = content.head.client_time_max_ms >= least
            times = content.client_times if late else None
        except (BatchError, IndexError):
            continue  # Damaged or overwritten: it has no times.
        late_rows = [] if times is None else (times >= least).nonzero()[0].tolist()
        first_kept = floor - step.stamp.base_offset
        first = next((row for row in late_rows if row >= first_kept), None)
        if first is not None and step.segment.intact():
            return step.stamp.base_offset + int(first)
    return None


def _walk(
    segments: Segments, stream: int, floor: int, bound: int, choose: Choose, *, contents: bool
) -> Iterator[LocatedBatch]:
    """Yield the batches of a stream that may hold the time, from the first record to look at on.

    choose: picks them by the times in a segment's index; without an index all are yielded.
    contents: whether contents are looked at, and so are checked.
    """
    lsn, first = begin_of(segments, stream, floor)
    for step in Walk(segments, stream, lsn, first, choose=choose, contents=contents).run(bound):
        if isinstance(step, LocatedBatch):
            yield step
