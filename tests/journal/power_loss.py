"""`python -m tests.journal.power_loss --images 10000`: disks that lost power, opened and checked.

Owns worlds of a ring, alone or with a checkpoint that follows it, on a disk in memory that loses
power at random moments, also amid an operation and amid the opening after an earlier loss, sector
by sector. The model knows every bundle appended in the life that survived. After each loss it must
hold: a prefix of the bundles, at least up to the last sync, whole, in order, once; nothing
torn is called damage; an offset given anew belongs to a new epoch; and of what lies between the
checkpoint and the end a follower misses nothing and sees nothing else. The checkpoint is durable
apart from the ring, as SQLite is; it follows only what is synced, and may be late, killed between
its commit and the hold, or be all that lets a full ring go on.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Final
from unittest.mock import patch

from malamute_protocol.content import Content
from malamute_protocol.stamp import DATA, Stamp
from malamute_py.cli.progress import Progress
from malamute_py.journal import (
    BatchTooLarge,
    Follower,
    JournalFull,
    Recovery,
    Ring,
    RingSettings,
)
from malamute_py.journal.check import FoundBatch
from malamute_py.journal.storage import File
from tests.journal.power import Disk, PowerLost
from tests.journal.rings import S, batch, read_all, records

SETTINGS: Final = RingSettings(segment_bytes=S, ring_bytes=4 * S, index_interval_bytes=1024)
STEPS: Final = 80
"""Steps of a world's life."""
FORKS: Final = 5
"""Disks that the runner makes of each loss: each keeps other sectors, and one of them goes on."""
EVERY: Final = 1_000
"""Images between two lines of a run without a terminal."""

Records = list[tuple[int, int, bytes]]
"""(stream, offset, body) of a bundle."""


class World:
    """A ring on a disk that fails, and what must be true of it."""

    name = "journal"

    def __init__(self, seed: int, forks: int = 1) -> None:
        """forks: disks that are made of each loss."""
        self.chance = random.Random(seed)
        self.forks = forks
        self.images = 0
        """Disks that have lost power and were opened and checked."""
        self.losses = 0
        self.amid = 0
        """Losses amid an operation, the opening after another loss among them."""
        self.disk = Disk()
        self.epoch = 0
        self.bundles: list[tuple[int, Records]] = []
        """(end LSN, what it holds) of the life that survived, in order."""
        self.begun: Records = []
        """A bundle amid whose append the power was lost: it is there as a whole, or not at all."""
        self.synced = 0
        self.serial = 0
        self.ring = self.open()

    def open(self) -> Ring:
        """Open the ring and compare it with the model. Raises PowerLost."""
        self.epoch += 1
        ring, recovery = self.open_ring()
        assert recovery.damages == (), recovery.damages
        assert recovery.unknown == ()
        assert recovery.end_lsn >= self.synced, "a confirmed bundle was dropped"
        if self.begun and recovery.end_lsn > (self.bundles[-1][0] if self.bundles else 0):
            self.bundles.append((recovery.end_lsn, self.begun))
        self.begun = []
        kept = [bundle for bundle in self.bundles if bundle[0] <= recovery.end_lsn]
        assert recovery.end_lsn == (kept[-1][0] if kept else 0), "the end is no bundle's end"
        self.bundles = kept
        self.synced = recovery.end_lsn
        self.check(ring)
        return ring

    def open_ring(self) -> tuple[Ring, Recovery]:
        return self._opened()

    def _opened(self, *, held: bool = False) -> tuple[Ring, Recovery]:
        return Ring.open(
            self.disk, settings=SETTINGS, epoch=self.epoch, held=held,
            entropy=self.chance.randbytes,
        )  # fmt: skip

    def check(self, ring: Ring) -> None:
        """Check that the ring serves exactly the records that the model has."""
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

    # --- what happens --------------------------------------------------------------------------

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
        self.begun = bundle
        try:
            answer = ring.append(batches)
        except (BatchTooLarge, JournalFull) as error:
            self.begun = []
            if isinstance(error, JournalFull):
                raise
            return  # over more new segments than so small a ring allows; nothing was written
        self.begun = []
        self.bundles.append((answer.end_lsn, bundle))

    def sync(self) -> None:
        self.synced = self.ring.sync()

    def close_and_open(self) -> None:
        self.ring.close()
        self.synced = self.ring.synced_lsn
        self.ring = self.open()

    def step(self) -> None:
        move = self.chance.random()
        if move < 0.6:
            self.interruptible(self.append)
        elif move < 0.78:
            self.interruptible(self.sync)
        elif move < 0.9:
            size = self.chance.choice([4096, 1 << 20])
            self.interruptible(lambda: self.ring.prepare_step(size))
        elif move < 0.93:
            self.interruptible(self.close_and_open)
        elif self.chance.random() < 0.8:
            self.lose_power()
        else:
            self.ring = self.open()

    def interruptible(self, act: Callable[[], object]) -> None:
        """Do something; now and then the power is lost before one of its changes of the disk."""
        if self.chance.random() < 0.05:
            self.disk.changes_left = self.chance.randint(0, 4)
        try:
            act()
        except PowerLost:
            self.amid += 1
            self.lose_power()
        self.disk.changes_left = None

    def lose_power(self) -> None:
        """Make disks of what was not synced, open and check each; the last one goes on."""
        self.losses += 1
        disk, bundles, begun, synced = self.disk, self.bundles, self.begun, self.synced
        for left in reversed(range(self.forks)):
            self.disk = disk.copy() if left else disk
            self.bundles, self.begun, self.synced = list(bundles), begun, synced
            self.open_after_loss()

    def open_after_loss(self) -> None:
        """Lose power, and perhaps again while the ring is opened, until it is open."""
        while True:
            self.disk.changes_left = None
            self.disk.crash(self.chance, power=True)
            if self.chance.random() < 0.15:
                self.disk.changes_left = self.chance.randint(0, 12)
            try:
                self.ring = self.open()
            except PowerLost:
                self.amid += 1
                continue
            self.disk.changes_left = None
            self.images += 1
            return

    def run(self) -> None:
        """Live to the end. Raises what was found."""
        for _ in range(STEPS):
            self.step()
        self.check(self.ring)


