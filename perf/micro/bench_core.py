"""The broker's core alone: streams, services, mail, atomic steps."""

from __future__ import annotations

from typing import Any

import pytest

from perf.micro.cores import mailing, publishing, round_trips, stepping


@pytest.mark.parametrize("subscribers", [0, 1, 100, 1000])
@pytest.mark.parametrize(("records", "width"), [(1, 12), (4096, 12), (64, 1024)])
def test_publish(benchmark: Any, per: Any, records: int, width: int, subscribers: int) -> None:
    per(records=records)
    benchmark(publishing(subscribers=subscribers, records=records, width=width))


def test_publish_a_hundred_batches_in_a_message(benchmark: Any, per: Any) -> None:
    per(records=100)
    benchmark(publishing(subscribers=1, records=1, width=12, bundled=100))


def test_publish_beside_idle_subscriptions(benchmark: Any, small: bool) -> None:
    benchmark(publishing(subscribers=1, records=1, width=12, idle=100 if small else 25_000))


def test_publish_64_subjects(benchmark: Any, per: Any) -> None:
    per(records=4096)
    benchmark(publishing(subscribers=1, records=4096, width=12, subjects=64))


def test_publish_64_subjects_to_a_hundred_who_want_one(benchmark: Any, per: Any) -> None:
    per(records=4096)
    benchmark(
        publishing(
            subscribers=100, records=4096, width=12, subjects=64, pattern=("topic", "orders.7.*")
        )
    )


@pytest.mark.parametrize("memory", [False, True], ids=["log", "memory"])
@pytest.mark.parametrize("count", [1, 64])
def test_request_and_reply(benchmark: Any, per: Any, count: int, memory: bool) -> None:
    per(records=count)
    benchmark(round_trips(count, memory=memory))


@pytest.mark.parametrize("count", [1, 64, 512])
def test_mail(benchmark: Any, per: Any, count: int) -> None:
    per(records=count)
    benchmark(mailing(count))


@pytest.mark.parametrize("parts", [2, 4])
def test_atomic_step(benchmark: Any, per: Any, parts: int) -> None:
    per(records=parts)
    benchmark(stepping(parts))
