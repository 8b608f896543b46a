"""Repair to a copy: all that can be read is there, the rest is reported, the copy is sound."""

from __future__ import annotations

import errno
import os
import random
import shutil
from io import FileIO
from pathlib import Path

import pytest

from malamute_py import EmbeddedBroker
from malamute_py.journal import Ring, RingSettings, inspect
from malamute_py.journal.directory import Journal
from malamute_py.store import mending
from malamute_py.store.database import DATABASE, lock
from malamute_py.store.errors import StoreLocked
from malamute_py.store.files import regular
from malamute_py.store.mending import CannotMend, Lost, mend
from tests.cli.running import run_cli
from tests.journal.rings import S, batch, everything
from tests.seeds import seeds

SMALL = RingSettings(segment_bytes=S, ring_bytes=8 * S, index_interval_bytes=2048)
STREAMS = (1, 2, 3)
BROKER = {
    "journal.segment_bytes": 1 << 20,
    "journal.ring_bytes": 8 << 20,
    "limits.batch_bytes_max": 256 << 10,
    "limits.record_bytes_max": 128 << 10,
}


def filled(
    directory: Path, chance: random.Random, segments: int = 5
) -> dict[int, dict[int, bytes]]:
    """Fill a ring of three streams, its bundles of one to four batches; returns its records."""
    journal = Journal.open(directory)
    ring, _ = journal.ring("main", SMALL, lambda: [b"state"])
    serial = 0
    while ring.end_lsn < segments * S - S // 2:
        batches, nexts = [], {number: ring.next_offset(number) for number in STREAMS}
        for _ in range(chance.choice([1, 1, 2, 4])):
            serial += 1
            number = chance.choice(STREAMS)
            body = b"%d:" % serial + chance.randbytes(chance.choice([10, 300, 3000, 9000]))
            batches.append(batch(ring, number, [body], base=nexts[number]))
            nexts[number] += 1
        ring.append(batches)
    ring.sync()
    if chance.random() < 0.5:
        while ring.prepare_step():
            pass
    had = {number: dict(everything(ring, number)) for number in STREAMS}
    if chance.random() < 0.5:
        journal.close()
    else:
        ring._mark(clean=False)  # It has come to rest.
        journal._release()  # As by a kill.
    return had


def spoil(directory: Path, chance: random.Random) -> None:
    """Do damage of every kind to the rings' files."""
    ring = directory / "rings" / "main"
    for _ in range(chance.choice([1, 1, 2, 4])):
        segments = sorted(ring.glob("*.seg"))
        path = chance.choice(segments)
        what = chance.choice(["flip", "flip", "zeros", "cut", "gone", "empty", "ring"])
        data = bytearray(path.read_bytes())
        if what in ("flip", "zeros") and len(data) > 5000:
            at = chance.randrange(0 if what == "flip" else 4096, len(data))
            size = 1 if what == "flip" else chance.choice([100, 5000, 40_000])
            for place in range(at, min(at + size, len(data))):
                data[place] = data[place] ^ 1 if what == "flip" else 0
            path.write_bytes(data)
        elif what == "cut":
            os.truncate(path, chance.randrange(len(data) + 1))
        elif what == "gone" and len(segments) > 2:
            path.unlink()
        elif what == "empty":
            path.write_bytes(b"")
        elif what == "ring":
            (ring / what).unlink(missing_ok=True)


def tree(where: Path) -> dict[str, bytes]:
    files = [path for path in where.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in files}


def opened(directory: Path) -> tuple[Journal, Ring]:
    journal = Journal.open(directory)
    ring, recovery = journal.ring("main", SMALL)
    assert recovery.damages == ()
    assert recovery.dropped == ()
    assert recovery.unknown == ()
    return journal, ring


