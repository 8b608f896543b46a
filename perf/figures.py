"""Figures of a measurement, and how they are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Figure(NamedTuple):
    """One figure of a measurement."""

    what: str
    value: float
    unit: str


def show(figures: Sequence[Figure], *, as_json: bool) -> None:
    """Print figures as a table, or as one JSON object that names the version of Python."""
    if as_json:
        rows = [figure._asdict() for figure in figures]
        json.dump({"python": sys.version.split()[0], "figures": rows}, sys.stdout, indent=1)
        print()
        return
    width = max(len(figure.what) for figure in figures)
    for what, value, unit in figures:
        print(f"{what:<{width}}  {value:>14,.{1 if value >= 10 else 2}f} {unit}")
