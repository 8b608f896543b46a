"""Rows of typed streams at the command line: JSON, lines in a pipe, columns on a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from malamute_py import EmbeddedBroker
from malamute_py.cli import output
from malamute_py.cli.typed import as_text
from tests.cli.running import Run

pa: Any = pytest.importorskip("pyarrow")

SCHEMA = pa.schema([("carrier", pa.string()), ("delay", pa.int32()), ("on", pa.date32())])
ROWS = [
    {"carrier": "AA", "delay": 4, "on": None},
    {"carrier": "\x1bUA", "delay": None, "on": None},
]


@pytest.fixture
def typed(broker: EmbeddedBroker, stream: str) -> str:
    with broker.connect_sync() as client:
        client.create_stream(stream, schema=SCHEMA)
        client.publish_table(stream, pa.Table.from_pylist(ROWS, SCHEMA), subject="carrier")
    return stream


@pytest.mark.moderate
def test_a_stream_is_made_that_validates_in_full_and_told_not_to(
    m: Run, stream: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.arrow"
    with pa.ipc.new_file(str(file), SCHEMA):
        pass
    m("stream", "create", stream, "--schema", str(file), "--validate", "full").ok()
    assert m("stream", "info", stream, "--json").ok().json["settings"]["validate"] == "full"
    m("stream", "edit", stream, "--validate", "schema").ok()
    refused = m("stream", "edit", stream, "--validate", "twice")
    assert refused.code != 0
    assert "validate is one of schema, full" in refused.err


ALL = ("--start", "earliest", "--until-tail")


def test_json_has_the_columns_of_each_row(m: Run, typed: str) -> None:
    for command in (("sub", typed, *ALL), ("replay", typed), ("stream", "peek", typed)):
        lines = [json.loads(line) for line in m(*command, "--json").out.splitlines()]
        assert [line["row"] for line in lines] == ROWS
        assert [line["subject"] for line in lines] == ["AA", "\x1bUA"]


def test_a_line_in_a_pipe_is_the_row_as_json(m: Run, typed: str) -> None:
    found = m("sub", typed, "AA", *ALL).out.splitlines()
    assert [json.loads(line) for line in found] == ROWS[:1]


def test_a_terminal_shows_columns_under_their_names(
    m: Run, typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    lines = m("sub", typed, *ALL).out.splitlines()
    named = [line for line in lines if "-- carrier  delay  on" in line]
    assert len(named) == 1
    assert lines[-2].split()[-3:] == ["AA", "4", "-"]
    assert "\\x1bUA" in lines[-1]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), ("a", "a"), (1.5, "1.5"), (True, "true"), ([1, None], "[1,null]")],
)
def test_a_value_is_text_for_a_person(value: Any, text: str) -> None:
    assert as_text(value) == text
