"""A small recording as tests want it, made by hand."""

from __future__ import annotations

from perf.suite.machine import Commit, Disk, Machine
from perf.suite.results import ColumnFacts, Limit, Measured, Results, Run, WorkFacts
from perf.suite.targets import OURS


def column(name: str, *, persistent: bool = False, synced: bool = False) -> ColumnFacts:
    peer, rest = name.split("-", 1)
    mode, client = rest.rsplit("-", 1)
    return ColumnFacts(name, peer, mode, client, f"{peer} {mode}, {client}", persistent, synced)


def runs(figure: str, *values: float) -> list[Run]:
    return [Run(1000, {figure: value, "mb_s": value * 140 / 1e6}) for value in values]


def recording() -> Results:
    """Ours and three columns at one to one with 140 B; one of them failed."""
    return Results(
        machine=Machine("a processor", 2, 1 << 34, "a system", "6.1", "3.11.7",
                        Disk("disk", "ext4", "rw", "write back")),
        commit=Commit("0123456789abcdef", "2026-01-01", dirty=False),
        command="python -m perf",
        started="2026-01-01T00:00:00+00:00",
        ended="2026-01-01T00:30:00+00:00",
        seconds=1800.0,
        runs=3,
        left_out={"redis": "redis-server is not installed: apt-get install redis-server"},
        columns=[
            column(OURS, persistent=True, synced=True),
            column("nats-core-native"),
            column("nats-core-python"),
            column("nats-jetstream-native", persistent=True),
        ],
        works=[
            WorkFacts("one-to-one/140", "one-to-one", "one to one, 140 B", "records_s", 140),
            WorkFacts("latency/1000", "latency", "one way at 1,000/s", "p50_us", 140),
        ],
        measured=[
            Measured("one-to-one/140", OURS, runs("records_s", 5e6, 4e6, 6e6)),
            Measured("one-to-one/140", "nats-core-native", runs("records_s", 4e6, 4.1e6, 3.9e6)),
            Measured("one-to-one/140", "nats-core-python", runs("records_s", 1e6, 1e6, 1e6)),
            Measured("one-to-one/140", "nats-jetstream-native",
                     [Run(10, error="publish ended with status 1:\nno such stream")]),
            Measured("latency/1000", OURS, [Run(10, {"p50_us": 90.0, "p99_us": 300.0})]),
            Measured("latency/1000", "nats-core-python",
                     [Run(10, {"p50_us": 100.0, "p99_us": 200.0})]),
        ],
        limits=[Limit("zmq-large", "raw ZeroMQ, 64 KiB", "MB/s", [5000.0, 5100.0, 4900.0])],
        curves=[
            {
                "name": "streams", "title": "A record among many streams", "axis": "streams",
                "expected": "flat", "note": "",
                "lines": [
                    {"name": "cost", "unit": "us", "slope": 0.02, "tail": 0.01, "note": "",
                     "points": [{"x": 1, "y": 2.0, "runs": [2.0], "note": ""},
                                {"x": 1000, "y": 2.2, "runs": [2.2], "note": ""}]},
                ],
            }
        ],
    )  # fmt: skip
