"""The matcher: the whitepaper's work, headers never seen, changes beside a full memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle
from typing import Any

import pytest

from malamute_py.matcher import Index
from perf.suite.patterns import (
    Header,
    field_headers,
    field_patterns,
    topic_headers,
    topic_patterns,
    whitepaper,
)


def filled(wires: Any, **settings: int) -> Index:
    index = Index(**settings)
    for wire in wires:
        index.add(wire)
    return index


@cache
def topics(count: int) -> Index:
    """Make an index that remembers one header, so that every header is new."""
    return filled(topic_patterns(count), memo_headers_max=1)


@cache
def fields(count: int, values: int, least: int) -> Index:
    return filled(field_patterns(count, values, least), memo_headers_max=1)


def each(index: Index, headers: list[Header]) -> Callable[[], None]:
    """Match a hundred headers, others each time; a call is long enough for the clock."""
    following = cycle(headers).__next__
    match = index.match

    def match_a_hundred() -> None:
        for _ in range(100):
            match(*following())

    return match_a_hundred


def size(count: int, small: bool) -> int:
    return min(count, 100) if small else count


def test_whitepaper_compile(benchmark: Any, small: bool) -> None:
    wires, headers = whitepaper()
    if small:
        wires, headers = wires[:100], headers[:100]

    def compile_all() -> None:
        index = filled(wires)
        for header in headers:
            index.match(*header)

    benchmark.pedantic(compile_all, rounds=5, warmup_rounds=1)


def test_whitepaper_match_and_enumerate(benchmark: Any, per: Any, small: bool) -> None:
    wires, headers = whitepaper()
    index = filled(wires[:100] if small else wires)

    def match_all() -> None:
        for keys, values in headers:
            index.match(keys, values).to_array()

    match_all()
    per(records=len(headers))
    benchmark(match_all)


@pytest.mark.parametrize("count", [100, 10_000, 100_000])
def test_new_subject(benchmark: Any, per: Any, small: bool, count: int) -> None:
    per(records=100)
    benchmark(each(topics(size(count, small)), topic_headers(2000, size(count, small))))


@pytest.mark.parametrize("count", [100, 10_000, 100_000])
@pytest.mark.parametrize(("least", "values"), [(10, 4), (10, 100), (3, 4), (3, 100)])
def test_new_ten_fields(
    benchmark: Any, per: Any, small: bool, least: int, values: int, count: int
) -> None:
    per(records=100)
    index = fields(size(count, small), values, least)
    benchmark.pedantic(each(index, field_headers(2000, values)), rounds=15, warmup_rounds=1)


def test_known_subject(benchmark: Any, per: Any, small: bool) -> None:
    index = filled(topic_patterns(size(10_000, small)))
    headers = topic_headers(1000, size(10_000, small))
    for header in headers:
        index.match(*header)
    per(records=100)
    benchmark(each(index, headers))


def test_a_pattern_comes_and_goes(benchmark: Any, small: bool) -> None:
    index = filled(topic_patterns(size(10_000, small)))
    for at in range(size(65_536, small)):
        index.match((f"p{at % 50}.q{at}.r.s",), ())
    numbers = iter(range(1 << 40))

    def come_and_go() -> None:
        at = next(numbers)
        index.discard(index.add(["topic", f"p{at % 50}.new{at}.*"]))

    benchmark(come_and_go)
