"""A simulator that cannot fail is a defect: each planted bug must be caught."""

from __future__ import annotations

import pytest

from tests.simulation.plants import PLANTS
from tests.simulation.run import run_seed


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_caught(name: str) -> None:
    plant = PLANTS[name]
    for seed in range(plant.first, plant.first + plant.seeds):
        outcome = run_seed(plant.scenario, seed, plant=name)
        if outcome.code in plant.caught_as:
            assert f"SEED={seed}" in outcome.tell()
            assert f"--plant {name}" in outcome.tell()
            return
    pytest.fail(f"{plant.what}: not caught within {plant.seeds} seeds")


@pytest.mark.slow
def test_a_plant_is_gone_after_the_run() -> None:
    name = "truncates-too-much"
    plant = PLANTS[name]
    caught = next(
        seed
        for seed in range(plant.seeds)
        if run_seed(plant.scenario, seed, plant=name).code in plant.caught_as
    )
    assert not run_seed(plant.scenario, caught).code
