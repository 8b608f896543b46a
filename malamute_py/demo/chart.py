"""The year on a terminal: departures a day, how many of them were late, and delays by rain.

Owns the pictures in text. The series come from the broker's records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from malamute_py.demo.expected import Result
from malamute_py.demo.picture import AIRPORTS, RAINS, mean_delay

_WEEK = 7


def year(days: Sequence[str], departures: Sequence[int], delayed: Sequence[int], width: int) -> str:
    """Draw both series as the mean of each week, and return that as coloured text.

    days: names, as 2013-01-31. departures, delayed: of each day. width: in characters.
    """
    import plotext

    plot: Any = plotext
    plot.clear_figure()
    plot.plotsize(width, 18)
    plot.theme("clear")
    plot.title("Departures a day from New York in 2013, each week's mean, as read back")
    weeks = list(range(0, len(days), _WEEK))
    for series, label, colour in (
        (departures, "departures", "blue"),
        (delayed, "of these late", "red"),
    ):
        means = [_mean(series[week : week + _WEEK]) for week in weeks]
        plot.plot(weeks, means, label=label, marker="braille", color=colour)
    # A tick at the first day of each month, with the month's number.
    firsts = [place for place, day in enumerate(days) if day.endswith("-01")]
    plot.xticks(firsts, [days[place][5:7] for place in firsts])
    plot.ylim(0, 1.1 * max(departures, default=1))
    return str(plot.build())


def rain(results: Sequence[Result], width: int) -> str:
    """Draw the mean delay by airport and rain, and return that as coloured text.

    width: in characters.
    """
    import plotext

    plot: Any = plotext
    plot.clear_figure()
    plot.plotsize(width, 18)
    plot.theme("clear")
    plot.title("Minutes by which departures were late, by the rain of their hour")
    means = [
        [mean_delay([each for each in results if (each.origin, each.rain) == (origin, rain)])
         for origin in AIRPORTS]
        for rain in RAINS
    ]  # fmt: skip
    plot.multiple_bar(list(AIRPORTS.values()), means, labels=RAINS,
                      color=["gray", "cyan+", "blue+", "blue"])  # fmt: skip
    return str(plot.build())


def _mean(values: Sequence[int]) -> float:
    """Return the mean of some figures, at least one."""
    return sum(values) / len(values)
