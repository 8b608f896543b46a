"""Measure the matcher: compile, match and enumerate, never-seen headers, changes.

    python perf/matcher.py [--json] [--messages 1000000]

Figures to compare with: the whitepaper's 12 s to compile 2,000 subscriptions for 2,000
topics and 26 s to match 1 M messages (170 M matches), on a 2 GHz workstation of 2005.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from malamute_protocol.pattern import PatternError
from malamute_py.matcher import Index

Header = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]
Figures = list[tuple[str, float, str]]

SEED = 1


def seconds(work: Callable[[], object]) -> float:
    """How long the work takes, with the garbage of what came before collected."""
    gc.collect()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def add_all(index: Index, wires: list[list[Any]]) -> list[int]:
    return [index.add(wire) for wire in wires]


def each_header(index: Index, headers: list[Header], what: str) -> Figures:
    """Match headers that were never seen: median, 99th percentile, and how much matched."""
    for header in headers[:50]:
        index.match(*header)
    times = []
    matched = 0
    for header in headers[50:]:
        start = time.perf_counter_ns()
        numbers = index.match(*header)
        times.append(time.perf_counter_ns() - start)
        matched += len(numbers)
    total = sum(times)
    times.sort()
    figures = [
        (f"{what}: median", times[len(times) // 2] / 1000, "us"),
        (f"{what}: p99", times[len(times) * 99 // 100] / 1000, "us"),
        (f"{what}: matches each", matched / len(times), ""),
    ]
    if matched >= 10 * len(times):
        # Then most of the cost is that of the matches themselves.
        figures.append((f"{what}: cost of a match", total / matched / 1000, "us"))
    return figures


def resident_mib() -> float:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


# --- the whitepaper's own figures ---------------------------------------------------


def whitepaper(messages: int) -> Figures:
    """2,000 subscriptions over 2,000 topics, about 170 matches a message."""
    pick = random.Random(SEED)
    # 20 x 10 x 10 topics of three parts.
    topics = [f"m{a}.n{b}.o{c}" for a in range(20) for b in range(10) for c in range(10)]
    wires: list[list[Any]] = []
    wildcards = ["m{a}.*.o{c}", "m{a}.n{b}.*", "*.n{b}.o{c}", "m{a}.#", "*.*.o{c}", "*.n{b}.*"]
    seen = set()
    for form in wildcards:
        for a, b, c in itertools.product(range(20), range(10), range(10)):
            text = form.format(a=a, b=b, c=c)
            if text not in seen:
                seen.add(text)
                wires.append(["topic", text])
    # The rest ask for sets of topics that only combinations say: distinct, and 12% of all each.
    while len(wires) < 2000:
        parts = [["topic", f"*.n{b}.o{c}"] for b in range(10) for c in range(10)]
        wires.append(["or", *pick.sample(parts, 12)])
    index = Index()
    headers: list[Header] = [((topic,), ()) for topic in topics]

    def compile_all() -> None:
        add_all(index, wires)
        for header in headers:
            index.match(*header)

    compile_s = seconds(compile_all)
    stream = [headers[pick.randrange(len(headers))] for _ in range(messages)]
    matched = 0

    def match_all() -> None:
        nonlocal matched
        for keys, fields in stream:
            matched += len(index.match(keys, fields).to_array())

    match_s = seconds(match_all)
    cached: dict[int, Any] = {}
    matched_cached = 0

    def match_with_arrays() -> None:
        # As the broker does: what a selection stands for is enumerated once, while it lasts.
        nonlocal matched_cached
        for keys, fields in stream:
            numbers = index.match(keys, fields)
            array = cached.get(id(numbers))
            if array is None:
                array = cached[id(numbers)] = numbers.to_array()
            matched_cached += len(array)

    array_s = seconds(match_with_arrays)
    assert matched == matched_cached
    return [
        ("2,000 x 2,000: compile", compile_s, "s"),
        ("2,000 x 2,000: compile, times faster than 12 s", 12 / compile_s, "x"),
        (f"{messages:,} messages: match and enumerate each", match_s, "s"),
        (f"{messages:,} messages: the same, array kept per result", array_s, "s"),
        (f"{messages:,} messages: matches enumerated", matched / 1e6, "M"),
        ("match, times faster than 26 s for 1 M", 26 * messages / 1e6 / match_s, "x"),
    ]


# --- never-seen headers -------------------------------------------------------------


def topic_patterns(count: int) -> Iterator[list[Any]]:
    """Distinct topics like those of a market: two thirds whole, one third with wildcards."""
    pick = random.Random(SEED)
    places = max(20, count // 50)
    seen: set[str] = set()
    while len(seen) < count:
        parts = [
            f"p{pick.randrange(50)}",
            f"q{pick.randrange(200)}",
            f"r{pick.randrange(places)}",
            f"s{pick.randrange(20)}",
        ]
        if pick.random() < 1 / 3:
            parts[pick.randrange(4)] = "*"
            if pick.random() < 0.3:
                parts[-1] = "#"
        text = ".".join(parts)
        if text not in seen:
            seen.add(text)
            yield ["topic", text]


def topic_headers(count: int, patterns: int) -> list[Header]:
    pick = random.Random(SEED + 1)
    places = max(20, patterns // 50)
    subjects = [
        f"p{pick.randrange(50)}.q{pick.randrange(200)}.r{pick.randrange(places)}"
        f".s{pick.randrange(20)}"
        for _ in range(count)
    ]
    return [((subject,), ()) for subject in subjects]


def field_patterns(count: int, values: int, least: int) -> Iterator[list[Any]]:
    """Conjunctions of least to ten criteria over ten fields; a tenth asks for a topic too."""
    pick = random.Random(SEED)
    names = [f"field{at}" for at in range(10)]
    for at in range(count):
        chosen = sorted(pick.sample(names, pick.randint(least, 10)))
        wire = ["fields", "all", [[name, str(pick.randrange(values))] for name in chosen]]
        yield ["and", wire, ["topic", "s.*"]] if at % 10 == 0 else wire


def field_headers(count: int, values: int) -> list[Header]:
    pick = random.Random(SEED + 1)
    return [
        (
            (f"s.{at}",),
            tuple((f"field{name}", str(pick.randrange(values))) for name in range(10)),
        )
        for at in range(count)
    ]


def never_seen() -> Figures:
    """A memory of one header, so that every header is new."""
    figures: Figures = []
    for count in (100, 10_000, 100_000):
        gc.collect()
        before_mib = resident_mib()
        wires = list(topic_patterns(count))
        index = Index(memo_headers_max=1)
        start = time.perf_counter()
        add_all(index, wires)
        add_s = time.perf_counter() - start
        what = f"new subject, {count:,} topic patterns"
        figures += each_header(index, topic_headers(2050, count), what)
        figures.append((f"adding one of {count:,} topic patterns", add_s / count * 1e6, "us"))
        if count == 100_000:
            grown = resident_mib() - before_mib
            figures.append((f"memory of {count:,} topic patterns and their wire", grown, "MiB"))
    for least, values in itertools.product((10, 3), (4, 100)):
        for count in (100, 10_000, 100_000):
            index = Index(memo_headers_max=1)
            add_all(index, list(field_patterns(count, values, least)))
            criteria = "10" if least == 10 else f"{least} to 10"
            what = f"new ten fields of {values} values, {count:,} patterns of {criteria} criteria"
            figures += each_header(index, field_headers(550, values), what)
    return figures


def add_expressions(index: Index, expressions: Iterable[str]) -> tuple[int, float, float]:
    """Add them up to the limit: how many were taken, the mean and the longest add in seconds."""
    times = []
    try:
        for expression in expressions:
            before = time.perf_counter()
            index.add(["regex", expression])
            times.append(time.perf_counter() - before)
    except PatternError:
        pass
    return len(times), sum(times) / len(times), max(times)


def expressions() -> Figures:
    """Regular expressions up to the limit of what is taken: usual ones, then hostile ones."""
    pick = random.Random(SEED)
    usual = Index(memo_headers_max=1)
    taken, mean_s, longest_s = add_expressions(
        usual, (rf"^sensor\.{at}\.[a-z]+\.t(emp|ime)$" for at in range(10_000))
    )
    headers: list[Header] = [((f"sensor.{at * 7}.abc{at}.temp",), ()) for at in range(1000)]
    figures = [
        ("usual regular expressions taken before the limit", float(taken), ""),
        ("adding one of these: mean", mean_s * 1e6, "us"),
        ("adding one of these: longest", longest_s * 1e3, "ms"),
        *each_header(usual, headers, "new subject over these"),
    ]
    pairs = ("".join(pick.choices("abcdefgh", k=2)) for _ in range(10_000))
    hostile = Index(memo_headers_max=1)
    taken, _, longest_s = add_expressions(
        hostile,
        (f"[a-z]{{{at % 20}}}.*{pair}.{{20}}[a-z]*{at}" for at, pair in enumerate(pairs)),
    )
    slowest = 0.0
    for _ in range(10):
        key = "".join(pick.choices("abcdefgh", k=255))
        before = time.perf_counter()
        hostile.match((key,), ())
        slowest = max(slowest, time.perf_counter() - before)
    return [
        *figures,
        ("hostile regular expressions taken before the limit", float(taken), ""),
        ("adding one of these: longest", longest_s * 1e3, "ms"),
        ("new subject of 255 bytes over these: longest of 10", slowest * 1e3, "ms"),
    ]


def changes() -> Figures:
    """A pattern comes and goes while 65,536 headers are remembered."""
    index = Index()
    add_all(index, list(topic_patterns(10_000)))
    headers: list[Header] = [((f"p{at % 50}.q{at}.r.s",), ()) for at in range(65_536)]
    for header in headers:
        index.match(*header)
    remembered = index.memo_headers
    add_s = discard_s = 0.0
    worst = 0.0
    for at in range(1000):
        start = time.perf_counter()
        number = index.add(["topic", f"p{at % 50}.new{at}.*"])
        middle = time.perf_counter()
        index.discard(number)
        end = time.perf_counter()
        add_s += middle - start
        discard_s += end - middle
        worst = max(worst, middle - start, end - middle)
    known = headers[:10_000]

    def match_known() -> None:
        for header in known:
            index.match(*header)

    again_s = seconds(match_known)
    number = index.add(["topic", "p1.#"])
    one_behind_s = seconds(match_known)
    hit_s = seconds(match_known)
    return [
        ("remembered headers", float(remembered), ""),
        ("memory of headers, as counted", index.memo_bytes / 2**20, "MiB"),
        ("add beside a full memo: mean", add_s * 1e3, "us"),
        ("discard beside a full memo: mean", discard_s * 1e3, "us"),
        ("add or discard beside a full memo: longest of 2,000", worst * 1e3, "ms"),
        ("remembered header, nothing changed", hit_s / len(known) * 1e6, "us"),
        ("remembered header, one change behind", one_behind_s / len(known) * 1e6, "us"),
        ("remembered header, too far behind: resolved anew", again_s / len(known) * 1e6, "us"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--messages", type=int, default=1_000_000)
    arguments = parser.parse_args()
    figures = whitepaper(arguments.messages) + never_seen() + expressions() + changes()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures.append(("peak memory of this program", peak, "MiB"))
    if arguments.json:
        print(json.dumps([{"what": w, "value": v, "unit": u} for w, v, u in figures], indent=1))
        return 0
    width = max(len(what) for what, _, _ in figures)
    for what, value, unit in figures:
        print(f"{what:<{width}}  {value:>12,.2f} {unit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
