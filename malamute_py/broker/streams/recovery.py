"""Recovery: the tables and the producers' sequences from the contents of the rings.

Each segment of a ring begins with a snapshot of the state there, so that a start needs only the log
after the newest one. Owns the use of snapshots and of the log after them at a start. The rules: the
tables are those of ring main; a producer's sequence in a stream, or the mark of a staged batch, is
the newest that the stream's own ring has; a stream in memory has none. Source: docs/design.md
(Journal; Queues and the checkpoint).
"""

from __future__ import annotations

from typing import Final

from malamute_py.broker.ready import MAIL_STREAM, MAIN, RecoveredState
from malamute_py.broker.streams.arrivals import Arrivals
from malamute_py.broker.streams.producers import Producers
from malamute_py.changelog.applying import STREAM_CHANGES, apply
from malamute_py.changelog.records import decode_change
from malamute_py.changelog.snapshots import decode_snapshot
from malamute_py.changelog.tables import Queues, Tables

STREAM_RECORD_BYTES = 32
"""Bytes that the creation of a stream takes in the log at least: its uuid alone is 16."""
NUMBERS_SHIFT: Final = 28
"""Where the log was not closed in order, numbers of messages go on at epoch << 28: after all
numbers of earlier runs, and below 2^53 for as many starts as a broker will see."""
UNSYNCED_NUMBERS: Final = 1 << 20
"""Numbers that are skipped, at least, after the newest one that is left."""


def recover_queues(state: RecoveredState) -> Queues:
    """Return the checkpoint's queues with the changes of the log since then, at a start.

    Changes of streams are passed over: recover() applies them, to the tables of a snapshot.
    """
    queues, tables = state.queues, Tables()
    for _offset, body in state.queue_changes:
        change = decode_change(body)
        if not isinstance(change, STREAM_CHANGES):
            apply(tables, queues, change)
    return queues


def recover(
    state: RecoveredState, producers: Producers, arrivals: Arrivals, runs_max: int
) -> Tables:
    """Return the tables of streams and producers as of the end of the log, at a start.

    state: what the shell read from the rings. producers: gets their places in the streams.
    arrivals: gets the marks of all staged batches that rings of streams' own have. runs_max: see
    ProducerStream.appended().
    """
    tables, queues = Tables(), Queues()
    main = state.rings.get(MAIN)
    snapshots = {
        name: decode_snapshot(facts.snapshot)
        for name, facts in state.rings.items()
        if facts.snapshot
    }
    if main is not None:
        changes_in_snapshot = 0
        own = snapshots.get(MAIN)
        if own is not None:
            tables, changes_in_snapshot = own.tables, own.change_next
        for offset, body in main.changes:
            if offset >= changes_in_snapshot:
                change = decode_change(body)
                if isinstance(change, STREAM_CHANGES):
                    apply(tables, queues, change)
        # A stream whose creation lies in damage keeps its number for ever: another stream under it
        # would be given its records. The damaged bytes had at most so many creations.
        tables.next_number += main.doubtful_bytes // STREAM_RECORD_BYTES
    for row in tables.producers.values():
        producers.opened(row.id, row.identity, row.epoch)
    for name, facts in state.rings.items():
        # A ring may still have records and sequences of streams that were removed.
        here = {row.number for row in tables.streams.values() if row.ring == name}
        snapshot = snapshots.get(name)
        if snapshot is not None:
            # Each is a producer's place or the mark of a staged batch; the other call ignores it.
            for sequence in snapshot.sequences:
                if sequence.stream in here:
                    producers.restore(sequence)
                    arrivals.witness(sequence.producer, sequence.stream, sequence.next)
        for fact in facts.producers:
            if fact.stream in here:
                producers.witness(fact, runs_max)
                arrivals.witness(fact.producer_id, fact.stream, fact.count)
    return tables


def mail_next(state: RecoveredState, epoch: int) -> int:
    """Return the mail stream's next number at a start: none that a client knows is given again.

    A power loss may have taken back messages whose numbers a reader knows already; so may one
    before a run that wrote no mail, however that run ended. Numbers so go on without a gap only
    after a run that ended in order and wrote mail. epoch: of the run that begins.
    """
    main = state.rings.get(MAIN)
    if main is None:
        return 0
    mail = main.streams.get(MAIL_STREAM)
    following = 0 if mail is None else mail.next
    if main.clean and mail is not None and mail.epochs:
        last_epoch_with_mail, _ = mail.epochs[-1]
        if last_epoch_with_mail == epoch - 1:
            return following
    return max(following + UNSYNCED_NUMBERS, epoch << NUMBERS_SHIFT)
