"""Opening a log for reading: what a path may be, and what is refused by name."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest

from malamute_py.journal import FileStorage, JournalCorrupt, open_reader
from malamute_py.mapped import NewerFormat, NoJournal
from tests.mapped.logs import Log, filled, records


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_reader(tmp_path / "nowhere")


def test_a_directory_that_holds_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(NoJournal, match="holds no broker's log"):
        open_reader(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_directory_in_which_no_broker_has_begun_is_refused(log: Log) -> None:
    log.close()
    (log.path / "rings" / "main").rename(log.path / "rings" / "other")
    (log.path / "manifest" / "main").unlink()
    with pytest.raises(NoJournal, match="no ring main"):
        open_reader(log.path)


@pytest.mark.parametrize("begun", [False, True])
def test_a_reading_waits_for_the_ring_of_a_stream_that_was_just_created(
    log: Log, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    number = log.create("quiet", "quiet")
    if begun:  # The directory is there, and no file of the ring's.
        (log.path / "rings" / "quiet").mkdir()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            log.fill(number, 2)

    monkeypatch.setattr("malamute_py.mapped.reader.time.sleep", wait)
    with open_reader(log.path) as reader:
        assert records(reader.read("quiet")) == filled(0, 2)
    assert len(waits) == 3


def test_a_reading_of_a_ring_that_no_broker_begins_ends_by_name(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create("quiet", "quiet")
    monkeypatch.setattr("malamute_py.mapped.reader.time.sleep", lambda _: None)
    monkeypatch.setattr("malamute_py.mapped.reader._BEGIN_S", 0.0)
    with open_reader(log.path) as reader, pytest.raises(NoJournal, match="has begun it yet"):
        reader.read("quiet")


@pytest.mark.moderate
@pytest.mark.parametrize("name", ["journal", "rings/main/ring"])
def test_files_of_a_later_version_are_refused(log: Log, name: str) -> None:
    with (log.path / name).open("r+b") as file:
        file.seek(4)
        file.write(struct.pack("<H", 2))
    with pytest.raises(NewerFormat, match="has version 2, and this program knows 1"):
        open_reader(log.path)


def test_a_ring_whose_facts_are_gone_is_refused_where_nothing_tells_them(log: Log) -> None:
    (log.path / "rings/main/ring").write_bytes(b"?" * 40)
    for path in (log.path / "rings/main").glob("*.seg"):
        path.unlink()
    with pytest.raises(JournalCorrupt, match="the ring's own facts"):
        open_reader(log.path)


def test_a_reader_without_the_right_to_read_is_told_whose_files_they_are(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: FileStorage) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self.describe())

    monkeypatch.setattr(FileStorage, "names", refused)
    with pytest.raises(PermissionError, match="by the user that the broker runs as") as raised:
        open_reader(log.path)
    assert raised.value.filename == str(log.path)


@pytest.mark.moderate
def test_a_link_in_the_place_of_a_segment_is_not_followed(log: Log, tmp_path: Path) -> None:
    trades = log.create("trades")
    log.fill(trades, 60)
    log.tidy()
    segment = log.path / "rings/main/000000000000.seg"
    segment.rename(tmp_path / "moved.seg")
    segment.symlink_to(tmp_path / "moved.seg")
    with open_reader(log.path) as reader:
        seen = records(reader.read("trades", until="tail"))
    assert seen == filled(seen[0][0], 60)
    assert seen[0][0] > 0


@pytest.mark.moderate
def test_a_stopped_broker_s_log_is_read_as_well(log: Log) -> None:
    trades = log.create("trades")
    log.fill(trades, 60)
    log.close()
    with open_reader(str(log.path)) as reader:
        assert records(reader.read("trades", until="tail", visibility="durable")) == filled(0, 60)
    log.open()


@pytest.mark.moderate
def test_a_segment_that_is_prepared_and_not_begun_is_no_end(log: Log) -> None:
    log.tidy()
    trades = log.create("trades")
    with open_reader(log.path) as reader:
        reading = reader.read("trades")
        for _ in range(30):
            log.tidy()
            begin = log.next(trades)
            log.fill(trades, 7)
            assert records(reading) == filled(begin, begin + 7)
