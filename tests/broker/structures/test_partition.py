"""Partition refinement against its definition."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from malamute_py.broker.structures.partition import partition

NUMBERS = st.one_of(st.integers(0, 12), st.integers(0, 1 << 17))
CLASSES = st.lists(st.sets(NUMBERS, min_size=1, max_size=12), max_size=40)


@given(CLASSES)
def test_patterns_are_together_exactly_when_they_select_the_same_headers(
    classes: list[set[int]],
) -> None:
    selected: dict[int, list[int]] = defaultdict(list)
    for place, numbers in enumerate(classes):
        for number in numbers:
            selected[number] += [2 * place, 2 * place + 1]
    wanted: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number in sorted(selected):
        wanted[tuple(selected[number])].append(number)
    found = partition(
        [(BitMap(numbers), [2 * place, 2 * place + 1]) for place, numbers in enumerate(classes)]
    )
    assert {tuple(places): numbers for numbers, places in found} == dict(wanted)
    assert len(found) == len(wanted)


def test_labels_are_packed_when_they_run_out() -> None:
    evens, odds = BitMap(range(0, 1000, 2)), BitMap(range(1, 1000, 2))
    classes = [(evens, [n]) if n % 3 else (odds, [n]) for n in range(50)]
    found = partition([*classes, (BitMap([7]), [99])])
    assert sorted(len(numbers) for numbers, _ in found) == [1, 499, 500]
