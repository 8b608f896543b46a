"""Newest records of batches: by columns as one by one, and many at once as each alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_protocol.keys import DELETION_FIELD
from malamute_py.broker.log.newest import Keys, NewestColumns, newest_columns, newest_rows
from tests.seeds import seeds

NAMES = [f"k.{number}" for number in range(12)]
KINDS = ("one", "fields", "codes", "several", "codec")


def drawn(draw: random.Random) -> bytes:
    """A batch of a few records: of one subject, of several, with field maps, or compressed."""
    kind = draw.choice(KINDS)
    count = draw.randint(1, 9)
    bodies = [b"v" * draw.randrange(40) for _ in range(count)]
    chosen: list[tuple[str, ...]] = [(draw.choice(NAMES),) for _ in range(count)]
    if kind == "several":
        chosen = [(draw.choice(NAMES[:3]), draw.choice("ab")) for _ in range(count)]
    table = list(dict.fromkeys(chosen))
    options: dict[str, Any] = {
        "subject_table": [list(keys) if len(keys) > 1 else keys[0] for keys in table],
        "subject_codes": np.array([table.index(keys) for keys in chosen], np.int32),
    }
    if kind == "one":
        options = {"subject": draw.choice(NAMES)}
    elif kind == "fields":
        options = {"subject": draw.choice(NAMES), "fields": {DELETION_FIELD: ""}}
    elif kind == "codec":
        options["codec"] = "gzip"
    return encode(bodies, **options)


def facts(keys: Keys) -> Any:
    """All that can be asked of an index."""
    newest = keys.before(1 << 40, 0, 100, 1 << 40)
    return list(keys.names), keys.bytes, keys.memory, dict(keys.deleted), newest


@pytest.mark.parametrize("seed", seeds(20, 200))
def test_copies_that_are_entered_together_are_those_of_each_one_after_the_other(seed: int) -> None:
    draw = random.Random(seed)
    alone, together = Keys(1, ready=False), Keys(1, ready=False)
    for keys in (alone, together):
        keys.enter("k.1", 35, 500, None)
    copy = 0
    for _ in range(4):
        rows = []
        for name in draw.sample(NAMES, draw.randint(0, len(NAMES))):
            copy += 1
            time_ms = draw.choice([None, None, copy])
            # A copy that was made again has the offset of the first one.
            offset = draw.choice([copy * 10, alone.revision(name) or copy * 10])
            rows.append((name, offset, draw.randint(0, 900), time_ms, copy))
        for row in rows:
            alone.enter_copies([row])
        together.enter_copies(rows)
        assert facts(alone) == facts(together)
        assert [alone.find(name) for name in NAMES] == [together.find(name) for name in NAMES]
        assert [alone.copy_of(name) for name in NAMES] == [together.copy_of(name) for name in NAMES]
        found = [keys.moved_from(0, 1 << 40, 100) for keys in (alone, together)]
        assert found[0] == found[1]


@pytest.mark.parametrize("seed", seeds(20, 200))
def test_the_newest_records_of_many_batches_are_those_of_each_one_after_the_other(
    seed: int,
) -> None:
    draw = random.Random(seed)
    alone, together = Keys(1, ready=False), Keys(1, ready=False)
    for keys in (alone, together):
        keys.enter_copies([("k.0", 1, 500, None, 7)])
    base = 5
    for _ in range(4):
        batches = []
        for _ in range(draw.randint(0, 5)):
            frame = drawn(draw)
            size = 96 + len(frame)
            content = Content(frame)
            for row in sorted(newest_rows(content, size), key=lambda each: each.row):
                time_ms = base if row.deletion else None
                alone.enter(row.subject, base + row.row, row.size, time_ms)
            batches.append((Content(frame), size, base, base))
            base += len(content)
        together.enter_many(newest_columns(batches))
        assert facts(alone) == facts(together)
        assert [alone.find(name) for name in NAMES] == [together.find(name) for name in NAMES]
        assert together.moved_count == alone.moved_count


def test_a_record_that_has_a_copy_stays_with_it_when_a_start_finds_its_old_segment_again() -> None:
    """A power loss took back that the segment was given up: another copy might find no room."""
    keys = Keys(1, ready=False)
    keys.enter_copies([("k.1", 5, 500, None, 7), ("k.2", 6, 500, 44, 8), ("k.3", 8, 500, None, 9)])
    before = facts(keys)
    found = NewestColumns(["k.1", "k.2"], [5, 6], [500, 500], {"k.2": 44})
    keys.enter_many(found)
    assert facts(keys) == before
    assert keys.before(100, 0, 10, 1 << 20) == []
    keys.enter_many(NewestColumns(["k.3", "k.4", "k.2"], [8, 9, 10], [500, 500, 500], {"k.2": 55}))
    assert keys.moved_count == 2
    assert keys.before(100, 0, 10, 1 << 20) == [("k.4", 9), ("k.2", 10)]
    assert (keys.copy_of("k.1"), keys.copy_of("k.3"), keys.deleted["k.2"]) == (7, 9, 55)
