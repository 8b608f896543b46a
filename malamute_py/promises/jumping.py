"""`python -m malamute_py.promises.jumping broker ...`: a broker whose clock jumps.

Owns the broker's clock: each SIGUSR1 moves it by up to a day, back or forth. It is otherwise the
broker of the command line.
"""

from __future__ import annotations

import importlib
import random
import signal
import time
from functools import partial
from typing import Any

from malamute_py.server import server
from malamute_py.server.clock import Clock

_JUMP_NS = 86_400 * 10**9
"""Bound of a jump: a day."""


class _JumpingClock:
    """The time of day, moved by all jumps until now."""

    def __init__(self) -> None:
        self._jumped_ns = 0

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970 by this clock."""
        return time.time_ns() + self._jumped_ns

    def jump(self, *_: Any) -> None:
        """Move the clock back or forth; the handler of SIGUSR1."""
        self._jumped_ns += random.randrange(-_JUMP_NS, _JUMP_NS)


def main() -> None:
    """Run the command line's broker with that clock."""
    clock = _JumpingClock()
    signal.signal(signal.SIGUSR1, clock.jump)
    # The broker looks here for the clock that it makes.
    vars(server)["Clock"] = partial(Clock, clock.wall_ns)
    # By name, as the command line is above this module in the order of imports.
    importlib.import_module("malamute_py.cli").main()


if __name__ == "__main__":
    main()
