"""Choosing faults: where a crash hits, what a power loss keeps, what rots.

Owns these choices for all scenarios. The rule: damage is only done where the promise still has an
answer: to batches that were synced and that a later, synced stamp proves to have been synced. (An
unsynced torn batch and a rotten last one look alike.)
"""

from __future__ import annotations

from random import Random

from tests.simulation.disk import SECTOR_BYTES, Disk
from tests.simulation.model import Bundle, Model
from tests.simulation.records import STAMP, STAMP_BYTES

PAGE_BYTES = 4096
"""Bytes that a failing read makes unreadable together."""


def power_mode(rng: Random) -> str:
    """Draw what a power loss keeps of unsynced data."""
    return rng.choice(("any", "any", "any", "prefix", "order", "none", "all"))


def plan_crash(disk: Disk, rng: Random) -> str:
    """Let the process die in the middle of a coming write or before a coming sync."""
    if rng.random() < 0.75:
        disk.crash_at_write = disk.writes + rng.randint(1, 12)
        return f"crash at write {disk.crash_at_write}"
    disk.crash_at_sync = disk.syncs + rng.randint(1, 4)
    return f"crash at sync {disk.crash_at_sync}"


def rot_something(disk: Disk, rng: Random, model: Model, ring: str) -> tuple[object, ...] | None:
    """Flip a bit of, or make unreadable, one batch that is proven to have been synced."""
    truth = model.ring(ring)
    proven = max((bundle.synced_hint for bundle in truth.bundles if bundle.promised), default=0)
    victims: list[Bundle] = [
        bundle
        for bundle in truth.bundles
        if bundle.end_lsn <= proven
        and bundle.promised
        and not bundle.damaged
        and all(number != 0 for number, _, _ in bundle.parts)
    ]
    if not victims:
        return None
    bundle = rng.choice(victims)
    which = rng.randrange(len(bundle.parts))
    place = find_batch(disk, ring, bundle.epoch, bundle.batch_lsns[which])
    if place is None:
        return None
    name, position, size = place
    inode = disk.inode(name)
    sectors = range(position // 512, (position + size - 1) // 512 + 1)
    if any(sector in inode.dirty for sector in sectors):
        return None
    bundle.damaged = True
    at = position + rng.randrange(size)
    if rng.random() < 0.3 and size > 3 * PAGE_BYTES:
        # A whole page inside the batch, so that its neighbours share none with it: below a page no
        # one can tell which bytes a failed read was about.
        first = (position // PAGE_BYTES + 1) * (PAGE_BYTES // SECTOR_BYTES)
        for sector in range(first, first + PAGE_BYTES // SECTOR_BYTES):
            disk.make_bad(name, sector)
        return ("bad page", name, first, bundle.parts)
    disk.rot(name, at, rng.randrange(8))
    return ("bit", name, at - position, bundle.parts)


def find_batch(disk: Disk, ring: str, epoch: int, lsn: int) -> tuple[str, int, int] | None:
    """Return (file, position, size) of a batch, found by its stamp's bytes."""
    needle = lsn.to_bytes(8, "little")
    for name, inode in sorted(disk.names.items()):
        if (ring and f"/{ring}/" not in name) or not name.endswith(".seg"):
            continue
        start = 0
        while (at := inode.live.find(needle, start)) >= 0:
            start = at + 1
            position = at - 16
            if position < 0 or position % 8 or position + STAMP_BYTES > inode.size:
                continue
            fields = STAMP.unpack_from(inode.live, position)
            if fields[0] == 0x31424C4D and fields[5] == lsn and fields[8] == epoch:
                return name, position, int(fields[13])
    return None
