"""The micro-benchmarks run, small and once; and what is called a change is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from perf.micro.__main__ import PYTEST
from perf.micro.comparing import Measured, Recorded, compare, load, save

ROOT = Path(__file__).parents[2]


def recorded(medians: list[float], references: list[float]) -> Recorded:
    one = Measured("core: publish", medians, [0.1] * len(medians), references)
    return Recorded("plain Python", "a machine", "3.11", "abc", [one])


OLD = recorded([10.0, 10.2, 9.9], [100.0, 100.0, 100.0])


@pytest.mark.slow
def test_every_micro_benchmark_runs_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PYTEST, "--benchmark-disable", "perf/micro"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]


def test_a_change_beyond_the_noise_is_flagged() -> None:
    [change] = compare(recorded([15.0, 15.1, 15.2], [100.0] * 3), OLD)
    assert change.flagged
    assert change.factor == pytest.approx(1.51)


def test_another_machines_speed_cancels() -> None:
    [change] = compare(recorded([20.0, 20.4, 19.8], [200.0] * 3), OLD)
    assert not change.flagged
    assert change.factor == pytest.approx(1.0)


def test_passes_that_lie_far_apart_flag_nothing() -> None:
    [change] = compare(recorded([10.5, 15.0, 25.0], [100.0] * 3), OLD)
    assert not change.flagged


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "micro.json"
    assert load(path) is None
    save(path, OLD)
    assert load(path) == OLD
