"""Durations by bucket."""

from __future__ import annotations

from malamute_py.broker.structures.histogram import BOUNDS_S, Histogram


def test_a_duration_lies_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = Histogram()
    for took_ns in (1, 250_000, 250_001, 11_000_000_000):
        histogram.add(took_ns)
    facts = histogram.facts()
    assert facts["bounds_s"] == list(BOUNDS_S)
    assert facts["counts"] == [2, 1, *[0] * (len(BOUNDS_S) - 2), 1]
    assert facts["sum_s"] == (1 + 250_000 + 250_001 + 11_000_000_000) / 1e9
