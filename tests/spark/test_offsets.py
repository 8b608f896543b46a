"""Offsets in a checkpoint: one form, and refused by name when they belong to something else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pyspark_malamute.errors import CheckpointMismatch
from pyspark_malamute.offsets import StreamOffset, check_stream, read_offset, selection_of
from pyspark_malamute.options import SourceOptions, parse_options

STREAM = "00112233445566778899aabbccddeeff"


def options(**more: str) -> SourceOptions:
    return parse_options({"endpoint": "tcp://127.0.0.1:9797", "stream": "flights", **more})


def stored(offset: StreamOffset) -> dict[str, Any]:
    """What comes back from Spark: the JSON that it wrote, parsed."""
    loaded: dict[str, Any] = json.loads(json.dumps(offset.to_json()))
    return loaded


def test_an_offset_comes_back_as_it_was_and_as_the_same_text() -> None:
    offset = StreamOffset(STREAM, 7, 1200, selection_of(options()))
    assert read_offset(stored(offset), options()) == offset
    text = json.dumps(offset.to_json())
    assert text == json.dumps(offset.to_json(), sort_keys=True)
    assert text == json.dumps(read_offset(json.loads(text), options()).to_json())


def test_the_selection_depends_on_pattern_and_window_and_on_nothing_else() -> None:
    here = selection_of(options(pattern="a.#"))
    assert here == selection_of(options(pattern="a.#", splitBytes="1m", failOnDataLoss="false"))
    assert here != selection_of(options(pattern="a.*"))
    assert here != selection_of(options(pattern="a.#", clientTimeFrom="5"))


def test_a_changed_pattern_is_refused_by_name_and_with_a_way_out() -> None:
    offset = StreamOffset(STREAM, 7, 1200, selection_of(options(pattern="a.#")))
    with pytest.raises(CheckpointMismatch, match="the pattern has changed") as caught:
        read_offset(stored(offset), options(pattern="b.#"))
    assert "'b.#'" in str(caught.value)
    assert "checkpointLocation" in str(caught.value)


def test_a_changed_client_time_window_is_refused_too() -> None:
    offset = StreamOffset(STREAM, 7, 1200, selection_of(options(clientTimeFrom="5")))
    with pytest.raises(CheckpointMismatch, match="client-time window"):
        read_offset(stored(offset), options(clientTimeFrom="6"))


def test_a_recreated_stream_is_refused_by_name() -> None:
    offset = StreamOffset(STREAM, 7, 1200, selection_of(options()))
    check_stream(offset, STREAM, options())
    with pytest.raises(CheckpointMismatch, match="was recreated") as caught:
        check_stream(offset, "ff" * 16, options())
    assert STREAM in str(caught.value)
    assert "ff" * 16 in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"logOffset": 12},
        {"version": 2, "stream": STREAM, "epoch": 1, "offset": 1, "selection": "x"},
        {"version": 1, "stream": STREAM, "epoch": 1, "selection": "x"},
        {"version": 1, "stream": STREAM, "epoch": 1, "offset": "many", "selection": "x"},
    ],
)
def test_what_is_no_offset_of_ours_is_refused_with_what_it_is(value: dict[str, Any]) -> None:
    with pytest.raises(CheckpointMismatch, match="flights"):
        read_offset(value, options())
