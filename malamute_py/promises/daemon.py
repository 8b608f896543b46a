"""The broker as a process of its own, as an operator would run it, and its sudden death.

Owns one daemon's process and data directory: start, kill, start again at the same
address, and what it costs. Tests, perf/ and the demo start their brokers with it, too, and ask for
what a run does not: how the process ended, its memory, its files.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import psutil


class DaemonFailed(Exception):
    """The broker's process did not come up; its output is in the message."""


class Daemon:
    """`malamute broker` on a free port of this machine, over one data directory."""

    def __init__(
        self, directory: Path, settings: Sequence[str] = (), program: Sequence[str] = ()
    ) -> None:
        """directory: for the data and the log; made when missing.

        settings: `key=value` as for `malamute broker --set`. program: module that runs instead of
        the command line's own, with the same arguments.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._data = directory / "data"
        self._log = directory / "broker.log"
        self._settings = settings
        self._program = program or (sys.executable, "-m", "malamute_py.cli")
        # The address must outlive the process, so the port is chosen here and not by the process.
        # It is kept bound and not listening, so that no other process has it while this one is
        # dead. libzmq shares addresses of this kind.
        self._address = socket.socket()
        self._address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._address.bind(("127.0.0.1", 0))
        self._port = self._address.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Return the endpoint for clients."""
        return f"tcp://127.0.0.1:{self._port}"

    def start(self, wait_s: float = 60.0) -> None:
        """Start the process and wait until it listens.

        Raises DaemonFailed: it ended, or did not listen in time and was killed.
        """
        command = [*self._program, "broker", "--listen", self.endpoint, "--data", str(self._data)]
        for setting in self._settings:
            command += ["--set", setting]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise DaemonFailed(f"the broker ended at once:\n{self.tail()}")
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1.0).close()
            except OSError:
                time.sleep(0.02)
            else:
                return
        self.kill()
        raise DaemonFailed(f"the broker did not listen within {wait_s:.0f} s:\n{self.tail()}")

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def gone(self, wait_s: float) -> bool:
        """Whether the process ends within so many seconds."""
        assert self._process is not None
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ended(self) -> str:
        """Say how the process ended: by a signal's name, or by an exit code."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return "nothing yet"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def tail(self) -> str:
        """Return the end of its log, for an error's message."""
        return self._log.read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        """Kill the process (SIGKILL): no goodbye, nothing flushed."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """Send SIGTERM, and wait for the orderly end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.kill()

    @property
    def process(self) -> psutil.Process:
        """Return the running process."""
        import psutil

        assert self._process is not None
        return psutil.Process(self._process.pid)

    def own_bytes(self) -> int:
        """Return resident memory that is the process's own (no shared file pages)."""
        memory = self.process.memory_info()
        return int(memory.rss - memory.shared)

    def cpu_s(self) -> float:
        """Return processor seconds used so far, of all threads, user and system."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def files(self) -> int:
        """Return how many files the data directory has."""
        return sum(len(names) for _, _, names in os.walk(self._data))

    def disk_bytes(self) -> int:
        """Return the bytes that the data directory occupies on disk."""
        return sum(
            os.stat(Path(folder) / name).st_blocks * 512  # stat() counts blocks of 512 bytes
            for folder, _, names in os.walk(self._data)
            for name in names
        )

    def __enter__(self) -> Self:
        """Start the process."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the process, and give its address back."""
        self.stop()
        self._address.close()
