"""A cap of a batch that several streams share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pyspark_malamute.shares import shares


def test_without_a_cap_no_stream_has_one() -> None:
    assert shares(0, {"a": 5, "b": 7}) == {"a": 0, "b": 0}


def test_what_a_quiet_stream_leaves_goes_to_the_busy_ones() -> None:
    assert shares(100, {"a": 1000, "b": 10, "c": 1000}) == {"b": 10, "a": 45, "c": 45}


def test_a_cap_that_is_less_than_the_streams_are_many_goes_to_the_first() -> None:
    assert shares(2, {"a": 9, "b": 1, "c": 5}) == {"a": 1, "b": 1}


@given(st.integers(1, 1000), st.dictionaries(st.text(max_size=3), st.integers(1, 500), min_size=1))
def test_shares_come_to_the_cap_and_none_is_empty(most: int, wanted: dict[str, int]) -> None:
    found = shares(most, wanted)
    assert min(found.values()) >= 1
    assert sum(found.values()) == most
    if most >= sum(wanted.values()):
        assert all(found[name] >= count for name, count in wanted.items())
