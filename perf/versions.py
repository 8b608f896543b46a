"""Compare two versions of the code: calls a second of each, by turns, as ratios.

    python -m perf.versions OLD NEW [--calls publish request] [--starts 8] [--pairs 4]

OLD and NEW are folders with the code: clones of the repository, or what `git archive` gives. Each
has a broker of its own with a journal on disk, and a client in a process of its own. Owns this
comparison. The rules: the two take turns, a short while each, and their ratio is the figure, so a
slow minute of the machine strikes both; all processes are started anew several times, by turns in
both orders and with a random pause, since one start of the same code is up to a fifth faster than
another: what a broker does every few seconds falls into the same turns for as long as it runs. A
clone's own environment is used where it has one (`make setup`), else the one of this command, which
then has to suit both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from malamute_py.demo.daemon import Daemon
from perf.versions_side import CALLS

STARTS = 8
PAIRS = 4
SHOWN = 1 / 8
"""Share of the starts up to which some may have the other version faster."""
PAUSE_S = 5.0
"""Longest pause after a start: the tables of queues are written every five seconds."""
SLICE_S = 0.3
"""Seconds of calls of one version, before the other has its turn."""
HEADING = f"{'':12} {'old/s':>11} {'new/s':>11}  ratio (quartiles)       client's us    broker's us"
SETTINGS = ("journal.ring_bytes=1073741824", "log.level=warning")


class Rates(NamedTuple):
    """Calls of one kind by one start of a version: one entry a turn."""

    calls_s: list[float]
    client_us: list[float]
    """Processor time of the client's process, in microseconds a call."""
    broker_us: list[float]
    """That of the broker's process, which the system counts in steps of some 10 ms."""

    @property
    def medians(self) -> tuple[float, float, float]:
        """The median of each list; of broker_us the mean, as its steps are coarse."""
        return (
            statistics.median(self.calls_s), statistics.median(self.client_us),
            statistics.mean(self.broker_us),
        )  # fmt: skip


class Outcome(NamedTuple):
    """The ratio of the new version's rate to the old one's: median and quartiles of the starts."""

    median: float
    low: float
    high: float
    faster: float
    """The share of the starts in which the new version was faster."""

    @property
    def words(self) -> str:
        """Say what the starts show. By chance, 1 of 14 runs of eight starts shows a difference."""
        if min(self.faster, 1 - self.faster) > SHOWN:
            return "no difference shown"
        return "faster" if self.faster > SHOWN else "slower"


def outcome(starts: Sequence[tuple[Rates, Rates]]) -> Outcome:
    """Compare old and new rates of two starts or more: that of a start is its pairs' median."""
    ratios = [
        statistics.median(
            after / before for before, after in zip(old.calls_s, new.calls_s, strict=True)
        )
        for old, new in starts
    ]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Outcome(median, low, high, sum(ratio > 1 for ratio in ratios) / len(ratios))


class Side:
    """One version: the process with its client, which makes calls when told to."""

    def __init__(self, code: Path, process: subprocess.Popen[str], broker: Daemon) -> None:
        self._code = code
        self._process = process
        self._broker = broker
        self._answer()  # it is connected

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the program of {self._code} ended: see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def measure(self, call: str, seconds: float) -> tuple[float, float, float]:
        """Make calls of a kind; returns one entry of each list of Rates."""
        assert self._process.stdin is not None
        used_s = self._broker.cpu_s()
        self._process.stdin.write(f"{call} {seconds}\n")
        self._process.stdin.flush()
        answer = self._answer()
        broker_us = (self._broker.cpu_s() - used_s) / answer["calls"] * 1e6
        return float(answer["calls_s"]), float(answer["client_us"]), broker_us


