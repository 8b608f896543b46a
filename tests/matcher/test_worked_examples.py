"""The whitepaper's two worked examples, bit for bit; its table rules over its listing."""

from __future__ import annotations

import pytest

from malamute_protocol.pattern import Pattern, fields, topic
from malamute_py.matcher import Index, compile_pattern, matches

TOPICS = ("forex.*", "*.usd", "*.eur", "#")
TOPIC_TABLE = {
    "forex": "1001",
    "forex.gbp": "1001",
    "forex.eur": "1011",
    "forex.usd": "1101",
    "trade": "0001",
    "trade.usd": "0101",
    "trade.jpy": "0001",
}

FIELD_SUBSCRIPTIONS = (
    ("currency=USD", "urgent"),
    ("currency=EUR",),
    ("market=forex", "currency=EUR"),
    ("urgent",),
)
# Message, hit counts.
FIELD_TABLE = (
    ({"currency": "JPY", "market": "forex", "slow": ""}, "0010"),
    ({"currency": "JPY", "urgent": ""}, "1001"),
    ({"market": "forex", "currency": "EUR"}, "0120"),
)


def bits(index: Index, numbers: list[int], subject: str, held: dict[str, str]) -> str:
    found = index.match((subject,), tuple(sorted(held.items())))
    return "".join("1" if number in found else "0" for number in numbers)


@pytest.mark.parametrize(("subject", "row"), TOPIC_TABLE.items())
def test_topic_example_gives_the_table_of_the_whitepaper(subject: str, row: str) -> None:
    index = Index()
    numbers = [index.add(topic(text)) for text in TOPICS]
    assert numbers == [0, 1, 2, 3]
    assert bits(index, numbers, subject, {}) == row
    for text, bit in zip(TOPICS, row, strict=True):
        assert matches(topic(text), (subject,), ()) is (bit == "1")
        assert compile_pattern(topic(text)).matches((subject,), ()) is (bit == "1")


@pytest.mark.parametrize(("held", "hits"), FIELD_TABLE)
def test_field_example_gives_the_hit_counts_of_the_whitepaper(
    held: dict[str, str], hits: str
) -> None:
    index = Index()
    any_numbers = [index.add(fields(*each, mode="any")) for each in FIELD_SUBSCRIPTIONS]
    all_numbers = [index.add(fields(*each)) for each in FIELD_SUBSCRIPTIONS]
    assert bits(index, any_numbers, "s", held) == "".join("1" if h != "0" else "0" for h in hits)
    assert bits(index, all_numbers, "s", held) == "".join(
        "1" if int(h) == len(each) else "0"
        for h, each in zip(hits, FIELD_SUBSCRIPTIONS, strict=True)
    )


TOPIC_CASES: tuple[tuple[str, str, bool], ...] = (
    ("a.*", "a", True),
    ("a.*", "a.b", True),
    ("a.*", "a.b.c", False),
    ("a.#", "a", False),
    ("a.#", "a.b", True),
    ("a.#", "a.b.c.d", True),
    ("a.#.d", "a.d", False),
    ("a.#.d", "a.b.d", True),
    ("a.#.d", "a.b.c.d", True),
    ("a.#.d", "a.d.d.e", False),
    ("#.d", "d", False),
    ("#.d", "a.d", True),
    ("#.#", "a", False),
    ("#.#", "a.b", True),
    ("*", "a", True),
    ("*", "a.b", False),
    ("*.*", "a", True),
    ("a.*.*", "a", False),
    ("a.*.*", "a.b", True),
    ("#.*", "a", True),
    ("#", "", True),
    ("*", "", True),
    ("a.*.c", "a..c", True),
    ("a.*", "ab", False),
)


@pytest.mark.parametrize(("text", "subject", "expected"), TOPIC_CASES)
def test_topic_wildcards_mean_what_the_specification_says(
    text: str, subject: str, expected: bool
) -> None:
    pattern: Pattern = topic(text)
    index = Index()
    number = index.add(pattern)
    assert matches(pattern, (subject,), ()) is expected
    assert compile_pattern(pattern).matches((subject,), ()) is expected
    assert (number in index.match((subject,), ())) is expected


def test_any_key_of_a_record_may_match() -> None:
    index = Index()
    number = index.add(topic("b.*"))
    assert number in index.match(("a.x", "b.x"), ())
    assert number not in index.match(("a.x", "c.x"), ())
