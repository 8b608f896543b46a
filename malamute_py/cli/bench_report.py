"""The report of a bench: one HTML file with its figures and plots, which needs no server.

Owns the plots. The rules: a window of time shows percentiles of what ended in it, and none where
nothing did; axes of time taken are logarithmic, as a slow one in a thousand is a hundred times a
usual one; the file has no script and fetches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final, NamedTuple

from malamute_py.cli.measuring import Measure, percentile

_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 34
WINDOWS: Final = 60
"""Windows that a run is cut into."""
_LINES: Final = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
_PERCENTILES: Final = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)
_SHORTEST_MS: Final = 1e-4
"""Shortest time that a plot shows; a shorter one is drawn as if it had this length."""
_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; }
td.n, th.n { text-align: right; } svg { width: 100%; height: auto; }
svg text { font-size: 11px; fill: currentColor; } .axis { stroke: currentColor; opacity: .25; }
.line { fill: none; stroke-width: 1.6; } .bar { fill: #4878a8; opacity: .8; }
.p50 { stroke: #4878a8; } .p90 { stroke: #3a8a4a; stroke-dasharray: 7 3; }
.p99 { stroke: #b8860b; stroke-dasharray: 3 2; } .max { stroke: #b03040; stroke-dasharray: 1 3; }
"""

Points = Sequence[tuple[float, float]]


class Window(NamedTuple):
    """A part of a run."""

    at_s: float
    """Middle of it, from the run's start."""
    ended: int
    """How many ended in it."""
    spans_ms: Mapping[str, float]
    """Percentiles of what they took, by name."""


def windows(measure: Measure) -> list[Window]:
    """Cut a measured run, from its first beginning to its last end, into windows of one length."""
    if not measure.ended_ns:
        return []
    begin = min(at - span for at, span in zip(measure.ended_ns, measure.spans_ns, strict=True))
    # One nanosecond more, so that the last end falls into the last window and not after it.
    length = max(1, max(measure.ended_ns) + 1 - begin) / WINDOWS
    within: list[list[int]] = [[] for _ in range(WINDOWS)]
    for at, span in zip(measure.ended_ns, measure.spans_ns, strict=True):
        window = min(WINDOWS - 1, int((at - begin) / length))  # min(): the division may round up.
        within[window].append(span)
    found = []
    for place, spans in enumerate(within):
        spans.sort()
        taken = {name: percentile(spans, share) / 1e6 for name, share in _LINES} if spans else {}
        middle_s = (place + 0.5) * length / 1e9
        found.append(Window(middle_s, len(spans), taken))
    return found


def page(title: str, conditions: Mapping[str, Any], measures: Sequence[Measure]) -> str:
    """Return the report as HTML: the conditions, and for each measure its figures and three plots.

    A measure that noted no times, as that of reading history, has its figures alone.
    """
    parts = [_facts(conditions)]
    for measure in measures:
        parts.append(f"<h2>{escape(measure.what)}</h2>{_figures(measure)}")
        if not measure.spans_ns:
            continue
        cut = windows(measure)
        seconds = cut[1].at_s - cut[0].at_s  # the length of each window
        lines = {
            name: [(each.at_s, each.spans_ms[name]) for each in cut if each.ended]
            for name, _ in _LINES
        }
        ordered = sorted(measure.spans_ns)
        # The axis counts nines: 90% stands at 1, 99% at 2.
        nines = [
            (-math.log10(1 - share), percentile(ordered, share) / 1e6)
            for share in _PERCENTILES
            if (1 - share) * len(ordered) >= 1  # Beyond it lies at least one value.
        ]
        parts += [
            _figure("Time taken, over the run", _spans(lines)),
            _figure("Ended a second, over the run",
                    _bars([(each.at_s, each.ended / seconds) for each in cut])),
            _figure("Time taken, by percentile", _spans({"p50": nines}, nines=True)),
        ]  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n"
        f"<h1>{escape(title)}</h1>\n{''.join(parts)}\n</html>\n"
    )


# --- tables ----------------------------------------------------------------------------------


