"""Scenarios `threads` and `thread-cuts`: those of the clients, with synchronous clients among them.

Owns only which programs there are: most have threads over the real synchronous client, the others
are as in `clients` and `cuts`, with their faults, oracles and end.
"""

from __future__ import annotations

import gc

from tests.simulation.clients_run import ClientsRun, CutsRun
from tests.simulation.process import Process
from tests.simulation.programs import Program
from tests.simulation.threaded import ThreadedProcess
from tests.simulation.threads import simulated_threads

SHARE = 0.75
"""Programs with threads, of all."""


class ThreadsRun(ClientsRun):
    """One seed of the scenario."""

    def run(self) -> None:
        """Run the seed. Raises Violation."""
        # Objects of before are not looked at when a program has dropped objects collected.
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
        return ThreadedProcess if self.rng.random() < SHARE else Program


class ThreadCutsRun(ThreadsRun, CutsRun):
    """One story of the scenario and a cut, as in CutsRun; the program that is cut has threads."""

    def _kind(self) -> type[Process]:
        return super()._kind() if self.processes else ThreadedProcess
