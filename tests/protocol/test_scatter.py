"""Scatter against extract(): the same bytes, whatever rows are taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malamute_protocol.batch import Content, Stamp, encode
from malamute_protocol.errors import LocalProtocolError
from malamute_protocol.extract import Scatter, can_scatter, copy_rows, extract

SUBJECTS = st.sampled_from(["a", "a.b", "c.d.e", "x" * 40])
ROWS = st.lists(st.tuples(st.binary(max_size=20), SUBJECTS), min_size=2, max_size=12)


@pytest.mark.moderate
@given(ROWS, st.data())
def test_rows_of_many_selections_are_what_each_would_be_extracted_to(
    rows: list[tuple[bytes, str]], data: st.DataObject
) -> None:
    content = Content(
        encode(
            [body for body, _ in rows],
            subject=[subject for _, subject in rows],
            producer_id=7,
            producer_epoch=2,
            first_sequence=99,
        )
    )
    assert can_scatter(content)
    stamp = Stamp(1, 4096, 4096, 0, 3, 1000, 5, 2, 0, 96 + len(content.view), len(rows), 0, 0)
    selections = data.draw(
        st.lists(
            st.sets(st.integers(0, len(rows) - 1), min_size=1).map(sorted), min_size=1, max_size=5
        )
    )
    for chosen, frames in zip(selections, Scatter(stamp, content).extract(selections), strict=True):
        mask = [row in chosen for row in range(len(rows))]
        assert frames == extract(stamp, content, mask)


def test_what_has_more_than_subjects_and_bodies_is_not_scattered() -> None:
    plain = encode([b"a", b"b"], subject="s")
    assert can_scatter(Content(plain))
    for more in (
        encode([b"a", b"b"], subject="s", client_time_ms=1),
        encode([b"a", b"b"], subject="s", expires_at_ms=1),
        encode([b"a", b"b"], subject="s", fields={"f": "1"}),
        encode([b"a", b"b"], subject="s", properties={"p": 1}),
        encode([b"a" * 100, b"b" * 100], subject="s", codec="zstd"),
    ):
        assert not can_scatter(Content(more))


def test_to_extract_no_row_is_refused_whatever_the_batch_has() -> None:
    content = Content(encode([b"a", b"b"], subject=["s", "t"], fields=[{"f": "1"}, None]))
    stamp = Stamp(1, 4096, 4096, 0, 3, 1000, 5, 2, 0, 96 + len(content.view), 2, 0, 0)
    with pytest.raises(LocalProtocolError, match="no row is selected"):
        extract(stamp, content, [False, False])
    with pytest.raises(LocalProtocolError, match="no row is selected"):
        copy_rows(content, [False, False])
