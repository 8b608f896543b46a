"""A measurement in a process of its own, which has a memory and a heap of its own.

Owns the process: spawned for one call and gone with it, so that objects of an earlier point neither
count at the next one nor slow it down.
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
    """Return the result of a module's function that a fresh process calls."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(call, *arguments, **named).result()


def own_bytes() -> int:
    """Return the resident memory that is this process's own."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)
