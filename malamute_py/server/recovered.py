"""From what the journal found at opening to what the core starts with.

Owns the translation of a ring's recovery into the core's RingFacts, and the first look at
the tables, which say how each ring of its own has to be opened. The rule: nothing is
guessed; a state that cannot be read whole stops the start by name. Source:
broker/ready.py, RecoveredState; DESIGN.md, section 6.
"""

from __future__ import annotations

from typing import Any

from malamute_protocol.stamp import CHANGE
from malamute_py.broker.ready import CHANGE_STREAM, MAIN, RingFacts, StreamFacts
from malamute_py.changelog.records import decode_change
from malamute_py.changelog.snapshots import ProducerFact, decode_snapshot
from malamute_py.changelog.tables import TABLE_CHANGES, Queues, Tables, apply
from malamute_py.journal import Recovery, Ring
from malamute_py.journal.layout import control_bodies


def ring_facts(name: str, ring: Ring, recovery: Recovery) -> RingFacts:
    """What the core wants to know of a ring."""
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
        # The ring keeps no offsets of control batches; the core's own snapshot does.
        after = decode_snapshot(recovery.snapshot).change_next if recovery.snapshot else 0
        if changes:
            after = max(after, changes[-1][0] + 1)
        streams[CHANGE_STREAM] = StreamFacts(0, after)
    return RingFacts(
        recovery.end_lsn,
        recovery.snapshot,
        tuple(changes),
        tuple(
            ProducerFact(
                fact.stream, fact.producer_id, fact.producer_epoch, fact.first_sequence,
                fact.count, fact.base_offset, fact.append_time_ms,
            )
            for fact in recovery.produced
        ),
        streams,
    )  # fmt: skip


def rings_asked(main: RingFacts) -> dict[str, dict[str, Any]]:
    """The rings that streams have to themselves, and what each was asked to be."""
    tables, position = Tables(), 0
    if main.snapshot:
        snapshot = decode_snapshot(main.snapshot)
        tables, position = snapshot.tables, snapshot.change_next
    for offset, record in main.changes:
        if offset >= position:
            change = decode_change(record)
            if isinstance(change, TABLE_CHANGES):
                apply(tables, Queues(), change)
    return {
        row.ring: {"ring_bytes": row.settings.ring_bytes, "full": row.settings.full}
        for row in tables.streams.values()
        if row.settings.ring_bytes and not row.settings.memory
    }
