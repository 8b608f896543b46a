"""`python -m tests.fuzz.contents --count N`: hostile contents through broker and consumer.

Owns the run of hostile.py's contents through a broker's work on a content, and through all that a
consumer asks of the batch that it gets.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

from tests.fuzz.hostile import Chance, Contents
from tests.fuzz.jobs import runs
from tests.fuzz.targets import as_it_is

A_RUN = 10_000
"""Contents of one seed."""


def run(count: int, seed: int) -> bytes | None:
    """Try so many contents of a seed; returns the first wrong error, with its trace."""
    source = Contents(Chance(seed))
    for _ in range(count):
        made = source.content()
        try:
            as_it_is(made)
        except Exception:  # noqa: BLE001 - each is a find, whatever it is
            traceback.print_exc()
            return made
    return None


def one(part: tuple[int, int]) -> tuple[int, int, bytes | None]:
    """Try contents of a seed; part: (seed, how many). Returns both, and the find."""
    seed, count = part
    return seed, count, run(count, seed)


def main() -> int:
    """Run; returns 0: nothing was found; 1: something was, and is in a file."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.contents", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first 10,000; the next is +1")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the seeds")
    parser.add_argument("--finds", type=Path, default=Path("fuzz-finds"), help="where finds go")
    given = parser.parse_args()
    began, done = time.monotonic(), 0
    for seed, count, found in runs(one, given.seed, given.count, A_RUN, given.jobs):
        if found is not None:
            given.finds.mkdir(parents=True, exist_ok=True)
            path = given.finds / f"content-{seed}"
            path.write_bytes(found)
            print(f"seed {seed}: {path}; keep it in tests/fuzz/corpus/content", file=sys.stderr)
            return 1
        done += count
        rate = done / (time.monotonic() - began)
        print(f"{done:,} contents, {rate:,.0f} a second, no find", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
