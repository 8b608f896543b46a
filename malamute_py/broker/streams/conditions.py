"""Conditions: what a batch must fulfil that goes to a stream with keys.

Such a stream keeps the newest record of each subject, its key. A newest record takes room twice: in
memory as a key, and in the stream's own ring, where compaction copies it before its segment is
given up. Owns the checks that come after a batch is known to be no retry, and before it is taken.
The rules: a refused batch changes nothing, its sequence included; a key that is there can be
changed whatever the quotas of keys say; a deletion is taken when there is room for nothing else.
Source: SPEC.md, section 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from malamute_protocol.content import Content
from malamute_protocol.errors import BrokerRefused, RevisionConflict
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.broker.context import Shard
from malamute_py.broker.log.newest import KEY_OVERHEAD, Keys, KeysMemory, NewestRow, newest_rows
from malamute_py.broker.log.stream import Stream
from malamute_py.changelog.settings import StreamSettings

RING_PARTS = 32
"""A batch takes at most a 32nd of its ring, which is half a segment of the smallest rings: a copy
of it has to fit into a segment."""
STAGED_PARTS = 4
"""A staged batch takes at most a fourth of its ring, whose segments have a third or more of it, or
two of the largest batches: the rest is room for the snapshot that a segment begins with."""
SMALL_PARTS = 3
"""A batch takes at most a third of a small ring without keys, which is one segment of it."""
SNAPSHOT_BYTES = 100 << 10
"""Bytes of a small ring's segment that its header and its snapshot of the state are expected to
take."""
FORGOTTEN_AT_ONCE = 1_000
"""Deleted keys that are forgotten at once at most."""
_COMING = "keys that were taken before are on their way into the log"
UNCONDITIONAL = -1
"""In place of a revision: the batch has no condition."""


class Conditions:
    """The conditions of all streams with keys."""

    def __init__(self, shard: Shard, look: Callable[[Stream], None]) -> None:
        """look: Compaction.look, which finds room in a stream's ring, if it is time."""
        self._shard = shard
        self._look = look
        self.memory: Final = KeysMemory()
        """The memory that the keys of all streams take: a sum over them for each batch is slow."""

    def enter(self, stream: Stream) -> None:
        """Count the keys of a stream that is made, or that a start found, and look at its ring."""
        assert stream.keys is not None
        stream.keys.count_among(self.memory)
        self.look_if_ready(stream)

    def leave(self, stream: Stream) -> None:
        """No longer count the keys of a stream that was removed."""
        if stream.keys is not None:
            stream.keys.count_among(KeysMemory())  # A sum that is not read.

    def look_if_ready(self, stream: Stream) -> None:
        """Have compaction look how full the ring of a stream is, where all its keys are known.

        Called when the stream is entered, and again when a start has read the last of its keys.
        """
        if stream.keys is not None and stream.keys.ready:
            self._look(stream)

    def admit(
        self, stream: Stream, content: Content, size: int, revision: int, *, staged: bool = False
    ) -> None:
        """Take a batch for a stream with keys, or raise BrokerRefused: then nothing was taken.

        Called for each publish, just before the batch is put on its way into the log. size: its
        bytes with the stamp. revision: offset of the record that the batch replaces, as its
        producer believes (UPDATE_KEY), 0 for a new key; UNCONDITIONAL: it replaces whatever is
        there. staged: it is of a committed transaction, and was checked when it was staged.
        """
        keys = stream.keys
        assert keys is not None
        check_ready(stream, keys)
        if not staged:
            check_lasting(stream, content)
        count = content.head.count
        rows = newest_rows(content, size)
        if revision != UNCONDITIONAL:
            if count != 1:
                raise BrokerRefused("bad_batch", f"a change of one key with {count} records")
            present = keys.revision(rows[0].subject)
            if present != revision:
                raise RevisionConflict(_conflict_reason(stream, rows[0].subject, present), present)
        check_size(stream, size)
        self._check_counts(stream, keys, rows, size)
        self._check_room(stream, keys, rows, size)
        keys.take(rows, count, size)

    def forget_deleted(self, keys: Keys) -> None:
        """Forget some of the keys that were deleted long ago, so that others have room."""
        before_ms = self._shard.now_ms - self._shard.settings.deleted_keys_ms
        keys.forget_deleted(before_ms, FORGOTTEN_AT_ONCE)

    def appended(self, stream: Stream, time_ms: int) -> None:
        """Enter the oldest batch that was taken, which the log has now, into its stream's keys."""
        assert stream.keys is not None
        stream.keys.appended(time_ms)
        self._look(stream)

    def _check_room(self, stream: Stream, keys: Keys, rows: list[NewestRow], size: int) -> None:
        """Raise BrokerRefused where a batch finds no room in its ring.

        `full`: it finds none until keys are deleted or a cursor lets records go; `wait`: compaction
        makes room, or batches on their way may be refused. Two rooms are looked at: that of newest
        records, at most `newest_max` bytes, and that of the ring, by the LSN where it would end. A
        batch of deletions alone may go a segment further into the ring.
        """
        room = keys.room
        size_known = room.segments > 0  # The journal has told how large the ring is.
        if not size_known and (len(keys) or keys.taken_bytes):
            # What is taken before it is known where the ring is full could fill it for good. The
            # first batch of a stream does not, and is not to wait.
            self._look(stream)
            raise BrokerRefused("wait", _blocked(stream.name, "is being looked at", room.failed))
        end_lsn = stream.ring.end_lsn + keys.taken_bytes + size
        most = keys.bytes + keys.coming_bytes + size  # Bytes of newest records, at most.
        # `most` counts the batch as if it replaced no record: most batches need no closer look.
        if most <= room.newest_max and room.allows(end_lsn, deletion=False):
            return
        deletion = all(row.deletion for row in rows)
        if most > room.newest_max and not deletion:  # Deletions make newest records fewer.
            self.forget_deleted(keys)
            taken = keys.bytes_with(rows)
            if taken > room.newest_max:
                raise BrokerRefused(
                    "full",
                    f"newest records would take {taken} bytes of the ring of stream "
                    f"'{stream.name}', at most half of it: delete keys",
                )
            if taken + keys.coming_bytes > room.newest_max:
                raise BrokerRefused("wait", _COMING)
        if not room.allows(end_lsn, deletion):
            room.look_lsn = 0  # Compaction looks at the ring now, not when it has grown further.
            self._look(stream)
            # Compaction makes room by itself unless a cursor pins records of the stream.
            code = "wait" if stream.pinned >= stream.next else "full"
            raise BrokerRefused(code, _blocked(stream.name, "gives up old records", room.failed))

    def _check_counts(self, stream: Stream, keys: Keys, rows: list[NewestRow], size: int) -> None:
        """Raise BrokerRefused where a batch of `size` bytes would bring too many keys.

        Bounded are the keys of a stream, and the memory of the keys of all streams. `limit`: keys
        that the log has leave no room; `wait`: only with those on their way into it they do.
        """
        settings = self._shard.settings
        # `most` is an upper bound, as if all keys were new: names take at most the batch's bytes.
        most = self.memory.now + self.memory.coming + KEY_OVERHEAD * len(rows) + size
        count = len(keys) + keys.coming_keys + len(rows)
        if count <= settings.keys_max and most <= settings.all_keys_bytes_max:
            return
        self.forget_deleted(keys)
        new = [row for row in rows if row.subject not in keys]
        if not new:
            return
        count, memory = len(keys) + len(new), self.memory.now + keys.weigh(new)
        if count > settings.keys_max:
            raise BrokerRefused(
                "limit", f"stream '{stream.name}' has {len(keys)} keys: streams.keys_max"
            )
        if memory > settings.all_keys_bytes_max:
            raise BrokerRefused("limit", "the keys of all streams: streams.all_keys_bytes_max")
        # Batches on their way into the log may still be refused, so that their keys never come.
        count, memory = count + keys.coming_keys, memory + self.memory.coming
        if count > settings.keys_max or memory > settings.all_keys_bytes_max:
            raise BrokerRefused("wait", _COMING)


