"""Measure typed streams: rows of a table into a broker, and its batches out as columns.

    python -m perf.typed [--json] [--rows 2000000]

Rows have an int64, a float64, an int32 and a string of 8 characters, in a stream in memory. Each
way out reads all of them, three times, and the quickest counts. Beside each way stands how many of
the numeric columns of a batch lie in the bytes that came from the socket, without a copy. The way
in is measured into a stream that checks the schema's id, and into one that validates in full.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

import malamute_py as malamute
from malamute_protocol.batch import Batch
from malamute_py.demo.daemon import Daemon
from perf.curves.brokers import OUT
from perf.figures import Figure, show

ROUNDS = 3
NUMBERS = ("n", "x", "i")


def table_of(rows: int) -> pa.Table:
    array: Any = pa.array
    names = array([f"{number:08}" for number in range(1_000)])
    return pa.table(
        {
            "n": array(np.arange(rows)),
            "x": array(np.random.default_rng(1).random(rows)),
            "i": array(np.arange(rows, dtype="i4")),
            "name": names.take(array(np.arange(rows) % 1_000)),
        }
    )


def arrow_columns(batch: Batch) -> list[Any]:
    rows = batch.to_arrow()
    return [rows.column(name) for name in NUMBERS]


def polars_columns(batch: Batch) -> list[Any]:
    frame = batch.to_polars()
    return [frame[name].to_arrow() for name in NUMBERS]


def pandas_columns(batch: Batch) -> list[Any]:
    frame = batch.to_pandas()
    return [frame[name].array.__arrow_array__().chunk(0) for name in NUMBERS]


WAYS: dict[str, tuple[Callable[[Batch], Any], Callable[[Batch], list[Any]]]] = {
    "Arrow": (Batch.to_arrow, arrow_columns),
    "polars": (Batch.to_polars, polars_columns),
    "pandas": (Batch.to_pandas, pandas_columns),
}


def in_place(batch: Batch, columns: list[Any]) -> int:
    """Return how many columns have their values in the bytes of the batch."""
    first = np.frombuffer(batch.content.view, np.uint8).ctypes.data
    end = first + len(batch.content.view)
    return sum(first <= column.buffers()[1].address < end for column in columns)


def read(client: malamute.SyncClient, use: Callable[[Batch], Any], rows: int) -> float:
    """Return the seconds that the quickest round took."""
    rounds = []
    for _ in range(ROUNDS):
        begun, count = time.perf_counter(), 0
        with client.subscribe("typed", start="earliest", until="tail") as reading:
            for batch in reading.batches():
                use(batch)
                count += len(batch)
        rounds.append(time.perf_counter() - begun)
        assert count == rows, f"{count} rows of {rows}"
    return min(rounds)


def published(client: malamute.SyncClient, table: pa.Table) -> list[Figure]:
    """Publish a table with and without full validation by turns, and once into `typed`."""
    streams: tuple[Literal["schema", "full"], ...] = ("schema", "full")
    best: dict[str, float] = {}
    for number in range(2 * ROUNDS):
        for validate in streams if number % 2 else reversed(streams):
            client.create_stream(
                validate, schema=table.schema, validate=validate, memory=True,
                ring_bytes=max(1 << 30, 4 * table.nbytes),
            )  # fmt: skip
            begun = time.perf_counter()
            client.publish_table(validate, table, subject="a.b.c")
            took = time.perf_counter() - begun
            best[validate] = min(took, best.get(validate, took))
            client.remove_stream(validate)
    client.publish_table("typed", table, subject="a.b.c")
    return [
        Figure("publish_table", table.num_rows / best["schema"], "rows/s"),
        Figure("publish_table, validated in full", table.num_rows / best["full"], "rows/s"),
        Figure("validated in full beside by id", best["full"] / best["schema"], "times as long"),
    ]


def measure(rows: int) -> list[Figure]:
    table = table_of(rows)
    figures = []
    OUT.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=OUT) as folder,
        Daemon(Path(folder)) as daemon,
        malamute.connect_sync(daemon.endpoint) as client,
    ):
        client.create_stream(
            "typed", schema=table.schema, memory=True, ring_bytes=max(1 << 30, 4 * table.nbytes)
        )
        figures += published(client, table)
        with client.subscribe("typed", start="earliest", until="tail") as reading:
            first = reading.next_batch(60_000)
        assert first is not None
        for name, (use, columns) in WAYS.items():
            figures.append(Figure(f"to {name}", rows / read(client, use, rows), "rows/s"))
            left = in_place(first, columns(first))
            figures.append(Figure(f"to {name}, columns without a copy", left, "of 3"))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rows", type=int, default=2_000_000, help="of the table")
    options = parser.parse_args()
    figures = measure(options.rows)
    show(figures, as_json=options.json)


if __name__ == "__main__":
    main()
