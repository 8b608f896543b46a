"""Regular expressions: their meaning, their bounds, and what happens beyond these."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from malamute_protocol.pattern import PatternError, any_of, from_text, regex
from malamute_py.matcher import Index, compile_pattern, expressions, matches


@pytest.mark.parametrize(
    "expression",
    ["(?=a)b", "(a)\\1", "a{1001}", "(.{500}){3}", "(", "[z-a]", "(?P<n>", "\\", "(?<!a)b"],
)
def test_what_re2_cannot_take_is_refused_by_name_and_with_a_reason(expression: str) -> None:
    for refuse in (Index().add, compile_pattern):
        with pytest.raises(PatternError) as refused:
            refuse(["regex", expression])
        assert refused.value.code == "bad_pattern"
        assert "regular expression" in refused.value.reason


def test_an_expression_with_a_huge_program_is_refused() -> None:
    with pytest.raises(PatternError, match="instructions"):
        Index().add(["regex", "(a{1,100}){10}b"])


@pytest.mark.parametrize(
    "expression",
    [
        "([ab]{0,30}a){0,30}c", "(a|b)*a(a|b){100}", "((a*b*){10}){30}c", "(a|b|){400}c",
        "a?b?" * 100, "(a|)" * 100, "(?i)" + "[ab]?" * 200,
    ],
)  # fmt: skip
def test_an_expression_that_keys_can_lead_to_ever_new_states_is_refused_unless_it_is_small(
    expression: str,
) -> None:
    with pytest.raises(PatternError, match="counted 8 times") as refused:
        Index().add(regex(expression))
    assert refused.value.code == "bad_pattern"


@pytest.mark.parametrize(
    "expression",
    [
        "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", r"\d{4}-\d{2}-\d{2}", "a{1}" * 100,
        "x" * 1_000,
        r"\?" * 100, "[?*+]" * 100, r"\Q" + "?" * 100, "(?:a)(?P<n>b)" * 40, "(eur|usd|gbp)" * 20,
        r"[\]?]" * 100, "[]?]" * 100, "[[:alpha:]?]" * 40,
    ],
)  # fmt: skip
def test_usual_expressions_are_taken(expression: str) -> None:
    Index().add(regex(expression))


def test_all_that_repeat_a_lot_are_few() -> None:
    index = Index()
    wires = [regex(f"([ab]{{0,12}}a){{0,5}}c{at}") for at in range(40)]
    for wire in wires[:10]:
        index.add(wire)
    with pytest.raises(PatternError) as refused:
        list(map(index.add, wires))
    assert refused.value.code == "limit"
    assert len(index) < 40


@pytest.mark.parametrize("expression", ["^(a+)+$", "(a|aa)+$", "(.*)*x", "^(([a-z])+.)+[A-Z]$"])
def test_expressions_that_stall_backtracking_engines_are_answered(expression: str) -> None:
    index = Index()
    number = index.add(regex(expression))
    key = "a" * 255 + "!"
    assert (number in index.match((key,), ())) is matches(regex(expression), (key,), ())


def test_an_expression_is_found_anywhere_and_characters_are_whole() -> None:
    index = Index()
    number = index.add(regex("b.d"))
    assert number in index.match(("abéde",), ())
    assert number not in index.match(("bd",), ())


def test_expressions_are_found_in_the_overlay_and_in_sets_and_gone_when_discarded() -> None:
    index = Index()
    numbers = [index.add(regex(f"^s{at}\\.|x{at}$")) for at in range(300)]
    assert list(index.match(("s7.x299",), ())) == sorted((numbers[7], numbers[299]))
    # Far more than half of every set goes, so each is rebuilt on the way.
    for at in range(10, 300):
        index.discard(numbers[at])
        if at % 29 == 0:
            key = f"s7.x{min(at + 1, 299)}"
            expected = {numbers[7]} | ({numbers[at + 1]} if at < 299 else set())
            assert set(index.match((key,), ())) == expected
    assert set(index.match(("s7.x9",), ())) == {numbers[7], numbers[9]}
    assert not index.match(("s200.x200",), ())


@pytest.mark.moderate
@pytest.mark.parametrize("seed", range(10))
def test_what_is_there_throughout_is_found_whatever_comes_and_goes_between_the_steps(
    seed: int,
) -> None:
    chance, index = random.Random(seed), Index(memo_headers_max=0)
    others = [index.add(regex(f"^x{number}")) for number in range(chance.randrange(40))]
    kept = [index.add(regex(text)) for text in ("o$", "^h", "^(hello|bye)$", "z", "^hi$")]
    others += [index.add(regex(f"^y{number}")) for number in range(chance.randrange(12))]
    for turn in range(20):
        found: list[int] = []
        for _ in matched(index, found):
            for number in range(chance.randrange(9)):
                others.append(index.add(regex(f"^w{turn}.{number}.{len(others)}")))
            for _ in range(chance.randrange(min(9, len(others) + 1))):
                index.discard(others.pop(chance.randrange(len(others))))
        assert set(found) >= {kept[0], kept[1], kept[2], kept[4]}
        assert kept[3] not in found


def matched(index: Index, found: list[int]) -> Iterator[None]:
    """Match a header in steps; its patterns are added to `found` in the end."""
    found += yield from index.steps(("hello", "hi"), ())


def test_expressions_that_are_too_large_to_compile_together_are_all_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expressions, "OVERLAY_MAX", 0)
    # Enough for one, far too little for all together.
    monkeypatch.setattr(expressions, "SET_MEMORY_BYTES", 40_000)
    index = Index()
    wires = [regex(f"a.*b.{{{at}}}c|[a-m]{{{at}}}z") for at in range(1, 26)]
    numbers = [index.add(wire) for wire in wires]
    for key in ("abxxxxc", "a" * 30 + "z", "abcabcabcabcabcabc", "q"):
        expected = {n for n, w in zip(numbers, wires, strict=True) if matches(w, (key,), ())}
        assert set(index.match((key,), ())) == expected


class Exhausted:
    """An automaton that ran out of memory: as RE2 does, it answers that nothing matches."""

    def Match(self, key: bytes) -> list[int]:  # noqa: N802 (RE2's name)
        return []


def test_an_automaton_that_runs_out_of_memory_does_not_hide_matches() -> None:
    group = expressions._Set([(7, "^a", 3), (8, "b$", 3), (9, "c", 3)])
    group.members[2] = None
    group.automaton = Exhausted()
    found: list[int] = []
    group.lookup(b"abc", found)
    group.lookup(b"cab", found)
    assert found == [7, 8]


def test_the_size_of_all_expressions_together_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Settle at once, so that sets give back what their members took.
    monkeypatch.setattr(expressions, "OVERLAY_MAX", 0)
    index = Index(programs_max=500 * expressions.REPEATED_WEIGHT)
    numbers = [index.add(regex(f"a{{{at}}}")) for at in (150, 151, 152)]
    for wire in (regex("b{100}"), any_of(regex("a"), regex("c{200}"))):
        with pytest.raises(PatternError) as refused:
            index.add(wire)
        assert refused.value.code == "limit"
    assert len(index) == 3
    index.discard(numbers[0])
    index.add(regex("b{100}"))


def test_what_one_pattern_combines_is_bounded() -> None:
    wires = [regex(f"[ab]{{100}}c{at}") for at in range(20)]
    with pytest.raises(PatternError, match="of the pattern count") as refused:
        compile_pattern(["or", *wires])
    assert refused.value.code == "bad_pattern"
    assert compile_pattern(["or", *wires[:5]]).slow
    assert not compile_pattern(["and", ["topic", "a.*"], ["not", ["prefix", "b"]]]).slow


def test_expressions_under_a_negation_are_bounded_like_others() -> None:
    index = Index()
    numbers = []
    wires = [["and", ["prefix", f"p{at}"], ["not", regex(f"[ab]{{100}}c{at}")]] for at in range(99)]
    refused = ""
    for wire in wires:
        try:
            numbers.append(index.add(wire))
        except PatternError as error:
            refused = error.code
            break
    assert refused == "limit"
    assert 10 < len(numbers) < 60
    before = index.slow
    for number in numbers:
        index.discard(number)
    assert (before, index.slow) == (True, False)
    index.add(["and", ["prefix", "p"], ["not", regex("[ab]{100}c")]])


def test_who_comes_and_goes_again_costs_a_remembered_header_nothing() -> None:
    index = Index()
    kept = index.add(["prefix", "a"])
    assert list(index.match(("ab",), ())) == [kept]
    for at in range(30):
        index.discard(index.add(regex(f"b{at}$")))
    came = index.add(regex("b$"))
    asked: list[str] = []
    log = index._memo._log
    for at, change in enumerate(log):
        if change is not None and change[1] is not None:
            number, holds = change

            def noted(keys: Any, fields: Any, holds: Any = holds, number: int = number) -> bool:
                asked.append(str(number))
                return bool(holds(keys, fields))

            log[at] = number, noted
    assert list(index.match(("ab",), ())) == [kept, came]
    assert len(asked) == 1


def test_a_field_called_regex_is_a_field() -> None:
    pattern = compile_pattern(from_text("fields:region=eu,regex=("))
    assert pattern.matches(("orders",), (("regex", "("), ("region", "eu")))
    assert not pattern.matches(("orders",), (("region", "eu"),))
    assert compile_pattern(from_text("fields:region=eu,regex")).matches(
        ("orders",), (("regex", "x"), ("region", "eu"))
    )