def batch_bytes_most(settings: StreamSettings, most: int) -> int:
    """Return the bytes that a batch of a stream may have, its stamp included.

    Told to a client that opens a producer; check_size() or the journal refuses larger ones. A
    batch has to fit into a segment, which matters in a small ring of the stream's own. most: bound
    for the batches of all streams.
    """
    ring_bytes = settings.ring_bytes
    if settings.keep:
        return min(most, ring_bytes // RING_PARTS)
    if 0 < ring_bytes < 2 * SMALL_PARTS * most:  # A small ring: two such batches fill a segment.
        return min(most, ring_bytes // SMALL_PARTS - SNAPSHOT_BYTES)
    return most


def check_size(stream: Stream, size: int, parts: int = RING_PARTS) -> None:
    """Raise BrokerRefused `too_large` where a batch takes more than 1/parts of its ring."""
    most = stream.settings.ring_bytes // parts
    if size > most:
        raise BrokerRefused("too_large", f"a batch of {size} bytes, at most {most} in this ring")


def check_staged(stream: Stream, content: Content, keys_max: int) -> None:
    """Raise BrokerRefused where a ring of a stream's own could never take a staged batch.

    Called when a transaction stages the batch: after its commit the batch cannot be refused.
    keys_max: keys that a stream may have.
    """
    size = STAMP_BYTES + content.head.content_bytes
    if stream.keys is None:
        check_size(stream, size, STAGED_PARTS)
        return
    check_lasting(stream, content)
    check_size(stream, size)
    if content.head.subjects_count > keys_max and len(newest_rows(content, size)) > keys_max:
        raise BrokerRefused("limit", f"a batch of more than {keys_max} keys: streams.keys_max")


def check_lasting(stream: Stream, content: Content) -> None:
    """Raise BrokerRefused where a record for a stream with keys expires, which no key does."""
    if content.head.earliest_expiry_ms:
        raise BrokerRefused(
            "unsupported",
            f"stream '{stream.name}' keeps the newest record of each subject: none expires",
        )


def check_ready(stream: Stream, keys: Keys) -> None:
    """Raise BrokerRefused `wait` while a start reads the keys of a stream."""
    if not keys.ready:
        raise BrokerRefused("wait", f"the keys of stream '{stream.name}' are being read")


def _conflict_reason(stream: Stream, subject: str, revision: int) -> str:
    """Return why an UPDATE_KEY is refused: the revision that was found instead; 0: no such key."""
    if not revision:
        return f"stream '{stream.name}' has no key '{subject}'"
    return f"key '{subject}' of stream '{stream.name}' is at revision {revision}"


def _blocked(stream: str, doing: str, failed: str) -> str:
    """Return why the ring of a stream takes nothing now: what it is doing, or what went wrong.

    failed: why the journal could not look at the ring; empty: it could.
    """
    return f"the ring of stream '{stream}' {f'cannot be looked at: {failed}' if failed else doing}"
