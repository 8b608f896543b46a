"""Appending: where batches go, what their stamps say, and how they are written.

Owns the end of the ring. The rule: a bundle is laid out first, its space is secured
second, written third, and becomes part of the ring only when all of it is written; an
offset is never given twice. Runs in the loop thread. Words: a bundle is the batches of one
append() with those that the journal adds: an epoch's start, a padding at the end of a segment, and
a snapshot (state of the ring and of its caller) at the begin of the next; a row is one of these
batches, laid out. Source: FORMAT.md, sections 3 to 5.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, TypeAlias

from malamute_protocol.stamp import (
    CONTROL,
    DATA,
    EPOCH_START,
    LAST_OF_BUNDLE,
    PADDING,
    SNAPSHOT,
    STAMP_BYTES,
    pack_stamps,
)
from malamute_py.journal.check import content_facts, header_table
from malamute_py.journal.errors import BatchTooLarge, DiskFull, JournalFailed
from malamute_py.journal.index import Place
from malamute_py.journal.layout import SnapshotFacts, control_content, pack_file
from malamute_py.journal.recovery import Scan
from malamute_py.journal.segment import Segment
from malamute_py.journal.space import Space
from malamute_py.journal.storage import File, Storage
from malamute_py.journal.streams import StreamTable
from malamute_py.journal.types import (
    NO_KEYS,
    SEGMENT_HEADER_BYTES,
    UNINDEXED_FROM,
    Append,
    Appended,
    AppendLike,
    Buffer,
)

SnapshotSource: TypeAlias = Callable[[], Sequence[bytes]]
_Row: TypeAlias = tuple[int, int, int, int, int, int, int, Buffer, int, Any]
"""(LSN, size, control kind, stream, base offset, count, append time as given, content, its CRC,
keys) of everything that a bundle writes, the journal's own included. A tuple: constructing an
object for each cost more than the write."""
_LSN: Final = 0
_SIZE: Final = 1
_KIND: Final = 2
_CONTENT: Final = 7
"""Places in a row."""

_OWN: Final = (EPOCH_START, SNAPSHOT, PADDING)
"""Kinds of batches that the journal adds, and no caller appends."""
_EMPTY_CONTENT, _EMPTY_CRC = control_content([])
_EPOCH_START: Final = Append(0, 0, 1, 0, _EMPTY_CONTENT, _EMPTY_CRC, None, EPOCH_START)


class Appender:
    """The writing end of one ring."""

    def __init__(
        self,
        storage: Storage,
        space: Space,
        streams: StreamTable,
        epoch: int,
        scan: Scan,
        fail: Callable[[str], JournalFailed],
    ) -> None:
        """epoch: of what is appended. scan: what an opening found, with where the ring ends.

        fail: seals the ring after a failed write, and returns what to raise.
        """
        self.end = scan.end_lsn
        """Position after the last bundle; swapped when a bundle is whole."""
        self.last_time_ms = scan.last_time_ms
        self.last_epoch = scan.epoch
        self.last_lsn = scan.last_lsn
        """LSN at which the ring's last batch begins; -1: not known, or damage follows it."""
        self._storage = storage
        self._space = space
        self._streams = streams
        self._epoch = epoch
        self._fail = fail
        self._segment_bytes = scan.segment_bytes

    def append(
        self, batches: Sequence[AppendLike], synced: int, snapshot_source: SnapshotSource
    ) -> Appended:
        """Write one bundle; durable only after sync(). See Ring.append.

        synced: position up to which the ring is synced; each stamp says it, for a recovery.
        snapshot_source: returns the caller's state, which a new segment begins with.
        """
        if not batches:
            raise ValueError("a bundle has at least one batch")
        begin = self.end
        bundle: Sequence[AppendLike] = batches
        # The first bundle of an epoch begins with a batch that says so.
        if self.last_epoch != self._epoch:
            bundle = [_EPOCH_START, *batches]
        rows, new_segments = self._lay_out(bundle, begin, snapshot_source)
        if new_segments:
            self._secure(new_segments)
        stamps = self._stamps(rows, synced)
        self._write(rows, stamps, new_segments)
        self._commit(rows, begin, new_segments)
        if len(rows) != len(batches):
            # The caller gets the stamps of its own batches alone.
            pairs = zip(stamps, rows, strict=True)
            stamps = [stamp for stamp, row in pairs if row[_KIND] not in _OWN]
        return Appended(tuple(stamps), rows[0][_LSN], self.end)

    def _lay_out(
        self, bundle: Sequence[AppendLike], begin: int, source: SnapshotSource
    ) -> tuple[list[_Row], int]:
        """Check every batch of a bundle and give it its place; nothing is written yet.

        Returns the rows, those that the journal adds included, and how many segments they begin.
        One pass that takes each attribute once: mail comes in bundles of many small batches.
        """
        rows: list[_Row] = []
        # Stream -> its next offset, of the streams that earlier batches of the bundle are for.
        following: dict[int, int] = {}
        states, segment_bytes = self._streams.states, self._segment_bytes
        snapshot: Append | None = None
        lsn, new_segments = begin, 0
        # Rounded up: where the ring's last segment ends. There nothing fits, and another is begun.
        limit = lsn + -lsn % segment_bytes
        for batch in bundle:
            content, kind, stream = batch.content, batch.control_kind, batch.stream
            base, count = batch.base_offset, batch.count
            need = STAMP_BYTES + len(content)
            if need % 8:
                raise ValueError(f"a content of {len(content)} bytes is not a multiple of 8")
            if kind == DATA:
                after = following.get(stream)
                if after is None:
                    state = states.get(stream)
                    after = 0 if state is None else state.next
                if base < after:
                    raise ValueError(
                        f"stream {stream}: offset {base} would be given twice,"
                        f" the next one is {after}"
                    )
                following[stream] = base + count
            elif kind in _OWN and batch is not _EPOCH_START:
                raise ValueError("epoch starts, snapshots and padding are the journal's own")
            if lsn + need > limit:
                # All segments of a bundle begin with the same state: that before the bundle.
                if snapshot is None:
                    snapshot = self._snapshot_batch(begin, source)
                lsn = self._begin_segment(rows, lsn, limit - lsn, need, snapshot)
                limit += segment_bytes
                new_segments += 1
            rows.append(
                (
                    lsn, need, kind, stream, base, count, batch.append_time_ms, content,
                    batch.content_crc, batch.keys,
                )
            )  # fmt: skip
            lsn += need
        return rows, new_segments

    def _secure(self, new_segments: int) -> None:
        """Have as many segments at hand as a bundle needs, before anything of it is written.

        Raises BatchTooLarge, DiskFull, and what Space.need() raises.
        """
        most = self._space.bundle_segments_max
        if new_segments > most:
            raise BatchTooLarge(
                f"a bundle over {new_segments} new segments, at most {most}: raise ring_bytes, or"
                " split the bundle"
            )
        try:
            self._space.need(new_segments)
        except OSError as error:
            # Nothing was written but zeros and names, which are done again next time: the
            # ring is as well as before, it only has no room yet.
            raise DiskFull(f"no segment could be prepared ({error}); check the disk") from error

    def _begin_segment(
        self,
        rows: list[_Row],
        lsn: int,
        rest: int,
        need: int,
        snapshot: Append,
    ) -> int:
        """Go on at the next segment, which begins with a snapshot; returns the position.

        rows: gets a padding for the rest of the segment before, if a stamp fits in, and the
        snapshot. rest: bytes that are left there. need: bytes of the batch that does not fit.
        """
        snapshot_bytes = STAMP_BYTES + len(snapshot.content)
        room = self._segment_bytes - SEGMENT_HEADER_BYTES - snapshot_bytes
        if need > room:
            raise BatchTooLarge(
                f"a batch of {need} bytes; a segment has {room} beside its header and the"
                f" snapshot of {snapshot_bytes}: use larger segments or smaller batches"
            )
        if rest >= STAMP_BYTES:
            # A padding has a place, a size and its kind, and nothing else.
            rows.append((lsn, rest, PADDING, 0, 0, 0, 0, b"", 0, None))
        lsn += rest + SEGMENT_HEADER_BYTES
        content, crc = snapshot.content, snapshot.content_crc
        rows.append((lsn, snapshot_bytes, SNAPSHOT, 0, 0, snapshot.count, 0, content, crc, None))
        return lsn + snapshot_bytes

    def _snapshot_batch(self, as_of_lsn: int, source: SnapshotSource) -> Append:
        """Return the batch that a new segment begins with: state of the ring and of its caller.

        as_of_lsn: where the bundle begins that it is written in: the state is that before it.
        """
        facts = SnapshotFacts(as_of_lsn, self.last_time_ms, self._streams.rows())
        bodies = [pack_file(facts), *source()]
        content, crc = control_content(bodies)
        # A control batch has no stream, offset or append time of its own: 0.
        return Append(0, 0, len(bodies), 0, content, crc, None, SNAPSHOT)

    def _stamps(self, rows: list[_Row], synced: int) -> list[bytes]:
        """Return the packed stamps of a bundle's batches, the last one flagged as the bundle's end.

        By the flag a recovery knows that the bundle is whole. Append time never goes back: a lower
        one is raised to the last. synced: see append().
        """
        bundle_lsn = rows[0][_LSN]
        epoch, last_time = self._epoch, self.last_time_ms
        fields = []
        for lsn, size, kind, stream, base, count, time_ms, _, crc, _ in rows:
            if time_ms > last_time:
                last_time = time_ms
            # In the order of a stamp's fields, with 0 for those that the journal leaves out.
            fields.append(
                (
                    CONTROL if kind else 0, lsn, bundle_lsn, synced, epoch, base, last_time,
                    stream, 0, size, count, kind, 0, crc, 0,
                )
            )  # fmt: skip
        # The first field is the flags.
        fields[-1] = (fields[-1][0] | LAST_OF_BUNDLE, *fields[-1][1:])
        return pack_stamps(fields)

    def _write(self, rows: list[_Row], stamps: list[bytes], new_segments: int) -> None:
        """Write a bundle, with one write for each segment that it touches.

        new_segments: how many of these are begun by it, out of the spares.
        """
        # The bundle goes on in the newest segment, then in spares.
        segments = self._space.segments
        targets = [*segments[-1:], *list(self._space.spares)[:new_segments]]
        files = {segment.number: segment.file for segment in targets}
        # Places of the rows with which new segments begin: the first batch of each is a snapshot.
        begun = (
            [at for at, row in enumerate(rows) if row[_KIND] == SNAPSHOT] if new_segments else []
        )
        try:
            for first, stop in pairwise([0, *begun, len(rows)]):
                if first == stop:
                    continue  # nothing of the bundle lies in the segment before
                buffers: list[Buffer] = []
                for stamp, row in zip(stamps[first:stop], rows[first:stop], strict=True):
                    buffers.append(stamp)
                    buffers.append(row[_CONTENT])
                if rows[stop - 1][_KIND] == PADDING:
                    buffers.pop()  # Of a padding the stamp alone is written.
                number, position = divmod(rows[first][_LSN], self._segment_bytes)
                self._write_run(files, number, position, buffers)
        except OSError as error:
            raise self._explained(error) from error

    def _write_run(
        self, files: dict[int, File | None], number: int, start: int, buffers: list[Buffer]
    ) -> None:
        """Write the part of a bundle that lies in one segment, at its place there.

        files: by number of the segment. start: position in it.
        """
        file = files[number]
        assert file is not None
        self._storage.write(file, start, buffers)

    def _commit(self, rows: list[_Row], begin: int, new_segments: int) -> None:
        """Make a bundle that has been written part of the ring: end, index and segments.

        begin: position of the bundle. new_segments: how many spares it has begun.
        """
        space = self._space
        segment = space.segments[-1] if space.segments else None
        begun = space.begin(new_segments) if new_segments else []
        time_ms = self.last_time_ms
        # Batches of streams without a header index, as mail, gather here and are indexed together.
        sparse: dict[int, list[Place]] = {}
        base_lsn = -1 if segment is None else segment.base_lsn
        for lsn, size, kind, stream, base, count, own_time_ms, content, _, keys in rows:
            if own_time_ms > time_ms:
                time_ms = own_time_ms
            if kind == DATA:
                if stream >= UNINDEXED_FROM:
                    place = (lsn - base_lsn, size, base, base + count, time_ms)
                    if stream in sparse:
                        sparse[stream].append(place)
                    else:
                        sparse[stream] = [place]
                else:
                    assert segment is not None
                    spot = (lsn - base_lsn, size, base, base + count)
                    self._index(segment, stream, spot, time_ms, content, keys)
            elif kind == SNAPSHOT:
                # The first batch of each new segment.
                if segment is not None:
                    self._close_part(segment, sparse, time_ms)
                segment = begun.pop(0)
                base_lsn = segment.base_lsn
        assert segment is not None
        self._close_part(segment, sparse, time_ms)
        self.last_time_ms = time_ms
        self.last_epoch = self._epoch
        self.last_lsn = rows[-1][_LSN]
        end = self.last_lsn + rows[-1][_SIZE]
        # The segment's end, where no stamp fits after the last batch.
        rest = -end % self._segment_bytes
        self.end = end + rest if rest < STAMP_BYTES else end
        if new_segments:
            space.note_snapshot(self.end, begin)

    def _close_part(self, segment: Segment, sparse: dict[int, list[Place]], time_ms: int) -> None:
        """Index what a bundle left in one segment, before its rest follows in the next one.

        sparse: places of the batches of streams without a header index, by stream; emptied.
        """
        segment.last_epoch = self._epoch
        segment.last_time_ms = max(segment.last_time_ms, time_ms)
        for stream, places in sparse.items():
            self._index_sparse(segment, stream, places)
        sparse.clear()

    def _index_sparse(self, segment: Segment, stream: int, places: list[Place]) -> None:
        """Add data batches of a stream without header index to the segment's index.

        places: of batches whose offsets follow on; (position, size, base, after, time) of each.
        """
        assert segment.live is not None
        total = segment.live.add_sparse(stream, places)
        _, _, base, _, _ = places[0]
        _, _, _, after, _ = places[-1]
        self._streams.note_batch(stream, base, after, self._epoch, total)

    def _index(
        self,
        segment: Segment,
        stream: int,
        place: tuple[int, int, int, int],
        time_ms: int,
        content: Buffer,
        keys: Any,
    ) -> None:
        """Add one data batch to the segment's index, by which readers find it.

        For batches of streams that are searched by header, which the hidden ones are not
        (_index_sparse). place: (position, size, base offset, next offset). keys: the content's
        header table; None or NO_KEYS: the caller has not read it, so it is read here.
        """
        live = segment.live
        assert live is not None
        if keys is None or keys is NO_KEYS:
            keys = header_table(content)
        position, size, base, after = place
        live.add(
            stream,
            position,
            size,
            base,
            after,
            time_ms,
            content_facts(content),
            keys,
            content,
            self._epoch,
        )
        self._streams.note_batch(stream, base, after, self._epoch, size)

    def _explained(self, error: OSError) -> Exception:
        """Return what to raise for a failed write; any but that of a full disk seals the ring.

        A full disk leaves the ring as it was: what was written lies after its end.
        """
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskFull(f"the disk is full: {error}")
        return self._fail(f"a write failed ({error})")
