"""The simulated disk does what its fault model says: no more, and no less."""

from __future__ import annotations

from random import Random

import pytest

from malamute_py.journal.errors import DiskFull, JournalLocked
from tests.simulation.disk import SECTOR_BYTES, CrashNow, Disk
from tests.simulation.storage import SimulatedStorage


def storage() -> SimulatedStorage:
    return SimulatedStorage(Disk())


def lose_power(disk: SimulatedStorage, mode: str = "none", seed: int = 0) -> None:
    disk.disk.power_loss(Random(seed), mode)


def content(disk: SimulatedStorage, name: str) -> bytes:
    file = disk.open(name)
    return disk.read(file, 0, file.size)


def written(data: bytes) -> SimulatedStorage:
    """A disk with one durable file of zeros, over which `data` was written."""
    disk = storage()
    file = disk.create("a", 8 * SECTOR_BYTES)
    disk.sync(file)
    disk.sync_directory()
    disk.write(file, 0, [data])
    return disk


def test_process_death_keeps_what_was_written() -> None:
    disk = written(b"new")
    disk.disk.crash()
    assert content(disk, "a").startswith(b"new")


def test_power_loss_takes_what_was_not_synced() -> None:
    disk = written(b"new")
    lose_power(disk)
    assert content(disk, "a") == bytes(8 * SECTOR_BYTES)


def test_a_synced_write_survives_every_power_loss() -> None:
    for seed in range(50):
        disk = written(b"new" * 1000)
        disk.sync(disk.open("a"))
        lose_power(disk, ("any", "none", "prefix", "order", "all")[seed % 5], seed)
        assert content(disk, "a").startswith(b"new" * 1000)


def test_power_loss_keeps_any_subset_of_sectors_and_whole_ones() -> None:
    kept = set()
    for seed in range(200):
        disk = written(b"x" * (3 * SECTOR_BYTES))
        lose_power(disk, "any", seed)
        sectors = [
            content(disk, "a")[at : at + SECTOR_BYTES]
            for at in range(0, 3 * SECTOR_BYTES, SECTOR_BYTES)
        ]
        assert all(set(sector) in ({0}, {120}) for sector in sectors)
        kept.add(tuple(sector[0] != 0 for sector in sectors))
    assert len(kept) == 8


def test_a_created_name_needs_the_directory_synced() -> None:
    disk = storage()
    disk.sync(disk.create("a", 100))
    lose_power(disk)
    assert disk.names() == []


def test_a_rename_is_atomic_under_every_power_loss() -> None:
    for seed in range(50):
        disk = storage()
        for name in ("old", "new"):
            file = disk.create(name, 3)
            disk.write(file, 0, [name.encode()])
            disk.sync(file)
        disk.sync_directory()
        disk.rename("new", "old")
        lose_power(disk, "any", seed)
        assert disk.names() in (["new", "old"], ["old"])
        assert content(disk, "old") in (b"old", b"new")


def test_a_truncated_tail_may_come_back() -> None:
    disk = written(b"tail")
    disk.sync(disk.open("a"))
    disk.create("a", 0)
    lose_power(disk, "none")
    assert content(disk, "a").startswith(b"tail")


def test_a_failed_sync_marks_pages_clean_that_never_reached_the_disk() -> None:
    lost = 0
    for seed in range(20):
        disk = written(b"new" * 500)
        disk.disk.rng = Random(seed)
        disk.disk.fail_syncs = 1
        with pytest.raises(OSError, match="Input/output"):
            disk.sync(disk.open("a"))
        disk.sync(disk.open("a"))
        assert content(disk, "a").startswith(b"new" * 500)
        lose_power(disk, "all")
        lost += not content(disk, "a").startswith(b"new" * 500)
    assert lost


def test_a_full_disk_refuses_and_leaves_no_file() -> None:
    disk = SimulatedStorage(Disk(capacity=1000))
    with pytest.raises(DiskFull):
        disk.create("a", 2000)
    assert disk.names() == []


def test_a_bad_sector_fails_reads_until_it_is_written() -> None:
    disk = written(b"data")
    disk.disk.make_bad("a", 0)
    with pytest.raises(OSError, match="Input/output"):
        disk.read(disk.open("a"), 0, 10)
    assert disk.read(disk.open("a"), SECTOR_BYTES, 10) == bytes(10)
    disk.write(disk.open("a"), 0, [b"again"])
    assert disk.read(disk.open("a"), 0, 5) == b"again"


def test_a_crash_cuts_the_write_that_was_under_way() -> None:
    cuts = set()
    for seed in range(50):
        disk = written(b"")
        disk.disk.rng = Random(seed)
        disk.disk.crash_at_write = disk.disk.writes + 1
        with pytest.raises(CrashNow):
            disk.write(disk.open("a"), 0, [b"x" * 100])
        disk.disk.crash()
        cuts.add(content(disk, "a").rstrip(b"\0").count(b"x"))
    assert len(cuts) > 10


def test_the_lock_keeps_a_second_opener_out_and_dies_with_its_process() -> None:
    disk = storage()
    disk.lock("lock")
    with pytest.raises(JournalLocked):
        disk.lock("lock")
    disk.disk.crash()
    disk.lock("lock").release()
    disk.lock("lock")
