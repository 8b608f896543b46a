"""Unpacked indexes: shared by all readers of the process, used for the same bytes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from malamute_py.journal import RingSettings
from malamute_py.journal.index import read_index
from malamute_py.journal.layout import RING_FILE, RingMeta, index_number
from malamute_py.journal.marks import read_mark
from malamute_py.journal.storage import FileStorage
from malamute_py.mapped import open_reader
from malamute_py.mapped import segments as segments_module
from malamute_py.mapped.segments import Indexes
from tests.journal.rings import S
from tests.mapped.logs import Log


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the segments whose index was unpacked."""
    found: list[int] = []

    def noted(data: bytes, ring: bytes, number: int) -> Any:
        found.append(number)
        return read_index(data, ring, number)

    monkeypatch.setattr(segments_module, "read_index", noted)
    monkeypatch.setattr(segments_module, "INDEXES", Indexes())
    return found


def filled(directory: Path) -> Log:
    log = Log(directory, RingSettings(S, 16 * S, index_interval_bytes=2048))
    trades = log.create("trades")
    for number in range(24):
        log.put(trades, *[b"x" * 100] * 100, subject=f"s.{number}")
    log.tidy()
    return log


def offsets(directory: Path, pattern: str) -> list[int]:
    with (
        open_reader(directory) as reader,
        reader.read("trades", pattern, until="tail", copy=True) as reading,
    ):
        return [record.offset for record in reading.records()]


def index_files(directory: Path) -> dict[int, Path]:
    found = {index_number(path.name): path for path in directory.rglob("*.idx")}
    return {number: path for number, path in found.items() if number is not None}


@pytest.mark.moderate
def test_a_second_reader_takes_indexes_that_the_first_has_unpacked(
    tmp_path: Path, unpacked: list[int]
) -> None:
    log = filled(tmp_path / "data")
    files = index_files(tmp_path / "data")
    assert offsets(tmp_path / "data", "s.3") == list(range(300, 400))
    assert sorted(unpacked) == sorted(files)
    assert len(files) > 2
    unpacked.clear()
    assert offsets(tmp_path / "data", "s.4") == list(range(400, 500))
    assert unpacked == []
    # A file with other bytes is unpacked anew; one that is damaged is no index.
    path = files[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert offsets(tmp_path / "data", "s.3") == list(range(300, 400))
    assert set(unpacked) == {0}
    log.close()


@pytest.mark.moderate
def test_unpacked_indexes_are_bounded_by_the_bytes_of_their_files(tmp_path: Path) -> None:
    log = filled(tmp_path / "data")
    files = index_files(tmp_path / "data")
    meta = read_mark(FileStorage(files[0].parent), RING_FILE, RingMeta)
    assert meta is not None
    first, second = files[0].read_bytes(), files[1].read_bytes()
    indexes = Indexes(len(first) + len(second) - 1)
    found = indexes.of(first, meta.uuid, 0)
    assert found is not None
    assert indexes.of(first, meta.uuid, 0) is found
    assert indexes.of(first, meta.uuid, 1) is None
    assert indexes.of(second, meta.uuid, 1) is not None
    assert indexes.of(first, meta.uuid, 0) is not found
    log.close()
