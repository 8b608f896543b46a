"""Plans of streams from which records were purged, trimmed, aged or moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from malamute_py.broker.log.stream import NEVER
from malamute_py.broker.ready import IndexQuery
from malamute_py.client.sync.client import SyncClient
from malamute_py.embedded import EmbeddedBroker
from malamute_py.server.journaling.queries import answer_query
from tests.journal.rings import memory_place, put

RECORDS = 2_000


@pytest.fixture(scope="module")
def client() -> Iterator[SyncClient]:
    with EmbeddedBroker() as broker, broker.connect_sync() as linked:
        yield linked


def filled(client: SyncClient, stream: str) -> None:
    """Publish records by turns under "a" and "b", after 1,000 of "a" alone, in batches of 100."""
    for first in range(0, RECORDS, 100):
        subjects = [
            "a" if row < 1_000 or row % 2 == 0 else "b" for row in range(first, first + 100)
        ]
        client.publish_many(stream, [b"x" * 400] * 100, subjects=subjects)


def read(client: SyncClient, stream: str, start: int, end: int) -> list[int]:
    """Offsets that a read of [start, end) brings."""
    with client.subscribe(
        stream, start=start, end=end, on_notice=lambda _: None
    ) as reading:  # fmt: skip
        return [record.offset for record in reading]


def test_a_cap_counts_no_record_that_was_purged(client: SyncClient) -> None:
    filled(client, "purged")
    client.purge("purged", "a", before=1_500)
    plan = client.plan_read("purged", start=0, records_max=300)
    brought = read(client, "purged", 0, plan.to_offset)
    assert plan.records == len(brought) == 300
    assert brought[0] == 1_001
    assert plan.to_offset == brought[-1] + 1
    whole = client.plan_read("purged", start=0, records_max=10_000)
    assert whole.records == len(read(client, "purged", 0, RECORDS)) == 750


def test_what_is_purged_as_a_whole_weighs_nothing_in_a_plan(client: SyncClient) -> None:
    filled(client, "light")
    before = client.plan_read("light", start=0, split_bytes=1)
    client.purge("light", "a", before=1_500)
    plan = client.plan_read("light", start=0, split_bytes=1)
    assert 0.4 * before.bytes < plan.bytes < 0.6 * before.bytes
    assert plan.splits[0].from_offset == 0
    assert plan.splits[0].to_offset > 1_000
    assert plan.to_offset == RECORDS
    nothing = client.plan_read("light", start=0, end=1_000)
    assert nothing.bytes == 0
    assert nothing.to_offset == 1_000


def test_a_pattern_and_a_purge_count_together(client: SyncClient) -> None:
    filled(client, "both")
    client.purge("both", "b", before=1_200)
    plan = client.plan_read("both", "b", start=0, records_max=10_000)
    assert plan.records == 400
    assert client.plan_read("both", "b", start=0, records_max=1).to_offset == 1_202


def test_a_plan_tells_what_a_trim_removed(client: SyncClient) -> None:
    filled(client, "trimmed")
    client.trim("trimmed", 700)
    plan = client.plan_read("trimmed", start=0, records_max=300)
    assert (plan.first, plan.trimmed) == (700, 700)
    assert (plan.from_offset, plan.to_offset, plan.records) == (0, 1_000, 300)
    assert read(client, "trimmed", 0, 1_000) == list(range(700, 1_000))


def test_a_plan_leaves_out_what_grew_too_old_in_the_journal() -> None:
    ring, _ = memory_place().open()
    for number in range(60):
        put(ring, 1, b"a", b"b", time_ms=1_000 + 10 * number)

    def plan(**arguments: Any) -> dict[str, Any]:
        asked = {
            "from": 3, "end": 120, "pattern": ["all"], "candidates": None, "records_max": 20,
            "bytes_max": 0, "split_bytes": 0, "client_time": None, "splits_max": 100, "purges": (),
            "oldest_ms": 1_300, "pinned": NEVER, "now_ms": 2_000, **arguments,
        }  # fmt: skip
        found: dict[str, Any] = answer_query(ring, IndexQuery("r", 1, 0, "plan", asked))
        return found

    found = plan()
    assert (found["young"], found["to"], found["records"]) == (60, 80, 20)
    assert found["splits"][0][0] == 60
    assert plan(pinned=50)["to"] == 70
    assert plan(oldest_ms=0)["to"] == 23
    old = plan(oldest_ms=5_000)
    assert (old["young"], old["to"], old["records"], old["splits"]) == (120, 120, 0, [])
