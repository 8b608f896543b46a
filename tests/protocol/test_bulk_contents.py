"""A large batch, whose bodies are copied once, has the very bytes that encode() makes."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from malamute_protocol.content import Content
from malamute_protocol.encode import encode, encode_bulk
from malamute_protocol.errors import LocalProtocolError
from malamute_protocol.limits import Limits

LARGE = 70_000


def bulk(bodies: list[Any], *, at: int = 0, **options: Any) -> bytes | bytearray:
    """encode_bulk() with the bounds of the bodies, the first of them at `at`."""
    return encode_bulk(bodies, np.array([*accumulate(map(len, bodies), initial=at)]), **options)


def bodies_of(count: int, size: int) -> list[bytes]:
    return [bytes([number % 251]) * (size + number % 3) for number in range(count)]


@given(
    st.integers(1, 300),
    st.integers(0, 3_000),
    st.integers(0, 1 << 40),
    st.sampled_from(["one", "many", "keys"]),
    st.booleans(),
    st.booleans(),
)
def test_it_makes_what_encode_makes(
    count: int, size: int, at: int, subjects: str, timed: bool, expiring: bool
) -> None:
    bodies = bodies_of(count, size)
    options: dict[str, Any] = {"producer_id": 7, "producer_epoch": 2, "first_sequence": 99}
    names = {"one": "a.b", "many": [f"s{number % 5}" for number in range(count)], "keys": "s"}
    options["subject"] = names[subjects]
    if subjects == "keys":
        options |= {"keys": ["a", "b"], "fields": {"x": "y"}, "properties": {"p": 1}}
    if timed:
        options["client_time_ms"] = list(range(count))
    if expiring:
        options["expires_at_ms"] = 1_800_000_000_000
    made = bulk(bodies, at=at, **options)
    assert made == encode(bodies, **options)
    Content(made).check(Limits())


def test_a_large_one_is_written_once_and_a_small_one_is_bytes() -> None:
    assert type(bulk([b"x" * LARGE], subject="s")) is bytearray
    assert type(bulk([b"x"], subject="s")) is bytes


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_it_is_what_encode_makes(codec: str) -> None:
    bodies = [b"x" * LARGE, b"y"]
    made = bulk(bodies, subject="s", codec=codec)
    assert made == encode(bodies, subject="s", codec=codec)


@pytest.mark.parametrize("body", ["text", (1, 2)])
def test_what_is_not_bytes_is_named(body: Any) -> None:
    with pytest.raises(LocalProtocolError, match=r"body of record 1 is .*not bytes"):
        bulk([b"x" * LARGE, body], subject="s")


def test_views_and_arrays_of_bytes_are_bytes_all_the_same() -> None:
    wide: Any = memoryview(b"12345678").cast("I")
    whole = b"x" * LARGE
    expected = encode([whole, b"12345678"], subject="s")
    for bodies in ([whole, wide], [bytearray(whole), b"12345678"], [memoryview(whole), wide]):
        assert bulk(bodies, subject="s") == expected


def test_limits_hold() -> None:
    whole = b"x" * LARGE
    with pytest.raises(LocalProtocolError, match="record 1 has 70000 bytes"):
        bulk([b"", whole], subject="s", limits=Limits(record_bytes_max=100))
    with pytest.raises(LocalProtocolError, match="a batch of"):
        bulk([whole, whole], subject="s", limits=Limits(batch_bytes_max=2 * LARGE - 1))
    with pytest.raises(LocalProtocolError, match="a batch of"):
        # The bodies fit, what is around them does not.
        bulk([whole, whole], subject="s", limits=Limits(batch_bytes_max=2 * LARGE))
    with pytest.raises(LocalProtocolError):
        bulk([whole], subject="s" * 300)
