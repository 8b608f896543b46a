"""`python -m tests.fuzz`: hostile messages through the broker's loop, core and rings in memory.

Owns the command line and what is written of a find: the steps that lead to it, made few, as a
file that --replay plays again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz.inside import Found, minimised, replay, run
from tests.fuzz.messages import Step, read_steps, write_steps

A_WORLD = 20_000
"""Messages that one broker is sent before the next begins."""


def main() -> int:
    """0: nothing was found; 1: something was."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000, help="how many in all")
    parser.add_argument("--seed", type=int, default=0, help="of the first 20,000; the next is +1")
    parser.add_argument("--finds", type=Path, default=Path("fuzz-finds"), help="where finds go")
    parser.add_argument("--go-on", action="store_true", help="go on behind a find")
    parser.add_argument("--slow", type=float, default=10.0, help="a step of more seconds is a find")
    parser.add_argument("--replay", type=Path, help="play the steps of a file instead")
    given = parser.parse_args()
    if given.replay is not None:
        replay(read_steps(given.replay))
        print("nothing was found")
        return 0
    began, done, seed, finds = time.monotonic(), 0, given.seed, set[str]()
    while done < given.messages:
        steps: list[Step] = []
        size = min(A_WORLD, given.messages - done)
        try:
            done += run(seed, size, steps, given.slow)
        except Found as found:
            done += len(steps)
            if found.about not in finds:
                _keep(given.finds, seed, steps, found)
            finds.add(found.about)
            if not given.go_on:
                return 1
        seed += 1
        rate = done / (time.monotonic() - began)
        print(f"{done:,} messages, {rate:,.0f} a second, next seed {seed}, finds {len(finds)}")
    return 1 if finds else 0


def _keep(folder: Path, seed: int, steps: list[Step], found: Found) -> None:
    print(f"seed {seed}, step {len(steps)}: {found}\n{found.about}", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() else "-" for letter in found.about)[:80]
    path = folder / f"{name}.steps"
    short = steps if found.about == "slow" else minimised(steps, found.about)
    write_steps(path, short, [found.about, f"seed {seed}"])
    print(f"again: python -m tests.fuzz --replay {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
