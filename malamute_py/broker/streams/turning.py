"""Turning: how the ring of a stream with keys gets room again.

Owns the trims of such streams. The rules: a segment is given up only when no newest record lies in
it; what waits for room is refused `full` by name, and never takes a newest record's place. Source:
SPEC.md, section 8; ARCHITECTURE.md, Decisions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from malamute_py.broker.context import Shard
from malamute_py.broker.log.keys import Keys
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.ready import IndexFailure
from malamute_py.broker.streams.retention import Retention

FORGOTTEN_AT_ONCE = 1_000
"""Deleted keys that one look forgets at most."""


class Turning:
    """Finds segments in which no newest record lies, and has them given up."""

    def __init__(self, shard: Shard, retention: Retention) -> None:
        """retention: has the trims that the shell is asked for."""
        self._shard = shard
        self._retention = retention

    def look(self, stream: Stream) -> None:
        """Ask the journal for the oldest segments of a stream's ring, if it is time."""
        keys = stream.keys
        if keys is None or keys.room.asked or stream.ring.end_lsn < keys.room.look_lsn:
            return
        keys.room.asked = True
        self._shard.ask(
            stream.ring.name, stream.number, "oldest_segments", {},
            partial(self._found, stream, keys),
        )  # fmt: skip

    def _found(self, stream: Stream, keys: Keys, value: Any) -> None:
        room = keys.room
        room.asked = False
        if isinstance(value, IndexFailure) or stream.removed:
            return
        before_ms = self._shard.now_ms - self._shard.settings.deleted_keys_ms
        keys.forget_deleted(before_ms, FORGOTTEN_AT_ONCE)
        room.segment_bytes, room.segments = value["segment_bytes"], value["segments"]
        room.begin(value["start_lsn"])
        kept = keys.oldest
        kept = min(stream.next if kept is None else kept, stream.pinned)
        first = stream.trim_asked
        for end_lsn, nexts in value["oldest"]:
            following = nexts.get(stream.number, 0)
            if stream.ring.end_lsn < room.look_lsn or following > kept:
                break
            first = max(first, following)
            room.begin(end_lsn)
        if stream.ring.end_lsn >= room.look_lsn:
            # No segment can be given up now: the next look is worth it when more was written.
            room.look_lsn = stream.ring.end_lsn + room.segment_bytes // 8
        if first > stream.trim_asked:
            stream.trim_asked = first
            self._retention.trims.append((stream.ring.name, stream.number, first))
