"""Running seeds: one, a range, with a planted bug or without, and reporting a failure.

Owns the outcome of a run. The rule: a failure names the scenario, the seed and the plant, says in
words what was violated, shows the last events, and gives the one line that replays it.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tests.simulation.disk import CrashNow
from tests.simulation.model import VIOLATIONS, Violation
from tests.simulation.trace import Trace


class Scenario(Protocol):
    """One seed of something."""

    def run(self) -> None:
        """Run the seed. Raises Violation."""


@dataclass(slots=True)
class Outcome:
    """The outcome of one seed."""

    scenario: str
    seed: int
    steps: int
    plant: str
    trace: Trace
    code: str = ""
    """Code of the violation; empty when the seed passed."""
    words: str = ""
    where: str = ""
    """The stack, for an error of the code under test."""

    @property
    def replay(self) -> str:
        """Return the line that runs this again."""
        more = "".join(
            f" --{name} {value}"
            for name, value in (("steps", self.steps), ("plant", self.plant))
            if value
        )
        return f'make simulate SEED={self.seed} ARGS="--scenario {self.scenario}{more}"'

    def tell(self) -> str:
        """Describe the failure for a person."""
        events = "\n".join(f"    {event}" for event in self.trace.last())
        where = f"\n{self.where}" if self.where else ""
        return (
            f"seed {self.seed} of {self.scenario} failed after {self.trace.count} events\n"
            f"  {self.code}: {self.words}{where}\n  the last events:\n{events}\n"
            f"  replay: {self.replay}"
        )


def scenario(name: str) -> Callable[..., Scenario]:
    """Return the scenario of this name; raises KeyError."""
    if name == "journal":
        from tests.simulation.ring_run import RingRun

        return RingRun
    if name == "broker":
        from tests.simulation.broker_run import BrokerRun

        return BrokerRun
    if name == "session":
        from tests.simulation.session_run import SessionRun

        return SessionRun
    if name == "clients":
        from tests.simulation.clients_run import ClientsRun

        return ClientsRun
    if name == "cuts":
        from tests.simulation.clients_run import CutsRun

        return CutsRun
    if name == "threads":
        from tests.simulation.threads_run import ThreadsRun

        return ThreadsRun
    if name == "thread-cuts":
        from tests.simulation.threads_run import ThreadCutsRun

        return ThreadCutsRun
    if name == "removal":
        from tests.simulation.removal_run import RemovalRun

        return RemovalRun
    if name == "work":
        from tests.simulation.work_run import WorkRun

        return WorkRun
    if name == "keys":
        from tests.simulation.keys_run import KeysRun

        return KeysRun
    if name == "transactions":
        from tests.simulation.transactions_run import TransactionsRun

        return TransactionsRun
    raise KeyError(name)


SCENARIOS = (
    "journal", "broker", "keys", "removal", "session", "work", "clients", "cuts", "threads",
    "thread-cuts", "transactions",
)  # fmt: skip


def run_seed(
    name: str, seed: int, *, steps: int = 0, plant: str = "", echo: bool = False
) -> Outcome:
    """Run one seed; any error of the code under test is a violation, too."""
    from tests.simulation.plants import planted

    trace = Trace(echo=echo)
    outcome = Outcome(name, seed, steps, plant, trace)
    with planted(plant) if plant else contextlib.nullcontext():
        try:
            scenario(name)(seed, steps=steps, trace=trace).run()
        except Violation as violation:
            outcome.code, outcome.words = violation.code, str(violation)
        except (Exception, CrashNow) as error:  # noqa: BLE001 - any error of theirs is a finding
            outcome.code = "broken"
            outcome.words = f"{VIOLATIONS['broken']}: {error!r}"
            outcome.where = traceback.format_exc(limit=-12)
    return outcome
