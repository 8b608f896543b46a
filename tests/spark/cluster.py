"""A Spark standalone cluster on this machine, of the processes that the pyspark package brings.

Owns master, workers and submitted jobs. The rule: Python on the cluster has the installed
distributions but none of ours, so that what it imports of ours came in the zip.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyspark

WAIT_S = 300
SMALL = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_LOCAL_IP": "127.0.0.1"}
_CLASSES = "org.apache.spark.deploy"
_EXECUTOR = "CoarseGrainedExecutorBackend"


class Cluster:
    """A master and one worker of two cores, or more; a context manager."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._processes = contextlib.ExitStack()
        self.url = ""
        self._worker: subprocess.Popen[bytes] | None = None
        self._python = directory / "python"
        # Without `site` the editable install of the checkout is not seen.
        self._python.write_text(
            f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{sysconfig.get_path("purelib")}"\n'
            f'export PYTHONPATH\nexec {sys.executable} -S "$@"\n'
        )
        self._python.chmod(0o755)

    def __enter__(self) -> Cluster:
        self._start("master", "master.Master", "--host", "127.0.0.1", "--port", "0",
                    "--webui-port", "0")  # fmt: skip
        self.url = self._said("master", r"Starting Spark master at (spark://\S+)")
        self._worker = self.add_worker("127.0.0.1")
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def add_worker(self, host: str) -> subprocess.Popen[bytes]:
        """Start a worker of two cores. host: an address of this machine."""
        name = f"worker-{host}"
        worker = self._start(
            name, "worker.Worker", "--host", host, "--cores", "2", "--memory", "1g",
            "--webui-port", "0", "--work-dir", str(self._directory / name), self.url,
        )  # fmt: skip
        self._said(name, r"(Successfully registered with master)")
        return worker

    @contextlib.contextmanager
    def running(self, zipped: Path, *job: str) -> Iterator[subprocess.Popen[bytes]]:
        """A submitted job, whose process group is killed in the end."""
        yield self._spawn(
            "driver",
            [
                str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", self.url,
                "--py-files", str(zipped), "--driver-memory", "512m",
                "--conf", "spark.executor.memory=512m", "--conf", "spark.ui.enabled=false",
                "--conf", "spark.driver.host=127.0.0.1",
                "--conf", "spark.driver.bindAddress=127.0.0.1",
                "--conf", "spark.sql.shuffle.partitions=2", *job,
            ],
            # Processes that Spark starts beside the driver do not look into --py-files.
            PYTHONPATH=str(zipped),
        )  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return the variables of a process of the cluster, or of one that submits a job to it."""
        given = {**os.environ, **SMALL, "PYSPARK_PYTHON": str(self._python),
                 "PYSPARK_DRIVER_PYTHON": str(self._python)}  # fmt: skip
        given.pop("PYTHONPATH", None)
        return given

    def kill_an_executor(self) -> None:
        """Kill an executor's Java at once."""
        assert self._worker is not None
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            for process in psutil.Process(self._worker.pid).children(recursive=True):
                # A child of the executors may end between the listing and the look at it.
                with contextlib.suppress(psutil.NoSuchProcess):
                    if any(_EXECUTOR in word for word in process.cmdline()):
                        process.kill()
                        return
            time.sleep(0.1)
        raise AssertionError("no executor was started")

    def log(self, name: str) -> str:
        """Text that a process has written so far."""
        file = self._directory / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def _start(self, name: str, kind: str, *given: str) -> subprocess.Popen[bytes]:
        program = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
        return self._spawn(name, [program, f"{_CLASSES}.{kind}", *given])

    def _spawn(self, name: str, command: list[str], **more: str) -> subprocess.Popen[bytes]:
        environment = {**self.environment(), **more}
        with (self._directory / f"{name}.log").open("ab") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, start_new_session=True, env=environment,
                cwd=self._directory,
            )  # fmt: skip
        self._processes.callback(killed, process)
        return process

    def _said(self, name: str, expression: str) -> str:
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            found = re.search(expression, self.log(name))
            if found:
                return found[1]
            time.sleep(0.1)
        raise AssertionError(f"{name} did not start: {self.log(name)[-2000:]}")


def killed(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
