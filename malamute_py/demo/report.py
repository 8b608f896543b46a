"""Checks of one run: expectation, finding and outcome, for people and as JSON.

Owns the list of checks. A check holds both figures; it is never only a tick.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Check:
    """One claim: the table's figure, and the one that came through the broker."""

    scene: str
    claim: str
    expected: str
    found: str
    holds: bool


@dataclass(slots=True)
class Report:
    """The checks of a run in the order they were made, printed as they are made."""

    console: Console
    checks: list[Check] = field(default_factory=list)
    scene: str = ""

    def begin(self, scene: str) -> None:
        """Start a scene: the checks that follow belong to it."""
        self.scene = scene
        self.console.print(f"\n[bold]{scene}[/bold]")

    def say(self, text: str) -> None:
        """Add a remark: a figure that is not compared with anything."""
        self.console.print(Padding(f"[dim]{escape(text)}[/dim]", (0, 0, 0, 4)))

    def same_rows(self, claim: str, expected: list[int], found: list[int]) -> None:
        """Check that row numbers are these, in this order; show where a difference begins."""
        if expected == found:
            self._add(claim, _count_of_rows(len(expected)), f"{len(found):,}, in order", holds=True)
            return
        # The first place that differs; where one list ends, the end of the shorter.
        at = next(
            (place for place, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
            min(len(expected), len(found)),
        )
        self._add(
            claim,
            _count_of_rows(len(expected)),
            f"{_count_of_rows(len(found))}, first difference at place {at:,}"
            f" ({expected[at : at + 3]} against {found[at : at + 3]})",
            holds=False,
        )

    def equal(self, claim: str, expected: Any, found: Any) -> None:
        """Check that two figures are the same."""
        self._add(claim, _shown(expected), _shown(found), holds=expected == found)

    def holds(self, claim: str, bound: str, found: str, holds: bool) -> None:
        """Record a claim that the caller has judged, as one with a bound instead of a figure.

        bound, found: what was to be and what is, in words.
        """
        self._add(claim, bound, found, holds=holds)

    def _add(self, claim: str, expected: str, found: str, *, holds: bool) -> None:
        """Keep a check, and print its outcome at once."""
        self.checks.append(Check(self.scene, claim, expected, found, holds))
        against = "" if holds else f", not {expected}"
        self.console.print(f"  {_outcome_mark(holds)} {escape(f'{claim}: {found}{against}')}")

    @property
    def all_hold(self) -> bool:
        """Whether every check came out as expected; false when there were none."""
        return bool(self.checks) and all(check.holds for check in self.checks)

    def table(self) -> Table:
        """Return all checks, scene by scene, for a terminal of 80 columns or more."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("What was checked", ratio=1)
        table.add_column("by the table", overflow="fold")
        table.add_column("through the broker", overflow="fold")
        scene = ""
        for check in self.checks:
            if check.scene != scene:
                scene = check.scene
                table.add_row(f"[bold]{escape(scene)}[/bold]")
            table.add_row(
                f"{_outcome_mark(check.holds)} {escape(check.claim)}",
                escape(check.expected), escape(check.found),
            )  # fmt: skip
        return table

    def to_json(self) -> str:
        """Return all checks as one JSON document."""
        return json.dumps([asdict(check) for check in self.checks], ensure_ascii=False, indent=1)


def _shown(figure: Any) -> str:
    """Return a figure as text, a large number with commas."""
    return f"{figure:,}" if isinstance(figure, int) else str(figure)


def _count_of_rows(count: int) -> str:
    """Return a number of rows in words."""
    return f"{count:,} {'row' if count == 1 else 'rows'}"


def _outcome_mark(holds: bool) -> str:
    """Return the sign before a claim that holds, or that does not, in rich's markup."""
    return "[green]✓[/green]" if holds else "[bold red]✗[/bold red]"
