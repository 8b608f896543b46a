"""A further kind of pattern, as kinds.py says it is added: first plain, then with a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from malamute_protocol.pattern import PatternError, check_length, check_text, validate
from malamute_py.matcher import (
    Index,
    PatternKind,
    candidates,
    compile_pattern,
    register_kind,
    unregister_kind,
)
from malamute_py.matcher.kinds import Canonical, Fields, Keys, Predicate, Table
from tests.matcher.test_candidates import Segment


class Suffix(PatternKind):
    """["suffix", text]: subjects that end with the text."""

    name = "suffix"

    def check(self, wire: Sequence[Any]) -> Sequence[Any]:
        check_length(wire, 2, '["suffix", ".c"]')
        check_text("suffix", "text", wire[1], 255)
        return ()

    def predicate(self, canonical: Canonical) -> Predicate:
        text: str = canonical[1]
        return lambda keys, fields: any(key.endswith(text) for key in keys)


class SuffixTable:
    """Suffixes by text."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def add(self, number: int, canonical: Canonical) -> None:
        self._numbers[canonical[1]] = number

    def discard(self, number: int, canonical: Canonical) -> None:
        del self._numbers[canonical[1]]

    def lookup(self, keys: Keys, fields: Fields, found: list[int]) -> None:
        for key in keys:
            endings = [key[start:] for start in range(len(key) + 1)]
            found.extend([self._numbers[text] for text in endings if text in self._numbers])


class IndexedSuffix(Suffix):
    """Suffixes, found by their text."""

    def table(self) -> Table:
        return SuffixTable()


@pytest.fixture(params=[Suffix, IndexedSuffix])
def kind(request: pytest.FixtureRequest) -> Iterator[PatternKind]:
    kind: PatternKind = request.param()
    register_kind(kind)
    yield kind
    unregister_kind(kind)


@pytest.mark.usefixtures("kind")
def test_a_further_kind_matches_alone_and_in_combinations() -> None:
    index = Index()
    alone = index.add(["suffix", ".c"])
    both = index.add(["and", ["topic", "a.#"], ["suffix", ".c"]])
    neither = index.add(["not", ["or", ["suffix", ".c"], ["suffix", ".d"]]])
    assert set(index.match(("a.b.c",), ())) == {alone, both}
    assert set(index.match(("b.c",), ())) == {alone}
    assert set(index.match(("a.e",), ())) == {neither}
    assert compile_pattern(["suffix", "x"]).matches(("ax",), ())
    for number in (alone, both, neither):
        index.discard(number)
    assert not index.match(("a.b.c",), ())


@pytest.mark.usefixtures("kind")
def test_a_further_kind_is_checked_and_leaves_every_batch_a_candidate() -> None:
    with pytest.raises(PatternError, match="suffix"):
        validate(["suffix", 1])
    assert candidates(["suffix", "c"], Segment([[(("c",), ())]], None)) is None


@pytest.mark.usefixtures("kind")
def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="registered already"):
        register_kind(Suffix())


def test_a_kind_that_is_not_registered_is_unknown() -> None:
    with pytest.raises(PatternError) as refused:
        Index().add(["suffix", ".c"])
    assert refused.value.code == "unknown_pattern_kind"
