"""`python -m tests.simulation`: replay a seed, or search a range of them.

--seed N              one seed
--seeds A..B          a range, B left out; stops at the first failure unless --keep-going
--scenario NAME       journal, broker, keys, removal, session, work, clients, cuts, threads,
                      thread-cuts, transactions, resets, or all (the default); with a
                      bias, and no part of all: fences, answers, replies,
                      rewinds
--steps N             another length than the seed chooses
--plant NAME          run with a planted bug (`--plant list` names them)
--jobs N              so many seeds at once, each in one of N processes
--trace               print every event
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

from tests.simulation.run import BIASED, SCENARIOS, Outcome, run_seed

PROGRESS = 100
"""Seeds between two lines that say how far a search is."""


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code: 0 all passed, 1 something was violated, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="")
    parser.add_argument("--scenario", default="all", choices=(*SCENARIOS, *BIASED, "all"))
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--plant", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--keep-going", action="store_true")
    given = parser.parse_args(arguments)
    if given.plant:
        from tests.simulation.plants import PLANTS

        if given.plant not in PLANTS:
            for name, plant in PLANTS.items():
                print(f"{name:24} {plant.scenario:8} {plant.what}")
            return 0 if given.plant == "list" else 2
        if given.scenario == "all":
            given.scenario = PLANTS[given.plant].scenario
    if given.seed is not None:
        seeds = range(given.seed, given.seed + 1)
    else:
        low, _, high = (given.seeds or "0..100").partition("..")
        seeds = range(int(low), int(high))
    names = SCENARIOS if given.scenario == "all" else (given.scenario,)
    return search(names, seeds, given)


def search(names: tuple[str, ...], seeds: range, given: argparse.Namespace) -> int:
    """Run all seeds of all scenarios and report the outcomes."""
    failures = 0
    for name in names:
        kinds: Counter[str] = Counter()
        codes: Counter[str] = Counter()
        began = time.perf_counter()
        ran = 0
        for seed, outcome in zip(seeds, _outcomes(name, seeds, given), strict=True):
            ran += 1
            kinds.update(outcome.trace.kinds)
            if ran % PROGRESS == 0 and len(seeds) > 2 * PROGRESS:
                print(f"{name}: {ran} of {len(seeds)} seeds, {failures} failed", flush=True)
            if outcome.code:
                failures += 1
                codes[outcome.code] += 1
                if not given.keep_going or failures <= 3:
                    print(outcome.tell())
                else:
                    print(f"seed {seed}: {outcome.code}: {outcome.words[:150]}")
                if not given.keep_going:
                    break
            elif len(seeds) == 1:
                print(f"{name} seed {seed}: passed, trace {outcome.trace.digest()}")
        took = time.perf_counter() - began
        if len(seeds) > 1:
            print(f"{name}: {ran} seeds in {took:.1f} s, {ran / took:.1f} a second")
            print("  " + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
            if codes:
                print("  failures:", dict(codes))
    return 1 if failures else 0


def _outcomes(name: str, seeds: range, given: argparse.Namespace) -> Iterator[Outcome]:
    """Yield the outcomes of seeds, in their order."""
    run = partial(run_seed, name, steps=given.steps, plant=given.plant, echo=given.trace)
    if given.jobs == 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        yield from pool.imap(run, seeds, chunksize=5)


if __name__ == "__main__":
    sys.exit(main())
