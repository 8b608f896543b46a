"""A recording is kept whole, and two are compared."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from perf.suite.compare import changes, compare
from perf.suite.results import Unreadable, load, placeless, rounded, save
from perf.suite.targets import OURS
from tests.perf.recorded import recording, runs


def test_what_was_saved_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    save(recording(), path)
    assert load(path) == recording()
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 99}'])
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(Unreadable):
        load(path)


def test_a_recording_of_another_schema_is_named_as_one(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(msgspec.json.encode({"schema": 99}))
    with pytest.raises(Unreadable, match="schema 99"):
        load(path)


def test_what_is_kept_names_no_folder_of_this_machine() -> None:
    folder = "/".join(["", "home", "ann", "checkout", ""])
    text = f'File "{folder}perf/x.py", at tcp://127.0.0.1:9797/a/b, see a/b/c and {folder}x'
    assert placeless(text) == 'File "x.py", at tcp://127.0.0.1:9797/a/b, see a/b/c and x'


def test_figures_are_kept_with_the_digits_that_mean_something() -> None:
    assert rounded({"a": 1234567.891, "b": 0.1234567}) == {"a": 1234570.0, "b": 0.123457}


def test_a_change_is_told_with_its_direction() -> None:
    now = recording()
    measured = now.of("one-to-one/140", OURS)
    assert measured is not None
    measured.runs = runs("records_s", 20e6, 21e6, 19e6)
    assert [(work, column) for work, column, _, _ in changes(recording(), now)] == [
        ("one-to-one/140", OURS)
    ]
    assert "better one-to-one/140" in compare(recording(), now)
    assert "WORSE  one-to-one/140" in compare(now, recording())
    assert "nothing changed" in compare(recording(), recording())
