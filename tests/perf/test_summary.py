"""Medians, spreads, and what is called a change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.suite.summary import changed, median, spread

VALUES = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=7)


def test_the_spread_is_how_far_the_extremes_lie_apart_as_a_share_of_the_median() -> None:
    assert spread([90.0, 100.0, 120.0]) == pytest.approx(0.3)
    assert spread([100.0]) == 0.0


def test_runs_that_overlap_did_not_change() -> None:
    assert changed([100.0, 110.0, 105.0], [108.0, 120.0, 130.0]) is None


def test_a_change_smaller_than_the_noise_floor_is_none() -> None:
    assert changed([100.0, 100.1, 100.2], [103.0, 103.1, 103.2]) is None


def test_a_change_smaller_than_the_runs_spread_is_none() -> None:
    assert changed([100.0, 100.0, 100.0], [101.0, 110.0, 130.0]) is None


def test_a_change_beyond_the_noise_is_told_as_a_ratio() -> None:
    assert changed([100.0, 101.0, 99.0], [200.0, 202.0, 198.0]) == pytest.approx(2.0)
    assert changed([100.0, 101.0, 99.0], [50.0, 51.0, 49.0]) == pytest.approx(0.5)


@given(VALUES)
def test_nothing_changed_against_itself(values: list[float]) -> None:
    assert changed(values, values) is None


@given(VALUES)
def test_the_median_lies_between_the_extremes(values: list[float]) -> None:
    assert min(values) <= median(values) <= max(values)
