"""Two versions of the code beside each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from perf import versions
from perf.versions import Outcome, Rates, outcome

ROOT = Path(versions.__file__).parents[1]


def rates(*calls_s: float) -> Rates:
    return Rates(list(calls_s), [], [])


def test_the_ratio_is_that_of_pairs_and_not_of_the_two_medians() -> None:
    half = rates(100, 10, 1), rates(50, 5, 0.5)
    assert outcome([half, half]) == Outcome(0.5, 0.5, 0.5, 0)


def test_a_start_counts_once_however_many_pairs_it_has() -> None:
    """One start of the same code is faster than another, for as long as it runs."""
    starts = [(rates(1, 1, 1, 1), rates(3, 3, 3, 3)), (rates(1), rates(1)), (rates(1), rates(1))]
    assert outcome(starts) == Outcome(1, 1, 2, 1 / 3)


@pytest.mark.parametrize(
    ("faster", "words"),
    [
        (0, "slower"), (1 / 8, "slower"), (2 / 8, "no difference shown"),
        (6 / 8, "no difference shown"), (7 / 8, "faster"), (1, "faster"),
    ],
)  # fmt: skip
def test_a_difference_is_told_where_seven_of_eight_starts_have_it(
    faster: float, words: str
) -> None:
    assert Outcome(1, 1, 1, faster).words == words


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
        ["versions", str(ROOT), str(ROOT), "--calls", "request", "bulk", "--starts", "2",
         "--pairs", "1", "--seconds", "0.05", "--pause", "0", "--json"],
    )  # fmt: skip
    versions.main()
    request, bulk = map(json.loads, capsys.readouterr().out.splitlines())
    assert (request["call"], bulk["call"]) == ("request", "bulk")
    assert min(*bulk["calls_s"], *bulk["client_us"], bulk["ratio"]) > 0
    assert len(bulk["broker_us"]) == 2
    assert bulk["quartiles"][0] <= bulk["ratio"] <= bulk["quartiles"][1]
