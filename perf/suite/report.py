"""The report of a recording: report.md beside its results.json, with the plots that it shows.

Owns the tables and their words. The rule: everything shown is computed from the recording; works
that failed or were left out are named, and a figure is the median of its runs with how far they
spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perf.micro.comparing import load as load_micro
from perf.suite import plots
from perf.suite.recording import sections
from perf.suite.results import (
    COUNT,
    UNPROMISED,
    ColumnFacts,
    Measured,
    Results,
    Sitting,
    WorkFacts,
)
from perf.suite.summary import median
from perf.suite.targets import OURS, Outcome, judge_all, reasons, unmeasured
from perf.suite.works import WORKS

MICRO = Path(__file__).resolve().parents[1] / "results" / "micro.json"
GROWN = 1.5
"""Factor by which a cost at the end of a curve must have grown to be reported."""
GROWING_UNITS = frozenset({"us", "ms", "s", "%"})
SPREAD_SHOWN = 0.10
"""Spread of runs from which on it is shown."""

PROMISES: tuple[tuple[str, Callable[[ColumnFacts], bool]], ...] = (
    ("survives a loss of power", lambda column: column.synced),
    ("survives the server's death", lambda column: column.persistent and not column.synced),
    ("promises nothing", lambda column: not column.persistent),
)

UNITS = {
    "records_s": "records/s",
    "deliveries_s": "deliveries/s",
    "round_trips_s": "round trips/s",
    "steps_s": "steps/s",
    "mb_s": "MB/s",
    "p50_us": "p50, us",
    "p99_us": "p99, us",
    "p999_us": "p99.9, us",
    "rate_s": "reached a second",
    "server_cpu_us": "server CPU, us",
    "publisher_cpu_us": "producer CPU, us",
    "consumer_cpu_us": "consumer CPU, us",
    "requester_cpu_us": "requester CPU, us",
    "worker_cpu_us": "worker CPU, us",
    "rss_mib": "server memory, MiB",
    "published_s": "confirmed/s",
    "disk_bytes": "bytes on disk",
    "disk_blocks": "blocks of files, bytes",
    "start_s": "start after a stop, s",
    "start_after_kill_s": "start after SIGKILL, s",
    "match_s": "s for a million",
    "compile_s": "compile, s",
    COUNT: "records a run",
}

HEADINGS = {
    "one-to-one": "One to one, in bulk",
    "replay": "Replay",
    "fan-out": "One to many",
    "producers": "Many producers",
    "wildcards": "Many wildcard subscriptions",
    "request": "Request and reply",
    "single": "A call a record",
    "alone": "Alone: from the call to its confirm",
    "latency": "One-way latency",
    "round-trip": "Round-trip latency",
    "queue": "Mail and durable queues",
    "steps": "Atomic steps",
    "start": "Start and recovery",
    "matching": "Matching",
}

BESIDE = {
    "stream": ("server_cpu_us", "publisher_cpu_us", "consumer_cpu_us", "disk_bytes", "disk_blocks",
               "rss_mib", COUNT),
    "queue": ("published_s", "server_cpu_us", "publisher_cpu_us", "consumer_cpu_us", "disk_bytes",
              "disk_blocks", "rss_mib", COUNT),
    "alone": ("p99_us", "p999_us", "published_s", "server_cpu_us", "publisher_cpu_us", COUNT),
    "round-trip": ("p99_us", "p999_us", "rate_s", "server_cpu_us", COUNT),
    "replay": ("mb_s", "server_cpu_us", "consumer_cpu_us", "rss_mib", COUNT),
    "request": ("p50_us", "p99_us", "p999_us", "server_cpu_us", "requester_cpu_us",
                "worker_cpu_us", "rss_mib", COUNT),
    "latency": ("p99_us", "p999_us", "rate_s", "server_cpu_us", COUNT),
    "steps": ("server_cpu_us", "publisher_cpu_us", "rss_mib", COUNT),
    "start": ("start_after_kill_s", "rss_mib"),
    "matching": ("p99_us", "compile_s"),
}  # fmt: skip
"""Figures shown beside the one that a work is about."""

KIND_OF_SECTION = {
    "replay": "replay",
    "request": "request",
    "latency": "latency",
    "round-trip": "round-trip",
    "alone": "alone",
    "queue": "queue",
    "steps": "steps",
    "start": "start",
    "matching": "matching",
}


NO_RATES = frozenset({"start_s", "start_after_kill_s", "match_s", "compile_s", "mb_s"})
"""Figures that are no rates, although their names end as those of rates do."""


# --- numbers -----------------------------------------------------------------------------


def number(value: float | None, figure: str = "") -> str:
    """Return a figure for a person: three digits that mean something."""
    if value is None:
        return ""
    if figure.endswith("_s") and figure not in NO_RATES:
        if value >= 1e6:
            return f"{value / 1e6:,.2f} M"
        if value >= 1e4:
            return f"{value / 1e3:,.0f} k"
        return f"{value:,.0f}"
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 or not value else f"{value:.2g}"


def cell(measured: Measured | None, figure: str) -> str:
    """Return the median, its spread where it is wide, or why there is none."""
    if measured is None:
        return ""
    middle = measured.median(figure)
    if middle is None:
        return "failed" if measured.error else ""
    text = number(middle, figure)
    if figure == COUNT:
        return text
    apart = measured.spread(figure)
    if apart > SPREAD_SHOWN:
        text += f" (±{apart / 2:.0%})"
    if measured.error:
        text += f", {len(measured.good)} of {len(measured.runs)} runs"
    return text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table; the first column is text, the others are numbers."""
    body = [list(row) for row in rows]
    if not body:
        return []
    marks = ["---"] + ["---:"] * (len(head) - 1)
    return [f"| {' | '.join(row)} |" for row in (head, marks, *body)] + [""]


