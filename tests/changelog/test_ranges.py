"""Attempts of records as ranges, against a plain dictionary."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from malamute_py.changelog.ranges import with_done, with_tries, without_done, without_tries
from malamute_py.changelog.records import Tries

RANGES = st.lists(st.integers(0, 40), min_size=2, max_size=8, unique=True).map(
    lambda bounds: list(
        zip(sorted(bounds)[::2], sorted(bounds)[1::2], strict=False)
    )
)  # fmt: skip
STEPS = st.lists(st.tuples(st.sampled_from(["died", "returned", "done"]), RANGES), max_size=12)


def plain(tries: list[Tries]) -> dict[int, tuple[int, str]]:
    return {
        offset: (times, why)
        for first, end, times, why in tries for offset in range(first, end)
    }  # fmt: skip


@given(STEPS)
def test_ranges_of_attempts_say_what_a_dictionary_says(
    steps: list[tuple[str, list[tuple[int, int]]]],
) -> None:
    tries: list[Tries] = []
    model: dict[int, tuple[int, str]] = {}
    for what, ranges in steps:
        offsets = [offset for first, end in ranges for offset in range(first, end)]
        if what == "done":
            tries = without_tries(tries, ranges)
            for offset in offsets:
                model.pop(offset, None)
        else:
            tries = with_tries(tries, ranges, what)
            for offset in offsets:
                model[offset] = model.get(offset, (0, ""))[0] + 1, what
        assert plain(tries) == model
        assert sum(end - first for first, end, _, _ in tries) == len(model)
        assert tries == sorted(tries)
        for one, other in pairwise(tries):
            assert one[1] <= other[0]
            assert one[1] < other[0] or one[2:] != other[2:], "neighbours that say the same are one"


@given(st.integers(0, 30), RANGES, RANGES)
def test_offsets_that_are_done_no_more_leave_the_others_done(
    next: int, done: list[tuple[int, int]], again: list[tuple[int, int]]
) -> None:
    next, done = with_done(next, [], done)
    every = set(range(next)) | {n for first, end in done for n in range(first, end)}
    every -= {n for first, end in again for n in range(first, end)}
    after, left = without_done(next, done, again)
    assert set(range(after)) | {n for first, end in left for n in range(first, end)} == every
    assert all(first > after for first, _ in left)