@contextmanager
def running(code: Path, directory: Path) -> Iterator[Side]:
    """Run a version's broker and client; both end with the block.

    code: its folder. directory: for the broker's data and log. Raises SystemExit: there is no code,
    or the client ended; DaemonFailed: the broker did.
    """
    if not (code / "malamute_py").is_dir():
        raise SystemExit(f"{code} is no folder with the code: it has no malamute_py")
    own = code / ".venv" / "bin" / "python"
    paths = os.pathsep.join([str(code), str(code / "protocol")])
    python = ["env", f"PYTHONPATH={paths}", str(own if own.exists() else sys.executable), "-P"]
    side = Path(__file__).with_name("versions_side.py")
    with (
        Daemon(directory, SETTINGS, [*python, "-m", "malamute_py.cli"]) as broker,
        subprocess.Popen(
            [*python, str(side), str(code), broker.endpoint],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process,
    ):  # fmt: skip
        yield Side(code, process, broker)


def compare(old: Side, new: Side, call: str, pairs: int, seconds: float) -> tuple[Rates, Rates]:
    """Measure one kind of call by turns; the first turn of each is left out."""
    found = {old: Rates([], [], []), new: Rates([], [], [])}
    for turn in range(pairs + 1):
        for side in (old, new) if turn % 2 else (new, old):
            measured = side.measure(call, seconds)
            if turn:
                for values, value in zip(found[side], measured, strict=True):
                    values.append(value)
    return found[old], found[new]


def progress(words: str) -> None:
    """Show on a terminal what is being done; empty: nothing any more."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{words}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.versions", description=str(__doc__).split("\n\n")[0],
        epilog="calls: " + "; ".join(f"{name}: {call.what}" for name, call in CALLS.items()),
    )  # fmt: skip
    parser.add_argument("old", type=Path, help="the folder of the version to compare with")
    parser.add_argument("new", type=Path, help="the folder of the other one")
    parser.add_argument("--calls", nargs="+", choices=list(CALLS), default=list(CALLS))
    parser.add_argument("--starts", type=int, default=STARTS, help=f"{STARTS} if it is not given")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"in each start; default {PAIRS}")
    parser.add_argument("--seconds", type=float, default=SLICE_S, help="of each turn")
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="longest random one, seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object a kind of call")
    args = parser.parse_args()
    if args.starts < 2:
        parser.error("two starts are the least that have quartiles")
    found: dict[str, list[tuple[Rates, Rates]]] = {call: [] for call in args.calls}
    folders = [args.old.resolve(), args.new.resolve()]
    for start in range(args.starts):
        first = start % 2
        with (
            tempfile.TemporaryDirectory(prefix="versions-") as data,
            running(folders[first], Path(data, "first")) as one,
            running(folders[1 - first], Path(data, "second")) as other,
        ):
            old, new = (other, one) if first else (one, other)
            for call in args.calls:
                progress(f"start {start + 1} of {args.starts}: {call}")
                time.sleep(random.uniform(0, args.pause))
                found[call].append(compare(old, new, call, args.pairs, args.seconds))
    progress("")
    if not args.json:
        print(HEADING)
    for call, starts in found.items():
        ratio = outcome(starts)
        calls_s, client_us, broker_us = (
            [
                statistics.median(rates.medians[place] for rates in side)
                for side in zip(*starts, strict=True)
            ]
            for place in range(3)
        )
        if args.json:
            facts = {
                "call": call, "calls_s": calls_s, "client_us": client_us, "broker_us": broker_us,
                "starts": args.starts, "pairs": args.pairs, "ratio": ratio.median,
                "quartiles": [ratio.low, ratio.high], "faster": ratio.faster,
            }  # fmt: skip
            print(json.dumps(facts))
            continue
        print(
            f"{call:12} {calls_s[0]:11,.0f} {calls_s[1]:11,.0f}  {ratio.median:.3f}"
            f" ({ratio.low:.3f} to {ratio.high:.3f})  {client_us[0]:6.2f} {client_us[1]:6.2f}"
            f"  {broker_us[0]:6.2f} {broker_us[1]:6.2f}  {ratio.words}"
        )


if __name__ == "__main__":
    main()
