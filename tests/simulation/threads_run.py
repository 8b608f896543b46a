"""Scenarios `threads` and `thread-cuts`: those of the clients, with synchronous clients among them.

Owns nothing but who is there: most programs have threads over the real synchronous client, the rest
is as in `clients` and `cuts`, their faults, oracles and end.
"""

from __future__ import annotations

import gc

from tests.simulation.clients_run import ClientsRun, CutsRun
from tests.simulation.programs import Process
from tests.simulation.threaded import ThreadedProcess
from tests.simulation.threads import simulated_threads

SHARE = 0.75
"""Programs with threads, of all."""


class ThreadsRun(ClientsRun):
    """One seed of the scenario."""

    def run(self) -> None:
        """Raises Violation."""
        # What was there before is not looked at when a program has what it dropped collected.
        gc.collect()
        freezing = not gc.get_freeze_count()
        if freezing:
            gc.freeze()
        try:
            with simulated_threads():
                super().run()
        finally:
            if freezing:
                gc.unfreeze()

    def _kind(self) -> type[Process]:
        return ThreadedProcess if self.rng.random() < SHARE else Process


class ThreadCutsRun(ThreadsRun, CutsRun):
    """One story of the scenario and a cut, as in CutsRun; the program that is cut has threads."""

    def _kind(self) -> type[Process]:
        return super()._kind() if self.processes else ThreadedProcess
