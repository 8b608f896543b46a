"""Comparison of a benchmark with its recorded figure, beyond noise.

Owns the form of micro.json and the rule. The figure is the median time of a call over the time of a
reference loop measured right before and after it, so that the speed of another machine, or of
another minute, cancels for work that is bound by the interpreter. There is one figure for each
pass. The noise is how far the passes lie apart, in both recordings, and never less than FLOOR. A
change is flagged when the passes do not overlap and the medians differ by more than the noise.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import msgspec

FLOOR = 0.07
"""Difference below which no two recordings on a virtual machine are told apart."""


class Measured(msgspec.Struct, frozen=True):
    """One benchmark: median, interquartile range and reference of each pass."""

    name: str
    medians_us: list[float]
    iqrs_us: list[float]
    references_us: list[float]
    records: int = 1
    """Records that a call handles."""
    bytes: int = 0

    @property
    def ratios(self) -> list[float]:
        """Return how many reference loops a call takes, for each pass."""
        pairs = zip(self.medians_us, self.references_us, strict=True)
        return [us / reference for us, reference in pairs]

    @property
    def spread(self) -> float:
        """Return how far the passes lie apart, as a share of their median."""
        return (max(self.ratios) - min(self.ratios)) / median(self.ratios)


class Recorded(msgspec.Struct, frozen=True):
    """The results of one run of `python -m perf.micro`."""

    form: str
    machine: str
    python: str
    commit: str
    benchmarks: list[Measured]


class Change(msgspec.Struct, frozen=True):
    """One benchmark beside its recorded self; a factor below 1 is faster."""

    name: str
    factor: float
    noise: float
    flagged: bool


def compare(new: Recorded, old: Recorded) -> list[Change]:
    """Return a change for each benchmark that both have."""
    before = {measured.name: measured for measured in old.benchmarks}
    changes = []
    for measured in new.benchmarks:
        if was := before.get(measured.name):
            factor = median(measured.ratios) / median(was.ratios)
            noise = max(FLOOR, measured.spread + was.spread)
            apart = min(measured.ratios) > max(was.ratios) or max(measured.ratios) < min(was.ratios)
            changes.append(
                Change(measured.name, factor, noise, apart and abs(factor - 1) > noise)
            )  # fmt: skip
    return changes


def load(path: Path) -> Recorded | None:
    """Return the recording at the path, if there is one."""
    return msgspec.json.decode(path.read_bytes(), type=Recorded) if path.exists() else None


def save(path: Path, recorded: Recorded) -> None:
    """Write the recording, a line for each field, so that diffs can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(recorded), indent=1) + b"\n")
