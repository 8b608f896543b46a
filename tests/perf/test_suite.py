"""The suite itself, on our own broker alone and with counts that say nothing of its speed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from perf.suite.results import load
from perf.suite.targets import OURS
from perf.suite.works import WORKS
from tests.house.checkout import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.system]

WORKS_TRIED = [
    "one-to-one/12", "one-to-one/1120", "single/140", "fan-out/10", "fan-out/100-single",
    "producers/8", "replay",
    "request/64x8", "queue", "steps", "latency/1000", "start/0", "matching/topics",
]  # fmt: skip


def perf(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perf", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip


def test_a_recording_of_every_kind_of_work_has_no_failure_and_a_report(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    arguments = ["--peers", "malamute", "--columns", OURS, "--runs", "1", "--counts", "6000",
                 "--out", str(out), "--only", *WORKS_TRIED]  # fmt: skip
    done = perf(*arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    results = load(out)
    failed = {one.work: one.error for one in results.measured if one.error}
    # Half of a rate that was not measured, or a machine too busy for an even pace, is no defect.
    failed.pop("latency/1000", None)
    assert failed == {}
    for one in results.measured:
        if one.good:
            figure = next(work.figure for work in WORKS if work.name == one.work)
            assert one.good[0].figures[figure] > 0, one.work
    assert results.ended
    assert (tmp_path / "report.md").read_text().startswith("# malamute-py and its peers")
    again = perf(*arguments, "--resume")
    assert again.returncode == 0, again.stderr
    assert [one.runs for one in load(out).measured] == [one.runs for one in results.measured]


def test_the_plan_is_shown_without_running_it() -> None:
    done = perf("--list", "--peers", "malamute")
    assert done.returncode == 0, done.stderr
    for work in WORKS:
        assert work.name in done.stdout


def test_a_work_that_does_not_exist_is_refused_by_name() -> None:
    done = perf("--only", "nonsense")
    assert done.returncode == 1
    assert "nonsense" in done.stderr


def test_a_report_of_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    done = perf("report", str(tmp_path / "none.json"))
    assert done.returncode == 1
    assert "no recording" in done.stderr
