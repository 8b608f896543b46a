"""The wire form of patterns, its checks, and the text form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malamute_protocol import pattern
from malamute_protocol.pattern import PatternError, from_text, to_text, validate
from tests.matcher import strategies as worlds


def nested(depth: int) -> Any:
    wire: Any = ["all"]
    for _ in range(depth):
        wire = ["not", wire]
    return wire


@pytest.mark.parametrize(
    ("built", "wire"),
    [
        (pattern.topic("a.*"), ["topic", "a.*"]),
        (pattern.prefix("a."), ["prefix", "a."]),
        (pattern.regex("^a"), ["regex", "^a"]),
        (
            pattern.fields("a", "b=1=2", ("c", "x=y"), ("d", None)),
            ["fields", "all", [["a"], ["b", "1=2"], ["c", "x=y"], ["d"]]],
        ),
        (pattern.fields(mode="any", equal={"a": ""}), ["fields", "any", [["a", ""]]]),
        (pattern.any_of(["all"], ["topic", "a"]), ["or", ["all"], ["topic", "a"]]),
        (pattern.all_of(["topic", "a"]), ["and", ["topic", "a"]]),
        (pattern.not_(pattern.everything()), ["not", ["all"]]),
    ],
)
def test_builders_give_the_wire_form(built: list[Any], wire: list[Any]) -> None:
    assert built == wire


@pytest.mark.parametrize(
    "wire",
    [
        None,
        "topic",
        [],
        {},
        [1],
        [["topic"]],
        ["topic"],
        ["topic", ""],
        ["topic", 5],
        ["topic", "a", "b"],
        ["topic", "a.b*"],
        ["topic", "a.**"],
        ["topic", "\ud800"],
        ["topic", "é" * 128],
        ["prefix", b"a"],
        ["prefix", "a" * 256],
        ["regex", "a" * 1025],
        ["fields", "some", [["a"]]],
        ["fields", "all", []],
        ["fields", "all", "ab"],
        ["fields", "all", [[]]],
        ["fields", "all", [["a", "b", "c"]]],
        ["fields", "all", [["", "b"]]],
        ["fields", "all", [["a", 1]]],
        ["fields", "all", [["a"]] * 65],
        ["fields", "all", [["a", "v" * 1025]]],
        ["and"],
        ["or"],
        ["not"],
        ["not", ["all"], ["all"]],
        ["and", "all"],
        ["all", 1],
        ["or", *[["all"]] * 256],
        ["and", *[["or", *[["all"]] * 20]] * 20],
        nested(8),
        nested(900),
    ],
)
def test_what_is_not_a_pattern_is_refused_with_code_and_reason(wire: Any) -> None:
    with pytest.raises(PatternError) as refused:
        validate(wire)
    assert refused.value.code == "bad_pattern"
    assert 10 < len(refused.value.reason) < 300


@pytest.mark.parametrize(
    ("criterion", "says"),
    [
        ({"a": "b"}, r"not a dict; a mapping goes to fields\(equal=...\)"),
        (5, "not 5"),
        (("a", "b", "c"), "not a tuple"),
        (("a", 5), "must be a string, not 5"),
        ("price>5", "'price>5' compares"),
        ("price>=5", "compares"),
        ("a!=b", "compares"),
    ],
)
def test_what_is_no_criterion_is_refused_by_the_builder(criterion: Any, says: str) -> None:
    with pytest.raises(PatternError, match=says):
        pattern.fields(criterion)
    with pytest.raises(PatternError, match="equal is a mapping"):
        pattern.fields(equal=5)  # type: ignore[arg-type]
    with pytest.raises(PatternError, match="compares"):
        pattern.from_text("fields:price>5")
    assert pattern.from_text(pattern.to_text(pattern.fields(("a>", None)))) == pattern.fields(
        ("a>", None)
    )


def test_the_deepest_and_the_widest_allowed_are_taken() -> None:
    assert validate(nested(7)) == nested(7)
    assert len(validate(["or", *[["all"]] * 255])) == 256


def test_an_unknown_kind_is_named_and_the_known_ones_listed() -> None:
    with pytest.raises(PatternError) as refused:
        validate(["and", ["all"], ["glob", "a*"]])
    assert refused.value.code == "unknown_pattern_kind"
    assert "'glob'" in refused.value.reason
    assert "topic" in refused.value.reason


@pytest.mark.parametrize(
    ("text", "wire"),
    [
        ("forex.*", ["topic", "forex.*"]),
        ("prefix:forex.", ["prefix", "forex."]),
        ("prefix:", ["prefix", ""]),
        ("regex:^a:b", ["regex", "^a:b"]),
        ("fields:a=b,c", ["fields", "all", [["a", "b"], ["c"]]]),
        ("any:a=b=c,d=", ["fields", "any", [["a", "b=c"], ["d", ""]]]),
        ("other:a", ["topic", "other:a"]),
        ('["not", ["topic", "a"]]', ["not", ["topic", "a"]]),
    ],
)
def test_text_is_read_as_the_contract_says(text: str, wire: list[Any]) -> None:
    assert from_text(text) == wire


@pytest.mark.parametrize("text", ["", "fields:", "any:=1", "[", "[1]", "a*", "[" * 5000])
def test_text_that_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(PatternError):
        from_text(text)


@given(worlds.patterns)
def test_every_pattern_has_a_text_that_reads_back_as_itself(wire: list[Any]) -> None:
    assert from_text(to_text(wire)) == wire


awkward = st.text(st.sampled_from('a=,:[é"#*.'), min_size=1, max_size=8)


@pytest.mark.moderate
@given(awkward, awkward, st.sampled_from(("prefix", "regex", "topic", "fields")))
def test_awkward_characters_survive_the_text_form(one: str, other: str, kind: str) -> None:
    wire = ["fields", "any", [[one, other], [other]]] if kind == "fields" else [kind, one + other]
    try:
        validate(wire)
    except PatternError:
        return
    assert from_text(to_text(wire)) == wire
