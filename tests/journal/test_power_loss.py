"""Power losses at random moments, sector by sector: what was synced is there, nothing else lies.

The model knows every bundle appended in the life that survived. After each crash it must
hold: a prefix of the bundles, at least up to the last sync, whole, in order, once; nothing
torn is called damage; and an offset given anew belongs to a new epoch.
"""

from __future__ import annotations

import random

import pytest

from malamute_py.journal import BatchTooLarge, JournalCorrupt, Recovery, Ring, RingSettings
from tests.journal.power import Disk
from tests.journal.rings import S, batch, read_all, records

SETTINGS = RingSettings(segment_bytes=S, ring_bytes=4 * S, index_interval_bytes=1024)
SEEDS = 100
STEPS = 80


class World:
    """A ring on a disk that fails, and what must be true of it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disk = Disk()
        self.epoch = 0
        self.bundles: list[tuple[int, list[tuple[int, int, bytes]]]] = []
        """(end LSN, [(stream, offset, body)]) of the life that survived, in order."""
        self.synced = 0
        self.serial = 0
        self.ring = self.open()

    def open(self) -> Ring:
        self.epoch += 1
        ring, recovery = self.open_ring()
        assert recovery.damages == (), recovery.damages
        assert recovery.unknown == ()
        assert recovery.end_lsn >= self.synced, "a confirmed bundle was dropped"
        kept = [bundle for bundle in self.bundles if bundle[0] <= recovery.end_lsn]
        assert recovery.end_lsn == (kept[-1][0] if kept else 0), "the end is no bundle's end"
        self.bundles = kept
        self.synced = recovery.end_lsn
        self.check(ring)
        return ring

    def open_ring(self) -> tuple[Ring, Recovery]:
        return Ring.open(self.disk, settings=SETTINGS, epoch=self.epoch)

    def check(self, ring: Ring) -> None:
        want: dict[int, list[tuple[int, bytes]]] = {}
        for _, bundle in self.bundles:
            for stream, offset, body in bundle:
                want.setdefault(stream, []).append((offset, body))
        for stream, pairs in want.items():
            first = ring.first_offset(stream)
            assert ring.next_offset(stream) == pairs[-1][0] + 1
            history = read_all(ring, stream)
            assert history.gaps == ()
            assert records(history) == pairs[first:]
        assert set(ring.streams()) <= set(want)

    def append(self) -> None:
        chance, ring = self.chance, self.ring
        bundle, batches = [], []
        nexts: dict[int, int] = {}
        for _ in range(chance.choice([1, 1, 1, 2, 5])):
            stream = chance.randrange(4)
            offset = nexts.get(stream, ring.next_offset(stream))
            self.serial += 1
            size = chance.choice([0, 10, 300, 3000, 25_000])
            body = b"%d:" % self.serial + chance.randbytes(size)
            batches.append(batch(ring, stream, [body], base=offset))
            bundle.append((stream, offset, body))
            nexts[stream] = offset + 1
        try:
            answer = ring.append(batches)
        except BatchTooLarge:
            return  # over more new segments than so small a ring allows; nothing was written
        self.bundles.append((answer.end_lsn, bundle))

    def step(self) -> None:
        move = self.chance.random()
        if move < 0.6:
            self.append()
        elif move < 0.78:
            self.synced = self.ring.sync()
        elif move < 0.9:
            self.ring.prepare_step(self.chance.choice([4096, 1 << 20]))
        elif move < 0.93:
            self.ring.close()
            self.synced = self.ring.synced_lsn
            self.ring = self.open()
        else:
            self.disk.crash(self.chance, power=self.chance.random() < 0.8)
            self.ring = self.open()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_was_synced_survives_and_nothing_else_lies(seed: int) -> None:
    run(seed)


def run_all(seeds: range) -> None:
    for seed in seeds:
        run(seed)


def run(seed: int) -> None:
    world = World(seed)
    for _ in range(STEPS):
        world.step()
    world.check(world.ring)


def test_the_model_catches_a_sync_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug must be found, or the test above proves nothing."""
    monkeypatch.setattr(Disk, "sync", lambda self, file: None)
    with pytest.raises((AssertionError, JournalCorrupt)):
        run_all(range(20))
