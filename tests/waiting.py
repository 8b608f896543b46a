"""How long a test waits for what must come.

Owns the bound, and waiting for a state that threads or tasks bring about. The rule: the bound is
paid on failure only, so it is far beyond what a loaded machine takes, and below the time after
which pytest ends a test.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

WAIT_S: Final = 60.0
WAIT_MS: Final = 60_000


async def until_async(condition: Callable[[], Any]) -> None:
    """Wait for a state that other threads, or this loop's other tasks, bring about."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - facts of other threads
            await asyncio.sleep(0.005)


def until(condition: Callable[[], Any]) -> None:
    """Wait for a state that other threads or processes bring about."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.005)