def _facts(conditions: Mapping[str, Any]) -> str:
    """Return the conditions of a bench as an HTML table."""
    rows = "".join(
        f"<tr><th>{escape(name.replace('_', ' '))}</th><td>{escape(_text(value))}</td></tr>"
        for name, value in conditions.items()
    )
    return f"<table>{rows}</table>"


def _figures(measure: Measure) -> str:
    """Return the figures of a measure as an HTML table of one row."""
    shown = {name: value for name, value in measure.facts().items() if name != "what"}
    heads = "".join(f'<th class="n">{escape(name.replace("_", " "))}</th>' for name in shown)
    cells = "".join(f'<td class="n">{escape(_text(value))}</td>' for value in shown.values())
    return f"<table><tr>{heads}</tr><tr>{cells}</tr></table>"


def _text(value: Any) -> str:
    """Return a condition or figure as a person reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


# --- plots -----------------------------------------------------------------------------------


def _figure(title: str, drawing: str) -> str:
    """Return a plot with its title. drawing: the inside of an SVG."""
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{drawing}</svg></figure>"
    )


def _across(value: float, most: float) -> float:
    """Return the x of a value on an axis from 0 to `most`."""
    return _LEFT + value / (most or 1) * (_WIDTH - _LEFT - _RIGHT)


def _up(share: float) -> float:
    """Return the y of a share of the plot's height; in SVG y grows downwards."""
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _spans(lines: Mapping[str, Points], *, nines: bool = False) -> str:
    """Draw lines of milliseconds on a logarithmic axis.

    nines: one line over percentiles, whose places count the nines (99% stands at 2); False: lines
    over seconds, each with its name below.
    """

    def power_of(value: float) -> float:
        """Return the power of ten that a time is; 0 has none, and stands at the least."""
        return math.log10(max(_SHORTEST_MS, value))

    values = [value for points in lines.values() for _, value in points]
    # The axis goes from one whole power of ten to another one.
    least = math.floor(power_of(min(values)))
    most = max(least + 1, math.ceil(power_of(max(values))))
    end = max(at for points in lines.values() for at, _ in points)

    def height(value: float) -> float:
        return _up((power_of(value) - least) / (most - least))

    drawn = [_level(height(10.0**power), f"{10.0**power:g} ms") for power in range(least, most + 1)]
    for place, (name, points) in enumerate(lines.items()):
        path = " ".join(f"{_across(at, end):.1f},{height(value):.1f}" for at, value in points)
        drawn.append(f'<polyline class="line {name}" points="{path}"/>')
        if not nines:  # A stroke in the line's style, with its name.
            begin, base = _LEFT + 70 * place, _HEIGHT - 6
            across = f'x1="{begin}" x2="{begin + 24}" y1="{base}" y2="{base}"'
            drawn.append(f'<line class="line {name}" {across}/>')
            drawn.append(_label(begin + 28, base + 4, name))
    if nines:
        for at, _ in lines["p50"]:
            left = min(_across(at, end) - 14, _WIDTH - 48)
            drawn.append(_label(left, _HEIGHT - 18, f"{100 * (1 - 10**-at):.6g}%"))
    else:
        drawn.append(_label(_WIDTH - 60, _HEIGHT - 20, f"{end:.2f} s"))  # The axis's end.
    return "".join(drawn)


def _bars(points: Points) -> str:
    """Draw a bar for each point, with lines at 0, half and all of the highest."""
    most = max(value for _, value in points) or 1
    width = (_WIDTH - _LEFT - _RIGHT) / len(points)
    drawn = [_level(_up(share), f"{most * share:,.0f}") for share in (0.0, 0.5, 1.0)]
    for place, (_, value) in enumerate(points):
        top = _up(value / most)
        drawn.append(f'<rect class="bar" x="{_LEFT + place * width:.1f}" y="{top:.1f}"'
                     f' width="{width * 0.85:.1f}" height="{_up(0) - top:.1f}"/>')  # fmt: skip
    return "".join(drawn)


def _level(height: float, text: str) -> str:
    """Draw a horizontal line across the plot, with its value at the left."""
    line = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}"'
    return f'<line class="axis" {line}/>{_label(4, height + 4, text)}'


def _label(left: float, base: float, text: str) -> str:
    return f'<text x="{left:.1f}" y="{base:.1f}">{escape(text)}</text>'
