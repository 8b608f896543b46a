"""The targets, as data: which figure of ours against what, and whether it was reached.

Owns the table of targets and its reading of a recording. The rule: a target is reached by the
medians of one recording or it is not; without one of the figures it is not measured, and never
counted as reached. People write in perf/results/reasons.toml why a target was missed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from perf.suite.results import Results

OURS = "malamute-synced-python"
REASONS = Path(__file__).resolve().parents[1] / "results" / "reasons.toml"


class Bar(msgspec.Struct, frozen=True):
    """A value to be compared with."""

    value: float
    words: str


class Target(msgspec.Struct, frozen=True):
    """One target: ours at a work against the best of some columns, a limit, or a number."""

    name: str
    title: str
    work: str
    figure: str
    ratio: float = 1.0
    """Factor: ours must be so many times the other; where less is better, at most so many times."""
    against: tuple[str, ...] = ()
    """Columns of peers by name, as globs: the best of them that was measured counts."""
    value: float = 0.0
    """A number, instead of columns."""
    limit: str = ""
    """A limit of the machine, in the unit of the figure, instead of columns."""
    or_limit: str = ""
    """The lower of the columns and so much of this limit (or_share) is enough."""
    or_share: float = 1.0
    other_work: str = ""
    """Another work, instead of columns: our own figure there."""
    less_is_better: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a target."""

    target: Target
    ours: float | None
    bar: Bar | None
    reached: bool | None
    """Whether the target was reached; None: not measured."""

    @property
    def ratio(self) -> float | None:
        if self.ours is None or self.bar is None or not self.bar.value:
            return None
        return self.ours / self.bar.value


def _targets() -> list[Target]:
    found = [
        Target(
            name=f"core-{size}",
            title=f"one to one, {size:,} B: NATS core with its native client, which keeps nothing",
            work=f"one-to-one/{size}",
            figure="mb_s",
            against=("nats-core-native",),
            or_limit="disk-reused" if size > 1120 else "",
            or_share=0.8,
        )
        for size in (12, 140, 1120, 2940, 11760)
    ]
    for size in (12, 140, 1120):
        found += [
            Target(
                name=f"{name}-{size}",
                title=f"one to one, {size:,} B: {words}",
                work=f"one-to-one/{size}",
                figure="records_s",
                ratio=ratio,
                against=against,
            )
            for name, words, ratio, against in (
                ("jetstream", "JetStream's file store, native client", 5.0,
                 ("nats-jetstream*-native",)),
                ("rabbitmq-queue", "RabbitMQ's durable queues, native client", 5.0,
                 ("rabbitmq-quorum-native",)),
                ("redis-stream", "Redis Streams, native client", 3.0, ("redis-stream*-native",)),
                # No native client of the stream protocol talks to Debian's RabbitMQ 3.10: Node's
                # opens with a command that 3.10 does not know. The faster of what there is.
                ("rabbitmq-stream", "RabbitMQ's streams, best client", 1.5, ("rabbitmq-stream-*",)),
            )
        ]  # fmt: skip
    found += [
        Target(
            name=f"python-{size}",
            title=f"one to one, {size:,} B: every Python client of any peer",
            work=f"one-to-one/{size}",
            figure="records_s",
            ratio=6.0,
            against=("*-python",),
        )
        for size in (12, 140, 560, 1120)
    ]
    found += [
        Target("fan-out-100", "one to 100, 140 B: the best peer", "fan-out/100", "deliveries_s",
               1.5, ("*",)),
        Target("replay", "replay, 140 B: records/s", "replay/whole", "records_s",
               value=10_000_000),
        Target("replay-zmq", "replay, 140 B: bytes against raw ZeroMQ's with 64 KiB",
               "replay/whole", "mb_s", 0.6, limit="zmq-large"),
        Target("replay-rare", "a rare subject (1 in 10,000): against reading everything",
               "replay/rare", "records_s", 50.0, other_work="replay/whole"),
        Target("request-python", "request and reply, 64 in flight: best peer, Python client",
               "request/64x1", "round_trips_s", 3.0, ("*-python",)),
        Target("request-nats", "request and reply, 64 in flight: NATS, native client",
               "request/64x1", "round_trips_s", 1.0, ("nats-core*-native",)),
        Target("latency-p50", "one way at 1,000/s, p50: best Python client of any peer",
               "latency/1000", "p50_us", 1.0, ("*-python",),
               less_is_better=True),
        Target("latency-p99", "one way at 1,000/s, p99: best Python client of any peer",
               "latency/1000", "p99_us", 1.0, ("*-python",),
               less_is_better=True),
        Target("matching", "the whitepaper's matching, seconds for 1 M messages (its own: 26)",
               "matching/whitepaper", "match_s", value=26.0 / 20, less_is_better=True),
        Target("matching-topics", "a new header, 100,000 topic subscriptions, us",
               "matching/topics", "p50_us", value=50.0, less_is_better=True),
        Target("matching-fields", "a new header, 100,000 subscriptions of ten fields, us",
               "matching/fields", "p50_us", value=200.0, less_is_better=True),
        Target("broker-cpu", "broker CPU a record of 140 B, one to one, us",
               "one-to-one/140", "server_cpu_us", value=0.45, less_is_better=True),
        Target("disk", "bytes on disk a record of 140 B in full batches",
               "one-to-one/140", "disk_bytes", value=153.0, less_is_better=True),
    ]  # fmt: skip
    return found


