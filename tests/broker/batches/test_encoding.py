"""Parts of one batch, each for one reader: the right rows, extracted in the cheapest way."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_protocol.extract import Scatter, extract
from malamute_protocol.stamp import Stamp
from malamute_py.broker.batches import encoding
from malamute_py.broker.batches.encoding import FEW_ROWS, PartEncodings
from malamute_py.broker.log.stream import StampedBatch
from tests.broker.shell import Shell

ROWS = 1_000


def batch_of(rows: int, size: int, **options: Any) -> StampedBatch:
    shell = Shell()
    shell.hello(1)
    shell.publish(1, "s", [b"x"])
    frame = encode(
        [bytes([n % 256]) * size for n in range(rows)],
        subject_table=["a", "b.c", "d"], subject_codes=[n % 3 for n in range(rows)], **options,
    )  # fmt: skip
    total = 96 + len(frame)
    stamp = Stamp(1, 0, 0, 0, 1, 70, 5, 1, 0, total, rows, 0, 0).pack()
    return StampedBatch(shell.stream("s"), stamp, frame, Content(frame), 70, 70 + rows, total)


def parts_of(batch: StampedBatch) -> PartEncodings:
    return PartEncodings(batch, 4_096, 0.25, 512)


def mask_of(rows: list[int]) -> int:
    return sum(1 << row for row in rows)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ways in which rows were extracted, in their order."""
    ways: list[str] = []

    def alone(*arguments: Any) -> Any:
        ways.append("alone")
        return extract(*arguments)

    def together(*arguments: Any) -> Any:
        ways.append("together")
        return Scatter(*arguments)

    monkeypatch.setattr(encoding, "extract", alone)
    monkeypatch.setattr(encoding, "Scatter", together)
    return ways


def test_parts_are_what_each_would_be_extracted_to(ways: list[str]) -> None:
    batch, dice = batch_of(ROWS, 100), Random(1)
    parts = parts_of(batch)
    for count in [1, 2, 1, 5, FEW_ROWS, FEW_ROWS + 1, 200, 3]:
        rows = sorted(dice.sample(range(ROWS), count))
        frames, bitmap, size = parts.frames(mask_of(rows))
        chosen = np.isin(np.arange(ROWS), rows)
        assert tuple(frames) == extract(Stamp.unpack(batch.stamp), batch.content, chosen)
        assert (bitmap, size) == (None, len(frames[0]) + len(frames[1]))
    # The second small part makes what all small parts share.
    assert ways == ["alone", "together", "alone", "alone"]


def test_what_is_most_of_a_batch_goes_whole_with_a_bitmap(ways: list[str]) -> None:
    batch = batch_of(ROWS, 100)
    every = mask_of(list(range(ROWS)))
    assert parts_of(batch).frames(every) == ([batch.stamp, batch.frame], None, batch.size)
    frames, bitmap, size = parts_of(batch).frames(every >> 1)
    assert bitmap == (every >> 1).to_bytes(125, "little")
    assert (frames, size) == ([batch.stamp, batch.frame], batch.size)
    assert ways == []


def test_large_rows_are_taken_out_whatever_their_share(ways: list[str]) -> None:
    batch = batch_of(20, 1_000)
    frames, bitmap, _ = parts_of(batch).frames(mask_of(list(range(19))))
    assert (bitmap, Content(frames[1]).head.count, ways) == (None, 19, ["alone"])


def test_of_a_small_or_a_compressed_batch_nothing_is_taken_out(ways: list[str]) -> None:
    for batch in (batch_of(10, 4), batch_of(ROWS, 100, codec="zstd")):
        frames, bitmap, _ = parts_of(batch).frames(0b10)
        assert (frames, bitmap is not None, ways) == ([batch.stamp, batch.frame], True, [])


def test_what_all_parts_share_is_made_when_it_has_paid(ways: list[str]) -> None:
    parts = parts_of(batch_of(8_192, 100))
    for n in range(20):
        parts.frames(1 << n)
    assert ways == ["alone"] * 8 + ["together"]


def test_rows_with_more_than_subjects_and_bodies_are_taken_out_alone(ways: list[str]) -> None:
    parts = parts_of(batch_of(ROWS, 100, client_time_ms=5))
    for n in range(5):
        parts.frames(1 << n)
    assert ways == ["alone"] * 5