# --- parts -------------------------------------------------------------------------------


def _head(results: Results) -> list[str]:
    machine, commit = results.machine, results.commit
    memory = machine.memory_bytes / (1 << 30)
    disk = machine.disk
    lines = [
        "# malamute-py and its peers, side by side",
        "",
        f"Commit `{commit.commit[:12]}`"
        + (" with changes that were not committed" if commit.dirty else "")
        + f", {results.seconds / 60:.0f} minutes of runs, {results.started} to"
        f" {results.ended or 'an interruption'}."
        + ("" if results.ended else " **It was interrupted: it is not complete.**"),
        "Made by " + "; then ".join(_sitting(one) for one in results.sat()) + ".",
        "",
        f"{machine.cores} cores of {machine.processor}"
        + (f" ({machine.virtual})" if machine.virtual not in ("", "none") else "")
        + f", {memory:.0f} GiB, {machine.system}, Linux {machine.kernel}, Python {machine.python};"
        f" data on {disk.file_system} ({disk.device}, {disk.options.split(',')[0]}).",
        "",
        _how(results.runs),
        "",
        AS_PACKAGED,
        "",
    ]
    if results.left_out:
        lines += [f"Left out: {', '.join(results.left_out)} (why: at the end).", ""]
    run = {work.name for work in results.works if any(m.runs for _, m in results.at(work.name))}
    absent = [work.name for work in WORKS if work.name not in run]
    absent += [] if results.limits else ["limits"]
    absent += [] if results.curves or results.curves_failed else ["curves"]
    if absent:
        lines += [f"Not part of this recording: {', '.join(absent)}.", ""]
    return lines


def _sitting(sitting: Sitting) -> str:
    until = f"to {sitting.ended}" if sitting.ended else "until it was interrupted"
    # With the same code: neither the measured nor the measuring code differs.
    at = f", of `{sitting.commit[:12]}`" if sitting.commit else ""
    return f"`{sitting.command}` ({sitting.started} {until}{at})"


