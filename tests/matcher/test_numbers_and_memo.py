"""Numbers of patterns, and the bounds and freshness of the memory of headers."""

from __future__ import annotations

import pytest

from malamute_protocol.pattern import (
    PatternError,
    all_of,
    any_of,
    everything,
    fields,
    not_,
    prefix,
    regex,
    topic,
)
from malamute_py.matcher import Index
from malamute_py.matcher.conjunctions import Conjunctions, HeldFact
from malamute_py.matcher.memo import LOG_MAX
from malamute_py.matcher.prefixes import PrefixTable


def test_patterns_that_say_the_same_share_a_number_until_the_last_is_discarded() -> None:
    index = Index()
    number = index.add(all_of(topic("a.*"), fields("f=1", "g")))
    assert index.add(all_of(fields("g", "f=1"), topic("a.*"), everything())) == number
    assert len(index) == 1
    index.discard(number)
    assert number in index.match(("a.b",), (("f", "1"), ("g", "")))
    index.discard(number)
    assert number not in index.match(("a.b",), (("f", "1"), ("g", "")))
    with pytest.raises(KeyError):
        index.discard(number)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (topic("#"), everything()),
        (prefix(""), everything()),
        (not_(not_(topic("a"))), topic("a")),
        (fields("a", "a=1"), fields("a=1")),
        (fields("a", "a=1", mode="any"), fields("a")),
        (any_of(topic("a"), any_of(topic("b"), topic("a"))), any_of(topic("b"), topic("a"))),
        (not_(all_of(topic("a"), topic("b"))), any_of(not_(topic("a")), not_(topic("b")))),
    ],
)
def test_forms_of_one_meaning_share_a_number(one: list[object], other: list[object]) -> None:
    index = Index()
    assert index.add(one) == index.add(other)


def test_the_pattern_of_a_number_is_told_only_while_it_is_in_use() -> None:
    index = Index()
    number = index.add(not_(topic("a.b")))
    assert index.pattern(number) == ["not", ["topic", "a.b"]]
    inner = 1 - number
    with pytest.raises(KeyError):
        index.pattern(inner)
    index.discard(number)
    with pytest.raises(KeyError):
        index.pattern(number)


def test_a_number_is_not_given_again_while_a_remembered_header_may_contain_it() -> None:
    index = Index()
    number = index.add(topic("a"))
    assert list(index.match(("a",), ())) == [number]
    index.discard(number)
    given_meanwhile = set()
    for at in range(LOG_MAX - 1):
        given_meanwhile.add(index.add(topic(f"b.{at}")))
    assert number not in given_meanwhile
    index.add(topic("c"))
    assert index.add(topic("d")) == number
    assert number not in index.match(("a",), ())
    assert number in index.match(("d",), ())


@pytest.mark.moderate
def test_numbers_are_given_again_so_they_do_not_grow_with_churn() -> None:
    index = Index()
    highest = 0
    for at in range(2000):
        number = index.add(all_of(topic(f"a.{at}"), fields(f"f={at}"), not_(prefix("z"))))
        highest = max(highest, number)
        index.match((f"a.{at}",), (("f", str(at)),))
        index.discard(number)
    assert highest < 4 * LOG_MAX
    assert len(index) == 0


def test_a_part_that_is_also_asked_for_outlives_the_pattern_that_it_is_part_of() -> None:
    index = Index()
    whole = index.add(all_of(topic("a.*"), topic("*.b")))
    part = index.add(topic("a.*"))
    assert set(index.match(("a.b",), ())) == {whole, part}
    index.discard(whole)
    assert set(index.match(("a.b",), ())) == {part}
    whole = index.add(all_of(topic("a.*"), topic("*.b")))
    index.discard(part)
    assert set(index.match(("a.b",), ())) == {whole}
    assert set(index.match(("a.c",), ())) == set()


def test_a_result_that_is_held_does_not_change_when_patterns_do() -> None:
    index = Index()
    first = index.add(topic("a"))
    held = index.match(("a",), ())
    index.add(topic("a.*"))
    index.discard(first)
    assert first not in index.match(("a",), ())
    assert list(held) == [first]


