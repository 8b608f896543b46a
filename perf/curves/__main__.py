"""Measure the scaling curves.

    python -m perf.curves [--only NAME ...] [--points N ...] [--quick] [--runs N] [--json FILE]

Prints a table for each curve, with the slope of each line on logarithmic axes: 0 is flat, 1 is in
proportion.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec

from perf.curves import CURVES
from perf.curves.curve import Curve, table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CURVES, default=list(CURVES), metavar="NAME")
    parser.add_argument("--points", nargs="+", type=int, help="instead of the curve's own")
    parser.add_argument("--quick", action="store_true", help="the first points, one run each")
    parser.add_argument("--runs", type=int, help="of each point; the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    runs = options.runs or (1 if options.quick else 3)
    curves: list[Curve] = []
    for name in options.only:
        plan = CURVES[name]
        points = options.points or (plan.quick if options.quick else plan.points)
        began = time.monotonic()
        curve = plan.measure(points, runs, lambda text: print(f"  {text}", file=sys.stderr))
        curves.append(curve)
        print(f"\n{table(curve)}\nin {time.monotonic() - began:.0f} s", flush=True)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(curves)) + b"\n")


if __name__ == "__main__":
    main()
