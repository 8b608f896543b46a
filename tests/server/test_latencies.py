"""Histograms of syncs and confirms, by a clock that the test sets."""

from __future__ import annotations

from malamute_py.server.latencies import BOUNDS_S, Histogram, Latencies


def test_a_duration_lies_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = Histogram()
    for took_ns in (1, 250_000, 250_001, 11_000_000_000):
        histogram.add(took_ns)
    facts = histogram.facts()
    assert facts["bounds_s"] == list(BOUNDS_S)
    assert facts["counts"] == [2, 1, *[0] * (len(BOUNDS_S) - 2), 1]
    assert facts["sum_s"] == (1 + 250_000 + 250_001 + 11_000_000_000) / 1e9


def test_a_sync_confirms_the_writes_that_it_covers_each_by_its_own_time() -> None:
    now = 0
    latencies = Latencies(lambda: now)
    latencies.wrote("main", 100, bundles=3)
    now = 1_000_000
    latencies.wrote("main", 200, bundles=1)
    latencies.wrote("other", 50, bundles=7)
    now = 2_000_000
    latencies.confirmed("main", 150)
    assert sum(latencies.confirm.facts()["counts"]) == 3
    assert latencies.confirm.facts()["sum_s"] == 3 * 0.002
    latencies.confirmed("main", 200)
    assert sum(latencies.confirm.facts()["counts"]) == 4
    latencies.confirmed("main", 200)
    latencies.forget("other")
    latencies.confirmed("other", 50)
    assert sum(latencies.confirm.facts()["counts"]) == 4
