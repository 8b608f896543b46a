"""Power losses at random moments, sector by sector: what was synced is there, nothing else lies.

The worlds and their model are those of power_loss.py, which makes as many more as are asked for.
"""

from __future__ import annotations

import shlex

import pytest

from malamute_py.journal import JournalCorrupt
from tests.journal.power import Disk
from tests.journal.power_loss import PLANTS, World, main
from tests.seeds import seeds

SEEDS = 100


@pytest.mark.parametrize("seed", seeds(12, SEEDS))
def test_what_was_synced_survives_and_nothing_else_lies(seed: int) -> None:
    World(seed).run()


def run_all(seeds: range, *, forks: int = 1) -> list[World]:
    worlds = [World(seed, forks) for seed in seeds]
    for world in worlds:
        world.run()
    return worlds


@pytest.mark.slow
def test_the_seeds_lose_power_amid_operations_and_amid_the_opening_after_a_loss() -> None:
    worlds = run_all(range(8), forks=3)
    losses = sum(world.losses for world in worlds)
    assert sum(world.amid for world in worlds) > 8
    assert sum(world.images for world in worlds) >= 3 * losses > 30
    assert sum(world.epoch for world in worlds) > sum(world.images for world in worlds)


def test_the_model_catches_a_sync_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug must be found, or the test above proves nothing."""
    monkeypatch.setattr(Disk, "sync", lambda self, file: None)
    with pytest.raises((AssertionError, JournalCorrupt)):
        run_all(range(20))


@pytest.mark.moderate
def test_a_run_makes_the_images_that_were_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--images", "60"]) == 0
    images, _, rest = capsys.readouterr().out.splitlines()[-1].partition(" ")
    assert int(images) >= 60
    assert "0 finds" in rest


@pytest.mark.moderate
@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("of", ["journal", "checkpoint"])
def test_a_run_finds_a_planted_bug_and_prints_the_command_that_finds_it_again(
    plant: str, of: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--images", "500", "--of", of, "--plant", plant]) == 1
    out = capsys.readouterr().out
    (again,) = [line for line in out.splitlines() if line.startswith("again: ")]
    found = out.partition("again: ")[0]
    program = "again: python -m tests.journal.power_loss "
    assert main(shlex.split(again.removeprefix(program))) == 1
    assert capsys.readouterr().out.startswith(found)
