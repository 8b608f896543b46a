"""Look-ups by time: where in a stream the first record of a time, or of a later one, lies.

Owns the walks that look for it, for a reading that begins at a time. The rules: an index says which
batches may hold it; damage just before the record that is found counts as the record that is
meant, as at the broker, so that the reading begins no later and names the loss. Source: SPEC.md,
section 6.
"""

from __future__ import annotations

from collections.abc import Callable

from malamute_protocol.errors import BatchError
from malamute_py.mapped.segments import Segments
from malamute_py.mapped.walk import Choose, LocatedBatch, Lost, Passed, Walk, begin_of


def at_append_time(
    segments: Segments, stream: int, floor: int, least: int, bound: int
) -> int | None:
    """Return the offset of the first batch appended at `least` ms or later; None: there is none.

    floor: offset of the first record to look at. bound: position in the ring to look up to.
    """

    def first_in(step: LocatedBatch) -> int:
        """Return the batch's first offset; -1: it was appended too early."""
        return step.stamp.base_offset if step.stamp.append_time_ms >= least else -1

    return _first_late_enough(
        segments, stream, floor, bound,
        lambda index, entries: (entries.rows["last_time"] >= least).tolist(), first_in,
        contents=False,
    )  # fmt: skip


def at_client_time(
    segments: Segments, stream: int, floor: int, least: int, bound: int
) -> int | None:
    """Return the offset of the first record with a client time of `least` ms or later; or None.

    floor, bound: as of at_append_time().
    """

    def first_in(step: LocatedBatch) -> int:
        """Return the batch's first kept offset whose client time is this or later; -1: none."""
        content = step.content()
        late = content.head.client_time_max_ms >= least
        times = content.client_times if late else None
        if times is None:
            return -1
        hits = (times >= least).nonzero()[0] + step.stamp.base_offset
        hits = hits[hits >= floor]
        return int(hits[0]) if len(hits) else -1

    return _first_late_enough(
        segments, stream, floor, bound,
        lambda index, entries: (entries.rows["client_max"] >= least).tolist(), first_in,
        contents=True,
    )  # fmt: skip


def _first_late_enough(
    segments: Segments, stream: int, floor: int, bound: int, choose: Choose,
    first_in: Callable[[LocatedBatch], int], *, contents: bool,
) -> int | None:  # fmt: skip
    """Return the first offset that `first_in` finds in a batch; None: there is none.

    choose: picks batches by the times in a segment's index; without an index all are looked at.
    first_in: returns the wanted offset of a batch, or -1. contents: whether it looks at contents,
    which are checked then. Where damage lies just before the batch found, or ends what may hold the
    time, its first offset is returned: the record wanted may have been there.
    """
    # following: offset after what is known to be too early, or to be gone by retention.
    lsn, following = begin_of(segments, stream, floor)
    damaged = False  # whether damage was met from there on
    walk = Walk(segments, stream, lsn, following, choose=choose, contents=contents)
    for step in walk.run(bound):
        if isinstance(step, LocatedBatch):
            try:
                found = first_in(step)
            except (BatchError, IndexError):
                damaged = True  # or overwritten, which a later step tells
                continue
            if found >= 0 and step.segment.intact():
                return following if step.stamp.base_offset > following else max(found, floor)
            following, damaged = step.stamp.next_offset, False
        elif isinstance(step, Lost) and step.code == "damaged":
            damaged = True
        elif isinstance(step, Lost | Passed):
            following, damaged = max(following, step.next), False
    return following if damaged else None
