"""A checkpoint that follows a ring through power losses: it misses nothing and sees no ghost.

The model is that of test_power_loss.py. The checkpoint is durable apart from the ring, as
SQLite is; it follows only what is synced, and may be late, killed between its commit and
the hold, or be all that lets a full ring go on. After each opening everything from the
checkpoint to the ring's end must be there to be followed, and equal the model.
"""

from __future__ import annotations

import pytest

from malamute_protocol.content import Content
from malamute_protocol.stamp import DATA, Stamp
from malamute_py.journal import Follower, FollowLost, JournalFull, Recovery, Ring
from malamute_py.journal.space import Space
from tests.journal.test_power_loss import SEEDS, SETTINGS, STEPS, World


def _is_data(stamp: Stamp) -> bool:
    return stamp.control_kind == DATA


class Followed(World):
    """The world, and a checkpoint that follows its ring."""

    def __init__(self, seed: int) -> None:
        self.checkpoint = 0
        self.refusals: set[str] = set()
        super().__init__(seed)

    def open(self) -> Ring:
        ring = super().open()
        ring.hold(self.checkpoint)
        self.check_followed(Follower(self.disk), ring.end_lsn)
        return ring

    def open_ring(self) -> tuple[Ring, Recovery]:
        return Ring.open(self.disk, settings=SETTINGS, epoch=self.epoch, held=True)

    def check_followed(self, follower: Follower, end: int) -> None:
        """What lies between the checkpoint and a bundle's end is there, once and in order."""
        got = []
        for stamp, view in follower.read(self.checkpoint, end, _is_data):
            blob, _, _ = Content(view).bodies()
            got.append((stamp.stream, stamp.base_offset, bytes(blob)))
        assert follower.position == end
        want = [bundle for at, bundle in self.bundles if self.checkpoint < at <= end]
        assert got == [record for bundle in want for record in bundle]

    def follow(self) -> None:
        chance = self.chance
        piece = chance.choice([1, 2000, 1 << 20])
        self.check_followed(Follower(self.disk, piece_bytes=piece), self.synced)
        self.checkpoint = self.synced
        if chance.random() < 0.2:
            return  # killed before the broker heard of it
        self.ring.hold(self.checkpoint)

    def append(self) -> None:
        try:
            super().append()
        except JournalFull as error:
            self.refusals.add(str(error).partition(" at position")[0])
            self.synced = self.ring.sync()
            self.follow()

    def step(self) -> None:
        if self.chance.random() < 0.08:
            self.follow()
        super().step()
        assert self.ring.start_lsn <= self.checkpoint
        assert self.ring.held_lsn is not None
        assert self.ring.held_lsn <= self.checkpoint


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_checkpoint_misses_nothing_that_was_synced_and_sees_nothing_else(seed: int) -> None:
    run(seed)


def run_all(seeds: range) -> list[Followed]:
    return [run(seed) for seed in seeds]


def run(seed: int) -> Followed:
    world = Followed(seed)
    for _ in range(STEPS):
        world.step()
    world.check(world.ring)
    world.check_followed(Follower(world.disk), world.ring.end_lsn)
    return world


def test_the_seeds_fill_the_ring_and_lap_it() -> None:
    worlds = run_all(range(20))
    assert {reason for world in worlds for reason in world.refusals} == {
        "the ring in a disk that may lose power is held by a checkpoint"
    }
    assert any(world.ring.start_lsn for world in worlds)


def test_the_model_catches_a_hold_that_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug must be found, or the tests above prove nothing."""
    monkeypatch.setattr(Space, "_held", lambda self, segment: False)
    with pytest.raises((AssertionError, FollowLost, ValueError)):
        run_all(range(20))