def _how(runs: int) -> str:
    return (
        "Server, each producer and the consumer are processes of their own, over loopback TCP; the"
        " many subscribers, subscriptions or workers of a work share one process. Every record"
        " carries its number"
        " and is checked at the consumer: size, order, none lost, none twice; every confirm is"
        " awaited at the level of the column, where the work has confirms. A figure is the median"
        f" of {runs} run{'s' if runs != 1 else ''}, run 1 of all columns before run 2 of any; (±)"
        f" is half of what the runs lie apart, where that is more than {SPREAD_SHOWN / 2:.0%}. A"
        " run ends when the last record was received and the last confirm came, whichever is later."
        " Microseconds of processor time a record are seconds a million records; the server's are"
        " of all its threads and children. Memory is the server's at the end of a run, earlier runs"
        " before it. An empty cell: the column has no part in that work, as Python clients of peers"
        " at 2,940 B and more and with 10 and 1,000 subscribers."
    )


AS_PACKAGED = (
    "Servers and native clients are those that the distribution packages, Python clients are PyPI's"
    " (versions at the end): newer servers exist of every peer, and may be faster."
)

KEPT = (
    "What was not given up for it: in every run of the table the verification above was on; what"
    " ours publishes is confirmed as synced; credit, windows, bounds, batches, ring and segments"
    " are at their defaults. One setting is not: a worker takes 256 requests at a time"
    " (`concurrency`, 16 by default; with 16, 64 in flight are half as fast). Two things do not"
    " wait for a sync in ours: a delivery to a reader who did not ask for `visibility=durable`, and"
    " a request with its reply, which are journaled and leave before."
)


def _targets(results: Results) -> list[str]:
    outcomes = judge_all(results)
    if all(outcome.reached is None for outcome in outcomes):
        return []
    written = reasons()
    reached = sum(outcome.reached is True for outcome in outcomes)
    missed = [outcome for outcome in outcomes if outcome.reached is False]
    open_ = sum(outcome.reached is None for outcome in outcomes)
    lines = [
        "## Targets",
        "",
        f"{reached} reached, {len(missed)} not"
        + (f", {open_} not measured here" if open_ else "")
        + ". Ours is `malamute, synced`: journaled, a confirm after fdatasync.",
        "",
        KEPT,
        "",
    ]
    lines += table(
        ("target", "ours", "against", "ratio", "wanted", ""),
        (_target_row(outcome) for outcome in outcomes if outcome.reached is not None),
    )
    for outcome in missed:
        why = written.get(outcome.target.name, "")
        lines.append(f"- {_named(outcome)}: {why or 'not explained yet'}")
    lines += ["", "Not measured:", ""] if open_ else []
    lines += [
        f"- {_named(outcome)}: {unmeasured(outcome.target, results)}"
        for outcome in outcomes
        if outcome.reached is None
    ]
    return [*lines, ""]


def _named(outcome: Outcome) -> str:
    return f"**{outcome.target.title}** (`{outcome.target.name}`)"


def _target_row(outcome: Outcome) -> tuple[str, ...]:
    target, bar = outcome.target, outcome.bar
    assert bar is not None
    sign = "at most" if target.less_is_better else "at least"
    ratio = outcome.ratio
    return (
        target.title,
        f"{number(outcome.ours, target.figure)} {_unit(target.figure)}",
        bar.words if target.value else f"{bar.words}: {number(bar.value, target.figure)}",
        "" if ratio is None else f"{ratio:.2f}",
        f"{sign} {target.ratio:g}",
        "reached" if outcome.reached else "**not reached**",
    )


def _unit(figure: str) -> str:
    return UNITS.get(figure, figure).rpartition(", ")[2]


def _limits(results: Results) -> list[str]:
    if not results.limits:
        return []
    lines = ["## What this machine can do, and what `synced` rests on", ""]
    lines += table(
        ("limit", "median", ""),
        (
            (limit.title, number(limit.median) if limit.median < 1e5 else
             number(limit.median, "records_s"), limit.unit)
            for limit in results.limits
        ),
    )  # fmt: skip
    disk = results.machine.disk
    lines.append(
        f"The data lies on {disk.file_system}; the kernel calls the device's cache"
        f' "{disk.write_cache}".'
    )
    lines += [
        limit.note[0].upper() + limit.note[1:] + "." for limit in results.limits if limit.note
    ]
    return [*lines, "", *_shares(results)]


BYTE_LIMITS = (
    ("tcp", 1e3, "loopback TCP"),
    ("zmq-large", 1.0, "ZeroMQ, 64 KiB"),
    ("disk-reused", 1.0, "write and sync"),
)
"""Limits that bytes a second are shares of: limit, its unit in MB/s, words."""

