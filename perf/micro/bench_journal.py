"""The journal: append, sync, read, over each storage and the record sizes of the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perf.micro.rings import STORAGES, Writer, storage

SIZES = (12, 140, 560, 1_120, 2_940, 11_760)
"""The laminarmq reference's record sizes; batches of 64 KiB, at least one record."""


def records_of(size: int) -> int:
    return max(1, (64 << 10) // size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", STORAGES)
def test_append_a_mebibyte(
    benchmark: Any, disk: Path, kind: str, size: int, per: Callable[..., None]
) -> None:
    writer = Writer(storage(kind, disk), records_of(size), size)
    batches = writer.room()
    per(records=batches * records_of(size), size=batches * writer.batch_bytes)
    benchmark.pedantic(
        writer.append, setup=writer.preparing(batches), rounds=100,
        warmup_rounds=5,
    )  # fmt: skip


@pytest.mark.parametrize("kind", STORAGES)
def test_append_one_record_alone(benchmark: Any, disk: Path, kind: str, per: Any) -> None:
    writer = Writer(storage(kind, disk), 1, 12)
    per(records=100)
    benchmark.pedantic(
        writer.append, setup=writer.preparing(100), rounds=100,
        warmup_rounds=5,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["file", "mapped"])
@pytest.mark.parametrize(("records", "size"), [(1, 12), (1000, 64)])
def test_sync_after_a_batch(benchmark: Any, disk: Path, kind: str, records: int, size: int) -> None:
    writer = Writer(storage(kind, disk), records, size)
    benchmark.pedantic(
        writer.ring.sync, setup=lambda: writer.append(1), rounds=100, warmup_rounds=5
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", STORAGES)
def test_read_eight_mebibytes(benchmark: Any, disk: Path, kind: str, size: int, per: Any) -> None:
    writer = Writer(storage(kind, disk), records_of(size), size)
    batches = 8 * writer.room()
    writer.append(batches)
    per(records=batches * records_of(size), size=batches * writer.batch_bytes)
    benchmark.pedantic(writer.reading(), rounds=20, warmup_rounds=2)
