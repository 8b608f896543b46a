"""Sealed segments read through mappings: what is mapped, for how long, and what a fault does."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from malamute_py.journal import FileStorage, History, Journal, MemoryStorage, Ring, RingSettings
from malamute_py.journal.directory import EPOCH_FILE
from malamute_py.journal.layout import segment_name
from malamute_py.journal.mapping import FilePart, Mappings, Part, populate_again, why_unmapped
from malamute_py.journal.storage import File, Storage
from tests.journal.rings import Faulty, put, records

S = 1 << 18
BODY = 30_000
SETTINGS = RingSettings(segment_bytes=S, ring_bytes=4 * S)


def ring_of(storage: Storage, mappings: Mappings | None, settings: RingSettings = SETTINGS) -> Ring:
    ring, _ = Ring.open(storage, settings=settings, epoch=1, mappings=mappings)
    return ring


def body(offset: int) -> bytes:
    return offset.to_bytes(4, "little") * (BODY // 4)


def fill(ring: Ring, count: int) -> None:
    """Append records of 30 kB, eight a segment; all but the newest segment are sealed then."""
    for _ in range(count):
        put(ring, 1, body(ring.next_offset(1)))
    ring.sync()
    while ring.prepare_step(S):
        pass


def is_right(history: History) -> bool:
    return all(found == body(offset) for offset, found in records(history))


def lost(history: History) -> list[int]:
    assert {gap.code for gap in history.gaps} <= {"damaged"}
    return [n for gap in history.gaps for n in range(gap.from_offset, gap.to_offset)]


def test_sealed_segments_are_mapped_as_long_as_a_holder_has_their_bytes(tmp_path: Path) -> None:
    mappings = Mappings()
    ring = ring_of(FileStorage(tmp_path), mappings)
    fill(ring, 20)
    held = ring.read(1, 0, 20, 1 << 30)
    assert len(records(held)) == 20
    assert is_right(held)
    mapped = [run for run in held.runs if isinstance(memoryview(run.data).obj, FilePart)]
    assert len(mapped) == len(mappings) == 2, "and the newest segment is not"
    del held, mapped
    assert not len(mappings)


def test_what_is_mapped_cannot_be_written_through(tmp_path: Path) -> None:
    ring = ring_of(FileStorage(tmp_path), Mappings())
    fill(ring, 20)
    assert ring.read(1, 0, 8, 1 << 30).runs[0].data.readonly


def test_small_reads_are_copies(tmp_path: Path) -> None:
    mappings = Mappings()
    ring = ring_of(FileStorage(tmp_path), mappings)
    fill(ring, 20)
    held = ring.read(1, 0, 2, 1)
    assert held.runs
    assert not len(mappings)


def test_beyond_a_number_of_parts_reads_are_copies(tmp_path: Path) -> None:
    mappings = Mappings(parts_max=1)
    ring = ring_of(FileStorage(tmp_path), mappings)
    fill(ring, 20)
    held = [ring.read(1, 0, 20, 1 << 30) for _ in range(3)]
    assert len(mappings) == 1
    assert all(len(records(each)) == 20 and is_right(each) for each in held)


@pytest.mark.moderate
def test_bytes_that_a_peer_has_not_taken_stay_while_the_ring_laps_several_times(
    tmp_path: Path,
) -> None:
    ring = ring_of(FileStorage(tmp_path), Mappings())
    fill(ring, 20)
    inodes = {path.stat().st_ino for path in tmp_path.glob("*.seg")}
    held = [ring.read(1, 0, 20, 1 << 30)]
    for _ in range(6):
        fill(ring, 10)
        first, after = ring.first_offset(1), ring.next_offset(1)
        held.append(ring.read(1, first, after, 1 << 30))
    assert ring.first_offset(1) > 30
    assert len(records(held[0])) == 20
    assert all(map(is_right, held))
    left = {path.stat().st_ino for path in tmp_path.glob("*.seg")}
    assert inodes & left, "files are used again although bytes of them are held"
    assert len(left) <= SETTINGS.ring_bytes // S


@pytest.mark.moderate
def test_a_file_whose_bytes_cannot_get_memory_is_removed_instead_of_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = ring_of(FileStorage(tmp_path), Mappings())
    fill(ring, 20)
    held = ring.read(1, 0, 20, 1 << 30)

    def detach(_: FilePart) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(FilePart, "detach", detach)
    fill(ring, 60)
    assert len(records(held)) == 20
    assert is_right(held)
    assert ring.first_offset(1) > 20
    assert is_right(ring.read(1, ring.first_offset(1), ring.next_offset(1), 1 << 30))
    assert len(list(tmp_path.glob("*.seg"))) <= SETTINGS.ring_bytes // S
    ring.close()
    again, recovery = Ring.open(FileStorage(tmp_path), settings=SETTINGS, epoch=2)
    assert not recovery.damages
    assert again.next_offset(1) == 80


def test_what_is_held_of_a_removed_ring_has_memory_of_its_own(tmp_path: Path) -> None:
    ring = ring_of(FileStorage(tmp_path), Mappings())
    fill(ring, 20)
    held = ring.read(1, 0, 8, 1 << 30)
    ring.detach()
    with (tmp_path / segment_name(0)).open("r+b") as file:
        file.write(bytes(S))
    assert len(records(held)) == 8
    assert is_right(held)


def test_a_file_that_was_cut_off_is_damage_and_no_signal(tmp_path: Path) -> None:
    ring = ring_of(FileStorage(tmp_path), Mappings())
    fill(ring, 20)
    os.truncate(tmp_path / segment_name(0), 100_000)
    found = ring.read(1, 0, 20, 1 << 30)
    assert lost(found) == list(range(3, 8))
    assert [offset for offset, _ in records(found)] == [0, 1, 2, *range(8, 20)]


def test_a_file_that_is_cut_off_after_it_was_mapped_is_damage_and_no_signal(tmp_path: Path) -> None:
    class Cut(Faulty):
        def map(self, file: File, position: int, size: int) -> Part | None:
            found = super().map(file, position, size)
            os.truncate(tmp_path / segment_name(0), 100_000)
            return found

    ring = ring_of(FileStorage(tmp_path), Mappings())
    fill(ring, 20)
    ring._files.storage = Cut(FileStorage(tmp_path))
    found = ring.read(1, 0, 8, 1 << 30)
    assert lost(found) == list(range(3, 8))


def test_a_page_that_cannot_be_read_costs_its_batch_and_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bad(Faulty):
        def read(self, file: File, position: int, size: int) -> bytes:
            if position <= 50_000 < position + size:
                raise OSError(errno.EIO, "a bad sector")
            return super().read(file, position, size)

    def populate(_: FilePart) -> None:
        raise OSError(errno.EFAULT, "Bad address")

    mappings = Mappings()
    ring = ring_of(FileStorage(tmp_path), mappings)
    fill(ring, 20)
    ring._files.storage = Bad(FileStorage(tmp_path))
    monkeypatch.setattr(FilePart, "populate", populate)
    found = ring.read(1, 0, 8, 1 << 30)
    assert [tuple(gap)[:3] for gap in found.gaps] == [(1, 2, "damaged")]
    assert segment_name(0) in found.gaps[0].reason
    assert [offset for offset, _ in records(found)] == [0, 2, 3, 4, 5, 6, 7]
    assert not len(mappings)


def test_times_are_found_through_mappings_too(tmp_path: Path) -> None:
    ring = ring_of(FileStorage(tmp_path), Mappings(part_bytes_min=1))
    for time_ms in range(1000, 1020):
        put(ring, 1, bytes(BODY), time_ms=time_ms)
    ring.sync()
    while ring.prepare_step(S):
        pass
    assert ring.closest_offset(1, 1003, inclusive=True) == 3


def test_a_journal_says_why_nothing_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_mappings = Journal.open(tmp_path, mapped=True)
    assert with_mappings.mappings is not None
    assert not with_mappings.unmapped
    with_mappings.close()
    assert Journal.open(MemoryStorage(), mapped=True).unmapped == "the journal is in memory"

    def populate(_: FilePart) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(FilePart, "populate", populate)
    assert "Invalid argument" in why_unmapped(FileStorage(tmp_path), EPOCH_FILE)
    without = Journal.open(tmp_path, mapped=True)
    assert without.mappings is None
    without.close()


def test_pages_are_asked_for_again_before_an_old_read_is_used_again(tmp_path: Path) -> None:
    ring = ring_of(FileStorage(tmp_path), Mappings())
    fill(ring, 20)
    (run,) = ring.read(1, 0, 8, 1 << 30).runs
    assert populate_again(run.data)
    assert populate_again(b"in memory")
    assert populate_again(memoryview(b"in memory"))
    os.truncate(tmp_path / segment_name(0), 8192)
    assert not populate_again(run.data)
