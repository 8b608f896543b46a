"""Batches that may hold a match: never one too few, and none too many where that is promised."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from malamute_py.matcher import HeaderIndex, candidates, matches
from tests.matcher import strategies as worlds

Header = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]
Batches = list[list[Header]]


class Segment:
    """A header index kept the simple way; depth: leading parts kept, None for all of them."""

    def __init__(self, batches: Batches, depth: int | None, fields_known: bool = True) -> None:
        self.exact = depth is None
        self._batches = batches
        self._depth = depth
        self._fields_known = fields_known

    def subjects(self) -> Iterable[tuple[str, BitMap]]:
        held: dict[str, BitMap] = {}
        for number, batch in enumerate(self._batches):
            for keys, _ in batch:
                for key in keys:
                    lead = ".".join(key.split(".")[: self._depth])
                    held.setdefault(lead, BitMap()).add(number)
        return held.items()

    def field(self, name: str, value: str | None) -> BitMap | None:
        if not self._fields_known:
            return None
        return BitMap(
            number
            for number, batch in enumerate(self._batches)
            for _, fields in batch
            if any(name == n and value in (None, v) for n, v in fields)
        )

    def everything(self) -> BitMap:
        return BitMap(range(len(self._batches)))

    def subject(self, key: str) -> BitMap:
        return BitMap(
            number
            for number, batch in enumerate(self._batches)
            if any(key in keys for keys, _ in batch)
        )


def holding(wire: list[Any], batches: Batches) -> BitMap:
    return BitMap(
        number
        for number, batch in enumerate(batches)
        if any(matches(wire, keys, fields) for keys, fields in batch)
    )


batches_of = st.lists(st.lists(worlds.headers, min_size=1, max_size=3), max_size=5)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    wire=worlds.patterns,
    batches=batches_of,
    depth=st.sampled_from((None, None, 0, 1, 2)),
    fields_known=st.booleans(),
)
def test_every_batch_with_a_match_is_a_candidate(
    wire: list[Any], batches: Batches, depth: int | None, fields_known: bool
) -> None:
    index: HeaderIndex = Segment(batches, depth, fields_known)
    found = candidates(wire, index)
    assert found is None or holding(wire, batches) <= found <= index.everything()


LEAVES: list[list[Any]] = [
    ["all"],
    ["topic", "a"],
    ["topic", "a.b"],
    ["topic", "a.*"],
    ["topic", "#.b"],
    ["prefix", "a"],
    ["prefix", "b.c"],
    ["regex", "c$"],
    ["fields", "all", [["f"], ["g", "1"]]],
    ["fields", "any", [["f", "1"], ["g", "2"]]],
]
KEYS = [("a",), ("a.b",), ("b.c",), ("aa",), ("a", "b.c"), ("b.b", "a.b")]
FIELDS = [(), (("f", "1"),), (("f", "2"), ("g", "1")), (("g", "2"),)]
EVERY_HEADER = list(product(KEYS, FIELDS))


@cache
def _holds(place: int, header: Any) -> bool:
    return matches(LEAVES[place], *header)


@pytest.mark.moderate
@pytest.mark.parametrize("depth", [None, 0, 1])
@pytest.mark.parametrize("fields_known", [True, False])
def test_every_pair_of_patterns_finds_each_batch_with_a_match(
    depth: int | None, fields_known: bool
) -> None:
    """One header a batch, then each with a neighbour: all pairs, as chance misses some."""
    for step in (0, 7):
        batches = [
            [header, EVERY_HEADER[(at + step) % len(EVERY_HEADER)]]
            for at, header in enumerate(EVERY_HEADER)
        ]
        index = Segment(batches, depth, fields_known)
        held = {
            str(leaf): [[_holds(place, header) for header in batch] for batch in batches]
            for place, leaf in enumerate(LEAVES)
        }
        for one, other in product(LEAVES, LEAVES):
            rows = list(zip(held[str(one)], held[str(other)], strict=True))
            for wire, holds in (
                (["and", one, other], lambda a, b: a and b),
                (["or", one, other], lambda a, b: a or b),
                (["not", ["and", one, other]], lambda a, b: not (a and b)),
                (["not", ["or", one, other]], lambda a, b: not (a or b)),
                (["and", one, ["not", other]], lambda a, b: a and not b),
            ):
                wanted = BitMap(at for at, (a, b) in enumerate(rows) if any(map(holds, a, b)))
                found = candidates(wire, index)
                assert found is None or wanted <= found, wire


@pytest.mark.parametrize(
    "wire",
    [
        ["not", ["all"]],
        ["and", ["topic", "a"], ["fields", "all", [["f"]]]],
        ["fields", "all", [["f"], ["g", "1"]]],
        ["fields", "all", [["f", "1"]]],
        ["fields", "any", [["f", "1"], ["g", "2"]]],
        ["not", ["or", ["topic", "a"], ["prefix", "b"]]],
        ["and", ["prefix", "a"], ["not", ["topic", "a.b"]]],
    ],
)
def test_batches_of_one_header_are_told_apart_by_an_exact_index(wire: list[Any]) -> None:
    batches: Batches = [[(keys, fields)] for keys, fields in EVERY_HEADER if len(keys) == 1]
    assert candidates(wire, Segment(batches, None)) == holding(wire, batches)


by_subject = st.one_of(
    worlds.by_subject,
    st.lists(worlds.by_subject, min_size=1, max_size=3).map(lambda each: ["or", *each]),
)


@pytest.mark.moderate
@given(wire=by_subject, batches=batches_of)
def test_over_an_exact_index_a_subject_pattern_has_no_other_candidates(
    wire: list[Any], batches: Batches
) -> None:
    segment = Segment(batches, None)
    found = candidates(wire, segment)
    assert (segment.everything() if found is None else found) == holding(wire, batches)


@pytest.mark.parametrize("depth", [None, 0, 1])
def test_a_whole_subject_is_looked_up_without_a_walk(depth: int | None) -> None:
    class NoWalk(Segment):
        def subjects(self) -> Iterable[tuple[str, BitMap]]:
            raise AssertionError("walked")

        def subject(self, key: str) -> BitMap:
            return BitMap([1]) if key == "a.b" else BitMap()

    assert candidates(["topic", "a.b"], NoWalk([], depth)) == BitMap([1])


def test_a_batch_that_holds_others_beside_a_match_is_a_candidate_of_a_negation() -> None:
    batches: Batches = [[(("a",), ()), (("b",), ())], [(("a",), ())], [(("b",), ())]]
    assert candidates(["not", ["topic", "a"]], Segment(batches, None)) == BitMap([0, 2])


def test_leading_parts_narrow_topics_and_prefixes() -> None:
    batches: Batches = [[(("a.b.c",), ())], [(("a.c.c",), ())], [(("b",), ())]]
    segment = Segment(batches, 2)
    assert candidates(["topic", "a.b.d"], segment) == BitMap()  # It is looked up, not led to.
    assert candidates(["topic", "a.b.*"], segment) == BitMap([0])
    assert candidates(["topic", "#.c"], segment) == BitMap([0, 1, 2])
    assert candidates(["prefix", "a.c.cc"], segment) == BitMap([1])
    assert candidates(["prefix", "a."], segment) == BitMap([0, 1])
    assert candidates(["regex", "^a"], segment) is None


def test_no_leading_parts_lead_anywhere() -> None:
    batches: Batches = [[(("a.b.c",), ())], [(("b",), ())]]
    for wire in (["topic", "a.b.*"], ["topic", "x.*"], ["prefix", "x"]):
        assert candidates(wire, Segment(batches, 0)) == BitMap([0, 1])
