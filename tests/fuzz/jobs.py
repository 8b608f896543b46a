"""Seeds of a fuzzer in several processes.

Owns how runs are spread: each seed is one run, whatever the number of processes, so that a seed
repeats a run that another number of processes made.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


def runs(
    run: Callable[[tuple[int, int]], T], seed: int, count: int, size: int, jobs: int
) -> Iterator[T]:
    """Yield the results of runs, in the order of seeds; a caller that stops ends those under way.

    run: of a module; it is given (seed, how many). seed: of the first run, the next has the one
    after it. size: how many of all `count` are one run's.
    """
    parts = [
        (seed + place, min(size, count - at)) for place, at in enumerate(range(0, count, size))
    ]
    if jobs == 1:
        yield from map(run, parts)
        return
    with multiprocessing.Pool(jobs) as pool:
        yield from pool.imap(run, parts)
