"""Clients of a measurement, each in a process of its own that talks JSON lines.

A program gives `play` its roles by name; the parent starts them with `Role`. A role says when
it is ready, waits for the word, does its work, and says what came of it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Part = Callable[[dict[str, Any]], Awaitable[None]]


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def word() -> None:
    """Return when the parent says so."""
    await asyncio.to_thread(sys.stdin.readline)


def play(parts: Mapping[str, Part]) -> bool:
    """When this process is a role: play it and return True."""
    if len(sys.argv) != 4 or sys.argv[1] != "--role":
        return False

    async def run() -> None:
        # A coroutine function may be typed by what it awaits only.
        await parts[sys.argv[2]](json.loads(sys.argv[3]))

    asyncio.run(run())
    return True


class Role:
    """One client as a child process."""

    def __init__(self, module: str, role: str, **options: Any) -> None:
        self.name = role
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--role", role, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self.process.wait()}")
        facts: dict[str, Any] = json.loads(line)
        return facts

    def end(self) -> None:
        self.go()
        self.process.communicate(timeout=60)
