"""`python -m tests.fuzz`: hostile messages through the broker's loop, core and rings in memory.

Owns the command line and the report of a find: the steps that lead to it, as few as possible, as a
file that --replay plays again.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.inside import Found, minimised, replay, run
from tests.fuzz.jobs import runs
from tests.fuzz.messages import Step, read_steps, write_steps

A_WORLD = 20_000
"""Messages that one broker is sent before the next begins."""


class World(NamedTuple):
    """The run of one broker."""

    seed: int
    messages: int
    found: tuple[str, str, list[Step]] | None
    """(what, about, the steps that led to it) of each find."""


def world(part: tuple[int, int], slow_s: float) -> World:
    """Send a broker so many messages of a seed. part: (seed, how many)."""
    seed, size = part
    steps: list[Step] = []
    try:
        return World(seed, run(seed, size, steps, slow_s), None)
    except Found as found:
        return World(seed, len(steps), (str(found), found.about, steps))


def main() -> int:
    """Run; returns 0: nothing was found; 1: something was."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000, help="how many in all")
    parser.add_argument("--seed", type=int, default=0, help="of the first 20,000; the next is +1")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the seeds")
    parser.add_argument("--finds", type=Path, default=Path("fuzz-finds"), help="where finds go")
    parser.add_argument("--go-on", action="store_true", help="go on behind a find")
    parser.add_argument("--slow", type=float, default=10.0, help="a step of more seconds is a find")
    parser.add_argument("--replay", type=Path, help="play the steps of a file instead")
    given = parser.parse_args()
    if given.replay is not None:
        replay(read_steps(given.replay))
        print("nothing was found")
        return 0
    began, done, finds = time.monotonic(), 0, set[str]()
    one = partial(world, slow_s=given.slow)
    for each in runs(one, given.seed, given.messages, A_WORLD, given.jobs):
        done += each.messages
        if each.found is not None:
            what, about, steps = each.found
            if about not in finds:
                _keep(given.finds, each.seed, steps, what, about)
            finds.add(about)
            if not given.go_on:
                return 1
        rate = done / (time.monotonic() - began)
        text = f"{done:,} messages, {rate:,.0f} a second, next seed {each.seed + 1}"
        print(f"{text}, finds {len(finds)}", flush=True)
    return 1 if finds else 0


def _keep(folder: Path, seed: int, steps: list[Step], what: str, about: str) -> None:
    print(f"seed {seed}, step {len(steps)}: {what}\n{about}", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() else "-" for letter in about)[:80]
    path = folder / f"{name}.steps"
    short = steps if about == "slow" else minimised(steps, about)
    write_steps(path, short, [about, f"seed {seed}"])
    print(f"again: python -m tests.fuzz --replay {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
