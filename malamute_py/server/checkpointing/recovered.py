"""The way from what the journal found at opening to the state that the core starts with.

Owns the translation of a ring's recovery into the core's RingFacts, the first look at the tables of
streams, which say how each stream's own ring has to be opened, and the order in which the queues
come back: the tables of the checkpoint, then the log from there. The rule: nothing is guessed.
Tables that are missing, damaged or of another log are built again where the log is complete;
otherwise an error names what is missing, and the broker serves streams alone. Source:
broker/ready.py, RecoveredState; docs/design.md (Journal; Queues and the checkpoint).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from malamute_protocol.stamp import CHANGE
from malamute_py.broker.ready import CHANGE_STREAM, MAIL_STREAM, MAIN, RingFacts, StreamFacts
from malamute_py.changelog.applying import STREAM_CHANGES, apply
from malamute_py.changelog.records import StreamRemoved, decode_change
from malamute_py.changelog.snapshots import ProducerFact, decode_snapshot
from malamute_py.changelog.tables import Queues, Tables
from malamute_py.config import CheckpointSection
from malamute_py.journal import JournalError, Recovery, Ring
from malamute_py.journal.errors import NotAFile
from malamute_py.journal.layout import control_bodies
from malamute_py.server.checkpointing.checkpoints import Parts
from malamute_py.server.errors import StartError
from malamute_py.store.database import DATABASE, Position, lock, position_of
from malamute_py.store.errors import ChangesLost, StoreError, StoreLocked, StoreMoved
from malamute_py.store.loading import load
from malamute_py.store.opening import LogFacts, open_store
from malamute_py.store.reading import Changes
from malamute_py.store.rebuilding import accept, rebuild

_LOCK_WAIT_S: Final = 30.0
"""How long to wait for the process of a killed broker, which ends by itself, also in the middle of
its work."""
_ACCEPT: Final = (
    "restore the directory from a snapshot (malamute snapshot restore SNAPSHOT --data NEW), or go"
    ' on without what is lost: start once with checkpoint.lost_changes = "accept"'
)
_NUMBERS_SHIFT: Final = 32
"""Bits by which the epoch is shifted to give the first number for a mailbox or a service, where it
is not known which numbers were given."""


class QueuesLost(Exception):
    """Mail, requests, cursors and groups could not be recovered; streams could."""

    remedy = _ACCEPT


def ring_facts(name: str, ring: Ring, recovery: Recovery) -> RingFacts:
    """Return what the core has to know of a ring that a start has opened: its part of the state.

    recovery: what the journal found in the ring.
    """
    # Records of the change log, each with its offset; only ring main has some.
    changes: list[tuple[int, bytes]] = []
    for control in recovery.controls:
        if control.kind == CHANGE and control.stream == CHANGE_STREAM:
            for row, record in enumerate(control_bodies(control.content)):
                changes.append((control.base_offset + row, record))
    streams = {
        number: StreamFacts(
            facts.first, facts.next, facts.bytes, facts.first_time_ms, facts.last_time_ms,
            tuple((pair.epoch, pair.first_offset) for pair in facts.epochs),
        )
        for number, facts in ring.streams().items()
    }  # fmt: skip
    if name == MAIN:
        # The offset after the newest change. The ring keeps no offsets of control batches; the
        # core's own snapshot does.
        after = decode_snapshot(recovery.snapshot).change_next if recovery.snapshot else 0
        if changes:
            after = max(after, changes[-1][0] + 1)
        # Damage took fewer changes than bytes. None of their offsets is given again: by the
        # offsets a start sees which changes are missing.
        after += recovery.doubtful_bytes
        streams[CHANGE_STREAM] = StreamFacts(0, after)
    return RingFacts(
        recovery.end_lsn,
        recovery.snapshot,
        tuple(changes),
        tuple(
            ProducerFact(
                fact.stream, fact.producer_id, fact.producer_epoch, fact.first_sequence,
                fact.count, fact.base_offset, fact.append_time_ms, fact.content_crc,
            )
            for fact in recovery.produced
        ),
        streams,
        recovery.clean,
        recovery.unseen_next,
        recovery.doubtful_bytes,
        recovery.doubtful_to,
    )  # fmt: skip


def rings_asked(main: RingFacts) -> tuple[dict[str, dict[str, Any]], set[str]]:
    """Return the rings that streams have to themselves, and those of streams that are gone.

    A start opens the former, each by the settings that its stream asks for; of the latter, which
    the log has removed since its last snapshot, files may be left. main: what was found in ring
    main, whose snapshot and changes tell the streams.
    """
    tables, position = Tables(), 0
    removed: set[str] = set()
    if main.snapshot:
        snapshot = decode_snapshot(main.snapshot)
        tables, position = snapshot.tables, snapshot.change_next
    for offset, record in main.changes:
        if offset >= position:  # the snapshot has those before it
            change = decode_change(record)
            if isinstance(change, StreamRemoved) and change.number in tables.streams:
                row = tables.streams[change.number]
                if row.settings.ring_bytes:
                    removed.add(row.ring)
            if isinstance(change, STREAM_CHANGES):
                apply(tables, Queues(), change)  # streams alone: queues are found later
    asked = {
        row.ring: {
            "ring_bytes": row.settings.ring_bytes,
            "full": row.settings.full,
            "keep": bool(row.settings.keep),
        }
        for row in tables.streams.values()
        if row.settings.ring_bytes and not row.settings.memory
    }
    return asked, removed


# --- the queues --------------------------------------------------------------------------


class QueuesFound(NamedTuple):
    """The queues as a start finds them."""

    queues: Queues
    changes: Iterator[tuple[int, bytes]]
    """Yields (offset, record) of the log after the tables; reading it fills `parts`. Raises
    StartError."""
    position: Position
    parts: Parts
    """Parts of the log with something that the tables do not have."""
    damages: list[str]
    """Damages, filled as `changes` is read."""
    new: bool
    """True: the tables were made just now."""
    rebuilt: str = ""
    """Reason why the tables were made anew from the log; "": they were not."""
    accepted: str = ""
    """Loss that the operator has accepted; "": none."""


def find_queues(
    directory: Path, uuid: bytes, ring: Ring, facts: RingFacts, config: CheckpointSection
) -> QueuesFound:
    """Open the checkpoint's tables at a start, or make new ones, and find where the log goes on.

    Tables that are missing or damaged are made anew where the log still has every change, or where
    the operator accepts the loss (checkpoint.lost_changes), which is durable when this returns.
    uuid: of the data directory. ring: main; nothing of it is overwritten meanwhile. facts: of ring
    main. Raises StartError; QueuesLost: the broker can serve streams alone. Reading the changes
    raises them, too.
    """
    where = str(directory / DATABASE)
    mail = facts.streams.get(MAIL_STREAM)
    log = LogFacts(
        uuid, ring.uuid, ring.start_lsn, ring.end_lsn, mail is not None and mail.next > 0
    )
    # Offset of the next change: all changes before it are in the log, or were.
    known = all_known = facts.streams[CHANGE_STREAM].next
    accepts = config.lost_changes == "accept"
    rebuilt = accepted = ""
    try:
        with lock(directory, _LOCK_WAIT_S):
            # The tables as they are, if they are sound and go with this log.
            try:
                connection, new = open_store(directory, log, accept_lost=accepts)
                try:
                    if position_of(connection).lsn >= facts.doubtful_to:
                        # The tables were filled before damage took a part of the log: it held
                        # no change that they lack.
                        known -= facts.doubtful_bytes
                    if accepts and not new:
                        accepted = accept(connection, log, ring.follow, known)
                    queues, position = load(connection), position_of(connection)
                finally:
                    connection.close()
            except (StoreError, sqlite3.Error, NotAFile) as error:
                # They are not: new ones, from the whole log.
                rebuilt, new, known = str(error), True, all_known
                if accepts:
                    accepted = rebuilt
                elif isinstance(error, StoreMoved):
                    raise  # The tables know changes that this log does not have.
                try:
                    rebuild(
                        directory, log, ring.follow, known, accept_lost=accepts,
                        # Above all numbers that earlier epochs gave to mailboxes and services.
                        number_next=ring.epoch << _NUMBERS_SHIFT,
                    )  # fmt: skip
                    connection, _ = open_store(directory, log)
                except (StoreError, JournalError) as why:
                    raise QueuesLost(f"{rebuilt}. They cannot be made from the log: {why}") from why
                try:
                    queues, position = load(connection), position_of(connection)
                finally:
                    connection.close()
    except StoreLocked as error:
        raise StartError(str(error), where, "end that process") from error
    except (StoreError, JournalError, OSError, sqlite3.Error) as error:
        raise QueuesLost(str(error)) from error
    # What damage took out of the log counts as given all the same.
    facts.streams[CHANGE_STREAM] = StreamFacts(0, max(known, position.change_next))
    if accepted:
        # No number or offset that a lost change may have given is given again.
        _go_beyond(queues, facts)
    # The changes that the tables do not have yet: the core applies them, the process stores them.
    parts = Parts()
    changes = Changes(ring.follow, position.change_next, relevant=parts.add)
    rest = _rest(changes, max(position.lsn, ring.start_lsn), ring.end_lsn, facts)
    return QueuesFound(queues, rest, position, parts, changes.damages, new, rebuilt, accepted)


def _go_beyond(queues: Queues, facts: RingFacts) -> None:
    """Have new messages numbered beyond those in the tables, which the log may have lost.

    For a start whose operator has accepted a loss: no number is given to a second message.
    """
    mail = facts.streams.get(MAIL_STREAM, StreamFacts(0, 0))
    beyond = mail.next
    for (_, base), message in queues.messages.items():
        beyond = max(beyond, base + message.count)
    for base, request in queues.requests.items():
        beyond = max(beyond, base + request.put.count)
    facts.streams[MAIL_STREAM] = msgspec.structs.replace(mail, next=beyond)


def _rest(
    changes: Changes, lsn: int, end_lsn: int, facts: RingFacts
) -> Iterator[tuple[int, bytes]]:
    """Yield the changes of the log that the tables lack. Raises QueuesLost: some are missing.

    lsn: up to which the tables have the log.
    """
    try:
        yield from changes.read([(lsn, end_lsn)])
        # Each change has an offset: the last one tells whether all came up to the log's next one.
        # The log may have overwritten what the tables have, and the rest of it may concern no
        # queues: then no change is read, which is right.
        due = facts.streams[CHANGE_STREAM].next
        if 0 <= changes.next < due:  # below 0: no change was read
            raise ChangesLost(
                f"the tables, and the log after them, end at change {changes.next} of {due}"
            )
    except (StoreError, JournalError, OSError) as error:
        raise QueuesLost(str(error)) from error
