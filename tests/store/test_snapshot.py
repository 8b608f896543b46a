"""Snapshots: taken while a broker works, verified, and started from."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from malamute_py.broker.log.ring import EPOCH_SHIFT
from malamute_py.broker.ready import MAIL_STREAM
from malamute_py.changelog import records as r
from malamute_py.config import JournalSection
from malamute_py.journal import inspect
from malamute_py.journal.directory import EPOCH_MAX, Journal
from malamute_py.journal.errors import EpochsSpent
from malamute_py.server.checkpointing.process import Checkpointed, CheckpointFailed
from malamute_py.store import snapshot as snapshots
from malamute_py.store.database import DATABASE
from malamute_py.store.mending import CannotMend, mend
from malamute_py.store.snapshot import (
    CONTENT,
    EPOCH_LEAP,
    MANIFEST,
    SnapshotFailed,
    restore,
    take,
    verify,
)
from tests.server.shell import Shell, put
from tests.store.logs import bodies_of

pytestmark = pytest.mark.slow

Begin = Callable[..., Shell]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    open_ones: list[Shell] = []

    def start(name: str = "data", **options: object) -> Shell:
        shell = Shell(tmp_path / name, **options)  # type: ignore[arg-type]
        open_ones.append(shell)
        return shell

    yield start
    for shell in open_ones:
        shell.abandon()


def filled(shell: Shell) -> None:
    """Put rows into the tables, and changes into the log after them."""
    shell.log(put(3), body=b"in the tables")
    shell.log(r.CursorSet(1, "c", 5, 1))
    shell.checkpoint()
    shell.log(put(2), body=b"in the log")
    shell.log(r.MailDone(1, [(0, b"\1")]))


def answered(shell: Shell) -> None:
    """Do a turn of the loop, as far as the checkpoint goes."""
    shell.tick(100)
    for result in shell.results.take():
        if isinstance(result, Checkpointed | CheckpointFailed):
            shell.checkpoints.take(result, shell.now_ms)


@pytest.mark.parametrize("running", [True, False])
def test_what_is_restored_is_what_was_there(begin: Begin, tmp_path: Path, running: bool) -> None:
    shell = begin()
    filled(shell)
    for _ in range(8):
        shell.noise(500_000)
    if not running:
        shell.close()
    manifest = take(shell.directory, tmp_path / "snap")
    assert manifest.rings["main"][1] == shell.ring.synced_lsn
    assert verify(tmp_path / "snap") == (manifest, [])
    restore(tmp_path / "snap", tmp_path / "new")
    for path in (*(tmp_path / "snap").rglob("*"), *(tmp_path / "new").rglob("*")):
        assert path.is_dir() or not path.stat().st_mode & 0o027, path
    again = begin("new")
    assert again.queues == shell.queues
    assert again.journal.epoch == shell.journal.epoch + EPOCH_LEAP + 1
    assert again.journal.uuid == shell.journal.uuid
    assert bodies_of(again.bodies(0).batches[0]) == [b"in the tables"] * 3
    assert bodies_of(again.bodies(3).batches[3]) == [b"in the log"] * 2
    again.log(put())
    again.close()
    findings = list(inspect.verify(tmp_path / "new"))
    assert {finding.kind for finding in findings} <= {"ok", "progress"}, findings


def test_a_snapshot_under_load_is_one_moment_of_the_log(begin: Begin, tmp_path: Path) -> None:
    shell = begin(config=JournalSection(segment_bytes=1 << 20, ring_bytes=64 << 20))
    stop = threading.Event()
    failures: list[BaseException] = []

    def load() -> None:
        try:
            turn = 0
            while not stop.is_set():
                if shell.ring.held_bytes > shell.ring.capacity_bytes // 2:
                    stop.wait(0.01)  # The process is slow today.
                    answered(shell)
                    continue
                shell.log(*(put() for _ in range(20)), body=b"x" * 200)
                shell.log(r.MailDone(1, [(number, b"") for number in range(turn, turn + 15)]))
                turn += 20
                shell.noise(5_000)
                answered(shell)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            failures.append(error)

    loading = threading.Thread(target=load)
    loading.start()
    try:
        for turn in range(3):
            least = shell.ring.synced_lsn
            manifest = take(shell.directory, tmp_path / f"snap{turn}")
            assert manifest.rings["main"][1] >= max(least, manifest.lsn)
            assert manifest.findings == []
    finally:
        stop.set()
        loading.join()
    assert not failures
    for turn in range(3):
        restore(tmp_path / f"snap{turn}", tmp_path / f"new{turn}")
        again = begin(f"new{turn}")
        # Each put of 20, 15 of which left in the next bundle: nothing between the two is torn.
        assert len(again.queues.messages) % 5 == 0
        sample = list(again.queues.messages)[:3] + list(again.queues.messages)[-3:]
        numbers = tuple(sorted({base for _, base in sample}))
        assert set(again.bodies(*numbers).batches) == set(numbers)
        assert again.change_next <= shell.change_next
        assert again.ring.next_offset(MAIL_STREAM) <= shell.mail_next


def test_a_ring_that_goes_round_under_the_copy_is_begun_anew(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = begin()
    filled(shell)
    rounds = 0
    piece = snapshots._RingCopy._piece

    def slow(self: snapshots._RingCopy, number: int, begin: int, stop: int) -> None:
        nonlocal rounds
        if rounds < 2:
            rounds += 1
            if shell.checkpoints.parts.bytes:
                shell.checkpoint()
            for _ in range(20):
                shell.noise(500_000)
        piece(self, number, begin, stop)

    monkeypatch.setattr(snapshots._RingCopy, "_piece", slow)
    manifest = take(shell.directory, tmp_path / "snap")
    assert rounds == 2
    assert manifest.rings["main"][0] > 0
    restore(tmp_path / "snap", tmp_path / "new")
    assert begin("new").queues == shell.queues


def test_damage_of_a_snapshot_is_found_before_it_is_restored(begin: Begin, tmp_path: Path) -> None:
    shell = begin()
    filled(shell)
    snap = tmp_path / "snap"
    take(shell.directory, snap)
    path = snap / CONTENT / DATABASE
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    assert verify(snap)[1] == [f"{DATABASE}: not as it was written"]
    with pytest.raises(SnapshotFailed, match="use another snapshot"):
        restore(snap, tmp_path / "new")
    path.unlink()
    assert verify(snap)[1] == [f"{DATABASE}: missing"]
    (snap / MANIFEST).unlink()
    with pytest.raises(SnapshotFailed, match="is no snapshot"):
        verify(snap)
    assert not (tmp_path / "new").exists()


def test_a_body_that_is_nowhere_is_told(begin: Begin, tmp_path: Path) -> None:
    import sqlite3

    shell = begin()
    shell.log(put())
    shell.checkpoint()
    while shell.ring.first_offset(MAIL_STREAM) == 0:
        shell.noise(500_000)
    shell.close()
    connection = sqlite3.connect(shell.directory / DATABASE)
    connection.execute("DELETE FROM bodies")
    connection.commit()
    connection.close()
    manifest = take(shell.directory, tmp_path / "snap")
    assert manifest.findings == [
        f"{DATABASE}: 1 bodies are nowhere, the first is of message 0"
    ]  # fmt: skip


def test_nothing_is_written_over(begin: Begin, tmp_path: Path) -> None:
    shell = begin()
    filled(shell)
    take(shell.directory, tmp_path / "snap")
    with pytest.raises(SnapshotFailed, match="there already"):
        take(shell.directory, tmp_path / "snap")
    with pytest.raises(SnapshotFailed, match="there already"):
        restore(tmp_path / "snap", shell.directory)
    with pytest.raises(SnapshotFailed, match="holds no journal"):
        take(tmp_path / "snap", tmp_path / "other")
    shutil.rmtree(tmp_path / "snap")
    (tmp_path / "snap").mkdir()  # An empty one will do.
    take(shell.directory, tmp_path / "snap")


def test_the_original_and_the_restored_never_mean_two_records_by_one_position(
    begin: Begin, tmp_path: Path
) -> None:
    shell = begin()
    filled(shell)
    take(shell.directory, tmp_path / "snap")
    shell.close()
    restore(tmp_path / "snap", tmp_path / "new")
    original, restored = Journal.open(shell.directory), Journal.open(tmp_path / "new")
    assert restored.epoch - original.epoch == EPOCH_LEAP
    original.close()
    restored.close()


def test_numbers_in_memory_stay_below_2_63_up_to_the_last_epoch() -> None:
    assert (EPOCH_MAX + 1) << EPOCH_SHIFT == 1 << 63


def test_a_hundred_snapshots_are_restored_and_taken_in_a_chain(
    begin: Begin, tmp_path: Path
) -> None:
    shell = begin()
    filled(shell)
    first = shell.journal.epoch
    take(shell.directory, tmp_path / "snap")
    shell.close()
    for link in range(1, 101):
        directory = tmp_path / f"directory-{link}"
        restore(tmp_path / "snap", directory)
        shutil.rmtree(tmp_path / "snap")
        take(directory, tmp_path / "snap")
        shutil.rmtree(tmp_path / f"directory-{link - 1}", ignore_errors=True)
    again = begin("directory-100")
    assert again.journal.epoch == first + 100 * EPOCH_LEAP + 1
    assert again.queues == shell.queues
    # Room for a first start and for 2^40 records in memory behind it.
    assert (again.journal.epoch + 1) << EPOCH_SHIFT < 1 << 63
    again.close()


def test_what_is_beyond_the_last_epoch_is_refused_by_name(begin: Begin, tmp_path: Path) -> None:
    shell = begin()
    filled(shell)
    shell.close()
    Journal.open(shell.directory, epoch=EPOCH_MAX - EPOCH_LEAP - 1).close()
    take(shell.directory, tmp_path / "last")
    Journal.open(shell.directory).close()
    take(shell.directory, tmp_path / "over")
    restore(tmp_path / "last", tmp_path / "new")
    journal = Journal.open(tmp_path / "new")
    assert journal.epoch == EPOCH_MAX
    journal.close()
    with pytest.raises(EpochsSpent, match=f"epoch {EPOCH_MAX + 1}.*malamute replay"):
        Journal.open(tmp_path / "new")
    with pytest.raises(SnapshotFailed, match=f"{EPOCH_MAX} is the last one"):
        restore(tmp_path / "over", tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    with pytest.raises(CannotMend, match=f"{EPOCH_MAX} is the last one"):
        mend(tmp_path / "new", tmp_path / "mended")
