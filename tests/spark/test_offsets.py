"""Offsets in a checkpoint: one form, and refused by name when they belong to something else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pyspark_malamute.errors import CheckpointMismatch
from pyspark_malamute.offsets import StreamOffset, check_stream, read_offsets, selection_of, to_json
from pyspark_malamute.options import SourceOptions, parse_options

STREAM = "00112233445566778899aabbccddeeff"


def options(**more: str) -> SourceOptions:
    return parse_options({"endpoint": "tcp://127.0.0.1:9797", "stream": "flights", **more})


HERE = {"flights": StreamOffset(STREAM, 7, 1200)}


def stored(chosen: SourceOptions, offsets: dict[str, StreamOffset] | None = None) -> dict[str, Any]:
    """Return offsets as Spark gives them back: parsed from the JSON that it wrote."""
    loaded: dict[str, Any] = json.loads(json.dumps(to_json(offsets or HERE, chosen)))
    return loaded


def test_an_offset_comes_back_as_it_was_and_as_the_same_text() -> None:
    several = {"weather": StreamOffset("22" * 16, 1, 5), **HERE}
    chosen = parse_options({"endpoint": "tcp://a:1", "streams": "weather,flights"})
    assert read_offsets(stored(chosen, several), chosen) == several
    text = json.dumps(to_json(several, chosen))
    assert text == json.dumps(to_json(several, chosen), sort_keys=True)
    assert text == json.dumps(to_json(read_offsets(json.loads(text), chosen), chosen))


def test_an_offset_of_the_first_version_is_that_of_the_one_stream() -> None:
    old = {
        "epoch": 7, "offset": 1200, "selection": selection_of(options()), "stream": STREAM,
        "version": 1,
    }  # fmt: skip
    assert read_offsets(old, options()) == HERE
    several = parse_options({"endpoint": "tcp://a:1", "streams": "weather,flights"})
    with pytest.raises(CheckpointMismatch, match="with option 'stream' first"):
        read_offsets(old, several)


def test_another_name_of_the_stream_is_refused_by_both_names() -> None:
    with pytest.raises(CheckpointMismatch, match=r"is of 'flights'.* 'weather'"):
        read_offsets(stored(options()), options(stream="weather"))


def test_the_selection_depends_on_pattern_and_window_and_on_nothing_else() -> None:
    here = selection_of(options(pattern="a.#"))
    assert here == selection_of(options(pattern="a.#", splitBytes="1m", failOnDataLoss="false"))
    assert here != selection_of(options(pattern="a.*"))
    assert here != selection_of(options(pattern="a.#", clientTimeFrom="5"))


def test_a_changed_pattern_is_refused_by_name_and_with_a_way_out() -> None:
    with pytest.raises(CheckpointMismatch, match="the pattern has changed") as caught:
        read_offsets(stored(options(pattern="a.#")), options(pattern="b.#"))
    assert "'b.#'" in str(caught.value)
    assert "checkpointLocation" in str(caught.value)


def test_a_changed_client_time_window_is_refused_too() -> None:
    with pytest.raises(CheckpointMismatch, match="client-time window"):
        read_offsets(stored(options(clientTimeFrom="5")), options(clientTimeFrom="6"))


def test_a_recreated_stream_is_refused_by_name() -> None:
    offset = HERE["flights"]
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
        {"version": 3, "streams": {}, "selection": "x"},
        {"version": 2, "streams": {"flights": 7}, "selection": "x"},
        {"version": 2, "streams": [], "selection": "x"},
        {"version": 1, "stream": STREAM, "epoch": 1, "selection": "x"},
        {"version": 1, "stream": STREAM, "epoch": 1, "offset": "many", "selection": "x"},
    ],
)
def test_what_is_no_offset_of_ours_is_refused_with_what_it_is(value: dict[str, Any]) -> None:
    with pytest.raises(CheckpointMismatch, match="flights"):
        read_offsets(value, options())
