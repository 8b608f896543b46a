"""Drivers as child processes: started, told to go, heard, ended, within a time limit.

Owns the pipes and the processes. The rule: whatever a driver does, the suite goes on. One that
hangs, dies or says something else is killed with everything it started, and the text that it wrote
to standard error is in the exception.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil

ROOT = Path(__file__).resolve().parents[2]
END_S = 20.0
_TAIL = 2_000

_children: dict[int, subprocess.Popen[bytes]] = {}


class RoleFailed(Exception):
    """A driver did not do its role; the text says what happened and ends with its own words."""


class Role:
    """One driver in one role."""

    def __init__(self, command: Sequence[str], role: str, **keys: object) -> None:
        """Start the driver. keys: its key=value arguments."""
        self.role = role
        arguments = [f"{key}={value}" for key, value in {"role": role, **keys}.items()]
        self._command = [*command, *arguments]
        # Open as long as the process: closed by kill().
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        _children[self._process.pid] = self._process
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def ready(self, within_s: float) -> str:
        """Wait until it is ready; returns its client's name, and its form. Raises RoleFailed."""
        facts = self._hear(within_s, "to be ready")
        if facts.get("ready") is not True:
            raise self._failed(f"said {facts} instead of being ready")
        return ", ".join(str(facts[name]) for name in ("client", "form") if facts.get(name))

    def go(self) -> None:
        """Tell it to go on; one that is gone already is noticed when it should speak."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()

    def result(self, within_s: float) -> dict[str, Any]:
        """Return the result that it reports. Raises RoleFailed."""
        return self._hear(within_s, "for its result")

    def end(self) -> None:
        """Let it clean up and wait for its end. Raises RoleFailed for a status other than 0."""
        assert self._process.stdin is not None
        self.go()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            status = self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            raise self._failed(f"did not end within {END_S:.0f} s after its result") from None
        if status != 0:
            raise self._failed(f"ended with status {status} after its result")

    def kill(self) -> None:
        """Kill it and all that it started, at once; nothing when it has ended."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        _children.pop(self._process.pid, None)
        # Its end closed the pipe, unless a process that left its session still holds it.
        self._listener.join(timeout=5)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if not self._listener.is_alive():
            self._process.stdout.close()
        self._errors.close()

    def _hear(self, within_s: float, what: str) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=within_s)
        except queue.Empty:
            raise self._failed(f"kept us waiting {within_s:.0f} s {what}") from None
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
            raise self._failed(f"ended with status {self._process.poll()} while we waited {what}")
        try:
            facts: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            raise self._failed(f"said {line[:200]!r}, which is not an object") from None
        return facts

    def _failed(self, what: str) -> RoleFailed:
        """Kill it; returns what happened, with the last of what it wrote."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _TAIL))
        words = self._errors.read().decode(errors="replace").strip()
        return RoleFailed(f"{self.role} {what}" + (f":\n{words}" if words else ""))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the driver, which must not outlive the block."""
        self.kill()

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._process.pid)


def kill_all() -> None:
    """Kill every driver that still runs: for the end of the program, whatever its reason."""
    for process in list(_children.values()):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
