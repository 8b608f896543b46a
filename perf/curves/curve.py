"""A curve: the cost of one thing against the number of another.

Owns the form of a curve and its slope. The rule: a slope is the exponent of a power law, fitted by
least squares to the logarithms of both axes: 0 is a cost that does not grow, 1 one that grows in
proportion. It says how a cost grows and not how high it is; so each point keeps its runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TypeAlias

import msgspec

Say: TypeAlias = Callable[[str], None]


class Point(msgspec.Struct, frozen=True):
    """One measurement: `y` is the median of the runs."""

    x: float
    y: float
    runs: tuple[float, ...]
    note: str = ""


class Line(msgspec.Struct, frozen=True):
    """One quantity against the axis of its curve."""

    name: str
    unit: str
    points: tuple[Point, ...]
    slope: float | None
    """Slope over all points; None where there are fewer than two."""
    tail: float | None
    """Slope between the last two points, where a cost shows that small counts hide."""
    note: str = ""


class Curve(msgspec.Struct, frozen=True):
    """Lines over one axis; both axes are meant to be logarithmic."""

    name: str
    title: str
    axis: str
    lines: tuple[Line, ...]
    expected: str
    """The expected outcome, in words."""
    note: str = ""


class Plan(msgspec.Struct, frozen=True):
    """The way to measure a curve."""

    name: str
    title: str
    axis: str
    points: tuple[int, ...]
    quick: tuple[int, ...]
    measure: Callable[[Sequence[int], int, Say], Curve]
    """Function (points, runs of each, callback for progress) -> the curve."""


class Gathering:
    """Points of several lines as they are measured."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], list[Point]] = {}
        self._notes: dict[str, str] = {}

    def add(self, name: str, unit: str, x: float, runs: Iterable[float], note: str = "") -> float:
        """Add the runs of one point of a line; returns their median."""
        kept = tuple(runs)
        point = Point(x, median(kept), kept, note)
        self._lines.setdefault((name, unit), []).append(point)
        return point.y

    def remark(self, name: str, note: str) -> None:
        """Add a remark on a line as a whole."""
        self._notes[name] = note

    def lines(self) -> tuple[Line, ...]:
        """The lines, in the order in which they began."""
        return tuple(
            Line(
                name, unit, tuple(points), slope(points), slope(points[-2:]),
                self._notes.get(name, ""),
            )
            for (name, unit), points in self._lines.items()
        )  # fmt: skip


def slope(points: Sequence[Point]) -> float | None:
    """Exponent of the power law through the points; only points with positive x and y count.

    None where fewer than two different x are left.
    """
    pairs = [(math.log(p.x), math.log(p.y)) for p in points if p.x > 0 and p.y > 0]
    if len({x for x, _ in pairs}) < 2:
        return None
    mean_x = sum(x for x, _ in pairs) / len(pairs)
    mean_y = sum(y for _, y in pairs) / len(pairs)
    spread = sum((x - mean_x) ** 2 for x, _ in pairs)
    return sum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread


def table(curve: Curve) -> str:
    """The curve as text: a row for each line, a column for each point, then the slopes."""
    xs = sorted({point.x for line in curve.lines for point in line.points})
    rows = [[curve.axis, *(f"{x:,.0f}" for x in xs), "slope", "last two"]]
    for line in curve.lines:
        by_x = {point.x: figure(point.y) for point in line.points}
        slopes = ["" if one is None else f"{one:+.2f}" for one in (line.slope, line.tail)]
        rows.append([f"{line.name}, {line.unit}", *(by_x.get(x, "") for x in xs), *slopes])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    text = [f"{curve.title} (right: {curve.expected})"]
    for name, *cells in rows:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        text.append("  ".join([name.ljust(widths[0]), *right]))
    remarks = [*(f"{line.name}: {line.note}" for line in curve.lines if line.note), curve.note]
    return "\n".join([*text, *(remark for remark in remarks if remark)])


def figure(value: float) -> str:
    """Return a number as text with three significant digits."""
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, digits)}f}"
