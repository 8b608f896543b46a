"""The matcher by itself: the whitepaper's work, and headers that were never seen.

A role like a driver's, in a process of its own (`python -m perf.suite.matching form=whitepaper`):
2,000 subscriptions over 2,000 topics and about 181 matches a message, each enumerated; or one new
header after the other beside 100,000 subscriptions to topics, or to ten fields. The whitepaper's
figures are 12 s to compile and 26 s for a million messages.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from malamute_py.matcher import Index

Header = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]

SEED = 1
SUBSCRIPTIONS = 100_000
WARM = 50


def whitepaper(messages: int) -> dict[str, float]:
    """Compile 2,000 subscriptions for 2,000 topics, then match and enumerate each message."""
    pick = random.Random(SEED)
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
    headers: list[Header] = [((topic,), ()) for topic in topics]
    index = Index()
    gc.collect()
    begun = time.perf_counter()
    for wire in wires:
        index.add(wire)
    for header in headers:
        index.match(*header)
    compile_s = time.perf_counter() - begun
    stream = [headers[pick.randrange(len(headers))] for _ in range(messages)]
    matched = 0
    gc.collect()
    begun = time.perf_counter()
    for keys, fields in stream:
        matched += len(index.match(keys, fields).to_array())
    match_s = time.perf_counter() - begun
    if not 150 < matched / messages < 210:
        raise SystemExit(f"{matched:,} matches of {messages:,} messages: about 181 each were due")
    return {"match_s": match_s * 1e6 / messages, "compile_s": compile_s, "seconds": match_s}


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


def field_patterns(count: int) -> Iterator[list[Any]]:
    """Ten criteria over ten fields of four values; a tenth asks for a topic too."""
    pick = random.Random(SEED)
    for at in range(count):
        wire = ["fields", "all", [[f"field{n}", str(pick.randrange(4))] for n in range(10)]]
        yield ["and", wire, ["topic", "s.*"]] if at % 10 == 0 else wire


def field_headers(count: int) -> list[Header]:
    pick = random.Random(SEED + 1)
    return [
        ((f"s.{at}",), tuple((f"field{name}", str(pick.randrange(4))) for name in range(10)))
        for at in range(count)
    ]


def never_seen(patterns: Iterator[list[Any]], headers: list[Header]) -> dict[str, float]:
    """Microseconds for a header that is new, with a memory of one header."""
    index = Index(memo_headers_max=1)
    for wire in patterns:
        index.add(wire)
    for header in headers[:WARM]:
        index.match(*header)
    gc.collect()
    times = []
    begun = time.perf_counter()
    for header in headers[WARM:]:
        start = time.perf_counter_ns()
        index.match(*header)
        times.append((time.perf_counter_ns() - start) / 1e3)
    seconds = time.perf_counter() - begun
    times.sort()
    return {
        "p50_us": times[len(times) // 2],
        "p99_us": times[len(times) * 99 // 100],
        "seconds": seconds,
    }


def main() -> None:
    keys = dict(word.partition("=")[::2] for word in sys.argv[1:])
    count, form = int(keys["count"]), keys["form"]
    print(json.dumps({"ready": True, "client": "malamute_py.matcher"}), flush=True)
    sys.stdin.readline()
    if form == "whitepaper":
        facts = whitepaper(count)
    elif form == "topics":
        headers = topic_headers(count + WARM, SUBSCRIPTIONS)
        facts = never_seen(topic_patterns(SUBSCRIPTIONS), headers)
    else:
        facts = never_seen(field_patterns(SUBSCRIPTIONS), field_headers(count + WARM))
    print(json.dumps(facts), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
