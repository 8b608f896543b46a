"""The year's delays and its rain as a picture, for a page.

Owns what the picture shows. All of it comes from the results that the query has published.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Final

from malamute_py.demo.expected import Result

RAINS: Final = ("dry", "light rain", "moderate rain", "heavy rain")
AIRPORTS: Final = {"EWR": "Newark", "JFK": "Kennedy", "LGA": "La Guardia"}
_COLOURS: Final = ("#c9c5bb", "#8ec1de", "#2f7fbf", "#0b2f5f")
_INK: Final = "#2b2b2b"
_FAINT: Final = "#7d7971"
_GRID: Final = "#e6e2d9"
_LEFT: Final = 0.055


def mean_delay(results: Iterable[Result]) -> float:
    """Minutes by which departures are late on average; 0 where none has departed."""
    counted = [(each.departed, each.mean_delay) for each in results if each.mean_delay is not None]
    departed = sum(count for count, _ in counted)
    return sum(count * mean for count, mean in counted) / departed if departed else 0.0


def draw(results: Sequence[Result], file: Path) -> None:
    """Draw each day's mean delay by airport, coloured by its heaviest rain, and the mean by rain.

    file: .svg or .png, as its name ends.
    """
    import matplotlib as mpl

    style: dict[str, Any] = {
        "font.size": 10, "text.color": _INK, "xtick.color": _FAINT, "ytick.color": _FAINT,
        "axes.spines.top": False, "axes.spines.right": False, "axes.spines.bottom": False,
        # The ids in an SVG are the same in each run.
        "axes.spines.left": False, "svg.hashsalt": "malamute",
    }  # fmt: skip
    styled: Any = mpl.rc_context
    with styled(style):
        _figure(results).savefig(file, dpi=160)


def _figure(results: Sequence[Result]) -> Any:
    """Draw the whole picture: for each airport a row with its days and, beside them, its rain.

    Places of texts are shares of the figure's width and height, from the lower left.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(11, 6.6))
    canvas: Any = FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        3, 2, width_ratios=[4.6, 1], left=_LEFT, right=0.965, top=0.80, bottom=0.06,
        hspace=0.25, wspace=0.09,
    )  # fmt: skip
    departed = sum(each.departed for each in results)
    figure.text(_LEFT, 0.94, "When it rains on New York, departures are late", size=17,
                weight="bold")  # fmt: skip
    figure.text(
        _LEFT, 0.9, f"Mean delay of each day's departures in minutes: {departed:,} departures of"
        " 2013. The colour is the heaviest rain of the day:", color=_FAINT,
    )  # fmt: skip
    # The legend: each entry begins where the text before it ends.
    left = _LEFT
    for rain, colour in zip(RAINS, _COLOURS, strict=True):
        figure.text(left, 0.859, "■", color=colour, size=13)
        label = figure.text(left + 0.016, 0.861, rain)
        left = label.get_window_extent(canvas.get_renderer()).x1 / figure.bbox.width + 0.022
    # All airports have the same scales.
    days = sorted({each.day for each in results})
    by_day = _grouped(results, "origin", "day").values()
    lowest, highest = (bound(map(mean_delay, by_day)) for bound in (min, max))
    longest = max(map(mean_delay, _grouped(results, "origin", "rain").values()))
    for place, (origin, name) in enumerate(AIRPORTS.items()):
        here = [each for each in results if each.origin == origin]
        axes = figure.add_subplot(grid[place, 0])
        axes.set_title(f"{name} ({origin})", loc="left", size=10.5, pad=3)
        axes.set_ylim(min(lowest * 1.05, 0), highest * 1.05)
        _days(axes, here, days)
        axes.tick_params(labelbottom=place == len(AIRPORTS) - 1)
        axes = figure.add_subplot(grid[place, 1])
        axes.set_xlim(0, longest * 1.15)
        _rains(axes, here)
    figure.axes[1].set_title("all days, by the hour's rain", loc="left", size=9,
                             color=_FAINT, pad=3)  # fmt: skip
    return figure


def _grouped(results: Iterable[Result], *names: str) -> dict[tuple[str, ...], list[Result]]:
    """Group results by the values that they have under these names of Result."""
    groups: dict[tuple[str, ...], list[Result]] = defaultdict(list)
    for each in results:
        groups[tuple(getattr(each, name) for name in names)].append(each)
    return groups


def _days(axes: Any, results: Sequence[Result], days: Sequence[str]) -> None:
    """Draw a bar for each day's mean delay at one airport, coloured by the day's heaviest rain.

    days: all days, so that each airport's begin and end at the same place.
    """
    by_day = {day: some for (day,), some in _grouped(results, "day").items()}
    heaviest = [max(RAINS.index(each.rain) for each in some) for some in by_day.values()]
    axes.bar(
        [date.fromisoformat(day) for day in by_day], [mean_delay(some) for some in by_day.values()],
        width=1.0, align="edge", color=[_COLOURS[rain] for rain in heaviest],
    )  # fmt: skip
    axes.set_xlim(date.fromisoformat(days[0]), date.fromisoformat(days[-1]) + timedelta(1))
    months = [date.fromisoformat(day) for day in days if day.endswith("-01")]
    axes.set_xticks(months, [f"{month:%b}" for month in months], ha="left")
    axes.tick_params(length=0)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.axhline(0, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _rains(axes: Any, results: Sequence[Result]) -> None:
    """Draw the mean delay at one airport for each kind of rain, the driest on top."""
    by_rain = _grouped(results, "rain")
    means = [mean_delay(by_rain[rain,]) for rain in RAINS]
    bars = axes.barh(RAINS, means, color=_COLOURS, height=0.74)
    axes.bar_label(bars, fmt="%.0f", padding=4)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_yticks([])
