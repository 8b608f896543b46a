"""The tools for a stopped broker: they tell everything and change nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

import google_crc32c
import msgspec
import numpy as np
import pytest

from malamute_py.journal import UNINDEXED_FROM, Journal, JournalCorrupt, RingSettings
from malamute_py.journal.index import ENTRY_DTYPE
from malamute_py.journal.inspect import dump, stat, verify
from malamute_py.journal.layout import index_name, segment_name, unpack_file
from tests.journal.rings import SMALL, S, batch, put


def make(directory: Path) -> None:
    journal = Journal.open(directory)
    ring, _ = journal.ring("main", SMALL)
    for number in range(12):
        put(ring, 1, b"%d" % number * 10_000)
        ring.append([batch(ring, 2, [b"x"]), batch(ring, 3, [b"y"])])
    ring.sync()
    ring.remove_before(1, offset=2)
    while ring.prepare_step():
        pass
    put(ring, 2, b"last")
    journal.close()


def image(directory: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def flip(directory: Path, lsn: int) -> None:
    path = directory / "rings" / "main" / segment_name(lsn // S)
    data = bytearray(path.read_bytes())
    data[lsn % S] ^= 4
    path.write_bytes(data)


def findings(directory: Path) -> list[tuple[str, str]]:
    return [(f.kind, f.message) for f in verify(directory) if f.kind != "progress"]


@pytest.mark.moderate
def test_stat_tells_what_is_there(tmp_path: Path) -> None:
    make(tmp_path)
    before = image(tmp_path)
    told = stat(tmp_path)
    (ring,) = told.rings
    assert (told.epoch, told.openings, told.in_use) == (1, 1, False)
    assert (ring.name, ring.segment_bytes, ring.clean) == ("main", S, True)
    assert ring.streams[1].first == 2
    assert ring.streams[1].next == 12
    assert ring.streams[2].next == 13
    assert ring.bytes_on_disk == S * len(list((tmp_path / "rings/main").glob("*.seg")))
    assert image(tmp_path) == before


def test_stat_tells_when_the_oldest_record_that_is_kept_was_appended(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    ring, _ = journal.ring("main", SMALL)
    for number in range(12):
        # A segment has room for six; records of a batch are appended together.
        put(ring, 1, b"%d" % number * 10_000, b"", time_ms=1_000 + number)
    ring.sync()
    ring.remove_before(1, offset=17)
    journal.close()
    (facts,) = [ring.streams[1] for ring in stat(tmp_path).rings]
    assert (facts.first, facts.first_time_ms, facts.last_time_ms) == (17, 1_008, 1_011)


def test_verify_reads_everything_with_progress_and_finds_nothing_wrong(tmp_path: Path) -> None:
    make(tmp_path)
    before = image(tmp_path)
    told = list(verify(tmp_path))
    steps = [f.done for f in told if f.kind == "progress"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 2
    assert [f.kind for f in told if f.kind != "progress"] == ["ok"]
    assert image(tmp_path) == before


def test_verify_finds_damage_even_in_a_segment_whose_index_is_whole(tmp_path: Path) -> None:
    make(tmp_path)
    assert (tmp_path / "rings" / "main" / index_name(0)).exists()
    flip(tmp_path, 20_000)
    ((kind, message),) = findings(tmp_path)[:1]
    assert kind == "damaged"
    assert "positions" in message


def test_verify_finds_an_index_that_is_damaged_or_lies(tmp_path: Path) -> None:
    make(tmp_path)
    ring = tmp_path / "rings" / "main"
    (ring / index_name(0)).write_bytes(b"nonsense")
    assert any(kind == "index" for kind, _ in findings(tmp_path))


@pytest.mark.moderate
@pytest.mark.parametrize("interval", [0, 300, 1 << 20])
def test_verify_bears_an_index_whose_entries_were_cut_otherwise_and_no_lie(
    tmp_path: Path, interval: int
) -> None:
    journal = Journal.open(tmp_path)
    settings = RingSettings(segment_bytes=S, ring_bytes=8 * S, index_interval_bytes=interval)
    ring, _ = journal.ring("main", settings)
    for number in range(300):
        bodies = [b"%d" % number]
        ring.append([batch(ring, 1, bodies), batch(ring, 1, bodies, base=2 * number + 1)])
        ring.append([batch(ring, UNINDEXED_FROM, bodies)])
    ring.sync()
    while ring.prepare_step():
        pass
    journal.close()
    assert [kind for kind, _ in findings(tmp_path)] == ["ok"]

    path = tmp_path / "rings" / "main" / index_name(0)
    stored = unpack_file(path.read_bytes(), list)
    table = np.frombuffer(stored[6], ENTRY_DTYPE).copy()
    table["bytes"][0] += 8
    stored[6] = table.tobytes()
    body = msgspec.msgpack.encode(stored)
    head = path.read_bytes()[:8]
    path.write_bytes(head + struct.pack("<II", google_crc32c.value(body), len(body)) + body)
    ((kind, message),) = findings(tmp_path)
    assert kind == "damaged"
    assert "does not agree" in message


def test_verify_names_unknown_files_and_a_broker_in_the_way(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "rings" / "main" / "notes").write_text("hello")
    journal = Journal.open(tmp_path)
    kinds = [kind for kind, _ in findings(tmp_path)]
    assert kinds[0] == "locked"
    assert "unknown" in kinds
    journal.close()


def test_where_nothing_can_be_locked_no_broker_has_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    make(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not stat(tmp_path).in_use
    assert "locked" not in [kind for kind, _ in findings(tmp_path)]


@pytest.mark.moderate
def test_dump_gives_every_batch_in_a_range_and_names_what_is_damaged(tmp_path: Path) -> None:
    make(tmp_path)
    whole = list(dump(tmp_path, "main"))
    kinds = [batch.kind for batch in whole]
    assert kinds[:2] == ["snapshot", "epoch_start"]
    assert kinds.count("data") == 37
    assert "padding" in kinds
    data = [b for b in whole if b.kind == "data"]
    part = list(dump(tmp_path, "main", data[3].lsn, data[6].lsn))
    assert [b.lsn for b in part] == [b.lsn for b in data[3:6]]
    flip(tmp_path, data[4].lsn + 20)
    hurt = list(dump(tmp_path, "main", data[3].lsn, data[6].lsn))
    assert [b.kind for b in hurt] == ["data", "damaged", "data"]
    assert hurt[1].stamp is None
    assert hurt[1].size == data[4].size
    assert hurt[1].fault


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        stat(tmp_path / "missing")
    with pytest.raises(JournalCorrupt, match="not a data directory"):
        stat(tmp_path)
    assert findings(tmp_path)[0][0] == "missing"
    make(tmp_path / "data")
    with pytest.raises(JournalCorrupt, match="no ring"):
        list(dump(tmp_path / "data", "other"))