@pytest.mark.moderate
@pytest.mark.parametrize("seed", seeds(4, 120))
def test_whatever_is_damaged_the_copy_is_sound_and_what_it_lacks_is_told(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    had = filled(tmp_path / "data", chance)
    spoil(tmp_path / "data", chance)
    before = tree(tmp_path / "data")
    try:
        mended = mend(tmp_path / "data", tmp_path / "new")
    except CannotMend:
        # No snapshot of the tables of streams is left.
        assert not (tmp_path / "new").exists()
        assert tree(tmp_path / "data") == before
        return
    assert tree(tmp_path / "data") == before, "the original was changed"
    findings = [f for f in inspect.verify(tmp_path / "new") if f.kind not in ("ok", "progress")]
    assert findings == []
    journal, ring = opened(tmp_path / "new")
    for number in STREAMS:
        has = dict(everything(ring, number))
        lost = {
            offset
            for each in mended.lost
            if each.stream == number
            for offset in range(each.from_offset, min(each.to_offset, 10_000))
        }
        assert has.items() <= had[number].items(), "a record is not what it was"
        assert had[number].keys() - has.keys() <= lost, "what is lost is not told"
        assert not lost & has.keys(), "what is there is told as lost"
        after = ring.next_offset(number)
        assert after >= max(had[number], default=-1) + 1 or any(
            each.stream == number for each in mended.lost
        )
        ring.append([batch(ring, number, [b"goes on"])])
        assert after not in had[number], "an offset comes again"
    ring.sync()
    journal.close()
    journal, ring = opened(tmp_path / "new")
    journal.close()
    again = mend(tmp_path / "new", tmp_path / "third")
    assert again.filled_bytes == 0, "the copy has nothing to repair"
    assert again.whole or mended.lost


@pytest.mark.moderate
def test_a_sound_directory_is_copied_whole(tmp_path: Path) -> None:
    had = filled(tmp_path / "data", random.Random(1))
    mended = mend(tmp_path / "data", tmp_path / "new")
    assert mended.whole
    assert mended.lost == []
    journal, ring = opened(tmp_path / "new")
    assert {number: dict(everything(ring, number)) for number in STREAMS} == had
    assert journal.epoch > 1024
    journal.close()


@pytest.mark.moderate
def test_a_segment_in_the_middle_is_told_by_stream_and_offsets(tmp_path: Path) -> None:
    had = filled(tmp_path / "data", random.Random(2))
    (tmp_path / "data" / "rings" / "main" / "000000000002.seg").unlink()
    mended = mend(tmp_path / "data", tmp_path / "new")
    journal, ring = opened(tmp_path / "new")
    for number in STREAMS:
        gone = sorted(had[number].keys() - dict(everything(ring, number)).keys())
        told = [each for each in mended.lost if each.stream == number]
        assert told == [Lost("main", number, gone[0], gone[-1] + 1)]
    journal.close()


def fill(directory: Path) -> None:
    with EmbeddedBroker(directory, **BROKER) as broker, broker.connect_sync() as client:  # type: ignore[arg-type]
        client.create_stream("own", ring_bytes=4 << 20)
        for number in range(20):
            client.publish("orders", b"order %d" % number)
            client.publish("own", b"own %d" % number)
        client.send("crew", b"mail")


def served(directory: Path, stream: str) -> list[bytes]:
    with EmbeddedBroker(directory, **BROKER) as broker, broker.connect_sync() as client:  # type: ignore[arg-type]
        records = client.subscribe(stream, start="earliest", until="tail")
        return [bytes(record.body) for record in records]


@pytest.mark.moderate
def test_a_directory_whose_tables_are_being_written_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint's process of a killed broker ends its transaction."""
    filled(tmp_path / "data", random.Random(1))
    monkeypatch.setattr(mending, "_LOCK_WAIT_S", 0.0)
    with lock(tmp_path / "data"):
        before = tree(tmp_path / "data")
        with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
            mend(tmp_path / "data", tmp_path / "new")
        assert not (tmp_path / "new").exists()
    mend(tmp_path / "data", tmp_path / "new")
    assert tree(tmp_path / "data") == before


@pytest.mark.moderate
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_tables_in_a_part_of_the_disk_that_cannot_be_read_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fill(tmp_path / "data")

    def failing(path: Path) -> FileIO:
        if path == tmp_path / "data" / DATABASE:
            raise OSError(number, os.strerror(number))
        return regular(path)

    monkeypatch.setattr(mending, "regular", failing)
    if number != errno.EIO:
        # What the operator can mend is no damage.
        with pytest.raises(PermissionError):
            mend(tmp_path / "data", tmp_path / "new")
        assert not (tmp_path / "new").exists()
        return
    mended = mend(tmp_path / "data", tmp_path / "new")
    assert (mended.queues, mended.whole) == ("rebuilt", True)


@pytest.mark.slow
def test_the_command_says_by_its_code_what_became_of_it(tmp_path: Path) -> None:
    fill(tmp_path / "data")
    before = tree(tmp_path / "data")
    whole = run_cli("journal", "repair", str(tmp_path / "data"), str(tmp_path / "same"))
    assert whole.code == 0
    assert tree(tmp_path / "data") == before
    for path in (tmp_path / "same").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert whole.json["whole"] is True
    assert whole.json["queues"] == "copied"
    assert len(served(tmp_path / "same", "orders")) == 20
    again = run_cli("journal", "repair", str(tmp_path / "data"), str(tmp_path / "same"))
    assert again.code == 1
    assert "there already" in again.err

    (tmp_path / "data" / DATABASE).write_bytes(b"")
    rings = tmp_path / "data" / "rings"
    segment = next((path / "000000000000.seg" for path in rings.glob("s-*")), None)
    segment = segment or next(
        path for path in rings.glob("*/000000000000.seg") if path.parent.name != "main"
    )
    data = bytearray(segment.read_bytes())
    data[data.index(b"own 7")] ^= 1
    segment.write_bytes(data)
    before = tree(tmp_path / "data")
    lossy = run_cli("journal", "repair", str(tmp_path / "data"), str(tmp_path / "new"))
    assert lossy.code == 5
    assert tree(tmp_path / "data") == before
    table = lossy.json
    assert [(each["stream"], each["from"], each["to"]) for each in table["lost"]] == [("own", 7, 8)]
    assert (table["queues"], table["queues_lost"]) == ("rebuilt", "")
    assert run_cli("journal", "verify", str(tmp_path / "new")).code == 0
    assert served(tmp_path / "new", "own") == [b"own %d" % n for n in range(20) if n != 7]
    with EmbeddedBroker(tmp_path / "new", **BROKER) as broker, broker.connect_sync() as client:  # type: ignore[arg-type]
        with client.inbox("crew") as inbox:
            for mail in inbox:
                assert bytes(mail.body) == b"mail"
                break
        assert client.publish("own", b"next").offset == 20

    shutil.rmtree(rings / "main")
    hopeless = run_cli("journal", "repair", str(tmp_path / "data"), str(tmp_path / "none"))
    assert hopeless.code == 1
    assert "no table of streams" in hopeless.err
    assert not (tmp_path / "none").exists()