TIME_LIMITS: tuple[tuple[str, str, str], ...] = (
    ("request/1x1", "round_trips_s", "relay-1"),
    ("request/1x8", "round_trips_s", "relay-1"),
    ("request/64x1", "round_trips_s", "relay-64"),
    ("request/64x8", "round_trips_s", "relay-64"),
    ("request/1024x1", "round_trips_s", "relay-1024"),
    ("request/1024x8", "round_trips_s", "relay-1024"),
    ("latency/1000", "p50_us", "relay-p50"),
    ("latency/1000", "p99_us", "relay-p99"),
    ("round-trip/1000", "p50_us", "relay-1"),
    ("single/140", "records_s", "zmq-small"),
    ("producers/8", "records_s", "zmq-small"),
    ("wildcards/2000", "records_s", "zmq-small"),
    ("one-to-one/140", "records_s", "zmq-small"),
    ("alone/140", "p50_us", "sync-p50"),
    ("alone/mail", "p50_us", "sync-p50"),
    ("queue/single", "records_s", "zmq-small"),
    ("queue/bulk", "records_s", "zmq-small"),
)
"""Work, figure and the limit that comes nearest to it."""


NO_LIMIT = (
    "A limit knows one message a record, ours may gather many in one: a share may be above all."
    " Start, atomic steps and matching have no limit of the machine to be held against."
)


def _shares(results: Results) -> list[str]:
    """Return every figure of ours that has a limit, as a share of it."""
    rows = []
    for work in results.works:
        ours = _bytes_s(results, work)
        if ours is None:
            continue
        cells = []
        for name, factor, _ in BYTE_LIMITS:
            limit = results.limit(name)
            cells.append("" if limit is None else f"{ours / (limit.median * factor):.1%}")
        rows.append((work.title, number(ours), *cells))
    words = [f"of {words}" for *_, words in BYTE_LIMITS]
    lines = table(("ours, synced: bytes", "MB/s", *words), rows)
    rows = []
    for name, figure, against in TIME_LIMITS:
        known, limit = results.work(name), results.limit(against)
        value = results.figure(name, OURS, figure)
        if known is None or limit is None or value is None:
            continue
        possible = limit.median
        if figure.endswith("_us") and limit.unit.endswith("/s"):
            possible = 1e6 / possible
        share = possible / value if figure.endswith("_us") else value / possible
        rows.append((
            f"{known.title}, {_words(figure)}", number(value, figure), limit.title,
            number(possible, figure), f"{share:.1%}",
        ))  # fmt: skip
    lines += table(("ours, synced: rates and times", "ours", "limit", "possible", "share"), rows)
    if rows:
        lines += [
            NO_LIMIT,
            "",
        ]
    return lines


def _bytes_s(results: Results, work: WorkFacts) -> float | None:
    """Return MB/s of records that ours moved; to many, of all that was delivered."""
    if work.figure == "deliveries_s":
        value = results.figure(work.name, OURS, work.figure)
        return None if value is None else value * work.size / 1e6
    return results.figure(work.name, OURS, "mb_s") if work.figure == "records_s" else None


def _words(figure: str) -> str:
    return UNITS.get(figure, figure)


def _section(results: Results, section: str, shown: Sequence[str]) -> list[str]:
    works = [
        work
        for work in results.works
        if work.section == section and any(m.runs for _, m in results.at(work.name))
    ]
    if not works:
        return []
    lines = [f"## {HEADINGS.get(section, section)}", ""]
    lines += [f"![{HEADINGS.get(section, section)}]({name})" for name in shown]
    lines += [""] if shown else []
    lines += _by_promise(results, works)
    if section == "one-to-one":
        lines += _megabytes(results, works)
    kind = KIND_OF_SECTION.get(section, "stream")
    for work in _detailed(works):
        lines += _beside(results, work, BESIDE[kind])
    notes = list(dict.fromkeys(work.note for work in works if work.note))
    return [*lines, *(f"{note[0].upper()}{note[1:]}." for note in notes), ""] if notes else lines