def test_a_change_that_does_not_concern_a_header_leaves_its_result_the_same_object() -> None:
    index = Index()
    index.add(topic("a"))
    held = index.match(("a",), ())
    index.discard(index.add(topic("b")))
    assert index.match(("a",), ()) is held


def test_the_memo_forgets_the_oldest_headers_beyond_its_count() -> None:
    index = Index(memo_headers_max=10)
    index.add(everything())
    kept = [index.match((f"s.{at}",), ()) for at in range(100)]
    assert len(index._memo) == 10
    assert index.match(("s.99",), ()) is kept[99]
    assert index.match(("s.0",), ()) is not kept[0]


@pytest.mark.moderate
def test_the_memo_keeps_within_its_bytes_however_large_headers_and_results_are() -> None:
    index = Index(memo_bytes_max=200_000)
    for at in range(5000):
        index.add(any_of(prefix("s"), fields(f"f{at}")))
    for at in range(200):
        index.match((f"s.{at}",), (("f", "x" * 1000),))
        assert index._memo.bytes <= 200_000
    assert 0 < len(index._memo) < 20
    for _ in range(LOG_MAX):
        index.add(regex(f"never{_}"))
    for at in range(200):
        index.match((f"s.{at}",), (("f", "x" * 1000),))
    assert 0 <= index._memo.bytes <= 200_000


def test_a_refused_pattern_leaves_the_index_as_it_was() -> None:
    index = Index()
    kept = index.add(topic("a"))
    for wire in (
        ["regex", "("],
        ["and", ["topic", "b"], ["regex", "("]],
        ["not", ["or", ["topic", "c"], ["regex", "[z-a]"]]],
        ["glob", "a*"],
    ):
        with pytest.raises(PatternError):
            index.add(wire)
    assert len(index) == 1
    assert list(index.match(("a",), ())) == [kept]
    assert index.add(topic("next")) == kept + 1


def test_many_patterns_filed_under_one_fact_are_all_found_and_all_forgotten() -> None:
    index = Index()
    numbers = [index.add(any_of(fields("urgent"), topic(f"a.{at}"))) for at in range(300)]
    urgent = (("urgent", ""),)
    assert set(index.match(("s",), urgent)) == set(numbers)
    assert list(index.match(("a.7",), ())) == [numbers[7]]
    for number in numbers[100:]:
        index.discard(number)
    # No memo could catch up over so many changes: the answer is the index's own.
    assert set(index.match(("s",), urgent)) == set(numbers[:100])
    for number in numbers[20:100]:
        index.discard(number)
    assert set(index.match(("s",), urgent)) == set(numbers[:20])
    again = [index.add(any_of(fields("urgent"), topic(f"b.{at}"))) for at in range(300)]
    assert set(index.match(("s",), urgent)) == set(numbers[:20]) | set(again)


def test_nothing_is_left_of_conjunctions_once_they_are_all_discarded() -> None:
    held = Conjunctions()
    every: list[frozenset[HeldFact]] = [
        frozenset({f"f{at % 7}", ("g", str(at % 50)), at}) for at in range(500)
    ]
    for number, facts in enumerate(every):
        held.add(number, facts)
    found: list[int] = []
    held.lookup(["f3", ("g", "3"), 3], found, [])
    assert found == [3]
    for number, facts in enumerate(every):
        held.discard(number, facts)
    assert len(held) == 0
    assert vars(held)["_root"].children == {}
    assert not vars(held)["_codes"]


def test_a_prefix_length_that_is_not_in_use_any_more_is_not_tried() -> None:
    table = PrefixTable()
    for number, text in enumerate(("ab", "cd", "abc")):
        table.add(number, ("prefix", text))
    table.discard(0, ("prefix", "ab"))
    assert vars(table)["_lengths"] == [2, 3]
    table.discard(1, ("prefix", "cd"))
    assert vars(table)["_lengths"] == [3]
