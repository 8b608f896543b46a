"""Plans of a real ring whose cap counts what is selected, compared with counting by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from malamute_py.client.sync.client import SyncClient
from malamute_py.embedded import EmbeddedBroker
from malamute_py.server.journaling import queries

SUBJECTS = ["a.b", "a.b", "a.b", "c.d"]
RECORDS = 3000


@pytest.fixture(scope="module")
def client() -> Iterator[SyncClient]:
    """A link to a broker with one stream, in batches of every size up to 300."""
    with EmbeddedBroker() as broker, broker.connect_sync() as linked:
        sizes = [1, 2, 300, 17, 180]
        first = 0
        while first < RECORDS:
            count = min(sizes[first % len(sizes)], RECORDS - first)
            rows = range(first, first + count)
            linked.publish_many(
                "s", [b"x" * 200] * count, subjects=[subject(row) for row in rows],
                fields=[{"even": str(row % 2 == 0)} for row in rows],
                client_time_ms=[row * 1000 for row in rows],
            )  # fmt: skip
            first += count
        yield linked


def subject(row: int) -> str:
    return "rare" if row in (41, 2700) else SUBJECTS[row % len(SUBJECTS)]


@pytest.mark.parametrize("most", [1, 2, 99, 700, 10_000])
@pytest.mark.parametrize("start", [0, 37, 2950])
@pytest.mark.parametrize(
    ("pattern", "window", "selects"),
    [
        ("#", None, lambda row: True),
        ("c.#", None, lambda row: subject(row) == "c.d"),
        ("rare", None, lambda row: subject(row) == "rare"),
        ("fields:even=True", None, lambda row: row % 2 == 0),
        ("a.b", (500_000, 900_000), lambda row: subject(row) == "a.b" and 500 <= row < 900),
        ("#", (500_000, 900_000), lambda row: 500 <= row < 900),
        ("nothing", None, lambda row: False),
    ],
)
def test_a_plan_ends_after_the_last_selected_record_that_its_cap_admits(
    client: SyncClient, pattern: str, window: Any, selects: Any, start: int, most: int
) -> None:
    plan = client.plan_read("s", pattern, start=start, records_max=most, client_time=window)
    selected = [row for row in range(start, RECORDS) if selects(row)]
    if len(selected) < most:
        assert plan.to_offset == RECORDS
        assert plan.records == len(selected)
    else:
        assert plan.to_offset == selected[most - 1] + 1
        assert plan.records == most


def test_a_plan_that_its_cap_of_bytes_ends_counts_no_more_than_its_offsets(
    client: SyncClient,
) -> None:
    plan = client.plan_read("s", "a.b", start=0, records_max=2000, bytes_max=1)
    assert 0 < plan.to_offset < 700
    assert plan.records == plan.to_offset


@pytest.mark.moderate
def test_a_plan_that_has_looked_through_much_ends_early_and_is_asked_again(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "_COUNTED_BYTES", 1)
    monkeypatch.setattr(queries, "_READ_BYTES", 1)
    position = records = questions = 0
    while position < RECORDS and records < 700:
        plan = client.plan_read("s", "c.#", start=position, records_max=700 - records)
        assert plan.to_offset > position
        position, records, questions = plan.to_offset, records + plan.records, questions + 1
    assert questions > 5
    assert records == 700
    assert position == [row for row in range(RECORDS) if subject(row) == "c.d"][699] + 1
