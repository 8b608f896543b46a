"""Tables as a start finds them: whole, missing, damaged, old, or of another log."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from malamute_py.changelog import records as r
from malamute_py.changelog.settings import MailboxSettings
from malamute_py.journal.storage import kind_of
from malamute_py.server.checkpointing import recovered
from malamute_py.server.checkpointing.process import Checkpointed
from malamute_py.server.checkpointing.recovered import QueuesLost
from malamute_py.server.errors import StartError
from malamute_py.store.database import DATABASE, FILES, MARK, connect, lock, position_of
from tests.server.shell import Shell, put
from tests.store.logs import bodies_of
from tests.waiting import WAIT_S

pytestmark = pytest.mark.slow


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
