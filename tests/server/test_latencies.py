"""Histograms of syncs and confirms, by a clock that the test sets."""

from __future__ import annotations

from malamute_py.server.latencies import Latencies


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