TARGETS: tuple[Target, ...] = tuple(_targets())


def bar_of(target: Target, results: Results) -> Bar | None:
    """Return the value that the target is compared with, its ratio not yet applied."""
    if target.value:
        words = f"{target.value / 1e6:g} M" if target.value >= 1e6 else f"{target.value:,.4g}"
        return Bar(target.value, words)
    if target.limit:
        limit = results.limit(target.limit)
        return None if limit is None else Bar(limit.median, limit.title)
    if target.other_work:
        other = results.figure(target.other_work, OURS, target.figure)
        return None if other is None else Bar(other, target.other_work)
    best: Bar | None = None
    for column, measured in results.at(target.work):
        if column.peer == "malamute":
            continue
        if not any(fnmatchcase(column.name, pattern) for pattern in target.against):
            continue
        value = measured.median(target.figure)
        if value is None:
            continue
        better = best is None or (value < best.value) == target.less_is_better
        if better and (best is None or value != best.value):
            best = Bar(value, column.label)
    if best is not None and target.or_limit:
        limit = results.limit(target.or_limit)
        if limit is not None and limit.median * target.or_share < best.value:
            share = f"{target.or_share:.0%} of: {limit.title}"
            return Bar(limit.median * target.or_share, share)
    return best


def judge(target: Target, results: Results) -> Outcome:
    ours = results.figure(target.work, OURS, target.figure)
    bar = bar_of(target, results)
    if ours is None or bar is None:
        return Outcome(target, ours, bar, None)
    wanted = bar.value * target.ratio
    return Outcome(target, ours, bar, ours <= wanted if target.less_is_better else ours >= wanted)


def unmeasured(target: Target, results: Results) -> str:
    """Say why a target has no outcome: which side of it is missing, and as far as known why."""
    if results.figure(target.work, OURS, target.figure) is None:
        return f"ours has no figure: {_why(target.work, OURS, results)}"
    if target.limit:
        return f"the limit {target.limit} was not measured"
    if target.other_work:
        return f"{target.other_work}: {_why(target.other_work, OURS, results)}"
    there = [
        column
        for column in results.columns
        if column.peer != "malamute"
        and any(fnmatchcase(column.name, pattern) for pattern in target.against)
    ]
    if there:
        words = "; ".join(
            f"{column.label}: {_why(target.work, column.name, results)}" for column in there
        )
        return f"nobody to be compared with has a figure: {words}"
    missing = ", ".join(
        name
        for name in results.left_out
        if any(fnmatchcase(name, one) or name == one.partition("-")[0] for one in target.against)
        or any(one.startswith("*") for one in target.against)
    )
    wanted = " or ".join(f"`{one}`" for one in target.against)
    return f"no column {wanted} took part" + (f" (left out: {missing})" if missing else "")


def _why(work: str, column: str, results: Results) -> str:
    measured = results.of(work, column)
    if measured is None or not measured.runs:
        return f"{work} was not run"
    return measured.error.strip().splitlines()[0] if measured.error else "it has no such figure"


def judge_all(results: Results, targets: Sequence[Target] = TARGETS) -> list[Outcome]:
    return [judge(target, results) for target in targets]


def reasons(path: Path = REASONS) -> dict[str, str]:
    """Return people's reasons for targets that were missed, by target; {} without the file."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        table = tomllib.load(file)
    return {str(name): str(text).strip() for name, text in table.items()}
