"""Planted bugs: mutations that the simulator must catch, or it is worth nothing.

Owns the one table of them, of which each file has the part that changes one room. The rule: a plant
makes a mistake that a programmer could make, and names the violations that count as catching it.
Source: docs/robustness.md, "What each harness has shown to find".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.simulation.plants import (
    broker,
    checkpoint,
    clients,
    groups,
    journal,
    keys,
    mail,
    removal,
    resets,
    services,
    session,
    steps,
    threads,
    transactions,
)
from tests.simulation.plants.planted import Planted

PLANTS: dict[str, Planted] = {
    name: plant
    for room in (
        journal, broker, keys, removal, session, steps, checkpoint, mail, services, groups,
        transactions, resets, clients, threads,
    )
    for name, plant in room.PLANTS.items()
}  # fmt: skip
"""Name -> planted bug. `python -m tests.simulation --plant list` prints it."""


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug for a while."""
    with contextlib.ExitStack() as stack:
        PLANTS[name].plant(stack)
        yield
