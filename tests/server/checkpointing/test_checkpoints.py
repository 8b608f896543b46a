"""The checkpoint beside a broker: when it follows, and deaths of either."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from malamute_py.broker.ready import (
    CHANGE_STREAM,
    MAIL_STREAM,
    Appended,
    AppendRefused,
    BodiesRead,
)
from malamute_py.changelog import records as r
from malamute_py.config import JournalSection
from malamute_py.journal.directory import Journal
from malamute_py.server.checkpointing import process
from malamute_py.server.checkpointing.checkpoints import Parts
from malamute_py.server.checkpointing.process import Checkpointed, CheckpointFailed
from malamute_py.server.journaling.journal_threads import Trimmed
from malamute_py.store import reading
from malamute_py.store.database import DATABASE, FILES, connect
from tests.server.shell import Shell, put, stored
from tests.store.logs import bodies_of
from tests.waiting import WAIT_S, until

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


def _is_of_housekeeping(result: Any) -> bool:
    return isinstance(result, Trimmed) or getattr(result, "name", "") == "segment_retired"


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
    shell.rings.read_bodies(BodiesRead(9, (0, 1, 2)))
    results: list[Any] = []

    def answered() -> bool:
        # Housekeeping tells in its own time of the segments that the noise overwrote.
        results.extend(each for each in shell.results.take() if not _is_of_housekeeping(each))
        return len(results) == 2

    until(answered)
    told, found = results
    assert (told.name, told.facts["number"]) == ("mail_damaged", 1)
    assert told.facts["reason"].startswith("in the tables: ")
    assert sorted(found.batches) == [0, 2]
    assert not found.failed, "it would be read again for ever"


def test_a_ring_that_refuses_gets_the_room_of_stored_bodies_back(
    start: Callable[..., Shell],
) -> None:
    shell = start(config=JournalSection(segment_bytes=1 << 20, ring_bytes=4 << 20, full="refuse"))
    for _ in range(12):
        shell.log(put(), body=b"b" * 500_000)
        shell.log(r.MailDone(1, [(shell.mail_next - 1, b"")]))
        assert isinstance(shell.checkpoint(), Checkpointed)
    assert shell.ring.start_lsn > 0


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
