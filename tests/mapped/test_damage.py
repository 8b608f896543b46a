"""Damage that a reader of a log meets: bit rot, missing or swapped segments, files cut off.

The rule that all tests check: a record is right, or its loss has a name.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import malamute_py as malamute
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.journal import FileStorage, JournalCorrupt, open_reader
from malamute_py.journal.directory import expected_of
from malamute_py.journal.layout import RingMeta
from malamute_py.journal.manifest import Manifest
from malamute_py.mapped.missing import NOTHING, Missing, find_missing
from malamute_py.mapped.segments import SegmentMap
from malamute_py.mapped.segments import Segments as MappedSegments
from tests.journal.rings import HEAD, S, batch
from tests.mapped.logs import SETTINGS, SMALL, Log, Noted, body_at, filled, flip, lap, records

RING = SMALL


@pytest.mark.moderate
@pytest.mark.parametrize("where", [8, 20, STAMP_BYTES + 40, STAMP_BYTES + 400])
@pytest.mark.parametrize("indexed", [False, True])
def test_bit_rot_is_named_as_damage_and_everything_else_is_read(
    tmp_path: Path, where: int, indexed: bool
) -> None:
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 10)
    begin = log.ring("main").end_lsn
    log.fill(trades, 100 if indexed else 5)
    log.tidy()
    log.fill(trades, 1)
    assert (log.path / "rings/main/000000000000.idx").exists() == indexed
    flip(log, begin + where)
    total = log.next(trades)
    with open_reader(log.path) as reader:
        reading = reader.read("trades", until="tail", on_notice=notes.append)
        assert records(reading) == filled(0, 10) + filled(11, total)
    assert notes.gone() == [(10, 11, "damaged")]
    (notice,) = notes
    assert "segment 0 at byte" in str(notice)
    log.close()


def test_damage_at_the_end_of_a_stopped_log_is_named_too(tmp_path: Path) -> None:
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 10)
    begin = log.ring("main").end_lsn
    log.fill(trades, 3)
    log.close()
    flip(log, begin + 400)
    with open_reader(log.path) as reader:
        reading = reader.read("trades", until="tail", on_notice=notes.append)
        assert records(reading) == filled(0, 10) + filled(11, 13)
    assert notes.gone() == [(10, 11, "damaged")]


def test_damage_that_only_a_later_batch_proves_is_stepped_over(tmp_path: Path) -> None:
    """The broker was killed: nothing but the stamps behind it says that the place was synced."""
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 10)
    begin = log.ring("main").end_lsn
    log.fill(trades, 3)
    log.ring("main").sync()
    log.fill(trades, 3)
    log.journal._release()
    flip(log, begin + 400)
    with open_reader(log.path) as reader:
        reading = reader.read("trades", until="tail", on_notice=notes.append)
        assert records(reading) == filled(0, 10) + filled(11, 16)
    assert notes.gone() == [(10, 11, "damaged")]


@pytest.mark.moderate
def test_a_record_before_the_damage_of_its_bundle_is_read(tmp_path: Path) -> None:
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades, other = log.create("trades"), log.create("other")
    log.fill(trades, 3)
    ring = log.ring("main")
    first = batch(ring, trades, [body_at(3)])
    begin = ring.end_lsn
    ring.append([first, batch(ring, other, [body_at(0)])])
    size = (ring.end_lsn - begin) // 2
    log.fill(other, 3)
    ring.sync()
    log.fill(other, 3)
    log.journal._release()
    flip(log, begin + size + 400)
    with open_reader(log.path) as reader:
        assert records(reader.read("trades", until="tail")) == filled(0, 4)
        reading = reader.read("other", until="tail", on_notice=notes.append)
        assert records(reading) == filled(1, 7)
    assert notes.gone() == [(0, 1, "damaged")]


@pytest.mark.moderate
@pytest.mark.parametrize("pattern", ["#", "wanted", "other"])
def test_damage_that_a_start_left_out_of_the_index_is_named_whatever_is_selected(
    tmp_path: Path, pattern: str
) -> None:
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 10)
    begin = log.ring("main").end_lsn
    log.fill(trades, 3)
    log.ring("main").sync()
    log.fill(trades, 3)
    log.journal._release()
    flip(log, begin + 400)
    log.open()
    log.put(trades, b"here", subject="wanted")
    log.fill(trades, 100)
    log.tidy()
    with open_reader(log.path) as reader:
        reading = reader.read("trades", pattern, until="tail", on_notice=notes.append)
        found = [offset for offset, _ in records(reading)]
    everything = [*range(10), *range(11, 117)]
    assert found == {"#": everything, "wanted": [16], "other": []}[pattern]
    assert notes.gone() == [(10, 11, "damaged")]
    log.close()


def test_a_torn_end_is_no_damage(tmp_path: Path) -> None:
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 10)
    begin = log.ring("main").end_lsn
    log.fill(trades, 1)
    log.journal._release()
    flip(log, begin + 400)
    with open_reader(log.path) as reader:
        reading = reader.read("trades", until="tail", on_notice=notes.append)
        assert records(reading) == filled(0, 10)
    assert notes == []


@pytest.mark.moderate
def test_a_segment_that_is_missing_amid_others_is_damage(tmp_path: Path) -> None:
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 170)
    log.tidy()
    (log.path / "rings/main/000000000001.seg").unlink()
    with open_reader(log.path) as reader:
        reading = reader.read("trades", until="tail", on_notice=notes.append)
        seen = records(reading)
    ((begin, end, code),) = notes.gone()
    assert code == "damaged"
    assert seen == filled(0, begin) + filled(end, 170)
    log.close()


ONE = "segment {} is missing, which the ring's manifest names"
TWO = "segments {} to {} are missing, which the ring's manifest names"


class Segments:
    """The segment files of ring main."""

    def __init__(self, log: Log) -> None:
        self.path = log.path / "rings/main"
        self.used = [self.file(number) for number in range(log.ring("main").end_lsn // S + 1)]

    def file(self, number: int) -> Path:
        return self.path / f"{number:012}.seg"


@pytest.fixture
def closed(tmp_path: Path) -> Log:
    """A log of four segments and a spare."""
    log = Log(tmp_path / "data", SETTINGS)
    number = log.create("trades")
    log.fill(number, 170)
    log.tidy()
    return log


def losses(log: Log, **options: object) -> tuple[list[tuple[int, bytes]], Noted]:
    notes = Noted()
    with open_reader(log.path) as reader:
        reading = reader.read("trades", until="tail", on_notice=notes.append, **options)  # type: ignore[arg-type]
        return records(reading), notes


@pytest.mark.moderate
@pytest.mark.parametrize("start", ["earliest", 0, 7])
@pytest.mark.parametrize("stopped", [True, False])
def test_missing_oldest_segments_are_damage_from_the_beginning_on(
    closed: Log, start: int | str, stopped: bool
) -> None:
    segments = Segments(closed)
    if stopped:
        closed.close()
    segments.used[0].unlink()
    seen, notes = losses(closed, start=start)
    ((begin, end, code),) = notes.gone()
    assert (begin, code) == (0 if start == "earliest" else start, "damaged")
    assert 0 < end < 100
    assert seen == filled(end, 170)
    assert ONE.format(0) in str(notes[0])
    closed.close()


@pytest.mark.moderate
def test_missing_newest_segments_are_damage_up_to_where_the_log_was_closed(closed: Log) -> None:
    segments = Segments(closed)
    closed.close()
    for path in segments.used[-2:]:
        path.unlink()
    seen, notes = losses(closed)
    ((begin, end, code),) = notes.gone()
    assert (end, code) == (170, "damaged")
    assert seen == filled(0, begin)
    assert TWO.format(2, 3) in str(notes[0])


@pytest.mark.moderate
def test_a_reading_that_follows_is_told_once_of_missing_newest_segments(closed: Log) -> None:
    segments, notes = Segments(closed), Noted()
    closed.close()
    segments.used[-1].unlink()
    with open_reader(closed.path) as reader:
        reading = reader.read("trades", on_notice=notes.append)
        seen = records(reading)
        assert records(reading) == []
    assert notes.gone() == [(len(seen), 170, "damaged")]


@pytest.mark.moderate
def test_missing_newest_segments_of_which_nothing_is_known_end_the_reading_by_an_error(
    closed: Log,
) -> None:
    segments = Segments(closed)
    closed.journal._release()
    manifest = Manifest(closed.journal.storage.child("manifest"), "main")
    known = manifest.expected
    assert known is not None
    manifest.write(
        known.ring, known.segment_bytes, known.epoch, known.first, known.last, known.end_lsn, None
    )
    segments.used[-1].unlink()
    with open_reader(closed.path) as reader:
        reading = reader.read("trades", until="tail", strict=True)
        seen: list[bytes] = []
        with pytest.raises(JournalCorrupt, match=r"segment 3 is missing.* nothing tells"):
            seen.extend(batch.bodies()[0] for batch in iter(lambda: reading.next_batch(0), None))
        assert seen == [body for _, body in filled(0, len(seen))]
        assert reading.next_batch(0) is None
        whole = reader.read("trades", until="tail", end=len(seen), strict=True)
        assert len(records(whole)) == len(seen)


@pytest.mark.moderate
def test_a_ring_of_which_all_segments_are_missing_is_damage(closed: Log) -> None:
    number = closed.create("own", "own")
    closed.fill(number, 3)
    closed.close()
    notes = Noted()
    for path in (closed.path / "rings/own").glob("*.seg"):
        path.unlink()
    with open_reader(closed.path) as reader:
        assert records(reader.read("own", until="tail", on_notice=notes.append)) == []
    assert notes.gone() == [(0, 3, "damaged")]


@pytest.mark.moderate
def test_a_missing_directory_of_a_ring_is_damage(closed: Log) -> None:
    number = closed.create("own", "own")
    closed.fill(number, 3)
    closed.close()
    shutil.rmtree(closed.path / "rings/own")
    with open_reader(closed.path) as reader, pytest.raises(JournalCorrupt, match="is missing"):
        reader.read("own")


@pytest.mark.moderate
def test_segments_whose_names_were_swapped_are_damage(closed: Log) -> None:
    segments = Segments(closed)
    closed.close()
    for from_, to in (("0", "x"), ("1", "0"), ("x", "1")):
        (segments.path / f"{from_:0>12}.seg").rename(segments.path / f"{to:0>12}.seg")
    seen, notes = losses(closed)
    ((begin, end, code),) = notes.gone()
    assert (begin, code) == (0, "damaged")
    assert seen == filled(end, 170)


@pytest.mark.moderate
def test_an_oldest_segment_that_is_about_to_be_used_again_is_not_missing(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest then names it under its new number, before its file is renamed."""
    number = log.create("trades")
    looks: list[Missing] = []
    rename, ring = FileStorage.rename, log.ring("main")
    directory = FileStorage(log.path, read_only=True)
    meta = RingMeta(ring.uuid, S)

    def look() -> Missing:
        """Compare as a reader does that read the log up to where this segment begins."""
        segments = MappedSegments(directory.child("rings").child("main"), meta)
        expected = expected_of(directory, "main")
        assert expected is not None
        return find_missing(segments, directory, "main", expected.last * S)

    def look_around(self: FileStorage, old: str, new: str) -> None:
        again = old.endswith(".seg") and new.endswith(".seg")
        looks.extend(look() for _ in range(again))
        rename(self, old, new)
        looks.extend(look() for _ in range(again))

    monkeypatch.setattr(FileStorage, "rename", look_around)
    lap(log, number)
    assert len(looks) > 1
    assert all(found is NOTHING for found in looks)


