"""Two versions of the code beside each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from perf import versions
from perf.versions import Outcome, Rates, outcome

ROOT = Path(versions.__file__).parents[1]


def test_the_ratio_is_that_of_pairs_and_not_of_the_two_medians() -> None:
    slowing = Rates([100.0, 10.0, 1.0], [])
    assert outcome(slowing, Rates([50.0, 5.0, 0.5], [])) == Outcome(0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Outcome(1.0, 0.9, 1.1), "no difference shown"),
        (Outcome(0.8, 0.7, 0.99), "slower"),
        (Outcome(1.2, 1.01, 1.3), "faster"),
    ],
)
def test_a_difference_is_told_where_the_quartiles_are_on_one_side(
    found: Outcome, words: str
) -> None:
    assert found.words == words


def test_a_folder_without_the_code_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(SystemExit, match="is no folder with the code"),
        versions.running(tmp_path, tmp_path / "data"),
    ):
        pass


@pytest.mark.moderate
def test_a_version_beside_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv",
        ["versions", str(ROOT), str(ROOT), "--calls", "request", "bulk", "--pairs", "2",
         "--seconds", "0.05", "--json"],
    )  # fmt: skip
    versions.main()
    request, bulk = map(json.loads, capsys.readouterr().out.splitlines())
    assert (request["call"], bulk["call"]) == ("request", "bulk")
    assert min(*bulk["calls_s"], *bulk["client_us"], bulk["ratio"]) > 0
    assert bulk["quartiles"][0] <= bulk["ratio"] <= bulk["quartiles"][1]
