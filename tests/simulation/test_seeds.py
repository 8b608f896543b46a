"""Seeds: some hundreds in every run of the tests, and seeds that once failed for ever.

`make simulate` searches further. The rule: a failing seed says how to replay it, is mended, and
then frozen under frozen/ with the reason why it is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.seeds import slow
from tests.simulation.__main__ import main
from tests.simulation.clients_run import CUTS
from tests.simulation.run import BIASED, SCENARIOS, run_seed

FROZEN = sorted((Path(__file__).parent / "frozen").glob("*.json"))
CHUNK = 20
SEARCHED = {
    "journal": range(160), "broker": range(240), "removal": range(120), "keys": range(120),
    "transactions": range(60), "resets": range(60), "session": range(60), "work": range(60),
    "clients": range(100), "cuts": range(CUTS), "threads": range(60),
    # Each takes a second: every fourth cut of one story.
    "thread-cuts": range(CUTS, 2 * CUTS, 4), **dict.fromkeys(BIASED, range(CHUNK)),
}  # fmt: skip
"""Scenario -> seeds."""


def check(scenario: str, seeds: Iterable[int]) -> None:
    for seed in seeds:
        outcome = run_seed(scenario, seed)
        assert not outcome.code, outcome.tell()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "first"),
    [(scenario, first) for scenario, seeds in SEARCHED.items() for first in seeds[::CHUNK]],
)
def test_the_promises_of_a_scenario_are_kept_under_every_fault(scenario: str, first: int) -> None:
    seeds = SEARCHED[scenario]
    at = seeds.index(first)
    check(scenario, seeds[at : at + CHUNK])


@pytest.mark.moderate
@pytest.mark.parametrize("seed", [1001, *slow([1000, 1002, 1003, 1004])])
@pytest.mark.parametrize(
    "scenario", [*(name for name in SCENARIOS if name != "thread-cuts"), *slow(["thread-cuts"])]
)
def test_a_few_seeds_pass(scenario: str, seed: int) -> None:
    check(scenario, range(seed, seed + 1))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_same_seed_does_the_same(scenario: str) -> None:
    for seed in range(3):
        first, second = run_seed(scenario, seed), run_seed(scenario, seed)
        assert first.trace.digest() == second.trace.digest()
        assert first.trace.count == second.trace.count > 0


@pytest.mark.slow
def test_seeds_in_several_processes_tell_what_they_tell_in_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = []
    for jobs in ("1", "2"):
        asked = ["--scenario", "journal", "--seeds", "0..12", "--plant", "truncates-too-much"]
        assert main([*asked, "--keep-going", "--jobs", jobs]) == 1
        told.append(
            [line for line in capsys.readouterr().out.splitlines() if " a second" not in line]
        )
    assert told[0] == told[1]
    assert any("replay: make simulate SEED=" in line for line in told[0])


@pytest.mark.moderate
def test_different_seeds_do_different_things() -> None:
    digests = {run_seed("journal", seed).trace.digest() for seed in range(5)}
    assert len(digests) == 5


@pytest.mark.slow
@pytest.mark.parametrize("script", FROZEN, ids=lambda path: path.stem)
def test_what_failed_once_is_as_it_was_frozen(script: Path) -> None:
    frozen: dict[str, Any] = json.loads(script.read_text(encoding="utf-8"))
    outcome = run_seed(frozen["scenario"], frozen["seed"], steps=frozen.get("steps", 0))
    assert outcome.code == frozen["expect"], f"{frozen['why']}\n{outcome.tell()}"
