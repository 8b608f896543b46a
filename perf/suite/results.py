"""Everything that one recording found, as it is kept in results.json.

Owns the schema and its version, reading and writing. The rule: figures are kept run by run, and
everything that a report shows is computed from them when it is made; a run that failed is kept with
its reason and never has a figure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from perf.suite.machine import Commit, Machine
from perf.suite.summary import median, spread

SCHEMA = 1


_FOLDERS = re.compile(r"(?<![\w.}\-:/])(?:/[\w.\-]+)+/(?=[\w.\-])")
DIGITS = 6
"""Digits of a figure: more say nothing, and the file is committed."""


COUNT = "count"
"""Figure that is not measured but asked for: how many records a run had."""
UNPROMISED = frozenset({"request", "latency", "round-trip", "start", "matching", "replay"})
"""Sections whose figures do not wait for a confirm."""


class Unreadable(Exception):
    """The file is not a recording of this schema."""


class ColumnFacts(msgspec.Struct, frozen=True):
    """A column as it was measured."""

    name: str
    peer: str
    mode: str
    client: str
    label: str
    persistent: bool
    synced: bool
    note: str = ""
    server_version: str = ""
    client_version: str = ""
    settings: tuple[str, ...] = ()

    def label_in(self, section: str) -> str:
        """Return its label; ours without its level where no confirm is waited for.

        The label for a start has no client: it is the server's.
        """
        if section == "start":
            return self.label.rpartition(", ")[0]
        if self.peer == "malamute" and section in UNPROMISED:
            return self.label.partition(",")[0]
        return self.label


class WorkFacts(msgspec.Struct, frozen=True):
    """A work as it was measured."""

    name: str
    section: str
    title: str
    figure: str
    """The figure that the work is about; the others are shown beside it."""
    size: int = 0
    note: str = ""


class Run(msgspec.Struct):
    """One run: its figures by name, or why there are none."""

    count: int
    figures: dict[str, float] = {}
    error: str = ""


class Measured(msgspec.Struct):
    """All runs of one column at one work."""

    work: str
    column: str
    runs: list[Run] = []

    @property
    def good(self) -> list[Run]:
        return [run for run in self.runs if not run.error]

    @property
    def error(self) -> str:
        """Return the reason of the first run that failed."""
        return next((run.error for run in self.runs if run.error), "")

    def values(self, figure: str) -> list[float]:
        """Return the figure of each run that has it."""
        if figure == COUNT:
            return [float(run.count) for run in self.good]
        return [run.figures[figure] for run in self.good if figure in run.figures]

    def median(self, figure: str) -> float | None:
        values = self.values(figure)
        return median(values) if values else None

    def spread(self, figure: str) -> float:
        values = self.values(figure)
        return spread(values) if values else 0.0


class Limit(msgspec.Struct):
    """One limit of the machine."""

    name: str
    title: str
    unit: str
    runs: list[float]
    note: str = ""

    @property
    def median(self) -> float:
        return median(self.runs)


class Sitting(msgspec.Struct):
    """One call of the suite that measured some of a recording."""

    command: str
    started: str
    ended: str = ""
    """Time of the end; empty while it goes on, or when it was interrupted."""
    commit: str = ""
    """Commit, where it is not that of the recording: only code that shows figures differs."""


class Results(msgspec.Struct):
    """One recording."""

    machine: Machine
    commit: Commit
    command: str
    started: str
    schema: int = SCHEMA
    ended: str = ""
    """Time of the end; empty while it goes on, or when it was interrupted."""
    seconds: float = 0.0
    """Seconds that it took, interruptions left out."""
    runs: int = 0
    """Runs of each work that were asked for."""
    versions: dict[str, dict[str, str]] = {}
    left_out: dict[str, str] = {}
    """Peers and clients that did not take part, and why."""
    columns: list[ColumnFacts] = []
    works: list[WorkFacts] = []
    measured: list[Measured] = []
    limits: list[Limit] = []
    curves: list[Any] = []
    """Curves in the form of perf/curves/."""
    curves_failed: dict[str, str] = {}
    """Curves that have no figures, and why."""
    sittings: list[Sitting] = []
    """All calls of the suite that made this recording, the first included."""

    def sat(self) -> list[Sitting]:
        return self.sittings or [Sitting(self.command, self.started, self.ended)]

    def of(self, work: str, column: str) -> Measured | None:
        for measured in self.measured:
            if measured.work == work and measured.column == column:
                return measured
        return None

    def at(self, work: str) -> Iterator[tuple[ColumnFacts, Measured]]:
        """Return the columns that have runs of a work, in the columns' order."""
        for column in self.columns:
            measured = self.of(work, column.name)
            if measured is not None:
                yield column, measured

    def column(self, name: str) -> ColumnFacts | None:
        return next((column for column in self.columns if column.name == name), None)

    def work(self, name: str) -> WorkFacts | None:
        return next((work for work in self.works if work.name == name), None)

    def limit(self, name: str) -> Limit | None:
        return next((limit for limit in self.limits if limit.name == name), None)

    def figure(self, work: str, column: str, figure: str) -> float | None:
        """Return the median of a figure, None when there is none."""
        measured = self.of(work, column)
        return None if measured is None else measured.median(figure)


def placeless(text: str) -> str:
    """Return a text without the folders of this machine: results are read elsewhere."""
    return _FOLDERS.sub("", text)


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.{DIGITS}g}") for name, value in figures.items()}


def load(path: Path) -> Results:
    """Read a recording. Raises Unreadable."""
    try:
        data = path.read_bytes()
        found = msgspec.json.decode(data).get("schema")
        if found != SCHEMA:
            raise Unreadable(f"{path} has schema {found}, this program reads {SCHEMA}")
        return msgspec.json.decode(data, type=Results)
    except (OSError, AttributeError, msgspec.MsgspecError) as error:
        raise Unreadable(f"{path} is no recording: {error}") from error


def save(results: Results, path: Path) -> None:
    """Write the file whole or not at all: a kill leaves the file before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    data = msgspec.json.format(msgspec.json.encode(results), indent=1)
    with beside.open("wb") as file:
        file.write(data + b"\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
