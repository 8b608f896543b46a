"""The matcher by itself: the whitepaper's work, and headers that were never seen.

A role like a driver's, in a process of its own (`python -m perf.suite.matching form=whitepaper`):
2,000 subscriptions over 2,000 topics and about 181 matches a message, each enumerated; or one new
header after the other beside 100,000 subscriptions to topics, or to ten fields. The whitepaper's
figures are 12 s to compile and 26 s for a million messages.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from malamute_py.matcher import Index
from perf.suite import patterns

SUBSCRIPTIONS = 100_000
VALUES = 4
CRITERIA = 10
"""Criteria of a subscription to fields: all ten, each one of four values."""
WARM = 50


def whitepaper(messages: int) -> dict[str, float]:
    """Compile 2,000 subscriptions for 2,000 topics, then match and enumerate each message."""
    wires, headers = patterns.whitepaper()
    pick = random.Random(patterns.SEED)
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


def never_seen(wires: Iterator[list[Any]], headers: list[patterns.Header]) -> dict[str, float]:
    """Return microseconds for a header that is new, with a memory of one header."""
    index = Index(memo_headers_max=1)
    for wire in wires:
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
        headers = patterns.topic_headers(count + WARM, SUBSCRIPTIONS)
        facts = never_seen(patterns.topic_patterns(SUBSCRIPTIONS), headers)
    else:
        wires = patterns.field_patterns(SUBSCRIPTIONS, VALUES, CRITERIA)
        facts = never_seen(wires, patterns.field_headers(count + WARM, VALUES))
    print(json.dumps(facts), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
