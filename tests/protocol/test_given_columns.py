"""Columns that a caller gives to the encoder: what they say is in the content, or is refused."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import pytest

from malamute_protocol.batch import encode, encode_columns, encode_fixed
from malamute_protocol.columns import NO_TIME
from malamute_protocol.content import Content
from malamute_protocol.errors import LocalProtocolError


def read(made: bytes) -> Content:
    content = Content(made)
    content.verify()
    return content


class Side(enum.StrEnum):
    BUY = "buy"


@pytest.mark.parametrize("subject", [np.str_("buy"), Side.BUY])
def test_a_subject_of_another_kind_of_str_is_one_key(subject: str) -> None:
    assert read(encode([b""], subject=subject, keys=["k"])).table.keys == [("buy", "k")]
    mixed = read(encode([b"", b""], subject=[["sell", "k"], subject]))
    assert mixed.table.keys == [("sell", "k"), ("buy",)]


@pytest.mark.parametrize(
    "codes",
    [
        np.array([0, 2**32 + 1]), np.array([0.0, 0.7]), [0, 2**40], ["0", "1"], [[0, 1], [1, 0]],
        np.array([1, 2**64 - 1], np.uint64),
    ],
)  # fmt: skip
def test_codes_that_are_no_places_in_their_table_are_refused(codes: Any) -> None:
    with pytest.raises(LocalProtocolError, match=r"codes? (are|for|[0-9])"):
        encode([b"", b""], subject_table=["a", "b"], subject_codes=codes)
    with pytest.raises(LocalProtocolError, match=r"codes? (are|for|[0-9])"):
        encode([b"", b""], field_table=[{"a": "1"}, {"a": "2"}], field_codes=codes)


def test_a_table_of_no_subject_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="without an entry"):
        encode([b""], subject_table=[])


@pytest.mark.parametrize(
    "times",
    [
        np.array(["2026-01-01", "2026-01-02"], "M8[us]"), np.array([1.5, np.nan]), [1.5, 2.5],
        np.array([1, 2**63], np.uint64), [1, 2**63], [1, 2**70], ["1", "2"], [True, False],
    ],
)  # fmt: skip
def test_times_that_are_not_whole_milliseconds_are_refused(times: Any) -> None:
    for name in ("client_time_ms", "expires_at_ms"):
        options: Any = {name: times}
        with pytest.raises(LocalProtocolError, match=name):
            encode([b"", b""], **options)


@pytest.mark.parametrize(
    "times",
    [
        [3, None], (3, None), np.array([3, None], object), np.array([3, NO_TIME]),
        [np.int64(3), None],
    ],
)  # fmt: skip
def test_times_of_some_records_are_what_was_given(times: Any) -> None:
    found = read(encode([b"", b""], client_time_ms=times)).client_times
    assert found is not None
    assert found.tolist() == [3, NO_TIME]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("subject", "\ud800"), ("subject", ["a", "\ud800"]), ("fields", {"a": "\ud800"}),
        ("fields", [{"a": ["1"]}, None]), ("fields", [{"a": "1", 3: "1"}, None]),
        ("fields", ["a", None]), ("fields", 3), ("properties", {"a": "\ud800"}),
    ],
)  # fmt: skip
def test_headers_that_cannot_be_written_are_named(name: str, value: Any) -> None:
    options: Any = {name: value}
    with pytest.raises(LocalProtocolError, match=name):
        encode([b"", b""], **options)


class Made(Sequence[dict[str, str]]):
    """A sequence that makes its entries whenever it is asked for them."""

    def __len__(self) -> int:
        return 3

    @overload
    def __getitem__(self, place: int) -> dict[str, str]: ...
    @overload
    def __getitem__(self, place: slice) -> list[dict[str, str]]: ...
    def __getitem__(self, place: int | slice) -> Any:
        return {"n": str(place)}

    def __iter__(self) -> Iterator[dict[str, str]]:
        return ({"n": str(place)} for place in range(3))


def test_field_maps_that_are_made_when_they_are_asked_for_are_those_of_their_records() -> None:
    content = read(encode([b""] * 3, fields=Made()))
    headers, codes = content.headers()
    assert codes is not None
    assert [headers[code].fields for code in codes] == [(("n", str(n)),) for n in range(3)]


@pytest.mark.parametrize(
    "offsets",
    [
        np.array([0, 5, 3], np.uint8), np.array([0, 5, 3], np.uint64), np.array([0, 5, 3]),
        np.array([2**31 - 1, -(2**31)], np.int32), np.array([0, 2**64 - 1, 3], np.uint64),
    ],
)  # fmt: skip
def test_offsets_that_fall_are_refused_whatever_integers_they_are(offsets: Any) -> None:
    with pytest.raises(LocalProtocolError, match="offsets fall"):
        encode_columns(offsets, b"abcdefgh")


def test_records_of_one_width_are_cut_by_bytes_out_of_items_that_are_wider() -> None:
    numbers: Any = np.arange(16, dtype="<i8")
    assert encode_fixed(numbers, 8) == encode_fixed(numbers.tobytes(), 8)


@pytest.mark.parametrize(
    "options",
    [
        {"subject": ["a", 3]}, {"subject": ["a", None]}, {"subject": 3}, {"subject_table": 3},
        {"subject_table": ["a", None], "keys": ["k"], "subject_codes": [0, 1]}, {"keys": 3},
        {"keys": "xy"}, {"properties": 3}, {"properties": "ab"},
        {"subject_table": ["a", "b"], "subject_codes": [[0], [0, 1]]},
    ],
)  # fmt: skip
def test_headers_of_other_types_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        encode([b"1", b"2"], **options)
