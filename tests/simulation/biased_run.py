"""Scenarios that are others with a bias: each is for a fault that those meet too seldom.

Owns what a bias changes: the cast, and the shares of faults. The rule: the promises are those of
the scenario that is biased, and so is all that is not said here.
"""

from __future__ import annotations

from tests.simulation.clients_run import HABITS, ClientsRun
from tests.simulation.process import Cast
from tests.simulation.programs import Program
from tests.simulation.work_run import WorkRun


class FencesRun(WorkRun):
    """`work`, where half of all faults are another link of a worker's identity."""

    def _fault(self) -> None:
        if self.steps > 0 and self.machine.running and self.rng.random() < 0.5:
            self.steps -= 1
            self._theft()
            self._schedule_fault()
            return
        super()._fault()


class Biased(ClientsRun):
    """`clients`, with one cast for all processes, and mostly the faults that the bias is for."""

    cut = 0.3
    """Share of connections that have an appointed end."""
    asks: tuple[Cast, ...] = ()
    serves: tuple[Cast, ...] = ()
    servers = 3
    """Most processes that serve."""
    power = 0.5
    """Share of crashes that are power losses."""
    crashes = 0.4
    """Share of faults that are crashes; as many are links that end."""

    def _begin(self) -> None:
        rng = self.rng
        self.cut_share = self.cut
        self.services = [where for role, where, *_ in self.serves if role == "works"]
        self.groups = not self.services
        for number in range(rng.randint(2, 3)):
            serves = list(self.serves) if number < self.servers else []
            program = Program(self, f"p{number}", f"p{number}", list(self.asks), serves)
            program.budget = rng.choice((10, 25))
            self.processes.append(program)
        for process in self.processes:
            process.start()

    def _fault(self) -> None:
        draw = self.rng.random()
        if self.steps <= 0 or not self.machine.running or draw > 2 * self.crashes:
            super()._fault()
            return
        self.steps -= 1
        if draw < self.crashes:
            self._crash(power=self.rng.random() < self.power)
        else:
            self._drop()
        self._schedule_fault()


class AnswersRun(Biased):
    """Programs that ask one worker, which answers in steps, while links and the broker end."""

    habits = HABITS | {"handlers answer in steps only"}
    asks = (("requests",),) * 3
    serves = (("works", "w0"),)
    servers = 1
    power = 0.0
    cut = 0.9


class RepliesRun(AnswersRun):
    """Programs that are workers for each other: replies are lost with the broker."""

    servers = 3


class RewindsRun(Biased):
    """Members of live groups, while power losses take back what they were shown."""

    asks = (("publishes",), ("publishes",))
    serves = (("joins", "s0", "g", "shared"), ("joins", "s1", "h", "shared"))
    power = 1.0
