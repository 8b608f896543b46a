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


_jumped_ns = [0]


def _wall_ns() -> int:
    return time.time_ns() + _jumped_ns[0]


def _jump(*_: Any) -> None:
    _jumped_ns[0] += random.randrange(-_JUMP_NS, _JUMP_NS)


def main() -> None:
    """Run the command line's broker with that clock."""
    signal.signal(signal.SIGUSR1, _jump)
    # The broker looks here for the clock that it makes.
    vars(server)["Clock"] = partial(Clock, _wall_ns)
    # By name, as the command line is above this module in the order of imports.
    importlib.import_module("malamute_py.cli").main()


if __name__ == "__main__":
    main()
