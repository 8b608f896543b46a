"""Patterns and headers for measuring the matcher, the same ones in each run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

Header = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]
SEED = 1


def whitepaper() -> tuple[list[list[Any]], list[Header]]:
    """Return 2,000 subscriptions over 2,000 topics, about 170 matches a message."""
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
    # The others ask for sets of topics that only combinations can describe: distinct, and 12% of
    # all each.
    while len(wires) < 2000:
        parts = [["topic", f"*.n{b}.o{c}"] for b in range(10) for c in range(10)]
        wires.append(["or", *pick.sample(parts, 12)])
    return wires, [((topic,), ()) for topic in topics]


def topic_patterns(count: int) -> Iterator[list[Any]]:
    """Return distinct topics like those of a market: two thirds whole, one third with wildcards."""
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
    """Return conjunctions of up to ten criteria over ten fields; a tenth asks for a topic too."""
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