@pytest.mark.moderate
def test_a_manifest_that_changes_during_the_look_is_compared_again(
    closed: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment that only the first reading named may have been removed in between."""
    segments = Segments(closed)
    manifest = Manifest(closed.journal.storage.child("manifest"), "main")
    known = manifest.expected
    assert known is not None
    mapped = MappedSegments.map

    def retire(self: MappedSegments, number: int) -> SegmentMap | None:
        if number == 0 and segments.used[0].exists():
            manifest.write(
                known.ring, known.segment_bytes, known.epoch, 1, known.last, known.end_lsn, None
            )
            segments.used[0].unlink()
        return mapped(self, number)

    with open_reader(closed.path) as reader:
        monkeypatch.setattr(MappedSegments, "map", retire)
        seen = records(reader.read("trades", until="tail", strict=True))
    assert seen == filled(seen[0][0], 170)
    assert seen[0][0] > 0
    closed.close()


@pytest.mark.moderate
def test_a_file_that_was_cut_off_is_damage_and_no_signal(tmp_path: Path) -> None:
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 170)
    log.tidy()
    os.truncate(log.path / "rings/main/000000000001.seg", HEAD * 5)
    with open_reader(log.path) as reader:
        reading = reader.read("trades", until="tail", on_notice=notes.append)
        seen = records(reading)
    gone = {offset for begin, end, _ in notes.gone() for offset in range(begin, end)}
    assert {code for _, _, code in notes.gone()} == {"damaged"}
    assert seen == [(n, body_at(n)) for n in range(170) if n not in gone]
    assert 20 < len(gone) < 60
    assert "cut off at 20480 bytes" in str(notes)
    log.close()


@pytest.mark.moderate
def test_a_page_that_the_disk_cannot_read_is_damage_and_no_signal(tmp_path: Path) -> None:
    """The kernel refuses unreadable pages by name, as it does those of a file that was cut off."""
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 110)
    log.tidy()
    path = log.path / "rings/main/000000000001.seg"
    bring = SegmentMap._bring

    def late(self: SegmentMap, piece: int) -> None:
        if self.number == 1:
            os.truncate(path, HEAD * 5)
        bring(self, piece)

    with open_reader(log.path) as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentMap, "_bring", late)
        reading = reader.read("trades", until="tail", on_notice=notes.append)
        seen = records(reading)
    gone = {offset for begin, end, _ in notes.gone() for offset in range(begin, end)}
    assert seen == [(n, body_at(n)) for n in range(110) if n not in gone]
    assert 20 < len(gone) < 60
    assert "the disk cannot read byte 20480" in str(notes)
    log.close()


@pytest.mark.moderate
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM])
def test_a_kernel_that_does_not_bring_pages_in_is_done_without(
    log: Log, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            raise OSError(number, os.strerror(number))

    trades = log.create("trades")
    log.fill(trades, 100)
    monkeypatch.setattr("malamute_py.mapped.segments.mmap.mmap", Refusing)
    with open_reader(log.path) as other:
        assert records(other.read("trades", until="tail", strict=True)) == filled(0, 100)


@pytest.mark.moderate
def test_a_header_that_the_disk_cannot_read_is_not_touched(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To copy it from the mapping ended the process."""

    class Failing(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            if start == 0:
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))

    headers: list[bytes] = []
    init = SegmentMap.__init__

    def noted(self: SegmentMap, *arguments: Any) -> None:
        init(self, *arguments)
        headers.append(self.header)

    trades = log.create("trades")
    log.fill(trades, 100)
    monkeypatch.setattr("malamute_py.mapped.segments.mmap.mmap", Failing)
    monkeypatch.setattr(SegmentMap, "__init__", noted)
    with open_reader(log.path) as other:
        assert records(other.read("trades", until="tail", strict=True)) == filled(0, 100)
    assert headers
    assert not any(map(any, headers))


