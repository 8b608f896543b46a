"""The checkpoint beside a broker: when it follows, what a start finds, and deaths of either."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from malamute_py.broker.ready import (
    CHANGE_STREAM,
    MAIL_STREAM,
    Appended,
    AppendRefused,
)
from malamute_py.changelog import records as r
from malamute_py.changelog.settings import MailboxSettings
from malamute_py.config import JournalSection
from malamute_py.journal.directory import Journal
from malamute_py.journal.storage import kind_of
from malamute_py.server.checkpointing import process, recovered
from malamute_py.server.checkpointing.checkpoints import Parts
from malamute_py.server.checkpointing.process import Checkpointed, CheckpointFailed
from malamute_py.server.checkpointing.recovered import QueuesLost
from malamute_py.server.errors import StartError
from malamute_py.store import reading
from malamute_py.store.database import DATABASE, FILES, MARK, connect, lock, position_of
from tests.server.shell import Shell, put, stored
from tests.store.logs import bodies_of
from tests.waiting import WAIT_S

pytestmark = pytest.mark.slow


def test_the_store_and_the_broker_mean_the_same_streams() -> None:
    assert (reading.CHANGE_STREAM, reading.MAIL_STREAM) == (CHANGE_STREAM, MAIL_STREAM)


def test_the_journal_knows_the_files_of_the_store(tmp_path: Path) -> None:
    Journal.open(tmp_path).close()
    for name in FILES:
        (tmp_path / name).write_bytes(b"")
    journal = Journal.open(tmp_path)
    assert not journal.unknown
    journal.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Shell]]:
    open_ones: list[Shell] = []

    def begin(**options: Any) -> Shell:
        shell = Shell(tmp_path / "data", **options)
        open_ones.append(shell)
        return shell

    yield begin
    for shell in open_ones:
        shell.abandon()


def test_the_process_follows_after_the_interval_and_the_ring_is_let_go(
    start: Callable[..., Shell],
) -> None:
    shell = start()
    shell.log(put())
    held = shell.ring.held_lsn
    shell.tick()
    shell.tick(shell.config.interval_ms - 1)
    assert not shell.checkpoints.pid
    shell.tick(1)
    answer = shell.answer()
    assert isinstance(answer, Checkpointed)
    assert answer.done.bodies == 1
    assert stored(shell) == shell.queues
    assert shell.ring.held_lsn == shell.ring.synced_lsn
    assert held is not None
    assert held < shell.ring.synced_lsn
    assert shell.names() == ["checkpoint_done"]
    facts = shell.checkpoints.facts()
    assert (facts["lsn"], facts["lag_bytes"]) == (shell.ring.synced_lsn, 0)


def test_a_clock_that_goes_back_delays_nothing(start: Callable[..., Shell]) -> None:
    shell = start()
    shell.now_ms = 1 << 41
    shell.log(put())
    shell.tick()
    shell.tick(-1_000_000)
    shell.tick(shell.config.interval_ms)
    assert isinstance(shell.answer(), Checkpointed)


def test_what_concerns_no_queue_moves_the_hold_without_any_process(
    start: Callable[..., Shell],
) -> None:
    shell = start()
    for _ in range(40):  # The ring goes round more than once.
        shell.noise(500_000)
        shell.tick(10_000)
    assert shell.ring.start_lsn > 0
    assert shell.ring.held_lsn == shell.ring.synced_lsn
    assert not shell.checkpoints.pid
    assert not shell.events
    # The tables are as they were at the beginning, and still the log proves that nothing is lost.
    shell.abandon()
    again = start()
    again.log(put())
    again.close()
    assert stored(again) == again.queues


def test_with_nothing_to_follow_the_position_is_written_now_and_then(
    start: Callable[..., Shell],
) -> None:
    shell = start(log_bytes=1_000_000)
    shell.tick()
    for _ in range(4):
        shell.noise(500_000)
    shell.tick(shell.config.idle_ms - 1)
    assert not shell.checkpoints.pid
    shell.tick(1)
    answer = shell.answer()
    assert isinstance(answer, Checkpointed)
    assert (answer.done.lsn, answer.done.rows) == (shell.ring.synced_lsn, 0)


def test_a_full_ring_forces_a_checkpoint_then_lets_what_adds_to_it_wait(
    start: Callable[..., Shell],
) -> None:
    shell = start(interval_ms=1_000_000, log_bytes=1 << 40)
    capacity = shell.ring.capacity_bytes
    shell.log(put())
    first = shell.ring.held_lsn
    assert first is not None
    while shell.ring.end_lsn - first < 0.74 * capacity:
        shell.noise(20_000)
    shell.tick()
    assert not shell.checkpoints.pid
    while shell.ring.end_lsn - first < 0.91 * capacity:
        shell.noise(20_000)
    shell.tick()
    assert shell.pressed == [True]
    assert shell.names() == ["pressure_begins", "checkpoint_forced"]
    assert isinstance(shell.answer(), Checkpointed)
    shell.tick()
    assert shell.pressed == [True, False]
    assert shell.names()[2:] == ["checkpoint_done", "pressure_ends"]


def test_what_only_waits_for_the_disk_takes_no_room_from_anyone(
    start: Callable[..., Shell],
) -> None:
    shell = start()
    for _ in range(60):  # The ring goes round, and no sync is asked for.
        assert isinstance(shell.try_append([shell.noise_batch(500_000)]), Appended)
        shell.tick()
    assert not shell.pressed
    shell.log(put())
    answer: Any = None
    for _ in range(60):
        answer = shell.try_append([shell.noise_batch(500_000)])
        if isinstance(answer, AppendRefused):
            break
    assert isinstance(answer, AppendRefused)
    assert answer.code == "wait"
    assert "held by a checkpoint" in answer.reason
    assert isinstance(shell.checkpoint(), Checkpointed)
    assert isinstance(shell.try_append([shell.noise_batch(500_000)]), Appended)


def test_a_stop_lets_the_tables_catch_up_so_that_the_next_start_reads_no_log(
    start: Callable[..., Shell],
) -> None:
    shell = start()
    shell.log(put(3))
    shell.log(r.MailDone(1, [(0, b"\1")]))
    shell.close()
    assert stored(shell) == shell.queues
    again = start()
    assert again.found.position.lsn == shell.ring.synced_lsn
    assert not again.found.parts.bytes
    assert again.queues == shell.queues


def test_without_time_at_the_stop_the_next_start_reads_the_log(
    start: Callable[..., Shell],
) -> None:
    shell = start(stop_ms=0)
    shell.log(put(3))
    shell.close()
    again = start()
    assert again.found.position.lsn == 0
    assert again.found.parts.bytes
    assert again.queues == shell.queues
    assert isinstance(again.checkpoint(), Checkpointed)
    assert stored(again) == shell.queues


def test_a_process_that_dies_is_started_again_later_each_time(
    start: Callable[..., Shell],
) -> None:
    shell = start()
    shell.log(put())
    assert isinstance(shell.checkpoint(), Checkpointed)
    first = shell.checkpoints.pid
    os.kill(first, signal.SIGKILL)
    shell.log(put())
    answer = shell.checkpoint()
    assert isinstance(answer, CheckpointFailed)
    assert answer.code == "died"
    assert shell.checkpoints.facts()["failures_total"] == 1
    shell.tick(shell.config.retry_ms - 1)
    assert not shell.checkpoints.pid
    shell.tick(1)
    assert isinstance(shell.answer(), Checkpointed)
    assert shell.checkpoints.pid not in (0, first)
    assert shell.names()[1:] == [
        "checkpoint_failed", "checkpoint_process_restarted", "checkpoint_done",
    ]  # fmt: skip
    assert stored(shell) == shell.queues


def test_a_process_that_died_without_work_is_not_left_lying_about(
    start: Callable[..., Shell], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_LOOK_S", 0.02)
    shell = start()
    shell.log(put())
    assert isinstance(shell.checkpoint(), Checkpointed)
    os.kill(shell.checkpoints.pid, signal.SIGKILL)
    wait_for(lambda: not shell.checkpoints.pid)
    shell.log(put())
    assert isinstance(shell.checkpoint(), Checkpointed)
    name, facts = shell.events[1]
    assert (name, "ended (-9)" in facts["text"]) == ("checkpoint_process_said", True)
    assert shell.checkpoints.facts()["restarts_total"] == 1


def test_what_the_process_says_reaches_the_log_and_never_stops_it(
    start: Callable[..., Shell], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONVERBOSE", "1")  # More than a pipe holds.
    shell = start()
    shell.log(put())
    assert isinstance(shell.checkpoint(), Checkpointed)
    name, facts = shell.events[0]
    assert name == "checkpoint_process_said"
    assert 0 < len(facts["text"]) <= 2_000
    assert shell.names()[1:] == ["checkpoint_done"]


def test_a_step_that_takes_long_is_said_once_and_left_alone(start: Callable[..., Shell]) -> None:
    shell = start()
    shell.log(put())
    shell.checkpoint()
    pid = shell.checkpoints.pid
    os.kill(pid, signal.SIGSTOP)
    shell.log(put())
    shell.tick()
    shell.tick(shell.config.interval_ms)
    shell.tick(29_999)
    assert shell.checkpoints.facts()["step_seconds"] == 29.999
    assert shell.names()[1:] == []
    for _ in range(3):
        shell.tick(1_000)
    assert shell.names()[1:] == ["checkpoint_slow"]
    assert shell.events[1][1]["pid"] == pid
    os.kill(pid, signal.SIGCONT)
    assert isinstance(shell.answer(), Checkpointed)
    assert shell.checkpoints.facts()["step_seconds"] == 0


def test_a_process_that_does_nothing_is_killed_and_another_goes_on(
    start: Callable[..., Shell],
) -> None:
    shell = start(stall_ms=8_000)
    shell.log(put())
    shell.checkpoint()
    pid = shell.checkpoints.pid
    os.kill(pid, signal.SIGSTOP)
    shell.log(put())
    shell.tick()
    shell.tick(shell.config.interval_ms)
    shell.tick(3_600_000)
    assert "checkpoint_process_hung" not in shell.names(), "one look says nothing"
    for _ in range(9):
        shell.tick(1_000)
    assert shell.names()[-1] == "checkpoint_process_hung"
    answer = shell.answer()
    assert isinstance(answer, CheckpointFailed)
    assert answer.code == "died"
    shell.tick(shell.config.retry_ms)
    assert isinstance(shell.answer(), Checkpointed)
    assert shell.checkpoints.pid not in (0, pid)
    facts = shell.checkpoints.facts()
    assert (facts["hangs_total"], facts["lag_bytes"]) == (1, 0)
    assert stored(shell) == shell.queues


def test_a_process_that_works_is_left_alone(start: Callable[..., Shell]) -> None:
    shell = start(stall_ms=8)
    shell.log(put())
    shell.checkpoint()
    process = shell.checkpoints._process
    done = iter(range(1_000))
    process.progress = lambda: (next(done),)  # type: ignore[method-assign]
    os.kill(shell.checkpoints.pid, signal.SIGSTOP)
    shell.log(put())
    shell.tick()
    shell.tick(shell.config.interval_ms)
    for _ in range(100):
        shell.tick(1)
    assert shell.checkpoints.hangs == 0
    process.progress = lambda: (-1,)  # type: ignore[method-assign]
    for _ in range(10):
        shell.tick(1)
    assert shell.checkpoints.hangs == 1


def test_pressure_ends_however_low_its_mark(start: Callable[..., Shell]) -> None:
    shell = start(force_percent=1, pressure_percent=3, interval_ms=1_000_000)
    shell.log(put())
    shell.noise(400_000)
    shell.tick()
    assert shell.pressed == [True]
    shell.answer()
    shell.tick()
    assert shell.pressed == [True, False]


def test_a_broker_that_is_killed_takes_the_process_with_it(start: Callable[..., Shell]) -> None:
    shell = start()
    shell.log(put())
    shell.checkpoint()
    process = shell.checkpoints._process._child
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()  # The kernel does this for a process that is killed.
    assert process.wait(WAIT_S) == 0


def test_a_process_killed_while_it_writes_leaves_whole_tables(
    start: Callable[..., Shell],
) -> None:
    shell = start(config=JournalSection(segment_bytes=4 << 20, ring_bytes=256 << 20), retry_ms=1)
    for turn in range(8):
        for _ in range(30):
            shell.log(*(put() for _ in range(60)), body=b"b" * 300)
        shell.log(*(r.MailDone(1, [(number, b"")]) for number in range(turn * 900, turn * 1000)))
        shell.tick()
        shell.tick(shell.config.interval_ms)
        pid = wait_for(lambda: shell.checkpoints.pid)
        time.sleep(0.02 * turn)  # Whatever it does by then.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        shell.answer()
        found = stored(shell)
        assert set(found.messages) <= {(1, number) for number in range(shell.mail_next)}
    while shell.checkpoints.parts.bytes:
        shell.tick()
        shell.tick(shell.config.interval_ms)
        shell.answer()
    assert stored(shell) == shell.queues
    connection = connect(shell.directory / DATABASE)
    numbers = {base for (base,) in connection.execute("SELECT base FROM bodies")}
    connection.close()
    assert numbers == {base for _, base in shell.queues.messages}


def wait_for(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)
    return found


def test_bodies_are_found_in_the_journal_and_behind_it(start: Callable[..., Shell]) -> None:
    shell = start()
    shell.log(put(2), body=b"old")
    shell.log(put(), body=b"gone")
    shell.log(r.MailDone(1, [(2, b"")]))
    assert bodies_of(shell.bodies(0).batches[0]) == [b"old"] * 2
    assert isinstance(shell.checkpoint(), Checkpointed)
    while shell.ring.first_offset(MAIL_STREAM) < 3:
        shell.noise(500_000)
    shell.log(put(), body=b"new")
    found = shell.bodies(0, 2, 3)
    assert {base: bodies_of(batch) for base, batch in found.batches.items()} == {
        0: [b"old"] * 2, 3: [b"new"],
    }  # fmt: skip
    assert not found.failed


def test_a_body_damaged_in_the_tables_costs_no_other(start: Callable[..., Shell]) -> None:
    shell = start()
    for _ in range(3):
        shell.log(put(), body=b"body")
    assert isinstance(shell.checkpoint(), Checkpointed)
    while shell.ring.first_offset(MAIL_STREAM) < 3:
        shell.noise(500_000)
    connection = connect(shell.directory / DATABASE)
    (batch,) = connection.execute("SELECT batch FROM bodies WHERE base = 1").fetchone()
    wrong = batch[:-3] + b"?" + batch[-2:]
    connection.execute("UPDATE bodies SET batch = ? WHERE base = 1", (wrong,))
    connection.close()
    found = shell.bodies(0, 1, 2)
    assert sorted(found.batches) == [0, 2]
    assert "the body of message 1 is damaged" in found.failed


def test_a_ring_that_refuses_gets_the_room_of_stored_bodies_back(
    start: Callable[..., Shell],
) -> None:
    shell = start(config=JournalSection(segment_bytes=1 << 20, ring_bytes=4 << 20, full="refuse"))
    for _ in range(12):
        shell.log(put(), body=b"b" * 500_000)
        shell.log(r.MailDone(1, [(shell.mail_next - 1, b"")]))
        assert isinstance(shell.checkpoint(), Checkpointed)
    assert shell.ring.start_lsn > 0


# --- starts that cannot be -----------------------------------------------------------------


def refused(start: Callable[..., Shell], **options: Any) -> str:
    """Return why mail, services, cursors and groups are refused."""
    with pytest.raises(QueuesLost) as caught:
        start(**options)
    assert 'checkpoint.lost_changes = "accept"' in caught.value.remedy
    assert "malamute snapshot restore" in caught.value.remedy
    return str(caught.value)


def make(start: Callable[..., Shell]) -> Shell:
    shell = start()
    shell.log(put(), r.CursorSet(1, "c", 5, 1))
    shell.close()
    return shell


def go_round(shell: Shell) -> None:
    """Have the ring give up its beginning."""
    while shell.ring.start_lsn == 0:
        shell.noise(500_000)


def elsewhere(path: Path) -> None:
    path.rename(path.parent.parent / "x")
    path.symlink_to("../x")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


FATES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "cut in its header": lambda path: os.truncate(path, 50),
    "cut in a table": lambda path: os.truncate(path, 3 * 4096),
    "its header damaged": lambda path: spoil(path, 0),
    "a page damaged": lambda path: spoil(path, 4096 * 2 + 5),
    "a row damaged": lambda path: spoil(path, path.read_bytes().rindex(b"\x64\xa1a")),
    "a FIFO": fifo,
    "a link": elsewhere,
    "a directory": directory,
}


def spoil(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    for place in range(at, at + 40):
        data[place] ^= 0x5A
    path.write_bytes(data)


@pytest.mark.parametrize("fate", list(FATES))
@pytest.mark.parametrize("killed", [True, False])
def test_lost_tables_are_made_anew_from_a_log_that_has_everything(
    start: Callable[..., Shell], fate: str, killed: bool
) -> None:
    """The broker did not start, streams included, though the log was there from position 0."""
    shell = start()
    shell.log(put(), r.CursorSet(1, "c", 5, 1), body=b"in the tables")
    assert isinstance(shell.checkpoint(), Checkpointed)
    shell.log(put(2), body=b"in the log")
    shell.log(r.MailDone(1, [(1, b"\1")]))
    if killed:
        shell.abandon()
    else:
        shell.close()
    before = shell.directory / DATABASE
    FATES[fate](before)
    kind = kind_of(before)
    again = start()
    assert again.found.rebuilt
    assert again.queues == shell.queues
    assert bodies_of(again.bodies(0).batches[0]) == [b"in the tables"]
    assert kind_of(before) == ""
    aside = shell.directory / "queues.damaged-0.db"
    assert os.path.lexists(aside) == (fate != "missing"), "nothing that was there is removed"
    assert kind_of(aside) == kind
    again.log(put())
    assert isinstance(again.checkpoint(), Checkpointed)
    again.close()
    third = start()
    assert third.found.rebuilt == ""
    assert third.queues == again.queues


@pytest.mark.parametrize("fate", list(FATES))
def test_lost_tables_are_not_made_of_half_a_log_without_a_word(
    start: Callable[..., Shell], fate: str
) -> None:
    shell = make(start)
    shell = start()
    go_round(shell)
    shell.log(r.CursorSet(1, "kept", 7, 1), r.MailboxSet(7, "new", MailboxSettings(), "x", 1))
    shell.close()
    FATES[fate](shell.directory / DATABASE)
    before = sorted(path.name for path in shell.directory.iterdir())
    assert "the log begins at position" in refused(start)
    assert sorted(path.name for path in shell.directory.iterdir()) == before, "nothing was changed"
    again = start(lost_changes="accept")
    assert again.found.accepted
    assert set(again.queues.cursors) == {(1, "kept")}
    assert again.queues.messages == {}
    assert again.queues.next_number >= again.journal.epoch << 32, "no number comes again"
    # A kill at once: the operator's word was given once, and is on disk.
    again.abandon()
    third = start()
    assert third.queues == again.queues
    assert third.found.accepted == ""


def test_the_log_alone_says_that_there_were_tables(start: Callable[..., Shell]) -> None:
    shell = make(start)
    for name in (DATABASE, MARK):
        (shell.directory / name).unlink()
    again = start()
    assert "queues.db is missing" in again.found.rebuilt
    assert again.queues == shell.queues


def with_old_tables(start: Callable[..., Shell]) -> Shell:
    """A stopped broker whose tables are older than what its log still has."""
    shell = start()
    shell.log(put())
    shell.close()
    old = (shell.directory / DATABASE).read_bytes()
    shell = start()
    shell.log(r.CursorSet(1, "lost", 5, 1))
    assert isinstance(shell.checkpoint(), Checkpointed)
    go_round(shell)
    shell.log(r.CursorSet(1, "kept", 5, 1))
    shell.close()
    (shell.directory / DATABASE).write_bytes(old)
    return shell


def test_what_is_accepted_is_on_disk_before_anything_is_served(
    start: Callable[..., Shell],
) -> None:
    """A kill within the first checkpoint's interval took the operator's word back."""
    shell = with_old_tables(start)
    for name in (f"{DATABASE}-wal", f"{DATABASE}-shm"):
        (shell.directory / name).unlink(missing_ok=True)
    refused(start)
    again = start(lost_changes="accept")
    assert "changes" in again.found.accepted
    assert len(again.queues.messages) == 1, "what the tables have is kept"
    assert set(again.queues.cursors) == {(1, "kept")}
    again.abandon()
    third = start()
    assert third.queues == again.queues


def test_tables_ahead_of_the_log_are_refused(start: Callable[..., Shell], tmp_path: Path) -> None:
    shell = make(start)
    connection = sqlite3.connect(shell.directory / DATABASE)
    connection.execute("UPDATE position SET lsn = lsn + 4096")
    connection.commit()
    connection.close()
    assert "older than its tables" in refused(start)
    again = start(lost_changes="accept")
    assert again.queues == shell.queues, "they know more than the log: nothing of it is given up"
    again.abandon()
    assert start().queues == shell.queues


def test_tables_of_another_directory_are_refused(
    start: Callable[..., Shell], tmp_path: Path
) -> None:
    shell = make(start)
    other = Shell(tmp_path / "other")
    other.close()
    (other.directory / DATABASE).replace(shell.directory / DATABASE)
    assert "another data directory" in refused(start)


def test_tables_older_than_the_log_reaches_are_refused_unless_what_is_lost_may_be(
    start: Callable[..., Shell],
) -> None:
    shell = with_old_tables(start)
    assert "are not there (changes 1 to 2)" in refused(start)
    shell = start(lost_changes="accept")
    assert list(shell.queues.cursors) == [(1, "kept")]
    shell.log(put())
    assert isinstance(shell.checkpoint(), Checkpointed)
    shell.close()
    assert start().queues == shell.queues


def test_a_directory_of_an_older_program_gets_tables(
    start: Callable[..., Shell],
) -> None:
    shell = start()
    for _ in range(30):
        shell.noise(500_000)
    shell.abandon()
    for name in FILES:
        (shell.directory / name).unlink(missing_ok=True)
    again = start()
    assert again.found.new
    again.log(put())
    again.close()
    assert start().queues == again.queues


def test_position_of_new_tables_is_the_beginning(start: Callable[..., Shell]) -> None:
    shell = start()
    connection = connect(shell.directory / DATABASE, read_only=True)
    assert position_of(connection)[:3] == (0, 0, 1)
    for path in shell.directory.glob("queues*"):
        assert path.stat().st_mode & 0o027 == 0, path
    connection.close()


def test_parts_that_lie_near_are_one() -> None:
    parts = Parts()
    parts.add(100, 200)
    parts.add(300, 400)
    parts.add(1_000_000, 1_000_100)
    assert parts.upto(2_000_000) == [(100, 400), (1_000_000, 1_000_100)]
    assert parts.bytes == 400
    assert parts.upto(1_000_050) == [(100, 400), (1_000_000, 1_000_050)]
    parts.drop(1_000_050)
    assert (parts.first, parts.bytes) == (1_000_050, 50)
    parts.drop(1_000_100)
    assert (parts.first, parts.bytes) == (None, 0)


def test_a_start_waits_for_the_last_writer_and_not_for_ever(
    start: Callable[..., Shell], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make(start)
    writer = lock(shell.directory)
    monkeypatch.setattr(recovered, "_LOCK_WAIT_S", 0.0)
    with pytest.raises(StartError, match=f"written by process {os.getpid()}"):
        start()
    monkeypatch.setattr(recovered, "_LOCK_WAIT_S", WAIT_S)
    release = threading.Timer(0.05, writer.release)
    release.start()
    assert start().queues == shell.queues
    release.join()


def test_tables_that_cannot_be_written_are_told_and_tried_again(
    start: Callable[..., Shell],
) -> None:
    shell = start()
    shell.log(put())
    connection = connect(shell.directory / DATABASE)
    connection.execute("UPDATE position SET change_next = 99")  # As if another had moved it.
    assert isinstance(shell.checkpoint(), Checkpointed)  # Nothing new to it.
    shell.log(put())
    connection.execute("UPDATE position SET change_next = 1")
    answer = shell.checkpoint()
    assert isinstance(answer, CheckpointFailed)
    assert answer.code == "moved"
    assert shell.checkpoints.parts.bytes
    assert shell.ring.held_lsn == shell.checkpoints.parts.first
    connection.close()
    shell.tick(shell.config.retry_ms)
    assert isinstance(shell.answer(), Checkpointed)
    assert "checkpoint_process_restarted" not in shell.names()  # None had died.
