"""A recording over a made-up peer: its server sleeps, its driver says what it is told to say."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from perf.peers.peer import Column, Peer, Server, ServerFailed, running
from perf.suite.recording import Listener, Plan, Recording
from perf.suite.results import Measured, Results, Run, load
from perf.suite.works import Work
from tests.perf.recorded import recording

pytestmark = [pytest.mark.slow, pytest.mark.system]

DRIVER = """
import json, sys
keys = dict(word.partition("=")[::2] for word in sys.argv[1:])
count, missing = int(keys["count"]), int(keys.get("missing", 0))
print(json.dumps({"ready": True, "client": "made up 1"}), flush=True)
sys.stdin.readline()
if "dies" in keys:
    sys.exit("no such queue in /" + "home/ann/data")
facts = {"begun_ns": 10**9, "ended_ns": 2 * 10**9, "cpu_s": 0.5}
if keys["role"] == "publish":
    facts["confirmed"] = count
else:
    facts |= {"received": count - missing, "missing": missing, "duplicates": 0, "misordered": 0}
print(json.dumps(facts), flush=True)
sys.stdin.readline()
"""

WORK = Work(
    name="one-to-one/140", kind="stream", title="one to one",
    roles=frozenset({"publish", "subscribe"}), seconds=1.0,
)  # fmt: skip


def column(mode: str, *more: str) -> Column:
    return Column(
        peer="other",
        mode=mode,
        client="python",
        label=mode,
        persistent=True,
        synced=False,
        roles=frozenset({"publish", "subscribe"}),
        command=(sys.executable, "-c", DRIVER, *more),
        rates={140: 1000},
    )


class Other:
    """Counts the servers that it started."""

    name = "other"

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self.started: list[str] = []
        self.folders: list[Path] = []

    def missing(self) -> str:
        return ""

    def versions(self) -> dict[str, str]:
        return {"server": "1"}

    def absent(self) -> dict[str, str]:
        return {}

    def columns(self) -> Sequence[Column]:
        return self._columns

    @contextmanager
    def server(self, column: Column, folder: Path) -> Iterator[Server]:
        if column.mode == "broken":
            raise ServerFailed("the port is taken")
        self.started.append(column.mode)
        self.folders.append(folder)
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        with running(command, folder, lambda: True, url="u", version="1.2") as server:
            yield server


class Log(Listener):
    def __init__(self) -> None:
        self.order: list[tuple[int, str]] = []
        self.skipped = 0

    def skips(self, work: Work, run: int, column: Column) -> None:
        self.skipped += 1

    def ends(self, work: Work, run: int, column: Column, outcome: Run) -> None:
        self.order.append((run, column.mode))


def empty() -> Results:
    results = recording()
    results.columns, results.works, results.measured = [], [], []
    return results


def record(
    other: Other, folder: Path, results: Results | None = None, runs: int = 2
) -> tuple[Results, Log]:
    log = Log()
    plan = Plan((WORK,), tuple(other.columns()), runs)
    peers: dict[str, Peer] = {"other": other}
    out = folder / "results.json"
    Recording(plan, peers, results or empty(), out, folder / "data", log).run()
    return load(out), log


def test_runs_are_interleaved_and_kept_with_their_figures(tmp_path: Path) -> None:
    other = Other([column("a"), column("b")])
    results, log = record(other, tmp_path)
    assert log.order == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert other.started == ["a", "b"]
    measured = results.of("one-to-one/140", "other-a-python")
    assert measured is not None
    assert measured.values("records_s") == [1000.0, 1000.0]
    assert measured.values("consumer_cpu_us") == [500.0, 500.0]
    facts = results.column("other-a-python")
    assert facts is not None
    assert (facts.server_version, facts.client_version) == ("1.2", "made up 1")
    assert not any(folder.exists() for folder in other.folders)


def test_what_fails_is_kept_with_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    other = Other([
        column("loses", "missing=1"), column("dies", "dies=1"), column("broken"), column("good"),
    ])  # fmt: skip
    results, log = record(other, tmp_path, runs=3)
    errors = {one.column: one.error for one in results.measured}
    assert "missing 1" in errors["other-loses-python"]
    assert "received 999" in errors["other-loses-python"]
    assert "no such queue in data" in errors["other-dies-python"]
    assert errors["other-broken-python"] == "the port is taken"
    assert errors["other-good-python"] == ""
    for one in results.measured:
        assert bool(one.good) == (one.column == "other-good-python")
    # Who failed twice is not asked a third time.
    assert log.order.count((2, "good")) == 1
    assert [mode for run, mode in log.order if run == 2] == ["good"]


def test_a_server_begins_anew_after_a_failure(tmp_path: Path) -> None:
    other = Other([column("dies", "dies=1")])
    record(other, tmp_path)
    assert other.started == ["dies", "dies"]


def test_a_recording_that_goes_on_does_only_what_is_left(tmp_path: Path) -> None:
    first, _ = record(Other([column("a")]), tmp_path, runs=1)
    other = Other([column("a"), column("b")])
    results, log = record(other, tmp_path, first, runs=2)
    assert log.order == [(0, "b"), (1, "a"), (1, "b")]
    assert log.skipped == 1
    assert [len(one.runs) for one in results.measured] == [2, 2]
    assert [one.name for one in results.works] == ["one-to-one/140"]


PACED = """
import json, sys
keys = dict(word.partition("=")[::2] for word in sys.argv[1:])
count, rate = int(keys["count"]), float(keys.get("rate", 0))
print(json.dumps({"ready": True, "client": "made up 1"}), flush=True)
sys.stdin.readline()
# It keeps no more than 100 a second, whatever it is asked for.
took = int((count - 1) / min(rate, 100.0) * 1e9)
facts = {"begun_ns": 10**9, "ended_ns": 10**9 + took, "cpu_s": 0.5}
if keys["role"] == "listen":
    facts = {"received": count, "p50_us": 1.0, "p99_us": 2.0, "p999_us": 3.0, "cpu_s": 0.5}
print(json.dumps(facts), flush=True)
sys.stdin.readline()
"""

HALF = Work(
    name="latency/half", kind="latency", title="half", roles=frozenset({"publish", "subscribe"}),
    figure="p50_us", half_of=("single/140", "one-to-one/140"), least=10,
)  # fmt: skip


def test_a_pace_that_cannot_be_kept_gives_way_to_one_that_can(tmp_path: Path) -> None:
    paced = column("a")
    other = Other([msgspec.structs.replace(paced, command=(sys.executable, "-c", PACED))])
    results = empty()
    top = Measured(WORK.name, paced.name, [Run(1000, {"records_s": 1000.0})])
    results.measured.append(top)
    plan = Plan((HALF,), tuple(other.columns()), 2)
    peers: dict[str, Peer] = {"other": other}
    Recording(plan, peers, results, tmp_path / "r.json", tmp_path / "data", Listener()).run()
    measured = results.of(HALF.name, paced.name)
    assert measured is not None
    assert measured.error == ""
    # Of 500 a second 100 were reached: four fifths of those, in both runs.
    assert measured.values("rate_s") == pytest.approx([80.0, 80.0])
