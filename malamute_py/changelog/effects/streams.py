"""Effects of records about streams and producers.

Owns what such a record changes in `Tables`. The rules: a number is given once, so a stream that was
created is not created again; a stream that is made under the name of a removed one has a higher
generation. Source: docs/design.md (Journal; Queues and the checkpoint).
apply() calls one of these functions for each record of the log, in the broker.
"""

from __future__ import annotations

from typing import Final

import msgspec

from malamute_py.changelog.records import (
    ProducerOpened,
    ProducersForgotten,
    StreamCreated,
    StreamEdited,
    StreamPurged,
    StreamRemoved,
    StreamTrimmed,
)
from malamute_py.changelog.tables import Effects, ProducerRow, Queues, StreamRow, Tables, with_purge

GENERATIONS_MAX: Final = 1_000
"""Names of removed streams whose generations are remembered one by one: each segment of ring main
begins with them."""


def _stream_created(tables: Tables, queues: Queues, change: StreamCreated) -> None:
    """Add a stream, with a generation above all that its name had."""
    if change.number < tables.next_number:
        return
    tables.next_number = change.number + 1
    tables.streams[change.number] = StreamRow(
        change.number, change.name, change.uuid, change.ring,
        change.settings, change.by, change.at_ms,
        generation=tables.generations.pop(change.name, tables.generations_before) + 1,
    )  # fmt: skip
    tables.names[change.name] = change.number


def _stream_edited(tables: Tables, queues: Queues, change: StreamEdited) -> None:
    """Change the settings of a stream; a body kind that is settled stays."""
    row = tables.streams.get(change.number)
    if row is None:
        return
    settings, kind = change.settings, row.settings.body_kind
    if kind and not settings.body_kind:
        # The edit was made before the stream's first batch, and comes after it.
        settings = msgspec.structs.replace(settings, body_kind=kind)
    row.settings = settings


def _stream_removed(tables: Tables, queues: Queues, change: StreamRemoved) -> None:
    """Remove a stream, and remember its generation for a later stream of the name."""
    row = tables.streams.pop(change.number, None)
    if row is not None and tables.names.get(row.name) == change.number:
        del tables.names[row.name]
        generations = tables.generations
        generations[row.name] = row.generation
        if len(generations) > GENERATIONS_MAX:
            # A stream of a name that is not remembered begins above all of those.
            forgotten = generations.pop(next(iter(generations)))
            tables.generations_before = max(tables.generations_before, forgotten)


def _stream_trimmed(tables: Tables, queues: Queues, change: StreamTrimmed) -> None:
    """Raise the first offset of a stream, and drop the purges that lie before it."""
    row = tables.streams.get(change.number)
    if row is not None:
        row.trimmed = max(row.trimmed, change.before)
        row.purges = [(pattern, end) for pattern, end in row.purges if end > row.trimmed]


def _stream_purged(tables: Tables, queues: Queues, change: StreamPurged) -> None:
    """Add the mark of a purge by subject to a stream."""
    row = tables.streams.get(change.number)
    if row is not None:
        first = max(change.first, row.trimmed)
        row.purges = with_purge(row.purges, (change.pattern, change.before), first)


def _producer_opened(tables: Tables, queues: Queues, change: ProducerOpened) -> None:
    """Add a producer, or raise its epoch: `fence` shuts out the client that had it before."""
    known = tables.producers.get(change.id)
    if change.fence:
        # Two openings that are under way at once get an epoch each.
        if known is not None:
            known.epoch += 1
    elif known is None or known.epoch <= change.epoch:
        tables.producers[change.id] = ProducerRow(change.id, change.identity, change.epoch)


def _producers_forgotten(tables: Tables, queues: Queues, change: ProducersForgotten) -> None:
    for producer in change.ids:
        tables.producers.pop(producer, None)


EFFECTS: Final[Effects] = {
    StreamCreated: _stream_created,
    StreamEdited: _stream_edited,
    StreamRemoved: _stream_removed,
    StreamTrimmed: _stream_trimmed,
    StreamPurged: _stream_purged,
    ProducerOpened: _producer_opened,
    ProducersForgotten: _producers_forgotten,
}
