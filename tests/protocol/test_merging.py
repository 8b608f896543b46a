"""Small batches become one, and their records stay what they were."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from malamute_protocol.arrow import batches_to_table
from malamute_protocol.batch import Batch, Content, Stamp, encode
from malamute_protocol.merging import merged


def batch_at(base: int, bodies: list[bytes], *, time_ms: int = 1000, **options: Any) -> Batch:
    content = encode(bodies, **options)
    head = Content(content).head
    stamp = Stamp(
        1, 0, 0, 0, 1, base, time_ms, 7, 0, 96 + len(content), head.count, 0, head.content_crc
    )
    return Batch(stamp, Content(content))


def told(batches: list[Batch]) -> list[Any]:
    """Return all that a reader sees of each record."""
    return [
        (
            record.offset, record.append_time_ms, record.client_time_ms, record.expires_at_ms,
            record.keys, dict(record.fields), dict(record.properties), bytes(record.body),
        )
        for batch in batches for record in batch
    ]  # fmt: skip


def some(chance: random.Random, base: int) -> Batch:
    """Return a batch of any size and any columns, of which some rows may be left out."""
    count = chance.choice([1, 1, 1, 2, 5, 64, 65, 200])
    options: dict[str, Any] = {"subject": chance.choice(["a", "b", "a.b"])}
    if chance.random() < 0.3:
        options["subject"] = [chance.choice(["x", "y", ("y", "k")]) for _ in range(count)]
    if chance.random() < 0.3:
        options["fields"] = [chance.choice([None, {"f": "1"}, {"f": "2"}]) for _ in range(count)]
    if chance.random() < 0.3:
        options["client_time_ms"] = [chance.choice([None, 5, -7]) for _ in range(count)]
    if chance.random() < 0.1:
        options["properties"] = {"p": 1}
    if chance.random() < 0.1:
        options["expires_at_ms"] = 99
    bodies = [chance.randbytes(chance.choice([0, 3, 300])) for _ in range(count)]
    batch = batch_at(base, bodies, time_ms=1000 + base // 100, **options)
    if count > 1 and chance.random() < 0.2:
        rows = [True] * count
        rows[chance.randrange(count)] = False
        batch = batch.with_rows(np.array(rows))
    return batch


@pytest.mark.moderate
@pytest.mark.parametrize("seed", range(20))
def test_records_and_their_order_stay(seed: int) -> None:
    chance = random.Random(seed)
    batches: list[Batch] = []
    base = 0
    for _ in range(120):
        batch = some(chance, base)
        base = batch.stamp.next_offset + chance.choice([0, 0, 3])
        batches.append(batch)
    found = list(merged(batches))
    assert told(found) == told(batches)
    assert len(found) < len(batches)


def test_lone_records_become_one_batch_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("malamute_protocol.merging._MERGED_RECORDS_MAX", 100)
    batches = [batch_at(n, [b"%d" % n], subject=f"s{n % 3}") for n in range(250)]
    assert [len(batch) for batch in merged(batches)] == [100, 100, 50]
    assert batches_to_table(batches).column("body").num_chunks == 3


@pytest.mark.moderate
def test_small_batches_become_no_batch_of_more_records_than_one_may_have() -> None:
    subjects = ["a", "b", "c"] * 21
    batches = [batch_at(63 * n, [b""] * 63, subject=subjects) for n in range(1050)]
    table = batches_to_table(batches)
    assert table.column("offset").to_pylist() == list(range(63 * 1050))
    assert [len(batch) for batch in merged(batches)] == [63 * 1040, 63 * 10]


def test_batches_of_which_no_record_was_delivered_add_none() -> None:
    none = np.zeros(2, np.bool_)
    batches = [batch_at(2 * n, [b"0", b"1"], subject="a").with_rows(none) for n in range(3)]
    assert told(list(merged(batches))) == []
    assert batches_to_table(batches).num_rows == 0


@pytest.mark.parametrize(
    "large", [batch_at(1, [b""] * 65, subject="a"), batch_at(1, [bytes(16 << 10)], subject="a")]
)
def test_large_batches_and_lone_small_ones_stay_as_they_are(large: Batch) -> None:
    small = batch_at(0, [b"0"], subject="a")
    last = batch_at(99, [b"1"], subject="a")
    assert list(merged([small, large, last])) == [small, large, last]


def test_batches_that_do_not_follow_each_other_stay_apart() -> None:
    batches = [batch_at(n, [b"%d" % n], subject="a") for n in (5, 6, 2, 3)]
    found = list(merged(batches))
    assert [len(batch) for batch in found] == [2, 2]
    assert told(found) == told(batches)
    other = batch_at(7, [b"7"], subject="a")
    other.stamp = other.stamp._replace(stream=8)
    assert len(list(merged([batches[0], batches[1], other]))) == 2
