"""The view of a run for a person: a bar with what runs and the time left, or plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from perf.peers.peer import Column
from perf.suite.recording import Listener, Plan
from perf.suite.results import Run
from perf.suite.works import Work

UNITS = {
    "records_s": "records/s",
    "match_s": "s for a million messages",
    "deliveries_s": "deliveries/s",
    "round_trips_s": "round trips/s",
    "steps_s": "steps/s",
    "p50_us": "us at the median",
    "start_s": "s",
}


def shown(outcome: Run, figure: str) -> str:
    """Describe one run in a few words."""
    if outcome.error:
        first, _, rest = outcome.error.partition("\n")
        return f"failed: {first} {rest.rpartition(chr(10))[2]}".rstrip()
    value = outcome.figures[figure]
    number = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{number} {UNITS.get(figure, figure)}"


DESCRIPTION = 42
"""Characters for what runs: a terminal of 80 has room for the rest."""


def span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}"


class Screen(Listener):
    """Shows each run; a context manager."""

    def __init__(
        self,
        plan: Plan,
        curves: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """curves: those that come after the plan, with the seconds that each should take."""
        self._curves = dict(curves or {})
        self._left = [plan.seconds(work) for work, _, _ in plan.pairs()]
        self._count = len(self._left) + len(self._curves)
        self._done = 0
        self._planned_s = self._spent_s = 0.0
        self._clock = clock
        self._since = 0.0
        self._console = Console(stderr=False)
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=16),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]} left"),
                console=self._console,
            )
            self._task = self._progress.add_task("begins", total=self._count, left="?")

    def skips(self, work: Work, run: int, column: Column) -> None:
        """Note a run that the recording which goes on has already."""
        self._done += 1
        self._left.pop(0)

    def begins_curve(self, name: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=f"curve: {name}", completed=self._done,
                                  left=self._time_left())  # fmt: skip
        else:
            print(f"[{self._done + 1}/{self._count}, {self._time_left()} left] curve: {name}",
                  flush=True)  # fmt: skip

    def ends_curve(self, name: str) -> None:
        self._done += 1
        self._curves.pop(name, None)
        if self._progress is not None:
            self._progress.update(self._task, completed=self._done, left=self._time_left())

    def begins(self, work: Work, run: int, column: Column) -> None:
        self._since = self._clock()
        if self._progress is not None:
            self._progress.update(
                self._task,
                description=f"{work.name} {run + 1}, {column.name}"[:DESCRIPTION],
                completed=self._done,
                left=self._time_left(),
            )

    def ends(self, work: Work, run: int, column: Column, outcome: Run) -> None:
        self._done += 1
        self._planned_s += self._left.pop(0) if self._left else 0.0
        self._spent_s += self._clock() - self._since
        words = shown(outcome, work.figure)
        line = f"{work.name:18} {column.label:40} run {run + 1}: {words}"
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False)
            self._progress.update(self._task, completed=self._done, left=self._time_left())
        else:
            print(f"[{self._done}/{self._count}, {self._time_left()} left] {line}", flush=True)

    def says(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def _time_left(self) -> str:
        """Return the planned time, stretched by as much as the runs so far took longer."""
        stretch = self._spent_s / self._planned_s if self._planned_s > 10 else 1.0
        return span(sum(self._left) * stretch + sum(self._curves.values()))

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        sys.stdout.flush()
