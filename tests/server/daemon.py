"""A broker in a process of its own, as an operator runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Self

from tests.waiting import WAIT_S

PROGRAM = """
import os, sys
from malamute_py.config import load
from malamute_py.sections import ConfigError
from malamute_py.server import Server, StartError
overrides = dict(word.split("=", 1) for word in sys.argv[1:])
try:
    sys.exit(Server(load(overrides=overrides)).run())
except (ConfigError, StartError) as error:
    print(f"refused: {error}", file=sys.stderr)
    sys.exit(2)
"""


class Daemon:
    """Starts on port 0; settings are dotted keys with `__` for the dot."""

    def __init__(
        self, data: object, *, stdin: Any = subprocess.DEVNULL, **settings: object
    ) -> None:
        wanted = {"data_directory": data, "listen": "tcp://127.0.0.1:0", **settings}
        words = [f"{key.replace('__', '.')}={value}" for key, value in wanted.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            stdin=stdin, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.lines: list[dict[str, Any]] = []
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        listening = self.wait_for("listening")
        self.endpoint: str = listening["endpoints"][0]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.text += line
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                continue

    def wait_for(self, event: str, wait_s: float = WAIT_S) -> dict[str, Any]:
        """Wait for the first log line of this event."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if line.get("event") == event:
                    return line
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.01)
        raise AssertionError(f"no {event} in the log:\n{self.text}")

    def resident_bytes(self) -> int:
        with open(f"/proc/{self.process.pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def terminate(self) -> int:
        """Send SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=WAIT_S)
        self._reader.join()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        if self.process.stderr is not None:
            self.process.stderr.close()