class Followed(World):
    """The world, and a checkpoint that follows its ring."""

    name = "checkpoint"

    def __init__(self, seed: int, forks: int = 1) -> None:
        self.checkpoint = 0
        self.refusals: set[str] = set()
        super().__init__(seed, forks)

    def open(self) -> Ring:
        ring = super().open()
        ring.hold(self.checkpoint)
        self.check_followed(Follower(self.disk), ring.end_lsn)
        return ring

    def open_ring(self) -> tuple[Ring, Recovery]:
        return self._opened(held=True)

    def check_followed(self, follower: Follower, end: int) -> None:
        """Check that a follower reads checkpoint to bundle's end, each record once and in order."""
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
            self.sync()
            self.follow()

    def step(self) -> None:
        if self.chance.random() < 0.08:
            self.interruptible(self.follow)
        super().step()
        assert self.ring.start_lsn <= self.checkpoint
        assert self.ring.held_lsn is not None
        assert self.ring.held_lsn <= self.checkpoint

    def run(self) -> None:
        super().run()
        self.check_followed(Follower(self.disk), self.ring.end_lsn)


def _is_data(stamp: Stamp) -> bool:
    return stamp.control_kind == DATA


WORLDS: Final = {world.name: world for world in (World, Followed)}

# --- planted bugs --------------------------------------------------------------------------------


def _syncs_nothing() -> contextlib.AbstractContextManager[object]:
    return patch.object(Disk, "sync", lambda self, file: None)


def _syncs_no_segment() -> contextlib.AbstractContextManager[object]:
    synced = Disk.sync

    def sync(self: Disk, file: File) -> None:
        if not file.name.endswith(".seg"):
            synced(self, file)

    return patch.object(Disk, "sync", sync)


def _takes_torn_batches() -> contextlib.AbstractContextManager[object]:
    return patch.object(FoundBatch, "content_good", property(lambda self: True))


PLANTS: Final = {
    "syncs-nothing": _syncs_nothing,
    "syncs-no-segment": _syncs_no_segment,
    "takes-torn-batches": _takes_torn_batches,
}
"""Name -> a bug that a run must find."""

# --- the run -------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """0: nothing was found; 1: something was, and the command that repeats it is printed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.journal.power_loss",
        description="Make disks that lost power, open each, and compare it with what was synced.",
    )
    parser.add_argument("--images", type=int, default=1_000, help="disks to be made, at least")
    parser.add_argument("--seed", type=int, default=0, help="of the first world; the next is +1")
    parser.add_argument("--of", choices=(*WORLDS, "both"), default="both", help="what is on them")
    parser.add_argument("--keep-going", action="store_true", help="go on behind a find")
    parser.add_argument("--plant", choices=tuple(PLANTS), help="run with a planted bug")
    given = parser.parse_args(arguments)
    with PLANTS[given.plant]() if given.plant else contextlib.nullcontext():
        return _search(given)


def _search(given: argparse.Namespace) -> int:
    began, images, worlds, finds = time.monotonic(), 0, 0, 0
    told = EVERY
    with Progress("images", total=given.images) as progress:
        for name, seed in _worlds(given.of, given.seed):
            world, found = _lived(name, seed)
            worlds += 1
            images += world
            progress.update(min(images, given.images), f"{name} {seed}, {finds} finds")
            if found:
                finds += 1
                more = f" --plant {given.plant}" if given.plant else ""
                again = f"python -m tests.journal.power_loss --images 1 --of {name} --seed {seed}"
                progress.stop()
                print(f"{name} {seed}: {found}\nagain: {again}{more}", flush=True)
                if not given.keep_going:
                    break
            if images >= told and not progress.shown:
                told = images - images % EVERY + EVERY
                print(f"{images:,} images, {worlds} worlds, {finds} finds", flush=True)
            if images >= given.images:
                break
    took = time.monotonic() - began
    print(
        f"{images:,} images of {worlds} worlds, seeds {given.seed} to {seed}, of {given.of}; "
        f"{finds} finds; {took:.0f} s"
    )
    return 1 if finds else 0


def _worlds(of: str, seed: int) -> Iterator[tuple[str, int]]:
    while True:
        for name in WORLDS if of == "both" else (of,):
            yield name, seed
        seed += 1


def _lived(name: str, seed: int) -> tuple[int, str]:
    """Live one world; returns its images and, when something was found, the end of its trace."""
    world: World | None = None
    try:
        world = WORLDS[name](seed, FORKS)
        world.run()
    except Exception:  # noqa: BLE001 - whatever the journal raises is a find
        return world.images if world else 0, traceback.format_exc(limit=-3, chain=False)
    return world.images, ""


if __name__ == "__main__":
    sys.exit(main())
