"""Random contents that are structurally valid, or nearly, with hostile insides; and their consumer.

make() chooses from a seed; consume() does with a batch all that a reader can do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from malamute_protocol.batch import Batch
from malamute_protocol.codec import compress
from malamute_protocol.content_layout import (
    PROPERTIES_COLUMN,
    PROPERTIES_CONSTANT,
    PROPERTIES_DICTIONARY,
)
from malamute_protocol.errors import MalamuteError
from tests.protocol.hostile import MAP_32, claim, craft, ints, packed

EDGES = (0, 1, -1, 2, 7, 255, 65_535, 65_536, 2**31 - 1, -(2**31))
TIMES = (0, 1, -1, 5, 10**12, 2**53, 2**62, 2**63 - 1, -(2**63), -(2**63) + 1)
BYTES = (b"", b"\xc1", b"\x80", b"\x90", b"\xa0", b"\xff" * 9, b"\xc4\x02x", b"\xd6\xff0000")


def _mostly(chance: random.Random, right: Any, *wrong: Any) -> Any:
    return right if chance.random() < 0.96 else chance.choice(wrong)


def _codes(chance: random.Random, count: int, entries: int, least: int) -> list[int] | None:
    if chance.random() < 0.4:
        return None
    codes = [chance.randint(least, max(least, entries - 1)) for _ in range(count)]
    if chance.random() < 0.05:
        codes[chance.randrange(count)] = chance.choice(EDGES)
    return codes


def _table(chance: random.Random) -> tuple[bytes, int]:
    kind = chance.randrange(30)
    if kind == 0:
        count = chance.choice((1, 300, 1 << 16, 1 << 20))
        return claim(count) + chance.choice((b"\xa0", b"\xa1a", b"\x90", b"\x91\xa0")) * min(
            count, 3_000
        ), _mostly(chance, count, 1)
    subjects: list[Any] = [
        chance.choice(["a", "b", "a.b.c", "", "é" * chance.randint(1, 128), "\0"]) for _ in range(3)
    ]
    if kind == 1:
        subjects.append(["k"] * chance.randint(0, 20))
    if kind == 2:
        subjects.append(chance.choice([1, None, {}, [[]], [1], b"x", 1.5]))
    if 2 < kind < 9:
        subjects = chance.sample(["a", "b"], chance.choice((0, 1, 1, 1, 2, 2, 2, 2)))
    return packed(subjects), _mostly(chance, len(subjects), *EDGES[:6])


def _maps(chance: random.Random) -> tuple[bytes, int]:
    if chance.random() < 0.6:
        return b"", _mostly(chance, 0, 1)
    kind = chance.randrange(16)
    if kind == 0:
        count = chance.choice((1, 1 << 16, 1 << 20))
        return b"\x91" + claim(count, MAP_32) + b"\xa0\xa0" * min(count, 2_000), 1
    maps: list[Any] = [{"k": chance.choice(["v", "", "w" * 1_024])} for _ in range(2)]
    if kind == 1:
        maps.append({f"{n}": "v" for n in range(chance.randint(0, 70))})
    if kind == 2:
        maps.append(chance.choice([1, [], {"k": 1}, {1: "v"}, None]))
    return packed(maps), _mostly(chance, len(maps), 0, 1, 9)


def _properties(chance: random.Random, count: int) -> tuple[int, bytes] | None:
    kind = chance.randrange(6)
    odd = chance.choice(
        (*BYTES, packed({"k": [1]}), packed({"k": {"a": 1}}), packed({"k": "v" * 70_000}),
         b"\x81\xa1k" + b"\x91" * 3_000, packed({"k": 2**64 - 1}), packed({"": None}))
    )  # fmt: skip
    if kind == 0:
        return PROPERTIES_CONSTANT, chance.choice((packed({"k": 1}), odd))
    if kind == 1:
        codes = _codes(chance, count, 2, -1) or [0] * count
        maps = chance.choice(
            (packed([{"a": 1}, {}]), claim(2) + odd * 2, claim(2) + odd * 2, odd,
             claim(1 << 24) + b"\x80" * 99)
        )  # fmt: skip
        return PROPERTIES_DICTIONARY, ints(codes) + maps
    if kind == 2:
        pieces = [chance.choice((packed({"r": row}), b"", odd[:500])) for row in range(count)]
        bounds = [0]
        for piece in pieces:
            bounds.append(bounds[-1] + len(piece))
        if chance.random() < 0.05:
            bounds[chance.randrange(count + 1)] = chance.choice(EDGES)
        return PROPERTIES_COLUMN, ints(bounds) + b"".join(pieces)
    return None


def _body(chance: random.Random, count: int) -> dict[str, Any]:
    kind = chance.choice((*[0] * 20, 1, 2))
    widths = [chance.choice((0, 1, 3, 40)) for _ in range(count)]
    bounds = [sum(widths[:n]) for n in range(count + 1)]
    if chance.random() < 0.04:
        bounds[chance.randrange(count + 1)] = chance.choice(EDGES)
    section = ints(bounds) + b"x" * sum(widths)
    parts = 0
    if kind == 1:
        parts = count
        inner = list(range(parts + 1))
        if chance.random() < 0.2:
            inner[chance.randrange(parts + 1)] = chance.choice(EDGES)
        section = ints(range(count + 1)) + ints(inner) + b"y" * parts
    elif kind == 2:
        section = chance.choice((b"", b"\xff\xff\xff\xff\x10\0\0\0" + bytes(16), bytes(64)))
    fields: dict[str, Any] = {"body": section, "body_kind": kind, "parts_count": parts}
    codec = chance.choice((*[0] * 24, 1, 2, 3, 4, 1, 2, 3, 4, 9))
    if codec:
        raw = len(section)
        try:
            section = compress(codec, section) if codec < 5 else section
        except MalamuteError:
            codec = 0
        if chance.random() < 0.3:
            section = chance.choice((section[:-1], section + b"x", b"", bytes(9)))
        fields |= {
            "body": section, "codec": codec,
            "body_raw": _mostly(chance, raw, 0, 1, 1 << 24, (1 << 32) - 1),
        }  # fmt: skip
    return fields


def make(chance: random.Random) -> bytes:
    """One content."""
    count = chance.choice((1, 2, 4, 9, 40))
    subjects, subjects_count = _table(chance)
    maps, maps_count = _maps(chance)
    fields: dict[str, Any] = {}
    if chance.random() < 0.3:
        times = [chance.choice(TIMES) for _ in range(count)]
        present = [time for time in times if time != -(2**63)] or [0]
        fields |= {
            "client_times": times,
            "client_range": _mostly(chance, (min(present), max(present)), (0, 0), (5, -5)),
        }
    if chance.random() < 0.3:
        expiries = [chance.choice(TIMES) for _ in range(count)]
        least = min((time for time in expiries if time), default=0)
        fields |= {"expiries": expiries, "earliest_ms": _mostly(chance, least, 0, 7)}
    if chance.random() < 0.02:
        fields["deltas"] = list(range(count))
    return craft(
        count, subjects=subjects, subjects_count=subjects_count & 0xFFFFFFFF, fieldmaps=maps,
        fieldmaps_count=maps_count,
        subject_codes=_codes(chance, count, max(1, subjects_count), 0),
        field_codes=_codes(chance, count, maps_count, -1),
        properties=_properties(chance, count),
        producer_id=chance.choice((*[0] * 20, 1 << 63)),
        first_sequence=chance.choice((0, 2**64 - 1)),
        **_body(chance, count), **fields,
    )  # fmt: skip


def _looks(batch: Batch) -> Iterator[Callable[[], Any]]:
    yield from (
        batch.bodies, batch.verify, batch.to_arrow, partial(batch.to_arrow, decode=True),
        lambda: batch.offsets, batch.span, batch.content.properties,
    )  # fmt: skip
    for record in batch:
        for name in (
            "body", "parts", "subject", "keys", "offset", "fields", "properties",
            "client_time_ms", "expires_at_ms",
        ):  # fmt: skip
            yield partial(getattr, record, name)


def consume(batch: Batch) -> int:
    """Look at all of a batch; returns how much of it could not be read, each time by name."""
    refused = 0
    for look in _looks(batch):
        try:
            look()
        except MalamuteError:
            refused += 1
        except TypeError as error:
            # What the kind of the bodies forbids is the caller's to know.
            if "bodies" not in str(error) and "Arrow" not in str(error):
                raise
    return refused
