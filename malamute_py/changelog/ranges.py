"""Ranges of offsets: which records of a group are done, and how many attempts each has had.

Owns the arithmetic of both lists. The rules: ranges are ascending, with a gap between each two;
attempts are ascending without overlap, and neighbours that say the same are one entry; a list is
never changed in place. Source: docs/design.md (Journal; Queues and the checkpoint).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from malamute_py.changelog.records import Range, Tries


def with_tries(tries: list[Tries], ranges: Iterable[Range], why: str) -> list[Tries]:
    """Return the attempts with one more for each record of the ranges.

    For records of a group that come back. The caller compares the counts with attempts_max, from
    which on a record is a dead letter. why: how the newest attempt ended.
    """
    merged = tries[:]
    for first, end in ranges:
        at, stop, known = _within(merged, first, end)
        found: list[Tries] = []
        offset = first  # Records before it are in `found`.
        for begin, until, times, _ in known:
            if offset < begin:  # Records between two entries had no attempt before.
                found.append((offset, begin, 1, why))
            found.append((begin, until, times + 1, why))
            offset = until
        if offset < end:
            found.append((offset, end, 1, why))
        _splice(merged, at, stop, first, end, found)
    return merged


def without_tries(tries: list[Tries], ranges: Iterable[Range]) -> list[Tries]:
    """Return the attempts of records that are in none of the ranges: those are done."""
    left = tries[:]
    for first, end in ranges:
        at, stop, known = _within(left, first, end)
        if known:
            _splice(left, at, stop, first, end, [])
    return left


def _within(tries: list[Tries], first: int, end: int) -> tuple[int, int, list[Tries]]:
    """Return the indices [at, stop) of entries that overlap a range, and these cut to the range.

    An entry is (first offset, offset after the last, attempts, why the last one ended).
    """
    at = bisect_left(tries, first, key=_end_of_tries)
    if at < len(tries) and _end_of_tries(tries[at]) == first:  # It ends where the range begins.
        at += 1
    stop = bisect_left(tries, (end,), at)
    return (
        at,
        stop,
        [
            (max(first, begin), min(end, until), times, why)
            for begin, until, times, why in tries[at:stop]
        ],
    )


def _splice(
    tries: list[Tries], at: int, stop: int, first: int, end: int, found: list[Tries]
) -> None:
    """Put `found` into the place of the entries at [at, stop), for the records first to end.

    What those entries say of records before `first` and from `end` on stays. Neighbours that say
    the same become one. tries: changed in place; it is the caller's own copy.
    """
    entries = list(found)
    if at < stop:  # The outer entries may reach beyond the range.
        begin, _, times, why = tries[at]
        if begin < first:
            entries.insert(0, (begin, first, times, why))
        _, until, times, why = tries[stop - 1]
        if until > end:
            entries.append((end, until, times, why))
    joined: list[Tries] = []
    before = max(0, at - 1)  # The entries next to the range may say the same as the new ones.
    for entry in (*tries[before:at], *entries, *tries[stop : stop + 1]):
        last = joined[-1] if joined else None
        begin, until, times, why = entry
        if last is not None and last[1:] == (begin, times, why):  # It ends where this begins.
            joined[-1] = last[0], until, times, why
        else:
            joined.append(entry)
    tries[before : stop + 1] = joined


def _end_of_tries(entry: Tries) -> int:
    """Return the offset after the last record of an entry."""
    return entry[1]


def with_done(next: int, done: list[Range], ranges: Iterable[Range]) -> tuple[int, list[Range]]:
    """Return `next`, and the ranges done after it, once `ranges` are done too.

    next: all records before it are done. done: ascending, with gaps between them. New ranges are
    looked up among them: a group with many members has a thousand, and each acknowledgement brings
    a few.
    """
    merged = done[:]
    for first, end in ranges:
        if first <= next:
            next = max(next, end)
            continue
        at = bisect_left(merged, (first,))
        if at and merged[at - 1][1] >= first:
            # The range before reaches up to this one: they become one.
            at -= 1
            first, end = merged[at][0], max(end, merged[at][1])
        stop = at
        while stop < len(merged) and merged[stop][0] <= end:  # So do those that it reaches.
            end = max(end, merged[stop][1])
            stop += 1
        merged[at:stop] = [(first, end)]
    # `next` moves past the ranges that it has come to, and these are listed no longer.
    passed = 0
    while passed < len(merged) and merged[passed][0] <= next:
        next = max(next, merged[passed][1])
        passed += 1
    return next, merged[passed:] if passed else merged


def without_done(next: int, done: list[Range], ranges: list[Range]) -> tuple[int, list[Range]]:
    """Return `next`, and the ranges done after it, once `ranges` are not done any more.

    For records of a group that are tried again after they were dead letters. ranges: ascending,
    without overlap, at least one.
    """
    low = min(next, ranges[0][0])
    # From `low` on, what lay before `next` is a range like the others.
    left: list[Range] = []
    for begin, until in [(low, next), *done] if low < next else done:
        offset = begin  # Records before it stay done, or are in one of `ranges`.
        for first, end in ranges:
            if end <= offset:
                continue
            if first >= until:
                break
            if offset < first:
                left.append((offset, first))
            offset = end
        if offset < until:
            left.append((offset, until))
    return with_done(low, [], left)
