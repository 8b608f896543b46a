"""`python -m perf`: measure this broker and its peers side by side, and report.

    python -m perf                         # everything, about 40 minutes
    python -m perf --quick                 # what has a target, once, about 3 minutes
    python -m perf --only 'one-to-one/*' --peers malamute nats
    python -m perf --resume                # an interrupted recording goes on
    python -m perf --against perf/results/results.json
    python -m perf report perf/results/results.json

See perf/README.md.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from perf.peers.peer import Peer, end_all
from perf.suite import limits, report
from perf.suite.compare import compare
from perf.suite.machine import InMemory, commit_of, disk_of, machine, same_code
from perf.suite.recording import Plan, Recording, now
from perf.suite.results import Results, Sitting, Unreadable, load, placeless, save
from perf.suite.roles import ROOT, kill_all
from perf.suite.screen import Screen, span
from perf.suite.works import QUICK, WORKS, selected

PEERS = ("malamute", "nats", "redis", "rabbitmq", "mosquitto")
RESULTS = ROOT / "perf" / "results" / "results.json"
OUT = ROOT / "perf" / "out"
CURVES_S = {
    "subscriptions": 86, "clients": 94, "streams": 46, "headers": 22, "groups": 21,
    "backlog": 65, "mailboxes": 40, "journal": 70,
}  # fmt: skip
"""Seconds of three runs of each curve, on two cores that others used, too."""
LIMIT_S = 9.5
"""Seconds of one pass over the limits."""
LIMITS, CURVES = "limits", "curves"


def load_peers(names: Sequence[str]) -> tuple[dict[str, Peer], dict[str, str]]:
    """Return the peers that can take part; and peers and clients that cannot, with the reason."""
    peers: dict[str, Peer] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            peer: Peer = importlib.import_module(f"perf.peers.{name}.server").PEER
        except ImportError as error:
            left_out[name] = f"its client is not installed ({error})"
            continue
        missing = peer.missing()
        if missing:
            left_out[name] = missing
        else:
            peers[name] = peer
            left_out |= peer.absent()
    left_out |= {name: "not asked for (--peers)" for name in PEERS if name not in names}
    return peers, left_out


def load_curves() -> dict[str, Any]:
    try:
        return dict(importlib.import_module("perf.curves").CURVES)
    except ImportError as error:
        print(f"no curves: {error}", file=sys.stderr)
        return {}


def wanted(patterns: Sequence[str], section: str, name: str) -> bool:
    return not patterns or any(
        pattern == section or fnmatchcase(f"{section}/{name}", pattern) for pattern in patterns
    )


def parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").partition("\n")
    made = argparse.ArgumentParser(
        prog="python -m perf",
        description=lines[0],
        epilog="`python -m perf report FILE` makes the report of a recording again.",
    )
    made.add_argument("--quick", action="store_true", help="what has a target, once, shorter runs")
    made.add_argument("--only", nargs="+", default=[], metavar="GLOB",
                      help="works by name or section, see --list")  # fmt: skip
    made.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS, metavar="PEER",
                      help=f"of {', '.join(PEERS)}")  # fmt: skip
    made.add_argument("--columns", nargs="+", default=[], metavar="GLOB",
                      help="columns by name, see --list")  # fmt: skip
    made.add_argument("--runs", type=int, default=0, help="of each work; 3, with --quick 1")
    made.add_argument("--list", action="store_true", help="show what would be run, and end")
    made.add_argument("--out", type=Path, default=None, help="the recording, a .json; its report "
                      "and plots go beside it (default perf/results/results.json when everything "
                      "is measured, else perf/out/results.json)")  # fmt: skip
    made.add_argument("--data", type=Path, default=OUT, help="where servers keep their data")
    made.add_argument("--resume", action="store_true", help="go on with the recording in --out")
    made.add_argument("--against", type=Path, default=None, help="compare with a recording")
    made.add_argument("--counts", type=int, default=0, help=argparse.SUPPRESS)
    return made


def curve_seconds(names: Sequence[str], plan: Plan) -> dict[str, float]:
    """Return the seconds that each curve is expected to take."""
    return {name: CURVES_S.get(name, 60) * plan.runs / 3 for name in names}


def make_plan(options: argparse.Namespace, peers: dict[str, Peer]) -> Plan:
    works = selected(options.only)
    if options.quick and not options.only:
        works = [work for work in WORKS if work.name in QUICK]
    columns = [column for peer in peers.values() for column in peer.columns()]
    if options.columns:
        columns = [
            column
            for column in columns
            if any(fnmatchcase(column.name, pattern) for pattern in options.columns)
        ]
    runs = options.runs or (1 if options.quick else 3)
    scale = 0.5 if options.quick else 1.0
    return Plan(tuple(works), tuple(columns), runs, scale, options.counts)


def show_plan(plan: Plan, left_out: dict[str, str], curves: Sequence[str], limit: bool) -> None:
    for column in plan.columns:
        print(f"column {column.name:28} {column.label}")
    for name, why in left_out.items():
        print(f"left out: {name}: {why}")
    for work in plan.works:
        columns = plan.columns_of(work)
        seconds = plan.seconds(work) * plan.runs * len(columns)
        print(f"{work.name:20} {len(columns):2} columns x {plan.runs} runs, {span(seconds):>6}  "
              f"{work.title}")  # fmt: skip
    total = plan.total_s()
    for name, seconds in curve_seconds(curves, plan).items():
        total += seconds
        print(f"{CURVES + '/' + name:20} {span(seconds):>24}")
    if limit:
        total += LIMIT_S * plan.runs * plan.scale
        print(f"{LIMITS:20} {span(LIMIT_S * plan.runs * plan.scale):>24}")
    print(f"about {span(total)} minutes")


def begin(options: argparse.Namespace, out: Path, plan: Plan) -> Results:
    """Return fresh results, or those that --resume goes on with. Raises SystemExit."""
    here, commit = machine(options.data), commit_of(ROOT)
    command = placeless(" ".join(["python -m perf", *sys.argv[1:]]))
    later = ""
    if options.resume and out.exists():
        results = load(out)
        if results.commit.commit != commit.commit:
            if not same_code(ROOT, results.commit.commit, commit.commit):
                raise SystemExit(
                    f"{out} was begun at commit {results.commit.commit[:12]}, this is"
                    f" {commit.commit[:12]}, and what is measured, or measures, differs: begin anew"
                    " without --resume"
                )
            later = commit.commit
        if results.machine != here:
            raise SystemExit(f"{out} was begun on another machine: begin anew without --resume")
        if results.runs != plan.runs:
            raise SystemExit(f"{out} has {results.runs} runs of each work: --runs {results.runs}")
        results.commit = msgspec.structs.replace(
            results.commit, dirty=results.commit.dirty or commit.dirty
        )
        results.sittings = results.sat()
        results.ended = ""
    else:
        results = Results(here, commit, command, now(), runs=plan.runs)
    results.sittings.append(Sitting(command, now(), commit=later))
    return results


def record(options: argparse.Namespace) -> int:
    options.data.mkdir(parents=True, exist_ok=True)
    peers, left_out = load_peers(options.peers)
    plan = make_plan(options, peers)
    whole = not (options.only or options.quick or options.columns or options.counts)
    with_limits = wanted(options.only, LIMITS, "")
    all_curves = load_curves() if options.only or not options.quick else {}
    curves = {n: c for n, c in all_curves.items() if wanted(options.only, CURVES, n)}
    if not plan.works and not curves and not with_limits:
        raise SystemExit(f"nothing is called {' '.join(options.only)}: see --list")
    if options.list:
        show_plan(plan, left_out, list(curves), with_limits)
        return 0
    out: Path = options.out or (RESULTS if whole else OUT / "results.json")
    try:
        # Before anything is measured: a missing file is reported at once, not at the end.
        before = None if options.against is None else load(options.against)
        results = begin(options, out, plan)
    except (InMemory, Unreadable) as error:
        raise SystemExit(str(error)) from None
    results.left_out = {name: placeless(why) for name, why in left_out.items()}
    # Versions of peers that only an earlier sitting measured stay as they are.
    results.versions |= {name: peer.versions() for name, peer in peers.items()}
    asked = {column.peer for column in results.columns}
    results.left_out = {n: why for n, why in results.left_out.items() if n not in asked}
    known = {found["name"] for found in results.curves}
    to_measure = [name for name in curves if name not in known]
    with (
        Screen(plan, curve_seconds(to_measure, plan)) as screen,
        _folder(options.data) as data,
    ):
        for name, why in left_out.items():
            screen.says(f"left out: {name}: {why}")
        if with_limits and not results.limits:
            # Limits come first: data of servers that the disk still removes would disturb them.
            scale = 0.3 if options.quick else 1.0
            results.limits = limits.measure(
                data, disk_of(options.data), plan.runs, scale, lambda t: screen.says(f"limit: {t}")
            )
            save(results, out)
        Recording(plan, peers, results, out, data, screen).run()
        for name in to_measure:
            measure_curve(name, curves[name], options, plan, results, screen)
            save(results, out)
    results.ended = results.sittings[-1].ended = now()
    save(results, out)
    made = report.make(results, out)
    print(f"{made} ({span(results.seconds)} minutes of runs)")
    if before is not None:
        print(compare(before, results))
    return 0


def measure_curve(
    name: str, curve: Any, options: argparse.Namespace, plan: Plan, results: Results, screen: Screen
) -> None:
    """Measure one curve into the results; a curve that fails is reported, and the others go on."""
    screen.begins_curve(name)
    since = time.monotonic()
    small = options.quick or options.counts
    try:
        found = curve.measure(curve.quick if small else curve.points, plan.runs,
                              lambda text: screen.says(f"  {text}"))  # fmt: skip
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            raise  # The exit of a signal, not of a curve that says what is wrong.
        screen.says(f"curve {name} failed: {error}")
        results.curves_failed[name] = placeless(str(error).partition("\n")[0])
    else:
        results.curves_failed.pop(name, None)
        results.curves.append(msgspec.to_builtins(found))
    results.seconds += time.monotonic() - since
    screen.ends_curve(name)


@contextlib.contextmanager
def _folder(data: Path) -> Any:
    """Make a folder for this recording alone, removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="perf-", dir=data)).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report_again(arguments: list[str]) -> int:
    made = argparse.ArgumentParser(prog="python -m perf report")
    made.add_argument("results", type=Path)
    made.add_argument("--against", type=Path, default=None)
    options = made.parse_args(arguments)
    try:
        results = load(options.results)
        print(report.make(results, options.results))
        if options.against is not None:
            print(compare(load(options.against), results))
    except Unreadable as error:
        raise SystemExit(str(error)) from None
    return 0


def _ended(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


def main() -> int:
    # Servers and drivers have sessions of their own: however this process ends, it ends them.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ended)
    atexit.register(end_all)
    atexit.register(kill_all)
    os.chdir(ROOT)
    if sys.argv[1:2] == ["report"]:
        return report_again(sys.argv[2:])
    try:
        return record(parser().parse_args())
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept, --resume goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
