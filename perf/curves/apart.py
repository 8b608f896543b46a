"""A measurement in a process of its own: its memory and its heap are nobody else's.

Owns the process: spawned for one call and gone with it, so that what an earlier point left
behind neither counts at the next one nor slows it down.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

import psutil

P = ParamSpec("P")
R = TypeVar("R")


def apart(call: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
    """What a function of a module returns when a fresh process calls it."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(call, *arguments, **named).result()


def own_bytes() -> int:
    """Resident memory of this process that is its own."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)
