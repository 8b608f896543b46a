"""Run the micro-benchmarks and compare them with the recorded ones: `python -m perf.micro`.

    python -m perf.micro                       # three passes; says what changed beyond the noise
    python -m perf.micro -k 'core and mail'    # some of them, as pytest's -k
    python -m perf.micro --record              # the results become perf/results/micro.json

Ends with status 1 when something became slower beyond the noise. Not while others use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from malamute_py.form import form
from perf.micro.comparing import Measured, Recorded, compare, load, save

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = HERE.parent / "results" / "micro.json"
PYTEST = (
    "-q", "-p", "no:xdist", "-p", "no:cacheprovider",
    "-o", "addopts=--import-mode=importlib", "-o", "python_files=bench_*.py",
    "-o", "pythonpath=", "--benchmark-disable-gc", "--benchmark-warmup=on",
    "--benchmark-warmup-iterations=50", "--benchmark-min-rounds=10", "--benchmark-quiet",
    "--benchmark-max-time=0.1",
)  # fmt: skip


def one_pass(select: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "pytest", *PYTEST, f"--benchmark-json={out}", str(HERE)]
        # Folders before the sources in the path (the compiled modules) are before them there, too.
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
        done = subprocess.run(
            [*command, *(("-k", select) if select else ())],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"the benchmarks failed:\n{done.stdout[-4000:]}")
        found: list[dict[str, Any]] = json.loads(out.read_bytes())["benchmarks"]
        return found


def measured(select: str, passes: int) -> list[Measured]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number in range(passes):
        print(f"pass {number + 1} of {passes}", file=sys.stderr, flush=True)
        for benchmark in one_pass(select):
            place = Path(benchmark["fullname"].partition("::")[0]).stem.removeprefix("bench_")
            found[f"{place}: {benchmark['name'].removeprefix('test_')}"].append(benchmark)
    return [
        Measured(
            name,
            medians_us=[round(run["stats"]["median"] * 1e6, 4) for run in runs],
            iqrs_us=[round(run["stats"]["iqr"] * 1e6, 4) for run in runs],
            references_us=[run["extra_info"]["reference_ns"] / 1e3 for run in runs],
            records=runs[0]["extra_info"].get("records", 1),
            bytes=runs[0]["extra_info"].get("bytes", 0),
        )
        for name, runs in found.items()
    ]


def processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as told:
        models = [line.partition(":")[2].strip() for line in told if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} processors"


def commit() -> str:
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return said.stdout.strip() or "unknown"


def show(new: Recorded, old: Recorded | None) -> int:
    """Print a line for each benchmark; returns how many became slower."""
    changes = {change.name: change for change in compare(new, old)} if old else {}
    print(f"{new.form}, Python {new.python}, {new.machine}")
    if old:
        for what, now, then in (
            ("form", new.form, old.form), ("Python", new.python, old.python),
            ("machine", new.machine, old.machine),
        ):  # fmt: skip
            if now != then:
                print(f"recorded with another {what}: {then}")
    width = max(len(measured.name) for measured in new.benchmarks)
    slower = 0
    for one in new.benchmarks:
        middle = sorted(one.medians_us)[len(one.medians_us) // 2]
        line = f"{one.name:<{width}} {middle:>12,.2f} us  {one.records / middle:>10,.3f} M/s"
        line += f" {one.bytes / middle:>9,.0f} MB/s" if one.bytes else " " * 15
        if change := changes.get(one.name):
            word = ("SLOWER" if change.factor > 1 else "FASTER") if change.flagged else ""
            slower += word == "SLOWER"
            line += f"  x{change.factor:.2f} (noise {change.noise:.0%}) {word}"
        print(line.rstrip())
    return slower


def main() -> int:
    about = __doc__ or ""
    parser = argparse.ArgumentParser(prog="python -m perf.micro", description=about.split("\n")[0])
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="some of them, as in pytest")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--against", type=Path, default=RESULTS, help="what to compare with")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--json", type=Path, default=None, help="write the results there as well")
    options = parser.parse_args()
    if options.record and options.k:
        parser.error("a recording is of all benchmarks: leave -k out")
    benchmarks = measured(options.k, options.passes)
    new = Recorded(form(), processor(), platform.python_version(), commit(), benchmarks)
    slower = show(new, load(options.against))
    for path in (options.json, RESULTS if options.record else None):
        if path:
            save(path, new)
    return 1 if slower and not options.record else 0


if __name__ == "__main__":
    sys.exit(main())