def _megabytes(results: Results, works: Sequence[WorkFacts]) -> list[str]:
    """Return the same runs in MB/s."""
    rows = []
    for column in results.columns:
        measured = [results.of(work.name, column.name) for work in works]
        if any(found is not None and found.good for found in measured):
            rows.append((column.label, *(cell(found, "mb_s") for found in measured)))
    return table(("MB/s", *(work.title for work in works)), rows)


def _detailed(works: Sequence[WorkFacts]) -> list[WorkFacts]:
    """Return the works with details: of those that differ by size only one."""
    if len(works) > 1 and len({work.size for work in works}) == len(works):
        return [work for work in works if work.size == 140] or [works[0]]
    return list(works)


def _by_promise(results: Results, works: Sequence[WorkFacts]) -> list[str]:
    """Return each work's figure by column, by promise of a confirm, with ratios to ours."""
    figure = works[0].figure
    lines: list[str] = []
    heads = [work.title for work in works]
    section = works[0].section
    # For a replay the promise of the log matters, although nothing is confirmed.
    apart = section not in UNPROMISED or section == "replay"
    for words, belongs in PROMISES if apart else (("", lambda column: True),):
        rows = []
        for column in results.columns:
            measured = [results.of(work.name, column.name) for work in works]
            if belongs(column) and any(found is not None and found.runs for found in measured):
                rows.append((column.label_in(section), *(
                    cell(found, work.figure) for work, found in zip(works, measured, strict=True)
                )))  # fmt: skip
        if rows:
            head = UNITS.get(figure, figure)
            if words:
                head += f"; what is {'kept' if section == 'replay' else 'confirmed'} {words}"
            lines += table((head, *heads), rows)
    return lines + _ratios(results, works, heads)


def _ratios(results: Results, works: Sequence[WorkFacts], heads: Sequence[str]) -> list[str]:
    rows = []
    for column in results.columns:
        if column.peer == "malamute":
            continue
        cells = []
        for work in works:
            ours = results.figure(work.name, OURS, work.figure)
            theirs = results.figure(work.name, column.name, work.figure)
            cells.append(f"{ours / theirs:.2f}" if ours and theirs else "")
        if any(cells):
            rows.append((column.label_in(works[0].section), *cells))
    own = results.column(OURS)
    label = own.label_in(works[0].section) if own is not None else "malamute"
    return table((f"{label}, as a multiple of", *heads), rows)


def _beside(results: Results, work: WorkFacts, figures: Sequence[str]) -> list[str]:
    """Return the other figures of one work, a row for each column."""
    found = [(column, m) for column, m in results.at(work.name) if m.good]
    there = [name for name in figures if any(m.values(name) for _, m in found)]
    if not there:
        return []
    per = " (a delivery)" if work.figure == "deliveries_s" else ""
    rows = [
        (column.label_in(work.section), *(cell(m, name) for name in there)) for column, m in found
    ]
    return table((f"{work.title}{per}", *(UNITS.get(name, name) for name in there)), rows)


def _curves(results: Results, shown: dict[str, list[str]]) -> list[str]:
    if not results.curves:
        return []
    written = reasons()
    lines = ["## Curves: what grows with what", ""]
    for curve in results.curves:
        lines += [f"### {curve['title']}", ""]
        lines += [f"![{curve['title']}]({name})" for name in shown.get(curve["name"], [])]
        lines += ["", f"Expected: {curve['expected']}.", ""]
        rows = []
        for line in curve["lines"]:
            points = line["points"]
            if not points:
                continue
            first, last = points[0], points[-1]
            rows.append((
                f"{line['name']}, {line['unit']}",
                f"{number(first['y'])} at {first['x']:,.0f}",
                f"{number(last['y'])} at {last['x']:,.0f}",
                "" if line["slope"] is None else f"{line['slope']:.2f}",
                "" if line.get("tail") is None else f"{line['tail']:.2f}",
            ))  # fmt: skip
        lines += table((curve["axis"], "first", "last", "slope", "slope at the end"), rows)
        lines += _grown(curve, written)
        notes = [curve.get("note", ""), *(line.get("note", "") for line in curve["lines"])]
        lines += [note for note in dict.fromkeys(notes) if note] + [""]
    words = "A slope is the exponent of a power law fitted to all points"
    return [*lines, f"{words}: 1 grows in proportion, 0 not at all.", ""]


