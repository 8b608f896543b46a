"""The index against its obvious twin, with patterns coming and going in between."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malamute_py.matcher import Index, compile_pattern, conjunctions, expressions, matches
from tests.matcher import strategies as worlds
from tests.seeds import examples

Header = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), worlds.patterns),
        st.tuples(st.just("discard"), st.integers(0, 1000)),
        st.tuples(st.just("match"), worlds.headers),
    ),
    max_size=60,
)


def assert_agrees(index: Index, held: dict[int, list[Any]], header: Header) -> None:
    expected = {number for number, wire in held.items() if matches(wire, *header)}
    assert set(index.match(*header)) == expected
    # From the memo, with an equal answer.
    assert set(index.match(*header)) == expected


def assert_classes_agree(index: Index, held: dict[int, list[Any]], headers: list[Header]) -> None:
    """Check all headers at once: each in one class, with just the patterns that match it."""
    found: dict[int, set[int]] = {}
    classes = index.classes(headers)
    for numbers, places in classes:
        assert numbers
        for place in places:
            assert place not in found
            found[place] = set(numbers)
    assert len({numbers.serialize() for numbers, _ in classes}) == len(classes)
    for place, header in enumerate(headers):
        expected = {number for number, wire in held.items() if matches(wire, *header)}
        assert found.get(place, set()) == expected


def run(index: Index, script: list[tuple[str, Any]], headers: list[Header]) -> None:
    added: list[tuple[int, list[Any]]] = []
    for verb, argument in script:
        if verb == "add":
            added.append((index.add(argument), argument))
        elif verb == "discard" and added:
            number, _ = added.pop(argument % len(added))
            index.discard(number)
        elif verb == "match":
            assert_agrees(index, dict(added), argument)
        assert len(index) == len(dict(added))
    for header in headers:
        assert_agrees(index, dict(added), header)
    assert_classes_agree(index, dict(added), headers)
    for number, _ in added:
        index.discard(number)
    assert len(index) == 0
    for header in headers:
        assert not index.match(*header)


@pytest.fixture(autouse=True, params=[1, 12], ids=["crowded", "roomy"])
def small_bounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split buckets and settle the overlay as early as can be, or as usual."""
    monkeypatch.setattr(conjunctions, "BUCKET_MAX", request.param)
    monkeypatch.setattr(expressions, "OVERLAY_MAX", request.param)


@pytest.mark.slow
@settings(max_examples=examples(200))
@given(script=steps, headers=st.lists(worlds.headers, max_size=4))
def test_every_header_matches_what_scan_says_while_patterns_come_and_go(
    script: list[tuple[str, Any]], headers: list[Header]
) -> None:
    run(Index(), script, headers)


@pytest.mark.moderate
@given(script=steps, headers=st.lists(worlds.headers, max_size=4))
def test_an_index_without_a_memo_says_the_same(
    script: list[tuple[str, Any]], headers: list[Header]
) -> None:
    run(Index(memo_headers_max=0), script, headers)


@pytest.mark.slow
@given(
    wires=st.lists(worlds.patterns, min_size=70, max_size=90),
    header=worlds.headers,
    leave=st.integers(0, 90),
)
@settings(max_examples=examples(25))
def test_a_header_that_missed_more_changes_than_the_log_holds_is_right_again(
    wires: list[list[Any]], header: Header, leave: int
) -> None:
    index = Index()
    index.match(*header)
    added = [(index.add(wire), wire) for wire in wires]
    assert_agrees(index, dict(added), header)
    for number, _ in added[:leave]:
        index.discard(number)
    assert_agrees(index, dict(added[leave:]), header)


@pytest.mark.moderate
@given(wire=worlds.patterns, headers=st.lists(worlds.headers, max_size=5))
def test_a_compiled_pattern_and_its_canonical_form_match_as_the_pattern_does(
    wire: list[Any], headers: list[Header]
) -> None:
    compiled = compile_pattern(wire)
    for header in headers:
        expected = matches(wire, *header)
        assert compiled.matches(*header) is expected
        assert matches_canonical(compiled.wire, header) is expected
    assert compile_pattern(compiled.wire).canonical == compiled.canonical


def matches_canonical(wire: list[Any], header: Header) -> bool:
    return matches(wire, *header)


@pytest.mark.moderate
@given(
    tens=st.lists(st.lists(st.integers(0, 2), min_size=10, max_size=10), min_size=30, max_size=60),
    held=st.lists(st.integers(0, 2), min_size=10, max_size=10),
)
@settings(max_examples=examples(25))
def test_many_conjunctions_over_the_same_fields_are_told_apart(
    tens: list[list[int]], held: list[int]
) -> None:
    index = Index()
    added = {}
    for ten in tens:
        # 0 asks nothing of the field.
        criteria = [[f"f{at}", str(value)] for at, value in enumerate(ten) if value]
        wire = ["fields", "all", criteria or [["f0"]]]
        added[index.add(wire)] = wire
    header = (("s",), tuple((f"f{at}", str(value)) for at, value in enumerate(held)))
    assert_agrees(index, added, header)


@pytest.mark.moderate
@given(
    st.one_of(
        st.lists(worlds.topics.filter(lambda wire: wire[1] not in ("#", "#.*")), max_size=12),
        st.lists(worlds.field_patterns, max_size=12),
    ),
    st.lists(st.one_of(worlds.headers, worlds.subjects.map(lambda s: ((s,), ()))), max_size=20),
)
def test_many_headers_at_once_are_told_apart_as_they_are_one_by_one(
    wires: list[list[Any]], headers: list[Header]
) -> None:
    index = Index()
    assert_classes_agree(index, {index.add(wire): wire for wire in wires}, headers)
