"""The short way of encoding a few plain records has the output of the general way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malamute_protocol.content import Content
from malamute_protocol.encode import encode, encode_columns
from malamute_protocol.errors import LocalProtocolError
from malamute_protocol.limits import Limits


def general(bodies: list[bytes], **options: Any) -> bytes:
    offsets = [0]
    for body in bodies:
        offsets.append(offsets[-1] + len(body))
    return encode_columns(offsets, b"".join(bodies), **options)


@pytest.mark.moderate
@given(
    st.lists(st.binary(max_size=40), min_size=1, max_size=40),
    st.text(max_size=30).filter(lambda text: text.isprintable()),
    st.integers(0, 1 << 60),
    st.integers(0, 1 << 30),
)
def test_both_ways_make_the_same_bytes(
    bodies: list[bytes], subject: str, producer: int, sequence: int
) -> None:
    options: dict[str, Any] = {"subject": subject}
    if producer:
        options |= {"producer_id": producer, "producer_epoch": 3, "first_sequence": sequence}
    made = encode(bodies, **options)
    assert made == general(bodies, **options)
    Content(made).check(Limits())


@pytest.mark.parametrize("body", ["text", 3, None])
def test_what_is_not_bytes_is_named(body: Any) -> None:
    with pytest.raises(LocalProtocolError, match="not bytes"):
        encode([b"a", body], subject="s")


def test_views_of_wide_items_are_bytes_all_the_same() -> None:
    view: Any = memoryview(b"12345678").cast("I")
    assert encode([view], subject="s") == encode([b"12345678"], subject="s")


def test_limits_hold_on_the_short_way() -> None:
    limits = Limits(record_bytes_max=100, batch_bytes_max=400)
    with pytest.raises(LocalProtocolError, match="record 1 has 101 bytes"):
        encode([b"", b"x" * 101], subject="s", limits=limits)
    with pytest.raises(LocalProtocolError, match="a batch of"):
        encode([b"x" * 100] * 4, subject="s", limits=limits)
    with pytest.raises(LocalProtocolError):
        encode([b"x"], subject="s" * 300)