def _grown(curve: Mapping[str, Any], written: Mapping[str, str]) -> list[str]:
    """Return the costs that are much higher at the last point than at the first, with remarks.

    Memory and bytes are not costs of a record; a line that falls, or lies flat, is left out.
    """
    found = []
    for line in curve["lines"]:
        if not line["points"] or line["unit"] not in GROWING_UNITS:
            continue
        first, last = line["points"][0]["y"], line["points"][-1]["y"]
        if first > 0 and last >= GROWN * first:
            found.append(f"{line['name']} ({last / first:,.1f} times)")
    if not found:
        return []
    why = written.get(f"curve-{curve['name']}", "not explained yet")
    return [f"Higher at the last point than at the first: {', '.join(found)}. {why}", ""]


def _micro(path: Path = MICRO) -> list[str]:
    """Return the micro-benchmarks last recorded, by another command and of another commit."""
    recorded = load_micro(path)
    if recorded is None:
        return []
    told = (
        f"Of another command, `make micro ARGS=--record`, at commit `{recorded.commit}`:"
        f" {recorded.form}, {recorded.machine}. `make micro` says what has changed since beyond the"
        " noise."
    )
    lines = ["## Micro-benchmarks", "", told, ""]
    lines += ["<details><summary>The median of each</summary>", ""]
    rows = []
    for one in recorded.benchmarks:
        middle = median(one.medians_us)
        rows.append((
            one.name.replace("|", "/"), number(middle),
            number(one.records / middle * 1e6, "records_s"),
            number(one.bytes / middle) if one.bytes else "",
        ))  # fmt: skip
    lines += table(("benchmark", "a call, us", "records/s", "MB/s"), rows)
    return [*lines, "</details>", ""]


def _failures(results: Results) -> list[str]:
    lines = []
    for work in results.works:
        for column, measured in results.at(work.name):
            failed = len(measured.runs) - len(measured.good)
            if failed:
                words = measured.error.strip().splitlines()
                last = f" ... {words[-1].strip()}" if len(words) > 1 else ""
                lines.append(
                    f"- {work.name}, {column.label}: {failed} of {len(measured.runs)} runs:"
                    f" {words[0]}{last}"
                )
    lines += [f"- curve {name}: {why}" for name, why in results.curves_failed.items()]
    return ["## What failed", "", *lines, ""] if lines else []


def _columns(results: Results) -> list[str]:
    rows = []
    for column in results.columns:
        if not any(m.column == column.name and m.good for m in results.measured):
            continue
        settings = "; ".join(text for text in (*column.settings, column.note) if text)
        rows.append(
            (column.label, column.server_version, column.client_version, settings.replace("|", "/"))
        )
    lines = ["## Who took part, and how", ""]
    lines += table(("column", "server", "client", "settings"), rows)
    for name, versions in results.versions.items():
        words = ", ".join(f"{what} {version}" for what, version in versions.items())
        lines.append(f"- {name}: {words}")
    if results.left_out:
        lines += ["", "Left out:", ""]
        lines += [f"- {name}: {why}." for name, why in results.left_out.items()]
    return [*lines, ""]


# --- all of it ---------------------------------------------------------------------------


def text(results: Results, drawn: plots.Drawn) -> str:
    lines = [*_head(results), *_targets(results), *_limits(results)]
    order = [name for name in HEADINGS if name in sections(results.works)]
    for section in order:
        lines += _section(results, section, drawn.sections.get(section, []))
    lines += _curves(results, drawn.curves)
    lines += _micro()
    lines += _failures(results)
    lines += _columns(results)
    return "\n".join(lines).rstrip() + "\n"


def make(results: Results, path: Path) -> Path:
    """Write report.md and the plots beside the recording at `path`; return the report's path."""
    drawn = plots.draw(results, path.parent)
    report = path.parent / "report.md"
    report.write_text(text(results, drawn))
    return report
