"""A data directory with its rings, and the log that hides it all."""

from __future__ import annotations

from pathlib import Path

import pytest

from malamute_py.journal import (
    Journal,
    JournalCorrupt,
    JournalLocked,
    Log,
    MemoryStorage,
    RingSettings,
    Storage,
)
from malamute_py.journal.layout import segment_name
from malamute_py.journal.storage import FileStorage, replace_file
from tests.journal.rings import SMALL, S, everything, put


@pytest.fixture(params=["file", "memory"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return FileStorage(tmp_path / "data") if request.param == "file" else MemoryStorage()


def test_the_epoch_rises_and_the_uuids_stay(where: Storage) -> None:
    journal = Journal.open(where)
    uuid, first = journal.uuid, journal.epoch
    ring, _ = journal.ring("main", SMALL)
    ring_uuid = ring.uuid
    put(ring, 1, b"a")
    journal.close()
    journal = Journal.open(where)
    assert journal.uuid == uuid
    assert (journal.epoch, journal.openings) == (first + 1, 2)
    ring, recovery = journal.ring("main", SMALL)
    assert ring.uuid == ring_uuid
    assert recovery.clean
    assert everything(ring, 1) == [(0, b"a")]
    journal.close()
    journal = Journal.open(where, epoch=50)
    assert (journal.epoch, journal.openings) == (50, 3)
    journal.close()
    with pytest.raises(ValueError, match="must be above 50"):
        Journal.open(where, epoch=50)
    Journal.open(where).close()


@pytest.mark.moderate
def test_rings_have_any_name_and_are_found_again(where: Storage) -> None:
    names = ["main", "orders/eu", "größe", "..", ".hidden", "a b%c~{tag}"]
    journal = Journal.open(where)
    for number, name in enumerate(names):
        ring, _ = journal.ring(name, SMALL)
        put(ring, 1, b"%d" % number)
    journal.memory_ring("memory only", SMALL)
    journal.close()
    journal = Journal.open(where)
    assert sorted(journal.names()) == sorted(names)
    for number, name in enumerate(names):
        ring, _ = journal.ring(name, SMALL)
        assert everything(ring, 1) == [(0, b"%d" % number)]
    assert journal.unknown == ()
    journal.close()
    with pytest.raises(ValueError, match="name"):
        journal.ring("", SMALL)


def test_a_second_opener_is_told_who_has_the_directory(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    with pytest.raises(JournalLocked, match="stop that broker, or choose another"):
        Journal.open(tmp_path)
    journal.close()
    Journal.open(tmp_path).close()


def test_what_is_not_ours_is_named(where: Storage) -> None:
    Journal.open(where).close()
    replace_file(where, "lost+found.txt", b"")
    where.child("pictures")
    journal = Journal.open(where)
    assert sorted(entry.file for entry in journal.unknown) == ["lost+found.txt", "pictures/"]
    journal.close()


@pytest.mark.parametrize("name", ["journal", "epoch"])
@pytest.mark.parametrize("fate", ["damaged", "missing"])
def test_a_lost_identity_or_epoch_is_never_guessed(where: Storage, name: str, fate: str) -> None:
    journal = Journal.open(where)
    journal.ring("main", SMALL)
    journal.close()
    if fate == "missing":
        where.remove(name)
    else:
        where.write(where.open(name), 18, [b"\xff"])
    # Nothing else says the same: neither the manifests nor, for the identity, the epoch.
    manifests = where.child("manifest")
    for manifest in manifests.names():
        manifests.remove(manifest)
    if name == "journal":
        where.remove("epoch")
    with pytest.raises(JournalCorrupt, match="restore"):
        Journal.open(where)


def test_a_failed_sync_is_noted_beside_the_ring_and_not_in_it(tmp_path: Path) -> None:
    import errno

    from malamute_py.journal import JournalFailed
    from tests.journal.rings import Faulty

    journal = Journal.open(tmp_path)
    ring, _ = journal.ring("main", SMALL)
    put(ring, 1, b"a")
    faulty = Faulty(ring._storage)
    faulty.fail["sync"] = OSError(errno.EIO, "gone")
    ring._storage = faulty
    with pytest.raises(JournalFailed):
        ring.sync()
    assert (tmp_path / "failed" / "main").exists()
    with pytest.raises(JournalFailed):
        journal.close()
    journal = Journal.open(tmp_path)
    ring, recovery = journal.ring("main", SMALL)
    assert recovery.rewritten
    assert everything(ring, 1) == [(0, b"a")]
    assert not (tmp_path / "failed" / "main").exists()
    journal.close()


# --- the log ---------------------------------------------------------------------------


class Clock:
    now = 1000

    def __call__(self) -> int:
        return self.now


def test_the_log_is_an_array_of_records(where: Storage) -> None:
    clock = Clock()
    with Log.open(where, SMALL, clock) as log:
        assert (log.first_offset, log.next_offset, len(log)) == (0, 0, 0)
        assert log.append(b"a") == 0
        clock.now = 2000
        assert log.append(b"b", b"", b"c") == 1
        log.sync()
        assert [log.read(offset) for offset in range(4)] == [b"a", b"b", b"", b"c"]
        assert log.closest_offset(1001) == 1
        assert log.closest_offset(2001) == 4
        assert list(log.records(2)) == [(2, b""), (3, b"c")]
        with pytest.raises(IndexError, match="holds 0 to 4"):
            log.read(4)
    with Log.open(where, clock=clock) as log:
        assert log.recovery.clean
        assert list(log.records()) == [(0, b"a"), (1, b"b"), (2, b""), (3, b"c")]
        assert log.remove_before(2000) == 1
        with pytest.raises(IndexError):
            log.read(0)
        assert log.append(b"d") == 4
        assert len(log) == 4


@pytest.mark.moderate
def test_the_log_can_be_limited_in_bytes_and_tells_its_bytes_on_disk(where: Storage) -> None:
    settings = RingSettings(segment_bytes=S, ring_bytes=20 * S, index_interval_bytes=0)
    with Log.open(where, settings) as log:
        for _ in range(30):
            log.append(bytes(30_000))
        assert log.bytes_on_disk() >= 15 * S
        first = log.limit_bytes(100_000)
        assert first == 27
        log.sync()
        log.limit_bytes(100_000)
        assert log.bytes_on_disk() <= 4 * S
        assert [offset for offset, _ in log.records()] == [27, 28, 29]


def test_records_come_up_to_one_that_is_damaged(where: Storage) -> None:
    with Log.open(where, SMALL) as log:
        for number in range(5):
            log.append(b"record %d" % number)
        segment = where.child("rings").child("log")
        file = segment.open(segment_name(0))
        at = segment.read(file, 0, S).index(b"record 3")
        segment.write(file, at, [b"RECORD"])
        with pytest.raises(JournalCorrupt, match="records 3 to 4: damaged"):
            list(log.records())
        records = log.records()
        assert [next(records) for _ in range(3)] == [(n, b"record %d" % n) for n in range(3)]
        assert log.read(4) == b"record 4"


def test_records_that_are_given_up_meanwhile_are_left_out() -> None:
    with Log.in_memory(RingSettings(segment_bytes=S, ring_bytes=64 * S)) as log:
        for number in range(50):
            log.append(bytes([number]) * 60_000)
        records = log.records()
        next(records)
        log.limit_bytes(4 * S)
        left = log.first_offset
        assert left > 20
        offsets = [offset for offset, _ in records]
        assert offsets[-1] == 49
        assert set(range(left, 50)) <= set(offsets)


def test_a_log_in_memory_is_the_same() -> None:
    with Log.in_memory() as log:
        for number in range(1000):
            log.append(b"%d" % number)
        assert log.read(500) == b"500"
        assert len(list(log.records())) == 1000


@pytest.mark.moderate
def test_a_lost_epoch_can_be_given_but_not_below_what_a_ring_has_seen(tmp_path: Path) -> None:
    with Log.open(tmp_path) as log:
        log.append(b"a")
    with Log.open(tmp_path) as log:
        log.append(b"b")
    (tmp_path / "epoch").unlink()
    (tmp_path / "manifest" / "log").unlink()
    with pytest.raises(JournalCorrupt, match="give an epoch above"):
        Journal.open(tmp_path)
    low = Journal.open(tmp_path, epoch=2)
    with pytest.raises(ValueError, match="above 2"):
        low.ring("log")
    low.close()
    high = Journal.open(tmp_path, epoch=7)
    ring, _ = high.ring("log")
    assert ring.next_offset(1) == 2
    high.close()
