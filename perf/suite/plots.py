"""The plots of a report: bars by column, curves on logarithmic axes.

Owns their look. The rule: a peer has one colour everywhere, a Python client's bar is paler than a
native one's, and a file stays small enough to be committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from perf.suite.results import ColumnFacts, Results

COLOURS = {
    "malamute": "#c2410c",
    "nats": "#2563eb",
    "redis": "#b91c6b",
    "rabbitmq": "#15803d",
    "mosquitto": "#6d5bd0",
}
OTHER = "#64748b"
PALE = 0.45
LINES = ("#c2410c", "#2563eb", "#15803d", "#b91c6b", "#6d5bd0", "#a16207", "#0e7490", "#475569")

SECONDS = frozenset({"start_s", "start_after_kill_s"})

BARS: dict[str, tuple[str, Sequence[tuple[str, str, str]]]] = {
    # section: file, (work, figure, heading)
    "one-to-one": (
        "one-to-one.svg",
        [(f"one-to-one/{size}", "records_s", f"{size:,} B, records/s")
         for size in (12, 140, 560, 1120, 2940, 11760)],
    ),
    "replay": (
        "replay.svg",
        [("replay/whole", "records_s", "whole, records/s"),
         ("replay/rare", "records_s", "1 in 10,000, records gone through/s")],
    ),
    "fan-out": (
        "fan-out.svg",
        [(f"fan-out/{n}", "deliveries_s", f"one to {n:,}, deliveries/s") for n in (10, 100, 1000)],
    ),
    "request": (
        "request.svg",
        [("request/1x1", "round_trips_s", "1 in flight, round trips/s"),
         ("request/64x1", "round_trips_s", "64 in flight, round trips/s"),
         ("request/1024x1", "round_trips_s", "1,024 in flight, round trips/s")],
    ),
    "latency": (
        "latency.svg",
        [("latency/1000", "p50_us", "1,000/s, p50, us"),
         ("latency/1000", "p99_us", "1,000/s, p99, us")],
    ),
    "round-trip": (
        "round-trip.svg",
        [("round-trip/1000", "p50_us", "1,000/s, p50, us"),
         ("round-trip/1000", "p99_us", "1,000/s, p99, us")],
    ),
    "alone": (
        "alone.svg",
        [("alone/140", "p50_us", "a lone publish, p50, us"),
         ("alone/mail", "p50_us", "a lone mail, p50, us")],
    ),
    "start": (
        "start.svg",
        [(f"start/{n}", figure, f"{many} records, after {words}, s")
         for n, many in ((0, "no"), (100_000, "100 k"), (1_000_000, "1 M"))
         for figure, words in (("start_s", "a stop"), ("start_after_kill_s", "SIGKILL"))],
    ),
    "queue": (
        "queue.svg",
        [("queue/single", "records_s", "a call a message, messages/s"),
         ("queue/bulk", "records_s", "in bulk, messages/s")],
    ),
}  # fmt: skip


class Drawn(msgspec.Struct):
    """File names of the plots."""

    sections: dict[str, list[str]] = {}
    curves: dict[str, list[str]] = {}


def draw(results: Results, folder: Path) -> Drawn:
    """Draw what the recording has figures for; without matplotlib nothing, and a report of that."""
    drawn = Drawn()
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plots: pip install matplotlib")
        return drawn
    mpl.use("Agg")
    mpl.rcParams.update(
        {
            # Text as text: small files, and a reader can search it.
            "svg.fonttype": "none",
            # The same recording gives the same file.
            "svg.hashsalt": "malamute",
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "figure.facecolor": "white",
        }
    )
    for section, (name, panels) in BARS.items():
        there = [panel for panel in panels if _bars_of(results, panel[0], panel[1])]
        if there:
            _draw_bars(results, there, folder / name)
            drawn.sections[section] = [name]
    for curve in results.curves:
        drawn.curves[curve["name"]] = _draw_curve(curve, folder)
    return drawn


def _bars_of(results: Results, work: str, figure: str) -> list[tuple[ColumnFacts, float]]:
    found = []
    for column, measured in results.at(work):
        value = measured.median(figure)
        if value is not None:
            found.append((column, value))
    return found


def _draw_bars(results: Results, panels: Sequence[tuple[str, str, str]], path: Path) -> None:
    from matplotlib import pyplot as plt

    across = 1 if len(panels) == 1 else 2
    down = -(-len(panels) // across)
    counts = [len(_bars_of(results, work, figure)) for work, figure, _ in panels]
    # A row of panels is as high as its longest list.
    most = [max(counts[row * across : (row + 1) * across]) for row in range(down)]
    heights = [0.7 + 0.25 * count for count in most]
    made, axes = plt.subplots(
        down,
        across,
        figsize=(5.6 * across, sum(heights)),
        squeeze=False,
        layout="constrained",
        height_ratios=heights,
    )
    places = [axis for row in axes for axis in row]
    for axis in places[len(panels) :]:
        axis.set_visible(False)
    for place, (axis, panel) in enumerate(zip(places, panels, strict=False)):
        work, figure, heading = panel
        less = figure.endswith("_us") or figure in SECONDS
        bars = sorted(_bars_of(results, work, figure), key=lambda bar: bar[1], reverse=not less)
        largest = max(value for _, value in bars)
        for at, (column, value) in enumerate(bars):
            axis.barh(
                at,
                value,
                height=0.72,
                color=COLOURS.get(column.peer, OTHER),
                alpha=_strength(column, work),
            )
            axis.text(value + largest * 0.015, at, short(value), va="center", fontsize=8)
        axis.set_yticks(range(len(bars)), [_label(column, work) for column, _ in bars], fontsize=8)
        # Bars are as thick in every panel; the best is at the top.
        axis.set_ylim(most[place // across] - 0.4, -0.6)
        axis.set_xlim(0, largest * 1.16)
        axis.set_xticks([])
        axis.spines["bottom"].set_visible(False)
        axis.tick_params(axis="y", length=0)
        axis.set_title(heading + (" (less is better)" if less else ""), loc="left")
    made.savefig(path, metadata={"Date": None})
    plt.close(made)


def _strength(column: ColumnFacts, work: str) -> float:
    """Return how strong a bar's colour is: pale for a peer's Python client, except for a start."""
    theirs = column.client == "python" and column.peer != "malamute"
    return PALE if theirs and not work.startswith("start/") else 1.0


def _label(column: ColumnFacts, work: str) -> str:
    return column.label_in(work.partition("/")[0]).replace(" client", "")


def short(value: float) -> str:
    """Return a value in a few characters."""
    for above, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= above:
            return f"{value / above:.3g} {letter}"
    return f"{value:.3g}"


def _draw_curve(curve: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw one panel for each unit, both axes logarithmic, each line with its slope."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    lines = [line for line in curve["lines"] if line["points"]]
    units = list(dict.fromkeys(line["unit"] for line in lines))
    if not units:
        return []
    across = min(2, len(units))
    down = -(-len(units) // across)
    made, axes = plt.subplots(
        down, across, figsize=(5.6 * across, 4.2 * down), squeeze=False, layout="constrained"
    )
    places = [axis for row in axes for axis in row]
    for axis in places[len(units) :]:
        axis.set_visible(False)
    for axis, unit in zip(places, units, strict=False):
        for at, line in enumerate(line for line in lines if line["unit"] == unit):
            points = sorted((point["x"], point["y"]) for point in line["points"])
            slope = "" if line["slope"] is None else f" (slope {line['slope']:.2f})"
            axis.plot(
                [x for x, _ in points],
                [y for _, y in points],
                marker="o",
                markersize=3.5,
                linewidth=1.4,
                color=LINES[at % len(LINES)],
                label=line["name"] + slope,
            )
        values = [p["y"] for line in lines if line["unit"] == unit for p in line["points"]]
        axis.set_xscale("log")
        if min(values) > 0:
            axis.set_yscale("log")
            low, high = min(values), max(values)
            # A flat line should look flat: at least a decade is shown.
            axis.set_ylim(min(low / 1.6, high / 10), max(high * 1.6, low * 10))
        axis.set_xlabel(curve["axis"])
        axis.set_ylabel(unit)
        axis.grid(True, which="major", alpha=0.25, linewidth=0.6)
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        # Marks between the decades are most of a file, and say nothing.
        axis.minorticks_off()
        # Below the panel: lines may lie anywhere inside.
        axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0.0, -0.16))
    made.suptitle(curve["title"], fontsize=10, fontweight="bold", x=0.01, ha="left")
    name = f"curve-{curve['name']}.svg"
    made.savefig(folder / name, metadata={"Date": None})
    plt.close(made)
    return [name]