@pytest.mark.moderate
@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("pattern", ["#", "wanted", "other"])
def test_damage_before_entries_that_are_passed_over_is_named_too(
    tmp_path: Path, pattern: str, copy: bool
) -> None:
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    log.fill(trades, 46)
    begins = []
    for _ in range(2):
        begins.append(log.ring("main").end_lsn)
        log.fill(trades, 1)
    assert S - 3000 < log.ring("main").end_lsn < S, "the last of segment 0"
    log.fill(trades, 52)
    log.put(trades, b"here", subject="wanted")
    log.fill(trades, 100)
    log.tidy()
    # As of a segment that a start has found damaged: it gets no index file.
    (log.path / "rings/main/000000000000.idx").unlink()
    for begin in begins:
        flip(log, begin + 8)
    with open_reader(log.path) as reader:
        reading = reader.read("trades", pattern, until="tail", copy=copy, on_notice=notes.append)
        found = [offset for offset, _ in records(reading)]
    everything = [*range(46), *range(48, 201)]
    assert found == {"#": everything, "wanted": [100], "other": []}[pattern]
    assert notes.gone() == [(46, 48, "damaged")]
    log.close()


@pytest.mark.moderate
@pytest.mark.parametrize("where", [8, STAMP_BYTES + 400])
@pytest.mark.parametrize("start", [malamute.AtTime(1010), malamute.AtClientTime(1010)])
@pytest.mark.parametrize("indexed", [False, True])
def test_a_start_by_time_names_damage_that_may_have_been_the_record_meant(
    tmp_path: Path, indexed: bool, start: malamute.AtTime | malamute.AtClientTime, where: int
) -> None:
    log, notes = Log(tmp_path / "data", SETTINGS), Noted()
    trades = log.create("trades")
    begins = []
    for number in range(100 if indexed else 20):
        begins.append(log.ring("main").end_lsn)
        log.put(trades, body_at(number), time_ms=1000 + number, client_time_ms=1000 + number)
    log.tidy()
    log.put(trades, body_at(len(begins)), time_ms=2000)
    flip(log, begins[5] + where)
    flip(log, begins[10] + where)
    with open_reader(log.path) as reader:
        reading = reader.read("trades", start=start, until="tail", on_notice=notes.append)
        assert records(reading)[0] == (11, body_at(11))
    assert notes.gone() == [(10, 11, "damaged")]
    log.close()


@pytest.mark.moderate
def test_a_segment_whose_index_file_cannot_be_read_is_read_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path / "data", SETTINGS)
    trades = log.create("trades")
    log.fill(trades, 100)
    log.tidy()
    read = FileStorage.read

    def with_a_bad_sector(storage: FileStorage, file: Any, position: int, size: int) -> bytes:
        if file.name.endswith(".idx"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), file.name)
        return read(storage, file, position, size)

    monkeypatch.setattr(FileStorage, "read", with_a_bad_sector)
    with open_reader(log.path) as reader:
        assert records(reader.read("trades", until="tail", strict=True)) == filled(0, 100)
    log.close()
