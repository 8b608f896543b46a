"""Rows that a pattern on subjects selects, found by header table."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol.batch import encode
from malamute_protocol.content import Content
from malamute_py.matcher import SubjectRows, compile_pattern, rows_by_subject
from malamute_py.matcher.rows import SUBJECTS_MAX, VERDICT_CHARACTERS_MAX, VERDICTS_MAX


def content(*subjects: Any, fields: Any = None) -> Content:
    return Content(encode([b""] * len(subjects), subject=list(subjects), fields=fields))


def places(pattern: Any, of: Content) -> list[int] | None:
    rows = rows_by_subject(pattern)
    assert rows is not None
    found = rows(of)
    return None if found is None else found.tolist()


@pytest.mark.parametrize(
    "pattern",
    [
        ["topic", "a"], ["topic", "*.b"], ["prefix", "a"], ["all"], ["not", ["topic", "a"]],
        ["or", ["topic", "a"], ["topic", "c.b"]],
    ],
)  # fmt: skip
def test_the_rows_are_those_whose_header_matches(pattern: Any) -> None:
    matches = compile_pattern(pattern).matches
    for of in (
        content("a", "c.b", ["x", "a"], "a", "q"),
        content("a", "a"),
        content("q"),
        content("a", "c.b", "a", fields=[{"f": "1"}, None, {"f": "2"}]),
    ):
        headers, codes = of.headers()
        which = [0] * len(of) if codes is None else codes.tolist()
        assert places(pattern, of) == [
            row for row, code in enumerate(which) if matches(*headers[code])
        ]


def test_a_subject_is_matched_once_for_all_batches_with_its_table() -> None:
    asked: list[Any] = []

    def matches(keys: Any, fields: Any) -> bool:
        asked.append(keys)
        return bool(keys == ("b",))

    rows = SubjectRows(matches, b"")
    for _ in range(3):
        found = rows(content("a", "b", "b", "c"))
        assert found is not None
        assert found.tolist() == [1, 2]
    assert asked == [("a",), ("b",), ("c",)]


def test_a_subject_is_matched_once_however_many_tables_have_it() -> None:
    asked: list[Any] = []

    def matches(keys: Any, fields: Any) -> bool:
        asked.append(keys)
        return bool(keys[-1] == "b")

    rows = SubjectRows(matches, b"")
    for subjects, wanted in (
        (["a", "b", "a"], [1]),
        (["b", "c", "a"], [0]),
        (["c", ["c", "b"], "b", "d"], [1, 2]),
        (["a", "b"], [1]),
    ):
        found = rows(content(*subjects))
        assert found is not None
        assert found.tolist() == wanted
    assert asked == [("a",), ("b",), ("c",), ("c", "b"), ("d",)]


def test_the_verdicts_that_are_kept_are_bounded() -> None:
    asked: list[Any] = []

    def matches(keys: Any, fields: Any) -> bool:
        asked.append(keys)
        return True

    rows = SubjectRows(matches, b"")
    long = "k" * (VERDICT_CHARACTERS_MAX + 1)
    for at in range(3):
        rows(content(long, f"{at}"))
    assert asked.count((long,)) == 3
    for first in range(0, 3 * VERDICTS_MAX, 1_000):
        rows(content(*map(str, range(first, first + 1_000))))
        assert len(rows._verdicts) <= VERDICTS_MAX
    found = rows(content(*map(str, range(SUBJECTS_MAX))))
    assert found is not None
    assert len(found) == SUBJECTS_MAX
    assert len(rows._verdicts) <= VERDICTS_MAX


def test_equal_patterns_are_one_selection_and_others_are_not() -> None:
    def selection(pattern: Any) -> bytes:
        rows = rows_by_subject(pattern)
        assert rows is not None
        return rows.selection

    one, two = ["topic", "a"], ["topic", "b"]
    assert selection(["or", one, two]) == selection(["or", two, one, one])
    others = [one, two, ["prefix", "a"], ["or", one, two], ["not", one], ["all"]]
    assert len({selection(each) for each in others}) == len(others)


def test_a_pattern_that_asks_for_fields_has_no_rows_by_subject() -> None:
    assert rows_by_subject(["fields", "all", [["f"]]]) is None
    assert rows_by_subject(["and", ["topic", "a"], ["not", ["fields", "all", [["f"]]]]]) is None


def test_a_batch_of_very_many_subjects_is_not_looked_into() -> None:
    subjects = [f"s.{number}" for number in range(SUBJECTS_MAX + 1)]
    assert places(["topic", "s.1"], content(*subjects)) is None
    assert places(["topic", "s.1"], content(*subjects[:-1])) == [1]


def test_a_batch_whose_header_table_is_quick_only_in_steps_is_not_looked_into() -> None:
    maps: Any = [{"f": f"{number}" * 40} for number in range(2000)]
    assert places(["topic", "a"], content(*["a"] * 2000, fields=maps)) is None
