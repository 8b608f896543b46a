"""The checkpoint: wherever it followed and whenever it died, tables and log are the queues."""

from __future__ import annotations

import contextlib
import errno
import random
import sqlite3
from pathlib import Path
from typing import Any, get_args

import google_crc32c
import msgspec
import pytest

from malamute_py.changelog import records as r
from malamute_py.changelog import tables
from malamute_py.changelog.applying import STREAM_CHANGES, apply
from malamute_py.changelog.records import decode_change
from malamute_py.changelog.tables import Queues, Tables
from malamute_py.journal import Follower
from malamute_py.store import checkpoint as checkpoint_module
from malamute_py.store.checkpoint import Abandoned, Checkpoint
from malamute_py.store.database import (
    DATABASE,
    Position,
    connect,
    create_file,
    open_database,
    position_of,
)
from malamute_py.store.errors import ChangesLost, StoreError, StoreMoved
from malamute_py.store.forms import KEYS
from malamute_py.store.loading import check, load
from malamute_py.store.reading import Changes
from tests.seeds import seeds
from tests.store.logs import DIRECTORY, LoggedQueues, RandomChanges, bodies_of


class Killed(BaseException):
    """The death of a killed process: no code catches it."""


def follower_of(logged: LoggedQueues) -> Follower:
    return Follower(logged.storage)


def recovered(logged: LoggedQueues, connection: sqlite3.Connection) -> Queues:
    """Return what a start would make of the tables and the rest of the log."""
    queues = load(connection)
    position = position_of(connection)
    changes = Changes(follower_of(logged).read, position.change_next)
    for _, record in changes.read([(position.lsn, logged.ring.end_lsn)]):
        change = decode_change(record)
        if not isinstance(change, STREAM_CHANGES):
            apply(Tables(), queues, change)
    return queues


def same(one: Queues, other: Queues) -> None:
    """Whether both are equal, and in one order."""
    for name in Queues.__struct_fields__:
        mine, others = getattr(one, name), getattr(other, name)
        if name == "next_number":
            assert mine == others
        else:
            assert list(mine.items()) == list(others.items()), name


def stored_bodies(connection: sqlite3.Connection) -> dict[int, list[bytes]]:
    return {
        base: bodies_of(batch)
        for base, batch in connection.execute("SELECT base, batch FROM bodies")
    }


