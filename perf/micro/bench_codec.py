"""The codec: batches each way, and the framing of commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from malamute_protocol.batch import (
    Batch,
    Content,
    Stamp,
    encode,
    encode_columns,
    encode_fixed,
    extract,
    iter_batches,
)
from malamute_protocol.commands import Confirm, Credit, Publish
from malamute_protocol.framing import decode_message, encode_message

SIZES = (12, 140, 1_120)
RECORDS = 1000


def ways(size: int, records: int) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Yield (name, records handled by a call, the call) for bodies of one size."""
    rng = np.random.default_rng(size)
    blob = rng.bytes(size * records)
    bodies = [blob[at : at + size] for at in range(0, len(blob), size)]
    ragged = [body[: size - n % 4] for n, body in enumerate(bodies)]
    offsets = np.arange(records + 1, dtype=np.int64) * size
    subjects = [f"flights.{n % 300}" for n in range(records)]
    fields = [{"carrier": str(n % 16)} for n in range(16)]
    maps = [fields[n % 16] for n in range(records)]
    content = encode(bodies, subject="forex.eur")
    uneven = encode(ragged, subject="forex.eur")
    mixed = encode(ragged, subject=subjects, fields=maps)

    def stamp(data: bytes) -> Stamp:
        head = Content(data).head
        total, crc = 96 + len(data), head.content_crc
        return Stamp(1, 0, 0, 0, 1, 0, 1_700_000_000_000, 1, 0, total, records, 0, crc)

    frames, mixed_frames = [stamp(content).pack(), content], [stamp(mixed).pack(), mixed]
    uneven_frames = [stamp(uneven).pack(), uneven]
    third = np.arange(records) % 3 == 0
    chosen = int(third.sum())
    view, mixed_view = Content(content), Content(mixed)
    yield "encode, one subject", records, lambda: encode(bodies, subject="forex.eur")
    yield (
        "encode, subject and fields a record",
        records,
        lambda: encode(ragged, subject=subjects, fields=maps),
    )
    yield "encode_columns", records, lambda: encode_columns(offsets, blob, subject="forex.eur")
    yield "encode_fixed", records, lambda: encode_fixed(blob, size, subject="forex.eur")
    yield "check (broker's receive path)", records, lambda: Content(content).check(taking=True)
    yield "check and headers, mixed", records, lambda: _checked(mixed)
    yield "view (head only)", records, lambda: Content(content)
    yield "bodies, equal sizes", records, lambda: [b.bodies() for b in iter_batches(frames)]
    yield "bodies, other sizes", records, lambda: [b.bodies() for b in iter_batches(uneven_frames)]
    yield "records, body of each", records, lambda: _read(frames)
    yield "records, everything of each", records, lambda: _read_all(mixed_frames)
    yield "to_arrow", records, lambda: [b.to_arrow() for b in iter_batches(frames)]
    yield (
        "to_arrow, mixed, decoded",
        records,
        lambda: Batch(stamp(mixed), Content(mixed)).to_arrow(decode=True),
    )
    yield "extract a third", chosen, lambda: extract(stamp(content), view, third)
    yield "extract a third, mixed", chosen, lambda: extract(stamp(mixed), mixed_view, third)
    one = encode(bodies[:1], subject="forex.eur")
    yield "encode a batch of one", 1, lambda: encode(bodies[:1], subject="forex.eur")
    yield "check a batch of one", 1, lambda: Content(one).check()


def _checked(data: bytes) -> None:
    content = Content(data)
    content.check()
    content.headers()


def _read(frames: list[bytes]) -> None:
    for batch in iter_batches(frames):
        for record in batch:
            _ = record.body


def _read_all(frames: list[bytes]) -> None:
    for batch in iter_batches(frames):
        for record in batch:
            _ = record.offset, record.subject, record.fields, record.body


@cache
def ways_of(size: int) -> dict[str, tuple[int, Callable[[], Any]]]:
    return {name: (records, work) for name, records, work in ways(size, RECORDS)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", [name for name, _, _ in ways(1, 8)])
def test_batch(benchmark: Any, per: Any, way: str, size: int) -> None:
    records, work = ways_of(size)[way]
    per(records=records, size=records * size)
    benchmark(work)


@pytest.mark.parametrize("count", [1, 100])
def test_commands(benchmark: Any, per: Any, count: int) -> None:
    commands, contents = some(count)
    per(records=count)
    benchmark(encode_message, commands, contents)


@pytest.mark.parametrize("count", [1, 100])
def test_commands_of_a_message(benchmark: Any, per: Any, count: int) -> None:
    frames = encode_message(*some(count))
    per(records=count)
    benchmark(decode_message, frames)


def some(count: int) -> tuple[list[Any], list[bytes]]:
    commands = [
        (Publish("flights", n), Confirm(n, 3, 1, n, 0), Credit(1, n, n))[n % 3]
        for n in range(count)
    ]
    return commands, [b"x"] * sum(command.content_frames for command in commands)
