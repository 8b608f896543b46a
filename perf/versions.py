"""Compare two versions of the code: calls a second of each, by turns, as ratios.

    python -m perf.versions OLD NEW [--calls publish request] [--pairs 15] [--seconds 0.3]

OLD and NEW are folders with the code: clones of the repository, or what `git archive` gives. Each
has a broker of its own with a journal on disk, and a client in a process of its own. Owns this
comparison. The rule: the two take turns, a short while each, and the ratio of a pair is the figure;
so a slow minute of the machine strikes both. A clone's own environment is used where it has one
(`make setup`), else the one of this command, which then has to suit both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from malamute_py.demo.daemon import Daemon
from perf.versions_side import CALLS

PAIRS = 15
SLICE_S = 0.3
"""Seconds of calls of one version, before the other has its turn."""
SETTINGS = ("journal.ring_bytes=1073741824", "log.level=warning")


class Rates(NamedTuple):
    """Calls of one kind by one version: one entry a turn."""

    calls_s: list[float]
    client_us: list[float]
    """Processor time of the client's process, in microseconds a call."""


class Outcome(NamedTuple):
    """The ratio of the new version's rate to the old one's: its median and quartiles."""

    median: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """Say what the pairs show."""
        if self.low <= 1 <= self.high:
            return "no difference shown"
        return "faster" if self.low > 1 else "slower"


def outcome(old: Rates, new: Rates) -> Outcome:
    """Compare the rates of pairs, of which there are two at least."""
    ratios = [after / before for before, after in zip(old.calls_s, new.calls_s, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Outcome(median, low, high)


class Side:
    """One version: the process with its client, which makes calls when told to."""

    def __init__(self, code: Path, process: subprocess.Popen[str]) -> None:
        self._code = code
        self._process = process
        self._answer()  # it is connected

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the program of {self._code} ended: see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def measure(self, call: str, seconds: float) -> tuple[float, float]:
        """Make calls of a kind; returns how many a second, and the client's microseconds a call."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{call} {seconds}\n")
        self._process.stdin.flush()
        answer = self._answer()
        return float(answer["calls_s"]), float(answer["client_us"])


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
        yield Side(code, process)


def compare(old: Side, new: Side, call: str, pairs: int, seconds: float) -> tuple[Rates, Rates]:
    """Measure one kind of call by turns; the first turn of each is left out."""
    found = {old: Rates([], []), new: Rates([], [])}
    for turn in range(pairs + 1):
        for side in (old, new) if turn % 2 else (new, old):
            rate, client_us = side.measure(call, seconds)
            if turn:
                found[side].calls_s.append(rate)
                found[side].client_us.append(client_us)
        if sys.stderr.isatty():
            print(f"\r{call}: {turn} of {pairs} pairs ", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return found[old], found[new]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.versions", description=str(__doc__).split("\n\n")[0],
        epilog="calls: " + "; ".join(f"{name}: {call.what}" for name, call in CALLS.items()),
    )  # fmt: skip
    parser.add_argument("old", type=Path, help="the folder of the version to compare with")
    parser.add_argument("new", type=Path, help="the folder of the other one")
    parser.add_argument("--calls", nargs="+", choices=list(CALLS), default=list(CALLS))
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"{PAIRS} if it is not given")
    parser.add_argument("--seconds", type=float, default=SLICE_S, help="of each turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object a kind of call")
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error("two pairs are the least that have quartiles")
    with (
        tempfile.TemporaryDirectory(prefix="versions-") as data,
        running(args.old.resolve(), Path(data, "old")) as before,
        running(args.new.resolve(), Path(data, "new")) as after,
    ):
        if not args.json:
            print(f"{'':12} {'old/s':>11} {'new/s':>11}  ratio (quartiles)    client's us a call")
        for call in args.calls:
            old, new = compare(before, after, call, args.pairs, args.seconds)
            ratio = outcome(old, new)
            rates = [statistics.median(each.calls_s) for each in (old, new)]
            client_us = [statistics.median(each.client_us) for each in (old, new)]
            if args.json:
                facts = {
                    "call": call, "calls_s": rates, "client_us": client_us, "pairs": args.pairs,
                    "ratio": ratio.median, "quartiles": [ratio.low, ratio.high],
                }  # fmt: skip
                print(json.dumps(facts), flush=True)
                continue
            print(
                f"{call:12} {rates[0]:11,.0f} {rates[1]:11,.0f}  {ratio.median:.3f}"
                f" ({ratio.low:.3f} to {ratio.high:.3f})  {client_us[0]:7.1f} {client_us[1]:7.1f}"
                f"  {ratio.words}",
                flush=True,
            )


if __name__ == "__main__":
    main()