@pytest.mark.parametrize("seed", seeds(6, 25))
def test_tables_and_the_rest_of_the_log_are_the_queues_whatever_is_killed_when(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(tables, "KEYS_MAX", 12)
    monkeypatch.setattr(tables, "ENDS_MAX", 2)
    monkeypatch.setattr(checkpoint_module, "_ROWS_MAX", draw.choice([3, 40, 50_000]))
    monkeypatch.setattr(checkpoint_module, "_BODIES_AT_ONCE", draw.choice([2, 10_000]))
    logged = LoggedQueues(ring_bytes=400 * 65_536)
    changes = RandomChanges(logged, seed)
    connection = logged.connection()
    checkpoint = Checkpoint(connection, follower_of(logged).read)
    pending: list[tuple[int, int]] = []
    for _ in range(120):
        begin = logged.ring.end_lsn
        if draw.random() < 0.3:
            logged.noise()
            continue
        end = logged.log(*changes.bundle())
        pending.append((begin, end))
        if draw.random() > 0.15:
            continue
        at = logged.ring.end_lsn if draw.random() < 0.5 else end
        ranges = pending if draw.random() < 0.7 else None
        if draw.random() < 0.4:
            before = load(connection)

            def die() -> None:
                raise Killed

            checkpoint.before_commit = die
            with pytest.raises(Killed):
                checkpoint.advance(at, ranges)
            same(load(connection), before)
            checkpoint.before_commit = lambda: None
            if draw.random() < 0.5:
                checkpoint = Checkpoint(connection, follower_of(logged).read)
            else:
                same(recovered(logged, connection), logged.queues)
                continue
        done = checkpoint.advance(at, ranges)
        assert (done.lsn, done.change_next) == position_of(connection)[:2]
        same(load(connection), logged.queues)
        alive = logged.alive()
        assert stored_bodies(connection) == {base: logged.bodies[base] for base in alive}
        pending.clear()
    same(recovered(logged, connection), logged.queues)
    check(connection, whole=True)


def test_a_message_sent_and_confirmed_within_a_step_touches_no_table() -> None:
    logged = LoggedQueues()
    logged.log(r.MailPut(1, -1, 3, 100, "a", 1))
    end = logged.log(r.MailDone(1, [(0, b"")]))
    done = Checkpoint(logged.connection(), follower_of(logged).read).advance(end)
    assert (done.changes, done.rows, done.bodies) == (2, 0, 0)


def test_a_body_stays_while_a_request_of_its_put_is_somewhere() -> None:
    logged = LoggedQueues()
    connection = logged.connection()
    checkpoint = Checkpoint(connection, follower_of(logged).read)
    checkpoint.advance(logged.log(r.RequestPut(6, -1, 2, 100, "a", "a", 1)))
    checkpoint.advance(logged.log(r.RequestDead(6, [(0, b"\1")], 5, "attempts", 1)))
    checkpoint.advance(logged.log(r.RequestDone(6, [(0, b"\2")])))
    assert list(stored_bodies(connection)) == [0]
    checkpoint.advance(logged.log(r.RequestRevived(5, 6, [(0, b"")], 1)))
    assert list(stored_bodies(connection)) == [0]
    checkpoint.advance(logged.log(r.RequestDone(6, [(0, b"")])))
    assert not stored_bodies(connection)


@pytest.mark.moderate
def test_a_step_that_nobody_wants_any_more_changes_nothing() -> None:
    logged = LoggedQueues(ring_bytes=400 * 65_536)
    for _ in range(30):
        logged.log(*(r.MailPut(1, -1, 1, 100, "a", 1) for _ in range(50)))
    connection = logged.connection()
    checkpoint = Checkpoint(connection, follower_of(logged).read)
    with pytest.raises(Abandoned):
        checkpoint.advance(logged.ring.end_lsn, going_on=lambda: False)
    assert position_of(connection).lsn == 0
    assert not load(connection).messages
    checkpoint.advance(logged.ring.end_lsn)
    same(load(connection), logged.queues)


def test_tables_that_another_moved_on_are_not_written(tmp_path: Any) -> None:
    logged = LoggedQueues()
    connection = logged.connection()
    one = Checkpoint(connection, follower_of(logged).read)
    other = Checkpoint(connection, follower_of(logged).read)
    end = logged.log(r.StepTaken("s", b"k", 1))
    other.advance(end)
    with pytest.raises(StoreMoved):
        one.advance(end)
    with pytest.raises(StoreMoved):
        Checkpoint(connection, follower_of(logged).read).advance(end - 8)


def damage(logged: LoggedQueues, lsn: int) -> None:
    file = logged.storage.open("000000000000.seg")
    byte = logged.storage.read(file, lsn, 1)
    logged.storage.write(file, lsn, [bytes([byte[0] ^ 1])])


def test_damage_of_another_stream_is_passed_over() -> None:
    logged = LoggedQueues()
    connection = logged.connection()
    checkpoint = Checkpoint(connection, follower_of(logged).read)
    begin = logged.log(r.StepTaken("s", b"1", 1))
    logged.noise()
    damage(logged, begin + 20)
    end = logged.log(r.StepTaken("s", b"2", 1))
    done = checkpoint.advance(end)
    assert len(done.damages) == 1
    assert not done.lost
    same(load(connection), logged.queues)


def test_tables_keep_what_each_key_was_used_for() -> None:
    logged = LoggedQueues()
    connection = logged.connection()
    end = logged.log(
        r.MailPut(3, -1, 1, 100, "s", 1, b"mail", digest=(1 << 64) - 1),
        r.RequestPut(4, -1, 1, 100, "s", "s", 1, 0, b"request", digest=2),
        r.StepTaken("s", b"step", 1, 66, 3),
        r.StepTaken("s", b"earlier", 1),
    )
    Checkpoint(connection, follower_of(logged).read).advance(end)
    uses = {key: (row.use, row.digest) for (_, key), row in load(connection).keys.items()}
    assert uses == {
        b"mail": (3, (1 << 64) - 1), b"request": (4, 2), b"step": (-66, 3), b"earlier": (0, 0),
    }  # fmt: skip


def test_a_key_that_an_earlier_version_wrote_is_read() -> None:
    data = msgspec.msgpack.encode(("s", b"k", 7, 2, 5))
    stored = google_crc32c.value(data).to_bytes(4, "little") + data
    assert KEYS.unpack(stored) == (("s", b"k"), tables.KeyRow(7, 2, 5, 0))
    data = msgspec.msgpack.encode(("s", b"k", 7, 2, 5, 3))
    stored = google_crc32c.value(data).to_bytes(4, "little") + data
    assert KEYS.unpack(stored) == (("s", b"k"), tables.KeyRow(7, 2, 5, 3, 0))
    data = msgspec.msgpack.encode(("s", b"k", 7, 2, 5, 3, 9, "of a later version"))
    stored = google_crc32c.value(data).to_bytes(4, "little") + data
    assert KEYS.unpack(stored) == (("s", b"k"), tables.KeyRow(7, 2, 5, 3, 9))


def test_changes_that_are_lost_stop_the_checkpoint_unless_that_is_accepted() -> None:
    logged = LoggedQueues()
    connection = logged.connection()
    begin = logged.log(r.StepTaken("s", b"1", 1))
    logged.log(r.StepTaken("s", b"2", 1))
    damage(logged, begin + 20)
    with pytest.raises(ChangesLost):  # Nothing after it proves anything.
        Checkpoint(connection, follower_of(logged).read).advance(logged.ring.end_lsn)
    end = logged.log(r.StepTaken("s", b"3", 1))
    with pytest.raises(ChangesLost):
        Checkpoint(connection, follower_of(logged).read).advance(end)
    assert position_of(connection).lsn == 0
    done = Checkpoint(connection, follower_of(logged).read, accept_lost=True).advance(end)
    assert done.lost == 1
    keys: Any = load(connection).keys
    assert list(keys) == [("s", b"1"), ("s", b"3")]


def test_a_body_that_is_damaged_is_missing_and_said() -> None:
    logged = LoggedQueues()
    connection = logged.connection()
    begin = logged.ring.end_lsn
    logged.log(r.MailPut(1, -1, 1, 100, "a", 1), bodies=[[b"q" * 400]])
    end = logged.log(r.MailPut(1, -1, 1, 100, "a", 1))
    at = logged.storage.read(logged.storage.open("000000000000.seg"), 0, 65_536).index(b"q" * 50)
    assert at > begin
    damage(logged, at)
    done = Checkpoint(connection, follower_of(logged).read).advance(end)
    assert (done.bodies, done.missing) == (1, 1)
    assert list(stored_bodies(connection)) == [1]
    same(load(connection), logged.queues)


def test_the_random_changes_are_of_every_kind() -> None:
    logged = LoggedQueues(ring_bytes=400 * 65_536)
    changes = RandomChanges(logged, 1)
    seen: set[type] = set()
    for _ in range(400):
        bundle = changes.bundle()
        seen |= set(map(type, bundle))
        logged.log(*bundle)
    tables_only = set(STREAM_CHANGES)
    assert seen - tables_only == set(get_args(r.Change)) - tables_only
    assert seen & tables_only


@pytest.mark.slow
def test_the_file_shrinks_when_what_was_in_it_has_gone(tmp_path: Any) -> None:
    logged = LoggedQueues(ring_bytes=2_000 * 65_536)
    create_file(tmp_path, Position(0, 0, 1, DIRECTORY, logged.ring.uuid))
    connection = open_database(tmp_path / DATABASE)
    checkpoint = Checkpoint(connection, follower_of(logged).read)
    for _ in range(500):
        logged.log(r.MailPut(1, -1, 1, 100, "a", 1), bodies=[[b"b" * 60_000]])
    checkpoint.advance(logged.ring.end_lsn)
    assert not checkpoint.tidy()
    for number in range(500):
        logged.log(r.MailDone(1, [(number, b"")]))
    checkpoint.advance(logged.ring.end_lsn)
    turns = 0
    while checkpoint.tidy():
        turns += 1
    assert turns > 1
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    assert (tmp_path / DATABASE).stat().st_size < 10 << 20
    check(connection, whole=True)
    connection.close()


@pytest.mark.moderate
def test_room_for_what_is_committed_is_there_before_so_that_a_full_disk_can_be_emptied(
    tmp_path: Any,
) -> None:
    logged = LoggedQueues(ring_bytes=2_000 * 65_536)
    create_file(tmp_path, Position(0, 0, 1, DIRECTORY, logged.ring.uuid))
    path = tmp_path / DATABASE
    connection = open_database(path)
    asked: list[int] = []

    def full(size: int) -> None:
        asked.append(size)
        raise OSError(errno.ENOSPC, "the disk is full")

    checkpoint = Checkpoint(connection, follower_of(logged).read, make_room=full)
    for _ in range(50):
        logged.log(r.MailPut(1, -1, 1, 100, "a", 1), bodies=[[b"b" * 60_000]])
    with pytest.raises(OSError, match="full"):
        checkpoint.advance(logged.ring.end_lsn)
    assert asked[0] > 50 * 60_000
    same(load(connection), Queues())
    # Killed when the room was there and nothing committed: bytes beyond are garbage.
    with path.open("ab") as file:
        file.truncate(asked[0])
    connection.close()
    connection = open_database(path)
    check(connection, whole=True)
    checkpoint = Checkpoint(connection, follower_of(logged).read)
    checkpoint.advance(logged.ring.end_lsn)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    assert path.stat().st_size == asked[0]
    # Deleted rows need hardly any room.
    for number in range(50):
        logged.log(r.MailDone(1, [(number, b"")]))
    checkpoint.advance(logged.ring.end_lsn)
    assert (tmp_path / f"{DATABASE}-wal").stat().st_size < 50 * 60_000 // 4
    check(connection, whole=True)
    same(load(connection), logged.queues)
    connection.close()


@pytest.mark.moderate
def test_a_full_disk_leaves_the_tables_as_they_were_and_the_step_is_done_later() -> None:
    logged = LoggedQueues(ring_bytes=400 * 65_536)
    connection = logged.connection()
    checkpoint = Checkpoint(connection, follower_of(logged).read)
    checkpoint.advance(logged.log(r.MailPut(1, -1, 1, 100, "a", 1)))
    before = load(connection)
    for _ in range(30):
        logged.log(*(r.MailPut(1, -1, 1, 100, "a", 1) for _ in range(50)))
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 3}")
    with pytest.raises(StoreError, match="full"):
        checkpoint.advance(logged.ring.end_lsn)
    same(load(connection), before)
    connection.execute("PRAGMA max_page_count = 1000000")
    checkpoint.advance(logged.ring.end_lsn)
    same(load(connection), logged.queues)
    check(connection, whole=True)


@pytest.mark.moderate
def test_a_file_of_a_version_without_transactions_gets_their_tables(tmp_path: Path) -> None:
    create_file(tmp_path, Position(0, 0, 1, DIRECTORY, b"r" * 16))
    path = tmp_path / DATABASE
    for table in ("transactions", "staged", "ends"):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(f"DROP TABLE {table}")
    with contextlib.closing(connect(path, read_only=True)) as connection:
        check(connection, whole=True)
        loaded = load(connection)
        assert not loaded.staged, "it may be looked at without being changed"
        assert not loaded.ends
    with contextlib.closing(open_database(path)) as connection:
        check(connection)
        connection.execute("SELECT id FROM transactions")
        connection.execute("SELECT base FROM staged")
        connection.execute("SELECT id FROM ends")
