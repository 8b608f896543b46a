"""SharedGathering against gather_rows(): equal bytes, whichever reader takes which rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from malamute_protocol.batch import Content, Stamp, encode
from malamute_protocol.gather import SharedGathering, gather_rows, rows_of

SUBJECTS = ["a", "a.b", "c.d.e", "x" * 40]
FIELDS: list[dict[str, str]] = [{}, {"f": "1"}, {"f": "2", "g": ""}]
ROW = st.tuples(
    st.one_of(st.binary(max_size=40), st.just(b"x" * 7)),
    st.sampled_from(SUBJECTS),
    st.sampled_from(FIELDS),
    st.sampled_from([None, 5]),
)
BATCHES = st.lists(
    st.tuples(st.lists(ROW, min_size=1, max_size=9), st.booleans(), st.booleans()),
    min_size=1,
    max_size=5,
)


def made(batches: list[tuple[list[Any], bool, bool]]) -> list[tuple[Stamp, Content]]:
    """Batches with gaps between them; fields and client times only in those that say so."""
    found = []
    base = 1_000
    for place, (rows, fields, times) in enumerate(batches):
        content = Content(
            encode(
                [body for body, *_ in rows],
                subject=[subject for _, subject, *_ in rows],
                fields=[row[2] for row in rows] if fields else None,
                client_time_ms=[row[3] for row in rows] if times else None,
            )
        )
        size = 96 + len(content.view)
        lsn = 4_096 * (place + 1)
        stamp = Stamp(0, lsn, lsn, 0, 3, base, 50 + place, 2, 0, size, len(rows), 0, 0)
        found.append((stamp, content))
        base += len(rows) + place
    return found


@given(BATCHES, st.data())
def test_rows_for_many_are_what_would_be_gathered_for_each(
    batches: list[tuple[list[Any], bool, bool]], data: st.DataObject
) -> None:
    pairs = made(batches)
    total = sum(len(rows) for rows, *_ in batches)
    choice = st.sets(st.integers(0, total - 1), min_size=1).map(sorted)
    takers = data.draw(st.lists(choice, min_size=1, max_size=5))
    gathering = SharedGathering(2)
    rows = []
    for stamp, content in pairs:
        assert gathering.takes(stamp, content)
        gathering.add(stamp, content)
        rows += [(row, stamp.lsn) for row in rows_of(stamp, content, np.arange(content.head.count))]
    found = gathering.gather(np.concatenate(takers), [len(chosen) for chosen in takers])
    for chosen, gathered in zip(takers, found, strict=True):
        wanted = [rows[row][0] for row in chosen]
        assert (gathered.stamp, gathered.content) == gather_rows(wanted, 2, 3, rows[chosen[0]][1])
        assert gathered.base == wanted[0].offset
        assert gathered.next == wanted[-1].offset + 1
        assert gathered.count == len(chosen)


def test_batches_of_another_epoch_or_with_more_to_a_row_do_not_join() -> None:
    ((stamp, content),) = made([([(b"x", "a", {}, None)], False, False)])
    gathering = SharedGathering(2)
    gathering.add(stamp, content)
    later = stamp._replace(base_offset=1_001)
    assert gathering.takes(later, content)
    assert not gathering.takes(later._replace(epoch=4), content)
    assert not gathering.takes(stamp._replace(base_offset=1_000 + (1 << 32)), content)
    for more in (
        encode([b"a"], subject="s", expires_at_ms=1),
        encode([b"a"], subject="s", properties={"p": 1}),
        encode([b"a" * 100], subject="s", codec="zstd"),
    ):
        assert not gathering.takes(later, Content(more))
