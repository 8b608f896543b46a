"""The systemd unit, as systemd itself reads it; skipped where systemd-analyze is not there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from malamute_py.config import Config
from tests.house.checkout import ROOT

UNIT = ROOT / "deploy" / "malamute.service"
pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *words], check=False, capture_output=True, text=True
    )


@pytest.mark.moderate
def test_systemd_understands_every_line(tmp_path: Path) -> None:
    text = UNIT.read_text()
    # The program that it expects need not be installed here.
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace("/usr/local/bin/malamute", "/bin/true"))
    done = analyze("verify", str(unit))
    told = [line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line]
    assert told == []
    assert done.returncode == 0


def test_the_broker_may_do_little_else_than_serve() -> None:
    done = analyze("security", "--offline=true", str(UNIT))
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd judges no unit that is not loaded (before version 250)")
    level = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert level is not None, done.stdout + done.stderr
    assert float(level[1]) <= 2.0


def test_a_broker_that_stops_in_time_is_not_taken_for_dead() -> None:
    """The drain and the checkpoint's last step end before the watchdog and the stop's time do."""
    times = r"^(WatchdogSec|TimeoutStopSec)=(\d+)$"
    found = dict(re.findall(times, UNIT.read_text(), re.MULTILINE))
    config = Config()
    stop_s = (config.loop.drain_ms + config.checkpoint.stop_ms) / 1_000
    assert stop_s < int(found["TimeoutStopSec"]) < int(found["WatchdogSec"])
