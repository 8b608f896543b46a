"""The process that a broker starts: told what to do by its first line, and ended with its input.

Owns the other end of server/http_process.py. The rule: the first line that it prints is the URL;
what else it prints is for the broker's log; when its input ends, the broker has gone or wants it
to go.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable

import msgspec

from malamute_py.http.serving import serve
from malamute_py.http.settings import Start
from malamute_py.sections import ConfigError

NICENESS = 5
"""The broker comes first where both want a processor."""


def _until_input_ends(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """Call `stop` once the standard input ends: the broker that started this process is gone."""

    def readable() -> None:
        """Take what the input has; nothing: it has ended."""
        if not os.read(0, 4_096):
            loop.remove_reader(0)
            stop()

    loop.add_reader(0, readable)


def main() -> int:
    """Serve as the first line of standard input says, until the broker closes it.

    Returns the exit code: 1 for a wrong configuration, whose fault the broker logs.
    """
    # Unbuffered: the end of the input, after this line, is for the event loop to see.
    with open(0, "rb", buffering=0, closefd=False) as told:
        start = msgspec.json.decode(told.readline(), type=Start)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)  # the broker goes first where processors are short
    try:
        serve(
            start.http,
            [start.endpoint],
            start.credential(),
            announce=lambda url: print(url, flush=True),
            until=_until_input_ends,
        )
    except ConfigError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
