"""A checkpoint that follows a ring through power losses: it misses nothing and sees no ghost.

The worlds and their model are those of power_loss.py, which makes as many more as are asked for.
"""

from __future__ import annotations

import pytest

from malamute_py.journal import FollowLost
from malamute_py.journal.space import Space
from tests.journal.power_loss import Followed
from tests.journal.test_power_loss import SEEDS
from tests.seeds import seeds, slow


@pytest.mark.parametrize("seed", seeds(12, SEEDS))
def test_a_checkpoint_misses_nothing_that_was_synced_and_sees_nothing_else(seed: int) -> None:
    Followed(seed).run()


def run_all(seeds: range) -> list[Followed]:
    worlds = [Followed(seed) for seed in seeds]
    for world in worlds:
        world.run()
    return worlds


@pytest.mark.moderate
@pytest.mark.parametrize("count", [5, *slow([20])])
def test_the_seeds_fill_the_ring_and_lap_it(count: int) -> None:
    worlds = run_all(range(count))
    assert {reason for world in worlds for reason in world.refusals} == {
        "the ring in a disk that may lose power is held by a checkpoint"
    }
    assert any(world.ring.start_lsn for world in worlds)


def test_the_model_catches_a_hold_that_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug must be found, or the tests above prove nothing."""
    monkeypatch.setattr(Space, "_held", lambda self, segment: False)
    with pytest.raises((AssertionError, FollowLost, ValueError)):
        run_all(range(20))
