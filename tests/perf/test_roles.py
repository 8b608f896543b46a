"""Drivers and servers that do what they should not: each is told, and none outlives its block."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from perf.peers.peer import ServerFailed, running
from perf.suite.machine import InMemory, disk_of
from perf.suite.roles import Role, RoleFailed

pytestmark = [pytest.mark.slow, pytest.mark.system]

LONG_S = 30.0


def role(program: str) -> Role:
    return Role((sys.executable, "-c", textwrap.dedent(program)), "publish", count=3)


def test_a_driver_is_started_told_heard_and_ended() -> None:
    with role(
        """
        import sys
        print('{"ready": true, "client": "c 1"}', flush=True)
        sys.stdin.readline()
        print('{"confirmed": 3}', flush=True)
        sys.stdin.readline()
        """
    ) as driver:
        assert driver.ready(LONG_S) == "c 1"
        driver.go()
        assert driver.result(LONG_S) == {"confirmed": 3}
        driver.end()


def test_a_driver_that_hangs_is_killed_with_what_it_said() -> None:
    program = "import sys, time; print('stuck', file=sys.stderr, flush=True); time.sleep(600)"
    with role(program) as driver:
        process = driver.process
        with pytest.raises(RoleFailed, match="kept us waiting"):
            driver.ready(0.5)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_driver_that_dies_is_told_with_its_last_words() -> None:
    with (
        role("raise SystemExit('no such server')") as driver,
        pytest.raises(RoleFailed, match=r"(?s)ended with status 1.*no such server"),
    ):
        driver.ready(LONG_S)


def test_a_driver_that_says_something_else_is_told() -> None:
    with role("print('hello', flush=True)") as driver, pytest.raises(RoleFailed, match="hello"):
        driver.ready(LONG_S)


def test_a_driver_that_fails_after_its_result_is_told() -> None:
    with role("print('{\"ready\": true}', flush=True); raise SystemExit(3)") as driver:
        driver.ready(LONG_S)
        with pytest.raises(RoleFailed, match="status 3"):
            driver.end()


def test_a_server_that_ends_at_once_is_told_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('the port is taken')"]
    with (
        pytest.raises(ServerFailed, match="the port is taken"),
        running(command, tmp_path / "data", lambda: False, url="", version=""),
    ):
        raise AssertionError("it never was ready")


def test_a_server_and_its_children_do_not_outlive_the_block(tmp_path: Path) -> None:
    started = tmp_path / "started"
    program = (
        "import pathlib, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(started)!r}).touch()\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program]
    with running(command, tmp_path / "data", started.exists, url="", version="1") as server:
        processes = [psutil.Process(pid) for pid in server.pids]
        assert len(processes) == 2
        assert server.alive()
        assert server.rss_bytes() > 0
    gone, alive = psutil.wait_procs(processes, timeout=LONG_S)
    assert len(gone) == 2, alive


def test_a_memory_file_system_is_refused() -> None:
    memory = [mount.mountpoint for mount in psutil.disk_partitions(all=True)
              if mount.fstype == "tmpfs"]  # fmt: skip
    if not memory:
        pytest.skip("no tmpfs is mounted here")
    with pytest.raises(InMemory, match="measure on a disk"):
        disk_of(Path(memory[0]))
