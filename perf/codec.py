"""What the batch codec costs by itself: records a second of each way through it.

One process, no sockets. Prints one line a way and body size, and the bytes of body a second;
--json for a program. Each way runs for about --seconds; the best of three counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

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

SIZES = (12, 140, 1024)


def rate(work: Callable[[], Any], seconds: float) -> float:
    """Calls a second, the best of three. Results are kept one call long, as a sender's are."""
    best = 0.0
    kept = work()
    for _ in range(3):
        calls, start = 0, perf_counter()
        while (spent := perf_counter() - start) < seconds / 3:
            kept = work()
            calls += 1
        best = max(best, calls / spent)
    del kept
    return best


def ways(size: int, records: int) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """(name, records handled a call, the call) for bodies of one size."""
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
    yield "check (broker's receive path)", records, lambda: Content(content).check()
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


def messages() -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Framing: commands a second, alone and 100 in a message."""
    for count in (1, 100):
        commands = [
            (Publish("flights", n), Confirm(n, 3, 1, n, 0), Credit(1, n, n))[n % 3]
            for n in range(count)
        ]
        contents = [b"x"] * sum(command.content_frames for command in commands)
        frames = encode_message(commands, contents)
        yield f"encode_message of {count}", count, partial(encode_message, commands, contents)
        yield f"decode_message of {count}", count, partial(decode_message, frames)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1000, help="records a batch")
    parser.add_argument("--seconds", type=float, default=0.6, help="time for each way")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = []
    for size in SIZES:
        for name, records, work in ways(size, options.records):
            results.append((name, size, records * rate(work, options.seconds)))
    for name, records, work in messages():
        results.append((name, 0, records * rate(work, options.seconds)))
    if options.json:
        print(
            json.dumps([dict(zip(("way", "bytes", "per_s"), row, strict=True)) for row in results])
        )
        return
    for name, size, per_s in results:
        volume = f"{per_s * size / 1e6:>10,.0f} MB/s" if size else ""
        print(f"{name:<38}{size or '':>6}{per_s:>16,.0f}/s{volume}")


if __name__ == "__main__":
    main()
